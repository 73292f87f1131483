"""Which addresses are public: every network of IANA's registries by its ends, every form with an IPv4 address inside."""

import ipaddress

import pytest

from trimtab.serve.http.auth import client_network
from trimtab.serve.media.addresses import is_public

# Of the registries, with what stands directly around each that is public.
PRIVATE = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16",
    "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24",
    "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    "::/128", "::1/128", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/32", "2001:2::/48",
    "2001:10::/28", "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7",
    "fe80::/10", "fec0::/10", "ff00::/8", "200::/7", "4000::/3", "e000::/4",
)  # fmt: skip


@pytest.mark.parametrize("network", PRIVATE)
def test_a_network_of_the_registries_is_not_public_at_either_end(network):
    whole = ipaddress.ip_network(network)
    middle = whole[whole.num_addresses // 2]
    for address in (whole[0], middle, whole[-1]):
        assert not is_public(str(address)), address
    if whole.version == 4:
        for address in (whole[0], middle, whole[-1]):
            for form in ("::ffff:{}", "64:ff9b::{}", "::{}", "::ffff:0:{}", "2001:470:1::5efe:{}", "2001:470:1::200:5efe:{}"):
                assert not is_public(form.format(address)), form.format(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0", "169.253.255.255",
        "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.0.3.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0",
        "223.255.255.255", "2606:4700::1111", "2001:200::1", "2001:470:1::1", "2003::1", "2a00:1450::1", "::ffff:1.1.1.1",
        "64:ff9b::1.1.1.1", "2001:470:1::5efe:1.1.1.1",
    ],
)  # fmt: skip
def test_what_stands_beside_them_is_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1", "::ffff:0:7f00:1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "fe80::1%eth0",
        "::ffff:7f00:1", "2002:7f00:1::", "2002:101:101::", "2001:0:4136:e378:8000:63bf:80ff:fffe", "fd00:ec2::254", "ff02::1",
    ],
)  # fmt: skip
def test_loopback_and_metadata_are_not_public_in_any_form(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"), ("fe80::1%eth0", "fe80::2%eth0"),
        ("::ffff:192.0.2.7", "192.0.2.7"), ("::ffff:c000:207", "64:ff9b::192.0.2.7"), ("127.0.0.1", "127.255.3.9"),
        ("::1", "127.0.0.1"), ("::ffff:127.0.0.2", "127.0.0.1"),
    ],
)  # fmt: skip
def test_addresses_that_one_client_can_take_are_one_client(one, other):
    assert client_network(one) == client_network(other)


def test_addresses_of_two_networks_are_two_clients():
    addresses = ["2001:db8:1:2::1", "2001:db8:1:3::1", "192.0.2.7", "192.0.2.8", "::ffff:192.0.2.9", "127.0.0.1", "a.socket"]
    assert len({client_network(address) for address in addresses}) == len(addresses)
    assert client_network("a.socket") == "a.socket"
