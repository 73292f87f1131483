"""How are images fetched by URL, only from hosts that the operator named and never from a private network?"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from weakref import WeakValueDictionary

from trimtab.errors import RequestError
from trimtab.serve.contract.settings import Settings
from trimtab.serve.media.addresses import is_public

CHUNK_BYTES = 64 * 2**10
# Fetches at once, of all clients and of one: slow addresses first delay the client that sent them.
AT_ONCE, OF_ONE_CLIENT = 8, 4


class Fetcher:
    """Fetches images from the allowed hosts. The connection uses the resolved addresses that were checked. Redirects are not
    followed. One deadline covers the time from the first packet to the last byte."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = {host.lower() for host in settings.allow_fetch}
        self._limits = settings.limits
        # A separate pool: hanging fetches must not delay other work in threads.
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="trimtab-fetch")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def get_all(self, urls: Mapping[str, str], *, sender: str = "") -> dict[str, bytes]:
        """Return the bytes at each address. urls: address -> the field that holds it. sender: the client, as `Job.sender`. Errors:
        RequestError, which reveals nothing about the internal network; the first one ends all of them."""
        checked = {url: self._check(url, field) for url, field in urls.items()}
        turns = self._turns.get(sender)
        if turns is None:
            self._turns[sender] = turns = asyncio.Semaphore(OF_ONE_CLIENT)
        tasks = [asyncio.create_task(self._get(turns, parts, urls[url])) for url, parts in checked.items()]
        try:
            bodies = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # unstarted fetches never start: nothing waits for them
                task.cancel()
        return dict(zip(checked, bodies, strict=True))

    async def _get(self, turns: asyncio.Semaphore, parts: SplitResult, field: str) -> bytes:
        await turns.acquire()
        loop = asyncio.get_running_loop()

        def end_turn(_: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turns.release)

        try:
            reading = self._threads.submit(self._read, parts, field)
        except BaseException:
            turns.release()
            raise
        # The turn ends with the thread's work, not with the request, which may end earlier.
        reading.add_done_callback(end_turn)
        try:
            # Resolving a name has no time limit.
            return await asyncio.wait_for(asyncio.wrap_future(reading), self._limits.fetch_s + 1)
        except asyncio.TimeoutError as exc:
            raise self._late(field) from exc

    def _late(self, field: str) -> RequestError:
        return RequestError(f"took longer than {self._limits.fetch_s:g} seconds", field=field)

    def _check(self, url: str, field: str) -> SplitResult:
        if not self._hosts:
            raise RequestError("this server does not fetch URLs", field=field, hint="Send the image itself as a data URL")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError as exc:
            raise RequestError("is not an address", field=field) from exc
        if host not in self._hosts:
            raise RequestError("is not a host that this server may fetch from", field=field, value=host[:256])
        if parts.username is not None or parts.password is not None or port not in (None, 80, 443):
            raise RequestError("an address with a user name, or with another port than 80 or 443, is not allowed", field=field)
        return parts

    def _read(self, parts: SplitResult, field: str) -> bytes:
        assert parts.hostname is not None
        until = time.monotonic() + self._limits.fetch_s
        try:
            connection = self._connect(parts, field, until)
            assert connection.sock is not None
            clock = threading.Timer(until - time.monotonic(), _shut, [connection.sock])
            clock.start()
            try:
                if isinstance(connection.sock, ssl.SSLSocket):
                    connection.sock.do_handshake()
                body = self._body(connection, parts, field)
            finally:
                clock.cancel()
                connection.close()
            if time.monotonic() >= until:  # a socket closed at the deadline looks like the end of an answer
                raise self._late(field)
            return body
        except (OSError, http.client.HTTPException, ValueError) as exc:
            if time.monotonic() >= until:
                raise self._late(field) from exc
            raise RequestError("cannot be fetched", field=field, value=parts.hostname) from exc

    def _body(self, connection: http.client.HTTPConnection, parts: SplitResult, field: str) -> bytes:
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else ""
        assert parts.hostname is not None
        connection.request("GET", path + query, headers={"Host": parts.hostname, "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status != 200:  # a redirect too: its target has not been checked
            raise RequestError(f"answered {answer.status}", field=field, value=parts.hostname)
        body = bytearray()
        while chunk := answer.read1(CHUNK_BYTES):
            body += chunk
            if len(body) > self._limits.fetch_bytes:
                raise RequestError(f"is larger than {self._limits.fetch_bytes} bytes", field=field)
        if answer.length:  # fewer bytes than announced
            raise http.client.IncompleteRead(bytes(body))
        return bytes(body)

    def _connect(self, parts: SplitResult, field: str, until: float) -> http.client.HTTPConnection:
        host = parts.hostname
        assert host is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        raw = None
        for address in self.public_addresses(host, port, field):
            try:
                raw = socket.create_connection((address, port), timeout=max(0.01, until - time.monotonic()))
                break
            except OSError:
                continue
        if raw is None:
            raise RequestError("cannot be reached", field=field, value=host)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = raw
        if parts.scheme == "https":
            # The TLS handshake follows later, under the deadline.
            connection.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
        return connection

    @staticmethod
    def public_addresses(host: str, port: int, field: str) -> list[str]:
        """Return the addresses of a host. Errors: RequestError if any of them is not public."""
        try:
            addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as exc:
            raise RequestError("has no address", field=field, value=host) from exc
        if not addresses or not all(is_public(address) for address in addresses):
            raise RequestError("is not a public address", field=field, value=host)
        return list(dict.fromkeys(addresses))


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
