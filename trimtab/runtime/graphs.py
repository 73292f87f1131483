"""How a decode step of all rows is computed: by transformers' modules, or from few kernels, launched as one CUDA graph.

    steps = Steps(batch, mode="auto")
    logits, greedy = steps.run()      # [count, V] float32 and the likeliest token of each row, on the device

A step of thousands of small kernels takes as long as Python needs to launch them. A graph launches them all at once; it
repeats the very addresses and numbers it was captured with, so whatever changes from step to step is read from tensors
that stay where they are: tokens, positions, the slot of each row's adapter. Graphs are captured as they are first needed,
one for each bucket of rows, or all of them beforehand (`Batch.prepare`). What cannot be captured runs as before, and
`fallbacks` says what and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.errors import DeviceError, RequestError, gib
from trimtab.plan import Plan
from trimtab.plan.execution import BUCKETS, CAPTURED, KERNEL_ROWS
from trimtab.request import STEP_MODES, check_choice
from trimtab.runtime import ends, hf_slots, many_rows, prompt_kernels, short_ops, tables, tiers
from trimtab.runtime.capturing import side_stream
from trimtab.runtime.devices import outside_torch
from trimtab.runtime.graph_cache import GraphCache
from trimtab.runtime.kernels import Kernels
from trimtab.runtime.out_of_memory import is_out_of_memory, memory_error, naming_out_of_memory
from trimtab.runtime.step_memory import check_room, extra_bytes, most_graphs

if TYPE_CHECKING:
    from trimtab.runtime import hf_gemma4, lora
    from trimtab.runtime.batch import Batch
    from trimtab.runtime.slots import AdapterSlots

# A cut is another one in a step if that takes less than this share of the time; scores further off than this share of the
# largest are not those of this step.
_WORTH, _FAR = 0.995, 0.1
# Of the largest score: a rounding of every layer in bfloat16 (2^-9), a few of them in one direction.
REPLAY_TOLERANCE = 2**-6
# In the key of a graph whose rows look their adapters up.
_TABLE = "table"
# Attention of a step through the modules reads this many places at least, doubled until the longest row fits.
SMALLEST_PLACES = 256


def check_replay(found: Tensor, expected: Tensor, count: int) -> None:
    """Raise RuntimeError unless a graph's scores of the first `count` rows are those of the step it was captured from.

    The same kernels on the same numbers: bit for bit, but for a library that takes another algorithm in a graph. Weights
    that a replay reads too early, or from where they no longer are, give scores that have nothing to do with these.
    """
    found, expected = found[:count], expected[:count]
    allowed = REPLAY_TOLERANCE * float(expected.nan_to_num().abs().max())
    if not torch.allclose(found, expected, rtol=0.0, atol=allowed, equal_nan=True):
        most = float((found - expected).nan_to_num().abs().max())
        raise RuntimeError(f"a replay's scores differ by up to {most:.3g} from the step it was captured from")


@dataclass(frozen=True)
class Fallback:
    """Something that runs the slower way. what: "graph", "fused step", a kernel's name; why: in words, with numbers."""

    what: str
    why: str


def streams_layers(plan: Plan) -> bool:
    """Whether a step copies weights to the device: layers or the head, not towers, which steps do not enter."""
    return any(row.part in ("language", "text", "head") and row.tier == "stream" for row in plan.placements)


@dataclass(eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, Tensor]
    keep: Any  # tensors that the graph reads by address


@dataclass(eq=False)
class Steps:
    """The steps of one batch. mode: "auto" takes the fastest that works, the others exactly what they say.

    "eager": transformers' modules as they are, one kernel after the other. "graph": the same modules, captured, on a GPU
    with fewer operations for norms (`short_ops`) and adapters (`slots`). "fused": few kernels of our own, captured; on a
    CPU their plain counterpart. Errors: RequestError for an unknown mode; DeviceError if a mode that was asked for by
    name cannot be had.
    """

    batch: Batch
    mode: str = "auto"
    fallbacks: list[Fallback] = field(default_factory=list)
    capture_s: float = 0.0
    captures: int = 0
    graph_bytes: int = 0  # that the driver took while graphs were captured beforehand
    wrote_tokens: bool = False  # whether the last step put each row's likeliest token where the next one reads it

    def __post_init__(self) -> None:
        check_choice(self.mode, STEP_MODES, field_name="decode")
        self.model = self.batch.model
        self.device: torch.device = self.model.device
        self._graphs: GraphCache[_Captured] = GraphCache()
        self._ahead = False
        self._slots: AdapterSlots | None = None
        self._short_ops: short_ops.ShortOps | None = None
        self._fused: hf_gemma4.FusedStep | None = None
        self._is_fusable = False
        # How often modules had been exchanged when it was last asked whether a fused step is right for them, and the answer.
        self._examined: tuple[int, str | None] | None = None
        self._shape: tuple[int, int] | None = None
        self._order: list[tiers.Group] = []
        self._has_streamed_layers = streams_layers(self.model.plan)
        self._tables = [
            module for module in self.model.hf_model.modules()
            if isinstance(module, tables.GatheredTable) and module.seen is None
        ]  # fmt: skip
        self._placeholders = hf_slots.placeholder_ids(self.model.hf_model)
        self.is_captured = self.mode != "eager" and self._may_capture()
        self.kernels = Kernels.none()
        with naming_out_of_memory("choosing kernels", self.model.plan, self.device):
            self._choose()

    def _choose(self) -> None:
        planned = self.model.plan.execution.step
        if self.mode == "auto" and planned.mode == "graph" and self.device.type == "cuda":
            self._fall_back("fused step", f"planned so: {planned.reason}", asked=False)
            if self.is_captured:
                self._take_for_adapters()
        elif self.mode == "fused" or (self.mode == "auto" and (self.is_captured or planned.mode != "eager")):
            self._choose_kernels()
        elif self.is_captured:
            self._take_for_adapters()
        has_many = self.is_captured and self.batch.rows > KERNEL_ROWS
        self._four_bit = prompt_kernels.four_bit(self.model.hf_model) if has_many else []
        if self._four_bit and self.device.type == "cuda":
            self._take(self.kernels.with_rows(self._four_bit, self.model.dtype))

    # What can be had ---------------------------------------------------------------------------------------------------

    def _may_capture(self) -> bool:
        why = self._why_no_graph()
        if why is None:
            return True
        if self.device.type == "cuda":
            self._fall_back("graph", why, asked=self.mode in ("graph", "fused"))
        elif self.mode == "graph":
            raise DeviceError("there are CUDA graphs on a GPU only", device=str(self.device), hint="Leave the mode out")
        return False

    def _why_no_graph(self) -> str | None:
        if self.device.type != "cuda":
            return "there is no GPU"
        found = hf_slots.why_not(self.model.hf_model)
        if found is not None:
            return found
        for row in self.model.plan.placements:
            if row.part in ("language", "text", "head") and row.tier in ("host", "disk"):
                return f"{row.block_path} is in tier {row.tier}: the CPU takes part in every step"
        plan = self.model.plan
        planned = plan.execution.step
        if self.mode == "auto" and planned.mode == "eager":
            return f"planned so: {planned.reason}"
        mode = self.mode if self.mode in CAPTURED else planned.mode
        check_room(self.model, self.batch.rows, mode)
        return None

    def _fall_back(self, what: str, why: str, *, asked: bool) -> None:
        if asked:
            raise DeviceError(f"{what}: {why}", device=str(self.device), hint="Omit the mode to use an available one")
        found = Fallback(what, why)
        if found not in self.fallbacks:
            self.fallbacks.append(found)

    def _choose_kernels(self) -> None:
        if self.device.type != "cuda" and self.mode != "fused":
            return
        from trimtab.runtime import hf_gemma4

        why = hf_gemma4.why_not(self.model.hf_model)
        if why is not None:
            self._fall_back("fused step", why, asked=self.mode == "fused")
            self._take_for_adapters()
            return
        self._is_fusable = True
        if self.device.type == "cuda":
            self._take(hf_gemma4.choose_kernels(self.model.hf_model, self.batch.rows, progress=self.model.measuring))
            # Without any of them the modules' own operations are as few as plain torch's.
            self._is_fusable = self.mode == "fused" or not self.kernels.is_empty

    def _take_for_adapters(self) -> None:
        if self.device.type == "cuda":
            self._take(Kernels.for_adapters(self.device, self.model.dtype))

    def _take(self, kernels: Kernels) -> None:
        self.kernels = kernels
        for name, reason in kernels.left_out.items():
            self._fall_back(name, reason, asked=False)

    # One step ----------------------------------------------------------------------------------------------------------

    def may_look_ahead(self) -> bool:
        """Whether the step after the last one can be queued before its tokens are known here: they are where it reads them,
        and nothing else of it is the host's to bring."""
        return self.wrote_tokens and not self._tables and not self._streams_decoder()

    def run(self, *, ahead: bool = False) -> tuple[Tensor, Tensor]:
        """Return the logits [count, V] float32 of one step of the active rows, and each row's likeliest token [count],
        -1 where the scores are not numbers. Both are overwritten by the next step.

        Keys and values are written; positions are the caller's to advance. ahead: the rows' last tokens are not in their
        lists yet.
        """
        self._ahead = ahead
        count = len(self.batch.active)
        names = [row.adapter for row in self.batch.active]
        self.wrote_tokens = False
        if not self.has_placeholder():
            found = self._run_graph(count, names) if self.is_captured else None
            if found is not None:
                return found[0][:count], found[1][:count]
            step = self._fused_step() if self.mode == "fused" else None
            return self._eager(count, names, step or self._short)
        return self._eager(count, names, self._modules)

    def has_placeholder(self) -> bool:
        # For a drawn picture token transformers embeds another one in its place.
        return any(row.token_ids[-1] in self._placeholders for row in self.batch.active)

    def _eager(
        self, count: int, names: Sequence[str | None], step: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.batch.cache.seen_places = self._places()
        self.model.route.set_rows(names)
        return self._finish(step, count)

    def _short(self, count: int) -> Tensor:
        """Return what `_modules` does, from fewer operations where that is allowed: it rounds elsewhere."""
        if self.mode == "eager" or not self._may_be_short():
            return self._modules(count)
        if self._short_ops is None:
            self._short_ops = short_ops.ShortOps(
                self.model.hf_model, self.model.route, self.device, partial(self._fall_back, asked=False)
            )
        with self._short_ops.step(), many_rows.covering(self._four_bit, self.kernels.rows):
            return self._modules(count, added_masks=True)

    def _may_be_short(self) -> bool:
        return self.device.type == "cuda"  # on a CPU the operations themselves take the time

    def _modules(self, count: int, *, added_masks: bool = False) -> Tensor:
        """Return the logits [count, V] of transformers' own forward pass."""
        batch, cache = self.batch, self.batch.cache
        if (slots := self.model.route.slots) is not None:
            slots.empty(count)
        cache.begin()
        masks = hf_slots.step_masks(self.model.hf_model, cache, count)
        if added_masks:
            masks = short_ops.added_masks(self.model.hf_model, masks, self.model.dtype)
        found = self.model.hf_model(
            input_ids=batch.tokens[:count], position_ids=hf_slots.step_positions(self.model.hf_model, cache, count),
            attention_mask=masks, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True,
        )  # fmt: skip
        logits: Tensor = found.logits[:, -1]
        return logits

    def _finish(self, step: Any, count: int, next_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if self._fused is not None and step is self._fused:
                return self._fused(count, next_tokens)
            return ends.likeliest(step(count), None, next_tokens, self.kernels.ends)

    def _finish_and_go_on(self, step: Any, count: int) -> tuple[Tensor, Tensor]:
        return self._finish(step, count, self.batch.tokens[:count, 0])

    def _places(self) -> int:
        longest = max(len(row.token_ids) for row in self.batch.active) + self._ahead
        places = SMALLEST_PLACES
        while places < longest:
            places *= 2
        return min(places, self.batch.context_tokens or places)

    # Graphs ------------------------------------------------------------------------------------------------------------

    def _fused_step(self) -> hf_gemma4.FusedStep | None:
        if not self._is_fusable:
            return None
        from trimtab.runtime import hf_gemma4

        if self._fused is None:  # not before a prompt has gone through: the cache's layers are known from then on
            self._fused = hf_gemma4.FusedStep(self.model.hf_model, self.batch.cache, self.batch.tokens, self.kernels)
        exchanges = self.model.route.exchanges
        if self._examined is None or self._examined[0] != exchanges:
            self._examined = exchanges, self._fused.why_not_rows()
        why = self._examined[1]
        if why is not None:
            self._fall_back("fused step", why, asked=self.mode == "fused")
            return None
        return self._fused

    def _run_graph(self, count: int, names: Sequence[str | None]) -> tuple[Tensor, Tensor] | None:
        bucket = next((size for size in BUCKETS if size >= count and size <= self.batch.rows), self.batch.rows)
        padded = [*names, *[None] * (bucket - count)]
        step: Any = self._short
        kind = "modules"
        slots = self._slots_for(names)
        if self.mode != "graph" and bucket <= many_rows.MOST_ROWS:
            fused = self._fused_step()
            if fused is not None:
                step, kind = fused, "fused"
        self.batch.cache.seen_places = self._places()
        has_adapters = any(names)
        key: tuple[Hashable, ...] = (kind, bucket)
        if kind == "modules":
            key = (*key, self.batch.cache.seen_places)
        if slots is not None:
            slots.set_rows(padded)
            self._forget_smaller(slots.shape_key)
            key = (*key, _TABLE, slots.shape_key)
        elif has_adapters:  # captured with the adapters' own addresses
            key = (*key, *((name, self.model.route.serials[name]) if name is not None else None for name in padded))
        self._stage(bucket)
        found = self._graphs.get(key)
        if found is None:
            found = self._capture(key, step, bucket, padded, slots if has_adapters else None)
            if found is None:
                return None
        self._graphs.move_to_end(key)
        with self._streamed():
            found.graph.replay()
        self.wrote_tokens = True
        return found.outputs

    def _slots_for(self, names: Sequence[str | None]) -> AdapterSlots | None:
        """Return the table of adapters if the kernels that use it were chosen and every adapter of the rows fits it."""
        if not self.kernels.has_lora or not any(names):
            return None
        slots = self._adapter_slots()
        for name in dict.fromkeys(names):
            why = slots.why_not(name)
            if why is not None:
                self._fall_back("adapters by table", why, asked=False)
                return None
        return slots

    def _adapter_slots(self) -> AdapterSlots:
        from trimtab.runtime.slots import LEAST_SLOTS, AdapterSlots

        if self._slots is None:
            self._slots = AdapterSlots(
                self.model.hf_model, self.model.route, self.batch.rows, self.device, module=self.kernels.matvec,
                slots=max(LEAST_SLOTS, self.batch.rows), many=self.kernels.rows,
            )  # fmt: skip
        return self._slots

    def _forget_smaller(self, shape: tuple[int, int]) -> None:
        """Drop graphs that look fewer layers up than are covered now: their keys are never asked for again."""
        if shape != self._shape:
            self._shape = shape
            for key in [key for key in self._graphs if _TABLE in key and key[-1] != shape]:
                del self._graphs[key]

    def prepare(self, expected: Iterable[lora.Fitting] = ()) -> None:
        """Capture a step of every bucket of rows before it is needed: of the base, and with adapters by table if any is
        attached. The batch's active rows are stand-ins, as many as it has rows; nobody's tokens come from these steps.

        expected: of adapters that may be attached later; their layers are looked up from the start. Ends early
        where capturing turns out impossible, at the most graphs that are kept, or when the device has lost the memory that was
        counted for it.
        """
        before = outside_torch(self.device)
        self._prepare(expected)
        self.graph_bytes += max(outside_torch(self.device) - before, 0)

    def _prepare(self, expected: Iterable[lora.Fitting]) -> None:
        names: list[str | None] = [None]
        if self.kernels.has_lora and self.model.route.serials:
            slots = self._adapter_slots()
            slots.cover(fitting for fitting in expected if not fitting.rest)  # the rest is seldom chosen by table
            names += [name for name in self.model.route.serials if slots.why_not(name) is None][:1]
        rows = list(self.batch.active)
        free = self._free_bytes()
        # The largest first: the smaller ones find room in its memory.
        sizes = sorted({*(size for size in BUCKETS if size < len(rows)), len(rows)}, reverse=True)
        for name in names:
            for size in sizes:
                self.batch.active[:] = rows[:size]
                for _ in range(2):  # where the fused step cannot be captured, the modules may
                    if not self.is_captured or len(self._graphs) >= most_graphs(self.model, self.batch.rows):
                        return
                    self.batch.tell_tokens()
                    if self._run_graph(size, [name] * size) is not None:
                        break
                lost = free - self._free_bytes()
                if lost > self._counted_bytes(len(rows)):
                    why = f"they have taken {gib(lost)}; the others are captured when they are first needed"
                    self._fall_back("captures ahead of requests", why, asked=False)
                    return

    def _counted_bytes(self, rows: int) -> int:
        """Return what captures of `rows` rows may take: what the plan has for them, and what was counted beyond it."""
        planned = self.model.plan.execution.step
        return sum(planned.bytes.values()) + extra_bytes(self.model, rows, "graph")

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def _stage(self, bucket: int) -> None:
        if self._tables:
            ids = torch.tensor([row.token_ids[-1] for row in self.batch.active])
            for table in self._tables:
                table.stage(ids, max(self.batch.rows, bucket))

    def _capture(
        self, key: tuple[Hashable, ...], step: Any, bucket: int, names: Sequence[str | None],
        slots: AdapterSlots | None,
    ) -> _Captured | None:  # fmt: skip
        start = time.perf_counter()
        while len(self._graphs) >= most_graphs(self.model, self.batch.rows):
            self._graphs.popitem(last=False)
        route = self.model.route
        if slots is None:
            route.set_rows(names)
        else:
            route.none()
        route.slots = slots
        for table in self._tables:
            table.reads_staged = True
        try:
            run = partial(self._finish_and_go_on, step, bucket)
            is_ours = step is self._fused or slots is not None
            overlap = is_ours and self._overlap_pays(run, slots)
            if step is self._fused:
                self._refine(run, slots, bucket, overlap=overlap)
            start = time.perf_counter()  # what was tried is done once on a card
            with self.kernels.overlapping(overlap):
                found = self._captured(run, slots)
        except RequestError:
            raise
        except Exception as exc:
            self._graphs.forget_pool()
            if is_out_of_memory(exc):  # planned: never a reason to go on the slower way
                raise memory_error(exc, "capturing a decode step", self.model.plan, self.device) from exc
            # The device says itself whether it got over it.
            torch.zeros(1, device=self.device).item()
            is_fused = step is self._fused
            why = f"capturing failed: {type(exc).__name__}: {exc}"
            self._fall_back("fused step" if is_fused else "graph", why, asked=self.mode != "auto")
            self._is_fusable, self.is_captured = False, is_fused  # without kernels of ours there may still be a graph
            return None
        finally:
            route.slots = None
            for table in self._tables:
                table.reads_staged = False
        self._graphs[key] = found
        self.captures += 1
        self.capture_s += time.perf_counter() - start
        return found

    def _overlap_pays(self, run: Callable[[], tuple[Tensor, Tensor]], keep: Any) -> bool:
        """Whether kernels that begin while the one before ends give the same bits and a faster step here; asked once."""
        if self.device.type != "cuda" or self.kernels.is_empty or self._streams_decoder():
            return False
        if self.kernels.overlap_pays is None:
            plain_ms, plain = self._tried(run, keep, overlap=False)
            if self._order:
                return False
            try:
                ms, scores = self._tried(run, keep, overlap=True)
                same = torch.equal(plain, scores)
                why = f"{ms:.2f} ms a step against {plain_ms:.2f}" if same else "the scores of a step are others"
                self.kernels.overlap_pays = same and ms < plain_ms
            except (RuntimeError, DeviceError) as exc:
                if is_out_of_memory(exc):
                    raise
                why, self.kernels.overlap_pays = f"{type(exc).__name__}: {exc}", False
            if not self.kernels.overlap_pays:
                self._fall_back("overlapping launches", why, asked=False)
        return self.kernels.overlap_pays

    def _streams_decoder(self) -> bool:
        """Whether a step's weights are copied beside it: then an order of launches is not an order of what they read, whatever was
        found for another model of the same kernels."""
        return bool(self._order) or self._has_streamed_layers

    def _refine(self, run: Callable[[], tuple[Tensor, Tensor]], keep: Any, bucket: int, *, overlap: bool) -> None:
        """Try in the whole step what was nearly the fastest way to cut a product by itself; keep what is faster there.

        Once on a card for each shape, for one row and for the most: what was found is kept in the user's cache folder.
        """
        if bucket not in (1, self.kernels.most_rows):
            return
        module = self.kernels.matvec
        untried = {} if module is None else module.kept.get("others", {})
        keys = [key for key in untried if key[3] == bucket]
        if not keys or self._streams_decoder():
            return
        best, expected = self._tried(run, keep, overlap=overlap)
        largest = float(expected.abs().max())
        count, done = sum(len(untried[key]) for key in keys), 0
        for key in keys:
            for cut in untried.pop(key):
                done += 1
                if self.model.measuring is not None:
                    self.model.measuring(done, count)
                before, module.kept[key] = module.kept[key], cut
                try:
                    ms, scores = self._tried(run, keep, overlap=overlap)
                except (
                    RuntimeError,
                    DeviceError,
                ) as exc:  # what cannot be captured is not chosen, and costs nothing else
                    module.kept[key] = before
                    self._graphs.forget_pool()
                    if is_out_of_memory(exc):
                        raise
                    continue
                # Each computes the same product, summed in another order; what is far off is not used, however fast.
                if ms < best * _WORTH and float((scores - expected).abs().max()) < _FAR * largest:
                    best = ms
                else:
                    module.kept[key] = before
        self.kernels.save_cuts()
        torch.cuda.empty_cache()  # every try had a pool of memory of its own

    def _tried(self, run: Callable[[], tuple[Tensor, Tensor]], keep: Any, *, overlap: bool) -> tuple[float, Tensor]:
        """Return the milliseconds of a captured step and its scores; nothing that the next step reads is changed."""
        with self.kernels.overlapping(overlap):
            one = self._captured(run, keep)
        before = self.batch.tokens.clone()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best = float("inf")
        for _ in range(8):
            self.batch.tokens.copy_(before)
            start.record()
            one.graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        self.batch.tokens.copy_(before)
        return best, one.outputs[0].clone()

    def _captured(self, run: Callable[[], tuple[Tensor, Tensor]], keep: Any) -> _Captured:
        with side_stream(self.device) as side:
            # Once for whatever is made on first use; what it writes, the replay writes again, but for the tokens.
            with torch.cuda.stream(side), self._pass(()):
                before = self.batch.tokens.clone()
                expected = run()[0].clone()
                self.batch.tokens.copy_(before)
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)

            def in_order() -> tuple[Tensor, Tensor]:
                with self._pass(self._order):
                    return run()

            graph, outputs = self._graphs.record(side, in_order)
        with self._streamed():
            graph.replay()
        self.batch.tokens.copy_(before)
        check_replay(outputs[0], expected, len(self.batch.active))
        return _Captured(graph, outputs, keep)

    @contextmanager
    def _pass(self, order: Sequence[tiers.Group]) -> Iterator[None]:
        """A pass through the model that begins with empty staging buffers, as every replay of it will."""
        streamer = self.model.streamer
        if streamer is None:
            yield
            return
        streamer.begin_pass(order)
        try:
            yield
        finally:
            self._order = streamer.end_pass()

    @contextmanager
    def _streamed(self) -> Iterator[None]:
        """Around a replay: the graph fills the staging buffers without the streamer seeing it."""
        streamer = self.model.streamer
        if streamer is None:
            yield
            return
        streamer.begin_pass()
        yield
        streamer.end_pass()
