"""How are the file, the keys and the registry of a server read again while requests run?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trimtab.errors import CheckpointError, RequestError, TrimtabError
from trimtab.serve.api import schemas
from trimtab.serve.contract.settings import RELOAD, Live, Settings
from trimtab.serve.worker.registry import ServedModel

# Settings that sockets, workers and the page were made with.
FIXED = ("host", "port", "cors_origins", "page", "grace_s", "retry", "otel")
FIXED_LIMITS = (
    "connections", "head_s", "body_s", "idle_s", "all_body_bytes", "prompt_tokens", "request_pixels", "request_audio_s",
)  # fmt: skip

# Models, settings, and the names of other keys of the file that have changed and wait for a restart.
Reread = Callable[[], tuple[Sequence[ServedModel], Settings, Sequence[str]]]
log = logging.getLogger("trimtab.serve")


class Pool(Protocol):
    """The interface that a reload needs of the models."""

    settings: Settings

    @property
    def names(self) -> Sequence[str]:
        """The names of the models."""

    async def use(self, served: ServedModel) -> Mapping[str, Sequence[str]]:
        """Load and unload adapters; returns names under "changed", "loaded", "unloaded" and "needs_restart", and texts under
        "problems"."""


class Reloader:
    """Reads the server's file, keys and registry again. forget: drops an adapter's metrics."""

    def __init__(self, pool: Pool, live: Live, reread: Reread, forget: Callable[[str, str | None], None]) -> None:
        self._pool, self._live, self._reread, self._forget = pool, live, reread, forget
        self._lock = asyncio.Lock()

    async def reload(self) -> dict[str, Any]:
        """Return the changes: settings by name, adapters as "model:adapter" (under "changed": those with another weight). If the
        file is wrong, nothing changes.

        Errors: RequestError, CheckpointError as at the start of the server.
        """
        async with self._lock:
            models, requested, waiting = await asyncio.to_thread(self._reread)
            before = self._live.settings
            settings, needs = _allowed(before, requested)
            gone = [f"models.{name}" for name in self._pool.names if name not in {served.name for served in models}]
            needs = [*needs, *waiting, *gone]
            report: dict[str, list[str]] = {"changed": _changed(before, settings)}
            report |= {"loaded": [], "unloaded": [], "needs_restart": needs, "problems": []}
            self._live.replace(settings)
            self._pool.settings = settings
            for served in models:
                for name, values in (await self._pool.use(served)).items():
                    report[name] += values
            for name in report["unloaded"]:
                model, _, adapter = name.partition(":")
                self._forget(adapter, model)
            log.info("reloaded", extra={"fields": {name: ",".join(value) for name, value in report.items() if value}})
            return {"status": "reloaded", **report}

    async def reload_quietly(self) -> None:
        """Reload, and log a failure: no client waits for the result."""
        try:
            await self.reload()
        except TrimtabError as exc:
            log.error("not reloaded: %s", exc)

    def routes(self) -> list[Route]:
        async def answer(request: Request) -> Response:
            if body := await request.body():
                schemas.read(schemas.ReloadRequest, body)
            try:
                return JSONResponse(await self.reload())
            except RequestError as exc:  # the file is wrong, not this request
                raise CheckpointError(str(exc), path="the configuration") from exc

        return [Route(RELOAD, answer, methods=["POST"])]


def _allowed(before: Settings, requested: Settings) -> tuple[Settings, list[str]]:
    """Return the settings that a reload may put in place, and the names of those that wait for a restart."""
    needs = [name for name in FIXED if getattr(before, name) != getattr(requested, name)]
    fixed = [name for name in FIXED_LIMITS if getattr(before.limits, name) != getattr(requested.limits, name)]
    limits = replace(requested.limits, **{name: getattr(before.limits, name) for name in FIXED_LIMITS})
    settings = replace(requested, limits=limits, **{name: getattr(before, name) for name in FIXED})
    return settings, [*needs, *(f"limits.{name}" for name in fixed)]


def _changed(before: Settings, after: Settings) -> list[str]:
    """Return the names of differing settings; never a value: keys are among them."""
    return [item.name for item in fields(before) if getattr(before, item.name) != getattr(after, item.name)]
