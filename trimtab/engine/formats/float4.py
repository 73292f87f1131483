"""How are NVFP4 and MXFP4 weights read and dequantized?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Draw, Packed, check_finite
from trimtab.formats.record import PackedEntry, StoredFormat

# float16 has the bits of e2m1 in the same order, with an exponent that is larger by 14.
FLOAT16_STEP = 2.0**14


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: of the weight. Errors: CheckpointError for scales that are not finite.

    weight uint8 [D_out, D_in / 2] as in the file, the first value in the low half; scale float8_e4m3fn [D_out, D_in / 16] or
    exponents uint8 [D_out, D_in / 32]; global float32 [2], by which scales are divided and multiplied, one of them 1. A value is q
    * scale in float32, rounded once to the weight's type.
    """
    found = {"weight": parts["weight"], "scale": parts["scale"]}
    one = torch.ones(1, device=found["scale"].device)
    if (divisor := parts.get("weight_global_scale")) is not None:
        found["global"] = torch.cat((divisor.reshape(1), one))
    elif (factor := parts.get("weight_scale_2")) is not None:
        found["global"] = torch.cat((one, factor.reshape(1)))
    check_finite(entry, factors(found))
    return Packed(entry.kind, entry.shape, dtype, found, {})


def factors(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the scales float32 of groups, with that of the weight."""
    if parts["scale"].dtype == torch.uint8:
        return powers(parts["scale"])
    return parts["scale"].float() / parts["global"][0] * parts["global"][1]


def powers(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) float32 of exponents (e8m0), NaN for 255: their bits, because powers may be rounded."""
    wide = exponents.to(torch.int32)
    bits = torch.where(wide == 0, 1 << 22, wide << 23)
    return torch.where(wide == 255, torch.nan, bits.view(torch.float32))


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`."""
    parts = packed.part_rows(rows, device, "global")
    scale = factors(parts).to(dtype)[..., None]
    return _values(parts["weight"]).to(dtype).view(*scale.shape[:2], -1).mul_(scale).view(len(rows), packed.shape[1])


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of an NVFP4 weight whose values are about 0.03."""
    scale = draw.uniform(rows, form.groups(columns)) * 200 + 1
    parts = {"weight": draw.bytes(rows, columns // 2), "scale": scale.to(torch.float8_e4m3fn)}
    return parts | {"global": draw.values(7000.0, 1.0)}


def _values(data: Tensor) -> Tensor:
    """Return the values float32 [n, 2 m] of bytes [n, m]. No table: a captured step cannot copy one to the device."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1).to(torch.int16)
    return ((codes & 8) << 12 | (codes & 7) << 9).view(torch.float16).float().mul_(FLOAT16_STEP)
