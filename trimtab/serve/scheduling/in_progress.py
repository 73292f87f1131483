"""Which prompts are in progress at once, and which of them has the next piece: short ones pass a long one between its pieces.

Each prompt in progress has separate keys and values. One prompt of any length is in progress, the `first`, and next to it short
ones, each at most half as long as that and half of the `Room` that is left: a shorter one always fits, and prompts of about
one length keep their order. Prompts of rows and those that need no row have a first one each, and share one `Room`. Memory
therefore holds at most two contexts and the room, as a plan of several rows counts (planning/memory/activations.py,
`prompts_kv_bytes`); on a GPU that captures prompts, one context and the room in addition to that count.

Short ones take turns: one that begins has its piece after those that are in progress, so none waits for later prompts. The
first one is chosen by turns (queue.py) regardless of its length, so those that pass cannot keep a long prompt waiting beyond the
one before it.

Prompts that need no row are those of embeddings and of log-probabilities (`Rowless`). Such a prompt is computed in pieces of a
fraction of a second, one piece a turn at most. Requests that wait for a row pass it between two pieces, regardless of their client,
and so do short ones of the same kind. Clients take turns. While rows are being answered a piece has the time that budget.py leaves
after a step; a longer one waits until enough time has passed. Prompts of rows come first: while they run it has `LEAST_SHARE` of
that time, or every second turn without rows.

A prompt whose log-probabilities are complete waits for a row, and with it all others that need one after their pieces; embeddings
go on. Other choices of the same request share its prompt, so they wait for it. Pure: callers report durations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.queue import FairQueue

Entry = TypeVar("Entry")

# Pieces of short prompts between two of the first one.
PIECES_BESIDE = 2
# The seconds of a piece where no answer waits for a token.
PIECE_S = 0.15
# Tokens of a piece, of one that can be cut: the first one, and those to choose from. Few sizes, so that jitter seldom changes one.
FIRST_TOKENS, SIZES = 32, (16, 32, 64, 128, 256, 512, 1024)
# The share of a turn's time that pieces have while prompts of rows use it too.
LEAST_SHARE = 0.25
# Turns that a piece waits for at most: one may take long because the machine was busy.
MOST_TURNS = 16


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
    until `free`. room: for the others.
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
        self._time_s, self._had_turn = 0.0, False

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
        if left_s is None:
            self._had_turn = not (is_shared and self._had_turn)
            return self._had_turn
        self._time_s += left_s * (LEAST_SHARE if is_shared else 1.0)
        return self._time_s >= min(self._last_s, MOST_TURNS * left_s)

    def most_tokens(self, left_s: float | None, kind: str) -> int:
        """Return the most tokens of the next piece, from the times of earlier ones of this kind of job; at most twice as many as
        they had."""
        tokens, token_s = self._paces.get(kind, (FIRST_TOKENS // 2, 0.0))
        fitting = (PIECE_S if left_s is None else left_s) / token_s if token_s else 2.0 * tokens
        most = min(fitting, 2.0 * tokens)
        self._asked = max((size for size in SIZES if size <= most), default=SIZES[0])
        return self._asked

    def took(self, tokens: int, seconds: float, kind: str) -> None:
        """Learn how long a piece took, the one that `most_tokens` limited."""
        self._last_s, self._time_s = seconds, max(self._time_s - seconds, 0.0)
        if 2 * tokens > self._asked or seconds > PIECE_S:  # else the text was shorter
            self._paces[kind] = max(tokens, 1), seconds / max(tokens, 1)
