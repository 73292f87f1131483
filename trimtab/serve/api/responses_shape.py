"""How do answers become responses of OpenAI's Responses API, whole or as named events?"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from trimtab.serve.api.answers import NamedEvents
from trimtab.serve.contract.job import Event


class ResponsesShape(NamedEvents):
    """body: the request as a chat. given: the request itself, which an answer repeats in part. Source: OpenAI's API reference,
    "Responses" and "Streaming events"."""

    prefix = "resp_"

    def __init__(self, body: Any, given: Any) -> None:
        super().__init__(body)
        self._given = given.model_dump(
            by_alias=True, exclude_none=True, include={"instructions", "max_output_tokens", "tools", "tool_choice", "text"}
        )
        self._output: list[dict[str, Any]] = []
        self._kind: str | None = None
        self._count = -1

    # Events -----------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": f"response.{kind}", "sequence_number": self._count, **fields}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def pieces(self, index: int, event: Event) -> list[dict[str, Any]]:
        match event.kind:
            case "text" if event.text:
                events = self._begin("message")
                self._item["content"][0]["text"] += event.text
                return [*events, self._of_part("output_text.delta", delta=event.text, logprobs=[])]
            case "reasoning":
                events = self._begin("reasoning")
                self._item["content"][0]["text"] += event.text
                return [*events, self._of_part("reasoning_text.delta", delta=event.text)]
            case "call":
                assert event.call is not None
                return self._call(event.call)
            case "done":
                return self._done(event)
        return []

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output) - 1}

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, **self._place(), content_index=0, **fields)

    def _begin(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        if self._kind == kind and kind != "function_call":
            return []
        ended, self._kind = self._end(), kind
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._output.append(item)
        added = [self._event("output_item.added", output_index=len(self._output) - 1, item=dict(item))]
        if kind == "message":
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            added.append(self._of_part("content_part.added", part=dict(item["content"][0])))
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        return [*ended, *added]

    def _end(self, status: str = "completed") -> list[dict[str, Any]]:
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        item = self._item
        item["status"] = status
        events = []
        if kind == "message":
            part = item["content"][0]
            events = [
                self._of_part("output_text.done", text=part["text"], logprobs=[]), self._of_part("content_part.done", part=part)
            ]  # fmt: skip
        elif kind == "reasoning":
            events = [self._of_part("reasoning_text.done", text=item["content"][0]["text"])]
        else:
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("function_call_arguments.done", **self._place(), **fields)]
        return [*events, self._event("output_item.done", output_index=len(self._output) - 1, item=item)]

    def _call(self, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "name" in piece:
            return self._begin("function_call", call_id=piece["id"], name=piece["name"], arguments="")
        self._item["arguments"] += piece["arguments"]
        return [self._event("function_call_arguments.delta", **self._place(), delta=piece["arguments"])]

    def _done(self, event: Event) -> list[dict[str, Any]]:
        self.count(event)
        status = "incomplete" if self.finishes[0] == "length" else "completed"
        ended = self._end(status)
        return [*ended, self._event(status, response=self._response(status))]

    # The whole answer -------------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        fields, is_over = self._given, status != "in_progress"
        return {
            "id": self.head["id"], "object": "response", "created_at": self.head["created"], "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.get("instructions"), "max_output_tokens": fields.get("max_output_tokens"),
            "model": self.body.model, "output": list(self._output),
            "parallel_tool_calls": self.body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": self.body.reasoning_effort, "summary": None}, "store": False,
            "temperature": 1.0 if self.body.temperature is None else self.body.temperature,
            "text": fields.get("text") or {"format": {"type": "text"}}, "tool_choice": fields.get("tool_choice", "auto"),
            "tools": fields.get("tools", []), "top_p": 1.0 if self.body.top_p is None else self.body.top_p,
            "truncation": "disabled", "usage": self.usage() if is_over else None, "user": self.body.user, "metadata": {},
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        return self._response("incomplete" if self.finishes.get(0) == "length" else "completed")
