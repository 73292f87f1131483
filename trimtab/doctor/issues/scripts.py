"""Minimal reproducers: one script per failure. It needs only the stock stack and first runs a similar case that passes.

A script (`reproducers/NAME.py.j2`) is a body of a few lines after the shared parts that it uses (`_parts.py.j2`): a tiny random
Gemma 4, its loader, a LoRA for its language model. Failures that do not depend on Gemma 4 are shown on a tiny Llama, without an
adapter. A script prints "works: ..." for the similar case, then raises the user's exception; a silent failure ends in an
AssertionError that reports it.
"""

from __future__ import annotations

from pathlib import Path

from trimtab.report.render import filled

TEMPLATES = Path(__file__).resolve().parents[1]


def script(name: str) -> str:
    """Return the whole text of one reproducer: its imports, the shared parts that it uses, its body."""
    return filled(TEMPLATES, f"issues/reproducers/{name}.py.j2")
