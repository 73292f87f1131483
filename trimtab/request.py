"""What may a user request: placement (`LoadRequest`), answers (`GenerateRequest`), messages, checked before any file is read?"""

from __future__ import annotations

import base64
import binascii
import math
import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from trimtab.adapter_names import NAME, NAME_RULE, Adapters, without_demo_name
from trimtab.errors import RequestError
from trimtab.process.json_file import as_json

TIERS = ("resident", "gather", "stream", "disk", "host")
QUANTS = ("none", "int8", "fp4", "nf4", "nf4-dq")
DEFAULT_QUANT = "nf4-dq"
# Names like those of formats of files (formats/record.py says which there are): they are read, never made.
STORED = re.compile(r"(?:b?f\d\d|[a-z]{1,10}\d[a-z0-9]{0,10}[-_][a-z0-9-]{1,40})\Z", re.ASCII)
# The output head as the checkpoint has it, or an 8-bit copy of it.
HEADS = ("full", "int8")
# Stacked experts as the files hold them, dequantized, or packed expert by expert while they are loaded.
EXPERTS = ("auto", "16bit", "nf4", "nf4-dq", "int8")
MADE_EXPERTS = EXPERTS[2:]
# What a merge writes packed: formats whose own rounding is defined.
REQUANTIZE = ("nf4", "nf4-dq")
# Values of a request's head: "auto" lets the plan choose.
HEAD_CHOICES = ("auto", *HEADS)
# Keys and values as the model computes them, or in 8 bits.
KV_FORMS = ("full", "int8")
# How steps are computed.
DECODE_MODES = ("auto", "eager", "graph", "fused")
DTYPES = ("bfloat16", "float16", "float32")
# The longest answer if the user gives no length, within the context.
DEFAULT_NEW_TOKENS = 256

# The longest side of an image, and the ratio of its sides. Larger images cost time and memory before a model's
# processor shrinks them.
PICTURE_SIDE, PICTURE_ASPECT = 16_384, 200
# Seconds of the longest audio clip.
MAX_SOUND_S = 3600.0

# The short spellings of papers, vLLM and `trimtab merge`.
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
SIZES = ("4GiB", "4G", "500MB", "1048576B")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(value: int | float | str | None, *, field_name: str) -> int | None:
    """Return a size in bytes from a number of bytes or text such as "4GiB", "4G" (the same) or "500MB"; None stays
    None.

    Errors: RequestError for text without a unit, for other types, and for sizes below 1.
    """
    if value is None:
        return None
    if isinstance(value, (numbers.Integral, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise RequestError("not a size", field=field_name, value=value, allowed=SIZES)
        if value != int(value):
            hint = f"Did you mean '{value}GiB'?"
            raise RequestError("not an integer number of bytes", field=field_name, value=value, allowed=SIZES, hint=hint)
        size = int(value)
    else:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or match.group(2).upper() not in {"", *_UNITS}:
            raise RequestError("not a size", field=field_name, value=value, allowed=SIZES)
        number, unit = match.groups()
        if not unit:
            hint = f"Did you mean {number}GiB? {number}B is that many bytes"
            raise RequestError("needs a unit", field=field_name, value=value, allowed=SIZES, hint=hint)
        amount = float(number) * _UNITS[unit.upper()]
        if not math.isfinite(amount):
            raise RequestError("not a size", field=field_name, value=f"{str(value)[:20]}...", allowed=SIZES)
        size = int(amount)
    if size <= 0:
        raise RequestError("a size must be above zero", field=field_name, value=value)
    return size


def token_count(text: str, field_name: str = "tokens") -> int:
    """Return a number of tokens: "4096", or "4k", where k is 1024. Errors: RequestError."""
    number, k = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    try:
        return int(number) * k
    except ValueError as exc:
        raise RequestError("is not a number of tokens, such as 4096 or 4k", field=field_name, value=text) from exc


def full_dtype(dtype: Any) -> Any:
    """Return the name of a dtype given as "bf16", "fp16", "fp32" or in full, or as torch's own: torch.bfloat16 is "bfloat16".

    What is none of these comes back as it is. torch is not imported: its values are known by where their class is from.
    """
    text = str(dtype) if type(dtype).__module__ == "torch" else dtype
    if not isinstance(text, str):
        return dtype
    text = text.removeprefix("torch.")
    return SHORT_DTYPES.get(text, text)


def check_choice(value: str, allowed: tuple[str, ...], *, field_name: str) -> None:
    """Raise RequestError unless value is one of allowed."""
    if value not in allowed:
        raise RequestError("unknown choice", field=field_name, value=value, allowed=allowed)


def check_picture_size(width: int, height: int, *, max_pixels: int, field_name: str, value: Any = None) -> None:
    """Raise RequestError if an image of this size is over the limits."""
    shown = f"has {width} x {height} pixels"
    if max(width, height) > PICTURE_SIDE:
        raise RequestError(f"{shown}, the limit per side is {PICTURE_SIDE}", field=field_name, value=value)
    if max(width, height) > PICTURE_ASPECT * min(width, height):
        raise RequestError(f"{shown}, the limit of longer to shorter side is {PICTURE_ASPECT}", field=field_name, value=value)
    if width * height > max_pixels:
        raise RequestError(f"{shown}, the limit is {max_pixels}", field=field_name, value=value)


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A request to load a model: the model, its use, and the budgets.

    model: a checkpoint folder, a hub-cache snapshot, a cached hub id or "demo". adapters: name -> PEFT adapter folder.
    gpu_memory_bytes, host_memory_bytes: budgets; None is the free memory of the machine. disk_memory_bytes: the most
    that the disk tier may take; None is the free space. offload_dir: folder of the disk tier's file; None is the user's
    cache. context_tokens: prompt and answer together, per row. answer_tokens: of an expected answer; a longer one gives
    the seconds of a step more weight and needs no more memory. batch: rows decoded together. images, audio_s: the most
    images and seconds of audio of one prompt, counted as activations. quant: "auto" is the checkpoint's own format if
    it is already quantized, else nf4-dq. dtype: "auto" is bfloat16, or the type of a card without it. keep_unquantized:
    patterns of modules that stay in `dtype`. head: "full" is the checkpoint's output head, "int8" an 8-bit copy (a tied
    table does not change), "auto" is full unless 8 bits keep more of the decoder on the GPU. place: pattern -> tier,
    the last match wins. device_map: a map in transformers' form. device: "auto", "cpu", "cuda" or "cuda:N". card: plan
    for this GPU from estimates; it need not be in this machine. decode: how steps run, one of DECODE_MODES; an
    explicitly requested mode that is unavailable is an error. prefix_cache_bytes: host memory for cached keys and
    values; 0 is no cache. batch_invariant: an answer has the same bits alone and in a batch: a step computes all rows,
    and prompts are computed one at a time in chunks of fixed size. kv_tokens: how many tokens of prompts and answers
    the rows of a batch hold together, in pages of a shared pool; at least one context. None: each row has its whole
    context. kv: "full" keys and values, or "int8", which rounds them to 8 bits. experts: "auto" keeps stacked experts as the
    files hold them, packed or not, "16bit" dequantizes them; else the format in which each expert is packed.
    Errors: RequestError with the field, for values of another type or out of range.
    """

    model: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    quant: str = "auto"
    dtype: str = "bfloat16"
    context_tokens: int = 4096
    batch: int = 1
    images: int = 1
    audio_s: float = 30.0
    place: Mapping[str, str] = field(default_factory=dict)
    device_map: Mapping[str, int | str] | None = None
    keep_unquantized: tuple[str, ...] = ()
    device: str = "auto"
    offload_dir: str | None = None
    head: str = "full"
    card: str | None = None
    disk_memory_bytes: int | None = None
    decode: str = "auto"
    prefix_cache_bytes: int = 0
    batch_invariant: bool = False
    kv_tokens: int | None = None
    kv: str = "full"
    answer_tokens: int = DEFAULT_NEW_TOKENS
    experts: str = EXPERTS[0]

    def __post_init__(self) -> None:
        if not STORED.match(self.quant):
            check_choice(self.quant, ("auto", *QUANTS), field_name="quant")
        object.__setattr__(self, "dtype", full_dtype(self.dtype))
        check_choice(self.dtype, ("auto", *DTYPES), field_name="dtype")
        check_choice(self.head, HEAD_CHOICES, field_name="head")
        check_choice(self.decode, DECODE_MODES, field_name="decode")
        check_choice(self.kv, KV_FORMS, field_name="kv")
        check_choice(self.experts, EXPERTS, field_name="experts")
        counts = (("context_tokens", 1), ("answer_tokens", 1), ("batch", 1), ("images", 0), ("prefix_cache_bytes", 0))
        for name, low in counts:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                argument = "context" if name == "context_tokens" else name  # as `plan` and a registry spell it
                raise RequestError(f"must be an integer of at least {low}", field=argument, value=value)
        if not isinstance(self.batch_invariant, bool):
            raise RequestError("must be True or False", field="batch_invariant", value=self.batch_invariant)
        if self.kv_tokens is not None and (not _is_whole(self.kv_tokens) or self.kv_tokens < self.context_tokens):
            raise RequestError(
                f"must be an integer of at least the context, {self.context_tokens}", field="kv_tokens",
                value=self.kv_tokens,
            )  # fmt: skip
        if isinstance(self.audio_s, numbers.Real) and not isinstance(self.audio_s, (int, float)):
            object.__setattr__(self, "audio_s", float(self.audio_s))  # numpy's numbers
        if not isinstance(self.audio_s, (int, float)) or not 0 <= self.audio_s <= MAX_SOUND_S:
            raise RequestError(f"must be between 0 and {MAX_SOUND_S:g} seconds", field="audio_s", value=self.audio_s)
        for name in ("adapters", "place"):
            if not isinstance(getattr(self, name), Mapping):
                raise RequestError("must be a mapping", field=name, value=getattr(self, name))
        if isinstance(self.keep_unquantized, str) or not all(isinstance(one, str) for one in self.keep_unquantized):
            listed = (f"[{self.keep_unquantized!r}]",) if isinstance(self.keep_unquantized, str) else ()
            raise RequestError("must be a list of patterns", field="keep_unquantized", value=self.keep_unquantized, allowed=listed)
        for name in self.adapters:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise RequestError(NAME_RULE, field="adapters", value=name)
        named = {name: without_demo_name(path) if isinstance(path, str) else path for name, path in self.adapters.items()}
        object.__setattr__(self, "adapters", named)
        for pattern, tier in self.place.items():
            if not pattern:
                raise RequestError("an empty pattern matches nothing; '*' matches every block", field="place", value=pattern)
            check_choice(tier, TIERS, field_name=f"place[{pattern!r}]")
        if self.place and self.device_map is not None:
            raise RequestError("place and device_map both set tiers; pass one of them", field="device_map")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise RequestError("unknown device", field="device", value=self.device, allowed=("auto", "cpu", "cuda", "cuda:N"))
        if self.card is not None and self.device not in ("auto", "cuda", "cuda:0"):
            raise RequestError(
                "a plan for a card has that card only, cuda:0", field="device", value=self.device,
                allowed=("auto", "cuda", "cuda:0"),
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON-ready values."""
        return dict(as_json(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoadRequest:
        """Return the request that `to_json` wrote; an unknown key is a RequestError that names it."""
        known = {item.name for item in fields(cls)}
        for key in values:
            if key not in known:
                raise RequestError("unknown key", field=f"request.{key}", allowed=sorted(known))
        kept = dict(values)
        kept["keep_unquantized"] = tuple(kept.get("keep_unquantized", ()))
        return cls(**kept)


LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 100
PENALTIES = (0.01, 100.0)
# Characters of one stop text: every token is compared with each of its prefixes.
MOST_STOP_CHARACTERS = 1024
# The ranges of OpenAI's API.
MOST_PENALTY, MOST_BIAS = 2.0, 100.0
# As many as OpenAI's API reports.
MOST_LOGPROBS = 20


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: Any, field_name: str) -> int:
    """Return an integer, numpy's as Python's. Errors: RequestError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError("must be an integer", field=field_name, value=value)
    return int(value)


def _real(value: Any, field_name: str) -> float:
    """Return a number, numpy's as Python's. Errors: RequestError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError("must be a number", field=field_name, value=value)
    return value if isinstance(value, (int, float)) else float(value)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """How to answer one prompt. Sampling names and meanings are those of transformers.

    max_new_tokens: most tokens of the answer; None is 256, or the rest of the context after the prompt if that is less.
    temperature: 0 is greedy; below LEAST_TEMPERATURE, and with a repetition_penalty outside PENALTIES, logits could
    leave the range of float32. top_k: sample from this many tokens. top_p, min_p: sample from the most likely tokens
    with this total probability; drop tokens below this share of the largest probability. seed: None takes a random one.
    stop: texts that end the answer and are not part of it. stop_token_ids: tokens that end the answer, as the model's
    own end tokens do. presence_penalty, frequency_penalty: subtracted from a token's logit if it is in the answer so
    far, once or for each occurrence; the prompt does not count. logit_bias: token id -> value added to its logit.
    logprobs: report each token's log-probability and those of the N most likely tokens; None reports none.
    Errors: RequestError with the field; top_k, top_p, min_p and seed are refused at temperature 0.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError("must be at least 1", field="max_new_tokens", value=self.max_new_tokens)
        if self.temperature > MOST_TEMPERATURE:
            raise RequestError(f"must be at most {MOST_TEMPERATURE}", field="temperature", value=self.temperature)
        if self.temperature != 0 and not self.temperature >= LEAST_TEMPERATURE:
            raise RequestError(f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}", field="temperature", value=self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise RequestError("must be at least 1", field="top_k", value=self.top_k)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise RequestError("must be above 0 and at most 1", field=name, value=value)
        least, most = PENALTIES
        if self.repetition_penalty is not None and not least <= self.repetition_penalty <= most:
            raise RequestError(f"must be between {least:g} and {most:g}", field="repetition_penalty", value=self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MOST_PENALTY <= getattr(self, name) <= MOST_PENALTY:
                raise RequestError(f"must be between {-MOST_PENALTY:g} and {MOST_PENALTY:g}", field=name, value=getattr(self, name))
        for token, bias in self.logit_bias:
            if token < 0 or not -MOST_BIAS <= bias <= MOST_BIAS:
                raise RequestError(
                    f"a token id has a bias between {-MOST_BIAS:g} and {MOST_BIAS:g}", field="logit_bias", value={token: bias}
                )
        for token in self.stop_token_ids:
            if token < 0:
                raise RequestError("a token id is an integer of at least 0", field="stop_token_ids", value=token)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError("must be an integer of 64 bits", field="seed", value=self.seed)
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise RequestError(f"must be an integer from 0 to {MOST_LOGPROBS}", field="logprobs", value=self.logprobs)
        for text in self.stop:
            if len(text) > MOST_STOP_CHARACTERS:  # every token is compared with each of its prefixes
                raise RequestError(f"a stop text has at most {MOST_STOP_CHARACTERS} characters", field="stop", value=len(text))
        if any(not text for text in self.stop):
            raise RequestError("an empty stop text would end every answer immediately", field="stop")
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p", "seed"):
                if getattr(self, name) is not None:
                    raise RequestError(
                        "has no effect at temperature 0 (greedy)",
                        field=name,
                        value=getattr(self, name),
                        hint="Set temperature above 0, or omit the option",
                    )

    def _check_types(self) -> None:
        """Make numpy's numbers Python's. Errors: RequestError for a value of another type."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            if item.name == "stop":
                if isinstance(value, str):
                    raise RequestError("is a string; pass a list of strings", field="stop", value=value)
                if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
                    raise RequestError("must be a list of strings", field="stop", value=value)
            elif item.name == "stop_token_ids":
                if not isinstance(value, (list, tuple, set, frozenset)):
                    raise RequestError("must be a list of token ids", field=item.name, value=value)
                object.__setattr__(self, item.name, tuple(_whole(token, item.name) for token in value))
            elif item.name == "logit_bias":
                pairs = tuple(value.items()) if isinstance(value, Mapping) else value
                is_list = isinstance(pairs, (list, tuple))
                if not is_list or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
                    raise RequestError("must be a bias by token id", field=item.name, value=value)
                pairs = tuple((_whole(token, item.name), _real(bias, item.name)) for token, bias in pairs)
                object.__setattr__(self, item.name, pairs)
            else:
                check = _whole if item.name in ("max_new_tokens", "top_k", "seed", "logprobs") else _real
                object.__setattr__(self, item.name, check(value, item.name))

    @property
    def answer_tokens(self) -> int:
        """Most tokens of the answer: the given number, or the default."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def within(self, left_tokens: int, *, most_tokens: int = DEFAULT_NEW_TOKENS) -> GenerateRequest:
        """Return the request with max_new_tokens as a number. A given number is kept even if it does not fit.

        left_tokens: the rest of the context after the prompt. most_tokens: the longest answer without a given number.
        """
        if self.max_new_tokens is not None:
            return self
        return replace(self, max_new_tokens=max(1, min(most_tokens, left_tokens)))


# The options of Python calls, for type checkers: a test compares them with what the calls take.


class AnswerOptions(TypedDict, total=False):
    """The options of an answer: the fields of GenerateRequest."""

    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: Sequence[str]
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    stop_token_ids: Collection[int]
    logprobs: int | None


class QuestionOptions(AnswerOptions, total=False):
    """The options of an answer, and what belongs to its prompt: the keyword arguments of `LoadedModel.answer`."""

    image: Any
    audio: Any
    system: str | None
    adapter: str | Mapping[str, float] | None
    template_kwargs: Mapping[str, Any] | None


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of `plan`, as `load` takes them for a model."""

    adapters: Adapters | None
    gpu_memory: int | float | str | None
    host_memory: int | float | str | None
    quant: str
    dtype: str
    context: int | str
    batch: int
    images: int
    audio_s: float
    place: Mapping[str, str] | None
    device_map: Mapping[str, int | str] | None
    keep_unquantized: Sequence[str]
    device: str
    offload_dir: str | Path | None
    head: str
    card: str | None
    max_memory: Mapping[int | str, int | str] | None
    prefix_cache: int | float | str | None
    batch_invariant: bool
    kv_tokens: int | str | None
    kv: str
    answer_tokens: int | str
    experts: str


# The messages of a chat -----------------------------------------------------------------------------------------------

OPENAI_TYPES = ("image_url", "input_audio")
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]{1,40}/[\w.+-]{1,80})?(?:;[\w=.+-]{1,80}){0,8};base64,", re.ASCII | re.IGNORECASE)
BASE64_PIECE = 2**16  # characters, a multiple of four
# The largest file of a message: larger images and audio are refused anyway.
MOST_BYTES = 256 * 2**20


class Part(TypedDict, total=False):
    """A part of a message: a text, or a place for an image or an audio clip."""

    type: str
    text: str
    image: object
    audio: object


class _Said(TypedDict):
    role: str
    content: str | list[Part]


class Message(_Said, total=False):
    """A message as chat templates read it. tool_calls: in OpenAI's form, with objects as arguments."""

    name: str
    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str
    reasoning_content: str


def parts_in(message: Mapping[str, object]) -> list[Part]:
    """Return the parts of a message; a text is one, and a message without content has none.

    {"type": "image", "image": X}                          X: a path, bytes, a Pillow image or an array
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "low"}}
    {"type": "audio", "audio": X}                          X: a path, bytes, samples or (samples, rate)
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
    """
    content: Any = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def texts_in(message: Mapping[str, object]) -> list[str]:
    """Return the texts of a message."""
    return [part["text"] for part in parts_in(message) if part["type"] == "text"]


def own_form(part: Mapping[str, object]) -> Mapping[str, object]:
    """Return a part of OPENAI_TYPES, with what it names, in this package's form. Errors: RequestError. An address on another
    machine is refused: nothing is fetched."""
    given = part[str(part["type"])]
    if part["type"] == "image_url":
        url = given.get("url") if isinstance(given, Mapping) else given
        detail = given.get("detail") if isinstance(given, Mapping) else None
        return {"type": "image", "image": _of_url(url, "image"), **({} if detail is None else {"detail": detail})}
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
        raise RequestError("input_audio has no data", field="audio")
    text = given["data"]
    return {"type": "audio", "audio": _of_url(text, "audio") if text.startswith("data:") else from_base64(text, field="audio")}


def _of_url(url: object, field: str) -> bytes:
    if not isinstance(url, str) or (parts := split_data_url(url)) is None:
        raise RequestError(
            "must be a data URL with base64; nothing is fetched", field=field, value=str(url)[:80],
            allowed=("data:image/png;base64,...",),
        )  # fmt: skip
    return from_base64(url, field=field, start=parts[1])


def split_data_url(url: str) -> tuple[str, int] | None:
    """Return the media type of a data URL ("" without one) and the offset of its base64; None for anything else."""
    match = _DATA_URL.match(url)
    return None if match is None else ((match["type"] or "").lower(), match.end())


def from_base64(text: str, *, field: str, start: int = 0) -> bytes:
    """Return decoded bytes. start: where the base64 begins. Errors: RequestError for text that is not plain base64, for none, for
    too much."""
    if len(text) - start > MOST_BYTES * 4 // 3 + 4:
        raise RequestError(f"has more than {MOST_BYTES} bytes", field=field)
    pieces: list[bytes] = []
    try:
        # One call for all would keep every other thread waiting until it is done.
        for place in range(start, len(text), BASE64_PIECE):
            piece = text[place : place + BASE64_PIECE]
            if "=" in piece and place + BASE64_PIECE < len(text):
                raise ValueError("padding before the end")
            pieces.append(base64.b64decode(piece, validate=True))
    except (binascii.Error, ValueError) as exc:
        raise RequestError("is not base64", field=field) from exc
    data = b"".join(pieces)
    if not data:
        raise RequestError("is empty", field=field)
    return data


def empty_place(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the message that leaves a chat without a prompt: an empty message of a user at its end, or the last one of
    a chat without any content; None for a chat with a prompt. messages: at least one."""
    last = len(messages) - 1
    if _says_something(messages[last]):
        return None
    return last if messages[last]["role"] == "user" or not any(map(_says_something, messages)) else None


def _says_something(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or any(part["type"] != "text" or part["text"].strip() for part in parts_in(message))
