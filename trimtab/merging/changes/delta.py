"""How does an adapter change a weight by PEFT's merge in float32, a few rows at a time?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.tiers.reader import PositionedFile, bytes_of

# Rows are processed in chunks of about this many values: 4 MiB in float32.
PIECE_VALUES = 2**20
Rows = Callable[[int, int], Tensor]


def row_count(shape: Sequence[int]) -> int:
    """Return the size of a tensor's first dimension; a scalar has one row."""
    return shape[0] if shape else 1


def row_pieces(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of row ranges of about PIECE_VALUES values."""
    rows = row_count(shape)
    width = 1
    for size in shape[1:]:
        width *= size
    step = max(1, PIECE_VALUES // max(1, width))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


class EntryRows:
    """Rows of a tensor in a file, in its own dtype, read when they are requested."""

    def __init__(self, file: PositionedFile, entry: TensorEntry) -> None:
        self.file, self.entry = file, entry
        self._row_bytes = entry.nbytes // max(1, row_count(entry.shape))

    def __call__(self, start: int, stop: int) -> Tensor:
        shape = (stop - start, *self.entry.shape[1:]) if self.entry.shape else ()
        rows = torch.empty(shape, dtype=getattr(torch, self.entry.dtype))
        if rows.numel():
            self.file.read_into(bytes_of(rows), self.entry.start + start * self._row_bytes)
        return rows

    def all(self) -> Tensor:
        return self(0, row_count(self.entry.shape))


@dataclass(eq=False)
class Change:
    """The change of one parameter by one adapter.

    left [rows, R] and right [R, D]: their product times `scale` is added; for a stack of experts left [E, rows, R] and
    right [E, R, D]. add: added as it is times `scale` (lora_bias). magnitude: DoRA's, [rows] for a linear layer; [D]
    for a table, whose norms run over all rows (`prepare`). saved: rows that replace the base's. weight: of the adapter.
    """

    adapter: str
    weight: float
    scale: float = 1.0
    left: Tensor | None = None
    right: Tensor | None = None
    add: Tensor | None = None
    magnitude: Tensor | None = None
    is_table: bool = False
    saved: EntryRows | None = None
    _factor: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the change does not depend on the base."""
        return self.saved is None and self.magnitude is None

    def prepare(self, base: Rows, shape: Sequence[int]) -> None:
        """Compute the values that need the whole parameter: the norms of a table with DoRA."""
        if self.magnitude is None or not self.is_table or self._factor is not None:
            return
        squares = torch.zeros(shape[1], dtype=torch.float64)
        for start, stop in row_pieces(shape):
            squares += self._sum(base(start, stop).float(), start, stop).double().square().sum(0)
        self._factor = self.magnitude / squares.sqrt().float()

    def delta(self, start: int, stop: int) -> Tensor | None:
        """Return the update of rows start to stop, float32; None if the adapter only replaces values."""
        if self.left is not None and self.right is not None:
            # As PEFT: the product first, the scale on it afterwards.
            product = self.left[start:stop] @ (self.right if self.right.dim() == 2 else self.right[start:stop])
            return product if self.scale == 1 else product.mul_(self.scale)
        return None if self.add is None else self.add[start:stop] * self.scale

    def _sum(self, base: Tensor, start: int, stop: int) -> Tensor:
        if self.saved is not None:
            base = self.saved(start, stop).float()
        delta = self.delta(start, stop)
        return base if delta is None else delta.add_(base)

    def value(self, base: Tensor, start: int, stop: int) -> Tensor:
        """Return rows start to stop of the base with only this adapter, at weight 1 (float32)."""
        total = self._sum(base, start, stop)
        return total if self.magnitude is None else self._gain(total, start, stop) * total

    def _gain(self, total: Tensor, start: int, stop: int) -> Tensor:
        """Return DoRA's factor of the rows. total: base + change."""
        assert self.magnitude is not None
        if self.is_table:
            assert self._factor is not None
            return self._factor
        return (self.magnitude[start:stop] / torch.linalg.norm(total, dim=1)).view(-1, 1)

    def difference(self, base: Tensor, start: int, stop: int) -> Tensor:
        """Return weight x (the adapter's rows - the base's), float32."""
        if self.is_plain:
            delta = self.delta(start, stop)
            assert delta is not None
            return delta if self.weight == 1 else delta.mul_(self.weight)
        return (self.value(base, start, stop) - base).mul_(self.weight)

    def put_on(self, current: Tensor, base: Tensor, start: int, stop: int) -> Tensor:
        """Return rows start to stop, float32, with this adapter applied after others. current: their result, may be
        overwritten."""
        if self.magnitude is None or self.saved is not None:  # nothing else changes a replaced one (plan.py)
            return current.add_(self.difference(base, start, stop))
        gain = self._gain(self._sum(base, start, stop), start, stop)
        delta = self.delta(start, stop)
        assert delta is not None
        new = delta.add_(current).mul_(gain)
        return new if self.weight == 1 else current.add_((new - current).mul_(self.weight))

    def fingerprint(self) -> str:
        """Return a hash that is equal only for equal changes of a parameter."""
        digest = hashlib.sha256(f"{self.adapter} {self.weight} {self.scale}".encode())
        for name in ("left", "right", "add", "magnitude"):
            tensor = getattr(self, name)
            digest.update(f"{name} {None if tensor is None else tuple(tensor.shape)}".encode())
            if tensor is not None:
                digest.update(bytes_of(tensor.contiguous()))
        if self.magnitude is not None:
            digest.update(str(self.is_table).encode())
        if self.saved is not None:
            for start, stop in row_pieces(self.saved.entry.shape):
                digest.update(bytes_of(self.saved(start, stop)))
        return digest.hexdigest()


def merged(base: Tensor, start: int, stop: int, changes: Sequence[Change]) -> Tensor:
    """Return rows start to stop with every change applied, float32. base: the same rows, float32, may be overwritten. DoRA rescales
    by norms of only the base and its own change, as PEFT 0.21.2 does with several active adapters. Source: PEFT 0.19.1 and 0.21.2,
    lora/layer.py (Linear.merge, Embedding.merge, ParamWrapper.get_delta_weight), lora/variants.py."""
    if len(changes) == 1 and changes[0].weight == 1:
        return changes[0].value(base, start, stop)
    if any(change.magnitude is not None for change in changes):
        current = base.clone()
        for change in changes:
            current = change.put_on(current, base, start, stop)
        return current
    differences = [change.difference(base, start, stop) for change in changes]
    for difference in differences:
        base += difference
    return base
