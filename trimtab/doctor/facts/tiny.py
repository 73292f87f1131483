"""Which tiny checkpoints do probes use, and which random inputs does a model take?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WIDTH, HEAD, VOCABULARY = 64, 32, 320
# The last ids of the vocabulary are placeholders: image, audio, begin and end of an image, video.
IMAGE, AUDIO, BEGIN, END, VIDEO = 319, 318, 317, 316, 315
_SLIDING, _FULL = "sliding_attention", "full_attention"

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "max_position_embeddings": 512,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_GEMMA4_VISION: dict[str, Any] = _VISION | {
    "num_key_value_heads": 2, "head_dim": HEAD, "patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 64,
}  # fmt: skip
_GEMMA4_IDS = {
    "image_token_id": IMAGE, "audio_token_id": AUDIO, "boi_token_id": BEGIN, "eoi_token_id": END, "video_token_id": VIDEO,
}  # fmt: skip


def _gemma4(text: Mapping[str, Any]) -> Any:
    from transformers import Gemma4Config

    own = {
        "num_hidden_layers": 5, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL], "num_kv_shared_layers": 2,
        "global_head_dim": 2 * HEAD, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY,
        "use_double_wide_mlp": True, "sliding_window": 8, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    audio = {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 2 * WIDTH,
        "subsampling_conv_channels": [128, 4], "attention_chunk_size": 4, "attention_context_left": 5,
    }  # fmt: skip
    return Gemma4Config(
        text_config=_TEXT | own | dict(text), vision_config=_GEMMA4_VISION | {"use_clipped_linears": True},
        audio_config=audio, **_GEMMA4_IDS,
    )  # fmt: skip


def _gemma4_moe(text: Mapping[str, Any]) -> Any:
    from transformers import Gemma4Config

    own = {
        "layer_types": [_SLIDING, _FULL], "global_head_dim": 2 * HEAD, "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": WIDTH, "sliding_window": 8,
    }  # fmt: skip
    return Gemma4Config(text_config=_TEXT | own | dict(text), vision_config=_GEMMA4_VISION, **_GEMMA4_IDS)


def _qwen2_5_vl(text: Mapping[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 2, "out_hidden_size": 2 * WIDTH,
        "fullatt_block_indexes": [1], "patch_size": 8,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=_TEXT | {"hidden_size": 2 * WIDTH, "rope_parameters": rope} | dict(text), vision_config=vision,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip


def _text_alone(name: str, **own: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Return what makes the config of this class with these fields."""

    def make(text: Mapping[str, Any]) -> Any:
        import transformers

        return getattr(transformers, name)(**(_TEXT | own | dict(text)))

    return make


_FAMILIES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "gemma4": ("Gemma4ForConditionalGeneration", _gemma4),
    "gemma4_moe": ("Gemma4ForConditionalGeneration", _gemma4_moe),
    "gemma3n": ("Gemma3nForCausalLM", _text_alone(
        "Gemma3nTextConfig", num_hidden_layers=4, layer_types=[_SLIDING, _FULL, _SLIDING, _FULL], num_kv_shared_layers=2,
        sliding_window=8, hidden_size_per_layer_input=64, vocab_size_per_layer_input=VOCABULARY, laurel_rank=64,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], altup_num_inputs=4, intermediate_size=[2 * WIDTH] * 4,
    )),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "llama": ("LlamaForCausalLM", _text_alone("LlamaConfig", tie_word_embeddings=False)),
    "qwen3": ("Qwen3ForCausalLM", _text_alone("Qwen3Config", tie_word_embeddings=True)),
    "mixtral": ("MixtralForCausalLM", _text_alone(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
    )),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _text_alone(
        "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH, decoder_sparse_step=1,
    )),
}  # fmt: skip
NAMES: tuple[str, ...] = tuple(_FAMILIES)


def build(name: str, folder: Path, **text: Any) -> Path:
    """Write the tiny checkpoint `name` (one of NAMES) in bfloat16 into folder; text: fields of its text config."""
    import torch
    import transformers

    class_name, make_config = _FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(make_config(text), dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(0)
    buffers = [(path, tensor) for path, tensor in model.named_buffers() if path in model.state_dict()]
    with torch.no_grad():
        for path, tensor in (*model.named_parameters(), *buffers):
            tensor.copy_(_value(path, tensor, generator))
    model.save_pretrained(folder)
    return folder


def _value(path: str, tensor: Any, generator: Any) -> Any:
    """Return weights that keep activations near 1, so that a rounding does not grow from layer to layer."""
    import torch

    noise = torch.randn(tensor.shape, generator=generator)
    if path.endswith(("input_min", "output_min")):
        return -2 - noise.abs()
    if path.endswith(("input_max", "output_max")):
        return 2 + noise.abs()
    if "norm" in path or tensor.dim() < 2:
        return tensor.float() + 0.05 * noise
    if "embed_tokens" in path or "position_embedding" in path:
        return 0.05 * noise
    scale = float(math.prod(tensor.shape[1:]) if tensor.dim() > 3 else tensor.shape[-1]) ** -0.5
    if re.search(r"(o_proj|down_proj|per_layer_projection|linear_end|ffw_layer_2)", path):
        scale /= 2
    return scale * noise


def inputs(config: Any, kind: str) -> dict[str, Any]:
    """Return random forward arguments of one row for a model's config.

    kind: "text", "image" or "audio". Pixels are float32, as from image processors.
    Shapes: input_ids [1, S]. Errors: ValueError for a kind that the family does not take.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    vocabulary = min(config.get_text_config().vocab_size, VOCABULARY)
    text = torch.randint(3, max(vocabulary - 20, 4), (8,), generator=generator)
    media: dict[str, Any] = {}
    placeholders: list[int] = []
    if kind == "image" and config.model_type == "gemma4":
        media = _patches(generator, config.vision_config)
        placeholders = [config.boi_token_id, *[config.image_token_id] * 6, config.eoi_token_id]
    elif kind == "image" and config.model_type.startswith("qwen"):
        vision = config.vision_config
        pixels = torch.randn(16, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
        media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        placeholders = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
    elif kind == "audio" and config.model_type == "gemma4":
        media = {
            "input_features": torch.randn(1, 32, 128, generator=generator),
            "input_features_mask": torch.ones(1, 32, dtype=torch.bool),
        }
        placeholders = [config.audio_token_id] * 8
    elif kind != "text":
        raise ValueError(f"{config.model_type} takes no {kind}")
    ids = torch.cat([text[:3], torch.tensor(placeholders, dtype=torch.long), text[3:]]).unsqueeze(0)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | media
    if media:
        token, number = (config.image_token_id, 1) if kind == "image" else (config.audio_token_id, 3)
        tensors["mm_token_type_ids"] = number * (ids == token).long()
    return tensors


def _patches(generator: Any, vision: Any) -> dict[str, Any]:
    """Return an image of six soft tokens."""
    import torch

    columns, rows = 3 * vision.pooling_kernel_size, 2 * vision.pooling_kernel_size
    pixels = torch.rand(1, columns * rows, 3 * vision.patch_size**2, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), dim=-1)
    return {"pixel_values": pixels, "image_position_ids": grid.reshape(1, -1, 2)}
