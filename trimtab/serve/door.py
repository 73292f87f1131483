"""Who may come in: the key, the address they called, and the size and kind of what they carry, before anything reads it.

A server without a key listens on this machine alone, and even then a web page in a browser here could call it. Two checks
keep pages of other sites out: the Host header has to be this machine (a name that was made to point here is refused), and
a POST has to be JSON (which a browser sends to another site only after asking, and CORS is off).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.serve.faults import http_error
from trimtab.serve.settings import Settings, is_loopback

OPEN_PATHS = ("/health", "/ready")


class Door:
    """Asks for a key and counts a body's bytes before anything reads it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._limit = app, settings.limits.body_bytes
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._is_local = not settings.api_keys and is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refused = self._refusal(scope, headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        await self._app(scope, _Counted(receive, self._limit, headers), send)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        if self._is_local and not _names_this_machine(headers.get(b"host", b"")):
            return http_error(421, "This server answers to this machine's own names only", code="wrong_host")
        if self._keys and not self._is_open(scope) and not self._has_key(headers.get(b"authorization", b"")):
            return http_error(
                401, "A valid API key is needed: Authorization: Bearer KEY", kind="authentication_error",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json" or headers.get(b"content-encoding", b"identity") != b"identity":
                return http_error(415, "Send JSON: Content-Type: application/json, not compressed", code="not_json")
        return None

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        # The page itself holds no secret: it asks its reader for the key and sends it with what it reads.
        return path in OPEN_PATHS or path == "/" or path.startswith("/page/")

    def _has_key(self, given: bytes) -> bool:
        kind, _, key = given.partition(b" ")
        # Every key is compared, in constant time each; digests are of one length, whatever the keys' are.
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return kind.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _names_this_machine(host: bytes) -> bool:
    """Whether a Host header names a loopback address; browsers always send one, so none at all is no browser."""
    text = host.decode("latin-1").strip().lower()
    name = text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]
    return not text or name.endswith(".localhost") or is_loopback(name)


class _Counted:
    """A `receive` that refuses a body above the limit, whatever its headers claim."""

    def __init__(self, receive: Receive, limit: int, headers: Mapping[bytes, bytes]) -> None:
        self._receive, self._limit, self._seen = receive, limit, 0
        with suppress(ValueError):
            self._seen = limit + 1 if int(headers.get(b"content-length", b"0")) > limit else 0

    async def __call__(self) -> Any:
        if self._seen <= self._limit:
            message = await self._receive()
            self._seen += len(message.get("body", b""))
            if self._seen <= self._limit:
                return message
        raise HTTPException(413, f"The body is larger than {self._limit} bytes")
