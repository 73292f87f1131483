"""Was an adapter trained with the model's tokenizer? The vocabularies of both folders' tokenizer.json are compared.

Trainers leave a copy of the tokenizer in the adapter's folder. It may have more tokens than the model's, and other
texts for reserved ones. The tokenizer of another model gives nearly every id another text, even if both have the same
size.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from stat import S_ISREG

from trimtab.errors import AdapterError, CheckpointError
from trimtab.process.json_file import JsonError, count, parse, read_bytes

TOKENIZER, KIND = "tokenizer.json", "tokenizer"
# Largest share of common ids that may have another text.
MOST_OTHER = 0.1


def check_vocabulary(adapter: str | Path, model: str | Path) -> None:
    """Raise AdapterError if both folders have a tokenizer.json and the same ids have different texts.

    adapter, model: folders. A missing file, or one without a vocabulary, proves nothing. Errors also: CheckpointError for a file
    over the limits of `json_file.py`.
    """
    ours, theirs = Path(model) / TOKENIZER, Path(adapter) / TOKENIZER
    stamps = _stamp(ours), _stamp(theirs)
    if None in stamps:
        return
    if problem := _problem(ours, theirs, stamps):
        raise AdapterError(
            adapter, [problem], hint="The adapter was trained with another model's tokenizer, or the model's was replaced"
        )


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Return a stamp that identifies a file in its present state; None if it is no file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) if S_ISREG(stat.st_mode) else None


@lru_cache(1024)  # a plan and the load after it both check each adapter; a large vocabulary takes a second to read
def _problem(ours: Path, theirs: Path, stamps: tuple[object, ...]) -> str:
    """Return why an adapter's tokenizer does not match the model's, "" if it does. stamps: of both files."""
    raw = [_raw(file) for file in (ours, theirs)]
    if raw[0] == raw[1]:
        return ""
    first, second = _texts(ours, raw[0]), _texts(theirs, raw[1])
    both = first.keys() & second.keys()
    other = [number for number in both if first[number] != second[number]]
    if not both or len(other) <= MOST_OTHER * len(both):
        return ""
    one = min(other)
    return (
        f"{TOKENIZER}: {len(other)} of {len(both)} token ids have other texts than in the model's tokenizer (id {one}: "
        f"{second[one]!r} here, {first[one]!r} there)"
    )


def _raw(path: Path) -> bytes:
    try:
        return read_bytes(path, KIND)
    except OSError:  # loading the tokenizer reports that
        return b""
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc


def _texts(path: Path, raw: bytes) -> dict[int, str]:
    """Return id -> text of a tokenizer.json's vocabulary, empty without one: loading the tokenizer reports that."""
    try:
        count(raw, KIND)
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc
    try:
        known = parse(raw, KIND)["model"]["vocab"]
        if isinstance(known, list):  # Unigram: [text, score] by id
            return {number: str(pair[0]) for number, pair in enumerate(known)}
        return {int(number): str(text) for text, number in known.items()}
    except (ValueError, OverflowError, KeyError, TypeError, IndexError, AttributeError):
        return {}
