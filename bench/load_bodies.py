"""The questions of a load run: texts of a number of tokens, pictures of 640x480 and sounds of 5 s, no two the same.

Texts are made of words that are one token each, so that N of them have N tokens.
"""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import client

# Tokens that the chat template puts around a text.
TEMPLATE_TOKENS = 9
PICTURE, SOUND_S, SOUND_HZ = (640, 480), 5, 16_000


def words_of(folder: Path) -> list[str]:
    """Return the words of a checkpoint's tokenizer that are one token each behind another word."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [word.removeprefix("▁") for word in tokenizer.get_vocab() if word.startswith("▁")]
    words = sorted(word for word in words if word.isascii() and word.isalpha())

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return [word for word in words if count(f"{word} {word} {word}") == 3]


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
    for number, body in enumerate(bodies):
        if number % 4 < 2:
            continue
        media = {"image": png(chance)} if number % 4 == 2 else {"audio": wav(chance.randbytes(2 * SOUND_S * SOUND_HZ))}
        question = " ".join(chance.choices(words, k=16))
        bodies[number] = client.chat_body(question, model=body["model"], max_tokens=max_tokens, **media)
    return bodies


def png(chance: random.Random) -> bytes:
    """Return a picture that no other is like."""
    from PIL import Image

    small = Image.frombytes("RGB", (40, 30), chance.randbytes(40 * 30 * 3))
    out = io.BytesIO()
    small.resize(PICTURE).save(out, "PNG")
    return out.getvalue()


def wav(samples: bytes) -> bytes:
    """Return a sound of 16-bit samples."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SOUND_HZ)
        file.writeframes(samples)
    return out.getvalue()
