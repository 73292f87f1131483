"""What a safetensors file says it holds: a strict reader of headers that touches no weights.

Format: 8 bytes little-endian header length N, N bytes of JSON `{"name": {"dtype", "shape", "data_offsets"}, ...}`, data.
Source: safetensors README, "Format". Stricter than the format where a lie would cost memory or give wrong weights: names
once, sizes exact, no overlap, no hole, the file exactly as long as it says.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trimtab.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSIONS = 64
MAX_INT = 2**63 - 1

# Spelling in files -> (torch's spelling, bytes of one value).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1), "I16": ("int16", 2), "U16": ("uint16", 2), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "I32": ("int32", 4), "U32": ("uint32", 4), "F32": ("float32", 4), "I64": ("int64", 8),
    "U64": ("uint64", 8), "F64": ("float64", 8),
}  # fmt: skip


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
    """All tensors of one file, its string metadata and its length."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    file_bytes: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Return what a safetensors file holds. Errors: CheckpointError for a file that is not exactly what it says."""
    file = Path(path)
    try:
        with open(file, "rb") as handle:
            file_bytes = os.fstat(handle.fileno()).st_size
            head = handle.read(8)
            length = int.from_bytes(head, "little") if len(head) == 8 else 0
            if len(head) < 8 or 8 + length > file_bytes:  # a length may look like magic, but then it is plausible
                _check_magic(file, head, file_bytes)
            if length > MAX_HEADER_BYTES:
                _refuse(file, f"header of {length} B is over the limit of {MAX_HEADER_BYTES} B")
            if 8 + length > file_bytes:
                _refuse(file, f"header of {length} B is longer than the file ({file_bytes} B): truncated or not safetensors")
            raw = handle.read(length)
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror})", path=file) from exc
    if len(raw) != length:
        _refuse(file, "changed while it was read")
    return _parse(file, raw, file_bytes)


def _refuse(file: Path, reason: str, tensor_name: str | None = None, hint: str = "") -> NoReturn:
    raise CheckpointError(reason, path=file, tensor_name=tensor_name, hint=hint)


def _check_magic(file: Path, head: bytes, file_bytes: int) -> None:
    if head.startswith(b"version "):
        _refuse(file, "is a Git LFS pointer, not the weights", hint="Fetch the real file with `git lfs pull`")
    if head[:2] == b"PK" or head[:1] == b"\x80":
        _refuse(file, "is a pickle (a PyTorch file), which can run code when read", hint="Convert it to safetensors")
    if len(head) < 8:
        _refuse(file, f"has {file_bytes} B, a safetensors file has at least 8")


def _parse(file: Path, raw: bytes, file_bytes: int) -> Header:
    if not raw.startswith(b"{"):
        _refuse(file, "header does not start with '{'")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                _refuse(file, "name occurs twice", key)
            found[key] = value
        return found

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_constant=lambda text: _refuse(file, text))
    except UnicodeDecodeError as exc:
        raise CheckpointError("header is not UTF-8", path=file) from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"header is not JSON ({exc})", path=file) from exc
    if not isinstance(content, dict):
        _refuse(file, "header is not a JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, "__metadata__ is not a map from text to text")
    data_start = 8 + len(raw)
    tensors = {name: _entry(file, name, item, data_start, file_bytes) for name, item in content.items()}
    _check_layout(file, tensors, data_start, file_bytes)
    return Header(file, metadata, tensors, file_bytes)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT


def _entry(file: Path, name: str, item: Any, data_start: int, file_bytes: int) -> TensorEntry:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        _refuse(file, "is not {dtype, shape, data_offsets}", name)
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(file, f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})", name)
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > MAX_DIMENSIONS:
        _refuse(file, f"bad shape {shape!r}", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _refuse(file, f"bad offsets {offsets!r}", name)
    begin, end = offsets
    spelled, width = DTYPES[dtype]
    nbytes = math.prod(shape) * width
    if nbytes > MAX_INT:
        _refuse(file, f"shape {shape} is too large", name)
    if begin > end or data_start + end > file_bytes:
        _refuse(file, f"offsets {offsets} lie outside the {file_bytes - data_start} B of data: truncated?", name)
    if end - begin != nbytes:
        _refuse(file, f"has {end - begin} B, its dtype {dtype} and shape {shape} need {nbytes} B", name)
    return TensorEntry(name, spelled, tuple(shape), file, data_start + begin, nbytes)


def _check_layout(file: Path, tensors: dict[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    at = data_start
    for entry in sorted(tensors.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start < at:
            _refuse(file, f"overlaps the tensor before it by {at - entry.start} B", entry.tensor_name)
        if entry.start > at:
            _refuse(file, f"a hole of {entry.start - at} B lies before it", entry.tensor_name)
        at += entry.nbytes
    if at != file_bytes:
        _refuse(file, f"{file_bytes - at} B follow the last tensor")
