"""Who may come in: the key, and the size of what they carry, before anything reads it."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.serve.settings import Settings

OPEN_PATHS = ("/health", "/ready")


class Door:
    """Asks for a key and counts a body's bytes before anything reads it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._has_key(headers.get(b"authorization", b"")):
            body: dict[str, Any] = {
                "message": "A valid API key is needed: Authorization: Bearer KEY", "type": "authentication_error",
                "param": None, "code": "invalid_api_key", "fields": {},
            }  # fmt: skip
            await JSONResponse({"error": body}, 401, headers={"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, _Counted(receive, self._settings.limits.body_bytes, headers), send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        # The page itself holds no secret: it asks its reader for the key and sends it with what it reads.
        return not self._keys or path in OPEN_PATHS or path == "/" or path.startswith("/page/")

    def _has_key(self, given: bytes) -> bool:
        kind, _, key = given.partition(b" ")
        # Every key is compared, in constant time each.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(matches)


class _Counted:
    """A `receive` that refuses a body above the limit, whatever its headers claim."""

    def __init__(self, receive: Receive, limit: int, headers: Mapping[bytes, bytes]) -> None:
        self._receive, self._limit, self._seen = receive, limit, 0
        with suppress(ValueError):
            self._seen = limit + 1 if int(headers.get(b"content-length", b"0")) > limit else 0

    async def __call__(self) -> Any:
        if self._seen > self._limit:
            raise HTTPException(413, f"The body is larger than {self._limit} bytes")
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            raise HTTPException(413, f"The body is larger than {self._limit} bytes")
        return message
