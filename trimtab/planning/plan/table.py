"""What does a plan say to people: identical layers in one row, and the memory of every device against its budget?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trimtab.adapters.file import GGUF, TENSORS_NAME
from trimtab.errors import gib
from trimtab.planning.values.byte_sizes import HELD_OBJECT_BYTES, KV8_KL
from trimtab.planning.values.cards import marked
from trimtab.planning.values.execution import Execution, Phase, how_computed
from trimtab.planning.values.rows import OUTSIDE_PEAK, PHASE_WORDS, ExpertWeights, Placement, Unquantized
from trimtab.report.document import Block, Document, Facts, Table, Text
from trimtab.request import EXPERTS, MADE_EXPERTS

if TYPE_CHECKING:
    from trimtab.planning.plan.contents import PlanContents


def verdict(plan: PlanContents) -> str:
    """Return the plan in one sentence: that it fits, how fast answers are, and what memory it takes of which budget."""
    needed, rate = plan.gpu_needed_bytes, predicted_rate(plan.execution)
    if plan.card is None and not rate.startswith("~"):  # estimates are marked
        rate = f"about {rate}"
    disk = f", {gib(plan.disk_bytes)} on disk" if plan.disk_bytes else ""
    if plan.execution_device == "cpu":
        taken = f"{gib(needed + plan.host_peak_bytes)} of {gib(plan.host_budget_bytes)} of host memory"
        return f"Fits: {rate} on the CPU; {taken}{disk}"
    taken = f"{gib(needed)} of {gib(plan.gpu_budget_bytes)} on the GPU, {gib(plan.host_peak_bytes)} of host memory"
    return f"Fits: {rate}; {taken}{disk}"


def tensors_peak(plan: PlanContents) -> str:
    """Return what the tensors of the execution device take at most, and when."""
    phase = PHASE_WORDS.get(plan.peak_phase, plan.peak_phase)
    return f"tensors at most {gib(plan.gpu_peak_bytes)} ({phase}), {gib(plan.gpu_load_peak_bytes)} while loading"


def document_of(plan: PlanContents) -> Document:
    """Return what a plan says to people: the verdict, the request, a row for each group of blocks, devices and execution."""
    request = plan.request
    head = (
        f"{plan.model_class} on {plan.execution_device}: {request.quant}, {request.dtype}, "
        f"{'8-bit head, ' if plan.execution.head == 'int8' else ''}"
        f"{'8-bit keys and values, ' if request.kv == 'int8' else ''}"
        f"{'' if request.experts == EXPERTS[0] else f'{request.experts} experts, '}"
        f"{'batch-invariant, ' if request.batch_invariant else ''}"
        f"context {request.context_tokens}, answer {plan.answer_tokens}, batch {request.batch}, images {request.images}, "
        f"audio {request.audio_s:g} s"
    )
    shared = _shared_prefix([row.block_path for row in plan.placements])
    first = f"block ({shared}...)" if shared else "block"
    columns = (first, "part", "tier", "home", "device", "host", "disk", "per request", "per token", "why")
    blocks = Table(
        columns, [_line(name.removeprefix(shared), rows) for name, rows in grouped(plan.placements)], has_note=True,
        optional=(1, 3, 7, *(() if plan.disk_bytes else (6,))),
    )  # fmt: skip
    parts: list[Block] = [Text(head, is_fixed=True), blocks, Facts(_devices(plan)), Facts(_execution(plan))]
    if plan.stored:
        parts.append(Table(("stored as", "modules", "bytes", "bits per value", "computed"), stored_rows(plan), has_note=True))
    if plan.unquantized:
        parts.append(Table(("not quantized", "modules", "bytes", "for example"), _unquantized(plan.unquantized)))
    document = Document(verdict(plan), parts)
    return document if plan.card is None else marked(document, plan.card)


def _shared_prefix(paths: Sequence[str]) -> str:
    """Return the dotted beginning that most of the paths have, "" if it is short."""
    parts = [path.split(".") for path in paths if "." in path]
    first = parts[0][0] if parts else ""
    return f"{first}." if first and all(words[0] == first for words in parts) else ""


def grouped(placements: Sequence[Placement]) -> list[tuple[str, list[Placement]]]:
    """Return (name, rows); layers of one list that share part, tier, home and reason are one: "layers.0-3,5"."""
    groups: dict[tuple[str, ...], list[Placement]] = {}
    for row in placements:
        parent, _, last = row.block_path.rpartition(".")
        name = (parent, "#") if last.isdecimal() else (row.block_path, "")
        groups.setdefault((*name, row.part, row.tier, row.home, row.reason), []).append(row)
    return [(f"{key[0]}.{_ranges(row.block_path for row in rows)}" if key[1] else key[0], rows) for key, rows in groups.items()]


def _ranges(paths: Iterable[str]) -> str:
    numbers = sorted(int(path.rpartition(".")[2]) for path in paths)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _line(name: str, rows: Sequence[Placement]) -> tuple[str, ...]:
    first = rows[0]
    sizes = (sum(getattr(row, f"{device}_bytes") for row in rows) for device in ("gpu", "host", "disk"))
    return (
        name or "(root)", first.part, first.tier, first.home, *(gib(size) if size else "-" for size in sizes),
        time_text(sum(row.request_s for row in rows)), time_text(sum(row.token_s for row in rows)), first.reason,
    )  # fmt: skip


def time_text(seconds: float) -> str:
    """Return seconds for people."""
    if seconds <= 0:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def memory_use(plan: PlanContents) -> tuple[str, str]:
    """Return the items of the execution device's memory and of the host's, each as text."""

    def items(named: Iterable[tuple[str, int]]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {gib(count)}" for name, count in named if count)

    gpu = plan.gpu
    inside = items((name, count) for name, count in gpu.items() if name not in OUTSIDE_PEAK)
    outside = items((name, gpu[name]) for name in OUTSIDE_PEAK if name in gpu)
    device = f"{tensors_peak(plan)}: {inside}{f'; outside tensors {outside}' if outside else ''}"
    return device, items(plan.host.items()) + held_limit(plan)


def _devices(plan: PlanContents) -> list[tuple[str, str]]:
    on_device, on_host = memory_use(plan)
    rows = [
        (plan.execution_device, f"{gib(plan.gpu_needed_bytes)} of a budget of {gib(plan.gpu_budget_bytes)}: {on_device}"),
        ("host", f"{gib(plan.host_peak_bytes)} of a budget of {gib(plan.host_budget_bytes)}: {on_host}"),
    ]
    if plan.disk_bytes:
        rows.append(("disk", f"{gib(plan.disk_bytes)} in a spill file that ends with the process"))
    return rows + [(name, why) for name, why in (("media", plan.media_reason), ("prefix cache", plan.prefix_reason)) if why]


def held_limit(plan: PlanContents) -> str:
    """Return the most host memory of adapters, and a server's use of it if the plan was not made for a server."""
    limit = gib(plan.held_adapters_limit_bytes)
    if plan.host.get("held_adapters"):
        return f" of {limit} for adapters"
    kept = served_bytes(plan)
    return f"; trimtab serve also keeps the adapters here: {gib(kept)} of {limit}" if kept else ""


def served_bytes(plan: PlanContents) -> int:
    """Return the bytes that a server keeps in host memory for the adapters of a plan; one folder counts once."""
    files = {
        plan.request.adapters[name]: count
        for name, stamps in plan.adapter_stamps.items() if name in plan.request.adapters
        for file, count, _ in stamps if file == TENSORS_NAME or file.lower().endswith(GGUF)
    }  # fmt: skip
    return sum(count + HELD_OBJECT_BYTES for count in files.values())


def _execution(plan: PlanContents) -> list[tuple[str, str]]:
    """Return how prompts and steps run, with predicted seconds."""
    execution = plan.execution
    step, prompt, towers = execution.step, execution.prompt, execution.towers
    phases = [("prompt", prompt, f"{time_text(prompt.seconds)} for a full context")]
    phases.append(("decode step", step, f"{estimate_mark(step)}{time_text(step.seconds)}, {marked_rate(plan)} predicted"))
    phases += [] if towers is None else [("towers", towers, f"{time_text(towers.seconds)} for all media")]
    rows = []
    for name, phase, speed in phases:
        took = sum(phase.bytes.values())
        rows.append((name, f"{phase.mode}{f', {gib(took)}' if took else ''}, {speed}: {phase.reason}"))
    rows += [("type", f"{plan.request.dtype}: {plan.dtype_reason}")] if plan.dtype_reason else []
    rows += [("attention", plan.window_reason)] if plan.window_reason else []
    rows += [("experts", _experts(plan.experts, execution) + _slots(plan, plan.experts))] if plan.experts is not None else []
    return [*rows, ("output head", f"{execution.head}: {execution.head_reason}"), *keys_and_values(plan)]


def _slots(plan: PlanContents, taken: ExpertWeights) -> str:
    """Return where experts are that do not all stay on the device."""
    slots = plan.execution.expert_slots
    if not slots:
        is_moved = plan.blocks_off_device and taken.format_name is not None and plan.execution_device != "cpu"
        is_short = plan.host_budget_bytes < plan.host.get("process", 0) + taken.bytes
        why = f": in host memory, with slots on the device, they need {gib(taken.bytes)} there" if is_short else ""
        return f"; layers off the device bring all of their experts{why}" if is_moved else ""
    return (
        f"; {slots} of {taken.count} of each layer on the device at a time ({gib(plan.gpu['expert_slots'])}), all in host memory: "
        f"{slots / taken.count:.0%} of the chosen ones are there if every expert is as likely, others are copied in the step"
    )


def _experts(taken: ExpertWeights, execution: Execution) -> str:
    """Return how stacked experts are kept, and what that means for answers."""
    size = f"{taken.bits_per_value:.2f} bits a weight, {gib(taken.bytes)} in {taken.modules} modules"
    if taken.format_name is None:
        return f"{size}: {taken.reason or f'as the model computes; experts={MADE_EXPERTS[0]!r} packs them, which changes answers'}"
    why = "requested; their rounding changes answers" if taken.is_made else "as the files hold them"
    rest = f"; others are {taken.reason}" if taken.reason else ""
    how = "steps read the chosen ones packed" if execution.step.mode == "fused" else "chosen ones are dequantized one at a time"
    return f"{taken.format_name}, {size}: {why}; {how}{rest}"


def keys_and_values(plan: PlanContents) -> list[tuple[str, str]]:
    """Return how keys and values are kept, unless in full precision with a whole context for each row."""
    request, pool = plan.request, plan.pool_tokens
    why, added_s = [], plan.execution.step.estimated_s
    if pool is not None:
        why.append(f"{pool} tokens for {request.batch} rows of up to {request.context_tokens}")
        if plan.execution.step.mode != "fused" or request.kv == "int8":
            why.append("every step copies the pages that its rows look at")
    if request.kv == "int8":
        why.append(f"requested; mean KL {KV8_KL:.1e} on the demo model; every step copies a layer's in {request.dtype}")
    form = ["pages"] * (pool is not None) + ["int8"] * (request.kv == "int8")
    if added_s:
        why.append(f"~{time_text(added_s)} of a step is an estimate, never measured")
    return [("keys and values", f"{', '.join(form)}, {gib(plan.gpu['kv_cache'])}: {'; '.join(why)}")] if why else []


def estimate_mark(phase: Phase) -> str:
    """Return the mark of seconds and rates that depend on unmeasured values: "~", or nothing."""
    return "~" if phase.estimated_s else ""


def predicted_rate(execution: Execution) -> str:
    """Return the predicted rate of decode steps for people, marked if it is partly an estimate."""
    return f"{estimate_mark(execution.step)}{rate_text(execution.tokens_per_s)} tokens/s"


def marked_rate(plan: PlanContents) -> str:
    """Return the predicted rate of a plan for people; on a CPU it is an estimate."""
    rate = predicted_rate(plan.execution)
    return f"~{rate}" if plan.execution_device == "cpu" and not rate.startswith("~") else rate


def rate_text(tokens_per_s: float) -> str:
    """Return a rate for people."""
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def stored_rows(plan: PlanContents) -> list[tuple[str, ...]]:
    """Return the formats of the checkpoint's files: modules, bytes, bits per value, and how each is computed."""
    is_kept = plan.execution_device == "cpu" and "unpacked_weights" in plan.gpu
    return [
        (
            one.format_name, str(one.modules), gib(one.bytes), f"{one.bits_per_value:.2f}",
            how_computed(
                one.format_name, are_tables=one.are_tables, step_mode=plan.execution.step.mode, is_kept=is_kept,
                dtype=plan.request.dtype,
            ),
        )
        for one in plan.stored
    ]  # fmt: skip


def _unquantized(rows: Sequence[Unquantized]) -> list[tuple[str, ...]]:
    by_reason: dict[str, list[Unquantized]] = {}
    for row in rows:
        by_reason.setdefault(row.reason or "not quantized", []).append(row)
    return [
        (reason, str(len(placements)), gib(sum(row.bytes for row in placements)), placements[0].module_path)
        for reason, placements in by_reason.items()
    ]
