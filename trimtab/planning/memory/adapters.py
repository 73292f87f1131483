"""How much memory do adapters take in a plan other than their own bytes?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from trimtab.adapters.file import TENSORS_NAME
from trimtab.adapters.match import AdapterSpec
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.planning.memory.activations import needs_of, use_of
from trimtab.planning.memory.prompts import has_room, prompt_bytes
from trimtab.planning.plan.plan import Plan
from trimtab.planning.values.byte_sizes import HELD_OBJECT_BYTES
from trimtab.planning.values.execution import CAPTURED, step_bytes

# Captured prompts read adapters of one layout from one buffer; this many buffers are kept.
MOST_LAYOUTS = 2


def head_change(specs: Mapping[str, AdapterSpec], anatomy: Anatomy) -> str:
    """Return the adapter that changes the output head, which must then stay full; "" if none does."""
    heads = {row.module_path for row in anatomy.rows if row.part == "head"}
    weights = {row.weight.tensor_path: row.weight for row in anatomy.rows if row.part == "head" and row.weight}
    owners = {weight.tied_to or weight.copy_of for weight in weights.values()}
    tied = {owner.removesuffix(".weight") for owner in owners if owner}
    tied |= {row.module_path for row in anatomy.rows for tensor in row.tensors if tensor.tied_to and tensor.tied_to in weights}
    for name, spec in specs.items():
        for target in spec.targets:
            if target.module_path in heads or (target.module_path in tied and target.kind == "saved"):
                return f"adapter {name} changes {target.module_path}"
    return ""


def held_bytes(folders: Iterable[str | os.PathLike[str]]) -> int:
    """Return the most host memory of the adapters of these folders in a server; one folder counts once."""
    files = {os.path.realpath(Path(folder) / TENSORS_NAME) for folder in folders}
    return sum(os.stat(file).st_size + HELD_OBJECT_BYTES for file in files)


def copies_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of captured prompts' copies of adapters of these sizes; adapters of one size mostly share a layout."""
    return sum(sorted(set(sizes))[-MOST_LAYOUTS:])


def first_adapter_bytes(plan: Plan, anatomy: Anatomy) -> int:
    """Return the device bytes that adapters need in addition to their own, if the plan has none; 0 if it counts them. A plan
    without adapters counts no scratch memory for them: it is subtracted from the free budget when the first one is loaded."""
    request, step = plan.request, plan.execution.step
    if request.adapters:
        return 0
    use = use_of(request, anatomy, answer_tokens=plan.answer_tokens)
    chunks, quant = plan.execution.prompt.chunks, request.quant
    in_place = has_room(request.batch, plan.gpu_budget_bytes)
    is_shared = plan.execution.prompt.mode in CAPTURED and in_place
    totals = []
    for has_adapters in (True, False):
        needs = needs_of(
            anatomy, use, quant=quant, has_adapters=has_adapters, has_rows=step.mode in CAPTURED and bool(step.bytes),
            chunk_tokens=max(chunks, default=0), has_room=is_shared, in_place=in_place,
        )  # fmt: skip
        total = needs.kv_cache_bytes + needs.activation_bytes
        if step.bytes:
            counted = step_bytes(
                step.mode, anatomy, quant=quant, rows=use.batch, context_tokens=use.context_tokens, has_adapters=has_adapters,
                kv=use.kv, is_paged=use.pool_tokens is not None,
            )  # fmt: skip
            total += sum(counted.values())
        if plan.execution.prompt.mode in CAPTURED:
            total += sum(prompt_bytes(anatomy, use, chunks, quant=quant, has_adapters=has_adapters, has_room=is_shared).values())
        totals.append(total)
    return max(totals[0] - totals[1], 0)
