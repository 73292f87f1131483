"""Peak memory of each case as an SVG bar chart; the same records give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from trimtab.errors import gib
from trimtab.report.charts import inline_svg, text

WIDTH, NAME_WIDTH, VALUE_WIDTH = 920, 330, 90
BAR, GAP, TOP = 13, 3, 26
KINDS = (("gpu_peak_bytes", "GPU"), ("host_peak_bytes", "host"))


def memory_pictures(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (title, SVG) for every measured kind of memory, the GPU's first."""
    charts = []
    for field, name in KINDS:
        rows = [
            (record, nbytes) for record in records if isinstance(nbytes := _peak(record, field), int) and nbytes > 0
        ]
        if rows:
            charts.append((f"Peak of {name} memory", _picture(rows, f"Peak of {name} memory per case")))
    return charts


def _peak(record: Mapping[str, Any], field: str) -> Any:
    memory = record.get("memory")
    return memory.get(field) if isinstance(memory, Mapping) else None


def _picture(rows: Sequence[tuple[Mapping[str, Any], int]], title: str) -> str:
    cases: dict[str, list[tuple[str, int]]] = {}
    for record, nbytes in rows:
        cases.setdefault(str(record.get("case")), []).append((str(record.get("engine")), nbytes))
    largest = max(nbytes for _, nbytes in rows)
    scale = (WIDTH - NAME_WIDTH - VALUE_WIDTH) / largest
    shapes, top = [], float(TOP)
    for case, bars in cases.items():
        shapes.append(text(NAME_WIDTH - 8, top + BAR - 2, case, anchor="end"))
        for engine, nbytes in bars:
            width = max(1.0, nbytes * scale)
            kind = "bar-trimtab" if engine == "trimtab" else "bar-stock"
            shapes.append(
                f'<rect class="{kind}" x="{NAME_WIDTH}" y="{top:.1f}" width="{width:.1f}" height="{BAR}">'
                f"<title>{escape(case)}, {escape(engine)}: {nbytes} bytes</title></rect>"
            )
            shapes.append(text(NAME_WIDTH + width + 6, top + BAR - 2, f"{gib(nbytes)} {engine}"))
            top += BAR + GAP
        top += 2 * GAP
    return inline_svg(shapes, WIDTH, round(top + GAP), title, more=' xmlns="http://www.w3.org/2000/svg"')
