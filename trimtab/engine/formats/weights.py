"""How is a stored weight of any format read, dequantized and computed with?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trimtab.engine.formats import bitsandbytes, float4, float8, ggml, grouped, int8_head, mobile
from trimtab.engine.formats.packed import (
    Draw,
    Exact,
    Packed,
    PlainShell,
    Shell,
    WideShell,
    dequantized,
    dequantized_shell,
    is_narrow,
)
from trimtab.engine.formats.packed import unpacked_shell as packed_shell
from trimtab.formats.record import Family, PackedEntry, StoredFormat, float_dtype, stored_format

Read = Callable[[PackedEntry, Mapping[str, Tensor], torch.dtype], Packed]
RandomParts = Callable[[StoredFormat, int, int, Draw], dict[str, Tensor]]


@dataclass(frozen=True)
class WeightFormat:
    """How weights of a family of formats are handled.

    read: (entry, its file tensors by part on the device where they are computed, dtype) -> the weight; nothing is quantized again.
    dequantize: the weight [D_out, D_in] in its own type, on its device. dequantize_rows: some of its rows, copied to a device
    first. shell: a layer over the parts where they are, without a copy: a layer over views of a staging buffer computes with the
    buffer's current content. exact_rows: rows of a weight that kernels read, in another type and not rounded to its own: what they
    are compared with. random_parts: the parts of such a weight. quantize: (weight, format) -> it packed; ValueError for values
    that the format does not have. write: (the weight, where [D_out, D_in], at least how many values at a time) -> it written there;
    `dequantize` and a copy without.
    """

    dequantize: Callable[[Packed], Tensor]
    dequantize_rows: Callable[[Packed, int, int, torch.device], Tensor]
    shell: Callable[[Packed, Tensor | None, torch.dtype], Shell]
    read: Read | None = None
    exact_rows: Callable[[Packed, range, torch.dtype], Tensor] | None = None
    random_parts: RandomParts | None = None
    quantize: Callable[[Tensor, str], Packed] | None = None
    write: Callable[[Packed, Tensor, int], Tensor] | None = None


def _plain_shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    kind = WideShell if is_narrow(packed.dtype, compute_dtype) else PlainShell
    return kind(packed.parts["weight"], bias)


def _head_rows(packed: Packed, start: int, stop: int, device: torch.device) -> Tensor:
    q, scale = (packed.parts[name][start:stop].to(device) for name in ("weight", "scale"))
    return int8_head.dense(q, scale, packed.dtype)


def _dequantized(
    read: Read, exact: Exact, parts: RandomParts, quantize: Callable[[Tensor, str], Packed] | None = None,
    shell: Callable[[Packed, Tensor | None, torch.dtype], Shell] | None = None,
) -> WeightFormat:  # fmt: skip
    """Return how a family is handled whose weights torch's operations dequantize for each product."""

    def whole(packed: Packed, out: Tensor | None = None, at_once: int = 0) -> Tensor:
        return dequantized(exact, packed, 0, packed.shape[0], packed.parts["weight"].device, out=out, at_once=at_once)

    return WeightFormat(
        whole, partial(dequantized, exact), shell or partial(dequantized_shell, exact), read,
        lambda packed, rows, dtype: exact(packed, rows, dtype, packed.parts["weight"].device), parts,
        quantize=quantize, write=whole,
    )  # fmt: skip


_BITSANDBYTES = WeightFormat(
    bitsandbytes.dequantize, bitsandbytes.dequantize_rows, bitsandbytes.shell, bitsandbytes.read, bitsandbytes.exact_rows,
    bitsandbytes.random_parts,
    bitsandbytes.quantize,
)  # fmt: skip
FORMATS: Mapping[Family, WeightFormat] = {
    "none": WeightFormat(
        lambda packed: packed.parts["weight"],
        lambda packed, start, stop, device: packed.parts["weight"][start:stop].to(device, copy=True),
        _plain_shell,
    ),
    "codebook": _BITSANDBYTES,
    "int8": _BITSANDBYTES,
    "head8": WeightFormat(
        lambda packed: int8_head.dense(packed.parts["weight"], packed.parts["scale"], packed.dtype),
        _head_rows,
        lambda packed, bias, _: int8_head.Head.of(packed.parts, bias, packed.kernel),
    ),
    "mobile": _dequantized(mobile.read, mobile.exact_rows, mobile.random_parts, shell=mobile.shell),
    "grouped": _dequantized(grouped.read, grouped.exact_rows, grouped.random_parts),
    "float4": _dequantized(float4.read, float4.exact_rows, float4.random_parts),
    "float8": _dequantized(float8.read, float8.exact_rows, float8.random_parts),
    "ggml": _dequantized(ggml.read, ggml.exact_rows, ggml.random_parts, lambda weight, _: ggml.quantize(weight)),
}


def _of(kind: str) -> WeightFormat:
    return FORMATS[stored_format(kind).family]


def quantize(weight: Tensor, quant: str) -> Packed:
    """Return a weight [D_out, D_in] packed in a format. Errors: ValueError for values that it does not have."""
    make = _of(quant).quantize
    assert make is not None, quant
    return make(weight, quant)


def prequantized(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return a weight that is already packed in a checkpoint. Nothing is quantized again. parts: the file tensors of the entry
    by their part names, on the device on which they are computed or packed. dtype: of weights whose file names none."""
    read = _of(entry.kind).read
    assert read is not None, entry.kind
    return read(entry, parts, dtype)


def unpacked(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a weight of a checkpoint that does not stay packed, in a type. Floats are viewed, and cast once. parts: as above."""
    if float_dtype(entry.kind) is not None:
        return ggml.floats(entry, parts["weight"]).to(dtype)
    return dequantize(prequantized(entry, parts, dtype)).to(dtype)


def dequantize(packed: Packed, out: Tensor | None = None, *, at_once: int = 0) -> Tensor:
    """Return the unpacked weight [D_out, D_in], in its own dtype, on its device. out: where it is written. at_once: values that may
    be computed at a time, DEQUANTIZED_BYTES each, where that is more than the plan counts for a product."""
    form = _of(packed.kind)
    if out is None:
        return form.dequantize(packed)
    return out.copy_(form.dequantize(packed)) if form.write is None else form.write(packed, out, at_once)


def dequantize_rows(packed: Packed, start: int, stop: int, device: torch.device) -> Tensor:
    """Return rows `start` to `stop` of the weight [D_out, D_in] in separate memory, on a device: the bits of `dequantize`.

    Only these rows are copied to the device and dequantized.
    """
    return _of(packed.kind).dequantize_rows(packed, start, stop, device)


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype) -> Tensor:
    """Return rows [n, D_in] of a weight in a type, not rounded to its own: what kernels are compared with, and what merges read.

    Errors: AssertionError for a weight without such rows, and for rows of bitsandbytes' formats that are not whole blocks.
    """
    of_rows = _of(packed.kind).exact_rows
    assert of_rows is not None, packed.kind
    return of_rows(packed, rows, dtype)


def random_parts(kind: str, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight of random bytes, with values about 0.03. kind: a format that kernels read."""
    parts_of = _of(kind).random_parts
    assert parts_of is not None, kind
    return parts_of(stored_format(kind), rows, columns, draw)


def shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return a callable layer over the packed parts: x [..., D_in] -> y [..., D_out]."""
    return _of(packed.kind).shell(packed, bias, compute_dtype)


def rounded(packed: Packed, x: Tensor, *, is_input: bool) -> Tensor:
    """Return inputs or outputs of a weight's layer as the layer rounds them: themselves where it does not."""
    scales = packed.static_scales
    return x if scales is None else mobile.rounded(x, scales[0 if is_input else 1])


def unpacked_shell(packed: Packed, weight: Tensor, bias: Tensor | None) -> Shell:
    """Return a callable layer over the weight as it is kept unpacked, which computes what `shell` computes on a CPU."""
    product = packed_shell(weight, bias)
    return product if packed.static_scales is None else mobile.rounding(packed, product)


def dequantize_at(packed: Packed, ids: Tensor) -> Tensor:
    """Return the rows of a table [n, D] by their ids [n], on their device. packed: of a format whose parts have a row each."""
    parts = {name: part[ids] for name, part in packed.parts.items()}
    return dequantize(replace(packed, shape=(len(ids), packed.shape[1]), parts=parts))
