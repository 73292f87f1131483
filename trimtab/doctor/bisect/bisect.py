"""In which release did a case change its result?"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from trimtab.adapters.adapter import read_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.checkpoint.names import near_names
from trimtab.doctor.bisect.environments import PACKAGES, Base, Environments, InstallError, Say, sorted_versions
from trimtab.errors import RequestError, TrimtabError
from trimtab.process.redact import scrubbed
from trimtab.report.document import Document, Items, Table

Label = str


@dataclass(frozen=True)
class Change:
    """A change between two releases that were run. between: releases in between that could not be run. confirmed: both gave
    their label a second time, None if not requested."""

    before: str
    after: str
    label_before: Label
    label_after: Label
    between: tuple[str, ...] = ()
    confirmed: bool | None = None


def find_changes(versions: Sequence[str], label_of: Callable[[str], Label | None]) -> tuple[Change, ...]:
    """Return the changes of the label along the versions, with few evaluations.

    label_of: None for a version that cannot be run; called at most once per version. The result has the changes that the search
    finds; if there is only one change, the result is exactly that one. The range is halved if the labels at its ends differ; both
    halves are searched if a third label appears. If the labels at both ends are equal, only the middle is tested: a change that is
    undone between two tested releases is not found.
    """
    label = cache(lambda at: label_of(versions[at]))

    def changes(low: int, high: int) -> list[Change]:
        """Return the changes between two runnable versions; a half with equal labels at its ends is not searched."""
        inside = sorted(range(low + 1, high), key=lambda at: abs(at - (low + high) // 2))
        middle = next((at for at in inside if label(at) is not None), None)
        if middle is not None:
            return [one for a, b in ((low, middle), (middle, high)) if label(a) != label(b) for one in changes(a, b)]
        before, after = label(low), label(high)
        if before is None or after is None or before == after:
            return []
        return [Change(versions[low], versions[high], before, after, tuple(versions[low + 1 : high]))]

    places = range(len(versions))
    low = next((at for at in places if label(at) is not None), None)
    high = next((at for at in reversed(places) if label(at) is not None), None)
    return () if low is None or high is None else tuple(changes(low, high))


FORMAT = 1
Run = Callable[[Path, str], Mapping[str, Any]]


@dataclass(frozen=True)
class Range:
    """The search range: a package from one release to another, both included."""

    package: str
    low: str
    high: str


@dataclass(frozen=True)
class Row:
    """One release: its label, or None and the reason why it was skipped; the number of runs."""

    version: str
    label: Label | None
    note: str = ""
    runs: int = 0


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The result of the search.

    rows: every release that was tried, the oldest first. changes: all detected changes, the oldest first. releases:
    their number in the range. others: the versions that all environments share. stopped: by Ctrl-C.
    """

    range: Range
    case: str
    rows: tuple[Row, ...]
    changes: tuple[Change, ...]
    releases: int
    others: Mapping[str, str]
    notes: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def first(self) -> str | None:
        """The first tested release with another label than the oldest one's."""
        return self.changes[0].after if self.changes else None

    @property
    def is_monotone(self) -> bool:
        """Whether the tested releases change their label at most once."""
        labels = [row.label for row in self.rows if row.label is not None]
        return sum(a != b for a, b in zip(labels, labels[1:])) <= 1

    def to_json(self) -> dict[str, Any]:
        """Return the bisection as JSON-ready values."""
        return {
            "format": FORMAT, **asdict(self.range), "case": self.case, "releases": self.releases,
            "others": dict(self.others), "rows": [asdict(row) for row in self.rows],
            "changes": [{**asdict(change), "between": list(change.between)} for change in self.changes],
            "first": self.first, "is_monotone": self.is_monotone, "notes": list(self.notes), "stopped": self.stopped,
        }  # fmt: skip


# The question ---------------------------------------------------------------------------------------------------------


def parse_range(text: str) -> Range:
    """Return the range in "PACKAGE=LOW..HIGH". Errors: RequestError for other text, an unknown package (with similar names), an
    invalid version, and an empty range."""
    package, equals, versions = text.partition("=")
    low, dots, high = versions.partition("..")
    if not equals or not dots:
        raise RequestError("is not PACKAGE=LOW..HIGH", field="bisect", value=text, allowed=("peft=0.19.1..0.21.2",))
    return check_range(Range(package.strip(), low.strip(), high.strip()))


def check_range(package_range: Range) -> Range:
    """Return the range with the package's known name. Errors: as of `parse_range`."""
    name = package_range.package.lower().replace("-", "_")
    if name not in PACKAGES:
        raise RequestError(
            "is not a package that can be bisected", field="bisect", value=package_range.package, allowed=PACKAGES,
            near=near_names(name, PACKAGES),
        )  # fmt: skip
    low, high = (_version(text) for text in (package_range.low, package_range.high))
    if low >= high:
        raise RequestError(
            "the range is empty: LOW must be the older release", field="bisect", value=f"{package_range.low}..{package_range.high}"
        )
    return Range(name, package_range.low, package_range.high)


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as exc:
        raise RequestError("is no version", field="bisect", value=text) from exc


def releases_between(package_range: Range, known: Sequence[str]) -> tuple[str, ...]:
    """Return the known releases of a range. Errors: RequestError if an end of it is unknown, with the nearest ones."""
    versions = [Version(text) for text in known]
    for end in (package_range.low, package_range.high):
        if Version(end) not in versions:
            nearest = sorted(known, key=lambda text: _distance(Version(text), Version(end)))[:4]
            raise RequestError(
                f"the package index has no such release of {package_range.package}", field="bisect", value=end,
                allowed=sorted_versions(known), near=sorted_versions(nearest),
            )  # fmt: skip
    low, high = Version(package_range.low), Version(package_range.high)
    return tuple(text for text, version in zip(known, versions, strict=True) if low <= version <= high)


def _distance(one: Version, other: Version) -> tuple[int, ...]:
    size = max(len(one.release), len(other.release))
    padded = [(*parsed.release, *(0,) * (size - len(parsed.release))) for parsed in (one, other)]
    return tuple(abs(a - b) for a, b in zip(*padded))


# With environments ----------------------------------------------------------------------------------------------------


def bisect(
    package: str, low: str, high: str, *, case: str, others: Mapping[str, str] | None = None,
    python: str | os.PathLike[str] | None = None, say: Say | None = None, model: str | Path | None = None,
    adapter: str | Path | None = None, run_case: Run | None = None, confirm: bool = False,
    environments: Environments | None = None,
) -> Bisection:  # fmt: skip
    """Return the releases of a package between which the case's label changes.

    case: of the matrix, or the id of a catalogue entry, whose probe then runs. others: package -> version for all environments; all
    others are the versions of `python` (None: this interpreter). model, adapter: None is the bundled demo. run_case: (interpreter,
    case name) -> record. confirm: run both sides of every change once more. Ctrl-C ends the search; the results so far are
    returned, with stopped=True.
    Errors: RequestError for an unknown package, release or case, an empty range, and an unreachable index without kept
    environments. CheckpointError, AdapterError for folders that are not a model or an adapter.
    """
    checked = check_range(Range(package, low, high))
    # Errors of the folders themselves are reported before anything is made.
    if model is not None:
        read_checkpoint(model)
    if adapter is not None:
        read_adapter(os.fspath(adapter))
    if run_case is None:
        run_case = runner_for(case, model, adapter)
    if environments is None:
        environments = Environments(Base.read(python), dict(others or {}), say=say or (lambda text: None))
    return _Bisecting(checked, case, environments, run_case, say or (lambda text: None)).run(confirm)


def bisect_each(ranges: Sequence[Range], *, case: str, **options: Any) -> tuple[Bisection, ...]:
    """Return the bisections of several packages one after the other, each with the others unchanged; see `bisect`."""
    bisections: list[Bisection] = []
    for wanted in [check_range(wanted) for wanted in ranges]:
        bisections.append(bisect(wanted.package, wanted.low, wanted.high, case=case, **options))
        if bisections[-1].stopped:
            break
    return tuple(bisections)


def runner_for(case: str, model: str | Path | None, adapter: str | Path | None) -> Run:
    """Return a function that runs a case of the matrix on the stock stack of an interpreter, or a probe of the
    catalogue ("B4").

    A probe's label is its state; it needs no model and no processor. Errors: RequestError for a name that is neither.
    """
    from trimtab.doctor.cases.cases import find_cases
    from trimtab.doctor.cases.runner import run_matrix
    from trimtab.doctor.catalogue import read_catalogue
    from trimtab.doctor.probes.runner import run_probes

    def probe(python: Path, name: str) -> Mapping[str, Any]:
        return {"case": name, "label": run_probes(python=python, ids=[name])[0].seen.state}

    def run(python: Path, name: str) -> Mapping[str, Any]:
        return run_matrix(cases=[name], python=python, model=model, adapter=adapter, engines=("stock",))[0]

    if case in {entry.bug.id for entry in read_catalogue()}:
        return probe
    find_cases([case])
    return run


def label_of(record: Mapping[str, Any]) -> Label:
    """Return a record's label; an unknown one with the exception's type, so that two unknowns can differ."""
    label = str(record["label"])
    exception = record.get("exception") or {}
    return f"{label} ({exception['type']})" if label == "UNKNOWN" and exception.get("type") else label


@dataclass
class _Bisecting:
    asked: Range
    case: str
    environments: Environments
    run_case: Run
    say: Say
    rows: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, confirm: bool) -> Bisection:
        package = self.asked.package
        versions = releases_between(self.asked, self._known())
        changes: tuple[Change, ...] = ()
        stopped = False
        try:
            changes = find_changes(versions, self._label)
            changes = tuple(self._confirmed(change) if confirm else change for change in changes)
        except KeyboardInterrupt:
            stopped = True
            changes = changes or _seen(versions, self.rows)
        others = {name: pinned for name, pinned in self.environments.pins(package, "").items() if name != package}
        return Bisection(
            range=self.asked, case=self.case, rows=tuple(self.rows[name] for name in versions if name in self.rows),
            changes=changes, releases=len(versions), others=others, notes=tuple(self.notes), stopped=stopped,
        )  # fmt: skip

    def _known(self) -> tuple[str, ...]:
        try:
            return self.environments.releases(self.asked.package)
        except InstallError as exc:
            kept = self.environments.kept_versions(self.asked.package)
            self._note(f"{exc}; only environments that were kept are searched: {', '.join(kept) or 'none'}")
            if len(kept) < 2:
                raise RequestError(str(exc), field="bisect", value=self.asked.package) from exc
            return kept

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def _label(self, version: str) -> Label | None:
        package = self.asked.package
        try:
            python = self.environments.python_for(package, version)
        except InstallError as exc:
            self._keep(Row(version, None, f"cannot be installed: {exc}"))
            return None
        try:
            label = label_of(self.run_case(python, self.case))
        except TrimtabError as exc:  # with this version, not even the model or the prompt can be made
            self._keep(Row(version, None, f"cannot be run: {scrubbed(str(exc))}"))
            return None
        self._keep(Row(version, label, runs=1))
        return label

    def _keep(self, row: Row) -> None:
        self.rows[row.version] = row
        self.say(f"{self.asked.package} {row.version}: {row.label or row.note}")

    def _confirmed(self, change: Change) -> Change:
        again = []
        for version, label in ((change.before, change.label_before), (change.after, change.label_after)):
            python = self.environments.python_for(self.asked.package, version)
            second_label = label_of(self.run_case(python, self.case))
            again.append(second_label == label)
            note = "" if second_label == label else f"a second run gave {second_label}"
            self.rows[version] = Row(version, label, note, runs=2)
        return replace(change, confirmed=all(again))


def _seen(versions: Sequence[str], rows: Mapping[str, Row]) -> tuple[Change, ...]:
    """Return the changes between neighbouring rows: only bounds if the search was stopped."""
    have = [(version, label) for version in versions if version in rows and (label := rows[version].label) is not None]
    return tuple(
        Change(a, b, before, after, tuple(versions[versions.index(a) + 1 : versions.index(b)]))
        for (a, before), (b, after) in zip(have, have[1:])
        if before != after
    )


# For people -----------------------------------------------------------------------------------------------------------


def bisection_document(bisection: Bisection) -> Document:
    """Return a row for each release, then what changed."""
    wanted = bisection.range
    pins = ", ".join(f"{name} {version}" for name, version in bisection.others.items())
    rows = [(row.version, f"{row.label or 'skipped'}{f': {row.note}' if row.note else ''}") for row in bisection.rows]
    texts = []
    for change in bisection.changes:
        gap = ""
        if change.between:
            why = "not tried yet" if bisection.stopped else "could not be run"
            gap = f"; between them {', '.join(change.between)} {why}"
        sure = {True: ", confirmed by a second run", False: ", but a second run differed", None: ""}[change.confirmed]
        texts.append(f"changed in {change.after}: {change.label_before} in {change.before}, then {change.label_after}{sure}{gap}")
    texts += [] if bisection.changes else ["no change was seen"]
    if not bisection.is_monotone:
        texts.append("it changed more than once: there may be further changes between releases that were not run")
    texts += [f"note: {note}" for note in bisection.notes] + ["stopped early"] * bisection.stopped
    title = f"{wanted.package} {wanted.low} to {wanted.high} ({bisection.releases} releases), case {bisection.case}; {pins}"
    return Document(title, [Table(("release", "label"), rows, has_note=True), Items(texts)])
