"""What a merge is asked for: a model, a place for the new one, adapters with their weights, and the form it is written in."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError
from trimtab.request import DTYPES, check_choice

REQUANTIZE = ("nf4", "nf4-dq")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """One adapter of a merge. weight: factor of its whole change; -1 takes a merged adapter out again."""

    name: str
    path: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MergeRequest:
    """What to merge into what.

    dtype: of every floating-point tensor that is written; None keeps what the files have (a packed base becomes the
    dtype of its config). requantize: None, "nf4" or "nf4-dq". Errors: RequestError.
    """

    model: str
    out: str
    adapters: tuple[Part, ...] = ()
    dtype: str | None = None
    requantize: str | None = None
    overwrite: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice(self.dtype, DTYPES, field_name="dtype")
        if self.requantize is not None:
            check_choice(self.requantize, REQUANTIZE, field_name="requantize")
        names = [part.name for part in self.adapters]
        for part in self.adapters:
            if not _NAME.fullmatch(part.name):
                raise RequestError(
                    "an adapter name has letters, digits, '.', '_' and '-' only, 64 at most", field="adapters",
                    value=part.name,
                )  # fmt: skip
            if names.count(part.name) > 1:
                raise RequestError("two adapters have this name", field="adapters", value=part.name)
            check_weight(part.name, part.weight)
        if not self.out:
            raise RequestError("an empty name is no folder", field="out")

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "dtype": self.dtype, "requantize": self.requantize,
            "adapters": [{"name": part.name, "path": part.path, "weight": part.weight} for part in self.adapters],
        }  # fmt: skip


def check_weight(name: str, weight: float) -> None:
    """Raise RequestError for a weight that changes nothing or is no number."""
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise RequestError("a weight is a finite number", field=f"adapters[{name!r}]", value=weight)
    if weight == 0:
        raise RequestError(
            "a weight of 0 would change nothing",
            field=f"adapters[{name!r}]",
            value=weight,
            hint="Leave the adapter out",
        )


AdapterOption = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]


def parts_of(adapters: Mapping[str, AdapterOption]) -> tuple[Part, ...]:
    """Return the adapters of a call: name -> path, or name -> (path, weight)."""
    found = []
    for name, value in adapters.items():
        path, weight = value if isinstance(value, tuple) else (value, 1.0)
        check_weight(name, weight)
        found.append(Part(name, os.fspath(path), float(weight)))
    return tuple(found)


FORMS = ("NAME=PATH", "NAME=PATH:WEIGHT")


def parse_adapter(text: str) -> Part:
    """Return the adapter that `NAME=PATH[:WEIGHT]` names.

    A path may hold colons (a Windows drive): only a number after the last one is a weight. A folder that really ends so
    is named with its weight: `a=model:2:1`. Errors: RequestError.
    """
    name, found, rest = text.partition("=")
    if not found or not name or not rest:
        raise RequestError("not an adapter", field="adapter", value=text, allowed=FORMS)
    path, colon, last = rest.rpartition(":")
    is_drive = re.fullmatch(r"[A-Za-z]", path) is not None
    if not colon or is_drive or not _NUMBER.fullmatch(last):
        if colon and not is_drive and not last:
            raise RequestError("no weight after the colon", field="adapter", value=text, allowed=FORMS)
        return Part(name, rest, 1.0)
    if not path:
        raise RequestError("no path before the weight", field="adapter", value=text, allowed=FORMS)
    part = Part(name, path, float(last))
    check_weight(name, part.weight)
    return part


def parse_adapters(texts: Iterable[str]) -> tuple[Part, ...]:
    """Return the adapters of repeated flags. Errors: RequestError, also for a name given twice."""
    parts = tuple(parse_adapter(text) for text in texts)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError("two adapters have this name", field="adapter", value=name)
    return parts


def full_dtype(text: str | None) -> str | None:
    """Return torch's spelling of a dtype given as "bf16", "fp16", "fp32" or in full; None stays None."""
    return None if text is None else SHORT_DTYPES.get(text, text)


def resolved(path: str | Path) -> Path:
    """Return the absolute path with every link followed, also of a path that does not exist yet."""
    return Path(os.path.realpath(path))
