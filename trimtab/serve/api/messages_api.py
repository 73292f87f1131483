"""How do requests of Anthropic's Messages API become chats, and answers its messages, whole or as named events?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse, Response

from trimtab.errors import RequestError
from trimtab.serve.api import answer_types, schemas
from trimtab.serve.api.answers import NamedEvents, Part
from trimtab.serve.api.schemas import (
    FIRST_ERROR,
    Adapter,
    ChatRequest,
    Count,
    FunctionName,
    Label,
    Name,
    StopText,
    Strict,
    Text,
    text_or_list,
)
from trimtab.serve.contract.field_names import Names
from trimtab.serve.contract.job import Event
from trimtab.serve.contract.plain_values import check_values


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: Text
    citations: None = None


TextOrBlocks = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[TextBlock], FIRST_ERROR, Tag("<list>")],
    Discriminator(text_or_list, custom_error_type="content", custom_error_message="must be a text or a list of blocks"),
]


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/webp"]
    data: str


class UrlSource(Strict):
    type: Literal["url"]
    url: str


Source = Annotated[
    Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
    Discriminator(schemas.kind_of, custom_error_type="source", custom_error_message="its type must be base64 or url"),
]


class ImageBlock(_Block):
    type: Literal["image"]
    source: Source


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Label
    name: FunctionName
    input: Annotated[dict[str, Any], Field(default_factory=dict)]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: TextOrBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking")
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")],
    Discriminator(schemas.kind_of, custom_error_type="block", custom_error_message=f"its type must be one of {', '.join(BLOCKS)}"),
]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[Block], FIRST_ERROR, Tag("<list>")],
        Discriminator(text_or_list, custom_error_type="content", custom_error_message="must be a text or a list of blocks"),
    ]  # fmt: skip


class ToolDefinition(_Block):
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    # Accepted, but not enforced.
    budget_tokens: Count | None = None


class Metadata(Strict):
    user_id: Label | None = None


class _Question(Strict):
    has_limits = True
    model: Name
    # Beyond Anthropic's: as for a chat.
    adapter: Adapter | None = None
    messages: Annotated[list[Turn], Field(min_length=1), FIRST_ERROR]
    system: TextOrBlocks | None = None
    tools: Annotated[list[ToolDefinition], FIRST_ERROR] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None


# Source: Anthropic's API reference, "Messages" (version 2023-06-01). `cache_control` is accepted without effect.
class MessagesRequest(_Question):
    """POST /v1/messages."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16), FIRST_ERROR] | None = None
    stream: bool = False
    # The client's label; no answer depends on it.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class CountRequest(_Question):
    """POST /v1/messages/count_tokens."""


# Fields of the chat -> those of the request. Messages and their parts: see `_messages`.
_NAMES = {
    "stop": "stop_sequences", "reasoning_effort": "thinking.type", "chat_template_kwargs": "thinking",
    "chat_template_kwargs.enable_thinking": "thinking.type", "chat_template_kwargs.reasoning_effort": "thinking.type",
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip


def chat_of(body: MessagesRequest | CountRequest, *, longest: int = 2**31 - 1) -> tuple[ChatRequest, Names]:
    """Return the request as a chat, and the request's names of the chat's fields. longest: the upper limit of
    max_tokens, which this API requires.

    Errors: RequestError for a block where it is not allowed.
    """
    messages, places = _messages(body)
    names = {**_NAMES, **places}
    for place, _ in enumerate(body.tools or ()):
        names[f"tools[{place}].function"] = f"tools[{place}]"
        names[f"tools[{place}].function.parameters"] = f"tools[{place}].input_schema"
    fields: dict[str, Any] = {"model": body.model, "adapter": body.adapter, "messages": messages}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        # As in Anthropic's API, the answer continues the last message.
        fields["continue_final_message"] = True
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        fields |= {"chat_template_kwargs": {"enable_thinking": True}} if is_on else {"reasoning_effort": "none"}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": min(body.max_tokens, longest), "stream": body.stream, "temperature": body.temperature,
            "top_p": body.top_p,
        }  # fmt: skip
        fields |= {"top_k": body.top_k, "stop": body.stop_sequences or None}
    return schemas.chat_of(fields, names), names


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: Choice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("is allowed with the type tool only", field="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": named if choice.name else {"any": "required"}.get(choice.type, choice.type)}
    return fields | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def _messages(body: MessagesRequest | CountRequest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the messages of the chat, and the paths of each and of its parts in the request."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        names |= {"messages[0]": "system", "messages[0].content": "system"}
        messages.append({"role": "system", "content": text})
    for place, turn in enumerate(body.messages):
        field = f"messages[{place}]"
        if isinstance(turn.content, str):
            turn_messages: list[tuple[dict[str, Any], dict[str, str]]] = [({"role": turn.role, "content": turn.content}, {})]
        elif turn.role == "user":
            turn_messages = _user(turn.content, f"{field}.content")
        else:
            turn_messages = [_assistant(turn.content, f"{field}.content")]
        for number, (_, places) in enumerate(turn_messages, start=len(messages)):
            names[f"messages[{number}]"] = field
            names |= {f"messages[{number}].{part}": name for part, name in places.items()}
        messages += [message for message, _ in turn_messages]
    return messages, names


def _user(blocks: Sequence[Any], field: str) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return the messages of a user's blocks, each with the paths of its parts."""
    results: list[tuple[dict[str, Any], dict[str, str]]] = []
    parts: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for place, block in enumerate(blocks):
        own, part = f"{field}[{place}]", f"content[{len(parts)}]"
        match block:
            case ToolResultBlock():
                text = block.content or ""
                text = text if isinstance(text, str) else "\n".join(part.text for part in text)
                text = f"Error: {text}" if block.is_error else text
                message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
                results.append((message, {"content": f"{own}.content", "tool_call_id": f"{own}.tool_use_id"}))
            case TextBlock():
                places[part] = own
                parts.append({"type": "text", "text": block.text})
            case ImageBlock(source=Base64Source() as source):
                places |= {part: own, f"{part}.image_url": f"{own}.source", f"{part}.image_url.url": f"{own}.source.data"}
                parts.append({"type": "image_url", "image_url": {"url": f"data:{source.media_type};base64,{source.data}"}})
            case ImageBlock(source=UrlSource() as source):
                places |= {part: own, f"{part}.image_url": f"{own}.source", f"{part}.image_url.url": f"{own}.source.url"}
                parts.append({"type": "image_url", "image_url": {"url": source.url}})
            case _:
                raise RequestError(f"a user's message has no {block.type}", field=own)
    return [*results, *([({"role": "user", "content": parts}, places)] if parts or not results else [])]


def _assistant(blocks: Sequence[Any], field: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the message of an assistant's blocks, with the paths of its parts."""
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for place, block in enumerate(blocks):
        own = f"{field}[{place}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                places.setdefault("reasoning_content", f"{own}.thinking")
                thoughts.append(block.thinking)
            case ToolUseBlock():
                check_values(block.input, field=f"{own}.input")
                call = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                part = f"tool_calls[{len(calls)}]"
                places |= {part: own, f"{part}.function": own, f"{part}.function.arguments": f"{own}.input"}
                places.setdefault("tool_calls", field)
                calls.append({"id": block.id, "type": "function", "function": call})
            case _:
                raise RequestError(f"an assistant's message has no {block.type}", field=own)
    fields: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    fields |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return fields | ({"tool_calls": calls} if calls else {}), places


# Answers --------------------------------------------------------------------------------------------------------------

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
        self._blocks: list[answer_types.AnthropicBlock] = []
        self._stop: answer_types.Stop = {"stop_reason": "end_turn", "stop_sequence": None}

    def opening(self, choices: int) -> list[answer_types.MessageStart]:
        return [{"type": "message_start", "message": self._started()}]

    def begun(self, part: Part) -> list[answer_types.BlockStart]:
        return [{"type": "content_block_start", "index": len(self._blocks), "content_block": _block(part)}]

    def grown(self, part: Part, text: str) -> answer_types.BlockDelta:
        delta: answer_types.TextDelta | answer_types.ThinkingDelta | answer_types.InputDelta = {"type": "text_delta", "text": text}
        if part.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        elif part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def ended(self, part: Part) -> list[answer_types.BlockStop]:
        self._blocks.append(_block(part))
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def finished(self, event: Event) -> list[answer_types.MessageDelta | answer_types.MessageStop]:
        reasons: dict[str, answer_types.StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
        stop_text = event.usage.get("stop_text")
        reason = reasons.get(self.finishes[0], "end_turn" if stop_text is None else "stop_sequence")
        self._stop = {"stop_reason": reason, "stop_sequence": stop_text}
        return [{"type": "message_delta", "delta": self._stop, "usage": self._usage()}, {"type": "message_stop"}]

    def error(self, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        return error_object(status, body)

    def _usage(self) -> answer_types.AnthropicUsage:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens, "output_tokens": self.completion_tokens,
            "cache_read_input_tokens": self.cached_tokens, "cache_creation_input_tokens": 0,
        }  # fmt: skip

    def _started(self) -> answer_types.StartedMessage:
        return {
            "id": self.head["id"], "type": "message", "role": "assistant", "model": self.body.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip

    def whole(self) -> answer_types.AnthropicMessage:
        return {**self._started(), "content": self._blocks, **self._stop, "usage": self._usage()}


def _block(part: Part) -> answer_types.AnthropicBlock:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(part.text)}


def _arguments(text: str) -> answer_types.Object:
    """Return a call's arguments. Incomplete arguments are returned as text, under a special name."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"not_json": text}
