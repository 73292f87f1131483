"""Runs the server: uvicorn on a listening socket, and a shutdown that lets answers finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus
from starlette.applications import Starlette

from trimtab.errors import RequestError, TrimtabError
from trimtab.process import phases
from trimtab.serve.contract import log as journal
from trimtab.serve.contract.settings import Live, Settings, is_loopback
from trimtab.serve.http.app import make_app
from trimtab.serve.http.connection import RESERVE, Guard, GuardedProtocol
from trimtab.serve.http.listener import BACKLOG, address_of, listen
from trimtab.serve.http.live import Reloader, Reread
from trimtab.serve.http.page import page_routes
from trimtab.serve.observe import tracing
from trimtab.serve.observe.metrics import Metrics
from trimtab.serve.pool import Pool
from trimtab.serve.worker.registry import ServedModel

# How many waiting connections are accepted before other work of the event loop.
ACCEPT_AT_ONCE = 16
# File descriptors that are not connections: files of bodies, pipes, the worker's.
OTHER_FILES = 128
TICK_S = 0.05
# GIL switch interval of this process. With Python's 5 ms, each read and write of the event loop waits that long while a
# thread reads a large body, and a few hundred connections wait for seconds.
SWITCH_S = 0.0002
# Garbage collection thresholds: new objects, and the frequency for older ones.
COLLECT_AFTER = (700, 5, 500)

log = logging.getLogger("trimtab.serve")


def serve(
    models: Sequence[ServedModel], settings: Settings, *, together: int = 1, say: Callable[[str], None],
    reread: Reread | None = None, pool: Pool | None = None, listener: socket.socket | None = None,
) -> bool:  # fmt: skip
    """Answer until SIGTERM or Ctrl-C. Then refuse new requests and let running ones end within `settings.grace_s`.

    Returns whether Ctrl-C ended the server. reread: returns the new models and settings when SIGHUP or an administrator
    requests a reload. pool: of these models, if their workers are already loading; listener: of the settings' address.
    If this raises, the caller stops and closes both. A second Ctrl-C ends at once. Errors: RequestError if the address
    is in use or not an address of this machine; that of the only model if it cannot be loaded.
    """
    journal.keep_streams()
    sys.setswitchinterval(SWITCH_S)
    # sse-starlette would cut streams at a signal; here they have their grace time.
    AppStatus.disable_automatic_graceful_drain()
    spans = tracing.from_environment() if settings.otel else None
    pool = pool or Pool(models, settings, together=together)
    listener = listener or listen(settings.host, settings.port)
    for model in models:
        count = len(model.adapters)
        rows = "rows as planned" if model.rows is None else f"{model.rows} rows"
        say(f"{model.name}: {count} adapter{'' if count == 1 else 's'}, {rows}")
    say(f"{address_of(listener)}  ({'this machine only' if is_loopback(settings.host) else 'with an API key'})")
    for line in ways_in(listener, has_page=settings.page):
        say(line)
    live, metrics = Live(settings), Metrics()
    reloader = Reloader(pool, live, reread or (lambda: (models, settings, ())), metrics.forget)
    extra = [*page_routes(settings), *reloader.routes()]
    app = make_app(pool, settings, metrics, extra=extra, folders=pool.folders, live=live, spans=spans)
    guard = Guard(settings.limits, room_for_connections(settings.limits.connections, say))
    server = _Server(app, pool, settings, guard, reloader)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        pool.stop()
        if spans is not None:
            spans.close()
    if server.failure is not None:
        raise TrimtabError.from_dict(server.failure)
    return server.was_interrupted


def ways_in(listener: socket.socket, *, has_page: bool) -> list[str]:
    """Return a line for the page, if there is one, and a line for clients: the base URL of the API."""
    address = address_of(listener)
    for everywhere, here in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        address = address.replace(everywhere, here)
    page = [f"page: {address}/"] if has_page else []
    return [*page, f"base URL for clients: {address}/v1"]


def room_for_connections(requested: int, say: Callable[[str], None]) -> int:
    """Return how many connections may be open: the requested number, or the rest of the limit of open files.

    The soft limit is raised if the hard one allows it. Errors: RequestError if none is left.
    """
    if os.name != "posix":
        return requested
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + RESERVE + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return requested
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = min(requested, soft - RESERVE - OTHER_FILES)
    if room < 1:
        raise RequestError(
            f"the system allows {soft} open files, and {needed} are needed", field="limit connections", value=requested,
            hint="Raise it (ulimit -n, LimitNOFILE)",
        )  # fmt: skip
    if room < requested:
        say(f"{room} connections at once instead of {requested}: the system allows {soft} open files (ulimit -n, LimitNOFILE)")
    return room


class _Server(uvicorn.Server):
    """uvicorn with a grace period: while running answers finish, it still listens and answers 503 to new requests."""

    def __init__(self, app: Starlette, pool: Pool, settings: Settings, guard: Guard, reloader: Reloader) -> None:
        self._reloader, self._reloading = reloader, set[asyncio.Task[None]]()
        protocol: Any = partial(GuardedProtocol, guard=guard)
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="on", log_level="warning", access_log=False, proxy_headers=False,
            log_config=None,
            server_header=False, date_header=False, timeout_keep_alive=math.ceil(settings.limits.idle_s), backlog=ACCEPT_AT_ONCE,
        )  # fmt: skip
        super().__init__(config)
        self._began, self.was_interrupted = time.monotonic(), False
        self._announcing: asyncio.Task[None] | None = None
        self.failure: Mapping[str, Any] | None = None
        self._pool, self._grace_s, self._guard = pool, settings.grace_s, guard

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._guard.on_loop_error)
        await super().startup(sockets)
        keep_for_good()
        self._announcing = asyncio.create_task(self._announce())
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        for listener in sockets or ():  # asyncio has limited the queue to its accepts per turn
            listener.listen(BACKLOG)

    def _reload(self) -> None:
        task = asyncio.create_task(self._reloader.reload_quietly())
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _announce(self) -> None:
        """Log one line when a model answers for the first time; end the server if none ever can."""
        while not self._pool.is_ready:
            self.failure = self._pool.failure
            if self.failure is not None:
                self.should_exit = True
                return
            phases.begin(*self._pool.phase)
            await asyncio.sleep(TICK_S)
        phases.begin("")
        names = [model["name"] for model in self._pool.status()["models"]]
        fields = {"models": ",".join(names), "seconds": round(time.monotonic() - self._began, 2), "pid": os.getpid()}
        log.info("ready", extra={"fields": fields})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
        self._pool.refuse_new()
        end = time.monotonic() + self._grace_s
        while self._pool.in_flight and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(TICK_S)
        if self._pool.in_flight:  # they get this status; otherwise their connections would only break
            await asyncio.to_thread(self._pool.stop)
        # Answers that were complete in time may still be sent.
        left_s = 0.0 if self.force_exit else end - time.monotonic()
        self.config.timeout_graceful_shutdown = max(1, math.ceil(left_s))
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves out the app's end: its task would be cancelled later, with a traceback in the log
            await asyncio.to_thread(self._pool.stop)
            await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            # uvicorn would raise them again, and end the process during its shutdown.
            self.was_interrupted = signal.SIGINT in self._captured_signals
            self._captured_signals.clear()


def keep_for_good() -> None:
    """Exclude the present objects from garbage collection: modules and classes exist as long as the process, and a collection
    over all of them stops it for 30 to 180 ms. Objects of connections are collected less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
