"""The bytes of keys and values, in full or in 8 bits, the time that 8 bits add to a step, and the families that support
them.

In 8 bits, a head of D values has D bytes and its own float32 scale (engine/kv/int8.py). Attention reads them in the
model's dtype: each layer's are converted just before use, which needs temporary memory, for longer if later layers read
the same keys and values.

Not covered: attention that reads 8 bits directly; the time that 8 bits add to prompts.

Rows that share a pool take pages from it as their requests need them (engine/kv/pages.py). Only full-attention layers
have pages: a sliding layer needs its window for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.checkpoint.anatomy import DTYPE_BYTES, KVLayer
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.checkpoint.anatomy import Anatomy
    from trimtab.planning.values.byte_sizes import Rates
    from trimtab.request import LoadRequest

# Bytes of the scale of one token's keys or values of one head, float32.
SCALE_BYTES = 4
# Mean KL of next-token distributions, 8 bits against full keys and values, over the demo's prompts, the largest of its adapters and
# formats (bench/results/kv8.json).
KV8_KL = 6.3e-4
# Kernels of one layer's step: magnitudes, scale, division, rounding and joining of keys and of values, writing them,
# and converting both back. An assumption: counted in the code, each as long as a small kernel in a graph. Neither was
# measured, so a plan marks it as an estimate (`Phase.estimated_s`).
LAYER_KERNELS = 24
KERNEL_S = 1.5e-6
# A node of a graph in the driver's memory, with its arguments and, the first time, its code: six graphs of E4B's
# prompts took 42 MiB, 1.46 KiB for each counted kernel (`captured` in bench/results/cards.json, run 9). Not measured
# for those here.
NODE_BYTES = 3 * 2**9
# Temporary copies while a chunk's keys are rounded: their values in float32, divided, and rounded.
ROUNDING_BYTES = 12


def position_bytes(layer: KVLayer, dtype: str, kv: str) -> int:
    """Return the bytes of one position's keys of a layer, or of its values."""
    each = layer.head_dim + SCALE_BYTES if kv == "int8" else layer.head_dim * DTYPE_BYTES[dtype]
    return layer.kv_heads * each


def copy_bytes(layers: Sequence[KVLayer], dtype: str, kv: str, *, rows: int, context_tokens: int, new_tokens: int) -> int:
    """Return the temporary bytes of reading 8-bit keys and values: those of one layer in the model's dtype, those that
    later layers read too, and the rounding of `new_tokens` of each row; 0 for full ones.
    """
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
    positions of `rows` rows.
    """
    full = [position_bytes(layer, dtype, kv) for layer in layers if layer.shares is None and layer.window is None]
    return 2 * rows * context_tokens * max(full, default=0)


def step_copy_bytes(
    layers: Sequence[KVLayer], dtype: str, kv: str, *, rows: int, context_tokens: int, is_paged: bool, is_fused: bool
) -> int:  # fmt: skip
    """Return the bytes of a step's copies of keys and values, for rows with full contexts: contiguous pages if no
    kernel reads them in place (`is_fused`: the fused kernels do, in full precision), and 8 bits in the model's dtype.
    """
    copies = is_paged and not (is_fused and kv == "full")
    paged = paged_copy_bytes(layers, dtype, rows=rows, context_tokens=context_tokens, kv=kv) if copies else 0
    return paged + copy_bytes(layers, dtype, kv, rows=rows, context_tokens=context_tokens, new_tokens=1)


def added_node_bytes(layers: Sequence[KVLayer], kv: str) -> int:
    """Return the driver's memory for the kernels that 8 bits add to a graph of a step."""
    return sum(layer.shares is None for layer in layers) * LAYER_KERNELS * NODE_BYTES if kv == "int8" else 0


def moved_bytes(layers: Sequence[KVLayer], dtype: str, *, rows: int, context_tokens: int) -> int:
    """Return the bytes moved to convert 8-bit keys and values of full contexts for attention: they are read, and
    written in the model's dtype. Attention's own reads are those of full ones.
    """
    return sum(
        2 * rows * min(layer.window or context_tokens, context_tokens)
        * (position_bytes(layer, dtype, "int8") + position_bytes(layer, dtype, "full"))
        for layer in layers
    )  # fmt: skip


def why_not_int8(anatomy: Anatomy) -> str | None:
    """Return why keys and values of this family cannot be kept in 8 bits, None if they can: layers with another state,
    and heads without space for a scale.
    """
    if anatomy.capture_unsupported is not None:
        return anatomy.capture_unsupported
    odd = sorted({layer.head_dim for layer in anatomy.kv_layers if layer.head_dim % SCALE_BYTES})
    return f"heads of {', '.join(map(str, odd))} values are no multiple of {SCALE_BYTES}" if odd else None


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
    """Return the seconds that 8 bits add to a step of rows with full contexts: an estimate from LAYER_KERNELS, KERNEL_S
    and the memory rate. No step in 8 bits was timed on a GPU.
    """
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
