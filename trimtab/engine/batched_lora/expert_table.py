"""Which adapter of which row changes which chosen expert?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trimtab.engine.kernels.experts import MEMBERS, ExpertLora, lora_tables
from trimtab.engine.lora.experts import DOWN, ExpertProduct
from trimtab.engine.lora.layers import ExpertsAdapter, StackChange


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


class StandIn:
    """Stands in a module for the adapter whose changes `tables` have now, so that the module's own way computes the same."""

    weight = None

    def __init__(self, adapter: ExpertsAdapter, tables: ExpertLora | None) -> None:
        self.part, self.of, self.tables = adapter.part, weakref.ref(adapter), tables

    def apply(self, product: ExpertProduct, x: Tensor, y: Tensor) -> Tensor:
        """See `ExpertsAdapter`. The base's once the adapter is gone, whose name is then not selected."""
        adapter = self.of()
        return y if adapter is None else adapter.apply(product, x, y)


class ExpertSlots:
    """The tables of a model's modules of experts, all with as many experts. slots: how many adapters they hold at once."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, slots: int) -> None:
        self.place = {module: number for number, module in enumerate(modules)}
        self.device, self.largest_rank = device, 0
        self._covered: set[nn.Module] = set()
        self._count = max((int(vars(module)["num_experts"]) for module in self.place), default=0)
        none = lora_tables([[None] * slots] * MEMBERS, torch.zeros(1, dtype=torch.int32), self._count)
        self._tables = [one.expand(len(self.place), *one.shape).contiguous().to(device) for one in none.numbers()]
        # For the torch path, which reads no address.
        self._changes: dict[nn.Module, list[list[StackChange | None]]] = {
            module: [[None] * slots for _ in range(MEMBERS)] for module in self.place
        }

    @property
    def shape_key(self) -> tuple[int, int]:
        """As `AdapterSlots.shape_key`."""
        return self.largest_rank, len(self._covered)

    def cover(self, adapters: Mapping[nn.Module, ExpertsAdapter]) -> None:
        """Look the modules up that these adapters change."""
        self._covered.update(adapters)
        self.largest_rank = max([self.largest_rank, *(one.A.shape[1] for own in adapters.values() for one in own.changes)])

    def put(self, slot: int, adapters: Mapping[nn.Module, ExpertsAdapter]) -> None:
        """Let a slot have these adapters; enqueued on the current stream."""
        if not self._covered:
            return
        made, first = [], torch.zeros(1, dtype=torch.int32)
        for module, lines in self._changes.items():
            adapter = adapters.get(module)
            members = {} if adapter is None else _members(adapter.changes)
            own = lora_tables([[members.get(member)] for member in range(MEMBERS)], first, self._count)
            made.append(own.numbers())
            for member, line in enumerate(lines if self.device.type == "cpu" else ()):  # elsewhere the table has addresses alone
                line[slot] = members.get(member)
        for table, values in zip(self._tables, zip(*made, strict=True), strict=True):
            table[:, :, slot].copy_(self._pinned(torch.stack(values)[:, :, 0]), non_blocking=True)

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values

    def args(self, module: nn.Module, row_slots: Tensor) -> ExpertLora | None:
        """Return the adapters of rows on a module, None if no adapter touches it."""
        if module not in self._covered:
            return None
        changes = self._changes[module] if self.device.type == "cpu" else None
        A, B, rank, scale, outputs, pairs = (table[self.place[module]] for table in self._tables)
        return ExpertLora(A, B, rank, scale, outputs, pairs, row_slots, self.largest_rank, changes=changes)
