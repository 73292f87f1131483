"""Dequantizing a packed weight to float32, a few rows at a time.

`packed_rows` chooses: bitsandbytes' weights are read from the file by rows, those of other formats once, packed.

bitsandbytes, 4-bit: two values per byte, the first in the high half; value = code[index] x the block's scale. Double quantization
keeps the scales as 8-bit codes of a second table, less their mean. int8: row-wise, value = integer x row maximum / 127.
Source: bitsandbytes 0.49.2 and 0.50.2, functional.py, dequantize_4bit and int8_vectorwise_dequant; the products are
float32 there too, so the values are the same bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats.weights import dequantize_rows, prequantized
from trimtab.engine.tiers.reader import PositionedFile, bytes_of
from trimtab.formats.record import PackedEntry, stored_format
from trimtab.merging.changes.delta import EntryRows

INT8_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes spells it
OpenFile = Callable[[TensorEntry], PositionedFile]


class PackedRows:
    """Rows of a packed weight, float32. The scales are kept in memory; packed values are read on request."""

    def __init__(self, entry: PackedEntry, open_file: OpenFile) -> None:
        self.entry, self.shape = entry, entry.shape
        self._weight = entry.parts["weight"]
        self._file = open_file(self._weight)

        def whole(part: str) -> Tensor:
            tensor = entry.parts[part]
            return EntryRows(open_file(tensor), tensor).all()

        if entry.kind == "int8":
            self._scale = whole("SCB").float()
            return
        assert entry.blocksize is not None
        self._block = entry.blocksize
        self._code = whole("quant_map")
        self._scale = whole("absmax")
        if entry.nested:
            codes, blocks = whole("nested_quant_map"), whole("nested_absmax")
            size = int(entry.state["nested_blocksize"])
            self._scale = codes[self._scale.int()] * blocks.repeat_interleave(size)[: self._scale.numel()]
            self._scale += float(entry.state["nested_offset"])

    @property
    def scales(self) -> Tensor:
        """The scale of each block of 4-bit values, or of each row of int8 ones, float32."""
        return self._scale

    @property
    def code(self) -> Tensor:
        """The 16 levels of 4-bit values in the order of their codes, float32."""
        return self._code

    def __call__(self, start: int, stop: int) -> Tensor:
        columns = self.shape[1]
        if self.entry.kind == "int8":
            rows = EntryRows(self._file, self._weight)(start, stop)
            return rows.float() * self._scale[start:stop].view(-1, 1) * INT8_STEP
        first, last = start * columns, stop * columns
        low, high = first // 2, math.ceil(last / 2)
        packed = torch.empty(high - low, dtype=torch.uint8)
        if packed.numel():
            self._file.read_into(bytes_of(packed), self._weight.start + low)
        pairs = torch.stack((packed >> 4, packed & 15), 1).reshape(-1)
        index = pairs[first - 2 * low : last - 2 * low].int()
        blocks = self._scale[first // self._block : math.ceil(last / self._block)]
        scale = blocks.repeat_interleave(self._block)[first % self._block :][: last - first]
        return (self._code[index] * scale).view(stop - start, columns)


class StoredRows:
    """Rows of a weight in another format than bitsandbytes', float32 without rounding. The packed weight is kept in memory."""

    def __init__(self, entry: PackedEntry, open_file: OpenFile) -> None:
        parts = {name: EntryRows(open_file(part), part).all() for name, part in entry.read_parts.items()}
        packed = prequantized(entry, parts, torch.float32)
        wide = {name: part.float() if name == "scale" and part.is_floating_point() else part for name, part in packed.parts.items()}
        self.shape, self._packed = entry.shape, replace(packed.with_parts(wide, {}), dtype=torch.float32)

    def __call__(self, start: int, stop: int) -> Tensor:
        return dequantize_rows(self._packed, start, stop, torch.device("cpu"))


def packed_rows(entry: PackedEntry, open_file: OpenFile) -> PackedRows | StoredRows:
    """Return the rows of a packed weight, float32."""
    is_bitsandbytes = stored_format(entry.kind).family in ("codebook", "int8")
    return PackedRows(entry, open_file) if is_bitsandbytes else StoredRows(entry, open_file)
