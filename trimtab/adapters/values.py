"""NaN and infinity in an adapter's tensors: read from the file in chunks, without torch.

Every use of an adapter begins with `read_adapter`, which calls this first, so errors are reported before work starts. A
value is not finite if all bits of its exponent are set; these bits are in its one or two highest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from trimtab.checkpoint.headers import TensorEntry


def _marks(is_marked: Callable[[int], bool]) -> bytes:
    """Return a table for `bytes.translate`: 1 for the bytes that are marked, 0 for all others."""
    return bytes(int(is_marked(byte)) for byte in range(256))


_SEVEN = _marks(lambda byte: byte & 0x7F == 0x7F)
_FIVE = _marks(lambda byte: byte & 0x7C == 0x7C)
# dtype -> (bytes of a value, tables for its highest byte and those below: a value marked in all of them is not finite).
_EXPONENTS: Mapping[str, tuple[int, tuple[bytes, ...]]] = {
    "float64": (8, (_SEVEN, _marks(lambda byte: byte >= 0xF0))), "float32": (4, (_SEVEN, _marks(lambda byte: byte >= 0x80))),
    "bfloat16": (2, (_SEVEN, _marks(lambda byte: byte >= 0x80))), "float16": (2, (_FIVE,)),
    "float8_e5m2": (1, (_FIVE,)), "float8_e4m3fn": (1, (_SEVEN,)),
}  # fmt: skip
# The bytes that a table marks: a search for each of them is several times as fast as `translate`.
_MARKED = {table: tuple(bytes([byte]) for byte in range(256) if table[byte]) for table in (_SEVEN, _FIVE)}
_PIECE_BYTES = 256 * 2**10  # the search holds the GIL, which other threads need for their steps


def value_problems(tensors: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Return a line for each tensor with values that are not finite. tensors: name -> entry. Errors: OSError."""
    problems = []
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}  # opening a file takes longer than reading one of its tensors

        def count_of(entry: TensorEntry) -> int:
            if entry.file not in files:
                files[entry.file] = stack.enter_context(open(entry.file, "rb"))
            return _not_finite(files[entry.file], entry)

        if not any(count_of(run) for run in _runs(tensors.values())):
            return ()
        for name, entry in tensors.items():
            count = count_of(entry) if entry.dtype in _EXPONENTS else 0
            if count:
                values = entry.nbytes // _EXPONENTS[entry.dtype][0]
                problems.append(f"{name}: {count} of {values} values are NaN or infinite")
    return tuple(problems)


def _runs(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    """Join tensors of one type that are adjacent in a file. Only types that can hold values which are not finite."""
    ends: dict[tuple[Path, str, int], tuple[TensorEntry, int]] = {}  # of each run: its first tensor and its bytes
    for entry in sorted(entries, key=attrgetter("start", "nbytes")):
        if entry.dtype in _EXPONENTS:
            first, nbytes = ends.pop((entry.file, entry.dtype, entry.start), (entry, 0))
            ends[entry.file, entry.dtype, entry.start + entry.nbytes] = first, nbytes + entry.nbytes
    return (replace(first, nbytes=nbytes) for first, nbytes in ends.values())


def _not_finite(file: BinaryIO, entry: TensorEntry) -> int:
    """Return how many values of a tensor are NaN or infinite."""
    width, tables = _EXPONENTS[entry.dtype]
    count, left = 0, entry.nbytes
    file.seek(entry.start)
    while left:
        data = file.read(min(_PIECE_BYTES, left))
        if not data:
            break
        left -= len(data)
        highest = data if width == 1 else data[width - 1 :: width]
        if not any(byte in highest for byte in _MARKED[tables[0]]):  # the usual case: no value is that large
            continue
        both = int.from_bytes(highest.translate(tables[0]), "little")
        for place, table in enumerate(tables[1:], 2):
            both &= int.from_bytes(data[width - place :: width].translate(table), "little")
        count += both.bit_count()
    return count
