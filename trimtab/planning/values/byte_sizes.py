"""How many bytes do weights, keys and values take, how long does a block take in each tier, and which type does a card get?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from trimtab.checkpoint.anatomy import DTYPE_BYTES, KVLayer
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.checkpoint.anatomy import Anatomy
    from trimtab.request import LoadRequest

# An 8-bit head (engine/formats/int8_head.py) is used in float32 in chunks of this many weights.
HEAD_CHUNK_VALUES = 4 * 2**20
# Preparing an adapter uses this many values of a weight at a time (engine/lora/base_values.py).
ADAPTER_PIECE_VALUES = 2 * 2**20
# Host memory of an adapter in addition to its tensors: names, shapes and targets. Measured: 0.12 MiB for 74 modules.
HELD_OBJECT_BYTES = 2**17
# One warp reads 128 bytes at a time and bitsandbytes loads 16-byte vectors: parts of a block buffer start at multiples
# of it.
ALIGN_BYTES = 256

# torch c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kMinLargeAlloc, kRoundLarge.
ALLOCATION_BYTES = 512
SMALL_BYTES = 2**20
LARGE_BYTES = 10 * 2**20
SEGMENT_BYTES = 2 * 2**20
# Memory that torch reserves beyond what it has given out: a T4 with E2B NF4 reserved 2.9 % more. A captured model has 80 MiB and
# more of it after loading, for every size (`shares_mib` in bench/results/cards.json). `fragments` counts the rest.
RESERVE_MIN_BYTES = 64 * 2**20
RESERVE_PERCENT = 3


def round_up(byte_count: int, step: int) -> int:
    return -(-byte_count // step) * step


def buffer_bytes(parts: Mapping[str, int]) -> int:
    """Return the bytes of the parts inside the contiguous buffer of a streamed block."""
    return sum(round_up(nbytes, ALIGN_BYTES) for nbytes in parts.values())


def allocated_bytes(byte_count: int) -> int:
    """Return the bytes that torch's CUDA allocator counts for one tensor (torch.cuda.memory_allocated).

    Sizes are rounded to 512 B; from 10 MiB on a tensor gets its own segment in steps of 2 MiB, whose rest is split off
    only if it exceeds 1 MiB. The rest of a shared 20 MiB segment depends on the order of calls and is not modelled.
    """
    if byte_count <= 0:
        return 0
    size = round_up(byte_count, ALLOCATION_BYTES)
    if size < LARGE_BYTES:
        return size
    segment = round_up(size, SEGMENT_BYTES)
    return segment if segment - size <= SMALL_BYTES else size


def allocator_reserve_bytes(peak_bytes: int) -> int:
    """Return the bytes that torch reserves beyond the peak in use; part of the budget, not of the peak."""
    return max(RESERVE_MIN_BYTES, peak_bytes * RESERVE_PERCENT // 100)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast the machine moves and computes, measured (`engine/memory/rates.py`) or assumed.

    *_Bps: bytes per second: pinned and pageable host memory to the execution device, its own memory read, host memory
    copied, the spill disk read, weights of a one-row matrix product on the CPU in NF4 (host_matmul_Bps) and in other forms.
    *_flops: multiply and add operations per second of a product with many rows. launch_s: one kernel, on a CPU one small
    operation of a layer; transfer_s: one copy started and waited for; disk_access_s: one small read. The defaults are an old
    consumer machine (PCIe 3 x16, SATA SSD, T4-class card).
    """

    pinned_h2d_Bps: float = 12e9
    pageable_h2d_Bps: float = 5e9
    device_Bps: float = 250e9
    host_Bps: float = 10e9
    disk_Bps: float = 0.5e9
    host_matmul_Bps: float = 1.5e9
    host_16bit_Bps: float = 5e9
    host_float32_Bps: float = 8e9
    host_int8_Bps: float = 0.7e9
    host_flops: float = 1e11
    device_flops: float = 2e13
    launch_s: float = 1e-5
    transfer_s: float = 3e-5
    disk_access_s: float = 1e-4

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if not value > 0:
                raise RequestError("must be above zero", field=f"rates.{name}", value=value)

    def copy_Bps(self, *, pinned: bool, on_cpu: bool) -> float:
        """Return the rate from host memory to the execution device."""
        if on_cpu:
            return self.host_Bps
        return self.pinned_h2d_Bps if pinned else self.pageable_h2d_Bps


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one block in a request: its rows in the prompt phase and in one decode step.

    passes: how often its weights are needed in the prompt phase (chunks of the prompt, or one for a tower).
    """

    passes: int
    prompt_rows: int
    step_rows: int


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The inputs of a block's time: packed bytes, multiply-adds per row, kernels per pass; row bytes of a table; bytes written
    and read again if weights are converted to a wider dtype."""

    nbytes: int
    flops: int
    leaves: int
    row_bytes: int = 0
    widened_bytes: int = 0


def seconds(
    tier: str, home: str, weights: Weights, work: Work, rates: Rates, *, pinned: bool, on_cpu: bool,
    step_launch_s: float | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Return (seconds per request, seconds per decode step) that a block costs in a tier.

    A copied block costs the longer of its copy and its computation; a gathered table costs the requested rows. step_launch_s: of
    one kernel of a decode step, if it differs from the rates (a captured step). The seconds come from measured rates: they compare
    placements and do not predict a speed.
    """
    copy_Bps = rates.copy_Bps(pinned=pinned, on_cpu=on_cpu)
    if weights.row_bytes:
        rows_s = [_rows_s(tier, home, weights, rows, rates, copy_Bps) for rows in (work.prompt_rows, work.step_rows)]
        return work.passes * rates.launch_s + rows_s[0], (rates.launch_s + rows_s[1] if work.step_rows else 0.0)
    stepping = rates if step_launch_s is None else replace(rates, launch_s=max(step_launch_s, 1e-9))
    step = _pass_s(tier, weights, work.step_rows, stepping, copy_Bps) if work.step_rows else 0.0
    rows = ceil(work.prompt_rows / work.passes) if work.passes else 0
    return work.passes * _pass_s(tier, weights, rows, rates, copy_Bps), step


def unhidden_s(weights: Weights, work: Work, rates: Rates, *, pinned: bool) -> float:
    """Return the seconds that a block copied to a GPU adds to a prompt if copies and computing do not overlap: the shorter of
    both, in each pass."""
    if not work.passes:
        return 0.0
    device_s = _pass_s("resident", weights, ceil(work.prompt_rows / work.passes), rates, 1.0)
    copied_s = rates.transfer_s + weights.nbytes / rates.copy_Bps(pinned=pinned, on_cpu=False)
    return work.passes * min(device_s, copied_s)


def _rows_s(tier: str, home: str, weights: Weights, rows: int, rates: Rates, copy_Bps: float) -> float:
    nbytes = rows * weights.row_bytes
    if tier == "resident" or not rows:
        return nbytes / rates.device_Bps
    fetched = rates.transfer_s + nbytes / copy_Bps
    return fetched + (rows * rates.disk_access_s + nbytes / rates.disk_Bps if home == "file" else 0.0)


def _pass_s(tier: str, weights: Weights, rows: int, rates: Rates, copy_Bps: float) -> float:
    device_s = max((weights.nbytes + weights.widened_bytes) / rates.device_Bps, rows * weights.flops / rates.device_flops)
    device_s += weights.leaves * rates.launch_s
    if tier == "resident" or not weights.nbytes:
        return device_s
    if tier == "host":
        host_s = max(weights.nbytes / rates.host_matmul_Bps, rows * weights.flops / rates.host_flops)
        return max(device_s, host_s + 2 * weights.leaves * rates.transfer_s)
    copied_s = rates.transfer_s + weights.nbytes / copy_Bps
    if tier == "disk":
        copied_s = max(copied_s, weights.nbytes / rates.disk_Bps) + rates.disk_access_s
    return max(device_s, copied_s)


# bf16 arithmetic begins with compute capability 8.0 (CUDA C++ Programming Guide, arithmetic instructions).
LEAST_BF16 = (8, 0)
# Prefixes of model_type.
BEYOND_FLOAT16 = ("gemma",)


# The start of the reason of a requested type.
ASKED = "requested"


def reason_of(dtype: str, capability: tuple[int, int] | None, model_type: str) -> str:
    """Return the cost of a requested type on a device, "" if there is none. model_type: of the model's config."""
    if dtype == "float16" and model_type.startswith(BEYOND_FLOAT16):
        return f"{ASKED}; activations of this family ({model_type}) exceed float16, and loading does not measure a requested type"
    if dtype != "bfloat16" or capability is None or capability >= LEAST_BF16:
        return ""
    return f"{ASKED}; bfloat16 is emulated on compute capability {capability[0]}.{capability[1]}"


def was_chosen(dtype_reason: str) -> bool:
    """Whether the plan chose the type for this reason, without a request."""
    return bool(dtype_reason) and not dtype_reason.startswith(ASKED)


def keeps_16bit(dtype: str, dtype_reason: str) -> bool:
    """Whether unquantized weights stay in 16 bits in memory while the model computes in float32: only if the plan chose
    float32. A request for float32 gets float32 weights, which take twice the memory and need no cast at each use."""
    return dtype == "float32" and was_chosen(dtype_reason)


def choose_dtype(model_type: str, capability: tuple[int, int] | None) -> tuple[str, str]:
    """Return the type in which a model computes on a device, and why it is not bfloat16 ("" if it is). capability: compute
    capability; None for a CPU and for an unknown card. float32 below 8.0 if a family's activations are known to exceed float16:
    Gemma 3 (github.com/huggingface/transformers/issues/36822) and 4 (github.com/unslothai/unsloth/pull/5092,
    github.com/huggingface/transformers/pull/46277)."""
    if capability is None or capability >= LEAST_BF16:
        return "bfloat16", ""
    emulated = f"bfloat16 is emulated on compute capability {capability[0]}.{capability[1]}"
    if model_type.startswith(BEYOND_FLOAT16):
        return "float32", f"{emulated}, and activations of this family ({model_type}) exceed float16"
    return "float16", f"{emulated}; activations are measured while loading"


# Keys and values ------------------------------------------------------------------------------------------------------

# Bytes of the scale of one token's keys or values of one head, float32.
SCALE_BYTES = 4
# Mean KL of next-token distributions, 8 bits against full keys and values, over the demo's prompts, the largest of its adapters and
# formats (bench/results/kv8.json).
KV8_KL = 6.3e-4
# Kernels of one layer's step: magnitudes, scale, division, rounding and joining of keys and values, writing, converting back:
# counted in the code, each as long as a small kernel in a graph. Not measured: a plan calls it an estimate (`Phase.estimated_s`).
LAYER_KERNELS = 24
KERNEL_S = 1.5e-6
# A node of a graph in the driver's memory: six graphs of E4B's prompts took 42 MiB, 1.46 KiB for each counted kernel (`captured` in
# bench/results/cards.json, run 9). Not measured for those here.
NODE_BYTES = 3 * 2**9
# Temporary copies while a chunk's keys are rounded: their values in float32, divided, and rounded.
ROUNDING_BYTES = 12


def position_bytes(layer: KVLayer, dtype: str, kv: str) -> int:
    """Return the bytes of one position's keys of a layer, or of its values."""
    each = layer.head_dim + SCALE_BYTES if kv == "int8" else layer.head_dim * DTYPE_BYTES[dtype]
    return layer.kv_heads * each


def copy_bytes(layers: Sequence[KVLayer], dtype: str, kv: str, *, rows: int, context_tokens: int, new_tokens: int) -> int:
    """Return the temporary bytes of reading 8-bit keys and values: those of one layer in the model's dtype, those that later
    layers read too, and the rounding of `new_tokens` of each row; 0 for full ones."""
    if kv != "int8":
        return 0
    kept = {layer.shares for layer in layers if layer.shares is not None}
    once = lasting = rounded = 0
    for layer in layers:
        if layer.shares is not None:
            continue
        places = context_tokens if layer.window is None else min(layer.window, context_tokens)
        # A chunk reads the sliding-window buffer and its own keys.
        read_places = places if layer.window is None or new_tokens == 1 else places + new_tokens
        read = 2 * rows * read_places * position_bytes(layer, dtype, "full")
        rounded = max(rounded, rows * new_tokens * layer.kv_heads * layer.head_dim * ROUNDING_BYTES)
        if layer.layer in kept:
            lasting += read
        else:
            once = max(once, read)
    return once + lasting + rounded


def paged_copy_bytes(
    layers: Sequence[KVLayer], dtype: str, *, rows: int, context_tokens: int, kv: str = "full"
) -> int:  # fmt: skip
    """Return the temporary bytes of a contiguous copy of a layer's pages, for torch's attention: keys and values of all
    positions of `rows` rows."""
    full = [position_bytes(layer, dtype, kv) for layer in layers if layer.shares is None and layer.window is None]
    return 2 * rows * context_tokens * max(full, default=0)


def step_copy_bytes(
    layers: Sequence[KVLayer], dtype: str, kv: str, *, rows: int, context_tokens: int, is_paged: bool, is_fused: bool
) -> int:  # fmt: skip
    """Return the bytes of a step's copies of keys and values, for rows with full contexts: contiguous pages if no kernel reads
    them in place (`is_fused`: the fused kernels do, in full precision), and 8 bits in the model's dtype."""
    copies = is_paged and not (is_fused and kv == "full")
    paged = paged_copy_bytes(layers, dtype, rows=rows, context_tokens=context_tokens, kv=kv) if copies else 0
    return paged + copy_bytes(layers, dtype, kv, rows=rows, context_tokens=context_tokens, new_tokens=1)


def added_node_bytes(layers: Sequence[KVLayer], kv: str) -> int:
    """Return the driver's memory for the kernels that 8 bits add to a graph of a step."""
    return sum(layer.shares is None for layer in layers) * LAYER_KERNELS * NODE_BYTES if kv == "int8" else 0


def moved_bytes(layers: Sequence[KVLayer], dtype: str, *, rows: int, context_tokens: int) -> int:
    """Return the bytes moved to convert 8-bit keys and values of full contexts for attention: they are read, and written in the
    model's dtype. Attention's own reads are those of full ones."""
    return sum(
        2 * rows * min(layer.window or context_tokens, context_tokens)
        * (position_bytes(layer, dtype, "int8") + position_bytes(layer, dtype, "full"))
        for layer in layers
    )  # fmt: skip


def why_not_int8(anatomy: Anatomy) -> str | None:
    """Return why keys and values of this family cannot be kept in 8 bits, None if they can: layers with another state, and
    heads without space for a scale."""
    if anatomy.capture_unsupported is not None:
        return anatomy.capture_unsupported
    odd = sorted({layer.head_dim for layer in anatomy.kv_layers if layer.head_dim % SCALE_BYTES})
    return f"heads of {', '.join(map(str, odd))} values are no multiple of {SCALE_BYTES}" if odd else None


def check_answers(anatomy: Anatomy) -> None:
    """Raise RequestError for a class without a head, which embeds only."""
    if anatomy.answers_unsupported is not None:
        hint = "`model.embed` and `model.hidden_states` work"
        raise RequestError(anatomy.answers_unsupported, field="model", value=anatomy.model_class, hint=hint)


def check_batched(anatomy: Anatomy, *, field: str, value: object, hint: str) -> None:
    """Raise RequestError for a family whose states rows cannot keep. A server's requests are rows of a batch."""
    if anatomy.capture_unsupported is not None:
        why = f"{anatomy.model_class} cannot be batched: {anatomy.capture_unsupported}"
        raise RequestError(why, field=field, value=value, hint=hint)


def check_family(request: LoadRequest, anatomy: Anatomy) -> None:
    """Raise RequestError for what a family does not support: 8 bits, or batch-invariant answers, which need rows, and layers that
    keep no state of all tokens."""
    check_kv(request.kv, anatomy)
    if not request.batch_invariant:
        return
    check_batched(anatomy, field="batch_invariant", value=True, hint="Leave it out")
    if any(layer.state_values for layer in anatomy.kv_layers):
        raise RequestError(
            f"{anatomy.model_class} keeps a state of all tokens, which a row that is computed apart would advance twice",
            field="batch_invariant", value=True, hint="Leave it out",
        )  # fmt: skip


def check_kv(kv: str, anatomy: Anatomy) -> None:
    """Raise RequestError for 8 bits of a family that does not support them (`why_not_int8`)."""
    why = why_not_int8(anatomy) if kv == "int8" else None
    if why is not None:
        raise RequestError(
            f"8-bit keys and values of {anatomy.model_class}: {why}", field="kv", value=kv, allowed=("full",),
            hint="Omit it to keep them in full",
        )  # fmt: skip


def added_step_s(
    layers: Sequence[KVLayer], dtype: str, rates: Rates, *, mode: str, on_cpu: bool, rows: int, context_tokens: int
) -> float:
    """Return the seconds that 8 bits add to a step of rows with full contexts: an estimate from LAYER_KERNELS, KERNEL_S and the
    memory rate. No step in 8 bits was timed on a GPU."""
    own = [layer for layer in layers if layer.shares is None]
    launch_s = rates.launch_s if mode == "eager" else KERNEL_S
    moved = moved_bytes(own, dtype, rows=rows, context_tokens=context_tokens)
    return len(own) * LAYER_KERNELS * launch_s + moved / (rates.host_Bps if on_cpu else rates.device_Bps)


# Positions of a page. A tile of the attention kernels is half of one; a row wastes half a page on average.
PAGE_TOKENS = 64
# Pages of the pool without a row: one that reads as zeros, one for writes that are never read. The rows' pages follow.
NONE, SCRAP, FIRST = 0, 1, 2


def pages_of(tokens: int) -> int:
    """Return the number of pages for this many tokens."""
    return -(-tokens // PAGE_TOKENS)


def pool_tokens(kv_tokens: int | None, *, rows: int, context_tokens: int) -> int | None:
    """Return how many tokens the rows' pool holds, in whole pages; None if every row has its whole context."""
    if kv_tokens is None or rows < 2 or kv_tokens >= rows * context_tokens:
        return None
    return pages_of(kv_tokens) * PAGE_TOKENS


def check_pool(kv_tokens: int | None, *, rows: int | None) -> None:
    """Raise RequestError for a pool of one row, which has its whole context anyway. rows: None if a plan chooses them."""
    if kv_tokens is not None and rows == 1:
        raise RequestError(
            "has no effect with one row: it has its whole context", field="kv_tokens", value=kv_tokens,
            hint="Plan two rows or more, or leave it out",
        )  # fmt: skip
