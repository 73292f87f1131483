"""How are Gemma 4's mobile weights read, and computed with activations rounded to 8 bits?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Draw, Packed, Shell, check_finite, dequantized_shell
from trimtab.formats.mobile import ACTIVATIONS
from trimtab.formats.record import PackedEntry, StoredFormat, stored_format

LEAST, MOST = -128, 127


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: in which it is computed. Errors: CheckpointError for scales that are not finite.

    weight as in the file: uint8 [D_out, D_in bits / 8], the first value in the lowest bits, or int8; scale float32 [D_out, groups];
    activation float32 [2], the scales of inputs and outputs, 0 for no rounding. A value is q times the scale rounded to the
    computing type. Source: transformers 5.23, integrations/gemma_quant.py.
    """
    found = {"weight": parts["weight"], "scale": parts["scale"]}
    if stored_format(entry.kind).has_rounding:
        given = [parts[name].reshape(1) if name in parts else parts["scale"].new_zeros(1) for name in ACTIVATIONS]
        found["activation"] = torch.cat(given)
    check_finite(entry, *(part for name, part in found.items() if name != "weight"))
    input_scale = float(found["activation"][0]) if "activation" in found else 0.0
    return Packed(entry.kind, entry.shape, dtype, found, {}, input_scale=input_scale)


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`, of scales that are rounded to the weight's type."""
    parts = packed.part_rows(rows, device, "activation")
    scale = parts["scale"].to(packed.dtype).to(dtype)[..., None]
    values = _integers(parts["weight"], stored_format(packed.kind).bits).to(dtype)
    return values.view(len(rows), scale.shape[1], -1).mul_(scale).view(len(rows), -1)


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
    """Return a layer that dequantizes the weight at each call, in the type of its inputs, and rounds them and its outputs."""

    def product(x: Tensor) -> Tensor:
        return dequantized_shell(exact_rows, replace(packed, dtype=x.dtype), bias, x.dtype)(x)

    return rounding(packed, product)
