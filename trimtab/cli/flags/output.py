"""How do commands print: JSON on stdout, texts, the line of phases, and how two answers differ?"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trimtab.printable import printable
from trimtab.process import phases

if TYPE_CHECKING:
    from trimtab.report.document import Document
    from trimtab.report.render import Report


class Command(Protocol):
    """Adds a command: its name, its function, one line of help; returns its parser."""

    def __call__(self, name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser: ...


def saying(options: argparse.Namespace) -> Callable[[str], None] | None:
    """Return a function that reports the progress of long work on stderr; None if no user is watching."""
    if options.json or not sys.stderr.isatty():
        return None
    return lambda text: print_text(text, file=sys.stderr, flush=True)


def print_text(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print text for people, with control characters of files and names escaped."""
    print(printable(str(text)), file=file, end=end, flush=flush)


def set_off(text: str, kind: str, stream: TextIO) -> str:
    """Return a text as a stream's terminal sets it off, without other control characters; plain where it has no color."""
    from trimtab.report.render import CODES

    plain = printable(text)
    return f"\x1b[{CODES[kind]}m{plain}\x1b[0m" if plain and has_color(stream) else plain


def show(report: Report | Document, *, width: int | None = None, file: TextIO | None = None) -> None:
    """Print a report in the columns of the terminal (width: in these), 80 where there is none, with color where it has color."""
    from trimtab.report.document import Document
    from trimtab.report.render import WIDTH, Lines

    stream = sys.stdout if file is None else file
    columns = width or (shutil.get_terminal_size().columns if stream.isatty() else WIDTH)
    document = report if isinstance(report, Document) else report.document()
    print(Lines(columns, has_color=has_color(stream)).show(document), file=stream, flush=True)


def print_error(text: str, *, before: str = "") -> None:
    """Print what ends or refuses a command, on stderr, in the columns of a terminal. before: lines in front of it."""
    from trimtab.report.render import wrapped

    head, lines = f"{printable(before)}\n" if before else "", f"trimtab: {printable(text)}".splitlines()
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in wrapped(line, columns, rest=" " * (len(line) - len(line.lstrip(" -"))))]
    said = "\n".join(lines).removeprefix("trimtab:")
    print(f"{head}{set_off('trimtab:', 'error', sys.stderr)}{said}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=1, default=str))


def give_report(report: Report, options: argparse.Namespace, *, draw: Callable[[Any, str], None] | None = None) -> None:
    """Print a report, as JSON with --json. First write it to --save and draw it to --picture, if the command has them."""
    picture = None if draw is None else options.picture
    if options.save:
        report.save(options.save)
    if picture and draw is not None:
        draw(report, picture)
    if options.json:
        print_json(report.to_json())
        return
    show(report)
    for path in (options.save, picture):
        if path:
            print_text(f"written: {path}", file=sys.stderr)


COLORS = ("auto", "always", "never")


def use_color(choice: str | None) -> None:
    """Let --color decide for this process and those that it starts; "auto" does not change the environment.

    Source: https://no-color.org and https://force-color.org; rich and Python's own messages read the same variables.
    """
    if choice == "always":
        os.environ["FORCE_COLOR"] = "1"
        os.environ.pop("NO_COLOR", None)
    elif choice == "never":
        os.environ["NO_COLOR"] = "1"
        os.environ.pop("FORCE_COLOR", None)


def has_color(stream: TextIO) -> bool:
    """Return whether text on a stream may have colors."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


# A terminal obeys control characters: a model's text must not move the cursor, set the title or write to the clipboard.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Style:
    """How text is set off. is_terminal: whether it obeys control characters. has_color: whether it may be set off, as on a
    terminal if None."""

    is_terminal: bool
    has_color: bool | None = None

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if (self.is_terminal if self.has_color is None else self.has_color) else text

    def printable(self, text: str) -> str:
        """Return a model's text in a safe form for a terminal; unchanged for other outputs."""
        return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n")) if self.is_terminal else text


def apart(first: str, second: str, *, names: Sequence[str]) -> str:
    """Return how many words of two answers differ, and which: the answers themselves are shown already.

    Where no word is common the words are left out: they would be the answers once more.
    """
    if first == second:
        return f"{names[0]} and {names[1]} give the same answer"
    left, right = first.split(), second.split()
    runs: tuple[list[str], list[str]] = ([], [])
    differing, common = [0, 0], 0
    for kind, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        common += b - a if kind == "equal" else 0
        for side, words in enumerate((left[a:b], right[c:d])):
            if kind != "equal" and words:
                runs[side].append(" ".join(words))
                differing[side] += len(words)
    lines = [f"differing words: {differing[0]} of {len(left)}, {differing[1]} of {len(right)}"]
    lines += [f"{name}: {' ... '.join(own)}" for name, own in zip(names, runs, strict=True) if own and common]
    return "\n".join(lines)


# The first phase of each command that takes long.
FIRST = {
    **dict.fromkeys(("plan", "run", "chat", "demo", "merge", "verify", "bench", "tune", "serve"), "reading the model"),
    "inspect": "reading the adapter", "doctor": "reading the installed packages", "pull": "asking the hub",
}  # fmt: skip
COLUMNS = 80


class PhaseLine:
    """A watcher that writes each phase in place of the last one, or on a separate line if the terminal is dumb."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_dumb = stream, os.environ.get("TERM") == "dumb"
        self._shown = self._phase = ""
        self._is_at_start = True  # no other text waits for its line to end

    def __call__(self, phase: str, far: str) -> None:
        if not self._is_dumb:
            if self._is_at_start:
                self._show(printable(f"{phase} {far}".strip(), one_line=True))
        elif phase and phase != self._phase:
            self._phase = phase
            self._write(f"{printable(phase.rstrip(','), one_line=True)}\n")

    def _show(self, text: str) -> None:
        text = text[: _columns(self._stream) - 1]
        if text != self._shown:  # the cursor goes back: what another process writes begins at the margin
            self._write(f"\r{text.ljust(len(self._shown))}\r")
            self._shown = text

    def give_way(self, text: str) -> None:
        """Remove the line, because other text comes here."""
        if self._shown:
            self._show("")
        if text:
            self._is_at_start = text.endswith("\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone; the command's own output says so
            self._stream.write(text)
            self._stream.flush()


class _Above:
    """A stream whose text takes the place of the line. Everything else is the stream's."""

    def __init__(self, stream: Any, line: PhaseLine) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        self._line.give_way(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def shown(command: str) -> Iterator[None]:
    """Show the phases of the block if stderr is a terminal, the first phase of the command at once."""
    if not _is_terminal(sys.stderr):
        yield
        return
    line, before = PhaseLine(sys.stderr), {"stdout": sys.stdout, "stderr": sys.stderr}
    above = {name: _Above(stream, line) for name, stream in before.items() if _is_terminal(stream)}
    for name, stream in above.items():
        setattr(sys, name, stream)
    try:
        with phases.watched(line):
            phases.begin(FIRST.get(command, ""))
            yield
    finally:
        line.give_way("")
        for name, stream in above.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _columns(stream: TextIO) -> int:
    with suppress(OSError, ValueError):  # a stream without a descriptor
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    return COLUMNS
