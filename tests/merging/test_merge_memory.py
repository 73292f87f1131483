"""A merge needs little memory whatever the model's size: measured in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench import merge_inside
from trimtab.checkpoint.folder import read_checkpoint

MIB = 2**20
WIDTH = 1024


def checkpoint(folder: Path, layers: int, vocabulary: int) -> Path:
    """Write a Llama in bfloat16, tensor by tensor, four layers a file."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    groups: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocabulary, WIDTH), "model.norm.weight": (WIDTH,)}]
    for layer in range(layers):
        if layer % 4 == 0:
            groups.append({})
        stem = f"model.layers.{layer}"
        groups[-1] |= {f"{stem}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        groups[-1] |= {f"{stem}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        groups[-1] |= {f"{stem}.mlp.{name}_proj.weight": (4 * WIDTH, WIDTH) for name in ("gate", "up")}
        groups[-1][f"{stem}.mlp.down_proj.weight"] = (WIDTH, 4 * WIDTH)
    weights = {}
    for number, group in enumerate(groups):
        name = f"model-{number:05d}.safetensors"
        save_file({key: torch.full(shape, 0.5, dtype=torch.bfloat16) for key, shape in group.items()}, folder / name)
        weights |= dict.fromkeys(group, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def adapter(folder: Path, base: Path) -> Path:
    """Write an adapter on every projection and on the table, whose change is taken by rows."""
    folder.mkdir()
    tensors = {}
    for name, entry in read_checkpoint(base).tensors.items():
        path = name.removesuffix(".weight")
        if path.endswith("_proj"):
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.full((8, entry.shape[1]), 0.01)
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.full((entry.shape[0], 8), 0.01)
        elif path.endswith("embed_tokens"):
            tensors[f"base_model.model.{path}.lora_embedding_A"] = torch.full((8, entry.shape[0]), 0.01)
            tensors[f"base_model.model.{path}.lora_embedding_B"] = torch.full((entry.shape[1], 8), 0.01)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    return folder


def extra_bytes(base: Path, own: Path, out: Path, **options: object) -> int:
    request = {"model": str(base), "out": str(out), "adapters": [["a", str(own), 1.0]], **options}
    found = merge_inside.run(request, timeout_s=300, environment={"OMP_NUM_THREADS": "1"})
    return int(found["peak_bytes"]) - int(found["baseline_bytes"])


@pytest.mark.parametrize("options", [{}, pytest.param({"requantize": "nf4-dq"}, marks=pytest.mark.slow)], ids=["plain", "packed"])
@pytest.mark.slow
def test_memory_beyond_the_imports_is_bounded_and_does_not_grow_with_the_model(options: dict[str, object], tmp_path: Path) -> None:
    peaks = []
    # 80 MiB in tensors of 8 MiB and a table of 16 MiB; then 280 MiB with a table of 80 MiB.
    for name, layers, vocabulary in (("small", 2, 8192), ("large", 6, 40960)):
        base = checkpoint(tmp_path / name, layers, vocabulary)
        own = adapter(tmp_path / f"{name}-adapter", base)
        peak = extra_bytes(base, own, tmp_path / f"{name}-out", **options)
        largest = max(entry.nbytes for entry in read_checkpoint(base).tensors.values())
        assert peak <= 2 * largest + 256 * MIB
        peaks.append(peak)
    # The bound that holds whatever the sizes are: module trees and pieces, not tensors. The measured difference of the
    # two is some MiB of module tree and of adapter; 64 MiB is less than the larger table alone.
    assert peaks[1] - peaks[0] < 64 * MIB
