"""What is the plan of one request on one machine?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, first_equal
from trimtab.errors import DoesNotFitError
from trimtab.formats.record import stored_format
from trimtab.planning.candidates import Candidates
from trimtab.planning.memory.activations import Use, use_of
from trimtab.planning.memory.media import NO_MEDIA, MediaMemory
from trimtab.planning.memory.towers import with_towers
from trimtab.planning.options import advised
from trimtab.planning.placing import Given
from trimtab.planning.plan.contents import Stamps
from trimtab.planning.plan.plan import Plan
from trimtab.planning.values.blocks import Block, Leaf, Machine, blocks_of, leaves_of, tied_paths
from trimtab.planning.values.byte_sizes import Rates, Weights, seconds
from trimtab.planning.values.execution import CAPTURED, FUSED_DTYPES, KERNEL_ROWS, head_bytes
from trimtab.planning.values.rows import Placement
from trimtab.request import LoadRequest

ITEM = "unpacked_weights"
# Columns after each row for a prompt's adapter (engine/batched_lora/columns.py): three for each rank of the
# layers over one input. Queries, keys and values of rank 16 take 144, and rows stay multiples of 128 bytes.
COLUMNS = 192
# Share of the unused budget: the rest is for later adapters and for memory that the plan does not count.
MOST_SHARE = 0.5
# The same for few rows on a GPU, where only prompts become faster.
FEW_ROWS_SHARE = 0.25


def unpacked_bytes(anatomy: Anatomy, columns: int = 0) -> int:
    """Return the bytes of all 4-bit linear layers of the decoder in the model's dtype, each row with this many more columns."""
    weights = [row.weight for row in anatomy.rows if row.part == "language" and row.kind == "linear" and row.quantized]
    values = [prod(one.shape) + prod(one.shape[:-1]) * columns for one in weights if one is not None]
    return sum(map(aligned, values)) * DTYPE_BYTES[anatomy.dtype]


def columns_of(plan: Plan) -> int:
    """Return the columns after each row of a plan's unpacked weights: for adapters, if prompt chunks compute the layers over
    one input in one product."""
    has_products = plan.execution.step.mode == "fused" and plan.execution_device != "cpu"
    return COLUMNS if has_products and plan.request.adapters and plan.request.dtype == "bfloat16" else 0


def aligned(count: int) -> int:
    """Return the number of values reserved for a weight in the shared memory: a multiple of 64, so that each weight starts at a
    multiple of 64 bytes."""
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


# Operations of a pass without the products, for each linear layer: with adapters, without, in units of the small operation that the
# machine's rates have (`Rates.launch_s`). A step of the demo model has 65 such layers (bench/results/cpu_predictions.json).
LINEAR_OPERATIONS = (54, 44)


def make_plan(
    request: LoadRequest,
    anatomy: Anatomy,
    *,
    adapters: Mapping[str, int],
    machine: Machine,
    rates: Rates,
    checkpoint_stamps: Stamps = (),
    adapter_stamps: Mapping[str, Stamps] | None = None,
    disk_free_bytes: int | None = None,
    head8: Anatomy | None = None,
    head_refused: str = "",
    is_advised: bool = True,
    held_bytes: int = 0,
    media: MediaMemory = NO_MEDIA,
    anatomy_of: Callable[[LoadRequest], Anatomy | None] | None = None,
    expert_bytes: Mapping[str, int] | None = None,
) -> Plan:
    """Return the placement and the execution with the least expected seconds within the request's budgets.

    adapters: name -> bytes on the execution device; expert_bytes: those of them that change experts. disk_free_bytes: of
    the spill folder, None if not known. head8: the anatomy with an 8-bit output head, for a request that leaves the head
    to the plan; head_refused: why it must stay full. is_advised: whether an error names the change that helps most, which
    needs more plans. anatomy_of: makes the anatomy of a request with another head or format, for that; None: no such
    change is tried, or only with `head8`.
    held_bytes: of adapters that stay in host memory, as a server keeps them. media: host memory of a server's images
    and audio.
    Errors: RequestError for placements that cannot be followed and executions that are unavailable, DoesNotFitError
    with the smallest sufficient budget.

    The same anatomy, request, machine and rates give the same plan.
    """
    given = Given(
        request=request, anatomy=first_equal(anatomy), adapters=adapters, machine=machine, rates=rates,
        disk_free_bytes=disk_free_bytes, head8=None if head8 is None else first_equal(head8), head_refused=head_refused,
        held_bytes=held_bytes, media=media, expert_bytes=expert_bytes or {},
    )  # fmt: skip
    try:
        plan = Candidates(given).best()
    except DoesNotFitError as exc:
        if not is_advised:
            raise
        known_of = anatomy_of or (lambda changed: given.head8 if changed.quant == request.quant else None)
        raise advised(exc, given, known_of) from None
    anatomy = given.anatomy
    shared = machine.host_available_bytes + machine.process_bytes if machine.on_cpu else None
    plan = with_unpacked(plan if machine.on_cpu else with_towers(plan, anatomy), anatomy, shared_bytes=shared)
    if machine.on_cpu:
        plan = with_cpu_seconds(plan, anatomy, use_of(plan.request, anatomy))
    return replace(plan, checkpoint_stamps=tuple(checkpoint_stamps), adapter_stamps=dict(adapter_stamps or {}))


def with_cpu_seconds(plan: Plan, anatomy: Anatomy, use: Use) -> Plan:
    """Return a plan for the CPU with the seconds of its blocks, prompt and step predicted from the CPU's rates. Attention over long
    contexts, and steps that read only some experts, are not counted."""
    rates, works, quant = plan.rates, use.works(), plan.request.quant
    launched = replace(rates, launch_s=rates.launch_s * LINEAR_OPERATIONS[0 if plan.request.adapters else 1])
    read_s = _read_s(anatomy, quant, rates, is_unpacked=ITEM in plan.gpu)

    def timed(block: Block, row: Placement) -> Placement:
        weights = Weights(
            nbytes=block.movable_bytes, flops=block.flops_per_token, leaves=len(block.leaves), row_bytes=block.row_bytes
        )
        own_s = 0.0 if block.is_table else read_s.get(block.block_path, 0.0)
        own = replace(launched, device_Bps=block.movable_bytes / own_s) if own_s else rates
        times = seconds(row.tier, row.home, weights, works[block.paid], own, pinned=False, on_cpu=True)
        return replace(row, request_s=times[0], token_s=times[1])

    rows = tuple(timed(block, row) for block, row in zip(blocks_of(anatomy, quant), plan.placements, strict=True))
    is_tied = any(row.weight is not None and row.weight.tied_to for row in anatomy.head_rows)
    head_s = head_bytes(anatomy) / _dense_Bps(anatomy.dtype, rates) if is_tied else 0.0
    prompt, step = plan.execution.prompt, plan.execution.step
    execution = replace(
        plan.execution, prompt=replace(prompt, seconds=sum(row.request_s for row in rows) + head_s),
        step=replace(step, seconds=sum(row.token_s for row in rows) + head_s + step.estimated_s),
    )  # fmt: skip
    return replace(plan, placements=rows, execution=execution)


def _read_s(anatomy: Anatomy, quant: str, rates: Rates, *, is_unpacked: bool) -> Mapping[str, float]:
    """Return block path -> the seconds of one-row products with its weights."""
    tied, is_packed = tied_paths(anatomy), anatomy.prequantized is not None
    taken: dict[str, float] = {}
    for row in anatomy.rows:
        form = next((row.form_of(one) for one in row.stacks), row.stored) or quant
        is_dequantized = row.quantized and stored_format(form).is_dequantized
        for leaf in leaves_of(row, quant, tied, prequantized=is_packed):
            own_Bps = rates.host_matmul_Bps if is_dequantized else rates.host_int8_Bps
            dense = is_unpacked and row.part == "language" and is_dequantized
            taken[row.block] = taken.get(row.block, 0.0) + _product_s(leaf, anatomy.dtype, rates, own_Bps, is_dense=dense)
    return taken


def _product_s(leaf: Leaf, dtype: str, rates: Rates, own_Bps: float, *, is_dense: bool) -> float:
    if is_dense or len(leaf.parts) == 1:
        return leaf.dense_bytes / _dense_Bps(dtype, rates)
    return leaf.nbytes / own_Bps + stored_format(leaf.kind).layer_operations * rates.launch_s


def _dense_Bps(dtype: str, rates: Rates) -> float:
    return rates.host_float32_Bps if dtype == "float32" else rates.host_16bit_Bps
