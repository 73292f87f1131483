"""Does a merged file have the right values: every change computed again in float64, everything else bit by bit?"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.checkpoint.folder import Checkpoint
from trimtab.engine.formats.coded_files import CodedRows
from trimtab.engine.tiers.reader import PositionedFile, bytes_of
from trimtab.formats.packed import split_packed
from trimtab.merging.changes.delta import EntryRows, Rows, row_pieces
from trimtab.merging.changes.dequantize import packed_rows
from trimtab.merging.check_exact import Exact, packed_alone, packed_range, rounded_once, ulp
from trimtab.merging.files.layout import Out
from trimtab.merging.files.write import MergedRows, Sources, packed_content
from trimtab.merging.report import CheckedTensor, MergeCheck
from trimtab.process import phases

if TYPE_CHECKING:
    from trimtab.merging.files.write import Work

# The report says whether a scale that is wrong by this share would change any value of the file.
SCALE_FAULT = 0.01
# Scales of 4-bit blocks are chosen by least squares; sums in another order may choose other, equally good scales.
PACKED_ERROR_RATIO = 1.05


def check_files(work: Work, written: Checkpoint) -> MergeCheck:
    """Return the result of reading the written checkpoint again. A value is right if it is the exact result rounded once, within
    the bound of float32 sums before that (`check_exact.py`), which is computed for every value: the false-alarm rate is 0. A 4-bit
    value must be the nearest level, under the scale in the file, to a value within it."""
    changed: list[CheckedTensor] = []
    equal, not_equal = 0, []
    packed = split_packed(written)[1]
    with ExitStack() as stack:
        files = {file: PositionedFile(file) for file in written.files}
        for file in files.values():
            stack.callback(file.close)
        outs = [out for shard in work.shards for out in shard.outs]
        count = phases.counting("checking every value, tensor")
        for place, out in enumerate(outs, 1):
            count(place, len(outs))
            rows: Rows
            if out.pack is not None:
                rows = packed_rows(packed[out.tensor_name], lambda entry: files[entry.file])
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
    for name, at, content in packed_content(out, MergedRows(out, sources)):
        entry, data = written.tensors[name], bytes_of(content)
        read_back = memoryview(bytearray(len(data)))
        files[entry.file].read_into(read_back, entry.start + at)
        if read_back != data:
            return False
    return True


def _check_changed(out: Out, rows: Rows, sources: Sources, is_same: bool | None) -> CheckedTensor:
    if isinstance(rows, CodedRows):
        return _check_packed(out, rows, sources, is_same is True)
    exact = Exact(out, sources)
    is_applied, worst = True, 0.0
    whole, on_file = _Slope(), _Slope()
    visible = 0
    for start, stop in row_pieces(out.shape):
        due = exact(start, stop)
        written = rows(start, stop)
        kind, values = written.dtype, written.double()
        whole.add(values - due.base, due.wanted - due.base)
        rounded = rounded_once(due.wanted, kind)
        on_file.add(values - due.base, rounded - due.base)
        off = rounded_once(due.wanted + SCALE_FAULT * (due.wanted - due.base), kind)
        visible += int((off != rounded).sum())
        error = (values - due.wanted).abs()
        # If terms cancel, an ulp of the small result would measure the rounding of the large terms.
        shown = ulp(torch.maximum(due.wanted.abs(), due.size), kind)
        worst = max(worst, float((error / shown).max()) if error.numel() else 0.0)
        is_applied &= bool((error <= 0.5 * ulp(due.wanted.abs() + due.slack, kind) + due.slack).all())
    return CheckedTensor(out.tensor_name, is_applied, worst, whole.value, on_file.value, visible)


def _check_packed(out: Out, rows: CodedRows, sources: Sources, is_same: bool) -> CheckedTensor:
    """Return the check of a packed weight. is_same: whether packing again gave the same bytes."""
    exact = Exact(out, sources)
    # The packed base is subtracted, because packing errors of the base are not errors of the change.
    packed_base, again = packed_alone(out, sources.rows(out.leaf)), packed_alone(out, MergedRows(out, sources))
    is_applied, whole, on_file = True, _Slope(), _Slope()
    error = best = 0.0
    visible = 0
    for start, stop in row_pieces(out.shape):
        due = exact(start, stop)
        written, base, expected = rows(start, stop), packed_base(start, stop).double(), again(start, stop).double()
        whole.add(written.double() - base, due.wanted - due.base)
        on_file.add(written.double() - base, expected - base)
        first = start * out.shape[1]
        low, high = packed_range(due, out, rows.scales, first)
        is_applied &= bool(((written >= low) & (written <= high)).all())
        change = SCALE_FAULT * (due.wanted - due.base)
        off = due._replace(wanted=due.wanted + change, slack=torch.zeros_like(change))
        visible += int((packed_range(off, out, rows.scales, first)[0] != written).sum())
        error += float((written.double() - due.wanted).square().sum())
        best += float((expected - due.wanted).square().sum())
    is_applied &= is_same or error <= PACKED_ERROR_RATIO * best
    return CheckedTensor(out.tensor_name, is_applied, 0.0, whole.value, on_file.value, visible)


class _Slope:
    """The regression of written on expected values, through zero."""

    def __init__(self) -> None:
        self._along = self._length = 0.0

    def add(self, there: Tensor, due: Tensor) -> None:
        self._along += float((there * due).sum())
        self._length += float(due.square().sum())

    @property
    def value(self) -> float | None:
        """1.0: the whole change; 0.0: nothing; None: no change is expected."""
        return self._along / self._length if self._length else None
