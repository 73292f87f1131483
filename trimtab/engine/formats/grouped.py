"""How are 4-bit and 8-bit integers with a scale for each group of a row read and dequantized: compressed-tensors, AWQ, GPTQ?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats import transposed
from trimtab.engine.formats.packed import (
    Draw,
    Packed,
    check_finite,
    digest_of,
    high_first,
    in_input_order,
    in_words,
    low_first,
    refused,
    viewed,
)
from trimtab.formats.record import PackedEntry, StoredFormat, stored_format

# Reading --------------------------------------------------------------------------------------------------------------


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: of a weight whose scales are float32. Errors: CheckpointError for scales that are
    not finite and an order of inputs that fits no groups. weight uint8 [D_out, D_in bits / 8], the first of two 4-bit values in the
    high half; scale and zero uint8 [D_out, groups]. A value is (q - zero) * scale, rounded once to the weight's type; without zero
    points, zero is half the range. Columns with act-order are sorted by group: index int32 [D_in] has the input of each."""
    form, layout = stored_format(entry.kind), str(entry.state["layout"])
    found = _packed(entry, parts, form) if layout == "packed" else transposed.parts_of(entry, parts, form, layout)
    check_finite(entry, found["scale"])
    order = _sort(entry, found, form) if form.has_index else ""
    own = found["scale"].dtype
    return Packed(entry.kind, entry.shape, dtype if own == torch.float32 else own, found, {}, order=order)


def _sort(entry: PackedEntry, found: dict[str, Tensor], form: StoredFormat) -> str:
    """Sort the columns of a weight by their groups, which are in `index`; return the digest of the order, which is there then.
    Errors: CheckpointError for groups of other sizes."""
    group, columns, data = found["index"].long(), entry.shape[1], found["weight"]
    index = group.argsort(stable=True)
    if not torch.equal(group[index], torch.arange(columns, device=index.device) // form.group):
        raise refused(entry, f"g_idx has groups that are not there or not of {form.group} inputs")
    found["index"], found["weight"] = index.int(), torch.empty_like(data)
    for first in range(0, len(data), step := max(1, len(data) // 8)):
        piece = data[first : first + step]
        values = (high_first(piece) if form.bits == 4 else piece)[:, index]
        if form.bits == 4:
            values = values[:, 0::2] << 4 | values[:, 1::2]
        found["weight"][first : first + step] = values
    return digest_of(found["index"])


def _packed(entry: PackedEntry, parts: Mapping[str, Tensor], form: StoredFormat) -> dict[str, Tensor]:
    """compressed-tensors: values in order along a row, the first in the lowest bits."""
    rows, columns = entry.shape
    scale = parts["weight_scale"].reshape(rows, -1).contiguous()
    found = {"weight": in_words(parts["weight"], columns, form.bits), "scale": scale}
    if form.has_zero:  # packed along D_out
        across = viewed(parts["weight_zero_point"].t(), torch.uint8)
        values = low_first(across) if form.bits == 4 else across
        found["zero"] = values[:, :rows].t().contiguous()
    return found | ({"index": parts["weight_g_idx"]} if form.has_index else {})


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`. q - zero is exact in 16 bits: at most 8 bits are significant."""
    form, columns, parts = stored_format(packed.kind), packed.shape[1], packed.part_rows(rows, device, "index")
    data, scale = parts["weight"], parts["scale"].to(dtype)
    if form.bits == 4:
        data = high_first(data)[:, :columns]
    zero: Tensor | float = parts["zero"].to(dtype) if form.has_zero else float(1 << (form.bits - 1))
    groups, size = scale.shape[1], form.group or columns
    values = data.to(dtype)
    if columns == groups * size:
        by_group = values.view(-1, groups, size)
        by_group.sub_(zero[..., None] if isinstance(zero, Tensor) else zero).mul_(scale[..., None])
    else:
        index = torch.arange(columns, device=device) // size
        values.sub_(zero[:, index] if isinstance(zero, Tensor) else zero).mul_(scale[:, index])
    return in_input_order(values, parts.get("index"))


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    scale = draw.uniform(rows, groups := form.groups(columns)) * 0.01
    parts = {"weight": draw.bytes(rows, columns * form.bits // 8), "scale": scale.to(draw.scale_dtype)}
    parts |= {"zero": draw.bytes(rows, groups) & 15} if form.has_zero else {}
    return parts | ({"index": draw.order(columns)} if form.has_index else {})
