"""Which prompts that need no row go through between the turns of those that do: embeddings, and log-probabilities of a prompt.

Such a prompt goes through in pieces of a fraction of a second, one piece a turn at most, and one prompt at a time, because each
has keys and values of its own. Requests that wait for a row pass it between two pieces, whoever sent them. Clients take turns
(line.py). While rows are being answered a piece has the time that budget.py leaves beside a step; a longer one waits until enough
of it has gone by. Prompts of rows come first: beside them it has `LEAST_SHARE` of that time, or every second turn without rows.

A prompt whose log-probabilities are complete keeps its place until it has a row. Other choices of the same request share its
prompt, so they wait for it. Pure: durations are told, none is measured here.
"""

from __future__ import annotations

from typing import Generic

from trimtab.serve.line import Entry, Lines

# The seconds of a piece where nobody waits for a token.
PIECE_S = 0.15
# Tokens of a piece, of one that can be cut: the first one, and those to choose from. Few sizes, so that jitter seldom changes one.
FIRST_TOKENS, SIZES = 32, (16, 32, 64, 128, 256, 512, 1024)
# The share of a turn's time that pieces have while prompts of rows use it too.
LEAST_SHARE = 0.25
# Turns that a piece waits for at most: one may take long because the machine was busy.
MOST_TURNS = 16


class Rowless(Generic[Entry]):
    """What waits, and the one that is being computed (`current`)."""

    def __init__(self) -> None:
        self.lines: Lines[Entry] = Lines()
        self.current: Entry | None = None
        self._groups: set[str] = set()  # of requests whose first choice waits or is computed here
        self._mates: list[Entry] = []
        # The last piece, and the last that was long enough to learn from.
        self._last_s, self._asked = 0.0, FIRST_TOKENS
        self._tokens, self._token_s = FIRST_TOKENS // 2, 0.0
        self._time_s, self._had_turn = 0.0, False

    def __bool__(self) -> bool:
        return self.current is not None or bool(len(self.lines))

    @property
    def waiting(self) -> int:
        return len(self.lines) + len(self._mates)

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
        """Take out a request that waits here, is computed here, or is held back; nothing for any other. Returns those that were
        held back because of it."""
        if entry in self._mates:
            self._mates.remove(entry)
            return []
        if entry in self.lines:
            self.lines.remove(entry)
        elif entry is self.current:
            self.current = None
        else:
            return []
        self._groups.discard(entry.job.group)
        free = [one for one in self._mates if one.job.group not in self._groups]
        self._mates = [one for one in self._mates if one.job.group in self._groups]
        return free

    def is_due(self, left_s: float | None, *, is_shared: bool) -> bool:
        """Whether a piece runs in this turn. left_s: the time beside a step of the rows, None without rows. is_shared: whether
        prompts of rows use it too."""
        if left_s is None:
            self._had_turn = not (is_shared and self._had_turn)
            return self._had_turn
        self._time_s += left_s * (LEAST_SHARE if is_shared else 1.0)
        return self._time_s >= min(self._last_s, MOST_TURNS * left_s)

    def most_tokens(self, left_s: float | None) -> int:
        """Return the most tokens of the next piece, from what earlier ones took; at most twice as many as they had."""
        fitting = (PIECE_S if left_s is None else left_s) / self._token_s if self._token_s else 2.0 * self._tokens
        most = min(fitting, 2.0 * self._tokens)
        self._asked = max((size for size in SIZES if size <= most), default=SIZES[0])
        return self._asked

    def took(self, tokens: int, seconds: float) -> None:
        """Learn how long a piece took."""
        self._last_s, self._time_s = seconds, max(self._time_s - seconds, 0.0)
        if 2 * tokens > self._asked or seconds > PIECE_S:  # else the text was shorter
            self._tokens, self._token_s = max(tokens, 1), seconds / max(tokens, 1)
