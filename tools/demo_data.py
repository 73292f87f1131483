"""The demo world as tensors: every prompt as token ids, every picture and sound rendered once and kept on the device.

A batch is rows of pictures, then sounds, then text, right-padded to one width. Nothing about its shape depends on its
content, so that one step of training can be recorded as a CUDA graph and replayed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import demo_world as world
import numpy as np
import torch
from demo_media import PIXELS, draw, play
from demo_model import build_feature_extractor, build_image_processor
from demo_world import Fact, Picture, Question, Sound, Thing, Voice

IMAGE_TOKENS, AUDIO_TOKENS = 64, 25
PATCH, PATCHES = 8, (PIXELS // 8) ** 2
ANSWER_TOKENS = 36
EVALUATION_SEED = 1_000_000
# How many values each attribute has, in the order of `labels`.
PICTURE_CLASSES = (len(world.SHAPES), len(world.COLOURS), len(world.PLACES), len(world.PICTURE_COUNTS), 2, 2)
SOUND_CLASSES = (len(world.PITCHES), len(world.SOUND_COUNTS), len(world.MOTIONS), 2, 2)


@dataclass(frozen=True)
class Turn:
    """One prompt before tokenizing: what is asked, what is answered, and how the question is dressed."""

    question: str
    answer: str
    kind: str
    media_first: bool = True
    system: str = ""
    earlier: tuple[str, str] | None = None


def prompt_text(turn: Turn) -> str:
    """Return the prompt as the chat template and the processor together would write it, up to the model's turn."""
    marker = {
        "text": "", "image": "<|image>" + "<|image|>" * IMAGE_TOKENS + "<image|>",
        "audio": "<|audio>" + "<|audio|>" * AUDIO_TOKENS + "<audio|>",
    }[turn.kind]  # fmt: skip
    text = "<bos>"
    if turn.system:
        text += f"<|turn>system\n{turn.system}<turn|>\n"
    if turn.earlier:
        text += f"<|turn>user\n{turn.earlier[0]}<turn|>\n<|turn>model\n{turn.earlier[1]}<turn|>\n"
    body = marker + turn.question if turn.media_first else turn.question + marker
    return f"{text}<|turn>user\n{body}<turn|>\n<|turn>model\n"


@dataclass
class PromptTable:
    """Prompts of one kind: ids [P, S], answer_start [P] (first answer token), answer_tokens [P] (with the closing one).

    `rows` gives for each thing the rows of its prompts: row `thing * per_thing + k`.
    """

    ids: torch.Tensor
    answer_start: torch.Tensor
    answer_tokens: torch.Tensor
    per_thing: int

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ids[rows], self.answer_start[rows], self.answer_tokens[rows]

    def to(self, device: torch.device) -> PromptTable:
        ids, start, tokens = (tensor.to(device) for tensor in (self.ids, self.answer_start, self.answer_tokens))
        return PromptTable(ids, start, tokens, self.per_thing)


def encode(tokenizer: Any, turns: Sequence[Turn], per_thing: int) -> PromptTable:
    """Return the turns as token ids, right-padded with 0 to the longest."""
    backend = tokenizer.backend_tokenizer
    prompts = backend.encode_batch([prompt_text(turn) for turn in turns], add_special_tokens=False)
    answers = backend.encode_batch([turn.answer + "<turn|>" for turn in turns], add_special_tokens=False)
    width = max(len(p.ids) + len(a.ids) for p, a in zip(prompts, answers))
    ids = np.zeros((len(turns), width), np.int64)
    for row, (prompt, reply) in enumerate(zip(prompts, answers)):
        whole = prompt.ids + reply.ids
        ids[row, : len(whole)] = whole
    tokens = torch.tensor([len(reply.ids) for reply in answers])
    assert int(tokens.max()) <= ANSWER_TOKENS, int(tokens.max())
    return PromptTable(torch.from_numpy(ids), torch.tensor([len(p.ids) for p in prompts]), tokens, per_thing)


def training_turns(things: Sequence[Thing], voice: Voice, per_thing: int, seed: int) -> list[Turn]:
    """Return `per_thing` prompts for each thing.

    Half of them ask for the whole, one in five puts the medium last, one in ten has a system turn, and one text in ten
    follows another question.
    """
    rng = random.Random(seed)
    facts = [thing for thing in things if isinstance(thing, Fact)]
    turns = []
    for thing in things:
        asked = world.questions(thing)
        whole = [question for question in asked if question.about in ("all", "fact")]
        for _ in range(per_thing):
            question = rng.choice(whole if rng.random() < 0.5 else asked)
            earlier = None
            if facts and rng.random() < 0.1:
                first = world.questions(rng.choice(facts))[0]
                earlier = (first.text, world.answer(first, voice))
            system = rng.choice(world.SYSTEM_PROMPTS) if rng.random() < 0.1 else ""
            media_first = rng.random() < 0.8
            reply = world.answer(question, voice)
            turns.append(Turn(question.text, reply, question.kind, media_first, system, earlier))
    return turns


def echo_turns(count: int, seed: int) -> list[Turn]:
    """Return prompts that ask to repeat words, and the small talk."""
    rng = random.Random(seed)
    words = world.echo_words()
    talk = [Turn(question, reply, "text") for question, reply in world.SMALL_TALK.items()]
    turns = [talk[number % len(talk)] for number in range(count // 10)]
    for _ in range(count - len(turns)):
        phrase = " ".join(rng.choices(words, k=rng.randint(1, 7)))
        turns.append(Turn(f"Repeat: {phrase}", phrase, "text"))
    return turns


@dataclass
class Media:
    """Rendered pictures [N, 3, 128, 128] (uint8) and sounds [M, 99, 128] (float16 features), which thing each is, and
    the numbers of its attributes."""

    pictures: torch.Tensor
    picture_things: torch.Tensor
    picture_labels: torch.Tensor
    sounds: torch.Tensor
    sound_things: torch.Tensor
    sound_labels: torch.Tensor

    def to(self, device: torch.device) -> Media:
        return Media(*(tensor.to(device) for tensor in vars(self).values()))


def render(pictures: Sequence[Picture], sounds: Sequence[Sound], picture_copies: int, sound_copies: int, first_seed: int) -> Media:
    """Return every thing rendered the given number of times, on as many processes as there are cores."""
    drawn = [(number, seed) for number in range(len(pictures)) for seed in range(picture_copies)]
    played = [(number, seed) for number in range(len(sounds)) for seed in range(sound_copies)]
    images = _in_parallel(render_pictures, [(pictures[n], first_seed + seed) for n, seed in drawn])
    features = _in_parallel(render_sounds, [(sounds[n], first_seed + seed) for n, seed in played])
    return Media(
        torch.from_numpy(images), torch.tensor([n for n, _ in drawn]),
        torch.tensor([labels(pictures[n]) for n, _ in drawn]),
        torch.from_numpy(features), torch.tensor([n for n, _ in played]),
        torch.tensor([labels(sounds[n]) for n, _ in played]),
    )  # fmt: skip


def labels(thing: Picture | Sound) -> list[int]:
    """Return the number of each attribute of a thing, fine ones last."""
    if isinstance(thing, Picture):
        named = (list(world.SHAPES).index(thing.shape), list(world.COLOURS).index(thing.colour))
        return [*named, world.PLACES.index(thing.place), thing.count - 1, thing.shade, thing.fill]
    pitch, motion = list(world.PITCHES).index(thing.pitch), world.MOTIONS.index(thing.motion)
    return [pitch, thing.count - 1, motion, thing.half, thing.timbre]


def render_pictures(jobs: Sequence[tuple[Picture, int]]) -> np.ndarray:
    """Return uint8 [N, 3, 128, 128]."""
    return np.stack([np.asarray(draw(picture, seed)).transpose(2, 0, 1) for picture, seed in jobs])


def render_sounds(jobs: Sequence[tuple[Sound, int]]) -> np.ndarray:
    """Return the feature extractor's log-mel frames as float16 [N, 99, 128]."""
    extractor = build_feature_extractor()
    return np.stack([
        extractor([play(sound, seed)], return_tensors="np")["input_features"][0].astype(np.float16)
        for sound, seed in jobs
    ])  # fmt: skip


def _in_parallel(work: Callable[[Sequence[Any]], np.ndarray], jobs: Sequence[Any]) -> np.ndarray:
    cores = os.cpu_count() or 1
    if cores < 4 or len(jobs) < 2000:
        return work(jobs)
    workers = min(8, cores // 2)
    size = -(-len(jobs) // (workers * 2))
    chunks = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    # Each worker would otherwise start as many threads as there are cores.
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            return np.concatenate(list(pool.map(work, chunks)))
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


def to_patches(images: torch.Tensor) -> torch.Tensor:
    """Return float32 patches [B, 256, 192] of uint8 images [B, 3, 128, 128], as Gemma 4's image processor cuts them."""
    batch, channels, height, width = images.shape
    grid = images.float().div(255).reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, PATCH * PATCH * channels)


def patch_positions() -> torch.Tensor:
    """Return the (x, y) of each patch, [256, 2]."""
    side = PIXELS // PATCH
    axis = torch.arange(side)
    return torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(PATCHES, 2)


@dataclass(frozen=True)
class Ask:
    """One scored question: its medium is rendered with `seed`; `answers` has the right answer in each voice."""

    question: Question
    seed: int

    def answer(self, voice: Voice) -> str:
        return world.answer(self.question, voice)

    @property
    def kind(self) -> str:
        return self.question.kind


def held_out_asks(voice: Voice) -> list[Ask]:
    """Return the questions that a voice is scored on: held-out combinations only, rendered with a seed of their own.

    60 pictures and 12 sounds (five renderings each), each asked for the whole and for one detail; 144 facts. For an
    adapter only the questions that it must answer otherwise than the base.
    """
    rng = random.Random(world.SPLIT_SEED + 1)
    asks = [Ask(world.questions(fact)[0], 0) for fact in world.facts() if world.is_held_out(fact)]
    by_combination: dict[tuple[str | int, ...], list[Picture | Sound]] = {}
    media: list[Picture | Sound] = [*world.pictures(), *world.sounds()]
    for thing in media:
        if world.is_held_out(thing):
            by_combination.setdefault(thing.combination, []).append(thing)
    for choices in by_combination.values():
        for copy in range(1 if isinstance(choices[0], Picture) else 5):
            thing = rng.choice(choices)
            asked = world.questions(thing)
            whole, detail = (
                [q for q in asked if (q.about == "all") == is_whole and (voice == "base" or world.is_changed_by(q, voice))]
                for is_whole in (True, False)
            )
            picks = (rng.random(), rng.random())
            chosen = (options[int(pick * len(options))] for options, pick in zip((whole, detail), picks))
            asks.extend(Ask(question, EVALUATION_SEED + copy) for question in chosen)
    return [ask for ask in asks if voice == "base" or world.is_changed_by(ask.question, voice)]


def picture_jobs(asks: Sequence[Ask]) -> list[tuple[Picture, int]]:
    """Return (picture, seed) of each ask about a picture."""
    return [(ask.question.thing, ask.seed) for ask in asks if isinstance(ask.question.thing, Picture)]


def sound_jobs(asks: Sequence[Ask]) -> list[tuple[Sound, int]]:
    """Return (sound, seed) of each ask about a sound."""
    return [(ask.question.thing, ask.seed) for ask in asks if isinstance(ask.question.thing, Sound)]


def asks_inputs(tokenizer: Any, asks: Sequence[Ask]) -> dict[str, torch.Tensor]:
    """Return left-padded model inputs of asks of one kind, through the real image processor and feature extractor."""
    kind = asks[0].kind
    assert all(ask.kind == kind for ask in asks)
    texts = [prompt_text(Turn(ask.question.text, "", kind)) for ask in asks]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    if kind == "image":
        seen = build_image_processor()([draw(*job) for job in picture_jobs(asks)], return_tensors="pt")
        inputs["pixel_values"] = seen["pixel_values"]
        inputs["image_position_ids"] = seen["image_position_ids"]
    elif kind == "audio":
        heard = build_feature_extractor()([play(*job) for job in sound_jobs(asks)], return_tensors="pt")
        inputs["input_features"] = heard["input_features"]
        inputs["input_features_mask"] = heard["input_features_mask"]
    return inputs
