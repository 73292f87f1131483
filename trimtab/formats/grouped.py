"""Which tensors of compressed-tensors checkpoints are integers of 4 and 8 bits with a scale for each group of a row?"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from trimtab.checkpoint.headers import TensorEntry
from trimtab.formats.record import SCALE_DTYPES, Found, PackedEntry, gathered

PACKED = "weight_packed"
SIDES = (PACKED, "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
BITS = (4, 8)


def weights(tensors: Mapping[str, TensorEntry], schemes: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    """Yield the weights of integers. schemes: the `weights` of each config group.

    `X.weight_packed` int32 [D_out, D_in bits / 32], the first value in the lowest bits, each plus half the range; `X.weight_scale`
    [D_out, groups] (or [D_out]), `X.weight_shape` int64 [2], where zero points are not 0 `X.weight_zero_point` int32, packed along
    D_out, and with act-order `X.weight_g_idx` int32 [D_in], the group of each input (up to 0.18: `actorder` "group"). Source:
    compressed-tensors 0.20.0, compressors/pack_quantized; the groups: 0.18.0.
    """
    for name, _, own, parts in gathered(tensors, {PACKED: SIDES}):
        yield name, own, _weight(name, parts, schemes)


def _weight(name: str, parts: Mapping[str, TensorEntry], schemes: Sequence[Mapping[str, Any]]) -> PackedEntry | str:
    """Return a weight, or what is wrong with its file tensors."""
    weight, scale, shape_entry = parts[PACKED], parts.get("weight_scale"), parts.get("weight_shape")
    if scale is None or shape_entry is None:
        return f"has no {'weight_scale' if scale is None else 'weight_shape'}"
    shape = _shape(shape_entry)
    if isinstance(shape, str):
        return shape
    rows, columns = shape
    if weight.dtype != "int32" or len(weight.shape) != 2 or weight.shape[0] != rows:
        return f"weight_packed is {weight.dtype} {list(weight.shape)}, its shape [{rows}, {columns}] needs int32 [{rows}, ...]"
    bits = next((bits for bits in BITS if weight.shape[1] == ceil(columns * bits / 32)), None)
    if bits is None or not any(one.get("num_bits") == bits for one in schemes):
        declared = ", ".join(sorted({str(one.get("num_bits")) for one in schemes}))
        return f"weight_packed is {list(weight.shape)}, which is not [{rows}, {columns}] in {declared} bits (4 and 8 are read)"
    if scale.dtype not in SCALE_DTYPES or scale.shape[:1] != (rows,) or len(scale.shape) > 2:
        return f"weight_scale is {scale.dtype} {list(scale.shape)}, a float for each of {rows} rows or of their groups is needed"
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    own = [one for one in schemes if one.get("num_bits") == bits and one.get("type", "int") == "int"]
    if not own:
        return f"weight_packed has integers of {bits} bits, config.json declares no type int of that many"
    fitting = [one for one in own if _has_groups(one, columns, groups)]
    if not fitting:
        return f"weight_scale has {groups} groups a row of {columns}, which no config group declares"
    size = 0 if groups == 1 else int(fitting[0]["group_size"])
    zero = parts.get("weight_zero_point")
    if all(bool(one.get("symmetric", True)) is (zero is not None) for one in fitting):
        return f"has {'no' if zero is None else 'a'} weight_zero_point, config.json says symmetric {str(zero is not None).lower()}"
    if zero is not None and (zero.dtype != "int32" or zero.shape != (ceil(rows * bits / 32), groups)):
        return f"weight_zero_point is {zero.dtype} {list(zero.shape)}, int32 [{ceil(rows * bits / 32)}, {groups}] is needed"
    index = parts.get("weight_g_idx")
    if index is not None and (index.dtype != "int32" or index.shape != (columns,) or columns % 2):
        return f"weight_g_idx is {index.dtype} {list(index.shape)}, int32 [{columns}] and pairs of inputs are needed"
    kind = f"int{bits}-{f'g{size}' if size else 'row'}{'-zp' if zero is not None else ''}{'-idx' if index and size else ''}"
    kind += "-f32" if scale.dtype == "float32" else ""
    kept = {"weight" if part == PACKED else part: entry for part, entry in parts.items() if part != "weight_shape"}
    return PackedEntry(name, kind, shape, scale.dtype, kept, {"layout": "packed"})


def _has_groups(scheme: Mapping[str, Any], columns: int, groups: int) -> bool:
    """Return whether a config group declares this many groups for a row; without a size, or with -1, a row is one."""
    size = scheme.get("group_size")
    if size is None or size == -1:
        return groups == 1
    return type(size) is int and 0 < size < 10**6 and ceil(columns / size) == groups


def _shape(entry: TensorEntry) -> tuple[int, int] | str:
    """Return the shape that a `weight_shape` holds, or what is wrong with it."""
    width = {"int64": "<2q", "int32": "<2i"}.get(entry.dtype)
    if width is None or entry.shape != (2,):
        return f"weight_shape is {entry.dtype} {list(entry.shape)}, int64 [2] is needed"
    try:
        with open(entry.file, "rb") as handle:
            handle.seek(entry.start)
            rows, columns = struct.unpack(width, handle.read(entry.nbytes))
    except (OSError, struct.error) as exc:
        return f"weight_shape cannot be read ({exc})"
    if not (0 < rows < 2**31 and 0 < columns < 2**31):
        return f"weight_shape is [{rows}, {columns}]"
    return rows, columns
