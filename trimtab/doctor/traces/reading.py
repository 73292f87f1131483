"""Which exceptions and frames are in a pasted text?"""

from __future__ import annotations

import bisect
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimtab.errors import RequestError

MOST_BYTES = 2 * 2**20
MOST_LINES = 50_000
MOST_LINE_CHARS = 50_000
MOST_TRACES = 50
MOST_FRAMES = 400
# A text of at most this many lines is one conversation: its settings may be in any line.
PASTE_LINES = 200
MESSAGE_LINES = 6
_GOES_ON = ("(", ",", ":")
LIBRARIES = (
    "accelerate", "bitsandbytes", "peft", "safetensors", "torch", "torchao", "transformers", "auto_round", "vllm", "sglang",
)  # fmt: skip

_QUOTES = str.maketrans({
    "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'", "：": ":", "\u00a0": " ", "\u200b": "", "❱": " ",
    "┃": "│", "║": "│",
})  # fmt: skip
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^(?:[ \t]*(?:>[ \t]?|E {2,}|\(\w+(?:\s+pid=\d+)?[^)\n]{0,40}pid=\d+\)|\[rank\d+\]:))+", re.MULTILINE)
# A run of spaces or bars is matched only from its beginning: a text may be one long run.
_BOX_START = re.compile(r"^[ \t]*│+[ \t]?")
_INNER_BAR = re.compile(r"(?:(?<![ \t])[ \t]+)?│[ \t]*")
_CORNERS = "╭╮╰╯┌┐└┘├┤"
_CORNER, _RULE = re.compile(f"[{_CORNERS}]"), re.compile(f"[{_CORNERS}─━═]{{2,}}")
_TRACEBACK = re.compile(r"Traceback(?:\s*\(most recent call last\))?:?")

# A frame is read from its ".py": the text after it shows the form, the text before it is the path.
_FILE = re.compile(r"\.py(?=[\"'`:\]]| in )")
_AFTER_PYTHON = re.compile(r"\.py[\"'`]\s{0,4},?\s{0,4}line\s{1,4}\d+\s{0,4},?\s{0,4}in\s{1,4}(?P<function>[\w<>\\.]{1,200})")
_AFTER_NUMBER = re.compile(r"\.py:\d+\]?(?:\([^)\n]{0,500}\))?[,:]? {1,8}in {1,8}(?P<function>[\w<>.]{1,200})")
_AFTER_NAME = re.compile(r"\.py\]?(?:\([^)\n]{0,500}\))? in (?P<function>[\w<>]{1,200})\(")
_PATH_CHARS, _AFTER_CHARS = 400, 800
_MENTION = re.compile(rf"(?<![\w/.:\\-])(?P<file>(?:{'|'.join(LIBRARIES)})/[\w/]+\.py)(?![\"'`]\s*,?\s*line|:\d)")
_EXCEPTION = re.compile(
    r"(?<![\w.])(?:[A-Za-z_]\w*\.){0,6}(?P<kind>[A-Z]\w*(?:Error|Exception))(?:[ \t]*:[ \t]*(?P<message>[^\n]*)"
    r"|\((?P<called>'?\w+'?)\)|[ \t]*(?=$))", re.MULTILINE,
)  # fmt: skip
_RAISED = re.compile(r"(?:\braise\s+|\bexcept\s+\(?[\w., ]*)$")
_KEY = re.compile(r"^\(?(?P<key>'[^'\n]*'|\"[^\"\n]*\"|\d+)")
_LOG_LINE = re.compile(r"\s\d{4}-\d\d-\d\d[ T]\d\d:\d\d")  # a forum joined the log's next line to it
_VERSION = re.compile(
    r"\b(?P<package>transformers|accelerate|peft|bitsandbytes|bitsandbyte|torch|bitandbytes)\b[`'\"]?"
    r"(?:\s+version)?(?:\s*(?:==|[:=|])\s*|\s+|\s*:\s*`\s*)[`'\"v]{0,2}(?P<version>\d+\.\d+(?:\.\w+)*)", re.IGNORECASE,
)  # fmt: skip
_SPELLINGS = {"bitsandbyte": "bitsandbytes", "bitandbytes": "bitsandbytes"}


@dataclass(frozen=True)
class Trace:
    """One exception in a text. kind: its class, "" if missing. frames: "file:function", outermost first. around: the
    surrounding text. line: its last line. times: number of occurrences."""

    kind: str
    message: str
    frames: tuple[str, ...]
    around: str
    line: int
    times: int = 1


@dataclass(frozen=True)
class Paste:
    """The contents of a pasted text. text: plain. versions: the package versions in it. mentions: library files in prose."""

    text: str
    traces: tuple[Trace, ...]
    versions: dict[str, str]
    mentions: tuple[str, ...]


def read_paste(text: str) -> Paste:
    """Return the exceptions and versions of a text. Errors: RequestError for a text without words or beyond the limits."""
    check_size(text)
    plain = plain_text(text)
    mentions = tuple(dict.fromkeys(match["file"] + ":" for match in _MENTION.finditer(plain)))
    return Paste(plain, tuple(_traces(plain)), _versions(plain), mentions)


def check_size(text: str) -> None:
    """Raise RequestError for a text without words, or one with too many bytes, lines or characters in a line."""
    lines = text.count("\n") + 1
    limits = (
        ("bytes", len(text.encode("utf-8", "replace")), MOST_BYTES), ("lines", lines, MOST_LINES),
        ("characters in one line", max(map(len, text.split("\n"))), MOST_LINE_CHARS),
    )  # fmt: skip
    for unit, value, most in limits:
        if value > most:
            raise RequestError(
                f"is too long: {value:,} {unit}", field="--trace", allowed=(f"at most {most:,}",),
                hint="Paste the traceback and the lines before it",
            )  # fmt: skip
    if not re.search(r"\w", text):
        raise RequestError("holds no text", field="--trace", hint="Paste a traceback, or the error's last line")


def plain_text(text: str) -> str:
    """Return a text with straight quotes and joined paths, without boxes, colors, quote marks and launchers' prefixes."""
    text = _ANSI.sub("", html.unescape(text).replace("\r\n", "\n").replace("\\_", "_")).translate(_QUOTES)
    text = _PREFIX.sub("", text)
    if "│" in text:
        text = re.sub(r"│[ \t]*│", "│\n│", text)
        text = "\n".join(map(_without_rules, text.split("\n")))
        text = "\n".join(map(_without_sides, text.split("\n")))
        text = _joined(text)
        text = _INNER_BAR.sub(" ", text)
    return text


def _without_rules(line: str) -> str:
    """Return a line with a line break for each rule of a box: two strokes up to the next corner, or three strokes."""
    kept, place = [], 0
    last = max(map(line.rfind, _CORNERS))
    while run := _RULE.search(line, place):
        start, end = run.span()
        if last >= end and (corner := _CORNER.search(line, end)):
            stop = corner.end()
        elif last >= start + 2:
            stop = last + 1
        elif end - start > 2:
            stop = end
        else:
            kept.append(line[place:end])
            place = end
            continue
        kept += [line[place:start], "\n"]
        place = stop
    return "".join([*kept, line[place:]])


def _without_sides(line: str) -> str:
    """Return a line without the bars at its two ends."""
    line = _BOX_START.sub("", line)
    bare = line.rstrip(" \t")
    return bare.rstrip("│").rstrip(" \t") if bare.endswith("│") else line


def _joined(text: str) -> str:
    """Return the text of a box with wrapped paths and function names joined into one line."""
    text = re.sub(r"(?P<head>[/\\][\w.+-]+)[ \t]*\n[ \t]*(?P<tail>[\w/\\.-]*\.py:\d+ in\b)", r"\g<head>\g<tail>", text)
    return re.sub(r"(\.py:\d+ in)[ \t]*\n[ \t]*(?=[\w<])", r"\1 ", text)


def _traces(text: str) -> Iterator[Trace]:
    """Yield every exception with the frames before it. If it has none, the frames that follow it belong to it."""
    kept: dict[tuple[str, str, tuple[str, ...]], Trace] = {}
    frames: list[str] = []
    start, pending = 0, None
    newlines = [match.start() for match in re.finditer("\n", text)]
    for place, event, value in _events(text):
        if event == "frame":
            frames.append(str(value))
            continue
        if event == "traceback":
            start, frames = (place if pending is None else start), []
            continue
        assert isinstance(value, tuple)
        kind, message, end = value
        if pending is not None and not frames:
            _keep(kept, pending)
        elif pending is not None and _same(pending, kind, message):
            pending = None
        elif pending is not None:
            _keep(kept, pending)
        around = text if len(newlines) < PASTE_LINES else text[start:end]
        trace = Trace(kind, message, tuple(frames[-MOST_FRAMES:]), around, bisect.bisect_left(newlines, end) + 1)
        pending = None if frames else trace
        if frames:
            _keep(kept, trace)
        frames, start = [], end
        if len(kept) >= MOST_TRACES:
            break
    if pending is not None:
        _keep(kept, Trace(pending.kind, pending.message, tuple(frames), pending.around, pending.line))
    yield from kept.values()


def _same(trace: Trace, kind: str, message: str) -> bool:
    return trace.kind == kind and trace.message.split("\n")[0][:60] == message.split("\n")[0][:60]


def _keep(kept: dict[tuple[str, str, tuple[str, ...]], Trace], trace: Trace) -> None:
    key = (trace.kind, trace.message[:200], trace.frames)
    before = kept.get(key)
    times = 1 if before is None else before.times + 1
    kept[key] = replace(before or trace, times=times)


def _events(text: str) -> list[tuple[int, str, str | tuple[str, str, int]]]:
    """Return frames, "Traceback" lines and exceptions in the order of the text."""
    events: list[tuple[int, str, str | tuple[str, str, int]]] = []
    for match in _FILE.finditer(text):
        frame = _frame_at(text, match.start())
        if frame:
            events.append((match.start(), "frame", frame))
    events += [(match.start(), "traceback", "") for match in _TRACEBACK.finditer(text)]
    for match in _EXCEPTION.finditer(text):
        if _RAISED.search(text, max(0, match.start() - 60), match.start()):
            continue
        events.append((match.start(), "exception", (match["kind"], _message(text, match), match.end())))
    return sorted(set(events), key=lambda event: event[0])


def _frame_at(text: str, place: int) -> str:
    """Return the frame whose file's ".py" is at this position, as "file:function"; "" if no form of a frame follows."""
    after, before = text[place : place + _AFTER_CHARS], text[max(0, place - _PATH_CHARS) : place]
    for pattern, ends in ((_AFTER_PYTHON, r"[\"'`\n]"), (_AFTER_NUMBER, r"[\s\[\"'`(]"), (_AFTER_NAME, r"[\s\[]")):
        match = pattern.match(after)
        if match:
            return f"{in_library(re.split(ends, before)[-1] + '.py')}:{_name(match['function'])}"
    return ""


def _name(function: str) -> str:
    """Return a function's name without its class, which notebooks and Python 3.11 write before it."""
    return function.replace("\\", "").rstrip(".").rpartition(".")[2]


def _message(text: str, match: re.Match[str]) -> str:
    """Return an exception's message with the lines that belong to it; of a KeyError only the key."""
    if match["called"] is not None:
        return str(match["called"])
    first = _LOG_LINE.split((match["message"] or "").strip().rstrip("`"))[0].rstrip()
    if match["kind"] == "KeyError" and (key := _KEY.match(first)):
        return key["key"]
    following = text[match.end() : match.end() + 2000].split("\n")[1 : MESSAGE_LINES + 1] if match["message"] is not None else []
    lines = [first]
    for line in following:
        if not (lines[-1].endswith(_GOES_ON) or line[:1] in " \t)" or not lines[-1]):
            break
        if not line.strip() or _AFTER_PYTHON.search(line) or _AFTER_NUMBER.search(line) or _TRACEBACK.search(line):
            break
        lines.append(line.strip())
    return "\n".join(lines)


def in_library(path: str) -> str:
    """Return a file's path from its package, with slashes; a path outside the known packages unchanged."""
    path = re.sub(r"[\\/]+", "/", path.strip())
    installed = re.split(r"(?:site|dist)-packages/", path)
    if len(installed) > 1:
        path = re.sub(r"^[\w.-]+\.egg/", "", installed[-1])
    matches = list(re.finditer(rf"(?:^|[/.])(?P<package>{'|'.join(LIBRARIES)})/", path))
    return path[matches[-1].start("package") :] if matches else path


def _versions(text: str) -> dict[str, str]:
    """Return the versions of packages in the text, the first of each."""
    versions: dict[str, str] = {}
    for match in _VERSION.finditer(text):
        package = match["package"].lower()
        versions.setdefault(_SPELLINGS.get(package, package), match["version"].rstrip("."))
    return versions
