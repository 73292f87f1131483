"""How are a server's answers fetched, bounded in number, bytes and time?"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2

from trimtab.errors import RequestError

MAX_REQUESTS = 200
ANSWER_BYTES = 8 * 2**20
REQUEST_S = 120.0
CONNECT_S = 10.0
DEADLINE_S = 300.0
SHOWN = 200  # characters of a server's text that an error repeats


@dataclass(frozen=True)
class Reply:
    """A status and its JSON; None if the body is no JSON."""

    status: int
    value: Any

    @property
    def words(self) -> str:
        """The server's error text, shortened to one line."""
        error = self.value.get("error", self.value) if isinstance(self.value, dict) else None
        text = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        return plain(text) if isinstance(text, str) else ""


def plain(text: str, limit: int = SHOWN) -> str:
    """Return a server's text for a terminal: shortened, without control characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def check_url(url: str, field: str = "against") -> str:
    """Return the address without a slash at its end. Errors: RequestError if it is no plain http(s) address."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as exc:
        raise RequestError(f"is not an address ({exc})", field=field, value=plain(url)) from exc
    if parts.username is not None or parts.password is not None:
        raise RequestError(
            "an address holds no user name or password", field=field, hint="Name the variable that holds a key: api_key_env"
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise RequestError("is not the address of a server", field=field, value=plain(url), allowed=("http://HOST:PORT/v1",))
    return url.rstrip("/")


def read_key(variable: str | None) -> str | None:
    """Return the key in an environment variable. Errors: RequestError if it is not set, or contains no key."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise RequestError("is not set", field="api_key_env", value=variable)
    if not key.isascii() or not key.isprintable():
        raise RequestError("holds characters that no key has", field="api_key_env", value=variable)
    return key


class Client:
    """Sends requests to one server within one deadline. transport: another one than the network, for tests. Redirects, proxies and
    credentials of the environment are not used."""

    def __init__(
        self, url: str, *, key: str | None = None, deadline_s: float = DEADLINE_S, max_requests: int = MAX_REQUESTS,
        transport: httpx2.AsyncBaseTransport | None = None, field: str = "against",
    ) -> None:  # fmt: skip
        self.url, self._field = check_url(url, field), field
        self._key, self._transport, self._max_requests = key, transport, max_requests
        self._deadline_s = deadline_s
        self.waited_s, self.requests = 0.0, 0

    def get(self, path: str) -> Reply:
        """Return the reply to a GET. Errors: RequestError."""
        return self._all([("GET", path, None)])[0]

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """Return the reply to a POST. Errors: RequestError."""
        return self._all([("POST", path, body)])[0]

    def post_each(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
        """Return the replies to several POSTs, one after the other over one connection. Errors: RequestError."""
        return self._all([("POST", path, body) for body in bodies])

    @property
    def requests_left(self) -> int:
        return self._max_requests - self.requests

    def _all(self, requests: Sequence[tuple[str, str, dict[str, Any] | None]]) -> list[Reply]:
        if len(requests) > self.requests_left:
            raise RequestError(
                f"needs more than {self._max_requests} requests to the server", field=self._field, value=self.url,
                hint="Give fewer prompts",
            )  # fmt: skip
        started = time.monotonic()
        try:
            return anyio.run(self._send_all, requests)
        finally:
            self.waited_s += time.monotonic() - started

    async def _send_all(self, requests: Sequence[tuple[str, str, dict[str, Any] | None]]) -> list[Reply]:
        replies = []
        async with httpx2.AsyncClient(
            transport=self._transport, timeout=httpx2.Timeout(REQUEST_S, connect=CONNECT_S), follow_redirects=False,
            trust_env=False,
        ) as client:  # fmt: skip
            started = time.monotonic()
            for method, path, body in requests:
                left_s = self._deadline_s - self.waited_s - (time.monotonic() - started)
                try:
                    # One deadline for the whole request, so a server that sends single bytes cannot exceed it.
                    with anyio.fail_after(max(0.0, min(left_s, REQUEST_S))):
                        replies.append(await self._send(client, method, path, body))
                except TimeoutError as exc:
                    limit_s = REQUEST_S if left_s > REQUEST_S else self._deadline_s
                    raise self._error(f"did not answer within {limit_s:g} seconds") from exc
                except (httpx2.HTTPError, httpx2.InvalidURL) as exc:
                    raise self._error(f"gives no answer ({plain(str(exc)) or type(exc).__name__})") from exc
        return replies

    async def _send(self, client: httpx2.AsyncClient, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        self.requests += 1
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "trimtab"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        async with client.stream(method, self.url + path, json=body, headers=headers) as response:
            if response.is_redirect:
                raise self._error("redirects to another address; redirects are not followed")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self._error("sends compressed answers although the request excludes them")
            held = bytearray()
            async for chunk in response.aiter_bytes():
                held += chunk
                if len(held) > ANSWER_BYTES:
                    raise self._error(f"answers with more than {ANSWER_BYTES} bytes")
            return Reply(response.status_code, _json(bytes(held)))

    def _error(self, reason: str) -> RequestError:
        return RequestError(reason, field=self._field, value=self.url)


def _json(held: bytes) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(held, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
