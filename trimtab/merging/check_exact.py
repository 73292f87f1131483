"""What is the exact value of a changed tensor in float64, and the bound for float32 sums?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.engine.formats.coded_files import CodedRows, in_memory, nearest_values
from trimtab.merging.changes.delta import Change, Rows, row_count, row_pieces
from trimtab.merging.changes.inverse import lay_back, without_casts
from trimtab.merging.changes.plan import Edit
from trimtab.merging.files.layout import Out
from trimtab.merging.files.write import Sources, packed_content

FLOAT32_STEP = 2.0**-24
# A norm of D squares in float32 is added up in vector lanes and pairwise: its error grows with log2(D), not with D.
NORM_STEPS = 64
# Roundings of a product's factors in addition to those of its sum: the scale, the product with it, the weight, the
# product with it.
FACTOR_STEPS = 5


class ExactRows(NamedTuple):
    """Rows of one changed tensor. wanted, base: float64. slack: the largest error of float32. size: of the terms."""

    wanted: Tensor
    slack: Tensor
    base: Tensor
    size: Tensor


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighbouring numbers of a dtype at each value, float64."""
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.tiny)  # zero has no exponent
    exponent = torch.frexp(size)[1] - 1
    return torch.ldexp(torch.full_like(size, info.eps), exponent)


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values rounded to the nearest number of a dtype, as float64. torch would round to float32 in between."""
    if dtype is torch.float64:
        return values
    step = ulp(values, dtype)
    return torch.round(values / step) * step  # half to even; a division by a power of two is exact


class Exact:
    """Rows of one changed tensor of the merged model, computed in float64 from the base and the adapters. A float32 sum of n
    products is off by at most n roundings of its terms, in any order (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1). Nothing here uses the code that wrote the file, except the inverse of stacks and splits."""

    def __init__(self, out: Out, sources: Sources) -> None:
        self.base = sources.rows(out.leaf)
        self.whole: tuple[Tensor, Tensor] | None = None
        self.changes: list[Change] = []
        if all(edit.by_rows for edit in out.edits):
            (edit,) = out.edits
            self.changes = [sources.adapters.change(ask) for ask in edit.asks]
            self.factors = [_factor(change, self.base, out.shape) for change in self.changes]
        else:
            self.whole = _laid_back(out, sources)

    def __call__(self, start: int, stop: int) -> ExactRows:
        base = self.base(start, stop).double()
        if self.whole is not None:
            exact, slack = self.whole[0][start:stop], self.whole[1][start:stop].double()
            return ExactRows(exact, slack, base, base.abs())
        exact, slack, size = _total(self.changes, self.factors, base, start, stop)
        return ExactRows(exact, slack, base, size)


def packed_alone(out: Out, rows: Rows) -> CodedRows:
    """Return rows of a tensor after packing them in the format that it is written in."""
    assert out.pack is not None
    parts: dict[str, list[Tensor]] = {}
    for name, _, content in packed_content(out, rows):
        parts.setdefault(name.removeprefix(out.tensor_name), []).append(content.reshape(-1).view(torch.uint8))
    return in_memory(out.pack, out.shape, {name: torch.cat(pieces) for name, pieces in parts.items()})


def packed_range(rows: ExactRows, out: Out, scales: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest valid packed value for each exact value, under the given scales.

    scales: of the whole weight, one per block. first: the index of the first value. Values are rounded to the tensor's type before
    they are packed. All steps are monotone, so a value within `slack` is packed to one in between.
    """
    kind = getattr(torch, out.dtype)
    ends = (rows.wanted - rows.slack, rows.wanted + rows.slack)
    low, high = (nearest_values(value.to(kind).float(), scales, first) for value in ends)
    return torch.minimum(low, high), torch.maximum(low, high)


def _total(
    changes: list[Change], factors: list[Tensor | None], base: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (result of all adapters, largest float32 error, size of the terms)."""
    total, size = base.clone(), base.abs()
    slack = torch.zeros_like(base)
    for change, factor in zip(changes, factors, strict=True):
        value, lost, terms, gain = _value(change, factor, base, start, stop)
        if gain is None or change.saved is not None:
            total += change.weight * (value - base)
            slack += abs(change.weight) * lost
        else:
            # DoRA rescales the result of earlier adapters: gain (base + change) + gain (total - base), and their errors
            # too.
            moved = gain * (total - base)
            terms = terms + 2 * moved.abs()
            lost = lost + gain.abs() * slack + FLOAT32_STEP * (terms + (NORM_STEPS + FACTOR_STEPS) * moved.abs())
            slack = abs(1 - change.weight) * slack + abs(change.weight) * lost
            total += change.weight * (value + moved - total)
        size += abs(change.weight) * terms
    # Each adapter is added to a sum of at most `size`.
    return total, slack + (len(changes) + 1) * FLOAT32_STEP * size, size


def _factor(change: Change, base: object, shape: tuple[int, ...]) -> Tensor | None:
    if change.magnitude is None or not change.is_table:
        return None
    squares = torch.zeros(shape[1], dtype=torch.float64)
    for start, stop in row_pieces(shape):
        squares += _sum(change, base(start, stop).double(), start, stop)[0].square().sum(0)  # type: ignore[operator]
    return change.magnitude.double() / squares.sqrt()


def _sum(change: Change, base: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return (base + change, size of the summed terms)."""
    if change.saved is not None:
        base = change.saved(start, stop).double()
    if change.left is not None and change.right is not None:
        left, right = change.left[start:stop].double(), change.right.double()
        right = right if right.dim() == 2 else right[start:stop]
        return base + (left @ right) * change.scale, (left.abs() @ right.abs()) * abs(change.scale) + base.abs()
    if change.add is not None:
        added = change.add[start:stop].double() * change.scale
        return base + added, added.abs() + base.abs()
    return base, base.abs()


def _value(
    change: Change, factor: Tensor | None, base: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (result of one adapter at weight 1, largest float32 error, size of its terms, DoRA's factor)."""
    total, terms = _sum(change, base, start, stop)
    # The error of a float32 sum of n products is at most n roundings of its terms.
    steps = FACTOR_STEPS + (change.left.shape[-1] if change.left is not None else 0)
    if change.magnitude is None:
        return total, steps * FLOAT32_STEP * terms, terms, None
    if factor is None:
        factor = (change.magnitude[start:stop].double() / torch.linalg.norm(total, dim=1)).view(-1, 1)
    return factor * total, factor.abs() * (steps + NORM_STEPS) * FLOAT32_STEP * terms, factor.abs() * terms, factor


def _laid_back(out: Out, sources: Sources) -> tuple[Tensor, Tensor]:
    """Return (a whole file tensor in float64, its largest float32 error) for one that several parameters use."""

    def read(leaf: str) -> Tensor:
        return sources.rows(leaf)(0, row_count(sources.shape(leaf))).float()

    shapes = {name: entry.shape for name, entry in sources.checkpoint.tensors.items()}
    shapes |= {name: entry.shape for name, entry in sources.packed.items()}
    wanted = read(out.leaf).double()
    slack = torch.zeros_like(wanted, dtype=torch.float32)
    for edit in out.edits:
        exact, lost = _parameter(edit, without_casts(edit.expression, read).contiguous(), sources)
        lay_back(edit.expression, out.leaf, exact, wanted, shapes)
        lay_back(edit.expression, out.leaf, lost, slack, shapes)
    return wanted, slack


def _parameter(edit: Edit, parameter: Tensor, sources: Sources) -> tuple[Tensor, Tensor]:
    changes = [sources.adapters.change(ask) for ask in edit.asks]
    shape = tuple(parameter.shape)
    factors = [_factor(change, lambda start, stop: parameter[start:stop], shape) for change in changes]
    exact, lost = torch.empty(shape, dtype=torch.float64), torch.empty(shape)
    for start, stop in row_pieces(shape):
        total, slack, _ = _total(changes, factors, parameter[start:stop].double(), start, stop)
        exact[start:stop], lost[start:stop] = total, slack
    return exact, lost
