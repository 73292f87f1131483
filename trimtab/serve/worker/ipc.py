"""Messages between the API process and the worker: one JSON object per message, with raw bytes. Never pickle.

A message is a JSON frame {"message": ..., "blobs": [path, ...]} followed by one frame per blob. A path gives the
position of those bytes in the message, so that text from a client cannot be confused with them.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from multiprocessing.connection import Connection
from typing import Any

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
    values["tokens"] = [[token.token_id, token.text, token.logprob, token.top] for token in event.tokens]
    return {name: value for name, value in values.items() if value}


def event_from_message(message: Mapping[str, Any]) -> Event:
    """Return the event that `event_to_message` wrote."""
    tokens = tuple(
        Token(token_id, text, logprob, tuple((int(i), str(t), float(p)) for i, t, p in top))
        for token_id, text, logprob, top in message.get("tokens", ())
    )
    return Event(**{**message, "tokens": tokens})
