"""Known failures in a pasted text, and the marks that identify each. Pure.

The first match is by exception, message and frames. A text without an exception line is searched as a whole, and only
for unique marks of a failure. A message that several causes share is UNKNOWN, with the missing information.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.doctor.traces.reading import PASTE_LINES, Paste, Trace, read_paste
from trimtab.doctor.traces.signatures import SIGNATURES, Match, match, plain_message

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
        is_exact = any(one.startswith("frame") or one == "a message of its own" for one in self.rests_on)
        return HIGH if has_type and is_exact else MEDIUM


def classify(text: str) -> tuple[Paste, tuple[Finding, ...]]:
    """Return the contents of a text and the diagnosis of each exception, the most certain known one first. Errors: as
    `read_paste`.
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
