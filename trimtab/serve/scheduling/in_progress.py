"""Which prompts are in progress at once, and which of them has the next piece: short ones pass a long one between its pieces.

Each prompt in progress has keys and values of its own, and a plan counts those of one whole context. So one prompt of any length is
in progress, the `first`, and beside it short ones, each at most half as long as that and half of the tokens that there is room for:
a shorter one always finds room, and prompts of about one length keep their order. The first one is chosen by turns (line.py)
whatever its length, so those that pass cannot keep a long prompt waiting beyond the one before it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry")

# Pieces of short prompts between two of the first one.
PIECES_BESIDE = 2


class InProgress(Generic[Entry]):
    """The prompts in progress. most_tokens: of all of them together, beyond a first one of any length."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.first: Entry | None = None
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
        """Whose piece is next."""
        if self.first is not None and (not self._beside or self._pieces >= PIECES_BESIDE):
            return self.first
        return self._beside[0] if self._beside else None

    def fits(self, tokens: int, *, kept_tokens: int = 0) -> bool:
        """Whether a prompt may begin beside the others. tokens: 0 for one that cannot. kept_tokens: held for prompts elsewhere."""
        left = self.most_tokens - kept_tokens - sum(self._tokens.values())
        return 0 < tokens <= min(left, left if self.first is None else self._tokens[self.first]) // 2

    def add(self, entry: Entry, tokens: int) -> None:
        """Let a prompt begin: beside the others where it may, as the first where there is none. Its piece is the next one, unless
        it is the first one's turn."""
        if self.first is None and not (self._beside and self.fits(tokens)):
            self.first = entry
        else:
            self._beside.appendleft(entry)
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
        """Take a prompt out: it is complete, or its client has left. Errors: KeyError."""
        del self._tokens[entry]
        if entry is self.first:
            self.first = None
        else:
            self._beside.remove(entry)
