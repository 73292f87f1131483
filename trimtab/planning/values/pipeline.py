"""In which order do the decoder layers that are copied in every step run, and how long does such a step take?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from trimtab.planning.values.blocks import Block, Choice, Item
from trimtab.planning.values.copy_order import CopyOrder, Piece

# Positions of the first of the spread layers, as shares of the distance between two.
PHASES = (0.0, 0.5)
# This many fewer or more layers may leave, because replaced layers, and so the staging buffers, differ in size.
MOST_LESS, MOST_MORE = 2, 3


@dataclass(frozen=True)
class Stage:
    """One block of a step, in the order of computing. seconds: of computing; copied_bytes: copied to the device before; pieces: the
    bytes of its pieces, () for a single one."""

    seconds: float
    copied_bytes: int = 0
    pieces: tuple[int, ...] = ()


class _Copied:
    """A stage that is copied, cut into its pieces."""

    def __init__(self, stage: Stage) -> None:
        ends = list(accumulate(stage.pieces or (stage.copied_bytes,)))
        self.pieces = [Piece(self, start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self.seconds, self.nbytes = stage.seconds, ends[-1]


def pipeline_s(stages: Sequence[Stage], *, link_Bps: float, slots: int) -> float:
    """Return the seconds of one of many steps. Its `slots` staging buffers hold the first copied blocks when it begins and when
    it ends: the last copies of a step are those that the next one begins with. A block's seconds are spread over its bytes."""
    blocks = [_Copied(stage) if stage.copied_bytes else None for stage in stages]
    order = CopyOrder([piece for block in blocks if block is not None for piece in block.pieces], slots)
    ready_s = [0.0] * len(order.steps)
    link_s = computed_s = 0.0
    place = 0
    for stage, block in zip(stages, blocks, strict=True):
        if block is None:
            computed_s += stage.seconds
            continue
        for piece in block.pieces:
            computed_s = max(computed_s, ready_s[place]) + block.seconds * (piece.nbytes / block.nbytes)
            for copy in order.due[place]:
                link_s = max(link_s, computed_s) + copy.nbytes / link_Bps
                ready_s[order.place[copy]] = link_s
            place += 1
    return max(computed_s, link_s)


def evened(
    blocks: Sequence[Block], items: Sequence[Item], chosen: Sequence[Choice], *, is_free: Callable[[Block], bool],
    is_allowed: Callable[[Sequence[Choice]], bool], seconds_of: Callable[[Sequence[Choice]], float],
) -> list[Choice]:  # fmt: skip
    """Return the choices with other decoder blocks copied in every step, if that takes fewer seconds: layers that are
    evenly spread, or at the end.

    is_free: whether a block was not placed by hand. is_allowed: whether choices keep every budget. seconds_of: of a request with
    these choices. All other blocks keep their choice, and so does the decoder if nothing better is allowed. Adjacent copied layers
    can leave the link idle for the rest of the step, because copies run ahead by as many layers as there are buffers.
    """
    best, best_s = list(chosen), seconds_of(chosen)
    places = [place for place, block in enumerate(blocks) if block.part == "language" and _moves(items[place], block, is_free)]
    layers = [place for place in places if blocks[place].is_decoder_layer]
    away = sum(chosen[place].tier == "stream" for place in layers)
    if not away or any(chosen[place].tier not in ("stream", "resident") for place in places):
        return best
    all_stay = list(chosen)
    for place in places:
        all_stay[place] = items[place].stay() or chosen[place]
    for cap in sorted({choice.staged_bytes for place in layers for choice in items[place].choices if choice.staged_bytes}):
        leave = {place: choice for place in layers if (choice := items[place].leave(cap, far=False)) is not None}
        for leaving in _spread(list(leave), away):
            candidate = list(all_stay)
            for place in leaving:
                candidate[place] = leave[place]
            if (tried_s := seconds_of(candidate)) < best_s and is_allowed(candidate):
                best, best_s = candidate, tried_s
    return best


def _moves(item: Item, block: Block, is_free: Callable[[Block], bool]) -> bool:
    """Whether a block may stay on the device, or be copied from the host in every step."""
    return is_free(block) and item.stay() is not None and any(choice.tier == "stream" for choice in item.choices)


def _spread(layers: Sequence[int], away: int) -> Iterator[set[int]]:
    """Yield layers that are evenly spread, or at the end: about as many as are copied now."""
    for count in range(max(away - MOST_LESS, 1), min(away + MOST_MORE, len(layers)) + 1):
        yield set(layers[-count:])
        for phase in PHASES:
            yield {layers[int((number + phase) * len(layers) / count)] for number in range(count)}
