"""I17: a snapshot of one memory pool frees the pool's id twice."""

from __future__ import annotations

import sys
from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="A process ends by a segmentation fault some time after torch described one of its memory pools",
    symptom="Segmentation fault in memory_snapshot, or anywhere else in Python's memory allocator, after many CUDA graphs or pools "
    "of memory were made",
    trigger="torch.cuda.MemPool.snapshot() or torch.cuda.memory_snapshot(pool.id), of a pool whose number is above 256 (before "
    "Python 3.12, by the rules of its integers, also of a smaller one)",
    cause="the function behind both takes the numbers out of its tuple of arguments as borrowed references, and releases them; "
    "Python 3.12 spares its own integers up to 256, and frees a larger one twice",
    affected=(Affected("torch"),),
    versions="2.11.0 with CUDA 13.0 on an H100: processes that had run many of trimtab's tests ended so in two of two runs, the "
    "next free block of Python's allocator was -1; other releases were not run",
    way_round="torch.cuda.memory._snapshot(), which takes no id, and choose the segments by their segment_pool_id",
    trimtab="segments are requested without a pool's id",
    evidence="run",
)  # fmt: skip

NEEDS_GPU = True


def probe(kit: Kit) -> Seen:
    """Request a snapshot of a pool that does not exist, and count the references to its id."""
    import torch

    ask: Any = getattr(torch._C, "_cuda_memorySnapshot", None)
    if ask is None or not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    number = int("1000003")  # a separate object, outside Python's cached integers
    held = [number] * 8  # it stays alive after any release
    before = sys.getrefcount(number)
    try:
        ask((0, number, False))
    except (RuntimeError, TypeError):  # releases that need two numbers, or none
        try:
            ask((0, number))
        except (RuntimeError, TypeError):
            return Seen(NOT_APPLICABLE, f"torch {torch.__version__} describes all pools at once")
    lost = before - sys.getrefcount(number)
    if lost > 0:
        _give_back(number, lost)
        return Seen(PRESENT, f"{lost} reference(s) to the pool's number were released in one call")
    return Seen(FIXED, f"the number has its {len(held)} references as before")


def _give_back(number: int, count: int) -> None:
    """Restore the references of an object that has lost some."""
    import ctypes

    for _ in range(count):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
