"""Which text, image and audio clip do all routes of a case get?"""

from __future__ import annotations

import json
import wave
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.doctor.facts import tiny

DEMO = Path(__file__).resolve().parents[2] / "demo"
NEW_TOKENS = 16
Inputs = dict[str, dict[str, Any]]


def make_inputs(folder: Path) -> tuple[Inputs, str]:
    """Return the forward arguments of each mode that the model has, and their source: "processor" or "drawn". They are the demo's
    first questions; without a processor, random tokens and media. Floats are bf16: an image processor's float32
    would change what the tower computes in."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    modes = ["text"]
    modes += ["image"] if getattr(config, "vision_config", None) is not None else []
    modes += ["audio"] if getattr(config, "audio_config", None) is not None else []
    processor = _processor(folder)
    if processor is not None:
        return {mode: _half(_asked(processor, mode, folder)) for mode in modes}, "processor"
    inputs: Inputs = {}
    for mode in modes:
        with suppress(ValueError):  # the format of other families' media depends on the processor
            inputs[mode] = _half(tiny.inputs(config, mode))
    return inputs, "drawn"


def save_inputs(inputs: Inputs, path: Path) -> None:
    """Write the inputs as one safetensors file."""
    from safetensors.torch import save_file

    flat = {f"{mode}.{name}": tensor.contiguous() for mode, tensors in inputs.items() for name, tensor in tensors.items()}
    save_file(flat, path)


def read_inputs(path: Path, device: Any) -> Inputs:
    """Return the saved inputs on a device."""
    from safetensors.torch import load_file

    inputs: Inputs = {}
    for key, tensor in load_file(path).items():
        mode, _, name = key.partition(".")
        inputs.setdefault(mode, {})[name] = tensor.to(device)
    return {mode: inputs[mode] for mode in ("text", "image", "audio") if mode in inputs}


def read_text(folder: Path, ids: list[int]) -> str | None:
    """Return the text of generated tokens; None for a checkpoint without a tokenizer."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)).decode(ids) if file.is_file() else None


def _half(tensors: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)
    }  # fmt: skip


def _processor(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json", "tokenizer.json")):
        return None
    from trimtab.engine.loader.processor import load_processor

    return load_processor(folder)


def _asked(processor: Any, mode: str, folder: Path) -> dict[str, Any]:
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    row = next(line for line in map(json.loads, lines) if line["kind"] == mode)
    if not hasattr(processor, "tokenizer"):
        return dict(processor(row["prompt"], return_tensors="pt"))
    text = {"type": "text", "text": row["prompt"]}
    parts = {"text": [text], "image": [{"type": "image"}, text], "audio": [text, {"type": "audio"}]}[mode]
    from trimtab.engine.templates.budget import render

    prompt = render(processor, [{"role": "user", "content": parts}], folder, add_generation_prompt=True)
    media: dict[str, Any] = {}
    if mode == "image":
        from PIL import Image

        media["images"] = [Image.open(DEMO / row["image"]).convert("RGB")]
    elif mode == "audio":
        media["audio"] = [_samples(DEMO / row["audio"])]
    # The template has written the special tokens.
    return dict(processor(text=[prompt], return_tensors="pt", add_special_tokens=False, **media))


def _samples(path: Path) -> Any:
    import numpy as np

    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (16_000, 2, 1)
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768
