"""Which tensors of an adapter hold values that are NaN or infinite: read from the file a piece at a time, without torch.

Every way to use an adapter begins with `read_adapter`, which asks this first: what is wrong is told before work starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.checkpoint.headers import TensorEntry

# dtype -> (integers of its width, bits of everything but the sign, the least of these that is no finite number).
_BITS: Mapping[str, tuple[str, int, int]] = {
    "float64": ("<u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000), "float32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "float16": ("<u2", 0x7FFF, 0x7C00), "bfloat16": ("<u2", 0x7FFF, 0x7F80),
    "float8_e5m2": ("u1", 0x7F, 0x7C), "float8_e4m3fn": ("u1", 0x7F, 0x7F),
}  # fmt: skip
_PIECE_BYTES = 16 * 2**20


def value_problems(tensors: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Return a line for each tensor with values that are not finite. tensors: name -> entry. Errors: OSError."""
    import numpy as np  # a tenth of a second, which commands without an adapter need not wait for

    problems = []
    for name, entry in tensors.items():
        count = _not_finite(entry, np)
        if count:
            values = entry.nbytes // np.dtype(_BITS[entry.dtype][0]).itemsize
            problems.append(f"{name}: {count} of {values} values are NaN or infinite")
    return tuple(problems)


def _not_finite(entry: TensorEntry, np: Any) -> int:
    """Return how many values of a tensor are NaN or infinite; 0 for dtypes that have no such values."""
    if entry.dtype not in _BITS:
        return 0
    kind, mask, limit = _BITS[entry.dtype]
    count, left = 0, entry.nbytes
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        while left:
            data = file.read(min(_PIECE_BYTES, left))
            if not data:
                break
            left -= len(data)
            values = np.frombuffer(data[: len(data) - len(data) % np.dtype(kind).itemsize], dtype=kind)
            magnitudes = values & values.dtype.type(mask)
            if magnitudes.size and magnitudes.max() >= limit:
                count += int((magnitudes >= limit).sum())
    return count
