"""Put the catalogue of known bugs into docs/upstream.md: its table is made from the entries, so that nothing is typed twice.

python tools/upstream_table.py            write
python tools/upstream_table.py --check    exit 1 if the page does not say what the entries say
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trimtab.doctor.catalogue import Entry, read_catalogue  # noqa: E402

PAGE = ROOT / "docs" / "upstream.md"
SLOT = re.compile(r"(<!-- catalogue -->\n).*?(<!-- /catalogue -->)", re.DOTALL)
ROOMS = {
    "A": "bitsandbytes weights under offload", "B": "PEFT on a split base", "C": "Maps and hooks", "D": "Gemma 4",
    "E": "Adapter weights", "F": "Merging", "G": "Others", "H": "Loading", "I": "Found while testing",
}  # fmt: skip


def table() -> str:
    """Return the catalogue as Markdown: one heading and one table a letter."""
    parts = []
    for letter in sorted({entry.bug.id[0] for entry in read_catalogue()}):
        rows = "\n".join(_row(entry) for entry in read_catalogue() if entry.bug.id[0] == letter)
        parts.append(f"### {letter}. {ROOMS[letter]}\n\n| id | bug | fixed in | workaround |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(entry: Entry) -> str:
    bug = entry.bug
    fixes = [f"{affected.package} {affected.fixed_in}" for affected in bug.affected if affected.fixed_in]
    path = f"../trimtab/doctor/catalogue/{entry.path.name}"
    cells = (f"[{bug.id}]({path})", f"{bug.title} ({bug.owner[0]})", " or ".join(fixes) or "-", bug.way_round)
    return "| " + " | ".join(re.sub(r"([|<>_*`])", r"\\\1", cell) if cell[0] != "[" else cell for cell in cells) + " |"


def filled(text: str) -> str:
    """Return the page with its table as the entries have it."""
    return SLOT.sub(lambda slot: f"{slot[1]}{table()}{slot[2]}", text)


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return int(filled(text) != text)
    PAGE.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
