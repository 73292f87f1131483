"""How do jobs become one HTTP response, whole or streamed, in OpenAI's form?"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimtab.serve.api.answer_types import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprobs
from trimtab.serve.contract.errors import error_json, error_response, note_refusal, plain_error
from trimtab.serve.contract.field_names import Names, client_error
from trimtab.serve.contract.job import Event, Token, finite_logprob, token_bytes
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.observe.metrics import Seen


class Fragments:
    """A JSON value as a list of encoded fragments, each encoded on arrival: encoding all at once would delay others."""

    def __init__(self, pieces: list[bytes], end: bytes = b"") -> None:
        self._pieces, self._end = pieces, end

    def add(self, values: bytes) -> None:
        """Add values of a list, without brackets."""
        if values:
            self._pieces += [b",", values] if len(self._pieces) > 1 else [values]

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        yield self._end


def json_body(value: Mapping[str, Any]) -> bytes:
    """Return a response as starlette's JSONResponse writes it, with `Fragments` inserted."""
    held: list[Fragments] = []
    place = uuid.uuid4().hex  # occurs in no text from a client

    def hold(one: Any) -> str:
        if not isinstance(one, Fragments):
            raise TypeError(f"{type(one).__name__} is not JSON")
        held.append(one)
        return place

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=hold)
    first, *rest = text.split(f'"{place}"')
    found = [first.encode()]
    for one, behind in zip(held, rest, strict=True):
        found += [*one, behind.encode()]
    return b"".join(found)


class Shape:
    """The wire form of an answer's events; `chunk` also collects them for `whole`."""

    object_name, chunk_name, prefix = "", "", ""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[Any]] = {}
        self.finishes: dict[int, str] = {}
        self.scored: dict[int, Fragments] = {}
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.forms: dict[str, str] = {}  # formats of the output head, and of keys and values

    def opening(self, choices: int) -> Sequence[Mapping[str, Any]]:
        """Return the chunks before the first event."""
        return []

    def pieces(self, index: int, event: Event) -> Sequence[Mapping[str, Any]]:
        """Return an event's server-sent events, and collect it for `whole`."""
        chunk = self.chunk(index, event)
        return [] if chunk is None else [chunk]

    def sent(self, piece: Mapping[str, Any], *, wants_usage: bool) -> dict[str, str]:
        """Return a chunk as a server-sent event. If usage is requested, every chunk has the field, as in OpenAI's API."""
        return {"data": json.dumps({**piece, "usage": None} if wants_usage else piece)}

    def closing(self, *, wants_usage: bool) -> list[dict[str, str]]:
        """Return the events that end a stream."""
        usage = [{"data": json.dumps(self.usage_chunk())}] if wants_usage else []
        return [*usage, {"data": "[DONE]"}]

    def error(self, status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an error object in this API's form."""
        return body

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """Return the chunk of an event, None if it has none."""
        if event.kind == "text":
            self.texts[index] = self.texts.get(index, "") + event.text
            self.tokens.setdefault(index, []).extend(event.tokens)
            return self._made(index, self.delta(event), None)
        if event.kind in ("reasoning", "call"):
            return self.aside(index, event)
        if event.kind == "scores":
            if event.result is not None and not event.result["start"]:
                self.scored[index] = Fragments([b"["], b"]")  # another worker starts again
            self.scored[index].add(event.data)
            return None
        if event.kind == "done":
            self.finishes[index] = event.finish or "stop"
            if index % self.body.n == 0:  # choices of one prompt share it
                self.prompt_tokens += event.usage["prompt_tokens"]
                self.cached_tokens += event.usage.get("cached_tokens", 0)
            self.completion_tokens += event.usage["completion_tokens"]
            self.forms = {name: event.usage[name] for name in ("output_head", "kv") if name in event.usage}
            return self._made(index, self.delta(Event(event.job_id, "text"), is_last=True), self.finishes[index])
        return None

    def _made(self, index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, **delta, "finish_reason": finish}
        return {**self.head, "object": self.chunk_name, "choices": [choice]}

    def aside(self, index: int, event: Event) -> dict[str, Any] | None:
        """Return the chunk of reasoning or of a call fragment."""
        return None

    def delta(self, event: Event, *, is_last: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def choice(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            # If the plan chose the head, answers may differ from those of another card.
            **self.forms,
        }  # fmt: skip

    def usage_chunk(self) -> dict[str, Any]:
        return {**self.head, "object": self.chunk_name, "choices": [], "usage": self.usage()}

    def whole(self) -> Mapping[str, Any]:
        choices = [{"index": index, **self.choice(index), "finish_reason": finish} for index, finish in
                   sorted(self.finishes.items())]  # fmt: skip
        return {**self.head, "object": self.object_name, "choices": choices, "usage": self.usage(), **self.of_prompt()}

    def of_prompt(self) -> dict[str, Any]:
        """Return the fields of an answer about its prompt, outside the choices."""
        return {}


@dataclass
class Part:
    """What follows without a break in an answer. kind: "text", "reasoning" or "call". text: of a call, its arguments."""

    kind: str
    call_id: str = ""
    name: str = ""
    text: str = ""

    def add(self, text: str) -> None:
        self.text += text


class NamedEvents(Shape):
    """The form of an answer of one choice, which is parts one after the other; its events have their types as names."""

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self._part: Part | None = None

    def sent(self, piece: Mapping[str, Any], *, wants_usage: bool) -> dict[str, str]:
        return {"event": piece["type"], "data": json.dumps(piece)}

    def closing(self, *, wants_usage: bool) -> list[dict[str, str]]:
        return []

    def pieces(self, index: int, event: Event) -> Sequence[Mapping[str, Any]]:
        part, call = self._part, event.call or {}
        if event.kind == "done":
            self.finishes[0] = event.finish or "stop"
            self.prompt_tokens, self.completion_tokens = event.usage["prompt_tokens"], event.usage["completion_tokens"]
            self.cached_tokens = event.usage.get("cached_tokens", 0)
            return [*([] if part is None else self.ended(part)), *self.finished(event)]
        if event.kind not in ("reasoning", "call") and not event.text:
            return []
        begun: Sequence[Mapping[str, Any]] = ()
        if part is None or part.kind != event.kind or "name" in call:
            ended = [] if part is None else self.ended(part)
            part = self._part = Part(event.kind, call.get("id", ""), call.get("name", ""))
            begun = [*ended, *self.begun(part)]
        if "name" in call:
            return begun
        text = call.get("arguments", event.text)
        part.add(text)
        return [*begun, self.grown(part, text)]

    # The events that begin a part, that of its next text, those that end it and those that end the answer.

    def begun(self, part: Part) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError

    def grown(self, part: Part, text: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def ended(self, part: Part) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError

    def finished(self, event: Event) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError


class ChatShape(Shape):
    object_name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self.thoughts: dict[int, str] = {}
        self.calls: dict[int, list[dict[str, Any]]] = {}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        return [
            self._made(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}, None) for index in range(choices)
        ]

    def aside(self, index: int, event: Event) -> dict[str, Any] | None:
        if event.kind == "reasoning":
            self.thoughts[index] = self.thoughts.get(index, "") + event.text
            return self._made(index, {"delta": {"reasoning_content": event.text}, "logprobs": None}, None)
        assert event.call is not None
        return self._made(index, {"delta": {"tool_calls": [self._call(index, event.call)]}, "logprobs": None}, None)

    def _call(self, index: int, piece: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call fragment in the form of a stream, and add it to the whole call."""
        calls = self.calls.setdefault(index, [])
        if "name" in piece:
            function = {"name": piece["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": function})
            return {"index": piece["index"], **calls[-1], "function": dict(function)}
        calls[piece["index"]]["function"]["arguments"] += piece["arguments"]
        return {"index": piece["index"], "function": {"arguments": piece["arguments"]}}

    def delta(self, event: Event, *, is_last: bool = False) -> dict[str, Any]:
        logprobs = chat_logprob_json(event.tokens) if event.tokens else None
        return {"delta": {} if is_last else {"content": event.text}, "logprobs": logprobs}

    def choice(self, index: int) -> dict[str, Any]:
        logprobs = chat_logprob_json(self.tokens.get(index, ())) if self.body.logprobs else None
        text: str | None = self.texts.get(index, "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if index in self.thoughts:
            message["reasoning_content"] = self.thoughts[index]
        if index in self.calls:
            message |= {"content": text or None, "tool_calls": self.calls[index]}
        return {"message": message, "logprobs": logprobs}

    def of_prompt(self) -> dict[str, Any]:
        return {"prompt_logprobs": self.scored[0]} if 0 in self.scored else {}


class CompletionShape(Shape):
    object_name = chunk_name = "text_completion"
    prefix = "cmpl-"

    def delta(self, event: Event, *, is_last: bool = False) -> dict[str, Any]:
        logprobs = completion_logprob_json(event.tokens) if event.tokens else None
        return {"text": event.text, "logprobs": logprobs}

    def choice(self, index: int) -> dict[str, Any]:
        tokens = self.tokens.get(index, ())
        logprobs = completion_logprob_json(tokens) if self.body.logprobs is not None else None
        scored = {"prompt_logprobs": self.scored[index]} if index in self.scored else {}
        return {"text": self.texts.get(index, ""), "logprobs": logprobs, **scored}


# Logprobs -------------------------------------------------------------------------------------------------------------


def chat_logprob_json(tokens: Sequence[Token]) -> ChatLogprobs:
    """Return tokens in the form of a chat choice's `logprobs`."""
    content: list[TopLogprobs] = [
        {**_token_json(token.text, token.logprob), "top_logprobs": [_token_json(text, logprob) for _, text, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token_json(text: str, logprob: float) -> TokenLogprob:
    """Return a token with its own bytes: those of several tokens can be joined to characters, their texts cannot."""
    return {"token": _shown(text), "logprob": finite_logprob(logprob), "bytes": list(token_bytes(text))}


def _shown(text: str) -> str:
    return token_bytes(text).decode("utf-8", "replace")


def completion_logprob_json(tokens: Sequence[Token]) -> TextLogprobs:
    """Return tokens in the form of a completion choice's `logprobs`."""
    return {
        "tokens": [_shown(token.text) for token in tokens], "token_logprobs": [finite_logprob(token.logprob) for token in tokens],
        "top_logprobs": [_top_json(token) for token in tokens], "text_offset": [token.offset for token in tokens],
    }  # fmt: skip


def _top_json(token: Token) -> dict[str, float]:
    """Return the most likely tokens by their texts. Of several with one text, that of the answer counts, else the most likely."""
    top: dict[str, float] = {}
    for _, text, logprob in token.top:
        top.setdefault(_shown(text), finite_logprob(logprob))
    own = _shown(token.text)
    return {**top, own: finite_logprob(token.logprob)} if own in top else top


# From jobs to a response ----------------------------------------------------------------------------------------------

# A stream waits this long for its first text, so that a refused request has its own status; later errors are events.
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
    called with the usage of each "started". names: of the chat's fields in the client's request.
    """

    def __init__(
        self, streams: Sequence[AsyncIterator[Event]], on_start: Callable[[Mapping[str, float]], None] | None = None, *,
        names: Names | None = None,
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
                self._on_start(event.usage)
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
    status, body = error_json(error, folders)
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
                body = self._shape.error(*error_json(event.error, self._folders))
                yield {"event": "error", "data": json.dumps(body)}
                return
            for piece in self._shape.pieces(index, event):
                yield self._shape.sent(piece, wants_usage=self._wants_usage)
        closing = self._shape.closing(wants_usage=self._wants_usage)
        self._ended = "done"
        for event_sent in closing:
            yield event_sent
