"""Put the table of formats, families and tiers into docs/which-files.md: it says only what the tests of formats load and compare.

python tools/which_files.py            write
python tools/which_files.py --check    exit 1 if the page does not say what the records and tests say
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.quantized_files import FAMILIES, FORMS, TIERS  # noqa: E402
from trimtab.formats.record import packed_bytes, stored_format  # noqa: E402
from trimtab.planning.values.execution import how_computed  # noqa: E402
from trimtab.planning.values.rows import StoredWeights  # noqa: E402

PAGE = ROOT / "docs" / "which-files.md"
SLOT = re.compile(r"(<!-- formats -->\n).*?(<!-- /formats -->)", re.DOTALL)
NAMES = {"llama": "Llama", "qwen3_vl": "Qwen3-VL", "gemma4": "Gemma 4", "qwen3_moe": "Qwen3 MoE", "gemma3n": "Gemma 3n"}
# Formats that other tests load in every tier (tests/engine/loader, tests/engine/formats/test_mobile.py, test_gguf_models.py):
# format -> families.
ELSEWHERE = {
    **dict.fromkeys(("nf4", "nf4-dq", "fp4", "int8"), FAMILIES),
    **dict.fromkeys(("mobile2-row-a8", "mobile4-row-a8", "mobile8-row-a8", "mobile2-row", "mobile4-g256"), ("gemma4",)),
    **dict.fromkeys(("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k"), ("llama", "gemma4")),
}
# Sides of a large weight, for the bits per value.
SHAPE = (4096, 4096)


def table() -> str:
    """Return the table as Markdown, one row a format."""
    formats: dict[str, tuple[str, ...]] = {name: tuple(families) for name, families in ELSEWHERE.items()}
    formats |= {name: FAMILIES for _, _, name in FORMS.values()}
    heads = ("format", "bits", *(NAMES[family] for family in FAMILIES), "on a GPU", "on a CPU")
    lines = [heads, ("---", "---:", *["---"] * (len(heads) - 2))]
    lines += [_row(name, formats[name]) for name in sorted(formats, key=lambda name: (stored_format(name).family, name))]
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{rows}\nall: {', '.join(TIERS)}. table: a table of embeddings, resident or gather.\n"


def _row(name: str, families: tuple[str, ...]) -> tuple[str, ...]:
    is_table = name.startswith("mobile") and not name.endswith("-a8")
    stored = StoredWeights(format_name=name, modules=1, values=1, bytes=1, are_tables=is_table)
    bits = 8 * packed_bytes(SHAPE, name, "bfloat16") / (SHAPE[0] * SHAPE[1])
    tiers = "table" if is_table else "all"
    how = (how_computed(stored, step_mode="fused", is_kept=False), how_computed(stored, step_mode="eager", is_kept=True))
    return (f"`{name}`", f"{bits:.2f}", *(tiers if family in families else "-" for family in FAMILIES), *how)


def filled(text: str) -> str:
    """Return the page with its table as the records have it."""
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
