"""The share of waiting prompts that runs behind one decode step, so that no answer waits long.

A turn is a step of all rows and, behind it, chunks of prompts. Their time is bounded: step and chunks together take at most
`RATIO` times the median step of as many rows. One chunk runs behind a step even where it takes longer: the least size, or a
larger one that takes hardly longer. Without rows a CPU's chunks take `ALONE_S` where that costs hardly more. Pure: callers report
durations, this module measures none.

A chunk reads every weight. On a GPU this is most of its time up to a few hundred tokens, and smaller chunks would make prompts slow
for all clients, so the least size is `LEAST_TOKENS`. On a CPU a chunk's time is nearly proportional to its tokens, and a small one
keeps the rows waiting for less. The least size is therefore the smallest that pays: a token costs at most `DEARER` times what it
costs in the size where it costs least. An engine that takes chunks of any size has smaller ones tried. Where the least one takes
longer than is left, a smaller one that fits is taken, up to `DEAREST`, or one that exceeds it by a fifth at most. Captured sizes
are judged by past prompts, because a trial would capture graphs.

On a GPU durations of a kind hardly differ, and medians are compared. On a CPU they do: a chunk whose median just fits would exceed
the time behind every second step. There a step and a chunk count with their 80th percentile (`_USUAL`). A size that has run
fewer than `TRIES` times counts with at most the estimate from others: a first chunk may take long, and the size would never run
again. For the same reason a size that has not run for `_FORGET` chunks loses its longest duration.

What it does not know: the time of a chunk of a size that has not run yet. It estimates from the next smaller and the next larger
size that have run; of a larger one alone it takes half of the time as independent of the size. Nor that a size which was tried
while the machine was busy would pay later. A pass of towers (`TOWERS`) has no bound: it runs first in a turn, or where the median
one fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

# Time between two tokens of an answer, in median steps of as many rows without prompts.
RATIO = 3.0
# The least size of a chunk as long as no smaller one is known to pay.
LEAST_TOKENS = 256
# A smaller size pays if its seconds per token are at most this many times the fewest of any size. Chunks of 256 tokens
# of E4B on an H200 take 0.75 times as long as those of 512 (bench/results/chunk_layers.json), 1.5 times as long per token.
DEARER = 1.5
# A size below the least is taken where only it fits, if a token costs at most this many times the least cost.
DEAREST = 2.5
# Chunks of a smaller size that are tried before it is judged.
TRIES = 3
# A chunk with this share of a size's tokens is one of that size where chunks have any: none of SIZES is further from the next.
_FULL = 2 / 3
# A chunk that takes this many times as long as the least one, or as long per token as the fastest one, is taken in its place.
HARDLY = 1.2
# Seconds of a chunk that no row waits for, where a smaller one costs hardly more.
ALONE_S = 0.3
# Sizes to choose from where chunks are not captured.
SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# The size of a chunk in which the towers computed a prompt's images and audio.
TOWERS = -1
_KEPT = 65  # durations of a kind in a median
_USUAL = 0.8  # this share of a CPU's durations is no longer than the duration it assumes
_FORGET = 128  # chunks after which a size that has not run loses its longest duration
_MOST_STEP = 1.5  # a CPU's step counts as this many medians at most
_FIXED = 0.5


class Budget:
    """The durations of steps and chunks. sizes: of chunks that an engine runs; empty for any. least: of a chunk behind a step."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes, self._tries = tuple(sorted(sizes)) or SIZES, not sizes
        self._steps: dict[int, deque[float]] = {}
        self._chunks: dict[int, deque[float]] = {}
        self._latest: deque[int] = deque(maxlen=_KEPT)  # sizes of chunks
        self._asked: dict[int, int] = {}  # how often a size was tried, whether it ran or the prompt was shorter
        self._count, self._ran = 0, dict[int, int]()  # chunks so far, and which was the last of a size
        self._token_s: dict[int, deque[float]] = {}  # seconds per token of full chunks, by size
        self._unlearned_least = next((size for size in self.sizes if size >= LEAST_TOKENS), self.sizes[-1])
        self.least, self._is_trying = self._unlearned_least, False

    def took_step(self, rows: int, seconds: float) -> None:
        """Learn how long a step without prompts took."""
        self._steps.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append(seconds)

    def took_chunk(self, size: int, seconds: float) -> None:
        """Learn how long a chunk of a size took. A prompt that the prefix cache holds whole has none."""
        if not size:
            return
        self._chunks.setdefault(size, deque(maxlen=_KEPT)).append(seconds)
        self._latest.append(size)
        self._count += 1
        self._ran[size] = self._count
        if self._tries:
            self._forget()
        full = next((one for one in self.sizes if _FULL * one <= size <= one), None)
        if full is not None:
            self._token_s.setdefault(full, deque(maxlen=_KEPT)).append(seconds / size)
            self._judge()

    def _forget(self) -> None:
        for size, known in self._chunks.items():
            if size != TOWERS and self._count - self._ran[size] >= _FORGET and len(known) > 1:
                known.remove(max(known))
                self._ran[size] = self._count

    def chunk_s(self, size: int) -> float | None:
        """Return the seconds of a chunk of this size, estimated if none of this size has run; None if nothing is known."""
        return self._estimate(size, median)

    def most_s(self, size: int) -> float | None:
        """Return the seconds that a chunk of this size has to fit into: on a CPU the 80th percentile, else the median."""
        return self._estimate(size, _usual if self._tries else median)

    def _estimate(self, size: int, of: Callable[[Sequence[float]], float]) -> float | None:
        known = self._chunks.get(size, ())
        if size == TOWERS or len(known) >= (TRIES if self._tries else 1):
            return of(known) if known else None
        return min((one for one in (of(known) if known else None, self._between(size, of)) if one is not None), default=None)

    def _between(self, size: int, of: Callable[[Sequence[float]], float]) -> float | None:
        """Return the seconds of a chunk of this size estimated from the nearest sizes; None if none has run."""
        larger = min((known for known in self._chunks if known > size), default=None)
        smaller = max((known for known in self._chunks if known < size and known != TOWERS), default=None)
        if larger is None:
            return None if smaller is None else of(self._chunks[smaller]) * size / smaller
        larger_s = of(self._chunks[larger])
        if smaller is None:
            return larger_s * (_FIXED + (1 - _FIXED) * size / larger)
        smaller_s = min(of(self._chunks[smaller]), larger_s)
        return smaller_s + (larger_s - smaller_s) * (size - smaller) / (larger - smaller)

    def left_s(self, rows: int) -> float | None:
        """Return the seconds left for chunks after a step of this many rows, or of the nearest known number of rows; None if
        nothing limits them."""
        if not rows or not self._steps:
            return None
        bucket = min(self._steps, key=lambda known: (abs(known - _bucket(rows)), known))
        step_s = median(self._steps[bucket])
        return RATIO * step_s - (min(_usual(self._steps[bucket]), _MOST_STEP * step_s) if self._tries else step_s)

    def size(self, left_s: float | None, *, is_first: bool) -> int | None:
        """Return the largest size of a chunk, the least or more, that fits in the time left; None if there is none. A
        short prompt takes a smaller one. For the first chunk of a turn there always is one, so that every prompt runs at some time.
        It may be smaller (`_below_least`)."""
        if left_s is None:
            return self._alone()
        taken_s = {size: self.most_s(size) or 0.0 for size in self.sizes if size >= self.least}
        # That of the least size, unless one of its few chunks took long, as a first one may.
        most_s = max(left_s, min(taken_s.values()) * HARDLY) if is_first else left_s
        size = max((size for size, seconds in taken_s.items() if seconds <= most_s), default=None)
        exceeds = size is None or taken_s[size] > left_s
        if exceeds and size is not None and self._is_trying:
            return self.least
        if exceeds and is_first and self._tries and (smaller := self._below_least(left_s)):
            return smaller
        if exceeds and size is not None and not self._runs(self.least):
            return self.least  # its time is an estimate, so no larger size is compared with it
        return size

    def _alone(self) -> int:
        """Return the size of a chunk that no row waits for. On a CPU another prompt may come and wait for it: a smaller one delays
        that by less, if a token costs hardly more. A size of twice as many tokens is tried as long as it saves more than that."""
        if not self._tries:
            return self.sizes[-1]
        sizes = [size for size in self.sizes if size >= self._unlearned_least]
        token_s = {size: median(self._token_s[size]) for size in sizes if size in self._token_s}
        *_, smaller, largest = (None, None, *token_s)
        double = next((size for size in sizes if size >= 2 * (largest or sizes[0] / 2)), None)
        if double and (largest is None or smaller is None or token_s[largest] * HARDLY < token_s[smaller]):
            return double
        most_s = HARDLY * min(token_s.values())
        paying = [size for size in sizes if token_s.get(size, 0.0) <= most_s]
        return max((size for size in paying if (self.most_s(size) or 0.0) <= ALONE_S), default=paying[0])

    def _runs(self, size: int) -> int:
        """Return how many chunks of a size are known. Short prompts have none of exactly the size, but full ones of it."""
        return max(len(self._chunks.get(size, ())), len(self._token_s.get(size, ())))

    def _below_least(self, left_s: float) -> int | None:
        """Return the largest size below the least that fits in the time left, or one in between that has hardly
        run yet. Where a token costs too much before, the fastest one that takes hardly longer than that; None if none does."""
        fewest_s = min((median(known) for known in self._token_s.values()), default=0.0)
        nearly: dict[int, float] = {}
        longest = max(self._latest, default=self.sizes[-1])  # of a larger size short prompts have no chunk
        for size in reversed([one for one in self.sizes if one < self.least]):
            median_s, most_s = self.chunk_s(size), self.most_s(size)
            if median_s is None or most_s is None or median_s > DEAREST * fewest_s * size:
                break
            if most_s <= left_s:
                return size
            is_known = self._runs(size) >= TRIES or self._asked.get(size, 0) >= TRIES
            if not is_known and max((one for one in self.sizes if one < size), default=0) < longest:
                self._asked[size] = self._asked.get(size, 0) + 1
                return size
            if median_s <= HARDLY * left_s:
                nearly[size] = median_s
        return min(nearly, key=lambda size: nearly[size], default=None)

    def fits_towers(self, left_s: float | None) -> bool:
        """Whether a pass of towers fits in the time left; True as long as none has run."""
        return left_s is None or (self.chunk_s(TOWERS) or 0.0) <= left_s

    def _judge(self) -> None:
        """Let the least size be the smallest that pays, or the next smaller one as long as that is tried."""
        token_s = {size: median(known) for size, known in self._token_s.items()}
        most_s = self._most_token_s(token_s)
        paying = {size for size, seconds in token_s.items() if seconds <= most_s}
        first = self._unlearned_least
        self.least = min((size for size in paying if size < first), default=first)
        smaller = max((size for size in self.sizes if size < self.least), default=None)
        known = len(self._token_s.get(smaller, ())) if smaller is not None else TRIES
        self._is_trying = self._tries and self.least in paying and known < TRIES
        if self._is_trying and smaller is not None:
            self.least = smaller

    def _most_token_s(self, token_s: dict[int, float]) -> float:
        """Return the most seconds that a token may take in a size that pays. token_s: those of each known size."""
        smallest, largest, first = min(token_s), max(token_s), self._unlearned_least
        fewest_s = min(token_s.values())
        if largest < first:  # seconds per token of the first least size, on the line through the known sizes
            if smallest == largest:
                return DEARER * fewest_s if self._tries else 0.0
            taken_s = {size: size * token_s[size] for size in (smallest, largest)}
            slope = max(taken_s[largest] - taken_s[smallest], 0.0) / (largest - smallest)
            fewest_s = min(fewest_s, (taken_s[largest] + slope * (first - largest)) / first)
        return DEARER * fewest_s


def _usual(durations: Sequence[float]) -> float:
    """Return the 80th percentile of durations; of few the longest one does not count, as a first one may be long."""
    return sorted(durations)[int(_USUAL * (len(durations) - 1))]


def _bucket(rows: int) -> int:
    """Return rows rounded up to a power of two: the steps that are captured."""
    return 1 << max(rows - 1, 0).bit_length()
