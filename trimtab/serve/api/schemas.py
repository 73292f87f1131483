"""Which requests in OpenAI's form does the server accept, with every field known and checked?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json, to_json

from trimtab.adapter_names import NAME as ADAPTER_NAME
from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError, choices_text
from trimtab.request import MOST_BIAS, MOST_PENALTY, MOST_STOP_CHARACTERS, PENALTIES
from trimtab.serve.contract.field_names import Names, client_field

Asked = TypeVar("Asked", bound=BaseModel)
Text = Annotated[str, Field(max_length=16 * 2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Label = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# A token id as the name of a JSON field.
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
MOST_BIASES = 1024


class _FailFast(FailFast):
    """pydantic's FailFast, which stops a list at its first invalid item, with the hash that the members of a union
    need.
    """

    def __hash__(self) -> int:
        return hash(type(self))


FIRST_ERROR = _FailFast()


def _no_number(value: Any) -> Any:
    """Return a value for comparison with a literal: in Python, 0 and 1 equal False and True."""
    return value if isinstance(value, bool) else repr(value)


OnlyFalse = Annotated[Literal[False], BeforeValidator(_no_number)]
EmptyList = Annotated[list[Any], Field(max_length=0)]
# Known fields without effect here: with --lenient, every value is accepted.
NO_EFFECT = frozenset({"metadata", "service_tier", "store", "include_obfuscation"})
# Known fields that are accepted only with values that change nothing: no other value is supported.
_HARMLESS_ONLY = NO_EFFECT | {
    "add_generation_prompt", "annotations", "background", "best_of", "echo", "function_call", "functions", "include",
    "load_inplace", "modalities", "suffix", "truncation",
}  # fmt: skip
LENIENT = "trimtab serve --lenient takes and ignores it"
_NULL = {"type": "null"}
# The most unknown fields of one object that get an error each.
MOST_UNKNOWN = 8
# Names of a list's items if they differ from its field.
_ITEMS = {"input": "items"}


def kind_of(value: Any) -> str:
    """Return the tag of a part or source by its `type`, which a discriminator compares."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


# A field that is not listed is refused by name, as is an unsupported value. null means that a field is absent, in every object,
# also for unknown fields. Fields beyond OpenAI's have vLLM's names and meanings; defaults are OpenAI's.
class Strict(BaseModel):
    # strict: "5" is no number and 1 no boolean. Tags of unions are written <so>: they are not part of a field's path.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True,
    )  # fmt: skip
    # Whether the context of a validation limits lists of this schema.
    has_limits: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _fields_that_count(cls, value: Any, info: ValidationInfo) -> Any:
        """Return an object without its nulls, which mean that a field is absent (a required one is refused by name),
        and with only the first of its unknown fields, because each costs an error.

        Errors: RequestError for a list with more items than the context allows, before any item is read.
        """
        for name, most in (info.context or {}).items() if cls.has_limits and isinstance(value, dict) else ():
            if isinstance(value.get(name), list) and len(value[name]) > most:
                raise RequestError(f"has more than {most} {_ITEMS.get(name, name)}", field=name)
        if not isinstance(value, dict):
            return value
        if None in value.values():
            required = _names_of(cls, are_required=True)
            value = {name: item for name, item in value.items() if item is not None or name in required}
        if len(value) <= MOST_UNKNOWN:
            return value
        known = _names_of(cls)
        unknown = [name for name in value if name not in known]
        return {name: value[name] for name in (*(known & value.keys()), *unknown[:MOST_UNKNOWN])}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema of the object; every optional field also allows null."""
        described = handler(core_schema)
        whole = handler.resolve_ref_schema(described)
        for name in whole.get("properties", {}).keys() - whole.get("required", ()):
            field = whole["properties"][name]
            values = {key: field[key] for key in field if key not in ("default", "title")}
            if values and values != _NULL and _NULL not in values.get("anyOf", ()):
                for key in values:
                    del field[key]
                field["anyOf"] = [values, _NULL]
        return described


# Parts of a message ---------------------------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    url: str
    # "low" limits the sides to 512 pixels; "high" and "auto" use the size of the model's processor.
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Strict):
    data: str
    format: Label


class AudioPart(Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


PART_TYPES = ("text", "image_url", "input_audio")


def text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def _prompt_kind(value: Any) -> str | None:
    if not isinstance(value, list):
        return "<text>" if isinstance(value, str) else None
    first = value[0] if value else ""
    return "<ids>" if isinstance(first, int) else "<id lists>" if isinstance(first, list) else "<texts>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")] | Annotated[AudioPart, Tag("<input_audio>")],
    Discriminator(kind_of, custom_error_type="part", custom_error_message=f"its type must be one of {', '.join(PART_TYPES)}"),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], FIRST_ERROR, Tag("<list>")],
    Discriminator(text_or_list, custom_error_type="content", custom_error_message="must be a text or a list of parts"),
]
StopText = Annotated[str, Field(max_length=MOST_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[list[StopText], Field(max_length=16), FIRST_ERROR, Tag("<list>")],
    Discriminator(text_or_list, custom_error_type="stop", custom_error_message="must be a text or a list of texts"),
]
Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], FIRST_ERROR, Tag("<texts>")]
    | Annotated[list[TokenId], FIRST_ERROR, Tag("<ids>")]
    | Annotated[list[Annotated[list[TokenId], FIRST_ERROR]], FIRST_ERROR, Tag("<id lists>")],
    Discriminator(_prompt_kind, custom_error_type="prompt", custom_error_message="must be a text, token ids, or a list of either"),
]


# Tool calls -----------------------------------------------------------------------------------------------------------

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionCall(Strict):
    name: FunctionName
    # A JSON object, as text. Clients omit it, or send null, for a call without arguments.
    arguments: Text = ""
    # OpenAI's helpers add this to an answer and send it back; `arguments` has the same content.
    parsed_arguments: Any = None


class ToolCall(Strict):
    id: Label
    type: Literal["function"]
    function: FunctionCall
    # A stream adds this, and clients may send it back.
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class Function(Strict):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionNamed(Strict):
    name: FunctionName


class ToolChosen(Strict):
    type: Literal["function"]
    function: FunctionNamed


def text_or_object(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, (dict, BaseModel)) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ToolChosen, Tag("<object>")],
    Discriminator(text_or_object, custom_error_type="choice", custom_error_message="must be none, auto, required or a function"),
]


class TemplateKwargs(Strict):
    """Variables of the chat template that a request may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


# Messages -------------------------------------------------------------------------------------------------------------


ROLES = ("system", "developer", "user", "assistant", "tool")


def _role(value: Any) -> Any:
    if value not in ROLES:
        raise PydanticCustomError("role", f"must be one of {', '.join(ROLES)}")  # type: ignore[arg-type]
    return value


# Roles other than assistant and tool.
Role = Annotated[Literal["system", "developer", "user"], BeforeValidator(_role)]


class SpokenMessage(Strict):
    role: Role
    content: Content
    # Used if the checkpoint's chat template writes it.
    name: Name | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    # Optional if there are calls.
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = None
    reasoning_content: Text | None = None
    # Clients send this back with an answer, always empty.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: EmptyList | None = None
    # OpenAI's helpers add this to an answer; `content` has the same content.
    parsed: Any = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: Label
    name: Name | None = None


def _message_kind(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"<{role}>" if role in ("assistant", "tool") else "<spoken>"


Message = Annotated[
    Annotated[SpokenMessage, Tag("<spoken>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(_message_kind),
]


# Requests -------------------------------------------------------------------------------------------------------------


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: OnlyFalse | None = None


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Label | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None  # an answer always follows its schema


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


# The adapter's name, or name -> weight for a weighted sum of several. OpenAI's clients send it as the model's name.
Adapter = Annotated[
    Annotated[Name, Tag("<text>")] | Annotated[dict[Label, float], Field(max_length=64), Tag("<object>")],
    Discriminator(text_or_object, custom_error_type="adapter", custom_error_message="must be a name, or weights by name"),
]


class _Sampling(Strict):
    has_limits = True
    model: Name
    adapter: Adapter | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=PENALTIES[0], le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MOST_BIASES)] | None = None
    n: Count = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's, vLLM's: number of most likely tokens at each position of the prompt.
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # The client's labels; no answer depends on them.
    user: Label | None = None
    safety_identifier: Label | None = None
    # Accepted at the values that change nothing, because clients send them.
    metadata: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FIRST_ERROR]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FIRST_ERROR] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    # Beyond OpenAI's, vLLM's: the answer continues the text of the last message, an assistant's.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Accepted at the values that change nothing.
    functions: EmptyList | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    store: OnlyFalse | None = None


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Accepted at the values that change nothing.
    echo: OnlyFalse | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None


class LoadAdapterRequest(Strict):
    """POST /v1/load_lora_adapter, in vLLM's form."""

    lora_name: Annotated[str, Field(pattern=f"^{ADAPTER_NAME.pattern}$")]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    model: Name | None = None
    # Accepted at the values that change nothing.
    load_inplace: OnlyFalse | None = None


class UnloadAdapterRequest(Strict):
    """POST /v1/unload_lora_adapter, in vLLM's form."""

    lora_name: Name
    model: Name | None = None
    # vLLM's number, also unused there.
    lora_int_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class ReloadRequest(Strict):
    """POST /admin/reload: an empty object, or no body at all."""


class EmbeddingsRequest(Strict):
    """POST /v1/embeddings."""

    model: Name
    adapter: Adapter | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    # Beyond OpenAI's: the last token's state, or the average of all.
    pooling: Literal["last", "mean"] | None = None
    user: Label | None = None


class TokenizeRequest(Strict):
    """POST /tokenize, in vLLM's form: a text, or the messages of a chat as its template writes them."""

    has_limits = True
    model: Name
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1), FIRST_ERROR] | None = None
    tools: Annotated[list[Tool], FIRST_ERROR] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize, in vLLM's form."""

    model: Name
    tokens: Annotated[list[TokenId], FIRST_ERROR]


def read(
    kind: type[Asked], body: bytes | bytearray, *, ignored: list[str] | None = None, most: Mapping[str, int] | None = None,
) -> Asked:  # fmt: skip
    """Return a body as one of the schemas above. Errors: RequestError with the path of the first invalid field.

    ignored: accept fields without effect and add their names to this set (None: refuse them). most: field -> the most
    items of its list; longer lists are refused before any item is validated.
    """
    try:
        return kind.model_validate_json(body, context=most)
    except ValidationError as exc:
        errors = _errors(exc)
    if ignored is not None and (kept := _without_effect(kind, body, errors, ignored)) is not None:
        try:
            return kind.model_validate_json(kept, context=most)
        except ValidationError as exc:
            errors = _errors(exc)
    raise _first(errors, kind=kind)


def chat_of(fields: Mapping[str, Any], names: Names | None = None) -> ChatRequest:
    """Return a chat made of another API's request. names: of its fields there. Errors: as `read`."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as exc:
        raise _first(_errors(exc), names or {}) from exc


_WORDING = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^(?:Input|Value|List|Dictionary|String|Data|Number) should (?=be |match )", "must "),
        (r"^(?:Value|List|Dictionary|String|Data) should have (.*?)(?: after validation)?, not (.*)$", r"must have \1, has \2"),
        (r"^(?:Value|List|Dictionary|String|Data) should have ", "must have "),
        (r"^Field required$", "is required"),
    )
)


def _errors(exc: ValidationError) -> Sequence[Mapping[str, Any]]:
    return exc.errors(include_url=False, include_context=False, include_input=False)


def _first(errors: Sequence[Mapping[str, Any]], names: Names | None = None, kind: type[BaseModel] | None = None) -> RequestError:
    first, *rest = [client_field(_path(error["loc"]) or "body", names or {}) for error in errors]
    also = list(dict.fromkeys(path for path in rest if path != first))[:8]
    return RequestError(_words(errors[0], kind) + (f"; also wrong: {', '.join(also)}" if also else ""), field=first)


def _without_effect(
    kind: type[BaseModel], body: bytes | bytearray, errors: Sequence[Mapping[str, Any]], ignored: list[str]
) -> bytes | None:
    """Return a body without the fields that are unknown or in NO_EFFECT; None if no error is about these."""
    paths = [
        [step for step in error["loc"] if isinstance(step, int) or not step.startswith("<")] for error in errors
        if error["type"] == "extra_forbidden" or NO_EFFECT & set(error["loc"])
    ]  # fmt: skip
    if not paths:
        return None
    try:
        value = from_json(body)
    except ValueError:  # an integer with more digits than Python reads
        return None
    known = _names_of(kind)
    if isinstance(value, dict):  # validation stops after a few of them
        paths += [[name] for name, item in value.items() if name not in known and item is not None]
    for path in paths:
        while not isinstance(path[-1], str) or (NO_EFFECT & set(path) and path[-1] not in NO_EFFECT):
            path = path[:-1]  # the field, not the error inside it
        target = value
        for step in path[:-1]:
            target = target[step]
        if path[-1] in target:
            del target[path[-1]]
            ignored.append(_path(path))
    return to_json(value, inf_nan_mode="constants")  # so that invalid JSON numbers are still refused


@cache
def _names_of(kind: type[BaseModel], *, are_required: bool = False) -> frozenset[str]:
    """Return the names of an object's fields, or of its required fields."""
    fields = kind.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if field.is_required() or not are_required)


def _words(error: Mapping[str, Any], kind: type[BaseModel] | None) -> str:
    if error["type"] == "extra_forbidden":
        typed, near = str(error["loc"][-1]), list[str]()
        if kind is not None and len(error["loc"]) == 1 and len(typed) <= 40:  # comparing longer names takes long
            near = near_names(typed, _names_of(kind))
        return f"not supported: {typed:.100}{choices_text((), near)}. This server refuses unknown fields; {LENIENT}"
    if error["type"] == "none_required":
        return f"not supported: {error['loc'][-1]!s:.100}"
    if error["type"] in ("part", "block", "item"):
        return f"not supported: this type ({error['msg']})"
    if error["type"] == "string_pattern_mismatch" and "logit_bias" in error["loc"]:
        return "must be a token id"
    text = _plain(str(error["msg"]))
    if error["type"] in ("too_long", "string_too_long") and " at most 0 " in text:
        text = "must be empty or left out"
    name = next((step for step in error["loc"] if step in _HARMLESS_ONLY), None)
    if name is None and error["type"] == "literal_error" and _path(error["loc"]).startswith("tools["):
        name = "this type of tool"
    return text if name is None else f"not supported: {name} ({text}{'; ' + LENIENT if name in NO_EFFECT else ''})"


def _plain(text: str) -> str:
    """Return a message of pydantic in the wording of the other errors."""
    for pattern, words in _WORDING:
        text = pattern.sub(words, text)
    return text[:1].lower() + text[1:]


def _path(loc: Sequence[int | str]) -> str:
    text = ""
    for step in loc:
        if isinstance(step, int):
            text += f"[{step}]"
        elif not step.startswith("<") and step != "[key]":
            text += f"{'.' if text else ''}{step[:100]}"
    return text
