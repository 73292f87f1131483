"""Which known bugs do the packages of an interpreter have?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.checkpoint.names import near_names
from trimtab.doctor.catalogue import FOLDER, Entry, read_catalogue
from trimtab.doctor.facts.bug import STATES, UNKNOWN, Bug, Seen
from trimtab.errors import RequestError
from trimtab.process.runner import DONE, Outcome, run_inside
from trimtab.process.work_folder import work_folder
from trimtab.report.document import Details, Document, Facts, Heading, Table, Text

IMPORTS_S = 240.0  # time limit for importing the stack from a cold disk, separate from every probe's limit


@dataclass(frozen=True)
class Verdict:
    """The result of one probe, and its time."""

    bug: Bug
    seen: Seen
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the verdict with all that is known about the bug, as JSON; the bug's own `evidence` is "known_from"."""
        known = asdict(self.bug)
        known["known_from"] = known.pop("evidence")
        del known["needs_gpu"]
        return known | {"state": self.seen.state, "evidence": self.seen.evidence, "seconds": self.seconds}


def run_probes(
    *,
    python: str | os.PathLike[str] | None = None,
    ids: Sequence[str] = (),
    timeout_s: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
    catalogue: Path = FOLDER,
) -> tuple[Verdict, ...]:
    """Return a verdict for each entry, or for those of `ids` ("A1"), in the order of the catalogue.

    python: the interpreter whose packages are examined (None: this one); trimtab need not be installed there. timeout_s: for one
    probe. progress: called with (done, total). catalogue: a folder of entries instead of the package's own. Errors: RequestError if
    an id is not in the catalogue (with similar ones) or the interpreter cannot be started. A probe that crashes the process or
    hangs becomes "unknown", and a new process continues with the next one.
    """
    entries = _chosen(read_catalogue(catalogue), ids)
    run = _Run(_absolute(python), timeout_s, len(entries), progress)
    with work_folder("probes") as folder:
        # A visible GPU would receive the tensors for the imitated one, so probes that need the real one come last.
        run.all(entries, folder, gpu_hidden=True)
        run.all(entries, folder, gpu_hidden=False)
    return tuple(run.verdicts[entry.bug.id] for entry in entries)


def _absolute(python: str | os.PathLike[str] | None) -> str | None:
    """Return the interpreter's path for a process that runs in another folder; a link is not resolved, because it identifies
    the environment."""
    if python is None:
        return None
    resolved = shutil.which(os.fspath(python))
    return os.fspath(python) if resolved is None else os.path.abspath(resolved)


def _chosen(entries: tuple[Entry, ...], ids: Sequence[str]) -> tuple[Entry, ...]:
    known = [entry.bug.id for entry in entries]
    for bug_id in ids:
        if bug_id.upper() not in known:
            near = near_names(bug_id, known)
            raise RequestError("is not in the catalogue of known bugs", field="ids", value=bug_id, allowed=known, near=near)
    requested = {bug_id.upper() for bug_id in ids}
    return tuple(entry for entry in entries if not requested or entry.bug.id in requested)


class _Run:
    """The verdicts so far of one run of probes."""

    def __init__(self, python: Any, timeout_s: float, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._python, self._timeout_s, self._total, self._progress = python, timeout_s, total, progress
        self._started = ""
        self.verdicts: dict[str, Verdict] = {}

    def all(self, entries: Sequence[Entry], folder: Path, *, gpu_hidden: bool) -> None:
        """Run the entries that have no verdict yet, in a new process after each that ended early."""
        environment = _ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": ""} if gpu_hidden else {})
        while left := self._left(entries):
            self._started, bugs = "", {entry.bug.id: entry.bug for entry in left}
            files = dict.fromkeys(str(entry.path) for entry in left)
            request = {"ids": list(bugs), "files": list(files), "folder": str(folder)}
            outcome = run_inside(
                "trimtab.doctor.probes.child",
                request | {"timeout_s": self._timeout_s, "gpu_hidden": gpu_hidden},
                python=self._python, cwd=folder, environment=environment, on_event=partial(self._hear, bugs),
                timeout_s=IMPORTS_S + self._timeout_s * len(left),
            )  # fmt: skip
            left = self._left(entries)
            if outcome.ended == DONE:
                return  # the remaining probes wait for a process that may see the GPU
            # If it ended before the first probe, no probe is the cause, and a new process would end in the same way.
            for entry in [entry for entry in left if entry.bug.id == self._started] or left:
                self._set(Verdict(entry.bug, Seen(UNKNOWN, _ending(outcome)), outcome.seconds))

    def _left(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if entry.bug.id not in self.verdicts]

    def _hear(self, bugs: dict[str, Bug], line: dict[str, Any]) -> None:
        if line["event"] == "start":
            self._started = line["id"]
        elif line["event"] == "seen" and line["id"] in bugs:
            self._set(Verdict(bugs[line["id"]], Seen(line["state"], line["evidence"]), line["seconds"]))

    def _set(self, verdict: Verdict) -> None:
        self.verdicts[verdict.bug.id] = verdict
        if self._progress is not None:
            self._progress(len(self.verdicts), self._total)


_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def _ending(outcome: Outcome) -> str:
    """Return how the process of a probe ended, in one line; for a hang also its location."""
    lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
    if any(line.startswith("Timeout (") for line in lines):
        # Every thread is listed, the main one last.
        main = max(place for place, line in enumerate(lines) if "hread 0x" in line or line.startswith("Timeout ("))
        at = next((line for line in lines[main:] if line.startswith("File ")), "")
        return f"the probe hung and was ended{_without_folders(at)}"
    last = lines[-1][:200] if lines else "it said nothing"
    return f"the probe's process ended as {outcome.ended!r} (exit code {outcome.exit_code}): {last}"


def _without_folders(line: str) -> str:
    """Return `File "/home/me/x.py", line 3 in f` without the folders, which may hold a user's name."""
    parts = line.split('"')
    return f" in {os.path.basename(parts[1].replace(os.sep, '/'))}{parts[2]}" if len(parts) == 3 else ""


def probes_document(verdicts: Sequence[Verdict]) -> Document:
    """Return the verdicts for people: a row for each bug, the count of each state, and what to do about those that are present."""
    rows = [(one.bug.id, one.seen.state, f"{one.bug.title} ({one.bug.owner[0]}): {one.seen.evidence}") for one in verdicts]
    counts = {state: sum(verdict.seen.state == state for verdict in verdicts) for state in STATES}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    known = []
    for bug in (one.bug for one in verdicts):
        facts = [("workaround", bug.way_round), ("threads", "; ".join(bug.trackers) or "none known"), ("trimtab", bug.trimtab)]
        known.append(Details(f"{bug.id} {bug.title}", [Facts(facts)]))
    total = f"{len(verdicts)} known bugs: {summary}"
    head = Heading("Known bugs of the other packages here, none of trimtab")
    table = Table(("id", "here", "bug and evidence"), rows, has_note=True)
    return Document(
        "", [head, table, Text(f"{total}. Programs that use these packages without trimtab meet the present ones"), *known]
    )
