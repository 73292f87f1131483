"""How does the chart of a benchmark show each figure, engine, spread and limit?"""

from __future__ import annotations

import os

from trimtab.benchmark import stats
from trimtab.benchmark.report import OURS, BenchReport, Side, number
from trimtab.report import charts
from trimtab.report.charts import INK, LINE, MARGIN, OVER, PAPER, QUIET, WIDTH, Box, Label, Shape, Stroke

BAR_HEIGHT, BAR_GAP, PANEL_GAP = 24, 8, 30
LEFT = MARGIN + 90
# Space for the numbers to the right of the longest bar.
BAR_WIDTH = WIDTH - LEFT - MARGIN - 380
COLORS = {OURS: "#2f6690", "stock": "#d98e32", "eager": "#9fc5e8"}
WHISKER = 2.0


def draw(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Write the chart of a report as .svg. Errors: RequestError for another ending or a path that cannot be written."""
    charts.check_path(path, field="--picture")
    charts.write_shapes(*layout(report), path)


def layout(report: BenchReport) -> tuple[list[Shape], float]:
    """Return the shapes of the chart and its height in pixels."""
    request = report.plan.request
    shapes: list[Shape] = [
        Label(MARGIN, 40, f"{report.plan.model_class} on {report.plan.execution_device}", 20, INK, bold=True),
        Label(
            MARGIN, 62,
            f"{request.quant}, {request.dtype}, {f'adapter {report.adapter}' if report.adapter else 'no adapter'}; "
            f"bars: median of {report.runs}, lines: least to most", 13, QUIET,
        ),
    ]  # fmt: skip
    top = 92.0
    sides = (report.ours, report.other)
    for side in sides:
        if side.failure is not None:
            words = str(side.failure).splitlines()[0]
            words = words if len(words) <= 110 else words[:107] + "..."
            shapes.append(Label(MARGIN, top, f"{side.name} failed: {words}", 13, LINE))
            top += 24
    for name, unit, _ in stats.FIGURES:
        if any(name in side.spreads for side in sides):
            drawn, top = _panel(name, unit, sides, top)
            shapes += drawn
    return shapes, top


def _panel(name: str, unit: str, sides: tuple[Side, ...], top: float) -> tuple[list[Shape], float]:
    spreads = {side.name: side.spreads[name] for side in sides if name in side.spreads}
    limits = {s.name: s.limit.tok_s for s in sides if name == "decode_tok_s" and s.limit and s.name in spreads}
    largest = max(spread.most for spread in spreads.values())
    # A limit far above every bar would make all bars invisible: it is written as text, and drawn at the end of the
    # panel.
    reach = max([largest, *(limit for limit in limits.values() if limit <= 20 * largest)])
    scale = BAR_WIDTH / (reach or 1.0)
    shapes: list[Shape] = [Label(MARGIN, top + 12, f"{stats.NAMES[name]}, {unit}", 15, INK, bold=True)]
    at = top + 24
    for side in sides:
        shapes.append(Label(LEFT - 10, at + BAR_HEIGHT / 2 + 4, side.name, 13, INK, anchor="end"))
        shapes.append(Box(LEFT, at, BAR_WIDTH, BAR_HEIGHT, OVER))
        spread = spreads.get(side.name)
        words = "not measured"
        if spread is not None:
            least, most = LEFT + spread.least * scale, LEFT + spread.most * scale
            middle = at + BAR_HEIGHT / 2
            shapes += [
                Box(LEFT, at, spread.median * scale, BAR_HEIGHT, COLORS[side.name]),
                Box(least, middle - WHISKER, max(most - least, WHISKER), 2 * WHISKER, PAPER),
                Box(least, middle - WHISKER / 2, max(most - least, WHISKER), WHISKER, INK),
            ]
            words = f"{number(spread.median)} ({number(spread.least)} to {number(spread.most)})"
        limit = limits.get(side.name)
        if limit is not None:
            line = LEFT + min(limit * scale, BAR_WIDTH)
            shapes.append(Stroke(line, at - 3, at + BAR_HEIGHT + 3, LINE))
            words += f", limit {number(limit)}{' (not drawn to scale)' if limit * scale > BAR_WIDTH + 1 else ''}"
        shapes.append(Label(LEFT + BAR_WIDTH + 10, at + BAR_HEIGHT / 2 + 4, words, 12, QUIET))
        at += BAR_HEIGHT + BAR_GAP
    return shapes, at - BAR_GAP + PANEL_GAP
