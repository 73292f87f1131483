"""The share of waiting prompts that runs behind one decode step, so that no answer waits long.

A turn is a step of all rows and, behind it, chunks of prompts. Their time is bounded: step and chunks together take no more than
`RATIO` times the median step of as many rows. A chunk reads every weight, so very small ones would make prompts slow for
everybody: one chunk of `LEAST_TOKENS` at least goes through behind a step, and a larger one where it takes hardly longer. Without
rows nothing is bounded. Pure: durations are told, none is measured here.

What it does not know: how long a chunk of a size takes that has not run yet; it estimates from those that have, a chunk costing
half of its time whatever its size. A pass of towers (`TOWERS`) is bounded by nothing: it goes through first in a turn, or where the
median one fits into what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

# Time between two tokens of an answer, in median steps of as many rows without prompts.
RATIO = 3.0
LEAST_TOKENS = 256
# A chunk that takes so many times as long as the least one is taken in its place.
HARDLY = 1.2
# Sizes to choose from where chunks are not captured.
SIZES = (16, 64, 128, 256, 512, 1024)
# Stands for the size of a chunk where a prompt's images and audio went through their towers.
TOWERS = -1
_KEPT = 65  # durations of a kind that a median is made of
_FIXED = 0.5


class Budget:
    """The durations of steps and chunks. sizes: of chunks that an engine runs, ascending."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = tuple(sorted(sizes)) or SIZES
        self._steps: dict[int, deque[float]] = {}
        self._chunks: dict[int, deque[float]] = {}

    def took_step(self, rows: int, seconds: float) -> None:
        """Learn how long a step without prompts took."""
        self._steps.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append(seconds)

    def took_chunk(self, size: int, seconds: float) -> None:
        """Learn how long a chunk of a size took."""
        self._chunks.setdefault(size, deque(maxlen=_KEPT)).append(seconds)

    def step_s(self, rows: int) -> float | None:
        """Return the median step of as many rows, of the nearest known number of rows, or None if nothing is known."""
        bucket_of_rows = _bucket(rows)
        known = min(self._steps, key=lambda bucket: (abs(bucket - bucket_of_rows), bucket), default=None)
        return None if known is None else median(self._steps[known])

    def chunk_s(self, size: int) -> float | None:
        """Return the seconds of a chunk of this size, estimated if none of this size has run; None if nothing is known."""
        if size in self._chunks:
            return median(self._chunks[size])
        if size == TOWERS:
            return None
        larger = min((known for known in self._chunks if known > size), default=None)
        if larger is not None:
            return median(self._chunks[larger]) * (_FIXED + (1 - _FIXED) * size / larger)
        smaller = max((known for known in self._chunks if known != TOWERS), default=None)
        return None if smaller is None else median(self._chunks[smaller]) * size / smaller

    def left_s(self, rows: int) -> float | None:
        """Return the seconds left for chunks after a step of this many rows; None if nothing limits them."""
        step_s = self.step_s(rows) if rows else None
        return None if step_s is None else (RATIO - 1) * step_s

    def size(self, left_s: float | None, *, is_first: bool) -> int | None:
        """Return the largest size of a chunk, the least or more, that takes no longer than what is left; None if there is none. A
        short prompt takes a smaller one. For the first chunk of a turn there always is one, so that no prompt waits for ever."""
        if left_s is None:
            return self.sizes[-1]
        least_s = self.chunk_s(self._least)
        if is_first and least_s is not None:
            left_s = max(left_s, least_s * HARDLY)
        for size in reversed([size for size in self.sizes if size >= self._least]):
            taken_s = self.chunk_s(size)
            if taken_s is None or taken_s <= left_s:
                return size
        return None

    def fits_towers(self, left_s: float | None) -> bool:
        """Whether a pass of towers takes no longer than what is left; so as long as none has run."""
        return left_s is None or (self.chunk_s(TOWERS) or 0.0) <= left_s

    @property
    def _least(self) -> int:
        return next((size for size in self.sizes if size >= LEAST_TOKENS), self.sizes[-1])


def _bucket(rows: int) -> int:
    """Return rows rounded up to a power of two: the steps that are captured."""
    return 1 << max(rows - 1, 0).bit_length()
