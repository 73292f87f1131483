"""Did two routes load the same adapters?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimtab.process.json_file import as_json

SIZE = 32
# A route may store A and B in bfloat16, which moves the slope by less than 0.1 % and the rest by less than 2 %.
LEAST_OFF, LEAST_REST = 0.004, 0.05
Sketch = Sequence[float]


@lru_cache(maxsize=16)
def _signs(length: int, salt: int) -> Tensor:
    """Return fixed signs [SIZE, length], float64, the same on every machine and release."""
    x = (torch.arange(SIZE * length, dtype=torch.int64) + 1 + salt * 0x51ED27) * 0x9E3779B1 & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (((x >> 7) & 1) * 2 - 1).double().view(length, SIZE).T.contiguous()


def sketch(A: Tensor, B: Tensor, scale: float) -> list[float]:
    """Return SIZE numbers of a change scale B A. Shapes: A [R, D_in], B [D_out, R], of any dtype and device. The numbers s_k^T D
    u_k of D = scale B A, for fixed vectors of signs s_k and u_k: their slope is the ratio of two scales."""
    left = _signs(B.shape[0], 1) @ B.detach().cpu().double()
    right = _signs(A.shape[1], 2) @ A.detach().cpu().double().T
    return [float(value) for value in (left * right).sum(1) * float(scale)]


@dataclass(frozen=True)
class OtherChange:
    """A module whose change differs in the second route. share: the share of the first route's change in it (0: none)."""

    adapter: str
    module_path: str
    share: float
    rest: float

    def __str__(self) -> str:
        if self.share == 0 and self.rest == 0:
            return f"{self.module_path}: the change of {self.adapter} is on one side only"
        of = f"{self.module_path}: {100 * self.share:.4g} % of the change of {self.adapter} is present"
        return of if self.rest <= LEAST_REST else f"{of}, with other changes of {self.rest:.2g} times its norm"


@dataclass(frozen=True)
class LoadedChanges:
    """The comparison of the changes that two routes loaded. modules: number of compared changes. wrong: those that differ."""

    modules: int
    wrong: tuple[OtherChange, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready values."""
        return dict(as_json(self))


Changes = Mapping[str, Mapping[str, Sketch]]


def compare_changes(first: Changes, second: Changes, *, same_names: bool = True) -> LoadedChanges | None:
    """Return whether two routes loaded the same changes, None if they have no module in common to compare.

    first, second: adapter -> module path -> `sketch`. same_names: both use the same module names, so a module that only one side
    has is wrong; otherwise it has another name. Answers show a wrong scale only above the noise of their roundings; loaded weights
    have no such noise.
    """
    wrong, count = [], 0
    for adapter in first.keys() & second.keys():
        ours, theirs = first[adapter], second[adapter]
        for path in sorted(ours.keys() | theirs.keys()):
            if path in ours and path in theirs:
                count += 1
                row = _compared(adapter, path, ours[path], theirs[path])
                if row is not None:
                    wrong.append(row)
            elif same_names and any((ours.get(path) or theirs.get(path)) or ()):
                wrong.append(OtherChange(adapter, path, 0.0, 0.0))
    return LoadedChanges(count, tuple(wrong)) if count or wrong else None


def _compared(adapter: str, path: str, a: Sketch, b: Sketch) -> OtherChange | None:
    length = math.fsum(x * x for x in a)
    if length == 0 or not math.isfinite(length):
        return OtherChange(adapter, path, 0.0, math.inf) if any(b) or length else None
    share = math.fsum(x * y for x, y in zip(a, b, strict=True)) / length
    rest = math.sqrt(math.fsum((y - share * x) ** 2 for x, y in zip(a, b, strict=True)) / length)
    is_same = abs(share - 1) <= LEAST_OFF and rest <= LEAST_REST
    return None if is_same else OtherChange(adapter, path, share, rest)
