"""What is one copy of a model inside Ray Serve?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.serve.contract.errors import plain_error
from trimtab.serve.contract.job import Event
from trimtab.serve.worker.ipc import event_to_message, job_from_message
from trimtab.serve.worker.supervisor import ModelFailedError, Supervisor, events_of

TICK_S = 0.05
# The folder of an adapter and, for a client's adapter, the folder that must contain its files.
Place = str | tuple[str, str]


class Replica:
    """One copy of a model.

    worker_settings: the settings of the worker, with its first adapters. places: the number of adapters that Ray may assign to this
    copy (-1: no limit). Pinned adapters are on every copy and do not count. Ray's multiplexing sends requests to a copy that has
    their adapter. An adapter that Ray forgets stays in this copy's host memory. A copy is unhealthy once its worker is given up,
    and Ray then replaces it.
    """

    async def __init__(self, worker_settings: Mapping[str, Any], retry: bool, places: int) -> None:  # type: ignore[misc]
        from ray import serve

        @serve.multiplexed(max_num_models_per_replica=places)
        async def held(name: str) -> str:
            return await self._have(name)

        self._held: Callable[[str], Awaitable[str]] = held
        self._paths: dict[str, Place] = dict(worker_settings["adapters"])
        self._kept = set(worker_settings["kept"])
        self._forgotten: set[str] = set()
        # Counts: requests that named an adapter; those whose adapter Ray did not know here; adapters read from files.
        self.asked = self.missed = self.read = 0
        self._supervisor = Supervisor(worker_settings, retry=retry)
        self._supervisor.start()
        try:
            await self._ready()
        except TrimtabError as exc:
            # Ray keeps only its text, and some of trimtab's classes cannot be made from a text.
            raise RuntimeError(f"{type(exc).__name__}: {exc}") from None
        for name in self._paths:
            if name not in self._kept:
                await self._held(name)
        self.missed = 0

    def __del__(self) -> None:
        if hasattr(self, "_supervisor"):
            self._supervisor.stop()

    async def check_health(self) -> None:
        """Raise once the worker is given up; Ray does not need to know of a restart."""
        if self._supervisor.state in ("failed", "stopped"):
            raise RuntimeError(str(ModelFailedError(self._supervisor.failure)))

    async def _ready(self) -> None:
        while self._supervisor.state != "ready":
            if self._supervisor.state in ("failed", "stopped"):
                raise ModelFailedError(self._supervisor.failure)
            await asyncio.sleep(TICK_S)

    # Adapters ---------------------------------------------------------------------------------------------------------

    async def _have(self, name: str) -> str:
        """Called by Ray for an adapter that it does not know here."""
        self.missed += 1
        await self._ready()
        if name not in self._supervisor.numbers.get("adapters", ()):
            self.read += 1
            place = self._paths[name]
            where = {"path": place} if isinstance(place, str) else dict(zip(("path", "root"), place))
            await asyncio.wrap_future(self._supervisor.call("load_adapter", name=name, **where))
        return name

    async def _bring(self, name: str, path: Place) -> None:
        if name in self._kept:
            return
        self._paths[name] = path
        self.asked += 1
        await self._held(name)

    async def load(self, name: str, path: Place) -> Mapping[str, Any] | None:
        """Read an adapter, and return its error in the form of an event; None without an error."""
        try:
            await self._bring(name, path)
        except TrimtabError as exc:
            return plain_error(exc)
        return None

    async def forget(self, name: str) -> None:
        """Drop an adapter that no new request will name, as soon as none is using it."""
        self._forgotten.add(name)
        await self._drop_forgotten()

    async def _drop_forgotten(self) -> None:
        for name in sorted(self._forgotten & set(self._supervisor.numbers.get("adapters", ()))):
            with suppress(TrimtabError):  # in use, or the worker is restarting: at the next call
                await asyncio.wrap_future(self._supervisor.call("unload_adapter", name=name))
                self._paths.pop(name, None)

    # Work -------------------------------------------------------------------------------------------------------------

    async def answer(self, message: Mapping[str, Any], path: Place | None) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a job. message: from `job_to_message`. path: the folder of its adapter, None for the base."""
        job = job_from_message(message)
        try:
            if path is not None and job.adapter is not None:
                await self._bring(job.adapter, path)
            async with aclosing(events_of(self._supervisor, job)) as events:
                async for event in events:
                    yield event_to_message(event)
        except TrimtabError as exc:
            yield event_to_message(Event(job.id, "error", finish="error", error=plain_error(exc)))

    async def numbers(self) -> dict[str, Any]:
        """Return the values of this copy for the page and the metrics."""
        supervisor = self._supervisor
        if supervisor.state == "ready":
            with suppress(TrimtabError):  # it has ended since
                await asyncio.wrap_future(supervisor.call("numbers"))
            await self._drop_forgotten()
        return {
            "state": supervisor.state, "restarts": supervisor.restarts, "failure": supervisor.failure,
            "numbers": supervisor.numbers if supervisor.state == "ready" else {}, "plan": supervisor.plan,
            "in_flight": supervisor.in_flight, "asked": self.asked, "missed": self.missed, "read": self.read,
            "pid": os.getpid(), "worker_pid": supervisor.pid,
        }  # fmt: skip
