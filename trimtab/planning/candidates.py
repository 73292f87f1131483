"""Which ways to compute are candidates for a plan, and which of their placements is the fastest?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.errors import DoesNotFitError, RequestError, gib
from trimtab.formats.record import HEAD8, packed_bytes
from trimtab.planning.memory.activations import patches_of
from trimtab.planning.memory.expert_slots import limits_of
from trimtab.planning.memory.prompts import has_room
from trimtab.planning.placing import Given, ModeRefusedError, Way, place
from trimtab.planning.plan.plan import Plan
from trimtab.planning.plan.table import predicted_rate
from trimtab.planning.values.blocks import quant_of
from trimtab.planning.values.byte_sizes import Rates, check_family
from trimtab.planning.values.execution import (
    CAPTURED,
    CAPTURED_CHUNKS,
    CHUNKS,
    INVARIANT_CHUNK,
    KERNEL_ROWS,
    LEAST_CAPABILITY,
    MODES,
    UNCAPTURED_CHUNKS,
    reads_packed,
    unsupported_reason,
)
from trimtab.request import LoadRequest

# Modes of a decode step, the fastest first.
FASTEST_FIRST = ("fused", "graph", "eager")
# Mean KL of next-token distributions, full head against 8 bits, on the demo model: the largest of eight measurements, without an
# adapter and with each of three, in 4 bits and bfloat16 (bench/results/head8.json: "specialist" in 4 bits).
HEAD8_KL = 1.4e-4


@dataclass(frozen=True)
class Candidates:
    """The plans that may answer one request, each made when a search needs it. Heads, then modes of decode steps, then chunks of
    prompts: each search takes the least expected seconds of the next one's."""

    given: Given

    def best(self) -> Plan:
        """Return the plan with the least expected seconds among the heads and the executions that the request allows.

        The first head is chosen unless the other keeps more of the decoder on the device and its kernel runs there.
        Errors: as `make_plan`.
        """
        request, machine, refused = self.given.request, self.given.machine, self.given.head_refused
        heads = {"full" if request.head == "auto" else request.head: self.given.anatomy}
        if request.head == "auto" and not machine.on_cpu and not refused and self.given.head8 is not None:
            heads["int8"] = self.given.head8
        check_family(request, self.given.anatomy)
        no_kernel = "" if machine.on_cpu else why_no_kernel(self.given.anatomy.dtype, machine.capability)
        plans: dict[str, Plan] = {}
        errors: list[DoesNotFitError] = []
        for head, anatomy in heads.items():
            if plans and (no_kernel or next(iter(plans.values())).is_whole):
                break
            try:
                plans[head] = self.fastest(anatomy, head)
            except DoesNotFitError as exc:
                errors.append(exc)
        if not plans:
            raise _nearest(errors)
        chosen, reason = _chosen_head(request, plans, machine, refused, no_kernel)
        plan = plans[chosen]
        slow = no_kernel or (f"its kernel computes up to {KERNEL_ROWS} rows" if request.batch > KERNEL_ROWS else "")
        if chosen == "int8" and slow and not machine.on_cpu:
            torch_s = torch_head_s(heads[chosen], plan.rates, rows=request.batch)
            reason += f"; {slow}: torch takes {1000 * torch_s:.1f} ms of each step for it, scaled from an H200"
        return replace(plan, execution=replace(plan.execution, head_reason=reason))

    def fastest(self, anatomy: Anatomy, head: str) -> Plan:
        """Return the plan of the fastest mode that is supported and fits.

        If part of the decoder leaves the device, eager steps may place it differently (the CPU computes some of it): then
        the least expected seconds decide.
        """
        request, machine = self.given.request, self.given.machine
        requested = request.decode if request.decode in MODES else None
        refused: dict[str, str] = {}
        excluded: tuple[str, ...] = ()  # by the user's placement
        errors: list[DoesNotFitError] = []
        plans: list[Plan] = []
        for mode in FASTEST_FIRST if requested is None else (requested,):
            # On a CPU, the plain counterpart of the fused kernels can be requested for comparison.
            on_cpu = machine.on_cpu and not (requested == mode == "fused")
            quant = quant_of(anatomy, request.quant)
            why = unsupported_reason(mode, anatomy, quant=quant, on_cpu=on_cpu, capability=machine.capability)
            if plans and (mode == "graph" or not _cpu_may_pay(plans[0])):
                continue  # the same bytes as the steps planned already, and slower
            if why is None:
                try:
                    is_read = reads_packed(mode, anatomy, quant)
                    reason = _mode_reason(mode, requested, refused, plans, machine, reads_packed=is_read)
                    plan = self.in_chunks(Way(anatomy=anatomy, head=head, mode=mode, reason=reason))
                    is_priced = head == "int8" and not machine.on_cpu
                    plans.append(with_head_cost(plan, anatomy, capability=machine.capability) if is_priced else plan)
                    if not plans[-1].blocks_off_device:
                        break
                except ModeRefusedError as exc:
                    why, excluded = str(exc), CAPTURED
                except DoesNotFitError as exc:
                    errors.append(exc)
                    why = f"needs {gib(exc.needed_bytes)}" if exc.needed_bytes else "does not fit"
            if why is not None:
                refused[mode] = why
        if plans:
            return min(plans, key=lambda plan: plan.expected_s)
        if errors:
            raise _nearest(errors)
        facts: dict[str, Any] = {
            "quant": quant_of(anatomy, request.quant), "on_cpu": machine.on_cpu, "capability": machine.capability,
        }  # fmt: skip
        others = (mode for mode in MODES if mode not in excluded)
        raise RequestError(
            f"decode steps cannot run this way: {refused[requested or 'eager']}", field="decode", value=request.decode,
            allowed=("auto", *(mode for mode in others if unsupported_reason(mode, anatomy, **facts) is None)),
            hint="Omit it to use an available mode",
        )  # fmt: skip

    def in_chunks(self, way: Way) -> Plan:
        """Return the plan with the most sizes of captured chunks that keep the whole decoder on the device, else the one
        with the least expected seconds: captured chunks with copied layers may be faster than the whole decoder without them.

        If graphs share the memory of other passes, they are possible together with layers that are copied in every step, and
        the seconds of a prompt and an answer decide. Otherwise graphs would take memory from the layers.
        Errors: those of the sizes that need the least.
        """
        request, machine, anatomy = self.given.request, self.given.machine, way.anatomy
        is_recurrent = any(layer.state_values for layer in anatomy.kv_layers)  # captured, such layers need a step's kernels
        modes = CAPTURED[1:] if is_recurrent else CAPTURED
        if way.mode not in modes or machine.on_cpu or anatomy.prompts_unsupported is not None:
            return self._placed(way)
        is_shared = has_room(request.batch, machine.budget_bytes(request.gpu_memory_bytes))
        has_wholes = bool(request.images) and "vision" in anatomy.parts and anatomy.images_look_ahead
        # Such an image is computed in one chunk.
        least_tokens = min(patches_of(anatomy.model_type)[1] if has_wholes else 0, max(CHUNKS))
        most_tokens = max(INVARIANT_CHUNK if request.batch_invariant else max(CHUNKS), least_tokens)
        most = min(size for size in CHUNKS if size >= most_tokens)
        plans: list[Plan] = []
        is_beside = False  # whether one of them has both captured chunks and copied layers
        refused = [way]
        for captured, choices in ((True, CAPTURED_CHUNKS), (False, UNCAPTURED_CHUNKS)):
            for chunks in (tuple(size for size in sizes if size <= most) for sizes in choices):
                if max(chunks) < least_tokens:
                    continue
                one = replace(way, chunks=chunks, captures_prompts=captured, only_whole=captured and not is_shared)
                try:
                    plan = self._placed(replace(one, is_explained=False))
                except DoesNotFitError:
                    refused += [] if captured else [one]
                    continue
                if plan.is_whole and (captured or not is_beside):
                    return plan
                if is_shared or not captured or plan.execution.expert_slots:
                    plans.append(plan)
                    is_beside |= captured
        if plans:
            return min(plans, key=lambda plan: plan.expected_s)
        errors = []
        for one in refused:
            try:
                return self._placed(one)
            except DoesNotFitError as exc:
                errors.append(exc)
        raise _nearest(errors)

    def _placed(self, way: Way) -> Plan:
        """Return the placement of a way. Where it is not the whole decoder and kernels read the experts, they may be in host memory
        with slots on the device, if that takes fewer expected seconds. Errors: of the way that needs the least."""
        request, machine = self.given.request, self.given.machine
        plans: list[Plan] = []
        errors: list[DoesNotFitError] = []
        try:
            plans.append(place(self.given, way))
        except DoesNotFitError as exc:
            errors.append(exc)
        is_free = way.mode == "fused" and {*(request.place or {}).values()} <= {"resident"} and request.device_map is None
        is_read = not machine.on_cpu and machine.has_pinned and machine.reads_host
        may_pay = is_free and is_read and not (plans and plans[0].is_whole)
        limits = limits_of(way.anatomy) if may_pay else None
        if limits is not None:
            try:
                plans.append(self._in_slots(way, *limits))
            except DoesNotFitError as exc:
                errors.append(exc)
        if not plans:
            raise _nearest(errors)
        made = min(plans, key=lambda plan: plan.expected_s)
        if not is_free or is_read or machine.on_cpu or made.is_whole or limits_of(way.anatomy) is None:
            return made
        why = f"{made.execution.step.reason}; no slots of experts: the driver lets no kernel read host memory at its own address"
        return replace(made, execution=replace(made.execution, step=replace(made.execution.step, reason=why)))

    def _in_slots(self, way: Way, least: int, most: int) -> Plan:
        """Return the fastest placement with as many slots of experts as fit. Errors: of the least."""
        best = place(self.given, replace(way, expert_slots=least))
        away, above = best.blocks_off_device, most + 1
        while above - least > 1:
            slots, more = (least + above) // 2, None
            with suppress(DoesNotFitError):
                more = place(self.given, replace(way, expert_slots=slots, is_explained=False))
            if more is None or more.blocks_off_device > away:
                above = slots
            else:
                least, best = slots, min(more, best, key=lambda plan: plan.expected_s)
        return best


def _nearest(errors: Sequence[DoesNotFitError]) -> DoesNotFitError:
    """Return the error of the plan that lacks the least memory, whose budget is the smallest sufficient one; larger budgets of
    two devices come last."""
    return min(errors, key=lambda error: (error.needs_both, error.needed_bytes - error.budget_bytes))


def _mode_reason(
    mode: str, requested: str | None, refused: Mapping[str, str], before: Sequence[Plan], machine: Any, *, reads_packed: bool
) -> str:  # fmt: skip
    if requested is not None:
        return "requested"
    if machine.on_cpu:
        return "the CPU computes"
    if before:
        return f"faster here than {before[-1].execution.step.mode} steps, which compute every layer on the GPU"
    why = "; ".join(f"no {name} steps: {reason}" for name, reason in refused.items())
    if mode == "fused":
        products = "" if reads_packed else " around the stack's own products"
        return f"its decoder is described: trimtab's kernels{products}, the fastest way that this model and card support"
    return why or "the fastest way that this model and card support"


def _cpu_may_pay(plan: Plan) -> bool:
    """Return whether the CPU may compute a layer faster than the layer can be copied to the device."""
    return 2 * plan.rates.host_matmul_Bps > plan.rates.pinned_h2d_Bps


def _chosen_head(request: LoadRequest, plans: Mapping[str, Plan], machine: Any, refused: str, no_kernel: str) -> tuple[str, str]:
    """Return the chosen head and the reason. refused: why it must stay full; no_kernel: why the 8-bit kernel cannot run."""
    first = next(iter(plans))
    if request.head != "auto":
        return first, "requested"
    if machine.on_cpu:
        return first, "the CPU computes"
    if refused:
        return first, refused
    if len(plans) == 1:
        if first == "int8":
            return first, f"the full head does not fit; {_cost()}"
        if plans[first].blocks_off_device:
            return first, f"8 bits would be computed by torch: {no_kernel}" if no_kernel else "8 bits do not fit either"
        return first, "the whole decoder stays on the device"
    whole, small = plans["full"], plans["int8"]
    kept = whole.blocks_off_device - small.blocks_off_device
    if kept <= 0 and whole.execution.expert_slots:
        return _head_of_slots(whole, small)
    if kept > 0 and small.expected_s < whole.expected_s:
        rates = f"{predicted_rate(small.execution)} instead of {predicted_rate(whole.execution)} predicted"
        return "int8", f"keeps {kept} more decoder blocks on the device, {rates}; {_cost()}"
    if kept > 0:
        return "full", "8 bits keep more of the decoder on the device, but are not faster"
    return "full", "8 bits would not keep more of the decoder on the device"


def _head_of_slots(whole: Plan, small: Plan) -> tuple[str, str]:
    """Return the head of a mixture whose experts are in slots with the full one, and the reason."""
    more = small.execution.expert_slots - whole.execution.expert_slots
    if small.expected_s < whole.expected_s:
        rates = f"{predicted_rate(small.execution)} instead of {predicted_rate(whole.execution)} predicted"
        kept = f"{more} more experts of each layer" if more > 0 else "all experts"
        return "int8", f"keeps {kept} on the device, {rates}; {_cost()}"
    return "full", "8 bits would not make steps faster"


def _cost() -> str:
    return f"mean KL up to {HEAD8_KL:.1e} on the demo model, a full head gives the logits of transformers"


# The head in 8 bits ---------------------------------------------------------------------------------------------------

# An 8-bit head's kernel (engine/formats/int8_head.py) computes up to KERNEL_ROWS rows in bfloat16; torch computes all other cases
# in float32, slower than the full head. Heads that the kernel refuses for width or bias are not covered: only loading knows them.
KERNEL_DTYPE = "bfloat16"
# Rows of a step -> seconds of torch's product with 8 bits, as a multiple of the full head's in bfloat16: E4B on an H200
# (bench/results/head8.json). More rows take at least as long. Other cards take the multiple as an estimate.
TORCH_MULTIPLES = {1: 10.4, 2: 13.5, 4: 14.1, 8: 17.9}


def why_no_kernel(dtype: str, capability: tuple[int, int] | None) -> str:
    """Return why a GPU cannot run the kernel for a model of this dtype, "" if it can or its capability is not known."""
    if capability is not None and capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        return f"its kernel needs compute capability {need}, the card has {have}"
    if dtype != KERNEL_DTYPE:
        return f"its kernel computes in {KERNEL_DTYPE}, the model in {dtype}"
    return ""


def torch_head_s(anatomy: Anatomy, rates: Rates, *, rows: int) -> float:
    """Return the predicted seconds of one step's 8-bit head in torch, in addition to reading its bytes once."""
    weights = [row.weight for row in anatomy.head_rows if row.weight is not None]
    full_bytes = sum(prod(weight.shape) * DTYPE_BYTES[KERNEL_DTYPE] for weight in weights)
    small_bytes = sum(packed_bytes(weight.shape, HEAD8, weight.dtype) for weight in weights)
    multiple = max(found for count, found in TORCH_MULTIPLES.items() if count <= max(rows, 1))
    return (full_bytes * multiple - small_bytes) / rates.device_Bps


def with_head_cost(plan: Plan, anatomy: Anatomy, *, capability: tuple[int, int] | None) -> Plan:
    """Return the plan of an 8-bit head on a GPU with the seconds that torch adds if the kernel does not run: to every step, and
    to a prompt, of which only the last token enters the head."""
    step, prompt = plan.execution.step, plan.execution.prompt
    no_kernel, rows = why_no_kernel(anatomy.dtype, capability), plan.request.batch
    if no_kernel or rows > KERNEL_ROWS:
        step = replace(step, seconds=step.seconds + torch_head_s(anatomy, plan.rates, rows=rows))
    if no_kernel:
        prompt = replace(prompt, seconds=prompt.seconds + torch_head_s(anatomy, plan.rates, rows=1))
    return replace(plan, execution=replace(plan.execution, step=step, prompt=prompt))
