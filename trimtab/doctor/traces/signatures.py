"""By which exception type, message, frames, source lines and settings is a known failure recognized?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.process.files import read_sections


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One failure. label: its name. catalogue: its id, "" if it is no bug. All are in signatures.ini.

    type: the exception's class name. message: pattern for the result of `plain_message`. frame: pattern for the frames,
    one per line, as "file:function", outermost first; "" needs none. innermost: frame must match the last frame outside
    torch. code: a source line or arrow that replaces the frame in a text without frames. beside_frames: it also counts
    with other frames, as in a shortened trace. settings: pattern that the configuration of a run, or the text around a
    trace, must also match. foreign: frames of another project with the same failure. stages: stages of a recorded run,
    () is any. ask: the information to request if the rest is missing. meaning: one line for people.

    A signature has a unique message, written by one function of one package, or needs a frame.
    """

    label: str
    type: str
    message: str
    frame: str = ""
    innermost: bool = False
    code: str = ""
    beside_frames: bool = False
    settings: str = ""
    foreign: str = ""
    stages: tuple[str, ...] = ()
    meaning: str
    catalogue: str = ""
    ask: str = ""

    @property
    def has_own_message(self) -> bool:
        """Whether the message identifies the failure without a frame or a setting."""
        return not (self.frame or self.settings)


@dataclass(frozen=True)
class Match:
    """A matching signature, and the matched evidence as text: "exception type", "message", "frame ...", ..."""

    signature: Signature
    rests_on: tuple[str, ...]


MESSAGE_CHARS = 20_000


def _signature(name: str, values: Mapping[str, str]) -> Signature:
    """Return the signature of a section."""
    texts = {field: text.replace("\n", "") for field, text in values.items()}
    return Signature(
        label=name.partition(" ")[0], stages=tuple(filter(None, texts.pop("stages", "").split(", "))),
        innermost=bool(texts.pop("innermost", "")), beside_frames=bool(texts.pop("beside_frames", "")), **texts,
    )  # fmt: skip


SIGNATURES = tuple(_signature(*section) for section in read_sections(Path(__file__).with_suffix(".ini")).items())
_QUOTE = re.compile('["`´′″‘’‚‛“”„‟‹›«»＂＇]')


def plain_message(message: str) -> str:
    """Return a message in the patterns' form: single spaces, every quote an apostrophe."""
    return _QUOTE.sub("'", " ".join(message[:MESSAGE_CHARS].split()))


def match(
    kind: str, message: str, frames: Sequence[str], *, stage: str | None = None, settings: str = "", code: str = ""
) -> Match | None:
    """Return the first matching signature, None for none.

    kind: the exception's class name, "" if unknown. message: its text. frames: as "file:function", outermost first.
    stage: of a recorded run, None for a pasted text. settings: the configuration, or the text around the trace. code:
    source lines of a pasted text that may replace frames.
    """
    plain = plain_message(message)
    for signature in SIGNATURES:
        rests_on = _seen(signature, kind, plain, frames, stage, settings, code)
        if rests_on is not None:
            return Match(signature, rests_on)
    return None


def _seen(
    signature: Signature, kind: str, message: str, frames: Sequence[str], stage: str | None, settings: str, code: str
) -> tuple[str, ...] | None:
    """Return the matched evidence of a signature, None unless all that it needs is present."""
    seen: list[str] = []
    if kind:
        if not re.fullmatch(signature.type, kind):
            return None
        seen.append(f"exception type {kind}")
    elif signature.type == "KeyError" and "KeyError" not in code:
        return None
    if not re.search(signature.message, message):
        return None
    seen.append("a distinctive message" if signature.has_own_message else "message")
    if stage is not None and signature.stages and stage not in signature.stages:
        return None
    if signature.foreign and any(re.search(signature.foreign, frame) for frame in frames):
        return None
    if signature.settings:
        if not re.search(signature.settings, settings):
            return None
        seen.append("settings")
    if signature.frame:
        where = _where(signature, frames, code)
        if not where:
            return None
        seen.append(where)
    return tuple(seen)


def _where(signature: Signature, frames: Sequence[str], code: str) -> str:
    """Return the frame, or the source line instead, as text; "" for neither."""
    outside = [frame for frame in frames if not frame.startswith("torch/")]
    looked_at = outside[-1:] if signature.innermost else list(frames)
    match = re.search(signature.frame, "\n".join(looked_at), re.MULTILINE)
    if match:
        last = match.group(0).splitlines()[-1]
        whole = next((frame for frame in reversed(looked_at) if last in frame), last)
        return f"frame {whole.rstrip(':')}"
    if not signature.beside_frames and any(not frame.endswith(":") for frame in outside):
        return ""  # the frames show another place of failure; a file that prose mentions ("file:") does not count
    line = re.search(signature.code, code, re.IGNORECASE) if signature.code else None
    return f"source line {' '.join(line.group(0).split())[:60]!r}" if line else ""
