"""Whether a GPU can run the kernel of an 8-bit output head, and the seconds of a step if it cannot.

The kernel (engine/formats/int8_head.py) computes up to KERNEL_ROWS rows in bfloat16 from compute capability 8.0. torch
computes all other cases: it converts the 8 bits to float32, one chunk at a time, which takes longer than the full head.

Not covered: heads that the kernel refuses for their width or bias, which only loading knows.

Pure: sizes of the model and of the plan.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.formats.record import HEAD8, packed_bytes
from trimtab.planning.plan.plan import Plan
from trimtab.planning.values.byte_sizes import Rates
from trimtab.planning.values.execution import KERNEL_ROWS, LEAST_CAPABILITY, head_rows

KERNEL_DTYPE = "bfloat16"
# Rows of a step -> seconds of torch's product with 8 bits, as a multiple of the full head's in bfloat16: E4B on an H200
# (bench/results/head8.json). More rows take at least as long. Other cards take the multiple as an estimate.
TORCH_MULTIPLES = {1: 10.4, 2: 13.5, 4: 14.1, 8: 17.9}


def why_no_kernel(dtype: str, capability: tuple[int, int] | None) -> str:
    """Return why a GPU cannot run the kernel for a model of this dtype, "" if it can or its capability is not known."""
    if capability is not None and capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        return f"its kernel needs compute capability {need}, the card has {have}"
    if dtype != KERNEL_DTYPE:
        return f"its kernel computes in {KERNEL_DTYPE}, the model in {dtype}"
    return ""


def torch_head_s(anatomy: Anatomy, rates: Rates, *, rows: int) -> float:
    """Return the predicted seconds of one step's 8-bit head in torch, in addition to reading its bytes once."""
    weights = [row.weight for row in head_rows(anatomy) if row.weight is not None]
    full_bytes = sum(prod(weight.shape) * DTYPE_BYTES[KERNEL_DTYPE] for weight in weights)
    small_bytes = sum(packed_bytes(weight.shape, HEAD8, weight.dtype) for weight in weights)
    multiple = max(found for count, found in TORCH_MULTIPLES.items() if count <= max(rows, 1))
    return (full_bytes * multiple - small_bytes) / rates.device_Bps


def with_head_cost(plan: Plan, anatomy: Anatomy, *, capability: tuple[int, int] | None) -> Plan:
    """Return the plan of an 8-bit head on a GPU with the seconds that torch adds if the kernel does not run: to every
    step, and to a prompt, of which only the last token enters the head.
    """
    step, prompt = plan.execution.step, plan.execution.prompt
    no_kernel, rows = why_no_kernel(anatomy.dtype, capability), plan.request.batch
    if no_kernel or rows > KERNEL_ROWS:
        step = replace(step, seconds=step.seconds + torch_head_s(anatomy, plan.rates, rows=rows))
    if no_kernel:
        prompt = replace(prompt, seconds=prompt.seconds + torch_head_s(anatomy, plan.rates, rows=1))
    return replace(plan, execution=replace(plan.execution, step=step, prompt=prompt))
