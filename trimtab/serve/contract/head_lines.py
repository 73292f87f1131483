"""Which header lines of a request does the server read, what does a repeated one do, and which credential do they hold?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

ONCE = (
    "authorization", "x-api-key", "host", "content-length", "content-type", "content-encoding", "transfer-encoding", "origin",
    "access-control-request-method",
)  # fmt: skip
LABELS = ("x-request-id", "traceparent")
LISTS = ("tracestate", "if-none-match", "access-control-request-headers")
_ONCE = {name.encode(): name for name in ONCE}

# In ASGI's form: lower-case names, in the order of arrival.
Lines = Iterable[tuple[bytes, bytes]]


class DifferentKeysError(Exception):
    """Authorization and x-api-key have different keys."""


def repeated(lines: Lines) -> str | None:
    """Return the first name of ONCE that has two lines, None if there is none.

    ONCE     a second line is refused, because two readers could use two values. These are the credentials, the host,
             and the headers that define the body
    LABELS   a repeated one counts as absent, as in W3C Trace Context section 3.2 for `traceparent`
    LISTS    all lines are one list. RFC 9110 section 5.3
    """
    seen: set[bytes] = set()
    for name, _ in lines:
        if name in _ONCE:
            if name in seen:
                return _ONCE[name]
            seen.add(name)
    return None


def value_of(lines: Lines, name: str) -> bytes:
    """Return the value of a line of ONCE or LABELS, b"" without one. A repeated label has none."""
    assert name in ONCE or name in LABELS
    values = [value for known, value in lines if known == name.encode()]
    return values[0].strip() if len(values) == 1 else b""


def list_of(lines: Lines, name: str) -> bytes:
    """Return the lines of one of LISTS as one."""
    assert name in LISTS
    return b",".join(value.strip() for known, value in lines if known == name.encode())


def credential_of(lines: Lines, *, has_keys: bool) -> bytes:
    """Return the key that a request sends, b"" without one: `Authorization: Bearer KEY`, or Anthropic's `x-api-key:
    KEY`. An empty line is none. Other schemes than Bearer have no key.

    lines: without repeated ones. has_keys: whether the server has keys; without any, the client's key is ignored.
    Errors: DifferentKeysError for two different keys, because a proxy could have checked the other one.
    """
    kind, _, key = value_of(lines, "authorization").partition(b" ")
    keys = [key.strip()] if kind.lower() == b"bearer" and key.strip() else []
    if own := value_of(lines, "x-api-key"):
        keys.append(own)
    if has_keys and len(set(keys)) > 1:
        raise DifferentKeysError
    return keys[0] if keys else b""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name counts only if it is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
