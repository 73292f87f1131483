"""How do texts of files and other programs become printable, with control characters as visible escapes?"""

from __future__ import annotations

import re

# C0 except tab and line end, DEL, C1, line separators, and bidirectional controls (Unicode 16, UAX 9 and 14).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]")
_OF_LINES = re.compile("[\t\n]")


def printable(text: str, *, one_line: bool = False) -> str:
    """Return the text with control characters escaped, such as `\\x1b`. one_line: tabs and line ends are escaped too. A terminal
    obeys control characters, and bidirectional controls show a reader another order than a program sees."""
    if _CONTROL.search(text):
        text = _CONTROL.sub(_escape, text)
    return _OF_LINES.sub(_escape, text) if one_line else text


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
