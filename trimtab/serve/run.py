"""How the server runs: a socket that is free, uvicorn on it, and an end that lets answers finish."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.routing import BaseRoute

from trimtab.errors import RequestError
from trimtab.serve.app import make_app
from trimtab.serve.metrics import Metrics
from trimtab.serve.pool import Pool
from trimtab.serve.registry import ServedModel
from trimtab.serve.settings import Settings, is_loopback


def serve(models: Sequence[ServedModel], settings: Settings, *, together: int = 1, say: Callable[[str], None]) -> None:
    """Answer until SIGTERM or Ctrl-C; then take nothing new and let what is running end within `settings.grace_s`.

    Errors: RequestError if the address is taken or is not this machine's.
    """
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in str(host) else host
    pool = Pool(models, settings, together=together)
    metrics = Metrics()
    app = make_app(pool, settings, metrics, extra=_page(settings))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=_whole(settings.grace_s),
        h11_max_incomplete_event_size=64 * 2**10, server_header=False, date_header=False,
    )  # fmt: skip
    for model in models:
        say(f"{model.name}: {model.request.model}, {len(model.adapters)} adapters, {model.rows} rows")
    say(f"http://{shown}:{port}  ({'this machine only' if is_loopback(settings.host) else 'with an API key'})")
    server = _Server(config, pool, settings)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()


def _page(settings: Settings) -> Sequence[BaseRoute]:
    if not settings.page:
        return ()
    from trimtab.serve.page import page_routes

    return page_routes(settings)


def _whole(seconds: float) -> int:
    return max(1, round(seconds))


class _Server(uvicorn.Server):
    """uvicorn, told to end: running answers are given their time before connections are closed."""

    def __init__(self, config: uvicorn.Config, pool: Pool, settings: Settings) -> None:
        super().__init__(config)
        self._pool, self._settings = pool, settings

    async def shutdown(self, sockets: Any = None) -> None:
        # uvicorn waits for open answers first and runs the lifespan's end after; new work must be refused before either.
        self._pool.refuse_new()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Errors: RequestError if the address is in use or not this machine's."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise RequestError("is not an address of this machine", field="host", value=host) from exc
    found = socket.socket(family, kind, proto)
    try:
        # On Windows the option would let two servers share a port; elsewhere it only skips the wait after a restart.
        if socket.has_ipv6 and hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as exc:
        found.close()
        if exc.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is in use" if exc.errno == errno.EADDRINUSE else "may not be taken by this user"
            raise RequestError(why, field="port", value=port, hint="Give another --port, or 0 for a free one") from exc
        raise RequestError(f"cannot be listened on ({exc.strerror})", field="host", value=host) from exc
    return found
