"""The facts of one issue, each with its recorded runs; the template `issue.md.j2` has the other text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.doctor.facts.buckets import REPOSITORIES, STATES, Bucket
from trimtab.doctor.facts.bug import Bug
from trimtab.doctor.facts.evidence import PACKAGES, Machine, Point, Probed, Run, Shown, Source, Statement, as_json, differences
from trimtab.doctor.issues.markdown import marks, render
from trimtab.doctor.issues.owner import action_for, came_back, owner_of, trackers_of
from trimtab.doctor.issues.words import described, ended, failing_frame, shortened, telling_lines, trace_text, whole_sentences
from trimtab.errors import RequestError, gib
from trimtab.process.redact import check_clean
from trimtab.report.render import inline, plain

TAIL_LINES = 40
MAP_ENTRIES = 12
MOST_NOTES = 4
DEMO = "demo"
DOCUMENTATION_OF = {
    "peft": "https://huggingface.co/docs/peft/package_reference/peft_model",
    "accelerate": "https://huggingface.co/docs/accelerate/package_reference/big_modeling",
    "bitsandbytes": "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    "transformers": "https://huggingface.co/docs/transformers/peft",
}


@dataclass(frozen=True)
class Recorded:
    """A text, or the rows of a table, shown as recorded, with its runs."""

    value: Any
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise RequestError("what is shown needs a recorded run", field="recorded", value=str(self.value)[:60])


Fact = Statement | Recorded


@dataclass(frozen=True)
class Draft:
    """One issue that may be filed, with all its evidence."""

    bucket: Bucket
    bug: Bug | None
    state: str
    owner: str
    failing: tuple[Run, ...]
    passing: Run | None
    shown: Shown
    runs: tuple[Run, ...]
    probed: tuple[Probed, ...]
    machine: Machine
    beside: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        return f"{self.owner}-{self.bucket.name}.md"

    @property
    def facts(self) -> dict[str, tuple[Fact, ...]]:
        return facts_of(self)

    def markdown(self) -> str:
        """Return the file's text. Errors: RequestError if it would contain personal data."""
        text = issue_markdown(self)
        check_clean(text, what=self.file_name)
        return text

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file_name, "title": self.bucket.title, "state": self.state, "owner": self.owner,
            "bug": self.bucket.bug, "failing": [run.mark for run in self.failing],
            "passing": self.passing.mark if self.passing else None, "markdown": self.markdown(),
        }  # fmt: skip


def issue_markdown(draft: Draft) -> str:
    """Return the whole file: notes for the filer above the line, the issue's text below it."""
    first = draft.failing[0]
    repository = REPOSITORIES.get(draft.owner, draft.owner)
    known = trackers_of(draft.bug, first)
    back = came_back(draft.bug, first)
    return render(
        "issue.md.j2", title=draft.bucket.title, failing=first.mark, passing=draft.passing, repository=repository,
        action=action_for(draft.state, known, repository),
        why=owner_of(draft.bug, first)[1], state=draft.state, state_words=STATES[draft.state], labels=labels_of(draft),
        cross_links=cross_links(draft, repository), bug=draft.bug,
        threads=[f"{one.name} ({one.state or 'state not known'})" for one in known],
        fixes=[f"{one.package} {one.fixed_in}" for one in (draft.bug.affected if draft.bug else ()) if one.fixed_in],
        came_back=f"fails with {', '.join(back)} {marks([first])}" if back else "", **facts_of(draft),
        expected=draft.bucket.expected, questions=draft.bucket.questions, links=_links(draft),
    )  # fmt: skip


def facts_of(draft: Draft) -> dict[str, tuple[Fact, ...]]:
    """Return all facts of an issue by their names in the template. Each has a source."""
    first, passing, shown = draft.failing[0], draft.passing, draft.shown
    tail = str((first.exception or {}).get("tail") or "")
    facts: dict[str, tuple[Fact, ...]] = {
        "packages": (Recorded(_packages(first), (first,)),),
        "machine": (Recorded(_machine_rows(draft.machine), (draft.machine,)),),
        "setting": tuple(Statement(text, (first,)) for text in _setting(first)),
        "works": (Statement(f"Works, the nearest case: {described(passing)}.", (passing,)),) if passing else (),
        "fails": (Statement(f"Fails: {described(first)}: {ended(first)}{failing_frame(first)}.", (first,)),),
        "script": (Statement("The script below first runs a case that works, then ends in this failure.", (shown,)),),
        "configuration": (Recorded(as_json(_short_maps(first.configuration)), (first,)),),
        "contrast": (Recorded(_contrast(first, passing), (first, passing)),) if passing else (),
        "reproducer": (Recorded(shown.text, (shown,)),),
        "ran": (
            Statement(f"Run by itself, it ended with exit code {shown.exit_code} after {shown.seconds:.0f} s.", (shown,)),
        ),
        "printed": (Recorded(shortened(shown.output), (shown,)),),
        "trace": (Recorded(trace_text(tail, TAIL_LINES), (first,)),) if tail else (),
        "actual": tuple(_actual(draft)), "specific": tuple(_points(draft, draft.bucket.specific)),
        "related": tuple(_related(draft)),
    }  # fmt: skip
    # Every run that a sentence names is in the table, so that its reader can look it up.
    return facts | {
        "results": (_results(draft, [source for group in facts.values() for fact in group for source in fact.sources]),)
    }


def _packages(first: Run) -> list[tuple[str, str]]:
    base = first.configuration.get("base") or {}
    model = str(first.record.get("model") or "")
    rows = [(name, first.versions[name]) for name in PACKAGES if name in first.versions]
    rows += [
        ("device", first.device), ("model", "the demo's Gemma 4" if model == DEMO else model),
        ("adapter", _adapter(first)),
        ("attn_implementation", str(base.get("attn_implementation") or "not given")),
        ("trust_remote_code", str(base.get("trust_remote_code", "not given (False)"))),
    ]  # fmt: skip
    return [(name, value) for name, value in rows if value]


def _adapter(run: Run) -> str:
    if not run.adapter:
        return "none"
    owner = "the demo's LoRA" if run.record.get("model") == DEMO else "LoRA"
    targets = run.configuration.get("targets")
    return f"{owner}, target_modules: {targets}" if targets else owner


def _setting(run: Run) -> list[str]:
    """Return the setting of the runs: the model, and how a GPU was imitated."""
    sentences = []
    if run.record.get("model") == DEMO:
        sentences.append("The recorded runs are on the bundled demo model, which is small, not on a released one.")
    if "imitated" in run.device:
        sentences += [
            '`torch.device("cpu")` is used in place of the GPU in every map.',
            'accelerate takes the string "cpu" for another device, so that hooks, meta tensors and moves are its own.',
            "An error of tensors on two real devices cannot show.",
        ]
        if run.record.get("how_pressed"):
            sentences.append(f"What accelerate reads as free memory was set: {plain(str(run.record['how_pressed']))}.")
    return sentences


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


def _short_maps(value: Any) -> Any:
    """Return a configuration with long lists and maps shortened, and the number of omitted entries."""
    if isinstance(value, dict):
        items = list(value.items())
        kept = {name: _short_maps(inner) for name, inner in items[:MAP_ENTRIES]}
        return kept | ({"...": f"{len(items) - MAP_ENTRIES} more"} if len(items) > MAP_ENTRIES else {})
    if isinstance(value, list):
        return [_short_maps(inner) for inner in value[:MAP_ENTRIES]] + (["..."] if len(value) > MAP_ENTRIES else [])
    return value


def _contrast(first: Run, passing: Run) -> list[tuple[str, str, str]]:
    return [(name, _value(one), _value(other)) for name, (one, other) in differences(first, passing).items()]


def _value(value: Any) -> str:
    return "not set" if value is None else inline(str(value))


def _results(draft: Draft, named: Sequence[Source]) -> Recorded:
    """Return the table of the failing runs, the nearest passing one and every other that a sentence names."""
    first = [*draft.failing, *([draft.passing] if draft.passing else [])]
    others = {source.mark: source for source in named if isinstance(source, Run) and source not in first}
    listed = [*first, *sorted(others.values(), key=draft.runs.index)]
    rows = [
        (run.mark, inline(run.case), described(run), inline(run.label), run.stage, _modes(run), _peak(run), _versions(run))
        for run in listed
    ]
    return Recorded(rows, tuple(listed))


def _modes(run: Run) -> str:
    """Return how each mode ended; an answer is compared with the same model's, all on one device with stock PEFT."""
    words = {True: "right", False: "another answer", None: "ok"}
    modes = run.record.get("modes") or {}
    states = {name: words[mode.get("equals_reference")] if mode.get("ok") else "failed" for name, mode in modes.items()}
    return ", ".join(f"{name} {word}" for name, word in states.items()) or "none reached"


def _peak(run: Run) -> str:
    memory = run.record.get("memory") or {}
    peaks = [("GPU", memory.get("gpu_peak_bytes")), ("host", memory.get("host_peak_bytes"))]
    return ", ".join(f"{name} {gib(count)}" for name, count in peaks if isinstance(count, int)) or "not measured"


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.versions.items() if name != "torch")


def _moved(run: Run) -> str:
    """Return the change of the placement as a sentence; "" if it was kept or is unknown."""
    moved = run.record.get("offloaded") or {}
    if run.record.get("placement_kept") is not False or not {"before", "after", "of"} <= set(moved):
        return ""
    return f"{moved['before']} of {moved['of']} weights were off the GPU before the adapter, {moved['after']} after it."


def _differing(run: Run) -> str:
    """Return a sentence on the answers that differ from those of the unsplit model with the adapter; "" if none is known to
    differ."""
    modes = (run.record.get("modes") or {}).items()
    differing = [
        f"{name} (a logit differs by {mode['max_abs']:.3g})"
        for name, mode in modes
        if mode.get("equals_reference") is False and isinstance(mode.get("max_abs"), int | float)
    ]
    return f"Another answer than that of the same model on one device: {', '.join(differing)}." if differing else ""


def _actual(draft: Draft) -> list[Statement]:
    """Return the observed behaviour, one claim per sentence; runs with the same claim share a sentence."""
    alike = _alike(draft.failing, lambda run: f"{ended(run)}{failing_frame(run)}.")
    statements = [
        Statement(f"{', '.join(dict.fromkeys(inline(run.case) for run in runs))}: {text}", runs) for text, runs in alike.items()
    ]
    return statements + [Statement(*one) for say in (_moved, _differing) for one in _alike(draft.failing, say).items()]


def _alike(runs: Sequence[Run], say: Callable[[Run], str]) -> dict[str, tuple[Run, ...]]:
    """Return sentence -> the runs of which it is true; "" is none."""
    runs_by_text: dict[str, tuple[Run, ...]] = {}
    for run in runs:
        if text := say(run):
            runs_by_text[text] = (*runs_by_text.get(text, ()), run)
    return runs_by_text


def _points(draft: Draft, points: Sequence[Point]) -> list[Statement]:
    first = draft.failing[0]
    beside = [
        run for run in draft.runs
        if run.is_stock and run.versions == first.versions and run.device_kind() == first.device_kind()
    ]  # fmt: skip
    stated = (point.stated(beside) for point in points)
    return [one for one in stated if one is not None]


def _related(draft: Draft) -> list[Statement]:
    statements = _points(draft, draft.bucket.related)
    first = draft.failing[0]
    for line, count in telling_lines(first)[:MOST_NOTES]:
        times = f" ({count} times)" if count > 1 else ""
        statements.append(Statement(f"Printed while it ran{times}: {inline(whole_sentences(line))}", (first,)))
    statements += [Statement(text, (first,)) for text in _scanned(first)]
    statements += _elsewhere(draft)
    for probe in draft.probed:
        seen = inline(whole_sentences(probe.evidence))
        statements.append(Statement(f"A check of {plain(probe.where)} reports {probe.state}: {seen}", (probe,)))
    return statements


def _scanned(run: Run) -> list[str]:
    """Return the counts of a scan of the live model: its linears by class, and its findings by kind."""
    linears = {name: count for name, count in (run.record.get("quantized") or {}).items() if count}
    kinds: dict[str, int] = {}
    for one in run.record.get("scan") or ():
        kinds[one["kind"]] = kinds.get(one["kind"], 0) + int(one.get("count") or 1)
    tables = [("The model had these linears", linears), ("A scan of the live model counted", kinds)]
    return [
        f"{what}: {', '.join(f'{count} {inline(name)}' for name, count in counts.items())}." for what, counts in tables if counts
    ]


def _elsewhere(draft: Draft) -> list[Statement]:
    """Return the results of the same cases under other versions."""
    cases = {run.case for run in draft.failing}
    others = [run for run in draft.runs if run.is_stock and run.case in cases and run not in draft.failing]
    return [
        Statement(f"{inline(run.case)} with {_versions(run)}: {ended(run)}.", (run,))
        for run in others
        if run.versions != draft.failing[0].versions
    ]


def _links(draft: Draft) -> list[str]:
    threads = [f"{one.name}{f' ({one.state})' if one.state else ''}" for one in trackers_of(draft.bug, draft.failing[0])]
    packages = dict.fromkeys((draft.owner, *(one.package for one in (draft.bug.affected if draft.bug else ()))))
    return [*threads, *(f"{DOCUMENTATION_OF[name]} (documentation)" for name in packages if name in DOCUMENTATION_OF)]


def labels_of(draft: Draft) -> list[str]:
    """Return labels to suggest: the kind of issue, then the areas of the recorded failure."""
    first = draft.failing[0]
    quantized = bool((first.configuration.get("base") or {}).get("quantization_config"))
    about = (
        ("Gemma4", "gemma4" in str(first.frames) or first.record.get("model") == "demo"), ("PEFT", first.adapter),
        ("Accelerate", any(frame.get("library") == "accelerate" for frame in first.frames)),
        ("bitsandbytes", quantized), ("quantization", quantized), ("device_map", bool(first.map_asked)),
        ("cpu-offload", first.offloads), ("merge", first.merges),
    )  # fmt: skip
    return [*draft.bucket.kinds, *(name for name, holds in about if holds)]


def cross_links(draft: Draft, repository: str) -> list[str]:
    """Return the other repositories that the catalogue names, and the other drafts."""
    others = [REPOSITORIES[name] for name in (draft.bug.owner if draft.bug else ()) if name in REPOSITORIES]
    return [*(inline(name) for name in dict.fromkeys(others) if name != repository), *draft.beside]
