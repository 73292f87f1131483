"""The reason for each block's placement, and that there is no placement, each as one sentence with bytes.

Each sentence states a fact about this plan. Its numbers come from the totals that the search compares: the placement in
which all blocks stay on the device, and the one in which no block goes to disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.errors import DoesNotFitError, gib
from trimtab.planning.search import Search
from trimtab.planning.values.blocks import Block
from trimtab.planning.values.budget import Choice, Item, Limits, Machine, Totals, totals_of
from trimtab.request import LoadRequest

if TYPE_CHECKING:
    from trimtab.planning.request.overrides import Asked

UNLIMITED_BYTES = 2**62
_PAID = {
    "token": "read at every token",
    "image": "read once per image",
    "audio": "read once per audio clip",
    "request": "read once per request",
}


class Reasons:
    """The reasons of one plan. Blocks with the same reason get the same sentence."""

    def __init__(
        self, blocks: Sequence[Block], items: Sequence[Item], chosen: Sequence[Choice], asked: Mapping[str, Asked],
        limits: Limits, device: str,
    ) -> None:  # fmt: skip
        self.asked = asked
        free = [block.block_path not in asked for block in blocks]
        rows = list(zip(items, chosen, free, strict=True))
        all_stay = [(item.stay() or choice if is_free else choice, item, 1) for item, choice, is_free in rows]
        all_near = [(_nearest(item, choice) if is_free else choice, item, 1) for item, choice, is_free in rows]
        self.too_much = _too_much(totals_of(all_stay, limits), limits, device)
        self.far = _far(totals_of(all_near, limits), limits)

    def of(self, block: Block, choice: Choice) -> str:
        """Return the reason of one block's placement."""
        requested = self.asked.get(block.block_path)
        if requested is not None:
            return f"requested: {requested.asked}"
        if block.movable_bytes == 0:
            return block.refused["stream"]
        if choice.tier == "resident":
            return f"stays: {_PAID[block.paid]}" if self.too_much else "fits"
        leaves = f"moved, {self.too_much}" if self.too_much else "would fit on the device, but is as fast in this tier"
        if choice.tier == "gather":
            why = f"{leaves}: only indexed, {gib(block.row_bytes)} per token"
            return f"{why}, from the checkpoint file{self.far}" if choice.is_far else why
        why = f"{leaves}: {_PAID[block.paid]}"
        return f"{why}{self.far}" if choice.is_far else why


def _nearest(item: Item, choice: Choice) -> Choice:
    """Return where a block would be with enough host memory: its present choice unless that is further away than the
    host.
    """
    return item.leave(choice.staged_bytes, far=False) or choice if choice.is_far else choice


def _too_much(all_stay: Totals, limits: Limits, device: str) -> str:
    """Return the budget that the placement with all blocks on the device would exceed, and by how much; "" if it would
    fit.
    """
    running, peak = limits.device_need(all_stay.run_bytes), limits.device_need(all_stay.peak_bytes)
    if running > limits.device_budget_bytes:
        return f"{gib(running - limits.device_budget_bytes)} over the budget of {device}"
    if peak > limits.device_budget_bytes:
        return f"loading would peak {gib(peak - limits.device_budget_bytes)} above the budget of {device}"
    return "" if limits.allows_total(all_stay) else _shared(all_stay, limits)


def _far(all_near: Totals, limits: Limits) -> str:
    """Return the budget that keeps blocks off the host, as the end of a sentence; "" if none does."""
    if not limits.allows_host(all_near):
        return f"; the host budget is {gib(limits.host_budget_bytes)}"
    return "" if limits.allows_total(all_near) else f"; {_shared(all_near, limits)}"


def _shared(totals: Totals, limits: Limits) -> str:
    over = limits.total_need(totals) - (limits.total_budget_bytes or 0)
    return f"{gib(over)} more than the machine's memory"


@dataclass(frozen=True)
class Refusal:
    """Why no placement of a request fits: the smallest budget that is enough, or the smallest of two. spilled_bytes: of the blocks
    that the request puts on disk."""

    request: LoadRequest
    machine: Machine
    items: Sequence[Item]
    limits: Limits
    spilled_bytes: int

    def error(self, search: Search) -> DoesNotFitError:
        limits = self.limits
        if limits.total_budget_bytes is not None:
            alone = Search(self.items, self._asked_limits())
            total_bytes = alone.smallest_total_bytes() if alone.best() is not None else None
            if total_bytes is not None:
                return refusal("memory", total_bytes, limits.total_budget_bytes)
            search = alone
        device_bytes, host_bytes = search.smallest_device_bytes(), search.smallest_host_bytes()
        if device_bytes is not None:
            return self._device_error(device_bytes, host_bytes)
        if host_bytes is not None:
            return refusal("host", host_bytes, limits.host_budget_bytes)
        return self._neither_fits()

    def _asked_limits(self) -> Limits:
        """Return the budgets that the user set, without the limit of a memory that both devices share."""
        request = self.request
        return replace(
            self.limits,
            device_budget_bytes=request.gpu_memory_bytes or UNLIMITED_BYTES,
            host_budget_bytes=request.host_memory_bytes or UNLIMITED_BYTES,
            total_budget_bytes=None,
        )

    def _neither_fits(self) -> DoesNotFitError:
        """Return the error for a request that needs more than one larger budget."""
        limits = self.limits
        open_host = replace(limits, host_budget_bytes=UNLIMITED_BYTES, total_budget_bytes=None)
        device_bytes = Search(self.items, open_host).smallest_device_bytes()
        if device_bytes is None:
            return self.of_disk()
        on_device = replace(limits, device_budget_bytes=device_bytes, total_budget_bytes=None)
        host_bytes = Search(self.items, on_device).smallest_host_bytes()
        return self._device_error(device_bytes, host_bytes, needs_both=True)

    def _device_error(self, device_bytes: int, host_bytes: int | None, *, needs_both: bool = False) -> DoesNotFitError:
        return refusal(
            self.machine.execution_device, device_bytes, self.limits.device_budget_bytes, host_bytes=host_bytes,
            needs_both=needs_both, total_bytes=self.machine.gpu_total_bytes,
        )  # fmt: skip

    def of_disk(self) -> DoesNotFitError:
        return refusal("disk", self.spilled_bytes, self.limits.disk_budget_bytes or 0)


_BUDGETS = {"host": "the host budget", "memory": "the machine's memory", "disk": "the space for blocks on disk"}


def refusal(
    device: str, needed_bytes: int, budget_bytes: int, *, host_bytes: int | None = None, needs_both: bool = False,
    total_bytes: int = 0,
) -> DoesNotFitError:  # fmt: skip
    """Return the error of a plan that needs a larger budget of a device. host_bytes: of the host that would be enough too, or
    that are needed as well (needs_both). total_bytes: of the GPU, which no budget makes larger; 0: unknown."""
    argument = "host_memory" if device == "host" else "gpu_memory" if device not in _BUDGETS else ""
    smallest = _budget(needed_bytes, "" if 0 < total_bytes < needed_bytes else argument)
    if host_bytes is not None:
        smallest += f" {'with' if needs_both else 'or'} a host budget of {_budget(host_bytes, 'host_memory')}"
    budget = _BUDGETS.get(device, f"the budget of {device}")
    return DoesNotFitError(
        f"the model does not fit {budget}, {gib(budget_bytes)} ({budget_bytes} B)", block=None, device=device,
        needed_bytes=needed_bytes, budget_bytes=budget_bytes, needs_both=needs_both, smallest=smallest,
        hint="Give a folder on another disk with offload_dir=" if device == "disk" else "",
    )  # fmt: skip


def _budget(needed_bytes: int, argument: str) -> str:
    """Return a budget in words, as an argument in whole MiB."""
    return f"{gib(needed_bytes)} ({argument}='{-(-needed_bytes // 2**20)}MiB')" if argument else gib(needed_bytes)
