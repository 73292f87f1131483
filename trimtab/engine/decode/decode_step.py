"""How is a decode step of all rows computed: by transformers' modules, or by a few kernels launched as one CUDA graph?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trimtab.engine.decode.step_capture import StepCapture
from trimtab.engine.decode.step_choice import Fallback, StepChoice
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.kernels import embed_and_logits, gemm4
from trimtab.engine.kernels.device_kernels import DeviceKernels
from trimtab.engine.kernels.experts import MOST_ROWS as MOST_EXPERT_ROWS
from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.kv.kv_cache import BatchedKVCache, LayerCache
from trimtab.engine.layers import leaves
from trimtab.engine.lora import fewer_ops
from trimtab.engine.lora.store import EAGER
from trimtab.engine.memory.graph_cache import Body, GraphCache, Inputs, Policy, extra_bytes, most_graphs
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.engine.memory.rates import outside_torch
from trimtab.errors import gib
from trimtab.planning.values.execution import BUCKETS, CHOSEN_ON_HOST, KERNEL_ROWS

if TYPE_CHECKING:
    from trimtab.engine.batched_lora.table import AdapterSlots
    from trimtab.engine.families.step import FusedStep
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.layers.context import EngineContext
    from trimtab.engine.lora.store import Fitting

# Of this many rows: logits, or the result of `FusedStep`.
Step = Callable[[int], Any]
# In the key of a graph whose rows look their adapters up.
_TABLE = "table"
# Attention of a step through the modules reads this many places at least, doubled until the longest row fits.
SMALLEST_PLACES = 256


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """The tensors that the steps of one batch read and write, at the same addresses in each of them.

    tokens [rows, 1] int64: each row's last token, where a step reads it and a captured one writes the next. cache: keys, values and
    positions of `rows` rows of up to context_tokens tokens.
    """

    tokens: Tensor
    cache: BatchedKVCache
    rows: int
    context_tokens: int


@dataclass(frozen=True)
class BatchState:
    """The rows of one step, from row 0 on.

    adapters: of each row, None for the base. last_tokens: of each row, as far as the host knows. longest: tokens of the longest
    row. A step that is queued ahead of its tokens has one more (`ahead`).
    """

    adapters: tuple[str | None, ...]
    last_tokens: tuple[int, ...]
    longest: int
    ahead: bool = False

    def __post_init__(self) -> None:
        if not self.adapters or len(self.adapters) != len(self.last_tokens):
            raise ValueError(f"{len(self.adapters)} adapters and {len(self.last_tokens)} tokens of rows")

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.adapters)

    @property
    def tokens_in_reach(self) -> int:
        """How many tokens the longest row has when the step runs."""
        return self.longest + self.ahead

    def uniform(self, adapter: str | None, count: int) -> BatchState:
        """Return the state of the first `count` rows, all with one adapter."""
        return BatchState((adapter,) * count, self.last_tokens[:count], self.longest, self.ahead)

    def any_of(self, token_ids: Sequence[int] | frozenset[int]) -> bool:
        """Whether a row's last token is one of these."""
        return any(token in token_ids for token in self.last_tokens)


@dataclass(eq=False)
class DecodeStep:
    """The decode steps of one batch's buffers. mode: "auto" takes the fastest that works, the others are exact.

    "eager": transformers' modules as they are, one kernel after the other. "graph": the same modules, captured, on a GPU with fewer
    operations for norms (`fewer_ops`) and adapters (`table`). "fused": a few kernels of trimtab, captured; on a CPU their plain
    counterpart. Errors: RequestError for an unknown mode; DeviceError if an explicitly requested mode is unavailable.
    """

    model: EngineContext
    buffers: StepBuffers
    mode: str = "auto"
    graph_bytes: int = 0  # that the driver took while graphs were captured beforehand
    wrote_tokens: bool = False  # whether the last step put each row's most likely token where the next one reads it

    def __post_init__(self) -> None:
        self.device: torch.device = self.model.device
        self.rows, self.cache, self.tokens = self.buffers.rows, self.buffers.cache, self.buffers.tokens
        self.is_invariant = bool(self.model.plan.request.batch_invariant)
        self._choice = StepChoice(self.model, self.mode, self.rows)
        self._graphs = GraphCache()
        self._slots: AdapterSlots | None = None
        self._short_ops: fewer_ops.ShortOps | None = None
        self._fused: FusedStep | None = None
        # The count of changes of the attached adapters at the last check whether a fused step is right for them, and the result.
        self._examined: tuple[int, str | None] | None = None
        self._shape: tuple[int, ...] | None = None
        self._live = -1  # rows that `cache.live` says
        self._tables = leaves.asking_host(self.model.hf_model)
        self.suppressed, self.suppressed_first = sequence.suppressed_ids(self.model.hf_model, self.device)
        # A token without a row in a layer's table ends its answer before a step looks it up.
        self._may_lack_rows = bool(sequence.lost_words(self.model.hf_model))
        # Families with recurrent layers look an image's placeholder up as any other token, in a step.
        is_recurrent = kv_cache.keeps_states(self.model.hf_model)
        self._placeholders = frozenset[int]() if is_recurrent else sequence.placeholder_ids(self.model.hf_model)
        self._capturing = StepCapture(self._choice, self.tokens, self._graphs)

    @property
    def fallbacks(self) -> list[Fallback]:
        """The slower computations in use, with reasons."""
        return self._choice.fallbacks

    @property
    def captures(self) -> int:
        """How many steps were captured."""
        return self._graphs.captures

    @property
    def capture_s(self) -> float:
        """The seconds of all captures, without trials of kernels."""
        return self._graphs.capture_s

    @property
    def kernels(self) -> DeviceKernels:
        """The kernels of trimtab in the steps."""
        return self._choice.kernels

    @property
    def may_fuse(self) -> bool:
        """Whether steps are made of a few kernels, or of their plain counterpart."""
        return self._choice.is_fusable

    @property
    def is_captured(self) -> bool:
        """Whether steps are CUDA graphs where none of their rows needs transformers' own pass."""
        return self._choice.is_captured

    # One step ----------------------------------------------------------------------------------------------------------

    def may_look_ahead(self) -> bool:
        """Whether the next step can be queued before the host knows its tokens: the tokens are on the device, the host brings no
        other input."""
        return self.wrote_tokens and not self._tables and not self._may_lack_rows

    def run(self, state: BatchState) -> tuple[Tensor, Tensor]:
        """Return the logits [count, V] float32 of one step of these rows, and each row's most likely token [count] that is not
        suppressed, -1 where the scores are not numbers. Both are overwritten by the next step.

        Keys and values are written; positions are the caller's to advance.
        """
        count = state.count
        self.wrote_tokens = False
        if self.is_invariant:
            return self._run_invariant(state)
        if not self.has_placeholder(state):
            outputs = self._run_graph(state) if self.is_captured else None
            if outputs is not None:
                return outputs[0][:count], outputs[1][:count]
            # Without a graph, fused kernels run where the user requested them.
            step = self.fused_step() if self.mode == "fused" else None
            return self._eager(state, step or self._short)
        return self._eager(state, self._modules)

    def _run_invariant(self, state: BatchState) -> tuple[Tensor, Tensor]:
        """Return the result of `run`, each row with the bits that it has alone: by one graph of all rows, active or not, and by
        passes of one row for those that the graph cannot compute. See batch_invariant.py."""
        count = state.count
        apart = [number for number in range(count) if not self.is_captured or self._is_apart(state, number)]
        before = self.tokens.clone() if apart else None
        outputs = None
        if len(apart) < count:
            names = tuple(None if number in apart else name for number, name in enumerate(state.adapters))
            outputs = self._run_graph(replace(state, adapters=names))
            if outputs is None:  # no row is in a graph now, or from now on
                return self._one_by_one(dict(enumerate(state.adapters)))
            self.wrote_tokens = not apart
        if before is not None:
            self.tokens.copy_(before)
            alone = self._one_by_one({number: state.adapters[number] for number in apart})
            if outputs is None:
                return alone
            for number, logits, token in zip(apart, *alone, strict=True):
                outputs[0][number], outputs[1][number] = logits, token
        assert outputs is not None
        return outputs[0][:count], outputs[1][:count]

    def _one_by_one(self, rows: Mapping[int, str | None]) -> tuple[Tensor, Tensor]:
        """Return the logits [count, V] float32 and the most likely tokens [count] of rows (number -> adapter), each alone."""
        self.cache.limit_attention(self.buffers.context_tokens)
        logits, tokens = [], []
        for number, name in rows.items():
            self.model.adapter_store.set(name)
            with self.cache.from_row(number), torch.no_grad():
                scores, token = embed_and_logits.without(
                    embed_and_logits.argmax_logits(self._modules(1), None, None, None), self.suppressed
                )
            logits.append(scores[0].clone())
            tokens.append(token[0].clone())
        return torch.stack(logits), torch.stack(tokens)

    def _is_apart(self, state: BatchState, number: int) -> bool:
        """Whether a row's step cannot be part of a graph of all rows: its token is an image's, or no table has its adapter."""
        name = state.adapters[number]
        if state.last_tokens[number] in self._placeholders:
            return True
        if name is None:
            return False
        return not self.kernels.has_lora or self._adapter_slots().why_not(name) is not None or self._reads_experts([name])

    def has_placeholder(self, state: BatchState) -> bool:
        """Whether a row's last token is an image's placeholder: transformers embeds another one in its place."""
        return state.any_of(self._placeholders)

    def _eager(self, state: BatchState, step: Step) -> tuple[Tensor, Tensor]:
        self.cache.limit_attention(self._places(state))
        self._advance(state.count)
        self.model.adapter_store.set_rows(state.adapters)
        return self._finish(step, state.count)

    def _short(self, count: int) -> Tensor:
        """Return the result of `_modules`, from fewer operations where that is allowed: roundings differ."""
        if self.mode == "eager" or not self._may_be_short():
            return self._modules(count)
        if self._short_ops is None:
            self._short_ops = fewer_ops.ShortOps(
                self.model.hf_model, self.model.adapter_store, self.device, partial(self._choice.fall_back, requested=False)
            )
        unpacked = self.model.unpacked
        table = MatmulTable(
            None if unpacked is None else unpacked.matmul(least=KERNEL_ROWS + 1),
            gemm4.matmul(self._choice.four_bit, self.kernels.rows),
        )  # fmt: skip
        with self._short_ops.step(matmuls=table):
            return self._modules(count, are_added=True)

    def _may_be_short(self) -> bool:
        return self.device.type == "cuda"  # on a CPU the operations themselves take the time

    def _modules(self, count: int, *, are_added: bool = False) -> Tensor:
        """Return the logits [count, V] of transformers' own forward pass. are_added: see `step_masks`."""
        cache = self.cache
        if (table := self.model.adapter_store.table) is not None:
            table.empty(count)
        cache.begin(count)
        masks = kv_cache.step_masks(self.model.hf_model, cache, count, self.model.dtype, are_added=are_added)
        step = cache.rows_of_step(count)
        output = self.model.hf_model(
            input_ids=self.tokens[step], position_ids=kv_cache.step_positions(self.model.hf_model, cache, count),
            attention_mask=masks, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True,
        )  # fmt: skip
        logits: Tensor = output.logits[:, -1]
        return logits

    def _finish(self, step: Step, count: int, next_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if self._fused is not None and step is self._fused:
                outputs = self._fused(count, next_tokens)
            else:
                outputs = embed_and_logits.argmax_logits(step(count), None, next_tokens, self.kernels.ends)
            return embed_and_logits.without(outputs, self.suppressed, next_tokens)

    def _finish_and_go_on(self, step: Step, count: int) -> tuple[Tensor, Tensor]:
        return self._finish(step, count, self.tokens[:count, 0])

    def _places(self, state: BatchState, *, sees_all: bool = False) -> int:
        """Return how many places of the context attention reads. sees_all: every one, for any rows."""
        if self.is_invariant or sees_all:
            return self.buffers.context_tokens
        places = SMALLEST_PLACES
        while places < state.tokens_in_reach:
            places *= 2
        return min(places, self.buffers.context_tokens)

    # Graphs ------------------------------------------------------------------------------------------------------------

    def fused_step(self) -> FusedStep | None:
        """Return the fused step, None where steps are not fused; the cache's layers have to be known."""
        if not self._choice.is_fusable:
            return None
        from trimtab.engine.families.step import FusedStep

        if self._fused is None:  # not before a prompt was computed: the cache's layers are known from then on
            self._fused = FusedStep(self.model.hf_model, self.cache, self.tokens, self.kernels, self.model.unpacked)
        changes = self.model.adapter_store.changes
        if self._examined is None or self._examined[0] != changes:
            self._examined = changes, self._fused.why_not_rows()
        why = self._examined[1]
        if why is not None:
            self._choice.fall_back("fused step", why, requested=self.mode == "fused")
            return None
        return self._fused

    def _run_graph(self, state: BatchState, *, sees_all: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return the outputs of a replayed graph of these rows, captured first where there is none; None where that failed."""
        count, names = state.count, state.adapters
        if self._reads_experts(names):
            self._choice.fall_back("graph", CHOSEN_ON_HOST, requested=False)
            return None
        bucket = next((size for size in BUCKETS if size >= count and size <= self.rows), self.rows)
        if self.is_invariant:
            bucket = self.rows
        elif self.cache.has_recurrent and (self.mode == "graph" or bucket > gemm4.MOST_ROWS or self.fused_step() is None):
            # A capture computes a step several times, and padding rows may be placed ones: modules would advance their states.
            self._choice.fall_back("graph", "states of recurrent layers need the kernels of a step", requested=self.mode == "graph")
            return None
        padded = [*names, *[None] * (bucket - count)]
        step: Step = self._short
        kind = "modules"
        slots = self._slots_for(names)
        if self.mode != "graph" and bucket <= gemm4.MOST_ROWS:
            fused = self.fused_step()
            if fused is not None:
                step, kind = fused, "fused"
        self.cache.limit_attention(self._places(state, sees_all=sees_all))
        has_adapters = any(names)
        key: tuple[Hashable, ...] = (kind, bucket)
        if kind == "modules" or self.cache.kv == "int8":
            key = (*key, self.cache.seen_places)
        if slots is not None:
            slots.set_rows(padded)
            self._forget_smaller(slots.shape_key)
            key = (*key, _TABLE, slots.shape_key)
        elif has_adapters:  # captured with the adapters' own addresses
            key = (*key, *((name, self.model.adapter_store.holders[name].serial) if name is not None else None for name in padded))
        table = slots if has_adapters or self.is_invariant else None
        run, store = partial(self._finish_and_go_on, step, bucket), self.model.adapter_store
        # The store's selection has the row numbers that the graph reads.
        body = Body(run, lambda: [run()[0][:count].clone()], kept=lambda: (table, store.selection))
        inputs = Inputs(partial(self._stage, state, bucket), lambda: [(self.tokens, self.tokens.clone())])
        capturing = partial(self._being_captured, body, padded, table, count, is_ours=kind == "fused" or table is not None)
        policy = Policy(
            self.model, "a decode step", partial(self._choice.capture_failed, is_fused=kind == "fused"),
            most=partial(most_graphs, self.model, self.rows), capturing=capturing, streamer=self.model.streamer, is_trial=True,
        )  # fmt: skip
        outputs = self._graphs.run(key, body, inputs, policy)
        if outputs is None:
            return None
        self.wrote_tokens = True
        return outputs[0], outputs[1]

    def _reads_experts(self, names: Sequence[str | None]) -> bool:
        """Whether a step of these rows reads chosen experts on the host: no kernels know them, or no table its adapters."""
        store, rows = self.model.adapter_store, self.rows if self.is_invariant else len(names)
        if not store.reads_on_host(names):
            return False
        if self.kernels.experts is None or self.mode == "graph" or rows > MOST_EXPERT_ROWS or self.fused_step() is None:
            return True
        return store.changes_experts(names) and self._slots_for(names) is None

    def _slots_for(self, names: Sequence[str | None]) -> AdapterSlots | None:
        """Return the table of adapters if the kernels that use it were chosen and every adapter of the rows fits it."""
        if not self.kernels.has_lora or not (any(names) or (self.is_invariant and self._has_adapters())):
            return None
        slots = self._adapter_slots()
        for name in dict.fromkeys(names):
            why = slots.why_not(name)
            if why is not None:
                self._choice.fall_back("adapters by table", why, requested=False)
                return None
        return slots

    def _has_adapters(self) -> bool:
        """Whether a table has layers to look up, of adapters that are there or were: from then on every step looks them up."""
        if self._slots is None and not self.model.adapter_store.names:
            return False
        return any(self._adapter_slots().shape_key[1::2])

    def _adapter_slots(self) -> AdapterSlots:
        from trimtab.engine.batched_lora.table import LEAST_SLOTS, AdapterSlots

        if self._slots is None:
            self._slots = AdapterSlots(
                self.model.hf_model.modules(), self.model.adapter_store, self.rows, self.device, module=self.kernels.matvec,
                slots=max(LEAST_SLOTS, self.rows), many=self.kernels.rows, is_fixed=self.is_invariant,
                experts=self._kernel_experts(),
            )  # fmt: skip
        return self._slots

    def _kernel_experts(self) -> list[torch.nn.Module]:
        """Return the modules of experts that kernels compute in a step."""
        if self.kernels.experts is None:
            return []
        from trimtab.engine.families.families import describe

        layers = describe(self.model.hf_model).layers
        return [layer.experts.module for layer in layers if layer.experts is not None and layer.experts.has_mixture]

    def _forget_smaller(self, shape: tuple[int, ...]) -> None:
        """Drop graphs that look fewer layers up than are covered now: their keys are never needed again."""
        if shape != self._shape:
            self._shape = shape
            self._graphs.drop(lambda key, _: _TABLE in key and key[-1] != shape)

    def sizes(self) -> list[int]:
        """Return for how many rows steps are captured, the largest first: the smaller ones fit in its memory."""
        rows = self.rows
        if self.is_invariant:
            return [rows]
        return sorted({*(size for size in BUCKETS if size < rows), rows}, reverse=True)

    def prepare(
        self, state: BatchState, expected: Iterable[Fitting] = (), sizes: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        """Capture a step of every bucket of rows before it is needed: of the base, and with adapters by table if any is
        attached. state: of stand-ins, as many as there are rows; no request's tokens come from these steps.

        expected: of adapters that may be attached later; their layers are looked up from the start. sizes: of those that `sizes`
        gives, None for all. Ends early where capturing turns out impossible, at the most graphs that are kept, or when the device
        has lost the memory that was counted for it.
        """
        before = outside_torch(self.device)
        self._prepare(state, expected, self.sizes() if sizes is None else sizes)
        self.graph_bytes += max(outside_torch(self.device) - before, 0)

    def _prepare(self, state: BatchState, expected: Iterable[Fitting], sizes: Sequence[int]) -> None:
        names: list[str | None] = [None]
        expected = list(expected)
        is_invariant = self.is_invariant
        if self.kernels.has_lora and (self.model.adapter_store.names or (is_invariant and expected)):
            slots = self._adapter_slots()
            slots.cover(fitting for fitting in expected if not fitting.rest)  # the rest is seldom chosen by table
            names += [
                one for one in self.model.adapter_store.names if slots.why_not(one) is None and not self._reads_experts([one])
            ][:1]
        free = self._free_bytes()
        if is_invariant:
            names = [None]
        steps = [(name, size, False) for name in names for size in sizes]
        if sizes and not self._graphs and "kv_copies" in self.model.plan.execution.step.bytes:
            # The largest copies of keys and values first: the memory of smaller ones, kept by the graphs, would hold none of these.
            steps.insert(0, (None, max(sizes), True))
        for name, size, sees_all in steps:
            rows = state.uniform(name, size)
            for _ in range(2):  # where the fused step cannot be captured, the modules may
                if not self.is_captured or len(self._graphs) >= most_graphs(self.model, self.rows):
                    return
                self.tokens[:size, 0].copy_(torch.tensor(rows.last_tokens), non_blocking=True)
                if self._run_graph(rows, sees_all=sees_all) is not None:
                    break
            lost = free - self._free_bytes()
            if lost > self._counted_bytes(state.count):
                why = f"captures so far take {gib(lost)}; the others are captured at their first use"
                self._choice.fall_back("captures ahead of requests", why, requested=False)
                return

    def _counted_bytes(self, rows: int) -> int:
        """Return the bytes that captures of `rows` rows may take: the planned ones, and those counted beyond the plan."""
        planned = self.model.plan.execution.step
        return sum(planned.bytes.values()) + extra_bytes(self.model, rows, "graph")

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def _advance(self, count: int) -> None:
        """Let the next step write the states of `count` rows: those of padding rows, which may be placed ones, stay as they are,
        and they bring no experts to the device."""
        if (self.cache.has_recurrent or self.model.plan.execution.expert_slots) and count != self._live:
            self._live = count
            self.cache.live.fill_(count)

    def _stage(self, state: BatchState, bucket: int) -> None:
        self._advance(state.count)
        if self._tables:
            ids = torch.tensor(state.last_tokens)
            for table in self._tables:
                table.stage(ids, max(self.rows, bucket))

    @contextmanager
    def _being_captured(
        self, body: Body, names: Sequence[str | None], slots: AdapterSlots | None, count: int, *, is_ours: bool
    ) -> Iterator[None]:  # fmt: skip
        store = self.model.adapter_store
        if slots is None:
            store.set_rows(names)
        else:
            store.none()
        # Passes in front of a capture compute the step too: states of recurrent layers stay as they are until it is replayed.
        self.cache.live.zero_()
        try:
            with leaves.reading_staged(self._tables), store.applying(slots):
                overlap = is_ours and self._capturing.overlap_pays(body, count)
                with self.kernels.overlapping(overlap):
                    yield
        finally:
            self.cache.live.fill_(max(self._live, 0))


# Families without a description ---------------------------------------------------------------------------------------

_TRIED: WeakKeyDictionary[HFModel, str | None] = WeakKeyDictionary()
# Of the logits, over their deviation. Over 40 families with random weights roundings give 1e-6 and 0.02 in bfloat16, positions
# that are off by one 0.18. A rounding may change which experts are chosen: of mixtures only what has nothing in common is found.
_LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_LARGEST_OF_EXPERTS = 0.7
_TRIED_TOKENS, _TRIED_PLACES = 6, 64
_OF_MODULES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def wrong_rows(model: EngineContext) -> str | None:
    """Return how a step of two rows behind a short text differs from stock's own pass over it, None if it does not.

    Two passes, once a model, four where the first two differ, and only for families without a description: `families.check`
    compares the others.
    """
    hf_model, store = model.hf_model, model.adapter_store
    if model.anatomy.fused_unsupported is None:
        return None
    if hf_model not in _TRIED:
        selection = store.selection
        try:
            store.none()
            with store.applying(EAGER), torch.no_grad():
                _TRIED[hf_model] = _wrong_rows(model, 2) and _wrong_rows(model, 3)
        except _OF_MODULES as exc:
            _raise_device_errors(exc)
            _TRIED[hf_model] = f"its modules do not compute a step of two rows ({type(exc).__name__}: {exc})"
        finally:
            sequence.reset_offset(hf_model)
            store.select(selection)
    return _TRIED[hf_model]


def _raise_device_errors(exc: BaseException) -> None:
    if is_out_of_memory(exc) or "CUDA" in str(exc):
        raise exc


def _wrong_rows(model: EngineContext, part: int) -> str | None:
    """Return the same of the tokens that follow the first 1/part of the vocabulary."""
    hf_model, device = model.hf_model, model.device
    # A sliding layer of stock's cache keeps one position less than its window.
    places = min(_TRIED_PLACES, model.plan.request.context_tokens)
    count = min(_TRIED_TOKENS, places - 1, *(window - 1 for window in kv_cache.windows(hf_model, places)))
    if count < 4 or kv_cache.keeps_states(hf_model):
        return None  # too short for two rows; or a state, which cannot be cut back
    words, media = model.anatomy.vocab_size - 1, sequence.placeholder_ids(hf_model)
    ordinary = (token for token in range(words // part, words) if token not in media)
    ids = torch.tensor([[token for token, _ in zip(ordinary, range(count), strict=False)]], device=device)
    if (count := ids.shape[1]) < 4:
        return None
    lengths = [count - 1, count - 3]
    cache, rows = kv_cache.prompt_cache(hf_model), BatchedKVCache(2, places, device)
    sequence.reset_offset(hf_model)
    try:
        with sequence.text_of(hf_model, count):
            wanted = hf_model(
                input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True, return_dict=True,
                **kv_cache.prompt_positions(hf_model, 0, count, device),
            ).logits[0, lengths].float()  # fmt: skip
    except _OF_MODULES as exc:  # a text alone is nothing for it
        _raise_device_errors(exc)
        return None
    rows.prepare(cache)
    for row, length in enumerate(lengths):
        for mine, theirs in zip(rows.layers, cache.layers, strict=True):
            if isinstance(mine, LayerCache):
                mine.fill(row, theirs.keys[:, :, :length], theirs.values[:, :, :length], length)
        rows.place(row, length)
    tokens = ids[0, lengths, None]
    step = DecodeStep(model, StepBuffers(tokens, rows, 2, places), "eager")
    made = step._eager(BatchState((None, None), tuple(tokens[:, 0].tolist()), count), step._modules)[0]
    most = _LARGEST_OF_EXPERTS if any(row.stacks for row in model.anatomy.rows) else _LARGEST_DIFFERENCE[model.dtype]
    deviation = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((made - wanted).norm(dim=-1) / deviation.clamp(min=1e-20)).max()
    if not bool(wanted.isfinite().all()) or not bool(deviation.all()) or bool(error <= most):
        return None
    return f"a step of two rows differs from transformers' own pass by {float(error):.2g} of the logits"
