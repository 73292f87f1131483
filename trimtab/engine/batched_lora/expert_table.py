"""Which adapter of which row changes which chosen expert?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trimtab.engine.kernels.experts import MEMBERS, Change, ExpertLora, lora_tables
from trimtab.engine.lora.experts import DOWN, ExpertsAdapter, StackChange
from trimtab.engine.lora.layers import Holders


def why_not(adapter: ExpertsAdapter) -> str | None:
    """Return why the changes of one adapter are in no table, None if they are."""
    if any(one.A.dtype != torch.float32 or not (one.A.is_contiguous() and one.B.is_contiguous()) for one in adapter.changes):
        return "is not held in contiguous float32"
    if any(matrix.data_ptr() % 16 for one in adapter.changes for matrix in (one.A, one.B)):
        return "is not aligned to 16 bytes"
    if len(_members(adapter.changes)) < len(adapter.changes):
        return "has more than two changes of one stack"
    return None


def _members(changes: Sequence[StackChange]) -> dict[int, StackChange]:
    """Return changes by their members: the first two of the first stack are 0 and 1, the first of the second is 2."""
    found = dict(enumerate([one for one in changes if one.parameter != DOWN][: MEMBERS - 1]))
    for one in changes:
        if one.parameter == DOWN:
            found[MEMBERS - 1] = one
    return found


def tables_of(adapter: ExpertsAdapter, count: int) -> ExpertLora:
    """Return the tables of an adapter for a pass whose tokens all have it. count: of experts. Errors: ask `why_not` first."""
    found = {member: _change(one) for member, one in _members(adapter.changes).items()}
    first = torch.zeros(1, dtype=torch.int32, device=adapter.changes[0].A.device)
    return lora_tables([[found.get(member)] for member in range(MEMBERS)], first, count)


def _change(one: StackChange) -> Change:
    return Change(one.A, one.B, one.scale, one.outputs.start, one.pairs)


class StandIn:
    """Stands in a module for the adapter whose changes a table has now, so that the module's own way computes the same."""

    weight = None

    def __init__(self, adapter: ExpertsAdapter) -> None:
        self.part, self.of = adapter.part, weakref.ref(adapter)

    @property
    def changes(self) -> tuple[StackChange, ...]:
        """See `ExpertsAdapter`. Empty once the adapter is gone, whose name is then not selected."""
        adapter = self.of()
        return () if adapter is None else adapter.changes


class ExpertSlots:
    """The tables of a model's modules of experts, all with as many experts. slots: how many adapters they hold at once."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, slots: int) -> None:
        self._place = {module: number for number, module in enumerate(modules)}
        self.device, self.largest_rank = device, 0
        self._covered: set[nn.Module] = set()
        count = max((int(vars(module)["num_experts"]) for module in self._place), default=0)
        shape = (len(self._place), MEMBERS, slots)
        self._A, self._B = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in "AB")
        self._rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self._scale = torch.zeros(shape, device=device)
        self._outputs = torch.zeros(*shape, 2, dtype=torch.int32, device=device)
        self._pairs = torch.full((*shape, count), -1, dtype=torch.int32, device=device)
        # For the torch path, which reads no address.
        self._changes: dict[nn.Module, list[list[Change | None]]] = {
            module: [[None] * slots for _ in range(MEMBERS)] for module in self._place
        }

    @property
    def shape_key(self) -> tuple[int, int]:
        """As `AdapterSlots.shape_key`."""
        return self.largest_rank, len(self._covered)

    def cover(self, holders: Holders, name: str) -> None:
        """Look the modules up that this adapter changes."""
        for module, adapter in self._adapters(holders, name):
            self._covered.add(module)
            self.largest_rank = max(self.largest_rank, *(one.A.shape[1] for one in adapter.changes))

    def _adapters(self, holders: Holders, name: str) -> Iterable[tuple[nn.Module, ExpertsAdapter]]:
        for _, module in holders.rest:
            adapter = vars(module)["adapters"][name]
            if isinstance(adapter, ExpertsAdapter) and module in self._place:
                yield module, adapter

    def put(self, slot: int, holders: Holders, name: str) -> None:
        """Let a slot have this adapter; enqueued on the current stream."""
        if not self._covered:
            return
        shape = self._rank.shape[:2]
        A, B = (torch.zeros(shape, dtype=torch.int64) for _ in "AB")
        rank, scale = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        outputs = torch.zeros(*shape, 2, dtype=torch.int32)
        pairs = torch.full((*shape, self._pairs.shape[-1]), -1, dtype=torch.int32)
        for lines in self._changes.values():
            for line in lines:
                line[slot] = None
        for module, adapter in self._adapters(holders, name):
            for member, one in _members(adapter.changes).items():
                at = self._place[module], member
                A[at], B[at] = one.A.data_ptr(), one.B.data_ptr()
                rank[at], scale[at] = one.A.shape[1], one.scale
                outputs[at] = torch.tensor([one.outputs.start, one.outputs.stop], dtype=torch.int32)
                pairs[at][torch.tensor(list(one.pairs))] = torch.tensor(list(one.pairs.values()), dtype=torch.int32)
                if self.device.type == "cpu":  # elsewhere the table has addresses alone
                    self._changes[module][member][slot] = _change(one)
        tables = (self._A, self._B, self._rank, self._scale, self._outputs, self._pairs)
        for table, made in zip(tables, (A, B, rank, scale, outputs, pairs), strict=True):
            table[:, :, slot].copy_(self._pinned(made), non_blocking=True)

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values

    def args(self, module: nn.Module, row_slots: Tensor) -> ExpertLora | None:
        """Return the adapters of rows on a module, None if no adapter touches it."""
        if module not in self._covered:
            return None
        at = self._place[module]
        return ExpertLora(
            self._A[at], self._B[at], self._rank[at], self._scale[at], self._outputs[at], self._pairs[at], row_slots,
            self.largest_rank, changes=self._changes[module] if self.device.type == "cpu" else None,
        )  # fmt: skip
