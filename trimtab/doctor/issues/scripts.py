"""What is the minimal reproducer of each failure?"""

from __future__ import annotations

from pathlib import Path

from trimtab.report.render import filled

TEMPLATES = Path(__file__).resolve().parents[1]


def script(name: str) -> str:
    """Return the whole text of one reproducer: its imports, the shared parts that it uses, its body. `reproducers/NAME.py.j2` is a
    body of a few lines after shared parts (`_parts.py.j2`). It prints "works: ..." for a similar case that passes, then raises the
    user's exception; a silent failure ends in an AssertionError."""
    return filled(TEMPLATES, f"issues/reproducers/{name}.py.j2")
