"""Which bytes of a page or snapshot of the prefix cache hold the keys and values of which layer?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.kv.kv_cache import BatchedKVCache
from trimtab.engine.kv.recurrent import RecurrentLayer, is_recurrent, states_of
from trimtab.planning.memory.prefix_cache import ALIGNED, LEAST_PAGE_BYTES
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# By layer and name, keys and values of one row or prompt: [H, places, D]; of a whole pool where rows share one. A recurrent layer's
# are its window ("conv", [1, C, K]) and its matrices ("recurrent", [H, Dk, Dv]).
States = Mapping[tuple[int, str], Tensor]


@dataclass(frozen=True)
class PageField:
    """One layer's keys, values or state in a page or snapshot: of the shape of `States`, from byte `offset` on."""

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
    """The fields of a page and of a snapshot. blocks: of one block of the full layers; rings: of the sliding and recurrent ones."""

    blocks: tuple[PageField, ...]
    rings: tuple[PageField, ...]
    block_tokens: int

    @classmethod
    def of(cls, cache: BatchedKVCache, block_tokens: int) -> Layout:
        """Return the layout of a family from the shapes of its first states."""
        fields: dict[bool, list[PageField]] = {False: [], True: []}
        ends = {False: 0, True: 0}

        for number, layer in cache.with_memory().items():
            is_ring = isinstance(layer, RecurrentLayer) or layer.is_ring
            for name, state in layer.row_states(0).items():
                high, places, wide = state.shape
                one = PageField(number, name, (high, places if is_ring else block_tokens, wide), state.dtype, ends[is_ring])
                fields[is_ring].append(one)
                ends[is_ring] += -(-one.nbytes // ALIGNED) * ALIGNED
        return cls(tuple(fields[False]), tuple(fields[True]), block_tokens)

    def empty(self, layer: int, name: str, device: torch.device) -> Tensor:
        """Return memory of the shape of a field."""
        field = next(one for one in (*self.blocks, *self.rings) if (one.layer, one.name) == (layer, name))
        return torch.empty(field.shape, dtype=field.dtype, device=device)

    def values_like(self, field: PageField, keys: Tensor) -> Tensor:
        """Return empty values of the layer of a field; `keys` where it has no separate ones."""
        for other in (*self.blocks, *self.rings):
            if other.layer == field.layer and other.name == "values":
                return keys.new_empty(1, other.shape[0], 1, other.shape[2], dtype=other.dtype)
        return keys

    @cached_property
    def page_bytes(self) -> int:
        return max(end_of(self.blocks), LEAST_PAGE_BYTES)

    @cached_property
    def snapshot_bytes(self) -> int:
        """Bytes of the sliding and recurrent layers' states and of one block; 0 if a prompt can resume behind every block."""
        return end_of(self.rings) + end_of(self.blocks) if self.rings else 0

    @cached_property
    def tails(self) -> tuple[PageField, ...]:
        """Fields of the full layers in a snapshot, after the rings: the tokens after the last whole block."""
        start = end_of(self.rings)
        return tuple(PageField(f.layer, f.name, f.shape, f.dtype, start + f.offset) for f in self.blocks)

    def parts(self, room: int, *, has_tail: bool) -> tuple[SnapshotPart, ...]:
        """Return the parts of a snapshot that each fit in `room` bytes, or are one field."""
        fields = [*self.rings, *(self.tails if has_tail else ())]
        parts = list[SnapshotPart]()
        first = 0
        for number, field in enumerate(fields):
            following = fields[number + 1] if number + 1 < len(fields) else None
            start = fields[first].offset
            if following is None or following.offset + following.nbytes - start > room:
                end, rings = number + 1, len(self.rings)
                ring_numbers = range(min(first, rings), min(end, rings))
                tail_numbers = range(max(first - rings, 0), max(end - rings, 0))
                parts.append(SnapshotPart(start, field.offset + field.nbytes, ring_numbers, tail_numbers))
                first = end
        return tuple(parts)


@dataclass(frozen=True)
class SnapshotPart:
    """Bytes start .. stop of a snapshot, and the numbers of the rings and tails in them, as the layout counts them."""

    start: int
    stop: int
    rings: range
    tails: range


def holds_window(place: int, written: int, window: int, held: int) -> bool:
    """Whether a sliding layer that holds the last `held` of `written` positions still has the window - 1 positions before `place`,
    which are all that a prompt needs to resume there.

    Such a ring may also hold later positions. Masks exclude them: they take each place of a ring for the last position before the
    next token that belongs there. Of a place that holds a later one, that position is outside the window or before the first token.
    """
    return max(place - window + 1, 0) >= min(place, max(written - held, 0))


def end_of(fields: Sequence[PageField]) -> int:
    """Return the bytes up to the end of the last field, aligned."""
    return max((-(-(one.offset + one.nbytes) // ALIGNED) * ALIGNED for one in fields), default=0)


class CopyBuffer:
    """The memory that copies pass, and its views. memory: uint8 on the device; None: each copy has new host memory."""

    def __init__(self, layout: Layout, memory: Tensor | None) -> None:
        self.layout, self.memory = layout, memory
        self.room = 2**62 if memory is None else memory.numel()
        self.most_pages = max(self.room // layout.page_bytes, 1)
        self._parts = {has_tail: layout.parts(self.room, has_tail=has_tail) for has_tail in (False, True)}
        self._block_views: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by the number of pages
        self._part_views: dict[SnapshotPart, tuple[Tensor, list[Tensor], list[Tensor]]] = {}

    def blocks(self, count: int) -> tuple[Tensor, list[Tensor]]:
        """Return the bytes of `count` pages, and each full layer's keys or values in them: [count, H, block, D]."""
        if self.memory is None:
            return self._views_of_pages(torch.empty(count * self.layout.page_bytes, dtype=torch.uint8))
        if not self._block_views:
            whole = self.memory[: self.most_pages * self.layout.page_bytes]
            self._block_views[self.most_pages] = self._views_of_pages(whole)
        if count not in self._block_views:
            flat, views = self._block_views[self.most_pages]
            first_views = [view.narrow(0, 0, count) for view in views]
            self._block_views[count] = flat[: count * self.layout.page_bytes], first_views
        return self._block_views[count]

    def parts(self, *, has_tail: bool) -> tuple[SnapshotPart, ...]:
        """Return the parts in which a snapshot passes the buffer."""
        return self._parts[has_tail]

    def part(self, part: SnapshotPart) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the bytes of a part of a snapshot, its rings as `RowViews.rings`, and its tails: [H, block, D]."""
        if self.memory is None:
            return self._views_of_part(part, torch.empty(part.stop - part.start, dtype=torch.uint8))
        if part not in self._part_views:
            self._part_views[part] = self._views_of_part(part, self.memory[: part.stop - part.start])
        return self._part_views[part]

    def _views_of_pages(self, flat: Tensor) -> tuple[Tensor, list[Tensor]]:
        pages = flat.view(-1, self.layout.page_bytes)
        return flat, [field.view(pages) for field in self.layout.blocks]

    def _views_of_part(self, part: SnapshotPart, flat: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        def view(field: PageField) -> Tensor:
            return field.view(flat[None], field.offset - part.start)[0]

        rings = [view(self.layout.rings[number]).view(-1) for number in part.rings]
        return flat, rings, [view(self.layout.tails[number]) for number in part.tails]


@dataclass(frozen=True, eq=False)
class RowViews:
    """The keys and values of one row or prompt, as the prefix cache copies them, in the order of a layout's fields.

    full: of the full layers, [H, places, D]. blocks: the same as [blocks, H, block, D]. rings: of the sliding layers, flat: torch
    copies a list of tensors without gaps in one kernel. pages: which pages of a pool hold the row's tokens; None: full layers have
    a place for each token, in order.
    """

    full: list[Tensor]
    blocks: list[Tensor]
    rings: list[Tensor]
    block_tokens: int
    pages: tuple[int, ...] | None = None

    @classmethod
    def of(cls, layout: Layout, states: States) -> RowViews:
        """Return the views of a row's states."""
        size = layout.block_tokens
        full = [states[field.layer, field.name] for field in layout.blocks]
        blocks = []
        for state in full:
            count = state.shape[1] // size
            blocks.append(state[:, : count * size].unflatten(1, (count, size)).transpose(0, 1))
        rings = [states[field.layer, field.name].view(-1) for field in layout.rings]
        return cls(full, blocks, rings, size)

    @classmethod
    def of_prompt(cls, layout: Layout, prompt: Cache, count: int) -> RowViews:
        """Return the states of a prompt that transformers runs, its sliding layers' as rings."""
        states: dict[tuple[int, str], Tensor] = {}
        rings = {field.layer: field.shape[1] for field in layout.rings}
        for number, layer in enumerate(prompt.layers):
            if is_recurrent(layer):
                states |= {(number, name): state for name, state in states_of(layer).items()}
            for name in ("keys", "values"):
                tensor = getattr(layer, name, None)
                if tensor is None:
                    continue
                states[number, name] = tensor[0]
                if number in rings:
                    kept = min(tensor.shape[2], rings[number])
                    places = torch.arange(count - kept, count, device=tensor.device) % rings[number]
                    ring = tensor.new_zeros(tensor.shape[1], rings[number], tensor.shape[3])
                    states[number, name] = ring.index_copy(1, places, tensor[0, :, -kept:] if kept else tensor[0])
        return cls.of(layout, states)

    def copy_blocks(self, first: int, parts: list[Tensor], *, into_row: bool) -> None:
        """Copy blocks from number `first` on to or from each full layer's [count, H, block, D]."""
        if not parts:
            return
        count = parts[0].shape[0]
        numbers = self._block_numbers(first, count)
        if numbers == list(range(numbers[0], numbers[0] + count)):
            copy([one.narrow(0, numbers[0], count) for one in self.blocks], parts, into_row=into_row)
            return
        # From page-locked memory: a copy from elsewhere would wait for every step that is queued.
        index = torch.tensor(numbers, dtype=torch.long, pin_memory=parts[0].is_cuda)
        index = index.to(parts[0].device, non_blocking=True)
        for blocks, part in zip(self.blocks, parts, strict=True):  # one by one: a selection takes memory
            blocks.index_copy_(0, index, part) if into_row else part.copy_(blocks.index_select(0, index))

    def tails(self, start: int, count: int, numbers: range) -> list[Tensor]:
        """Return `count` tokens of one block, from token `start` on, of the full fields with these numbers: [H, count, D]."""
        if self.pages is not None:
            page, place = divmod(start, PAGE_TOKENS)
            start = self.pages[page] * PAGE_TOKENS + place
        return [self.full[number].narrow(1, start, count) for number in numbers]

    def _block_numbers(self, first: int, count: int) -> list[int]:
        """Return where blocks lie, counted in blocks."""
        if self.pages is None:
            return list(range(first, first + count))
        each, rest = divmod(PAGE_TOKENS, self.block_tokens)
        assert not rest, self.block_tokens
        return [self.pages[at // each] * each + at % each for at in range(first, first + count)]


def copy(row: list[Tensor], buffer: list[Tensor], *, into_row: bool) -> None:
    """Copy parts of a row from or to parts of a buffer, of the same dtypes on one device: a copy that converts takes memory."""
    if row:
        torch._foreach_copy_(row, buffer) if into_row else torch._foreach_copy_(buffer, row)
