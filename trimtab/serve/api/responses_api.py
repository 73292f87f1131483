"""How do requests of OpenAI's Responses API become chats, and answers its responses, whole or as named events?"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from trimtab.errors import RequestError
from trimtab.serve.api import answer_types, schemas
from trimtab.serve.api.answers import NamedEvents, Part
from trimtab.serve.api.schemas import (
    FIRST_ERROR,
    Adapter,
    AudioPart,
    ChatRequest,
    Count,
    EmptyList,
    FunctionName,
    Label,
    Name,
    OnlyFalse,
    Strict,
    Text,
    text_or_list,
    text_or_object,
)
from trimtab.serve.contract.field_names import Names
from trimtab.serve.contract.job import Event


class InputText(Strict):
    type: Literal["input_text"]
    text: Text


class OutputText(Strict):
    type: Literal["output_text"]
    text: Text
    annotations: EmptyList | None = None
    logprobs: EmptyList | None = None


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None
    file_id: None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


PARTS = ("input_text", "input_image", "input_audio", "output_text")
InputPart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[AudioPart, Tag("<input_audio>")]
    | Annotated[OutputText, Tag("<output_text>")],
    Discriminator(schemas.kind_of, custom_error_type="part", custom_error_message=f"its type must be one of {', '.join(PARTS)}"),
]
Parts = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[InputPart], FIRST_ERROR, Tag("<list>")],
    Discriminator(text_or_list, custom_error_type="content", custom_error_message="must be a text or a list of parts"),
]


class _Item(Strict):
    # Fields that an answer adds, and clients send back.
    id: Label | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class MessageItem(_Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Label | None = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: Text = ""


class FunctionOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: Parts


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], FIRST_ERROR] | None = None
    content: Annotated[list[ReasoningText], FIRST_ERROR] | None = None
    encrypted_content: None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind or 'message'}>"


ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_kind, custom_error_type="item", custom_error_message=f"its type must be one of {', '.join(ITEMS)}"),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Strict):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: Label | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    summary: None = None


# Source: OpenAI's API reference, "Responses". The server stores nothing: `input` has the whole conversation, and fields that refer
# to stored state are refused by name.
class ResponsesRequest(Strict):
    """POST /v1/responses."""

    has_limits = True
    model: Name
    # Beyond OpenAI's: as for a chat.
    adapter: Adapter | None = None
    input: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), FIRST_ERROR, Tag("<list>")],
        Discriminator(text_or_list, custom_error_type="input", custom_error_message="must be a text or a list of items"),
    ]  # fmt: skip
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], FIRST_ERROR] | None = None
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ChosenTool, Tag("<object>")],
        Discriminator(
            text_or_object, custom_error_type="choice", custom_error_message="must be none, auto, required or a function"
        ),
    ] | None = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    # Accepted at the values that change nothing.
    store: OnlyFalse | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    include: EmptyList | None = None
    truncation: Literal["disabled"] | None = None
    background: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None


# Fields of the chat -> those of the request. For parts of a message, see `_messages`.
_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "chat_template_kwargs": "reasoning",
    "chat_template_kwargs.reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "response_format.type": "text.format.type", "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}  # fmt: skip


def chat_of(body: ResponsesRequest) -> tuple[ChatRequest, Names]:
    """Return the same request as a chat, and the request's names of its fields. Errors: RequestError."""
    messages, places = _messages(body)
    names = {**_NAMES, **places}
    for place, _ in enumerate(body.tools or ()):
        names[f"tools[{place}].function"] = f"tools[{place}]"
    fields: dict[str, Any] = {
        "model": body.model, "adapter": body.adapter, "messages": messages,
        "temperature": body.temperature, "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens, "stream": bool(body.stream), "user": body.user,
        "parallel_tool_calls": body.parallel_tool_calls,
    }  # fmt: skip
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in body.tools
        ]
    if isinstance(body.tool_choice, ChosenTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    else:
        fields["tool_choice"] = body.tool_choice
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    return schemas.chat_of(fields, names), names


def _format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.name is None or text_format.schema_ is None:
        raise RequestError("needs a name and a schema", field="text.format")
    return {
        "type": "json_schema",
        "json_schema": {"name": text_format.name, "schema": text_format.schema_, "strict": text_format.strict},
    }


def _messages(body: ResponsesRequest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the messages of the chat, and the paths of each and of its parts in the request."""
    messages: list[dict[str, Any]] = []
    # For each message: its path and the paths of its parts.
    places: list[dict[str, str]] = []

    def add(message: dict[str, Any], field: str, **parts: str) -> dict[str, Any]:
        messages.append(message)
        places.append({"": field, **parts})
        return message

    if body.instructions:
        add({"role": "system", "content": body.instructions}, "instructions", content="instructions")
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    # An assistant's reasoning, text and calls are separate items, but one message of a chat.
    turn: dict[str, Any] | None = None
    thoughts: list[str] = []
    for place, item in enumerate(items):
        field = "input" if isinstance(body.input, str) else f"input[{place}]"
        is_ours = not isinstance(item, FunctionOutputItem) and getattr(item, "role", "assistant") == "assistant"
        if not is_ours:
            turn = None
        elif turn is None or (isinstance(item, MessageItem) and turn["content"] is not None):
            turn, thoughts = add({"role": "assistant", "content": None}, field), []
        match item:
            case MessageItem(role="assistant"):
                assert turn is not None
                turn["content"] = _text(item.content, f"{field}.content")
                places[-1]["content"] = f"{field}.content"
            case MessageItem():
                content = field if isinstance(body.input, str) else f"{field}.content"
                add({"role": item.role, "content": _content(item.content)}, field, content=content)
                if not isinstance(item.content, str):
                    places[-1] |= _part_places(item.content, content)
            case FunctionCallItem():
                assert turn is not None
                call = {"name": item.name, "arguments": item.arguments}
                calls = turn.setdefault("tool_calls", [])
                places[-1].setdefault("tool_calls", field)
                places[-1][f"tool_calls[{len(calls)}]"] = field
                places[-1][f"tool_calls[{len(calls)}].function"] = field
                calls.append({"id": item.call_id, "type": "function", "function": call})
            case FunctionOutputItem():
                text = _text(item.output, f"{field}.output")
                message = {"role": "tool", "tool_call_id": item.call_id, "content": text}
                add(message, field, content=f"{field}.output", tool_call_id=f"{field}.call_id")
            case ReasoningItem():
                assert turn is not None
                thoughts += [part.text for part in item.content or ()]
                places[-1].setdefault("reasoning_content", f"{field}.content")
        if turn is not None and thoughts and (place + 1 == len(items) or not isinstance(items[place + 1], ReasoningItem)):
            turn["reasoning_content"] = "".join(thoughts)
    # Reasoning without a following item is no message.
    kept = [at for at, m in enumerate(messages) if m["role"] != "assistant" or m["content"] is not None or "tool_calls" in m]
    names = {
        f"messages[{number}]{'.' if part else ''}{part}": field
        for number, at in enumerate(kept)
        for part, field in places[at].items()
    }
    return [messages[at] for at in kept], names


def _part_places(parts: Sequence[Any], field: str) -> dict[str, str]:
    """Return the paths of images among the parts of a message: the other parts have the chat's paths."""
    images = [place for place, part in enumerate(parts) if isinstance(part, InputImage)]
    return {
        f"content[{place}].image_url{inner}": f"{field}[{place}].{name}"
        for place in images
        for inner, name in (("", "image_url"), (".url", "image_url"), (".detail", "detail"))
    }


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if isinstance(part, InputImage):
            raise RequestError("not supported: an image here", field=f"{field}[{place}]")
        if isinstance(part, AudioPart):
            raise RequestError("not supported: audio here", field=f"{field}[{place}]")
    return "".join(part.text for part in content)


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputImage):
            parts.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
        elif isinstance(part, AudioPart):
            parts.append(part.model_dump())
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


# Answers --------------------------------------------------------------------------------------------------------------

_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponsesShape(NamedEvents):
    """body: the request as a chat. given: the request itself, which an answer repeats in part. Source: OpenAI's API reference,
    "Responses" and "Streaming events"."""

    prefix = "resp_"

    def __init__(self, body: Any, given: Any) -> None:
        super().__init__(body)
        self._given = given.model_dump(
            by_alias=True, exclude_none=True, include={"instructions", "max_output_tokens", "tools", "tool_choice", "text"}
        )
        self._output: list[answer_types.ResponseItem] = []
        self._item_id = ""
        self._count = -1

    # Events -----------------------------------------------------------------------------------------------------------

    def opening(self, choices: int) -> list[answer_types.ResponseStart]:
        response = self._started()
        return [
            {"type": "response.created", **self._number(), "response": response},
            {"type": "response.in_progress", **self._number(), "response": response},
        ]

    def begun(self, part: Part) -> list[answer_types.ItemEvent | answer_types.PartEvent]:
        self._item_id = f"{_PREFIXES[part.kind]}{uuid.uuid4().hex}"
        added: answer_types.ItemEvent = {
            "type": "response.output_item.added", **self._number(), "output_index": len(self._output),
            "item": self._item(part, "in_progress"),
        }  # fmt: skip
        if part.kind != "text":
            return [added]
        return [added, {"type": "response.content_part.added", **self._of_part(), "part": _output_text(part)}]

    def grown(self, part: Part, text: str) -> answer_types.ResponseEvent:
        if part.kind == "text":
            return {"type": "response.output_text.delta", **self._of_part(), "delta": text, "logprobs": []}
        if part.kind == "reasoning":
            return {"type": "response.reasoning_text.delta", **self._of_part(), "delta": text}
        return {"type": "response.function_call_arguments.delta", **self._of_item(), "delta": text}

    def ended(self, part: Part) -> list[answer_types.ResponseEvent]:
        events: list[answer_types.ResponseEvent] = []
        if part.kind == "text":
            events = [
                {"type": "response.output_text.done", **self._of_part(), "text": part.text, "logprobs": []},
                {"type": "response.content_part.done", **self._of_part(), "part": _output_text(part)},
            ]
        elif part.kind == "reasoning":
            events = [{"type": "response.reasoning_text.done", **self._of_part(), "text": part.text}]
        else:
            fields: answer_types.CalledFunction = {"name": part.name, "arguments": part.text}
            events = [{"type": "response.function_call_arguments.done", **self._of_item(), **fields}]
        item = self._item(part, self._status())
        added = len(self._output)
        self._output.append(item)
        return [*events, {"type": "response.output_item.done", **self._number(), "output_index": added, "item": item}]

    def finished(self, event: Event) -> list[answer_types.ResponseEnd]:
        kind: Literal["response.incomplete", "response.completed"] = "response.incomplete"
        if (response := self.whole())["status"] == "completed":
            kind = "response.completed"
        return [{"type": kind, **self._number(), "response": response}]

    def _number(self) -> answer_types.Numbered:
        self._count += 1
        return {"sequence_number": self._count}

    def _of_item(self) -> answer_types.OfItem:
        return {**self._number(), "item_id": self._item_id, "output_index": len(self._output)}

    def _of_part(self) -> answer_types.OfPart:
        return {**self._of_item(), "content_index": 0}

    def _item(self, part: Part, status: answer_types.ItemStatus) -> answer_types.ResponseItem:
        """Return a part as an item, which has no content while it is in progress."""
        is_open = status == "in_progress"
        if part.kind == "text":
            content = [] if is_open else [_output_text(part)]
            return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}
        if part.kind == "reasoning":
            thoughts: list[answer_types.ResponseThought] = [] if is_open else [{"type": "reasoning_text", "text": part.text}]
            return {"id": self._item_id, "type": "reasoning", "status": status, "summary": [], "content": thoughts}
        call: answer_types.CalledFunction = {"name": part.name, "arguments": part.text}
        return {"id": self._item_id, "type": "function_call", "status": status, "call_id": part.call_id, **call}

    # The whole answer -------------------------------------------------------------------------------------------------

    def _started(self) -> answer_types.StartedResponse:
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

    def _usage(self) -> answer_types.ResponseUsage:
        return {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }  # fmt: skip

    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self.finishes.get(0) == "length" else "completed"

    def whole(self) -> answer_types.Response:
        status = self._status()
        return {
            **self._started(), "status": status, "output": self._output, "usage": self._usage(),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }  # fmt: skip


def _output_text(part: Part) -> answer_types.ResponseText:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
