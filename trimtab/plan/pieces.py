"""The pieces of a block that is copied in every step, and the order in which a known pass copies them.

A buffer holds a block at a time. A piece of the next block is copied as soon as the weights that lie in its place have been used,
so the link goes on while the rest of the block is computed with: one buffer hides nearly as much of the copies as two.

Pure: sizes, and objects that stand for blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol


class Movable(Protocol):
    """One weight that moves, as `pieces_of` sees it."""

    @property
    def module_path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


def pieces_of(leaves: Sequence[Movable]) -> tuple[tuple[str, ...], ...]:
    """Return the module paths of each piece of a block, about in the order of computing.

    What reads one input is never cut apart, because one kernel may read it all: the linears of one parent with the same D_in
    (queries, keys and values; gate and up), and the weights of one module. These come in the order of the modules. Small neighbours
    are joined, up to the size of the largest.
    """
    units: dict[tuple[str, int | str], list[Movable]] = {}
    for leaf in leaves:
        is_linear = len(leaf.shape) == 2
        key = (leaf.module_path.rpartition(".")[0], leaf.shape[1] if is_linear else leaf.module_path)
        units.setdefault(key, []).append(leaf)
    most = max(map(_nbytes, units.values()), default=0)
    joined: list[list[Movable]] = []
    for unit in units.values():
        if joined and _nbytes(joined[-1]) + _nbytes(unit) <= most:
            joined[-1] += unit
        else:
            joined.append(list(unit))
    return tuple(tuple(dict.fromkeys(leaf.module_path for leaf in piece)) for piece in joined)


def _nbytes(leaves: Sequence[Movable]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


# A pass in a known order ---------------------------------------------------------------------------------------------------


class Pieces(Protocol):
    """A block with its pieces, which fill its buffer from the beginning."""

    @property
    def pieces(self) -> Sequence[Piece]: ...


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes start to end of a block's buffer: weights that are used together. block: whose `pieces` it is one of."""

    block: Any
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def blocks_in(order: Sequence[Piece]) -> list[Any]:
    """Return the blocks that a pass enters, in order; pieces of one block side by side are entering it once."""
    blocks: list[Any] = []
    for piece in order:
        if not blocks or blocks[-1] is not piece.block:
            blocks.append(piece.block)
    return blocks


class CopyOrder:
    """When a pass copies what. `due[place]` are the copies that may begin once the piece entered at that place has been used.

    order: the pieces in the order in which the pass enters them (`entries`). A visit is a block's pieces side by side: visit k uses
    buffer k modulo `slots`, and the blocks of the first visits are in the buffers when the pass begins. closing: by buffer, the
    block in it when the pass ends: of the pass that comes next (`following`: its first blocks) where that is known, else of this
    pass again. intact: which of `following` are in their buffers before this pass fills them; of these a pass copies the pieces
    that it has overwritten. A block is copied piece by piece if a visit enters all of its pieces. cut: "once": each of them once;
    "again": or more often; "never": as a whole.

    By place: `slots_at`, the buffer; `ends_at`, the place behind its visit; `brought_by`, the copy that brings the piece. For a
    first visit (before `first_end`) that is a copy of an earlier pass; it is None where the buffer's visit before is of the same
    block. slot_of: of each copy, its buffer. last_copies: those after which a buffer holds their block.
    """

    def __init__(
        self, order: Sequence[Piece], slots: int, *, following: Sequence[Pieces] = (), intact: Collection[Any] = (),
        cut: Literal["once", "again", "never"] = "once",
    ) -> None:  # fmt: skip
        self.entries = [piece for piece, before in zip(order, [None, *order], strict=False) if piece is not before]
        self.blocks = blocks_in(order)
        self._cut: str = cut
        visits: list[range] = []
        for _, entries in groupby(range(len(self.entries)), key=lambda place: id(self.entries[place].block)):
            places = list(entries)
            visits.append(range(places[0], places[-1] + 1))
        self.slots_at = [number % slots for number, places in enumerate(visits) for _ in places]
        self.ends_at = [places.stop for places in visits for _ in places]
        self.first_end = sum(map(len, visits[:slots]))
        self.brought_by: list[Piece | None] = [None] * len(self.entries)
        self.due: list[list[Piece]] = [[] for _ in self.entries]
        self.slot_of: dict[Piece, int] = {}
        self.last_copies: set[Piece] = set()
        after = [] if any(block in self.blocks for block in following) else list(following[:slots])
        self.closing = [*after, *self.blocks[len(after) : slots]]
        for slot in range(min(slots, len(visits))):
            chain = visits[slot::slots]
            first = self._copies(chain[0])
            for here, coming in pairwise(chain):
                if self._block(here) is not self._block(coming):
                    self._queue(here, slot, self._copies(coming))
            reach = max(self._block(places).pieces[-1].end for places in chain)
            end = self.closing[slot]
            if end is self._block(chain[-1]):
                continue
            over = [piece for piece in end.pieces if piece.start < reach or end not in intact]
            self._queue(chain[-1], slot, over if slot < len(after) else first)

    def _block(self, places: range) -> Any:
        return self.entries[places.start].block

    def _copies(self, places: range) -> list[Piece]:
        """Return the copies that bring the block of a visit, in the order of use."""
        block, entered = self._block(places), [self.entries[place] for place in places]
        pieces = list(dict.fromkeys(entered))
        is_whole = self._cut == "never" or len(pieces) < len(block.pieces)
        if is_whole or (self._cut == "once" and len(entered) > len(pieces)):
            copy_of = dict.fromkeys(pieces, Piece(block, 0, block.pieces[-1].end))
        else:
            copy_of = {piece: Piece(block, piece.start, piece.end) for piece in pieces}
        for place in places:
            self.brought_by[place] = copy_of[self.entries[place]]
        return list(dict.fromkeys(copy_of.values()))

    def _queue(self, used: range, slot: int, copies: Sequence[Piece]) -> None:
        """Queue the copies of the block that takes a buffer over, each behind all that lies in its place."""
        after = used.start
        for copy in copies:
            over = (n for n in used if self.entries[n].start < copy.end and copy.start < self.entries[n].end)
            after = max(after, max(over, default=after))
            self.due[after].append(copy)
            self.slot_of[copy] = slot
        self.last_copies.add(copies[-1])
