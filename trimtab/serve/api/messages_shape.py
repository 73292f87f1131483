"""How do answers become responses of Anthropic's Messages API, whole or as named events?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from trimtab.serve.api.answer_types import AnthropicUsage
from trimtab.serve.api.answers import NamedEvents
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
    """Source: Anthropic's API reference, "Messages" and "Streaming messages". `message_start` has 0 prompt tokens: their number is
    known at the end, in `message_delta`."""

    prefix = "msg_"

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self._blocks: list[dict[str, Any]] = []
        self._open: str | None = None
        self._finish, self._stop_text = "end_turn", None

    def opening(self, choices: int) -> list[dict[str, Any]]:
        message = {**self._message(), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [{"type": "message_start", "message": message}]

    def pieces(self, index: int, event: Event) -> list[dict[str, Any]]:
        match event.kind:
            case "text" if event.text:
                events = self._begin("text", {"type": "text", "text": ""})
                self._blocks[-1]["text"] += event.text
                return [*events, self._delta({"type": "text_delta", "text": event.text})]
            case "reasoning":
                events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += event.text
                return [*events, self._delta({"type": "thinking_delta", "thinking": event.text})]
            case "call":
                assert event.call is not None
                return self._call(event.call)
            case "done":
                return self._done(event)
        return []

    def _begin(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that open a block, unless one of its kind is open. Each call is a separate block."""
        if self._open == kind and kind != "tool_use":
            return []
        ended = self._end()
        self._open = kind
        self._blocks.append(dict(block))
        return [*ended, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _end(self) -> list[dict[str, Any]]:
        is_open, self._open = self._open is not None, None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if is_open else []

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _call(self, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "name" in piece:
            block = {"type": "tool_use", "id": piece["id"], "name": piece["name"], "input": {}}
            events = self._begin("tool_use", block)
            self._blocks[-1]["written"] = ""
            return events
        self._blocks[-1]["written"] += piece["arguments"]
        return [self._delta({"type": "input_json_delta", "partial_json": piece["arguments"]})]

    def _done(self, event: Event) -> list[dict[str, Any]]:
        self.count(event)
        self._stop_text = event.usage.get("stop_text")
        self._finish = {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.finishes[0], "end_turn")
        if self._stop_text is not None and self._finish == "end_turn":
            self._finish = "stop_sequence"
        delta = {"stop_reason": self._finish, "stop_sequence": self._stop_text}
        return [
            *self._end(), {"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}
        ]  # fmt: skip

    def error(self, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        return error_object(status, body)

    def _message(self) -> dict[str, Any]:
        return {"id": self.head["id"], "type": "message", "role": "assistant", "model": self.body.model, "content": []}

    def _usage(self) -> AnthropicUsage:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens, "output_tokens": self.completion_tokens,
            "cache_read_input_tokens": self.cached_tokens, "cache_creation_input_tokens": 0,
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        content = []
        for block in self._blocks:
            fields = {name: value for name, value in block.items() if name != "written"}
            content.append({**fields, "input": _arguments(block["written"])} if "written" in block else fields)
        ended = {"stop_reason": self._finish, "stop_sequence": self._stop_text}
        return {**self._message(), "content": content, **ended, "usage": self._usage()}


def _arguments(text: str) -> Any:
    """Return a call's arguments. Incomplete arguments are returned as text, under a special name."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"not_json": text}
