"""What an issue says, section by section, from the evidence of its draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.doctor.draft_evidence import PACKAGES, Machine, Point, Run, Source, Statement, as_json, differences
from trimtab.doctor.draft_front import trackers_of
from trimtab.doctor.draft_text import Block, Gap, Link, Quote, Section, Table, Wish, inline, plain
from trimtab.doctor.draft_words import cut, described, ended, failing_frame, shortened, telling_lines, trace_text
from trimtab.errors import gib

if TYPE_CHECKING:
    from trimtab.doctor.draft import Draft

TAIL_LINES = 40
MAP_ENTRIES = 12
MOST_NOTES = 4
RESULTS = "Observed results"
_MARKS = (
    f"Marks in brackets say where a sentence comes from: r1, r2 ... are rows of the table under {RESULTS}. An answer is right "
    "if it is that of the same model in the same formats, all on one device."
)
DEMO = "demo"
DOCUMENTATION_OF = {
    "peft": "https://huggingface.co/docs/peft/package_reference/peft_model",
    "accelerate": "https://huggingface.co/docs/accelerate/package_reference/big_modeling",
    "bitsandbytes": "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    "transformers": "https://huggingface.co/docs/transformers/peft",
}


def sections_of(draft: Draft) -> tuple[Section, ...]:
    """Return the sections of the issue; each holds blocks alone that carry their sources, or state nothing."""
    found: list[tuple[str, list[Block]]] = [
        ("System information", _system(draft)),
        ("Summary", _summary(draft)),
        ("Exact configuration", _configuration(draft)),
        ("Reproducer: the case that works and the case that fails", _code(draft)),
        (RESULTS, []),
        ("Trace", _trace(draft)),
        ("Expected behaviour", [Wish(text) for text in draft.bucket.expected]),
        ("Actual behaviour", _actual(draft)),
        ("Why it is specific", _points(draft, draft.bucket.specific)),
        ("Related observations", _related(draft)),
        ("Questions", [Wish(text) for text in draft.bucket.questions]),
        ("Links", _links(draft)),
    ]
    # Every run that a sentence names stands in the table, so that its reader can look it up.
    named = [source for _, blocks in found for block in blocks for source in getattr(block, "sources", ())]
    runs = [source for source in named if isinstance(source, Run)]
    full = [(title, _results(draft, runs) if title == RESULTS else blocks) for title, blocks in found]
    return tuple(Section(title, tuple(blocks)) for title, blocks in full if blocks)


def _system(draft: Draft) -> list[Block]:
    first = draft.failing[0]
    rows = [(name, first.versions[name]) for name in PACKAGES if name in first.versions]
    rows += [("device", first.device), *_setup_rows(first)]
    blocks: list[Block] = [Table(("package", "version"), tuple(rows), (first,))]
    machine = _machine_rows(draft.machine)
    if machine:
        blocks.append(Table(("machine", ""), tuple(machine), (draft.machine,)))
    if first.record.get("model") == DEMO:
        blocks.append(
            Statement(
                "The recorded runs are on the small model that comes with trimtab, not on a released one.", (first,)
            )
        )
    if "imitated" in first.device:
        blocks += [Statement(text, (first,)) for text in _imitation(first)]
    return blocks


def _setup_rows(run: Run) -> list[tuple[str, str]]:
    """Return model, adapter, attention and whether remote code was allowed, as far as the run says them."""
    base = run.configuration.get("base") or {}
    model = str(run.record.get("model") or "")
    rows = [("model", "the demo's Gemma 4" if model == DEMO else model)]
    rows.append(("adapter", str(run.configuration.get("targets") or "LoRA") if run.adapter else "none"))
    rows.append(("attn_implementation", str(base.get("attn_implementation") or "not given")))
    rows.append(("trust_remote_code", str(base.get("trust_remote_code", "not given"))))
    return [(name, value) for name, value in rows if value]


def _imitation(run: Run) -> list[str]:
    """Return how a GPU was played: what a reader needs to judge a run without one."""
    found = [
        '`torch.device("cpu")` stands for the GPU in every map. accelerate takes the string "cpu" for another device, so '
        "that hooks, meta tensors and moves are its own; an error of tensors on two real devices cannot show."
    ]
    if run.record.get("how_pressed"):
        found.append(f"What accelerate reads as free memory was set: {plain(str(run.record['how_pressed']))}.")
    return found


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
    blocks: list[Block] = []
    if passing is not None:
        blocks.append(Statement(f"Works, the nearest case: {described(passing)}.", (passing,)))
    blocks.append(Statement(f"Fails: {described(first)}: {ended(first)}{failing_frame(first)}.", (first,)))
    if passing is None:
        blocks.append(Gap("No passing case was recorded under these versions: record one before filing."))
    blocks.append(
        Statement("The script below first runs a case that works, then ends in this failure.", (draft.shown,))
    )
    return [
        *blocks,
        Gap(_MARKS),
    ]


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


def _results(draft: Draft, named: Sequence[Run]) -> list[Block]:
    """Return the table of the failing runs, the nearest passing one and every other that a sentence names."""
    first = [*draft.failing, *([draft.passing] if draft.passing else [])]
    others = sorted({run.mark: run for run in named if run not in first}.values(), key=draft.runs.index)
    listed = [*first, *others]
    several = len({tuple(run.versions.items()) for run in listed}) > 1
    head = ("run", "case", "what was done", "label", "ended at", "answers", "peak memory")
    rows = tuple(
        (run.mark, inline(run.case), described(run), inline(run.label), run.stage, _modes(run), _peak(run))
        + ((_versions(run),) if several else ())
        for run in listed
    )
    return [Table((*head, "versions") if several else head, rows, tuple(listed))]


def _modes(run: Run) -> str:
    """Return how each mode ended; an answer is compared with the same model's, all on one device with stock PEFT."""
    words = {True: "right", False: "another answer", None: "ok"}
    modes = run.record.get("modes") or {}
    said = {name: words[mode.get("equals_reference")] if mode.get("ok") else "failed" for name, mode in modes.items()}
    return ", ".join(f"{name} {word}" for name, word in said.items()) or "none reached"


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


def _differing(run: Run) -> str:
    """Return which answers are not those of the unsplit model with the adapter, as a clause; "" if none is known to differ."""
    modes = (run.record.get("modes") or {}).items()
    found = [
        f"{name} (a logit differs by {mode['max_abs']:.3g})"
        for name, mode in modes
        if mode.get("equals_reference") is False and isinstance(mode.get("max_abs"), int | float)
    ]
    return f"; another answer than that of the same model on one device: {', '.join(found)}" if found else ""


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
        alike.setdefault(f"{ended(run)}{failing_frame(run)}{_moved(run)}{_differing(run)}", []).append(run)
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
        blocks.append(Statement(f"Said while it ran{times}: {inline(cut(line))}", (first,)))
    blocks += _elsewhere(draft)
    for probe in draft.probed:
        blocks.append(
            Statement(f"A check of {plain(probe.where)} says {probe.state}: {inline(cut(probe.evidence))}", (probe,))
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
    threads: list[Block] = [Link(one.name, one.state) for one in trackers_of(draft.bug, draft.failing[0])]
    packages = dict.fromkeys((draft.owner, *(one.package for one in (draft.bug.affected if draft.bug else ()))))
    return [*threads, *(Link(DOCUMENTATION_OF[name], "documentation") for name in packages if name in DOCUMENTATION_OF)]
