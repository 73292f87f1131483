"""Which names belong together: patterns with boundaries, prefixes, and the nearest name to a mistyped one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache


def is_under(path: str, prefix: str) -> bool:
    """Return whether path is prefix or lies below it at a dot; the empty prefix holds everything."""
    return not prefix or path == prefix or path.startswith(prefix + ".")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    body = "".join({"*": ".*", "?": "[^.]"}.get(char, re.escape(char)) for char in pattern)
    return re.compile(rf"{body}(\..*)?", re.DOTALL)


def matches(pattern: str, path: str) -> bool:
    """Return whether the pattern names the path or something above it.

    `*` stands for any text, dots included, `?` for one character of a segment. "a.b" names "a.b" and everything below,
    "layers.1" never "layers.11".
    """
    return _compiled(pattern).fullmatch(path) is not None


def near_names(name: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of the choices that a mistyped name may have meant, best first; often empty."""
    words = _words(name)
    scored = []
    for choice in dict.fromkeys(choices):
        ratio = SequenceMatcher(None, name, choice, autojunk=False).ratio()
        shared = len(words & _words(choice)) / max(len(words), 1)
        last = SequenceMatcher(None, name.rpartition(".")[2], choice.rpartition(".")[2], autojunk=False).ratio()
        score = max(ratio, 0.5 * shared + 0.5 * last)
        if score >= 0.5:
            scored.append((-score, choice))
    return [choice for _, choice in sorted(scored)[:count]]


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[._]", name) if word}
