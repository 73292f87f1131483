"""Memory of the prefix cache: the host memory that the request sets, and a copy buffer on the device.

Host memory, because device memory is what a plan is short of and a copy is cheap beside a prompt: 2,000 tokens of an 8B model
are 290 MB, 12 ms on a link of 25 GB/s, where the prompt takes hundreds. On a CPU both are the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.checkpoint.anatomy import DTYPE_BYTES, KVLayer

# Tokens of a block: what two prompts share is found in steps of so many.
BLOCK_TOKENS = 32
# Blocks and snapshots are gathered here, so that a copy over the link is one of many layers.
STAGING_BYTES = 32 * 2**20


def staging_bytes(layers: Sequence[KVLayer], dtype: str, *, context_tokens: int) -> int:
    """Return the bytes of the buffer on the device: one block of all full layers and one sliding layer's window fit at least."""
    block = largest = 0
    for layer in layers:
        if layer.shares is not None:
            continue
        token = layer.kv_heads * layer.head_dim * DTYPE_BYTES[dtype]
        if layer.window is None:
            block += 2 * token * BLOCK_TOKENS
        else:
            largest = max(largest, token * min(layer.window, context_tokens))
    return max(STAGING_BYTES, block, largest)


def prefix_bytes(layers: Sequence[KVLayer], dtype: str, *, context_tokens: int, is_kept: bool) -> dict[str, int]:
    """Return what the prefix cache takes on the device, by item."""
    return {"prefix_staging": staging_bytes(layers, dtype, context_tokens=context_tokens)} if is_kept else {}
