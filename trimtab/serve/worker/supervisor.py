"""How is a worker started, given jobs, read and restarted after a crash?"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from trimtab.errors import DeviceError, TrimtabError
from trimtab.serve.contract.errors import for_clients
from trimtab.serve.contract.job import ENDS, SPOKEN, Event, Job
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.scheduling.scheduler import MistakeError, StoppingError, error_event
from trimtab.serve.worker import worker
from trimtab.serve.worker.ipc import Life, Patience, event_from_message, exit_code_of, job_to_message

Emit = Callable[[Event], None]
# A dead worker is restarted at once, and then after growing pauses while it keeps dying without an answer.
PAUSES_S = (0.0, 0.5, 2.0, 10.0, 30.0)
PATIENCE = Patience()
# A model that could not be loaded is not tried again for each request.
FAILED_S = 30.0
# Errors of a start that another start would have too.
FINAL = frozenset(kind.__name__ for kind in worker.FOR_OPERATORS)
# The first phase of a worker, before it tells its own.
STARTING = ("starting the worker process", "")
# States with a worker that accepts messages, now or later. "unresponsive": a ready one has become silent (ipc.py). Requests wait
# for it, or for the next one.
LIVES = ("ready", "unresponsive")

log = logging.getLogger("trimtab.serve")


class WorkerDiedError(DeviceError):
    """The worker process ended while it had work; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int | None, reason: str = "") -> None:
        self.exit_code = exit_code
        super().__init__(reason or _how_it_ended(exit_code), device="worker", hint="Send the request again")


class ModelFailedError(DeviceError):
    """The worker could not load its model, or kept dying. `retry_after_s`: whole seconds until a request starts it again."""

    def __init__(self, failure: Mapping[str, Any] | None, retry_after_s: float = FAILED_S) -> None:
        self.retry_after_s, why = math.ceil(retry_after_s), ""
        if failure is not None:
            message, _ = for_clients(failure["class"], failure["message"], failure.get("fields", {}))
            why = f" ({failure['class']}: {message})"
        super().__init__(f"the model cannot be loaded{why}", device="worker")


class WorkerError(TrimtabError):
    """An error from the worker: its class, message and fields unchanged."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        self.error = dict(error)
        super().__init__(str(error["message"]))

    def to_dict(self) -> dict[str, Any]:
        return self.error


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"the worker process was ended by {signal.Signals(-exit_code).name}"
    return f"the worker process ended with exit code {exit_code}"


@dataclass(eq=False)
class Flight:
    """One job. tries: number of workers that received it."""

    job: Job
    emit: Emit
    has_spoken: bool = False
    tries: int = 0

    def message(self) -> dict[str, Any]:
        """Return the message that submits it to a worker."""
        self.tries += 1
        return {"do": "submit", "job": job_to_message(self.job)}


@dataclass(frozen=True, eq=False)
class Call:
    """One operation of the worker between two turns."""

    future: Future[Any]
    what: str
    arguments: Mapping[str, Any]


class Loaded:
    """The adapters that the next worker has to load. roots: for those that clients loaded, the folder that must contain them."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self.adapters, self.roots = dict(adapters), dict[str, str]()

    def called(self, what: str, arguments: Mapping[str, Any]) -> None:
        """Note what a call of the worker has changed."""
        if what == "load_adapter":
            self.adapters[arguments["name"]] = str(arguments["path"])
            if root := arguments.get("root"):
                self.roots[arguments["name"]] = root
        elif what == "unload_adapter":
            self.adapters.pop(arguments["name"], None)
            self.roots.pop(arguments["name"], None)


class InFlight:
    """All methods may be called on any thread; events and results are reported on the caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.flights: dict[str, Flight] = {}
        self.leaving: dict[str, Flight] = {}  # jobs whose clients have left, until the worker has dropped them
        self.calls: dict[int, Call] = {}
        self._next_call = 0

    def add(self, job: Job, emit: Emit) -> Flight:
        """Take a job; `emit` gets its events until "done" or "error"."""
        with self._lock:
            self.flights[job.id] = flight = Flight(job, emit)
            return flight

    def leave(self, job_id: str, *, has_worker: bool) -> bool:
        """Forget a job; return whether a worker has to drop it, whose "dropped" is its only further event."""
        with self._lock:
            flight = self.flights.pop(job_id, None)
            if flight is None or not flight.tries or not has_worker:
                return False
            self.leaving[job_id] = flight
            return True

    def call(self, what: str, arguments: Mapping[str, Any]) -> tuple[Future[Any], dict[str, Any]]:
        """Return a call's future, and the message that requests it."""
        future: Future[Any] = Future()
        with self._lock:
            self._next_call += 1
            self.calls[self._next_call] = Call(future, what, arguments)
            return future, {"do": "call", "id": self._next_call, "what": what, **arguments}

    def messages(self, *, only_new: bool) -> list[dict[str, Any]]:
        """Return the messages that submit the jobs, or only those that no worker has received."""
        with self._lock:
            return [flight.message() for flight in self.flights.values() if not (only_new and flight.tries)]

    def pass_on(self, event: Event) -> None:
        """Give a job its event."""
        with self._lock:
            flight = self.flights.get(event.job_id)
            if event.kind in ENDS and event.job_id in self.leaving:
                # Its client has left: the computed tokens count.
                flight, event = self.leaving.pop(event.job_id), replace(event, kind="dropped")
            if flight is None:
                return
            flight.has_spoken |= event.kind in SPOKEN
            if event.kind in ENDS:
                self.flights.pop(event.job_id, None)
        flight.emit(event)

    def replied(self, message: Mapping[str, Any]) -> Call | None:
        """Return the call that a message answers, which is then to be `answer`ed."""
        with self._lock:
            return self.calls.pop(message["id"], None)

    def take(self, may_stay: Callable[[Flight], bool] = lambda flight: False) -> tuple[list[Flight], list[Call]]:
        """Forget all calls, the clients that have left, and the jobs that may not stay. Returns jobs and calls."""
        with self._lock:
            self.leaving.clear()
            calls, self.calls = self.calls, {}
            gone = [flight for flight in self.flights.values() if not may_stay(flight)]
            self.flights = {name: flight for name, flight in self.flights.items() if flight not in gone}
            return gone, list(calls.values())


def answer(call: Call, message: Mapping[str, Any]) -> None:
    """Give a call its result, unless its caller has left."""
    if not call.future.set_running_or_notify_cancel():
        return
    if "error" in message:
        call.future.set_exception(WorkerError(message["error"]))
    else:
        call.future.set_result(message["value"])


def end_all(flights: Iterable[Flight], calls: Iterable[Call], error: TrimtabError) -> None:
    """End jobs and calls with an error."""
    for call in calls:
        if call.future.set_running_or_notify_cancel():
            call.future.set_exception(error)
    for flight in flights:
        flight.emit(error_event(flight.job.id, error))


async def events_of(
    supervisor: Supervisor, job: Job, *, on_dropped: Callable[[Mapping[str, Any]], None] | None = None,
    wait: Callable[[Awaitable[Event]], Awaitable[Event]] = lambda event: event,
) -> AsyncGenerator[Event, None]:  # fmt: skip
    """Yield the events of a job until it is done. Closing the iterator early cancels the job. Errors: those of `submit` and `wait`.

    on_dropped: called later with the computed tokens of a cancelled job. wait: waits for the next event.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def take(event: Event) -> None:
        if event.kind != "dropped":
            events.put_nowait(event)
        elif on_dropped is not None:
            on_dropped(event.usage)

    def emit(event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended: nothing reads events any more
            loop.call_soon_threadsafe(take, event)

    supervisor.submit(job, emit)
    is_over = False
    try:
        while not is_over:
            event = await wait(events.get())
            is_over = event.kind in ("done", "error")
            yield event
    finally:
        if not is_over:
            supervisor.cancel(job.id)


class Supervisor:
    """Keeps one worker alive. settings: those of `worker.main`. retry: send a job without an event to the next worker, once.

    patience: how long it may be silent. on_change: called (on any thread) when `state` changes. target: the function that the
    process runs. Every job ends in exactly one "done" or "error" event. When the pipe breaks, a running job gets a named error, or
    the next worker if it had sent nothing yet and retries are on. One thread receives from the pipe and calls `emit`, one sends to
    it (ipc.py).
    """

    def __init__(
        self, settings: Mapping[str, Any], *, retry: bool = False, patience: Patience = PATIENCE,
        on_change: Callable[[str], None] | None = None, target: Callable[..., None] = worker.main,
    ) -> None:  # fmt: skip
        self._target = target
        self.settings, self.retry, self.patience, self._on_change = dict(settings), retry, patience, on_change
        self.state, self.restarts, self.loading, self.phase = "stopped", 0, (0, 0), STARTING
        self.failure: Mapping[str, Any] | None = None
        self.numbers: dict[str, Any] = {}
        self.plan: dict[str, Any] | None = None
        self.loaded, self.work = Loaded(settings.get("adapters", {})), InFlight()
        self._lock = threading.RLock()
        self._life: Life | None = None
        self._failures = 0
        self._is_stopping = False

    # Start and end ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker and return at once; `state` says when it is ready. A second call does nothing.

        Errors: OSError or RuntimeError if the system refuses a process or thread; the supervisor is then stopped, and
        can be started again.
        """
        with self._lock:
            if self._life is not None:
                return
            self._is_stopping, self.failure = False, None
            if self.state == "failed":
                self.plan = None  # its files may have been repaired
            self._become("loading")
            try:
                self._start_life()
            except (OSError, RuntimeError):
                self._become("stopped")
                raise

    def _start_life(self) -> None:
        """Start a worker. Errors: OSError or RuntimeError if the system refuses a pipe, process or thread; everything
        is cleaned up."""
        # A restarted worker loads the plan of the first one, independent of the present free memory and loaded
        # adapters.
        adapters, roots = dict(self.loaded.adapters), dict(self.loaded.roots)
        settings = {**self.settings, "adapters": adapters, "roots": roots, "plan": self.plan}
        life, before = Life(self._target, settings, self.patience), self._life
        self._life, self.loading, self.phase = life, (0, 0), STARTING
        try:
            life.begin(self._hear, self._not_sent)
        except RuntimeError:
            self._life = before
            raise

    def drain(self, grace_s: float) -> None:
        """Let running answers end within a time limit, then stop. New jobs are refused from now on."""
        with self._lock:
            self._is_stopping = True
            life = self._life
        if life is not None and self.state in LIVES:
            life.send({"do": "drain"})
            exit_code_of(life.process, grace_s)
        self.stop()

    def stop(self) -> None:
        """Stop the worker now. Running answers end with an error."""
        with self._lock:
            self._is_stopping = True
            life, self._life = self._life, None
        if life is not None:
            life.stop()
        end_all(*self.work.take(), StoppingError())
        self._become("stopped")

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        life = self._life
        return None if life is None else life.process.pid

    def _become(self, state: str) -> None:
        self.state = state
        if self._on_change is not None:
            self._on_change(state)

    # Work -------------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self.work.flights)

    def submit(self, job: Job, emit: Emit) -> None:
        """Submit a job; `emit` gets its events until "done" or "error". The job waits while the worker restarts.

        Errors: StoppingError while the server stops; ModelFailedError after the worker failed permanently.
        """
        with self._lock:
            if self.state == "failed":
                raise ModelFailedError(self.failure)
            if self._is_stopping or self._life is None:
                raise StoppingError
            flight = self.work.add(job, emit)
            if self.state == "ready":
                self._life.send(flight.message())

    def cancel(self, job_id: str) -> None:
        """Forget a job; its only further event is "dropped", if the worker has begun it."""
        with self._lock:
            life = self._life if self.state in LIVES else None
            if self.work.leave(job_id, has_worker=life is not None) and life is not None:
                life.send({"do": "cancel", "id": job_id})

    def call(self, what: str, **arguments: Any) -> Future[Any]:
        """Call an operation of the worker between two turns: "load_adapter", "unload_adapter", "numbers"."""
        with self._lock:
            if self._life is None or self.state != "ready":
                refused: Future[Any] = Future()
                refused.set_exception(DeviceError(f"the worker is {self.state}", device="worker"))
                return refused
            future, message = self.work.call(what, arguments)
            self._life.send(message)
        return future

    # The two threads --------------------------------------------------------------------------------------------------

    def _not_sent(self, message: Mapping[str, Any], exc: Exception) -> None:
        """Answer a message that the worker will never receive."""
        event = error_event("", MistakeError(write_traceback(exc, "internal error while a request is sent")))
        if message["do"] == "submit":
            self.work.pass_on(replace(event, job_id=message["job"]["id"]))
        elif message["do"] == "call":
            self._replied({"id": message["id"], "error": event.error})

    def _hear(self, life: Life) -> None:
        try:
            while True:
                message = life.receive()
                if message is None:
                    self._look(life)
                else:
                    self._take(life, message)
        except (EOFError, OSError):
            exit_code_of(life.process, 5)
        except Exception:
            # Without a receiving thread, every request would wait forever: a new worker and a new thread continue.
            log.exception("internal error while reading messages of its worker")
        if exit_code_of(life.process, 0) is None:
            life.process.kill()
        exit_code = exit_code_of(life.process)
        life.close()
        self._ended(life, exit_code)

    def _look(self, life: Life) -> None:
        """Check a worker that has been silent since the last check."""
        with self._lock:
            is_loading = self.state not in LIVES
            if life is self._life and self.state == "ready" and life.silence.is_unresponsive:
                self._become("unresponsive")
                log.warning("a worker does not respond", extra={"fields": self._named(life)})
        if life.silence.is_over(is_loading=is_loading):
            life.end(f"the worker process did not respond for {life.silence.silent_s:.0f} seconds and was ended")

    def _named(self, life: Life) -> dict[str, Any]:
        return {"model": self.settings.get("name", ""), "worker_pid": life.process.pid}

    def _responds(self, life: Life) -> None:
        """Record that the worker sends messages again, and process the ones received in between."""
        with self._lock:
            if self._life is not life or self.state != "unresponsive":
                return
            self._become("ready")
            log.info("a worker responds again", extra={"fields": self._named(life)})
            for message in self.work.messages(only_new=True):
                life.send(message)

    def _take(self, life: Life, message: dict[str, Any]) -> None:
        life.heard(message)
        self._responds(life)
        match message["say"]:
            case "loading":
                self.loading = (message["done"], message["of"])
            case "phase":
                self.phase = (message["phase"], message["far"])
            case "ready":
                self._on_ready(life, message)
            case "events":
                life.answered |= bool(message["events"])
                for event in message["events"]:
                    self.work.pass_on(event_from_message(event))
            case "reply":
                self._replied(message)
            case "fatal":
                self.failure = message["error"]

    def _on_ready(self, life: Life, message: dict[str, Any]) -> None:
        self.plan = message.pop("plan")
        self.numbers = {name: value for name, value in message.items() if name != "say"}
        with self._lock:
            if self._life is not life:
                return
            self.failure = None
            self._become("ready")
            if self.restarts:
                log.info("a worker is ready again", extra={"fields": {"model": self.settings.get("name", "")}})
            for job_message in self.work.messages(only_new=False):
                life.send(job_message)

    def _replied(self, message: Mapping[str, Any]) -> None:
        call = self.work.replied(message)
        if call is None:
            return
        if "error" not in message:
            with self._lock:
                self.loaded.called(call.what, call.arguments)
                self.numbers = message["value"]
        answer(call, message)

    def _may_stay(self, flight: Flight) -> bool:
        """Whether a job waits for the next worker: one that none has received was not lost, with or without retries."""
        return flight.tries == 0 or (self.retry and not flight.has_spoken and flight.tries == 1)

    def _ended(self, life: Life, exit_code: int | None) -> None:
        with self._lock:
            if self._life is not life:
                return  # `stop` has handled it
            died = WorkerDiedError(exit_code, life.reason)
            lost, calls = self.work.take(self._may_stay)
            self._failures = 0 if life.answered else self._failures + 1
            is_final = self.plan is None or (self.failure or {}).get("class") in FINAL
            cannot_load = self.state == "loading" and is_final
            is_over = self._is_stopping or cannot_load or self._failures >= len(PAUSES_S)
            has_said_why = cannot_load and self.failure is not None
            if is_over:
                self._life = None
                lost += self.work.take()[0]
                self.failure = self.failure or error_event("", died).error
                self._become("stopped" if self._is_stopping else "failed")
            else:
                self.restarts += 1
                self._become("restarting")
        if not self._is_stopping and not has_said_why:
            fields = {**self._named(life), "lost_requests": len(lost)}
            end = "and does not start again" if is_over else "and starts again"
            log.error("%s, %s", life.reason or _how_it_ended(exit_code), end, extra={"fields": fields})
        error: TrimtabError = died
        if self._is_stopping:
            error = died if exit_code else StoppingError()
        elif is_over:
            error = ModelFailedError(self.failure)
        end_all(lost, calls, error)
        if not is_over:
            self._start_again(life)

    def _start_again(self, life: Life) -> None:
        """Start a worker instead of one that ended. If the system refuses now, it may succeed later: requests wait."""
        for pause_s in chain(PAUSES_S[self._failures :], repeat(PAUSES_S[-1])):
            time.sleep(pause_s)
            with self._lock:
                # The supervisor may have been stopped, and even started again, during the pause.
                if self._life is not life:
                    return
                try:
                    self._start_life()
                except (OSError, RuntimeError) as exc:
                    log.error("a worker cannot be started, which is tried again: %s", exc)
                else:
                    return
