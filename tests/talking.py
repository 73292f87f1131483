"""Which checkpoints the tests talk to: a small Gemma 4 with a real processor, and a Llama with its tokenizer alone."""

from __future__ import annotations

import io
import sys
from functools import cache
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image, ImageDraw

TOOLS = Path(__file__).parent.parent / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))


@cache
def _tokenizer():
    import demo_model

    return demo_model.train_tokenizer()


def build_gemma4(folder: Path) -> Path:
    """Write a Gemma 4 with every quirk, random weights, and the demo's tokenizer, processor and chat template."""
    import demo_model

    tokenizer = _tokenizer()
    demo_model.save_base(demo_model.build_model(demo_model.build_config(tokenizer), 0), tokenizer, folder)
    return folder


def build_llama(folder: Path, *, chat_template: str | None = None) -> Path:
    """Write a Llama whose folder has a tokenizer and no processor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def png(*, size: tuple[int, int] = (150, 100), mode: str = "RGB") -> bytes:
    """Return a picture of a red disc."""
    picture = Image.new(mode, size, "white" if mode == "RGB" else (0, 0, 0, 0))
    ImageDraw.Draw(picture).ellipse((20, 20, 80, 80), fill="red" if mode == "RGB" else (255, 0, 0, 255))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def wav(*, rate: int = 44_100, channels: int = 2, seconds: float = 0.8, form: str = "WAV") -> bytes:
    """Return a tone of 440 Hz."""
    time = np.arange(int(rate * seconds)) / rate
    samples = 0.3 * np.sin(2 * np.pi * 440 * time)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([samples] * channels, 1), rate, format=form)
    return buffer.getvalue()
