"""JSON schemas of the server's responses: the response half of the API's description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(fields: Mapping[str, Schema], *, maybe: Mapping[str, Schema] | None = None, others: bool = False) -> Schema:
    """Return the schema of an object that has every one of the fields. maybe: fields that it may have. others: and any."""
    return {
        "type": "object", "properties": {**fields, **(maybe or {})}, "required": list(fields), "additionalProperties": others
    }  # fmt: skip


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


# A token id -> its entry in that place; null for the first token.
_SCORED: Schema = _list(_or_null({"type": "object", "additionalProperties": _object(
    {"logprob": NUMBER, "rank": COUNT, "decoded_token": TEXT})}))  # fmt: skip


def _answer(name: str, choice: Mapping[str, Schema]) -> Schema:
    head = {"id": TEXT, "created": COUNT, "model": TEXT, "object": {"const": name}}
    scored = {"prompt_logprobs": _SCORED}
    choices = _list(_object({"index": COUNT, **choice, "finish_reason": FINISH}, maybe=scored))
    return _object({**head, "choices": choices}, maybe={"usage": _or_null(reference("Usage")), **scored})


def _events(chunk: Schema) -> Schema:
    """Return the schema of one server-sent event of a stream, whose last one is [DONE] if the answer is whole."""

    def data(schema: Schema) -> Schema:
        return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}

    # An event without a name is called "message" where it is read.
    message = {"const": "message"}
    return {
        "type": "object", "required": ["data"],
        "anyOf": [
            {"title": "the end", "properties": {"event": message, "data": {"const": "[DONE]"}}},
            {"title": "an error, the last event", "required": ["event"],
             "properties": {"event": {"const": "error"}, "data": data(reference("Error"))}},
            {"title": "a piece", "properties": {"event": message, "data": data(chunk)}},
        ],
    }  # fmt: skip


_BYTES = _list({"type": "integer", "minimum": 0, "maximum": 255})
_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _BYTES}
_CHAT_LOGPROBS = _object({
    "content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})), "refusal": {"type": "null"},
})  # fmt: skip
_TEXT_LOGPROBS = _object({
    "tokens": _list(TEXT), "token_logprobs": _list(NUMBER), "text_offset": _list(COUNT),
    "top_logprobs": _list({"type": "object", "additionalProperties": NUMBER}),
})  # fmt: skip
_FORM = {"enum": ["full", "int8"]}
_MODEL = _object(
    {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "root": TEXT, "parent": _or_null(TEXT)},
    maybe={"max_model_len": COUNT, "output_head": _FORM, "kv": _FORM},
)
_FUNCTION = {"name": TEXT, "arguments": TEXT}
_CALL = _object({"id": TEXT, "type": {"const": "function"}, "function": _object(_FUNCTION)})
_CALL_PIECE = _object({"index": COUNT, "function": _object({}, maybe=_FUNCTION)}, maybe={"id": TEXT, "type": {"const": "function"}})
_THOUGHT = {"reasoning_content": TEXT}
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(TEXT), "refusal": {"type": "null"}},
    maybe={**_THOUGHT, "tool_calls": _list(_CALL)},
)
_DELTA = _object({}, maybe={"role": {"const": "assistant"}, "content": TEXT, **_THOUGHT, "tool_calls": _list(_CALL_PIECE)})
_ERROR = {
    "message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT), "class": TEXT, "fields": {"type": "object"},
}  # fmt: skip

_ANY: Schema = {"type": "object"}


def _events_by_name(errors: Schema) -> Schema:
    """Return the schema of an event whose name is its type; the last one may be an error."""
    data = {"type": "string", "contentMediaType": "application/json"}
    return {
        "type": "object", "required": ["data", "event"],
        "anyOf": [
            {"title": "an error, the last event",
             "properties": {"event": {"const": "error"}, "data": {**data, "contentSchema": errors}}},
            {"title": "a piece", "properties": {
                "event": TEXT, "data": {**data, "contentSchema": {"type": "object", "required": ["type"]}}}},
        ],
    }  # fmt: skip


SCHEMAS: Mapping[str, Schema] = {
    "AnthropicError": _object({"type": {"const": "error"}, "error": _object(_ERROR)}),
    "Response": _object(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "model": TEXT,
            "output": _list(_ANY),
            "status": {"enum": ["completed", "incomplete"]},
            "usage": _ANY,
        },
        others=True,
    ),
    "AnthropicMessage": _object(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": _list(_ANY),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _or_null(TEXT),
            "usage": _object(
                dict.fromkeys(("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"), COUNT)
            ),
        }
    ),
    "TokenCount": _object({"input_tokens": COUNT}),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "model": TEXT,
            "usage": _object({"prompt_tokens": COUNT, "total_tokens": COUNT}),
            "data": _list(
                _object({"object": {"const": "embedding"}, "index": COUNT, "embedding": {"anyOf": [TEXT, _list(NUMBER)]}})
            ),
        }
    ),
    "Tokens": _object({"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT), "token_strs": _or_null(_list(TEXT))}),
    "TokensText": _object({"prompt": TEXT}),
    "Error": _object({"error": _object(_ERROR)}),
    "Usage": _object(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        },
        maybe={"output_head": _FORM, "kv": _FORM},
    ),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(reference("Model"))}),
    "ChatCompletion": _answer("chat.completion", {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS)}),
    "ChatCompletionChunk": _answer("chat.completion.chunk", {"delta": _DELTA, "logprobs": _or_null(_CHAT_LOGPROBS)}),
    "Completion": _answer("text_completion", {"text": TEXT, "logprobs": _or_null(_TEXT_LOGPROBS)}),
    "AdapterChanged": _object({"status": {"enum": ["loaded", "unloaded"]}, "lora_name": TEXT}),
    "Reloaded": _object(
        {
            "status": {"const": "reloaded"},
            **{name: _list(TEXT) for name in ("changed", "loaded", "unloaded", "needs_restart", "problems")},
        }
    ),
    "Health": _object({"status": TEXT}),
    "Status": _object({"models": _list({"type": "object"}), "requests": _list({"type": "object"})}),
}

# Path -> schema of its answer, and of each event if it is streamed. Text is no JSON.
ANSWERS: Mapping[str, tuple[Schema | None, Schema | None]] = {
    "/health": (reference("Health"), None), "/ready": (reference("Health"), None), "/metrics": (None, None),
    "/openapi.json": ({"type": "object"}, None), "/v1/models": (reference("ModelList"), None),
    "/v1/models/{name}": (reference("Model"), None), "/api/status": (reference("Status"), None),
    "/v1/chat/completions": (reference("ChatCompletion"), _events(reference("ChatCompletionChunk"))),
    "/v1/completions": (reference("Completion"), _events(reference("Completion"))),
    "/v1/responses": (reference("Response"), _events_by_name(reference("Error"))),
    "/v1/messages": (reference("AnthropicMessage"), _events_by_name(reference("AnthropicError"))),
    "/v1/messages/count_tokens": (reference("TokenCount"), None), "/v1/embeddings": (reference("Embeddings"), None),
    "/tokenize": (reference("Tokens"), None), "/detokenize": (reference("TokensText"), None),
    "/v1/load_lora_adapter": (reference("AdapterChanged"), None),
    "/v1/unload_lora_adapter": (reference("AdapterChanged"), None),
    "/admin/reload": (reference("Reloaded"), None),
}  # fmt: skip
