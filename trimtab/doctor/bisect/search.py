"""Searches a list of releases for changes of a label, with few evaluations. Pure: knows no package and no case.

The range is halved if the labels at its ends differ; releases that cannot be run are skipped; both halves are searched
if a third label appears. If the labels at both ends are equal, only the middle is tested, so a change that is undone
between two tested releases is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Label = str


@dataclass(frozen=True)
class Change:
    """A change between two releases that were run. between: releases in between that could not be run. confirmed: both
    gave their label a second time, None if not requested.
    """

    before: str
    after: str
    label_before: Label
    label_after: Label
    between: tuple[str, ...] = ()
    confirmed: bool | None = None


def find_changes(
    versions: Sequence[str], label_of: Callable[[str], Label | None], upcoming: Callable[[list[str]], None] | None = None
) -> tuple[Change, ...]:
    """Return the changes of the label along the versions, with few evaluations.

    label_of: None for a version that cannot be run; called at most once per version. upcoming: called with the versions
    that may be next. The result has the changes that the search finds; if there is only one change, the result is
    exactly that one.
    """
    search = _Search(versions, label_of, upcoming or (lambda found: None))
    return tuple(search.changes())


@dataclass
class _Search:
    versions: Sequence[str]
    label_of: Callable[[str], Label | None]
    upcoming: Callable[[list[str]], None]
    labels: dict[int, Label | None] = field(default_factory=dict)

    def label(self, at: int) -> Label | None:
        if at not in self.labels:
            self.labels[at] = self.label_of(self.versions[at])
        return self.labels[at]

    def changes(self) -> Iterator[Change]:
        last = len(self.versions) - 1
        if last < 1:
            return
        self._announce([0, last, last // 2])
        low = next((at for at in range(last + 1) if self.label(at) is not None), None)
        high = next((at for at in range(last, -1, -1) if self.label(at) is not None), None)
        if low is None or high is None or low >= high:
            return
        if self.label(low) != self.label(high):
            yield from self._narrow(low, high)
            return
        middle = self._between(low, high)
        if middle is not None and self.label(middle) != self.label(low):
            yield from self._narrow(low, middle)
            yield from self._narrow(middle, high)

    def _narrow(self, low: int, high: int) -> Iterator[Change]:
        """Yield the changes between two versions of different labels."""
        while (middle := self._between(low, high)) is not None:
            if self.label(middle) == self.label(low):
                low = middle
            elif self.label(middle) == self.label(high):
                high = middle
            else:
                yield from self._narrow(low, middle)
                yield from self._narrow(middle, high)
                return
        before, after = self.label(low), self.label(high)
        assert before is not None and after is not None
        yield Change(
            self.versions[low], self.versions[high], before, after, tuple(self.versions[low + 1 : high])
        )  # fmt: skip

    def _between(self, low: int, high: int) -> int | None:
        """Return the runnable version nearest to the middle, strictly between, None if there is none."""
        middle = (low + high) // 2
        inside = sorted(range(low + 1, high), key=lambda at: abs(at - middle))
        if inside and middle not in self.labels:
            self._announce([middle, (low + middle) // 2, (middle + high) // 2])
        return next((at for at in inside if self.label(at) is not None), None)

    def _announce(self, places: list[int]) -> None:
        upcoming = [self.versions[at] for at in dict.fromkeys(places) if at not in self.labels]
        if upcoming:
            self.upcoming(upcoming)
