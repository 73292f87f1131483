"""What every command needs to say something: its place in the parser, and JSON on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, Protocol


class Command(Protocol):
    """Adds a command: its name, what runs it, one line of help; gives back its parser."""

    def __call__(
        self, name: str, function: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser: ...


def saying(options: argparse.Namespace) -> Callable[[str], None] | None:
    """Return what tells a person on stderr how far a long piece of work is; None where nobody looks."""
    if options.json or not sys.stderr.isatty():
        return None
    return lambda text: print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=1, default=str))
