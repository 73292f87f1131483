"""The machine that a plan is for: its memory and its GPU's properties. `machine/machine_cache.py` and
`engine/memory/rates.py` read them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine a plan is for.

    execution_device: "cuda:0" or "cpu". gpu_*: of the execution device, 0 without one. *_free_bytes, *_available_bytes:
    bytes that can still be allocated in addition to context_bytes, the driver's share of the device that torch does not
    count, and process_bytes, the host memory of the process before any weight. Budgets include these two. capability:
    the compute capability, multiprocessors: their number; None and 0 if not read.
    """

    execution_device: str
    gpu_total_bytes: int = 0
    gpu_free_bytes: int = 0
    host_available_bytes: int
    context_bytes: int = 300 * 2**20
    process_bytes: int = 2**30
    has_pinned: bool = True
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0

    @property
    def on_cpu(self) -> bool:
        return self.execution_device == "cpu"

    def budget_bytes(self, requested: int | None) -> int:
        """Return the budget of the execution device: the requested one, else all free bytes."""
        free = self.host_available_bytes + self.process_bytes if self.on_cpu else self.gpu_free_bytes + self.context_bytes
        return requested or free
