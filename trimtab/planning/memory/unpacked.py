"""Whether a plan keeps the decoder's 4-bit weights unpacked as well as packed, and the bytes of that.

A step of one row reads the packed weights: fewer bytes, so faster. A prompt chunk, and a step of more rows than the
matrix-vector kernels support, multiply with weights in the model's dtype, which every pass unpacks. On an H200 that is
2.2 of the 16.5 ms of a prompt of 512 tokens, and most of a step of 32 rows (bench/results/many_rows.json). If enough of
the budget is left, the plan keeps the unpacked form permanently; the bits are the same. It may use half of the rest for
many rows, and a quarter for few rows, where only prompts become faster.

On a CPU the packed weights are never faster: in every pass, even of one row, bitsandbytes unpacks a weight, writes it
to memory and reads it again. There the plan keeps the unpacked form for one row too.

Pure: sizes of the model and of the plan.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.formats.record import stored_format
from trimtab.planning.plan.plan import Plan
from trimtab.planning.values.execution import CAPTURED, FUSED_DTYPES, KERNEL_ROWS

ITEM = "unpacked_weights"
# Columns after each row for a prompt's adapter (engine/batched_lora/columns.py): three for each rank of the
# layers over one input. Queries, keys and values of rank 16 take 144, and rows stay multiples of 128 bytes.
COLUMNS = 192
# Share of the unused budget: the rest is for later adapters and for memory that the plan does not count.
MOST_SHARE = 0.5
# The same for few rows on a GPU, where only prompts become faster.
FEW_ROWS_SHARE = 0.25


def unpacked_bytes(anatomy: Anatomy, columns: int = 0) -> int:
    """Return the bytes of all 4-bit linear layers of the decoder in the model's dtype, each row with this many more
    columns.
    """
    weights = [row.weight for row in anatomy.rows if row.part == "language" and row.kind == "linear" and row.quantized]
    values = [prod(one.shape) + prod(one.shape[:-1]) * columns for one in weights if one is not None]
    return sum(map(aligned, values)) * DTYPE_BYTES[anatomy.dtype]


def columns_of(plan: Plan) -> int:
    """Return the columns after each row of a plan's unpacked weights: for adapters, if prompt chunks compute the layers
    over one input in one product.
    """
    has_products = plan.execution.step.mode == "fused" and plan.execution_device != "cpu"
    return COLUMNS if has_products and plan.request.adapters and plan.request.dtype == "bfloat16" else 0


def aligned(count: int) -> int:
    """Return the number of values reserved for a weight in the shared memory: a multiple of 64, so that each weight
    starts at a multiple of 64 bytes.
    """
    return -(-count // 64) * 64


def with_unpacked(plan: Plan, anatomy: Anatomy, *, shared_bytes: int | None = None) -> Plan:
    """Return the plan with unpacked weights counted if they help and fit, else unchanged.

    shared_bytes: of the memory that device and host share on a CPU, None on a GPU.
    """
    share = _share_on_gpu(plan) if shared_bytes is None else MOST_SHARE
    # On a GPU only products that kernels compute otherwise read the copy.
    form = stored_format(plan.request.quant)
    is_read = form.layout is not None and not form.has_rounding if shared_bytes is None else form.is_dequantized
    if (
        not share or not is_read
        or any(row.part in ("language", "head") and row.tier != "resident" for row in plan.placements)
    ):  # fmt: skip
        return plan
    left = plan.gpu_budget_bytes - plan.gpu_needed_bytes
    if shared_bytes is not None:
        left = min(left, shared_bytes - plan.gpu_needed_bytes - plan.host_peak_bytes)
    count = unpacked_bytes(anatomy, columns_of(plan))
    if not count or count > share * left:
        return plan
    return replace(
        plan, gpu={**plan.gpu, ITEM: count}, gpu_peak_bytes=plan.gpu_peak_bytes + count,
        gpu_load_peak_bytes=plan.gpu_load_peak_bytes + count,
    )  # fmt: skip


def _share_on_gpu(plan: Plan) -> float:
    """Return the share of the unused budget that the copy may take: 0 if nothing would read it."""
    request = plan.request
    if plan.execution.step.mode not in CAPTURED or request.dtype not in FUSED_DTYPES:
        return 0.0
    if request.batch > KERNEL_ROWS:
        return MOST_SHARE
    return FEW_ROWS_SHARE if plan.execution.prompt.mode == "graph" else 0.0
