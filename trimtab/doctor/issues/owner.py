"""Who owns a failure, and where is it to be filed?"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.doctor.facts.buckets import FIXED
from trimtab.doctor.facts.bug import NAMED, Bug, Tracker, known_trackers, release
from trimtab.doctor.facts.evidence import Run

# Owners of the stack's layers. If several are involved, the first of these whose code is in the trace.
LAYERS = {
    "bitsandbytes": "quantized weights and their state", "accelerate": "hooks and dispatch",
    "peft": "the adapter's layers and its new dispatch", "transformers": "model code and the quantizer's integration",
}  # fmt: skip


def trackers_of(bug: Bug | None, run: Run | None = None) -> tuple[Tracker, ...]:
    """Return the catalogue's threads and those in a run's error."""
    return known_trackers(bug, run.message if run is not None else "")


def owner_of(bug: Bug | None, run: Run) -> tuple[str, str]:
    """Return (package, reason) of the failure's owner: by the catalogue, else by the layers of the trace.

    By layers: the library of the innermost frame if it is one of the four; transformers if none is.
    """
    layer, trigger = layers_of(run)
    where = f"fails in {layer} ({LAYERS[layer]})" if layer else "a wrong result without an exception"
    called_from = f", called from {trigger}" if trigger and trigger != layer else ""
    if bug is not None:
        return bug.owner[0], f"{where}{called_from}; the catalogue names {', '.join(bug.owner)}"
    return layer or "transformers", f"{where}{called_from}"


def layers_of(run: Run) -> tuple[str, str]:
    """Return the libraries of the innermost and of the outermost frame in the stack's four packages; "" without one."""
    libraries = [str(frame.get("library")) for frame in run.frames if frame.get("library") in LAYERS]
    return (libraries[-1], libraries[0]) if libraries else ("", "")


def fixed_here(bug: Bug, run: Run) -> bool:
    """Whether a release fixes the bug and the run did not use it: one fixed package is enough."""
    fixes = [one for one in bug.affected if one.fixed_in is not None]
    return bool(fixes) and not any(_has_fix(one.package, str(one.fixed_in), run) for one in fixes)


def came_back(bug: Bug | None, run: Run) -> list[str]:
    """Return the packages of the run that the catalogue calls fixed although the run fails."""
    return [
        f"{one.package} {run.versions[one.package]} (fixed in {one.fixed_in})"
        for one in (bug.affected if bug else ())
        if one.fixed_in is not None and _has_fix(one.package, one.fixed_in, run)
    ]


def _has_fix(package: str, fixed_in: str, run: Run) -> bool:
    return package in run.versions and release(run.versions[package]) >= release(fixed_in)


def action_for(state: str, known: Sequence[Tracker], repository: str) -> str:
    """Return the next step there: a thread that is open or may be open comes before a new issue."""
    here = [one for one in known if one.repository == repository]
    is_open = [one for one in here if one.is_open]
    if is_open:
        return f"add the evidence to {is_open[0].name}, no new issue"
    if state == FIXED:
        return "no new issue, a release has the fix"
    named = [one for one in known if one.state == NAMED]
    if named:
        return f"add the evidence to {named[0].name} if it is open: the error message links to it; else new issue"
    unsaid = [one for one in here if one.may_be_open]
    if unsaid:
        return f"look at {unsaid[0].name} first: its state is not known. Add the evidence there if it is open; else new issue"
    return "new issue"
