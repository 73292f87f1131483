"""Do the towers of a plan run as CUDA graphs, and how much device memory does that take?"""

from __future__ import annotations

from dataclasses import replace

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.planning.memory.activations import FLOAT32_BYTES, Use, needs_of, patches_of, use_of, widths_of
from trimtab.planning.memory.prompts import ADAPTER_KERNELS, KERNEL_BYTES, PLAIN_KERNELS, QUANTIZED_KERNELS
from trimtab.planning.plan.plan import Plan
from trimtab.planning.values.execution import CAPTURED, Phase

GRAPHS, BUFFERS, POOL = "tower_graphs", "tower_buffers", "tower_activations"
PARTS = ("vision", "audio", "connector")
# Shapes of each tower whose graphs are kept.
SHAPES = 4
# Kernels of a layer in addition to its linears: norms, rotation, attention, convolutions, gates; two for each linear
# that is clipped.
LAYER_KERNELS, CLIP_KERNELS = 60, 2
# Copies of the inputs and outputs of each layer.
COPY_KERNELS = 2
# Further inputs of a layer, in float32 and for each position: rotary embeddings of the largest heads.
ROTATION_VALUES = 256
# Share of the unused budget: the rest is for later adapters and for memory that the plan does not count.
MOST_SHARE = 0.5


def tower_bytes(anatomy: Anatomy, use: Use, *, quant: str, has_adapters: bool) -> dict[str, int]:
    """Return the device bytes of captured towers by item. The activations are those of a whole pass: of one layer, in the pool of
    the graphs, and the tensors between two layers. None of them is in the prompts' shared memory, where their graphs may write.
    """
    needs = needs_of(anatomy, use, quant=quant, has_adapters=has_adapters).phases
    pool = max((needs[name][1] for name in ("pictures", "sound") if name in needs), default=0)
    return {
        GRAPHS: SHAPES * kernels_of(anatomy, has_adapters=has_adapters) * KERNEL_BYTES,
        BUFFERS: SHAPES * _buffer_bytes(anatomy, use, quant), POOL: pool,
    }  # fmt: skip


def kernels_of(anatomy: Anatomy, *, has_adapters: bool) -> int:
    """Return the approximate number of kernels of a pass through the layers of all towers."""
    layers, total = set(), 0
    for row in anatomy.rows:
        if row.part not in ("vision", "audio") or not row.block.rpartition(".")[2].isdecimal():
            continue
        layers.add(row.block)
        if row.kind == "linear":
            total += (QUANTIZED_KERNELS if row.quantized else PLAIN_KERNELS) + CLIP_KERNELS
            total += ADAPTER_KERNELS if has_adapters else 0
    return total + (LAYER_KERNELS + COPY_KERNELS) * len(layers)


def _buffer_bytes(anatomy: Anatomy, use: Use, quant: str) -> int:
    """Return the buffers of one shape of each tower."""
    width, total = DTYPE_BYTES[anatomy.dtype], 0
    if use.patches:
        hidden = widths_of(anatomy, "vision", quant=quant).hidden
        mask = use.patches * patches_of(anatomy.model_type)[0] * width
        total += use.patches * (2 * hidden * width + ROTATION_VALUES * FLOAT32_BYTES) + mask
    if use.sound_s:
        hidden = widths_of(anatomy, "audio", quant=quant).hidden
        # Padded by at most half; plus a mask of a few neighbours.
        total += 3 * use.sound_tokens * (2 * hidden * width + ROTATION_VALUES * FLOAT32_BYTES) // 2
    return total


def with_towers(plan: Plan, anatomy: Anatomy) -> Plan:
    """Return the plan for a GPU with the mode and bytes of its towers; unchanged for a request without media."""
    use = use_of(plan.request, anatomy, answer_tokens=plan.answer_tokens)
    if not use.patches and not use.sound_s:
        return plan
    counted = tower_bytes(anatomy, use, quant=plan.request.quant, has_adapters=bool(plan.request.adapters))
    seconds = sum(row.request_s for row in plan.placements if row.part in PARTS)
    reason = _why_not(plan, sum(counted.values()))
    towers = Phase(
        mode="eager" if reason else "graph", bytes={} if reason else counted, seconds=seconds,
        reason=reason or f"captured layer by layer, {SHAPES} shapes of each tower",
    )  # fmt: skip
    plan = replace(plan, execution=replace(plan.execution, towers=towers))
    if reason:
        return plan
    return replace(plan, gpu={**plan.gpu, **counted}, gpu_peak_bytes=plan.gpu_peak_bytes + counted[BUFFERS] + counted[POOL])


def _why_not(plan: Plan, needed: int) -> str:
    """Return why towers are not captured, "" if they are."""
    if plan.execution.prompt.mode not in CAPTURED:
        return "prompts are not captured"
    rows_elsewhere = [row for row in plan.placements if row.part in PARTS and row.tier != "resident"]
    if rows_elsewhere:
        return f"{rows_elsewhere[0].block_path} is in tier {rows_elsewhere[0].tier}"
    left = int(MOST_SHARE * (plan.gpu_budget_bytes - plan.gpu_needed_bytes))
    if needed > left:
        return f"captured towers need {needed / 2**20:.0f} MiB, {max(left, 0) / 2**20:.0f} MiB of the budget may be used"
    return ""
