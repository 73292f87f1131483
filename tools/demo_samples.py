"""The demo's sample pictures, sounds and prompts: six of each kind, held out of training, with the right answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import demo_world as world
from demo_data import Ask
from demo_media import draw, play, write_wav

SAMPLES = 6
SAMPLE_SEED = 2_000_000


def sample_asks() -> list[Ask]:
    """Return six pictures, six sounds and six facts, all held out, as unlike each other as a seed finds them."""
    rng = random.Random(world.SPLIT_SEED + 2)
    asks: list[Ask] = []
    for things, first, second in (
        (list(world.pictures()), "shape", "colour"), (list(world.sounds()), "pitch", "motion"),
        (list(world.facts()), "relation", "land"),
    ):  # fmt: skip
        held_out = [thing for thing in things if world.is_held_out(thing)]
        rng.shuffle(held_out)
        chosen: list[Any] = []
        for _ in range(SAMPLES):

            def newness(thing: Any) -> tuple[int, int]:
                seen = [getattr(other, first) for other in chosen], [getattr(other, second) for other in chosen]
                return (-seen[0].count(getattr(thing, first)), -seen[1].count(getattr(thing, second)))

            fresh = [thing for thing in held_out if thing.combination not in {other.combination for other in chosen}]
            chosen.append(max(fresh, key=newness))
        for number, thing in enumerate(chosen):
            questions = [question for question in world.questions(thing) if question.about in ("all", "fact")]
            asks.append(Ask(questions[number % len(questions)], SAMPLE_SEED))
    return asks


def write_samples(demo: Path) -> None:
    """Write images/, sounds/ and prompts.jsonl: one line a prompt, with the right answer of the base and each adapter."""
    (demo / "images").mkdir(parents=True, exist_ok=True)
    (demo / "sounds").mkdir(parents=True, exist_ok=True)
    lines = []
    counts = dict.fromkeys(("image", "audio", "text"), 0)
    for ask in sample_asks():
        counts[ask.kind] += 1
        name = f"{ask.kind}_{counts[ask.kind]}"
        line: dict[str, Any] = {"id": name, "kind": ask.kind, "prompt": ask.question.text}
        if ask.kind == "image":
            line["image"] = f"images/{name}.png"
            draw(ask.question.thing, ask.seed).save(demo / line["image"], optimize=True)
        elif ask.kind == "audio":
            line["audio"] = f"sounds/{name}.wav"
            write_wav(demo / line["audio"], play(ask.question.thing, ask.seed))
        line["answers"] = {voice: ask.answer(voice) for voice in world.VOICES}
        lines.append(json.dumps(line))
    (demo / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
