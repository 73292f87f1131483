"""4-bit and 8-bit integers with a scale, and perhaps a zero point, for each group of a row: compressed-tensors, AWQ, GPTQ.

weight uint8 [D_out, D_in bits / 8], the first of two 4-bit values in the high half of a byte; scale [D_out, groups]; zero uint8
[D_out, groups]; index int32 [D_in], the group of each column. A value is (q - zero) * scale, rounded once to the weight's type;
without zero points, zero is half the range. So every layout of files becomes one, without loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Draw, Packed, check_finite, high_first, low_first, refused, viewed
from trimtab.formats.record import PackedEntry, StoredFormat, stored_format

# 1 in each value of a word of GPTQ's first layout (GPTQModel, utils/model.py: convert_gptq_v1_to_v2_format).
GPTQ_ONE = {4: 0x11111111, 8: 0x01010101}
_LOW = 0x0F0F0F0F


# Reading --------------------------------------------------------------------------------------------------------------


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return the weight of file tensors. dtype: of a weight whose scales are float32. Errors: CheckpointError for scales that are
    not finite and an order of inputs that fits no groups."""
    form = stored_format(entry.kind)
    layout = str(entry.state["layout"])
    found = _packed(entry, parts, form) if layout == "packed" else _transposed(entry, parts, form, layout)
    check_finite(entry, found["scale"])
    own = found["scale"].dtype
    return Packed(entry.kind, entry.shape, dtype if own == torch.float32 else own, found, {})


def _packed(entry: PackedEntry, parts: Mapping[str, Tensor], form: StoredFormat) -> dict[str, Tensor]:
    """compressed-tensors: values in order along a row, the first in the lowest bits."""
    rows, columns = entry.shape
    groups = form.groups(columns)
    found = {"weight": _in_order(parts["weight"], columns, form), "scale": parts["weight_scale"].reshape(rows, groups).contiguous()}
    if form.has_zero:  # packed along D_out
        across = viewed(parts["weight_zero_point"].t(), torch.uint8)
        values = low_first(across) if form.bits == 4 else across
        found["zero"] = values[:, :rows].t().contiguous()
    return found


def _transposed(entry: PackedEntry, parts: Mapping[str, Tensor], form: StoredFormat, layout: str) -> dict[str, Tensor]:
    """AWQ and GPTQ: [D_in, D_out], packed along D_out (AWQ) or D_in (GPTQ)."""
    rows, columns = entry.shape
    if layout == "awq":
        even, odd = parts["weight"][0::2], parts["weight"][1::2]  # two inputs of a byte
        low, high = (even & _LOW) << 4 | odd & _LOW, even & ~_LOW | odd >> 4 & _LOW
        data, zero = _awq_outputs(low, high), parts["qzeros"]
        zero = _awq_outputs(zero & _LOW, zero >> 4 & _LOW)
    else:
        data = _in_order(parts["weight"].t(), columns, form)
        # gptq stores one less than each zero point, subtracted from whole words: a zero point of 0 borrows from its neighbour.
        one = int(GPTQ_ONE[form.bits]) if layout == "gptq" else 0
        stored = viewed(parts["qzeros"] + one, torch.uint8)
        zero = (low_first(stored) if form.bits == 4 else stored).t()[:rows].contiguous()
    found = {"weight": data, "scale": parts["scales"].t().contiguous(), "zero": zero}
    index = parts.get("g_idx")
    if index is None:
        return found
    if int(index.min()) < 0 or int(index.max()) >= form.groups(columns):
        raise refused(entry, "g_idx names groups that are not there")
    if form.has_index:
        found["index"] = index
    elif form.group and not torch.equal(index.long(), torch.arange(columns, device=index.device) // form.group):
        raise refused(entry, "has inputs in another order (g_idx), but config.json says desc_act false")
    return found


def _in_order(words: Tensor, columns: int, form: StoredFormat) -> Tensor:
    """Return the values of int32 words [D_out, m], which lie along a row, the first in the lowest bits, as they are kept."""
    if form.bits == 4:
        words = (words & _LOW).bitwise_left_shift_(4).bitwise_or_((words >> 4).bitwise_and_(_LOW))
    return viewed(words, torch.uint8)[:, : -(-columns * form.bits // 8)].contiguous()


def _awq_outputs(low: Tensor, high: Tensor) -> Tensor:
    """Return bytes [D_out, n] of int32 words [n, D_out / 8] whose bytes are those of the low and of the high halves of AWQ's.

    AWQ's int32 holds eight outputs, from its lowest bits 0 2 4 6 1 3 5 7 (AutoAWQ 0.2.9, packing_utils.py: AWQ_ORDER).
    """
    halves = torch.stack((low.t(), high.t()), dim=-1).view(torch.uint8).view(-1, len(low), 2, 2, 2)
    return halves.permute(0, 4, 2, 3, 1).reshape(-1, len(low))  # of the low halves outputs 0 4 1 5, of the high ones 2 6 3 7


# Computing ------------------------------------------------------------------------------------------------------------


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of the weight as `packed.Exact`. q - zero is exact in 16 bits: at most 8 bits are significant."""
    form, columns, parts = stored_format(packed.kind), packed.shape[1], packed.part_rows(rows, device, "index")
    data, scale = parts["weight"], parts["scale"].to(dtype)
    if form.bits == 4:
        data = high_first(data)[:, :columns]
    zero: Tensor | float = parts["zero"].to(dtype) if form.has_zero else float(1 << (form.bits - 1))
    groups, size = scale.shape[1], form.group or columns
    values = data.to(dtype)
    if columns == groups * size and not form.has_index:
        by_group = values.view(-1, groups, size)
        by_group.sub_(zero[..., None] if isinstance(zero, Tensor) else zero).mul_(scale[..., None])
    else:
        index = parts["index"] if form.has_index else torch.arange(columns, device=device) // size
        values.sub_(zero[:, index] if isinstance(zero, Tensor) else zero).mul_(scale[:, index])
    return values


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a weight whose values are about 0.03."""
    groups = form.groups(columns)
    scale = draw.uniform(rows, groups) * 0.01
    parts = {"weight": draw.bytes(rows, columns * form.bits // 8), "scale": scale.to(draw.scale_dtype)}
    return parts | ({"zero": draw.bytes(rows, groups) & 15} if form.has_zero else {})
