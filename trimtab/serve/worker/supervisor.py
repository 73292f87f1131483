"""The API process's side of a worker: it starts the worker, sends jobs, reads events, and restarts it after a crash.

Every job ends in exactly one "done" or "error" event, also if the worker ends. When the pipe breaks, each running job
gets a named error at once, or is given to the next worker if it had sent nothing yet and retries are on.
Threads: one receives from the pipe, one sends to it; callers may be on any thread, and the receiving thread calls
`emit`.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.process.runner import activity_of
from trimtab.serve.contract.client_words import for_clients
from trimtab.serve.contract.job import ENDS, SPOKEN, Event, Job
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.scheduling.scheduler import MistakeError, StoppingError, error_event
from trimtab.serve.worker import worker
from trimtab.serve.worker.ipc import Channel, Patience, Silence, event_from_message, frames_of, job_to_message

Emit = Callable[[Event], None]
# A dead worker is restarted at once, and then after growing pauses while it keeps dying without an answer.
PAUSES_S = (0.0, 0.5, 2.0, 10.0, 30.0)
# Seconds between two checks for the exit code of an ended process, and the time limit.
EXIT_CODE_LOOK_S, EXIT_CODE_WAIT_S = 0.001, 5.0
PATIENCE = Patience()
# "unresponsive": a ready worker has become silent (ipc.py). Requests wait for it, or for the next one.
# The first phase of a worker, before it tells its own.
STARTING = ("starting the worker process", "")
STATES = ("stopped", "loading", "ready", "unresponsive", "restarting", "failed")
# States with a worker that accepts messages, now or later.
LIVES = ("ready", "unresponsive")

log = logging.getLogger("trimtab.serve")


class WorkerDiedError(DeviceError):
    """The worker process ended while it had work; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int | None, reason: str = "") -> None:
        self.exit_code = exit_code
        super().__init__(reason or _how_it_ended(exit_code), device="worker", hint="Send the request again")


class ModelFailedError(DeviceError):
    """The worker could not load its model, or kept dying; the operator has to act."""

    def __init__(self, failure: Mapping[str, Any] | None) -> None:
        why = ""
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


def exit_code_of(process: Any, timeout_s: float | None = None) -> int | None:
    """Wait for the end of a process and return its exit code, or None while it runs.

    Any thread may call it. `Process.join` and `Process.exitcode` are not enough: the thread that gets the exit status
    from the operating system stores it slightly later, and until then the process counts as running for all other
    threads. Each start of another process reads the status of all of them (multiprocessing/process.py, _cleanup).
    """
    if not multiprocessing.connection.wait([process.sentinel], timeout_s):
        return None
    deadline_s = time.monotonic() + EXIT_CODE_WAIT_S
    while (exit_code := process.exitcode) is None and time.monotonic() < deadline_s:
        time.sleep(EXIT_CODE_LOOK_S)
    return exit_code


@dataclass(eq=False)
class _Flight:
    """One job. tries: number of workers that received it."""

    job: Job
    emit: Emit
    has_spoken: bool = False
    tries: int = 0

    def message(self) -> dict[str, Any]:
        """Return the message that submits it to a worker."""
        self.tries += 1
        return {"do": "submit", "job": job_to_message(self.job)}


@dataclass(eq=False)
class _Call:
    future: Future[Any]
    what: str
    arguments: Mapping[str, Any]


@dataclass(eq=False)
class _Life:
    """One worker process from its start to its end."""

    process: Any
    channel: Channel
    silence: Silence
    outbox: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    looked: float = field(default_factory=time.monotonic)
    answered: bool = False
    reason: str = ""  # the reason if the supervisor ended it


class Supervisor:
    """Keeps one worker alive. settings: those of `worker.main`. retry: send a job without an event to the next worker, once.

    patience: how long it may be silent. on_change: called (on any thread) when `state` changes. target: the function that the
    process runs.
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
        self._adapters: dict[str, str] = dict(settings.get("adapters", {}))
        # For adapters that clients loaded: the folder that must contain them.
        self._roots: dict[str, str] = {}
        self._lock = threading.RLock()
        self._flights: dict[str, _Flight] = {}
        self._leaving: dict[str, _Flight] = {}  # jobs whose clients have left, until the worker has dropped them
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._life: _Life | None = None
        self._failures = 0
        self._is_stopping = False
        self._ready = threading.Event()

    # Start and end ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker and return at once; `wait_ready` waits for it. A second call does nothing.

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
        is cleaned up.
        """
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        # A restarted worker loads the plan of the first one, independent of the present free memory and loaded
        # adapters.
        settings = {**self.settings, "adapters": dict(self._adapters), "roots": dict(self._roots), "plan": self.plan}
        process = spawn.Process(target=self._target, args=(there, settings), name="trimtab-worker", daemon=True)
        process.start()
        there.close()
        silence = Silence(self.patience, partial(activity_of, process.pid))
        life, before = _Life(process, Channel(here), silence), self._life
        self._life, self.loading, self.phase = life, (0, 0), STARTING
        try:
            threading.Thread(target=self._send, args=(life,), name="trimtab-send", daemon=True).start()
            threading.Thread(target=self._hear, args=(life,), name="trimtab-hear", daemon=True).start()
        except RuntimeError:
            self._life = before
            process.kill()
            life.outbox.put(None)
            life.channel.close()
            raise

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the worker answers. Errors: WorkerError with its failure; RequestError at the time limit."""
        if not self._ready.wait(timeout_s):
            raise RequestError("the model is not loaded yet", field="timeout", value=timeout_s)
        if self.state == "failed":
            raise WorkerError(self.failure or {"class": "DeviceError", "message": "the worker failed", "fields": {}})

    def drain(self, grace_s: float) -> None:
        """Let running answers end within a time limit, then stop. New jobs are refused from now on."""
        with self._lock:
            self._is_stopping = True
            life = self._life
        if life is not None and self.state in LIVES:
            life.outbox.put({"do": "drain"})
            exit_code_of(life.process, grace_s)
        self.stop()

    def stop(self) -> None:
        """Stop the worker now. Running answers end with an error."""
        with self._lock:
            self._is_stopping = True
            life, self._life = self._life, None
            self._ready.clear()
        if life is not None:
            life.process.kill()  # it has nothing to clean up, and ignores SIGTERM
            exit_code_of(life.process)
            life.outbox.put(None)
        self._end_all(StoppingError())
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
        return len(self._flights)

    def submit(self, job: Job, emit: Emit) -> None:
        """Submit a job; `emit` gets its events until "done" or "error". The job waits while the worker restarts.

        Errors: StoppingError while the server stops; ModelFailedError after the worker failed permanently.
        """
        with self._lock:
            if self.state == "failed":
                raise ModelFailedError(self.failure)
            if self._is_stopping or self._life is None:
                raise StoppingError
            self._flights[job.id] = flight = _Flight(job, emit)
            if self.state == "ready":
                self._life.outbox.put(flight.message())

    def cancel(self, job_id: str) -> None:
        """Forget a job; its only further event is "dropped", if the worker has begun it."""
        with self._lock:
            flight = self._flights.pop(job_id, None)
            if flight is not None and flight.tries and self._life is not None and self.state in LIVES:
                self._leaving[job_id] = flight
                self._life.outbox.put({"do": "cancel", "id": job_id})

    def call(self, what: str, **arguments: Any) -> Future[Any]:
        """Call an operation of the worker between two turns: "load_adapter", "unload_adapter", "numbers"."""
        future: Future[Any] = Future()
        with self._lock:
            if self._life is None or self.state != "ready":
                future.set_exception(DeviceError(f"the worker is {self.state}", device="worker"))
                return future
            self._next_call += 1
            self._calls[self._next_call] = _Call(future, what, arguments)
            self._life.outbox.put({"do": "call", "id": self._next_call, "what": what, **arguments})
        return future

    def _remember(self, call: _Call) -> None:
        """Store which adapters the next worker has to load."""
        if call.what == "load_adapter":
            self._adapters[call.arguments["name"]] = str(call.arguments["path"])
            if root := call.arguments.get("root"):
                self._roots[call.arguments["name"]] = root
        elif call.what == "unload_adapter":
            self._adapters.pop(call.arguments["name"], None)
            self._roots.pop(call.arguments["name"], None)

    # The two threads --------------------------------------------------------------------------------------------------

    def _send(self, life: _Life) -> None:
        while (message := life.outbox.get()) is not None:
            try:
                frames = frames_of(message)
            except Exception as exc:  # this message cannot be written, the next one can
                self._not_sent(message, MistakeError(write_traceback(exc, "internal error while a request is sent")))
                continue
            try:
                life.channel.send_frames(frames)
            except (OSError, ValueError):
                return  # the receiving thread gets the same error and reports it

    def _not_sent(self, message: Mapping[str, Any], error: TrimtabError) -> None:
        """Answer messages that the worker will never receive."""
        event = error_event("", error)
        if message["do"] == "submit":
            self._pass_on(replace(event, job_id=message["job"]["id"]))
        elif message["do"] == "call":
            self._replied({"id": message["id"], "error": event.error})

    def _hear(self, life: _Life) -> None:
        try:
            while True:
                if life.channel.poll(self.patience.look_s):
                    life.looked = time.monotonic()
                    self._take(life, life.channel.receive())
                else:
                    self._look(life)
        except (EOFError, OSError):
            exit_code_of(life.process, 5)
        except Exception:
            # Without a receiving thread, every request would wait forever: a new worker and a new thread continue.
            log.exception("internal error while reading messages of its worker")
        if exit_code_of(life.process, 0) is None:
            life.process.kill()
        exit_code = exit_code_of(life.process)
        life.outbox.put(None)
        life.channel.close()
        self._ended(life, exit_code)

    def _look(self, life: _Life) -> None:
        """Check a worker that has been silent since the last check."""
        now = time.monotonic()
        life.silence.looked(now - life.looked)
        life.looked = now
        with self._lock:
            is_loading = self.state not in LIVES
            if life is self._life and self.state == "ready" and life.silence.is_unresponsive:
                self._become("unresponsive")
                log.warning("a worker does not respond", extra={"fields": self._named(life)})
        if life.silence.is_over(is_loading=is_loading):
            life.reason = f"the worker process did not respond for {life.silence.silent_s:.0f} seconds and was ended"
            life.process.kill()

    def _named(self, life: _Life) -> dict[str, Any]:
        return {"model": self.settings.get("name", ""), "worker_pid": life.process.pid}

    def _responds(self, life: _Life) -> None:
        """Record that the worker sends messages again, and process the ones received in between."""
        with self._lock:
            if self._life is not life or self.state != "unresponsive":
                return
            self._become("ready")
            log.info("a worker responds again", extra={"fields": self._named(life)})
            for flight in self._flights.values():
                if not flight.tries:
                    life.outbox.put(flight.message())

    def _take(self, life: _Life, message: dict[str, Any]) -> None:
        if message["say"] == "busy":
            life.silence.announced(message["most_s"])
        else:
            life.silence.heard()
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
                    self._pass_on(event_from_message(event))
            case "reply":
                self._replied(message)
            case "fatal":
                self.failure = message["error"]

    def _on_ready(self, life: _Life, message: dict[str, Any]) -> None:
        self.plan = message.pop("plan")
        self.numbers = {name: value for name, value in message.items() if name != "say"}
        with self._lock:
            if self._life is not life:
                return
            self.failure = None
            self._become("ready")
            if self.restarts:
                log.info("a worker is ready again", extra={"fields": {"model": self.settings.get("name", "")}})
            for flight in self._flights.values():
                life.outbox.put(flight.message())
        self._ready.set()

    def _pass_on(self, event: Event) -> None:
        with self._lock:
            flight = self._flights.get(event.job_id)
            if event.kind in ENDS and event.job_id in self._leaving:
                # Its client has left: the computed tokens count.
                flight, event = self._leaving.pop(event.job_id), replace(event, kind="dropped")
            if flight is None:
                return
            flight.has_spoken |= event.kind in SPOKEN
            if event.kind in ENDS:
                self._flights.pop(event.job_id, None)
        flight.emit(event)

    def _replied(self, message: dict[str, Any]) -> None:
        with self._lock:
            call = self._calls.pop(message["id"], None)
            if call is not None and "error" not in message:
                self._remember(call)
                self.numbers = message["value"]
        if call is None or not call.future.set_running_or_notify_cancel():
            return
        if "error" in message:
            call.future.set_exception(WorkerError(message["error"]))
        else:
            call.future.set_result(message["value"])

    def _ended(self, life: _Life, exit_code: int | None) -> None:
        with self._lock:
            if self._life is not life:
                return  # `stop` has handled it
            self._ready.clear()
            self._leaving.clear()
            calls, self._calls = self._calls, {}
            died = WorkerDiedError(exit_code, life.reason)
            # Jobs that no worker has received were not lost with this one, with or without retries.
            kept = {
                name: flight for name, flight in self._flights.items()
                if flight.tries == 0 or (self.retry and not flight.has_spoken and flight.tries == 1)
            }  # fmt: skip
            lost = [flight for name, flight in self._flights.items() if name not in kept]
            self._flights = kept
            self._failures = 0 if life.answered else self._failures + 1
            never_ready = self.state == "loading" and self.plan is None
            is_over = self._is_stopping or never_ready or self._failures >= len(PAUSES_S)
            has_said_why = never_ready and self.failure is not None
            if is_over:
                self._life = None
                lost += kept.values()
                self._flights = {}
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
        for call in calls.values():
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
        for flight in lost:
            flight.emit(error_event(flight.job.id, error))
        if is_over:
            self._ready.set()
            return
        self._start_again(life)

    def _start_again(self, life: _Life) -> None:
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

    def _end_all(self, error: TrimtabError) -> None:
        with self._lock:
            self._leaving.clear()
            flights, self._flights = self._flights, {}
            calls, self._calls = self._calls, {}
        for call in calls.values():
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
        for flight in flights.values():
            flight.emit(error_event(flight.job.id, error))
