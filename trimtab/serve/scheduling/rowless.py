"""Which prompts that need no row are computed between the turns of those that do: embeddings, and log-probabilities of a prompt.

Such a prompt is computed in pieces of a fraction of a second, one piece a turn at most. Requests that wait for a row pass it
between two pieces, regardless of their client, and so do short ones of the same kind (in_progress.py). Clients take turns
(queue.py). While rows are being answered a piece has the time that budget.py leaves after a step; a longer one waits until enough
time has passed. Prompts of rows come first: while they run it has `LEAST_SHARE` of that time, or every second turn without rows.

A prompt whose log-probabilities are complete waits for a row, and with it all others that need one after their pieces; embeddings
go on. Other choices of the same request share its prompt, so they wait for it. Pure: callers report durations.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.in_progress import InProgress, Room
from trimtab.serve.scheduling.queue import FairQueue

# The seconds of a piece where no answer waits for a token.
PIECE_S = 0.15
# Tokens of a piece, of one that can be cut: the first one, and those to choose from. Few sizes, so that jitter seldom changes one.
FIRST_TOKENS, SIZES = 32, (16, 32, 64, 128, 256, 512, 1024)
# The share of a turn's time that pieces have while prompts of rows use it too.
LEAST_SHARE = 0.25
# Turns that a piece waits for at most: one may take long because the machine was busy.
MOST_TURNS = 16


class Request(Protocol):
    @property
    def job(self) -> Job: ...


Entry = TypeVar("Entry", bound=Request)


class Rowless(Generic[Entry]):
    """The requests that wait for their pieces, are being computed (`begun`), or are `complete` and wait for a row. room: as
    `InProgress` takes it."""

    def __init__(self, room: Room[Entry]) -> None:
        self.lines: FairQueue[Entry] = FairQueue()
        self.begun: InProgress[Entry] = InProgress(room)
        self.complete: list[Entry] = []
        self._groups: set[str] = set()  # of requests whose first choice waits or is computed here
        self._mates: list[Entry] = []
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

    def add(self, entry: Entry) -> None:
        """Let a request wait for its pieces."""
        self.lines.add(entry)
        if entry.job.group:
            self._groups.add(entry.job.group)

    def holds_back(self, entry: Entry) -> bool:
        """Keep a request that shares the prompt of one here, and return True; False for any other."""
        is_mate = bool(entry.job.group) and entry.job.group in self._groups
        if is_mate:
            self._mates.append(entry)
        return is_mate

    def remove(self, entry: Entry) -> list[Entry]:
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

    def may_begin(self, entry: Entry) -> bool:
        """Whether a request would not wait for a row behind another whose pieces are complete."""
        return not self.complete or entry.job.kind == "embedding"

    def end(self, entry: Entry) -> None:
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
