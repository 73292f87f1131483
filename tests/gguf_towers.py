"""GGUF models with projector files (mmproj), written as llama.cpp's converter does, without trimtab and the gguf package.

`gemma4` and `qwen3vl` write a checkpoint of transformers as two files in a folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import gguf_files, pico, talking_families


def gemma4(source: Path, folder: Path) -> Path:
    """Write a Gemma 4 checkpoint as a GGUF model with a projector file, beside its config.json; returns the folder."""
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text, vision = config["text_config"], config["vision_config"]
    layers, sliding = text["num_hidden_layers"], [one == "sliding_attention" for one in text["layer_types"]]
    shared, wide = text.get("num_kv_shared_layers") or 0, text["intermediate_size"]
    full_heads = text.get("num_global_key_value_heads") or (1 if text["attention_k_eq_v"] else text["num_key_value_heads"])
    keys = gguf_files._GEMMA_KEYS | {
        "gemma4.block_count": layers, "gemma4.embedding_length": text["hidden_size"], "gemma4.attention.shared_kv_layers": shared,
        "gemma4.attention.head_count": text["num_attention_heads"], "gemma4.attention.sliding_window_pattern": sliding,
        "gemma4.attention.head_count_kv": [text["num_key_value_heads"] if one else full_heads for one in sliding],
        "gemma4.embedding_length_per_layer_input": text["hidden_size_per_layer_input"],
        "gemma4.feed_forward_length": [
            wide * (1 + bool(text["use_double_wide_mlp"] and place >= layers - shared)) for place in range(layers)
        ],
    }  # fmt: skip
    tensors: dict[str, Any] = {"rope_freqs.weight": ("F32", torch.tensor([1.0] * 8 + [1e30] * 24), (32,))}
    towers: dict[str, Any] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.startswith("model.language_model."):
            own, held, target = gguf_files.own_name(name.replace("language_model.", ""), gguf_files._GEMMA_NAMES), tensor, tensors
        elif ".audio_tower." in name or "embed_audio" in name:
            own, held, target = "a." + name[-40:], tensor.reshape(-1), towers  # left out by the reader
        else:
            own, held, target = _projector_name(name), tensor.view(1) if tensor.dim() == 0 else tensor, towers
            if own == "v.patch_embd.weight":
                side = vision["patch_size"]
                held = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2).contiguous()
        kind = "BF16" if held.dim() in (2, 4) else "F32"
        target[own] = (kind, gguf_files.pack(kind, held)[0], tuple(held.shape))
    folder.mkdir(parents=True)
    gguf_files.write(folder / "model.gguf", keys, tensors)
    clip = {
        "general.type": "mmproj", "general.architecture": "clip", "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4v", "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.block_count": vision["num_hidden_layers"], "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.image_size": 224,
    }  # fmt: skip
    gguf_files.write(folder / "mmproj-model.gguf", clip, towers)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _projector_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of Gemma 4's vision tower."""
    fixed = {"input_proj.weight": "v.patch_embd.weight", "position_embedding_table": "v.position_embd.weight",
             "std_bias": "v.std_bias", "std_scale": "v.std_scale",
             "embedding_projection.weight": "mm.input_projection.weight"}  # fmt: skip
    if found := next((new for old, new in fixed.items() if name.endswith(old)), None):
        return found
    stems = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_out", "gate_proj": "ffn_gate",
             "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "ln1", "pre_feedforward_layernorm": "ln2",
             "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "post_attention_layernorm": "attn_post_norm",
             "post_feedforward_layernorm": "ffn_post_norm"}  # fmt: skip
    path, _, end = name.replace(".linear.", ".").rpartition(".")
    return f"v.blk.{path.split('.')[4]}.{stems[path.rpartition('.')[2]]}.{end}"


# Qwen3-VL -------------------------------------------------------------------------------------------------------------


def deep_qwen3vl(folder: Path) -> Path:
    """Write a Qwen3-VL checkpoint with three layers in its tower, two of which feed the language model; returns the folder."""
    import transformers

    _, make = pico._CONFIGS["qwen3_vl"]
    config = make()
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 3, [0, 2]
    model = transformers.Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            tensor.copy_(pico._value(path, tensor, 3, generator, unit_scores=True))
    model.bfloat16().save_pretrained(folder)
    return folder


Tensors = dict[str, tuple[str, Tensor, tuple[int, ...]]]


def qwen3vl(source: Path, folder: Path, *, text: str = "F16", tower: str = "F16", **more: Any) -> tuple[Path, Path]:
    """Write a Qwen3-VL checkpoint as a GGUF model with a projector file; returns (their folder, that of the values in bfloat16).

    text, tower: the type of matrices of both files. more: other keys of the projector, without `clip.`, None for none. Source:
    llama.cpp, conversion/qwen3vl.py (Qwen3VLTextModel, Qwen3VLVisionModel) and base.py (MmprojModel).
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    language, vision = config["text_config"], config["vision_config"]
    model: Tensors = {}
    projector: Tensors = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        parts = _qwen3vl_parts(name, tensor.float(), vision)
        values = []
        for own, part in parts.items():
            is_tower = own.startswith(("v.", "mm."))
            kind = "F32" if part.dim() == 1 or own == "v.position_embd.weight" else tower if is_tower else text
            if own.startswith("v.patch_embd") and kind not in gguf_files.PLAIN:
                kind = "F32"
            blocks, held = gguf_files.pack(kind, part)
            (projector if is_tower else model)[own] = (kind, blocks, tuple(part.shape))
            values.append(held)
        dense[name] = (values[0] if len(values) == 1 else torch.stack(values, dim=2)).bfloat16().contiguous()
    folder.mkdir(parents=True)
    gguf_files.write(folder / "model.gguf", _language_keys(language, vision) | _vocabulary("qwen3_vl"), model)
    keys = _projector_keys(language, vision) | {f"clip.{name}": one for name, one in more.items()}
    gguf_files.write(folder / "mmproj-model.gguf", {name: one for name, one in keys.items() if one is not None}, projector)
    (folder.parent / "dense").mkdir()
    save_file(dense, folder.parent / "dense" / "model.safetensors", {"format": "pt"})
    (folder.parent / "dense" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, folder.parent / "dense"


def _qwen3vl_parts(name: str, tensor: Tensor, vision: dict[str, Any]) -> dict[str, Tensor]:
    """Return llama.cpp's names of a tensor, with the values of each."""
    if not name.startswith("model.visual."):
        return {gguf_files.own_name(name.replace("language_model.", ""), gguf_files.DENSE): tensor}
    rest, _, end = name.removeprefix("model.visual.").rpartition(".")
    if rest == "patch_embed.proj" and end == "weight":  # Conv3d as two Conv2d, one a frame
        return {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
    if deep := re.fullmatch(r"deepstack_merger_list\.(\d+)\.(.+)", rest):
        stem = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[deep[2]]
        return {f"v.deepstack.{vision['deepstack_visual_indexes'][int(deep[1])]}.{stem}.{end}": tensor}
    if layer := re.fullmatch(r"blocks\.(\d+)\.(.+)", rest):
        stems = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
                 "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}  # fmt: skip
        return {f"v.blk.{layer[1]}.{stems[layer[2]]}.{end}": tensor}
    fixed = {"patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd", "merger.norm": "v.post_ln",
             "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}  # fmt: skip
    return {f"{fixed[rest]}.{end}": tensor}


def _language_keys(language: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    rope = language["rope_parameters"]
    keys = {
        "context_length": language["max_position_embeddings"], "embedding_length": language["hidden_size"],
        "feed_forward_length": language["intermediate_size"], "block_count": language["num_hidden_layers"],
        "attention.head_count": language["num_attention_heads"], "attention.head_count_kv": language["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": language["rms_norm_eps"], "attention.key_length": language["head_dim"],
        "attention.value_length": language["head_dim"], "rope.freq_base": rope["rope_theta"],
        "rope.dimension_sections": [*rope["mrope_section"], 0], "n_deepstack_layers": len(vision["deepstack_visual_indexes"]),
    }  # fmt: skip
    return {"general.architecture": "qwen3vl", "general.type": "model"} | {f"qwen3vl.{name}": one for name, one in keys.items()}


def _projector_keys(language: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "has_vision_encoder": True, "projector_type": "qwen3vl_merger", "use_gelu": True,
        "vision.projection_dim": language["hidden_size"], "vision.patch_size": vision["patch_size"],
        "vision.image_size": int(vision["num_position_embeddings"] ** 0.5 * vision["patch_size"]),
        "vision.embedding_length": vision["hidden_size"], "vision.feed_forward_length": vision["intermediate_size"],
        "vision.block_count": vision["depth"], "vision.attention.head_count": vision["num_heads"],
        "vision.image_mean": [0.48145466, 0.4578275, 0.40821073], "vision.image_std": [0.26862954, 0.26130258, 0.27577711],
        "vision.spatial_merge_size": vision["spatial_merge_size"],
        "vision.attention.layer_norm_epsilon": language["rms_norm_eps"],
        "vision.is_deepstack_layers": [layer in vision["deepstack_visual_indexes"] for layer in range(vision["depth"])],
    }  # fmt: skip
    return {"general.architecture": "clip", "general.type": "mmproj"} | {f"clip.{name}": one for name, one in keys.items()}


def _vocabulary(family: str) -> dict[str, Any]:
    """Return the keys of a family's tokenizer and template."""
    made = talking_families.tokenizer(family)
    state = json.loads(made.backend_tokenizer.to_str())
    places = {place: text for text, place in made.get_vocab().items()}
    control = {one["id"]: 3 if one["special"] else 4 for one in state["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [places.get(place, f"[PAD{place}]") for place in range(pico.VOCABULARY)],
        "tokenizer.ggml.token_type": [control.get(place, 1 if place in places else 5) for place in range(pico.VOCABULARY)],
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": made.eos_token_id, "tokenizer.ggml.padding_token_id": made.pad_token_id,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": made.chat_template,
    }  # fmt: skip
