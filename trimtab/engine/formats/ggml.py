"""Weights in ggml's types: blocks of 32 or 256 values along a row, as GGUF files store them, in parts that kernels read aligned.

A block's bytes are no multiple of 16 in most types, so its scales stand apart: as many bytes, each value as it is in the file.
weight: of 128 values 64 bytes of their lowest 4 bits, the first of two in the high half; then the bits above (Q5_K 1, Q6_K 2), the
first four of every eight in the lower half of a word of 16 or 32 values; or int8 (Q8_0). scale: of each block, float16 (Q4_1: the
scale and the minimum), or the 16 bytes of Q4_K and Q5_K that hold scales and minima, or Q6_K's 16 bytes, whose own scale is outer.
index int32 [D_in] where the file has the columns in another order. F16, BF16 and F32 are a part: weight uint8. A value is computed
in float32 and rounded once to the weight's type. Source: ggml-quants.c, dequantize_row_*; the values are those of gguf 0.19.0
(quants.py) and of transformers 5.23.0 (integrations/gguf/dequant.py) in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Draw, Packed, check_finite
from trimtab.formats.record import DEQUANTIZED_VALUES, GGML_BLOCKS, GGML_PARTS, INDEXED, PackedEntry, StoredFormat
from trimtab.gguf.architectures import in_order

# Format -> where the scales and minima in float16 are in a block.
SCALES = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of a file tensor, its rows in the model's order. dtype: of its values. Errors: CheckpointError for scales
    that are not finite."""
    weight, kind = parts["weight"], entry.kind.removesuffix(INDEXED)
    for start in SCALES.get(kind, ()):
        check_finite(entry, _half(weight.reshape(-1, GGML_BLOCKS[kind][1]), start))
    rows, columns = entry.shape
    order = entry.state.get("rows")
    numbers = None if order is None else in_order(torch.arange(rows, device=weight.device), order)
    found: dict[str, Tensor] = {}
    for first in range(0, rows, step := max(1, DEQUANTIZED_VALUES // columns)):
        piece = slice(first, first + step)
        for name, part in arranged(kind, weight[piece if numbers is None else numbers[piece]]).items():
            if name not in found:
                found[name] = part if len(part) == rows else part.new_empty(rows, part.shape[1])
            if found[name] is not part:
                found[name][piece] = part
    if order := entry.state.get("columns"):
        found["index"] = in_order(torch.arange(columns, dtype=torch.int32, device=weight.device), order)
    return Packed(entry.kind, entry.shape, dtype, found, {})


def quantize(weight: Tensor) -> Packed:
    """Return a weight [D_out, D_in] as Q8_0: of 32 values the scale is the largest magnitude / 127. Errors: ValueError for values
    that are not finite, or too large for a scale in float16. Source: ggml-quants.c, quantize_row_q8_0_ref, whose roundf takes
    halves away from 0."""
    (rows, columns), device = weight.shape, weight.device
    data = torch.empty(rows, columns, dtype=torch.int8, device=device)
    scale = torch.empty(rows, columns // 32, dtype=torch.float16, device=device)
    for first in range(0, rows, step := max(1, min(rows // 8, DEQUANTIZED_VALUES // columns))):
        piece = slice(first, first + step)
        x = weight[piece].float().view(-1, columns // 32, 32)
        each = x.abs().amax(dim=-1, keepdim=True) / 127
        x = x * torch.where(each > 0, 1 / each, 0)
        whole = x.abs().floor()
        data[piece] = ((whole + (x.abs() - whole >= 0.5)) * x.sign()).view(-1, columns)
        scale[piece] = each[..., 0]
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("values that are NaN, infinite or too large for Q8_0")
    return Packed("q8_0", (rows, columns), weight.dtype, {"weight": data, "scale": scale}, {})


# Blocks ---------------------------------------------------------------------------------------------------------------


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].view(torch.float16).float()


def _halves(data: Tensor) -> Tensor:
    """Return the low and then the high halves of bytes [n, m]: [n, 2 m]."""
    return torch.cat((data & 15, data >> 4), dim=1)


def _integers(kind: str, blocks: Tensor) -> Tensor:
    """Return the unsigned values of a file's blocks [n, bytes of a block] of 4, 5 or 6 bits: uint8 [n, values]."""
    if kind in ("q4_0", "q4_1"):
        return _halves(blocks[:, 2 if kind == "q4_0" else 4 :])
    if kind == "q6_k":
        low = blocks[:, :128].reshape(-1, 2, 1, 64)
        low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
        shifts = (2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)).view(1, 1, 4, 1)
        return (low | (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).view(-1, 8, 32) << 4).view(-1, 256)
    pairs = blocks[:, 16 if kind == "q4_k" else 48 :].reshape(-1, 4, 1, 32)
    low = torch.cat((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32)
    if kind == "q5_k":
        bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
        low = low | (blocks[:, None, 16:48] >> bits & 1) << 4
    return low.view(-1, 256)


# Kind -> (bits above the lowest four, values of a word of them).
_ABOVE = {"q5_k": (1, 32), "q6_k": (2, 16)}


def arranged(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of rows of a file tensor [n, bytes of a row]."""
    return {name: part.contiguous() for name, part in _parts(kind, weight).items()}


def _parts(kind: str, weight: Tensor) -> dict[str, Tensor]:
    if kind not in GGML_PARTS:
        return {"weight": weight}
    rows, blocks = weight.shape[0], weight.reshape(-1, GGML_BLOCKS[kind][1])
    if kind == "q8_0":
        return {
            "weight": blocks[:, 2:].reshape(rows, -1).view(torch.int8),
            "scale": blocks[:, :2].reshape(rows, -1).view(torch.float16),
        }
    q = _integers(kind, blocks)
    data = (q[:, 0::2] & 15) << 4 | q[:, 1::2] & 15
    if kind in _ABOVE:
        bits, each = _ABOVE[kind]
        high = (q >> 4).view(-1, each // 8, 2, 4).transpose(1, 2).reshape(-1, 8 // bits)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=q.device)
        data = torch.cat((data.view(-1, 64), (high << shifts).sum(1, dtype=torch.uint8).view(-1, 16 * bits)), dim=1)
    found = {"weight": data.reshape(rows, -1)}
    if kind == "q6_k":
        outer = blocks[:, 208:210].reshape(rows, -1).view(torch.float16)
        return found | {"scale": blocks[:, 192:208].reshape(rows, -1), "outer": outer}
    head = blocks[:, : GGML_PARTS[kind]["scale"]].reshape(rows, -1)
    return found | {"scale": head if kind in ("q4_k", "q5_k") else head.view(torch.float16)}


def _scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minima of 6 bits that 12 bytes of a K block hold."""
    low, mid, high = data[:, 0:4], data[:, 4:8], data[:, 8:12]
    scale = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=1)
    return scale.float(), torch.cat((mid & 63, (high >> 4) | (mid >> 6) << 4), dim=1).float()


def values(kind: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the values float32 [n, D_in] of the parts of n rows, in the file's order of columns."""
    data, rows = parts["weight"], parts["weight"].shape[0]
    if kind not in GGML_PARTS:
        return data.contiguous().view({"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[kind]).float()
    if kind == "q8_0":
        return (parts["scale"].float()[..., None] * data.view(rows, -1, 32).float()).view(rows, -1)
    pairs = data.reshape(-1, 64 + 16 * _ABOVE[kind][0] if kind in _ABOVE else data.shape[1])
    low = pairs[:, :64] if kind in _ABOVE else pairs
    q = torch.stack((low >> 4, low & 15), dim=-1)
    if kind in _ABOVE:
        bits, each = _ABOVE[kind]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
        high = (pairs[:, 64:, None] >> shifts & ((1 << bits) - 1)).view(-1, 2, each // 8, 4).transpose(1, 2)
        q = q.view(-1, 128) | high.reshape(-1, 128) << 4
    if kind in ("q4_0", "q4_1"):
        scale, q = parts["scale"].float().view(rows, -1, 1 if kind == "q4_0" else 2), q.view(rows, -1, 32).float()
        return (scale[..., :1] * (q - 8) if kind == "q4_0" else scale[..., :1] * q + scale[..., 1:]).view(rows, -1)
    if kind == "q6_k":
        scale = parts["outer"].float().reshape(-1, 1) * parts["scale"].reshape(-1, 16).view(torch.int8).float()
        return (scale[..., None] * (q.view(-1, 16, 16).float() - 32)).view(rows, -1)
    blocks = parts["scale"].reshape(-1, 16)
    scale, minimum = _scales(blocks[:, 4:])
    a, b = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
    return (a[..., None] * q.view(-1, 8, 32).float() - b[..., None]).view(rows, -1)


# Computing ------------------------------------------------------------------------------------------------------------


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`, but computed in float32."""
    kind, parts = packed.kind.removesuffix(INDEXED), packed.part_rows(rows, device, "index")
    index = parts.pop("index", None)
    if kind in GGML_PARTS and "scale" not in parts:  # rows that lie in the file
        parts = arranged(kind, parts["weight"])
    found = values(kind, parts)
    return (found if index is None else found[:, index]).to(dtype)


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    size, nbytes = GGML_BLOCKS[form.name]
    blocks = draw.bytes(rows * columns // size, nbytes)
    for at in SCALES[form.name]:
        step = draw.uniform(len(blocks), 1) * (0.01 if size == 32 else 0.0003)
        blocks[:, at : at + 2] = step.half().view(torch.uint8)
    return arranged(form.name, blocks.view(rows, -1))
