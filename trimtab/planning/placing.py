"""In which tier is each block if the model computes one way, and what bytes and seconds does that take?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.formats.record import stored_format
from trimtab.planning.memory.activations import Use, needs_of, use_of
from trimtab.planning.memory.adapters import copies_bytes
from trimtab.planning.memory.expert_slots import fetched_bytes, slots_bytes, stacks_bytes
from trimtab.planning.memory.media import MediaMemory
from trimtab.planning.memory.prefix_cache import prefix_bytes
from trimtab.planning.memory.prompts import BESIDE_ROOM_BYTES, ROOM_SLACK_BYTES, has_room, prompt_bytes, uncaptured_bytes
from trimtab.planning.memory.towers import PARTS
from trimtab.planning.plan.plan import Plan
from trimtab.planning.request.overrides import Asked, resolve_device_map, resolve_place
from trimtab.planning.search import Reasons, Refusal, Search
from trimtab.planning.values.blocks import (
    STAGING_SLOTS,
    Block,
    Choice,
    Item,
    Limits,
    Machine,
    Paid,
    Totals,
    blocks_of,
    experts_of,
    places_of,
    quant_of,
    slots_of,
    stored_of,
    totals_of,
    unquantized_of,
    widened_bytes,
)
from trimtab.planning.values.byte_sizes import (
    Rates,
    Weights,
    Work,
    added_step_s,
    allocated_bytes,
    allocator_reserve_bytes,
    seconds,
    unhidden_s,
)
from trimtab.planning.values.execution import (
    CAPTURED,
    EXPERT_LAYER_S,
    EXPERT_RATE_SHARE,
    FRAGMENT_BYTES,
    LINK_SHARE,
    ROW_LAYER_S,
    ROW_VALUE_S,
    STATE_LAYER_S,
    STATE_ROW_S,
    BlockWork,
    Execution,
    Phase,
    StepWork,
    check_bytes,
    head_bytes,
    prompt_launch_s,
    reads_packed,
    rows_beyond_first,
    step_bytes,
    step_s,
)
from trimtab.planning.values.pipeline import evened
from trimtab.planning.values.rows import OUTSIDE_PEAK, Placement
from trimtab.request import LoadRequest

# A ring of page-locked buffers for file tensors, and tensors that are read before they are used (engine/tiers/reader.py).
READ_BUFFER_BYTES = 128 * 2**20


class ModeRefusedError(Exception):
    """The user's placement excludes a decode mode. The message names the mode."""


@dataclass(frozen=True)
class Known:
    """Cached values of plans for one machine. blocks: of the anatomies, by their identity and format, and whether
    experts are apart. items: the choices, also by use and by whether steps are captured."""

    blocks: dict[tuple[int, str, bool], tuple[Block, ...]] = field(default_factory=dict)
    items: dict[tuple[int, str, bool, Use, bool], list[Item]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What all candidates for one request have in common. Fields are arguments of `make_plan`.

    expert_bytes: of the adapters' parts on experts, which no graph of a prompt copies. is_explained: whether an error
    names the sufficient budget, which needs a further search.
    """

    request: LoadRequest
    anatomy: Anatomy
    adapters: Mapping[str, int]
    machine: Machine
    rates: Rates
    disk_free_bytes: int | None
    head8: Anatomy | None
    head_refused: str
    held_bytes: int
    media: MediaMemory
    expert_bytes: Mapping[str, int] = field(default_factory=dict)
    known: Known = field(default_factory=Known)
    is_explained: bool = True


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute: the head (anatomy: with it), the mode of steps and why, and the chunks of prompts.

    only_whole: whether only a placement with the whole decoder on the device is useful. is_explained: as in `Given`. expert_slots:
    as `Execution` has it.
    """

    anatomy: Anatomy
    head: str
    mode: str
    reason: str
    chunks: tuple[int, ...] = ()
    captures_prompts: bool = False
    only_whole: bool = False
    is_explained: bool = True
    expert_slots: int = 0


def place(given: Given, way: Way) -> Plan:
    """Return the cheapest placement of one way within every budget. Errors: as `make_plan`, and ModeRefusedError."""
    return _Planner(given, way).plan()


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """The tiers that a block may be in while the model computes one way, and what each takes. asked: the user's, by block path.
    is_captured, reads_packed: of decode steps."""

    machine: Machine
    rates: Rates
    use: Use
    asked: Mapping[str, Asked]
    is_captured: bool
    reads_packed: bool

    @cached_property
    def works(self) -> Mapping[Paid, Work]:
        return self.use.works()

    def item(self, block: Block) -> Item:
        requested = self.asked.get(block.block_path)
        choices = [
            self._choice(block, tier, home)
            for tier, home in places_of(block)
            if (requested is None and self._runs_in_mode(block, tier))
            or (requested is not None and requested.tier == tier and requested.home in (None, home))
        ]
        if requested is not None and not all(self._runs_in_mode(block, choice.tier) for choice in choices):
            why = f"{block.block_path} is placed in tier {requested.tier}: the CPU takes part in every step"
            raise ModeRefusedError(why)
        if requested is not None and not choices:
            raise RequestError(
                f"{block.block_path} is not one tensor of the checkpoint, so its rows cannot be read from there",
                field="device_map", value=requested.asked, allowed=("cpu", self.machine.execution_device),
            )  # fmt: skip
        return Item(tuple(choices), block.is_table, block.load_transient_bytes, block.dense_bytes)

    def _choice(self, block: Block, tier: str, home: str) -> Choice:
        on_cpu, is_moved = self.machine.on_cpu, tier != "resident"
        movable = block.movable_bytes if on_cpu else block.movable_allocated_bytes
        staged = block.buffer_bytes if tier in ("stream", "disk") else 0
        device = (block.row_bytes if on_cpu else allocated_bytes(block.row_bytes)) if tier == "gather" else 0
        host = block.movable_bytes if tier in ("host", "gather") else staged
        request_s, step_s = self._seconds(block, tier, home)
        return Choice(
            tier, home, device if is_moved else movable, host if is_moved and home == "host" else 0,
            staged if home == "disk" else 0, staged, request_s, step_s, request_s + self.use.answer_tokens * step_s,
        )  # fmt: skip

    def _seconds(self, block: Block, tier: str, home: str) -> tuple[float, float]:
        pinned, on_cpu = self.machine.has_pinned, self.machine.on_cpu
        # A captured step launches its kernels all at once.
        launch_s = 0.0 if self.is_captured and block.paid == "token" else None
        return seconds(
            tier, home, self.weights(block), self.works[block.paid], self.rates, pinned=pinned, on_cpu=on_cpu,
            step_launch_s=launch_s,
        )  # fmt: skip

    def weights(self, block: Block) -> Weights:
        return Weights(
            nbytes=block.movable_bytes, flops=block.flops_per_token, leaves=len(block.leaves), row_bytes=block.row_bytes,
            widened_bytes=0 if self.reads_packed else block.widened_bytes,
        )  # fmt: skip

    def _runs_in_mode(self, block: Block, tier: str) -> bool:
        """Return whether a captured step can run with the block in this tier: the CPU computes nothing at a token."""
        return not (self.is_captured and block.part in ("language", "head") and tier in ("host", "disk"))


class _Planner:
    """One placement in the making."""

    def __init__(self, given: Given, way: Way) -> None:
        self.given, self.way, self.machine, self.rates = given, way, given.machine, given.rates
        self.mode, self.captures_prompts, self.adapter_sizes = way.mode, way.captures_prompts, dict(given.adapters)
        self.expert_bytes = given.expert_bytes
        self.media, self.held_bytes = given.media, given.held_bytes
        self.anatomy = anatomy = way.anatomy
        self.request = request = replace(given.request, head=way.head, quant=quant_of(anatomy, given.request.quant))
        machine, known, mode, chunks = given.machine, given.known, way.mode, way.chunks
        adapters, captures_prompts = given.adapters, way.captures_prompts
        are_apart = way.expert_slots > 0
        key = id(anatomy), request.quant, are_apart
        if key not in known.blocks:
            known.blocks[key] = blocks_of(anatomy, request.quant, are_apart=are_apart)
        self.blocks = known.blocks[key]
        self.asked = _asked(request, anatomy, self.blocks, machine)
        self.use = use_of(request, anatomy)
        self.is_captured = mode in CAPTURED and not machine.on_cpu
        self.reads_packed = self.is_captured and reads_packed(mode, anatomy, request.quant)
        # A step of kernels around the stack's products takes the seconds of captured modules.
        self.timed_as = "graph" if mode == "fused" and not self.reads_packed else mode
        most = min(self.use.prefill_tokens, self.use.context_tokens)
        self.chunks = tuple(size for size in chunks if size <= most) or chunks[:1]
        in_place = bool(self.chunks) and has_room(request.batch, machine.budget_bytes(request.gpu_memory_bytes))
        self.has_room = captures_prompts and in_place
        self.needs = needs_of(
            anatomy, self.use, quant=request.quant, has_adapters=bool(adapters), has_rows=self.is_captured,
            chunk_tokens=max(self.chunks, default=0), is_fused=mode == "fused", has_room=self.has_room, in_place=in_place,
            is_unpacked_elsewhere=bool(self.chunks) and (self.has_room or not captures_prompts),
        )  # fmt: skip
        self.prompt_bytes = self._prompt_bytes()
        self.adapter_bytes = sum(adapters.values())
        self.slot_bytes = slots_bytes(anatomy, way.expert_slots) if are_apart else 0
        self.apart_bytes = stacks_bytes(anatomy) if are_apart else 0
        self.execution_bytes = self._execution_bytes()
        keeps_prefixes = bool(request.prefix_cache_bytes) and not machine.on_cpu
        self.prefix_bytes = (
            prefix_bytes(anatomy.kv_layers, anatomy.dtype, context_tokens=request.context_tokens) if keeps_prefixes else {}
        )
        self.choices = _Choices(
            machine=machine, rates=given.rates, use=self.use, asked=self.asked, is_captured=self.is_captured,
            reads_packed=self.reads_packed,
        )  # fmt: skip
        kept = (*key, self.use, self.is_captured)
        self.items = (not self.asked and known.items.get(kept)) or list(map(self.choices.item, self.blocks))
        if not self.asked:
            known.items[kept] = self.items
        self.limits = self._limits()

    def plan(self) -> Plan:
        disk_bytes = self.limits.disk_budget_bytes
        if disk_bytes is not None and self._spilled_bytes() > disk_bytes:
            raise self._refusal().of_disk()
        search = Search(self.items, self.limits)
        best = search.best() if search.may_fit() else None
        if best is None and self.is_captured:  # perhaps one staging buffer fits; an error counts one too
            self.limits = replace(self.limits, slots=1)
            search = Search(self.items, self.limits)
            best = search.best() if search.may_fit() else None
        if best is None:
            raise self._refusal().error(search) if self.given.is_explained and self.way.is_explained else self._unexplained()
        return self._with_best_buffers(*best) if self.is_captured and self._copies(best[0]) else self._plan(*best)

    def _refusal(self) -> Refusal:
        return Refusal(self.request, self.machine, self.items, self.limits, self._spilled_bytes())

    def _unexplained(self) -> DoesNotFitError:
        return DoesNotFitError(
            "no placement", block=None, device=self.machine.execution_device, needed_bytes=0,
            budget_bytes=self.limits.device_budget_bytes,
        )  # fmt: skip

    def _copies(self, chosen: Sequence[Choice]) -> bool:
        """Whether a step copies blocks of the decoder."""
        pairs = zip(self.blocks, chosen, strict=True)
        return any(block.part in ("language", "head") and choice.tier == "stream" for block, choice in pairs)

    def _with_best_buffers(self, chosen: list[Choice], totals: Totals) -> Plan:
        """Return the plan of a captured step that copies blocks, with two staging buffers or with one: a second one
        hides more of the copies, and takes the memory of a block."""
        given, one = self.limits, replace(self.limits, slots=1)
        alone = (chosen, totals) if given == one else Search(self.items, one).best()
        if self.way.only_whole and (alone is None or self._copies(alone[0])):
            raise self._unexplained()  # evenly spread layers are copied as well
        candidates = [self._evened(chosen, totals)]
        self.limits = one
        candidates += [] if alone is None or given == one else [self._evened(*alone)]
        best = min(candidates, key=lambda one: self._seconds_of(one[0], one[1].slots))
        if best is candidates[0]:
            self.limits = given
        return self._plan(*best)

    def _seconds_of(self, chosen: Sequence[Choice], slots: int) -> float:
        prompt_s = sum(choice.request_s for choice in chosen) + self._waits_s(chosen, slots)
        return prompt_s + self.use.answer_tokens * self._step_s(chosen, slots)

    def _waits_s(self, chosen: Sequence[Choice], slots: int) -> float:
        """Return the seconds that one staging buffer adds to the passes of a prompt, because it alternates between
        copying and computing. Captured passes through blocks of several pieces add none: the copies continue."""
        staged = [block for block, choice in zip(self.blocks, chosen, strict=True) if choice.staged_bytes]
        if slots != 1 or len(staged) < 2:
            return 0.0
        cut = self.captures_prompts
        in_turn = [block for block in staged if not (cut and block.paid == "token" and len(block.pieces) > 1)]
        weighed = ((self.choices.weights(block), self.choices.works[block.paid]) for block in in_turn)
        return sum(unhidden_s(*pair, self.rates, pinned=self.machine.has_pinned) for pair in weighed)

    def _evened(self, chosen: list[Choice], totals: Totals) -> tuple[list[Choice], Totals]:
        """Return the placement with the layers that a captured step copies spread over the decoder, and its totals."""

        def totals_with(choices: Sequence[Choice]) -> Totals:
            return totals_of([(choice, item, 1) for choice, item in zip(choices, self.items, strict=True)], self.limits)

        even = evened(
            self.blocks, self.items, chosen, is_free=lambda block: block.block_path not in self.asked,
            is_allowed=lambda choices: self.limits.allows(totals_with(choices)),
            seconds_of=lambda choices: self._seconds_of(choices, slots_of(choices, self.limits)),
        )  # fmt: skip
        return even, totals if even == chosen else totals_with(even)

    def _execution_bytes(self) -> dict[str, int]:
        """Return the bytes of prompts and steps without weights and caches, by item."""
        if self.machine.on_cpu:
            return {}
        counted = step_bytes(
            self.mode, self.anatomy, quant=self.request.quant, rows=self.use.batch, context_tokens=self.use.context_tokens,
            has_adapters=bool(self.adapter_sizes), kv=self.use.kv, is_paged=self.use.pool_tokens is not None,
        )  # fmt: skip
        if self.has_room:
            counted |= {"fragments": ROOM_SLACK_BYTES + BESIDE_ROOM_BYTES}
        elif self.is_captured and not self.captures_prompts:
            counted |= {"fragments": FRAGMENT_BYTES}
        if self.mode == "fused":
            # Kernels are checked while no request runs: in the memory of a prompt's activations, and beyond it.
            more = check_bytes(self.anatomy) - self.needs.activation_bytes - counted.get("logits", 0)
            counted |= {"checks": more} if more > 0 else {}
        return counted

    def _prompt_bytes(self) -> dict[str, int]:
        """Return the bytes of chunked prompts without weights and caches, by item. Graphs read a single adapter in place."""
        if not self.captures_prompts:
            if not self.chunks:
                return {}
            return uncaptured_bytes(self.anatomy, self.chunks, quant=self.request.quant, has_adapters=bool(self.adapter_sizes))
        sizes = [size - self.expert_bytes.get(name, 0) for name, size in self.adapter_sizes.items()]
        is_switched = len(sizes) > 1 or self.use.batch > 1
        return prompt_bytes(
            self.anatomy, self.use, self.chunks, quant=self.request.quant,
            has_adapters=bool(sizes), adapter_copy_bytes=copies_bytes(sizes) if is_switched else 0, has_room=self.has_room,
        )  # fmt: skip

    def _fixed_bytes(self) -> int:
        """Return the bytes that stay on the execution device in every plan, including look-up tables of 4-bit formats."""
        quant, on_cpu = self.request.quant, self.machine.on_cpu
        made = (row.made for row in self.anatomy.rows if row.made is not None)
        tables = {table for name in {quant, *made} for table in stored_format(name).tables.items()}
        codes = sum(nbytes if on_cpu else allocated_bytes(nbytes) for _, nbytes in tables)
        return codes + sum(block.fixed_bytes if on_cpu else block.fixed_allocated_bytes for block in self.blocks)

    def _limits(self) -> Limits:
        machine, request, fixed = self.machine, self.request, self._fixed_bytes() + self.slot_bytes
        kept = self.apart_bytes + request.prefix_cache_bytes + self.held_bytes
        on_cpu, available = machine.on_cpu, machine.host_available_bytes + machine.process_bytes
        counted = self.execution_bytes | self.prompt_bytes | self.prefix_bytes
        outside = sum(count for name, count in counted.items() if name in OUTSIDE_PEAK)
        inside = sum(counted.values()) - outside
        return Limits(
            device_budget_bytes=machine.budget_bytes(request.gpu_memory_bytes),
            host_budget_bytes=request.host_memory_bytes or available,
            disk_budget_bytes=self.given.disk_free_bytes, total_budget_bytes=available if on_cpu else None,
            run_bytes=fixed + self.adapter_bytes + self.needs.kv_cache_bytes + self.needs.activation_bytes + inside,
            load_bytes=fixed, host_bytes=machine.process_bytes + kept + sum(self.media.by_item.values()),
            host_load_bytes=READ_BUFFER_BYTES,
            context_bytes=0 if on_cpu else machine.context_bytes + outside,
            reserve=(lambda peak_bytes: 0) if on_cpu else allocator_reserve_bytes,
        )  # fmt: skip

    # The result -------------------------------------------------------------------------------------------------------

    def _plan(self, chosen: list[Choice], totals: Totals) -> Plan:
        limits, request = self.limits, self.request
        resident = sum(choice.device_bytes for choice in chosen)
        host_weights = {
            f"{tier}_weights": sum(c.host_bytes for c in chosen if c.tier == tier) for tier in ("gather", "stream", "host")
        }  # fmt: skip
        gpu = {
            "weights": resident, "fixed": limits.load_bytes - self.slot_bytes,
            **({"expert_slots": self.slot_bytes} if self.slot_bytes else {}), "adapters": self.adapter_bytes,
            "kv_cache": self.needs.kv_cache_bytes, "activations": self.needs.activation_bytes,
            "staging": totals.slots * totals.staged_bytes, **self.execution_bytes, **self.prompt_bytes,
            **self.prefix_bytes,
            "cuda_context": 0 if self.machine.on_cpu else self.machine.context_bytes,
            "allocator_reserve": limits.reserve(totals.peak_bytes),
        }  # fmt: skip
        host = {
            "process": self.machine.process_bytes, **host_weights, **({"experts": self.apart_bytes} if self.apart_bytes else {}),
            "buffers": max(totals.buffer_bytes, totals.read_buffer_bytes),
        }  # fmt: skip
        if request.prefix_cache_bytes:
            host["prefix_cache"] = request.prefix_cache_bytes
        if self.held_bytes:
            host["held_adapters"] = self.held_bytes
        host |= self.media.by_item
        reasons = Reasons(self.blocks, self.items, chosen, self.asked, limits, self.machine.execution_device)
        return Plan(
            request=request, model_class=self.anatomy.model_class, execution_device=self.machine.execution_device,
            placements=tuple(
                self._placement(block, choice, reasons.of(block, choice))
                for block, choice in zip(self.blocks, chosen, strict=True)
            ),
            gpu=gpu, host=host, gpu_peak_bytes=totals.run_bytes, gpu_load_peak_bytes=totals.load_bytes,
            gpu_budget_bytes=limits.device_budget_bytes, host_peak_bytes=totals.host_bytes,
            host_budget_bytes=limits.host_budget_bytes, disk_bytes=totals.disk_bytes, staging_slots=totals.slots,
            prefill_tokens=self.use.prefill_tokens, answer_tokens=self.use.answer_tokens, peak_phase=self.needs.phase,
            unquantized=unquantized_of(self.anatomy, request.quant), checkpoint_stamps=(), rates=self.rates,
            execution=self._execution(chosen, totals.slots), adapter_bytes=self.adapter_sizes, media_reason=self.media.reason,
            stored=stored_of(self.anatomy), experts=experts_of(self.anatomy),
        )  # fmt: skip

    def _execution(self, chosen: Sequence[Choice], slots: int) -> Execution:
        """Return how prompts and steps run on this placement, with predicted seconds."""
        use, rates, has_adapters = self.use, self.rates, bool(self.adapter_sizes)
        prompt_s = sum(choice.request_s for choice in chosen)
        if self.machine.on_cpu:
            one_s = sum(choice.step_s for choice in chosen)
            counted: Mapping[str, int] = {}
        else:
            passes = -(-use.prompt_tokens // max(self.chunks)) if self.chunks else use.passes
            counts = prompt_linears(self.anatomy, self.blocks, use, is_cut=bool(self.chunks))
            options = {"is_captured": self.captures_prompts, "has_adapters": has_adapters}
            launch_s = prompt_launch_s(*counts, passes=passes, launch_s=rates.launch_s, **options)
            prompt_s += self._waits_s(chosen, slots)
            prompt_s = prompt_s + launch_s if self.captures_prompts else max(prompt_s, launch_s)
            prompt_s += passes * self._fetch_s(-(-use.prompt_tokens // max(passes, 1)), in_turns=True)
            one_s = self._step_s(chosen, slots) + self._fetch_s(use.batch)
            counted = self.execution_bytes
        estimated_s = 0.0
        if use.kv == "int8":
            estimated_s = added_step_s(
                self.anatomy.kv_layers, self.anatomy.dtype, rates, mode=self.mode, on_cpu=self.machine.on_cpu, rows=use.batch,
                context_tokens=use.context_tokens,
            )  # fmt: skip
        step = Phase(
            mode=self.mode, bytes=counted, reason=self.way.reason, seconds=one_s + estimated_s,
            is_asked=self.request.decode != "auto", estimated_s=estimated_s,
        )  # fmt: skip
        prompt = Phase(
            mode="graph" if self.captures_prompts else "eager", bytes=self.prompt_bytes, reason=self._prompt_reason(),
            seconds=prompt_s, chunks=self.chunks,
        )  # fmt: skip
        return Execution(
            prompt=prompt, step=step, head=self.request.head, head_reason="", is_head_asked=self.given.request.head != "auto",
            expert_slots=self.way.expert_slots,
        )  # fmt: skip

    def _prompt_reason(self) -> str:
        sizes = f"chunks of {', '.join(map(str, self.chunks))} tokens"
        if self.captures_prompts:
            return f"captured in {sizes}"
        if self.machine.on_cpu:
            return "the CPU computes"
        if not self.is_captured:
            why = "steps are not captured"
        else:
            why = self.anatomy.prompts_unsupported or "captured prompts would take memory from the decoder"
        if self.chunks:
            return f"{why}, in static {sizes}"
        return f"{why}, in chunks of {self.use.prefill_tokens} tokens"

    def _fetch_s(self, tokens: int, *, in_turns: bool = False) -> float:
        """Return the seconds that a pass waits for experts in host memory, as `fetched_bytes` has it."""
        slots, link_Bps = self.way.expert_slots, self.rates.copy_Bps(pinned=self.machine.has_pinned, on_cpu=False)
        return fetched_bytes(self.blocks, tokens, slots, in_turns=in_turns) / (link_Bps * LINK_SHARE) if slots else 0.0

    def _step_s(self, chosen: Sequence[Choice], slots: int) -> float:
        link_Bps = self.rates.copy_Bps(pinned=self.machine.has_pinned, on_cpu=False)
        work = step_work(self.anatomy, self.blocks, chosen, rows=self.use.batch, slots=slots, reads_packed=self.reads_packed)
        return step_s(self.timed_as, work, self.rates, link_Bps=link_Bps, has_adapters=bool(self.adapter_sizes))

    def _placement(self, block: Block, choice: Choice, reason: str) -> Placement:
        fixed = block.fixed_bytes if self.machine.on_cpu else block.fixed_allocated_bytes
        return Placement(
            block_path=block.block_path, part=block.part, tier=choice.tier, home=choice.home,
            gpu_bytes=choice.device_bytes + fixed, host_bytes=choice.host_bytes, disk_bytes=choice.disk_bytes,
            request_s=choice.request_s, token_s=choice.step_s, reason=reason,
        )  # fmt: skip

    def _spilled_bytes(self) -> int:
        """Return the bytes of the blocks that the request puts on disk."""
        on_disk = {path for path, requested in self.asked.items() if requested.tier == "disk"}
        return sum(block.buffer_bytes for block in self.blocks if block.block_path in on_disk)


def _asked(request: LoadRequest, anatomy: Anatomy, blocks: Sequence[Block], machine: Machine) -> dict[str, Asked]:
    if request.device_map is not None:
        return resolve_device_map(request.device_map, blocks, anatomy, execution_device=machine.execution_device)
    return resolve_place(request.place, blocks, anatomy) if request.place else {}


def step_work(
    anatomy: Anatomy, blocks: Sequence[Block], chosen: Sequence[Choice], *, rows: int, slots: int = STAGING_SLOTS,
    reads_packed: bool = False,
) -> StepWork:  # fmt: skip
    """Return the work of one decode step of `rows` rows with the blocks in their placements, a choice for each block. slots:
    staging buffers. reads_packed: as `execution.reads_packed`."""
    device = link = linears = layers = 0
    other_s = row_s = 0.0
    states = {str(layer.layer) for layer in anatomy.kv_layers if layer.state_values}
    first: list[BlockWork] = []  # modules outside the layers come before them
    after: list[BlockWork] = []
    for block, choice in zip(blocks, chosen, strict=True):
        if block.paid != "token":
            continue
        if block.is_table:
            other_s += choice.step_s
            continue
        is_layer = block.is_decoder_layer
        linears, layers = linears + len(block.leaves), layers + is_layer
        if choice.tier == "host":
            other_s += choice.step_s
            continue
        copied = block.movable_bytes if choice.tier == "stream" else 0
        own = block.read_bytes(rows)
        if reads_packed and block.expert_bytes:
            others = block.movable_bytes - (0 if block.are_apart else block.expert_bytes)
            own = others + int(rows * block.expert_bytes * block.expert_share / EXPERT_RATE_SHARE)
            other_s += EXPERT_LAYER_S[block.beside]
        if reads_packed and is_layer:
            is_state = block.block_path.rpartition(".")[2] in states
            other_s += block.layer_s + is_state * STATE_LAYER_S
            row_s += ROW_LAYER_S + ROW_VALUE_S * block.attended + is_state * STATE_ROW_S
        device, link = device + own + (0 if reads_packed else block.widened_bytes), link + copied
        other_s += choice.step_s if choice.tier == "disk" else 0.0
        one = BlockWork(own, copied, len(block.leaves), is_layer, block.piece_bytes if copied else ())
        (first if block.part == "language" and not is_layer else after).append(one)
    head = head_bytes(anatomy)
    tied = {path for row in anatomy.head_rows for path in [row.weight and row.weight.tied_to] if path}
    read = {row.stored for row in anatomy.head_rows if row.stored and stored_format(row.stored).layout} if reads_packed else set()
    head += sum(widened_bytes(row, anatomy.dtype) for row in anatomy.head_rows if row.stored not in read)
    device += head if tied else 0  # a weight that the head shares with a table is no separate block
    return StepWork(
        device_bytes=device, link_bytes=link, other_s=other_s, tail_bytes=head, layers=layers, linears=linears,
        rows_s=row_s * rows_beyond_first(rows), blocks=(*first, *after), slots=max(slots, 1),
    )  # fmt: skip


def prompt_linears(anatomy: Anatomy, blocks: Sequence[Block], use: Use, *, is_cut: bool) -> tuple[int, int, int]:
    """Return the number of linears of the decoder, of its layers that only the last pass of a prompt enters, and of towers that
    run. is_cut: whether prompts are computed in chunks of fixed shapes: layers that read the keys of earlier ones then see only
    the last token (engine/passes/chunk_forward.py)."""
    shared = {str(layer.layer) for layer in anatomy.kv_layers if layer.shares is not None and is_cut}
    whole = skipped = towers = 0
    for block in blocks:
        if block.part in PARTS and (use.patches or use.sound_s):
            towers += len(block.leaves)
        if block.paid == "token" and not block.is_table:
            whole += len(block.leaves)
            skipped += len(block.leaves) * (block.block_path.rpartition(".")[2] in shared)
    return whole, skipped, towers
