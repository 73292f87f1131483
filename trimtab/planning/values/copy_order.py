"""The pieces of a block that is copied in every step, and the order in which a known pass copies them.

A buffer holds a block at a time. A piece of the next block is copied as soon as the weights that lie in its place have been used,
so the link goes on while the rest of the block is computed with: one buffer hides nearly as much of the copies as two.

Pure: sizes, and objects that stand for blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
    """When a pass copies what. `due[place]` are the copies that may begin once the step at that place has been used.

    order: the pieces in the order in which the pass enters them, those of a block side by side. The first blocks are in the
    `slots` buffers when the pass begins, and again when it ends; block k uses buffer k modulo `slots`. steps: what is copied, in
    the order of use: each piece, but a block as a whole of which the pass does not enter every piece once. place: of each piece
    that is entered, its step. last: of each block, its last step.
    """

    def __init__(self, order: Sequence[Piece], slots: int) -> None:
        self.blocks = blocks_in(order)
        self.slot_of = {block: number % slots for number, block in enumerate(self.blocks)}
        entered: dict[Pieces, list[Piece]] = {block: [] for block in self.blocks}
        for piece in order:
            entered[piece.block].append(piece)
        self.steps: list[Piece] = []
        self.place: dict[Piece, int] = {}
        self.last: dict[Pieces, int] = {}
        first: dict[Pieces, int] = {}
        for block, pieces in entered.items():
            first[block] = len(self.steps)
            is_cut = len(pieces) == len(block.pieces) == len(set(pieces))
            self.steps += pieces if is_cut else [Piece(block, 0, block.pieces[-1].end)]
            self.last[block] = len(self.steps) - 1
            self.place |= {piece: first[block] + number * is_cut for number, piece in enumerate(pieces)}
        self.due: list[list[Piece]] = [[] for _ in self.steps]
        for slot in range(min(slots, len(self.blocks))):
            chain = self.blocks[slot::slots]
            for here, following in zip(chain, [*chain[1:], chain[0]], strict=True):
                if here is not following:
                    self._queue(
                        range(first[here], self.last[here] + 1), range(first[following], self.last[following] + 1)
                    )

    def _queue(self, used: range, coming: range) -> None:
        """Queue the copies of the block that takes a buffer over, each behind all that lies in its place."""
        after = used.start
        for copy in (self.steps[number] for number in coming):
            over = (n for n in used if self.steps[n].start < copy.end and copy.start < self.steps[n].end)
            after = max(after, max(over, default=after))
            self.due[after].append(copy)
