"""Which tiny checkpoints the tests run on: real classes of every family with every quirk, a few layers, no download.

`build` writes a checkpoint with transformers' own `save_pretrained`, `inputs` gives forward arguments for it, `adapter`
writes an adapter with stock PEFT. Dimensions are multiples of 64 so that a 4-bit block is a real one. Weights are
random but tame: residual branches are small and query norms 1/16, or a rounding would grow from layer to layer.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEAD, VOCABULARY = 64, 32, 320
# The last ids of the vocabulary are placeholders: picture, sound, begin and end of a picture.
IMAGE, AUDIO, BEGIN, END, VIDEO = 319, 318, 317, 316, 315
TEXT_TOKENS = 12

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "max_position_embeddings": 512,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _gemma4_parts(text: Mapping[str, Any], *, audio: bool, vision: Mapping[str, Any]) -> dict[str, Any]:
    towers: dict[str, Any] = {
        "vision_config": _VISION
        | {"num_key_value_heads": 2, "head_dim": HEAD, "patch_size": 8, "pooling_kernel_size": 2}
        | {"position_embedding_size": 64, **vision}
    }
    if audio:
        towers["audio_config"] = {
            "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 2 * WIDTH,
            "subsampling_conv_channels": [128, 4], "attention_chunk_size": 4, "attention_context_left": 5,
        }  # fmt: skip
    return towers | {
        "text_config": _TEXT | {"sliding_window": 8, "final_logit_softcapping": 30.0} | dict(text),
        "image_token_id": IMAGE, "audio_token_id": AUDIO, "boi_token_id": BEGIN, "eoi_token_id": END,
        "video_token_id": VIDEO,
    }  # fmt: skip


def _gemma4() -> Any:
    from transformers import Gemma4Config

    text = {
        "num_hidden_layers": 5, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL], "num_kv_shared_layers": 2,
        "global_head_dim": 2 * HEAD, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY,
        "use_double_wide_mlp": True,
    }  # fmt: skip
    return Gemma4Config(**_gemma4_parts(text, audio=True, vision={"use_clipped_linears": True}))


def _gemma4_dense() -> Any:
    from transformers import Gemma4Config

    text = {
        "layer_types": [_SLIDING, _FULL], "global_head_dim": 2 * HEAD, "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    return Gemma4Config(**_gemma4_parts(text, audio=False, vision={"standardize": True}))


def _gemma4_moe() -> Any:
    from transformers import Gemma4Config

    text = {
        "layer_types": [_SLIDING, _FULL], "global_head_dim": 2 * HEAD, "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": WIDTH,
    }  # fmt: skip
    return Gemma4Config(**_gemma4_parts(text, audio=False, vision={}))


def _gemma3() -> Any:
    from transformers import Gemma3Config

    text = _TEXT | {"layer_types": [_SLIDING, _FULL], "sliding_window": 8, "query_pre_attn_scalar": HEAD}
    return Gemma3Config(
        text_config=text, vision_config=_VISION | {"image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip


def _gemma3n() -> Any:
    from transformers import Gemma3nTextConfig

    text = {
        "num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL], "num_kv_shared_layers": 2,
        "sliding_window": 8, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 64, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "altup_num_inputs": 4,
        "intermediate_size": [2 * WIDTH] * 4,
    }  # fmt: skip
    return Gemma3nTextConfig(**(_TEXT | text))


def _qwen_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=_TEXT | {"hidden_size": 2 * WIDTH, "rope_parameters": _qwen_rope()},
        vision_config={
            "depth": 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 2,
            "out_hidden_size": 2 * WIDTH, "fullatt_block_indexes": [1], "patch_size": 8,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip


def _qwen3_vl(name: str = "") -> Any:
    """Name: "Moe" for a mixture, whose files have its stacks transposed."""
    import transformers

    text: dict[str, Any] = _TEXT | {"rope_parameters": _qwen_rope()}
    if name:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * WIDTH, "mlp_only_layers": [1]}
    return getattr(transformers, f"Qwen3VL{name}Config")(
        text_config=text,
        vision_config={
            "depth": 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 2, "out_hidden_size": WIDTH,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 8,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
        tie_word_embeddings=not name,
    )  # fmt: skip


def _mistral3() -> Any:
    from transformers import Mistral3Config

    return Mistral3Config(
        text_config=_TEXT | {"model_type": "mistral"},
        vision_config=_VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 16, "head_dim": HEAD},
        image_token_index=IMAGE, spatial_merge_size=2,
    )  # fmt: skip


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_TEXT, tie_word_embeddings=False)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_TEXT, tie_word_embeddings=True)


def _qwen3_5(name: str = "", *, has_images: bool = False) -> Any:
    """Name: "Moe" for a mixture. With images, several values of a head turn along each axis."""
    import transformers

    text: dict[str, Any] = _TEXT | {
        "num_hidden_layers": 4, "tie_word_embeddings": False, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    if name:
        text |= {"num_experts": 4, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
    if not has_images:
        return getattr(transformers, f"Qwen3_5{name}TextConfig")(**text)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    rope["mrope_interleaved"] = True
    vision = {
        "depth": 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 2, "out_hidden_size": WIDTH,
        "num_position_embeddings": 16, "patch_size": 8,
    }  # fmt: skip
    return getattr(transformers, f"Qwen3_5{name}Config")(
        text_config=text | {"rope_parameters": rope}, vision_config=vision,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip


_GROWING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 256, "factor": 2.0,
}  # fmt: skip


def _text(name: str, **more: Any) -> Any:
    """The config of a family without images, which has no name of its own here."""
    import transformers

    return getattr(transformers, f"{name}Config")(**_TEXT | {"tie_word_embeddings": False} | more)


def _llava() -> Any:
    from transformers import LlavaConfig

    vision = _VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": WIDTH}
    return LlavaConfig(text_config=_TEXT | {"model_type": "llama"}, vision_config=vision, image_token_index=IMAGE)


def _internvl() -> Any:
    from transformers import InternVLConfig

    vision = _VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    return InternVLConfig(text_config=_TEXT | {"model_type": "qwen2"}, vision_config=vision, image_token_id=IMAGE)


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    return Qwen3MoeConfig(**_TEXT, **experts, mlp_only_layers=[1], decoder_sparse_step=1)


_CONFIGS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "gemma4": ("Gemma4ForConditionalGeneration", _gemma4), "gemma4_dense": ("Gemma4ForConditionalGeneration", _gemma4_dense),
    "gemma4_moe": ("Gemma4ForConditionalGeneration", _gemma4_moe), "gemma3": ("Gemma3ForConditionalGeneration", _gemma3),
    "gemma3n": ("Gemma3nForCausalLM", _gemma3n), "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _qwen3_vl), "mistral3": ("Mistral3ForConditionalGeneration", _mistral3),
    "llama": ("LlamaForCausalLM", _llama), "qwen3": ("Qwen3ForCausalLM", _qwen3), "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
}  # fmt: skip
FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
# With tests of their own; not in those of every family.
_OTHERS = {
    "qwen3_5": ("Qwen3_5ForCausalLM", _qwen3_5),
    "gemma2": (
        "Gemma2ForCausalLM",
        partial(
            _text, "Gemma2", sliding_window=8, query_pre_attn_scalar=2 * HEAD, attn_logit_softcapping=0.5,
            final_logit_softcapping=2.0,
        ),
    ),
    "gemma": ("GemmaForCausalLM", partial(_text, "Gemma", tie_word_embeddings=True)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        partial(
            _text, "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH,
            shared_expert_intermediate_size=WIDTH, decoder_sparse_step=1, mlp_only_layers=[1],
        ),
    ),
    "ministral3": ("Ministral3ForCausalLM", partial(_text, "Ministral3", rope_parameters=_GROWING)),
    "phi3": (
        "Phi3ForCausalLM",
        partial(_text, "Phi3", sliding_window=12, original_max_position_embeddings=256, head_dim=HEAD // 2, rope_parameters=_LONG),
    ),
    "olmo2": ("Olmo2ForCausalLM", partial(_text, "Olmo2")),
    "olmo3": ("Olmo3ForCausalLM", partial(_text, "Olmo3", layer_types=[_SLIDING, _FULL], sliding_window=8)),
    "glm": ("GlmForCausalLM", partial(_text, "Glm", attention_bias=True)),
    "glm4": ("Glm4ForCausalLM", partial(_text, "Glm4", attention_bias=True)),
    "smollm3": ("SmolLM3ForCausalLM", partial(_text, "SmolLM3", no_rope_layers=[1, 0])),
    "qwen2": (
        "Qwen2ForCausalLM",
        partial(_text, "Qwen2", use_sliding_window=True, sliding_window=8, layer_types=[_FULL, _SLIDING], tie_word_embeddings=True),
    ),
    "seed_oss": ("SeedOssForCausalLM", partial(_text, "SeedOss", attention_bias=True, attention_out_bias=False)),
    "granite": (
        "GraniteForCausalLM",
        partial(
            _text, "Granite", embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.22, logits_scaling=8.0
        ),
    ),
    "qwen3_5_vl": ("Qwen3_5ForConditionalGeneration", partial(_qwen3_5, has_images=True)),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", partial(_qwen3_5, "Moe")),
    "qwen3_5_moe_vl": ("Qwen3_5MoeForConditionalGeneration", partial(_qwen3_5, "Moe", has_images=True)),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", partial(_qwen3_vl, "Moe")),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        partial(
            _text, "Glm4Moe", use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
            first_k_dense_replace=1, moe_intermediate_size=WIDTH, n_group=1, topk_group=1,
        ),
    ),
    "llava": ("LlavaForConditionalGeneration", _llava), "internvl": ("InternVLForConditionalGeneration", _internvl),
    "gpt_oss": (
        "GptOssForCausalLM",
        partial(_text, "GptOss", layer_types=[_SLIDING, _FULL], sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
    ),
}  # fmt: skip


# Checkpoints ----------------------------------------------------------------------------------------------------------


def build(family: str, folder: Path, *, seed: int = 0, dtype: str = "bfloat16", shards: int = 1) -> Path:
    """Write the family's checkpoint into folder and return it. shards: at least this many files, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(_built(family, seed, dtype, shards), folder, dirs_exist_ok=True)
    return folder


def built(family: str) -> Path:
    """Return the folder of the family's checkpoint that all tests of a process share: none of them changes it."""
    return _built(family, 0, "bfloat16", 1)


@cache
def _cache_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="trimtab-pico-", ignore_cleanup_errors=True)


@cache
def _built(family: str, seed: int, dtype: str, shards: int) -> Path:
    folder = Path(_cache_folder().name) / f"{family}-{seed}-{dtype}-{shards}"
    model = make_model(family, seed=seed, dtype=dtype)
    byte_count = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size="1GB" if shards == 1 else max(byte_count // (shards + 1), 1))
    return folder


def make_model(family: str, *, seed: int = 0, dtype: str = "bfloat16") -> Any:
    """Return the family's real model on the CPU with tame random weights, in eval mode."""
    import transformers

    class_name, make_config = _CONFIGS.get(family) or _OTHERS[family]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # a test draws on alike, whoever made the model
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = getattr(transformers, class_name)._from_config(make_config(), dtype=getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(seed)
    depth = sum(1 for path, _ in model.named_modules() if re.search(r"\.(layers|blocks)\.\d+$", path))
    buffers = [(path, tensor) for path, tensor in model.named_buffers() if path in model.state_dict()]
    unit_scores = not family.startswith(("gemma4", "gemma3n"))
    with torch.no_grad():
        for path, tensor in (*model.named_parameters(), *buffers):
            tensor.copy_(_value(path, tensor, depth, generator, unit_scores=unit_scores))
    return model


def _value(path: str, tensor: Tensor, depth: int, generator: torch.Generator, *, unit_scores: bool) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if re.search(r"linear_attn\.(in_proj_qkv|conv1d)\.weight$", path):
        # Keys near their token's queries: a norm of a product near 0 is a sign, which turns with a rounding.
        size = len(tensor) // 4
        noise[size : 2 * size] = (noise[:size] + 0.25 * noise[size : 2 * size]) / 1.03
    if path.endswith(("input_min", "output_min")):
        return -2 - noise.abs()
    if path.endswith(("input_max", "output_max")):
        return 2 + noise.abs()
    if re.search(r"\.(q|k)_norm\.weight$", path) and not unit_scores:
        return tensor.float() / 16 * (1 + 0.1 * noise)  # attention without 1/sqrt(d): keep it far from one-hot
    if path.endswith("A_log"):
        return 0.5 * noise - 3  # states that remember: a norm of one token's product with itself is a sign
    if "norm" in path or tensor.dim() < 2:
        return tensor.float() + 0.05 * noise
    if "embed_tokens" in path or "position_embedding" in path or "pos_embed" in path:
        return 0.05 * noise
    scale = float(math.prod(tensor.shape[1:]) if tensor.dim() > 3 else tensor.shape[-1]) ** -0.5
    if re.search(r"(o_proj|down_proj|per_layer_projection|linear_end|ffw_layer_2|attn\.proj|fc2|linear_right)", path):
        scale /= (2 * depth) ** 0.5
    if re.search(r"router\.proj|mlp\.gate\.weight", path):
        scale *= 8  # a rounding must not choose another expert
    return scale * noise


# Inputs ---------------------------------------------------------------------------------------------------------------


def inputs(family: str, model_config: Any, *, seed: int = 0) -> dict[str, Tensor]:
    """Return forward arguments of one row: text, and pictures and sound where the family sees and hears.

    Soft tokens stand as placeholder ids between text tokens. Pixels are float32, as image processors give them.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    text = torch.randint(3, 300, (TEXT_TOKENS,), generator=generator)
    media: dict[str, Tensor] = {}
    image_tokens = audio_tokens = 0
    if family.startswith("gemma4"):
        media, image_tokens = _patches(generator, model_config.vision_config)
    elif family in ("gemma3", "mistral3", "llava", "internvl"):
        size = model_config.vision_config.image_size
        size = size if isinstance(size, int) else size[0]
        media["pixel_values"], image_tokens = torch.randn(1, 3, size, size, generator=generator), 1 if family == "internvl" else 4
        if family == "mistral3":
            media["image_sizes"] = torch.tensor([[size, size]])
    elif "_vl" in family:
        vision = model_config.vision_config
        pixels = torch.randn(16, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
        media, image_tokens = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}, 4
    if getattr(model_config, "audio_config", None) is not None:
        frames, audio_tokens = 32, 8
        media["input_features"] = torch.randn(1, frames, 128, generator=generator)
        media["input_features_mask"] = torch.ones(1, frames, dtype=torch.bool)
    picture = [BEGIN, *[IMAGE] * image_tokens, END] if image_tokens else []
    sound = [AUDIO] * audio_tokens
    ids = torch.cat([text[:4], torch.tensor(picture + sound, dtype=torch.long), text[4:]]).unsqueeze(0)
    types = (ids == IMAGE).long() + 3 * (ids == AUDIO).long()
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | media
    if image_tokens and family not in ("mistral3", "llava", "internvl"):
        found["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = types
    return found


def _patches(generator: torch.Generator, vision: Any) -> tuple[dict[str, Tensor], int]:
    columns, rows = 6, 4
    pixels = torch.rand(1, columns * rows, 3 * vision.patch_size**2, generator=generator)
    grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    positions = torch.stack([grid[1], grid[0]], dim=-1).reshape(1, -1, 2)
    return {"pixel_values": pixels, "image_position_ids": positions}, columns * rows // vision.pooling_kernel_size**2


# Adapters -------------------------------------------------------------------------------------------------------------

_PROJECTIONS = r"(q|k|v|o|gate|up|down)_proj"
_RECURRENT = r"linear_attn\.(in_proj_\w+|out_proj)"
_LANGUAGE = rf"model\.(language_model\.)?layers\.\d+\.((self_attn|mlp|mlp\.shared_expert)\.{_PROJECTIONS}|{_RECURRENT})"
_TOWERS = r"model\.(vision_tower|visual|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..+"


def adapter(base_folder: Path, folder: Path, **options: Any) -> Path:
    """Write an adapter for a checkpoint with stock PEFT, random and not zero, and return its folder. options: of `_adapter`.

    PEFT makes it once a process for checkpoints with the same files; folders of tests have copies.
    """
    files = sorted(file for file in Path(base_folder).iterdir() if file.is_file())
    known = hashlib.sha256(repr(sorted(options.items())).encode())
    for file in files:
        known.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    made = Path(_cache_folder().name) / f"adapter-{known.hexdigest()}"
    if not made.exists():
        _adapter(base_folder, made, **options)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    config = json.loads((made / "adapter_config.json").read_text(encoding="utf-8"))
    former, config["base_model_name_or_path"] = config["base_model_name_or_path"], str(base_folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    card = (made / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(card.replace(former, str(base_folder)), encoding="utf-8")
    return folder


def _adapter(
    base_folder: Path, folder: Path, *, targets: str = "text", rank: int = 4, rslora: bool = False, dora: bool = False,
    bias: bool = False, embeddings: bool = False, modules_to_save: Sequence[str] = (),
    rank_pattern: Mapping[str, int] | None = None, alpha_pattern: Mapping[str, int] | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Write an adapter into a new folder.

    targets: "text" is every attention and MLP projection of the language model; "all" also every Linear of towers and
    connectors, inside Gemma 4's wrappers by their inner `.linear`; else a pattern of paths. bias: lora_bias. embeddings: LoRA
    on embed_tokens too.
    """
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model = _load(base_folder)
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, use_rslora=rslora, use_dora=dora, lora_bias=bias, task_type="CAUSAL_LM",
            target_modules=_targets(model, targets, embeddings), modules_to_save=list(modules_to_save) or None,
            rank_pattern=dict(rank_pattern or {}), alpha_pattern=dict(alpha_pattern or {}),
        )  # fmt: skip
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, config)
        _randomize(peft_model, torch.Generator().manual_seed(seed))
        peft_model.save_pretrained(folder)


def _load(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=config.dtype).eval()


def _targets(model: Any, targets: str, embeddings: bool) -> str | list[str]:
    if targets not in ("text", "all"):
        return targets
    if not any(re.match(_TOWERS, path) for path, _ in model.named_modules()):
        # PEFT turns MLP names of a model with fused experts into adapters on 3-D parameters.
        fused = any(parameter.dim() == 3 for parameter in model.parameters())
        names = [f"{name}_proj" for name in ("qkvo" if fused else ("q", "k", "v", "o", "gate", "up", "down"))]
        there = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        more = ("qkv_proj", "gate_up_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
        names += [name for name in more if name in there]
        return [*names, "embed_tokens"] if embeddings else names
    wanted = {"text": _LANGUAGE, "all": f"{_LANGUAGE}|{_TOWERS}"}[targets]
    # Exact class: a subclass such as the output projection of nn.MultiheadAttention is read from outside its forward.
    paths = [path for path, module in model.named_modules() if type(module) is nn.Linear and re.fullmatch(wanted, path)]
    if embeddings:
        paths.append(next(path for path, _ in model.named_modules() if path.endswith(".embed_tokens")))
    return "|".join(sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(path)) for path in paths}))


def _randomize(peft_model: Any, generator: torch.Generator) -> None:
    with torch.no_grad():
        for path, parameter in peft_model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if "lora_magnitude_vector" in path:
                parameter.mul_(1 + 0.1 * noise)
            elif "lora_B" in path or "lora_embedding_B" in path:
                parameter.copy_(0.03 * noise)
            elif "lora_embedding_A" in path:
                parameter.copy_(0.3 * noise)
            elif "modules_to_save" in path:
                parameter.add_(0.05 * noise)


# Real sizes -----------------------------------------------------------------------------------------------------------


def e_series_config(size: str) -> Any:
    """Return the Gemma 4 configuration with the sizes of the released "e2b" or "e4b"."""
    from transformers import Gemma4Config

    e2b = {"e2b": True, "e4b": False}[size]
    layers, every = (35, 5) if e2b else (42, 6)
    text = {
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size": 1536 if e2b else 2560,
        "intermediate_size": 6144 if e2b else 10240, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 1 if e2b else 2, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20 if e2b else 18, "sliding_window": 512,
        "use_double_wide_mlp": e2b, "final_logit_softcapping": 30.0,
        "layer_types": [_SLIDING if (i + 1) % every else _FULL for i in range(layers)],
    }  # fmt: skip
    config = Gemma4Config(text_config=text, vision_config={"use_clipped_linears": True}, audio_config={"output_proj_dims": 1536})
    config.architectures, config.dtype = ["Gemma4ForConditionalGeneration"], torch.bfloat16
    return config


def e_series(size: str, folder: Path) -> Path:
    """Write the config.json of a real size, without weights, and return the folder."""
    e_series_config(size).save_pretrained(folder)
    return folder


def big_adapter_header(folder: Path, size: str = "e2b", rank: int = 8) -> Path:
    """Write an adapter of a real size, its weights a sparse file of zeros, and return its folder.

    For E2B the field's 786 tensors: language 490 (the 80 of k and v in KV-shared layers, which the model does not have,
    among them), vision 224, audio 72. As there, target_modules are the broad outer names, tower keys carry the inner
    `.linear`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for path, (rows, columns) in _big_targets(e_series_config(size)).items():
        for role, shape in (("A", [rank, columns]), ("B", [rows, rank])):
            nbytes = 4 * math.prod(shape)
            header[f"base_model.model.{path}.lora_{role}.weight"] = {
                "dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]
            }  # fmt: skip
            end += nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": f"gemma-4-{size}", "r": rank,
        "lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True, "use_rslora": False,
        "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return folder


def _big_targets(config: Any) -> dict[str, tuple[int, int]]:
    """Return path -> (rows, columns) of every adapted projection, counted from the sizes, not from the model."""
    text, vision, audio = config.text_config, config.vision_config, config.audio_config
    found: dict[str, tuple[int, int]] = {}
    first_shared = text.num_hidden_layers - text.num_kv_shared_layers
    for layer, kind in enumerate(text.layer_types):
        head = 512 if kind == _FULL else 256
        wide = text.intermediate_size * (2 if text.use_double_wide_mlp and layer >= first_shared else 1)
        stem = f"model.language_model.layers.{layer}"
        found |= _layer(stem, text.hidden_size, wide, text.num_attention_heads * head, text.num_key_value_heads * head)
    for layer in range(vision.num_hidden_layers):
        heads, kv_heads = vision.num_attention_heads * vision.head_dim, vision.num_key_value_heads * vision.head_dim
        stem = f"model.vision_tower.encoder.layers.{layer}"
        inner = _layer(stem, vision.hidden_size, vision.intermediate_size, heads, kv_heads)
        found |= {f"{path}.linear": shape for path, shape in inner.items()}
    for layer in range(audio.num_hidden_layers):
        for name in ("q", "k", "v"):
            path = f"model.audio_tower.layers.{layer}.self_attn.{name}_proj.linear"
            found[path] = (audio.hidden_size, audio.hidden_size)
    return found


def _layer(stem: str, width: int, wide: int, q_out: int, kv_out: int) -> dict[str, tuple[int, int]]:
    return {
        f"{stem}.self_attn.q_proj": (q_out, width), f"{stem}.self_attn.k_proj": (kv_out, width),
        f"{stem}.self_attn.v_proj": (kv_out, width), f"{stem}.self_attn.o_proj": (width, q_out),
        f"{stem}.mlp.gate_proj": (wide, width), f"{stem}.mlp.up_proj": (wide, width),
        f"{stem}.mlp.down_proj": (width, wide),
    }  # fmt: skip
