"""Draw how decoding grows with rows, rank and context from bench/results/decode.json: docs/images/decode.svg.

python tools/decode_curves.py            write
python tools/decode_curves.py --check    exit 1 if the picture is another
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trimtab.report.charts import INK, MARGIN, QUIET, WIDTH, Box, Label, Shape, svg

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "images" / "decode.svg"
SHORT_PLACES = 512  # what the other rows' prompts have
LEFT, BAR, GAP = MARGIN + 210, 18, 6
COLORS = {"fused": "#2f6690", "graph": "#9fc5e8", "eager": "#cfd5db", "stock": "#d98e32"}


def way(row: dict[str, Any]) -> str:
    """Return stock, or how trimtab's steps were computed."""
    if row["engine"] == "stock":
        return "stock"
    return "fused" if row["decode"] == "auto" else str(row["decode"])


def panels(rows: list[dict[str, Any]]) -> list[tuple[str, str, list[tuple[str, float, str]]]]:
    """Return (title, unit, bars) with (label, value, colour) a bar."""
    timed = [row for row in rows if "ms" in row and row["model"] == "e4b"]
    resident = [row for row in timed if row["placement"] == "resident" and not row.keys() & {"loaded", "draws"}]

    def bar(label: str, row: dict[str, Any]) -> tuple[str, float, str]:
        return f"{label}, run {row['run']}", row["tok_s"], COLORS[way(row)]

    def adapter(row: dict[str, Any]) -> str:
        return f"rank {row['adapter_rank']}" if row["adapter_rank"] else "no adapter"

    one = [bar(f"{way(r)}, {adapter(r)}", r) for r in resident if r["batch"] == 1]
    many = [
        bar(f"{way(r)}, {r['batch']} rows, {r['adapters'] or 'no'} adapters", r) for r in resident
        if r["batch"] > 1 or (way(r) == "fused" and r["adapter_rank"] == 8)
    ]  # fmt: skip
    long = [bar(f"{way(r)}, {r['context']:,} places", r) for r in timed if r["context"] > SHORT_PLACES]
    loaded = [bar(f"{way(r)}, {r['loaded']} loaded", r) for r in timed if "loaded" in r]
    return [
        ("One row, by adapter", "tokens a second", one),
        ("Rows with adapters of rank 8", "tokens a second of all rows", many),
        ("Length of the context, one row, rank 8", "tokens a second", long),
        ("Adapters on the model, one row with one of them", "tokens a second", loaded),
    ]


def picture(results: dict[str, Any]) -> str:
    """Return the picture as SVG."""
    where = results["environment"]
    found: list[Shape] = [
        Label(MARGIN, 36, "Decoding a Gemma 4 of E4B's size, NF4 with double quantization", 19, INK, bold=True),
        Label(MARGIN, 58, f"{where['gpu']}, random weights; dark: own kernels, light: captured modules, orange: stock", 13, QUIET),
    ]  # fmt: skip
    top = 84.0
    for title, unit, bars in panels(results["rows"]):
        if not bars:
            continue
        found.append(Label(MARGIN, top + 14, f"{title}: {unit}", 14, INK, bold=True))
        top += 24
        scale = (WIDTH - LEFT - MARGIN - 80) / max(value for _, value, _ in bars)
        for label, value, color in bars:
            found.append(Label(LEFT - 8, top + BAR - 5, label, 12, QUIET, anchor="end"))
            found.append(Box(LEFT, top, max(value * scale, 1.0), BAR, color))
            found.append(Label(LEFT + value * scale + 6, top + BAR - 5, f"{value:,.0f}", 12, INK))
            top += BAR + GAP
        top += 14
    return svg(found, top)


def main(arguments: list[str]) -> int:
    """Return 0 if the picture is that of the results."""
    made = picture(json.loads((ROOT / "bench" / "results" / "decode.json").read_text(encoding="utf-8")))
    if "--check" in arguments:
        return int(FILE.read_text(encoding="utf-8") != made)
    FILE.write_text(made, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
