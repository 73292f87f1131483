"""Which prompts does a comparison have: those of a JSONL file, or a built-in set?"""

from __future__ import annotations

import json
import math
import random
import struct
import wave
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint.unreadable import request_refusal
from trimtab.errors import RequestError
from trimtab.process.json_file import JsonError, parse, read_bytes

KEYS = ("id", "text", "image", "audio", "token_ids", "expected")
DEMO = Path(__file__).resolve().parents[2] / "demo"
DEMO_PER_KIND = 1
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
TEXTS = {
    "p01_lora_short": "In two sentences, what does a low-rank adapter change in a language model?",
    "p02_hypertension_short": "Name two things that a person with high blood pressure can do every day.",
    "p03_medical_tutor": "You are a patient tutor. Explain to a first-year student how the heart moves blood.",
}
IMAGE_TEXT, AUDIO_TEXT = "What is shown in this image?", "What can be heard?"
IMAGE_SIDE, TONE_HZ, TONE_S, TONE_RATE = 224, 440.0, 1.0, 16_000
TOKEN_COUNT = 24


@dataclass(frozen=True)
class Prompt:
    """One question. image, audio: absolute file names. token_ids: instead of text, for models without a tokenizer.

    expected: adapter name ("base" for none) -> the right answer, if known; shown, never used in a verdict.
    """

    id: str
    text: str | None = None
    image: str | None = None
    audio: str | None = None
    token_ids: tuple[int, ...] = ()
    expected: Mapping[str, str] | None = None

    @property
    def kind(self) -> str:
        """Its modalities: "text", "image", "audio" or "image+audio"."""
        media = [name for name in ("image", "audio") if getattr(self, name)]
        return "+".join(media) or "text"

    def to_json(self) -> dict[str, Any]:
        """Return the prompt as JSON-ready values, without missing fields."""
        values = {name: getattr(self, name) for name in KEYS}
        values["token_ids"] = list(self.token_ids)
        values["expected"] = dict(self.expected) if self.expected else None
        return {name: value for name, value in values.items() if value}


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Return the prompts of a JSONL file. Errors: RequestError that lists every problem of the file with its line. A line is one
    JSON object: `id`, and `text` (with `image` and `audio`, file names in the same folder) or unchanged `token_ids`."""
    file = Path(path)
    try:
        lines = read_bytes(file, "prompts").decode("utf-8").splitlines()
    except (OSError, JsonError) as exc:
        raise request_refusal("prompts", path, exc) from exc
    except UnicodeDecodeError as exc:
        raise RequestError("is not UTF-8 text", field="prompts", value=str(path)) from exc
    read = ((f"line {number}", *_read_line(line, file.parent)) for number, line in enumerate(lines, 1) if line.strip())
    return _collected(read, str(path))


def checked(prompts: Sequence[Prompt | Mapping[str, Any] | str]) -> tuple[Prompt, ...]:
    """Return prompts given in Python: Prompts, mappings with the keys of a line, or texts (named p1, p2, ...)."""

    def read(number: int, given: Prompt | Mapping[str, Any] | str) -> tuple[Prompt | None, list[str]]:
        if isinstance(given, Prompt):
            return given, []
        return _read_values({"id": f"p{number}", "text": given} if isinstance(given, str) else given, Path.cwd())

    return _collected(((f"prompt {number}", *read(number, given)) for number, given in enumerate(prompts, 1)), None)


def given_prompts(prompts: str | Path | Sequence[Prompt | Mapping[str, Any] | str] | None) -> tuple[Prompt, ...] | None:
    """Return the prompts of a file or of a call, None for neither."""
    if prompts is None:
        return None
    return read_prompts(prompts) if isinstance(prompts, (str, Path)) else checked(prompts)


def _collected(read: Iterable[tuple[str, Prompt | None, list[str]]], value: str | None) -> tuple[Prompt, ...]:
    """Return the prompts that were read. Errors: RequestError with every problem. read: (where, prompt, its problems)."""
    prompts: list[Prompt] = []
    problems: list[str] = []
    for where, prompt, wrong in read:
        problems += [f"{where}: {problem}" for problem in wrong]
        prompts += [] if prompt is None else [prompt]
    ids = [prompt.id for prompt in prompts]
    problems += [f"id {name!r} is used {ids.count(name)} times" for name in dict.fromkeys(ids) if ids.count(name) > 1]
    _refuse(problems if prompts or problems else ["holds no prompt"], value)
    return tuple(prompts)


def check_modalities(prompts: Sequence[Prompt], config: Mapping[str, Any]) -> None:
    """Raise one RequestError for all prompts with a modality that the model of this config.json lacks."""
    takes = [name for name, part in (("image", "vision"), ("audio", "audio")) if config.get(f"{part}_config")]
    problems = [
        f"{prompt.id} has {'an' if name[0] in 'ai' else 'a'} {name}, the model takes {', '.join(['text', *takes])}"
        for prompt in prompts
        for name in ("image", "audio")
        if getattr(prompt, name) and name not in takes
    ]
    _refuse(problems, None)


def built_in(model: Path, config: Mapping[str, Any], media_folder: Path) -> tuple[Prompt, ...]:
    """Return the built-in prompts for a model folder; generated media are written to media_folder."""
    if model.resolve() == (DEMO / "base").resolve():
        return demo_prompts()
    if not any((model / name).is_file() for name in TOKENIZERS):
        return _token_prompts(config)
    prompts = [Prompt(name, text) for name, text in TEXTS.items()]
    if config.get("vision_config"):
        prompts.append(Prompt("p04_picture", IMAGE_TEXT, image=str(_draw_picture(media_folder / "picture.png"))))
    if config.get("audio_config"):
        prompts.append(Prompt("p05_tone", AUDIO_TEXT, audio=str(_play_tone(media_folder / "tone.wav"))))
    return tuple(prompts)


def demo_prompts(per_kind: int = DEMO_PER_KIND) -> tuple[Prompt, ...]:
    """Return the first questions of each kind to the demo model, with their right answers."""
    by_kind: dict[str, list[Prompt]] = {}
    for line in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        media: dict[str, Any] = {name: str(DEMO / row[name]) for name in ("image", "audio") if name in row}
        by_kind.setdefault(row["kind"], []).append(Prompt(row["id"], row["prompt"], **media, expected=row["answers"]))
    return tuple(prompt for kind in ("text", "image", "audio") for prompt in by_kind.get(kind, [])[:per_kind])


def _read_line(line: str, folder: Path) -> tuple[Prompt | None, list[str]]:
    try:
        values = parse(line.encode("utf-8"), "prompt")
    except JsonError as exc:
        return None, [str(exc)]
    if not isinstance(values, dict):
        return None, [f"must hold an object, it holds a {type(values).__name__}"]
    return _read_values(values, folder)


def _read_values(values: Mapping[str, Any], folder: Path) -> tuple[Prompt | None, list[str]]:
    problems = [f"unknown key {key!r} (known: {', '.join(KEYS)})" for key in values if key not in KEYS]
    for name in ("id", "text", "image", "audio"):
        if name in values and not (isinstance(values[name], str) and values[name].strip()):
            problems.append(f"{name} must be a text that is not empty")
    if "id" not in values:
        problems.append("has no id")
    ids = values.get("token_ids", [])
    if not isinstance(ids, (list, tuple)) or not all(type(token) is int and token >= 0 for token in ids):
        problems.append("token_ids must be a list of integers")
        ids = []
    if not ids and "text" not in values:
        problems.append("has neither text nor token_ids")
    if ids and any(name in values for name in ("text", "image", "audio")):
        problems.append("token_ids are used unchanged; text, image and audio do not apply")
    expected = values.get("expected")
    if expected is not None and not (
        isinstance(expected, Mapping) and all(isinstance(answer, str) for answer in expected.values())
    ):
        problems.append('expected must be an object of texts ("base" or an adapter\'s name -> answer)')
    media = {name: folder / values[name] for name in ("image", "audio") if isinstance(values.get(name), str)}
    problems += [f"{name} {file} is not a file" for name, file in media.items() if not file.is_file()]
    if problems:
        return None, problems
    paths: dict[str, Any] = {name: str(file.resolve()) for name, file in media.items()}
    return Prompt(values["id"], values.get("text"), **paths, token_ids=tuple(ids), expected=expected), []


def _refuse(problems: Sequence[str], value: str | None) -> None:
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        raise RequestError("\n  - ".join([count, *problems]), field="prompts", value=value)


def _token_prompts(config: Mapping[str, Any]) -> tuple[Prompt, ...]:
    text = config.get("text_config") or config
    size = int(text.get("vocab_size") or 256)
    return tuple(Prompt(name, token_ids=tuple(random_tokens(size, TOKEN_COUNT, seed))) for seed, name in enumerate(TEXTS))


def random_tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """Return token ids that represent ordinary text in a vocabulary of this size."""
    # The first ids are special ones; the last ids of a multimodal vocabulary are placeholders of images and audio.
    draw, low, high = random.Random(seed), min(8, vocabulary // 4), max(vocabulary // 4 + 1, vocabulary * 3 // 4)
    return [draw.randrange(low, high) for _ in range(count)]


def _draw_picture(file: Path) -> Path:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), (238, 236, 228))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((0, 150, IMAGE_SIDE, IMAGE_SIDE), fill=(90, 140, 84))
    pen.ellipse((138, 28, 188, 78), fill=(222, 174, 60))
    pen.polygon([(40, 150), (90, 92), (140, 150)], fill=(150, 76, 60))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file)
    return file


def _play_tone(file: Path) -> Path:
    count = int(TONE_S * TONE_RATE)
    samples = [int(9000 * math.sin(2 * math.pi * TONE_HZ * at / TONE_RATE)) for at in range(count)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(TONE_RATE)
        sound.writeframes(struct.pack(f"<{count}h", *samples))
    return file
