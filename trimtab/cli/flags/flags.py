"""Flags become a request: the placement and sampling groups that several commands share, and their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.adapter_names import is_mix, parse_adapters, parse_mix, parse_unweighted
from trimtab.checkpoint.names import near_names
from trimtab.checkpoint.unreadable import path_hint, request_refusal
from trimtab.errors import CheckpointError, RequestError
from trimtab.planning import Plan
from trimtab.planning.request.max_memory import merged_budgets
from trimtab.process.json_file import JsonError, parse, read_bytes
from trimtab.request import (
    DECODE_MODES,
    DEFAULT_NEW_TOKENS,
    EXPERTS,
    HEAD_CHOICES,
    KV_FORMS,
    QUANTS,
    TIERS,
    GenerateRequest,
    LoadRequest,
    parse_bytes,
    token_count,
)

MAX_MEMORY = '{"0": "4GiB", "cpu": "16GiB"}'
DEVICE_MAP = '{"": 0, "model.vision_tower": "cpu"}'


class Number(float):
    """A number of the command line; messages show it as it was typed."""

    def __init__(self, text: str | float) -> None:
        self._text = str(text)

    def __repr__(self) -> str:
        return self._text


def add_placement(
    command: argparse.ArgumentParser, *, model_help: str, weights: bool = False, takes_plan: bool = True,
    compares: bool = False, prefix_cache: str = "no cache",
) -> None:  # fmt: skip
    """Add the flags that decide a plan. Every default is None, so that set flags can be detected; LoadRequest has the
    defaults.

    takes_plan: whether a saved plan may replace all of them. compares: whether the command compares with another
    computation, so that the plan never chooses head and dtype. prefix_cache: its default, as text.
    """
    model = command.add_argument("model", metavar="MODEL", help=f"{model_help}; demo is the bundled model")
    if takes_plan:
        command.add_argument(
            "--plan", metavar="FILE", action=InPlaceOf, other=model, shifts=command,
            help="a plan that `trimtab plan --save FILE` wrote, instead of MODEL and the placement flags",
        )  # fmt: skip
    group = group_of(command, "placement")
    add_adapters(group, "an adapter to load", weights=weights)
    command.set_defaults(takes_weights=weights)
    add_budgets(group)
    group.add_argument("--quant", metavar="FORMAT", help=f"{', '.join(QUANTS)} (default: the checkpoint's own, or nf4-dq)")
    group.add_argument(
        "--experts", metavar="FORMAT",
        help=f"stacked experts: {', '.join(EXPERTS)} (default: {EXPERTS[0]}, as in the files; nf4 and int8 change answers)",
    )  # fmt: skip
    group.add_argument(
        "--head", metavar="FORM",
        help=f"the output head: {', '.join(HEAD_CHOICES)} "
        + ("(default: full)" if compares else "(default: auto, 8 bits if that keeps more of the decoder on the GPU)"),
    )  # fmt: skip
    add_dtype(group, "bfloat16" if compares else "bfloat16; the plan decides on GPUs without it")
    group.add_argument(
        "--context", type=token_count, metavar="N",
        help="most tokens of prompt plus answer, such as 4096 or 4k; k is 1024, as in every number of tokens (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--place", action="append", metavar="PATTERN=TIER",
        help=f"place blocks, modules or a modality in a tier ({', '.join(TIERS)}); repeatable, the last match wins",
    )  # fmt: skip
    group.add_argument("--device-map", metavar="FILE|JSON", help="a device map in transformers' form")
    group.add_argument("--keep-unquantized", action="append", metavar="PATTERN", help="do not quantize these modules; repeatable")
    group.add_argument(
        "--prefix-cache", metavar="SIZE",
        help=f"host memory for cached keys and values of prompt prefixes, such as 1GiB (default: {prefix_cache})",
    )  # fmt: skip
    group.add_argument(
        "--batch-invariant", action="store_true", default=None,
        help="give an answer the same bits alone and in a batch (slower: steps compute all rows)",
    )  # fmt: skip
    group.add_argument(
        "--kv-tokens", type=token_count, metavar="N",
        help="tokens whose keys and values all rows hold together (default: the whole context for each row)",
    )  # fmt: skip
    group.add_argument(
        "--kv", metavar="FORM",
        help=f"keys and values: {', '.join(KV_FORMS)} (default: full; int8 rounds them, which changes answers a little)",
    )  # fmt: skip
    add_device(group)
    group.add_argument("--offload-dir", metavar="FOLDER", help="folder of the disk tier's file (default: the user's cache)")


def group_of(command: argparse.ArgumentParser, title: str) -> Any:
    """Return the command's group of flags with this title, a new one if it has none."""
    same = [group for group in command._action_groups if group.title == title]
    return same[0] if same else command.add_argument_group(title)


def add_budgets(group: Any, what: str = "budget") -> None:
    """Add the memory budget flags, the same on every command."""
    group.add_argument("--gpu-memory", metavar="SIZE", help=f"{what}, such as 4GiB or 4G (default: the free memory)")
    group.add_argument("--host-memory", metavar="SIZE", help=f"{what}, such as 16GiB (default: the available memory)")
    group.add_argument("--max-memory", metavar="FILE|JSON", help=f"both budgets in transformers' form: {MAX_MEMORY}")


def add_dtype(group: Any, default: str) -> None:
    """Add --dtype. default: the dtype without it, as text."""
    group.add_argument("--dtype", metavar="DTYPE", help=f"bfloat16, float16, float32, or bf16, fp16, fp32 (default: {default})")


def add_answer_tokens(group: Any) -> None:
    """Add the answer length of a plan, for commands without another source of it."""
    group.add_argument(
        "--answer-tokens", type=token_count, metavar="N",
        help=f"tokens of an expected answer: the fastest placement for it is taken (default: {DEFAULT_NEW_TOKENS})",
    )  # fmt: skip


def add_device(group: Any, what: str = "") -> None:
    """Add --device. what: its subject if it is not the whole command."""
    group.add_argument("--device", metavar="DEVICE", help=f"{what}auto, cpu, cuda or cuda:N (default: auto)")


def add_adapters(group: Any, what: str, *, weights: bool = False, **options: Any) -> None:
    """Add --adapter, the same on every command. weights: whether the command scales adapters."""
    form = "NAME=PATH[:WEIGHT]" if weights else "[NAME=]PATH"
    text = f"{what}; repeatable; the default name is that of its folder"
    group.add_argument("--adapter", action="append", metavar=form, help=text, **options)


def add_sampling(command: argparse.ArgumentParser, *, longest: str = "256, or what the context leaves") -> None:
    """Add the sampling flags. longest: the default of the longest answer, as text."""
    group = group_of(command, "sampling")
    group.add_argument("--max-new-tokens", type=token_count, metavar="N", help=f"most tokens of the answer (default: {longest})")
    group.add_argument("--temperature", type=Number, metavar="T", help="0 is greedy (default: 0)")
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens")
    group.add_argument("--top-p", type=Number, metavar="P", help="sample from the most likely tokens with a total probability of P")
    group.add_argument("--min-p", type=Number, metavar="P", help="drop tokens below P times the largest probability")
    group.add_argument("--repetition-penalty", type=Number, metavar="R", help="values above 1 reduce repetition")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the sampler")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable")
    add_stop_at_turn_end(group)


def add_stop_at_turn_end(group: Any) -> None:
    """Add the flag for ending answers at the chat template's end-of-turn token."""
    group.add_argument(
        "--stop-at-turn-end", action=argparse.BooleanOptionalAction,
        help="end answers where the chat template ends a turn, also if the checkpoint's end tokens lack that token (default: if "
        "the tokenizer's own end token is that one)",
    )  # fmt: skip


def add_decode(command: argparse.ArgumentParser, *, eager: bool = True) -> None:
    """Add the decode mode. eager: whether the command also has --eager."""
    group = group_of(command, "execution")
    group.add_argument("--decode", metavar="HOW", help=f"how decode steps run: {', '.join(DECODE_MODES)} (default: auto)")
    if eager:
        group.add_argument("--eager", action="store_true", default=None, help="short for --decode eager: launch kernel by kernel")


def decode_of(options: argparse.Namespace) -> str:
    """Return the mode that --eager and --decode request. Errors: RequestError if both are given."""
    if options.eager and options.decode is not None:
        raise RequestError(
            "cannot be combined with --eager: both set how decode steps run",
            field="--decode",
            value=options.decode,
            hint="Give one",
        )
    return "eager" if options.eager else options.decode or "auto"


class InPlaceOf(argparse.Action):
    """A flag that replaces a positional argument, which may then be missing.

    `IN_PLACE` of the options has the positional arguments that flags replace. shifts: the command, if given words fill
    the positional arguments from the first, so that a missing one is only known in `give_model`.
    """

    def __init__(
        self, *arguments: Any, other: argparse.Action, shifts: argparse.ArgumentParser | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._other, self._shifts = other, shifts

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        # Not nargs="?": before Python 3.13 that matches nothing if a flag is between MODEL and PROMPT.
        for action in (self._other,) if self._shifts is None else self._shifts._actions:
            if not action.option_strings:
                action.required = False
        setattr(namespace, self.dest, values)
        setattr(namespace, IN_PLACE, {*getattr(namespace, IN_PLACE, ()), self._other.dest})


IN_PLACE = "in_place"


def give_model(options: argparse.Namespace) -> None:
    """Use the file of --plan as MODEL, and shift the positional arguments by one.

    Errors: RequestError if a model is given too; CheckpointError if the file does not exist.
    """
    path = getattr(options, "plan", None)
    if path is None:
        return
    positional = [action for action in options.parser._actions if not action.option_strings]
    values = [value for action in positional if (value := getattr(options, action.dest)) is not None]
    free = [action for action in positional if action.dest not in getattr(options, IN_PLACE)]
    if len(values) > len(free):
        raise RequestError("cannot be combined with MODEL: both name the model", field="--plan", value=path, hint="Give one")
    if len(values) < len(free):
        options.parser.error(f"the following arguments are required: {free[len(values)].metavar}")
    if not Path(path).is_file():
        hint = f"{path_hint(path)} `trimtab plan MODEL --save FILE` writes one".lstrip()
        raise CheckpointError("there is no such plan", path=path, hint=hint)
    for action in positional:
        setattr(options, action.dest, None)
    options.model = path
    for action, value in zip(free, values, strict=True):
        setattr(options, action.dest, value)


# Flags of the placement group -> fields of LoadRequest. `run` counts images and audio itself, and knows the answer
# length.
PLACEMENT = {
    "gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes", "quant": "quant", "dtype": "dtype",
    "context": "context_tokens", "batch": "batch", "images": "images", "audio_s": "audio_s", "device": "device",
    "offload_dir": "offload_dir", "adapter": "adapters", "place": "place", "device_map": "device_map",
    "keep_unquantized": "keep_unquantized", "head": "head", "card": "card", "prefix_cache": "prefix_cache_bytes",
    "batch_invariant": "batch_invariant",
    "kv_tokens": "kv_tokens", "kv": "kv", "answer_tokens": "answer_tokens", "experts": "experts",
    "max_memory": "disk_memory_bytes",  # and both budgets
}  # fmt: skip


def answer_length(new_tokens: int | None) -> dict[str, int]:
    """Return the field of LoadRequest for the longest answer of a command, if the user set one."""
    return {} if new_tokens is None else {"answer_tokens": new_tokens}


def given_flags(options: argparse.Namespace) -> list[str]:
    return [name for name in PLACEMENT if getattr(options, name, None) is not None]


def load_request(options: argparse.Namespace, **counted: Any) -> LoadRequest:
    """Return the request of the flags. counted: fields that a command knows without a flag."""
    values: dict[str, Any] = {"model": options.model, **counted}
    for name in given_flags(options):
        value = getattr(options, name)
        if name in ("gpu_memory", "host_memory", "prefix_cache"):
            value = parse_bytes(value, field_name=f"--{name.replace('_', '-')}")
        elif name == "adapter":
            if getattr(options, "takes_weights", False):
                value = {one.name: one.path for one in parse_adapters(value, field="--adapter")}
            else:
                value = parse_unweighted(value, field="--adapter")
        elif name == "place":
            value = pairs(value, "--place", "PATTERN=TIER", first=False)
        elif name == "device_map":
            value = read_device_map(value)
        elif name == "keep_unquantized":
            value = tuple(value)
        values[PLACEMENT[name]] = value
    if getattr(options, "max_memory", None) is not None:
        max_memory = read_json_object(options.max_memory, "--max-memory", MAX_MEMORY)
        budgets = {name: values.get(name) for name in ("gpu_memory_bytes", "host_memory_bytes")}
        values |= merged_budgets(max_memory, device=values.get("device", "auto"), **budgets, card=values.get("card"))
    return LoadRequest(**values)


def plan_or_request(options: argparse.Namespace, **counted: Any) -> Plan | LoadRequest:
    """Return the plan that `trimtab plan --save` wrote, or the request of MODEL and the flags.

    counted: as in `load_request`. Errors: RequestError for a flag with a saved plan, which it would not change.
    """
    if not is_saved_plan(options):
        return load_request(options, **counted)
    for name in given_flags(options):
        flag = f"--{name.replace('_', '-')}"
        raise RequestError("has no effect on a saved plan", field=flag, hint="Plan again with it")
    return Plan.load(options.model)


# `--use base`, and `/adapter base` of a chat.
BASE = "base"


def adapter_to_use(use: str | None, names: Sequence[str], *, also: Sequence[str] = ()) -> str | None:
    """Return the active adapter, the only one without --use. also: other accepted values. Errors: RequestError."""
    allowed = (*names, *also)
    if use is None and len(names) > 1:
        raise RequestError(
            "several adapters are given; name the one that answers", field="--use", allowed=allowed,
            hint="`base` answers without one" if BASE in also else "",
        )  # fmt: skip
    if use is not None and use not in names:
        near = near_names(use, allowed)
        raise RequestError("no adapter of this name is given", field="--use", value=use, allowed=allowed, near=near)
    return use if use is not None else next(iter(names), None)


def check_folder_of(path: str | None, flag: str) -> None:
    """Raise RequestError if the folder of an output file does not exist, before the work begins."""
    if path and not Path(path).absolute().parent.is_dir():
        parent = str(Path(path).parent)
        raise RequestError(f"there is no folder {parent}", field=flag, value=path, hint=path_hint(parent, holds=""))


def check_media(images: Sequence[str], audios: Sequence[str]) -> float:
    """Return how many seconds the audio clips last. Errors: RequestError for a file that is no image or no audio."""
    from trimtab.engine.chat.media import SAMPLE_RATE, read_audio, read_image

    for path in images:
        read_image(path)
    return sum(len(read_audio(path)) for path in audios) / SAMPLE_RATE


def is_saved_plan(options: argparse.Namespace) -> bool:
    """Return whether the model is the file of a plan: that of --plan, or MODEL."""
    path = Path(options.model)
    return getattr(options, "plan", None) is not None or (path.suffix == ".json" and path.is_file())


def pairs(texts: Sequence[str], flag: str, form: str, *, first: bool) -> dict[str, str]:
    """Return NAME -> VALUE of repeated NAME=VALUE flags; first: a value may hold "=" itself, else the name may."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=") if first else text.rpartition("=")
        if not (name and equals and value):
            raise RequestError(f"must have the form {form}", field=flag, value=text)
        if name in values:
            raise RequestError(f"{name} is given twice", field=flag, value=text)
        values[name] = value
    return values


def read_device_map(source: str) -> dict[str, int | str]:
    """Return the device map in a flag's value or in the file that it names. Errors: RequestError."""
    device_map = read_json_object(source, "--device-map", DEVICE_MAP, kind="device map")
    if not all(isinstance(v, (int, str)) and not isinstance(v, bool) for v in device_map.values()):
        reason = "must be an object of module paths and devices"
        raise RequestError(reason, field="--device-map", value=source, allowed=(DEVICE_MAP,))
    return device_map


def read_json_object(source: str, flag: str, example: str, *, kind: str = "option") -> dict[str, Any]:
    """Return the JSON object in a flag's value or in the file that it names. kind: whose limits it has, as of `json_file`.

    Errors: RequestError, also for a repeated key.
    """
    text = source.strip()
    try:
        raw = text.encode("utf-8", "surrogateescape") if text.startswith("{") else read_bytes(source, kind)
        value = parse(raw, kind)
    except (OSError, JsonError) as exc:
        raise request_refusal(flag, source, exc, allowed=(example,)) from exc
    if not isinstance(value, dict):
        raise RequestError("must be a JSON object", field=flag, value=source, allowed=(example,))
    return value


# The largest file of a prompt or system message: longer than any context.
TEXT_FILE_BYTES = 16 * 2**20


def read_text(path: str, flag: str) -> str:
    """Return the text of a file, without its last line end. Errors: RequestError if it cannot be read, is too large or not
    UTF-8."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(TEXT_FILE_BYTES + 1)
    except OSError as exc:
        raise request_refusal(flag, path, exc) from exc
    return as_text(raw, flag, path)


def as_text(raw: bytes, flag: str, path: str) -> str:
    """Return bytes as text. Errors: RequestError."""
    if len(raw) > TEXT_FILE_BYTES:
        raise RequestError(f"has more than {TEXT_FILE_BYTES} bytes", field=flag, value=path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise RequestError(f"is not UTF-8 text ({exc.reason} at byte {exc.start})", field=flag, value=path) from exc
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def system_of(options: argparse.Namespace) -> str | None:
    """Return the system message from --system or --system-file. Errors: RequestError if both do."""
    if options.system_file is None:
        return None if options.system is None else str(options.system)
    if options.system is not None:
        raise RequestError("cannot be combined with --system", field="--system-file", value=options.system_file, hint="Give one")
    return read_text(options.system_file, "--system-file")


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the set sampling options, checked before anything is read or loaded."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    sampling = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    GenerateRequest(**sampling)
    return sampling


def add_pull(command: argparse.ArgumentParser) -> None:
    """Add --pull and --revision to a command that loads a model."""
    group = group_of(command, "download")
    group.add_argument("--pull", action="store_true", help="download MODEL first if it is not in the local cache")
    group.add_argument("--revision", metavar="NAME", help="a branch, tag or commit for --pull (default: main)")


def chosen(options: argparse.Namespace, source: Plan | LoadRequest, *, base_of_several: bool = False) -> Any:
    """Return the active adapter: a name, name -> weight, or None for the base.

    With a weight on any of them and no --use, all adapters are combined. base_of_several: whether several adapters
    without a weight select the base. `base` means no adapter, unless an adapter has that name. Errors: RequestError.
    """
    weights = {one.name: one.weight for one in parse_adapters(options.adapter or (), field="--adapter")}
    request = source.request if isinstance(source, Plan) else source
    names, use = list(request.adapters), options.use
    if use is not None and is_mix(use):
        mix = parse_mix(use, field="--use")
        for name in mix:
            adapter_to_use(name, names)
            if weights.get(name, 1) != 1:
                raise RequestError(
                    f"the weight of {name} in --adapter has no effect with a mix; set it in --use alone", field="--use", value=use
                )
        return mix
    if use == BASE and BASE not in names:
        return None
    if use is None and any(weight != 1 for weight in weights.values()):
        return dict(weights)
    if use is None and base_of_several and len(names) > 1:
        return None
    one = adapter_to_use(use, names, also=(BASE,))
    weight = 1.0 if one is None else weights.get(one, 1.0)
    return one if weight == 1 else {one: weight}


def mix_text(adapter: Any) -> str:
    """Return the text form of an adapter or a mix."""
    if isinstance(adapter, Mapping):
        return "+".join(f"{name}:{weight:g}" for name, weight in adapter.items())
    return BASE if adapter is None else str(adapter)
