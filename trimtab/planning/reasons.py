"""The reason for each block's placement, and that there is no placement, each as one sentence with bytes.

Each sentence states a fact about this plan. Its numbers come from the totals that the search compares: the placement in
which all blocks stay on the device, and the one in which no block goes to disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trimtab.errors import DoesNotFitError, gib
from trimtab.planning.values.blocks import Block
from trimtab.planning.values.budget import Choice, Item, Limits, Totals, totals_of

if TYPE_CHECKING:
    from trimtab.planning.request.overrides import Asked

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
