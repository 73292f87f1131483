"""Which HTTP application serves a pool of models, and which form has every error?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from trimtab.checkpoint.names import near_names
from trimtab.errors import TrimtabError, choices_text
from trimtab.process.redact import without_paths
from trimtab.serve.api import messages_api, other_routes, responses_api, schemas, to_jobs
from trimtab.serve.api.admission import FREE_BYTES, AccessMiddleware, BodyLimits, BodyTooLargeError, Reader, client_of, sender_of
from trimtab.serve.api.answers import CLIENT_LEFT, ChatShape, CompletionShape, Merged, Shape, answer
from trimtab.serve.api.routes import (
    ANTHROPICS,
    BESIDE,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    ROUTES,
    TOKENIZE,
    WITH_IDS,
    WITH_MEDIA,
)
from trimtab.serve.contract import log
from trimtab.serve.contract.errors import error_json, error_response, http_error, note_refusal, plain_error
from trimtab.serve.contract.field_names import Names, client_error, client_field
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.contract.quotas import Quotas
from trimtab.serve.contract.settings import IGNORED_HEADER, RELOAD, Live, Settings
from trimtab.serve.http.openapi import description
from trimtab.serve.media.fetch import Fetcher
from trimtab.serve.observe.metrics import Metrics, Seen

# Texts of /ready for models that cannot answer now; the first one counts.
NOT_READY = {"loading": "loading", "restarting": "loading", "unresponsive": "unresponsive"}
# Fields without effect that the answer's header names; the others are counted.
MOST_IGNORED = 20


class Pool(Protocol):
    """The interface that the app needs of the models behind it."""

    def resolve(self, model_id: str, *, field: str = "model") -> tuple[str, str | None]:
        """Return (model, adapter, mix or None) of an id as clients name it. Errors: UnknownModelError, RequestError."""

    def context_tokens(self, model: str) -> int: ...

    def most_jobs(self, model: str) -> int:
        """Return how many jobs a model's rows and queue hold."""

    def takes(self, model: str) -> tuple[str, ...]:
        """Return which of "text", "image", "audio" a model takes."""

    def submit(self, model: str, job: Job, on_dropped: Callable[[Mapping[str, Any]], None] | None = None) -> AsyncIterator[Event]:
        """Yield the events of a job. Closing the iterator cancels the job; `on_dropped` receives the tokens computed for it.
        Errors: TrimtabError."""

    async def load_adapter(self, model: str | None, name: str, path: str) -> None: ...

    async def unload_adapter(self, model: str | None, name: str) -> None: ...

    def models(self) -> Sequence[Mapping[str, Any]]:
        """Return every model and adapter as /v1/models shows it."""

    async def refresh(self) -> None: ...

    def status(self) -> Mapping[str, Any]: ...

    async def start(self) -> None: ...

    async def drain(self, grace_s: float) -> None: ...

    @property
    def is_ready(self) -> bool: ...


# Errors ---------------------------------------------------------------------------------------------------------------


def on_trimtab_error(folders: Sequence[str] = ()) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of our errors. folders: paths that no error may name, as `redact.own_folders` gives them."""

    async def handle(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, TrimtabError)
        error = client_error(plain_error(exc), _names_of(request))
        note_refusal(error, folders)
        return _as_asked(request, *error_json(error, folders, is_admin=request.url.path == RELOAD))

    return handle


def _names_of(request: Request) -> Names:
    """Return the client's names for the fields of the chat that a request became."""
    names: Names = getattr(request.state, "names", {})
    return names


def _ignored_header(fields: Sequence[str]) -> str:
    """Return the names of fields as the value of a header, `MOST_IGNORED` of them and at most 1,000 characters."""
    names = list(dict.fromkeys(fields))
    more = f", and {len(names) - MOST_IGNORED} more" if len(names) > MOST_IGNORED else ""
    text = ", ".join(names[:MOST_IGNORED]).encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else "?" for char in text)[: 1000 - len(more)] + more


def _as_asked(request: Request, status: int, body: Mapping[str, Any]) -> Response:
    """Return an error in the form of the API that was asked."""
    return error_response(status, messages_api.error_object(status, body) if request.url.path in ANTHROPICS else body)


async def _on_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    near = choices_text((), near_names(request.url.path[:64], ROUTES))
    words = {
        404: f"There is no such route{near}; GET /openapi.json lists the routes",
        405: f"This route does not take {request.method:.20}",
    }
    detail = str(exc.detail)
    return http_error(exc.status_code, words.get(exc.status_code, detail), headers=exc.headers, logged=detail)


async def _on_left(request: Request, exc: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _on_bug(request: Request, exc: Exception) -> Response:
    response = _as_asked(request, *error_json({"class": "bug", "message": "", "fields": {}}))
    if log.request_id():  # this answer is made outside of the journal
        response.headers[log.HEADER] = log.request_id()
    return response


# The app --------------------------------------------------------------------------------------------------------------


def make_app(
    pool: Pool,
    settings: Settings,
    metrics: Metrics,
    *,
    extra: Sequence[BaseRoute] = (),
    folders: Sequence[str] = (),
    live: Live | None = None,
    spans: log.Spans | None = None,
) -> Starlette:
    """Return the application. extra: further routes (the page). folders: paths that no answer may contain, as `own_folders`
    returns them. live: calls back with new settings after a reload. spans: creates a trace of each request."""
    live = live or Live(settings)
    beside_api = BESIDE.keys() & {getattr(route, "path", "") for route in extra}
    api = _Api(pool, settings, metrics, folders, beside_api)
    live.listen(api.use)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await pool.start()
        try:
            yield
        finally:
            await pool.drain(settings.grace_s)

    routes = [*api.routes(), *extra]
    paths = [getattr(route, "path", "") for route in routes]
    middleware = [Middleware(AccessMiddleware, live=live, body_limits=api.body_limits)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send various headers
            expose_headers=["retry-after", log.HEADER, IGNORED_HEADER],
        )  # fmt: skip
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(log.Journal, counts=metrics, paths=paths, spans=spans))
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan,
        exception_handlers={
            TrimtabError: on_trimtab_error(folders), HTTPException: _on_http_error, ClientDisconnect: _on_left,
            Exception: _on_bug,
        },
    )  # fmt: skip
    # A redirect would repeat any Host header.
    app.router.redirect_slashes = False
    return app


class _Api:
    def __init__(
        self, pool: Pool, settings: Settings, metrics: Metrics, folders: Sequence[str], beside_api: Collection[str]
    ) -> None:
        self.pool, self.settings, self.metrics, self.folders = pool, settings, metrics, folders
        self.beside_api = beside_api
        # The description as bytes, by whether it requires a key.
        self._described: dict[bool, Any] = {}
        self.quotas = Quotas(settings.key_limits)
        metrics.expect_keys(limits.name for limits in settings.key_limits.values())
        self.fetcher, self.reader = Fetcher(settings), Reader(settings.limits, lenient=settings.lenient)
        models = [entry["id"] for entry in pool.models() if entry["parent"] is None]
        self._takes_media = any(len(pool.takes(model)) > 1 for model in models)
        self._context_tokens = max((pool.context_tokens(model) for model in models), default=0)

    def use(self, settings: Settings) -> None:
        """Use other settings for new requests. Running requests finish with the old ones."""
        self.settings, self.fetcher = settings, Fetcher(settings)
        self.reader.use(settings.limits, lenient=settings.lenient)
        self.quotas.use(settings.key_limits)
        self.metrics.expect_keys(limits.name for limits in settings.key_limits.values())

    def body_limits(self, path: str) -> BodyLimits:
        """Return the limits of a path's body, for any model."""
        limits = self.settings.limits
        most_bytes, most_values = limits.body_bytes, limits.json_values
        if path in WITH_MEDIA and self._takes_media:
            most_bytes = max(most_bytes, limits.media_body_bytes)
        most_bytes = min(most_bytes, limits.all_body_bytes + FREE_BYTES)  # a larger one never finds room
        if path in WITH_IDS:  # every prompt may be token ids
            most_values += (limits.embeddings if path == EMBEDDINGS else limits.n) * self._context_tokens
        return BodyLimits(most_bytes, limits.body_bytes, most_values, limits.json_depth)

    def routes(self) -> list[BaseRoute]:
        def post(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
            async def answered(request: Request) -> Response:
                response = await endpoint(request)
                if ignored := getattr(request.state, "ignored", None):
                    response.headers[IGNORED_HEADER] = _ignored_header(ignored)
                return response

            return Route(path, answered, methods=["POST"])

        return [
            Route("/health", self.health), Route("/ready", self.ready), Route("/metrics", self.prometheus),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.model),
            Route("/api/status", self.status), post(CHAT, self.chat),
            post(COMPLETIONS, self.completions), post(RESPONSES, self.responses), post(MESSAGES, self.messages),
            post(COUNT_TOKENS, self.count_tokens), post(EMBEDDINGS, self.embeddings), post(TOKENIZE, self.tokenize),
            post(DETOKENIZE, self.detokenize), post("/v1/load_lora_adapter", self.load_adapter),
            post("/v1/unload_lora_adapter", self.unload_adapter),
        ]  # fmt: skip

    async def health(self, request: Request) -> Response:
        """Whether this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a model could answer now."""
        if self.pool.is_ready:
            return JSONResponse({"status": "ready"})
        states = {model["state"] for model in self.pool.status()["models"]}
        found = [word for state, word in NOT_READY.items() if state in states]
        word = "failed" if states == {"failed"} else found[0] if found else "stopping"
        return JSONResponse({"status": word}, 503)

    async def prometheus(self, request: Request) -> Response:
        await self.pool.refresh()
        body, kind = self.metrics.text(self.pool.status())
        return Response(body, media_type=kind)

    async def openapi(self, request: Request) -> Response:
        has_key = bool(self.settings.api_keys)
        if has_key not in self._described:  # a tenth of a second, once
            make = partial(description, has_key=has_key, beside=self.beside_api)
            self._described[has_key] = await asyncio.to_thread(lambda: JSONResponse(make()).body)
        return Response(self._described[has_key], media_type="application/json")

    async def status(self, request: Request) -> Response:
        await self.pool.refresh()
        shown = {**self.pool.status(), "requests": self.metrics.recent()}
        return JSONResponse(without_paths(shown, folders=self.folders))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self.pool.models())})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        # Every name that a request may use is answered, also the longer one of an adapter.
        model, adapter = self.pool.resolve(name)
        own = {entry["root"]: entry for entry in self.pool.models() if entry["parent"] == model}
        base = next(entry for entry in self.pool.models() if entry["parent"] is None and entry["root"] == model)
        fields = base if adapter is None else own.get(adapter, {**base, "root": adapter, "parent": model})
        return JSONResponse({**fields, "id": name})

    async def load_adapter(self, request: Request) -> Response:
        body, _ = await self.reader.read(schemas.LoadAdapterRequest, request)
        path = self.settings.adapter_path(body.lora_path)
        await self.pool.load_adapter(body.model, body.lora_name, str(path))
        return JSONResponse({"status": "loaded", "lora_name": body.lora_name})

    async def unload_adapter(self, request: Request) -> Response:
        body, _ = await self.reader.read(schemas.UnloadAdapterRequest, request)
        await self.pool.unload_adapter(body.model, body.lora_name)
        self.metrics.forget(body.lora_name, body.model)
        return JSONResponse({"status": "unloaded", "lora_name": body.lora_name})

    # Answers ----------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body, size = await self.reader.read(schemas.ChatRequest, request)
        request.state.names = to_jobs.names_of_chat(body)
        return await self._chat(request, body, size, ChatShape)

    async def responses(self, request: Request) -> Response:
        body, size = await self.reader.read(responses_api.ResponsesRequest, request)
        converted, request.state.names = await self.reader.run(size, lambda: responses_api.chat_of(body))
        return await self._chat(request, converted, size, lambda chat: responses_api.ResponsesShape(chat, body))

    async def messages(self, request: Request) -> Response:
        body, size = await self.reader.read(messages_api.MessagesRequest, request)
        longest = self.pool.context_tokens(self.pool.resolve(body.model)[0])
        longest = min(longest, self.settings.limits.max_tokens or longest)
        chat, request.state.names = await self.reader.run(size, lambda: messages_api.chat_of(body, longest=longest))
        if body.thinking is not None and body.thinking.budget_tokens is not None:
            request.state.ignored = [*(request.state.ignored or ()), "thinking.budget_tokens"]
        return await self._chat(request, chat, size, messages_api.MessagesShape, may_be_shorter=True)

    async def _chat(
        self, request: Request, body: schemas.ChatRequest, size: int, shape: Callable[[schemas.ChatRequest], Shape], *,
        may_be_shorter: bool = False,
    ) -> Response:  # fmt: skip
        to_jobs.check_shape(body)
        model, adapter = to_jobs.voice_of(self.pool, body)
        messages = await self._read_messages(request, body, size, model)
        broken: list[str] | None = [] if self.settings.lenient else None
        to_jobs.check_results(messages, broken)
        if broken:
            names = _names_of(request)
            request.state.ignored = [*(request.state.ignored or ()), *(client_field(field, names) for field in broken)]
        # Only the decoded images stay, once each, until the answer ends.
        body = body.model_copy(update={"messages": []})
        return await self._answer(request, body, model, adapter, [messages], shape(body), may_be_shorter=may_be_shorter)

    async def _read_messages(self, request: Request, body: schemas.ChatRequest, size: int, model: str) -> list[dict[str, Any]]:
        limits = self.settings.limits
        to_jobs.check_media(body, takes=self.pool.takes(model), limits=limits)
        if size > limits.body_bytes and len(self.pool.takes(model)) == 1:
            raise BodyTooLargeError(limits.body_bytes, hint="This model supports text only")
        urls = to_jobs.urls_of(body)
        fetched = await self.fetcher.get_all(urls, sender=self._sender(request)) if urls else {}
        read = partial(to_jobs.messages_of, body, limits=limits, fetched=fetched, cut=request.state.cut)
        return await self.reader.run(size, read)

    async def completions(self, request: Request) -> Response:
        body, _ = await self.reader.read(schemas.CompletionRequest, request)
        to_jobs.check_shape(body)
        model, adapter = to_jobs.voice_of(self.pool, body)
        return await self._answer(request, body, model, adapter, to_jobs.prompts_of(body), CompletionShape(body))

    async def _answer(
        self, request: Request, body: Any, model: str, adapter: str | None, prompts: Sequence[Any], shape: Shape,
        *, may_be_shorter: bool = False,
    ) -> Response:  # fmt: skip
        """Answer every prompt. may_be_shorter: than max_tokens, where the prompt leaves less of the context."""
        make = partial(
            to_jobs.jobs_of, body, prompts, adapter=adapter, context_tokens=self.pool.context_tokens(model),
            limits=self.settings.limits, most_jobs=self.pool.most_jobs(model),
        )  # fmt: skip
        # Schemas may take a moment to check.
        is_long = getattr(body, "response_format", None) or getattr(body, "tools", None)
        jobs = await self.reader.run(self.settings.limits.body_bytes, make) if is_long else make()
        if may_be_shorter:
            jobs = [replace(job, fills_context=True) for job in jobs]
        jobs = self._of_client(request, jobs)
        self._name_adapter(request, body)
        seen = self._begin(request, model, adapter, choices=len(jobs))
        streams = [self.pool.submit(model, job, seen.dropped) for job in jobs]
        merged = Merged(streams, seen.started, names=_names_of(request))
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        return await answer(
            request, merged, shape, seen, wants_usage=wants_usage, send_s=self.settings.limits.send_s,
            folders=self.folders,
        )  # fmt: skip

    def _name_adapter(self, request: Request, body: Any) -> None:
        """Have later errors about the model's adapter name the field that chose it."""
        if getattr(body, "adapter", None) is not None:
            request.state.names = {**_names_of(request), "model": "adapter"}

    def _begin(
        self, request: Request, model: str, adapter: str | None, *, choices: int, computes: bool = True
    ) -> Seen:  # fmt: skip
        """Return the events of a request. Errors: QuotaError if its key may have no more."""
        limits = self.quotas.of(request.state.credential) if self.settings.key_limits else None
        use = None if limits is None else self.quotas.enter(limits)
        key = None if limits is None else limits.name
        return self.metrics.begin(model, adapter, choices=choices, key=key, use=use, computes=computes)

    # Other routes -----------------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        body, _ = await self.reader.read(schemas.EmbeddingsRequest, request)
        model, adapter = to_jobs.voice_of(self.pool, body)
        context_tokens = self.pool.context_tokens(model)
        jobs = other_routes.embedding_jobs(body, adapter=adapter, context_tokens=context_tokens, limits=self.settings.limits)
        self._name_adapter(request, body)
        return await self._result(request, model, adapter, jobs, other_routes.EmbeddingsShape(body))

    async def tokenize(self, request: Request) -> Response:
        body, size = await self.reader.read(schemas.TokenizeRequest, request)
        other_routes.check_tokenize(body)
        model, _ = self.pool.resolve(body.model)
        context_tokens = self.pool.context_tokens(model)
        if body.messages is None:
            job = other_routes.text_job(body, context_tokens=context_tokens)
        else:
            chat = await self.reader.run(size, lambda: other_routes.chat_to_tokenize(body))
            job = await self._chat_tokens(request, chat, size, model)
        return await self._result(request, model, None, [job], other_routes.TokensShape(body, context_tokens))

    async def count_tokens(self, request: Request) -> Response:
        body, size = await self.reader.read(messages_api.CountRequest, request)
        chat, request.state.names = await self.reader.run(size, lambda: messages_api.chat_of(body))
        model, _ = self.pool.resolve(body.model)
        job = await self._chat_tokens(request, chat, size, model)
        return await self._result(request, model, None, [job], other_routes.CountShape(body))

    async def _chat_tokens(self, request: Request, chat: schemas.ChatRequest, size: int, model: str) -> Job:
        messages = await self._read_messages(request, chat, size, model)
        context_tokens = self.pool.context_tokens(model)
        return other_routes.chat_job(chat, messages, context_tokens=context_tokens, limits=self.settings.limits)

    async def detokenize(self, request: Request) -> Response:
        body, _ = await self.reader.read(schemas.DetokenizeRequest, request)
        model, _ = self.pool.resolve(body.model)
        job = other_routes.ids_job(body, context_tokens=self.pool.context_tokens(model))
        return await self._result(request, model, None, [job], other_routes.TextShape(body))

    def _of_client(self, request: Request, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs with the owner of their prefixes, the client that takes turns with others, and their time."""
        client, sender = client_of(request.state.credential, self.settings), self._sender(request)
        return [replace(job, client=client, sender=sender, deadline_s=self.settings.timeout_s) for job in jobs]

    def _sender(self, request: Request) -> str:
        address = "" if request.client is None else request.client.host
        return sender_of(request.state.credential, address, self.settings)

    async def _result(self, request: Request, model: str, adapter: str | None, jobs: Sequence[Job], shape: Shape) -> Response:
        computes = any(job.kind == "embedding" for job in jobs)  # others only split or join a text
        seen = self._begin(request, model, adapter, choices=1, computes=computes)
        stream = other_routes.in_turn(self.pool, model, self._of_client(request, jobs), seen.dropped)
        merged = Merged([stream], names=_names_of(request))
        return await answer(
            request, merged, shape, seen, wants_usage=False, send_s=self.settings.limits.send_s, folders=self.folders
        )  # fmt: skip
