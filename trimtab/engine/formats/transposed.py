"""The values of AWQ and GPTQ files in the layout of grouped.py: [D_in, D_out], packed along D_out (AWQ) or D_in (GPTQ)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.engine.formats.packed import LOW_HALVES, in_words, low_first, refused, viewed
from trimtab.formats.record import PackedEntry, StoredFormat

# 1 in each value of a word of GPTQ's first layout (GPTQModel, utils/model.py: convert_gptq_v1_to_v2_format).
GPTQ_ONE = {4: 0x11111111, 8: 0x01010101}


def parts_of(entry: PackedEntry, parts: Mapping[str, Tensor], form: StoredFormat, layout: str) -> dict[str, Tensor]:
    """Return the parts of a weight. layout: awq, gptq or gptq_v2. Errors: CheckpointError for an order that fits no groups."""
    rows, columns = entry.shape
    if layout == "awq":
        even, odd = parts["weight"][0::2], parts["weight"][1::2]  # two inputs of a byte
        low, high = (even & LOW_HALVES) << 4 | odd & LOW_HALVES, even & ~LOW_HALVES | odd >> 4 & LOW_HALVES
        data, zero = _awq_outputs(low, high), parts["qzeros"]
        zero = _awq_outputs(zero & LOW_HALVES, zero >> 4 & LOW_HALVES)
    else:
        data = in_words(parts["weight"].t(), columns, form.bits)
        # gptq stores one less than each zero point, subtracted from whole words: a zero point of 0 borrows from its neighbour.
        one = int(GPTQ_ONE[form.bits]) if layout == "gptq" else 0
        stored = viewed(parts["qzeros"] + one, torch.uint8)
        zero = (low_first(stored) if form.bits == 4 else stored).t()[:rows].contiguous()
    found = {"weight": data, "scale": parts["scales"].t().contiguous(), "zero": zero}
    index = parts.get("g_idx")
    if index is None:
        return found
    if form.has_index:
        found["index"] = index
    elif not torch.equal(index.long(), torch.arange(columns, device=index.device) // (form.group or columns)):
        raise refused(entry, "has inputs in another order (g_idx), but config.json says desc_act false")
    return found


def _awq_outputs(low: Tensor, high: Tensor) -> Tensor:
    """Return bytes [D_out, n] of int32 words [n, D_out / 8] whose bytes are those of the low and of the high halves of AWQ's.

    AWQ's int32 holds eight outputs, from its lowest bits 0 2 4 6 1 3 5 7 (AutoAWQ 0.2.9, packing_utils.py: AWQ_ORDER).
    """
    halves = torch.stack((low.t(), high.t()), dim=-1).view(torch.uint8).view(-1, len(low), 2, 2, 2)
    return halves.permute(0, 4, 2, 3, 1).reshape(-1, len(low))  # of the low halves outputs 0 4 1 5, of the high ones 2 6 3 7
