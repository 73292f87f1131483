"""Responses of Anthropic's Messages API: a message of blocks, whole or as named events.

Source: Anthropic's API reference, "Messages" and "Streaming messages". The number of prompt tokens is known only at the
end of a stream: `message_start` has 0, `message_delta` the number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from trimtab.serve.api import answer_types as types
from trimtab.serve.api.answers import NamedEvents, Part
from trimtab.serve.contract.job import Event

# HTTP status -> Anthropic's name of the error.
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_object(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error of trimtab in Anthropic's form; its other fields are kept."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


def as_anthropics(response: Response) -> Response:
    """Return a response with an error of trimtab in Anthropic's form, including its headers."""
    body = error_object(response.status_code, json.loads(bytes(response.body)))
    headers = {name: value for name, value in response.headers.items() if name not in ("content-length", "content-type")}
    return JSONResponse(body, response.status_code, headers=headers)


class MessagesShape(NamedEvents):
    prefix = "msg_"

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self._blocks: list[types.AnthropicBlock] = []
        self._stop: types.Stop = {"stop_reason": "end_turn", "stop_sequence": None}

    def opening(self, choices: int) -> list[types.MessageStart]:
        return [{"type": "message_start", "message": self._started()}]

    def begun(self, part: Part) -> list[types.BlockStart]:
        return [{"type": "content_block_start", "index": len(self._blocks), "content_block": _block(part)}]

    def grown(self, part: Part, text: str) -> types.BlockDelta:
        delta: types.TextDelta | types.ThinkingDelta | types.InputDelta = {"type": "text_delta", "text": text}
        if part.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        elif part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def ended(self, part: Part) -> list[types.BlockStop]:
        self._blocks.append(_block(part))
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def finished(self, event: Event) -> list[types.MessageDelta | types.MessageStop]:
        reasons: dict[str, types.StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
        stop_text = event.usage.get("stop_text")
        reason = reasons.get(self.finishes[0], "end_turn" if stop_text is None else "stop_sequence")
        self._stop = {"stop_reason": reason, "stop_sequence": stop_text}
        return [{"type": "message_delta", "delta": self._stop, "usage": self._usage()}, {"type": "message_stop"}]

    def error(self, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        return error_object(status, body)

    def _usage(self) -> types.AnthropicUsage:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens, "output_tokens": self.completion_tokens,
            "cache_read_input_tokens": self.cached_tokens, "cache_creation_input_tokens": 0,
        }  # fmt: skip

    def _started(self) -> types.StartedMessage:
        return {
            "id": self.head["id"], "type": "message", "role": "assistant", "model": self.body.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip

    def whole(self) -> types.AnthropicMessage:
        return {**self._started(), "content": self._blocks, **self._stop, "usage": self._usage()}


def _block(part: Part) -> types.AnthropicBlock:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(part.text)}


def _arguments(text: str) -> types.Object:
    """Return a call's arguments. Incomplete arguments are returned as text, under a special name."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"not_json": text}
