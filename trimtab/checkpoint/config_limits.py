"""Which numbers of a config.json are too large to make modules, lists or buffers of?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import CheckpointError, RequestError

# Entries without numbers of the model: labels are texts, and trimtab reads the quantization.
NOT_FIELDS = ("quantization_config", "id2label", "label2id", "task_specific_params", "auto_map", "compression_config")
# Numbers that no module is made of: ids, factors, times, and some lengths.
NO_SIZE = re.compile(
    r"(^|_)(ids?|idx|index|indices|indexes|tokens?|seed|theta|temperature|period|base|value|val|scale|scaling|factor|alpha|beta|"
    r"eps|epsilon|clipping|rate|frequency|timescale|floor|version|steps?|offset|params|parameters|flos|limit|penalty|max_length|"
    r"min_length)$"
)
MODULES, LARGEST, OF_NO_SIZE = 512, 2**24, 2**63 - 1
# (words of a name, the largest value): the first match decides.
BY_NAME: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"label|classes"), 100_000),
    (re.compile(r"vocab|position|embeddings|ctx|seq|context"), 2**25),
    (re.compile(r"length|window|chunk|samples|duration|proposals"), 2**31),
    (re.compile(r"image_size|img_size|patch_size"), 2**16),
    (re.compile(r"size|dim|width|channels?|hidden_units|inner|configs"), 2**20),
    (re.compile(r"experts?"), 2**16),
    (re.compile(r"heads?|groups?"), 2**16),
    (re.compile(r"layers?|blocks?|depths?|stages?|stacks?|levels?|repeats?|codebooks?|quantizers?"), MODULES),
)  # fmt: skip
_NOT_NEGATIVE = re.compile(r"(size|dim|width|heads|experts|layers|depths)$")
_NOT_ZERO = ("hidden_size", "vocab_size", "num_attention_heads")
# What is too large in a field of these names is refused as well where the config's own class declares none: some class reads it
# (head_dim is read by 99 families of transformers 5.23.0 that do not declare it).
_READ = re.compile(
    r"(num|n)_\w+|depths?|\w+_layers|\w*(dims?|width|channels|groups|positions|buckets)|"
    r"(\w+_)?(vocab|head|hidden|embedding|output|kernel|intermediate)_size"
)
_NOT_EVERYWHERE = (OF_NO_SIZE, LARGEST, BY_NAME[2][1])
_LAYERS = re.compile(r"(^|_)(layers?|blocks|depths?)$")
# The number of a layer's experts, and of those that a token chooses.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
# Experts of a token where a config does not say it.
USUAL_CHOSEN = 8
# Image patches that a tower can have: its position ids are real numbers of 8 bytes.
MOST_PATCHES = 2**22
# Modules of a model beyond those that have file tensors: some seconds of building.
MOST_MODULES = 40_000
# Buffers that a model computes while it is built, together: three times the masks of CodeGen and GPT-Neo, which have one a layer.
MOST_BUFFER_BYTES = 384 * 2**20
# Objects in a config: defaults of transformers 5.23.0 have at most 58. A loader copies each of them several times.
MOST_OBJECTS = 256


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError, with the field, if the architecture is no text or a count is larger than in any model."""
    objects = sum(isinstance(value, Mapping) for _, value in _values(config))
    if objects > MOST_OBJECTS:
        _refuse([("config.json", objects, f"a model has at most {MOST_OBJECTS} objects in its config")], path)
    problems = list(_wrong_types(config))
    problems += [one for one in _wrong_numbers(config) if _is_read(one[0]) and one[1] > largest(one[0])]
    _refuse(problems, path)


def _is_read(field: str) -> bool:
    return largest(field) not in _NOT_EVERYWHERE and _READ.fullmatch(field.rpartition(".")[2]) is not None


def check_declared(config: Mapping[str, Any], declared: Collection[str], path: Path) -> None:
    """Raise CheckpointError for a number out of range, in a field that the config's classes declare."""
    problems = [one for one in _wrong_numbers(config) if one[0].rpartition(".")[2] in declared]
    parts = {f"{name}.": value for name, value in config.items() if isinstance(value, dict)}
    for part, holder in {"": config, **parts}.items():
        sides, patch = _numbers_of(holder.get("image_size")), _numbers_of(holder.get("patch_size"))
        patches = max(sides, default=0) // max(*patch, 1) if patch else 0
        if patches**2 > MOST_PATCHES:
            problems.append(
                (f"{part}image_size", holder["image_size"], f"is {patches} x {patches} patches, at most {MOST_PATCHES} are read")
            )
        experts = [one for name in _EXPERTS for one in _numbers_of(holder.get(name))]
        for name in _CHOSEN if experts else ():
            chosen, field = _numbers_of(holder.get(name)), f"{part}{name}"
            problems += [(field, one, f"there are {min(experts)} experts") for one in chosen if one > min(experts)]
            if not chosen and name in holder and name in declared:
                problems.append((field, holder[name], f"a token needs at least one of {min(experts)} experts"))
    _refuse(problems, path)


def check_layers(config: Mapping[str, Any], tensors: int, path: Path) -> None:
    """Raise CheckpointError, with the field, for more layers than the weight files have tensors."""
    why = f"the weight files have {tensors} tensors"
    _refuse([(field, value, why) for field, value in _layers(config) if value > max(tensors, 64)], path)


def most_tensors(config: Mapping[str, Any]) -> int:
    """Return the most tensors in the files of a model with this many layers and experts: a multiple of any real
    model's.

    Reference: 280,000 of 60 layers with 256 experts each, three weights an expert, packed in six parts.
    """
    layers = sum(int(value) for _, value in _layers(config) if value > 0)
    experts = (int(value) for field, value in _numbers(config) if "expert" in field and 0 < value <= largest(field))
    return 10_000 + layers * (300 + 30 * max(experts, default=0))


def _layers(config: Mapping[str, Any]) -> list[tuple[str, int | float]]:
    return [(field, value) for field, value in _numbers(config) if _LAYERS.search(field) and largest(field) == MODULES]


def largest(field: str) -> int:
    """Return the largest value of a field, by the last part of its name. A number is checked by the name of its field, at any
    depth. Limits are several times the largest default of transformers 5.23.0 and the largest value of any released model."""
    name = field.rpartition(".")[2].lower()
    if NO_SIZE.search(name):
        return OF_NO_SIZE
    return next((most for words, most in BY_NAME if words.search(name)), LARGEST)


def _wrong_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for field, value in _numbers(config):
        name, most = field.rpartition(".")[2], largest(field)
        if value > most and not (most == OF_NO_SIZE and isinstance(value, float)):  # Mamba's time_step_limit is infinite
            yield field, value, f"at most {most} is read"
        elif value < 0 and _NOT_NEGATIVE.search(name) and "chunk" not in name:
            yield field, value, "must not be negative"
        elif value == 0 and name in _NOT_ZERO:
            yield field, value, "must be at least 1"


def _refuse(problems: list[tuple[str, Any, str]], path: Path) -> None:
    if not problems:
        return
    lines = [f"{field} is {short(value)}: {why}" for field, value, why in problems[:5]]
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    field, value, why = problems[0]
    raise CheckpointError(
        "; ".join(lines) + more, path=path, cause=RequestError(why, field=field, value=short(value)),
        hint="The file is damaged, or not the config of a model",
    )  # fmt: skip


def short(value: Any) -> str:
    """Return a value of a foreign file as text, of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong_types(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield "architectures", names, "must be a list of class names"
    seen: set[str] = set()
    for field, value in _values(config):
        # A part may have no class name.
        is_part_without = value is None and field != "model_type"
        if field.rpartition(".")[2] == "model_type" and not isinstance(value, str) and not is_part_without:
            if field not in seen:  # a list's values stand under its name again
                yield field, value, "must be a text"
            seen.add(field)


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    for field, value in _values(config):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield field, value


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) of everything in a config, what is in a list under the list's own name."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        field, value = waiting.pop()
        if field:
            yield field, value
        if isinstance(value, Mapping):
            inner = [(f"{field}.{name}" if field else str(name), one) for name, one in value.items() if name not in NOT_FIELDS]
            waiting += reversed(inner)
        elif isinstance(value, list):
            waiting += [(field, one) for one in reversed(value)]


def experts_per_token(config: object) -> int:
    """Return how many experts a token uses, 0 where a text config does not say."""
    return next((found[0] for name in _CHOSEN if (found := _numbers_of(getattr(config, name, None)))), 0)


def _numbers_of(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one > 0]
