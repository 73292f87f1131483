"""The vision tower of Gemma 4 in a projector file (mmproj) as tensors of the model.

A file does not say how images are cut and pooled, nor which tokens are their places: that comes from the config.json and the
processor's files in its folder, and each key of the file that says a size must agree. Source: llama.cpp, conversion/gemma.py
(Gemma4VisionAudioModel), gguf-py constants.py, tools/mtmd/models/gemma4v.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimtab.gguf.architectures import Mapped
from trimtab.gguf.header import GgufHeader, refuse

HINT = "Use the safetensors files of the model for images"
PROJECTOR = "gemma4v"
_TOWER, _LAYERS = "model.vision_tower", "model.vision_tower.encoder.layers"
# Name in the file -> (the model's name, what undoes the converter's change).
_NAMES = {
    "v.patch_embd.weight": (f"{_TOWER}.patch_embedder.input_proj.weight", "patches"),
    "v.position_embd.weight": (f"{_TOWER}.patch_embedder.position_embedding_table", "whole"),
    "v.std_bias": (f"{_TOWER}.std_bias", ""), "v.std_scale": (f"{_TOWER}.std_scale", ""),
    "mm.input_projection.weight": ("model.embed_vision.embedding_projection.weight", ""),
}  # fmt: skip
# Stem of a tensor in a layer -> the model's path. Linear layers may have limits of inputs and outputs.
_LINEAR = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORMS = {
    "ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_LAYER = re.compile(r"v\.blk\.(\d{1,4})\.([a-z_0-9]+)\.([a-z_]+)", re.ASCII)
_AUDIO = ("a.", "mm.a.")
_KEYS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "patch_size": "patch_size", "attention.layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip
_OTHER_KEYS = (
    "image_size", "image_mean", "image_std", "image_min_pixels", "image_max_pixels", "projection_dim", "projector_type",
    "projector.scale_factor",
)  # fmt: skip


def vision_of(header: GgufHeader, vision: Mapping[str, Any]) -> list[Mapped]:
    """Return the tensors of the vision tower by the model's names; those of audio are left out. vision: vision_config.

    Errors: CheckpointError for another projector, for a key that does not agree, and with the tensors that are not known.
    """
    file, keys = header.files[0], header.keys
    kind = keys.get("clip.vision.projector_type", keys.get("clip.projector_type"))
    if keys.get("general.type", "mmproj") != "mmproj" or kind != PROJECTOR:
        refuse(file, f"is a projector of the type {kind!r:.40}; {PROJECTOR} is read", hint=HINT)
    for name, value in keys.items():
        stem = name.removeprefix("clip.vision.")
        if stem == name or stem in _OTHER_KEYS:
            continue
        wanted = vision.get(_KEYS.get(stem, ""))
        is_equal = value == wanted
        if isinstance(value, float) and isinstance(wanted, float):
            is_equal = abs(value - wanted) <= 1e-6 * abs(wanted)
        if wanted is None or not is_equal:
            refuse(file, f"{name} is {value!r:.40}, config.json has {wanted!r:.40}", hint=HINT)
    mapped, lost = [], []
    for name, tensor in header.tensors.items():
        if name.startswith(_AUDIO):
            continue
        layer = _LAYER.fullmatch(name)
        if name in _NAMES:
            path, change = _NAMES[name]
            mapped.append(Mapped(path, tensor, change=change))
        elif layer and layer[3] == "weight" and layer[2] in _NORMS:
            mapped.append(Mapped(f"{_LAYERS}.{layer[1]}.{_NORMS[layer[2]]}.weight", tensor))
        elif layer and layer[2] in _LINEAR and layer[3] in ("weight", *_LIMITS):
            end, change = ("linear.weight", "") if layer[3] == "weight" else (layer[3], "scalar")
            mapped.append(Mapped(f"{_LAYERS}.{layer[1]}.{_LINEAR[layer[2]]}.{end}", tensor, change=change))
        else:
            lost.append(name)
    if lost:
        refuse(file, f"has tensors whose meaning is not known here: {', '.join(lost[:5])}", hint=HINT)
    return mapped
