"""Rendering of issues: the templates of this folder, filled, with the runs behind each sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.report.render import bullets, cell, fence, filled, inline, table


def render(template: str, **values: Any) -> str:
    """Return a template of this folder filled with values. Errors: jinja2's, for a missing value."""
    return filled(Path(__file__).parent, template, (inline, cell, fence, marks, table, bullets), **values)


def marks(sources: Sequence[Any], most: int | None = None) -> str:
    """Return the marks of a sentence's runs: "[r1] [r2]", and the number of further runs beyond `most`."""
    named = list(dict.fromkeys(source.mark for source in sources))
    more = f" and {len(named) - most} more" if most is not None and len(named) > most else ""
    return " ".join(f"[{mark}]" for mark in named[:most]) + more
