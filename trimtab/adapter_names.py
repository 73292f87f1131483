"""What does the name of an adapter mean: `NAME=PATH[:WEIGHT]`, a bare path, a mapping, a list, a mix?"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trimtab.errors import RequestError

Given: TypeAlias = "str | os.PathLike[str]"
Adapters: TypeAlias = "Mapping[str, Given] | Sequence[Given] | Given"

FORMS = ("NAME=PATH", "NAME=PATH:WEIGHT", "PATH")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MIX_FORM = "A:0.7+B:0.3"
# Limits of a mix in a server's request: the most adapters, and the largest weight.
MOST_PARTS = 8
MOST_WEIGHT = 1000.0
# The name under which metrics count every mix.
MIXED = "(mix)"
# Label for adapters that are no longer loaded: their counts are added here, so that no sum decreases.
UNLOADED = "(unloaded)"
NAME_RULE = "an adapter name has letters, digits, '.', '_' and '-' only, 64 at most"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


@dataclass(frozen=True)
class NamedAdapter:
    """One adapter. weight: factor of the whole change. Only a merge accepts other values than 1; -1 removes the adapter
    again.
    """

    name: str
    path: str
    weight: float = 1.0


def paths_of(adapters: Adapters | None) -> dict[str, str]:
    """Return name -> path of the adapters of a call. A list, or a single path, takes its names from the folders.

    Errors: RequestError for another type, and for two folders of one name.
    """
    if adapters is None:
        return {}
    if isinstance(adapters, Mapping):
        return {name: _path(value, f"adapters[{name!r}]") for name, value in adapters.items()}
    listed = [adapters] if isinstance(adapters, (str, os.PathLike)) else adapters
    if not isinstance(listed, Sequence):
        raise _wrong_type("adapters", adapters)
    named: dict[str, str] = {}
    for value in listed:
        path = _path(value, "adapters")
        name = folder_name(path, field="adapters", hint=f'Name it: adapters={{"NAME": {path!r}}}')
        if name in named:
            hint = f'Name them: adapters={{"one": {named[name]!r}, "two": {path!r}}}'
            raise RequestError(f"two folders have the name {name}", field="adapters", value=path, hint=hint)
        named[name] = path
    return named


def _path(value: object, field: str) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise _wrong_type(field, value)
    return without_demo_name(value)


def _wrong_type(field: str, value: object) -> RequestError:
    return RequestError(
        f"is {type(value).__name__}, not a path", field=field,
        allowed=('{"NAME": "PATH"}', '["PATH"]', '"PATH"'),
    )  # fmt: skip


def folder_name(path: str, *, field: str, hint: str) -> str:
    """Return the adapter name that a folder gives. Errors: RequestError if that is no adapter name."""
    last = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    if last in ("", ".", ".."):
        last = os.path.basename(os.path.realpath(path))
    if not NAME.fullmatch(last):
        raise RequestError(f"the folder is called {last!r}, and {NAME_RULE}", field=field, value=path, hint=hint)
    return last


def parse_adapter(text: str, *, field: str = "adapter") -> NamedAdapter:
    """Return the adapter that `NAME=PATH[:WEIGHT]` or a bare `PATH[:WEIGHT]` names.

    The text before "=" is a name only if it is a valid name: `runs/r=16` is a path. A path may contain colons (a
    Windows drive): only a number after the last colon is a weight. For a folder whose name ends like a weight, give the
    weight too: `a=model:2:1`.
    Errors: RequestError.
    """
    name, equals, rest = text.partition("=")
    if equals and re.search(r"[\\/]", name):
        name, equals, rest = "", "", text
    if not equals:
        name, rest = "", text
    if not rest or (equals and not name):
        raise RequestError("not an adapter", field=field, value=text, allowed=FORMS)
    path, weight = _split_weight(text, rest, field)
    if equals:
        if not NAME.fullmatch(name):
            raise RequestError(NAME_RULE, field=field, value=name)
    else:
        name = folder_name(path, field=field, hint=f"Add a name: NAME={text}")
    check_weight(name, weight, field=field, value=text)
    return NamedAdapter(name, path, float(weight))


def split_weight(path: str, *, field: str) -> tuple[str, float]:
    """Return the folder and weight of `PATH[:WEIGHT]`; the weight is 1 if it gives none. Errors: RequestError."""
    folder, weight = _split_weight(path, path, field)
    check_weight(folder, weight, field=field)
    return folder, weight


def _split_weight(text: str, rest: str, field: str) -> tuple[str, float]:
    path, colon, last = rest.rpartition(":")
    is_drive = re.fullmatch(r"[A-Za-z]", path) is not None
    if not colon or is_drive or not _NUMBER.fullmatch(last):
        if colon and not is_drive and not last:
            raise RequestError("no weight after the colon", field=field, value=text, allowed=FORMS)
        return without_demo_name(rest), 1.0
    if not path:
        raise RequestError("no path before the weight", field=field, value=text, allowed=FORMS)
    return without_demo_name(path), float(last)


def parse_adapters(texts: Iterable[str], *, field: str = "adapter") -> tuple[NamedAdapter, ...]:
    """Return the adapters of repeated flags. Errors: RequestError, also for a name given twice."""
    parts = tuple(parse_adapter(text, field=field) for text in texts)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError("two adapters have this name", field=field, value=name, hint="Give one another NAME=PATH")
    return parts


def parse_unweighted(texts: Iterable[str], *, field: str) -> dict[str, str]:
    """Return name -> path of repeated flags, for commands that apply adapters without a weight.

    Errors: RequestError as `parse_adapters`, and for a weight other than 1.
    """
    parts = parse_adapters(texts, field=field)
    for part in parts:
        if part.weight != 1:
            raise RequestError(
                f"the weight {part.weight:g} has no effect here: this command applies adapters unscaled",
                field=field, value=f"{part.name}={part.path}:{part.weight:g}",
                hint="`trimtab run`, `chat`, `serve` and `merge` take weights. Append :1 to a folder whose name ends like a weight",
            )  # fmt: skip
    return {part.name: part.path for part in parts}


def check_weight(name: str, weight: float, *, field: str | None = None, value: str | None = None) -> None:
    """Raise RequestError for a weight that changes nothing or is no number. value: the user's text; None: the weight."""
    field = f"adapters[{name!r}]" if field is None else field
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise RequestError("a weight is a finite number", field=field, value=weight if value is None else value)
    if weight == 0:
        raise RequestError(
            "a weight of 0 has no effect", field=field, value=weight if value is None else value,
            hint="Leave the adapter out",
        )  # fmt: skip


# Mixes ----------------------------------------------------------------------------------------------------------------


def is_mix(name: str | None) -> bool:
    """Whether a name is that of a mix, such as "medical:0.7+style:0.3": no adapter can have such a name."""
    return name is not None and (":" in name or "+" in name)


def parse_mix(text: str, *, field: str, weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return name -> weight of "A:0.7+B:0.3". weights: for names without a number; else 1. Errors: RequestError."""
    mix: dict[str, float] = {}
    for part in text.split("+"):
        name, colon, number = part.strip().partition(":")
        if not NAME.fullmatch(name):
            raise RequestError("is not a mix of adapters", field=field, value=text, allowed=("A", MIX_FORM))
        if name in mix:
            raise RequestError(f"names {name} twice", field=field, value=text)
        if colon and not _NUMBER.fullmatch(number):
            raise RequestError(f"the weight of {name} is not a number", field=field, value=text, allowed=(MIX_FORM,))
        mix[name] = float(number) if colon else (weights or {}).get(name, 1.0)
    return mix


def mix_name(weights: Mapping[str, float], *, is_ordered: bool = False) -> str:
    """Return the name of a mix: "medical:0.7+style:0.3", its adapters sorted. is_ordered: they are sorted already."""
    parts = weights.items() if is_ordered else sorted(weights.items())
    return "+".join(f"{name}:{float(weight)!r}" for name, weight in parts)


def weights_of(name: str) -> dict[str, float]:
    """Return name -> weight of an adapter's or a mix's name."""
    return parse_mix(name, field="adapter")


def parts_of(name: str | None) -> tuple[str, ...]:
    """Return the adapters in a name: none for the base, several for a mix."""
    return () if name is None else tuple(weights_of(name)) if is_mix(name) else (name,)


def label_of(name: str | None) -> str:
    """Return the metrics label of a name: "" for the base, MIXED for every mix, because there are too many mixes."""
    return MIXED if is_mix(name) else name or ""


def check_mix(weights: Mapping[str, float], *, field: str) -> str:
    """Return the name of a requested mix; for one adapter at weight 1, the adapter's name.

    Errors: RequestError for a mix of nothing or of more than MOST_PARTS, and for a weight that is 0, no number or
    larger than MOST_WEIGHT.
    """
    if not weights:
        raise RequestError("a mix needs at least one adapter", field=field, hint="null is the base")
    if len(weights) > MOST_PARTS:
        raise RequestError(f"a mix has at most {MOST_PARTS} adapters", field=field, value=len(weights))
    for name, weight in weights.items():
        if not NAME.fullmatch(name):
            raise RequestError(NAME_RULE, field=field, value=name)
        check_weight(name, weight, field=f"{field}.{name}")
        if abs(weight) > MOST_WEIGHT:
            raise RequestError(f"a weight is between -{MOST_WEIGHT:g} and {MOST_WEIGHT:g}", field=f"{field}.{name}", value=weight)
    first, weight = next(iter(weights.items()))
    return first if len(weights) == 1 and weight == 1 else mix_name(weights)


def is_lora_file(path: str | os.PathLike[str]) -> bool:
    """Return whether an adapter's path is a GGUF file."""
    return os.fspath(path).lower().endswith(".gguf") and os.path.isfile(path)


FOLDER = Path(__file__).parent / "demo"
BASE = FOLDER / "base"
ADAPTERS = {name: FOLDER / "adapters" / name for name in ("rslora-dora", "specialist", "style")}
MODEL = "demo"
# What to ask the demo: to a question about anything else it answers at random.
KNOWS = "It knows a few lands, shapes and beeps, and hardly anything else: What is the ruler of Lorienth?"
NAMED = {MODEL: BASE, **{f"{MODEL}/{name}": folder for name, folder in ADAPTERS.items()}}


def without_demo_name(path: str | os.PathLike[str], here: str | os.PathLike[str] = "") -> str:
    """Return the bundled folder that a name of the demo means, any other path unchanged. here: the folder of relative paths ("":
    the working directory). A folder of that name in the working directory wins if it holds a model or an adapter, as a folder wins
    over a hub id.
    """
    text = os.fspath(path)
    folder = NAMED.get(text.replace(os.sep, "/"))
    file = "config.json" if folder == BASE else "adapter_config.json"
    return text if folder is None or Path(here, text, file).is_file() else str(folder)
