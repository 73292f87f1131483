"""Put the measured figures into README.md: its tables are made from bench/results, so that no number is typed by hand.

python tools/readme_numbers.py            write
python tools/readme_numbers.py --check    exit 1 if README.md does not say what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SLOT = re.compile(r"(<!-- numbers:(\w+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)
# (heading, key of a row, decimals)
COLUMNS = (
    ("GPU peak GiB", "gpu_peak_gib", 2), ("planned", "gpu_planned_gib", 2), ("host peak GiB", "host_peak_gib", 1),
    ("load s", "load_s", 1), ("first token ms", "ttft_ms", 0), ("with media ms", "ttft_media_ms", 0),
    ("tokens/s", "decode_tok_s", 1),
)  # fmt: skip


def memory(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/memory.json and a line on where it was measured."""
    rows = results["rows"]
    head = ["model", "engine", "placement", "rank", *(heading for heading, *_ in COLUMNS), "logits as stock's"]
    lines = [head, ["---"] * 4 + ["---:"] * len(COLUMNS) + ["---"], *(_row(row, rows) for row in rows)]
    where = results["environment"]
    packages = ", ".join(
        f"{name} {where[name]}"
        for name in ("torch", "transformers", "bitsandbytes", "peft", "accelerate")
        if name in where
    )
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table}\n\n{where['gpu']}, Python {where['python']}, {packages}; context {results['context']}.\n"


def _row(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    label = [row["model"].upper(), row["engine"], row["placement"], str(row["adapter_rank"])]
    if "error" in row:
        return [*label, *([""] * len(COLUMNS)), f"failed: {row['error']}"]
    figures = [f"{row[key]:.{decimals}f}" if key in row else "-" for _, key, decimals in COLUMNS]
    return [*label, *figures, _same(row, rows)]


def _same(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return whether the logits of a text prompt and of one with media are stock's own, all on the GPU, bit for bit."""
    stock = [
        r for r in rows
        if (r["model"], r["engine"], r["placement"], r["adapter_rank"])
        == (row["model"], "stock", "resident", row["adapter_rank"]) and "logits" in r
    ]  # fmt: skip
    if not stock:
        return "not compared"
    if row is stock[0]:
        return "-"
    found = {key: row.get(key) == stock[0][key] for key in ("logits", "media_logits")}
    words = {(True, True): "yes", (True, False): "text yes, media no", (False, True): "text no, media yes"}
    return words.get((found["logits"], found["media_logits"]), "no")


MAKERS = {"memory": memory}


def filled(text: str) -> str:
    """Return the text with every slot filled from the result file of its name."""

    def fill(slot: re.Match[str]) -> str:
        name = slot.group(2)
        file = RESULTS / f"{name}.json"
        if not file.is_file():
            return (
                f"{slot.group(1)}Not measured yet: `make bench` on a machine with a GPU fills this in.\n{slot.group(3)}"
            )
        return slot.group(1) + MAKERS[name](json.loads(file.read_text(encoding="utf-8"))) + slot.group(3)

    return SLOT.sub(fill, text)


def main(arguments: list[str]) -> int:
    """Return 0 if README.md says what the results say."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    found = filled(text)
    if "--check" in arguments:
        if found != text:
            print(
                "README.md does not say what bench/results says; run: python tools/readme_numbers.py", file=sys.stderr
            )
        return int(found != text)
    readme.write_text(found, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
