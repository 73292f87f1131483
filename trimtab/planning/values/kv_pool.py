"""How many tokens the rows of a batch hold together, if that is less than every row's whole context.

Rows that share a pool take pages from it as their requests need them (engine/kv/pages.py). Only full-attention layers
have pages: a sliding layer needs its window for every row.
"""

from __future__ import annotations

from trimtab.errors import RequestError

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
