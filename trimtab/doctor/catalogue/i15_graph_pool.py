"""I15: a memory pool whose CUDA graphs are all deleted accepts no new graph."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="A second CUDA graph cannot be captured into a memory pool once the first one is gone",
    symptom="RuntimeError: it->second->use_count > 0 INTERNAL ASSERT FAILED at CachingHostAllocator.h (or "
    "CUDACachingAllocator.cpp), and every later capture into that pool fails too",
    trigger="a CUDA graph captured with pool= of a pool that others used before, all of whose graphs were deleted, with a "
    "torch.cuda.MemPool that is still held",
    cause="a graph that is deleted lowers the pool's count in the allocator of page-locked memory to 0, where a MemPool counts "
    "for the device's allocator only, and a capture asserts that the count is above 0",
    affected=(Affected("torch"),),
    versions="2.11.0 with CUDA 13.0 on an H100: captures into a held MemPool failed so in trimtab's tests, and no longer once "
    "a graph was kept; reported by others for CUDA 12.8 on a B200; this probe has not run on a GPU; pools of page-locked memory "
    "came with pytorch pull request 167507 (read)",
    way_round="keep one graph of the pool, however small, or take a new pool",
    trackers=(
        "vllm-project/vllm#53679 (closed: the same assertion of page-locked memory after a trial capture)",
        "huggingface/transformers#48312 (open: that of the device's allocator, continuous batching)",
        "vllm-project/vllm#28426 (closed: that of the device's allocator, piecewise graphs)",
    ),
    trimtab="one graph of a single kernel stays in the pool that prompts share",
    evidence="tracker",
)  # fmt: skip

NEEDS_GPU = True


def probe(kit: Kit) -> Seen:
    """Capture a graph into a pool that is kept alive, delete it, and capture another one."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    if not hasattr(torch.cuda, "MemPool"):
        return Seen(NOT_APPLICABLE, f"torch {torch.__version__} has no torch.cuda.MemPool")
    pool: Any = torch.cuda.MemPool()
    value = torch.zeros(1, device="cuda")
    try:
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool.id):
                value.add_(1)
            del graph
    except RuntimeError as exc:
        if "use_count > 0" in str(exc):
            return Seen(PRESENT, str(exc).splitlines()[0])
        raise
    return Seen(FIXED, "two graphs were captured into one pool, the second after the first was gone")
