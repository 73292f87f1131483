"""How do captured passes of prompts and all others share one segment of device memory for their temporary tensors?"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypedDict
from weakref import WeakSet

import torch

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.engine.cuda.nvrtc import side_stream, wait_for_all
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.engine.memory.reserve import torch_bytes
from trimtab.planning import Plan
from trimtab.planning.memory.prompts import has_room, room_bytes
from trimtab.planning.values.execution import CAPTURED

# Left to other tensors on the device when the segment is allocated.
_SPARE_BYTES = 8 * 2**20
# Left of the bytes that the plan counts for torch: segments of 2 MiB for small tensors, here and in the room, and tensors of
# answers outside the room: copies of a prompt's embeddings, logits, a piece of an adapter that is being prepared.
LEFT_BYTES = 64 * 2**20
# The segment is smaller than planned by up to a quarter where torch holds more elsewhere than a plan counts: a pass takes less
# where our kernels add its adapters, whose copies in float32 a plan counts (a third of an image's pass with E4B).
LEAST_SHARE = 0.75


class Owner(Protocol):
    """An owner of graphs in a room."""

    def drop_graphs(self) -> None: ...


class Block(TypedDict):
    address: int
    size: int
    state: str


class Segment(TypedDict):
    total_size: int
    segment_pool_id: Sequence[int]
    blocks: list[Block]


class PrefillMemoryPool:
    """The room of one model. nbytes: of its segment. torch_bytes: the plan's count for torch, where the room takes the rest of it;
    0 where it holds `nbytes`. dtype: of the model. owners: of its graphs. A CUDA graph keeps the addresses of its temporary
    tensors; graphs and other passes never run at the same time. No tensor that a pass allocates here may be alive when a graph is
    replayed: results are copied, and `check` drops the graphs if a block is left. One segment is allocated first, because torch
    never joins segments.
    """

    def __init__(self, device: torch.device, nbytes: int, *, torch_bytes: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.nbytes, self.torch_bytes = device, nbytes, torch_bytes
        self.owners: WeakSet[Owner] = WeakSet()
        self.segment_bytes = 0
        self._left: frozenset[tuple[int, int]] = frozenset()  # (address, bytes) of blocks that earlier passes have left in the pool
        self._dtype = dtype
        self._pool: torch.cuda.MemPool | None = None
        self._mark: torch.Tensor | None = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._is_used = False

    @property
    def is_made(self) -> bool:
        return self._pool is not None

    @property
    def handle(self) -> tuple[int, int]:
        """The pool, as `CUDAGraph.capture_begin` takes it."""
        assert self._pool is not None
        return self._pool.id

    @property
    def held_bytes(self) -> int:
        """The bytes that torch has for the room; more than its segment where tensors did not fit there."""
        return sum(int(segment["total_size"]) for segment in self._segments())

    @property
    def left_bytes(self) -> int:
        """The blocks that passes have left in the room."""
        return sum(size for _, size in self._left)

    def make(self, *, is_lean: bool = False) -> bool:
        """Allocate the segment. Returns whether the room can be used: False where the device has no such memory left. is_lean:
        whether passes take less than a plan counts, because our kernels add adapters. Errors: RuntimeError of the capture."""
        if self._pool is not None:
            return True
        torch.cuda.empty_cache()
        try:
            with torch.cuda.device(self.device):  # a pool is of the current one
                return self._allocate(is_lean)
        except RuntimeError as exc:  # the driver's and cuBLAS's errors for want of memory are not torch's
            self.release()
            if is_out_of_memory(exc):
                return False
            raise

    def _allocate(self, is_lean: bool) -> bool:
        self._mark = mark = torch.zeros(16, 16, dtype=self._dtype, device=self.device)
        with side_stream(self.device) as side, torch.cuda.stream(side):
            self._call_libraries()
        self.segment_bytes = self.nbytes
        if self.torch_bytes:
            rest = self.torch_bytes - int(torch.cuda.memory_reserved(self.device)) - LEFT_BYTES
            self.segment_bytes = max(rest, int(LEAST_SHARE * self.nbytes) if is_lean else self.nbytes)
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < self.segment_bytes + _SPARE_BYTES:
            return False
        self._pool = torch.cuda.MemPool()
        with side_stream(self.device) as side:
            # torch (seen in 2.11) captures nothing into a pool whose graphs are all gone (CachingHostAllocator.h asserts
            # `use_count > 0`; I15 of the doctor's catalogue): this one stays.
            self._anchor, _ = GraphCache(lambda: self.handle).record(side, mark.zero_)
        with self.using():
            torch.empty(self.segment_bytes, dtype=torch.uint8, device=self.device)  # freed at once: the pool keeps it
        return True

    def _call_libraries(self) -> None:
        """Let cuBLAS and cuBLASLt allocate the workspaces that they keep for each thread and stream: no part of the room."""
        assert self._mark is not None
        torch.addmm(self._mark[0], self._mark, self._mark @ self._mark)

    def lend(self, spare_bytes: int) -> None:
        """Give the memory back for a pass that allocates elsewhere (logits of every position, an embedding), where the budget has
        no other for it. The next prompt allocates it again, and its graphs are captured again. spare_bytes: of the budget."""
        if spare_bytes < self.nbytes:
            self.release()

    def release(self) -> None:
        """Give the memory back. Graphs are dropped first."""
        if self._pool is None:
            return
        wait_for_all(self.device)  # replays that are queued
        self._drop_graphs()
        self._anchor = None
        self._pool, self._left = None, frozenset()
        gc.collect()  # graphs that are part of cycles keep the pool
        with suppress(RuntimeError):  # after a failed capture torch may refuse
            torch.cuda.empty_cache()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Allocate in the room while the block runs, on the capture stream; it waits for work queued before, and the block is
        waited for by work queued after it. Without a room, and within another such block, nothing changes."""
        if self._pool is None or self._is_used:
            yield
            return
        index = self._index
        with side_stream(self.device) as side:
            try:
                with torch.cuda.stream(side):
                    self._call_libraries()
                    _begin(index, self.handle)
                    self._is_used = True
                    try:
                        yield
                    finally:
                        self._is_used = False
                        torch._C._cuda_endAllocateToPool(index, self.handle)
                        torch._C._cuda_releasePool(index, self.handle)
            finally:  # a pass that ends by an error has queued work too
                torch.cuda.current_stream(self.device).wait_stream(side)

    def check(self) -> bool:
        """Drop the graphs if passes have left tensors in the room since the last check. Returns whether nothing was left."""
        if self._pool is None:
            return True
        if not self._left and is_empty(self._index, self.handle):  # as it should be: nothing to compare
            return True
        left = self._blocks()
        if not left <= self._left and gc.isenabled():  # it is off while a graph is captured (nvrtc.py)
            gc.collect()
            left = self._blocks()
        is_clean = left <= self._left
        self._left = left
        if not is_clean:
            self._drop_graphs()
        return is_clean

    def _drop_graphs(self) -> None:
        for owner in tuple(self.owners):
            owner.drop_graphs()

    def _blocks(self) -> frozenset[tuple[int, int]]:
        """Return (address, bytes) of every block that is in use."""
        blocks = (block for segment in self._segments() for block in segment["blocks"])
        return frozenset((block["address"], block["size"]) for block in blocks if block["state"] != "inactive")

    def _segments(self) -> list[Segment]:
        return [] if self._pool is None else segments(self.handle)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index


def _begin(index: int, handle: tuple[int, int]) -> None:
    # Older releases of torch name a stream instead of the thread: that is the capture stream, which only this thread uses.
    begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)
    begin = begin or torch._C._cuda_beginAllocateCurrentStreamToPool
    begin(index, handle)


def room_of(plan: Plan, anatomy: Anatomy, device: torch.device) -> PrefillMemoryPool | None:
    """Return the room of a model whose prompts are captured, None for any other."""
    is_captured = plan.execution.prompt.mode in CAPTURED
    if device.type != "cuda" or not is_captured or not has_room(plan.request.batch, plan.gpu_budget_bytes):
        return None
    towers = plan.execution.towers
    # The room is all that the plan counts: torch never joins segments, and a pass at its worst would need more of them than its
    # tensors take. Captured towers have separate segments.
    takes_rest = towers is None or towers.mode not in CAPTURED
    return PrefillMemoryPool(
        device, room_bytes(plan, anatomy), torch_bytes=torch_bytes(plan) if takes_rest else 0,
        dtype=getattr(torch, plan.request.dtype),
    )  # fmt: skip


Pool = tuple[int, int]


def segments(pool: Pool | None = None) -> list[Segment]:
    """Return the segments of all GPUs as torch describes them, with their blocks; `pool`: those of one pool of memory.

    `torch.cuda.memory_snapshot` and `MemPool.snapshot` of torch 2.11 release references that they do not own, of the numbers of the
    pool's id: the process ends later, in the next allocation of memory (I17 of the doctor's catalogue). The snapshot without
    arguments takes no id.
    """
    found: list[Segment] = torch.cuda.memory._snapshot()["segments"]
    return found if pool is None else [one for one in found if tuple(one["segment_pool_id"]) == tuple(pool)]


def is_empty(device_index: int, pool: Pool) -> bool:
    """Whether no tensor is alive in a pool, without describing what is there; False where torch cannot tell. A freed block that
    waits for another stream counts as empty."""
    check = getattr(torch._C, "_cuda_checkPoolLiveAllocations", None)
    try:
        return check is not None and bool(check(device_index, pool, set()))
    except RuntimeError:  # torch does not know the pool
        return False
