"""What does the server answer: which type has each response and streamed chunk or event?"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

# Responses are dicts of these types: mypy checks who makes them, and nothing is validated while an answer is sent.
Count = Annotated[int, Field(ge=0)]
Object = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls"] | None
Form = Literal["full", "int8"]

Health = TypedDict("Health", {"status": str})
Status = TypedDict("Status", {"models": list[Object], "requests": list[Object]})
Model = TypedDict("Model", {
    "id": str, "object": Literal["model"], "created": Count, "owned_by": str, "root": str, "parent": str | None,
    "max_model_len": NotRequired[Count], "output_head": NotRequired[Form], "kv": NotRequired[Form],
})  # fmt: skip
ModelList = TypedDict("ModelList", {"object": Literal["list"], "data": list[Model]})
AdapterChanged = TypedDict("AdapterChanged", {"status": Literal["loaded", "unloaded"], "lora_name": str})
Reloaded = TypedDict("Reloaded", {
    "status": Literal["reloaded"], "changed": list[str], "loaded": list[str], "unloaded": list[str], "needs_restart": list[str],
    "problems": list[str],
})  # fmt: skip

# Errors ---------------------------------------------------------------------------------------------------------------

ErrorBody = TypedDict("ErrorBody", {
    "message": str, "type": str, "param": str | None, "code": str | None, "class": str, "fields": Object,
})  # fmt: skip
Error = TypedDict("Error", {"error": ErrorBody})
AnthropicError = TypedDict("AnthropicError", {"type": Literal["error"], "error": ErrorBody})

# OpenAI's chats and completions ---------------------------------------------------------------------------------------

Cached = TypedDict("Cached", {"cached_tokens": Count})
Usage = TypedDict("Usage", {
    "prompt_tokens": Count, "completion_tokens": Count, "total_tokens": Count, "prompt_tokens_details": Cached,
    "output_head": NotRequired[Form], "kv": NotRequired[Form],
})  # fmt: skip
Scored = TypedDict("Scored", {"logprob": float, "rank": Count, "decoded_token": str})
# A token id -> its entry in that place; null for the first token.
PromptScores = list[dict[str, Scored] | None]
Byte = Annotated[int, Field(ge=0, le=255)]
TokenLogprob = TypedDict("TokenLogprob", {"token": str, "logprob": float, "bytes": list[Byte]})
TopLogprobs = TypedDict("TopLogprobs", {"token": str, "logprob": float, "bytes": list[Byte], "top_logprobs": list[TokenLogprob]})
ChatLogprobs = TypedDict("ChatLogprobs", {"content": list[TopLogprobs], "refusal": None})
TextLogprobs = TypedDict("TextLogprobs", {
    "tokens": list[str], "token_logprobs": list[float], "top_logprobs": list[dict[str, float]], "text_offset": list[Count],
})  # fmt: skip
CalledFunction = TypedDict("CalledFunction", {"name": str, "arguments": str})
Call = TypedDict("Call", {"id": str, "type": Literal["function"], "function": CalledFunction})
FunctionPiece = TypedDict("FunctionPiece", {"name": NotRequired[str], "arguments": NotRequired[str]})
CallPiece = TypedDict("CallPiece", {
    "index": Count, "function": FunctionPiece, "id": NotRequired[str], "type": NotRequired[Literal["function"]],
})  # fmt: skip
Message = TypedDict("Message", {
    "role": Literal["assistant"], "content": str | None, "refusal": None, "reasoning_content": NotRequired[str],
    "tool_calls": NotRequired[list[Call]],
})  # fmt: skip
Delta = TypedDict("Delta", {
    "role": NotRequired[Literal["assistant"]], "content": NotRequired[str], "reasoning_content": NotRequired[str],
    "tool_calls": NotRequired[list[CallPiece]],
})  # fmt: skip
ChatChoice = TypedDict("ChatChoice", {
    "index": Count, "message": Message, "logprobs": ChatLogprobs | None, "finish_reason": Finish,
    "prompt_logprobs": NotRequired[PromptScores],
})  # fmt: skip
ChunkChoice = TypedDict("ChunkChoice", {
    "index": Count, "delta": Delta, "logprobs": ChatLogprobs | None, "finish_reason": Finish,
    "prompt_logprobs": NotRequired[PromptScores],
})  # fmt: skip
TextChoice = TypedDict("TextChoice", {
    "index": Count, "text": str, "logprobs": TextLogprobs | None, "finish_reason": Finish,
    "prompt_logprobs": NotRequired[PromptScores],
})  # fmt: skip
Head = TypedDict("Head", {
    "id": str, "created": Count, "model": str, "usage": NotRequired[Usage | None], "prompt_logprobs": NotRequired[PromptScores],
})  # fmt: skip


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[TextChoice]


# Anthropic's messages, and the events of their streams ----------------------------------------------------------------

AnthropicUsage = TypedDict("AnthropicUsage", {
    "input_tokens": Count, "output_tokens": Count, "cache_read_input_tokens": Count, "cache_creation_input_tokens": Count,
})  # fmt: skip
AnthropicText = TypedDict("AnthropicText", {"type": Literal["text"], "text": str})
AnthropicThinking = TypedDict("AnthropicThinking", {"type": Literal["thinking"], "thinking": str, "signature": str})
AnthropicToolUse = TypedDict("AnthropicToolUse", {"type": Literal["tool_use"], "id": str, "name": str, "input": Object})
AnthropicBlock = AnthropicText | AnthropicThinking | AnthropicToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
Stop = TypedDict("Stop", {"stop_reason": StopReason, "stop_sequence": str | None})
NoStop = TypedDict("NoStop", {"stop_reason": None, "stop_sequence": None})
_Message = TypedDict("_Message", {
    "id": str, "type": Literal["message"], "role": Literal["assistant"], "model": str, "content": list[AnthropicBlock],
    "usage": AnthropicUsage,
})  # fmt: skip


class AnthropicMessage(_Message, Stop):
    """A whole message."""


class StartedMessage(_Message, NoStop):
    """A message before its first block."""


MessageStart = TypedDict("MessageStart", {"type": Literal["message_start"], "message": StartedMessage})
BlockStart = TypedDict("BlockStart", {"type": Literal["content_block_start"], "index": Count, "content_block": AnthropicBlock})
TextDelta = TypedDict("TextDelta", {"type": Literal["text_delta"], "text": str})
ThinkingDelta = TypedDict("ThinkingDelta", {"type": Literal["thinking_delta"], "thinking": str})
InputDelta = TypedDict("InputDelta", {"type": Literal["input_json_delta"], "partial_json": str})
BlockDelta = TypedDict("BlockDelta", {
    "type": Literal["content_block_delta"], "index": Count, "delta": TextDelta | ThinkingDelta | InputDelta,
})  # fmt: skip
BlockStop = TypedDict("BlockStop", {"type": Literal["content_block_stop"], "index": Count})
MessageDelta = TypedDict("MessageDelta", {"type": Literal["message_delta"], "delta": Stop, "usage": AnthropicUsage})
MessageStop = TypedDict("MessageStop", {"type": Literal["message_stop"]})
MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop

# OpenAI's responses, and the events of their streams ------------------------------------------------------------------

Nothing = Annotated[list[Object], Field(max_length=0)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseText = TypedDict("ResponseText", {
    "type": Literal["output_text"], "text": str, "annotations": Nothing, "logprobs": Nothing,
})  # fmt: skip
ResponseThought = TypedDict("ResponseThought", {"type": Literal["reasoning_text"], "text": str})
ResponseMessage = TypedDict("ResponseMessage", {
    "id": str, "type": Literal["message"], "status": ItemStatus, "role": Literal["assistant"], "content": list[ResponseText],
})  # fmt: skip
ResponseReasoning = TypedDict("ResponseReasoning", {
    "id": str, "type": Literal["reasoning"], "status": ItemStatus, "summary": Nothing, "content": list[ResponseThought],
})  # fmt: skip
ResponseCall = TypedDict("ResponseCall", {
    "id": str, "type": Literal["function_call"], "status": ItemStatus, "call_id": str, "name": str, "arguments": str,
})  # fmt: skip
ResponseItem = ResponseMessage | ResponseReasoning | ResponseCall
# What an answer repeats of its request.
Effort = TypedDict("Effort", {"effort": str | None, "summary": None})
TextForm = TypedDict("TextForm", {
    "type": Literal["text", "json_object", "json_schema"], "name": NotRequired[str], "description": NotRequired[str],
    "schema": NotRequired[Object], "strict": NotRequired[bool],
})  # fmt: skip
ResponseForm = TypedDict("ResponseForm", {"format": NotRequired[TextForm]})
ResponseTool = TypedDict("ResponseTool", {
    "type": Literal["function"], "name": str, "description": NotRequired[str], "parameters": NotRequired[Object],
    "strict": NotRequired[bool],
})  # fmt: skip
ChosenName = TypedDict("ChosenName", {"type": Literal["function"], "name": str})
Incomplete = TypedDict("Incomplete", {"reason": Literal["max_output_tokens"]})
Thought = TypedDict("Thought", {"reasoning_tokens": Count})
ResponseUsage = TypedDict("ResponseUsage", {
    "input_tokens": Count, "input_tokens_details": Cached, "output_tokens": Count, "output_tokens_details": Thought,
    "total_tokens": Count,
})  # fmt: skip
_Response = TypedDict("_Response", {
    "id": str, "object": Literal["response"], "created_at": Count, "error": None, "instructions": str | None,
    "max_output_tokens": Count | None, "model": str, "output": list[ResponseItem], "parallel_tool_calls": bool,
    "previous_response_id": None, "reasoning": Effort, "store": Literal[False], "temperature": float, "text": ResponseForm,
    "tool_choice": Literal["none", "auto", "required"] | ChosenName, "tools": list[ResponseTool], "top_p": float,
    "truncation": Literal["disabled"], "user": str | None, "metadata": Object,
})  # fmt: skip


class Response(_Response):
    status: Literal["completed", "incomplete"]
    incomplete_details: Incomplete | None
    usage: ResponseUsage


class StartedResponse(_Response):
    status: Literal["in_progress"]
    incomplete_details: None
    usage: None


Numbered = TypedDict("Numbered", {"sequence_number": Count})
OfItem = TypedDict("OfItem", {"sequence_number": Count, "item_id": str, "output_index": Count})
OfPart = TypedDict("OfPart", {"sequence_number": Count, "item_id": str, "output_index": Count, "content_index": Count})
ResponseStart = TypedDict("ResponseStart", {
    "type": Literal["response.created", "response.in_progress"], "sequence_number": Count, "response": StartedResponse,
})  # fmt: skip
ResponseEnd = TypedDict("ResponseEnd", {
    "type": Literal["response.completed", "response.incomplete"], "sequence_number": Count, "response": Response,
})  # fmt: skip
ItemEvent = TypedDict("ItemEvent", {
    "type": Literal["response.output_item.added", "response.output_item.done"], "sequence_number": Count, "output_index": Count,
    "item": ResponseItem,
})  # fmt: skip


class PartEvent(OfPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: ResponseText


class ReasoningDelta(OfPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(OfPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class OutputDelta(OfPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: Nothing


class OutputDone(OfPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: Nothing


class ArgumentsDelta(OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(OfItem, CalledFunction):
    type: Literal["response.function_call_arguments.done"]


ResponseEvent = (
    ResponseStart | ItemEvent | PartEvent | ReasoningDelta | ReasoningDone | OutputDelta | OutputDone | ArgumentsDelta
    | ArgumentsDone | ResponseEnd
)  # fmt: skip

# Other forms ----------------------------------------------------------------------------------------------------------

TokenCount = TypedDict("TokenCount", {"input_tokens": Count})
Embedding = TypedDict("Embedding", {"object": Literal["embedding"], "index": Count, "embedding": str | list[float]})
EmbeddingsUsage = TypedDict("EmbeddingsUsage", {"prompt_tokens": Count, "total_tokens": Count})
Embeddings = TypedDict("Embeddings", {"object": Literal["list"], "model": str, "usage": EmbeddingsUsage, "data": list[Embedding]})
Tokens = TypedDict("Tokens", {"count": Count, "max_model_len": Count, "tokens": list[Count], "token_strs": list[str] | None})
TokensText = TypedDict("TokensText", {"prompt": str})
