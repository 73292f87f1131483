"""Numbers and tables of reports: aligned columns on a screen, Markdown on a page."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.process.text_table import aligned

WIDTH = 80


def number(value: float | None) -> str:
    """Return a number for people: 0 only if it is exactly 0."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def yes(value: bool | None) -> str:
    """Return yes, no, or - for an unknown value."""
    return "-" if value is None else "yes" if value else "no"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return lines of aligned columns; columns that do not fit WIDTH follow below, with the first column repeated."""
    rows = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts, taken = [[0]], len(indent) + widths[0]
    for column, width in enumerate(widths[1:], 1):
        if taken + 2 + width > WIDTH and len(parts[-1]) > 1:
            parts.append([0])
            taken = len(indent) + widths[0]
        parts[-1].append(column)
        taken += 2 + width
    lines: list[str] = []
    for part in parts:
        lines += ([""] if lines else []) + aligned([[row[column] for column in part] for row in rows], indent=indent)
    return lines


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; bars and line ends in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(markdown_cell(cell) for cell in row) + " |" for row in lines]


def markdown_cell(text: str) -> str:
    """Return the text with bars and line ends escaped."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
    return " ".join(escaped.split())
