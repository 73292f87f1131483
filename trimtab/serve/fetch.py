"""Pictures by address: only from hosts that the operator named, never from a private network, within size and time.

The address a name resolves to is checked and then connected to, so that a name which answers differently the second time
gains nothing. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import SplitResult, urlsplit

from trimtab.errors import RequestError
from trimtab.serve.settings import Settings

FIELD = "image_url.url"
CHUNK_BYTES = 64 * 2**10


class Fetcher:
    """Fetches what the settings allow."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = {host.lower() for host in settings.allow_fetch}
        self._limits = settings.limits

    async def get(self, url: str) -> bytes:
        """Return the bytes at an address. Errors: RequestError, without a word about what the network inside looks like."""
        parts = self._check(url)
        return await asyncio.to_thread(self._read, parts)

    def _check(self, url: str) -> SplitResult:
        if not self._hosts:
            raise RequestError(
                "this server fetches nothing", field=FIELD, hint="Send the picture itself, as a data URL"
            )
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError as exc:
            raise RequestError("is not an address", field=FIELD) from exc
        if host not in self._hosts:
            raise RequestError("is not a host that this server may fetch from", field=FIELD, value=host)
        if parts.username is not None or port not in (None, 80, 443):
            raise RequestError("user names and ports of its own are not allowed", field=FIELD)
        return parts

    def _read(self, parts: SplitResult) -> bytes:
        deadline = time.monotonic() + self._limits.fetch_s
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=self._limits.fetch_s)
        try:
            connection.sock = self._connect(parts, port)
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
            answer = connection.getresponse()
            if answer.status != 200:
                raise RequestError(f"answered {answer.status}", field=FIELD, value=parts.hostname)
            found = bytearray()
            while chunk := answer.read(CHUNK_BYTES):
                found += chunk
                if len(found) > self._limits.fetch_bytes:
                    raise RequestError(f"is larger than {self._limits.fetch_bytes} bytes", field=FIELD)
                if time.monotonic() > deadline:
                    raise RequestError(f"took longer than {self._limits.fetch_s:g} seconds", field=FIELD)
            return bytes(found)
        except (OSError, http.client.HTTPException) as exc:
            raise RequestError("cannot be fetched", field=FIELD, value=parts.hostname) from exc
        finally:
            connection.close()

    def _connect(self, parts: SplitResult, port: int) -> socket.socket:
        host = parts.hostname
        assert host is not None
        address = self.public_address(host, port)
        raw = socket.create_connection((address, port), timeout=self._limits.fetch_s)
        if parts.scheme == "https":
            return ssl.create_default_context().wrap_socket(raw, server_hostname=host)
        return raw

    @staticmethod
    def public_address(host: str, port: int) -> str:
        """Return the address of a host. Errors: RequestError if any of its addresses is not a public one."""
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except OSError as exc:
            raise RequestError("has no address", field=FIELD, value=host) from exc
        for address in found:
            ip = ipaddress.ip_address(address.partition("%")[0])
            mapped = getattr(ip, "ipv4_mapped", None)
            if not (mapped or ip).is_global or ip.is_multicast:
                raise RequestError("is not on the public network", field=FIELD, value=host)
        return sorted(found)[0]
