"""How a draft is written: Markdown that survives being pasted, fences inside fences included.

A draft's body is a list of sections made of blocks; a block with a fact is a `Statement`, or a `Quote` or `Table` that
says which recorded runs it shows. Wishes, questions and links are blocks of their own kind and state nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.doctor.draft_evidence import Source, Statement
from trimtab.errors import RequestError


@dataclass(frozen=True)
class Quote:
    """Text shown as it was recorded. language: of the fence."""

    text: str
    language: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise RequestError("quoted text needs a recorded run", field="quote", value=self.text[:60])


@dataclass(frozen=True)
class Table:
    """Values of recorded runs; cells are plain text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise RequestError("a table needs a recorded run", field="table", value=self.head)


@dataclass(frozen=True)
class Wish:
    """What is wanted, or asked."""

    text: str


@dataclass(frozen=True)
class Link:
    """A pointer to a thread or another draft. known: what is said of it elsewhere, not by a run."""

    text: str
    known: str = ""


@dataclass(frozen=True)
class Gap:
    """That something was not recorded."""

    text: str


Block = Statement | Quote | Table | Wish | Link | Gap


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


def fence(text: str, language: str = "") -> str:
    """Return the text in a fence that is longer than every run of backticks in it, so that it can hold other fences."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    bar = "`" * max(3, longest + 1)
    # A line break of another kind would end a line for Markdown and not for us.
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
    """Return recorded text as Markdown that shows it and does nothing else: no markup, no mention, no link to a thread."""
    flat = " ".join(text.split())
    escaped = re.sub(r"([\\`*_{}\[\]<>|~])", r"\\\1", flat)
    # GitHub makes "@name" a mention and "#12" a link; a zero-width space keeps both as they read.
    return re.sub(r"([@#])(?=\w)", "\\1\u200b", escaped)


class Raw(str):
    """Markdown that is ours, in a table cell."""


def cell(text: str) -> str:
    """Return text for a table cell: a code span keeps its bars only when they are escaped."""
    is_ours = isinstance(text, Raw) or "`" in text
    return " ".join(text.split()).replace("|", r"\|") if is_ours else plain(text)


def render(title: str, front: Sequence[tuple[str, str]], sections: Iterable[Section]) -> str:
    """Return the whole file: what the filer must know above the line, the issue's text below it."""
    lines = [f"# {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in front]
    lines += [
        "",
        "The text of the issue starts below the line. Brackets name the recorded run behind a sentence.",
        "",
        "---",
    ]
    for section in sections:
        lines += ["", f"### {section.title}", "", *_blocks(section.blocks)]
    return "\n".join(lines).rstrip() + "\n"


def _blocks(blocks: Sequence[Block]) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Statement):
            lines.append(f"- {block}")
        elif isinstance(block, Wish):
            lines.append(f"- {block.text}")
        elif isinstance(block, Link):
            lines.append(f"- {block.text}{f' ({block.known})' if block.known else ''}")
        elif isinstance(block, Gap):
            lines.append(f"- {block.text}")
        elif isinstance(block, Table):
            lines += ["", *table(block.head, block.rows), "", f"Recorded in {marks(block.sources)}.", ""]
        else:
            lines += ["", f"Recorded in {marks(block.sources)}:", "", fence(block.text, block.language), ""]
    return _without_double_blanks(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [
        f"| {' | '.join(head)} |", f"|{'---|' * len(head)}",
        *(f"| {' | '.join(cell(value) for value in row)} |" for row in rows),
    ]  # fmt: skip


def marks(sources: Sequence[Source]) -> str:
    return " ".join(f"[{mark}]" for mark in dict.fromkeys(source.mark for source in sources))


def _without_double_blanks(lines: list[str]) -> list[str]:
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return kept
