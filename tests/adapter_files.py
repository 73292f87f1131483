"""Adapter folders written by hand, and models as rows for them: a small multimodal one and Gemma 4 E2B's linears."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.raised import raised
from trimtab.adapters.adapter import AdapterFile, AdapterSpec, match_adapter, read_adapter
from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, Part, TensorRow
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import AdapterError

PEFT_HEAD = "base_model.model."
CODES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "int64": ("I64", 8)}
Shapes = dict[str, tuple[int, ...]]


def write_adapter(folder: Path, shapes: Shapes, *, dtype: str = "float32", **config: Any) -> Path:
    """Write a folder as PEFT does, tensors full of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    code, size = CODES[dtype]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    return folder


def write_tensors(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a new folder as PEFT does, with these tensors."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def rewritten(source: Path, folder: Path, change: Any = None, **config: Any) -> Path:
    """Write a copy of an adapter with other tensors and fields."""
    tensors = load_file(source / "adapter_model.safetensors")
    stored = json.loads((source / "adapter_config.json").read_text("utf-8")) | config
    return write_tensors(folder, tensors if change is None else change(tensors), stored)


def row(path: str, shape: tuple[int, ...], *, kind: str = "linear", part: Part = "language", **options: Any) -> ModuleRow:
    names = {"linear": "Linear", "embedding": "Embedding", "experts": "MixtralExperts", "other": "RMSNorm"}
    tied = options.pop("tied_to", None)
    name = options.pop("class_name", names[kind])
    tensors = options.pop("tensors", None) or (TensorRow(f"{path}.weight", shape, "bfloat16", False, (), tied),)
    return ModuleRow(path, name, part, kind, path, tensors, **options)  # type: ignore[arg-type]


TEXT = "model.language_model"
VISION = "model.vision_tower.encoder.layers.0.self_attn.q_proj"


def small_anatomy() -> Anatomy:
    """A multimodal model in small: two text layers, the second KV-shared, and a wrapped vision linear."""
    rows = [row(f"{TEXT}.embed_tokens", (50, 16), kind="embedding")]
    for layer in (0, 1):
        for name in ("q_proj", "k_proj", "v_proj") if layer == 0 else ("q_proj",):
            rows.append(row(f"{TEXT}.layers.{layer}.self_attn.{name}", (16, 16)))
        rows.append(row(f"{TEXT}.layers.{layer}.mlp.up_proj", (32, 16)))
    biased = f"{TEXT}.layers.0.self_attn.o_proj"
    tensors = tuple(TensorRow(f"{biased}.{name}", shape, "bfloat16", False, ()) for name, shape in
                    (("weight", (16, 16)), ("bias", (16,))))  # fmt: skip
    rows += [
        row(biased, (16, 16), tensors=tensors),
        row(f"{TEXT}.layers.0.experts", (4, 16, 16), kind="experts"),
        row(f"{TEXT}.norm", (16,), kind="other"),
        row(f"{TEXT}.conv", (16, 16, 3), kind="other", class_name="Conv1d"),
        row(VISION, (), kind="other", part="vision", class_name="Gemma4ClippableLinear", wraps=f"{VISION}.linear",
            tensors=(TensorRow(f"{VISION}.input_min", (), "bfloat16", True, ()),)),
        row(f"{VISION}.linear", (24, 12), part="vision"),
        row("model.vision_tower.encoder.layers.0.mlp.up_proj", (24, 12), part="vision"),
        row("lm_head", (50, 16), part="head", tied_to=f"{TEXT}.embed_tokens.weight"),
    ]  # fmt: skip
    missing = tuple(f"{TEXT}.layers.1.self_attn.{name}" for name in ("k_proj", "v_proj"))
    return Anatomy("Small", "small", "bfloat16", tuple(rows), (), 16, 50, missing)


def pair(path: str, out_size: int, in_size: int, rank: int = 4, head: str = PEFT_HEAD) -> Shapes:
    return {f"{head}{path}.lora_A.weight": (rank, in_size), f"{head}{path}.lora_B.weight": (out_size, rank)}


def q_proj(layer: int = 0, **options: Any) -> Shapes:
    return pair(f"{TEXT}.layers.{layer}.self_attn.q_proj", 16, 16, **options)


def match(folder: Path, shapes: Shapes, anatomy: Anatomy | None = None, **config: Any) -> AdapterSpec:
    return match_adapter(read_adapter(write_adapter(folder, shapes, **config)), anatomy or small_anatomy())


def refused(path: Path) -> tuple[str, ...]:
    return raised(AdapterError, read_adapter, path).problems


def problems_of(folder: Path, shapes: Shapes, anatomy: Anatomy | None = None, **config: Any) -> tuple[str, ...]:
    error = raised(AdapterError, match, folder, shapes, anatomy, **config)
    assert error.path == str(folder)
    return error.problems


def embedding(path: str = f"{TEXT}.embed_tokens") -> Shapes:
    return {f"{PEFT_HEAD}{path}.lora_embedding_A": (4, 50), f"{PEFT_HEAD}{path}.lora_embedding_B": (16, 4)}


def e2b_anatomy() -> Anatomy:
    """Gemma 4 E2B's modules that LoRA reaches: 35 text layers (20 KV-shared), 16 vision and 12 audio layers."""
    rows, missing = [row(f"{TEXT}.embed_tokens", (262144, 1536), kind="embedding")], []
    for layer in range(35):
        path, full = f"{TEXT}.layers.{layer}", layer % 5 == 4
        head, mlp = (512 if full else 256), (6144 if layer < 15 else 12288)
        for name, shape in (("q_proj", (8 * head, 1536)), ("k_proj", (head, 1536)), ("v_proj", (head, 1536)),
                            ("o_proj", (1536, 8 * head))):  # fmt: skip
            if layer >= 15 and name in ("k_proj", "v_proj"):
                missing.append(f"{path}.self_attn.{name}")
            else:
                rows.append(row(f"{path}.self_attn.{name}", shape))
        for name, shape in (("gate_proj", (mlp, 1536)), ("up_proj", (mlp, 1536)), ("down_proj", (1536, mlp))):
            rows.append(row(f"{path}.mlp.{name}", shape))
    for path, part, width in _towers():
        rows.append(row(path, (), kind="other", part=part, class_name="Gemma4ClippableLinear", wraps=f"{path}.linear",
                        tensors=(TensorRow(f"{path}.input_min", (), "bfloat16", True, ()),)))  # fmt: skip
        rows.append(row(f"{path}.linear", (width, width), part=part))
    return Anatomy("Gemma4ForConditionalGeneration", "gemma4", "bfloat16", tuple(rows), (), 1536, 262144, tuple(missing))


def _towers() -> list[tuple[str, Part, int]]:
    found: list[tuple[str, Part, int]] = []
    for layer in range(16):
        path = f"model.vision_tower.encoder.layers.{layer}"
        found += [(f"{path}.self_attn.{name}_proj", "vision", 768) for name in "qkvo"]
        found += [(f"{path}.mlp.{name}_proj", "vision", 768) for name in ("gate", "up", "down")]
    for layer in range(12):
        found += [(f"model.audio_tower.layers.{layer}.self_attn.{name}_proj", "audio", 1024) for name in "qkv"]
    return found


def big_adapter() -> Shapes:
    """The 786 tensors of a multimodal E2B adapter: towers by their inner path, k/v of KV-shared layers included."""
    shapes: Shapes = {}
    sizes = {r.module_path: r.weight.shape for r in e2b_anatomy().rows if r.weight is not None}
    for layer in range(35):
        head = 512 if layer % 5 == 4 else 256
        for name in ("q", "k", "v", "o"):
            path = f"{TEXT}.layers.{layer}.self_attn.{name}_proj"
            shapes |= pair(path, *sizes.get(path, (head, 1536)), rank=8)
        for name in ("gate", "up", "down"):
            path = f"{TEXT}.layers.{layer}.mlp.{name}_proj"
            shapes |= pair(path, *sizes[path], rank=8)
    for path, _, width in _towers():
        shapes |= pair(f"{path}.linear", width, width, rank=8)
    return shapes


def header_only(folder: Path, shapes: Shapes, **config: Any) -> AdapterFile:
    """Return what `read_adapter` gives, without writing 100 MB of zeros."""
    entries = {
        name: TensorEntry(name, "bfloat16", shape, folder / "adapter_model.safetensors", 0, 2 * math.prod(shape))
        for name, shape in shapes.items()
    }
    return AdapterFile(folder, {"peft_type": "LORA", **config}, entries, folder / "adapter_model.safetensors")
