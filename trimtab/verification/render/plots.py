"""Plots of parity reports: lines and bars as inline SVG, with the page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.report.charts import escape, inline_svg, text

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 150, 64, 24, 10
# Of the page's font of 10 px: the height of a line, and the width of a wide letter.
LINE_PX, LETTER_PX = 11, 6.5
DECADES = 8


def lines(
    values: Sequence[float], *, label: str, dashed: float | None = None, dashed_label: str = "", mark: int | None = None,
    mark_label: str = "",
) -> str:  # fmt: skip
    """Return a plot of values by position on a logarithmic axis with 0 at the bottom.

    dashed: a level to draw across (the noise floor). mark: a position to draw a line at (where the answer begins).
    """
    scale = _Log([*values, dashed or 0.0])
    step = (WIDTH - LEFT - 8) / max(1, len(values))
    points = [(LEFT + step * (at + 0.5), scale.y(value)) for at, value in enumerate(values)]
    parts = [_frame(scale)]
    if mark is not None and 0 < mark < len(values):
        x = LEFT + step * mark
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        marked_right = x < (LEFT + WIDTH) / 2  # its label stands on the side with more room
        parts.append(text(x + 4 if marked_right else x - 4, TOP + 10, mark_label, anchor="start" if marked_right else "end"))
    if dashed:
        y = scale.y(dashed)
        parts.append(_across("floor", y))
        parts.append(text(WIDTH - 12, _base_of(y), dashed_label, anchor="end"))
    parts.append(f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    shown = points if len(points) <= 400 else ()
    for (x, y), value, at in zip(shown, values, range(len(values)), strict=False):
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2"><title>{at}: {value:.3g}</title></circle>')
    parts.append(text(LEFT, HEIGHT - 8, "position 0"))
    if len(values) > 1:
        parts.append(text(WIDTH - 8, HEIGHT - 8, str(len(values) - 1), anchor="end"))
    return inline_svg(parts, WIDTH, HEIGHT, label)


def bars(values: Sequence[float], names: Sequence[str], *, label: str, logarithmic: bool, line: float | None = None) -> str:
    """Return a bar for every value, its name in a tooltip. line: a level to draw across."""
    scale = _Log(values) if logarithmic else _Linear([*values, line or 0.0])
    step = (WIDTH - LEFT - 8) / max(1, len(values))
    foot = scale.y(0.0)
    parts = [_frame(scale)]
    for at, (value, name) in enumerate(zip(values, names, strict=True)):
        y = scale.y(value)
        top, size = min(y, foot), max(abs(foot - y), 0.5)
        parts.append(
            f'<rect class="bar" x="{LEFT + step * at + step * 0.1:.2f}" y="{top:.1f}" width="{max(step * 0.8, 0.4):.2f}" '
            f'height="{size:.1f}"><title>{escape(name)}: {value:.3g}</title></rect>'
        )
    if line is not None:
        parts.append(_across("floor", scale.y(line)))
    if names:
        ends = names[:1] if len(names) == 1 else (names[0], names[-1])
        most = int((WIDTH - LEFT - 8) / len(ends) / LETTER_PX) - 2
        parts.append(text(LEFT, HEIGHT - 8, _shortened(ends[0], most)))
        parts += [text(WIDTH - 8, HEIGHT - 8, _shortened(name, most), anchor="end") for name in ends[1:]]
    return inline_svg(parts, WIDTH, HEIGHT, label)


class _Log:
    """A logarithmic axis of at most DECADES decades below its largest value; 0 and smaller values are at the bottom."""

    def __init__(self, values: Sequence[float]) -> None:
        known = [value for value in values if 0 < value < math.inf]
        self.high = math.ceil(math.log10(max(known))) if known else 0
        self.low = max(math.floor(math.log10(min(known))), self.high - DECADES) if known else -1
        if self.low == self.high:
            self.low -= 1

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        if not value > 0:
            return HEIGHT - BOTTOM
        share = (math.log10(value) - self.low) / (self.high - self.low) if value < math.inf else 1.0
        # The lowest decade begins slightly above the bottom, so that the smallest value does not look like 0.
        return HEIGHT - BOTTOM - (0.08 + 0.92 * min(max(share, 0.0), 1.0)) * (HEIGHT - BOTTOM - TOP)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, label) of a few lines of the grid."""
        step = max(1, (self.high - self.low) // 3)
        return [(0.0, "0"), *((10.0**power, f"1e{power}") for power in range(self.low, self.high + 1, step))]


class _Linear:
    """A linear axis from the smallest value (0 at most) to the largest."""

    def __init__(self, values: Sequence[float]) -> None:
        known = [value for value in values if math.isfinite(value)]
        self.low, self.high = min([0.0, *known]), max([0.0, *known])
        if self.low == self.high:
            self.high = 1.0

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, label) of a few lines of the grid."""
        middle = (self.low + self.high) / 2
        return [(value, f"{value:.2g}") for value in dict.fromkeys((self.low, 0.0, middle, self.high))]


def _frame(scale: _Log | _Linear) -> str:
    parts, taken = [], list[float]()
    for value, words in scale.ticks():
        y = scale.y(value)
        parts.append(_across("grid", y))
        if all(abs(y - other) >= LINE_PX for other in taken):  # a label that another one covers says nothing
            taken.append(y)
            parts.append(text(LEFT - 6, y + 3, words, anchor="end"))
    return "".join(parts)


def _base_of(y: float) -> float:
    """Return where the label of a level stands: above it, or below it where the label of a position is above."""
    return y - 4 if y - 4 >= TOP + 10 + LINE_PX else max(y, TOP + 10) + LINE_PX + 1


def _shortened(name: str, most: int) -> str:
    """Return a name whole, or its two ends: the tooltip has all of it."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most // 2 - 2) :]}"


def _across(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 8}" y2="{y:.1f}"/>'
