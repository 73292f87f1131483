"""Random checkpoints and adapters of real sizes, made on the GPU: Gemma 4 E2B and E4B with vision and audio, and text models and
Qwen3-VL-4B of other families; for a CPU a Llama of 310 million weights.

The weights mean nothing. Their scales are chosen so that a rounding is not amplified from layer to layer: with unit
query and key norms attention is nearly one-hot and two routes that are equal on paper differ by several percent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trimtab.engine.kv.sequence import Inputs

LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
SHARD_BYTES = 4 * 10**9
LANGUAGE = r"language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
VISION = r"vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.linear"
AUDIO = r"audio_tower\.layers\.\d+\.self_attn\.(q|k|v)_proj\.linear"
TARGETS = rf".*({LANGUAGE}|{VISION}|{AUDIO})"
# Qwen3 has no "language_model" in its paths; Qwen3-VL has, and its tower's linears have names of their own.
QWEN_TARGETS = (
    r"(model\.)?(language_model\.)?layers\.\d+\.((self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj|linear_attn\.(in_proj_(qkv|z)|out_proj))"
    r"|model\.visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
)
PACKED = (
    r"layers\.\d+\.((self_attn|mlp|mlp\.shared_expert|linear_attn|router)\.(?!gate\.)\w+|per_layer_input_gate|per_layer_projection)"
    r"\.weight$"
)
# Modules that stay in 16 bits, by whole paths: transformers matches from the start of a name.
NOT_PACKED = (
    "lm_head", "model.visual", "model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio",
    "model.language_model.per_layer_model_projection",
)  # fmt: skip
CLASSES = {
    "e2b": "Gemma4ForConditionalGeneration",
    "e4b": "Gemma4ForConditionalGeneration",
    "qwen3-8b": "Qwen3ForCausalLM",
    "qwen3-vl-4b": "Qwen3VLForConditionalGeneration",
    "llama-310m": "LlamaForCausalLM",
    "llama-3-8b": "LlamaForCausalLM",
    "gemma3-4b": "Gemma3ForCausalLM",
    "qwen3.5-9b": "Qwen3_5ForCausalLM",
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "qwen3.5-35b-a3b": "Qwen3_5MoeForCausalLM",
    "26b-a4b": "Gemma4ForConditionalGeneration",
}
# That neither see nor hear.
READERS = ["qwen3-8b", "llama-310m", "llama-3-8b", "gemma3-4b", "qwen3.5-9b", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "26b-a4b"]
# A few narrow layers of a size: every bench runs on a CPU with it, to see that it will on a GPU.
TINY = "-tiny"
CLASSES |= {size + TINY: name for size, name in CLASSES.items()}
READERS += [size + TINY for size in READERS]
# Sizes of released text models, as their config.json has them.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("LlamaConfig", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    }),
    "gemma3-4b": ("Gemma3TextConfig", {
        "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256,
    }),
    "qwen3.5-9b": ("Qwen3_5TextConfig", {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": False,
    }),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    }),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeTextConfig", {}),  # transformers' defaults are this model's
}  # fmt: skip


def config_of(size: str) -> Any:
    """Return the config of "e2b", "e4b" (Gemma 4), "qwen3-8b", "qwen3-vl-4b" (sizes of the released models), "llama-310m", one of
    TEXTS, or of any of them with `TINY` behind its name."""
    if size.endswith(TINY):
        return _narrow(config_of(size.removesuffix(TINY)))
    if size == "llama-310m":
        from transformers import LlamaConfig

        return LlamaConfig(**LLAMA)
    if size in TEXTS:
        import transformers

        name, values = TEXTS[size]
        return getattr(transformers, name)(**values)
    if size.startswith("qwen"):
        return _qwen_config(size)
    from transformers import Gemma4Config

    if size == "26b-a4b":
        text = {
            "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 1024,
            "final_logit_softcapping": 30.0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "layer_types": ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(30)],
        }  # fmt: skip
        return Gemma4Config(text_config=text, vision_config={"num_hidden_layers": 2}, audio_config=None)
    e2b = size == "e2b"
    layers, every = (35, 5) if e2b else (42, 6)
    text = {
        "vocab_size": 262144, "hidden_size": 1536 if e2b else 2560, "intermediate_size": 6144 if e2b else 10240,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 1 if e2b else 2, "head_dim": 256,
        "global_head_dim": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20 if e2b else 18,
        "sliding_window": 512, "use_double_wide_mlp": e2b, "final_logit_softcapping": 30.0,
        "layer_types": ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)],
    }  # fmt: skip
    return Gemma4Config(text_config=text, vision_config={"use_clipped_linears": True}, audio_config={"output_proj_dims": 1536})


def first_layers(config: Any, layers: int) -> Any:
    """Return the config of a model's first layers."""
    text = config.get_text_config()
    own = text.to_dict()
    own.pop("per_layer_config", None)  # of all layers; made again
    shared = own.get("num_kv_shared_layers")
    own |= {"num_hidden_layers": layers} | ({"num_kv_shared_layers": shared * layers // text.num_hidden_layers} if shared else {})
    own |= {"layer_types": own["layer_types"][:layers]} if own.get("layer_types") else {}
    if text is config:
        return type(text)(**own)
    config.text_config = type(text)(**own)
    return config


def _narrow(config: Any) -> Any:
    """Return a config with few and narrow layers, one of each kind."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    config = first_layers(config, 2 * (kinds.index("full_attention") + 1) if kinds else 4)
    text = config.get_text_config()
    text.hidden_size, text.intermediate_size = 256, 512
    if getattr(text, "moe_intermediate_size", None):
        text.num_experts, text.moe_intermediate_size = 8, 128
    if getattr(text, "hidden_size_per_layer_input", 0):
        text.hidden_size_per_layer_input = 64
    vision = getattr(config, "vision_config", None)
    if hasattr(vision, "deepstack_visual_indexes"):  # Qwen3-VL
        vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads = 4, 128, 256, 2
        vision.out_hidden_size, vision.deepstack_visual_indexes = 256, [0, 1, 2]
    elif vision is not None:
        vision.num_hidden_layers, vision.hidden_size, vision.intermediate_size = 2, 128, 256
        vision.num_attention_heads = vision.num_key_value_heads = 2
        if config.audio_config is not None:
            config.audio_config.num_hidden_layers = 2
    return config


def _qwen_config(size: str) -> Any:
    from transformers import Qwen3Config, Qwen3VLConfig

    if size == "qwen3-8b":
        return Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
            rope_theta=1000000.0,
        )  # fmt: skip
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tie_word_embeddings=True,
    )  # fmt: skip


def empty_model(config: Any, size: str = "e4b") -> Any:
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return getattr(transformers, CLASSES[size])(config)
    finally:
        torch.set_default_dtype(torch.float32)


def write_checkpoint(
    size: str, folder: Path, *, device: str = "cuda", packed: bool = False, config: Any = None,
    made_of: Callable[[str, Any], dict[str, Any]] | None = None,
) -> Path:  # fmt: skip
    """Write the checkpoint as shards with an index, made tensor by tensor on the device. packed: the decoder's linears in NF4
    with double quantization, as transformers saves them. config: another of this size. made_of: the tensors of a weight in another
    format, by name; none for a weight that stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(size) if config is None else config
    config.dtype, config.architectures = torch.bfloat16, [CLASSES[size]]
    model = empty_model(config, size)
    depth = config.get_text_config().num_hidden_layers
    tied = config.get_text_config().tie_word_embeddings
    generator = torch.Generator(device=device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, empty in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        made = {} if made_of is None else made_of(name, empty)
        made = made or {name: _value(name, empty, depth, generator, device)}
        if packed and empty.dim() == 2 and re.search(PACKED, name) and not name.startswith(NOT_PACKED):
            made = _packed(name, made[name])
        nbytes = sum(one.nbytes for one in made.values())
        if held + nbytes > SHARD_BYTES and shards[-1]:
            _save(shards[-1], folder, len(shards))
            shards[-1] = dict.fromkeys(shards[-1], torch.empty(0))
            shards.append({})
            held = 0
        shards[-1] |= {key: one.cpu() for key, one in made.items()}
        held += nbytes
    _save(shards[-1], folder, len(shards))
    weight_map = {name: f"model-{i:05d}.safetensors" for i, shard in enumerate(shards, 1) for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if packed:
        config.quantization_config = {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(NOT_PACKED),
        }  # fmt: skip
    config.save_pretrained(folder)
    if size.startswith(("e2b", "e4b")):
        _write_for_every_release(folder / "config.json")
    return folder


def _packed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a linear's weight in NF4 with double quantization, its tensors by their names in a file."""
    from bitsandbytes.functional import quantize_4bit

    weight, state = quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
    return {name: weight} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}


def _write_for_every_release(file: Path) -> None:
    """Leave the vision tower's rotary embedding to its default: 5.23 calls it "axial", a name that 5.6.2 does not know."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["vision_config"].pop("rope_parameters", None)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _value(name: str, empty: torch.Tensor, depth: int, generator: torch.Generator, device: str) -> torch.Tensor:
    if not empty.is_floating_point():
        return torch.zeros(empty.shape, dtype=empty.dtype, device=device)
    if name.endswith(("input_min", "output_min")):
        return torch.full(empty.shape, -64.0, dtype=empty.dtype, device=device)
    if name.endswith(("input_max", "output_max")):
        return torch.full(empty.shape, 64.0, dtype=empty.dtype, device=device)
    if "q_norm" in name:
        return torch.full(empty.shape, 1 / 16, dtype=empty.dtype, device=device)
    if "norm" in name or name.endswith(("layer_scalar", "std_scale", "per_dim_scale", "router.scale", "per_expert_scale")):
        return torch.ones(empty.shape, dtype=empty.dtype, device=device)
    if empty.dim() < 2 or name.endswith("bias"):
        return torch.zeros(empty.shape, dtype=empty.dtype, device=device)
    scale = empty.shape[-1] ** -0.5
    if re.search(r"(o_proj|down_proj|linear_fc2|attn\.proj|per_layer_projection|lconv1d\.linear_end|ffw_layer_2)", name):
        scale /= (2 * depth) ** 0.5
    if "embed_tokens" in name or "position_embedding" in name:
        scale = 0.02
    tensor = torch.empty(empty.shape, dtype=empty.dtype, device=device)
    return tensor.normal_(0, scale, generator=generator)


def _save(shard: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})


def write_adapter(checkpoint: Path, folder: Path, rank: int, *, seed: int = 1, size: str | None = None) -> Path:
    """Write a PEFT adapter on language, vision and audio modules; tower keys carry the inner `.linear` path."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(checkpoint)
    size = size or next(size for size, name in CLASSES.items() if name in config.architectures)
    model, targets = empty_model(config, size), TARGETS if size.startswith(("e2b", "e4b")) else QWEN_TARGETS
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and re.fullmatch(targets, path):
            key = f"base_model.model.{path}"
            a = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
            b = torch.randn(module.out_features, rank, generator=generator) * 0.02 / rank**0.5
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "r": rank, "lora_alpha": rank,
        "lora_dropout": 0.0, "bias": "none", "target_modules": targets, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(peft_config, indent=1))
    return folder


def text_inputs(config: Any, tokens: int, *, device: str, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return input_ids and mask [1, tokens] of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 150000, (1, tokens), generator=generator).to(device)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        **({"mm_token_type_ids": torch.zeros_like(ids)} if config.model_type.startswith("gemma4") else {}),
    }  # fmt: skip


def media_prompt(config: Any, *, seconds: float = 10.0) -> Inputs:
    """Return `media_inputs` on the GPU as a prompt."""
    tensors = media_inputs(config, device="cuda", seconds=seconds)
    ids = tuple(tensors["input_ids"][0].tolist())
    return Inputs(tensors, len(ids), ids, has_media=True)


def media_inputs(config: Any, *, device: str, seconds: float = 10.0) -> dict[str, torch.Tensor]:
    """Return one picture of 2,520 patches (280 soft tokens) and one sound, with 64 text tokens around them."""
    generator = torch.Generator().manual_seed(4)
    columns, rows = 60, 42
    pixels = torch.rand(1, columns * rows, 3 * config.vision_config.patch_size**2, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).reshape(1, -1, 2)
    frames = int(seconds * 100)
    features = torch.randn(1, frames, 128, generator=generator)
    sound_tokens = ((frames + 1) // 2 + 1) // 2
    text = torch.randint(1000, 200000, (64,), generator=generator)
    ids = torch.cat([
        text[:32], torch.full((280,), config.image_token_id), torch.full((sound_tokens,), config.audio_token_id),
        text[32:],
    ]).unsqueeze(0)  # fmt: skip
    types = (ids == config.image_token_id).long() + 3 * (ids == config.audio_token_id).long()
    return {
        "input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device),
        "mm_token_type_ids": types.to(device), "pixel_values": pixels.to(device, torch.bfloat16),
        "image_position_ids": grid.to(device), "input_features": features.to(device, torch.bfloat16),
        "input_features_mask": torch.ones(1, frames, dtype=torch.bool, device=device),
    }  # fmt: skip
