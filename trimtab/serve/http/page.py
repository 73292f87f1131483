"""Which files are the page at `/`, and with which policy are they sent?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from trimtab._version import __version__
from trimtab.serve.contract.log import list_of
from trimtab.serve.contract.settings import Settings

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
VENDORED = "markdown-it.js"  # another project's work, byte for byte as it is published; licence in the same folder
# Every file that is sent -> its type; there are no others.
ASSETS = {
    INDEX: "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8", "chat.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("api.js", "branches.js", "chances.js", "chat.js", "chats.js", "differ.js", "dom.js", "markdown.js", "media.js", "mixes.js",
         "options.js", "page.js", "panel.js", "picture.js", "recorder.js", "save.js", "store.js", "sure.js", "tex.js", "theme.js",
         "turns.js", "undo.js", VENDORED),
        "text/javascript; charset=utf-8",
    ),
    "markdown-it.LICENSE.txt": "text/plain; charset=utf-8",
}  # fmt: skip
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' blob:", "media-src blob:",
    "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    "require-trusted-types-for 'script'", "trusted-types 'none'",
))  # fmt: skip
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    # Requested every time, answered with 304 while unchanged: a new version never mixes with an old one.
    "cache-control": "no-cache",
}  # fmt: skip


@dataclass(frozen=True)
class _Asset:
    body: bytes
    media_type: str
    tag: str


def page_routes(settings: Settings) -> list[BaseRoute]:
    """Return the routes of the page and its files; none if the settings disable it."""
    if not settings.page:
        return []
    assets = {name: _read(name, media_type) for name, media_type in ASSETS.items()}
    about = {"version": __version__, "loads_adapters": settings.adapter_root is not None and settings.allows_admin}

    async def index(request: Request) -> Response:
        return _answer(request, assets[INDEX])

    async def asset(request: Request) -> Response:
        asset_file = assets.get(request.path_params["name"])
        if asset_file is None:
            raise HTTPException(404, "The page has no such file", headers=HEADERS)
        return _answer(request, asset_file)

    async def what(request: Request) -> Response:
        return JSONResponse(about, headers=HEADERS)

    return [Route("/", index), Route("/page/about.json", what), Route("/page/{name:path}", asset)]


def _read(name: str, media_type: str) -> _Asset:
    body = (FOLDER / name).read_bytes()
    return _Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:20]}"')


def _answer(request: Request, asset: _Asset) -> Response:
    headers = {**HEADERS, "etag": asset.tag}
    if asset.tag.encode() in list_of(request.scope["headers"], "if-none-match"):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers={**headers, "content-type": asset.media_type})
