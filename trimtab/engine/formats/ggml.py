"""Weights in ggml's types: blocks of 32 or 256 values along a row, as GGUF files store them.

weight uint8 [D_out, bytes of a row]; index int32 [D_in] where the file has the columns in another order. A value is computed in
float32 and rounded once to the weight's type. Source: ggml-quants.c, dequantize_row_*; the values are those of gguf 0.19.0
(quants.py) and of transformers 5.23.0 (integrations/gguf/dequant.py) in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.packed import DequantizedShell, Packed, Shell
from trimtab.errors import CheckpointError
from trimtab.formats.record import DEQUANTIZED_VALUES, GGML_BLOCKS, INDEXED, PackedEntry
from trimtab.gguf.architectures import in_order

# Format -> where the scales and minima in float16 are in a block.
SCALES = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of a file tensor, its rows in the model's order. dtype: of its values. Errors: CheckpointError for scales
    that are not finite."""
    weight, kind = parts["weight"], entry.kind.removesuffix(INDEXED)
    for start in SCALES.get(kind, ()):
        if not bool(torch.isfinite(_half(weight.reshape(-1, GGML_BLOCKS[kind][1]), start)).all()):
            raise CheckpointError("has scales that are not finite", path="", tensor_name=entry.tensor_name)
    if order := entry.state.get("rows"):
        weight = in_order(weight, order)
    found = {"weight": weight}
    if order := entry.state.get("columns"):
        columns = torch.arange(entry.shape[1], dtype=torch.int32, device=weight.device)
        found["index"] = in_order(columns, order)
    return Packed(entry.kind, entry.shape, dtype, found, {})


# Values of blocks -----------------------------------------------------------------------------------------------------


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].view(torch.float16).float()


def _halves(data: Tensor) -> Tensor:
    """Return the low and then the high halves of bytes [n, m]: [n, 2 m]."""
    return torch.cat((data & 15, data >> 4), dim=1)


def _scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minima of 6 bits that 12 bytes of a K block hold."""
    low, mid, high = data[:, 0:4], data[:, 4:8], data[:, 8:12]
    scale = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=1)
    return scale.float(), torch.cat((mid & 63, (high >> 4) | (mid >> 6) << 4), dim=1).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _halves(blocks[:, 4:]).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _in_groups(q: Tensor, blocks: Tensor) -> Tensor:
    """q [n, 8, 32] with the scales and minima of a Q4_K or Q5_K block."""
    scale, minimum = _scales(blocks[:, 4:16])
    return (_half(blocks, 0) * scale)[..., None] * q.float() - (_half(blocks, 2) * minimum)[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    return _in_groups(torch.cat((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    pairs = blocks[:, 48:].reshape(-1, 4, 1, 32)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = blocks[:, None, 16:48] >> bits & 1
    return _in_groups(torch.cat((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32) | high << 4, blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
    shifts = (2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).view(-1, 8, 32)
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scale[..., None] * ((low | high << 4).view(-1, 16, 16).float() - 32)


def _values(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


# Format -> float32 values of blocks [n, bytes of a block], in any shape.
BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "f16": _values(torch.float16),
    "bf16": _values(torch.bfloat16), "f32": _values(torch.float32),
}  # fmt: skip


# Computing ------------------------------------------------------------------------------------------------------------


def dequantize(packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight [D_out, D_in] in its own type, or then cast to another; a few rows are in memory in addition at a time."""
    return dequantize_rows(packed, 0, packed.shape[0], packed.parts["weight"].device, dtype)


def dequantize_rows(packed: Packed, start: int, stop: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows of the weight as `weights.dequantize_rows`, or then cast to another type."""
    kind, columns = packed.kind.removesuffix(INDEXED), packed.shape[1]
    index = packed.parts["index"].to(device) if "index" in packed.parts else None
    out = torch.empty(stop - start, columns, dtype=dtype or packed.dtype, device=device)
    step = max(1, DEQUANTIZED_VALUES // columns)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        values = BLOCKS[kind](packed.parts["weight"][first:last].to(device).reshape(-1, GGML_BLOCKS[kind][1])).view(-1, columns)
        out[first - start : last - start].copy_((values if index is None else values[:, index]).to(packed.dtype))
    return out


def shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return a layer that dequantizes the weight at each call."""
    return DequantizedShell(packed, bias, compute_dtype, dequantize)
