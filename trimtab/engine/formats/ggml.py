"""How are weights in ggml's types, as GGUF files store them, read into parts that kernels read aligned?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Draw, Packed, check_finite, digest_of, high_first, in_input_order, viewed
from trimtab.formats.record import DEQUANTIZED_VALUES, GGML_BLOCKS, GGML_FLOATS, GGML_PARTS, INDEXED, PackedEntry, StoredFormat
from trimtab.gguf.architectures import in_order

# Format -> where the scales and minima in float16 are in a block.
SCALES = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
_FLOATS = {kind: getattr(torch, dtype) for kind, dtype in GGML_FLOATS.items()}


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
        found["index"] = in_order(torch.arange(columns, device=weight.device), order).argsort().int()
    given = digest_of(found["index"]) if order else ""
    return Packed(entry.kind, entry.shape, dtype, found, {}, order=given)


def floats(entry: PackedEntry, weight: Tensor) -> Tensor:
    """Return the values of a file tensor that is not quantized, in its own type, rows and columns in the model's order."""
    out = viewed(weight, _FLOATS[entry.kind.removesuffix(INDEXED)])
    for dim, side in enumerate(("rows", "columns")):
        if order := entry.state.get(side):
            out = out.index_select(dim, in_order(torch.arange(out.shape[dim], device=out.device), order))
    return out


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
    return viewed(blocks[:, start : start + 2], torch.float16).float()


# Kind -> (bits above the lowest four, which 16 or 32 values of a row have them in a word; where they are in a block).
_ABOVE = {"q5_k": (1, 16), "q6_k": (2, 128)}
# Kind -> (where the lowest four bits are in a block, bytes whose low halves are as many values, followed by their high halves).
_LOW = {"q4_0": (2, 16), "q4_1": (4, 16), "q4_k": (16, 32), "q5_k": (48, 32), "q6_k": (0, 64)}


def _low(kind: str, blocks: Tensor) -> Tensor:
    """Return the lowest four bits of a file's blocks, those of the first of two neighbours in the high half of a byte: uint8 [n,
    values / 2]. Two bytes are computed at a time."""
    start, run = _LOW[kind]
    count = GGML_BLOCKS[kind][0] // 2
    pairs = viewed(blocks[:, start : start + count], torch.int16).view(-1, count // run, 1, run // 2)
    low, high = pairs << 4 & 0xF0 | pairs >> 8 & 15, pairs & 0xF0 | pairs >> 12 & 15
    return torch.cat((low, high), dim=2).to(torch.uint8).view(-1, count)


def _above(kind: str, blocks: Tensor) -> Tensor:
    """Return the bits of a file's blocks above the lowest four, in the order of the parts: uint8 [128 values, 16 bits]. Four bytes,
    which have those of four neighbours, are computed at a time."""
    bits, start = _ABOVE[kind]
    words = viewed(blocks[:, start : start + 32 * bits], torch.int32).view(-1, bits, 1, 8)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=blocks.device).view(1, 1, -1, 1)
    each = words >> shifts & 0x01010101 * ((1 << bits) - 1)
    step = 8 - bits
    four = (each | each >> step | each >> 2 * step | each >> 3 * step) & (1 << 4 * bits) - 1
    if bits == 1:
        octets = four.view(-1, 2, 2)
        four = octets[:, 0] | octets[:, 1] << 4
    return four.to(torch.uint8).view(-1, 2, 2).transpose(1, 2).reshape(-1, 16 * bits)


def _spread(kind: str, above: Tensor) -> Tensor:
    """Return the bits of `_above`, each where it is in a value: uint8 [128 values, 128]."""
    bits = _ABOVE[kind][0]
    four = above.view(-1, 2, 2).transpose(1, 2).to(torch.int32)
    if bits == 1:
        four = torch.stack((four & 15, four >> 4), dim=2)
    step = 8 - bits
    each = (four | four << step | four << 2 * step | four << 3 * step) & 0x01010101 * ((1 << bits) - 1)
    return (each << 4).contiguous().view(torch.uint8).view(-1, 128)


def arranged(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of rows of a file tensor [n, bytes of a row].

    weight: of 128 values 64 bytes of their lowest 4 bits, the first of two in the high half; then the bits above (Q5_K 1, Q6_K 2),
    the first four of every eight in the lower half of a word of 16 or 32 values; or int8 (Q8_0). scale: of each block, float16
    (Q4_1: scale and minimum), or the 16 bytes of Q4_K and Q5_K with scales and minima, or Q6_K's 16 bytes, whose own scale is
    outer. F16, BF16 and F32: weight uint8.
    """
    if kind not in GGML_PARTS:
        return {"weight": weight.contiguous()}
    blocks = weight.reshape(-1, GGML_BLOCKS[kind][1])
    head = blocks[:, : GGML_PARTS[kind]["scale"]]
    data = blocks[:, 2:].view(torch.int8) if kind == "q8_0" else _low(kind, blocks)
    if kind in _ABOVE:
        data = torch.cat((data.view(-1, 64), _above(kind, blocks)), dim=1)
    if kind == "q6_k":
        found = {"weight": data, "scale": blocks[:, 192:208], "outer": viewed(blocks[:, 208:210], torch.float16)}
    else:
        found = {"weight": data, "scale": head if kind in ("q4_k", "q5_k") else viewed(head, torch.float16)}
    return {name: part.reshape(len(weight), -1).contiguous() for name, part in found.items()}


def _scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minima of 6 bits that 12 bytes of a K block hold."""
    low, mid, high = data[:, 0:4], data[:, 4:8], data[:, 8:12]
    scale = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=1)
    return scale.float(), torch.cat((mid & 63, (high >> 4) | (mid >> 6) << 4), dim=1).float()


def values(kind: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the values float32 [n, D_in] of the parts of n rows, in the file's order of columns. Source: ggml-quants.c,
    dequantize_row_*; gguf 0.19.0, quants.py; transformers 5.23.0, integrations/gguf/dequant.py."""
    data, rows = parts["weight"], parts["weight"].shape[0]
    if kind not in GGML_PARTS:
        return viewed(data, _FLOATS[kind]).float()
    if kind == "q8_0":
        return (parts["scale"].float()[..., None] * data.view(rows, -1, 32).float()).view(rows, -1)
    if kind in _ABOVE:
        whole = data.reshape(-1, 64 + 16 * _ABOVE[kind][0])
        q = high_first(whole[:, :64]) | _spread(kind, whole[:, 64:].contiguous())
    else:
        q = high_first(data)
    if kind in ("q4_0", "q4_1"):
        scale, found = parts["scale"].float().view(rows, -1, 1 if kind == "q4_0" else 2), q.view(rows, -1, 32).float()
        found = found.sub_(8).mul_(scale) if kind == "q4_0" else found.mul_(scale[..., :1]).add_(scale[..., 1:])
    elif kind == "q6_k":
        scale = parts["outer"].float().reshape(-1, 1) * parts["scale"].reshape(-1, 16).view(torch.int8).float()
        found = q.view(-1, 16, 16).float().sub_(32).mul_(scale[..., None])
    else:
        blocks = parts["scale"].reshape(-1, 16)
        scale, minimum = _scales(blocks[:, 4:])
        a, b = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
        found = q.view(-1, 8, 32).float().mul_(a[..., None]).sub_(b[..., None])
    return found.view(rows, -1)


# Computing ------------------------------------------------------------------------------------------------------------


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`, but computed in float32."""
    kind, parts = packed.kind.removesuffix(INDEXED), packed.part_rows(rows, device, "index")
    index = parts.pop("index", None)
    if kind in GGML_PARTS and "scale" not in parts:  # rows that lie in the file
        parts = arranged(kind, parts["weight"])
    found = values(kind, parts)
    return in_input_order(found, index).to(dtype)


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    size, nbytes = GGML_BLOCKS[kind := form.name.removesuffix(INDEXED)]
    blocks = draw.bytes(rows * columns // size, nbytes)
    for at in SCALES[kind]:
        step = draw.uniform(len(blocks), 1) * (0.01 if size == 32 else 0.0003)
        blocks[:, at : at + 2] = step.half().view(torch.uint8)
    return arranged(kind, blocks.view(rows, -1)) | ({"index": draw.order(columns)} if form.has_index else {})
