"""Write the README's table of numbers from the bench results, so that no figure is typed by hand.

python tools/readme_numbers.py            rewrite the table
python tools/readme_numbers.py --check    exit 1 if it is not what the results say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- numbers:memory -->", "<!-- /numbers:memory -->"
PLACEMENTS = {
    ("stock", "resident"): "stock, all on the GPU", ("stock", "towers-cpu"): "stock, towers on the CPU",
    ("trimtab", "resident"): "trimtab, all on the GPU", ("trimtab", "lean"): "trimtab, table gathered, towers streamed",
    ("trimtab", "lean+half-decoder"): "the same, and half of the decoder streamed",
    ("trimtab", "card4"): "trimtab on an imitated 4 GiB card",
}  # fmt: skip


def table() -> str:
    found = json.loads((ROOT / "bench/results/memory.json").read_text(encoding="utf-8"))
    lines = [
        "| model | how | GPU peak GiB (planned) | host peak GiB | load s | first token ms: text / picture + sound |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        name = PLACEMENTS.get((row["engine"], row["placement"]))
        if name and row["adapter_rank"] == 8 and "error" not in row:
            lines.append(line(name, row))
    env = found["environment"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "transformers", "bitsandbytes", "peft"))
    return "\n".join([*lines, "", f"One {env['gpu']}, {versions}; `bench/results/memory.json`."])


def line(name: str, row: dict[str, Any]) -> str:
    planned = f" ({row['gpu_planned_gib']:.2f})" if "gpu_planned_gib" in row else ""
    return (
        f"| {row['model'].upper()} | {name} | {row['gpu_peak_gib']:.2f}{planned} | {row['host_peak_gib']:.2f} | "
        f"{row['load_s']:.1f} | {row['ttft_ms']:.0f} / {row['ttft_media_ms']:.0f} |"
    )


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" in sys.argv:
        return int(wanted != text)
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
