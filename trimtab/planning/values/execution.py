"""How do prompts and decode steps run, and which device memory and time does that take?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, ModuleRow
from trimtab.formats.packed import formats_of
from trimtab.formats.record import HEAD8, STACK_MULTIPLE, PackedEntry, float_dtype, packed_bytes, stored_format
from trimtab.planning.values.blocks import STAGING_SLOTS
from trimtab.planning.values.byte_sizes import Rates, added_node_bytes, step_copy_bytes
from trimtab.planning.values.pipeline import Stage, pipeline_s

MIB = 2**20
MODES = ("eager", "graph", "fused")
CAPTURED = ("graph", "fused")
# Steps are captured for these numbers of rows; fewer rows are padded.
# Constants: bench/results/cards.json and decode.json (NVIDIA H200, driver 580, torch 2.11, CUDA 13.0).
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Graphs that one batch keeps (engine/decode/decode_step.py).
MOST_GRAPHS = 16
# Attention of a captured step through the modules reads this many positions, doubled until the longest row fits.
SMALLEST_POSITIONS = 256
# Adapters that tables have room for at least (engine/batched_lora/table.py), and changes of experts in each.
ADAPTER_SLOTS, EXPERT_CHANGES = 32, 3
# Rows of the largest launch of the fused kernels.
KERNEL_ROWS = 8
# Numbers of rows with separate launch configurations of matrix-vector products; more rows use another kernel.
PRODUCT_ROWS = tuple(size for size in BUCKETS if size <= KERNEL_ROWS)
LEAST_CAPABILITY = (8, 0)
FUSED_DTYPES = ("bfloat16", "float16")

# Device code and tables of torch, cuBLAS and bitsandbytes after prompts, steps and media have run: 175 MiB after
# loading and capturing, 24 more after prompts and media, including the fused kernels and two graphs.
LIBRARY_BYTES = 168 * MIB
# trimtab's kernel modules, one for every shape of a product. Captured modules call more of torch's and cuBLAS' kernels than a fused
# step: a process took 29 MiB more than planned with 4 MiB here (Qwen3-8B on 5 GiB, H100).
KERNEL_BYTES = {"eager": 0, "graph": 40 * MIB, "fused": 16 * MIB}
# A graph's nodes in the driver's memory. The first graph also loads the code that launches graphs.
GRAPH_BYTES = {"graph": 4 * MIB, "fused": 2 * MIB}
FIRST_GRAPH_BYTES = 16 * MIB
# Scratch of products and adapters, and the buffers between the kernels of a step: 10 MiB for one row.
SCRATCH_BYTES = {"graph": 12 * MIB, "fused": 12 * MIB}
# The same for each row of a graph of more than KERNEL_ROWS rows: parts of attention and of products. An estimate from E4B's shapes
# (8 heads of 512, 32 parts: 0.5 MiB; 3 parts of 20,480 outputs: 0.2 MiB), not measured.
ROW_SCRATCH_BYTES = MIB
# cuBLAS: a workspace for each computing stream and an internal one (torch 2.11, CUDABlas.cpp: 8.1 MiB, 32 MiB on compute capability
# 9.0). Within budgets below 16 GiB they are bounded to the smaller one on every card (engine/memory/rates.py).
WORKSPACE_BYTES = 8519680
# Below such a budget memory is saved where that costs little: these workspaces, cuDNN's attention, one segment for prompts.
SMALL_BUDGET_BYTES = 16 * 2**30
# A margin for uncaptured prompts, whose caches leave holes in torch's allocator: with 36 MiB a streamed model took 4 MiB more than
# planned (bench/results/cards.json, run 3). With chunks 31 to 100 MiB of torch's memory stayed unused with it (runs 4 and 5).
FRAGMENT_BYTES = 48 * MIB
# Temporary bytes while kernels are chosen, for products and for both ends of a step (E4B's size: 23 MiB).
CHECK_BYTES = 64 * MIB
CHECKED_POSITIONS = 1100
CHECK_PIECE_VALUES = 2**20

# Seconds of a step beyond reading its bytes: per decoder layer of a fused step, per linear of captured modules, per
# kernel of an eager step. With adapters, then without.
FUSED_LAYER_S = (39e-6, 36e-6)
GRAPH_LINEAR_S = (24e-6, 21e-6)
# Each row beyond the first in a fused layer, and for each value of its attention's output. Rows beyond WIDE_ROWS cost a share
# of it (bench/results/many_rows.json). A recurrent layer: of a step, of a row. One and eight rows of five families (families.json).
ROW_LAYER_S, ROW_VALUE_S = 1.3e-6, 1.3e-9
WIDE_ROWS, WIDE_ROW_SHARE = 32, 1 / 3
STATE_LAYER_S, STATE_ROW_S = 28e-6, 6e-6
# A fused layer with packed experts beyond another: in an MLP's place, next to one, with a shared expert. Kernels decode each row's
# experts at this share of the memory's rate, on an H200 (bench/results/experts.json: 8 % off, within 16 GiB 15 %).
EXPERT_LAYER_S = {"": 0.0, "mlp": 38e-6, "shared": 13e-6}
EXPERT_RATE_SHARE = 0.31
# bitsandbytes' one-row product reads memory at this share of the rate.
GRAPH_RATE_SHARE = 0.75
EAGER_KERNELS = (19, 14)
# Seconds of a captured chunk beyond its arithmetic, per linear of the decoder: unpacking, adapters, and the kernels
# between. From one measurement (E4B, 512 tokens with an adapter: 21.8 ms on the GPU).
CHUNK_LINEAR_S = 45e-6
# The same for an uncaptured pass, with adapters and without: Python launches 2,329 kernels for E4B's 343 linears. With adapters
# 0.42 to 0.61 ms for 512 and 4,080 tokens (cards.json, runs 4, 5); without them in proportion to EAGER_KERNELS, not measured.
UNCAPTURED_LINEAR_S = (0.48e-3, 0.35e-3)
# Sizes of chunks, and the choices among them: all, a few, one. Without capture, a size costs only its inputs.
CHUNKS = (16, 64, 128, 256, 512, 1024)
CAPTURED_CHUNKS = (CHUNKS, (128, 512), (256,))
UNCAPTURED_CHUNKS = ((128, 512), (64, 256))
# The largest chunk of batch-invariant answers, whose chunks are not fitted to the time between steps.
INVARIANT_CHUNK = 512
# A streamed step's copies run at this share of the link's rate.
LINK_SHARE = 0.97


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How prompts, or decode steps, run.

    mode: one of MODES. bytes: device bytes by item. reason: why this mode. seconds: predicted, of a prompt before its first token
    or of one step. is_asked: whether the mode was explicitly requested: then it is never replaced. chunks: sizes in tokens of
    prompt chunks whose keys and values are written directly into a row's buffers, captured unless the mode is eager; () if a prompt
    has a separate cache. estimated_s: the part of `seconds` that depends on unmeasured assumptions (byte_sizes.py), or 0. Captured
    modes need keys and values of every sequence at fixed addresses in addition to the prompt's cache, logits of every graph, and
    the graphs' nodes.
    """

    mode: str
    bytes: Mapping[str, int]
    reason: str
    seconds: float
    is_asked: bool = False
    chunks: tuple[int, ...] = ()
    estimated_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model runs. head: "full" or "int8"; head_reason: why; is_head_asked: whether the request set it; else the plan
    chose it. towers: the phase of image and audio towers, None on a CPU and for a request without media. expert_slots: how many
    experts of each layer are on the device at a time, the others in host memory; 0: all are where their layer is."""

    prompt: Phase
    step: Phase
    head: str
    head_reason: str
    is_head_asked: bool = False
    towers: Phase | None = None
    expert_slots: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Predicted decode steps per second."""
        return 1 / self.step.seconds if self.step.seconds else 0.0


# Supported modes ------------------------------------------------------------------------------------------------------

CHOSEN_ON_HOST = "the experts of a token are chosen on the host"


def unsupported_reason(mode: str, anatomy: Anatomy, *, quant: str, on_cpu: bool, capability: tuple[int, int] | None) -> str | None:
    """Return why steps of this model cannot run in a mode on this device, None if they can."""
    if mode == "eager":
        return None
    if on_cpu:
        return "CUDA graphs require a GPU"
    if anatomy.capture_unsupported is not None:
        return anatomy.capture_unsupported
    on_device = groups_on_device(anatomy.dtype, capability)
    if mode == "graph" and any(row.packs_experts for row in anatomy.rows if row.stacks):
        return CHOSEN_ON_HOST
    if mode == "graph" and not on_device and any(row.stacks for row in anatomy.rows):
        return f"torch's product over experts counts the tokens of each on the host, in {anatomy.dtype} on this card"
    is_recurrent = any(layer.state_values for layer in anatomy.kv_layers)
    if mode == "graph":
        return "states of recurrent layers need the kernels of a step" if is_recurrent else None
    if anatomy.fused_unsupported is not None:
        return anatomy.fused_unsupported
    if capability is not None and capability < LEAST_CAPABILITY:
        need = ".".join(map(str, LEAST_CAPABILITY))
        return f"compute capability {capability[0]}.{capability[1]}; trimtab's kernels need {need} and more shared memory"
    if anatomy.dtype not in FUSED_DTYPES:
        return f"trimtab's kernels compute in {' or '.join(FUSED_DTYPES)}, the model in {anatomy.dtype}"
    if stored_format(quant).layout is None and not is_recurrent:  # whose captured steps only kernels compute; products stay cuBLAS'
        return f"trimtab's kernels do not read weights in {quant}"
    on_host = (row for row in anatomy.rows if row.stacks and (row.packs_experts or not on_device))
    return next((why for row in on_host if (why := _unread_experts(row)) is not None), None)


def groups_on_device(dtype: str, capability: tuple[int, int] | None) -> bool:
    """Whether torch's grouped product over unpacked experts keeps their counts on the device; else the host reads them, which no
    capture allows. Source: torch 2.11, aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda and its fallback."""
    return dtype == "bfloat16" and capability is not None and capability[0] in (9, 10) and sys.platform != "win32"


def _unread_experts(row: ModuleRow) -> str | None:
    """Return why kernels do not read a row's experts, which are then chosen on the host; None if they do."""
    shapes = [stack.shape[1:] for stack in row.stacks]
    if row.is_transposed or row.is_interleaved or any(size % STACK_MULTIPLE for shape in shapes for size in shape):
        return f"{CHOSEN_ON_HOST}: kernels do not know how their stacks lie"
    unread = (form for stack in row.stacks if (form := row.form_of(stack)) is not None and stored_format(form).layout is None)
    form = next(unread, None)
    return None if form is None else f"{CHOSEN_ON_HOST}: no kernel reads {form}"


def reads_packed(mode: str, anatomy: Anatomy, quant: str) -> bool:
    """Whether kernels multiply with the weights of a mode as they are stored; else each product dequantizes them."""
    if mode != "fused" or anatomy.dtype not in FUSED_DTYPES:
        return False
    layers = (row.stored or quant for row in anatomy.rows if row.part == "language" and row.kind == "linear" and row.quantized)
    return all(stored_format(name).layout is not None for name in {quant, *layers})


def how_computed(name: str, *, are_tables: bool, step_mode: str, is_kept: bool, dtype: str = "bfloat16") -> str:
    """Return how products with the weights of a format are computed. step_mode: "eager" on a CPU. is_kept: the decoder's are kept
    unpacked there. dtype: in which the model computes."""
    form = stored_format(name)
    rounded = "; inputs and outputs rounded to 8 bits" if form.has_rounding else ""
    if form.is_rounded(dtype):
        rounded = f"; its values rounded to {dtype}"
    if are_tables:
        return "the rows of the tokens are dequantized" + rounded
    if float_dtype(name) is not None:
        return "as unquantized weights" + rounded
    if step_mode == "fused" and form.layout is not None:
        return "steps by trimtab's kernels, packed; prompts dequantized by a kernel" + rounded
    rest = "dequantized for each product" if form.is_own else "by bitsandbytes' layers"
    return (f"the decoder's kept unpacked, others {rest}" if is_kept and form.is_dequantized else rest) + rounded


# Rows of gate and of up that no format's blocks cut.
_WHOLE_BLOCKS = (2**14, 2**14)


def formats_on_gpu(packed: Mapping[str, PackedEntry]) -> list[dict[str, Any]]:
    """Return `formats_of` packed weights, with what a GPU that has kernels computes of each; JSON-ready. Steps are eager where no
    kernel reads the experts."""
    stacked = {entry.kind for name, entry in packed.items() if ".experts." in name}
    of_experts = {name for name in stacked if stored_format(name).why_not_stacked(_WHOLE_BLOCKS) is None}
    is_read = all(stored_format(name).layout is not None for name in of_experts)
    facts: dict[str, Any] = {"step_mode": "fused" if is_read else "eager", "is_kept": False}
    found = formats_of(packed)
    for one in found:
        one["on_gpu"] = how_computed(one["name"], are_tables=one["is_table"], **facts)
        one["on_gpu"] += "; of experts the chosen ones" if one["name"] in of_experts else ""
    return found


# Bytes -----------------------------------------------------------------------------------------------------------------


def graph_count(mode: str, *, rows: int, context_tokens: int, has_adapters: bool, kv: str = "full") -> int:
    """Return how many graphs a batch of `rows` rows captures: each bucket, with adapters and without, for modules and for 8-bit
    keys and values also each number of positions that attention reads."""
    buckets = len([size for size in BUCKETS if size < rows]) + 1
    positions = 1
    if mode == "graph" or kv == "int8":
        seen = SMALLEST_POSITIONS
        while seen < context_tokens:
            seen, positions = 2 * seen, positions + 1
    return min(buckets * positions * (2 if has_adapters else 1), MOST_GRAPHS)


def graph_bytes(mode: str, anatomy: Anatomy, *, kv: str = "full") -> int:
    """Return the driver's memory for the nodes of one graph of a step."""
    return GRAPH_BYTES[mode] + added_node_bytes(anatomy.kv_layers, kv)


def check_bytes(anatomy: Anatomy, *, rows: int = KERNEL_ROWS) -> int:
    """Return the temporary bytes while kernels are chosen: two pairs of caches for each kind of attention, one in float32."""
    kinds = {(layer.kv_heads, layer.head_dim) for layer in anatomy.kv_layers if layer.kv_heads}
    values = max((rows * heads * CHECKED_POSITIONS * width for heads, width in kinds), default=0)
    return max(CHECK_BYTES, values * (4 * DTYPE_BYTES[anatomy.dtype] + 4) + 4 * CHECK_PIECE_VALUES * 8)


def expert_table_bytes(anatomy: Anatomy, rows: int) -> int:
    """Return the bytes of the tables in which steps, and passes of several prompts, find the rows' adapters on experts
    (engine/batched_lora/table.py): of three changes an adapter, numbers for each expert and eight more."""
    counts = [row.stacks[0].shape[0] for row in anatomy.rows if row.takes_lora and row.stacks]
    slots = max(ADAPTER_SLOTS, rows) + (ADAPTER_SLOTS if rows > 1 else 0)
    return len(counts) * EXPERT_CHANGES * slots * 4 * (max(counts, default=0) + 8)


def step_bytes(
    mode: str, anatomy: Anatomy, *, quant: str, rows: int, context_tokens: int, has_adapters: bool, kv: str = "full",
    is_paged: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Return the device bytes of steps by item, without keys and values.

    "kernels" and "graphs" are in the driver's memory, the others in torch's. "kv_copies": keys and values that
    attention of captured steps reads instead of 8 bits or pages; the graphs keep them. is_paged: whether rows share a
    pool of pages. Around the stack's own products (`reads_packed`) kernels and scratch are those of captured modules too.
    """
    modes = (mode, "graph") if mode == "fused" and not reads_packed(mode, anatomy, quant) else (mode,)
    counted = {"kernels": LIBRARY_BYTES + max(KERNEL_BYTES[one] for one in modes), "workspaces": WORKSPACE_BYTES}
    if mode == "eager":
        return counted
    graphs = graph_count(mode, rows=rows, context_tokens=context_tokens, has_adapters=has_adapters, kv=kv)
    sizes = [*(size for size in BUCKETS if size < rows), rows]
    kinds = 2 if has_adapters else 1
    tables = expert_table_bytes(anatomy, rows) if has_adapters and mode == "fused" else 0
    # Every graph keeps its logits in float32; the softcap's temporaries and those in the model's dtype are shared.
    logits = anatomy.vocab_size * (4 * kinds * sum(sizes) + 12 * rows)
    wide = sum(size for size in sizes if size > KERNEL_ROWS)
    copies = step_copy_bytes(
        anatomy.kv_layers, anatomy.dtype, kv, rows=rows, context_tokens=context_tokens, is_paged=is_paged,
        is_fused=mode == "fused",
    )  # fmt: skip
    return counted | ({"kv_copies": copies} if copies else {}) | {
        "workspaces": 2 * WORKSPACE_BYTES, "logits": logits,
        "scratch": max(SCRATCH_BYTES[one] for one in modes) + wide * ROW_SCRATCH_BYTES + tables,
        "graphs": FIRST_GRAPH_BYTES + graphs * graph_bytes(mode, anatomy, kv=kv),
    }  # fmt: skip


# Seconds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockWork:
    """Reads, copies and launches of one block in a step. is_layer: whether it is a decoder layer. pieces: bytes of each
    separately copied piece."""

    device_bytes: int
    link_bytes: int
    linears: int
    is_layer: bool
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Reads and launches of one step. device_bytes: weights that the device reads; link_bytes: those of them that are copied to
    it first; other_s: seconds of the CPU or a disk; tail_bytes: weights read after the last copied ones (the head). rows_s: of
    kernels, for the rows beyond the first. blocks: in the order of computing, () if unknown. slots: staging buffers."""

    device_bytes: int
    link_bytes: int
    other_s: float
    tail_bytes: int
    layers: int
    linears: int
    rows_s: float = 0.0
    blocks: tuple[BlockWork, ...] = ()
    slots: int = STAGING_SLOTS


def step_s(mode: str, work: StepWork, rates: Rates, *, link_Bps: float, has_adapters: bool) -> float:
    """Return the predicted seconds of one step: the longer of computing and copying.

    If copies take longer, they hide all computing except that after the last copied layer. If the order of the blocks
    is known, computing that the staging buffers cannot overlap is also added.
    """
    which = 0 if has_adapters else 1
    read_s = work.device_bytes / rates.device_Bps
    per_layer = FUSED_LAYER_S[which] + work.rows_s / max(work.layers, 1)
    if mode == "fused":
        overhead_s = work.layers * per_layer
        tail_s = 2 * per_layer
    elif mode == "graph":
        read_s /= GRAPH_RATE_SHARE
        overhead_s = work.linears * GRAPH_LINEAR_S[which]
        tail_s = 2 * overhead_s / max(work.layers, 1)
    else:
        overhead_s = work.linears * EAGER_KERNELS[which] * rates.launch_s
        tail_s = 2 * overhead_s / max(work.layers, 1)
    if mode in CAPTURED and work.link_bytes and work.blocks:
        rate = rates.device_Bps * (GRAPH_RATE_SHARE if mode == "graph" else 1)
        stages = [
            Stage(
                one.device_bytes / rate
                + (per_layer * one.is_layer if mode == "fused" else one.linears * GRAPH_LINEAR_S[which]),
                one.link_bytes,
                one.pieces,
            )
            for one in work.blocks
        ]  # fmt: skip
        rest_s = read_s + overhead_s - sum(stage.seconds for stage in stages)  # the head if it is a table of another block
        stages.append(Stage(max(rest_s, 0.0)))
        return pipeline_s(stages, link_Bps=link_Bps * LINK_SHARE, slots=work.slots) + work.other_s
    link_s = work.link_bytes / (link_Bps * LINK_SHARE)
    tail_s += work.tail_bytes / rates.device_Bps
    return max(read_s + overhead_s, link_s + tail_s if work.link_bytes else 0.0) + work.other_s


def rows_beyond_first(rows: int) -> float:
    """Return how many times a step's kernels take `ROW_LAYER_S` and the like for this many rows."""
    return min(rows, WIDE_ROWS) - 1 + WIDE_ROW_SHARE * max(rows - WIDE_ROWS, 0)


def prompt_launch_s(
    linears: int, skipped: int, towers: int, *, passes: int, is_captured: bool, has_adapters: bool, launch_s: float
) -> float:  # fmt: skip
    """Return the seconds of a prompt's passes: if captured, beyond arithmetic and copies; else Python's launch time,
    which hides computing and copies.

    linears: of the decoder; skipped: those that only the last pass enters; towers: linears of towers that run for this
    prompt. launch_s: one kernel of this machine.
    """
    which = 0 if has_adapters else 1
    plain_s = max(UNCAPTURED_LINEAR_S[which], EAGER_KERNELS[which] * launch_s)
    entered = passes * linears - (passes - 1) * skipped
    return entered * (CHUNK_LINEAR_S if is_captured else plain_s) + (0.0 if is_captured else towers * plain_s)


def head_bytes(anatomy: Anatomy) -> int:
    """Return the bytes of the output head that a step reads, tied to another matrix or not."""
    return sum(
        packed_bytes(row.weight.shape, HEAD8 if row.is_head8 else "none", row.weight.dtype)
        for row in anatomy.head_rows if row.weight is not None
    )  # fmt: skip
