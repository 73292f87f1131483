"""How does a terminal show what a command is doing? As one line of stderr, which gives way to any other text.

Imports no other package: the line is there before the command's own imports begin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from trimtab.printable import printable
from trimtab.process import phases

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
