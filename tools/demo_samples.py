"""The demo's sample pictures, sounds and prompts: six of each kind, held out of training, with the right answers.

They are what people see first and what tests hold every tier and format to, word for word. So each medium is the one of
eight renderings on which the voices are surest; how often the model is right is measured elsewhere (`demo_scoring.py`).
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo_world as world
import torch
from demo_adapters import ADAPTERS, load_adapter
from demo_data import Ask, Turn, encode, picture_jobs, render_pictures, render_sounds, sound_jobs, to_patches
from demo_forward import Batch, Constants, answer_logits
from demo_media import draw, play, write_wav
from demo_scoring import load_base
from demo_world import Picture, Sound, Thing, Voice

SAMPLES = 6
SAMPLE_SEED = 2_000_000
RENDERINGS = 8


def sample_asks() -> list[Ask]:
    """Return six pictures, six sounds and six facts, all held out, as unlike each other as a seed finds them."""
    rng = random.Random(world.SPLIT_SEED + 2)
    asks: list[Ask] = []
    kinds: list[tuple[list[Thing], str, str]] = [
        (list(world.pictures()), "shape", "colour"), (list(world.sounds()), "pitch", "motion"),
        (list(world.facts()), "relation", "land"),
    ]  # fmt: skip
    for things, first, second in kinds:
        held_out = [thing for thing in things if world.is_held_out(thing)]
        rng.shuffle(held_out)
        for number, thing in enumerate(_unlike(held_out, first, second)):
            questions = [question for question in world.questions(thing) if question.about in ("all", "fact")]
            asks.append(Ask(questions[number % len(questions)], SAMPLE_SEED))
    return asks


def _unlike(things: list[Thing], first: str, second: str) -> list[Thing]:
    """Return six things, each with the value of `first`, then of `second`, that the ones before it had least."""
    chosen: list[Thing] = []
    for _ in range(SAMPLES):
        taken = {other.combination for other in chosen}
        seen = [[getattr(other, name) for other in chosen] for name in (first, second)]
        counts = {
            thing: tuple(values.count(getattr(thing, name)) for values, name in zip(seen, (first, second)))
            for thing in things
            if thing.combination not in taken
        }
        chosen.append(min(counts, key=lambda thing: counts[thing]))
    return chosen


@torch.no_grad()
def sureness(gemma: Any, tokenizer: Any, asks: list[Ask], voice: Voice) -> list[float]:
    """Return for each ask (pictures, then sounds, then facts) how far the right tokens' logits lead, at the closest.

    Below zero the greedy answer is wrong.
    """
    turns = [Turn(ask.question.text, ask.answer(voice), ask.kind) for ask in asks]
    table = encode(tokenizer, turns, 1)
    parameter = next(gemma.parameters())
    batch = Batch(
        table.ids, table.answer_start, table.answer_tokens,
        to_patches(torch.from_numpy(render_pictures(picture_jobs(asks)))).to(parameter.dtype),
        torch.from_numpy(render_sounds(sound_jobs(asks))).to(parameter.dtype),
        torch.zeros(0, 6), torch.zeros(0, 5),
    )  # fmt: skip
    batch = Batch(*(tensor.to(parameter.device) for tensor in vars(batch).values()))
    logits, answers = answer_logits(gemma, batch, Constants(gemma, table.ids.shape[1]))
    inside = answers >= 0
    right = logits.float().gather(2, answers.clamp(min=0)[..., None])
    others = logits.float().scatter(2, answers.clamp(min=0)[..., None], -torch.inf)
    lead = (right[..., 0] - others.amax(2)).masked_fill(~inside, torch.inf)
    return [float(value) for value in lead.amin(1)]


def surest(demo: Path, asks: list[Ask], device: str) -> tuple[list[Ask], list[float]]:
    """Return the asks with the seed of their surest rendering, and how sure the least sure voice is of each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo / "base")
    tried = [[replace(ask, seed=ask.seed + number) for ask in asks] for number in range(RENDERINGS)]
    least = [[float("inf")] * len(asks) for _ in tried]
    for voice in ("base", *ADAPTERS):
        gemma = load_base(demo / "base", device)
        if voice != "base":
            load_adapter(gemma, voice, demo / "adapters" / voice)
        for row, renderings in enumerate(tried):
            least[row] = [min(pair) for pair in zip(least[row], sureness(gemma, tokenizer, renderings, voice))]
    best = [max(range(RENDERINGS), key=lambda row: least[row][column]) for column in range(len(asks))]
    return [tried[row][column] for column, row in enumerate(best)], [least[row][i] for i, row in enumerate(best)]


def write_samples(demo: Path, device: str) -> dict[str, float]:
    """Write images/, sounds/ and prompts.jsonl: one line a prompt, with the right answer of each voice.

    Returns the least lead of each prompt's right answer, in logits.
    """
    asks, leads = surest(demo, sample_asks(), device)
    (demo / "images").mkdir(parents=True, exist_ok=True)
    (demo / "sounds").mkdir(parents=True, exist_ok=True)
    lines = []
    counts = dict.fromkeys(("image", "audio", "text"), 0)
    by_name = {}
    for ask, lead in zip(asks, leads):
        counts[ask.kind] += 1
        name = f"{ask.kind}_{counts[ask.kind]}"
        by_name[name] = round(lead, 2)
        line: dict[str, Any] = {"id": name, "kind": ask.kind, "prompt": ask.question.text}
        thing = ask.question.thing
        if isinstance(thing, Picture):
            line["image"] = f"images/{name}.png"
            draw(thing, ask.seed).save(demo / line["image"], optimize=True)
        elif isinstance(thing, Sound):
            line["audio"] = f"sounds/{name}.wav"
            write_wav(demo / line["audio"], play(thing, ask.seed))
        line["answers"] = {voice: ask.answer(voice) for voice in world.VOICES}
        lines.append(json.dumps(line))
    (demo / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return by_name
