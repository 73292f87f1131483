"""What is known about one bug of another package, and what did a probe observe here?"""

from __future__ import annotations

import re
from dataclasses import dataclass

PRESENT, FIXED, NOT_APPLICABLE, UNKNOWN = "present", "fixed", "not applicable", "unknown"
STATES = (PRESENT, FIXED, NOT_APPLICABLE, UNKNOWN)


@dataclass(frozen=True)
class Affected:
    """One package of a bug: first version with it (None: all earlier known versions), first version without it (None: none)."""

    package: str
    since: str | None = None
    fixed_in: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One entry of the catalogue.

    id: letter and number ("A1"). name: short, with hyphens; both are of its variable. title: one line, what a user sees.
    symptom: the message or the silent effect. trigger: the affected configuration. cause: file and function upstream. affected:
    the packages; with several, any fixed one is enough unless `versions` says otherwise. versions: as text, with the evidence
    for each. way_round: the workaround for users. owner: the repository for a report, the main one first (none: the affected
    packages). trackers: "owner/repository#number" with its state as text. trimtab: how trimtab itself avoids it. evidence:
    "run" (reproduced), "source" (read in the installed files), "tracker" (reported by others). needs_gpu: whether only a visible
    GPU shows it.
    """

    id: str = ""
    name: str = ""
    title: str
    symptom: str
    trigger: str
    cause: str
    affected: tuple[Affected, ...]
    versions: str
    way_round: str
    owner: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    trimtab: str
    evidence: str
    needs_gpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.owner or tuple(one.package for one in self.affected))


@dataclass(frozen=True)
class Seen:
    """The result of a probe: state is one of STATES, evidence: numbers, a message, file and line."""

    state: str
    evidence: str


NAMED = "named by the error's own text"
OPEN, CLOSED, UNSAID = "open", "closed", "state not known"
_NAMED = re.compile(r"https://github\.com/(?P<repository>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>\d+)")
_TRACKER = re.compile(r"^(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)\s*(?:\((?P<state>.*)\))?$")


@dataclass(frozen=True)
class Tracker:
    """A known thread. state: from the catalogue, "" if it gives none. A thread of unknown state may be open: check it before filing
    an issue."""

    repository: str
    number: int
    state: str

    @property
    def is_pull_request(self) -> bool:
        """Whether it is a pull request and no issue: evidence does not belong there."""
        return bool(re.search(r"pull request|\bmerged\b|\bpatch\b", self.state))

    @property
    def known_state(self) -> str:
        """OPEN, CLOSED, or UNSAID if the catalogue gives neither."""
        if re.search(r"\bopen\b", self.state):
            return OPEN
        return CLOSED if re.search(r"\b(closed|merged|fixed)\b", self.state) else UNSAID

    @property
    def is_open(self) -> bool:
        """Whether it is an issue that was open at the last check."""
        return self.known_state == OPEN and not self.is_pull_request

    @property
    def may_be_open(self) -> bool:
        """Whether it is an issue that is not known to be closed: check it before a new one is filed."""
        return self.known_state != CLOSED and not self.is_pull_request

    @property
    def name(self) -> str:
        return f"{self.repository}#{self.number}"

    @property
    def url(self) -> str:
        return f"https://github.com/{self.repository}/issues/{self.number}"


def known_trackers(bug: Bug | None, message: str = "") -> tuple[Tracker, ...]:
    """Return the catalogue's threads, without entries in another form, and the threads in an error's text."""
    matches = (_TRACKER.match(text) for text in (bug.trackers if bug else ()))
    known = [Tracker(one["repository"], int(one["number"]), one["state"] or "") for one in matches if one]
    names = {one.name for one in known}
    named = {one.name: one for one in (Tracker(one["repository"], int(one["number"]), NAMED) for one in _NAMED.finditer(message))}
    return (*known, *(one for name, one in named.items() if name not in names))


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version for comparisons: "1.14.0.dev0" counts as 1.14.0."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
