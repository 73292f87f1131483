"""The values that a packed weight can have under the scales in its file, and the values that a right merge may choose.

A packer may choose its scales freely. The code of a value is then fixed: the nearest level. Codes are chosen for one of
two sets of scales: those that are read back from the file, or, as in bitsandbytes before it packs the scales, the
largest value of each block. This test needs neither the packer nor a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats.coded_files import CodedRows
from trimtab.engine.tiers.reader import PositionedFile
from trimtab.formats.record import DOUBLE, PackedEntry
from trimtab.merging.changes.dequantize import StoredRows, packed_rows
from trimtab.merging.check_exact import rounded_once

# Packed scales are 8-bit codes of their distance from the mean: half of the largest step of the table, as a share of its end, and
# a margin for the mean, which is not read here.
NESTED_STEP = 0.01


@dataclass(frozen=True)
class Grid:
    """The possible values of one packed weight: level x scale.

    levels: float64, ascending. scales: float32, one for `block` values in a row-major order. dtype: of the rounding
    before packing. shape: [D_out, D_in]. scale_error: the largest error of packed scales, 0 if they are not packed.
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
