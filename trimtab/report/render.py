"""How is a report shown: as text in the columns of a terminal, as Markdown, or as a page?"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from trimtab.errors import RequestError
from trimtab.printable import printable
from trimtab.process.files import write_text
from trimtab.report.document import Block, Code, Details, Document, Facts, Figure, Heading, Items, Table, Text

# What a report is printed in at the least, where no terminal is, and at the most.
NARROWEST, WIDTH, WIDEST = 60, 80, 200
GAP, INDENT = "  ", "    "
# The fewest columns of a first cell that other columns leave, and of a note to the right of its row.
_NAME, _NOTE = 20, 40
# How texts and cells of a kind are set off (SGR, ECMA-48 section 8.3.117); a page has a class for each.
CODES = {
    "error": "1;31", "heading": "1", "note": "2",
    "resident": "32", "gather": "36", "stream": "33", "host": "34", "disk": "35", "good": "32", "bad": "31", "unsure": "33",
}  # fmt: skip
# Cells whose word is a kind, or says one.
KINDS: Mapping[str, str] = dict.fromkeys(("resident", "gather", "stream", "host", "disk"), "") | {
    "same": "good", "PASS": "good", "fixed": "good", "differs": "bad", "present": "bad",
    "same within noise": "unsure", "cannot tell": "unsure", "unknown": "unsure",
}  # fmt: skip
_NUMBER = re.compile(r"[~+-]?\d[\d.,]*(?:e[+-]?\d+)?(?: ?[A-Za-z%/]{1,8})?|-|")


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at blanks, and after the bars of a regular expression."""

    wordsep_simple_re = re.compile(r"([\t\n\x0b\x0c\r ]+|(?<=\|)(?=\S))")


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text as lines of at most `width` columns, words whole. first, rest: what begins the first line, and others."""
    return _Wrapper(width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False).wrap(text)


class Form(Protocol):
    """One way to show a report."""

    def show(self, document: Document) -> str: ...


class Lines:
    """Text of at most `width` columns, unless one word is longer. has_color: whether kinds are set off."""

    def __init__(self, width: int = WIDEST, *, has_color: bool = False) -> None:
        self.width, self.has_color = min(max(width, NARROWEST), WIDEST), has_color

    def show(self, document: Document) -> str:
        title = [self._set_off(line, document.kind) for line in self._wrapped(document.title)]
        lines, is_joined = title, not title
        for block in document.blocks:
            if own := self._lines(block):
                lines += own if is_joined else ["", *own]
                is_joined = isinstance(block, Heading)
        return "\n".join(lines)

    def _lines(self, block: Block) -> list[str]:
        match block:
            case Heading():
                return [self._set_off(line, "heading") for line in self._wrapped(block.text)]
            case Text():
                return [self._set_off(line, block.kind) for line in self._wrapped(block.text)]
            case Items():
                return [line for text in block.texts for line in self._wrapped(text, "- ", GAP)]
            case Facts():
                return self._facts(block)
            case Table():
                return self._table(block)
            case Code():
                return [f"{INDENT}{printable(line)}".rstrip() for line in block.text.rstrip().splitlines()]
            case Details() | Figure():
                return []

    def _wrapped(self, text: str, first: str = "", rest: str | None = None) -> list[str]:
        # A number stays with its unit.
        bound = re.sub(r"(?<=\d) (?=[KMG]iB\b|m?s\b|tok(?:ens)?/s|%)", "\u00a0", printable(text))
        return [line.replace("\u00a0", " ") for line in wrapped(bound, self.width, first, first if rest is None else rest)]

    def _facts(self, facts: Facts) -> list[str]:
        wide = max((len(printable(name)) for name, _ in facts.rows), default=0) + len(GAP)
        lines = []
        for name, text in facts.rows:
            lines += self._wrapped(text, printable(name, one_line=True).ljust(wide), " " * wide) or [printable(name)]
        return lines

    def _table(self, table: Table) -> list[str]:
        rows = [[printable(cell, one_line=True) for cell in row] for row in (table.head, *table.rows)]
        notes = [row.pop() for row in rows] if table.has_note else [""] * len(rows)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = [all(map(_NUMBER.fullmatch, column[1:])) and len(rows) > 1 for column in zip(*rows, strict=True)]

        def taken(columns: Sequence[int]) -> int:
            return sum(widths[column] for column in columns) + len(GAP) * (len(columns) - 1)

        shown = list(range(len(widths)))
        for column in table.optional:
            if taken(shown) > self.width:
                shown.remove(column)
        if len(shown) > 1 and (left := self.width - taken(shown[1:]) - len(GAP)) >= _NAME:
            widths[0] = min(widths[0], left)
        parts = [shown[:1]]
        for column in shown[1:]:
            parts += [shown[:1]] if taken([*parts[-1], column]) > self.width and len(parts[-1]) > 1 else []
            parts[-1].append(column)
        # A note stands to the right of its row if there is room for the longest word of any.
        least = max(min(_NOTE, max(map(len, notes))), max((len(word) for note in notes for word in note.split()), default=0))
        lines: list[str] = []
        for part in parts:
            lines += [""] * bool(lines)
            start = taken(part) + len(GAP)
            is_last, room = part is parts[-1], self.width - start
            for row, note in zip(rows, notes, strict=True):
                name, *cells = (self._cell(row[at], widths[at], right[at]) for at in part)
                if cells and len(row[0]) > widths[0]:  # a long name stands above its figures
                    lines += [one.replace(", ", ",") for one in self._wrapped(row[0].replace(",", ", "), "", INDENT)]
                    name = " " * widths[0]
                line = GAP.join([name, *cells])
                if is_last and note and (room >= least or len(note) <= room):
                    first, *rest = self._wrapped(note, " " * start)
                    unseen = sum(map(len, re.findall(r"\x1b\[[\d;]*m", line)))
                    lines += [line + first[len(line) - unseen :], *rest]
                else:
                    lines.append(line.rstrip())
                    lines += self._wrapped(note, INDENT) if is_last and row is not rows[0] else []
        return lines

    def _cell(self, text: str, width: int, is_right: bool) -> str:
        padded = text.rjust(width) if is_right else text.ljust(width)
        return padded.replace(text, self._set_off(text, KINDS[text] or text), 1) if self.has_color and text in KINDS else padded

    def _set_off(self, text: str, kind: str) -> str:
        return f"\x1b[{CODES[kind]}m{text}\x1b[0m" if self.has_color and text and kind in CODES else text


class Template:
    """A report through a template of this folder."""

    def __init__(self, name: str, *, is_escaped: bool) -> None:
        self.name, self.is_escaped = name, is_escaped

    def show(self, document: Document) -> str:
        filters = (markdown_table, plain, fence, kind_of)
        return filled(Path(__file__).parent, self.name, filters, is_escaped=self.is_escaped, document=document)


# Every form of a report, by the ending of its file.
FORMS: Mapping[str, Form] = {
    ".txt": Lines(), ".md": Template("report.md.j2", is_escaped=False), ".html": Template("report.html.j2", is_escaped=True),
}  # fmt: skip


def kind_of(text: str) -> str:
    """Return the kind of a cell's text, "" if it has none."""
    return KINDS.get(text) or (text if text in KINDS else "number" if text.strip("-") and _NUMBER.fullmatch(text) else "")


@cache
def _template(folder: Path, name: str, filters: tuple[Any, ...], is_escaped: bool) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, autoescape=is_escaped, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {one.__name__: one for one in filters}
    environment.tests |= {"of": lambda block, name: type(block).__name__ == name}
    return environment.get_template(name)


def filled(folder: Path, name: str, filters: tuple[Any, ...] = (), *, is_escaped: bool = False, **values: Any) -> str:
    """Return a template of a folder filled with values. Errors: jinja2's, for a missing value."""
    text: str = _template(folder, name, filters, is_escaped).render(values)
    return text.rstrip() + "\n"


# Reports --------------------------------------------------------------------------------------------------------------


class Report:
    """A value that is shown to people, in every form, and written as JSON."""

    endings: tuple[str, ...] = (".json", ".md", ".html")

    def document(self) -> Document:
        """Return what it says."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        raise NotImplementedError

    def __str__(self) -> str:
        return FORMS[".txt"].show(self.document())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, whole or not at all, in the form of the name's ending. Errors: RequestError."""
        self.check_save_path(path)
        form = FORMS.get(Path(path).suffix.lower())
        text = json.dumps(self.to_json(), indent=1) + "\n" if form is None else form.show(self.document())
        write_text(path, text, field="save")

    @classmethod
    def check_save_path(cls, path: str | os.PathLike[str]) -> None:
        """Raise RequestError for a report file of an unknown form, or in a folder that does not exist."""
        if Path(path).suffix.lower() not in cls.endings:
            raise RequestError("unknown format of a report", field="save", value=str(path), allowed=cls.endings)
        if not Path(path).resolve().parent.is_dir():
            raise RequestError("its folder does not exist", field="save", value=str(path))


# Markdown -------------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return a text as plain Markdown of one line: no markup, no mention, no link to a thread."""
    escaped = re.sub(r"([\\`*_{}\[\]>|~])", r"\\\1", " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;"))
    # GitHub makes "@name" a mention and "#12" a link; a zero-width space prevents both and is invisible.
    return re.sub(r"([@#])(?=\w)", "\\1\u200b", escaped)


def fence(text: str, language: str = "") -> str:
    """Return the text in a fence that is longer than every run of backticks in it, so that it can hold other fences."""
    bar = "`" * max(3, _longest_run(text) + 1)
    # Another kind of line break would end a line in Markdown, but not here.
    body = "\n".join(re.split(r"\r\n|\r", text)).rstrip("\n")
    return f"{bar}{language}\n{body}\n{bar}"


def inline(text: str) -> str:
    """Return the text as a code span of one line."""
    flat = " ".join(text.split())
    if not flat:
        return ""
    bar = "`" * (_longest_run(flat) + 1)
    gap = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{bar}{gap}{flat}{gap}{bar}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def cell(text: str) -> str:
    """Return text for a table cell, with escaped bars, also in code spans."""
    return " ".join(text.split()).replace("|", r"\|") if "`" in text else plain(text)


def table(rows: Iterable[Sequence[str]], *head: str) -> str:
    """Return a table whose cells may have code spans."""
    return _table(head, [map(cell, row) for row in rows])


def markdown_table(block: Table) -> str:
    """Return a table of any text."""
    return _table([plain(text) for text in block.head], [map(plain, row) for row in block.rows])


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])


def bullets(texts: Iterable[Any]) -> str:
    """Return a list of lines."""
    return "\n".join(f"- {text}" for text in texts)
