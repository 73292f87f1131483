"""The API's OpenAPI description, made from the schemas that the server validates requests with.

Version 3.2 is the first that can describe the events of a stream (`itemSchema`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from trimtab._version import __version__
from trimtab.serve.api.request_kinds import ANTHROPICS, REQUESTS
from trimtab.serve.api.schemas import ReloadRequest
from trimtab.serve.contract.settings import ADMIN_PATHS, RELOAD
from trimtab.serve.http.answer_schemas import ANSWERS, SCHEMAS, reference

_WORDS = {
    "/health": "Whether this process answers", "/ready": "Whether a model could answer now",
    "/metrics": "Metrics in Prometheus' text form", "/openapi.json": "This description",
    "/v1/models": "Every model and adapter that is served", "/v1/models/{name}": "One of them",
    "/api/status": "What the page shows", "/v1/chat/completions": "Answer a chat, whole or as a stream of server-sent events",
    "/v1/completions": "Continue a text or token ids",
    "/v1/responses": "Answer in OpenAI's Responses form, stateless", "/v1/messages": "Answer in Anthropic's form",
    "/v1/messages/count_tokens": "Count the tokens of such a request", "/v1/embeddings": "One vector per text",
    "/tokenize": "The tokens of a text or chat", "/detokenize": "The text of tokens",
    "/v1/load_lora_adapter": "Load an adapter below the server's folder",
    "/v1/unload_lora_adapter": "Unload an adapter",
    RELOAD: "Reload settings, keys and adapters",
}  # fmt: skip
# Routes that a server may have in addition to those of the API, and their bodies.
BESIDE: Mapping[str, type[BaseModel]] = {RELOAD: ReloadRequest}
_OPEN = ("/health", "/ready")
# Errors of any request: heads and bodies that cannot be read, connections that are all taken, mistakes of the server.
_ALWAYS = {
    400: "A field is wrong, or the request cannot be read", 405: "The path has another method", 408: "The request was too slow",
    421: "This server answers requests for this machine's own names only", 431: "The head is too large",
    500: "The server failed", 501: "A transfer coding that is not read", 503: "Busy: retry after Retry-After seconds",
    505: "Another version than HTTP/1.0 or 1.1",
}  # fmt: skip
_POSTED = {
    404: "No model or adapter of this name", 413: "The body is too large", 415: "The body is not JSON",
    422: "A file of an adapter is damaged or does not match", 429: "The queue is full", 504: "The answer took too long",
    507: "There is no memory for the adapter, or no disk space for the body",
}  # fmt: skip


def description(*, has_key: bool, beside: Collection[str] = ()) -> dict[str, Any]:
    """Return the description. has_key: whether this server requires an API key. beside: its paths of `BESIDE`."""
    kinds: dict[str, type[BaseModel]] = {**REQUESTS, **{path: BESIDE[path] for path in BESIDE if path in beside}}
    template = reference("{model}")["$ref"]
    _, definitions = models_json_schema([(kind, "validation") for kind in kinds.values()], ref_template=template)
    components: dict[str, Any] = {"schemas": {**definitions["$defs"], **SCHEMAS}}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths = {path: words for path, words in _WORDS.items() if path not in BESIDE or path in kinds}
    return {
        "openapi": "3.2.0",
        "info": {"title": "trimtab", "version": __version__, "description": "OpenAI's API on local models"},
        "paths": {path: _path(path, words, kinds.get(path), has_key) for path, words in paths.items()},
        "components": components,
    }


def _path(path: str, words: str, kind: type[Any] | None, has_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": path.strip("/").replace("/", "_").replace(".", "_").replace("{name}", "name"), "summary": words,
        "responses": {"200": {"description": "The answer", "content": _content(path)}, **_refusals(path, kind, has_key)},
    }  # fmt: skip
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    if kind is not None:
        content = {"application/json": {"schema": reference(kind.__name__)}}
        operation["requestBody"] = {"required": path != RELOAD, "content": content}
    if has_key and path not in _OPEN:
        operation["security"] = [{"key": []}]
    return {"get" if kind is None else "post": operation}


def _content(path: str) -> dict[str, Any]:
    whole, event = ANSWERS[path]
    content: dict[str, Any] = {}
    if whole is not None:
        content["application/json"] = {"schema": whole}
    if event is not None:
        content["text/event-stream"] = {"itemSchema": event}
    return content or {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}


def _refusals(path: str, kind: type[Any] | None, has_key: bool) -> dict[str, Any]:
    words = {**_ALWAYS, **(_POSTED if kind is not None else {})}
    if "{name}" in path:
        words[404] = _POSTED[404]
    if has_key and path not in _OPEN:
        words[401] = "A valid API key is required"
    if path in ADMIN_PATHS:
        words[403] = "An admin key is required, or this server is not administered over HTTP"
    responses = {}
    for status, text in sorted(words.items()):
        schema = reference("Error")
        if path in ANTHROPICS:
            schema = {"anyOf": [reference("AnthropicError"), schema]}
        if (path, status) == ("/ready", 503):
            schema = {"anyOf": [reference("Health"), schema]}
        responses[str(status)] = {"description": text, "content": {"application/json": {"schema": schema}}}
    return responses
