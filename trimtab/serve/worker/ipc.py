"""Messages between the API process and the worker, one JSON object each, with raw bytes; and whether the worker makes progress.

A message is a JSON frame {"message": ..., "blobs": [path, ...]} followed by one frame per blob. A path gives the
position of those bytes in the message, so that text from a client cannot be confused with them. Never pickle.

    Pulse     the worker's side: the expected time of a piece of work, announced before it begins if it is long
    Silence   the API process's side: since when nothing was received, whether that is too long, and when to end it
    Life      the API process's side: the worker process from its start to its end, and what waits to be sent to it

The loop that makes tokens sends beats, not a separate thread, so a loop that hangs is silent. One call can be long
without a fault, such as a prompt chunk on a slow CPU. The worker knows how long work of a kind has taken per unit, and
announces a bound before it begins if the bound is more than `LONG_S` or unknown. A worker that is silent without a
bound, or beyond it, is not ready.

It is ended later, and only if it does nothing: the CPU time of a process that hangs or was stopped does not grow, while
that of one on a swapping machine does, or it reads. Activity is accepted up to `most_s`, since a loop can also run
without end. Silence is counted in checks: if checks are late, this process was stopped or the machine slept, and
perhaps the worker too.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from trimtab.process.runner import Activity, activity_of
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Event, Job, Token


class Channel:
    """One end of the pipe. `send` may be called from several threads; `receive` from one. Errors: EOFError, OSError
    when the other end is closed.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        self.send_frames(frames_of(message))

    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Send the result of `frames_of`."""
        with self._lock:
            for frame in frames:
                self._connection.send_bytes(frame)

    def receive(self) -> dict[str, Any]:
        head = json.loads(self._connection.recv_bytes())
        message: dict[str, Any] = head["message"]
        for path in head["blobs"]:
            target: Any = message
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = self._connection.recv_bytes()
        return message

    def poll(self, timeout_s: float | None) -> bool:
        """Whether a message is waiting, within a time limit (None: no limit)."""
        return self._connection.poll(timeout_s)

    def close(self) -> None:
        self._connection.close()


# How often the receiving thread checks whether its channel was closed.
LOOK_S = 0.2


class Inbox:
    """The messages of a channel, received on a separate thread: images of a request take longer through a pipe than a
    decode step. `poll`, `receive` and `rest` are called from one thread, and no other code receives from the channel
    after `start`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._came = channel, threading.Condition()
        self._messages: deque[dict[str, Any] | Exception] = deque()
        self._is_receiving = False

    def start(self) -> None:
        """Start the thread; it ends with the channel."""
        threading.Thread(target=self._run, name="trimtab-receive", daemon=True).start()

    def _run(self) -> None:
        message: dict[str, Any] | Exception = {}
        while not isinstance(message, Exception):
            try:
                while not self._channel.poll(LOOK_S):  # a wait without a limit would keep a closed pipe open
                    pass
                self._is_receiving = True  # before anything is read from the pipe that `rest` checks
                message = self._channel.receive()
            except Exception as exc:  # raised in `receive`
                message = exc
            with self._came:
                self._messages.append(message)
                self._is_receiving = False
                self._came.notify()

    def poll(self, timeout_s: float) -> bool:
        """Whether a whole message has arrived, within a time limit."""
        with self._came:
            return bool(self._messages or (timeout_s and self._came.wait_for(lambda: self._messages, timeout_s)))

    def receive(self) -> dict[str, Any]:
        """Return the next message, after `poll` has returned True. Errors: as `Channel.receive`, again at every call."""
        with self._came:
            message = self._messages[0]
            if isinstance(message, Exception):
                raise message
            return self._messages.popleft()  # type: ignore[return-value]

    def rest(self) -> Iterator[dict[str, Any]]:
        """Yield all messages sent until now, including those in transit; nothing after the channel is closed."""
        while True:
            is_sent = False
            with suppress(OSError):
                is_sent = self._channel.poll(0)
            with self._came:
                if not (is_sent or self._is_receiving or self._messages):
                    return
                self._came.wait_for(lambda: self._messages)
                if isinstance(self._messages[0], Exception):
                    return
            yield self.receive()


_PLAIN = frozenset({str, int, float, bool, type(None)})


def frames_of(message: Mapping[str, Any]) -> list[bytes]:
    """Return the frames of a message. Errors: ValueError and others for values that JSON cannot represent."""
    blobs: list[bytes] = []
    paths: list[list[str | int]] = []
    plain = _without_blobs(message, [], blobs, paths)
    return [json.dumps({"message": plain, "blobs": paths}, separators=(",", ":"), default=str).encode(), *blobs]


def _without_blobs(value: Any, path: list[str | int], blobs: list[bytes], paths: list[list[str | int]]) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        blobs.append(bytes(value))
        paths.append(path)
        return None
    if isinstance(value, Mapping):
        return {str(name): _without_blobs(item, [*path, str(name)], blobs, paths) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        if all(type(item) in _PLAIN for item in value):  # many tokens or numbers
            return value
        return [_without_blobs(item, [*path, place], blobs, paths) for place, item in enumerate(value)]
    return value


def job_to_message(job: Job) -> dict[str, Any]:
    """Return a job as plain values; bytes stay bytes."""
    values = {item.name: getattr(job, item.name) for item in fields(Job)}
    return values | {"request": asdict(job.request)}


def job_from_message(message: Mapping[str, Any]) -> Job:
    """Return the job that `job_to_message` wrote."""
    request = dict(message["request"])
    for name in ("stop", "stop_token_ids"):
        request[name] = tuple(request.get(name, ()))
    request["logit_bias"] = tuple((token, bias) for token, bias in request.get("logit_bias", ()))
    return Job(**{**message, "request": GenerateRequest(**request), "tools": tuple(message.get("tools", ()))})


def event_to_message(event: Event) -> dict[str, Any]:
    """Return an event as plain values, without empty fields."""
    values = {item.name: getattr(event, item.name) for item in fields(Event)}
    values["tokens"] = [[token.token_id, token.text, token.logprob, token.top, token.offset] for token in event.tokens]
    return {name: value for name, value in values.items() if value}


def event_from_message(message: Mapping[str, Any]) -> Event:
    """Return the event that `event_to_message` wrote."""
    tokens = tuple(
        Token(token_id, text, logprob, tuple((int(i), str(t), float(p)) for i, t, p in top), offset)
        for token_id, text, logprob, top, offset in message.get("tokens", ())
    )
    return Event(**{**message, "tokens": tokens})


# Does the worker still make progress? ---------------------------------------------------------------------------------


# Seconds between two beats of a worker without other messages.
BEAT_S = 0.5
# Expected seconds from which work is announced, and its bound: a multiple of the expected time, within these seconds.
LONG_S, MARGIN, LEAST_S, MOST_S = 1.0, 10.0, 30.0, 900.0
# The bound of work of a kind that has not run yet: a first time may compile or capture.
FIRST_S = 300.0
# The longest time per unit of a kind decays with each shorter one.
FADE = 0.9


class Pulse:
    """The announcements of a worker's loop. send: to the API process. now: seconds."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self.send, self.now = send, now
        self.unit_s: dict[str, float] = {}

    def work(self, kind: str, units: float = 1.0) -> _Work:
        """Return a context for one unit of work. units: the quantity to which its time is proportional, such as tokens."""
        return _Work(self, kind, max(units, 1.0))


class _Work:
    __slots__ = ("_kind", "_pulse", "_start", "_units")

    def __init__(self, pulse: Pulse, kind: str, units: float) -> None:
        self._pulse, self._kind, self._units = pulse, kind, units

    def __enter__(self) -> None:
        pulse = self._pulse
        unit_s = pulse.unit_s.get(self._kind)
        if unit_s is None or unit_s * self._units > LONG_S:
            most_s = FIRST_S if unit_s is None else min(max(MARGIN * unit_s * self._units, LEAST_S), MOST_S)
            pulse.send({"say": "busy", "what": self._kind, "most_s": most_s})
        self._start = pulse.now()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if exc is None:
            unit_s = self._pulse.unit_s
            took_s = (self._pulse.now() - self._start) / self._units
            unit_s[self._kind] = max(took_s, FADE * unit_s.get(self._kind, 0.0))


@dataclass(frozen=True)
class Patience:
    """Seconds of silence.

    unresponsive_s: until a worker is not ready. restart_s: until an inactive one is ended. most_s: until any silent one
    is ended. loading_s: the same while loading: a worker reports after every block, but starting Python, planning and
    reading one block may be slow.
    """

    unresponsive_s: float = 4.0
    restart_s: float = 25.0
    most_s: float = 300.0
    loading_s: float = 900.0

    @property
    def look_s(self) -> float:
        """Seconds between two checks."""
        return self.unresponsive_s / 8


class Silence:
    """The silence of one worker. patience: its limits. work: the worker's activity since its start, None if it is
    stopped.
    """

    def __init__(self, patience: Patience, work: Callable[[], Activity | None]) -> None:
        self.patience, self._work = patience, work
        self.silent_s = 0.0
        self._bound_s = 0.0  # announced work may take until then
        self._before: Activity | None = None
        self._due_s = self._window_s = 0.0

    def heard(self) -> None:
        """Record a beat, or any other message except `announced` ones."""
        self.silent_s = self._bound_s = 0.0

    def announced(self, most_s: float) -> None:
        """Record work that may take this long. An outer unit of work may have announced more."""
        self._bound_s = max(self._bound_s - self.silent_s, most_s)
        self.silent_s = 0.0

    def looked(self, seconds: float) -> None:
        """Record a check without a new message, this many seconds after the last one."""
        self.silent_s += min(seconds, 2 * self.patience.look_s)

    @property
    def is_unresponsive(self) -> bool:
        """Whether the worker should have sent a message."""
        return self.silent_s > max(self.patience.unresponsive_s, self._bound_s)

    def is_over(self, *, is_loading: bool) -> bool:
        """Whether to end the worker."""
        if is_loading:
            return self.silent_s > max(self.patience.loading_s, self._bound_s)
        if not self.is_unresponsive:
            self._before, self._due_s = None, 0.0
            return False
        if not self._due_s:
            self._begin(max(self.patience.restart_s, self._bound_s))
        if self.silent_s > max(self.patience.most_s, self._bound_s):
            return True
        if self.silent_s <= self._due_s:
            return False
        before, window_s = self._before, self._window_s
        self._begin(self.silent_s + self.patience.restart_s - self.patience.unresponsive_s)
        works = before is not None and self._before is not None and self._before.is_more(before, window_s)
        return not works

    def _begin(self, due_s: float) -> None:
        self._before, self._due_s, self._window_s = self._work(), due_s, due_s - self.silent_s


# A worker process --------------------------------------------------------------------------------------------------

# Seconds between two checks for the exit code of an ended process, and the time limit.
EXIT_CODE_LOOK_S, EXIT_CODE_WAIT_S = 0.001, 5.0


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


class Life:
    """One worker. answered: whether it has sent an event. reason: why the supervisor ended it, "" if it did not."""

    def __init__(self, target: Callable[..., None], settings: Mapping[str, Any], patience: Patience) -> None:
        """Start the process. Errors: OSError or RuntimeError if the system refuses it or its pipe."""
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        self.process: Any = spawn.Process(target=target, args=(there, settings), name="trimtab-worker", daemon=True)
        self.process.start()
        there.close()
        self.channel, self.silence = Channel(here), Silence(patience, partial(activity_of, self.process.pid))
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._patience, self._looked = patience, time.monotonic()
        self.answered, self.reason = False, ""

    def begin(self, hear: Callable[[Life], None], not_sent: Callable[[Mapping[str, Any], Exception], None]) -> None:
        """Start its two threads. hear: runs on one of them. not_sent: gets each message that cannot be written, and why. Errors:
        RuntimeError if the system refuses one; the process is then ended."""
        try:
            threading.Thread(target=self._send, args=(not_sent,), name="trimtab-send", daemon=True).start()
            threading.Thread(target=hear, args=(self,), name="trimtab-hear", daemon=True).start()
        except RuntimeError:
            self.process.kill()
            self.close()
            raise

    def send(self, message: dict[str, Any]) -> None:
        """Send a message after those that wait, without waiting for it."""
        self._outbox.put(message)

    def _send(self, not_sent: Callable[[Mapping[str, Any], Exception], None]) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                frames = frames_of(message)
            except Exception as exc:  # this message cannot be written, the next one can
                not_sent(message, exc)
                continue
            try:
                self.channel.send_frames(frames)
            except (OSError, ValueError):
                return  # the receiving thread gets the same error and reports it

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None if none came in the time between two looks. Errors: EOFError, OSError at its end."""
        came, now = self.channel.poll(self._patience.look_s), time.monotonic()
        if not came:
            self.silence.looked(now - self._looked)
        self._looked = now
        return self.channel.receive() if came else None

    def heard(self, message: Mapping[str, Any]) -> None:
        """Note that it is not silent, or how long it will be."""
        if message["say"] == "busy":
            self.silence.announced(message["most_s"])
        else:
            self.silence.heard()

    def end(self, reason: str) -> None:
        """End a worker that has been silent too long."""
        self.reason = reason
        self.process.kill()

    def close(self) -> None:
        """End the sending thread, and close the pipe."""
        self._outbox.put(None)
        self.channel.close()

    def stop(self) -> None:
        """End the process and the sending thread, and wait for the process. The receiving thread closes the pipe."""
        self.process.kill()  # it has nothing to clean up, and ignores SIGTERM
        exit_code_of(self.process)
        self._outbox.put(None)
