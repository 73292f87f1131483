"""The questions of a load run: texts of a number of tokens, pictures of 640x480 and sounds of 5 s, no two the same.

For checkpoints that `bench.load.give_voice` made: every token id is a word, so a text of N words has N tokens.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import client

# Tokens that the chat template puts around a text.
TEMPLATE_TOKENS = 9
PICTURE, SOUND_S, SOUND_HZ = (640, 480), 5, 16_000


def words_of(folder: Path) -> list[str]:
    """Return the words of a random checkpoint that are one token each."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return [word.removeprefix("▁") for word in vocabulary if word.startswith("▁w") and word[2:].isdecimal()]


def texts(
    words: Sequence[str], models: Sequence[str], *, count: int, tokens: int, max_tokens: int, seed: int = 0
) -> list[dict[str, Any]]:  # fmt: skip
    """Return `count` requests of about `tokens` tokens each, to the models in turn."""
    chance = random.Random(seed)
    return [
        client.chat_body(
            " ".join(chance.choices(words, k=max(1, tokens - TEMPLATE_TOKENS))), model=models[number % len(models)],
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]  # fmt: skip


def mixed(
    words: Sequence[str], models: Sequence[str], *, count: int, tokens: int, max_tokens: int, seed: int = 0
) -> list[dict[str, Any]]:  # fmt: skip
    """Return requests of which half are texts, a quarter pictures and a quarter sounds with a question."""
    bodies = texts(words, models, count=count, tokens=tokens, max_tokens=max_tokens, seed=seed)
    chance = random.Random(seed + 1)
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            if number % 4 < 2:
                continue
            kind = "image" if number % 4 == 2 else "audio"
            path = Path(name) / ("a.png" if kind == "image" else "a.wav")
            path.write_bytes(_png(chance) if kind == "image" else _wav(chance))
            question = " ".join(chance.choices(words, k=16))
            media: dict[str, Any] = {kind: path}
            bodies[number] = client.chat_body(question, model=bodies[number]["model"], max_tokens=max_tokens, **media)
    return bodies


def _png(chance: random.Random) -> bytes:
    from PIL import Image

    small = Image.frombytes("RGB", (40, 30), chance.randbytes(40 * 30 * 3))
    out = io.BytesIO()
    small.resize(PICTURE).save(out, "PNG")
    return out.getvalue()


def _wav(chance: random.Random) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SOUND_HZ)
        file.writeframes(chance.randbytes(2 * SOUND_S * SOUND_HZ))
    return out.getvalue()
