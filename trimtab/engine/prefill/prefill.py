"""How do prompts run as CUDA graphs, and which does transformers run?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.decode.step_choice import Fallback
from trimtab.engine.families.chunk import ChunkLayers, LastLayers
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.kernels import dequantize, gemm4
from trimtab.engine.kernels.dequantize import LEAST_TOKENS
from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.kv.sequence import PrefillState
from trimtab.engine.layers import leaves
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.lora import fewer_ops
from trimtab.engine.memory.graph_cache import Body, FormUses, GraphCache, Inputs, Key, Policy, extra_bytes
from trimtab.engine.memory.rates import outside_torch
from trimtab.engine.passes.chunk_forward import CHUNKS, SMALLEST_PLACES, Chunk, ChunkForward, Form, Piece, why_not_now
from trimtab.engine.prefill.packing import Layouts, PackedPrefill, values_of
from trimtab.engine.prefill.rows import (
    PromptJob,
    Rows,
    Stage,
    chunks_of,
    ends_in_step,
    knows_padding,
    may_be_open,
    reads_experts,
    select_adapter,
)
from trimtab.engine.prefill.tower_passes import TowerPasses, unloaded_error
from trimtab.engine.towers.graphs import TowerOps, Towers
from trimtab.engine.towers.pieces import PausedError
from trimtab.errors import RequestError, gib
from trimtab.planning.memory.activations import use_of
from trimtab.planning.memory.prompts import LEAST_LARGEST, choose_chunks, planned_graphs, prompt_graph_bytes
from trimtab.planning.values.execution import CAPTURED

# Graphs that are kept; beyond, the least recently used one is evicted.
MOST_GRAPHS = 40
# Graphs of prompts with several chunks: first, later and last chunks of two sizes, and some lasts that are smaller.
CUT_GRAPHS = 9


class PrefillRunner:
    """The captured prompts of one batch. mode: "auto", on a GPU where the plan leaves room; "static": the same passes, never
    captured, on any device; "eager": none. sizes: of chunks, None for those that fit. counted_bytes: those that the plan counts for
    them already. There is a graph for each form of a chunk (`Form`) and each layout of adapters: the first use runs
    uncaptured, the second is captured, later if that evicts another graph. All graphs share one set of inputs, and their memory
    with passes that are not captured."""

    def __init__(self, batch: Rows, mode: str = "auto", sizes: Sequence[int] | None = None, *, counted_bytes: int = 0) -> None:
        self.batch, self.model, self.device = batch, batch.model, batch.model.device
        self.captures = mode == "auto" and self.device.type == "cuda"
        # graph_bytes: that the driver took for graphs captured beforehand
        self.counted_bytes, self.graph_bytes = counted_bytes, 0
        self.sizes: tuple[int, ...] = ()
        self.is_steady = True  # whether the last chunk took as long as the next one of its form will
        self.jobs: WeakKeyDictionary[PrefillState, PromptJob] = WeakKeyDictionary()  # of the prompt that has the row, if any
        self._forward: ChunkForward | None = None
        self.firsts: ChunkLayers | None = None
        self.lasts: LastLayers | None = None
        self._short: fewer_ops.ShortOps | None = None
        self._kernels: dequantize.PromptKernels | None = None
        self._tower_ops: TowerOps | None = None
        self._columns: adapter_columns.Columns[adapter_columns.DequantizedWeights] | None = None
        self.four_bit: list[Leaf] = []
        self.room = self.model.prompt_room if self.captures and batch.rows == 1 else None
        self._graphs = GraphCache(lambda: None if self.room is None else self.room.handle)
        self._uses = FormUses()
        self.layouts = Layouts(self)
        # Towers are captured while others are answered: batch-invariant ones always run as they are.
        self.towers = Towers(self.model, "eager" if batch.is_invariant else mode, self.fall_back)
        self._outputs: dict[tuple[bool, int], list[Tensor]] = {}
        self.is_recurrent = kv_cache.keeps_states(self.model.hf_model)
        self.tower_passes = TowerPasses(self)
        self.staged_tables = leaves.asking_host(self.model.hf_model)
        self.placeholders = sequence.placeholder_ids(self.model.hf_model)
        if (self.captures or mode == "static") and (why := self._why_not(sizes)) is not None:
            self.fall_back(why)
        self.is_on = bool(self.sizes)  # whether any prompt is computed in chunks of fixed shapes
        if self.is_on and batch.rows > 1:
            batch.cache.keep_prompt_row()
        self.packs = PackedPrefill(self)
        if self.room is not None:
            self.room.owners.add(self)

    @property
    def most_packed(self) -> int:
        """The most tokens of a pass of several prompts, padding included."""
        return max(self.sizes, default=0)

    def fall_back(self, why: str, what: str = "captured prompts") -> None:
        one = Fallback(what, why)
        if one not in self.batch.steps.fallbacks:
            self.batch.steps.fallbacks.append(one)

    def _why_not(self, sizes: Sequence[int] | None) -> str | None:
        if (why := self.model.anatomy.prompts_unsupported) is not None:
            return why
        if (why := why_not_now(self.model.hf_model, self.batch.cache.context_tokens)) is not None:
            return why
        if self.is_recurrent and not self.batch.steps.may_fuse:
            return "states of recurrent layers need the kernels of a step"
        for row in self.model.plan.placements if self.captures else ():
            if row.part in ("language", "text", "head") and row.tier in ("host", "disk"):
                return f"{row.block_path} is in tier {row.tier}: the CPU takes part in every chunk"
        wanted = self.captures
        self.sizes, needed, free = self._fitting(sizes)
        planned = self.model.plan.execution.prompt
        if self.device.type == "cuda" and not self.sizes and sizes is None and not planned.chunks:
            return f"planned so: {planned.reason}"
        if self.sizes and (self.captures == wanted or planned.mode not in CAPTURED):
            return None
        return f"they need {gib(needed)} more than the plan and the captured steps, {gib(free)} are left"

    def _fitting(self, sizes: Sequence[int] | None) -> tuple[tuple[int, ...], int, int]:
        """Return the sizes of chunks that the plan leaves room for, the bytes of the least that is worth it, and those left."""
        most = min(self.model.prefill_tokens, self.batch.context_tokens or self.model.prefill_tokens)
        chosen = tuple(sizes or [size for size in CHUNKS if size <= most])
        if not self.captures:
            return chosen, 0, 0
        planned = self.model.plan.execution.prompt
        if sizes is None and self.batch.rows <= self.model.plan.request.batch:
            self.captures = planned.mode in CAPTURED
            return planned.chunks, self.extra_bytes(chosen[:1]), 0
        free = self.left_bytes()
        least = min(LEAST_LARGEST, max(chosen, default=0))
        fitting = choose_chunks(chosen, self.extra_bytes, free)
        if not fitting and sizes is None and planned.chunks:
            self.captures = False  # transformers' own pass has a cache that a plan with chunks does not count
            fitting = planned.chunks
        return fitting, self.extra_bytes((least,)), max(free, 0)

    def left_bytes(self) -> int:
        plan = self.model.plan
        free = int(plan.gpu_budget_bytes - plan.gpu_needed_bytes) + self.counted_bytes
        return free - extra_bytes(self.model, self.batch.rows) if self.batch.steps.is_captured else free

    def extra_bytes(self, sizes: Sequence[int] | None = None, *, adapters: bool = True) -> int:
        """Return the bytes counted for captured prompts in addition to the plan; `sizes` None for those in use."""
        plan, anatomy, holders = self.model.plan, self.model.anatomy, self.model.adapter_store.holders
        use = use_of(plan.request, anatomy, answer_tokens=plan.answer_tokens)
        value_bytes = [values_of(name, one).nbytes for name, one in holders.items() if adapters and one.fitting.plain]
        return prompt_graph_bytes(
            anatomy, use, self.sizes if sizes is None else sizes, quant=plan.request.quant,
            has_adapters=bool(plan.request.adapters), adapter_bytes=max(value_bytes, default=0),
        )  # fmt: skip

    # One prompt ------------------------------------------------------------------------------------------------------

    def takes(self, prompt: PrefillState) -> bool:
        """Whether this object computes the next piece of a prompt. Towers run when its first one is requested, or as
        much of them as one piece is while rows are being answered. Errors: RequestError for a prompt that is always computed here,
        and begins while another is in progress."""
        job = self.jobs.get(prompt)
        if job is None:
            if not self.sizes or prompt.done_tokens:
                return False
            if not self.is_row_free and (self.batch.is_invariant or prompt.returns_states):
                raise RequestError("another prompt is on its way", field="prompt", hint="Complete it and give it its row first")
            if not self.is_row_free or not knows_padding(self):
                return False
            job = self.jobs[prompt] = PromptJob()
        if job.stage is not Stage.BEGUN:
            return True
        is_known = False
        try:
            is_known = self._begin(prompt, job)
        except PausedError:
            is_known = True
        finally:
            if not is_known:
                self.release(prompt)
        if job.stage is Stage.BEGUN:
            if is_known and self.room is not None:
                self.room.check()  # not before the exception is gone, which keeps the tensors of the pass
            return is_known
        self.batch.pages.bind(prompt.row, self.batch.cache.prompt_row)
        self.chunk_forward()  # the cache's layers are known from then on
        self.batch.cache.clear(self.batch.cache.prompt_row)  # a masked NaN still spreads
        self.batch.prefixes.into_row(job.kept, self.batch.cache.prompt_row)
        return True

    def chunk_forward(self) -> ChunkForward:
        """Return the forward of chunks, made at first use."""
        if self._forward is None:
            # Every number of places is a graph: with few graphs all later chunks read the whole context.
            least = SMALLEST_PLACES if self.may_be_cut else self.batch.cache.context_tokens
            self._forward = ChunkForward(self.model.hf_model, self.batch.cache, self.model.dtype, least)
        return self._forward

    def forget(self, key: Hashable) -> None:
        """Drop the graphs that read an adapter's layout."""
        self._graphs.drop(lambda one, _: one[1] == key)
        self.towers.forget(key)

    @property
    def is_row_free(self) -> bool:
        """Whether no prompt is in progress in the prompts' row."""
        return not self.jobs and (self.batch.cache.has_prompt_row or not self.batch.active)

    def _begin(self, prompt: PrefillState, job: PromptJob) -> bool:
        """Let a job's chunks follow, behind its towers. Returns False where they are unknown. Errors: PausedError."""
        inputs, media, offset = prompt.inputs, None, 0
        if inputs.has_media:
            media = self.tower_passes.media_of(prompt) if self.tower_passes.takes_media else None
            if media is None:
                return False
            offset = sequence.read_offset(self.model.hf_model)
        may_end_at = (lambda _: True) if media is None else media.may_end_at
        kept = self.batch.prefixes.find(prompt, may_end_at=may_end_at)
        chunks: list[Chunk] | None = []
        if kept.tokens < inputs.prompt_tokens:
            prompt.begin(ends_in_step=ends_in_step(prompt, self.batch, may_end_at))
            chunks = chunks_of(prompt, self.sizes, kept.tokens, self.batch.prefixes, may_end_at)
        if chunks is not None:
            job.begin(chunks, media, offset, self.serial_of(prompt.row.adapter), kept)
        return chunks is not None

    def serial_of(self, name: str | None) -> int | None:
        """Return the serial of an attached adapter, None for the base."""
        return None if name is None else self.model.adapter_store.serial_of(name)

    def step(self, prompt: PrefillState, most_tokens: int | None = None) -> bool:
        """Compute the next chunk, of at most `most_tokens` where it can be cut. Returns True when the whole prompt is complete,
        with its states in the cache's prompt row.

        Errors: RequestError if the prompt's adapter was unloaded since the prompt began, even if another adapter has its name
        now.
        """
        job, forward = self.jobs[prompt], self._forward
        if job.stage is Stage.BEGUN:  # in the middle of its towers
            prompt.begin_chunk(0)
            return False
        assert forward is not None
        if job.serial != self.serial_of(prompt.row.adapter):
            raise unloaded_error(prompt, self.model.adapters)
        if job.stage is Stage.TOWERS:
            job.enter(Stage.CHUNKS)
            prompt.begin_chunk(0)
            return False
        if not job.chunks:  # the same prompt was computed before, or all of it but its last token
            assert prompt.row.reuse is not None
            prompt.take_states(job.kept.tokens, logits=prompt.row.reuse.logits, offset=job.offset)
            return True
        chunk = job.chunks[job.done]
        if most_tokens is not None and chunk.size > most_tokens and job.media is None and not prompt.returns_states:
            sizes = [size for size in self.sizes if size <= most_tokens] or [min(self.sizes)]
            job.cut(chunks_of(prompt, sizes, chunk.start, self.batch.prefixes) or [chunk])
            chunk = job.chunks[job.done]
        prompt.begin_chunk(chunk.size)
        piece = Piece(prompt.row.token_ids[: chunk.end], chunk.start, self.batch.cache.prompt_row)
        form = forward.form_of([piece], chunk.size, is_last=chunk.is_last, media=job.media, returns_states=prompt.returns_states)
        forward.load(form, [piece], job.media)
        result = self._run(form, piece, prompt.row.adapter)
        is_through = job.end_chunk(ends_in_step=prompt.ends_in_step)
        kept = result[0].clone() if form.is_last else None
        states = result[: chunk.count] if form.returns_states else None
        prompt.end_chunk(chunk.end, logits=kept, offset=job.offset if is_through else None, states=states)
        return is_through

    def holds(self, prompt: PrefillState) -> bool:
        """Whether a prompt's states are in the cache's prompt row."""
        return prompt in self.jobs

    def release(self, prompt: PrefillState) -> None:
        """Let another prompt have the row: this one has been given its own."""
        self.jobs.pop(prompt, None)

    def evict(self, row: int, but: PrefillState | None) -> None:
        """Make room where the prompts' row is about to be filled: a prompt that waits there starts again in transformers' pass."""
        owner = next(iter(self.jobs), None)
        if owner is None or owner is but or row != self.batch.cache.prompt_row:
            return
        self.release(owner)
        owner.restart(keeps_logits=True)

    # One chunk -------------------------------------------------------------------------------------------------------

    def _run(self, form: Form, piece: Piece, adapter: str | None) -> Tensor:
        key, serial, in_kernels = select_adapter(self, self.chunk_forward(), adapter)
        if not self._can_stage(form, piece):
            self.is_steady = not self.captures
            return self._static(form)
        return self.computed((form, key, in_kernels), serial, [piece.row], partial(self._stage, form, piece))

    def computed(
        self, key: Key, serial: int | None, rows: Sequence[int], stage: Callable[[], None] = lambda: None, *, at_once: bool = False
    ) -> Tensor:  # fmt: skip
        """Return the result of a form's pass, captured where possible.

        key: the form and the rest of the program's key. serial: of the adapter whose own addresses it reads. rows:
        the rows of the cache that it writes. stage: copies the inputs that the host has.
        """
        form = key[0]
        assert isinstance(form, Form)
        self.is_steady = not self.captures or key in self._graphs
        self._uses.note(key)
        output = self._by_graph(key, serial, rows, stage, at_once=at_once)
        return self._static(form) if output is None else output

    def _can_stage(self, form: Form, piece: Piece) -> bool:
        """Whether the table rows that the host fetches are those of the chunk's tokens. For the placeholder of an image or
        audio clip transformers looks up another row."""
        if not self.staged_tables:
            return True
        return not form.has_embeddings and self.placeholders.isdisjoint(piece.new_ids)

    def _may_capture(self, key: Key, *, at_once: bool = False) -> bool:
        """Whether a form is captured now. at_once: before it pays."""
        if not at_once and (not self.captures or reads_experts(self)):
            return False
        self._forget_unloaded()  # graphs of unloaded adapters must not take the place of others
        oldest = next(iter(self._graphs), None) if len(self._graphs) >= self._most_graphs else None
        return at_once or self.model.plan.request.batch_invariant or self._uses.pays(key, oldest)

    def _has_room(self) -> bool:
        """Whether the memory that all graphs share is there."""
        is_made = self.room is None or self.room.make(is_lean=self.kernels().adds)
        if not is_made:
            self.fall_back("another pass or program has their memory for now")
        return is_made

    def _static(self, form: Form) -> Tensor:
        """Return the result of a graph of this form, kernel by kernel."""
        self.kernels()  # chosen outside the room: checks and timings are not part of the pass
        # A first pass allocates keys and values, which stay.
        room = self.room if self.batch.cache.has_states else None
        with nullcontext() if room is None else room.using():
            passed = self._passed(form)
        if room is None or not room.is_made:
            return passed
        result = passed.clone()
        del passed
        room.check()
        return result

    def _passed(self, form: Form) -> Tensor:
        with self._short_ops(form), self.model.adapter_store.applying(self.packs.emptied(form)):
            return self.chunk_forward().run(form)

    @contextmanager
    def _short_ops(self, form: Form) -> Iterator[None]:
        if self.device.type != "cuda":  # on a CPU the operations themselves take the time
            yield
            return
        kernels, unpacked, columns = self.kernels(), self.model.unpacked, self._columns
        assert self._short is not None
        least = 2 if form.rows > 1 else LEAST_TOKENS  # of several prompts a few tokens pass the last layers
        table = MatmulTable(
            None if unpacked is None else unpacked.matmul(),
            gemm4.matmul(self.four_bit, self.batch.steps.kernels.rows, least=least, most=gemm4.PAYING_ROWS),
            kernels.matmul(self.four_bit, None if columns is None else columns.operands),
            *self.batch.steps.kernels.head_matmuls(self.model.hf_model),
        )  # fmt: skip
        try:
            with self._short.step(matmuls=table):
                yield
        finally:
            if columns is not None:
                columns.forget()

    def kernels(self) -> dequantize.PromptKernels:
        """Return the kernels of ours that passes use here, chosen when they are first needed; none on a CPU."""
        if self.device.type == "cuda" and self._short is None:
            self._kernels, self._short = dequantize.chosen_with_short_ops(self.model, self.fall_back)
            self._columns = adapter_columns.choose(self.model, self._kernels, self.fall_back)
            self.four_bit = dequantize.four_bit(self.model.hf_model)
            self._tower_ops = TowerOps(self.model, self._kernels, self._short)
        return self._kernels or dequantize.PromptKernels()

    def head_ops(self) -> AbstractContextManager[None]:
        """Let the kernels of steps multiply with a packed head while the block runs; on a CPU it runs as it is."""
        self.kernels()
        if self._short is None or not dequantize.packed_heads(self.model.hf_model):
            return nullcontext()
        return self._short.step(matmuls=MatmulTable(*self.batch.steps.kernels.head_matmuls(self.model.hf_model)))

    def tower_ops(self) -> AbstractContextManager[None]:
        """Let the towers use the kernels of prompts while the block runs; on a CPU they run as they are."""
        self.kernels()
        return nullcontext() if self._tower_ops is None else self._tower_ops.running()

    # Graphs ----------------------------------------------------------------------------------------------------------

    def prepare(self, token: int, adapter: str | None, sizes: Sequence[int] | None = None) -> None:
        """Capture a prompt of one chunk of every size before it is needed, the largest first: the others find room in its memory;
        the chunk without the last token too (rows.py). No row may be active. sizes: these alone; none: packs alone."""
        if not self.captures or not self.sizes or not self.is_row_free or not knows_padding(self):
            return
        before = outside_torch(self.device)
        select_adapter(self, self.chunk_forward(), adapter)
        adapter = None if reads_experts(self) else adapter  # such prompts are not captured
        self._prepare(token, adapter, self.sizes if sizes is None else sizes)
        if not sizes:
            self.packs.prepare(token, adapter)
        self.graph_bytes += max(outside_torch(self.device) - before, 0)

    def _prepare(self, token: int, adapter: str | None, sizes: Sequence[int]) -> None:
        ends = (True, False) if may_be_open(self) else (True,)
        for size, is_last in product(sorted(sizes, reverse=True), ends):
            if not self.captures:
                return
            forward = self.chunk_forward()
            piece = Piece([token] * min(size, (self.batch.context_tokens or size) - 1), 0, self.batch.cache.prompt_row)
            form = forward.form_of([piece], size, is_last=is_last)
            self.batch.cache.clear(piece.row)
            forward.load(form, [piece])
            key, serial, in_kernels = select_adapter(self, forward, adapter)
            whole = (form, key, in_kernels)
            if whole not in self._graphs and not reads_experts(self):
                self._by_graph(whole, serial, [piece.row], partial(self._stage, form, piece), at_once=True)

    def _by_graph(
        self, key: Key, serial: int | None, rows: Sequence[int], stage: Callable[[], None], *, at_once: bool
    ) -> Tensor | None:  # fmt: skip
        """Return the result of a form's graph, captured where it may be; None where the pass has to run uncaptured."""
        form, captures = key[0], self._graphs.captures
        assert isinstance(form, Form)

        def outputs(results: Sequence[Tensor]) -> list[Tensor]:
            if form.returns_states:  # where its buffers would have embeddings
                return [self.chunk_forward().buffers.held_embeddings(results[0])[0]]
            return self._outputs.setdefault((form.is_last, form.rows), [torch.empty_like(one) for one in results])

        body = Body(
            lambda: [self._passed(form)], lambda: [self._static(form).clone()], outputs, serial,
        )  # fmt: skip
        policy = Policy(
            self.model, "a prompt", failed=self._end_captures, forget=self.drop_graphs if self.room is None else self.room.release,
            may_capture=partial(self._may_capture, at_once=at_once), has_room=self._has_room, most=lambda: self._most_graphs,
            capturing=self._capturing, streamer=self.model.streamer, frees=True,
        )  # fmt: skip
        made = self._graphs.run(key, body, Inputs(stage, partial(self.batch.cache.rings, rows)), policy)
        if self.room is not None and self._graphs.captures > captures:
            self.room.check()  # drops this graph too where something is left: the result of its replay is correct
        return None if made is None else made[0]

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self.kernels()  # not chosen in the pass
        torch.cuda.empty_cache()  # memory of uncaptured passes must not stay in the graphs' pool
        with leaves.reading_staged(self.staged_tables):
            yield

    def _end_captures(self, why: str) -> None:
        self.captures = False
        self.fall_back(why)

    def drop_graphs(self) -> None:
        """Forget every graph: their memory is another's."""
        self._graphs.clear()

    def _forget_unloaded(self) -> None:
        """Drop the graphs of unloaded adapters."""
        serials = {None, *self.model.adapter_store.serials.values()}
        self._graphs.drop(lambda _, one: one.serial not in serials)

    @cached_property
    def _most_graphs(self) -> int:
        """How many graphs are kept: those that the plan counts, and those that fit in the bytes that it left over."""
        planned = self.model.plan.execution.prompt
        if self.sizes != planned.chunks or not self.sizes:
            return MOST_GRAPHS
        counted = planned_graphs(self.sizes, self.batch.context_tokens or 0)
        each = max(planned.bytes.get("prompt_graphs", 0) // counted, 1)
        return min(counted + max(self.left_bytes(), 0) // each, MOST_GRAPHS)

    @property
    def may_be_cut(self) -> bool:
        """Whether graphs of prompts that are cut into other chunks than the largest have room."""
        return not self.captures or self._most_graphs >= len(self.sizes) + CUT_GRAPHS

    def has_room_for(self, graphs: int, spare_bytes: int) -> bool:
        """Whether there is room for this many graphs beyond those of cut prompts, with this many bytes left over."""
        return self._most_graphs >= len(self.sizes) + CUT_GRAPHS + graphs and self.left_bytes() >= spare_bytes

    def _stage(self, form: Form, piece: Piece) -> None:
        if not self.staged_tables:
            return
        padded = torch.zeros(form.size, dtype=torch.long)
        padded[: len(piece.new_ids)] = torch.tensor(piece.new_ids)
        for table in self.staged_tables:
            table.stage(padded, form.size)
