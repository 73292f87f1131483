"""Numbers and tables of reports: aligned columns on a screen, Markdown on a page."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.columns import aligned


def number(value: float | None) -> str:
    """Return a number for people: 0 only if it is exactly 0."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def yes(value: bool | None) -> str:
    """Return yes, no, or - for an unknown value."""
    return "-" if value is None else "yes" if value else "no"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return lines of aligned columns."""
    return aligned([head, *rows], indent=indent)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; bars and line ends in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(markdown_cell(cell) for cell in row) + " |" for row in lines]


def markdown_cell(text: str) -> str:
    """Return text that stays inside its cell."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
    return " ".join(escaped.split())
