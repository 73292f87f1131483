"""Which tensors does the header of a safetensors file declare, read strictly and without weights?"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from trimtab.errors import CheckpointError
from trimtab.gguf.header import refuse, refuse_tensors
from trimtab.process.json_file import KINDS, JsonError, parse

MAX_HEADER_BYTES = KINDS["header"].nbytes  # the safetensors library's own limit
MAX_DIMENSIONS = 64
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
MAX_INT = 2**63 - 1
OTHER_CONFIG = "config.json belongs to another checkpoint, or the file was made to take long"

# Spelling in files -> (torch's spelling, bytes of one value).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1), "I16": ("int16", 2), "U16": ("uint16", 2), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "I32": ("int32", 4), "U32": ("uint32", 4), "F32": ("float32", 4), "I64": ("int64", 8),
    "U64": ("uint64", 8), "F64": ("float64", 8),
}  # fmt: skip

# Torch's spelling -> (bytes of one value, the bits that are all set in one that is NaN or infinite).
_NOT_FINITE = {
    "bfloat16": (2, 0x7F80), "float16": (2, 0x7C00), "float32": (4, 0x7F800000), "float64": (8, 0x7FF << 52),
    "float8_e4m3fn": (1, 0x7F), "float8_e5m2": (1, 0x7C),
}  # fmt: skip
_PIECE_BYTES = 2**16

_PICKLE = "is a pickle (a PyTorch file), which can run code when it is read, and is refused"
_CONVERT = "Convert it to safetensors in a place you trust, with transformers' save_pretrained"
# First bytes -> the real format of the file, next step. Pickle protocols 2 to 5 start with 0x80 and their number.
_OTHER_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (b"version ", "is a Git LFS pointer, not the weights", "Fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", _PICKLE, _CONVERT), (b"\x80\x02", _PICKLE, _CONVERT), (b"\x80\x03", _PICKLE, _CONVERT),
    (b"\x80\x04", _PICKLE, _CONVERT), (b"\x80\x05", _PICKLE, _CONVERT),
    (b"GGUF", "is a GGUF file, not safetensors", "Use the safetensors files of the same model"),
)  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. dtype: torch's spelling. start: offset of its first byte from the start of the file."""

    tensor_name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """All tensors of one file, and its string metadata."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


class _Doubled(dict[str, Any]):
    """A JSON object with repeated keys, of which `json` keeps only the last. Objects without repeated keys are plain dicts:
    there are many."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        times = Counter(key for key, _ in pairs)
        self.repeated = [key for key in self if times[key] > 1]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    return values if len(values) == len(pairs) else _Doubled(pairs)


def _repeated(values: dict[str, Any]) -> list[str]:
    return values.repeated if isinstance(values, _Doubled) else []


def read_header(path: str | os.PathLike[str], *, most_tensors: int | None = None) -> Header:
    """Return the tensors of a safetensors file. most_tensors: the most tensors that are accepted; None: any number.

    Errors: CheckpointError with every wrong tensor, for a file that does not match its header exactly. Format: 8 bytes
    little-endian header length N, N bytes of JSON `{"name": {"dtype", "shape", "data_offsets"}, ...}`, then the data. Source:
    safetensors README, "Format". No types of less than one byte per value, no complex numbers.
    """
    file = Path(path)
    try:
        with open(file, "rb") as handle:
            file_bytes = os.fstat(handle.fileno()).st_size
            head = handle.read(8)
            length = _header_length(file, head, file_bytes)
            raw = handle.read(length)
    except (OSError, ValueError) as exc:  # ValueError: a path with a null character
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise CheckpointError(f"cannot be read ({reason})", path=file) from exc
    if len(raw) != length:
        refuse(file, "changed while it was read")
    count = raw.count(b'"data_offsets"')
    if most_tensors is not None and count > most_tensors:
        refuse(file, f"has {count} tensors, a model of this config has fewer than {most_tensors}", hint=OTHER_CONFIG)
    return _parse(file, raw, file_bytes)


def is_finite(entry: TensorEntry, dtype: str) -> bool:
    """Whether no value of a tensor is NaN or infinite; True for types without such values. dtype: of its bytes. Errors:
    CheckpointError, for a file that cannot be read."""
    if dtype not in _NOT_FINITE:
        return True
    width, bits = _NOT_FINITE[dtype]
    try:
        with open(entry.file, "rb") as handle:
            handle.seek(entry.start)
            for start in range(0, entry.nbytes, _PIECE_BYTES):
                piece = handle.read(min(_PIECE_BYTES, entry.nbytes - start))
                mask, lowest, sign = (_of_all(one, width, len(piece) // width) for one in (bits, bits & -bits, 1 << 8 * width - 1))
                # Where all bits are set, the lowest carries into the sign, which is 0.
                if (int.from_bytes(piece, "little") & mask) + lowest & sign:
                    return False
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror or exc})", path=entry.file) from exc
    return True


@lru_cache(maxsize=16)
def _of_all(bits: int, width: int, count: int) -> int:
    return int.from_bytes(bits.to_bytes(width, "little") * count, "little")


def _header_length(file: Path, head: bytes, file_bytes: int) -> int:
    length = int.from_bytes(head, "little")
    # The first bytes of every other format, read as a length, are far over the limit, so no real length matches them.
    if len(head) < 8 or length > MAX_HEADER_BYTES:
        for magic, reason, hint in _OTHER_FORMATS:
            if head.startswith(magic):
                refuse(file, reason, hint=hint)
    if len(head) < 8:
        refuse(file, f"has {file_bytes} B, a safetensors file has at least 8")
    if length > MAX_HEADER_BYTES:
        refuse(file, f"header of {length} B is over the limit of {MAX_HEADER_BYTES} B: not a safetensors file")
    if 8 + length > file_bytes:
        refuse(
            file, f"header of {length} B is longer than the file ({file_bytes} B)",
            hint="The file is truncated: copy or download it again",
        )  # fmt: skip
    return length


def _whole_number(text: str) -> int:
    if text == "-0" or len(text) > 20:  # the library reads the first as a float; the second has more than 64 bits
        raise ValueError(f"{brief(text)} is not a size")
    return int(text)


def _read_json(file: Path, raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        refuse(file, "header does not start with '{'")
    try:
        content = parse(raw, "header", object_pairs_hook=_object, parse_int=_whole_number)
    except JsonError as exc:
        raise CheckpointError(f"header {exc}", path=file) from exc
    assert isinstance(content, dict)  # it starts with '{'
    return content


def _parse(file: Path, raw: bytes, file_bytes: int) -> Header:
    content = _read_json(file, raw)
    problems = [(_shown(name), "the name occurs twice") for name in _repeated(content)]
    metadata = _metadata(file, content.pop("__metadata__", {}))
    data_start = 8 + len(raw)
    tensors: dict[str, TensorEntry] = {}
    for name, item in content.items():
        try:
            tensors[name] = _entry(file, name, item, data_start)
        except ValueError as exc:
            problems.append((_shown(name), str(exc)))
    if problems:
        refuse_tensors(file, problems)
    _check_layout(file, tensors, data_start, file_bytes)
    return Header(file, metadata, tensors)


def _metadata(file: Path, values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        refuse(file, "__metadata__ is not a map from text to text")
    if repeated := _repeated(values):
        refuse(file, f"__metadata__ has keys twice: {', '.join(map(_shown, repeated))}")
    return dict(values)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT


def _shown(name: str) -> str:
    """Return the name as printable text. JSON can encode half a surrogate pair, which no output accepts."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _entry(file: Path, name: str, item: Any, data_start: int) -> TensorEntry:
    """Return one tensor of the header. A ValueError gives the problem."""
    if _shown(name) != name:
        raise ValueError("the name is not valid Unicode")
    if not isinstance(item, dict) or item.keys() != ENTRY_KEYS or _repeated(item):
        raise ValueError("is not {dtype, shape, data_offsets}, each once")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {brief(dtype)} (known: {', '.join(DTYPES)})")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"bad shape {brief(shape)}")
    spelled, width = DTYPES[dtype]
    if math.prod(size or 1 for size in shape) * width > MAX_INT:  # strides overflow even if a zero makes it empty
        raise ValueError(f"shape {brief(shape)} is too large")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise ValueError(f"bad offsets {brief(offsets)}")
    nbytes = math.prod(shape) * width
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"has {offsets[1] - offsets[0]} B, its dtype {dtype} and shape {brief(shape)} need {nbytes} B")
    return TensorEntry(name, spelled, tuple(shape), file, data_start + offsets[0], nbytes)


def _check_layout(file: Path, tensors: dict[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    """Raise CheckpointError unless the tensors cover the data from its first byte to its last, each byte once."""
    ordered = sorted(tensors.values(), key=lambda entry: (entry.start, entry.nbytes))
    beyond = [
        (entry.tensor_name, f"ends at byte {entry.start + entry.nbytes} of a file of {file_bytes} B")
        for entry in ordered if entry.start + entry.nbytes > file_bytes
    ]  # fmt: skip
    if beyond:
        refuse_tensors(file, beyond, hint="The file is truncated: copy or download it again")
    problems: list[tuple[str, str]] = []
    at = data_start
    for entry in ordered:
        if entry.start < at:
            problems.append((entry.tensor_name, f"overlaps the tensor before it by {at - entry.start} B"))
        elif entry.start > at:
            problems.append((entry.tensor_name, f"a gap of {entry.start - at} B is before it"))
        at = max(at, entry.start + entry.nbytes)
    if problems:
        refuse_tensors(file, problems)
    if at != file_bytes:
        refuse(file, f"{file_bytes - at} B follow the last tensor")
