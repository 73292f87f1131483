"""Jobs become one HTTP response: merged events, whole or as a stream, cancelled when the client disconnects.

A request that is refused before it begins gets its own status, also for a stream: the response head of a stream waits
up to `HOLD_S` for the first text. After that, an error is sent as an `error` event, and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimtab.serve.api.openai_shape import Shape, json_body
from trimtab.serve.contract.errors import error_from_worker, error_response, note_refusal, plain_error
from trimtab.serve.contract.field_names import Names, client_error
from trimtab.serve.contract.job import Event
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.observe.metrics import Seen

HOLD_S = 10.0
PING_S = 15
# Events that are joined with the next one if the first is unread.
JOINED = ("text", "reasoning")
# Events that report computed tokens.
COUNTED = ("done", "result", "error")
# A client that has left reads no status; logs use nginx's number for it.
CLIENT_LEFT = 499


class Merged:
    """The events of several jobs as one stream of (choice, event). It ends when all have ended, or at the first error.

    Unread events are joined per choice, so that a slow reader costs no more memory than the unread text. on_start:
    called when the computation of a job's prompt begins. names: of the chat's fields in the client's request.
    """

    def __init__(
        self, streams: Sequence[AsyncIterator[Event]], on_start: Callable[[], None] | None = None, *, names: Names | None = None
    ) -> None:  # fmt: skip
        self._on_start, self._names = on_start, names or {}
        self._waiting: deque[tuple[int, Event]] = deque()
        self._more, self._decided = asyncio.Event(), asyncio.Event()
        self._open = len(streams)
        self.error: Mapping[str, Any] | None = None
        self._tasks = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(streams)]

    def __len__(self) -> int:
        return len(self._tasks)

    async def _pump(self, index: int, stream: AsyncIterator[Event]) -> None:
        try:
            async for event in stream:
                self._put(index, event)
        except Exception as exc:
            error = plain_error(exc)
            if error["class"] == "bug":
                write_traceback(exc, "internal error while a request was answered")
            self._put(index, Event("", "error", finish="error", error=error))

    def _put(self, index: int, event: Event) -> None:
        if event.kind == "started":  # not sent to clients
            if self._on_start is not None:
                self._on_start()
            return
        if event.error is not None:
            event = replace(event, error=client_error(event.error, self._names))
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last[0] == index and last[1].kind == event.kind and event.kind in JOINED:
            joined = replace(last[1], text=last[1].text + event.text, tokens=last[1].tokens + event.tokens)
            self._waiting[-1] = (index, joined)
        else:
            self._waiting.append((index, event))
        if event.kind == "error" and self.error is None:
            self.error = event.error
        self._more.set()
        self._decided.set()

    async def begun(self) -> None:
        """Wait for the first text, end or error."""
        await self._decided.wait()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._open:
            while not self._waiting:
                self._more.clear()
                await self._more.wait()
            index, event = self._waiting.popleft()
            if event.kind in ("done", "error"):
                self._open -= 1
            yield index, event

    def tell_unread(self, tell: Callable[[Event], None]) -> None:
        """Call `tell` with the unread counts of the request."""
        for _, event in self._waiting:
            if event.kind in COUNTED:
                tell(event)
        self._waiting.clear()

    async def aclose(self) -> None:
        """Cancel the running jobs."""
        # One cancellation may not be enough: before Python 3.12, `wait_for` loses one that arrives together with its
        # result.
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)


async def answer(
    request: Request, merged: Merged, shape: Shape, seen: Seen, *, wants_usage: bool, send_s: float,
    folders: Sequence[str] = (),
) -> Response:  # fmt: skip
    """Return the whole answer, or its stream. The jobs always end with it.

    folders: paths that no error may contain, from `redact.own_folders`.
    """
    if not shape.body.stream:
        return await _whole(request, merged, shape, seen, folders)
    try:
        is_here = await _unless_gone(request, merged.begun(), HOLD_S)
        if is_here and merged.error is None:
            return _Stream(merged, shape, seen, wants_usage=wants_usage, send_s=send_s, folders=folders)
    except BaseException:
        await _end(merged, seen, "cancelled")
        raise
    await _end(merged, seen, merged.error["class"] if merged.error else "cancelled")
    if merged.error is None:
        return Response(status_code=CLIENT_LEFT)
    return _refused(merged.error, shape, folders)


def _refused(error: Mapping[str, Any], shape: Shape, folders: Sequence[str]) -> Response:
    note_refusal(error, folders)
    status, body = error_from_worker(error, folders)
    return error_response(status, shape.error(status, body))


async def _whole(request: Request, merged: Merged, shape: Shape, seen: Seen, folders: Sequence[str]) -> Response:
    ended = "cancelled"
    try:
        if not await _unless_gone(request, _collect(merged, shape, seen), None):
            return Response(status_code=CLIENT_LEFT)
        if merged.error is not None:
            ended = merged.error["class"]
            return _refused(merged.error, shape, folders)
        ended = "done"
        return Response(json_body(shape.whole()), media_type="application/json")
    finally:
        await _end(merged, seen, ended)


async def _collect(merged: Merged, shape: Shape, seen: Seen) -> None:
    async for index, event in merged:
        seen.event(event)
        if event.kind == "error":
            return
        shape.pieces(index, event)


async def _end(merged: Merged, seen: Seen, how: str) -> None:
    merged.tell_unread(seen.event)
    seen.end(how)
    with anyio.CancelScope(shield=True):
        await merged.aclose()


async def _unless_gone(request: Request, work: Any, timeout_s: float | None) -> bool:
    """Wait for work, with a time limit; False if the client leaves before it is done."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        done, _ = await asyncio.wait({working, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            working.result()
        return working in done or leaving not in done
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    # The body has been read; the next message is the client's disconnect.
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(EventSourceResponse):
    """A streamed answer. Its jobs end with it, also if no chunk could be sent."""

    def __init__(
        self, merged: Merged, shape: Shape, seen: Seen, *, wants_usage: bool, send_s: float, folders: Sequence[str]
    ) -> None:
        self._merged, self._shape, self._seen, self._wants_usage = merged, shape, seen, wants_usage
        self._ended, self._folders = "cancelled", folders
        super().__init__(self._pieces(), sep="\n", ping=PING_S, send_timeout=send_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(SendTimeoutError):  # a client that reads nothing for so long counts as disconnected
                await super().__call__(scope, receive, send)
        finally:
            await _end(self._merged, self._seen, self._ended)

    async def _pieces(self) -> AsyncIterator[dict[str, str]]:
        for chunk in self._shape.opening(len(self._merged)):
            yield self._shape.sent(chunk, wants_usage=self._wants_usage)
        async for index, event in self._merged:
            self._seen.event(event)
            if event.kind == "error":
                assert event.error is not None
                self._ended = event.error["class"]
                note_refusal(event.error, self._folders)
                body = self._shape.error(*error_from_worker(event.error, self._folders))
                yield {"event": "error", "data": json.dumps(body)}
                return
            for piece in self._shape.pieces(index, event):
                yield self._shape.sent(piece, wants_usage=self._wants_usage)
        closing = self._shape.closing(wants_usage=self._wants_usage)
        self._ended = "done"
        for event_sent in closing:
            yield event_sent
