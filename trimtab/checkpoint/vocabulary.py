"""Whether an adapter was trained with the model's tokenizer: the vocabularies of both folders' tokenizer.json are compared.

Trainers leave a copy of the tokenizer in the adapter's folder. It may have more tokens than the model's, and other texts
for some that were reserved; a tokenizer of another model gives nearly every id another text, also where it is as large.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG

from trimtab.errors import AdapterError

TOKENIZER = "tokenizer.json"
# Share of the ids of both that may have another text.
MOST_OTHER = 0.1


def check_vocabulary(adapter: str | Path, model: str | Path) -> None:
    """Raise AdapterError if both folders have a tokenizer.json and the same ids have different texts.

    adapter, model: folders. A missing file, or one without a vocabulary, proves nothing.
    """
    ours, theirs = Path(model) / TOKENIZER, Path(adapter) / TOKENIZER
    stamps = _stamp(ours), _stamp(theirs)
    if None in stamps:
        return
    if problem := _problem(ours, theirs, stamps):
        raise AdapterError(
            adapter,
            [problem],
            hint="The adapter was trained with another model's tokenizer, or the model's was replaced",
        )


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Return what a file shares with no other, nor with itself once it has changed; None if it is no file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) if S_ISREG(stat.st_mode) else None


@lru_cache(1024)  # a plan, and loading after it, ask again of each adapter; large vocabularies take a second to read
def _problem(ours: Path, theirs: Path, stamps: tuple[object, ...]) -> str:
    """Return what is wrong with an adapter's tokenizer beside the model's, "" for nothing. stamps: of both files."""
    if _is_equal(ours, theirs):
        return ""
    first, second = _texts(ours), _texts(theirs)
    both = first.keys() & second.keys()
    other = [number for number in both if first[number] != second[number]]
    if not both or len(other) <= MOST_OTHER * len(both):
        return ""
    one = min(other)
    return (
        f"{TOKENIZER}: {len(other)} of {len(both)} token ids have other texts than in the model's tokenizer (id {one}: "
        f"{second[one]!r} here, {first[one]!r} there)"
    )


def _is_equal(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def _texts(path: Path) -> dict[int, str]:
    """Return id -> text of a tokenizer.json's vocabulary, empty if it cannot be read: whoever loads the tokenizer reports that."""
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        known = tokenizer["model"]["vocab"]
        if isinstance(known, list):  # Unigram: [text, score] by id
            return {number: str(pair[0]) for number, pair in enumerate(known)}
        return {int(number): str(text) for text, number in known.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError):
        return {}
