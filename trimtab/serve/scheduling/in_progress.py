"""Which prompts are in progress at once, and which of them has the next piece: short ones pass a long one between its pieces.

Each prompt in progress has separate keys and values. One prompt of any length is in progress, the `first`, and next to it short
ones, each at most half as long as that and half of the `Room` that is left: a shorter one always fits, and prompts of about
one length keep their order. Prompts of rows and those that need no row have a first one each, and share one `Room`. Memory
therefore holds at most two contexts and the room, as a plan of several rows counts (planning/memory/activations.py,
`prompts_kv_bytes`); on a GPU that captures prompts, one context and the room in addition to that count.

Short ones take turns: one that begins has its piece after those that are in progress, so none waits for later prompts. The
first one is chosen by turns (queue.py) regardless of its length, so those that pass cannot keep a long prompt waiting beyond the
one before it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry")

# Pieces of short prompts between two of the first one.
PIECES_BESIDE = 2


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
