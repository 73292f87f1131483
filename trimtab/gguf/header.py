"""Which keys and tensors does the header of a GGUF file have, read strictly and without weights?"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trimtab.errors import CheckpointError

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Four times the header of Gemma 4, which has the largest vocabulary of a released model.
MOST_HEADER_BYTES = 128 * 2**20
# Llama's largest model has 1,000 tensors; Gemma 4's vocabulary has 1.3 million values.
MOST_TENSORS, MOST_KEYS, MOST_VALUES = 50_000, 4_000, 2_500_000
MOST_KEY_BYTES, MOST_NAME_BYTES, MOST_TEXT_BYTES = 1_000, 256, 4 * 2**20
MOST_FILES, MOST_DIMENSIONS, MOST_ALIGNMENT = 1_000, 4, 65_536
MAX_INT = 2**63 - 1
SHOWN_PROBLEMS = 5

# ggml's number of a type -> (its name, values of a block, bytes of a block). Source: ggml.h, and gguf 0.19.0, constants.py.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1),
    25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
# GGUF's number of a value's type -> its form for `struct`; 8 is a text, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_DAMAGED = "The file is damaged or truncated: copy or download it again"
_NEWER = "The type is newer than this release of trimtab (use a Q4_K_M or Q8_0 file), or the file is damaged (download it again)"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file. type_name: ggml's. shape: as torch has it, the last side along a row. start: from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The keys and tensors of a file, or of a set of files with the keys of its first."""

    files: tuple[Path, ...]
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture", ""))


class _Left:
    """What the header of a file, or the headers of a set together, may still have."""

    def __init__(self) -> None:
        self.header_bytes, self.values, self.tensors, self.keys = MOST_HEADER_BYTES, MOST_VALUES, MOST_TENSORS, MOST_KEYS


class _Cursor:
    """A position in a header. Every read is checked against the file's length and the limits before it is made."""

    def __init__(self, path: Path, file: BinaryIO, left: _Left) -> None:
        self.path, self.file, self.left, self.at = path, file, left, 0
        self.file_bytes = os.fstat(file.fileno()).st_size

    def take(self, count: int, what: str) -> bytes:
        if self.at + count > self.file_bytes:
            refuse(self.path, f"ends within {what}", hint=_DAMAGED)
        self.left.header_bytes -= count
        if self.left.header_bytes < 0:
            refuse(self.path, f"header is longer than {MOST_HEADER_BYTES} B at {what}", hint=_DAMAGED)
        found = self.file.read(count)
        if len(found) != count:
            refuse(self.path, "changed while it was read")
        self.at += count
        return found

    def number(self, form: str, what: str) -> Any:
        raw = self.take(struct.calcsize(f"<{form}"), what)
        if form == "?" and raw not in (b"\0", b"\1"):
            refuse(self.path, f"{what} is {raw[0]}, not 0 or 1", hint=_DAMAGED)
        return struct.unpack(f"<{form}", raw)[0]

    def text(self, what: str, most: int = MOST_TEXT_BYTES) -> str:
        length = self.number("Q", what)
        if length > most:
            refuse(self.path, f"{what} has {length} B, at most {most} are read", hint=_DAMAGED)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as exc:
            raise CheckpointError(f"{what} is not UTF-8", path=self.path, hint=_DAMAGED) from exc

    def value(self, kind: int, what: str) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind == TEXT:
            return self.text(what)
        if kind != ARRAY:
            refuse(self.path, f"{what} is of the unknown type {kind}", hint=_NEWER)
        inner, count = self.number("I", what), self.number("Q", what)
        self.left.values -= count
        if self.left.values < 0:
            refuse(self.path, f"{what} has {count} values, at most {MOST_VALUES} are read in all", hint=_DAMAGED)
        if inner == TEXT:
            return [self.text(what) for _ in range(count)]
        if inner not in NUMBERS:
            refuse(self.path, f"{what} is a list of lists or of the unknown type {inner}", hint=_NEWER)
        form = NUMBERS[inner]
        return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}"), what)))


def refuse(path: Path, reason: str, tensor_name: str | None = None, hint: str = "") -> NoReturn:
    """Raise CheckpointError about a file of tensors."""
    raise CheckpointError(reason, path=path, tensor_name=tensor_name, hint=hint)


def refuse_tensors(path: Path, problems: Sequence[tuple[str, str]], hint: str = "") -> NoReturn:
    """Raise CheckpointError for problems (name, reason); it is about the first tensor and names the others."""
    name, reason = problems[0]
    if len(problems) > 1:
        others = [f"{other}: {why}" for other, why in problems[1 : 1 + SHOWN_PROBLEMS]]
        shown = "; ".join(others) + ("; ..." if len(problems) > 1 + SHOWN_PROBLEMS else "")
        reason += f" (and {len(problems) - 1} more: {shown})"
    refuse(path, reason, name, hint)


def read_gguf(path: str | os.PathLike[str]) -> GgufHeader:
    """Return the header of a file, or of the whole set that it is a part of. Errors: CheckpointError, with every wrong tensor.
    Format, little-endian: "GGUF", a version, the numbers of tensors and of keys, the keys with their values, the tensors' names,
    shapes, types and offsets, then the data, each tensor at a multiple of `general.alignment`. Source: ggml, docs/gguf.md."""
    file = Path(path)
    first = _read_one(file)
    count = first.keys.get("split.count", 0)
    if not count:
        return first
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MOST_FILES:
        refuse(file, f"split.count is {count!r:.30}, at most {MOST_FILES} files are read")
    if count == 1:
        return first
    left = _Left()
    return _joined(file, [_read_one(part, left) for part in _set_of(file, count)], count)


def _set_of(file: Path, count: int) -> list[Path]:
    """Return the files of the set that a file is one of, by llama.cpp's names. Errors: CheckpointError if one is missing."""
    named = SPLIT.fullmatch(file.name)
    if named is None or int(named[3]) != count:
        refuse(
            file, f"is one of {count} files (split.count), but is not called NAME-0000N-of-{count:05}.gguf",
            hint="Give the files the names that they were published with",
        )  # fmt: skip
    parts = [file.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        shown = ", ".join(missing[:SHOWN_PROBLEMS]) + (", ..." if len(missing) > SHOWN_PROBLEMS else "")
        refuse(file, f"{len(missing)} of {count} files of its set are missing: {shown}", hint="Copy or download them again")
    return parts


def _joined(file: Path, parts: list[GgufHeader], count: int) -> GgufHeader:
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        own, no = part.files[0], part.keys.get("split.no")
        if no != number or part.keys.get("split.count") != count:
            refuse(own, f"says it is file {no!r:.20} of {part.keys.get('split.count')!r:.20}, its name says {number} of {count}")
        twice = [name for name in part.tensors if name in tensors]
        if twice:
            refuse(own, f"is in {tensors[twice[0]].file.name} as well", twice[0])
        tensors |= part.tensors
    total = parts[0].keys.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        refuse(file, f"its set has {len(tensors)} tensors, split.tensors.count is {total!r:.30}", hint=_DAMAGED)
    return GgufHeader(tuple(part.files[0] for part in parts), parts[0].keys, tensors)


def file_kind(path: Path) -> str:
    """Return general.type of a file without the rest of its header: "model", "adapter" or "mmproj"; "model" for a damaged one."""
    with suppress(CheckpointError, OSError), open(path, "rb") as file:
        cursor = _Cursor(path, file, _Left())
        magic, _, _, keys = cursor.take(4, "its first bytes"), cursor.take(4, ""), cursor.take(8, ""), cursor.number("Q", "")
        for _ in range(keys if magic == MAGIC and keys <= MOST_KEYS else 0):
            name = cursor.text("a key's name", MOST_KEY_BYTES)
            value = cursor.value(cursor.number("I", name), name)
            if name == "general.type":
                return str(value)
            if not name.startswith(("general.", "split.")):
                break  # writers put general.* first: a vocabulary is not read for this
    return "model"


def read_bytes(tensor: GgufTensor) -> bytes:
    """Return the bytes of a small tensor. Errors: CheckpointError if the file ends before them."""
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        found = file.read(tensor.nbytes)
    if len(found) != tensor.nbytes:
        refuse(tensor.file, "changed while it was read", tensor.name)
    return found


def _read_one(path: Path, left: _Left | None = None) -> GgufHeader:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for its writer
            refuse(path, "is no regular file")
        with open(path, "rb") as file:
            return _parse(path, _Cursor(path, file, left or _Left()))
    except (OSError, ValueError) as exc:  # ValueError: a path with a null character
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise CheckpointError(f"cannot be read ({reason})", path=path) from exc


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.take(4, "its first bytes") != MAGIC:
        refuse(path, "does not begin with GGUF: not a GGUF file")
    version = cursor.number("I", "its version")
    if version not in VERSIONS:
        is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS)
        refuse(path, "is a big-endian GGUF file" if is_big else f"is GGUF version {version}; 2 and 3 are read")
    tensors, keys = cursor.number("Q", "its count of tensors"), cursor.number("Q", "its count of keys")
    for count, most, what in ((tensors, MOST_TENSORS, "tensors"), (keys, MOST_KEYS, "keys")):
        left = getattr(cursor.left, what) - count
        if left < 0:
            refuse(path, f"says it has {count} {what}, at most {most} are read in all", hint=_DAMAGED)
        setattr(cursor.left, what, left)
    values: dict[str, Any] = {}
    for _ in range(keys):
        name = cursor.text("a key's name", MOST_KEY_BYTES)
        if name in values:
            refuse(path, f"the key {name!r:.100} is there twice", hint=_DAMAGED)
        values[name] = cursor.value(cursor.number("I", name), name)
    alignment = values.get("general.alignment", 32)
    is_power = isinstance(alignment, int) and not isinstance(alignment, bool) and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or alignment > MOST_ALIGNMENT:
        refuse(path, f"general.alignment is {alignment!r:.30}, not a power of two up to {MOST_ALIGNMENT}")
    entries = [_entry(cursor) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader((path,), values, _laid_out(path, entries, start, alignment, cursor.file_bytes))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return (name, shape, type, offset) of a tensor."""
    name = cursor.text("a tensor's name", MOST_NAME_BYTES)
    dimensions = cursor.number("I", name)
    if not 0 < dimensions <= MOST_DIMENSIONS:
        refuse(cursor.path, f"has {dimensions} dimensions, 1 to {MOST_DIMENSIONS} are read", name, _DAMAGED)
    shape = tuple(cursor.number("Q", name) for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I", name), cursor.number("Q", name)


def _laid_out(
    path: Path, entries: Sequence[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, file_bytes: int
) -> dict[str, GgufTensor]:
    """Return the tensors, each inside the file and next to the one before it. Errors: CheckpointError with every wrong one."""
    tensors: dict[str, GgufTensor] = {}
    problems: list[tuple[str, str]] = []
    for name, shape, kind, offset in entries:
        type_name, values, block_bytes = TYPES.get(kind, ("", 1, 1))
        if name in tensors:
            problems.append((name, "the name occurs twice"))
        elif not type_name:
            problems.append((name, f"is of the unknown type {kind}"))
        elif not all(0 < side <= MAX_INT for side in shape) or prod(shape) > MAX_INT // 8 or shape[-1] % values:
            problems.append((name, f"has the shape {list(shape)}, which is none of {type_name} (rows of blocks of {values})"))
        else:
            tensors[name] = GgufTensor(name, type_name, shape, path, start + offset, prod(shape) // values * block_bytes)
    at = start
    for tensor in sorted(tensors.values(), key=lambda one: one.start):
        if tensor.start + tensor.nbytes > file_bytes:
            problems.append((tensor.name, f"ends at byte {tensor.start + tensor.nbytes} of a file of {file_bytes} B"))
        elif tensor.start != at:
            problems.append((tensor.name, f"begins at byte {tensor.start}, the tensor before it ends at {at} (with alignment)"))
        at = -(-max(at, tensor.start + tensor.nbytes) // alignment) * alignment
    if not problems and file_bytes > at:
        refuse(path, f"{file_bytes - at} B follow the last tensor", hint=_DAMAGED)
    if problems:
        refuse_tensors(path, problems, _NEWER if "unknown type" in problems[0][1] else _DAMAGED)
    return tensors
