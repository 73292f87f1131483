"""Charts as SVG: shapes laid out in pixels from the top left corner, and the parts of a picture inside a page.

`write_shapes` writes .svg (by hand, the same bytes for the same shapes) or .png (the same shapes through matplotlib). `text` and
`inline_svg` make pictures that take their colours from the page around them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.files import write_text, write_whole

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


# A picture of its own -------------------------------------------------------------------------------------------------


def check_path(path: str | os.PathLike[str], *, field: str = "picture") -> None:
    """Raise RequestError unless an image can have this ending."""
    if Path(path).suffix.lower() not in (".svg", ".png"):
        raise RequestError("a chart is .svg or .png", field=field, value=str(path), allowed=(".svg", ".png"))


def write_shapes(shapes: Sequence[Shape], height: float, path: str | os.PathLike[str]) -> None:
    """Write shapes as .svg or .png, whole or not at all. Errors: RequestError if the place cannot be written."""
    target = Path(path)
    if target.suffix.lower() == ".png":
        write_whole(target, lambda sibling: _png(shapes, height, sibling), field="picture")
        return
    write_text(target, svg(shapes, height), field="picture")


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
            lines.append(f'<text {place} fill="{shape.color}"{weight}>{escape(shape.text, quote=False)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _png(shapes: Sequence[Shape], height: float, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    inch = 100.0  # pixels of the layout; drawn at twice that for sharp text
    figure = Figure(figsize=(WIDTH / inch, height / inch), dpi=2 * inch, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for shape in shapes:
        if isinstance(shape, Box):
            axes.add_patch(Rectangle((shape.left, shape.top), shape.width, shape.height, color=shape.fill, linewidth=0))
        elif isinstance(shape, Stroke):
            ends = [shape.left, shape.left], [shape.top, shape.bottom]
            axes.add_line(Line2D(*ends, color=shape.color, linewidth=1.5))
        else:
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            axes.text(
                shape.left, shape.base, shape.text, fontsize=shape.size * 72 / inch, color=shape.color, ha=align,
                va="baseline", weight="bold" if shape.bold else "normal",
            )  # fmt: skip
    figure.savefig(path, format="png")


# A picture inside a page -----------------------------------------------------------------------------------------------


def text(left: float, base: float, words: str, *, anchor: str = "start") -> str:
    """Return a text with its baseline at `base`."""
    return f'<text x="{left:.1f}" y="{base:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def inline_svg(parts: Sequence[str], width: int, height: int, label: str, *, more: str = "") -> str:
    """Return the parts as one picture. label: for readers who hear the page. more: further attributes."""
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"{more}>{"".join(parts)}</svg>'
