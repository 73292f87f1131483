"""A client's request becomes jobs, with its tools and media: values beyond the limits are refused here, before anything waits."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from trimtab.adapter_names import check_mix, mix_name
from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest, empty_place, texts_in
from trimtab.serve.api.admission import BodyLimits, JsonCounter
from trimtab.serve.api.schemas import (
    AssistantMessage,
    AudioPart,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ImagePart,
    TextPart,
    ToolChosen,
)
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.plain_values import check_values
from trimtab.serve.contract.settings import Limits
from trimtab.serve.grammar.call_grammar import NO_PARAMETERS
from trimtab.serve.grammar.schema import check_patterns, check_schema
from trimtab.serve.grammar.schema_cost import check_cost
from trimtab.serve.media import media
from trimtab.serve.media.cut_media import Cut

# More characters than any token has: a text of more than this times the context cannot fit and is not tokenized.
TOKEN_CHARACTERS = 256


class Names(Protocol):
    """The models and adapters of a server; the pool implements it."""

    def resolve(self, model_id: str, *, field: str = "model") -> tuple[str, str | None]: ...


def voice_of(pool: Names, body: Any) -> tuple[str, str | None]:
    """Return the (model, adapter or mix) in a request's `model` and `adapter`. Errors: RequestError, UnknownModelError."""
    model, adapter = pool.resolve(body.model)
    chosen = body.adapter
    if chosen is None:
        return model, adapter
    if adapter is not None:
        raise RequestError("the model names an adapter already", field="adapter", hint="Name the model alone, or leave it out")
    if not isinstance(chosen, str):
        check_mix(chosen, field="adapter")
        chosen = mix_name(chosen)
    return pool.resolve(f"{model}:{chosen}", field="adapter")


def jobs_of(
    body: ChatRequest | CompletionRequest, prompts: Sequence[Any], *, adapter: str | None, context_tokens: int,
    limits: Limits, most_jobs: int,
) -> list[Job]:  # fmt: skip
    """Return a job for each choice of each prompt, the choices of a prompt adjacent. most_jobs: that rows and queue hold. Errors:
    RequestError."""
    most = min(limits.n, most_jobs)
    if len(prompts) * body.n > most:
        field = "n" if body.n > most or len(prompts) == 1 else "prompt"
        who = "this server gives" if most == limits.n else "the rows and the queue of this model hold"
        raise RequestError(f"{who} at most {most} choices", field=field)
    is_chat = isinstance(body, ChatRequest)
    for prompt in prompts:
        check_length(prompt, context_tokens, "messages" if is_chat else "prompt")
    top = chat_logprobs(body) if isinstance(body, ChatRequest) else body.logprobs
    schema = schema_of(body, limits) if isinstance(body, ChatRequest) else None
    calls = calls_of(body, limits) if isinstance(body, ChatRequest) else {}
    if schema is not None and calls.get("must_call") is not None:
        raise RequestError("cannot be combined with response_format", field="tool_choice")
    requests = [generate_request(body, context_tokens=context_tokens, limits=limits, index=i) for i in range(body.n)]
    groups = [uuid.uuid4().hex if body.n > 1 else "" for _ in prompts]
    return [
        Job(
            uuid.uuid4().hex, prompt, request, group=group, adapter=adapter, top_logprobs=top, schema=schema,
            fills_context=fills_context(body), **calls,
            prompt_logprobs=body.prompt_logprobs if request is requests[0] else None,
            continue_final_message=isinstance(body, ChatRequest) and bool(body.continue_final_message),
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for request in requests
    ]  # fmt: skip


def check_length(prompt: Any, context_tokens: int, field: str) -> None:
    """Refuse at once a prompt that cannot fit with any tokens; the worker counts the tokens and refuses the rest."""
    if isinstance(prompt, dict):
        count = len(prompt["text"]) // TOKEN_CHARACTERS
    elif isinstance(prompt[0], int):
        count = len(prompt)
    else:
        count = sum(len(text) for message in prompt for text in texts_in(message)) // TOKEN_CHARACTERS
    if count > context_tokens:
        raise RequestError(f"is longer than the context of {context_tokens} tokens", field=field)


def fills_context(body: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer may use the rest of the context."""
    return _wanted_tokens(body)[1] is None


def _wanted_tokens(body: ChatRequest | CompletionRequest) -> tuple[str, int | None]:
    """Return the field of the answer's longest length, and its value."""
    completion_tokens = getattr(body, "max_completion_tokens", None)
    if completion_tokens is None:
        return "max_tokens", body.max_tokens
    if body.max_tokens is not None:
        raise RequestError("set this or max_tokens, not both", field="max_completion_tokens", value=completion_tokens)
    return "max_completion_tokens", completion_tokens


def names_of_chat(body: ChatRequest) -> dict[str, str]:
    """Return the chat's names of fields that have other names in a job and in the worker's errors."""
    names = {}
    if body.max_completion_tokens is not None and body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    kwargs = body.chat_template_kwargs
    if body.reasoning_effort is not None and (kwargs is None or kwargs.reasoning_effort is None):
        names["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
        if kwargs is None:
            names["chat_template_kwargs"] = "reasoning_effort"
    return names


def generate_request(
    body: ChatRequest | CompletionRequest, *, context_tokens: int, limits: Limits, index: int = 0
) -> GenerateRequest:
    """Return the sampling parameters of one choice. index: of the choice; each has its own seed. Errors: RequestError.

    Without max_tokens, the answer may fill the context, as in OpenAI's API. The worker knows the length of the prompt
    and limits the answer.
    """
    field, max_tokens = _wanted_tokens(body)
    if max_tokens is not None and max_tokens > context_tokens:
        raise RequestError(f"the context has {context_tokens} tokens", field=field, value=max_tokens)
    if max_tokens is not None and limits.max_tokens is not None and max_tokens > limits.max_tokens:
        raise RequestError(f"this server answers at most {limits.max_tokens} tokens", field=field, value=max_tokens)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    longest = min(context_tokens, limits.max_tokens or context_tokens)
    common: dict[str, Any] = {
        "max_new_tokens": max_tokens if max_tokens is not None else longest, "stop": stop,
        "repetition_penalty": body.repetition_penalty, "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
    }  # fmt: skip
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0:
        # At temperature 0 these fields change nothing, and clients send them.
        return GenerateRequest(**common, temperature=0.0)
    return GenerateRequest(
        **common, temperature=temperature,
        top_p=body.top_p if body.top_p != 1 else None,
        top_k=body.top_k if body.top_k not in (0, -1) else None,
        min_p=body.min_p or None,
        seed=None if body.seed is None else (body.seed + index) % 2**63,
    )  # fmt: skip


def schema_of(body: ChatRequest, limits: Limits) -> Mapping[str, Any] | None:
    """Return the JSON schema of the answer, {} for any object, None for free text. Errors: RequestError."""
    response_format = body.response_format
    if response_format is None or response_format.type != "json_schema":
        if response_format is not None and response_format.json_schema is not None:
            raise RequestError(f"has no effect with type {response_format.type}", field="response_format.json_schema")
        return {} if response_format is not None and response_format.type == "json_object" else None
    if response_format.json_schema is None:
        raise RequestError("is missing", field="response_format.json_schema")
    field = "response_format.json_schema.schema"
    check_values(response_format.json_schema.schema_, field=field)
    if len(json.dumps(response_format.json_schema.schema_)) > limits.schema_bytes:
        raise RequestError(f"is larger than {limits.schema_bytes} bytes", field=field)
    check_schema(response_format.json_schema.schema_, field=field)
    check_patterns([response_format.json_schema.schema_], field=field)
    check_cost([response_format.json_schema.schema_], field=field)
    return response_format.json_schema.schema_


def chat_logprobs(body: ChatRequest) -> int | None:
    """Return the number of most likely tokens to report with each token, None for no logprobs. Errors: RequestError."""
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise RequestError("has no effect without logprobs", field="top_logprobs", value=body.top_logprobs)
        return None
    return body.top_logprobs or 0


def check_shape(body: ChatRequest | CompletionRequest) -> None:
    """Raise RequestError for fields that have no effect together."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("has no effect without stream", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("not supported: prompt_logprobs in a stream", field="prompt_logprobs")
    if isinstance(body, ChatRequest):
        check_continued(body)


def check_continued(body: ChatRequest) -> None:
    """Raise RequestError for a last message that an answer cannot continue, and for fields that are impossible with it."""
    field = "continue_final_message"
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            raise RequestError(f"not supported: false without {field}", field="add_generation_prompt")
        return
    if body.add_generation_prompt:
        raise RequestError(f"cannot be combined with {field}", field="add_generation_prompt")
    last, path = body.messages[-1], f"messages[{len(body.messages) - 1}]"
    if not isinstance(last, AssistantMessage):
        raise RequestError(f"must be assistant: {field} continues its text", field=f"{path}.role", value=last.role)
    if last.tool_calls:
        raise RequestError("the answer cannot continue a message with calls", field=f"{path}.tool_calls")
    texts = [last.content] if isinstance(last.content, str) else [getattr(p, "text", "") for p in last.content or ()]
    if not texts or not texts[-1].strip():
        raise RequestError("does not end with a text that the answer could continue", field=f"{path}.content")
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError("cannot hold an answer that continues a message", field="response_format")
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError("cannot hold an answer that continues a message", field="tool_choice")


# Tools and calls -----------------------------------------------------------------------------------------------------


def calls_of(body: ChatRequest, limits: Limits) -> dict[str, Any]:
    """Return a job's fields of tools and of the chat template. Errors: RequestError."""
    return {**_tools_of(body, limits), "template_kwargs": _template_kwargs(body)}


def _tools_of(body: ChatRequest, limits: Limits) -> dict[str, Any]:
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("none", "auto"):
            raise RequestError("has no effect without tools", field="tool_choice")
        return {}
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    check_values(tools, field="tools")
    if len(json.dumps(tools)) > limits.tools_bytes:
        raise RequestError(f"is larger than {limits.tools_bytes} bytes", field="tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("two tools have the same name", field="tools")
    if choice == "none":
        return {}
    must_call = "" if choice == "required" else choice.function.name if isinstance(choice, ToolChosen) else None
    if must_call and must_call not in names:
        near = near_names(must_call, names)
        raise RequestError("is not one of the tools", field="tool_choice.function.name", allowed=names[:8], near=near)
    # One strict tool constrains the calls of all tools: the tool of a call is unknown before it is written.
    is_strict = any(tool["function"].get("strict") for tool in tools)
    for place, tool in enumerate(tools):
        function, field = tool["function"], f"tools[{place}].function"
        function.setdefault("parameters", NO_PARAMETERS)
        if must_call is not None or is_strict:
            check_schema(function["parameters"], field=f"{field}.parameters")
        function.pop("strict", None)
    if must_call is not None or is_strict:
        functions = [tool["function"] for tool in tools]
        compiled = [one["parameters"] for one in functions if must_call in (None, "", one["name"])]
        check_patterns(compiled, field="tools", are_tools=True)
        check_cost(compiled, field="tools")
    several = body.parallel_tool_calls is not False
    holds_calls = is_strict and must_call is None
    return {"tools": tools, "must_call": must_call, "holds_calls": holds_calls, "several_calls": several}


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    kwargs = {} if body.chat_template_kwargs is None else body.chat_template_kwargs.model_dump(exclude_none=True)
    if body.reasoning_effort is not None:
        if "reasoning_effort" in kwargs:
            raise RequestError("give it once", field="chat_template_kwargs.reasoning_effort")
        kwargs["reasoning_effort"] = body.reasoning_effort
    return kwargs


def beside(message: Any, place: int, limits: Limits) -> dict[str, Any]:
    """Return the fields of a message other than its role and content. Errors: RequestError."""
    fields_of_job: dict[str, Any] = {}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name, None):
            fields_of_job[name] = getattr(message, name)
    if calls := getattr(message, "tool_calls", None):
        if len(calls) > limits.tools:
            raise RequestError(f"has more than {limits.tools} calls", field=f"messages[{place}].tool_calls")
        fields_of_job["tool_calls"] = [
            {
                "id": call.id, "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        call.function.arguments, f"messages[{place}].tool_calls[{number}].function.arguments", limits
                    ),
                },
            }
            for number, call in enumerate(calls)
        ]  # fmt: skip
    elif message.content is None:
        raise RequestError("is missing", field=f"messages[{place}].content")
    return fields_of_job


def arguments_of(text: str, field: str, limits: Limits) -> dict[str, Any]:
    """Return a call's arguments, which are sent as the text of a JSON object. Errors: RequestError."""
    data = text.encode("utf-8", "replace")
    try:
        JsonCounter(BodyLimits(len(data) + 1, len(data) + 1, limits.json_values, limits.json_depth)).feed(data)
        arguments = json.loads(text or "{}")
    except RequestError as exc:
        raise RequestError(exc.reason, field=field) from exc
    except ValueError as exc:
        raise RequestError("is not JSON", field=field) from exc
    if not isinstance(arguments, dict):
        raise RequestError("is not a JSON object", field=field)
    check_values(arguments, field=field)
    return arguments


def with_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the function's name added to each tool's answer, because some templates write it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def check_results(messages: Sequence[Mapping[str, Any]], ignored: list[str] | None = None) -> None:
    """Check that each tool message has a call, and that each call's tool messages directly follow it, as in OpenAI's
    API.

    ignored: set for the names of fields that break the rule (None: the first one is refused). Errors: RequestError.
    """
    made: list[str] = []
    waiting: set[str] = set()
    caller = ""  # the field of the calls
    for place, message in enumerate([*messages, {"role": ""}]):
        if message["role"] == "tool":
            if message.get("tool_call_id") not in made:
                reason = "is not the id of a call" if made else "no tool_calls come before this message"
                hint = "A tool message follows the assistant message whose tool_calls have its id"
                error = RequestError(
                    reason, field=f"messages[{place}].tool_call_id", value=message.get("tool_call_id"), allowed=made[:8],
                    hint=hint,
                )  # fmt: skip
                _refuse(error, ignored)
            waiting.discard(message.get("tool_call_id", ""))
            continue
        if waiting:
            names = ", ".join(one for one in made if one in waiting)
            hint = "Send a tool message for each call before the next message"
            _refuse(RequestError(f"no tool message answers {names[:400]}", field=caller, hint=hint), ignored)
        made = [call["id"] for call in message.get("tool_calls", ())]
        waiting, caller = set(made), f"messages[{place}].tool_calls"


def _refuse(error: RequestError, ignored: list[str] | None) -> None:
    if ignored is None:
        raise error
    ignored.append(error.field)


# Messages -------------------------------------------------------------------------------------------------------------


def _media_parts(body: ChatRequest) -> Iterator[tuple[str, ImagePart | AudioPart]]:
    """Yield every part that is not text, with its path in the request."""
    for place, message in enumerate(body.messages):
        parts = () if message.content is None or isinstance(message.content, str) else message.content
        for number, part in enumerate(parts):
            if not isinstance(part, TextPart):
                yield f"messages[{place}].content[{number}]", part


def check_media(body: ChatRequest, *, takes: Sequence[str], limits: Limits) -> None:
    """Raise RequestError for more messages or media than allowed, or of a kind that the model does not support."""
    if len(body.messages) > limits.messages:
        raise RequestError(f"has more than {limits.messages} messages", field="messages")
    for count, (field, part) in enumerate(_media_parts(body)):
        kind = "image" if isinstance(part, ImagePart) else "audio"
        if kind not in takes:
            raise RequestError(f"this model takes {', '.join(takes)}", field=field, value=part.type)
        if count >= limits.media_count:
            raise RequestError(f"this server takes at most {limits.media_count} images and audio clips", field=field)


def urls_of(body: ChatRequest) -> dict[str, str]:
    """Return the http(s) addresses of images, each with the path of its first field."""
    fields: dict[str, str] = {}
    for field, part in _media_parts(body):
        if isinstance(part, ImagePart) and part.image_url.url[:8].lower().startswith(("http://", "https://")):
            fields.setdefault(part.image_url.url, f"{field}.image_url.url")
    return fields


def messages_of(body: ChatRequest, *, limits: Limits, fetched: Mapping[str, bytes], cut: Cut | None = None) -> list[dict[str, Any]]:
    """Return the messages in the worker's form, media as bytes. fetched: address -> bytes. cut: the base64 that was
    removed from the body.

    Errors: RequestError.
    """
    messages: list[dict[str, Any]] = []
    total = media.Total(limits)
    for place, message in enumerate(body.messages):
        role = "system" if message.role == "developer" else message.role
        head = {"role": role, **beside(message, place, limits)}
        if message.content is None or isinstance(message.content, str):
            messages.append({**head, "content": message.content})
            continue
        parts = [
            _part(part, f"messages[{place}].content[{number}]", total, fetched, cut or {})
            for number, part in enumerate(message.content)
        ]
        messages.append({**head, "content": parts})
    if (empty := empty_place(messages)) is not None:
        raise RequestError("is empty: there is no prompt", field=f"messages[{empty}].content")
    return with_names(messages)


def _part(part: Any, field: str, total: media.Total, fetched: Mapping[str, bytes], cut: Cut) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        url, field = part.image_url.url, f"{field}.image_url.url"
        data = fetched[url] if url in fetched else media.from_data_url(url, field=field, cut=cut)
        low = {"detail": "low"} if part.image_url.detail == "low" else {}
        return {"type": "image", "image": total.take_image(data, field=field), **low}
    field = f"{field}.input_audio"
    data = media.from_text(part.input_audio.data, field=f"{field}.data", cut=cut)
    return {"type": "audio", "audio": total.take_sound(data, part.input_audio.format, field=field)}


def prompts_of(body: CompletionRequest | EmbeddingsRequest, *, field: str = "prompt") -> list[Any]:
    """Return every prompt of a request: {"text": ...} or a list of token ids. field: their path. Errors: RequestError."""
    prompt: Any = getattr(body, field)
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
