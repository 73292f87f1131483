"""The API's description in OpenAPI's form, made from the shapes that the server itself reads requests with."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import trimtab
from trimtab.serve.faults import BUG, ERRORS, HTTP_CODES
from trimtab.serve.wire import REQUESTS

_REFERENCE = "#/components/schemas/{model}"
_WORDS = {
    "/health": "Whether this process answers", "/ready": "Whether a model could answer now",
    "/metrics": "Numbers in Prometheus' text form", "/v1/models": "Every model and adapter that can be asked",
    "/v1/models/{name}": "One of them", "/api/status": "What the page shows",
    "/v1/chat/completions": "Answer a chat, whole or as a stream of server-sent events",
    "/v1/completions": "Go on with a text or token ids", "/v1/load_lora_adapter": "Load an adapter below the server's folder",
    "/v1/unload_lora_adapter": "Forget an adapter",
}  # fmt: skip
_OPEN = ("/health", "/ready")


def description(*, has_key: bool) -> dict[str, Any]:
    """Return the description. has_key: whether this server asks for an API key."""
    _, found = models_json_schema([(kind, "validation") for kind in REQUESTS.values()], ref_template=_REFERENCE)
    schemas = {**found["$defs"], "Error": _error_schema()}
    components: dict[str, Any] = {"schemas": schemas}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trimtab", "version": trimtab.__version__, "description": "OpenAI's API on local models"},
        "paths": {path: _path(path, words, has_key) for path, words in _WORDS.items()},
        "components": components,
    }


def _path(path: str, words: str, has_key: bool) -> dict[str, Any]:
    kind = REQUESTS.get(path)
    told: dict[str, Any] = {
        "operationId": path.strip("/").replace("/", "_").replace("{name}", "name"), "summary": words,
        "responses": {"200": {"description": "The answer"}},
    }  # fmt: skip
    if "{name}" in path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if kind is not None:
        schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        told["responses"] |= _refusals()
    if path.endswith("completions"):
        told["responses"]["200"]["content"] = {
            "application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}},
        }  # fmt: skip
    if has_key and path not in _OPEN:
        told["security"] = [{"key": []}]
    return {"get" if kind is None else "post": told}


def _refusals() -> dict[str, Any]:
    statuses = {status for status, _, _ in (*ERRORS.values(), BUG)} | set(HTTP_CODES)
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {str(status): {"description": "Refused", "content": content} for status in sorted(statuses)}


def _error_schema() -> dict[str, Any]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    fields = {
        "message": text, "type": text, "param": maybe, "code": maybe, "class": text, "fields": {"type": "object"},
    }  # fmt: skip
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
