"""What the recorded runs do not carry, as NOT_TO_FILE.md: failures without a draft, claims, keys, threads that are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trimtab.doctor.claims import NOT_TESTED, REFUTED, Decision
from trimtab.doctor.draft_buckets import DEFERRED, DOCUMENTATION, FIXED, REPOSITORIES
from trimtab.doctor.draft_evidence import Run
from trimtab.doctor.draft_front import trackers_of
from trimtab.doctor.draft_text import Raw, fence, inline, marks, table
from trimtab.doctor.draft_words import trace_text

if TYPE_CHECKING:
    from trimtab.doctor.draft import Draft, Withheld

MOST_MARKS = 8
TAIL_LINES = 12


def not_to_file(
    drafts: Sequence[Draft],
    withheld: Sequence[Withheld],
    decisions: Sequence[Decision],
    keys: Mapping[str, Sequence[Run]],
    runs: Sequence[Run],
) -> str:
    """Return the file's text. runs: all that were recorded, so that its marks can be looked up."""
    lines = ["# Not to file", "", "What these runs do not carry. Brackets name the recorded runs."]
    lines += ["", "## Claims wider than the evidence", ""]
    lines += table(
        ("claim", "the runs say", "instead"),
        [(decision.claim.text, Raw(_verdict(decision)), decision.claim.instead) for decision in decisions],
    )
    lines += ["", "## Failures without a draft", "", *_withheld(withheld)]
    lines += ["", "## Threads that exist: add evidence there, no new issue", "", *_threads(drafts)]
    lines += ["", "## Drafts that are not for filing now", "", *_waiting(drafts)]
    lines += ["", "## Module names that these models do not have", "", *_keys(keys)]
    lines += ["", "## The runs", ""]
    rows = [
        (run.mark, inline(run.case), run.engine, inline(run.label), run.stage, _versions(run)) for run in runs
    ]  # fmt: skip
    lines += table(("run", "case", "by", "label", "ended at", "versions"), rows)
    return "\n".join(lines).rstrip() + "\n"


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.versions.items())


def _verdict(decision: Decision) -> str:
    if decision.state == REFUTED:
        return f"refuted by {_marks(decision.refuted_by)}"
    if decision.state == NOT_TESTED:
        return "not tested: no run says anything about it"
    return f"nothing refutes it, and it is wider than the {len(decision.asked)} runs that were asked {_marks(decision.asked)}"


def _marks(runs: Sequence[Run]) -> str:
    more = f" and {len(runs) - MOST_MARKS} more" if len(runs) > MOST_MARKS else ""
    return marks(tuple(runs[:MOST_MARKS])) + more


def _withheld(withheld: Sequence[Withheld]) -> list[str]:
    lines: list[str] = []
    for one in withheld:
        cases = ", ".join(dict.fromkeys(inline(run.case) for run in one.runs))
        lines.append(f"- {inline(one.name)}: {one.reason}. Cases: {cases} {_marks(one.runs)}")
        tail = str((one.runs[0].exception or {}).get("tail") or "")
        if tail:
            lines += ["", fence(trace_text(tail, TAIL_LINES), "text"), ""]
    return lines or ["None."]


def _threads(drafts: Sequence[Draft]) -> list[str]:
    lines = []
    for draft in drafts:
        repository = REPOSITORIES.get(draft.owner, draft.owner)
        known = trackers_of(draft.bug, draft.failing[0])
        here = [one for one in known if one.may_be_open and one.repository == repository]
        if here:
            names = ", ".join(one.name if one.is_open else f"{one.name} (look: its state is not known)" for one in here)
            lines.append(f"- {draft.file_name}: {names}")
    return lines or ["None."]


def _waiting(drafts: Sequence[Draft]) -> list[str]:
    reasons = {
        FIXED: "fixed in a release, upgrade instead", DEFERRED: "no passing case beside it",
        DOCUMENTATION: "no bug: a change of the documentation",
    }  # fmt: skip
    lines = [f"- {draft.file_name}: {reasons[draft.state]}" for draft in drafts if draft.state in reasons]
    return lines or ["None."]


def _keys(keys: Mapping[str, Sequence[Run]]) -> list[str]:
    return [f"- {inline(key)} {_marks(tuple(runs))}" for key, runs in keys.items()] or ["None."]
