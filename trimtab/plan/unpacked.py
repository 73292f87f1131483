"""Whether a plan keeps the decoder's 4-bit weights unpacked as well as packed, and the bytes of that.

A step of one row reads the packed weights: fewer bytes, so faster. A chunk of a prompt, and a step of more rows than the
matrix-vector kernels take, multiply with weights in the model's own type, which are unpacked in every pass: on an H200 that is 2.2
of the 16.5 ms of a prompt of 512 tokens, and most of a step of 32 rows (bench/results/many_rows.json). Where several rows are
planned and the budget leaves room, the plan keeps that form, the same bits, for good.

Pure: sizes of the model and of the plan.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.plan.execution import CAPTURED, FUSED_DTYPES, FUSED_QUANTS, KERNEL_ROWS
from trimtab.plan.plan import Plan

ITEM = "unpacked_weights"
# Of what a plan leaves over: the rest is for adapters that come later and for what nobody has counted.
MOST_SHARE = 0.5


def unpacked_bytes(anatomy: Anatomy) -> int:
    """Return the bytes of all 4-bit linear layers of the decoder in the model's own type."""
    weights = [row.weight for row in anatomy.rows if row.part == "language" and row.kind == "linear" and row.quantized]
    return sum(prod(weight.shape) for weight in weights if weight is not None) * DTYPE_BYTES[anatomy.dtype]


def with_unpacked(plan: Plan, anatomy: Anatomy) -> Plan:
    """Return the plan with unpacked weights counted where they pay and fit, else as it is."""
    request = plan.request
    if (
        request.batch <= KERNEL_ROWS or plan.execution.step.mode not in CAPTURED or request.quant not in FUSED_QUANTS
        or request.dtype not in FUSED_DTYPES or plan.execution_device == "cpu"
        or any(row.part in ("language", "head") and row.tier != "resident" for row in plan.placements)
    ):  # fmt: skip
        return plan
    count = unpacked_bytes(anatomy)
    if not count or count > MOST_SHARE * (plan.gpu_budget_bytes - plan.gpu_needed_bytes):
        return plan
    return replace(
        plan, gpu={**plan.gpu, ITEM: count}, gpu_peak_bytes=plan.gpu_peak_bytes + count,
        gpu_load_peak_bytes=plan.gpu_load_peak_bytes + count,
    )  # fmt: skip
