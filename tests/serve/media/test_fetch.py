"""Addresses are fetched from named hosts alone, never from inside (every network of IANA's registries), within size and time."""

import asyncio
import ipaddress
import socket
import threading
from contextlib import contextmanager

import pytest

from tests import waiting
from tests.raised import raised
from trimtab.errors import RequestError
from trimtab.serve.api.admission import client_network
from trimtab.serve.contract.settings import Limits, Settings
from trimtab.serve.media import fetch
from trimtab.serve.media.addresses import is_public
from trimtab.serve.media.fetch import Fetcher

FIELD = "messages[0].content[0].image_url.url"


def fetcher(*hosts, **limits):
    return Fetcher(Settings(allow_fetch=hosts or ("pictures.example",), limits=Limits(**limits)))


def get(found, url):
    return asyncio.run(found.get_all({url: FIELD}))[url]


def refused(found, url):
    error = raised(RequestError, get, found, url)
    assert error.field == FIELD
    return str(error)


@contextmanager
def server(monkeypatch, answer):
    """Listen here, let every name lead here, and let here count as public. answer: what is done with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = []

        def work():
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(65536))
                    answer(connection)

        threading.Thread(target=work, daemon=True).start()
        port = listener.getsockname()[1]
        real = socket.create_connection
        monkeypatch.setattr(fetch, "is_public", lambda address: True)
        monkeypatch.setattr(Fetcher, "public_addresses", staticmethod(lambda host, _, field: ["127.0.0.1"]))
        monkeypatch.setattr(fetch.socket, "create_connection", lambda to, timeout: real((to[0], port), timeout))
        yield asked


def reply(body, head="HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"):
    return lambda connection: connection.sendall(head.format(len(body)).encode() + body)


def test_without_named_hosts_nothing_is_fetched():
    assert "does not fetch" in refused(Fetcher(Settings()), "http://pictures.example/a.png")


@pytest.mark.parametrize("url", [
    "http://other.example/a", "http://pictures.example.evil/a", "http://evil@other.example/a", "http://pictures.example./a",
    "http://2130706433/a", "http://0x7f000001/a", "http://127.0.0.1/a", "http://[::1]/a", "http://localhost/a",
    "http://pictures.example@evil.example/a", "http://evil.example#@pictures.example/a", "http:///a", "http://[/a",
    "http://evil.example\\@pictures.example.evil/a",
])  # fmt: skip
def test_other_hosts_are_refused(url):
    assert "host" in refused(fetcher(), url) or "not an address" in refused(fetcher(), url)


@pytest.mark.parametrize("url", [
    "http://me@pictures.example/a", "http://:x@pictures.example/a", "http://pictures.example:22/a",
    "http://pictures.example:99999/a",
])  # fmt: skip
def test_users_and_ports_are_refused(url):
    assert refused(fetcher(), url)


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["::1"], ["169.254.169.254"], []])
def test_a_named_host_that_leads_inside_is_refused_and_not_called(monkeypatch, addresses):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(fetch.socket, "create_connection", lambda *_, **__: pytest.fail("connected"))
    assert "public" in refused(fetcher(), "http://pictures.example/a")


def test_the_address_that_was_checked_is_the_one_that_is_called(monkeypatch):
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])
    called = []

    def resolve(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers)]

    def connect(to, timeout):
        called.append(to)
        raise OSError("far away")

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", connect)
    assert "reached" in refused(fetcher(), "https://pictures.example/a")
    assert called == [("93.184.216.34", 443)]


def test_a_name_that_resolves_to_nothing_is_refused(monkeypatch):
    def nothing(*_, **__):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(fetch.socket, "getaddrinfo", nothing)
    assert "no address" in refused(fetcher(), "http://pictures.example/a")


def test_bytes_are_fetched(monkeypatch):
    with server(monkeypatch, reply(b"picture")) as asked:
        assert get(fetcher(), "http://pictures.example/ä b.png?q=ü&x=1") == b"picture"
    assert asked[0].startswith(b"GET /%C3%A4%20b.png?q=%C3%BC&x=1 HTTP/1.1\r\n")
    assert b"\r\nHost: pictures.example\r\n" in asked[0]


def test_a_redirect_is_not_followed(monkeypatch):
    head = "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/secret\r\nContent-Length: {}\r\n\r\n"
    with server(monkeypatch, reply(b"", head)) as asked:
        assert "answered 302" in refused(fetcher(), "http://pictures.example/a")
    assert len(asked) == 1


def test_more_bytes_than_the_limit_are_refused(monkeypatch):
    with server(monkeypatch, reply(b"x" * 200_000)):
        assert "larger than 1000" in refused(fetcher(fetch_bytes=1000), "http://pictures.example/a")


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-", b""]
)
def test_one_that_drips_is_ended_by_the_clock(monkeypatch, head):
    dripped = []

    def drip(connection):
        connection.sendall(head)
        try:
            for place in waiting.dripped(range(200), 0.05):
                connection.sendall(b"x")
                dripped.append(place)
        except OSError:
            pass

    with server(monkeypatch, drip):
        assert "longer than 0.3" in refused(fetcher(fetch_s=0.3), "http://pictures.example/a")
        assert len(dripped) < 150


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"\xff" * 100])
def test_an_answer_that_is_none_is_refused(monkeypatch, answer):
    with server(monkeypatch, lambda connection: connection.sendall(answer)):
        assert "cannot be fetched" in refused(fetcher(), "http://pictures.example/a")


def test_several_are_fetched_side_by_side(monkeypatch):
    two = threading.Barrier(2, timeout=60)  # one alone would wait in vain
    monkeypatch.setattr(Fetcher, "_read", lambda self, parts, field: (two.wait(), parts.path.encode())[1])
    found = asyncio.run(fetcher().get_all({f"http://pictures.example/{i}": FIELD for i in range(8)}))
    assert found["http://pictures.example/3"] == b"/3"


class Slow:
    """Reads of addresses whose path holds "slow" wait until they are let go."""

    def __init__(self, monkeypatch):
        self.let_go, self.begun = threading.Event(), []
        monkeypatch.setattr(Fetcher, "_read", lambda _, parts, field: self.read(parts))

    def read(self, parts):
        self.begun.append(parts.path)
        if "slow" in parts.path:
            assert self.let_go.wait(60)
        elif "wrong" in parts.path:
            raise RequestError("cannot be fetched", field=FIELD)
        return b"picture"


def urls(*names):
    return {f"http://pictures.example/{name}": FIELD for name in names}


def test_slow_addresses_of_one_client_leave_threads_to_others(monkeypatch):
    slow, found = Slow(monkeypatch), fetcher()

    async def ask():
        slow_ones = [
            asyncio.create_task(found.get_all(urls(*(f"slow{request}{i}" for i in range(16))), sender="a")) for request in range(2)
        ]
        try:
            await waiting.until_async(lambda: len(slow.begun) >= fetch.OF_ONE_CLIENT)
            assert await asyncio.wait_for(found.get_all(urls("b"), sender="b"), 60)
            # A request that ends frees no thread that still reads for it, and what it had not begun is not read.
            ended = slow_ones.pop(0)
            ended.cancel()
            await asyncio.wait([ended], timeout=60)
            await asyncio.wait_for(found.get_all(urls("c"), sender="b"), 60)
            assert len(slow.begun) == fetch.OF_ONE_CLIENT + 2
        finally:
            slow.let_go.set()
        await asyncio.wait_for(slow_ones[0], 60)
        assert not any(f"slow0{i}" in path for path in slow.begun for i in range(fetch.OF_ONE_CLIENT, 16))

    asyncio.run(ask())


def test_the_first_address_that_fails_ends_the_others(monkeypatch):
    slow, found = Slow(monkeypatch), fetcher()

    async def ask():
        with pytest.raises(RequestError, match="cannot be fetched"):
            await found.get_all(urls("wrong", *(f"slow{i}" for i in range(15))))
        slow.let_go.set()
        assert await asyncio.wait_for(found.get_all(urls("after")), 60)

    asyncio.run(ask())
    assert len(slow.begun) <= 2 * fetch.OF_ONE_CLIENT + 1


def test_a_name_that_never_resolves_does_not_hold_the_client(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(Fetcher, "_read", lambda *_: done.wait(10))
    try:
        assert "longer than" in refused_later(fetcher(fetch_s=0.1), done)
    finally:
        done.set()


def refused_later(found, done):
    async def ask():
        try:
            with pytest.raises(RequestError) as caught:
                await found.get_all({"http://pictures.example/a": FIELD})
            return str(caught.value)
        finally:
            done.set()

    return asyncio.run(ask())


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


@pytest.mark.parametrize("address", [
    "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0", "169.253.255.255",
    "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.0.3.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0",
    "223.255.255.255", "2606:4700::1111", "2001:200::1", "2001:470:1::1", "2003::1", "2a00:1450::1", "::ffff:1.1.1.1",
    "64:ff9b::1.1.1.1", "2001:470:1::5efe:1.1.1.1",
])  # fmt: skip
def test_what_stands_beside_them_is_public(address):
    assert is_public(address)


@pytest.mark.parametrize("address", [
    "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1", "::ffff:0:7f00:1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "fe80::1%eth0",
    "::ffff:7f00:1", "2002:7f00:1::", "2002:101:101::", "2001:0:4136:e378:8000:63bf:80ff:fffe", "fd00:ec2::254", "ff02::1",
])  # fmt: skip
def test_loopback_and_metadata_are_not_public_in_any_form(address):
    assert not is_public(address)


@pytest.mark.parametrize(("one", "other"), [
    ("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"), ("fe80::1%eth0", "fe80::2%eth0"),
    ("::ffff:192.0.2.7", "192.0.2.7"), ("::ffff:c000:207", "64:ff9b::192.0.2.7"), ("127.0.0.1", "127.255.3.9"),
    ("::1", "127.0.0.1"), ("::ffff:127.0.0.2", "127.0.0.1"),
])  # fmt: skip
def test_addresses_that_one_client_can_take_are_one_client(one, other):
    assert client_network(one) == client_network(other)


def test_addresses_of_two_networks_are_two_clients():
    addresses = ["2001:db8:1:2::1", "2001:db8:1:3::1", "192.0.2.7", "192.0.2.8", "::ffff:192.0.2.9", "127.0.0.1", "a.socket"]
    assert len({client_network(address) for address in addresses}) == len(addresses)
    assert client_network("a.socket") == "a.socket"
