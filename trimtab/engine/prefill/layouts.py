"""Where do captured prompts and towers read adapters?"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from trimtab.engine.batched_lora import table
from trimtab.engine.batched_lora.table import AdapterSlots, StandIn
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.attached import Holders, PlainPlace
from trimtab.engine.lora.experts import uncover
from trimtab.engine.lora.layers import ExpertsAdapter
from trimtab.engine.lora.store import TOWERS, AdapterStore, Selection
from trimtab.engine.prefill.rows import Passes
from trimtab.engine.prefill.selection import has_layers
from trimtab.errors import gib
from trimtab.planning.memory.adapters import MOST_LAYOUTS

if TYPE_CHECKING:
    from torch import nn

    from trimtab.engine.layers.leaves import Leaf


# Of layouts, in the layers of any model of this process.
_NUMBERS = itertools.count(1)


@dataclass(eq=False)
class PromptLayout:
    """The buffer in which graphs read adapters of one layout: layers know its tensors in `buffer` by `name`, and experts its table.

    holds: (name, serial) of the adapter whose values it has. has_towers: whether layers of towers read it too. experts: the table;
    stand_ins: of the adapter, by module. let_go: takes it out of the layers, at the latest when it goes. Adapters of one layout
    have the same layers and ranks at the same places of one piece of memory. An adapter of another kind (DoRA, embeddings, whole
    modules) has separate graphs that read it where it is.
    """

    name: str
    buffer: Tensor
    has_towers: bool
    experts: AdapterSlots
    stand_ins: dict[nn.Module, StandIn]
    leaves: InitVar[list[Leaf]]
    holds: tuple[str, int] | None = None

    def __post_init__(self, leaves: list[Leaf]) -> None:
        self.let_go = weakref.finalize(self, _let_go, self.name, WeakSet(leaves), WeakSet(self.stand_ins))


class Layouts:
    """The layouts of one batch's prompts, the one used longest ago first."""

    def __init__(self, prompts: Passes) -> None:
        self.prompts, self.model = prompts, prompts.model
        self._held: OrderedDict[Hashable, PromptLayout] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        return sum(int(one.buffer.nbytes) for one in self._held.values())

    @property
    def names(self) -> set[str]:
        """Adapter names of these layouts in the layers."""
        return {one.name for one in self._held.values()}

    def set_adapter(self, name: str | None) -> tuple[Hashable, int | None]:
        """Select an adapter for this pass; returns its part of a graph's key, and its serial where a graph
        would read its own addresses."""
        store = self.model.adapter_store
        if name is None or name not in store.names:  # which raises there
            store.set(name)
            return None, None
        layout = self._layout_of(name)
        if layout is None:
            store.set(name)
            serial = store.holders[name].serial
            return (name, serial), serial
        _select(store, layout)
        return layout.name, None

    def set_towers(self, name: str | None) -> tuple[Hashable, int | None]:
        """The same for a pass of the towers: adapters that change no tower share the base's graphs. Errors: RequestError for an
        adapter that is not loaded."""
        store = self.model.adapter_store
        store.set(name)
        if name is None or not self.model.tower_content(name):
            return None, None
        layout = self._layout_of(name)
        if layout is None or not layout.has_towers:
            serial = store.holders[name].serial
            return (name, serial), serial
        _select(store, layout)
        return layout.name, None

    def _layout_of(self, name: str) -> PromptLayout | None:
        """Return the layout of an adapter with its values in place, None for one that has none."""
        prompts, store = self.prompts, self.model.adapter_store
        planned = self.model.plan.execution.prompt
        if prompts.sizes == planned.chunks and "adapter_copy" not in planned.bytes:
            return None  # planned so: one adapter is read where it is
        holders = store.holders[name]
        serial, fitting, experts = holders.serial, holders.fitting, self._experts_of(name, holders)
        rest = {part_of(module, name) for _, module in holders.rest if module not in experts}
        if not fitting.plain or not rest <= set(TOWERS):
            return None
        source = values_of(name, holders)
        has_towers = not rest
        places = [one for one in fitting.plain if has_towers or one.part not in TOWERS]
        ranks = [one.A.shape[1] for adapter in experts.values() for one in adapter.changes]
        plain = tuple((one.leaf.module_path, one.rank, one.scale, one.A_start, one.B_start) for one in places)
        key = (
            has_towers, source.numel(), plain, tuple(vars(module)["module_path"] for module in experts), max(ranks, default=0),
        )  # fmt: skip
        layout = self._held.get(key)
        if layout is None:
            while self._held and not self._has_room(source.nbytes):
                self._drop()
            if not self._has_room(source.nbytes):
                prompts.fall_back(
                    f"a copy of {name} takes {gib(source.nbytes)}, which is not available", "prompts that share graphs"
                )
                return None
            layout = self._held[key] = self._new(places, source, experts, has_towers=has_towers)
        self._held.move_to_end(key)
        if layout.holds != (name, serial):
            layout.buffer.copy_(source)
            layout.experts.set_experts(experts)
            for module, stand_in in layout.stand_ins.items():
                stand_in.of = weakref.ref(experts[module])
            layout.holds = (name, serial)
        return layout

    def _has_room(self, needed: int) -> bool:
        prompts = self.prompts
        if not prompts.captures:
            return True
        planned, others = self.model.plan.execution.prompt, self.nbytes
        if prompts.sizes == planned.chunks:
            counted = planned.bytes.get("adapter_copy", 0)
            return needed + others <= counted + max(prompts.left_bytes(), 0)
        counted = prompts.extra_bytes() - prompts.extra_bytes(prompts.sizes, adapters=False)
        return needed + others <= counted or needed + others - counted <= prompts.left_bytes() - prompts.extra_bytes()

    def _experts_of(self, name: str, holders: Holders) -> dict[nn.Module, ExpertsAdapter]:
        """Return what an adapter changes of experts, by module, if kernels add all of it, else nothing."""
        adapters = {module: vars(module)["adapters"][name] for _, module in holders.rest}
        changed = {module: one for module, one in adapters.items() if isinstance(one, ExpertsAdapter)}
        steps = self.prompts.batch.steps
        step = steps.fused_step() if changed and steps.kernels.experts is not None and has_layers(self.prompts) else None
        found = [layer.experts for layer in step.layers if layer.experts is not None] if step is not None else []
        known = {one.module: changed[one.module] for one in found if one.module in changed and one.takes_many}
        return known if len(known) == len(changed) and all(table.why_not_experts(one) is None for one in changed.values()) else {}

    def _new(
        self, places: Sequence[PlainPlace], source: Tensor, experts: Mapping[nn.Module, ExpertsAdapter], *, has_towers: bool
    ) -> PromptLayout:  # fmt: skip
        while len(self._held) >= MOST_LAYOUTS:
            self._drop()
        buffer = torch.empty_like(source)
        slots = AdapterSlots.of_experts(experts, self.model.adapter_store, source.device)
        stand_ins = {module: StandIn(one, slots.expert_args(module, 1)) for module, one in experts.items()}
        own_name = f"\0prompt layout {next(_NUMBERS)}"
        layout = PromptLayout(own_name, buffer, has_towers, slots, stand_ins, [one.leaf for one in places])
        for module, stand_in in stand_ins.items():
            vars(module)["adapters"][own_name] = stand_in
        for one in places:
            wide, high, rank = one.leaf.in_features, one.leaf.out_features, one.rank
            A = buffer.as_strided((rank, wide), (wide, 1), one.A_start)
            B = buffer.as_strided((high, rank), (rank, 1), one.B_start)
            one.leaf.adapters[layout.name] = lora.LinearAdapter(one.part, one.scale, A, B)
        return layout

    def _drop(self) -> None:
        """Give back the layout used longest ago, and its graphs."""
        _, old = self._held.popitem(last=False)
        old.let_go()
        self.prompts.forget(old.name)


def _let_go(name: str, leaves: WeakSet[Leaf], experts: WeakSet[nn.Module]) -> None:
    """Take a layout out of the model's layers: it was dropped, or its batch is gone."""
    for leaf in leaves:
        leaf.adapters.pop(name, None)
    for module in experts:
        if (adapters := vars(module).get("adapters")) is not None and adapters.pop(name, None) and not adapters:
            uncover(module)


def _select(store: AdapterStore, layout: PromptLayout) -> None:
    store.select(Selection(layout.name))


def part_of(module: nn.Module, name: str) -> str | None:
    """Return the part of the model that an adapter's piece in a module belongs to."""
    adapter = module.__dict__["adapters"][name]
    part: str | None = getattr(adapter, "part", None) or module.__dict__.get("part")
    return part


def values_of(name: str, holders: Holders) -> Tensor:
    """Return the values [N] that an attached adapter's plain places count in."""
    first = holders.fitting.plain[0]
    A: Tensor = first.leaf.adapters[name].A
    begins = A.storage_offset() - first.A_start
    count = A.untyped_storage().nbytes() // A.element_size() - begins
    return A.as_strided((count,), (1,), begins)
