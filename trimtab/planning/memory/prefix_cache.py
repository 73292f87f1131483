"""How much memory does the prefix cache take, and how many tokens does it hold?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, KVLayer
from trimtab.errors import RequestError, gib
from trimtab.planning.memory.activations import STATE_BYTES
from trimtab.planning.values.byte_sizes import position_bytes
from trimtab.request import LoadRequest

# Tokens of a block: common prefixes of prompts are found in multiples of it.
BLOCK_TOKENS = 32
# Blocks and snapshots are gathered here, so that one copy over the link has many layers.
STAGING_BYTES = 32 * 2**20
# The alignment of a layer's keys or values in a page or snapshot, and the smallest page: its index takes a few hundred
# bytes.
ALIGNED, LEAST_PAGE_BYTES = 16, 4096


@dataclass(frozen=True)
class PrefixPages:
    """The pages of a model's prefix cache. page_bytes: of a block of BLOCK_TOKENS tokens. snapshot_pages: of one snapshot; 0 for a
    model without sliding and recurrent layers. They are in host memory, because a copy is cheap: 2,000 tokens of an 8B model are
    290 MB, 12 ms on a link of 25 GB/s, while their prompt takes hundreds of ms. On a CPU both are the same memory."""

    page_bytes: int
    snapshot_pages: int

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of a prompt from which another can resume: its whole blocks, and a snapshot."""
        return (max(tokens // BLOCK_TOKENS, 1) + self.snapshot_pages) * self.page_bytes

    def tokens_in(self, capacity_bytes: int) -> int:
        """Return the tokens of the longest such prompt that fits."""
        return max(capacity_bytes // self.page_bytes - self.snapshot_pages, 0) * BLOCK_TOKENS


def pages_of(layers: Sequence[KVLayer], dtype: str, kv: str, *, context_tokens: int) -> PrefixPages:
    """Return the pages of a model, as `engine/kv/prefix_layout.py` lays them out. A recurrent layer's window, 3 % of its state, is
    counted in float32."""
    block = rings = 0
    for layer in layers:
        rings += -(-layer.state_values * STATE_BYTES // ALIGNED) * ALIGNED
        if layer.shares is None:
            places = BLOCK_TOKENS if layer.window is None else min(layer.window, context_tokens)
            taken = 2 * (-(-places * position_bytes(layer, dtype, kv) // ALIGNED) * ALIGNED)
            block, rings = (block + taken, rings) if layer.window is None else (block, rings + taken)
    page = max(block, LEAST_PAGE_BYTES)
    return PrefixPages(page, -(-(rings + block) // page) if rings else 0)


def prefix_reason(request: LoadRequest, anatomy: Anatomy, capacity_bytes: int | None = None) -> str:
    """Return the plan's note on a prefix cache that holds less than one prompt of the context, "" for others. capacity_bytes:
    its size if it is not the request's. Errors: RequestError for one that no prompt could resume from."""
    capacity = request.prefix_cache_bytes if capacity_bytes is None else capacity_bytes
    layers = anatomy.kv_layers
    if not capacity and capacity_bytes is None:
        return ""
    pages = pages_of(layers, anatomy.dtype, request.kv, context_tokens=request.context_tokens)
    least, whole = pages.bytes_of(BLOCK_TOKENS), pages.bytes_of(request.context_tokens)
    if capacity < least:
        what = f"a block of {BLOCK_TOKENS} tokens" + " and a snapshot of sliding or recurrent layers" * bool(pages.snapshot_pages)
        raise RequestError(
            f"must be at least {least} bytes ({gib(least)}), {what} of this model: no prompt could resume from less",
            field="prefix_cache", value=capacity, hint="Give more, or leave it out for no prefix cache",
        )  # fmt: skip
    if capacity >= whole:
        return ""
    held = f"{gib(capacity)} hold {pages.tokens_in(capacity)} tokens of one prompt"
    return f"{held}; a prompt that fills the context of {request.context_tokens} takes {gib(whole)}"


def staging_bytes(layers: Sequence[KVLayer], dtype: str, *, context_tokens: int) -> int:
    """Return the bytes of the buffer on the device: at least one block of all full layers, one sliding layer's window, and one
    recurrent layer's state."""
    block = largest = 0
    for layer in layers:
        if layer.shares is not None:
            continue
        token, largest = layer.kv_heads * layer.head_dim * DTYPE_BYTES[dtype], max(largest, layer.state_values * STATE_BYTES)
        if layer.window is None:
            block += 2 * token * BLOCK_TOKENS
        else:
            largest = max(largest, token * min(layer.window, context_tokens))
    return max(STAGING_BYTES, block, largest)


def prefix_bytes(layers: Sequence[KVLayer], dtype: str, *, context_tokens: int) -> dict[str, int]:
    """Return the device bytes of the prefix cache by item."""
    return {"prefix_staging": staging_bytes(layers, dtype, context_tokens=context_tokens)}
