"""Which recorded run supports each statement of a draft?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import RequestError
from trimtab.process.redact import clean, clean_all

PACKAGES = ("transformers", "accelerate", "peft", "bitsandbytes", "torch")
OFFLOAD = ("cpu", "disk")
REQUIRED: tuple[tuple[str, type], ...] = (("case", str), ("engine", str), ("label", str), ("versions", dict))
# Labels that count as passed other than PASS: a right merge, and a model that is too large for a reference.
PASSING = ("PASS", "PASS_NOT_COMPARED", "BF16_MERGED_MATCHES_BF16_ADAPTER", "DIRECT_4BIT_MERGED_MATCHES_ADAPTER")
NO_ADAPTER = ("none", "dispatch")
# A folder below a run's work folder is the same setting in every run.
_RUN_FOLDER = re.compile(r"^<work>[\\/][\w-]+[\\/]")


@dataclass(frozen=True)
class Run:
    """One recorded run. mark: its name in a sentence ("r3"). record: its JSON object, cleaned."""

    mark: str
    record: Mapping[str, Any] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = record_problems(self.record)
        if problems:
            raise RequestError(f"is not a record of a run: {'; '.join(problems)}", field="runs", value=self.mark)

    @property
    def case(self) -> str:
        return str(self.record["case"])

    @property
    def label(self) -> str:
        return str(self.record["label"])

    @property
    def engine(self) -> str:
        return str(self.record["engine"])

    @property
    def stage(self) -> str:
        return str(self.record.get("stage") or "")

    @property
    def title(self) -> str:
        return str(self.record.get("title") or "")

    @property
    def device(self) -> str:
        return str(self.record.get("device") or "")

    @property
    def configuration(self) -> Mapping[str, Any]:
        return self.record.get("configuration") or {}

    @property
    def call(self) -> str:
        """How the adapter was attached; "" if the run ended before."""
        return str(self.configuration.get("call") or "")

    @property
    def is_stock(self) -> bool:
        """Whether the run did not use trimtab: only then it is evidence about other packages."""
        return self.engine == "stock" and self.call != "bridge"

    @property
    def passed(self) -> bool:
        """Whether it succeeded and kept the placement."""
        return self.label in PASSING and self.record.get("placement_kept") is not False

    @property
    def exception(self) -> Mapping[str, Any] | None:
        """The exception that ended it, or that of its first mode that failed."""
        modes = (self.record.get("modes") or {}).values()
        exceptions = (self.record.get("exception"), *(mode.get("exception") for mode in modes))
        return next((one for one in exceptions if one), None)

    @property
    def exception_type(self) -> str:
        return str((self.exception or {}).get("type", ""))

    @property
    def message(self) -> str:
        return str((self.exception or {}).get("message", ""))

    @property
    def frames(self) -> tuple[Mapping[str, Any], ...]:
        """The frames of its trace in installed libraries, outermost first."""
        return tuple((self.exception or {}).get("frames") or ())

    @property
    def versions(self) -> dict[str, str]:
        return {name: str(self.record["versions"][name]) for name in PACKAGES if self.record["versions"].get(name)}

    @property
    def map_asked(self) -> Mapping[str, Any]:
        device_map = self.record.get("map_asked")
        return device_map if isinstance(device_map, Mapping) else {}

    @property
    def offloads(self) -> bool:
        return any(str(device) in OFFLOAD for device in self.map_asked.values())

    @property
    def eight_bit_layers(self) -> int:
        return int((self.record.get("quantized") or {}).get("Linear8bitLt") or 0)

    @property
    def four_bit_layers(self) -> int:
        return int((self.record.get("quantized") or {}).get("Linear4bit") or 0)

    @property
    def settings(self) -> dict[str, Any]:
        """The leaves of its configuration by dotted name, with the calls."""
        beside = {"then": "merge"} if self.merges and "then" not in self.configuration else {}
        pressed = self.record.get("pressure")
        return dict(_leaves(self.configuration)) | beside | ({"GPU full": pressed} if pressed is not None else {})

    @property
    def merges(self) -> bool:
        """Whether the adapter was merged, or the run failed in the merge."""
        return bool(self.record.get("merged")) or self.stage == "merge"

    @property
    def adapter(self) -> bool:
        """Whether it had an adapter."""
        return bool(self.call) and self.call not in NO_ADAPTER

    def device_kind(self) -> str:
        """Return "gpu" or "cpu": their messages differ for the same failure."""
        return "cpu" if self.device.upper().startswith("CPU") else "gpu"

    def ended(self) -> str:
        """Return how it ended, in a phrase."""
        if self.exception is not None:
            first = self.message.splitlines()[0] if self.message else ""
            return f"{self.exception_type}: {first}"
        return self.label


@dataclass(frozen=True)
class Shown:
    """A reproducer that was run and showed its failure: its text, its output, and the versions."""

    text: str
    output: str
    exit_code: int
    seconds: float
    versions: Mapping[str, str]
    mark: str = "reproducer"


@dataclass(frozen=True)
class Probed:
    """The result of a probe of the installation."""

    bug_id: str
    state: str
    evidence: str
    where: str = "this installation"

    @property
    def mark(self) -> str:
        return f"probe {self.bug_id}"


@dataclass(frozen=True)
class Machine:
    """The machine of the runs, from the environment: only for the system information."""

    values: Mapping[str, Any]
    mark: str = "environment"

    def has(self, versions: Mapping[str, str]) -> bool:
        """Whether these versions are installed, as far as the environment names the packages."""
        packages = self.values.get("packages") or {}
        return all(packages[name].get("version") == value for name, value in versions.items() if packages.get(name))


Source = Run | Shown | Probed | Machine


@dataclass(frozen=True)
class Statement:
    """One sentence with a fact and its runs. Errors: RequestError if it has none."""

    text: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise RequestError("a sentence with a fact needs a recorded run", field="statement", value=self.text)
        if not all(isinstance(source, Run | Shown | Probed | Machine) for source in self.sources):
            raise RequestError("only a recorded run is evidence", field="statement", value=self.text)

    @property
    def marks(self) -> str:
        return " ".join(f"[{mark}]" for mark in dict.fromkeys(source.mark for source in self.sources))

    def __str__(self) -> str:
        return f"{self.text} {self.marks}"


@dataclass(frozen=True)
class Point:
    """A prepared sentence, with the test that a run must pass to support it."""

    text: str
    carried_by: Callable[[Run], bool]

    def stated(self, runs: Iterable[Run]) -> Statement | None:
        """Return it with the first runs that support it, None if none does."""
        carrying = tuple(run for run in runs if self.carried_by(run))[:3]
        return Statement(self.text, carrying) if carrying else None


def evidence_of(records: Sequence[Mapping[str, Any]]) -> tuple[Run, ...]:
    """Return the records as evidence, marked r1, r2, ... in their order, cleaned.

    Errors: RequestError that names every invalid record.
    """
    problems = [
        f"run {place}: {'; '.join(faults)}" for place, record in enumerate(records, 1) if (faults := record_problems(record))
    ]
    if problems:
        raise RequestError(" | ".join(problems), field="runs")
    return tuple(Run(f"r{place}", clean_all(record)) for place, record in enumerate(records, 1))


def record_problems(record: Any) -> list[str]:
    """Return the reasons why a value is no record of a run."""
    if not isinstance(record, Mapping):
        return [f"a {type(record).__name__}, not an object"]
    return [
        f"{name!r} is missing" if name not in record else f"{name!r} is a {type(record[name]).__name__}"
        for name, kind in REQUIRED
        if not isinstance(record.get(name), kind)
    ]


def _leaves(value: Any, head: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{head}.{name}" if head else str(name))
    else:
        yield head, _RUN_FOLDER.sub("<work>/", value) if isinstance(value, str) else value


def nearest_pass(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return the passing run of the stock stack that differs in the fewest settings, under the same versions and model.

    Each single setting counts. Of equally near runs, the one with the same call is returned: a contrast in the
    placement is more useful than one in the adapter.
    """
    passing = [
        other for other in runs
        if other.passed and other.is_stock and other.versions == run.versions
        and other.record.get("model") == run.record.get("model") and other.device_kind() == run.device_kind()
    ]  # fmt: skip
    return min(passing, key=lambda other: _distance(run, other), default=None)


def _distance(run: Run, other: Run) -> tuple[int, int, bool]:
    """Return the distance of two runs: the requested format first, then whole groups, then the call."""
    formats = sum(name.startswith("base.quantization_config.") for name in differences(run, other))
    return formats, setting_groups(run, other), other.call != run.call


def setting_groups(run: Run, other: Run) -> int:
    """Return the number of settings in which two runs differ; a whole map or quantization counts as one."""
    return len({".".join(name.split(".")[:2]) for name in differences(run, other)})


def differences(run: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs differ: by dotted name, the first's value and the second's (None: not set)."""
    one, two = run.settings, other.settings
    return {name: (one.get(name), two.get(name)) for name in dict.fromkeys((*one, *two)) if one.get(name) != two.get(name)}


_TRACE_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*?)(?:: (?P<message>.*))?$")
_FILE_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def raised_in(output: str) -> tuple[str, str, tuple[str, ...]]:
    """Return (type, message's first line, files of the frames) of the last traceback in an output; empty if it has none."""
    start = output.rfind("Traceback (most recent call last):")
    if start < 0:
        return "", "", ()
    files, lines = [], output[start:].splitlines()[1:]
    for line in lines:
        if match := _FILE_LINE.match(line):
            files.append(match["file"].replace("\\", "/"))
        elif line and not line[0].isspace() and (match := _TRACE_LINE.match(line)):
            return match["type"].rpartition(".")[2], match["message"] or "", tuple(files)
    return "", "", tuple(files)


def without_numbers(text: str) -> str:
    """Return the first line with every number as N: the same failure gives the same text for another model size."""
    first = clean(text).splitlines()[0] if text else ""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", first)[:200]


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str, ensure_ascii=False)
