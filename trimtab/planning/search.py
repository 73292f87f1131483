"""Which placement is the cheapest that keeps every budget, and why is each block where it is?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul as _mul
from typing import TYPE_CHECKING

from trimtab.errors import DoesNotFitError, gib
from trimtab.planning.values.blocks import Block, Choice, Item, Limits, Machine, Placed, Totals, totals_of
from trimtab.request import LoadRequest

if TYPE_CHECKING:
    from trimtab.planning.request.overrides import Asked

# Sizes of staging buffers that are tried: the distinct block sizes, thinned when a model has more kinds than this.
MOST_CAPS = 10
# Placements whose seconds differ by less than this share are equal: ten identical layers need no comparison.
TIE = 1e-9
# Cached families: plans of one request differ in their limits and need the same few families.
KEPT = 8

Counts = tuple[int, ...]
# The annotation of `operator` returns Any; one function for integers and one for seconds keeps the sums typed.
_times: Callable[[int, int], int] = _mul
_weigh: Callable[[int, float], float] = _mul


@dataclass(frozen=True)
class _Group:
    item: Item
    count: int


@dataclass(frozen=True)
class _Prefix:
    """How many blocks of each group leave: the first blocks of an order. has_neighbours: whether all tables have left. least_s,
    least_device_bytes: lower bounds for the prefix and all its neighbours: of the seconds without the cost of scarce host
    memory, and of the blocks on the device without any buffer."""

    leaving: Counts
    order: tuple[int, ...]
    has_neighbours: bool
    least_s: float
    least_device_bytes: int


class _Destinations:
    """The tier of each group within a staging cap, with the bytes that it frees and its cost. Never changed after it is made:
    searches within other limits share it."""

    def __init__(self, groups: Sequence[_Group], cap: int) -> None:
        self.groups, self.cap = groups, cap
        self.stay = [group.item.stay() for group in groups]
        self.near = [group.item.leave(cap, far=False) for group in groups]
        self.far = [group.item.leave(cap, far=True) for group in groups]
        self.is_possible = all(any(three) for three in zip(self.stay, self.near, self.far, strict=True))
        if not self.is_possible:
            return
        self.must: Counts = tuple(group.count if stay is None else 0 for group, stay in zip(groups, self.stay, strict=True))
        leave = [[c for c in two if c is not None] for two in zip(self.near, self.far, strict=True)]
        self.leave_s = [min((c.cost_s for c in two), default=0.0) for two in leave]
        self.leave_device = [min((c.device_bytes for c in two), default=0) for two in leave]
        self.leave_staged = [min((c.staged_bytes for c in two), default=0) for two in leave]
        stay_s = [0.0 if c is None else c.cost_s for c in self.stay]
        stay_device = [0 if c is None else c.device_bytes for c in self.stay]
        self.more_s = [away - here for away, here in zip(self.leave_s, stay_s, strict=True)]
        self.freed = [here - away for here, away in zip(stay_device, self.leave_device, strict=True)]
        self.all_stay_s = sum(s * group.count for s, group in zip(stay_s, groups, strict=True))
        self.all_stay_bytes = sum(n * group.count for n, group in zip(stay_device, groups, strict=True))
        self.near_host = [0 if c is None else c.host_bytes for c in self.near]
        self.far_order = self._far_order()
        self.walks = [self._walk(order) for order in self._orders()]

    def _far_order(self) -> list[tuple[float, int, int]]:
        """Return (seconds per byte, bytes freed, group) of the blocks that can move from the host to disk, cheapest first."""
        keyed = []
        for number, (near, far) in enumerate(zip(self.near, self.far, strict=True)):
            if near is not None and far is not None and near.host_bytes > far.host_bytes:
                freed = near.host_bytes - far.host_bytes
                keyed.append(((far.cost_s - near.cost_s) / freed, freed, number))
        return sorted(keyed, key=lambda entry: (entry[0], entry[2]))

    def least_s(self, leaving: Counts) -> float:
        """Return a lower bound of the seconds, without the cost of scarce host memory."""
        return self.all_stay_s + sum(map(_weigh, leaving, self.more_s))

    def least_run_bytes(self, leaving: Counts, limits: Limits) -> int:
        """Return a lower bound of the device's running peak: exact unless host and disk blocks stage different sizes."""
        staged = blocks = 0
        for count, size in zip(leaving, self.leave_staged, strict=True):
            if count and size:
                staged, blocks = max(staged, size), blocks + count
        freed = sum(map(_times, leaving, self.freed))
        return limits.run_bytes + self.all_stay_bytes - freed + min(blocks, limits.slots) * staged

    def least_host_bytes(self, leaving: Counts, disk_cap: int, limits: Limits) -> int:
        """Return a lower bound of the host's bytes with everything up to disk_cap on disk. It falls as disk_cap rises."""
        host = limits.host_bytes + limits.host_load_bytes + sum(map(_times, leaving, self.near_host))
        for _, freed, number in self.far_order:
            far = self.far[number]
            if far is not None and far.staged_bytes <= disk_cap:
                host -= leaving[number] * freed
        return host

    def least_far_s(self, leaving: Counts, limits: Limits, host_budget_bytes: int) -> float:
        """Return a lower bound of the seconds that scarce host memory adds: fractions of blocks to disk, without buffers."""
        short = self.least_host_bytes(leaving, -1, limits) - host_budget_bytes
        more_s = 0.0
        for rate, freed, number in self.far_order:
            if short <= 0:
                break
            moved_bytes = min(short, leaving[number] * freed)
            more_s, short = more_s + max(rate, 0.0) * moved_bytes, short - moved_bytes
        return more_s

    def _orders(self) -> list[list[int]]:
        """Return the groups that may leave, in order: tables, then by seconds per byte; for either destination."""
        by_near, by_far = self._order(self.near, self.far), self._order(self.far, self.near)
        return [by_near] if by_far == by_near else [by_near, by_far]

    def _order(self, first: Sequence[Choice | None], second: Sequence[Choice | None]) -> list[int]:
        keyed = []
        for number, (group, stay) in enumerate(zip(self.groups, self.stay, strict=True)):
            leave = first[number] or second[number]
            if leave is not None and stay is not None and stay.device_bytes > leave.device_bytes:
                rate = (leave.cost_s - stay.cost_s) / (stay.device_bytes - leave.device_bytes)
                keyed.append((not group.item.is_table, rate, number))
        return [number for _, _, number in sorted(keyed)]

    def _walk(self, order: Sequence[int]) -> tuple[_Prefix, ...]:
        leaving = list(self.must)
        left = [group.count - count for group, count in zip(self.groups, self.must, strict=True)]
        dearest_s = max((self.more_s[number] for number in order), default=0.0)
        walk = [self._prefix(tuple(leaving), left, order, float("-inf"))]
        for number in order:
            for _ in range(self.groups[number].count):
                leaving[number], left[number] = leaving[number] + 1, left[number] - 1
                walk.append(self._prefix(tuple(leaving), left, order, self.least_s(tuple(leaving)) - dearest_s))
        return tuple(walk)

    def _prefix(self, leaving: Counts, left: Sequence[int], order: Sequence[int], least_s: float) -> _Prefix:
        freed = sum(map(_times, leaving, self.freed)) + max((self.freed[n] for n in order if left[n]), default=0)
        table_waits = any(left[number] and self.groups[number].item.is_table for number in order)
        return _Prefix(leaving, tuple(order), not table_waits, least_s, self.all_stay_bytes - freed)

    def around(self, prefix: _Prefix) -> Iterator[Counts]:
        """Yield a prefix and its neighbours: one block more or one less leaves."""
        leaving = prefix.leaving
        yield leaving
        for number in prefix.order if prefix.has_neighbours else ():
            group = self.groups[number]
            if leaving[number] < group.count:
                yield (*leaving[:number], leaving[number] + 1, *leaving[number + 1 :])
            if leaving[number] and not group.item.is_table:
                yield (*leaving[:number], leaving[number] - 1, *leaving[number + 1 :])

    def far_must(self, leaving: Counts) -> Counts:
        return tuple(count if near is None else 0 for count, near in zip(leaving, self.near, strict=True))

    def far_prefixes(self, leaving: Counts, disk_cap: int, limits: Limits, host_budget_bytes: int) -> Iterator[tuple[Counts, bool]]:
        """Yield how many of each group go to disk, and whether it is a plain prefix of the disk order, cheapest first; before
        each comes the previous one with another block added. Those that certainly exceed the host's budget are skipped."""
        order = [(n, freed) for _, freed, n in self.far_order if leaving[n] and _staged(self.far[n]) <= disk_cap]
        counts = list(self.far_must(leaving))
        short = self.least_host_bytes(leaving, -1, limits) - host_budget_bytes
        for number, freed in order:
            for _ in range(leaving[number]):
                for other, more in order:
                    if short <= more and other != number and counts[other] < leaving[other]:
                        yield (*counts[:other], counts[other] + 1, *counts[other + 1 :]), False
                counts[number] += 1
                short -= freed
                if short <= 0:
                    yield tuple(counts), True

    def far_all(self, leaving: Counts, disk_cap: int) -> Counts:
        """Return everything within the disk cap on disk: the least host memory of that cap."""
        counts = list(self.far_must(leaving))
        for _, _, number in self.far_order:
            if _staged(self.far[number]) <= disk_cap:
                counts[number] = leaving[number]
        return tuple(counts)

    def placed(self, leaving: Counts, far_counts: Counts) -> list[Placed]:
        """Return the placement in which this many blocks of each group leave the device, and this many of those go to disk."""
        placements: list[Placed] = []
        for number, group in enumerate(self.groups):
            moved_count, away = leaving[number], far_counts[number]
            for choice, count in (
                (self.stay[number], group.count - moved_count),
                (self.near[number], moved_count - away),
                (self.far[number], away),
            ):
                if count:
                    assert choice is not None
                    placements.append((choice, group.item, count))
        return placements


def _staged(choice: Choice | None) -> int:
    return 0 if choice is None else choice.staged_bytes


@dataclass(frozen=True)
class _Family:
    """All candidate placements, for any limits. caps: sizes of staging buffers, ascending; destinations: for each cap within
    which every block can be placed."""

    caps: tuple[int, ...]
    destinations: tuple[_Destinations, ...]


@lru_cache(maxsize=KEPT)
def _family(items: tuple[Item, ...]) -> _Family:
    counted: dict[Item, int] = {}
    for item in items:
        counted[item] = counted.get(item, 0) + 1
    groups = [_Group(item, count) for item, count in counted.items()]
    caps = _thinned(sorted({choice.staged_bytes for item in counted for choice in item.choices}))
    destinations = (_Destinations(groups, cap) for cap in caps)
    return _Family(tuple(caps), tuple(to for to in destinations if to.is_possible))


class Search:
    """The family of placements of one request; `best` and the three `smallest` methods search it.

    Candidates do not depend on the budgets, so more memory never gives a slower plan. They are prefixes of an order in which blocks
    leave the device: tables first, then the fewest seconds per byte; each is also tried with one block more or one less, for every
    size of the staging buffers. If device and host are both full to the last block, it may miss a placement that fits exactly.
    """

    def __init__(self, items: Sequence[Item], limits: Limits) -> None:
        self.items, self.limits = tuple(items), limits
        family = _family(self.items)
        self.caps, self.destinations = family.caps, family.destinations

    def may_fit(self) -> bool:
        """Return False if the device's budget is too small for the blocks that cannot leave, or the host's is too small without
        any block."""
        if not self._may_hold_on_host():
            return False
        for to in self.destinations:
            freed = sum(max(each, 0) * group.count for each, group in zip(to.freed, to.groups, strict=True))
            least = self.limits.run_bytes + to.all_stay_bytes - freed
            if self.limits.device_need(least) <= self.limits.device_budget_bytes:
                return True
        return False

    def best(self) -> tuple[list[Choice], Totals] | None:
        """Return the cheapest placement within the limits, None if there is none."""
        best_found: tuple[list[Placed], Totals] | None = None

        def is_hopeless(least_s: float) -> bool:
            return best_found is not None and least_s >= best_found[1].cost_s * (1 - TIE)

        for to, leaving in self._leavings(is_hopeless):
            if is_hopeless(to.least_s(leaving)):
                continue
            run_bytes = to.least_run_bytes(leaving, self.limits)
            if not self._may_hold(run_bytes):
                continue
            host_budget_bytes = self.limits.host_budget_bytes
            if self.limits.total_budget_bytes is not None:  # the rest of a memory that device and host share
                left_bytes = self.limits.total_budget_bytes - self.limits.device_need(run_bytes)
                host_budget_bytes = min(host_budget_bytes, left_bytes)
            if is_hopeless(to.least_s(leaving) + to.least_far_s(leaving, self.limits, host_budget_bytes)):
                continue
            for placed, totals in self._filled(to, leaving, host_budget_bytes):
                if not is_hopeless(totals.cost_s) and self.limits.allows(totals):
                    best_found = placed, totals
        return None if best_found is None else (self._spread(best_found[0]), best_found[1])

    def smallest_device_bytes(self) -> int | None:
        """Return the smallest device budget that has a placement within the host and disk budgets, None if none has."""
        best: int | None = None
        if not self._may_hold_on_host():
            return best
        prefixes = [(to, prefix) for to in self.destinations for walk in to.walks for prefix in walk]
        seen: set[tuple[int, Counts]] = set()
        for to, prefix in sorted(prefixes, key=lambda pair: pair[1].least_device_bytes):
            if best is not None and self.limits.device_need(self.limits.run_bytes + prefix.least_device_bytes) >= best:
                break
            for leaving in to.around(prefix):
                if (to.cap, leaving) in seen:
                    continue
                seen.add((to.cap, leaving))
                if best is not None and self.limits.device_need(to.least_run_bytes(leaving, self.limits)) >= best:
                    continue
                for _, totals in self._filled(to, leaving, self.limits.host_budget_bytes):
                    need = self.limits.device_need(totals.peak_bytes)
                    if (best is None or need < best) and self.limits.allows_host(totals) and self.limits.allows_disk(totals):
                        best = need
        return best

    def smallest_host_bytes(self) -> int | None:
        """Return the smallest host budget that has a placement within the device and disk budgets, None if none has."""
        return self._smallest_far(
            lambda budget_bytes: replace(self.limits, host_budget_bytes=budget_bytes), lambda totals: totals.host_bytes,
            self.limits.allows_device,
        )  # fmt: skip

    def smallest_total_bytes(self) -> int | None:
        """Return the smallest sum of both, if device and host are one memory."""
        return self._smallest_far(
            lambda budget_bytes: replace(self.limits, total_budget_bytes=budget_bytes), self.limits.total_need,
            lambda totals: self.limits.allows_device(totals) and self.limits.allows_host(totals),
        )  # fmt: skip

    def _smallest_far(
        self, within: Callable[[int], Limits], measure: Callable[[Totals], int], is_allowed: Callable[[Totals], bool]
    ) -> int | None:
        """Return the smallest budget with a placement. within: the limits with this budget; measure: a placement's use of it;
        is_allowed: whether the other budgets except the disk's are kept."""
        # Each size of disk buffers needs least host memory when everything up to that size is on disk.
        best: int | None = None
        is_disk_short = False
        for to, leaving in self._leavings():
            if best is not None and to.least_host_bytes(leaving, self.caps[-1], self.limits) >= best:
                continue
            if not self._may_hold(to.least_run_bytes(leaving, self.limits)):
                continue
            for cap in (-1, *self.caps):
                if best is not None and to.least_host_bytes(leaving, cap, self.limits) >= best:
                    continue
                totals = totals_of(to.placed(leaving, to.far_all(leaving, cap)), self.limits)
                if (best is None or measure(totals) < best) and is_allowed(totals):
                    if self.limits.allows_disk(totals):
                        best = measure(totals)
                    else:
                        is_disk_short = True
        while best is not None and is_disk_short:  # some of the blocks that may go there
            less = Search(self.items, within(best - 1)).best()
            best, is_disk_short = (best, False) if less is None else (measure(less[1]), True)
        return best

    def _leavings(self, is_hopeless: Callable[[float], bool] = lambda least_s: False) -> Iterator[tuple[_Destinations, Counts]]:
        """Yield (destinations, how many of each group leave), each once: prefixes and their neighbours, without those that
        cannot be within the device's budget."""
        for to in self.destinations:
            seen: set[Counts] = set()
            for walk in to.walks:
                for prefix in walk:
                    if is_hopeless(prefix.least_s):
                        break  # further prefixes cost more
                    if not self._may_hold(self.limits.run_bytes + prefix.least_device_bytes):
                        continue
                    for leaving in to.around(prefix):
                        if leaving not in seen:
                            seen.add(leaving)
                            yield to, leaving

    def _may_hold_on_host(self) -> bool:
        return self.limits.host_bytes + self.limits.host_load_bytes <= self.limits.host_budget_bytes

    def _may_hold(self, run_bytes: int) -> bool:
        return self.limits.device_need(run_bytes) <= self.limits.device_budget_bytes

    def _filled(self, to: _Destinations, leaving: Counts, host_budget_bytes: int) -> Iterator[tuple[list[Placed], Totals]]:
        """Yield placements of the blocks that leave: all in host memory, then, while it is exceeded, more and more on disk.
        Those that certainly exceed the host's budget are skipped."""
        if to.least_host_bytes(leaving, self.caps[-1], self.limits) > host_budget_bytes:
            return
        if to.least_host_bytes(leaving, -1, self.limits) <= host_budget_bytes:
            placed = to.placed(leaving, to.far_must(leaving))
            totals = totals_of(placed, self.limits)
            yield placed, totals
            if self._has_room(totals):
                return
        has_room: dict[Counts, bool] = {}
        for cap in self.caps:
            if cap > to.cap or to.least_host_bytes(leaving, cap, self.limits) > host_budget_bytes:
                continue
            for far_counts, is_prefix in to.far_prefixes(leaving, cap, self.limits, host_budget_bytes):
                if far_counts not in has_room:
                    placed = to.placed(leaving, far_counts)
                    totals = totals_of(placed, self.limits)
                    has_room[far_counts] = self._has_room(totals)
                    yield placed, totals
                if is_prefix and has_room[far_counts]:
                    break  # longer prefixes cost more

    def _has_room(self, totals: Totals) -> bool:
        return self.limits.allows_host(totals) and self.limits.allows_total(totals)

    def _spread(self, placed: Sequence[Placed]) -> list[Choice]:
        """Return one choice per item: of identical blocks the first stay, the next go to the host, the last to disk."""
        waiting: dict[Item, list[Choice]] = {}
        for choice, item, count in reversed(placed):
            waiting.setdefault(item, []).extend([choice] * count)
        return [waiting[item].pop() for item in self.items]


def _thinned(sizes: list[int]) -> list[int]:
    """Return at most MOST_CAPS of the sizes, the largest among them."""
    if len(sizes) <= MOST_CAPS:
        return sizes
    last = len(sizes) - 1
    return [sizes[round(place * last / (MOST_CAPS - 1))] for place in range(MOST_CAPS)]


# Reasons --------------------------------------------------------------------------------------------------------------

UNLIMITED_BYTES = 2**62
_PAID = {
    "token": "read at every token", "image": "read once per image", "audio": "read once per audio clip",
    "request": "read once per request",
}  # fmt: skip


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
    """Return where a block would be with enough host memory: its present choice unless that is further away than the host."""
    return item.leave(choice.staged_bytes, far=False) or choice if choice.is_far else choice


def _too_much(all_stay: Totals, limits: Limits, device: str) -> str:
    """Return the budget that the placement with all blocks on the device would exceed, and by how much; "" if it would fit."""
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
            self.limits, device_budget_bytes=request.gpu_memory_bytes or UNLIMITED_BYTES,
            host_budget_bytes=request.host_memory_bytes or UNLIMITED_BYTES, total_budget_bytes=None,
        )  # fmt: skip

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
