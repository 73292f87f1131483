"""How fast does this machine copy memory now: on the device, in host memory, and over the link?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from trimtab.benchmark.stopwatch import wait

DEVICE_SAMPLE_BYTES = 2**30
HOST_SAMPLE_BYTES = 256 * 2**20
REPEATS = 7


def measure(device: str) -> dict[str, Any]:
    """Return device_Bps, host_Bps and link_Bps (None on a CPU) of the device that a model ran on. A copy reads and writes every
    byte, so its rate counts both."""
    host = _copy_Bps(torch.device("cpu"), HOST_SAMPLE_BYTES)
    where = torch.device(device)
    if where.type != "cuda":
        return {"device_Bps": host, "host_Bps": host, "link_Bps": None}
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(where)
    size = max(min(DEVICE_SAMPLE_BYTES, int(free) // 4), 2**20)
    return {"device_Bps": _copy_Bps(where, size), "host_Bps": host, "link_Bps": _link_Bps(where)}


def _copy_Bps(device: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / _best_s(lambda: target.copy_(source), device)


def _link_Bps(device: torch.device) -> float:
    source = torch.zeros(HOST_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(HOST_SAMPLE_BYTES, dtype=torch.uint8, device=device)
    return HOST_SAMPLE_BYTES / _best_s(lambda: target.copy_(source, non_blocking=True), device)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(REPEATS + 1):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken[1:]), 1e-9)
