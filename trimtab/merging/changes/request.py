"""The request of a merge: a model, an output folder, adapters with their weights, and the output format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.adapter_names import NAME, NAME_RULE, NamedAdapter, check_weight, parse_adapter, parse_adapters, paths_of
from trimtab.errors import RequestError
from trimtab.request import DTYPES, REQUANTIZE, check_choice, full_dtype

__all__ = ["MergeRequest", "Part", "check_weight", "full_dtype", "parse_adapter", "parse_adapters", "parts_of"]

Part = NamedAdapter


@dataclass(frozen=True, kw_only=True)
class MergeRequest:
    """A merge: adapters, their base and the output.

    dtype: of every floating-point tensor that is written; None keeps the dtypes of the files (a packed base gets the
    dtype of its config). requantize: None, or one of REQUANTIZE. Errors: RequestError.
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
            object.__setattr__(self, "dtype", full_dtype(self.dtype))
            check_choice(self.dtype or "", DTYPES, field_name="dtype")
        if self.requantize is not None:
            check_choice(self.requantize, REQUANTIZE, field_name="requantize")
        names = [part.name for part in self.adapters]
        for part in self.adapters:
            if not NAME.fullmatch(part.name):
                raise RequestError(NAME_RULE, field="adapters", value=part.name)
            if names.count(part.name) > 1:
                raise RequestError("two adapters have this name", field="adapters", value=part.name)
            check_weight(part.name, part.weight)
        if not self.out:
            raise RequestError("the name is empty", field="out")

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "dtype": self.dtype, "requantize": self.requantize,
            "adapters": [{"name": part.name, "path": part.path, "weight": part.weight} for part in self.adapters],
        }  # fmt: skip


AdapterOption = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]


def parts_of(adapters: Mapping[str, AdapterOption] | Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> tuple[Part, ...]:
    """Return the adapters of a call: name -> path, name -> (path, weight), a list of paths, or one path."""
    if not isinstance(adapters, Mapping):
        return tuple(Part(name, path) for name, path in paths_of(adapters).items())
    parts = []
    for name, value in adapters.items():
        path, weight = value if isinstance(value, tuple) else (value, 1.0)
        check_weight(name, weight)
        parts.append(Part(name, paths_of({name: path})[name], float(weight)))
    return tuple(parts)
