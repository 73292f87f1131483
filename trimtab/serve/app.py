"""The HTTP face: OpenAI's routes on a pool of models, and what each of our errors is called there.

    GET  /health  /ready  /metrics  /v1/models  /v1/models/{id}
    POST /v1/chat/completions  /v1/completions  /v1/load_lora_adapter  /v1/unload_lora_adapter
    GET  /            the page, with what it reads: /page/...  /api/status

Once a stream has begun its status is sent: an error then comes as an `error` event and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from trimtab.errors import RequestError, TrimtabError
from trimtab.serve import wire
from trimtab.serve.door import Door
from trimtab.serve.faults import UnknownModelError, error_json, error_response, raised_error, told_error
from trimtab.serve.fetch import Fetcher
from trimtab.serve.job import Event, Job
from trimtab.serve.metrics import Metrics
from trimtab.serve.settings import Settings
from trimtab.serve.shapes import ChatShape, CompletionShape, Shape

Asked = TypeVar("Asked", bound=BaseModel)


class Pool(Protocol):
    """What the app needs of the models behind it."""

    def resolve(self, model_id: str) -> tuple[str, str | None]:
        """Return (model, adapter or None) of an id as clients name it. Errors: UnknownModelError."""

    def context_tokens(self, model: str) -> int: ...

    def takes(self, model: str) -> tuple[str, ...]:
        """Return which of "text", "image", "audio" a model takes."""

    def submit(self, model: str, job: Job) -> AsyncIterator[Event]:
        """Yield what a job is told; closing the iterator cancels it. Errors: TrimtabError."""

    async def load_adapter(self, model: str | None, name: str, path: str) -> None: ...

    async def unload_adapter(self, model: str | None, name: str) -> None: ...

    def models(self) -> Sequence[Mapping[str, Any]]:
        """Return every model and adapter as /v1/models shows it."""

    def status(self) -> Mapping[str, Any]: ...

    async def start(self) -> None: ...

    async def drain(self, grace_s: float) -> None: ...

    @property
    def is_ready(self) -> bool: ...


# Errors ---------------------------------------------------------------------------------------------------------------


async def _on_trimtab_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, TrimtabError)
    return error_response(*raised_error(exc))


async def _on_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    body: dict[str, Any] = {
        "message": str(exc.detail),
        "type": "invalid_request_error",
        "param": None,
        "code": None,
        "fields": {},
    }
    return JSONResponse({"error": body}, exc.status_code, headers=exc.headers)


async def _on_bug(request: Request, exc: Exception) -> Response:
    return error_response(*error_json("bug", "", {}))


# The way in -----------------------------------------------------------------------------------------------------------


async def _read(request: Request, kind: type[Asked]) -> Asked:
    """Return the body as one of the wire's models. Errors: RequestError naming the first field that is wrong."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        more = f" (and {exc.error_count() - 1} more)" if exc.error_count() > 1 else ""
        raise RequestError(f"{first['msg']}{more}", field=_field(first["loc"]) or "body") from None
    except (RecursionError, UnicodeError) as exc:
        raise RequestError("cannot be read", field="body") from exc


def _field(loc: Sequence[int | str]) -> str:
    text = ""
    for step in loc:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step[:1].islower() and not step.startswith(("list[", "function-", "constrained-", "literal[")):
            text += f".{step}" if text else step
    return text.removesuffix(".str").removesuffix(".int")


# The app --------------------------------------------------------------------------------------------------------------


def make_app(pool: Pool, settings: Settings, metrics: Metrics, *, extra: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the application. extra: more routes (the page)."""
    api = _Api(pool, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await pool.start()
        try:
            yield
        finally:
            await pool.drain(settings.grace_s)

    middleware = [Middleware(Door, settings=settings)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )  # fmt: skip
        middleware.insert(0, cors)
    return Starlette(
        routes=[*api.routes(), *extra], middleware=middleware, lifespan=lifespan,
        exception_handlers={
            TrimtabError: _on_trimtab_error, HTTPException: _on_http_error, Exception: _on_bug,
        },
    )  # fmt: skip


class _Api:
    def __init__(self, pool: Pool, settings: Settings, metrics: Metrics) -> None:
        self.pool, self.settings, self.metrics = pool, settings, metrics
        self.fetcher = Fetcher(settings)

    def routes(self) -> list[BaseRoute]:
        def post(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, endpoint, methods=["POST"])

        return [
            Route("/health", self.health), Route("/ready", self.ready), Route("/metrics", self.prometheus),
            Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.model),
            Route("/api/status", self.status), post("/v1/chat/completions", self.chat),
            post("/v1/completions", self.completions), post("/v1/load_lora_adapter", self.load_adapter),
            post("/v1/unload_lora_adapter", self.unload_adapter),
        ]  # fmt: skip

    async def health(self, request: Request) -> Response:
        """Whether this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a model could answer now."""
        ready = self.pool.is_ready
        return JSONResponse({"status": "ready" if ready else "loading"}, 200 if ready else 503)

    async def prometheus(self, request: Request) -> Response:
        body, kind = self.metrics.text(self.pool.status())
        return Response(body, media_type=kind)

    async def status(self, request: Request) -> Response:
        return JSONResponse({**self.pool.status(), "requests": self.metrics.recent()})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self.pool.models())})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = next((model for model in self.pool.models() if model["id"] == name), None)
        if found is None:
            raise UnknownModelError(name, [model["id"] for model in self.pool.models()])
        return JSONResponse(found)

    async def load_adapter(self, request: Request) -> Response:
        asked = await _read(request, wire.LoadAdapterRequest)
        path = self.settings.adapter_path(asked.lora_path)
        await self.pool.load_adapter(asked.model, asked.lora_name, str(path))
        return JSONResponse({"status": "loaded", "lora_name": asked.lora_name})

    async def unload_adapter(self, request: Request) -> Response:
        asked = await _read(request, wire.UnloadAdapterRequest)
        await self.pool.unload_adapter(asked.model, asked.lora_name)
        return JSONResponse({"status": "unloaded", "lora_name": asked.lora_name})

    # Answers ----------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        asked = await _read(request, wire.ChatRequest)
        self._check_stream(asked)
        model, adapter = self.pool.resolve(asked.model)
        fetched = {url: await self.fetcher.get(url) for url in dict.fromkeys(wire.find_urls(asked))}
        messages = wire.messages_of(asked, limits=self.settings.limits, fetched=fetched)
        self._check_media(model, messages)
        top, schema = wire.chat_logprobs(asked), wire.schema_of(asked, self.settings.limits)
        jobs = self._jobs(asked, model, adapter, [messages], top=top, schema=schema)
        return await self._answer(request, asked, model, adapter, jobs, ChatShape(asked))

    async def completions(self, request: Request) -> Response:
        asked = await _read(request, wire.CompletionRequest)
        self._check_stream(asked)
        model, adapter = self.pool.resolve(asked.model)
        jobs = self._jobs(asked, model, adapter, wire.prompts_of(asked), top=asked.logprobs, schema=None)
        return await self._answer(request, asked, model, adapter, jobs, CompletionShape(asked))

    def _check_stream(self, asked: Any) -> None:
        if asked.stream_options is not None and not asked.stream:
            raise RequestError("has no effect without stream", field="stream_options")

    def _check_media(self, model: str, messages: Sequence[Mapping[str, Any]]) -> None:
        takes = self.pool.takes(model)
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] not in takes:
                    raise RequestError(f"this model takes {', '.join(takes)}", field="messages", value=part["type"])

    def _jobs(
        self, asked: Any, model: str, adapter: str | None, prompts: Sequence[Any], *, top: int | None, schema: Any
    ) -> list[Job]:
        limits, context = self.settings.limits, self.pool.context_tokens(model)
        if len(prompts) * asked.n > limits.n:
            raise RequestError(f"this server gives at most {limits.n} choices", field="prompt")
        return [
            Job(
                uuid.uuid4().hex, prompt,
                wire.generate_request(asked, context_tokens=context, limits=limits, index=index), adapter=adapter,
                deadline_s=self.settings.timeout_s, top_logprobs=top, schema=schema,
                fills_context=wire.fills_context(asked),
            )
            for prompt in prompts
            for index in range(asked.n)
        ]  # fmt: skip

    async def _answer(
        self, request: Request, asked: Any, model: str, adapter: str | None, jobs: Sequence[Job], shape: Shape
    ) -> Response:
        merged = _Merged([self.pool.submit(model, job) for job in jobs])
        seen = self.metrics.begin(model, adapter, choices=len(jobs))
        try:
            # What is refused before it starts has a status of its own, in a stream too.
            first = await merged.first()
        except BaseException as exc:
            await merged.aclose()
            seen.end(type(exc).__name__)
            raise
        if first.kind == "error":
            await merged.aclose()
            assert first.error is not None
            seen.end(first.error["class"])
            return error_response(*told_error(first.error))
        if asked.stream:
            return EventSourceResponse(self._chunks(merged, shape, asked, seen), sep="\n", ping=15)
        return await self._whole(request, merged, shape, seen)

    async def _chunks(self, merged: _Merged, shape: Shape, asked: Any, seen: Any) -> AsyncIterator[dict[str, str]]:
        ended = "cancelled"
        try:
            for chunk in shape.opening(len(merged)):
                yield {"data": json.dumps(chunk)}
            async for index, event in merged:
                seen.event(event)
                if event.kind == "error":
                    assert event.error is not None
                    ended = event.error["class"]
                    yield {"event": "error", "data": json.dumps(told_error(event.error)[1])}
                    return
                if (chunk := shape.chunk(index, event)) is not None:
                    yield {"data": json.dumps(chunk)}
            if asked.stream_options is not None and asked.stream_options.include_usage:
                yield {"data": json.dumps(shape.usage_chunk())}
            ended = "done"
            yield {"data": "[DONE]"}
        finally:
            # Also when the client has left: its rows are free before the next step.
            await merged.aclose()
            seen.end(ended)

    async def _whole(self, request: Request, merged: _Merged, shape: Shape, seen: Any) -> Response:
        ended = "cancelled"
        watch = asyncio.create_task(_until_gone(request))
        collect = asyncio.create_task(self._collect(merged, shape, seen))
        try:
            await asyncio.wait({watch, collect}, return_when=asyncio.FIRST_COMPLETED)
            if not collect.done():
                raise ClientDisconnect
            if (refused := collect.result()) is not None:
                ended = refused["class"]
                return error_response(*told_error(refused))
            ended = "done"
            return JSONResponse(shape.whole())
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            for task in (watch, collect):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await merged.aclose()
            seen.end(ended)

    async def _collect(self, merged: _Merged, shape: Shape, seen: Any) -> Mapping[str, Any] | None:
        async for index, event in merged:
            seen.event(event)
            if event.kind == "error":
                return event.error
            shape.chunk(index, event)
        return None


async def _until_gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


class _Merged:
    """The events of several jobs as one stream of (choice, event); ends when all have, or at the first error."""

    def __init__(self, streams: Sequence[AsyncIterator[Event]]) -> None:
        self._streams = list(streams)
        self._queue: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(streams)]
        self._open = len(self._tasks)
        self._held: list[tuple[int, Event]] = []

    def __len__(self) -> int:
        return len(self._streams)

    async def _pump(self, index: int, stream: AsyncIterator[Event]) -> None:
        try:
            async for event in stream:
                await self._queue.put((index, event))
        except TrimtabError as exc:
            await self._queue.put((index, exc))

    async def _get(self) -> tuple[int, Event]:
        index, found = await self._queue.get()
        if isinstance(found, BaseException):
            raise found
        return index, found

    async def first(self) -> Event:
        """Return the first event, which stays in the stream. Errors: what refused the job."""
        self._held.append(await self._get())
        return self._held[0][1]

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        return self._events()

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        while self._open:
            index, event = self._held.pop(0) if self._held else await self._get()
            if event.kind in ("done", "error"):
                self._open -= 1
            yield index, event

    async def aclose(self) -> None:
        """Cancel what goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()  # type: ignore[attr-defined]
