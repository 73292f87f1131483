"""A Gemma 4 checkpoint in the layout of Google's mobile files, packed by plain torch: no line of trimtab or of transformers.

As in `google/gemma-4-E2B-it-qat-mobile-transformers`: 2, 4 and 8 bits a channel by patterns of module names, a 2-bit head of its
own, a 2-bit word table, a 4-bit per-layer table with a scale for each layer's part of a row, and a static scale of the inputs and
outputs of each layer, some of them 0 (not calibrated).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS = {
    "^lm_head$": 2, r"language_model\.embed_tokens$": 2, r"language_model\.embed_tokens_per_layer$": 4,
    r"language_model\.layers\.(\d|1[0-4])\.mlp\.gate": 4, r"language_model\.layers\.\d+\.mlp\.": 2,
    r"language_model\.layers\.\d+\.per_layer_": 8, r"language_model\.layers\.\d+\.self_attn\.": 4, "audio_tower": 8,
}  # fmt: skip
NOT_CONVERTED = [
    "per_layer_model_projection", "model.vision_tower", "model.embed_vision", "model.embed_audio", "relative_k_proj", "output_proj",
]  # fmt: skip
QUANTIZATION = {
    "quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True, "modules_to_not_convert": NOT_CONVERTED,
    "module_quant_configs": {pattern: {"num_bits": bits} for pattern, bits in BITS.items()},
}  # fmt: skip
PLE = "embed_tokens_per_layer.weight"


def packed(weight: Tensor, bits: int, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Return (stored [D_out, D_in bits / 8], scale [D_out, groups]); the first value is in the lowest bits."""
    blocks = weight.float().view(weight.shape[0], groups, -1)
    half = 1 << (bits - 1)
    scale = (blocks.abs().amax(-1, keepdim=True) / (half - 0.5)).clamp(min=1e-6)
    q = (blocks / scale).round().clamp(-half, half - 1).view(weight.shape).long()
    if bits == 8:
        return q.to(torch.int8), scale[..., 0]
    each = 8 // bits
    parts = (q + half).view(weight.shape[0], -1, each) << (torch.arange(each) * bits)
    return parts.sum(-1).to(torch.uint8), scale[..., 0]


def bits_of(module: str) -> int:
    return next((bits for pattern, bits in BITS.items() if re.search(pattern, module)), 4)


def stock(folder: Path) -> Any:
    """Return transformers' own model of the files. Release 5.23 refuses more than one scale a row of a table, although its forward
    takes them: they are set after it has loaded the first of each row."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    wide = {name: tensor for name, tensor in tensors.items() if name.endswith("embedding_scale")}
    tensors |= {name: tensor[:, :1].contiguous() for name, tensor in wide.items()}
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16).eval()
    for name, scale in wide.items():
        model.get_submodule(name.removesuffix(".embedding_scale")).embedding_scale = torch.nn.Parameter(scale, requires_grad=False)
    return model


def write(source: Path, folder: Path, *, rounds: bool = True) -> Path:
    """Write a Gemma 4 checkpoint with a per-layer table as a mobile one, and return its folder. rounds: layers are calibrated."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(7)
    word = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = torch.randn(tensors[word].shape, generator=generator).mul(0.1).to(tensors[word].dtype)
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    linear = re.compile(r"(_proj|linear|gate|projection|^lm_head)\.weight$")
    out: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        stem = name.removesuffix(".weight")
        if any(word in name for word in NOT_CONVERTED) or tensor.dim() != 2:
            out[name] = tensor
        elif "embed_tokens" in name:
            groups = config["text_config"]["num_hidden_layers"] if name.endswith(PLE) else 1
            out[f"{stem}.embedding_quantized"], out[f"{stem}.embedding_scale"] = packed(tensor, bits_of(stem), groups)
        elif linear.search(name):
            out[name], out[f"{stem}.weight_scale"] = packed(tensor, bits_of(stem))
            scales = (torch.rand(2, generator=generator) * 0.03 + 0.01) * rounds
            out[f"{stem}.input_activation_scale"] = scales[0] * (number % 5 > 0)
            out[f"{stem}.output_activation_scale"] = scales[1] * (number % 7 > 0)
        else:
            out[name] = tensor
    for layer in range(config["text_config"]["num_hidden_layers"]):
        for side in "kv":
            out[f"model.language_model.layers.{layer}.self_attn.{side}_cache_scale"] = torch.tensor(0.05)
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, file, {"format": "pt"})
    config["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config))
    return folder
