"""What does a report say, however it is shown: a title and blocks of texts, facts, lists, tables and figures?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

Changed = TypeVar("Changed")


@dataclass(frozen=True)
class Heading:
    """The heading of the blocks that follow."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph. kind: a key of `render.KINDS`. is_fixed: `changed` leaves it."""

    text: str
    kind: str = ""
    is_fixed: bool = False


@dataclass(frozen=True)
class Facts:
    """Texts with names; one without a name goes on below the one before it."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells below their head. has_note: the last column is a running text. optional: columns that a narrow terminal omits, the
    first one first."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_note: bool = False
    optional: tuple[int, ...] = ()


@dataclass(frozen=True)
class Code:
    """Lines that are shown as they are."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A chart, which only a page shows. svg: of `charts`."""

    title: str
    svg: str


@dataclass(frozen=True)
class Details:
    """Blocks that a page opens on request, and a terminal omits."""

    summary: str
    blocks: Sequence[Block]


Block = Heading | Text | Facts | Items | Table | Code | Figure | Details


@dataclass(frozen=True)
class Document:
    """A report. kind: of its title, a key of `render.KINDS`."""

    title: str
    blocks: Sequence[Block]
    kind: str = "heading"


def changed(value: Changed, change: Callable[[str], str]) -> Changed:
    """Return a document, a block or a part of one with every text changed, charts and kinds apart."""
    made: Any = value
    if isinstance(value, str):
        made = change(value)
    elif isinstance(value, tuple | list):
        made = tuple(changed(one, change) for one in value)
    elif is_dataclass(value) and not isinstance(value, type) and not getattr(value, "is_fixed", False):
        own = {item.name: getattr(value, item.name) for item in fields(value) if item.name not in ("kind", "svg", "optional")}
        made = replace(value, **{name: changed(one, change) for name, one in own.items()})
    return made  # type: ignore[no-any-return]


def joined(title: str, documents: Iterable[Document]) -> Document:
    """Return several documents as one, each below its title."""
    return Document(title, [block for one in documents for block in (Heading(one.title), *one.blocks) if block != Heading("")])


# Cells ----------------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Return a number for people: 0 only if it is exactly 0."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def yes(value: bool | None) -> str:
    """Return yes, no, or - for an unknown value."""
    return "-" if value is None else "yes" if value else "no"


def some(texts: Sequence[str], most: int, what: str = "") -> str:
    """Return the first texts, and the number of the others."""
    more = f" and {len(texts) - most} more{what}" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def counted(count: int, word: str) -> str:
    """Return a number with its word, such as "1 run" or "2 runs"."""
    return f"{count} {word}{'' if count == 1 else 's'}"
