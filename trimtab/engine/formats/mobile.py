"""Gemma 4's mobile weights: 2, 4 or 8 bits with a scale for each row, and activations rounded to 8 bits with static scales.

weight as in the file: uint8 [D_out, D_in bits / 8], the first value in the lowest bits, or int8; scale float32 [D_out, groups];
activation float32 [2], the scales of inputs and outputs, 0 for no rounding. A value is q times the scale rounded to the computing
type. Source: transformers 5.23, integrations/gemma_quant.py, whose operations these are, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.formats.packed import Draw, Packed, Shell, check_finite
from trimtab.formats.mobile import ACTIVATIONS
from trimtab.formats.record import MOBILE_PIECE_VALUES, MOBILE_VALUES, PackedEntry, StoredFormat, stored_format

LEAST, MOST = -128, 127


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: in which it is computed. Errors: CheckpointError for scales that are not finite."""
    found = {"weight": parts["weight"], "scale": parts["scale"]}
    if stored_format(entry.kind).has_rounding:
        given = [parts[name].reshape(1) if name in parts else parts["scale"].new_zeros(1) for name in ACTIVATIONS]
        found["activation"] = torch.cat(given)
    check_finite(entry, *(part for name, part in found.items() if name != "weight"))
    input_scale = float(found["activation"][0]) if "activation" in found else 0.0
    return Packed(entry.kind, entry.shape, dtype, found, {}, input_scale=input_scale)


# Values ---------------------------------------------------------------------------------------------------------------


def dequantize(packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight [D_out, D_in] in its own type or another; a few rows are in memory in addition at a time."""
    return dequantize_rows(packed, 0, packed.shape[0], packed.parts["weight"].device, dtype)


def dequantize_rows(packed: Packed, start: int, stop: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows of the weight as `weights.dequantize_rows`, in its own type or another."""
    columns, bits = packed.shape[1], stored_format(packed.kind).bits
    out = torch.empty(stop - start, columns, dtype=dtype or packed.dtype, device=device)
    step = max(1, MOBILE_VALUES // columns)
    for first in range(start, stop, step):
        rows = slice(first, min(first + step, stop))
        data, scale = (packed.parts[name][rows].to(device) for name in ("weight", "scale"))
        piece = out[first - start : rows.stop - start].view(len(data), scale.shape[1], -1)
        piece.copy_(_integers(data, bits).view(piece.shape))
        piece.mul_(scale.to(out.dtype)[..., None])
    return out


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype) -> Tensor:
    """Return rows of the weight with its rounded scales, their product not rounded."""
    part = slice(rows.start, rows.stop)
    own = {"weight": packed.parts["weight"][part], "scale": packed.parts["scale"][part].to(packed.dtype)}
    return dequantize(Packed(packed.kind, (len(rows), packed.shape[1]), dtype, own, {}))


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    data, step = draw.bytes(rows, columns * form.bits // 8), draw.uniform(rows, form.groups(columns)) * 0.2 / 2**form.bits
    scales = {"activation": draw.values(0.03, 0.1 * columns**0.5 / 16)} if form.has_rounding else {}
    return {"weight": data.view(torch.int8) if form.bits == 8 else data, "scale": step} | scales


def _integers(data: Tensor, bits: int) -> Tensor:
    """Return the signed values int8 [n, m 8 / bits] of stored bytes [n, m]."""
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    values = torch.stack([data >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
    return values.to(torch.int8).sub_(1 << (bits - 1))


# Products -------------------------------------------------------------------------------------------------------------


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return activations rounded to 8 bits with a static scale, themselves where it is 0."""
    scale = scale.to(x.dtype)
    is_calibrated = scale != 0
    safe = torch.where(is_calibrated, scale, torch.ones_like(scale))
    return torch.where(is_calibrated, (x / safe).round_().clamp_(LEAST, MOST).mul_(safe), x)


def rounding(packed: Packed, product: Shell) -> Shell:
    """Return a product whose inputs and outputs are rounded as the weight's layer rounds them."""
    scales = packed.parts.get("activation")
    if scales is None:
        return product
    return lambda x: rounded(product(rounded(x, scales[0])), scales[1])


def shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return a layer that dequantizes the weight at each call, a large one (a head) in pieces of MOBILE_PIECE_VALUES."""
    own = None if bias is None else bias.to(compute_dtype)
    count, columns = packed.shape
    step = max(1, MOBILE_PIECE_VALUES // columns)

    def product(x: Tensor) -> Tensor:
        if step >= count:
            return functional.linear(x, dequantize(packed, x.dtype), own)
        out = torch.empty(*x.shape[:-1], count, dtype=x.dtype, device=x.device)
        for start in range(0, count, step):
            stop = min(start + step, count)
            weight = dequantize_rows(packed, start, stop, x.device, x.dtype)
            out[..., start:stop] = functional.linear(x, weight, None if own is None else own[start:stop])
        return out

    return rounding(packed, product)
