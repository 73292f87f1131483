"""Which prompts are in progress at once, which of them has the next piece, and what share of them runs behind one decode step?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Generic, Protocol, TypeVar

from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.queue import FairQueue

Entry = TypeVar("Entry")

# Pieces of short prompts between two of the first one.
PIECES_BESIDE = 2
# The seconds of a piece where no answer waits for a token.
PIECE_S = 0.15
# Tokens of a piece, of one that can be cut: the first one, and those to choose from. Few sizes, so that jitter seldom changes one.
FIRST_TOKENS, PIECE_SIZES = 32, (16, 32, 64, 128, 256, 512, 1024)
# The share of a turn's time that pieces have while prompts of rows use it too.
LEAST_SHARE = 0.25
# Turns that a piece waits for at most: one may take long because the machine was busy.
MOST_TURNS = 16

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


class _WithJob(Protocol):
    @property
    def job(self) -> Job: ...


Request = TypeVar("Request", bound=_WithJob)


class Room(Generic[Entry]):
    """The tokens of prompts with keys and values, except the first ones, until each is freed. most_tokens: of all together."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._tokens: dict[Entry, int] = {}

    @property
    def left_tokens(self) -> int:
        return self.most_tokens - sum(self._tokens.values())

    def take(self, entry: Entry, tokens: int) -> None:
        self._tokens[entry] = tokens

    def free(self, entry: Entry) -> None:
        self._tokens.pop(entry, None)


class InProgress(Generic[Entry]):
    """The prompts in progress.

    first: the one of any length. place: whose keys and values are counted as those of the first: that one, also after `remove`,
    until `free`. room: for the others. One prompt of any length is in progress, and next to it short ones, each at most half as
    long and half of the `Room` that is left.
    """

    def __init__(self, room: Room[Entry]) -> None:
        self.room = room
        self.first: Entry | None = None
        self.place: Entry | None = None
        self._beside: deque[Entry] = deque()  # whose piece is next comes first
        self._tokens: dict[Entry, int] = {}
        self._pieces = 0  # of short prompts since the last one of the first

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._tokens)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._tokens

    @property
    def current(self) -> Entry | None:
        """The prompt whose piece is next."""
        if self.first is not None and (not self._beside or self._pieces >= PIECES_BESIDE):
            return self.first
        return self._beside[0] if self._beside else None

    def fits(self, tokens: int) -> bool:
        """Whether a prompt may begin next to the others. tokens: 0 for one that cannot."""
        left = self.room.left_tokens
        return 0 < tokens <= min(left, left if self.first is None else self._tokens[self.first]) // 2

    def add(self, entry: Entry, tokens: int, *, is_counted: bool = False) -> None:
        """Let a prompt begin: as the first where there is none, unless others have keys and values here and it fits next to them.
        is_counted: its keys and values are complete and have a place already."""
        is_alone = not self._beside and self.place is None
        if self.first is None and (is_counted or is_alone or not self.fits(tokens)):
            assert is_counted or self.place is None
            self.first = entry
            if not is_counted:
                self.place = entry
        else:
            self._beside.append(entry)
            if not is_counted:
                self.room.take(entry, tokens)
        self._tokens[entry] = tokens

    def took(self, entry: Entry) -> None:
        """Note that a prompt has had a piece."""
        if entry is self.first:
            self._pieces = 0
        elif entry in self._tokens:
            self._pieces += 1
            self._beside.remove(entry)
            self._beside.append(entry)

    def remove(self, entry: Entry) -> None:
        """Take a prompt out: it is complete, or its client has left. Its keys and values count until `free`. Errors: KeyError."""
        del self._tokens[entry]
        if entry is self.first:
            self.first = None
        else:
            self._beside.remove(entry)

    def free(self, entry: Entry) -> None:
        """Count the keys and values of a prompt no more; nothing for one that has none here."""
        self.room.free(entry)
        if entry is self.place:
            self.place = None


class Rowless(Generic[Request]):
    """The requests that wait for their pieces, are being computed (`begun`), or are `complete` and wait for a row. room: as
    `InProgress` takes it."""

    def __init__(self, room: Room[Request]) -> None:
        self.lines: FairQueue[Request] = FairQueue()
        self.begun: InProgress[Request] = InProgress(room)
        self.complete: list[Request] = []
        self._groups: set[str] = set()  # of requests whose first choice waits or is computed here
        self._mates: list[Request] = []
        self._last_s, self._asked = 0.0, FIRST_TOKENS  # of the last piece
        # Kind of job -> tokens and seconds per token of the last piece that was long enough to learn from.
        self._paces: dict[str, tuple[int, float]] = {}
        self._time_s, self._had_turn, self._goes_first = 0.0, False, False

    def __bool__(self) -> bool:
        return bool(len(self.begun) or len(self.lines))

    @property
    def waiting(self) -> int:
        return len(self.lines) + len(self._mates)

    @property
    def running(self) -> int:
        return len(self.begun) + len(self.complete)

    def add(self, entry: Request) -> None:
        """Let a request wait for its pieces."""
        self.lines.add(entry)
        if entry.job.group:
            self._groups.add(entry.job.group)

    def holds_back(self, entry: Request) -> bool:
        """Keep a request that shares the prompt of one here, and return True; False for any other."""
        is_mate = bool(entry.job.group) and entry.job.group in self._groups
        if is_mate:
            self._mates.append(entry)
        return is_mate

    def remove(self, entry: Request) -> list[Request]:
        """Take out a request that waits here, is computed or complete here, or is kept back; nothing for any other. Returns those
        that were kept back because of it."""
        if entry in self._mates:
            self._mates.remove(entry)
            return []
        if entry in self.lines:
            self.lines.remove(entry)
        elif entry in self.begun:
            self.begun.remove(entry)
        elif entry in self.complete:
            self.complete.remove(entry)
        else:
            return []
        self._groups.discard(entry.job.group)
        free = [one for one in self._mates if one.job.group not in self._groups]
        self._mates = [one for one in self._mates if one.job.group in self._groups]
        return free

    @property
    def goes_first(self) -> bool:
        """Whether no other prompt begins before a request here has had a piece."""
        return self._goes_first and bool(self)

    def go_first(self, goes_first: bool = True) -> None:
        """Let a request here go before the next prompt: one of them at a time has the memory of captured chunks."""
        self._goes_first = goes_first

    def may_begin(self, entry: Request) -> bool:
        """Whether a request would not wait for a row behind another whose pieces are complete."""
        return not self.complete or entry.job.kind == "embedding"

    def end(self, entry: Request) -> None:
        """Let a request whose pieces are complete wait for a row. Its keys and values stay counted (`InProgress.free`)."""
        self.begun.remove(entry)
        self.complete.append(entry)

    def is_due(self, left_s: float | None, *, is_shared: bool) -> bool:
        """Whether a piece runs in this turn. left_s: the time after a step of the rows, None without rows. is_shared: whether
        prompts of rows use it too."""
        is_shared &= not self.goes_first
        if left_s is None:
            self._had_turn = not (is_shared and self._had_turn)
            return self._had_turn
        self._time_s += left_s * (LEAST_SHARE if is_shared else 1.0)
        return self._time_s >= min(self._last_s, MOST_TURNS * left_s)

    def waits(self) -> None:
        """Note that no piece could run in a turn that was due: the next turn is too."""
        self._had_turn = False

    def most_tokens(self, left_s: float | None, kind: str) -> int:
        """Return the most tokens of the next piece, from the times of earlier ones of this kind of job; at most twice as many as
        they had."""
        tokens, token_s = self._paces.get(kind, (FIRST_TOKENS // 2, 0.0))
        fitting = (PIECE_S if left_s is None else left_s) / token_s if token_s else 2.0 * tokens
        most = min(fitting, 2.0 * tokens)
        self._asked = max((size for size in PIECE_SIZES if size <= most), default=PIECE_SIZES[0])
        return self._asked

    def took(self, tokens: int, seconds: float, kind: str) -> None:
        """Learn how long a piece took, the one that `most_tokens` limited."""
        self._goes_first = False
        self._last_s, self._time_s = seconds, max(self._time_s - seconds, 0.0)
        if 2 * tokens > self._asked or seconds > PIECE_S:  # else the text was shorter
            self._paces[kind] = max(tokens, 1), seconds / max(tokens, 1)


class Budget:
    """The durations of steps and chunks. sizes: of chunks that an engine runs; empty for any. least: of a chunk behind a step. A
    turn is a step of all rows and chunks of prompts behind it: together at most `RATIO` times the median step of as many rows. A
    pass of towers has no bound. Reasons: docs/decisions/0037."""

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
