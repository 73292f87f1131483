"""What clients send, in OpenAI's shapes: every field known and checked, and turned into jobs.

A field that is not listed here is refused by name, and so is one whose value this server does not honour: nothing is
silently ignored. Fields beyond OpenAI's (`top_k`, `min_p`, `repetition_penalty`) have the names and meanings of vLLM's.
Defaults are OpenAI's, temperature 1 among them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve import media
from trimtab.serve.settings import Limits

Text = Annotated[str, Field(max_length=4 * 2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class ImageUrl(_Strict):
    url: str
    detail: Literal["auto"] | None = None


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(_Strict):
    data: str
    format: str


class AudioPart(_Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | ImagePart | AudioPart, Field(discriminator="type")]


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]


class StreamOptions(_Strict):
    include_usage: bool = False


class JsonSchema(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class _Sampling(_Strict):
    model: Name
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    # Accepted at the value that changes nothing; clients send it.
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None  # a label of the client's own; no answer depends on it


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None


class LoadAdapterRequest(_Strict):
    """POST /v1/load_lora_adapter, vLLM's shape."""

    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    model: Name | None = None


class UnloadAdapterRequest(_Strict):
    """POST /v1/unload_lora_adapter, vLLM's shape."""

    lora_name: Name
    model: Name | None = None


# To jobs --------------------------------------------------------------------------------------------------------------


def fills_context(asked: _Sampling) -> bool:
    """Whether the answer may take what the prompt leaves of the context."""
    return asked.max_tokens is None and getattr(asked, "max_completion_tokens", None) is None


def generate_request(asked: _Sampling, *, context_tokens: int, limits: Limits, index: int = 0) -> GenerateRequest:
    """Return how one choice is drawn. index: which of `n` choices; each has a seed of its own. Errors: RequestError.

    Without max_tokens the answer may fill the context, as OpenAI's may; how much of it the prompt takes is known in the
    worker, which shortens it.
    """
    given = getattr(asked, "max_completion_tokens", None)
    if given is not None and asked.max_tokens is not None:
        raise RequestError("give it or max_tokens, not both", field="max_completion_tokens", value=given)
    wanted = given if given is not None else asked.max_tokens
    if wanted is not None and limits.max_tokens is not None and wanted > limits.max_tokens:
        raise RequestError(f"this server answers at most {limits.max_tokens} tokens", field="max_tokens", value=wanted)
    if asked.n > limits.n:
        raise RequestError(f"this server gives at most {limits.n} choices", field="n", value=asked.n)
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    longest = min(context_tokens, limits.max_tokens or context_tokens)
    common: dict[str, Any] = {
        "max_new_tokens": wanted if wanted is not None else longest, "stop": stop,
        "repetition_penalty": asked.repetition_penalty,
    }  # fmt: skip
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if temperature == 0:
        # The likeliest token is in every cut and needs no draw: these change nothing, and clients send them.
        return GenerateRequest(**common, temperature=0.0)
    return GenerateRequest(
        **common, temperature=temperature,
        top_p=asked.top_p if asked.top_p != 1 else None,
        top_k=asked.top_k if asked.top_k not in (0, -1) else None,
        min_p=asked.min_p or None,
        seed=None if asked.seed is None else (asked.seed + index) % 2**63,
    )  # fmt: skip


def schema_of(asked: ChatRequest, limits: Limits) -> Mapping[str, Any] | None:
    """Return the JSON schema that the answer is held to, {} for any object, None for free text. Errors: RequestError."""
    wanted = asked.response_format
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise RequestError("has no effect with type text", field="response_format.json_schema")
        return None
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise RequestError("needs type json_schema", field="response_format.json_schema")
        return {}
    if wanted.json_schema is None:
        raise RequestError("is missing", field="response_format.json_schema")
    if len(wanted.json_schema.model_dump_json()) > limits.schema_bytes:
        raise RequestError(f"is larger than {limits.schema_bytes} bytes", field="response_format.json_schema")
    return wanted.json_schema.schema_


def chat_logprobs(asked: ChatRequest) -> int | None:
    """Return how many likeliest tokens to tell with each, None for no logprobs. Errors: RequestError."""
    if not asked.logprobs:
        if asked.top_logprobs is not None:
            raise RequestError("has no effect without logprobs", field="top_logprobs", value=asked.top_logprobs)
        return None
    return asked.top_logprobs or 0


def find_urls(asked: ChatRequest) -> list[str]:
    """Return the http(s) addresses of pictures in a request."""
    parts = [part for message in asked.messages if not isinstance(message.content, str) for part in message.content]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    return [url for url in urls if url.startswith(("http://", "https://"))]


def messages_of(asked: ChatRequest, *, limits: Limits, fetched: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the messages in the worker's form, media as bytes. fetched: address -> bytes. Errors: RequestError."""
    if len(asked.messages) > limits.messages:
        raise RequestError(f"has more than {limits.messages} messages", field="messages")
    made: list[dict[str, Any]] = []
    count = 0
    for place, message in enumerate(asked.messages):
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            made.append({"role": role, "content": message.content})
            continue
        parts = []
        for number, part in enumerate(message.content):
            field = f"messages[{place}].content[{number}]"
            count += not isinstance(part, TextPart)
            if count > limits.media_count:
                raise RequestError(f"this server takes at most {limits.media_count} media", field=field)
            parts.append(_part(part, field, limits, fetched))
        made.append({"role": role, "content": parts})
    return made


def _part(part: Any, field: str, limits: Limits, fetched: Mapping[str, bytes]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        url, field = part.image_url.url, f"{field}.image_url.url"
        if url in fetched:
            return media.image_part(media.check_image(fetched[url], field=field, limits=limits))
        return media.image_part(media.from_data_url(url, field=field, limits=limits))
    field = f"{field}.input_audio"
    data = media.from_base64(part.input_audio.data, field=f"{field}.data")
    return media.sound_part(media.check_sound(data, part.input_audio.format, field=field, limits=limits))


def prompts_of(asked: CompletionRequest) -> list[Any]:
    """Return every prompt of a completion request: {"text": ...} or a list of token ids. Errors: RequestError."""
    prompt: Any = asked.prompt
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if not prompt:
        raise RequestError("is empty", field="prompt")
    if isinstance(prompt[0], int):
        return [list(prompt)]
    if any(not item for item in prompt):
        raise RequestError("holds an empty prompt", field="prompt")
    return [{"text": item} if isinstance(item, str) else list(item) for item in prompt]


# From events ----------------------------------------------------------------------------------------------------------


def chat_logprob_json(tokens: Sequence[Any]) -> dict[str, Any]:
    """Return tokens in the shape of a chat choice's `logprobs`."""
    content: list[dict[str, Any]] = []
    for token in tokens:
        top = [_token_json(text, logprob) for _, text, logprob in token.top]
        content.append(_token_json(token.text, token.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _token_json(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprob_json(tokens: Sequence[Any], offset: int) -> dict[str, Any]:
    """Return tokens in the shape of a completion choice's `logprobs`. offset: characters of the answer before them."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{text: logprob for _, text, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }


def data_url(data: bytes, kind: str) -> str:
    """Return bytes as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
