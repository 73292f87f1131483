"""Which waiting prompts run together, as rows of one pass with an adapter each, and where do captured prompts read adapters?"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from trimtab.engine.batched_lora import table
from trimtab.engine.batched_lora.table import LEAST_SLOTS, AdapterSlots, StandIn
from trimtab.engine.kernels import gemm4
from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.kv.sequence import PrefillState
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.experts import uncover
from trimtab.engine.lora.layers import ExpertsAdapter
from trimtab.engine.lora.store import TOWERS, AdapterStore, Holders, PlainPlace, Selection
from trimtab.engine.passes.chunk_forward import Form, Piece
from trimtab.engine.prefill.rows import Passes, has_layers, layers_of, may_be_open, share_of_layers
from trimtab.errors import gib
from trimtab.planning.memory.adapters import MOST_LAYOUTS

if TYPE_CHECKING:
    from torch import nn

    from trimtab.engine.layers.leaves import Leaf


@dataclass(frozen=True)
class Costs:
    """The cost of passes, in tokens of a prompt alone. alone, together: beyond their tokens; token: one of a pass of several."""

    alone: float
    together: float
    token: float


# E4B with an adapter took 12.0 ms for 64 tokens, 16.5 for 512 (bench/results/prompts.json).
PACKED_WEIGHTS = Costs(800, 800, 1.0)
# Unpacked weights whose columns have the adapter of a prompt alone, while passes of several look theirs up: 6.4 ms for 64 tokens
# and 9.5 for 512, two prompts of 512 take 20.8 together (H100, bench/results/together_h100.json).
ADAPTER_INSIDE = Costs(860, 1300, 1.66)
# Prompts of a pass, and the fewest tokens of one: a smaller pass saves hardly anything.
MOST_PROMPTS = 16
LEAST_TOKENS = 256
# Keys and values that the rows of a pass look at are copied side by side: at most this many positions of all rows together.
MOST_POSITIONS = 16384
# Adapters of a higher rank are added faster by torch, one prompt at a time.
MOST_RANK = 16
# Graphs of passes that are captured where there is room for all others, and the memory that has to be left after them.
PACK_GRAPHS = 8
# Passes of this many tokens are captured before the first request.
PREPARED_TOKENS = 512
SPARE_BYTES = 256 * 2**20


State = TypeVar("State", bound=PrefillState)


@dataclass(frozen=True)
class Together(Generic[State]):
    """Prompts of one pass, in the order in which they wait. matches: the cached part of each prompt. size: places of a row."""

    prompts: tuple[State, ...]
    matches: tuple[Match, ...]
    size: int
    rows: int

    @property
    def tokens(self) -> int:
        """Of the pass, padding included."""
        return self.size * self.rows


def shapes_of(sizes: Sequence[int], most_tokens: int) -> list[tuple[int, int]]:
    """Return (tokens of a row, rows) of passes of up to `most_tokens` tokens. sizes: of chunks that prompts are cut into."""
    rows = [2**power for power in range(1, MOST_PROMPTS.bit_length())]
    least = min(LEAST_TOKENS, most_tokens)
    return [(size, count) for size in sizes for count in rows if least <= size * count <= most_tokens]


def choose_shape(
    waiting: Sequence[int], sizes: Sequence[int], most_tokens: int, costs: Costs = PACKED_WEIGHTS, *, share: float = 1.0
) -> tuple[tuple[int, int], list[int]] | None:
    """Return the shape that saves most against passes of one prompt each, and which prompts take part, the first always; None if
    none saves anything. waiting: tokens of each. share: of a whole pass for a prompt alone, where a step computes its last
    token."""
    best, saved = None, 0.0
    for size, rows in shapes_of(sizes, most_tokens):
        members = [number for number, count in enumerate(waiting) if count <= size][:rows]
        if len(members) < 2 or members[0] != 0:
            continue
        alone = share * sum(costs.alone + min(one for one in sizes if one >= waiting[number]) for number in members)
        gain = alone - (costs.together + costs.token * size * rows)
        if gain > saved:
            best, saved = ((size, rows), members), gain
    return best


class PackedPrefill:
    """The passes of several prompts of one batch. A pass reads and unpacks all weights, so prompts of about one length are worth
    one. Each shape is a graph."""

    def __init__(self, prompts: Passes) -> None:
        # A weak reference: the owner has this object, and a cycle would keep the memory of both.
        self._owner = weakref.ref(prompts)
        # transformers' modules of experts take a step's tokens without their rows.
        self._flattens = any(hasattr(one, "has_gate") and hasattr(one, "num_experts") for one in prompts.model.hf_model.modules())
        self._slots: AdapterSlots | None = None
        self.passes = 0

    @property
    def prompts(self) -> Passes:
        owner = self._owner()
        assert owner is not None
        return owner

    def why_not(self) -> str | None:
        """Return why no prompts go through together here, None if they can."""
        prompts = self.prompts
        if not prompts.is_on:
            return "prompts are not captured"
        if prompts.model.plan.request.batch_invariant:
            return "answers are batch-invariant"
        if prompts.batch.rows < 2:
            return "the batch has one row"
        if prompts.is_recurrent:
            return "layers keep a state of all tokens"
        if prompts.captures and prompts.staged_tables:
            return "the host fetches rows of tables"
        if prompts.model.streamer is not None:
            return "layers are streamed"
        if self._flattens and prompts.model.adapter_store.names and not has_layers(prompts):
            return "modules of experts take the tokens of all rows as one"
        if prompts.captures and not self._has_products():
            return "there is no kernel for many rows"
        if prompts.captures and not self._has_room:
            return "their graphs have no room"
        return None

    @cached_property
    def _has_room(self) -> bool:
        return self.prompts.has_room_for(PACK_GRAPHS, SPARE_BYTES)

    def _has_products(self) -> bool:
        """Whether the few tokens that pass the last layers are multiplied without unpacking weights."""
        prompts = self.prompts
        prompts.kernels()
        return not prompts.four_bit or prompts.batch.steps.kernels.rows is not None or prompts.model.unpacked is not None

    # Which -------------------------------------------------------------------------------------------------------------

    def choose(self, waiting: Sequence[State], most_tokens: int | None = None) -> Together[State] | None:
        """Return the waiting prompts for one pass of at most `most_tokens`, the first among them; None if the first one is
        computed alone."""
        prompts = self.prompts
        free = prompts.batch.free_rows
        if len(waiting) < 2 or free < 2 or self.why_not() is not None or not self._can(waiting[0]):
            return None
        able, groups = [], set()
        for prompt in waiting:
            if self._can(prompt) and prompt.row.group not in groups:
                able.append(prompt)
                groups |= {prompt.row.group} - {""}  # the others of a group copy its states
        most = min(most_tokens or prompts.most_packed, prompts.most_packed)
        counts = [prompt.inputs.prompt_tokens for prompt in able]
        matches = [prompts.batch.prefixes.find(prompt) for prompt in able]
        kept = [
            (prompt, match) for prompt, match, count in zip(able, matches, counts, strict=True)
            if match.tokens < count and prompts.batch.prefixes.border(prompt) >= count
        ]  # fmt: skip
        if not kept or kept[0][0] is not waiting[0]:
            return None
        lengths = [prompt.inputs.prompt_tokens - match.tokens for prompt, match in kept]
        largest = max(prompts.sizes)
        fitting = [number for number, count in enumerate(lengths) if count <= largest]
        if not fitting or fitting[0] != 0:
            return None
        unpacked = prompts.model.unpacked
        costs = ADAPTER_INSIDE if unpacked is not None and unpacked.columns else PACKED_WEIGHTS
        may_end = kept[0][0].may_end_in_step and may_be_open(prompts)
        ends_in_step = may_end and bool(prompts.batch.active)
        share = share_of_layers(prompts.chunk_forward()) if ends_in_step else 1.0
        choice = choose_shape([lengths[number] for number in fitting], prompts.sizes, most, costs, share=share)
        if choice is None:
            return None
        (size, rows), members = choice
        chosen = [kept[fitting[number]] for number in members][:free]
        if len(chosen) < 2:
            return None
        if any(match.tokens for _, match in chosen):
            longest = max(prompt.inputs.prompt_tokens for prompt, _ in chosen)
            if rows * longest > MOST_POSITIONS:
                return None
        return Together(tuple(prompt for prompt, _ in chosen), tuple(match for _, match in chosen), size, rows)

    def has_place(self, prompt: PrefillState) -> bool:
        """Whether a waiting prompt is short enough for such a pass, for any other prompts and adapters."""
        if self.why_not() is not None or prompt.inputs.has_media or prompt.done_tokens or prompt.returns_states:
            return False
        left_tokens = prompt.inputs.prompt_tokens - self.prompts.batch.prefixes.peek(prompt)
        return left_tokens <= max(self.prompts.sizes)

    def _can(self, prompt: PrefillState) -> bool:
        if prompt.inputs.has_media or prompt.returns_states:
            return False
        if prompt.done_tokens or prompt.logits is not None or prompt in self.prompts.jobs:
            return False
        batch, group = self.prompts.batch, prompt.row.group
        if group and any(row.group == group for row in (*batch.placed, *batch.active)):
            return False
        name, store = prompt.row.adapter, self.prompts.model.adapter_store
        if name is None or not self.prompts.captures:
            return name is None or name in store.names
        if name not in store.names or store.holders[name].fitting.largest_rank > MOST_RANK:
            return False
        table = self._table()
        return table is not None and table.why_not(name) is None

    def _table(self) -> AdapterSlots | None:
        """Return the table that rows find their adapters in, None where there are no kernels that read it."""
        prompts = self.prompts
        kernels, own = prompts.kernels(), prompts.batch.steps.kernels
        if self._slots is None and kernels.adds and own.has_lora:
            assert kernels.module is not None
            step = prompts.batch.steps.fused_step() if own.experts is not None else None
            layers = [] if step is None else step.layers
            self._slots = AdapterSlots(
                prompts.model.hf_model.modules(), prompts.model.adapter_store, MOST_PROMPTS, prompts.device, module=own.matvec,
                many=own.rows, prompt=kernels.module,
                experts=[layer.experts.module for layer in layers if layer.experts is not None and layer.experts.takes_many],
            )  # fmt: skip
        return self._slots

    # How ---------------------------------------------------------------------------------------------------------------

    def run(self, together: Together[Any], rows: Sequence[int]) -> list[Tensor]:
        """Put these prompts through, their keys and values into these rows of the cache; returns each one's logits [V]."""
        self.prompts.chunk_forward()  # the cache's layers are known from then on
        pieces = []
        for prompt, match, row in zip(together.prompts, together.matches, rows, strict=True):
            self.prompts.batch.pages.bind(prompt.row, row)
            self.prompts.batch.cache.clear(row)
            self.prompts.batch.prefixes.into_row(match, row)
            pieces.append(Piece(prompt.inputs.token_ids, match.tokens, row))
        names = [prompt.row.adapter for prompt in together.prompts]
        logits = self._pass(pieces, names, together.size, together.rows)
        return [logits[number].clone() for number in range(len(pieces))]

    def _pass(
        self, pieces: Sequence[Piece], names: Sequence[str | None], size: int, rows: int, *, at_once: bool = False
    ) -> Tensor:  # fmt: skip
        prompts, model = self.prompts, self.prompts.model
        forward = prompts.chunk_forward()
        padded = [*names, *[names[0]] * (rows - len(names))]
        # Once adapters are attached a pass looks them up, whether its prompts have any or not: one graph for all.
        table = self._table() if model.adapter_store.names else None
        key: Hashable = None
        if table is not None:
            table.set_rows(padded)
            model.adapter_store.none()
            key = table.shape_key
        else:
            model.adapter_store.set_rows(padded)
        forward.use(layers_of(prompts, forward), None)
        form = forward.form_of(pieces, size, rows=rows, by_table=table is not None)
        forward.load(form, pieces)
        self.passes += 1
        key = key, forward.firsts is not None
        return prompts.computed((form, key), None, [piece.row for piece in pieces], at_once=at_once)

    def prepare(self, token: int, adapter: str | None) -> None:
        """Capture the passes that are needed most before they are. No row may be active."""
        if self.why_not() is not None:
            return
        table = self._table() if self.prompts.model.adapter_store.names else None
        adapter = None if table is not None and table.why_not(adapter) is not None else adapter
        for size, rows in shapes_of(self.prompts.sizes, self.prompts.most_packed):
            if size * rows == PREPARED_TOKENS or size >= PREPARED_TOKENS:
                count = min(rows, self.prompts.batch.rows)
                pieces = [Piece([token] * (size - 1), 0, row) for row in range(count)]
                self._pass(pieces, [adapter] * count, size, rows, at_once=True)

    def emptied(self, form: Form) -> AdapterSlots | None:
        """Return the table in which the rows of a pass look their adapters up, if they do, with sums of no row left in it."""
        if not form.by_table:
            return None
        assert self._slots is not None
        self._slots.empty(form.rows)
        return self._slots


assert MOST_PROMPTS <= LEAST_SLOTS and MOST_PROMPTS <= gemm4.PAYING_ROWS


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
