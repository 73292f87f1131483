"""Put the tables of formats and families into docs/which-files.md: they say what tests load and compare, and what was measured.

python tools/which_files.py            write
python tools/which_files.py --check    exit 1 if the page does not say what the records and tests say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.formats import BUDGETS  # noqa: E402
from tests import gguf_files, pico  # noqa: E402
from tests.engine.loader.test_load import QUANTS, STORED  # noqa: E402
from tests.long_runs import FIRST  # noqa: E402
from tests.quantized_files import FAMILIES, FORMS, TIERS  # noqa: E402
from trimtab.engine.families import families  # noqa: E402
from trimtab.formats.record import packed_bytes, stored_format  # noqa: E402
from trimtab.planning.values.execution import how_computed  # noqa: E402

PAGE = ROOT / "docs" / "which-files.md"
SLOT = re.compile(r"(<!-- (formats|families|speeds) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
NAMES = {
    "gemma4": "Gemma 4", "gemma4_moe": "Gemma 4 with experts", "gemma3": "Gemma 3", "gemma3n": "Gemma 3n", "gemma2": "Gemma 2",
    "gemma": "Gemma 1",
    "llama": "Llama", "mistral3": "Mistral 3", "ministral3": "Ministral 3", "mixtral": "Mixtral", "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5", "qwen3_vl": "Qwen3-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_moe": "Qwen3 MoE", "phi3": "Phi-3 and 4",
    "olmo2": "OLMo 2", "olmo3": "OLMo 3", "glm": "GLM", "glm4": "GLM-4", "granite": "Granite", "gpt_oss": "gpt-oss",
    "seed_oss": "Seed-OSS", "smollm3": "SmolLM3", "qwen2": "Qwen2, Qwen2.5",
    "llava": "LLaVA", "internvl": "InternVL", "qwen2_moe": "Qwen2 MoE", "qwen3_5_moe": "Qwen3.5 MoE", "glm4_moe": "GLM-4.5",
    "qwen3_vl_moe": "Qwen3-VL MoE",
}  # fmt: skip
# Rows of bench/results/families.json, formats.json and experts.json.
MEASURED = {
    "qwen3": "qwen3-8b", "llama": "llama-3-8b", "gemma3": "gemma3-4b", "qwen3_vl": "qwen3-vl-4b", "qwen3_5": "qwen3.5-9b",
    "gemma4": "e4b", "gemma4_moe": "26b-a4b", "qwen3_moe": "qwen3-30b-a3b", "qwen3_5_moe": "qwen3.5-35b-a3b",
}  # fmt: skip
# Formats that other tests load, in every tier but of PARTLY: test_mobile.py and test_gguf_models.py in tests/engine/formats.
# Format -> families.
PARTLY = {"fp4-dq": "resident, stream"}
ELSEWHERE = {
    **dict.fromkeys(STORED, FIRST),
    **dict.fromkeys((name for name in QUANTS if name != "none"), pico.FAMILIES),
    **dict.fromkeys((name.lower() for form in gguf_files.FORMS.values() for name in form), ("llama", "gemma4")),
    **dict.fromkeys(("mobile2-row-a8", "mobile4-row-a8", "mobile8-row-a8", "mobile2-row", "mobile4-g256"), ("gemma4",)),
}
OTHERS = {
    "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_5": "Qwen3.5", "qwen3_moe": "Qwen3 MoE",
    "qwen3_5_moe": "Qwen3.5 MoE",
}  # fmt: skip
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
    others = ", ".join(OTHERS[name] for name in gguf_files.FAMILIES if name in OTHERS)
    return (
        f"{rows}\nall: {', '.join(TIERS)}. table: a table of embeddings, resident or gather.\n"
        f"Types of GGUF files (`q4_0` to `f32`) are loaded in {others} as well.\n"
    )


def _row(name: str, families: tuple[str, ...]) -> tuple[str, ...]:
    is_table = name.startswith("mobile") and not name.endswith("-a8")
    bits = 8 * packed_bytes(SHAPE, name, "bfloat16") / (SHAPE[0] * SHAPE[1])
    tiers = "table" if is_table else PARTLY.get(name, "all")
    how = [
        how_computed(name, are_tables=is_table, step_mode=mode, is_kept=mode == "eager") for mode in ("fused", "eager")
    ]  # fmt: skip
    return (f"`{name}`", f"{bits:.2f}", *(tiers if family in families else "-" for family in FAMILIES), *how)


def family_table() -> str:
    """Return the table of families as Markdown: what computes their steps and prompts, why, and how fast it was."""
    rows, where = _measured()
    lines = [("family", "modules", "steps and prompts", "tokens/s"), ("---", "---", "---", "---:")]
    for name, label in NAMES.items():
        class_name, config = pico._CONFIGS.get(name) or pico._OTHERS[name]
        with torch.device("meta"):
            model = getattr(transformers, class_name)._from_config(config())
        why = families.why_not(model)
        row = rows.get(MEASURED.get(name, ""))
        speed = "-" if row is None else f"{row['tok_s']:.0f} ({row['model']})"
        text = f"captured modules: {why}" if why is not None else "own kernels"
        layers = [] if why is not None else families.describe(model).layers
        if any(layer.experts is not None and not layer.experts.has_mixture for layer in layers):
            text += ", experts by their module"
        lines.append((label, f"`{type(model.get_decoder()).__name__}`", text, speed))
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        + f"\n{where}, 4-bit weights, one row, an adapter on. -: not measured.\n"
    )


def speed_table() -> str:
    """Return the table of measured formats as Markdown."""
    result = json.loads((ROOT / "bench" / "results" / "formats.json").read_text())
    lines = [("model", "format", "budget", "tokens/s", "first of 512 tokens", "GPU"), ("---", "---", "---", "---:", "---:", "---")]
    lines += [
        (
            row["model"] + " *" * ("earlier" in row), f"`{row['form']}`", BUDGETS.get(f"{row['model']}:{row['form']}", "all"),
            f"{row['tok_s']:.0f}", f"{row['first_ms']:.1f} ms", row.get("gpu", result["environment"]["gpu"]),
        )
        for row in result["rows"] if "tok_s" in row
    ]  # fmt: skip
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n*: an earlier call.\n"


def _measured() -> tuple[dict[str, dict[str, object]], str]:
    results = [json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text()) for name in ("formats", "families", "experts")]
    gpus = {one["environment"]["gpu"] for one in results}
    own = {"engine": "trimtab", "form": "nf4-dq"}
    rows = [row | _of_case(row) for one in results for row in reversed(one["rows"]) if "tok_s" in row and "card_gib" not in row]
    return {row["model"]: row for row in rows if {**own, **row}.items() >= own.items()}, " and ".join(sorted(gpus))


def _of_case(row: dict[str, object]) -> dict[str, object]:
    """Return the model and the form of a row of experts.json, "MODEL:FORM" or more where the card is smaller."""
    model, _, form = str(row.get("case", "")).partition(":")
    return {"model": model, "form": form} if form else {}


def filled(text: str) -> str:
    """Return the page with its tables as the records have them."""
    made = {"formats": table, "families": family_table, "speeds": speed_table}
    return SLOT.sub(lambda slot: f"{slot[1]}{made[slot[2]]()}{slot[3]}", text)


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return int(filled(text) != text)
    PAGE.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
