"""Rendering of issues: jinja templates, and Markdown that can be pasted anywhere, including fences inside fences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """Return a template of this folder filled with values. Errors: jinja2's, for a missing value."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {one.__name__: one for one in (inline, cell, fence, marks, table, bullets)}
    return environment.get_template(template).render(values).rstrip() + "\n"


def fence(text: str, language: str = "") -> str:
    """Return the text in a fence that is longer than every run of backticks in it, so that it can hold other fences."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    bar = "`" * max(3, longest + 1)
    # Another kind of line break would end a line in Markdown, but not here.
    body = "\n".join(re.split(r"\r\n|\r", text)).rstrip("\n")
    return f"{bar}{language}\n{body}\n{bar}"


def inline(text: str) -> str:
    """Return the text as a code span of one line."""
    flat = " ".join(text.split())
    if not flat:
        return ""
    longest = max((len(run) for run in re.findall(r"`+", flat)), default=0)
    bar = "`" * (longest + 1)
    gap = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{bar}{gap}{flat}{gap}{bar}"


def plain(text: str) -> str:
    """Return recorded text as plain Markdown text: no markup, no mention, no link to a thread."""
    flat = " ".join(text.split())
    escaped = re.sub(r"([\\`*_{}\[\]<>|~])", r"\\\1", flat)
    # GitHub makes "@name" a mention and "#12" a link; a zero-width space prevents both and is invisible.
    return re.sub(r"([@#])(?=\w)", "\\1\u200b", escaped)


def cell(text: str) -> str:
    """Return text for a table cell, with escaped bars, also in code spans."""
    return " ".join(text.split()).replace("|", r"\|") if "`" in text else plain(text)


def table(rows: Iterable[Sequence[str]], *head: str) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def bullets(texts: Iterable[Any]) -> str:
    """Return a list of lines."""
    return "\n".join(f"- {text}" for text in texts)


def marks(sources: Sequence[Any], most: int | None = None) -> str:
    """Return the marks of a sentence's runs: "[r1] [r2]", and the number of further runs beyond `most`."""
    named = list(dict.fromkeys(source.mark for source in sources))
    more = f" and {len(named) - most} more" if most is not None and len(named) > most else ""
    return " ".join(f"[{mark}]" for mark in named[:most]) + more
