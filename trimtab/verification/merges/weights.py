"""Are merged weights equal to base plus change, within the rounding of a right merge?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats.coded_files import CodedRows
from trimtab.engine.tiers.reader import PositionedFile
from trimtab.formats.record import DOUBLE, PackedEntry
from trimtab.merging.changes.dequantize import StoredRows, packed_rows
from trimtab.merging.check_exact import rounded_once, ulp
from trimtab.merging.files.layout import FLOATS
from trimtab.verification.routes.alarm_rate import symmetric_limit

# Packed scales are 8-bit codes of their distance from the mean: half of the largest step of the table, as a share of its end, and
# a margin for the mean, which is not read here.
NESTED_STEP = 0.01


@dataclass(frozen=True)
class Grid:
    """The possible values of one packed weight: level x scale.

    levels: float64, ascending. scales: float32, one for `block` values in a row-major order. dtype: of the rounding before packing.
    shape: [D_out, D_in]. scale_error: the largest error of packed scales, 0 if they are not packed. A packer may choose its scales
    freely; the code of a value is then the nearest level, for the scales in the file or, as in bitsandbytes, the largest value of
    each block.
    """

    levels: Tensor
    scales: Tensor
    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale_error: float = 0.0

    @property
    def rows_a_piece(self) -> int:
        """Rows per chunk, in whole blocks: all rows if a row is no whole number of blocks."""
        return 1 if self.shape[1] % self.block == 0 else self.shape[0]

    def scale_of(self, start: int, stop: int) -> Tensor:
        """Return the scale in the file of every value of some rows, float64 [rows, D_in]."""
        first, last = start * self.shape[1], stop * self.shape[1]
        blocks = self.scales[first // self.block : -(-last // self.block)].double()
        return blocks.repeat_interleave(self.block)[: last - first].view(stop - start, -1)

    def largest_of(self, values: Tensor) -> Tensor:
        """Return the largest magnitude of every value's block, in the shape of the values (whole rows from a block's start)."""
        flat = values.abs().reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % self.block)).view(-1, self.block)
        return blocks.amax(1).repeat_interleave(self.block)[: flat.numel()].view(values.shape)

    def rounded(self, values: Tensor) -> Tensor:
        """Return values rounded to the dtype before packing, as float64."""
        return rounded_once(values, self.dtype)

    def nearest(self, values: Tensor, chosen_for: Tensor) -> Tensor:
        """Return the level of each packed value if codes are chosen for these scales."""
        divisor = torch.where(chosen_for == 0, torch.ones_like(chosen_for), chosen_for)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[torch.bucketize(values / divisor, middles)]


def read_grid(entry: PackedEntry) -> tuple[Grid, Tensor] | None:
    """Return the grid of a packed weight and its values, float32 [D_out, D_in], not rounded; None if its format has none."""
    with _opened(entry) as rows:
        if not isinstance(rows, CodedRows):
            return None
        error = NESTED_STEP * float((rows.scales - rows.scales.mean()).abs().max()) if entry.kind.endswith(DOUBLE) else 0.0
        grid = Grid(rows.levels, rows.scales, rows.block, getattr(torch, entry.dtype), entry.shape, error)
        return grid, rows(0, entry.shape[0])


def exact_values(entry: PackedEntry) -> Tensor:
    """Return the values of a packed weight, float32 [D_out, D_in], not rounded: what a merge adds a change to."""
    with _opened(entry) as rows:
        return rows(0, entry.shape[0])


@contextmanager
def _opened(entry: PackedEntry) -> Iterator[CodedRows | StoredRows]:
    with ExitStack() as stack:

        def opened(part: TensorEntry) -> PositionedFile:
            file = PositionedFile(part.file)
            stack.callback(file.close)
            return file

        yield packed_rows(entry, opened)


# The test assumes nothing about the form of the noise, so the rate can be small.
FALSE_ALARM_RATE = 1e-6
SCALE_FAULT = 0.01
# Least error of a slope: above the rounding of a scale; if the grid of a packed weight is unknown (a weight that a
# loader stacks from several), also above that of 4-bit scales that clip large values.
LEAST_OFF, LEAST_OFF_COARSE = 0.004, 0.05
# Largest error of computing in bfloat16: in steps of the file's dtype, and as a share of the change's terms.
STEPS, STEPS_DORA, TERM_SHARE, NORM_SHARE = 2.0, 4.0, 2.0**-6, 2.0**-14
# The error of 4-bit codes is a tenth of a weight's norm.
PACKED_ERROR = 0.25
# Two products of a level and a scale are equal below this share of the scale: float32 rounds by 2^-24.
SAME_VALUE = 2.0**-20
_PIECE_VALUES = 2**20
# (exact values, merged ones, change, bound, rows) -> (how far each is off, how far a wrong scale would move it, what is outside).
Test = Callable[[Tensor, Tensor, Tensor, Tensor, slice], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Sums:
    """Sums over the values of one module or of several, from which the tests are made."""

    along: float = 0.0
    squares: float = 0.0
    length: float = 0.0
    fault_along: float = 0.0
    fault_squares: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    @property
    def off(self) -> float:
        """The excess share of the change in the weights; negative if some is missing."""
        return self.along / self.length if self.length else 0.0

    @property
    def size(self) -> float:
        """The significance of `off`: |sum of x| / sqrt(sum of x^2)."""
        return abs(self.along) / math.sqrt(self.squares) if self.squares else 0.0

    @property
    def fault_size(self) -> float:
        """The `size` with a scale that is wrong by SCALE_FAULT."""
        return abs(self.fault_along) / math.sqrt(self.fault_squares) if self.fault_squares else 0.0


@dataclass(frozen=True)
class ModuleWeight:
    """One merged weight. form: dtype of the file, or its packed form. beyond: number of values outside the bound.

    is_coarse: packed, and compared with the exact values because its grid is unknown.
    """

    module_path: str
    form: str
    beyond: int
    sums: Sums = field(repr=False)
    is_coarse: bool = False

    @property
    def slope(self) -> float:
        """The share of the change in the weights, relative to the share that the exact result keeps after rounding (1.0:
        right)."""
        return 1 + self.sums.off

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready values."""
        return {
            "module_path": self.module_path, "form": self.form, "slope": self.slope, "size": self.sums.size,
            "beyond": self.beyond,
        }  # fmt: skip


@dataclass(frozen=True)
class OtherTensors:
    """The tensors that no adapter changes. equal: number of those that are the base's. differing, not_compared: tensor paths."""

    equal: int = 0
    differing: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True)
class MergedWeights:
    """All modules that an adapter changes and all other tensors, and the verdict on them: "right", "differs" or "cannot tell"."""

    modules: tuple[ModuleWeight, ...]
    false_alarm_rate: float = FALSE_ALARM_RATE
    others: OtherTensors = OtherTensors()

    @property
    def limit(self) -> float:
        """The limit of `size`, with one false-alarm rate for all modules and their sum."""
        return symmetric_limit(self.false_alarm_rate, len(self.modules) + 1)

    @property
    def together(self) -> Sums:
        """The sums of all modules."""
        return sum((row.sums for row in self.modules), Sums())

    @property
    def least_off(self) -> float:
        return LEAST_OFF_COARSE if any(row.is_coarse for row in self.modules) else LEAST_OFF

    @property
    def wrong(self) -> tuple[ModuleWeight, ...]:
        """The modules that are not base plus change, the worst first."""
        rows = [row for row in self.modules if row.beyond or self._is_off(row.sums, row.is_coarse)]
        return tuple(sorted(rows, key=lambda row: -abs(row.sums.off)))

    def _is_off(self, sums: Sums, is_coarse: bool) -> bool:
        return sums.size > self.limit and abs(sums.off) > (LEAST_OFF_COARSE if is_coarse else LEAST_OFF)

    @property
    def sees_scale_fault(self) -> bool:
        """Whether the test would detect a scale wrong by 1 % in all modules."""
        return self.least_off < SCALE_FAULT and self.together.fault_size > self.limit

    @property
    def verdict(self) -> Literal["right", "differs", "cannot tell"]:
        """The worst of all; "cannot tell" if a tensor was not compared, or the test could not even detect a merge of nothing."""
        together = self.together
        if self.others.differing or self.wrong or self._is_off(together, self.least_off == LEAST_OFF_COARSE):
            return "differs"
        # With nothing merged, x would be the square of the change in each value, plus the present errors.
        if self.least_off == LEAST_OFF_COARSE and together.length < 2 * self.limit * math.sqrt(together.squares):
            return "cannot tell"
        return "cannot tell" if self.others.not_compared else "right"

    def to_json(self) -> dict[str, Any]:
        """Return the test as JSON-ready values."""
        return {
            "verdict": self.verdict, "slope": 1 + self.together.off, "size": self.together.size, "limit": self.limit,
            "false_alarm_rate": self.false_alarm_rate, "sees_scale_fault": self.sees_scale_fault,
            "wrong": [row.module_path for row in self.wrong], "modules": [row.to_json() for row in self.modules],
            "others": asdict(self.others),
        }  # fmt: skip


def module_weight(
    module_path: str, base: Tensor, merged: Tensor, delta: Tensor, form: str, *, terms: Tensor | None = None,
    grid: Grid | None = None,
) -> ModuleWeight:  # fmt: skip
    """Return one module's sums. Shapes: [D_out, D_in] each, float32 values of any file dtype.

    form: the merged file's dtype, or the format that it is packed in. terms: size of the terms of the change; None with DoRA,
    whose norms are sums over all of the weight. grid: of a packed weight; `merged` is then not rounded to any dtype.
    """
    is_packed = form not in FLOATS
    step = max(1, _PIECE_VALUES // max(1, base.shape[-1]))
    step = max(step, grid.rows_a_piece) if grid is not None else step
    tests = [_plain(form)] if not is_packed else [_coarse] if grid is None else [_packed(grid, own) for own in (True, False)]
    tallies = [_Tally(test) for test in tests]
    error = size = 0.0
    for start in range(0, base.shape[0], step):
        rows = slice(start, min(start + step, base.shape[0]))
        w, m, d = base[rows].double(), merged[rows].double(), delta[rows].double()
        bound = _bound(w, d, terms[rows].double() if terms is not None else None, "bfloat16" if is_packed else form)
        if is_packed:
            error, size = error + float((m - w - d).square().sum()), size + float((w + d).square().sum())
        for tally in tallies:
            tally.add(w + d, m, d, bound, rows)
    # All codes are chosen for one set of scales: the set that explains more of them.
    best = min(tallies, key=lambda tally: tally.other)
    beyond = best.beyond
    if is_packed and not error <= PACKED_ERROR**2 * size:
        beyond = base.numel()
    return ModuleWeight(module_path, form, beyond, best.sums, is_packed and grid is None)


def _bound(w: Tensor, d: Tensor, terms: Tensor | None, form: str) -> Tensor:
    """Return the largest error of each value in a merge that computes in bfloat16 and rounds change and sum to `form`."""
    steps = (STEPS if terms is not None else STEPS_DORA) * ulp(torch.maximum(w.abs(), (w + d).abs()), getattr(torch, form))
    return steps + (TERM_SHARE * d.abs() + NORM_SHARE * w.abs() if terms is None else TERM_SHARE * terms)


class _Tally:
    """Sums over the chunks of one weight, by one test. beyond: values outside the bound. other: values other than expected."""

    def __init__(self, test: Test) -> None:
        self.test, self.sums, self.beyond, self.other = test, Sums(), 0, 0

    def add(self, exact: Tensor, m: Tensor, d: Tensor, bound: Tensor, rows: slice) -> None:
        off, fault, beyond = self.test(exact, m, d, bound, rows)
        x, y = off * d, fault * d
        self.sums += Sums(*(float(v.sum()) for v in (x, x * x, d * d, y, y * y)))
        self.beyond += int(beyond.sum())
        self.other += int((off != 0).sum())


def _plain(form: str) -> Test:
    """Return the test against the exact values, rounded once to the file's dtype."""
    kind = getattr(torch, form)

    def test(exact: Tensor, m: Tensor, d: Tensor, bound: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        expected = rounded_once(exact, kind)
        return m - expected, rounded_once(exact + SCALE_FAULT * d, kind) - expected, ~((m - exact).abs() <= bound)

    return test


def _coarse(exact: Tensor, m: Tensor, d: Tensor, bound: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Test against the exact values, within the noise of packing."""
    return m - exact, SCALE_FAULT * d + (m - exact), torch.zeros(())


def _packed(grid: Grid, own: bool) -> Test:
    """Return the test against the packed levels of the exact values. own: codes are chosen for the scales in the file."""

    def test(exact: Tensor, m: Tensor, d: Tensor, bound: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        scale = grid.scale_of(rows.start, rows.stop)

        def packed(values: Tensor) -> Tensor:
            rounded = grid.rounded(values)
            return grid.nearest(rounded, scale if own else grid.largest_of(rounded)) * scale

        expected = packed(exact)
        # The values of the file are a product in float32.
        off = torch.where((m - expected).abs() <= SAME_VALUE * scale.abs(), torch.zeros_like(m), m - expected)
        ends = [exact - bound, exact + bound]
        largest = [grid.largest_of((exact.abs() + sign * bound).clamp_min(0)) for sign in (-1, 1)]
        reached = torch.stack([grid.nearest(end, one) * scale for end in ends for one in ([scale] if own else largest)])
        slack = SAME_VALUE * scale.abs()
        beyond = ~((m >= reached.amin(0) - slack) & (m <= reached.amax(0) + slack))
        if not own:  # codes alone do not show a block that is all too large
            packing = grid.scale_error + slack
            beyond |= ~((scale >= largest[0] - packing) & (scale <= largest[1] + packing))
        return off, packed(exact + SCALE_FAULT * d) - expected, beyond

    return test


def saved_weight(path: str, saved: Tensor, merged: Tensor, form: str) -> ModuleWeight:
    """Return whether a saved module's tensor is in the merged file, rounded to its dtype."""
    exact, written = saved.double(), merged.double()
    off = ~((written - exact).abs() <= ulp(exact, getattr(torch, form)))
    return ModuleWeight(path, form, int(off.sum()), Sums())


def merged_weights(rows: Sequence[ModuleWeight], others: OtherTensors = OtherTensors()) -> MergedWeights | None:
    """Return the test of all modules and tensors, None if there is none.

    Two tests share one false-alarm rate. Bound: a merge that computes in bfloat16 at worst stays within a computed bound. Slope:
    errors must not correlate with the change, |sum of x| / sqrt(sum of x^2), x = (value - expected) x change; it must also differ
    by a least share, since a scale rounded to bfloat16 is off by up to 0.2 %.
    """
    return MergedWeights(tuple(rows), others=others) if rows or others != OtherTensors() else None
