"""The memory of a placement on every device, while running and while loading, against the budgets.

A `Machine` is what a plan is for, a `Choice` one way to place a block, an `Item` a block with its choices, `Limits` the budgets
with the bytes that are taken in every placement, `Totals` the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

STAGING_SLOTS = 2
DISK_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a plan is for, as machine/machine_cache.py and engine/memory/rates.py read it.

    execution_device: "cuda:0" or "cpu". gpu_*: of the execution device, 0 without one. *_free_bytes, *_available_bytes:
    bytes that can still be allocated in addition to context_bytes, the driver's share of the device that torch does not
    count, and process_bytes, the host memory of the process before any weight. Budgets include these two. capability:
    the compute capability, None if not read. reads_host: whether kernels read page-locked host memory at its own address.
    """

    execution_device: str
    gpu_total_bytes: int = 0
    gpu_free_bytes: int = 0
    host_available_bytes: int
    context_bytes: int = 300 * 2**20
    process_bytes: int = 2**30
    has_pinned: bool = True
    capability: tuple[int, int] | None = None
    reads_host: bool = True

    @property
    def on_cpu(self) -> bool:
        return self.execution_device == "cpu"

    def budget_bytes(self, requested: int | None) -> int:
        """Return the budget of the execution device: the requested one, else all free bytes."""
        free = self.host_available_bytes + self.process_bytes if self.on_cpu else self.gpu_free_bytes + self.context_bytes
        return requested or free


@dataclass(frozen=True)
class Choice:
    """One way to place a block: bytes on each device, bytes of its staging buffer, seconds of a whole request."""

    tier: str
    home: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    staged_bytes: int
    request_s: float
    step_s: float
    cost_s: float

    @property
    def is_far(self) -> bool:
        """Whether it is outside host memory too: spilled to disk, or left in the checkpoint file."""
        return self.home in ("disk", "file")


@dataclass(frozen=True)
class Item:
    """The choices that one block has; transient_bytes and dense_bytes as in `blocks.Block`."""

    choices: tuple[Choice, ...]
    is_table: bool
    transient_bytes: int
    dense_bytes: int

    def stay(self) -> Choice | None:
        return next((choice for choice in self.choices if choice.tier == "resident"), None)

    def leave(self, cap: int, *, far: bool) -> Choice | None:
        """Return the fastest choice off the device, to the host or to disk, within a staging buffer of cap."""
        fitting = [
            choice for choice in self.choices if choice.tier != "resident" and choice.is_far == far and choice.staged_bytes <= cap
        ]
        return min(fitting, key=lambda choice: choice.cost_s, default=None)


Placed = tuple[Choice, Item, int]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The cost of a placement: peaks of running and loading on the device, host and disk bytes, seconds per request.

    staged_bytes: one staging buffer, of which there are `slots`. buffer_bytes: the host buffers of the disk tier.
    """

    run_bytes: int
    load_bytes: int
    host_bytes: int
    disk_bytes: int
    slots: int
    staged_bytes: int
    buffer_bytes: int
    read_buffer_bytes: int
    cost_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.run_bytes, self.load_bytes)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Budgets, and the bytes that are taken in every placement.

    total_budget_bytes: device and host together, on a machine where both are the same memory. run_bytes, load_bytes: on
    the device in addition to the blocks, while running and while loading. host_bytes: base of the process.
    context_bytes: the driver's share. reserve: peak -> bytes that the allocator holds beyond it. While loading:
    host_load_bytes of read buffers.
    slots: staging buffers, at most.
    """

    device_budget_bytes: int
    host_budget_bytes: int
    disk_budget_bytes: int | None
    total_budget_bytes: int | None
    run_bytes: int
    load_bytes: int
    host_bytes: int
    host_load_bytes: int
    context_bytes: int
    reserve: Callable[[int], int]
    slots: int = STAGING_SLOTS

    def device_need(self, peak_bytes: int) -> int:
        """Return the device budget that a peak needs."""
        return peak_bytes + self.reserve(peak_bytes) + self.context_bytes

    def allows_device(self, totals: Totals) -> bool:
        return self.device_need(totals.peak_bytes) <= self.device_budget_bytes

    def allows_host(self, totals: Totals) -> bool:
        return totals.host_bytes <= self.host_budget_bytes

    def allows_disk(self, totals: Totals) -> bool:
        return self.disk_budget_bytes is None or totals.disk_bytes <= self.disk_budget_bytes

    def total_need(self, totals: Totals) -> int:
        return self.device_need(totals.peak_bytes) + totals.host_bytes

    def allows_total(self, totals: Totals) -> bool:
        return self.total_budget_bytes is None or self.total_need(totals) <= self.total_budget_bytes

    def allows(self, totals: Totals) -> bool:
        return self.allows_device(totals) and self.allows_host(totals) and self.allows_disk(totals) and self.allows_total(totals)


def slots_of(chosen: Iterable[Choice], limits: Limits) -> int:
    """Return how many staging buffers the blocks of a placement need: only the `slots` of its totals."""
    return min(sum(choice.staged_bytes > 0 for choice in chosen), limits.slots)


def totals_of(placed: Iterable[Placed], limits: Limits) -> Totals:
    """Return the totals of a placement; placed: (choice, item, how many identical blocks)."""
    resident = host = disk = staged_blocks = staged = spilled_blocks = spilled = 0
    transient = leaving_transient = 0
    cost_s = 0.0
    for choice, item, count in placed:
        resident += choice.device_bytes * count
        host += choice.host_bytes * count
        disk += choice.disk_bytes * count
        cost_s += choice.cost_s * count
        if choice.tier == "resident":
            if item.dense_bytes:
                transient = max(transient, item.transient_bytes)
        elif not item.is_table:
            leaving_transient = max(leaving_transient, item.transient_bytes)
        if choice.staged_bytes:
            staged_blocks, staged = staged_blocks + count, max(staged, choice.staged_bytes)
            if choice.tier == "disk":
                spilled_blocks, spilled = spilled_blocks + count, max(spilled, choice.staged_bytes)
    slots = min(staged_blocks, limits.slots)
    buffers = min(spilled_blocks, DISK_BUFFERS) * spilled
    running = resident + slots * staged
    # Loading: blocks that leave are packed first, while nothing is resident; then blocks that stay. Weights to pack
    # pass through two buffers of the largest one's size, allocated for the whole load.
    places = 2 * max(transient, leaving_transient)
    filling = resident + places
    reading = limits.host_load_bytes + spilled
    return Totals(
        run_bytes=limits.run_bytes + running, load_bytes=limits.load_bytes + max(filling, running),
        host_bytes=limits.host_bytes + host + max(buffers, reading), disk_bytes=disk, slots=slots, staged_bytes=staged,
        buffer_bytes=buffers, read_buffer_bytes=reading, cost_s=cost_s,
    )  # fmt: skip
