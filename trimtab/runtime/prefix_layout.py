"""The layout of a page and of a snapshot of the prefix cache: which bytes hold the keys and values of which layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.runtime.hf_slots import LayerCache, SlotCache

ALIGNED = 16
# The smallest page: the index of a page takes a few hundred bytes.
LEAST_PAGE_BYTES = 4096


@dataclass(frozen=True)
class PageField:
    """One layer's keys or values in a page or snapshot: [H, places, D] from byte `offset` on."""

    layer: int
    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        heads, places, width = self.shape
        return heads * places * width * self.dtype.itemsize

    def view(self, pages: Tensor, offset: int | None = None) -> Tensor:
        """Return [n, H, places, D] of bytes [n, page]."""
        start = self.offset if offset is None else offset
        return pages[:, start : start + self.nbytes].view(self.dtype).unflatten(1, self.shape)


@dataclass(frozen=True)
class Layout:
    """The fields of a page and of a snapshot. blocks: of one block of the full layers; rings: of the sliding layers."""

    blocks: tuple[PageField, ...]
    rings: tuple[PageField, ...]
    block_tokens: int

    @classmethod
    def of(cls, cache: SlotCache, block_tokens: int) -> Layout:
        """Return the layout of a family from the shapes of its first states."""
        fields: dict[bool, list[PageField]] = {False: [], True: []}
        ends = {False: 0, True: 0}
        for number, layer in enumerate(cache.layers):
            if not (isinstance(layer, LayerCache) and layer.is_initialized):
                continue
            for name, tensor in (("keys", layer.keys), ("values", layer.values)):
                places = layer.places if layer.is_ring else block_tokens
                shape = (layer.heads, places, int(tensor.shape[-1]))
                one = PageField(number, name, shape, tensor.dtype, ends[layer.is_ring])
                fields[layer.is_ring].append(one)
                ends[layer.is_ring] += -(-one.nbytes // ALIGNED) * ALIGNED
        return cls(tuple(fields[False]), tuple(fields[True]), block_tokens)

    @property
    def page_bytes(self) -> int:
        return max(end_of(self.blocks), LEAST_PAGE_BYTES)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the sliding layers' states and of one block; 0 if a prompt can resume at the end of every block."""
        return end_of(self.rings) + end_of(self.blocks) if self.rings else 0

    @property
    def tails(self) -> tuple[PageField, ...]:
        """Fields of the full layers in a snapshot, after the rings: the tokens after the last whole block."""
        start = end_of(self.rings)
        return tuple(PageField(f.layer, f.name, f.shape, f.dtype, start + f.offset) for f in self.blocks)


def end_of(fields: Sequence[PageField]) -> int:
    """Return the bytes up to the end of the last field, aligned."""
    return max((-(-(one.offset + one.nbytes) // ALIGNED) * ALIGNED for one in fields), default=0)
