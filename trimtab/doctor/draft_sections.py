"""What an issue says, section by section, from the evidence of its draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.doctor.draft_evidence import PACKAGES, Machine, Point, Run, Source, Statement, as_json, differences
from trimtab.doctor.draft_front import trackers_of
from trimtab.doctor.draft_text import Block, Gap, Link, Quote, Section, Table, Wish, inline, plain
from trimtab.doctor.draft_words import described, ended, failing_frame, shortened, telling_lines, trace_text
from trimtab.errors import gib

if TYPE_CHECKING:
    from trimtab.doctor.draft import Draft

TAIL_LINES = 40
MAP_ENTRIES = 12
MOST_NOTES = 4


def sections_of(draft: Draft) -> tuple[Section, ...]:
    """Return the sections of the issue; each holds blocks alone that carry their sources, or state nothing."""
    found = (
        ("System information", _system(draft)),
        ("Summary", _summary(draft)),
        ("Exact configuration", _configuration(draft)),
        ("Reproducer: the case that works and the case that fails", _code(draft)),
        ("Observed results", _results(draft)),
        ("Trace", _trace(draft)),
        ("Expected behaviour", [Wish(text) for text in draft.bucket.expected]),
        ("Actual behaviour", _actual(draft)),
        ("Why it is specific", _points(draft, draft.bucket.specific)),
        ("Related observations", _related(draft)),
        ("Questions", [Wish(text) for text in draft.bucket.questions]),
        ("Links", _links(draft)),
    )
    return tuple(Section(title, tuple(blocks)) for title, blocks in found if blocks)


def _system(draft: Draft) -> list[Block]:
    first = draft.failing[0]
    rows = [(name, first.versions[name]) for name in PACKAGES if name in first.versions]
    rows.append(("device", first.device))
    blocks: list[Block] = [Table(("package", "version"), tuple(rows), (first,))]
    machine = _machine_rows(draft.machine)
    return [*blocks, Table(("machine", ""), tuple(machine), (draft.machine,))] if machine else blocks


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    values = machine.values
    gpus = ", ".join(str(gpu.get("name")) for gpu in values.get("gpus") or () if isinstance(gpu, dict))
    driver = f" (driver {values['driver']})" if values.get("driver") else ""
    rows = (
        ("OS", values.get("os")), ("Python", values.get("python")), ("CPU", values.get("cpu")),
        ("GPU", f"{gpus}{driver}" if gpus else ""), ("CUDA", values.get("cuda")),
        ("memory", gib(values["host_total_bytes"]) if isinstance(values.get("host_total_bytes"), int) else ""),
    )  # fmt: skip
    return [(name, str(value)) for name, value in rows if value]


def _summary(draft: Draft) -> list[Block]:
    first, passing = draft.failing[0], draft.passing
    blocks: list[Block] = [Statement(f"Fails: {described(first)}: {ended(first)}{failing_frame(first)}.", (first,))]
    if passing is not None:
        blocks.append(Statement(f"Works, the nearest case: {described(passing)}.", (passing,)))
    else:
        blocks.append(Gap("No passing case was recorded under these versions: record one before filing."))
    blocks.append(
        Statement("The script below first runs a case that works, then ends in this failure.", (draft.shown,))
    )
    return blocks


def _configuration(draft: Draft) -> list[Block]:
    first, passing = draft.failing[0], draft.passing
    blocks: list[Block] = [Quote(as_json(_short_maps(first.configuration)), "json", (first,))]
    if passing is None:
        return blocks
    rows = tuple((name, _value(one), _value(other)) for name, (one, other) in differences(first, passing).items())
    if rows:
        sources: tuple[Source, ...] = (first, passing)
        blocks.append(Table(("setting", f"fails ({first.mark})", f"works ({passing.mark})"), rows, sources))
    return blocks


def _short_maps(value: Any) -> Any:
    """Return a configuration in which a long list or map is cut, with how much was left out."""
    if isinstance(value, dict):
        items = list(value.items())
        kept = {name: _short_maps(inner) for name, inner in items[:MAP_ENTRIES]}
        return kept | ({"...": f"{len(items) - MAP_ENTRIES} more"} if len(items) > MAP_ENTRIES else {})
    if isinstance(value, list):
        return [_short_maps(inner) for inner in value[:MAP_ENTRIES]] + (["..."] if len(value) > MAP_ENTRIES else [])
    return value


def _value(value: Any) -> str:
    return "not set" if value is None else inline(str(value))


def _code(draft: Draft) -> list[Block]:
    shown = draft.shown
    ran = Statement(
        f"Run by itself, it ended with exit code {shown.exit_code} after {shown.seconds:.0f} s and printed:", (shown,)
    )
    return [Quote(shown.text, "python", (shown,)), ran, Quote(shortened(shown.output), "text", (shown,))]


def _results(draft: Draft) -> list[Block]:
    listed = [*draft.failing, *([draft.passing] if draft.passing else [])]
    several = len({tuple(run.versions.items()) for run in listed}) > 1
    head = ("run", "case", "what was done", "label", "ended at", "modes", "peak memory")
    rows = tuple(
        (run.mark, inline(run.case), described(run), inline(run.label), run.stage, _modes(run), _peak(run))
        + ((_versions(run),) if several else ())
        for run in listed
    )
    return [Table((*head, "versions") if several else head, rows, tuple(listed))]


def _modes(run: Run) -> str:
    modes = run.record.get("modes") or {}
    return ", ".join(f"{name} {'ok' if mode.get('ok') else 'failed'}" for name, mode in modes.items()) or "none reached"


def _peak(run: Run) -> str:
    memory = run.record.get("memory") or {}
    found = [("GPU", memory.get("gpu_peak_bytes")), ("host", memory.get("host_peak_bytes"))]
    return ", ".join(f"{name} {gib(count)}" for name, count in found if isinstance(count, int)) or "not measured"


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.versions.items() if name != "torch")


def _moved(run: Run) -> str:
    """Return what became of the placement, as a clause; "" if it was kept or is not known."""
    moved = run.record.get("offloaded") or {}
    if run.record.get("placement_kept") is not False or not {"before", "after", "of"} <= set(moved):
        return ""
    return (
        f"; {moved['before']} of {moved['of']} weights were off the GPU before the adapter, {moved['after']} after it"
    )


def _trace(draft: Draft) -> list[Block]:
    first = draft.failing[0]
    tail = str((first.exception or {}).get("tail") or "")
    if not tail:
        return []
    return [Quote(trace_text(tail, TAIL_LINES), "text", (first,))]


def _actual(draft: Draft) -> list[Block]:
    """Return what happened, runs that ended alike in one sentence."""
    alike: dict[str, list[Run]] = {}
    for run in draft.failing:
        alike.setdefault(f"{ended(run)}{failing_frame(run)}{_moved(run)}", []).append(run)
    return [
        Statement(f"{', '.join(dict.fromkeys(inline(run.case) for run in runs))}: {text}.", tuple(runs))
        for text, runs in alike.items()
    ]


def _points(draft: Draft, points: Sequence[Point]) -> list[Block]:
    first = draft.failing[0]
    beside = [
        run for run in draft.runs
        if run.is_stock and run.versions == first.versions and run.device_kind() == first.device_kind()
    ]  # fmt: skip
    stated = (point.stated(beside) for point in points)
    return [one for one in stated if one is not None]


def _related(draft: Draft) -> list[Block]:
    blocks = _points(draft, draft.bucket.related)
    first = draft.failing[0]
    for line, count in telling_lines(first)[:MOST_NOTES]:
        times = f" ({count} times)" if count > 1 else ""
        blocks.append(Statement(f"Said while it ran{times}: {inline(line)}", (first,)))
    blocks += _elsewhere(draft)
    for probe in draft.probed:
        blocks.append(
            Statement(f"A check of {plain(probe.where)} says {probe.state}: {inline(probe.evidence)}", (probe,))
        )
    return blocks


def _elsewhere(draft: Draft) -> list[Block]:
    """Return what the same cases did under other versions."""
    cases = {run.case for run in draft.failing}
    first = draft.failing[0]
    others = [run for run in draft.runs if run.is_stock and run.case in cases and run.versions != first.versions]
    return [
        Statement(f"{inline(run.case)} with {_versions(run)}: {ended(run)}.", (run,))
        for run in others
        if run not in draft.failing
    ]


def _links(draft: Draft) -> list[Block]:
    blocks: list[Block] = [Link(one.name, one.state) for one in trackers_of(draft.bug)]
    return blocks + [Link(name, "draft beside this one") for name in draft.beside]
