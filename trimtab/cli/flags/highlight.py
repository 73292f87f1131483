"""Two answers with the differing words marked, and text that is safe for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

# A terminal obeys control characters: a model's text must not move the cursor, set the title or write to the clipboard.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Style:
    """The style of marks. is_terminal: whether the output obeys control characters. has_color: whether marks are colors
    (None: on a terminal); else marks are plain characters.
    """

    is_terminal: bool
    has_color: bool | None = None

    @property
    def _sets_off(self) -> bool:
        return self.is_terminal if self.has_color is None else self.has_color

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._sets_off else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._sets_off else text

    def mark(self, text: str) -> str:
        return f"\x1b[1;4m{text}\x1b[0m" if self._sets_off else f"[{text}]"

    def printable(self, text: str) -> str:
        """Return a model's text in a safe form for a terminal; unchanged for other outputs."""
        return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n")) if self.is_terminal else text


def marked(first: str, second: str, *, names: Sequence[str], style: Style) -> str:
    """Return two answers with the differing words marked, and their number."""
    if first == second:
        return f"{names[0]} and {names[1]} give the same answer"
    left, right = (style.printable(text).split() for text in (first, second))
    parts: tuple[list[str], list[str]] = ([], [])
    differing = [0, 0]
    for kind, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for side, words in enumerate((left[a:b], right[c:d])):
            if kind == "equal":
                parts[side].extend(words)
            elif words:
                parts[side].append(style.mark(" ".join(words)))
                differing[side] += len(words)
    lines = [f"differing words: {differing[0]} of {len(left)}, {differing[1]} of {len(right)}"]
    lines += [f"{name}: {' '.join(words)}" for name, words in zip(names, parts, strict=True)]
    return "\n".join(lines)
