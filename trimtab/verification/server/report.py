"""What does the report on a server's adapter say, and which exit code does it have?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.report.document import Block, Details, Document, Facts, Heading, Table, Text
from trimtab.report.render import Report
from trimtab.verification.server.channels import Channel
from trimtab.verification.server.client import plain
from trimtab.verification.server.verdict import ALIVE, CANNOT_TELL, IGNORED, WRONG, Verdict, Weighed

EXIT_ALIVE, EXIT_DEAD, EXIT_CANNOT_TELL = 0, 1, 9
LEAST_RATE = 1e-4  # the smallest value that "0.01%" shows
PRECISION_WORDS = {"none": "unquantized", "auto": "as the checkpoint is"}
HEAD = ("fault", "size", "from it", "from right", "questions", "nearer", "it is")
SHOWN_ANSWER = 120


@dataclass(frozen=True)
class Alarms:
    """False alarms in runs against right servers. at_most: the rate's upper bound with 95 % confidence.

    Source of the bound: Clopper and Pearson 1934.
    """

    cases: int
    alarms: int
    at_most: float

    def __str__(self) -> str:
        return f"{self.alarms} of {self.cases} right servers of the demo model (95 % confidence: at most {self.at_most:.1%})"


# Measured by `python -m bench.alive` (bench/results/alive.json); a test compares the two.
MEASURED = Alarms(cases=204, alarms=0, at_most=0.0146)


@dataclass(frozen=True)
class Answered:
    """One question, the distance between adapter and base on it (KL in nats per token), and the server's answer."""

    id: str
    kind: str
    kl: float
    text: str


@dataclass(frozen=True, kw_only=True)
class RemoteReport(Report):
    """Whether the adapter of a server is alive.

    residuals: precision -> distance of the local base (or, if the server's base was not queried, of the nearest local
    answer) from the server's. channels, refusals: kind of question -> channel, and the server's earlier refusals.
    not_tried: faults that cannot be built. notes: differences that are no fault of the adapter. server_s, seconds:
    waiting for the server, and in total.
    """

    url: str
    remote_model: str
    remote_base: str | None
    model: str
    adapter: str
    adapter_path: str
    verdict: Verdict
    precision: str
    residuals: Mapping[str, float]
    channels: Mapping[str, Channel]
    refusals: Mapping[str, tuple[str, ...]]
    answered: tuple[Answered, ...]
    not_tried: tuple[str, ...]
    notes: tuple[str, ...]
    requests: int
    server_s: float
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 alive, 1 ignored or wrong, 9 cannot tell."""
        return {ALIVE: EXIT_ALIVE, CANNOT_TELL: EXIT_CANNOT_TELL}.get(self.verdict.word, EXIT_DEAD)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        verdict, smallest = self.verdict, self.verdict.smallest_seen
        return {
            "format": 1, "against": self.url, "remote_model": self.remote_model, "remote_base": self.remote_base,
            "model": self.model, "adapter": self.adapter, "adapter_path": self.adapter_path, "verdict": verdict.word,
            "fault": verdict.fault or None, "reason": verdict.reason, "is_alive_as_a_whole": verdict.is_as_a_whole,
            "confidence": verdict.confidence, "false_alarm_rate": verdict.false_alarm_rate,
            "false_alarms_measured": asdict(MEASURED), "noise": verdict.noise, "visible_from": verdict.visible_from,
            "smallest_fault_seen": smallest and {"name": smallest.name, "size": smallest.size},
            "excluded": list(verdict.excluded), "still_possible": list(verdict.unseen),
            "faults": [asdict(one) for one in verdict.weighed], "not_tried": list(self.not_tried),
            "precision": self.precision, "residuals": dict(self.residuals),
            "asked": {kind: {"how": channel.name, "logprobs": channel.top, "refused": list(self.refusals[kind])}
                      for kind, channel in self.channels.items()},
            "questions": [asdict(one) for one in self.answered], "notes": list(self.notes), "requests": self.requests,
            "server_s": round(self.server_s, 2), "seconds": round(self.seconds, 2), "exit_code": self.exit_code,
            "versions": dict(self.versions),
        }  # fmt: skip

    def document(self) -> Document:
        """Return what it says."""
        rows = [_fault_row(one, self.verdict) for one in self.verdict.weighed]
        blocks: list[Block] = [Facts(facts(self))]
        if rows:
            blocks += [Heading("Known faults"), Table(HEAD, rows), Text(LEGEND, "note")]
        if self.answered:
            head = ("question", "kind", "KL", "the server's answer")
            answers = [(one.id, one.kind, f"{one.kl:.3g}", plain(one.text, SHOWN_ANSWER)) for one in self.answered]
            blocks.append(Details("Questions", [Table(head, answers, has_note=True)]))
        return Document(headline(self), blocks, {ALIVE: "good", CANNOT_TELL: "unsure"}.get(self.verdict.word, "bad"))


# Words ----------------------------------------------------------------------------------------------------------------


def headline(report: RemoteReport) -> str:
    """Return the verdict as one line."""
    verdict, name = report.verdict, plain(report.remote_model)
    words = {
        ALIVE: f"ALIVE: {name} answers with the adapter {report.adapter}",
        IGNORED: f"IGNORED: {name} answers as its base, the adapter {report.adapter} has no effect",
        CANNOT_TELL: f"CANNOT TELL whether {name} answers with the adapter {report.adapter}"
        + (": as a whole it does, a small fault would not be detected" if verdict.is_as_a_whole else ""),
        WRONG: f"WRONG: {name} does not answer as the adapter {report.adapter} should",
    }[verdict.word]
    if verdict.word == WRONG:
        what = next((one.what for one in verdict.weighed if one.name == verdict.fault), "in no known way")
        words += f": {what}"
    return words


def facts(report: RemoteReport) -> list[tuple[str, str]]:
    """Return the facts behind the verdict, each with its name."""
    verdict = report.verdict
    rows = [("server", report.url), ("model", report.model), ("adapter", report.adapter_path), ("because", verdict.reason)]
    if verdict.confidence is not None:
        rows.append(("confidence", _share(verdict.confidence)))
    rate = max(verdict.false_alarm_rate, LEAST_RATE)
    rows.append(("alarms", f"a right server is called wrong in at most {rate:.2%} of runs (sign test); measured: {MEASURED}"))
    if verdict.weighed:
        rows.append(("noise", f"{verdict.noise:.3g}; a fault below {verdict.visible_from:.3g} is not detected"))
    smallest = verdict.smallest_seen
    if smallest is not None and verdict.word in (ALIVE, CANNOT_TELL):
        rows.append(("detected", f"{smallest.name} ({smallest.size:.3g}) is the smallest fault that would have been detected"))
    nearest = ", ".join(f"{name} {value:.3g}" for name, value in report.residuals.items())
    of = "server's base" if report.remote_base else "server (no request went to its base)"
    rows.append(("precision", f"{PRECISION_WORDS.get(report.precision, report.precision)}, the nearest to the {of}: {nearest}"))
    for kind, channel in report.channels.items():
        count = sum(one.kind == kind for one in report.answered)
        how = f"top {channel.top} logprobs" if channel.top else "texts alone: the server gives no logprobs"
        rows.append(("questions", f"{count} {kind} questions by {channel.name} ({how})"))
    rows += [("note", plain(note, 400)) for note in report.notes]
    rows += [("not tried", plain(one, 400)) for one in report.not_tried]
    rows.append(("time", f"{report.requests} requests, {report.server_s:.1f} s for the server, {report.seconds:.1f} s in all"))
    return rows


def _share(confidence: float) -> str:
    return f"{confidence:.2%}" if confidence < 0.9999 else "above 99.99%"


def _fault_row(one: Weighed, verdict: Verdict) -> tuple[str, ...]:
    state = "seen" if one.name == verdict.fault else "excluded" if one.name in verdict.excluded else "possible"
    if not one.questions:
        return (one.name, "0", "-", "-", "0", "-", "not shown by any question")
    return (
        one.name, f"{one.size:.3g}", f"{one.distance:.3g}", f"{one.right_distance:.3g}", str(one.questions),
        f"{one.nearer} of {one.nearer + one.farther}", state,
    )  # fmt: skip


LEGEND = (
    "Size: how far the fault moves the right answers, which trimtab computes. From it, from right: the distances of the server's "
    "answers from both. All three are mean differences of logprobs, on the questions that show the fault. Nearer: on how many of "
    "them the fault is nearer."
)
