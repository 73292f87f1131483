"""POST /api/verify: whether the running plan still gives the answers of another route, as a stream of events.

    {"model": "gemma", "adapter": "medical" or null, "against": "resident"}

The comparison is `trimtab.verify`'s, in processes of its own beside the worker: the plan is loaded a second time, so there
must be room for it, and one comparison runs at a time. The answer is a stream: {"say": ...} as it goes on, one
{"report": ...}, then [DONE]; or an `error` event. A client that leaves ends it. The API process still imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.process import DONE, OOM_HOST, TIMEOUT, Outcome, run_inside
from trimtab.redact import without_paths
from trimtab.serve import wire
from trimtab.serve.faults import raised_error
from trimtab.serve.head_lines import value_of
from trimtab.serve.supervisor import WorkerError

INSIDE = "trimtab.serve.verifying_inside"
TIMEOUT_S = 3600.0


class Served(Protocol):
    """What this needs of the pool."""

    def running(self, model: str | None) -> tuple[str, Mapping[str, Any] | None, Mapping[str, str]]:
        """Return a model's name, its plan as JSON (None before it was first loaded) and adapter -> folder."""


def verify_routes(pool: Served, *, folders: Sequence[str] = ()) -> list[BaseRoute]:
    """Return the route of comparisons. folders: what no answer may name, as `redact.own_folders` gives them."""
    return [Route("/api/verify", _Verifying(pool, folders).verify, methods=["POST"])]


class _Verifying:
    def __init__(self, pool: Served, folders: Sequence[str] = ()) -> None:
        self._pool, self._folders, self._is_busy = pool, folders, False

    async def verify(self, request: Request) -> Response:
        # Only what a page of another site cannot send without asking first.
        if value_of(request.scope["headers"], "content-type").partition(b";")[0].strip().lower() != b"application/json":
            raise HTTPException(415, "The body must be application/json")
        work = self._work(wire.read(wire.VerifyRequest, await request.body()))
        if self._is_busy:
            raise HTTPException(409, "A comparison is running; one at a time", headers={"retry-after": "10"})
        self._is_busy = True
        return EventSourceResponse(self._told(work), sep="\n", ping=15)

    def _work(self, body: wire.VerifyRequest) -> dict[str, Any]:
        """Return what the process is given. Errors: RequestError."""
        name, plan, adapters = self._pool.running(body.model)
        if plan is None:
            raise RequestError("has not been loaded yet, so there is no plan to compare", field="model", value=name)
        if body.adapter is not None and body.adapter not in adapters:
            raise RequestError(
                "no adapter of this name is loaded", field="adapter", value=body.adapter, allowed=sorted(adapters)
            )
        if body.against == "alone" and len(plan["request"]["adapters"]) < 2:
            raise RequestError("needs at least two adapters on the model", field="against", value=body.against)
        chosen = {} if body.adapter is None else {body.adapter: adapters[body.adapter]}
        if body.against == "alone":
            chosen = dict(plan["request"]["adapters"])
        return {"plan": plan, "adapters": chosen, "adapter": body.adapter, "against": body.against}

    async def _told(self, work: Mapping[str, Any]) -> AsyncIterator[dict[str, str]]:
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        left = threading.Event()
        loop = asyncio.get_running_loop()

        def on_event(line: dict[str, Any]) -> None:
            # The process says every half second that it lives: so often, at least, this can end it.
            if left.is_set():
                raise _ClientLeftError
            if line["event"] in ("say", "report"):
                loop.call_soon_threadsafe(events.put_nowait, line)

        task = asyncio.create_task(asyncio.to_thread(_compare, work, on_event))
        try:
            yield {"data": json.dumps({"say": "checking the free memory"})}
            while not (task.done() and events.empty()):
                with suppress(TimeoutError, asyncio.TimeoutError):
                    line = await asyncio.wait_for(events.get(), 0.2)
                    shown = without_paths(line["value"], folders=self._folders)
                    yield {"data": json.dumps({line["event"]: shown})}
            try:
                task.result()
            except TrimtabError as exc:
                yield {"event": "error", "data": json.dumps(raised_error(exc, self._folders)[1])}
                return
            yield {"data": "[DONE]"}
        finally:
            left.set()
            task.add_done_callback(self._free)

    def _free(self, task: asyncio.Task[None]) -> None:
        self._is_busy = False
        if not task.cancelled():
            task.exception()  # seen: nobody is left to be told


class _ClientLeftError(Exception):
    """Raised where the process is watched, to end it."""


def _compare(work: Mapping[str, Any], on_event: Any) -> None:
    """Run a comparison to its end. The first process only looks for room: a device is free of it before the second."""
    for what in ("room", "compare"):
        request = {"module": INSIDE, "request": {**work, "what": what}}
        try:
            outcome = run_inside("trimtab.proof.isolated", request, timeout_s=TIMEOUT_S, on_event=on_event)
        except OSError as exc:  # its files are in the temporary folder
            words = f"the comparison cannot be started ({exc.strerror or type(exc).__name__})"
            raise DeviceError(words, device="host", hint="Free space in the temporary folder (TMPDIR)") from exc
        _check(outcome)


def _check(outcome: Outcome) -> None:
    for line in outcome.lines:
        if line["event"] == "error":
            raise WorkerError(line)
    if outcome.ended == DONE:
        return
    words = {
        OOM_HOST: "was killed, probably for lack of host memory", TIMEOUT: f"took longer than {TIMEOUT_S:.0f} s",
    }  # fmt: skip
    how = words.get(outcome.ended, f"ended with exit code {outcome.exit_code}")
    raise DeviceError(f"the comparison {how}", device="host", hint="`trimtab verify` on the command line says more")
