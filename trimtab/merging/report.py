"""The report of a merge, and the record of it in the new folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.errors import gib
from trimtab.report.document import Document, Facts
from trimtab.report.render import Report

RECORD_NAME = "trimtab_merge.json"
CRITERION = "every value is the float64 result rounded once, within the proven bound of float32 sums"
# The bound is valid for every order of summation, so a right merge cannot be outside it.
FALSE_ALARM_RATE = 0.0


@dataclass(frozen=True)
class MergedAdapter:
    """One merged adapter. scales: scale -> number of modules; weight is a further factor. files: name -> sha256."""

    name: str
    folder: str
    weight: float
    modules: int
    no_effect: int
    scales: Mapping[str, int]
    files: Mapping[str, str]


@dataclass(frozen=True)
class MergedFile:
    """One weight file: bytes and sha256 as written, sha256 of the base's; is_resumed: written by an earlier run."""

    name: str
    file_bytes: int
    sha256: str
    base_sha256: str
    is_resumed: bool = False


@dataclass(frozen=True)
class CheckedTensor:
    """One changed tensor, computed again. error_ulps: largest distance from the exact result, in ulps of its dtype at
    the larger of base and result.

    survival: share of the change in the written file (1.0: all; 0.0: rounded away). is_applied: every value is within
    rounding of the expected one. slope: share of the change in the exact result, rounded once, that is in the file
    (1.0: right; 0.99: a scale 1 % too small; 2.0: merged twice); None if rounding removes the whole change. visible:
    how many values a scale wrong by 1 % would change; if it is 0, the files with and without that fault are the same.
    """

    tensor_name: str
    is_applied: bool
    error_ulps: float
    survival: float | None
    slope: float | None = None
    visible: int = 0

    @property
    def problem(self) -> str:
        """The problem of the tensor, as text."""
        share = "" if self.slope is None else f" ({self.slope:.4g} of its change is present)"
        return f"{self.tensor_name} is not as computed{share}"


@dataclass(frozen=True)
class MergeCheck:
    """The result of checking the written files: changed tensors computed again, all others compared bit by bit."""

    changed: tuple[CheckedTensor, ...]
    equal: int
    not_equal: tuple[str, ...]

    @property
    def applied(self) -> int:
        return sum(tensor.is_applied for tensor in self.changed)

    @property
    def error_ulps(self) -> float:
        return max((tensor.error_ulps for tensor in self.changed), default=0.0)

    @property
    def passed(self) -> bool:
        return self.applied == len(self.changed) and not self.not_equal

    @property
    def slopes(self) -> tuple[float, float] | None:
        """The smallest and the largest slope of the changed tensors; None if rounding leaves no change in any."""
        known = [tensor.slope for tensor in self.changed if tensor.slope is not None]
        return (min(known), max(known)) if known else None

    @property
    def blind(self) -> tuple[str, ...]:
        """The changed tensors in which a scale wrong by 1 % would change no value: there it cannot be detected and has no
        effect."""
        return tuple(tensor.tensor_name for tensor in self.changed if not tensor.visible)

    def to_json(self) -> dict[str, Any]:
        return {
            "applied": self.applied, "expected": len(self.changed), "error_ulps": self.error_ulps, "equal": self.equal,
            "not_equal": list(self.not_equal), "passed": self.passed, "changed": [asdict(t) for t in self.changed],
            "criterion": CRITERION, "false_alarm_rate": FALSE_ALARM_RATE, "slopes": self.slopes and list(self.slopes),
            "blind": list(self.blind),
        }  # fmt: skip


@dataclass(frozen=True)
class MergeReport(Report):
    """The report of a merge. changed: names of file tensors. parity: set by a caller that compared answers."""

    out: str
    base: str
    adapters: tuple[MergedAdapter, ...]
    files: tuple[MergedFile, ...]
    copied: tuple[str, ...]
    changed: tuple[str, ...]
    untouched: int
    added: tuple[str, ...]
    dtype: str | None
    requantize: str | None
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    check: MergeCheck | None = None
    check_seconds: float = 0.0
    parity: Any | None = field(default=None, compare=False)

    @property
    def file_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)

    def document(self) -> Document:
        """Return what it says."""
        form = f", packed to {self.requantize}" if self.requantize else ""
        form += f", {self.dtype}" if self.dtype else ""
        rows = []
        for adapter in self.adapters:
            scales = ", ".join(f"{scale} x {count}" for scale, count in adapter.scales.items())
            idle = f", {adapter.no_effect} tensors without effect" if adapter.no_effect else ""
            rows.append((f"{adapter.name} x {adapter.weight:g}", f"{adapter.modules} modules (scale {scales or '-'}){idle}"))
        resumed = sum(file.is_resumed for file in self.files)
        rate = self.file_bytes / self.seconds if self.seconds else 0
        rows.append(("tensors", f"{len(self.changed)} changed, {self.untouched} copied, {len(self.added)} added"))
        rows.append(("files", (
            f"{len(self.files)}, {gib(self.file_bytes)} in {self.seconds:.1f} s ({gib(int(rate))}/s)"
            + (f", {resumed} of them from an earlier run" if resumed else "")
        )))  # fmt: skip
        rows += [("note", note) for note in self.notes]
        rows += [] if self.check is None else _check_rows(self.check)
        return Document(f"{self.base} -> {self.out}{form}", [Facts(rows)])

    def record(self) -> dict[str, Any]:
        """Return the record in the new folder; it does not depend on when or where the merge ran."""
        return {
            "format": 1, "made_by": "trimtab merge", "base": self.base,
            "base_files": {file.name: file.base_sha256 for file in self.files},
            "adapters": [asdict(adapter) for adapter in self.adapters],
            "dtype": self.dtype, "requantize": self.requantize, "changed_tensors": len(self.changed),
            "copied_tensors": self.untouched, "added_tensors": list(self.added),
            "files": {file.name: {"bytes": file.file_bytes, "sha256": file.sha256} for file in self.files},
            "notes": list(self.notes), "versions": dict(self.versions),
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        parity: Any = self.parity
        parity = parity.to_json() if hasattr(parity, "to_json") else parity
        return self.record() | {
            "out": self.out, "changed": list(self.changed), "copied_files": list(self.copied),
            "resumed_files": [file.name for file in self.files if file.is_resumed], "bytes": self.file_bytes,
            "seconds": round(self.seconds, 3), "check": None if self.check is None else self.check.to_json(),
            "check_seconds": round(self.check_seconds, 3), "parity": parity,
        }  # fmt: skip


def _check_rows(check: MergeCheck) -> list[tuple[str, str]]:
    known = [tensor.survival for tensor in check.changed if tensor.survival is not None]
    survival = f", {min(known):.1%} to {max(known):.1%} of each change is in the files" if known else ""
    rows = [("checked", (
        f"{check.applied} of {len(check.changed)} changes applied, largest error {check.error_ulps:.3g} ulp{survival}; "
        f"{check.equal} other tensors equal to the base's bit for bit"
    ))]  # fmt: skip
    if check.slopes is not None:
        rows.append(("slope", (
            f"of the written change on the exact one {check.slopes[0]:.6g} to {check.slopes[1]:.6g}; false-alarm rate 0: the bound "
            "of each value holds for every order of summation"
        )))  # fmt: skip
    if check.blind:
        rows.append(("cannot detect", (
            f"a scale that is wrong by 1 % in {len(check.blind)} tensors: it would change no value of the file"
        )))  # fmt: skip
    rows += [("NOT applied", tensor.problem) for tensor in check.changed if not tensor.is_applied]
    return rows + [("NOT equal", name) for name in check.not_equal]
