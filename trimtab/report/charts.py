"""How are charts drawn as SVG, in a file or inside a page?"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.printable import printable
from trimtab.process.files import write_text

WIDTH, MARGIN = 1000, 32
INK, QUIET, PAPER, LINE, OVER = "#1f2933", "#64707d", "#ffffff", "#c0392b", "#f3f5f7"


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    width: float
    height: float
    fill: str


@dataclass(frozen=True)
class Stroke:
    """A vertical line."""

    left: float
    top: float
    bottom: float
    color: str


@dataclass(frozen=True)
class Label:
    """Text with its baseline at `base`; anchor "start", "middle" or "end"."""

    left: float
    base: float
    text: str
    size: float
    color: str
    anchor: str = "start"
    bold: bool = False


Shape = Box | Stroke | Label


def escape(words: str) -> str:
    """Return text of a chart, printable and escaped."""
    return html.escape(printable(words))


# A separate file ------------------------------------------------------------------------------------------------------


def check_path(path: str | os.PathLike[str], *, field: str = "picture") -> None:
    """Raise RequestError unless charts are written in the format of this file ending."""
    if Path(path).suffix.lower() != ".svg":
        raise RequestError("a chart is an .svg file", field=field, value=str(path), allowed=(".svg",))


def write_shapes(shapes: Sequence[Shape], height: float, path: str | os.PathLike[str]) -> None:
    """Write shapes as .svg, whole or not at all. Errors: RequestError if the file cannot be written."""
    write_text(Path(path), svg(shapes, height), field="picture")


def svg(shapes: Sequence[Shape], height: float) -> str:
    """Return the shapes as SVG text."""
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Box):
            size = f'width="{shape.width:.2f}" height="{shape.height:.2f}"'
            lines.append(f'<rect x="{shape.left:.2f}" y="{shape.top:.2f}" {size} fill="{shape.fill}"/>')
        elif isinstance(shape, Stroke):
            place = f'x1="{shape.left:.2f}" x2="{shape.left:.2f}" y1="{shape.top:.2f}" y2="{shape.bottom:.2f}"'
            lines.append(f'<line {place} stroke="{shape.color}" stroke-width="2"/>')
        else:
            place = f'x="{shape.left:.2f}" y="{shape.base:.2f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
            weight = ' font-weight="bold"' if shape.bold else ""
            lines.append(f'<text {place} fill="{shape.color}"{weight}>{html.escape(printable(shape.text), quote=False)}</text>')
    return "\n".join([*lines, "</svg>", ""])


# Inside a page --------------------------------------------------------------------------------------------------------


def text(left: float, base: float, words: str, *, anchor: str = "start") -> str:
    """Return a text with its baseline at `base`."""
    return f'<text x="{left:.1f}" y="{base:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def inline_svg(parts: Sequence[str], width: int, height: int, label: str) -> str:
    """Return the parts as one SVG element. label: for screen readers."""
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
