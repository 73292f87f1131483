"""Is an IP address public, by IANA's registries and equally on every Python?"""

from __future__ import annotations

import ipaddress

_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared with carriers' customers (CGNAT)
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # public, but only answered inside Azure: the platform's services
            "169.254.0.0/16",  # link-local, where clouds keep their metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # IETF protocols
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_V6_PUBLIC = ipaddress.IPv6Network("2000::/3")
_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # IETF protocols: Teredo, benchmarks, ORCHID
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation
        ),
    )
)
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Upper half of an interface identifier with an IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


def is_public(address: str) -> bool:
    """Whether an address, and the IPv4 address inside it, are public.

    Only global unicast (2000::/3) is public in IPv6, and IPv4-mapped and well-known NAT64 forms of a public IPv4 address. Python's
    releases differ, so `ipaddress` and the networks here must agree. Source, read in 2025: IANA IPv4 and IPv6 Special-Purpose
    Address Registries; RFC 1112, 3879, 4213, 4291, 5214, 6052, 7526, 7915, 8215, 9602, 9637. Reachable networks inside one that is
    not (192.0.0.9, 2001:20::/28) count as that one.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not any(ip in network for network in _V4)
    inner = str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    if ip in MAPPED or ip in NAT64:
        return is_public(inner)
    if int(ip) >> 32 & 0xFFFFFFFF in _ISATAP and not is_public(inner):
        return False
    return ip in _V6_PUBLIC and ip.is_global and not any(ip in network for network in _V6)
