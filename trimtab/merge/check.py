"""Whether the written files hold what they should: every change computed again in float64, everything else compared bit by bit.

A changed value is right if it is the exact result rounded once to the file's dtype, give or take what the float32 sums
before that rounding may lose; the bound is computed for every value, none is chosen by hand. Packed weights are packed
again and compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.packed import split_packed
from trimtab.merge import pack
from trimtab.merge.delta import Change, EntryRows, Rows, row_pieces
from trimtab.merge.report import CheckedTensor, MergeCheck
from trimtab.merge.shards import BLOCKSIZE, Out
from trimtab.merge.stream import MergedRows, Sources
from trimtab.merge.unpack import PackedRows
from trimtab.runtime.read import PositionedFile, bytes_of

if TYPE_CHECKING:
    from trimtab.merge.merge import Work

FLOAT32_STEP = 2.0**-24
# A norm of D squares in float32 is added up in vector lanes and pairwise: its error grows with log2(D), not with D.
NORM_STEPS = 64


def check_files(work: Work, written: Checkpoint) -> MergeCheck:
    """Return what a second look at the written checkpoint finds."""
    changed: list[CheckedTensor] = []
    equal, not_equal = 0, []
    packed = split_packed(written)[1]
    with ExitStack() as stack:
        files = {file: PositionedFile(file) for file in written.files}
        for file in files.values():
            stack.callback(file.close)
        for out in (out for shard in work.shards for out in shard.outs):
            rows: Rows
            if out.pack is not None:
                rows = PackedRows(packed[out.tensor_name], lambda entry: files[entry.file])
                is_same = _packed_is_same(out, work.sources, written, files)
            else:
                entry = written.tensors[out.tensor_name]
                rows = EntryRows(files[entry.file], entry)
                is_same = None
            if any(edit.asks for edit in out.edits):
                changed.append(_check_changed(out, rows, work.sources, is_same))
            elif is_same if is_same is not None else _is_equal(out, rows, work.sources):
                equal += 1
            else:
                not_equal.append(out.tensor_name)
    return MergeCheck(tuple(changed), equal, tuple(not_equal))


def _is_equal(out: Out, rows: Rows, sources: Sources) -> bool:
    base = sources.rows(out.leaf)
    for start, stop in row_pieces(out.shape):
        new = rows(start, stop)
        old = base(start, stop).to(new.dtype)
        if bytes_of(new.contiguous()) != bytes_of(old.contiguous()):
            return False
    return True


def _packed_is_same(out: Out, sources: Sources, written: Checkpoint, files: dict[Path, PositionedFile]) -> bool:
    for name, at, data in _repacked(out, sources):
        entry = written.tensors[name]
        found = memoryview(bytearray(len(data)))
        files[entry.file].read_into(found, entry.start + at)
        if found != data:
            return False
    return True


def _repacked(out: Out, sources: Sources) -> Iterator[tuple[str, int, memoryview]]:
    rows = MergedRows(out, sources)
    yield from pack.packed_parts(out.tensor_name, rows, out.shape, out.dtype, nested=out.pack == "nf4-dq")


def _check_changed(out: Out, rows: Rows, sources: Sources, is_same: bool | None) -> CheckedTensor:
    exact = _Exact(out, sources)
    # What packing loses of the base itself is not lost of the change: the packed base is subtracted.
    packed_base = _PackedBase(out, sources) if out.pack is not None else None
    is_applied, worst, along, length = is_same is not False, 0.0, 0.0, 0.0
    for start, stop in row_pieces(out.shape):
        wanted, slack, base, size = exact(start, stop)
        found = rows(start, stop)
        change = wanted - base
        start_from = base if packed_base is None else packed_base(start, stop).double()
        along += float(((found.double() - start_from) * change).sum())
        length += float(change.square().sum())
        if is_same is None:
            error = (found.double() - wanted).abs()
            step = ulp(wanted, found.dtype)
            # Where terms cancel out, an ulp of the small result would measure the rounding of the large terms.
            shown = ulp(torch.maximum(wanted.abs(), size), found.dtype)
            worst = max(worst, float((error / shown).max()) if error.numel() else 0.0)
            is_applied &= bool((error <= 0.5 * step + slack).all())
    return CheckedTensor(out.tensor_name, is_applied, worst, along / length if length else None)


class _PackedBase:
    """Rows of the base's own tensor as they would be after packing it alone."""

    def __init__(self, out: Out, sources: Sources) -> None:
        rows = sources.rows(out.leaf)
        parts: dict[str, bytearray] = {}
        for name, _, data in pack.packed_parts("w", rows, out.shape, out.dtype, nested=out.pack == "nf4-dq"):
            parts.setdefault(name, bytearray()).extend(data)
        self.columns = out.shape[1]
        self.weight = torch.frombuffer(parts["w"], dtype=torch.uint8)
        self.code = torch.frombuffer(parts["w.quant_map"], dtype=torch.float32)
        self.scales = pack.read_scales(parts)

    def __call__(self, start: int, stop: int) -> Tensor:
        places = torch.arange(start * self.columns, stop * self.columns)
        pairs = self.weight[places // 2]
        index = torch.where(places % 2 == 0, pairs >> 4, pairs & 15)
        values = self.code[index.int()] * self.scales[places // BLOCKSIZE]
        return values.view(stop - start, self.columns)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighbouring numbers of a dtype at each value, float64."""
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.tiny)  # zero has no exponent of its own
    exponent = torch.frexp(size)[1] - 1
    return torch.ldexp(torch.full_like(size, info.eps), exponent)


class _Exact:
    """Rows of one changed tensor in float64: (result, what float32 may lose on the way, base, size of the terms)."""

    def __init__(self, out: Out, sources: Sources) -> None:
        self.base, self.merged = sources.rows(out.leaf), None
        self.changes: list[Change] = []
        if all(edit.by_rows for edit in out.edits):
            (edit,) = out.edits
            self.changes = [sources.adapters.change(ask) for ask in edit.asks]
            self.factors = [self._factor(change, out.shape) for change in self.changes]
        else:  # what goes back through several tensors is computed by the same code again
            self.merged = MergedRows(out, sources)

    def __call__(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        base = self.base(start, stop).double()
        size = base.abs()
        if self.merged is not None:
            found = self.merged(start, stop).double()
            return found, torch.zeros_like(found), base, size
        total, slack = base.clone(), FLOAT32_STEP * size
        for change, factor in zip(self.changes, self.factors, strict=True):
            value, lost, terms = _value(change, factor, base, start, stop)
            total += change.weight * (value - base)
            slack += abs(change.weight) * lost
            size += abs(change.weight) * terms
        return total, slack + FLOAT32_STEP * total.abs(), base, size

    def _factor(self, change: Change, shape: tuple[int, ...]) -> Tensor | None:
        if change.magnitude is None or not change.is_table:
            return None
        squares = torch.zeros(shape[1], dtype=torch.float64)
        for start, stop in row_pieces(shape):
            squares += _sum(change, self.base(start, stop).double(), start, stop)[0].square().sum(0)
        return change.magnitude.double() / squares.sqrt()


def _sum(change: Change, base: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return (base + change, size of the terms that were added up)."""
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


def _value(change: Change, factor: Tensor | None, base: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (result of one adapter at weight 1, what float32 may lose, size of its terms)."""
    found, terms = _sum(change, base, start, stop)
    # A sum of n products in float32 is off by n roundings of its terms at most.
    steps = 4 + (change.left.shape[-1] if change.left is not None else 0)
    if change.magnitude is None:
        return found, steps * FLOAT32_STEP * terms, terms
    if factor is None:
        factor = (change.magnitude[start:stop].double() / torch.linalg.norm(found, dim=1)).view(-1, 1)
    return factor * found, factor.abs() * (steps + NORM_STEPS) * FLOAT32_STEP * terms, factor.abs() * terms
