"""Which waiting prompts run together, as rows of one pass with an adapter each?"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from trimtab.engine.batched_lora.table import LEAST_SLOTS, AdapterSlots
from trimtab.engine.kernels import gemm4 as many_rows
from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.kv.sequence import PrefillState
from trimtab.engine.passes.chunk_forward import Form, Piece
from trimtab.engine.prefill import selection
from trimtab.engine.prefill.rows import Passes
from trimtab.engine.prefill.selection import has_layers, layers_of


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
        if prompts.captures and not prompts.has_room_for(PACK_GRAPHS, SPARE_BYTES):
            return "their graphs have no room"
        return None

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
        may_end = kept[0][0].may_end_in_step and selection.may_be_open(prompts)
        ends_in_step = may_end and bool(prompts.batch.active)
        share = selection.share_of_layers(prompts.chunk_forward()) if ends_in_step else 1.0
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


assert MOST_PROMPTS <= LEAST_SLOTS and MOST_PROMPTS <= many_rows.PAYING_ROWS
