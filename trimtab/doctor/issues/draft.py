"""Which drafts of issues do recorded runs support, one per failure?"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.doctor.facts.buckets import BUCKETS, DEFERRED, FIXED, STATES, SUPPORTING, Bucket
from trimtab.doctor.facts.bug import Bug
from trimtab.doctor.facts.evidence import (
    Machine,
    Probed,
    Run,
    Shown,
    evidence_of,
    nearest_pass,
    raised_in,
    setting_groups,
    without_numbers,
)
from trimtab.doctor.issues import run as draft_run
from trimtab.doctor.issues.claims import Decision, decide_claims, keys_without_module
from trimtab.doctor.issues.issue import Draft
from trimtab.doctor.issues.markdown import script
from trimtab.doctor.issues.not_to_file import Withheld, not_to_file
from trimtab.doctor.issues.owner import fixed_here, owner_of
from trimtab.doctor.traces.answer import known_bugs
from trimtab.errors import RequestError
from trimtab.process.files import whole_folder
from trimtab.process.redact import check_clean, clean
from trimtab.report.document import Block, Code, Details, Document, Items, Table, Text

NOT_TO_FILE = "NOT_TO_FILE.md"
RunScript = Callable[[str], Mapping[str, Any]]
LANE_WITHHELD = (
    "the merged model generated the adapter's tokens and only its logits differ beyond rounding: no answer shows it. Try "
    "more prompts (trimtab verify --lanes), and draft from those (trimtab doctor --lanes)"
)
# Endings of a run that are no bug.
NO_FAILURE = ("PASS", "PASS_NOT_COMPARED", "NOT_APPLICABLE", "REFUSED_BY_NAME")


@dataclass(frozen=True)
class Drafts:
    """The drafts. folder: where they were written, None if nothing was."""

    drafts: tuple[Draft, ...]
    withheld: tuple[Withheld, ...]
    decisions: tuple[Decision, ...]
    not_to_file: str
    folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "drafts": [draft.to_json() for draft in self.drafts],
            "withheld": [one.to_json() for one in self.withheld],
            "claims": [decision.to_json() for decision in self.decisions], "not_to_file": self.not_to_file,
        }  # fmt: skip

    def written_to(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Drafts:
        """Write one Markdown file per failure and NOT_TO_FILE.md, whole or not at all; return the drafts with their folder.

        overwrite: replace earlier drafts. Errors: RequestError for a folder with other content.
        """
        target = Path(folder)
        check_folder(target, overwrite=overwrite)
        texts = {draft.file_name: draft.markdown() for draft in self.drafts} | {NOT_TO_FILE: self.not_to_file}
        with whole_folder(target, field="drafts", overwrite=True) as partial:
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8", newline="\n")
            check_folder(target, overwrite=overwrite)
        return replace(self, folder=target)


def make_drafts(
    runs: Sequence[Mapping[str, Any]],
    environment: Any,
    *,
    verdicts: Sequence[Any] = (),
    python: str | os.PathLike[str] | None = None,
    run_script: RunScript | None = None,
    bugs: Mapping[str, Bug] | None = None,
    say: Callable[[str], None] | None = None,
) -> Drafts:
    """Return the drafts that the runs support.

    runs: records of the matrix, of one or more interpreters. environment: an Environment or its JSON. verdicts: of the catalogue's
    probes in the runs' interpreter. python: the interpreter of the runs, in which the reproducers are run. bugs: by id, None for
    the catalogue. Errors: RequestError for no runs, or for an invalid record.
    """
    if not runs:
        raise RequestError("drafts require recorded runs", field="runs")
    evidence = evidence_of(runs)
    known = known_bugs() if bugs is None else bugs
    reproduce = run_script if run_script is not None else lambda text: draft_run.run_script(text, python=python)
    probed = tuple(Probed(one.bug.id, one.seen.state, clean(one.seen.evidence), "this installation") for one in verdicts)
    values = environment.to_json() if hasattr(environment, "to_json") else dict(environment or {})
    maker = _Maker(evidence, known, reproduce, probed, Machine(values), say or (lambda text: None))
    drafts, withheld = maker.make()
    names = {draft.bucket.name: draft.file_name for draft in drafts}
    drafts = tuple(replace(draft, beside=tuple(names[name] for name in draft.bucket.beside if name in names)) for draft in drafts)
    decisions = decide_claims(evidence)
    text = not_to_file(drafts, withheld, decisions, keys_without_module([run for run in evidence if run.is_stock]), evidence)
    check_clean(text, what=NOT_TO_FILE)
    return Drafts(drafts, withheld, decisions, text)


@dataclass
class _Maker:
    """Sorts the failing runs into buckets and makes of each a draft, or a reason why there is none."""

    runs: tuple[Run, ...]
    bugs: Mapping[str, Bug]
    reproduce: RunScript
    probed: tuple[Probed, ...]
    machine: Machine
    say: Callable[[str], None]
    withheld: dict[tuple[str, str], tuple[Run, ...]] = field(default_factory=dict)

    def make(self) -> tuple[tuple[Draft, ...], tuple[Withheld, ...]]:
        drafts = []
        for bucket, runs in self._buckets():
            made = self._draft(bucket, runs)
            if isinstance(made, Draft):
                drafts.append(made)
            else:
                self._withhold(bucket.name, made, runs)
        for run in self.runs:
            if run.is_stock and run.passed and str(run.record.get("lane") or "").endswith("_DIVERGES"):
                self._withhold(str(run.record["lane"]).lower().replace("_", "-"), LANE_WITHHELD, (run,))
        drafts.sort(key=lambda draft: (list(STATES).index(draft.state), draft.file_name))
        return tuple(drafts), tuple(Withheld(*key, runs) for key, runs in self.withheld.items())

    def _buckets(self) -> list[tuple[Bucket, tuple[Run, ...]]]:
        failing = [run for run in self.runs if run.is_stock and not run.passed and run.label not in NO_FAILURE]
        buckets: dict[str, tuple[Bucket, list[Run]]] = {}
        for run in failing:
            bucket = next((bucket for bucket in BUCKETS if bucket.takes(run)), None) or self._generic(run)
            if bucket is not None:
                buckets.setdefault(bucket.name, (bucket, []))[1].append(run)
        # Runs of one bucket under several version sets: the first set is the draft's; the others are listed in it.
        return [(bucket, self._plainest_first(bucket, runs)) for bucket, runs in buckets.values()]

    def _passing(self, bucket: Bucket, run: Run) -> Run | None:
        """Return the passing run to compare with a failing one: the other of the bucket's pair, else the nearest."""
        if run.case == bucket.pair[0]:
            beside = [other for other in self.runs if other.case == bucket.pair[1]]
            if pair := nearest_pass(run, beside):
                return pair
        return nearest_pass(run, self.runs)

    def _plainest_first(self, bucket: Bucket, runs: list[Run]) -> tuple[Run, ...]:
        """Return the runs with the draft's run first: it used the environment's versions, like the reproducer, and is the
        bucket's case or the nearest to a passing case."""

        def order(run: Run) -> tuple[bool, bool, bool, int]:
            passing = self._passing(bucket, run)
            is_pair = passing is not None and (run.case, passing.case) == bucket.pair
            # An explicit map is readable; an automatic one depends on the card.
            is_automatic = isinstance((run.configuration.get("base") or {}).get("device_map"), str)
            far = 1000 if passing is None else setting_groups(run, passing)
            return not self.machine.has(run.versions), not is_pair, is_automatic, far

        first = min(runs, key=order)
        return (first, *(run for run in runs if run is not first))

    def _generic(self, run: Run) -> Bucket | None:
        """Return a bucket for a catalogue run without a bucket; None, with the reason recorded, if it is impossible."""
        bug = self.bugs.get(str(run.record.get("catalogue") or ""))
        if bug is None:
            self._withhold(run.label.lower().replace("_", "-"), _why_unknown(run), (run,))
            return None
        if run.exception is None:
            # The script of a silent failure prints its own text, which cannot be checked here.
            self._withhold(bug.name, "no exception was raised and no minimal reproducer is known for it", (run,))
            return None
        return Bucket(
            name=bug.name, labels=(run.label,), bug=bug.id, title=bug.title, state=SUPPORTING,
            shows=(re.escape(run.exception_type), ""), expected=("the call works, or is refused with its reason.",),
        )  # fmt: skip

    def _withhold(self, name: str, reason: str, runs: tuple[Run, ...]) -> None:
        self.withheld[name, reason] = (*self.withheld.get((name, reason), ()), *runs)

    def _draft(self, bucket: Bucket, failing: tuple[Run, ...]) -> Draft | str:
        """Return the draft of a bucket, or why there is none."""
        first = failing[0]
        text = script(bucket.script) if bucket.script else clean(str(first.record.get("script") or ""))
        if not text.strip():
            return "the runs hold no reproducer"
        if not self.machine.has(first.versions):
            return "recorded under other versions than this environment's: make its draft there"
        self.say(f"{bucket.name}: running its reproducer")
        shown = show(text, bucket, first, self.reproduce(text))
        if isinstance(shown, str):
            self.say(f"{bucket.name}: no draft, {shown}")
            return shown
        bug = self.bugs.get(bucket.bug)
        passing = self._passing(bucket, first)
        state = FIXED if bug is not None and fixed_here(bug, first) else bucket.state if passing else DEFERRED
        probed = tuple(one for one in self.probed if one.bug_id == bucket.bug)
        owner, _ = owner_of(bug, first)
        return Draft(bucket, bug, state, owner, failing, passing, shown, self.runs, probed, self.machine)


def _why_unknown(run: Run) -> str:
    if run.exception is None:
        return f"ended as {run.label} without a separate trace"
    return "no known signature matches this failure; read its trace and find its cause before filing"


def show(text: str, bucket: Bucket, run: Run, result: Mapping[str, Any]) -> Shown | str:
    """Return a reproducer's run as evidence, or why it is none: it must fail as the recorded run failed."""
    versions = {name: value for name, value in dict(result.get("versions") or {}).items() if name in run.versions}
    differing = [name for name in run.versions if versions.get(name) != run.versions[name]]
    if differing:
        return f"the reproducer ran with other versions than the run ({', '.join(differing)})"
    if result.get("ended") not in (None, "done"):
        return f"the reproducer ended as {result['ended']}"
    output = clean(str(result.get("output") or ""))
    kind, message, files = raised_in(output)
    if not kind:
        return f"the reproducer did not show the failure (exit code {result.get('exit_code')})"
    wanted_type, wanted_message = bucket.shows
    if not re.fullmatch(wanted_type, kind) or not re.search(wanted_message, message):
        return f"the reproducer ended in another failure ({kind}: {message[:80]})"
    if bucket.script:
        if not re.search(r"^works: ", output, re.M):
            return "the reproducer failed in the case that should work"
    elif without_numbers(message) != without_numbers(run.message):
        return f"the reproducer ended in another failure ({kind}: {message[:80]})"
    if run.frames and not bucket.shows[0].startswith("AssertionError") and not _same_place(run, files):
        return "the reproducer failed in another place than the run"
    return Shown(text, output, int(result.get("exit_code") or 0), float(result.get("seconds") or 0.0), versions)


def _same_place(run: Run, files: tuple[str, ...]) -> bool:
    """Whether the file of the run's innermost library frame is among the reproducer's."""
    ours = [str(frame["file"]) for frame in run.frames if frame.get("library") != "torch"]
    return not ours or any(file.endswith(ours[-1]) for file in files)


# Files ----------------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Raise RequestError unless the folder is absent, empty or, with overwrite, contains only drafts."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RequestError("is a file", field="drafts", value=str(folder))
    entries = sorted(entry.name for entry in folder.iterdir())
    if not entries:
        return
    if not overwrite:
        raise RequestError(
            "the folder is not empty", field="drafts", value=str(folder), hint="Name another folder, or remove this one"
        )
    foreign = [name for name in entries if not name.endswith(".md")] if NOT_TO_FILE in entries else entries
    if foreign:
        raise RequestError(
            f"the folder contains other files than drafts ({', '.join(foreign[:3])})", field="drafts", value=str(folder)
        )


def drafts_document(drafts: Drafts) -> Document:
    """Return a summary of the written files, and each of them."""
    rows = [(draft.file_name, draft.state, draft.bucket.title) for draft in drafts.drafts]
    left = [f"{one.name}: {one.reason} ({', '.join(sorted({run.case for run in one.runs}))})" for one in drafts.withheld]
    blocks: list[Block] = [Table(("draft", "state", "issue"), rows, has_note=True)] if rows else []
    blocks.append(Text(f"{NOT_TO_FILE}: {len(drafts.withheld)} failures without a draft, {len(drafts.decisions)} claims"))
    blocks.append(Items(left))
    blocks += [Details(f"{draft.state}: {draft.bucket.title}", [Code(draft.markdown())]) for draft in drafts.drafts]
    blocks.append(Details(NOT_TO_FILE, [Code(drafts.not_to_file)]))
    return Document(f"{len(drafts.drafts)} drafts" + (f" in {drafts.folder}" if drafts.folder else ""), blocks)
