"""Foreign text made printable: control characters of files and names become visible escapes before anything shows them.

A terminal obeys control characters (it moves the cursor, clears the screen, writes to the clipboard), and bidirectional controls
make a reader see another order than a program. Every message of an error, table, log and report passes here; JSON has
escapes of its own, and a model's answers are its own text (`cli/flags/highlight.py`). Imports nothing outside the
standard library.
"""

from __future__ import annotations

import re

# C0 but for tab and line end, DEL, C1, separators of lines, and controls of direction (Unicode 16, UAX 9 and 14).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]")
_OF_LINES = re.compile("[\t\n]")


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text with `\\x1b` in place of an escape, and the like. one_line: tabs and line ends are escaped too."""
    if _CONTROL.search(text):
        text = _CONTROL.sub(_escape, text)
    return _OF_LINES.sub(_escape, text) if one_line else text


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
