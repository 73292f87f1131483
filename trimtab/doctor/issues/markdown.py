"""Rendering of issues: the templates of this folder, filled, with the runs behind each sentence, and their reproducers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.report.render import bullets, cell, fence, filled, inline, table

TEMPLATES = Path(__file__).resolve().parents[1]


def render(template: str, **values: Any) -> str:
    """Return a template of this folder filled with values. Errors: jinja2's, for a missing value."""
    return filled(TEMPLATES, f"issues/{template}", (inline, cell, fence, marks, table, bullets), **values)


def script(name: str) -> str:
    """Return the whole text of one reproducer: its imports, the shared parts that it uses, its body. `reproducers/NAME.py.j2` is a
    body of a few lines after shared parts (`_parts.py.j2`). It prints "works: ..." for a similar case that passes, then raises the
    user's exception; a silent failure ends in an AssertionError."""
    return filled(TEMPLATES, f"issues/reproducers/{name}.py.j2")


def marks(sources: Sequence[Any], most: int | None = None) -> str:
    """Return the marks of a sentence's runs: "[r1] [r2]", and the number of further runs beyond `most`."""
    named = list(dict.fromkeys(source.mark for source in sources))
    more = f" and {len(named) - most} more" if most is not None and len(named) > most else ""
    return " ".join(f"[{mark}]" for mark in named[:most]) + more
