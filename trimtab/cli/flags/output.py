"""Output of all commands: their place in the parser, and JSON on stdout."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trimtab.printable import printable

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
    """Print what ends or refuses a command, on stderr. before: lines in front of it."""
    head = f"{printable(before)}\n" if before else ""
    print(f"{head}{set_off('trimtab:', 'error', sys.stderr)} {printable(text)}", file=sys.stderr, flush=True)


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
