"""The words in which two answers differ, and text that is safe for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

# A terminal obeys control characters: a model's text must not move the cursor, set the title or write to the clipboard.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Style:
    """How text is set off. is_terminal: whether it obeys control characters. has_color: whether it may be set off, as on a
    terminal if None."""

    is_terminal: bool
    has_color: bool | None = None

    @property
    def _sets_off(self) -> bool:
        return self.is_terminal if self.has_color is None else self.has_color

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._sets_off else text

    def printable(self, text: str) -> str:
        """Return a model's text in a safe form for a terminal; unchanged for other outputs."""
        return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n")) if self.is_terminal else text


def apart(first: str, second: str, *, names: Sequence[str]) -> str:
    """Return how many words of two answers differ, and which: the answers themselves are shown already.

    Where no word is common the words are left out: they would be the answers once more.
    """
    if first == second:
        return f"{names[0]} and {names[1]} give the same answer"
    left, right = first.split(), second.split()
    runs: tuple[list[str], list[str]] = ([], [])
    differing, common = [0, 0], 0
    for kind, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        common += b - a if kind == "equal" else 0
        for side, words in enumerate((left[a:b], right[c:d])):
            if kind != "equal" and words:
                runs[side].append(" ".join(words))
                differing[side] += len(words)
    lines = [f"differing words: {differing[0]} of {len(left)}, {differing[1]} of {len(right)}"]
    lines += [f"{name}: {' ... '.join(own)}" for name, own in zip(names, runs, strict=True) if own and common]
    return "\n".join(lines)
