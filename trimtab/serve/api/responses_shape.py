"""Responses of OpenAI's Responses API: a response of items, whole or as named events.

Source: OpenAI's API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from trimtab.serve.api import answer_types as types
from trimtab.serve.api.answers import NamedEvents, Part
from trimtab.serve.contract.job import Event

_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponsesShape(NamedEvents):
    """body: the request as a chat. given: the request itself, which an answer repeats in part."""

    prefix = "resp_"

    def __init__(self, body: Any, given: Any) -> None:
        super().__init__(body)
        self._given = given.model_dump(
            by_alias=True, exclude_none=True, include={"instructions", "max_output_tokens", "tools", "tool_choice", "text"}
        )
        self._output: list[types.ResponseItem] = []
        self._item_id = ""
        self._count = -1

    # Events -----------------------------------------------------------------------------------------------------------

    def opening(self, choices: int) -> list[types.ResponseStart]:
        response = self._started()
        return [
            {"type": "response.created", **self._number(), "response": response},
            {"type": "response.in_progress", **self._number(), "response": response},
        ]

    def begun(self, part: Part) -> list[types.ItemEvent | types.PartEvent]:
        self._item_id = f"{_PREFIXES[part.kind]}{uuid.uuid4().hex}"
        added: types.ItemEvent = {
            "type": "response.output_item.added", **self._number(), "output_index": len(self._output),
            "item": self._item(part, "in_progress"),
        }  # fmt: skip
        if part.kind != "text":
            return [added]
        return [added, {"type": "response.content_part.added", **self._of_part(), "part": _text(part)}]

    def grown(self, part: Part, text: str) -> types.ResponseEvent:
        if part.kind == "text":
            return {"type": "response.output_text.delta", **self._of_part(), "delta": text, "logprobs": []}
        if part.kind == "reasoning":
            return {"type": "response.reasoning_text.delta", **self._of_part(), "delta": text}
        return {"type": "response.function_call_arguments.delta", **self._of_item(), "delta": text}

    def ended(self, part: Part) -> list[types.ResponseEvent]:
        events: list[types.ResponseEvent] = []
        if part.kind == "text":
            events = [
                {"type": "response.output_text.done", **self._of_part(), "text": part.text, "logprobs": []},
                {"type": "response.content_part.done", **self._of_part(), "part": _text(part)},
            ]
        elif part.kind == "reasoning":
            events = [{"type": "response.reasoning_text.done", **self._of_part(), "text": part.text}]
        else:
            fields: types.CalledFunction = {"name": part.name, "arguments": part.text}
            events = [{"type": "response.function_call_arguments.done", **self._of_item(), **fields}]
        item = self._item(part, self._status())
        added = len(self._output)
        self._output.append(item)
        return [*events, {"type": "response.output_item.done", **self._number(), "output_index": added, "item": item}]

    def finished(self, event: Event) -> list[types.ResponseEnd]:
        kind: Literal["response.incomplete", "response.completed"] = "response.incomplete"
        if (response := self.whole())["status"] == "completed":
            kind = "response.completed"
        return [{"type": kind, **self._number(), "response": response}]

    def _number(self) -> types.Numbered:
        self._count += 1
        return {"sequence_number": self._count}

    def _of_item(self) -> types.OfItem:
        return {**self._number(), "item_id": self._item_id, "output_index": len(self._output)}

    def _of_part(self) -> types.OfPart:
        return {**self._of_item(), "content_index": 0}

    def _item(self, part: Part, status: types.ItemStatus) -> types.ResponseItem:
        """Return a part as an item, which has no content while it is in progress."""
        is_open = status == "in_progress"
        if part.kind == "text":
            content = [] if is_open else [_text(part)]
            return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}
        if part.kind == "reasoning":
            thoughts: list[types.ResponseThought] = [] if is_open else [{"type": "reasoning_text", "text": part.text}]
            return {"id": self._item_id, "type": "reasoning", "status": status, "summary": [], "content": thoughts}
        call: types.CalledFunction = {"name": part.name, "arguments": part.text}
        return {"id": self._item_id, "type": "function_call", "status": status, "call_id": part.call_id, **call}

    # The whole answer -------------------------------------------------------------------------------------------------

    def _started(self) -> types.StartedResponse:
        fields = self._given
        return {
            "id": self.head["id"], "object": "response", "created_at": self.head["created"], "status": "in_progress",
            "error": None, "incomplete_details": None, "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"), "model": self.body.model, "output": [],
            "parallel_tool_calls": self.body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": self.body.reasoning_effort, "summary": None}, "store": False,
            "temperature": 1.0 if self.body.temperature is None else self.body.temperature,
            "text": fields["text"] if fields.get("text") else {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice", "auto"), "tools": fields.get("tools", []),
            "top_p": 1.0 if self.body.top_p is None else self.body.top_p,
            "truncation": "disabled", "usage": None, "user": self.body.user, "metadata": {},
        }  # fmt: skip

    def _usage(self) -> types.ResponseUsage:
        return {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }  # fmt: skip

    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self.finishes.get(0) == "length" else "completed"

    def whole(self) -> types.Response:
        status = self._status()
        return {
            **self._started(), "status": status, "output": self._output, "usage": self._usage(),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }  # fmt: skip


def _text(part: Part) -> types.ResponseText:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
