"""Pages whose slots a program fills: written, or compared with what is in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def write_or_check(pages: Iterable[Path], filled: Callable[[str], str], arguments: Sequence[str], *, is_wrong: str) -> int:
    """Fill the slots of pages, or with `--check` in the arguments only compare. Returns 1 if a page has another text.

    filled: a page's text with its slots filled. is_wrong: what is said of such a page, behind its name.
    """
    wrong = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        now = filled(text)
        if "--check" not in arguments:
            page.write_text(now, encoding="utf-8", newline="\n")
        elif now != text:
            print(f"{page.name} {is_wrong}", file=sys.stderr)
            wrong = 1
    return wrong
