"""How do the tensors of a projector file (mmproj) become the vision tower of Gemma 4 or Qwen3-VL?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trimtab.gguf.architectures import MOST_LAYERS, MOST_SIDE, Keys, Mapped, shortest
from trimtab.gguf.header import GgufHeader, refuse

HINT = "Use the safetensors files of the model for images"
GEMMA4, QWEN3VL = "gemma4v", "qwen3vl_merger"
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


def projector_of(header: GgufHeader) -> str:
    """Return the type of a projector that is read. Errors: CheckpointError for any other file. Source: llama.cpp,
    conversion/gemma.py (Gemma4VisionAudioModel), conversion/qwen3vl.py, gguf-py constants.py, tools/mtmd/models/gemma4v.cpp and
    qwen3vl.cpp, clip.cpp."""
    keys = header.keys
    kind = keys.get("clip.vision.projector_type", keys.get("clip.projector_type"))
    if keys.get("general.type", "mmproj") != "mmproj" or kind not in (GEMMA4, QWEN3VL):
        refuse(header.files[0], f"is a projector of the type {kind!r:.40}; {GEMMA4} and {QWEN3VL} are read", hint=HINT)
    return str(kind)


# Gemma 4 --------------------------------------------------------------------------------------------------------------


def gemma4_vision(header: GgufHeader, vision: Mapping[str, Any]) -> list[Mapped]:
    """Return the tensors of the vision tower by the model's names; those of audio are left out. vision: vision_config.

    Errors: CheckpointError for a key that does not agree, and with the tensors that are not known. The file does not say how images
    are cut and pooled: that comes from config.json and the processor's files, which each size in the file must match.
    """
    file, keys = header.files[0], header.keys
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


# Qwen3-VL -------------------------------------------------------------------------------------------------------------

_MARKS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
_SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "depth",
    "attention.head_count": "num_heads", "patch_size": "patch_size", "projection_dim": "out_hidden_size",
}  # fmt: skip
# Of all norms in transformers, which reads no epsilon from a config; and the frames of a patch.
_EPSILON, _FRAMES = 1e-6, 2
# Pixels of an image and of a video, which no key names: those of every Qwen3-VL that Qwen published (preprocessor_config.json,
# video_preprocessor_config.json).
_PIXELS, _VIDEO_PIXELS = (65_536, 16_777_216), (4_096, 25_165_824)


def qwen3vl_config(header: GgufHeader, projector: GgufHeader, own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (config.json, processor_config.json) of a model's file and its projector. own: the language model's config.

    Errors: CheckpointError for a key that is missing, not known or does not fit the language model.
    """
    file, keys = projector.files[0], Keys(projector, HINT)
    vision = _vision(keys)
    processor = _processor(keys, vision)
    keys.check_all_taken()
    count, sections = (header.keys[f"{header.architecture}.{name}"] for name in ("n_deepstack_layers", "rope.dimension_sections"))
    wide, taps = vision["out_hidden_size"], len(vision["deepstack_visual_indexes"])
    if wide != own["hidden_size"]:
        refuse(file, f"clip.vision.projection_dim is {wide}, the model is {own['hidden_size']} wide", hint=HINT)
    if taps != count or taps > own["num_hidden_layers"]:
        refuse(file, f"feeds {taps} layers of the model, whose file says {count!r:.40} (n_deepstack_layers)", hint=HINT)
    numbers = sections[:3]
    is_right = len(numbers) == 3 and all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in numbers)
    if not is_right or any(sections[3:]) or 2 * sum(numbers) != own["head_dim"]:
        refuse(header.files[0], f"qwen3vl.rope.dimension_sections is {sections!r:.60} for heads of {own['head_dim']}", hint=HINT)
    text = {name: value for name, value in own.items() if name not in _NOT_OF_TEXT} | {"model_type": "qwen3_vl_text"}
    text["rope_parameters"] = own["rope_parameters"] | {"mrope_section": numbers, "mrope_interleaved": True}
    config = {name: own[name] for name in ("tie_word_embeddings", "dtype", "quantization_config")} | {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text,
        "vision_config": vision,
    }  # fmt: skip
    return config | {f"{name}_token_id": _place(header, mark) for name, mark in _MARKS.items()}, processor


# Fields of the language model's own config that stand in the whole model's, or that it does not have.
_NOT_OF_TEXT = ("model_type", "architectures", "dtype", "quantization_config", "tie_word_embeddings", "mlp_bias")


def _vision(keys: Keys) -> dict[str, Any]:
    """Return vision_config of a projector's keys."""
    file = keys.header.files[0]
    for name, wanted in (
        ("has_vision_encoder", True), ("has_audio_encoder", False), ("use_silu", False), ("projector_type", QWEN3VL),
        ("vision.projector_type", QWEN3VL),
    ):  # fmt: skip
        keys.expect(name, wanted)
    if not keys.take("use_gelu", bool):
        refuse(file, "clip.use_gelu is False, True is read", hint=HINT)
    if (epsilon := keys.take("vision.attention.layer_norm_epsilon", float)) != _EPSILON:
        refuse(file, f"clip.vision.attention.layer_norm_epsilon is {epsilon!r}, {_EPSILON} is read", hint=HINT)
    vision = {field: _size(keys, name) for name, field in _SIZES.items()}
    if vision["hidden_size"] % (4 * vision["num_heads"]):
        refuse(file, f"clip.vision.embedding_length is {vision['hidden_size']} for {vision['num_heads']} heads", hint=HINT)
    deep = keys.take("vision.is_deepstack_layers", list)
    if len(deep) != vision["depth"] or not all(isinstance(one, bool) for one in deep):
        refuse(file, f"clip.vision.is_deepstack_layers has {len(deep)} values for {vision['depth']} layers", hint=HINT)
    return vision | {
        "model_type": "qwen3_vl_vision", "in_channels": 3, "temporal_patch_size": _FRAMES, "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": (_size(keys, "image_size") // vision["patch_size"]) ** 2,
        "spatial_merge_size": _size(keys, "spatial_merge_size", 2),
        "deepstack_visual_indexes": [place for place, one in enumerate(deep) if one],
    }  # fmt: skip


def _processor(keys: Keys, vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return processor_config.json of a projector's keys."""
    low, high = (keys.take(f"vision.image_{name}_pixels", int, usual) for name, usual in zip(("min", "max"), _PIXELS, strict=True))
    if not 0 < low <= high:
        refuse(keys.header.files[0], f"clip.vision.image_min_pixels is {low}, image_max_pixels {high}", hint=HINT)
    cut = {
        "patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"], "temporal_patch_size": _FRAMES,
        "image_mean": _colours(keys, "image_mean"), "image_std": _colours(keys, "image_std"),
    }  # fmt: skip
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": low, "longest_edge": high}}
    low, high = _VIDEO_PIXELS
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": low, "longest_edge": high}}
    return {"processor_class": "Qwen3VLProcessor", "image_processor": cut | image, "video_processor": cut | video}


def _size(keys: Keys, name: str, default: int | None = None) -> int:
    value, most = keys.take(f"vision.{name}", int, default), MOST_LAYERS if name == "block_count" else MOST_SIDE
    if not 0 < value <= most:
        refuse(keys.header.files[0], f"{keys.prefix}vision.{name} is {value}, 1 to {most} is read", hint=HINT)
    return int(value)


def _colours(keys: Keys, name: str) -> list[float]:
    values = keys.take(f"vision.{name}", list)
    is_right = len(values) == 3 and all(isinstance(one, float) and math.isfinite(one) and 0 <= one < 10 for one in values)
    if not is_right or (name == "image_std" and 0.0 in values):
        refuse(keys.header.files[0], f"{keys.prefix}vision.{name} is {values!r:.60}, three numbers are read", hint=HINT)
    return [shortest(one) for one in values]


def _place(header: GgufHeader, mark: str) -> int:
    tokens = header.keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or tokens.count(mark) != 1:
        refuse(header.files[0], f"its vocabulary has no {mark}, which images need", hint=HINT)
    return int(tokens.index(mark))


def qwen3vl_vision(header: GgufHeader, vision: Mapping[str, Any]) -> list[Mapped]:
    """Return the tensors of the vision tower by the model's names. vision: of `qwen3vl_config`.

    Errors: CheckpointError with the tensors that are not known, that are missing, or that have another shape.
    """
    file, wanted = header.files[0], _wanted(vision)
    lost, missing = [name for name in header.tensors if name not in wanted], [name for name in wanted if name not in header.tensors]
    if lost:
        refuse(file, f"has tensors whose meaning is not known here: {', '.join(lost[:5])}", hint=HINT)
    if missing:
        refuse(file, f"lacks {len(missing)} of {len(wanted)} tensors: {', '.join(missing[:5])}", hint=HINT)
    for name, (_, shape) in wanted.items():
        if header.tensors[name].shape != shape:
            found = list(header.tensors[name].shape)
            refuse(file, f"has the shape {found}, {list(shape)} follows from its keys", name, HINT)
    changes = {_FIRST: "frames", _POSITIONS: "whole"}
    return [
        Mapped(path, header.tensors[name], change=changes.get(name, ""), second=header.tensors[_SECOND] if name == _FIRST else None)
        for name, (path, _) in wanted.items() if path
    ]  # fmt: skip


_FIRST, _SECOND, _POSITIONS = "v.patch_embd.weight", "v.patch_embd.weight.1", "v.position_embd.weight"


def _wanted(vision: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name in the file -> (the model's name, "" for a part of another; its shape)."""
    wide, inner, out, patch = (vision[name] for name in ("hidden_size", "intermediate_size", "out_hidden_size", "patch_size"))
    merged = wide * vision["spatial_merge_size"] ** 2
    # Stems of a weight with a bias, and the weight's shape.
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("v.post_ln", "merger.norm", (wide,)), ("mm.0", "merger.linear_fc1", (merged, merged)),
        ("mm.2", "merger.linear_fc2", (out, merged)), ("v.patch_embd", "patch_embed.proj", (wide, 3, patch, patch)),
    ]  # fmt: skip
    for place, layer in enumerate(vision["deepstack_visual_indexes"]):
        shapes = {"norm": ("norm", (merged,)), "fc1": ("linear_fc1", (merged, merged)), "fc2": ("linear_fc2", (out, merged))}
        rows += [
            (f"v.deepstack.{layer}.{stem}", f"deepstack_merger_list.{place}.{path}", shape)
            for stem, (path, shape) in shapes.items()
        ]
    for layer in range(vision["depth"]):
        shapes = {
            "ln1": ("norm1", (wide,)), "ln2": ("norm2", (wide,)), "attn_qkv": ("attn.qkv", (3 * wide, wide)),
            "attn_out": ("attn.proj", (wide, wide)), "ffn_up": ("mlp.linear_fc1", (inner, wide)),
            "ffn_down": ("mlp.linear_fc2", (wide, inner)),
        }  # fmt: skip
        rows += [(f"v.blk.{layer}.{stem}", f"blocks.{layer}.{path}", shape) for stem, (path, shape) in shapes.items()]
    found = {_SECOND: ("", rows[3][2]), _POSITIONS: ("model.visual.pos_embed.weight", (vision["num_position_embeddings"], wide))}
    for own, path, shape in rows:
        found[f"{own}.weight"] = (f"model.visual.{path}.weight", shape)
        found[f"{own}.bias"] = (f"model.visual.{path}.bias", shape[:1])
    return found
