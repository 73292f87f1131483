"""The memory that torch's allocator holds on GPUs, read in a way that is safe in every release.

`torch.cuda.memory_snapshot` and `MemPool.snapshot` of torch 2.11 release references that they do not own: of the numbers of the
pool's id. A number above 256 is freed twice (Python 3.12 spares smaller ones), and the process ends later, in the next
allocation (I17 of the doctor's catalogue). The snapshot without arguments takes no id.
"""

from __future__ import annotations

from typing import Any

import torch

Pool = tuple[int, int]


def segments(pool: Pool | None = None) -> list[dict[str, Any]]:
    """Return the segments of all GPUs as torch describes them, with their blocks; `pool`: those of one pool of memory."""
    found: list[dict[str, Any]] = torch.cuda.memory._snapshot()["segments"]
    return found if pool is None else [one for one in found if tuple(one["segment_pool_id"]) == tuple(pool)]


def is_empty(device_index: int, pool: Pool) -> bool:
    """Whether no tensor is alive in a pool, without describing its blocks; False where torch cannot tell. A freed block that
    waits for another stream counts as empty."""
    check = getattr(torch._C, "_cuda_checkPoolLiveAllocations", None)
    try:
        return check is not None and bool(check(device_index, pool, set()))
    except RuntimeError:  # torch does not know the pool
        return False
