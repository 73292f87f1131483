"""A plan in the columns of a terminal, 80 elsewhere: figures of each row of blocks, its reason below, a paragraph per device."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial

from trimtab.errors import gib
from trimtab.planning.plan.plan import Plan
from trimtab.planning.plan.table import grouped, keys_and_values, marked_rate, memory_use, stored_rows, time_text, verdict

WIDTH = 80
# What a plan is printed in at the least and at the most.
NARROWEST, WIDEST = 60, 200
# Marks of estimates that one line may get (`cards.marked`).
MOST_MARKS = 5
# Columns of the figures of a line, without the name; the most columns of a name.
_FIGURES, _WIDEST_NAME = 43, 60
_SIZES = 9


def narrow_table(plan: Plan, width: int = WIDTH) -> str:
    """Return the plan as text of at most `width` columns (60 to 200). The wide form (`table`) says the same in one line per row."""
    request, execution = plan.request, plan.execution
    width = min(max(width, NARROWEST), WIDEST) - (0 if plan.card is None else MOST_MARKS)
    wrapped, names = _wrapping(width), min(width - _FIGURES, _WIDEST_NAME)
    lines = [*wrapped(verdict(plan)), ""]
    lines += wrapped(
        f"{plan.model_class} on {plan.execution_device}: {request.quant}, {request.dtype}, "
        f"{'8-bit head, ' if execution.head == 'int8' else ''}"
        f"{'8-bit keys and values, ' if request.kv == 'int8' else ''}context {request.context_tokens}, "
        f"answer {plan.answer_tokens}, batch {request.batch}, {'batch-invariant, ' if request.batch_invariant else ''}"
        f"images {request.images}, audio {request.audio_s:g} s"
    )
    lines += ["", _row("block", "tier", ("device", "host", "per token"), names)]
    shared = _shared_prefix([row.block_path for row in plan.placements])
    if shared:
        lines.append(f"({shared}...)")
    for name, rows in grouped(plan.placements):
        shown = name.removeprefix(shared) or "(root)"
        host = sum(row.host_bytes + row.disk_bytes for row in rows)
        sizes = (_size(sum(row.gpu_bytes for row in rows)), _size(host), time_text(sum(row.token_s for row in rows)))
        lines += _named(shown, rows[0].tier, sizes, names, width)
        lines += wrapped(rows[0].reason, indent=4)
    lines += ["", *_devices(plan, wrapped), ""]
    phases = [("prompt", execution.prompt, f"{time_text(execution.prompt.seconds)} for a full context")]
    phases.append(("decode step", execution.step, f"{marked_rate(plan)} predicted"))
    if execution.towers is not None:
        phases.append(("towers", execution.towers, f"{time_text(execution.towers.seconds)} for all media"))
    for title, phase, speed in phases:
        took = sum(phase.bytes.values())
        size = f", {gib(took)}" if took else ""
        lines += wrapped(f"{title}: {phase.mode}{size}, {speed}: {phase.reason}", hanging=4)
    if plan.dtype_reason:
        lines += wrapped(f"type: {request.dtype}: {plan.dtype_reason}", hanging=4)
    lines += wrapped(f"output head: {execution.head}: {execution.head_reason}", hanging=4)
    for what, form, size, _, why in keys_and_values(plan):
        lines += wrapped(f"{what}: {form}, {size}: {why}", hanging=4)
    for name, modules, size, bits, how in stored_rows(plan)[1:]:
        lines += wrapped(f"stored as {name}: {modules} modules, {size}, {bits} bits per value: {how}", hanging=4)
    if plan.unquantized:
        total = sum(row.bytes for row in plan.unquantized)
        reasons = "; ".join(dict.fromkeys(row.reason or "not quantized" for row in plan.unquantized))
        lines += ["", *wrapped(f"not quantized: {len(plan.unquantized)} modules, {gib(total)}: {reasons}", hanging=4)]
    return "\n".join(line.rstrip() for line in lines)


def _devices(plan: Plan, wrapped: Callable[..., list[str]]) -> list[str]:
    on_device, on_host = memory_use(plan)
    budget = gib(plan.gpu_budget_bytes)
    device = f"{plan.execution_device}: {gib(plan.gpu_needed_bytes)} of a budget of {budget}: {on_device}"
    host = f"host: {gib(plan.host_peak_bytes)} of a budget of {gib(plan.host_budget_bytes)}: {on_host}"
    disk = [f"disk: {gib(plan.disk_bytes)} in a spill file that ends with the process"] if plan.disk_bytes else []
    media = [f"media: {plan.media_reason}"] if plan.media_reason else []
    kept = [f"prefix cache: {plan.prefix_reason}"] if plan.prefix_reason else []
    return [line for text in (device, host, *disk, *media, *kept) for line in wrapped(text, hanging=4)]


def _size(byte_count: int) -> str:
    return gib(byte_count) if byte_count else "-"


def _row(name: str, tier: str, sizes: Sequence[str], names: int) -> str:
    return f"{name:<{names}}  {tier:<8}" + "".join(f"  {size:>{_SIZES}}" for size in sizes)


def _named(name: str, tier: str, sizes: Sequence[str], names: int, width: int) -> list[str]:
    """Return the line of figures, below the name where that is too long."""
    if len(name) <= names:
        return [_row(name, tier, sizes, names)]
    broken = _lines(name.replace(",", ", "), width, hanging=4)
    return [*(line.replace(", ", ",") for line in broken), _row("", tier, sizes, names)]


def _wrapping(width: int) -> Callable[..., list[str]]:
    """Return what wraps a text (indent and hanging: columns)."""
    return partial(_lines, width=width)


def _lines(text: str, width: int, *, indent: int = 0, hanging: int = 0) -> list[str]:
    first, others = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _shared_prefix(paths: Sequence[str]) -> str:
    """Return the dotted beginning that most of the paths have, "" if it is short."""
    parts = [path.split(".") for path in paths if "." in path]
    first = parts[0][0] if parts else ""
    return f"{first}." if first and all(words[0] == first for words in parts) else ""
