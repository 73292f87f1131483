"""Rows of a packed weight in float32: read from the file a few at a time where their format allows it, else packed once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats.coded_files import CodedRows
from trimtab.engine.formats.weights import exact_rows, prequantized
from trimtab.engine.tiers.reader import PositionedFile, bytes_of
from trimtab.formats.record import DEQUANTIZED_VALUES, PackedEntry, stored_format
from trimtab.merging.changes.delta import EntryRows

OpenFile = Callable[[TensorEntry], PositionedFile]


class StoredRows:
    """Rows of a weight, float32 without rounding. The packed weight is kept in memory."""

    def __init__(self, entry: PackedEntry, open_file: OpenFile) -> None:
        parts = {name: EntryRows(open_file(part), part).all() for name, part in entry.read_parts.items()}
        self.shape, self._packed = entry.shape, prequantized(entry, parts, torch.float32)

    def __call__(self, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start, self.shape[1])  # its own memory: values of some formats are views of the packed weight
        for first in range(start, stop, step := max(1, DEQUANTIZED_VALUES // self.shape[1])):
            last = min(first + step, stop)
            found[first - start : last - start] = exact_rows(self._packed, range(first, last), torch.float32)
        return found


def packed_rows(entry: PackedEntry, open_file: OpenFile) -> CodedRows | StoredRows:
    """Return the rows of a packed weight, float32."""
    if not stored_format(entry.kind).is_coded:
        return StoredRows(entry, open_file)
    weight = entry.parts["weight"]
    file = open_file(weight)

    def whole(part: str) -> Tensor:
        tensor = entry.parts[part]
        return EntryRows(open_file(tensor), tensor).all()

    def stored(first: int, last: int) -> Tensor:
        found = torch.empty(last - first, dtype=torch.uint8)
        if found.numel():
            file.read_into(bytes_of(found), weight.start + first)
        return found

    return CodedRows(entry, whole, stored)
