"""NOT_TO_FILE.md: failures without a draft, unsupported claims, keys, open threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.doctor.facts.buckets import DEFERRED, DOCUMENTATION, FIXED, REPOSITORIES
from trimtab.doctor.facts.evidence import Run
from trimtab.doctor.issues.claims import NOT_TESTED, REFUTED, Decision
from trimtab.doctor.issues.issue import Draft
from trimtab.doctor.issues.markdown import render
from trimtab.doctor.issues.owner import trackers_of
from trimtab.doctor.issues.words import trace_text
from trimtab.report.render import inline

MOST_MARKS = 8
TAIL_LINES = 12
_WAITING = {
    FIXED: "fixed in a release, upgrade instead", DEFERRED: "no passing case next to it",
    DOCUMENTATION: "no bug: a change of the documentation",
}  # fmt: skip


@dataclass(frozen=True)
class Withheld:
    """A failure without a draft, and why."""

    name: str
    reason: str
    runs: tuple[Run, ...]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "reason": self.reason, "runs": [run.mark for run in self.runs]}


def not_to_file(
    drafts: Sequence[Draft],
    withheld: Sequence[Withheld],
    decisions: Sequence[Decision],
    keys: Mapping[str, Sequence[Run]],
    runs: Sequence[Run],
) -> str:
    """Return the file's text. runs: all recorded runs, so that its marks can be looked up."""
    return render(
        "not_to_file.md.j2", decisions=decisions, refuted=REFUTED, not_tested=NOT_TESTED, keys=keys, most_marks=MOST_MARKS,
        withheld=[_failure(one) for one in withheld], threads=_threads(drafts),
        waiting=[(draft.file_name, _WAITING[draft.state]) for draft in drafts if draft.state in _WAITING],
        rows=[
            (run.mark, inline(run.case), run.engine, inline(run.label), run.stage,
             ", ".join(f"{name} {value}" for name, value in run.versions.items()))
            for run in runs
        ],
    )  # fmt: skip


def _failure(one: Withheld) -> dict[str, object]:
    tail = str((one.runs[0].exception or {}).get("tail") or "")
    return {
        "name": one.name, "reason": one.reason, "cases": ", ".join(dict.fromkeys(inline(run.case) for run in one.runs)),
        "runs": one.runs, "trace": trace_text(tail, TAIL_LINES) if tail else "",
    }  # fmt: skip


def _threads(drafts: Sequence[Draft]) -> list[tuple[str, str]]:
    threads = []
    for draft in drafts:
        repository = REPOSITORIES.get(draft.owner, draft.owner)
        known = trackers_of(draft.bug, draft.failing[0])
        here = [one for one in known if one.may_be_open and one.repository == repository]
        if here:
            names = ", ".join(one.name if one.is_open else f"{one.name} (look: its state is not known)" for one in here)
            threads.append((draft.file_name, names))
    return threads
