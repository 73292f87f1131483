"""In which order does a known pass copy the pieces of blocks that are copied in every step?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
    """Return the blocks that a pass enters, in order; adjacent pieces of one block enter it once."""
    blocks: list[Any] = []
    for piece in order:
        if not blocks or blocks[-1] is not piece.block:
            blocks.append(piece.block)
    return blocks


class CopyOrder:
    """The copies of a pass and their time. `due[place]` are the copies that may begin once the step at that index has
    been used.

    order: the pieces in the order in which the pass enters them, those of a block adjacent. The first blocks are in the `slots`
    buffers when the pass begins, and again when it ends; block k uses buffer k modulo `slots`. steps: the copies in the order of
    use: single pieces, or a whole block if the pass does not enter every piece exactly once. place: entered piece -> its step.
    last: block -> its last step. A piece of the next block is copied as soon as the weights in its memory have been used: one
    buffer hides nearly as much of the copies as two.
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
                    self._queue(range(first[here], self.last[here] + 1), range(first[following], self.last[following] + 1))

    def _queue(self, used: range, coming: range) -> None:
        """Queue the copies of the next block of a buffer, each after all uses of the memory that it overwrites."""
        after = used.start
        for copy in (self.steps[number] for number in coming):
            over = (n for n in used if self.steps[n].start < copy.end and copy.start < self.steps[n].end)
            after = max(after, max(over, default=after))
            self.due[after].append(copy)
