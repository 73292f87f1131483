"""float8 weights (e4m3) with one scale for each block, row or weight: official FP8 files of Qwen, DeepSeek and others.

weight float8_e4m3fn [D_out, D_in]; scale float32, as many as the format's name says. A value is q * scale in float32, rounded once
to the weight's type. Activations are not rounded: the product is of 16-bit values, on every card.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.float4 import powers
from trimtab.engine.formats.packed import DequantizedShell, Draw, Packed, Shell, check_finite
from trimtab.formats.record import DEQUANTIZED_VALUES, PackedEntry, StoredFormat, stored_format


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: of a weight whose scales are float32. Errors: CheckpointError for scales that are
    not finite."""
    own, scale = parts["scale"].dtype, parts["scale"]
    if own == torch.uint8:
        own, scale = torch.float32, powers(scale)
    scale = scale.float().reshape(_scales(entry.kind, entry.shape))
    check_finite(entry, scale)
    found = {"weight": parts["weight"], "scale": scale}
    return Packed(entry.kind, entry.shape, dtype if own == torch.float32 else own, found, {})


def _scales(kind: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a weight."""
    high, wide = stored_format(kind).block
    return (-(-shape[0] // high) if high else 1, -(-shape[1] // wide) if wide else 1)


def dequantize(packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight [D_out, D_in] in its own type, or then cast to another; a few rows are in memory in addition at a time."""
    return dequantize_rows(packed, 0, packed.shape[0], packed.parts["weight"].device, dtype)


def dequantize_rows(packed: Packed, start: int, stop: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows of the weight as `weights.dequantize_rows`, or then cast to another type."""
    columns = packed.shape[1]
    high, wide = stored_format(packed.kind).block
    out = torch.empty(stop - start, columns, dtype=dtype or packed.dtype, device=device)
    step = max(1, DEQUANTIZED_VALUES // columns)
    scale = packed.parts["scale"].to(device)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        values = packed.parts["weight"][first:last].to(device).to(torch.float32)
        factor = scale if high == 0 else scale[torch.arange(first, last, device=device) // high]
        values *= factor if wide == 0 else factor.repeat_interleave(min(wide, columns), dim=1)[:, :columns]
        out[first - start : last - start].copy_(values.to(packed.dtype))
    return out


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype) -> Tensor:
    """Return rows of the weight, not rounded to its type."""
    (high, wide), scale = stored_format(packed.kind).block, packed.parts["scale"]
    of_row = torch.arange(rows.start, rows.stop, device=scale.device) // (high or packed.shape[0])
    of_column = torch.arange(packed.shape[1], device=scale.device) // (wide or packed.shape[1])
    values = packed.parts["weight"][rows.start : rows.stop].to(torch.float32).to(dtype)
    return values * scale.to(dtype)[of_row][:, of_column]


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    values = (draw.normal(rows, columns) * 100).clamp(-448, 448)
    return {"weight": values.to(torch.float8_e4m3fn), "scale": draw.uniform(*_scales(form.name, (rows, columns))) * 0.001}


def shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return a layer that dequantizes the weight at each call."""
    return DequantizedShell(packed, bias, compute_dtype, dequantize)
