"""The copies of streamed towers beside what is computed before and after them, and beside the towers themselves.

    copies = TowerCopies(model.streamer)
    with copies.running(kinds): hf_model(**tensors)      # the towers of a prompt, not cut

The first pass over media of the same kinds shows in which order its blocks are entered. A later pass tells the streamer: each block
is then copied while the one before it computes, with one staging buffer piece by piece. Its last copies are the first blocks of
what follows: those of the decoder where layers are streamed, else the towers' own. The latter run beside the prompt's chunks and
stay in the buffers until the next image or audio clip.

What is not covered: passes that are cut into pieces between decode steps, passes of transformers' own that run the decoder too,
blocks on a disk. They are copied as any other pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from trimtab.plan.pieces import Piece
from trimtab.runtime.tiers import Streamer

# Kinds of media that a prompt may have together are few; more than these are not known by their order.
MOST_KINDS = 16


class TowerCopies:
    """What is known of the towers' passes of one model. orders: kinds of media -> the pieces that such a pass enters."""

    def __init__(self, streamer: Streamer | None) -> None:
        self._streamer = streamer
        self.orders: dict[Hashable, list[Piece]] = {}

    @contextmanager
    def running(self, kinds: Hashable, *, is_cut: bool = False) -> Iterator[None]:
        """Copy in the order of an earlier pass of these kinds while the block runs. is_cut: whether the pass may stop in the middle
        or begins there."""
        streamer = self._streamer
        if streamer is None or is_cut:
            yield
            return
        order, entered = self.orders.get(kinds, []), list[Piece]()
        if order:
            streamer.expect(order, streamer.replayed)
        streamer.watched = entered
        try:
            yield
        except BaseException:
            streamer.end_expected(is_failed=True)  # a copy could fail too, and hide why
            raise
        finally:
            streamer.watched = None
        streamer.end_expected()
        # Of media that are cached a tower runs for some only, or not at all: the longest order is the complete one.
        on_disk = any(piece.block.host is None for piece in entered)
        if not on_disk and len(entered) > len(order) and (order or len(self.orders) < MOST_KINDS):
            self.orders[kinds] = entered
