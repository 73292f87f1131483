"""What is the API's OpenAPI description?"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from typing_extensions import get_type_hints

from trimtab._version import __version__
from trimtab.serve.api.admission import OPEN_PATHS
from trimtab.serve.api.answer_types import AnthropicError, Error, Health, Object
from trimtab.serve.api.routes import ANTHROPICS, BESIDE, ROUTES, Described
from trimtab.serve.contract.settings import ADMIN_PATHS, RELOAD

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
_TEMPLATE = "#/components/schemas/{model}"
Schema = dict[str, Any]


class _AnswerSchemas(GenerateJsonSchema):
    """Answers have no other fields than those of their types."""

    def typed_dict_schema(self, schema: Any) -> Schema:
        found = super().typed_dict_schema(schema)
        found.pop("title", None)
        return {"additionalProperties": False, **found}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def description(*, has_key: bool, beside: Collection[str] = ()) -> Schema:
    """Return the description. has_key: whether this server requires an API key. beside: its paths of `BESIDE`. Version 3.2 is the
    first that can describe the events of a stream (`itemSchema`)."""
    routes = {**ROUTES, **{path: BESIDE[path] for path in BESIDE if path in beside}}
    _, bodies = models_json_schema(
        [(route.body, "validation") for route in routes.values() if route.body is not None], ref_template=_TEMPLATE
    )
    kinds = {kind.__name__: kind for route in (*ROUTES.values(), *BESIDE.values())
             for kind in (route.answer, *(get_args(route.event) or (route.event,)))
             if kind not in (None, Object)} | {kind.__name__: kind for kind in (Error, AnthropicError)}  # fmt: skip
    _, answers = TypeAdapter.json_schemas(
        [(name, "serialization", TypeAdapter(kinds[name])) for name in sorted(kinds)],
        ref_template=_TEMPLATE, schema_generator=_AnswerSchemas,
    )  # fmt: skip
    components: Schema = {"schemas": {**bodies["$defs"], **answers["$defs"]}}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.2.0", "info": {"title": "trimtab", "version": __version__, "description": "OpenAI's API on local models"},
        "paths": {path: _path(path, route, has_key) for path, route in routes.items()}, "components": components,
    }  # fmt: skip


def _reference(kind: Any) -> Schema:
    return {"type": "object"} if kind is Object else {"$ref": _TEMPLATE.format(model=kind.__name__)}


def _path(path: str, route: Described, has_key: bool) -> Schema:
    operation: Schema = {
        "operationId": path.strip("/").replace("/", "_").replace(".", "_").replace("{name}", "name"), "summary": route.words,
        "responses": {"200": {"description": "The answer", "content": _content(path, route)}, **_refusals(path, route, has_key)},
    }  # fmt: skip
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    if route.body is not None:
        operation["requestBody"] = {"required": path != RELOAD, "content": {"application/json": {"schema": _reference(route.body)}}}
    if has_key and path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]
    return {"get" if route.body is None else "post": operation}


def _content(path: str, route: Described) -> Schema:
    if route.answer is None:
        return {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}
    content: Schema = {"application/json": {"schema": _reference(route.answer)}}
    if route.event is not None:
        content["text/event-stream"] = {"itemSchema": _events(route.event, AnthropicError if path in ANTHROPICS else Error)}
    return content


def _events(kind: Any, error_kind: Any) -> Schema:
    """Return the schema of one server-sent event of a stream; the last one may be an error. Pieces without a name end with [DONE]
    if the answer is whole."""

    def event(title: str, name: Schema, schema: Schema) -> Schema:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
        return {"title": title, "properties": {"event": name, "data": data}}

    error = event("an error, the last event", {"const": "error"}, _reference(error_kind))
    if named := get_args(kind):
        pieces = [event("a piece", {"enum": list(get_args(get_type_hints(one)["type"]))}, _reference(one)) for one in named]
        return {"type": "object", "required": ["data", "event"], "anyOf": [error, *pieces]}
    message = {"const": "message"}  # an event without a name is called so where it is read
    return {
        "type": "object", "required": ["data"],
        "anyOf": [
            {"title": "the end", "properties": {"event": message, "data": {"const": "[DONE]"}}}, {**error, "required": ["event"]},
            event("a piece", message, _reference(kind)),
        ],
    }  # fmt: skip


def _refusals(path: str, route: Described, has_key: bool) -> Schema:
    words = {**_ALWAYS, **(_POSTED if route.body is not None else {})}
    if "{name}" in path:
        words[404] = _POSTED[404]
    if has_key and path not in OPEN_PATHS:
        words[401] = "A valid API key is required"
    if path in ADMIN_PATHS:
        words[403] = "An admin key is required, or this server is not administered over HTTP"
    responses = {}
    for status, text in sorted(words.items()):
        schema = _reference(Error)
        other = AnthropicError if path in ANTHROPICS else Health if (path, status) == ("/ready", 503) else None
        if other is not None:
            schema = {"anyOf": [_reference(other), schema]}
        responses[str(status)] = {"description": text, "content": {"application/json": {"schema": schema}}}
    return responses
