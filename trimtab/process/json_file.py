"""How are JSON files read within limits of bytes, values and depth, and values of this package written as JSON?"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from trimtab.errors import CheckpointError

MiB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits for files of one kind. values: objects, lists and everything in them; None: the file is text.

    depth: of nesting; None where the parser's own limit (some hundred levels) is enough, because no code walks the nesting.
    object_bytes: the fewest bytes of one object in a valid file; None: unknown. is_finite: NaN, Infinity and numbers that become
    infinite are refused. once: a repeated key is refused. may_be_pipe: a user names the file on the command line, where `<(...)`
    makes a pipe. A megabyte of `{}`s becomes a hundred megabytes of objects: the file's size bounds neither memory nor time.
    """

    nbytes: int
    values: int | None = None
    depth: int | None = 64
    object_bytes: int | None = None
    is_finite: bool = False
    once: bool = False
    may_be_pipe: bool = False


# All below the limits: Gemma 3's tokenizer.json (34 MB, 1.9 million values), Mistral's tekken.json (19 MB), 250,000 tensors in one
# header (25 MB, 1.8 million), a plan of 400 blocks (1 MB). transformers copies a config five times: a second for 65,536 values.
KINDS: dict[str, Limits] = {
    "config.json": Limits(4_000_000, 131_072),
    "generation_config.json": Limits(2 * MiB, 65_536),
    "adapter_config.json": Limits(32 * MiB, 400_000, is_finite=True),
    "header": Limits(100_000_000, 2_500_000, depth=None, object_bytes=40, is_finite=True),
    "index": Limits(128 * MiB, 2_000_000, depth=None),
    "quant_state": Limits(65_536, 10_000),
    "tokenizer": Limits(128 * MiB, 4_000_000, depth=None),
    "tokenizer settings": Limits(16 * MiB, 500_000),
    "processor": Limits(4 * MiB, 400_000),
    "chat template": Limits(4 * MiB),
    "vocabulary": Limits(128 * MiB),
    "plan": Limits(64 * MiB, 2_000_000),
    "own state": Limits(64 * MiB, 4_000_000),
    "merge record": Limits(64 * MiB, 1_000_000, depth=200),
    "prompt": Limits(4 * MiB, 500_000),
    "prompts": Limits(512 * MiB),
    "answer": Limits(64 * MiB, 2_000_000),
    "device map": Limits(16 * MiB, 300_000, once=True, may_be_pipe=True),
    "option": Limits(16 * MiB, 300_000, depth=200, once=True, may_be_pipe=True),
    "toml": Limits(4 * MiB),
    "report": Limits(256 * MiB, 4_000_000),
}  # fmt: skip

# Files other than weights that transformers 5.6.2 to 5.23.0 may open in a folder: name -> kind. Source:
# utils/__init__.py and the VOCAB_FILES_NAMES of its tokenizers.
FOREIGN_FILES: dict[str, str] = {
    **dict.fromkeys(("config.json",), "config.json"),
    **dict.fromkeys(("generation_config.json",), "generation_config.json"),
    **dict.fromkeys(
        ("tokenizer.json", "vocab.json", "tekken.json", "vocab-src.json", "vocab-tgt.json", "target_vocab.json",
         "entity_vocab.json", "added_tokens.json", "word_shape.json", "word_pronunciation.json", "emoji.json", "byte_maps.json",
         "normalizer.json"), "tokenizer",
    ),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json"), "tokenizer settings"),
    **dict.fromkeys(
        ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json"),
        "processor",
    ),
    **dict.fromkeys(("chat_template.json", "chat_template.jinja"), "chat template"),
    **dict.fromkeys(
        ("merges.txt", "vocab.txt", "dict.txt", "bpe.codes", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
         "sentencepiece.model", "spm.model", "spm_char.model", "source.spm", "target.spm", "prophetnet.tokenizer"), "vocabulary",
    ),
}  # fmt: skip
TEMPLATES = "additional_chat_templates"

_TO_BRACES = bytes.maketrans(b"[]", b"{}")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"{}[]")))
FEW_BYTES = 4096
MOST_DIGITS = 4300  # Python's int limit; without it, a million digits take minutes
_TOO_LONG = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))


class JsonError(ValueError):
    """The reason why a file cannot be read, as text that follows its name."""


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses (their compared fields) and mappings as objects, tuples as lists."""
    if is_dataclass(value):
        return {item.name: as_json(getattr(value, item.name)) for item in fields(value) if item.compare}
    if isinstance(value, Mapping):
        return {name: as_json(one) for name, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_json(path: str | os.PathLike[str], kind: str) -> Any:
    """Return the value in a JSON file. kind: one of KINDS. Errors: JsonError; OSError if it cannot be opened."""
    return parse(read_bytes(path, kind), kind)


def read_object(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Return a file's JSON object. Errors: CheckpointError."""
    values = read_values(path, kind)
    if not isinstance(values, dict):
        raise CheckpointError("is not a JSON object", path=path)
    return values


def read_values(path: str | os.PathLike[str], kind: str) -> Any:
    """Return the value in a JSON file. Errors: CheckpointError."""
    return _own(path, read_json, kind)


def read_own(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Return the JSON object of a file that this package writes; {} for one that is not there or cannot be read."""
    try:
        return read_object(path, kind)
    except CheckpointError:
        return {}


def check_files(folder: Path, *, without: Iterable[str] = ()) -> None:
    """Raise CheckpointError for a file of a folder that transformers would open and that is over its limits.

    Nothing is parsed: other errors are reported by the code that opens the file. without: names that are not opened.
    """
    templates = folder / TEMPLATES
    names = [(folder / name, kind) for name, kind in FOREIGN_FILES.items() if name not in set(without)]
    try:
        names += [(file, "chat template") for file in sorted(templates.glob("*.jinja"))[: 2**10]]
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror})", path=templates) from exc
    for file, kind in names:
        if file.exists():
            check_file(file, kind)


def check_file(path: str | os.PathLike[str], kind: str) -> None:
    """Raise CheckpointError for a file over its limits. It is not parsed."""
    _own(path, _check, kind)


def _check(path: str | os.PathLike[str], kind: str) -> None:
    limits = KINDS[kind]
    if limits.values is None:
        os.close(_opened(path, limits))
    else:
        count(read_bytes(path, kind), kind)


def _own(path: str | os.PathLike[str], read: Callable[..., Any], kind: str) -> Any:
    try:
        return read(path, kind)
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror or exc})", path=path) from exc
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc


# Bytes ----------------------------------------------------------------------------------------------------------------


def read_bytes(path: str | os.PathLike[str], kind: str) -> bytes:
    """Return a file's bytes. Errors: JsonError if it is too large or not a regular file; OSError if it cannot be opened."""
    limits = KINDS[kind]
    with os.fdopen(_opened(path, limits), "rb") as file:
        raw = file.read(limits.nbytes + 1)
    if len(raw) > limits.nbytes:
        raise _too_large(limits.nbytes)
    return raw


def _opened(path: str | os.PathLike[str], limits: Limits) -> int:
    """Return the handle of a file whose size is within the limit. Opening a pipe without a writer would block forever."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags | (0 if limits.may_be_pipe else getattr(os, "O_NONBLOCK", 0)))
    except ValueError as exc:  # a name with a null character
        raise JsonError(f"cannot be read ({exc})") from exc
    try:
        seen = os.fstat(handle)
        is_pipe = limits.may_be_pipe and stat.S_ISFIFO(seen.st_mode)
        if stat.S_ISDIR(seen.st_mode):
            raise JsonError("is a folder, not a file")
        if not stat.S_ISREG(seen.st_mode) and not is_pipe:
            raise JsonError("is no plain file (a pipe or a device)")
        if seen.st_size > limits.nbytes:
            raise _too_large(limits.nbytes)
    except JsonError:
        os.close(handle)
        raise
    return handle


def _too_large(most: int) -> JsonError:
    return JsonError(f"has more than {most} B, too large for a file of its kind")


# Values ---------------------------------------------------------------------------------------------------------------


def count(raw: bytes, kind: str) -> None:
    """Raise JsonError for JSON with more values or levels than its kind may have. It is not parsed.

    Every value follows a comma or the beginning of a list or object. Characters inside strings are counted too at
    first. Only a count above the limit removes the strings, which costs ten times as much.
    """
    limits = KINDS[kind]
    assert limits.values is not None
    if len(raw) > limits.nbytes:
        raise _too_large(limits.nbytes)
    objects = raw.count(b"{")
    opened = objects + raw.count(b"[")
    is_deep = limits.depth is not None and opened > limits.depth
    least = limits.object_bytes or 0
    is_hollow = objects * least > len(raw) + FEW_BYTES
    if is_deep or is_hollow or opened + raw.count(b",") >= limits.values:
        structure = _count_structure(raw, limits.values, limits.depth)
        objects = structure.count(b"{")
        if objects * least > len(raw) + FEW_BYTES:
            raise JsonError(f"has {objects} objects in {len(raw)} B, which are too short to describe anything")
    digits = getattr(sys, "get_int_max_str_digits", lambda: 0)()
    if not 0 < digits <= MOST_DIGITS and _TOO_LONG.search(raw):
        raise JsonError(f"is not JSON (a number of more than {MOST_DIGITS} digits)")


def _count_structure(raw: bytes, most: int, depth: int | None) -> bytes:
    """Return the JSON without its strings, once its values and levels are within the limits."""
    too_many = JsonError(f"has more than {most} values, too many for a file of its kind")
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if raw.count(b'"') > 4 * most:  # a key and a text for each value: more strings mean more values
        raise too_many
    structure = _without_strings(raw)
    if sum(structure.count(sign) for sign in (b",", b"{", b"[")) >= most:
        raise too_many
    if depth is None:
        return structure
    braces = structure.translate(_TO_BRACES, _NO_BRACKETS)
    for _ in range(depth):  # each pass removes the innermost level
        braces = braces.replace(b"{}", b"")
        if not braces:
            return structure
    if braces.count(b"{") > depth or b"{}" in braces:
        raise JsonError(f"is not JSON (nested more than {depth} levels deep, or with brackets that are never closed)")
    return structure


def _without_strings(raw: bytes) -> bytes:
    """Return JSON without the text between its quotes. Works in megabytes, because each fragment is a separate object."""
    kept, is_inside = [], 0
    for start in range(0, len(raw), MiB):
        pieces = raw[start : start + MiB].split(b'"')
        kept.append(b"".join(pieces[is_inside::2]))
        is_inside ^= (len(pieces) - 1) & 1
    return b"".join(kept)


def parse(raw: bytes, kind: str, **hooks: Any) -> Any:
    """Return the values of JSON text in UTF-8, within the limits of its kind. hooks: arguments of `json.loads`. Errors:
    JsonError."""
    limits = KINDS[kind]
    count(raw, kind)
    if limits.is_finite:
        hooks = {"parse_constant": _no_constant, "parse_float": _finite, **hooks}
    if limits.once:
        hooks = {"object_pairs_hook": _once, **hooks}
    try:
        return json.loads(raw.decode("utf-8"), **hooks)
    except UnicodeDecodeError as exc:
        raise JsonError(f"is not JSON: is not UTF-8 ({exc.reason} at byte {exc.start})") from exc
    except RecursionError as exc:
        raise JsonError("is not JSON (nested too deep)") from exc
    except MemoryError as exc:
        raise JsonError("is too large for the memory that is free") from exc
    except (ValueError, OverflowError) as exc:
        raise JsonError(f"is not JSON ({exc})") from exc


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return values
