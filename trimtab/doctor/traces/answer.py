"""What is the answer to a pasted error: owner, trackers, workaround, next questions, confidence?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from trimtab.doctor.facts.bug import OPEN, Bug, Tracker, known_trackers, release
from trimtab.doctor.traces.likeness import Index, index_of
from trimtab.doctor.traces.reading import PASTE_LINES, Paste, Trace, read_paste
from trimtab.doctor.traces.signatures import SIGNATURES, Match, match, plain_message
from trimtab.report.document import Block, Document, Facts, Heading, Items, Text

UNKNOWN = "UNKNOWN"
HIGH, MEDIUM, NONE = "high", "medium", "none"


@dataclass(frozen=True)
class Finding:
    """The classification of one exception in a text. match: None for UNKNOWN. asks: information that would decide it."""

    trace: Trace | None
    match: Match | None
    asks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return UNKNOWN if self.match is None else self.match.signature.label

    @property
    def rests_on(self) -> tuple[str, ...]:
        return () if self.match is None else self.match.rests_on

    @property
    def confidence(self) -> str:
        """HIGH: type and message, and a frame or a unique message. MEDIUM: a source line for the frame, or no type."""
        if self.match is None:
            return NONE
        has_type = any(one.startswith("exception type") for one in self.rests_on)
        is_exact = any(one.startswith("frame") or one == "a distinctive message" for one in self.rests_on)
        return HIGH if has_type and is_exact else MEDIUM


def classify(text: str) -> tuple[Paste, tuple[Finding, ...]]:
    """Return the contents of a text and the diagnosis of each exception, the most certain known one first. Errors: as `read_paste`.
    A text without an exception line is searched as a whole, only for unique marks of a failure. A message that several causes share
    is UNKNOWN.
    """
    paste = read_paste(text)
    findings = [_of_trace(trace, paste) for trace in paste.traces]
    if not any(finding.match for finding in findings):
        whole = _of_whole(paste)
        if whole is not None:
            findings = [Finding(paste.traces[0] if paste.traces else None, whole)]
    known: dict[str, Finding] = {}
    for finding in findings:
        if finding.match is not None:
            known.setdefault(finding.label, finding)
    unknown = [finding for finding in findings if finding.match is None]
    if not findings:
        unknown = [Finding(None, None, _asks("", paste.text))]
    surest = sorted(known.values(), key=lambda finding: finding.confidence != HIGH)
    return paste, (*surest, *unknown)


def _of_trace(trace: Trace, paste: Paste) -> Finding:
    frames = (*trace.frames, *paste.mentions) if not trace.frames else trace.frames
    first = trace.message.split("\n")[0]
    for message in dict.fromkeys((first, trace.message)):
        signature = match(trace.kind, message, frames, settings=trace.around, code=trace.around)
        if signature is not None:
            return Finding(trace, signature)
    return Finding(trace, None, _asks(trace.kind, trace.message))


def _of_whole(paste: Paste) -> Match | None:
    """Return the match of a text without an exception line; None for a long log, whose lines may be unrelated."""
    if paste.text.count("\n") >= PASTE_LINES:
        return None
    frames = tuple(frame for trace in paste.traces for frame in trace.frames) or paste.mentions
    return match("", paste.text, frames, settings=paste.text, code=paste.text)


def _asks(kind: str, message: str) -> tuple[str, ...]:
    """Return the missing information: the other conditions of each signature with this message."""
    plain = plain_message(message)
    return tuple(dict.fromkeys(
        signature.ask for signature in SIGNATURES
        if signature.ask and (not kind or re.fullmatch(signature.type, kind)) and re.search(signature.message, plain)
    ))  # fmt: skip


MOST_SHOWN = 3
MOST_TRACKERS = 3
MOST_UNKNOWN = 3
SHORT = 100
ASK_UNKNOWN = (
    "the whole traceback, from its first line on",
    "versions of torch, transformers, accelerate, peft, bitsandbytes (trimtab doctor --report prints them)",
    "the device_map and the quantization_config of the call",
)  # fmt: skip


@dataclass(frozen=True)
class Alike:
    """One entry of the catalogue that a report looks like. tell: what to ask or run to know whether it is this one."""

    bug: Bug
    score: float
    tell: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "bug": self.bug.id, "title": self.bug.title, "symptom": self.bug.symptom, "score": round(self.score, 2),
            "tell": list(self.tell),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The known facts about one exception of a paste.

    label: its name, UNKNOWN for none. meaning: in a line. exception: as pasted, its first line. rests_on: by what it was
    recognized. bug: the entry of the catalogue, None without one. bucket: the issue that it belongs into. owner: whose
    repository. trackers: known threads. fix: whether a release has the fix, in a sentence. way_round: what works today.
    ask: what to ask next. times: how often the text has it. looks_like: for UNKNOWN without a traceback, entries with
    words like these; no diagnosis.
    """

    label: str
    meaning: str
    exception: str
    confidence: str
    rests_on: tuple[str, ...]
    bug: Bug | None
    bucket: str
    owner: str
    trackers: tuple[Tracker, ...]
    fix: str
    way_round: str
    ask: tuple[str, ...]
    line: int = 0
    times: int = 1
    looks_like: tuple[Alike, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "label": self.label, "meaning": self.meaning, "exception": self.exception, "confidence": self.confidence,
            "rests_on": list(self.rests_on), "bug": self.bug.id if self.bug else None,
            "title": self.bug.title if self.bug else None, "bucket": self.bucket or None, "owner": self.owner or None,
            "trackers": [
                {"name": one.name, "url": one.url, "state": one.known_state, "as_last_known": one.state}
                for one in self.trackers
            ],
            "fix": self.fix, "way_round": self.way_round or None, "ask": list(self.ask), "line": self.line, "times": self.times,
            "looks_like": [one.to_json() for one in self.looks_like],
        }  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a pasted text. answers: known failures first, most certain first. versions: from the text."""

    answers: tuple[Answer, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The surest known failure, or UNKNOWN."""
        return self.answers[0].label

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "label": self.label, "versions": dict(self.versions), "answers": [one.to_json() for one in self.answers],
        }  # fmt: skip


def diagnose(text: str) -> Diagnosis:
    """Return the answer to a pasted text. Errors: RequestError for a text without words or beyond the limits."""
    paste, findings = classify(text)
    answers = [_answer(finding, paste) for finding in findings]
    if answers[0].label == UNKNOWN:
        answers[0] = replace(answers[0], looks_like=_looks_like(paste))
    return Diagnosis(tuple(answers), paste.versions)


def _looks_like(paste: Paste) -> tuple[Alike, ...]:
    """Return the entries that a report without a traceback looks like; () for one with frames, which say that it is none."""
    has_frames = any(not frame.startswith("torch/") for trace in paste.traces for frame in trace.frames)
    if has_frames or paste.text.count("\n") >= PASTE_LINES:
        return ()
    return tuple(Alike(known_bugs()[bug_id], score, _tell(bug_id)) for bug_id, score in _index().alike(paste.text))


def _tell(bug_id: str) -> tuple[str, ...]:
    asks = dict.fromkeys(one.ask for one in SIGNATURES if one.catalogue == bug_id and one.ask)
    return (
        *(f"ask: {ask}" for ask in list(asks)[:1] or [f"is it so: {known_bugs()[bug_id].trigger}"]),
        f"run: trimtab doctor --probe {bug_id}",
    )


@cache
def _index() -> Index:
    return index_of(known_bugs().values())


@cache
def known_bugs() -> Mapping[str, Bug]:
    """Return the catalogue of known bugs by id."""
    from trimtab.doctor.catalogue import read_catalogue

    return {entry.bug.id: entry.bug for entry in read_catalogue()}


def _answer(finding: Finding, paste: Paste) -> Answer:
    trace, exception = finding.trace, ""
    if trace is not None:
        exception = f"{trace.kind}: {trace.message.splitlines()[0] if trace.message else ''}".strip(": ")
    facts: dict[str, Any] = {"exception": exception, "line": trace.line if trace else 0, "times": trace.times if trace else 1}
    if finding.match is None:
        return Answer(
            label=UNKNOWN, meaning="no known signature matches", confidence=finding.confidence, rests_on=(), bug=None, bucket="",
            owner="", trackers=(), fix="not known", way_round="", ask=(*finding.asks, *ASK_UNKNOWN), **facts,
        )  # fmt: skip
    signature = finding.match.signature
    bug = known_bugs().get(signature.catalogue)
    return Answer(
        label=signature.label, meaning=signature.meaning, confidence=finding.confidence, rests_on=finding.rests_on, bug=bug,
        bucket=_bucket(signature.label), owner=", ".join(bug.owner) if bug else "",
        trackers=tuple(sorted(known_trackers(bug), key=lambda one: not one.may_be_open)), fix=_fix(bug, paste.versions),
        way_round=bug.way_round if bug else _OOM_WAY_ROUND if signature.label == "OOM_GPU" else "",
        ask=_ask(finding, bug, paste.versions), **facts,
    )  # fmt: skip


_OOM_WAY_ROUND = "a smaller context, fewer bits, a smaller model, or modules off the GPU (trimtab plan says what fits)"


def _bucket(label: str) -> str:
    from trimtab.doctor.facts.buckets import BUCKETS

    return next((bucket.name for bucket in BUCKETS if label in bucket.labels), "")


def _fix(bug: Bug | None, versions: Mapping[str, str]) -> str:
    """Return whether a release has the fix, and whether the text's versions are before or after it."""
    if bug is None:
        return "nothing to fix upstream"
    fixes = [(one.package, one.fixed_in) for one in bug.affected if one.fixed_in]
    if not fixes:
        return f"no release known to have a fix; {bug.versions}"
    releases = " or ".join(f"{package} {version}" for package, version in fixes)
    sides = [
        f"{package} {versions[package]} {'has it' if release(versions[package]) >= release(version) else 'has not'}"
        for package, version in fixes if package in versions
    ]  # fmt: skip
    return f"{releases} has the fix; {', '.join(sides) if sides else bug.versions}"


def _ask(finding: Finding, bug: Bug | None, versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the next questions to the author of the text."""
    asks = []
    signature = finding.match.signature if finding.match else None
    if finding.confidence != "high" and signature is not None and signature.ask:
        asks.append(signature.ask)
    missing = [one.package for one in (bug.affected if bug else ()) if one.package not in versions]
    if missing:
        asks.append(f"the version of {', '.join(missing)}")
    if bug is not None:
        asks.append(f"run here: trimtab doctor --probe {bug.id}")
    return tuple(asks)


# Text -----------------------------------------------------------------------------------------------------------------


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """Return the answers for one screen: the first known failure in full, others in a few lines, the rest in one."""
    known = [one for one in diagnosis.answers if one.label != UNKNOWN]
    unknown = [one for one in diagnosis.answers if one.label == UNKNOWN]
    first, *rest = known or unknown
    times = f", {first.times} times" if first.times > 1 else ""
    blocks: list[Block] = [Facts(_rows(first, times))]
    for one in rest[: MOST_SHOWN - 1] if known else ():
        blocks += [Heading(f"{one.label}: {one.meaning}"), Facts(_short_rows(one))]
    others = ", ".join(f"{one.label} (line {one.line})" for one in known[MOST_SHOWN:])
    blocks += [Text(f"As well: {others}")] if others else []
    unknown = unknown if known else unknown[1:]
    lines = [f"UNKNOWN at line {one.line}: {one.exception[:80]}" for one in unknown[:MOST_UNKNOWN]]
    lines += [f"and {len(unknown) - MOST_UNKNOWN} more"] if len(unknown) > MOST_UNKNOWN else []
    return Document(f"{first.label}: {first.meaning}", [*blocks, Items(lines)])


def _short_rows(answer: Answer) -> list[tuple[str, str]]:
    """Return the failure's place in the text, its owner and the workaround."""
    bug = f", known bug {answer.bug.id}" if answer.bug else ""
    rows = (
        ("pasted", f"line {answer.line}: {answer.exception}" if answer.exception else "without its exception"),
        ("owner", f"{answer.owner or 'nobody'}{bug}, confidence {answer.confidence}"),
        ("workaround", answer.way_round or "none known"),
    )
    return [(name, value if len(value) <= SHORT else f"{value[: SHORT - 4]} ...") for name, value in rows]


def _rows(answer: Answer, times: str) -> list[tuple[str, str]]:
    """Return what is known of the answer, and what to ask."""
    bug = answer.bug
    rows = [
        ("pasted", f"{answer.exception[:160]} (line {answer.line}{times})" if answer.exception else ""),
        ("confidence", f"{answer.confidence}{': ' if answer.rests_on else ''}{', '.join(answer.rests_on)}"),
        ("known bug", f"{bug.id} {bug.name}: {bug.title}" if bug is not None else ""), ("owner", answer.owner),
        ("bucket", answer.bucket), ("trackers", _trackers(answer.trackers) if answer.trackers else ""),
        ("fix", answer.fix if answer.label != UNKNOWN else ""), ("workaround", answer.way_round),
        ("looks like", "(by its words; this is no diagnosis)" if answer.looks_like else ""),
    ]  # fmt: skip
    for one in answer.looks_like:
        rows += [("", f"{one.bug.id} {one.bug.name}: {one.bug.title}"), *(("", tell) for tell in one.tell)]
    rows += [("ask next" * (not place), ask) for place, ask in enumerate(answer.ask)]
    return [(name, text) for name, text in rows if text]


def _trackers(trackers: tuple[Tracker, ...]) -> str:
    shown = "; ".join(f"{one.name} ({one.state or 'state unknown: check it first'})" for one in trackers[:MOST_TRACKERS])
    more = f"; {len(trackers) - MOST_TRACKERS} more" if len(trackers) > MOST_TRACKERS else ""
    head = "" if any(one.known_state == OPEN for one in trackers) else "none known to be open: "
    return f"{head}{shown}{more}"
