"""The threads about a bug, and their known state. Pure.

A state comes from the catalogue's text; no network is used. A thread of unknown state may be open: check it before
filing an issue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.doctor.facts.bug import Bug

NAMED = "named by the error's own text"
OPEN, CLOSED, UNSAID = "open", "closed", "state not known"
_NAMED = re.compile(r"https://github\.com/(?P<repository>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>\d+)")
_TRACKER = re.compile(r"^(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)\s*(?:\((?P<state>.*)\))?$")


@dataclass(frozen=True)
class Tracker:
    """A known thread. state: from the catalogue, "" if it gives none."""

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
