"""A client's request becomes jobs: values beyond the limits are refused here, before anything waits or computes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from trimtab.adapter_names import check_mix, mix_name
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.runtime.content_parts import empty_place
from trimtab.serve import calling, media
from trimtab.serve.cut_media import Cut
from trimtab.serve.job import Job
from trimtab.serve.schema import check_ends
from trimtab.serve.settings import Limits
from trimtab.serve.wire import (
    AssistantMessage,
    AudioPart,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ImagePart,
    TextPart,
)

# More characters than a token ever has: a text above this times the context cannot fit, and is not worth tokenizing.
TOKEN_CHARACTERS = 256


class Names(Protocol):
    """What knows the models and adapters of a server: the pool."""

    def resolve(self, model_id: str, *, field: str = "model") -> tuple[str, str | None]: ...


def voice_of(pool: Names, asked: Any) -> tuple[str, str | None]:
    """Return (model, adapter or mix) that a request names in `model` and `adapter`. Errors: RequestError, UnknownModelError."""
    model, adapter = pool.resolve(asked.model)
    given = asked.adapter
    if given is None:
        return model, adapter
    if adapter is not None:
        raise RequestError(
            "the model names an adapter already", field="adapter", hint="Name the model alone, or leave it out"
        )
    if not isinstance(given, str):
        check_mix(given, field="adapter")
        given = mix_name(given)
    return pool.resolve(f"{model}:{given}", field="adapter")


def jobs_of(
    asked: ChatRequest | CompletionRequest, prompts: Sequence[Any], *, adapter: str | None, context_tokens: int,
    limits: Limits, deadline_s: float | None, client: str = "",
) -> list[Job]:  # fmt: skip
    """Return a job for each choice of each prompt, a prompt's choices side by side. Errors: RequestError."""
    if len(prompts) * asked.n > limits.n:
        field = "n" if asked.n > limits.n or len(prompts) == 1 else "prompt"
        raise RequestError(f"this server gives at most {limits.n} choices", field=field)
    is_chat = isinstance(asked, ChatRequest)
    for prompt in prompts:
        check_length(prompt, context_tokens, "messages" if is_chat else "prompt")
    top = chat_logprobs(asked) if isinstance(asked, ChatRequest) else asked.logprobs
    schema = schema_of(asked, limits) if isinstance(asked, ChatRequest) else None
    calls = calling.calls_of(asked, limits) if isinstance(asked, ChatRequest) else {}
    if schema is not None and calls.get("must_call") is not None:
        raise RequestError("cannot be combined with response_format", field="tool_choice")
    requests = [generate_request(asked, context_tokens=context_tokens, limits=limits, index=i) for i in range(asked.n)]
    groups = [uuid.uuid4().hex if asked.n > 1 else "" for _ in prompts]
    return [
        Job(
            uuid.uuid4().hex, prompt, request, group=group, adapter=adapter, deadline_s=deadline_s, top_logprobs=top, schema=schema,
            fills_context=fills_context(asked), client=client, **calls,
            prompt_logprobs=asked.prompt_logprobs if request is requests[0] else None,
            continue_final_message=isinstance(asked, ChatRequest) and bool(asked.continue_final_message),
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for request in requests
    ]  # fmt: skip


def check_length(prompt: Any, context_tokens: int, field: str) -> None:
    """Refuse at once what cannot fit whatever its tokens are; the worker, which counts them, refuses the rest."""
    if isinstance(prompt, dict):
        count = len(prompt["text"]) // TOKEN_CHARACTERS
    elif isinstance(prompt[0], int):
        count = len(prompt)
    else:
        count = sum(_characters(message["content"]) for message in prompt) // TOKEN_CHARACTERS
    if count > context_tokens:
        raise RequestError(f"is longer than the context of {context_tokens} tokens", field=field)


def _characters(content: Any) -> int:
    if isinstance(content, str) or content is None:
        return len(content or "")
    return sum(len(part["text"]) for part in content if part["type"] == "text")


def fills_context(asked: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer may take what the prompt leaves of the context."""
    return _wanted_tokens(asked) is None


def _wanted_tokens(asked: ChatRequest | CompletionRequest) -> int | None:
    given = getattr(asked, "max_completion_tokens", None)
    if given is not None and asked.max_tokens is not None:
        raise RequestError("set this or max_tokens, not both", field="max_completion_tokens", value=given)
    return given if given is not None else asked.max_tokens


def generate_request(
    asked: ChatRequest | CompletionRequest, *, context_tokens: int, limits: Limits, index: int = 0
) -> GenerateRequest:
    """Return how one choice is drawn. index: which of `n` choices; each has a seed of its own. Errors: RequestError.

    Without max_tokens the answer may fill the context, as OpenAI's may; how much of it the prompt takes is known in the
    worker, which shortens it.
    """
    wanted = _wanted_tokens(asked)
    if wanted is not None and wanted > context_tokens:
        raise RequestError(f"the context has {context_tokens} tokens", field="max_tokens", value=wanted)
    if wanted is not None and limits.max_tokens is not None and wanted > limits.max_tokens:
        raise RequestError(f"this server answers at most {limits.max_tokens} tokens", field="max_tokens", value=wanted)
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    longest = min(context_tokens, limits.max_tokens or context_tokens)
    common: dict[str, Any] = {
        "max_new_tokens": wanted if wanted is not None else longest, "stop": stop,
        "repetition_penalty": asked.repetition_penalty, "presence_penalty": asked.presence_penalty or 0.0,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "logit_bias": tuple((int(token), bias) for token, bias in (asked.logit_bias or {}).items()),
    }  # fmt: skip
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if temperature == 0:
        # The most likely token is in every cut and needs no draw: these change nothing, and clients send them.
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
    if wanted is None or wanted.type != "json_schema":
        if wanted is not None and wanted.json_schema is not None:
            raise RequestError(f"has no effect with type {wanted.type}", field="response_format.json_schema")
        return {} if wanted is not None and wanted.type == "json_object" else None
    if wanted.json_schema is None:
        raise RequestError("is missing", field="response_format.json_schema")
    field = "response_format.json_schema.schema"
    try:
        size = len(json.dumps(wanted.json_schema.schema_, allow_nan=False))
    except ValueError as exc:  # numbers that are none, or longer than Python writes
        raise RequestError("contains a number that JSON does not allow", field=field) from exc
    if size > limits.schema_bytes:
        raise RequestError(f"is larger than {limits.schema_bytes} bytes", field=field)
    check_ends(wanted.json_schema.schema_, field=field)
    return wanted.json_schema.schema_


def chat_logprobs(asked: ChatRequest) -> int | None:
    """Return how many most likely tokens to tell with each, None for no logprobs. Errors: RequestError."""
    if not asked.logprobs:
        if asked.top_logprobs is not None:
            raise RequestError("has no effect without logprobs", field="top_logprobs", value=asked.top_logprobs)
        return None
    return asked.top_logprobs or 0


def check_shape(asked: ChatRequest | CompletionRequest) -> None:
    """Raise RequestError for fields that have no effect together."""
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("has no effect without stream", field="stream_options")
    if asked.prompt_logprobs is not None and asked.stream:
        raise RequestError("not supported: prompt_logprobs in a stream", field="prompt_logprobs")
    if isinstance(asked, ChatRequest):
        check_continued(asked)


def check_continued(asked: ChatRequest) -> None:
    """Raise RequestError for a last message that an answer cannot continue, and for what cannot hold half an answer."""
    field = "continue_final_message"
    if not asked.continue_final_message:
        if asked.add_generation_prompt is False:
            raise RequestError(f"not supported: false without {field}", field="add_generation_prompt")
        return
    if asked.add_generation_prompt:
        raise RequestError(f"cannot be combined with {field}", field="add_generation_prompt")
    last, path = asked.messages[-1], f"messages[{len(asked.messages) - 1}]"
    if not isinstance(last, AssistantMessage):
        raise RequestError(f"must be assistant: {field} continues its text", field=f"{path}.role", value=last.role)
    if last.tool_calls:
        raise RequestError("the answer cannot continue a message with calls", field=f"{path}.tool_calls")
    texts = [last.content] if isinstance(last.content, str) else [getattr(p, "text", "") for p in last.content or ()]
    if not texts or not texts[-1].strip():
        raise RequestError("does not end with a text that the answer could continue", field=f"{path}.content")
    if asked.response_format is not None and asked.response_format.type != "text":
        raise RequestError("cannot hold an answer that continues a message", field="response_format")
    if asked.tool_choice not in (None, "none", "auto"):
        raise RequestError("cannot hold an answer that continues a message", field="tool_choice")


# Messages -------------------------------------------------------------------------------------------------------------


def _media_parts(asked: ChatRequest) -> Iterator[tuple[str, ImagePart | AudioPart]]:
    """Yield every part that is not text, with its path in the request."""
    for place, message in enumerate(asked.messages):
        parts = () if message.content is None or isinstance(message.content, str) else message.content
        for number, part in enumerate(parts):
            if not isinstance(part, TextPart):
                yield f"messages[{place}].content[{number}]", part


def check_media(asked: ChatRequest, *, takes: Sequence[str], limits: Limits) -> None:
    """Raise RequestError for more messages or media than allowed, or of a kind that the model does not take."""
    if len(asked.messages) > limits.messages:
        raise RequestError(f"has more than {limits.messages} messages", field="messages")
    for count, (field, part) in enumerate(_media_parts(asked)):
        kind = "image" if isinstance(part, ImagePart) else "audio"
        if kind not in takes:
            raise RequestError(f"this model takes {', '.join(takes)}", field=field, value=part.type)
        if count >= limits.media_count:
            raise RequestError(f"this server takes at most {limits.media_count} images and audio clips", field=field)


def urls_of(asked: ChatRequest) -> dict[str, str]:
    """Return the http(s) addresses of pictures, each with the path of its first field."""
    found: dict[str, str] = {}
    for field, part in _media_parts(asked):
        if isinstance(part, ImagePart) and part.image_url.url[:8].lower().startswith(("http://", "https://")):
            found.setdefault(part.image_url.url, f"{field}.image_url.url")
    return found


def messages_of(
    asked: ChatRequest, *, limits: Limits, fetched: Mapping[str, bytes], cut: Cut | None = None
) -> list[dict[str, Any]]:
    """Return the messages in the worker's form, media as bytes. fetched: address -> bytes. cut: what was taken out of the body.

    Errors: RequestError.
    """
    made: list[dict[str, Any]] = []
    for place, message in enumerate(asked.messages):
        role = "system" if message.role == "developer" else message.role
        head = {"role": role, **calling.beside(message, place, limits)}
        if message.content is None or isinstance(message.content, str):
            made.append({**head, "content": message.content})
            continue
        parts = [
            _part(part, f"messages[{place}].content[{number}]", limits, fetched, cut or {})
            for number, part in enumerate(message.content)
        ]
        made.append({**head, "content": parts})
    if (empty := empty_place(made)) is not None:
        raise RequestError("is empty: there is no prompt", field=f"messages[{empty}].content")
    return calling.with_names(made)


def _part(part: Any, field: str, limits: Limits, fetched: Mapping[str, bytes], cut: Cut) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        url, field = part.image_url.url, f"{field}.image_url.url"
        data = fetched[url] if url in fetched else media.from_data_url(url, field=field, cut=cut)
        return media.image_part(media.check_image(data, field=field, limits=limits), detail=part.image_url.detail)
    field = f"{field}.input_audio"
    data = media.from_text(part.input_audio.data, field=f"{field}.data", cut=cut)
    return media.sound_part(media.check_sound(data, part.input_audio.format, field=field, limits=limits))


def prompts_of(asked: CompletionRequest | EmbeddingsRequest, *, field: str = "prompt") -> list[Any]:
    """Return every prompt of a request: {"text": ...} or a list of token ids. field: where they stand. Errors: RequestError."""
    prompt: Any = getattr(asked, field)
    if isinstance(prompt, str):
        prompt = [prompt]
    if prompt and isinstance(prompt[0], int):
        prompt = [prompt]
    for place, item in enumerate(prompt):
        if not item:
            raise RequestError("is empty", field=field if len(prompt) == 1 else f"{field}[{place}]")
    if not prompt:
        raise RequestError("is empty", field=field)
    return [{"text": item} if isinstance(item, str) else list(item) for item in prompt]
