"""How are float8 weights (e4m3) with one scale for each block, row or weight read and dequantized?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.float4 import powers
from trimtab.engine.formats.packed import Draw, Packed, check_finite
from trimtab.formats.record import PackedEntry, StoredFormat, stored_format


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: of a weight whose scales are float32. Errors: CheckpointError for scales that are
    not finite. weight float8_e4m3fn [D_out, D_in]; scale float32. A value is q * scale in float32, rounded once to the weight's
    type. Activations are not rounded."""
    own, scale = parts["scale"].dtype, parts["scale"]
    if own == torch.uint8:
        own, scale = torch.float32, powers(scale)
    scale = scale.float().reshape(stored_format(entry.kind).blocks(*entry.shape))
    check_finite(entry, scale)
    found = {"weight": parts["weight"], "scale": scale}
    return Packed(entry.kind, entry.shape, dtype if own == torch.float32 else own, found, {})


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`."""
    parts, columns = packed.part_rows(rows, device, "scale"), packed.shape[1]
    (high, wide), factor = stored_format(packed.kind).block, parts["scale"].to(dtype)
    if high:
        factor = factor[torch.arange(rows.start, rows.stop, device=device) // high]
    values = parts["weight"].to(torch.float32).to(dtype)
    return values.mul_(factor if wide == 0 else factor.repeat_interleave(min(wide, columns), dim=1)[:, :columns])


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    values = (draw.normal(rows, columns) * 100).clamp(-448, 448)
    return {"weight": values.to(torch.float8_e4m3fn), "scale": draw.uniform(*form.blocks(rows, columns)) * 0.001}
