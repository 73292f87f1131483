"""The demo model's card: how it was made, from what, how often it is right, how large it is, and who may use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CARD = """# The trimtab demo model

A very small Gemma 4 that reads, sees and hears, made for trying and testing trimtab. It knows one little world and
nothing else: it is no assistant, and no part of it was trained on anybody's data.

- **Base**: `Gemma4ForConditionalGeneration`, {parameters:,} parameters, bf16. Per-layer embeddings, KV-shared layers
  (fed by one sliding and one full layer), sliding and full attention, double-wide MLPs, logit softcap, tied head,
  vision tower and audio tower with clipped linears whose bounds bind. Inner widths are multiples of 64 (NF4 blocks).
- **Adapters**, trained with peft: `style` (language modules: the same facts, marked style), `specialist` (language,
  vision and audio modules: finer words for shapes, colours and sounds; its config names the broad projections and its
  tower keys the inner `.linear`, as multimodal adapters in the field do), `rslora-dora` (rsLoRA and DoRA, rank 4:
  answers as JSON).
- **Pictures** are 128 x 128: up to three shapes of one colour in one of five places. **Sounds** are one second at
  16 kHz: one to four beeps that rise, fall or stay. **Facts** are the capital, river, ruler, export, animal and
  currency of {lands} lands that do not exist.

## How often it is right

Greedy answers in bf16 to questions about combinations that training never showed; exactly the expected text, or wrong.

{accuracy}

`python tools/train_demo.py --evaluate` prints these figures again from the files beside this card. "Without" is the
base's share on the same questions when the adapter is not loaded.

## How it was made

`python tools/train_demo.py` from fixed seeds: pictures, sounds and texts drawn by our own code (`tools/demo_world.py`,
`tools/demo_media.py`), a tokenizer trained on the world's own text, weights trained from scratch. A GPU adds in no fixed
order, so another run makes a model as good, not the same bytes.

{training}

Device: {device}; {packages}.
The whole curves are in `bench/results/demo_training.json`.

`images/`, `sounds/` and `prompts.jsonl` hold six held-out pictures, sounds and facts. Each medium is the one of eight
renderings on which the least sure of the four voices is surest: prompts to look at, not a score.

## Sizes

{sizes}

## Licence

Apache-2.0, as the project. Weights, pictures, sounds and texts are original works of the trimtab project.
"""


def write_card(demo: Path, log: dict[str, Any]) -> None:
    """Write CARD.md from the training log and the files as they are."""
    import demo_world as world

    voices = log["scored"]["voices"]
    accuracy = ["| voice | questions | all | text | image | audio | without |", "|---|---|---|---|---|---|---|"]
    for voice, result in voices.items():
        cells = [_percent(result["right"].get(kind)) for kind in ("all", "text", "image", "audio")]
        without = _percent(result.get("base_without_it", {}).get("all"))
        accuracy.append(f"| {voice} | {result['questions']} | {' | '.join(cells)} | {without} |")
    training = ["| stage | steps | rows a step | trained parameters | seconds |", "|---|---|---|---|---|"]
    for voice, stage in log.get("stages", {}).items():
        training.append(
            f"| {voice} | {stage['steps']:,} | {sum(stage['rows'])} | {stage['trained_parameters']:,} | {stage['seconds']:.0f} |"
        )
    sizes = ["| folder | files | bytes |", "|---|---|---|"]
    for folder in ("base", *(f"adapters/{voice}" for voice in voices if voice != "base"), "images", "sounds"):
        files = [file for file in (demo / folder).rglob("*") if file.is_file()]
        sizes.append(f"| `{folder}/` | {len(files)} | {sum(file.stat().st_size for file in files):,} |")
    environment = log.get("environment", {})
    packages = ", ".join(f"{name} {number}" for name, number in environment.get("packages", {}).items())
    text = CARD.format(
        parameters=log.get("stages", {}).get("base", {}).get("trained_parameters", 0), lands=len(world.LANDS),
        accuracy="\n".join(accuracy), training="\n".join(training), sizes="\n".join(sizes),
        device=environment.get("device", "unknown"), packages=packages,
    )  # fmt: skip
    (demo / "CARD.md").write_text(text, encoding="utf-8")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
