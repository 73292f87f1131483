"""What does the server answer: which type has each response and streamed chunk?"""

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


# Other forms ----------------------------------------------------------------------------------------------------------

Response = TypedDict("Response", {
    "id": str, "object": Literal["response"], "created_at": Count, "model": str, "output": list[Object],
    "status": Literal["completed", "incomplete"], "usage": Object,
})  # fmt: skip

Response.__pydantic_config__ = {"extra": "allow"}  # type: ignore[attr-defined]
AnthropicUsage = TypedDict("AnthropicUsage", {
    "input_tokens": Count, "output_tokens": Count, "cache_read_input_tokens": Count, "cache_creation_input_tokens": Count,
})  # fmt: skip
AnthropicMessage = TypedDict("AnthropicMessage", {
    "id": str, "type": Literal["message"], "role": Literal["assistant"], "model": str, "content": list[Object],
    "stop_reason": Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"], "stop_sequence": str | None,
    "usage": AnthropicUsage,
})  # fmt: skip
TokenCount = TypedDict("TokenCount", {"input_tokens": Count})
Embedding = TypedDict("Embedding", {"object": Literal["embedding"], "index": Count, "embedding": str | list[float]})
EmbeddingsUsage = TypedDict("EmbeddingsUsage", {"prompt_tokens": Count, "total_tokens": Count})
Embeddings = TypedDict("Embeddings", {"object": Literal["list"], "model": str, "usage": EmbeddingsUsage, "data": list[Embedding]})
Tokens = TypedDict("Tokens", {"count": Count, "max_model_len": Count, "tokens": list[Count], "token_strs": list[str] | None})
TokensText = TypedDict("TokensText", {"prompt": str})
