"""What each stage of the demo's training learns from, how long, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import demo_world as world
import torch
from demo_adapters import add_adapter, save_adapter
from demo_data import (
    Ask,
    Media,
    Turn,
    echo_turns,
    encode,
    held_out_asks,
    picture_jobs,
    render,
    render_pictures,
    render_sounds,
    sound_jobs,
    to_patches,
    training_turns,
)
from demo_forward import Batch
from demo_model import build_config, build_model, save_base, train_tokenizer
from demo_training import Schedule, Stage, TrainingSet, train
from demo_world import Voice
from torch.nn import functional

STAGES: tuple[Voice, ...] = world.VOICES
SEEDS: dict[Voice, int] = {"base": 11, "style": 21, "specialist": 31, "rslora-dora": 41}
SCHEDULES: dict[Voice, Schedule] = {
    "base": Schedule(steps=6_500, learning_rate=1.5e-3, clip_at=0.5, hint_weight=0.5, weight_decay=0.02),
    "style": Schedule(steps=1_000, learning_rate=2e-3, warmup_steps=50, evaluate_every=500, weight_decay=0.0),
    "specialist": Schedule(steps=1_400, learning_rate=2e-3, warmup_steps=50, evaluate_every=500, weight_decay=0.0),
    "rslora-dora": Schedule(steps=1_400, learning_rate=2e-3, warmup_steps=50, evaluate_every=500, weight_decay=0.0),
}


@dataclass(frozen=True)
class Sizes:
    """How much is rendered and asked: copies of each fine picture and sound, prompts for each thing."""

    pictures: int = 6
    sounds: int = 16
    prompts: tuple[int, int, int] = (12, 48, 6)
    echoes: int = 6_000


QUICK = Sizes(pictures=1, sounds=1, prompts=(2, 2, 1), echoes=200)
Tell = Callable[[str], None]
Report = Callable[[dict[str, Any]], None]


def training_media(sizes: Sizes) -> Media:
    """Return every picture and sound that may be trained on, rendered."""
    seen = [picture for picture in world.pictures() if not world.is_held_out(picture)]
    heard = [sound for sound in world.sounds() if not world.is_held_out(sound)]
    return render(seen, heard, sizes.pictures, sizes.sounds, first_seed=0)


def training_set(voice: Voice, media: Media, tokenizer: Any, sizes: Sizes) -> TrainingSet:
    """Return the prompts of a voice over the rendered media."""
    things: dict[str, list[world.Thing]] = {
        "image": [picture for picture in world.pictures() if not world.is_held_out(picture)],
        "audio": [sound for sound in world.sounds() if not world.is_held_out(sound)],
        "text": [fact for fact in world.facts() if not world.is_held_out(fact)],
    }
    seed = SEEDS[voice]
    tables = {
        kind: encode(tokenizer, training_turns(of_kind, voice, count, seed + number), count)
        for number, ((kind, of_kind), count) in enumerate(zip(things.items(), sizes.prompts))
    }
    echoes = encode(tokenizer, echo_turns(sizes.echoes, seed), 1) if voice == "base" else None
    return TrainingSet(media, tables, echoes)


def held_out_batch(asks: list[Ask], voice: Voice, tokenizer: Any, width: int, device: torch.device) -> Batch:
    """Return the scored questions of a voice as one batch with the right answers in it."""
    ordered = sorted(asks, key=lambda ask: ("image", "audio", "text").index(ask.kind))
    table = encode(tokenizer, [Turn(ask.question.text, ask.answer(voice), ask.kind) for ask in ordered], 1)
    images, sounds = picture_jobs(ordered), sound_jobs(ordered)
    pixels = to_patches(torch.from_numpy(render_pictures(images)))
    features = torch.from_numpy(render_sounds(sounds)).float()
    ids = functional.pad(table.ids, (0, width - table.ids.shape[1]))
    named = (torch.zeros(len(images), 6, dtype=torch.long), torch.zeros(len(sounds), 5, dtype=torch.long))
    return Batch(*(t.to(device) for t in (ids, table.answer_start, table.answer_tokens, pixels, features, *named)))


@dataclass(frozen=True)
class Place:
    """Where a run reads and writes: the demo's folder, the scratch folder of unfinished stages, the device."""

    demo: Path
    work: Path
    device: torch.device

    def folder(self, voice: Voice) -> Path:
        return self.demo / "base" if voice == "base" else self.demo / "adapters" / voice

    def is_done(self, voice: Voice) -> bool:
        name = "config.json" if voice == "base" else "adapter_config.json"
        return (self.folder(voice) / name).exists()


def run_stage(
    voice: Voice, place: Place, media: Media, sizes: Sizes, *, steps: int | None, report: Report, say: Tell
) -> dict[str, Any]:
    """Train one stage and write what it makes; return its log."""
    from transformers import AutoTokenizer

    schedule = SCHEDULES[voice]
    if steps is not None:
        schedule = replace(schedule, steps=steps, warmup_steps=min(schedule.warmup_steps, max(1, steps // 5)))
    tokenizer = train_tokenizer() if voice == "base" else AutoTokenizer.from_pretrained(place.demo / "base")
    gemma, model = _starting_point(voice, place, tokenizer)
    data = training_set(voice, media, tokenizer, sizes).to(place.device)
    held_out = held_out_batch(held_out_asks(voice), voice, tokenizer, data.width, place.device)
    state_file = place.work / f"{voice}.state.pt"
    log = train(gemma, Stage(data, [held_out], schedule, SEEDS[voice], state_file, report, say))
    log["trained_parameters"] = sum(p.numel() for p in gemma.parameters() if p.requires_grad)
    if voice == "base":
        save_base(gemma, tokenizer, place.folder(voice))
    else:
        save_adapter(model, voice, place.folder(voice))
    return log


def _starting_point(voice: Voice, place: Place, tokenizer: Any) -> tuple[Any, Any]:
    """Return (the Gemma model, the model to save): the same for the base, a PeftModel around it for an adapter."""
    if voice == "base":
        gemma = build_model(build_config(tokenizer), SEEDS[voice]).to(place.device)
        return gemma, gemma
    from transformers import Gemma4ForConditionalGeneration

    gemma = Gemma4ForConditionalGeneration.from_pretrained(place.demo / "base", dtype=torch.float32).to(place.device)
    return gemma, add_adapter(gemma, voice, SEEDS[voice])
