"""How does the single server's app answer inside Ray Serve, with copies of a model in place of workers?"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sse_starlette.sse import AppStatus

from trimtab.adapter_names import UNLOADED, is_mix
from trimtab.errors import RequestError, TrimtabError
from trimtab.serve.contract.errors import UnknownModelError
from trimtab.serve.contract.job import SPOKEN, Job
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.http.app import make_app
from trimtab.serve.http.page import page_routes
from trimtab.serve.observe import tracing
from trimtab.serve.observe.metrics import Metrics
from trimtab.serve.pool import Pool
from trimtab.serve.ray.config import read_arguments
from trimtab.serve.ray.replica import Place
from trimtab.serve.scheduling.scheduler import MistakeError, StoppingError, error_event
from trimtab.serve.worker.ipc import event_from_message, job_to_message
from trimtab.serve.worker.supervisor import Emit, ModelFailedError, WorkerDiedError, WorkerError

POLL_S = 2.0
ASK_S = 10.0
TICK_S = 0.05
# Metrics of a worker that are summed over copies; of the others the largest is shown.
ADDED = (
    "rows", "running", "waiting", "queue_limit", "counts", "swaps", "reloads", "kv_bytes", "kv_tokens", "kv_reserved_tokens",
)  # fmt: skip
NAMES = ("adapters", "resident", "kept", "lost")

log = logging.getLogger("trimtab.serve")


class Ingress:
    """The ingress of the application. arguments: from `config.arguments_of`. handles: one per model, in their order. There is one:
    it knows the adapters that clients loaded, and forgets them if Ray restarts it."""

    def __init__(self, arguments: Mapping[str, Any], *handles: Any) -> None:
        # sse-starlette would cut streams as soon as this process gets a signal.
        AppStatus.disable_automatic_graceful_drain()
        models, settings = read_arguments(arguments)
        most = arguments["replicas"][1]
        left = iter(handles)

        def make(worker_settings: Mapping[str, Any], *, retry: bool, on_change: Callable[[str], None]) -> Any:
            return Replicas(next(left), worker_settings, retry=retry, on_change=on_change)

        # The pool's queue begins when every row of every copy is in use.
        wide = [replace(model, copies=most) for model in models]
        self._pool = Pool(wide, settings, together=len(models), make=make)
        extra = page_routes(settings)
        spans = tracing.from_environment() if settings.otel else None
        self._app = make_app(self._pool, settings, Metrics(), extra=extra, folders=self._pool.folders, spans=spans)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the app; Ray calls this once, and runs the app's start and end."""
        return self._app


class Replicas:
    """All copies of one model, with the interface of a supervisor.

    handle: Ray's handle of the deployment of `replica.Replica`. retry: a job is sent to another copy, once, if its copy was
    lost before the first event. All methods but `stop` and `drain` run on one loop.
    """

    def __init__(
        self, handle: Any, worker_settings: Mapping[str, Any], *, retry: bool, on_change: Callable[[str], None] | None = None
    ) -> None:
        self._handle, self._retry, self._on_change = handle, retry, on_change
        self._kept = set(worker_settings["kept"])
        # Client's name of an adapter -> the copies' name, and its folder. A reused name is a new adapter.
        self._adapters: dict[str, tuple[str, Place]] = {name: (name, path) for name, path in worker_settings["adapters"].items()}
        self.state, self.restarts, self.loading = "stopped", 0, (0, 0)
        self.failure: Mapping[str, Any] | None = None
        self.numbers: dict[str, Any] = {}
        self.plan: dict[str, Any] | None = None
        self.pid: int | None = None
        self._restarts: dict[int, int] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._lock = threading.Lock()

    # Start and end ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the copies; Ray starts and stops them."""
        if self._keeper is None:
            self._loop, self._is_stopping = asyncio.get_running_loop(), False
            self._become("loading")
            self._keeper = self._loop.create_task(self._keep())

    def drain(self, grace_s: float) -> None:
        """Let running answers end within a time limit, then stop. Called from any thread but the loop's."""
        self._is_stopping = True
        end = time.monotonic() + grace_s
        while self._running and time.monotonic() < end:
            time.sleep(TICK_S)
        self.stop()

    def stop(self) -> None:
        """End every running job with the error that the server stops."""
        self._is_stopping = True
        with suppress(RuntimeError):  # the loop has ended: nothing waits any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end)
        self._become("stopped")

    def _end(self) -> None:
        keeper, self._keeper = self._keeper, None
        for task in (keeper, *self._running.values()):
            if task is not None:
                task.cancel()

    def _become(self, state: str) -> None:
        with self._lock:
            is_new, self.state = self.state != state, state
        if is_new and self._on_change is not None:
            self._on_change(state)

    async def _keep(self) -> None:
        while True:
            answers: Sequence[Any] = ()
            # No request is answered while no copy runs, or while Ray replaces it.
            with suppress(Exception):
                call = self._handle.broadcast("numbers")
                answers = await call.results_async(timeout_s=ASK_S, return_exceptions=True)
            try:
                if not self._is_stopping:
                    self._see([one for one in answers if isinstance(one, Mapping)])
            except Exception:
                log.exception("internal error while reading messages of its copies")
            await asyncio.sleep(POLL_S)

    def _see(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Record the state of every copy. numbers: one result of `Replica.numbers` per copy."""
        ready = [one for one in numbers if one["state"] == "ready"]
        self._restarts |= {one["pid"]: one["restarts"] for one in numbers}
        self.restarts = sum(self._restarts.values())
        if ready:
            names = {key: name for name, (key, _) in self._adapters.items()}
            self.numbers, self.plan = summed([one["numbers"] for one in ready], names), ready[0]["plan"]
        # Copies are listed once they are loaded, so a copy that is not ready was ready before.
        self._become("ready" if ready else "loading" if self.plan is None else "restarting")

    # Work -------------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def submit(self, job: Job, emit: Emit) -> None:
        """Submit a job; `emit` gets its events until "done" or "error". Errors: StoppingError."""
        if self._is_stopping or self._loop is None:
            raise StoppingError
        task = self._loop.create_task(self._answer(job, emit))
        self._running[job.id] = task

    def cancel(self, job_id: str) -> None:
        """Forget a job: it receives no more events, and its copy stops answering it."""
        task = self._running.pop(job_id, None)
        if task is not None:
            task.cancel()

    async def _answer(self, job: Job, emit: Emit) -> None:
        """Emit the events of a job: exactly one "done" or "error" at the end, unless the job was cancelled."""
        error: TrimtabError | None = None
        try:
            for _ in range(2 if self._retry else 1):
                error, has_spoken = await self._emit_all(job, emit)
                if error is None or has_spoken or not isinstance(error, WorkerDiedError):
                    return
        finally:
            # `cancel` removes it first; any other cancellation is an end like others.
            if self._running.pop(job.id, None) is not None:
                ended = StoppingError() if self._is_stopping else WorkerDiedError(None, "the copy of the model was lost")
                emit(error_event(job.id, error or ended))

    async def _emit_all(self, job: Job, emit: Emit) -> tuple[TrimtabError | None, bool]:
        """Emit the events of one copy. Returns its error (None if the job has ended) and whether text was emitted."""
        stream, has_spoken = None, False
        try:
            stream = self._stream(job)
            async for message in stream:
                event = event_from_message(message)
                has_spoken |= event.kind in SPOKEN
                if event.kind not in ("done", "error"):
                    emit(event)
                elif self._running.pop(job.id, None) is not None:
                    stream = None
                    emit(event)
                    return None, has_spoken
            return WorkerDiedError(None, "the copy of the model ended its answer too early"), has_spoken
        except Exception as exc:
            return lost(exc), has_spoken
        finally:
            if stream is not None:
                stream.cancel()

    def _stream(self, job: Job) -> Any:
        handle, path = self._handle, None  # type: tuple[Any, Place | None]
        if job.adapter is not None:
            if is_mix(job.adapter):
                raise RequestError("not supported: a mix of adapters with --ray", field="adapter", value=job.adapter)
            if job.adapter not in self._adapters:  # unloaded after its name was resolved
                raise UnknownModelError(job.adapter, list(self._adapters))
            key, path = self._adapters[job.adapter]
            # Pinned adapters are on every copy, so any copy can answer.
            handle = handle if job.adapter in self._kept else handle.options(multiplexed_model_id=key)
            job = replace(job, adapter=key)
        return handle.options(stream=True).answer.remote(job_to_message(job), path)

    # Calls ------------------------------------------------------------------------------------------------------------

    def call(self, what: str, **arguments: Any) -> Future[Any]:
        """Run "load_adapter" or "unload_adapter" on the copies. The result is of the last poll; "numbers" does not ask them."""
        if self._loop is None:
            future: Future[Any] = Future()
            future.set_exception(StoppingError())
            return future
        return asyncio.run_coroutine_threadsafe(self._call(what, arguments), self._loop)

    async def _call(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if what == "load_adapter":
            path, root = str(arguments["path"]), arguments.get("root")
            await self._load(arguments["name"], path if root is None else (path, str(root)))
        elif what == "unload_adapter":
            await self._unload(arguments["name"])
        return self.numbers

    async def _load(self, name: str, path: Place) -> None:
        """One copy reads and checks an adapter; the others read it at its first request."""
        key = f"{name[:50]}.{secrets.token_hex(4)}"
        try:
            error = await self._handle.options(multiplexed_model_id=key).load.remote(key, path)
        except Exception as exc:
            raise lost(exc) from exc
        if error is not None:
            raise WorkerError(error)
        self._adapters[name] = (key, path)

    async def _unload(self, name: str) -> None:
        """Unload an adapter: running requests finish with it, and each copy drops it after its last one."""
        key, _ = self._adapters.pop(name)
        with suppress(Exception):  # an unreachable copy keeps some memory until it ends, but no request names the adapter
            await self._handle.broadcast("forget", key).results_async(timeout_s=ASK_S, return_exceptions=True)


def lost(exc: Exception) -> TrimtabError:
    """Return the error that a client receives for an exception of Ray."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

    if isinstance(exc, TrimtabError):
        return exc
    if isinstance(exc, DeploymentUnavailableError):
        return ModelFailedError(None)
    if isinstance(exc, (RayError, RayServeException)) and not isinstance(exc, RayTaskError):
        return WorkerDiedError(None, f"the copy of the model was lost ({type(exc).__name__})")
    return MistakeError(write_traceback(exc, "internal error while a copy answered"))


def summed(per_copy: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of several copies as one set: counts are added; of memory and times the largest is taken.

    names: a copy's name of an adapter -> the client's name. Adapters without a client's name are omitted, their answers counted.
    """
    total: dict[str, Any] = {}
    for one in per_copy:
        for name, value in one.items():
            total[name] = value if name not in total else _joined(total[name], value, adds=name in ADDED)
    for name in NAMES:
        if name in total:
            total[name] = sorted({names[key] for key in total[name] if key in names})
    if "by_adapter" in total.get("counts", {}):
        by_adapter: Counter[str] = Counter()
        for key, count in total["counts"]["by_adapter"].items():
            by_adapter[names.get(key, UNLOADED) if key else ""] += count
        total["counts"] = {**total["counts"], "by_adapter": dict(by_adapter)}
    return total


def _joined(first: Any, second: Any, *, adds: bool) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, Mapping):
        added = {key: _joined(first.get(key), value, adds=adds) for key, value in second.items()}
        return {**first, **added}
    if isinstance(first, list):
        return [*first, *second]
    if isinstance(first, (int, float)):
        return first + second if adds else max(first, second)
    return first
