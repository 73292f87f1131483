"""What the demo runs on: a tiny Gemma 4 with random weights that reads, sees and hears, two adapters, a picture, a sound.

Made in a folder in a few seconds from transformers' own classes. The folder is laid out as

    base/  adapters/NAME/  images/  sounds/  prompts.jsonl (one JSON object a line: kind, prompt, image or audio)

The weights are random: the model shows where bytes go and that two placements agree, and its answers mean nothing.
"""

from __future__ import annotations

import json
import math
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

SEED = 20260401
RATE_HZ = 16_000
PIXELS = 128
RANK = 8
# Names of Gemma 4's special tokens; the ids are our own.
NAMED_TOKENS = {
    "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip
MODEL_TOKENS = {
    "sot_token": "<|turn>", "eot_token": "<turn|>", "boi_token": "<|image>", "eoi_token": "<image|>",
    "image_token": "<|image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {{- part['text'] if part['type'] == 'text' else '<|' + part['type'] + '|>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{{- '<|turn>model\\n' if add_generation_prompt -}}
"""
LANGUAGE = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
TOWERS = r"model\.(vision_tower|audio_tower)\..*\.(q|k|v)_proj\.linear"
ADAPTERS = {"words": LANGUAGE, "senses": f"{LANGUAGE}|{TOWERS}"}


def build(folder: Path) -> None:
    """Fill the folder; the same bytes each time with the same releases of torch and transformers."""
    tokenizer = _tokenizer()
    config = _config(tokenizer)
    _write_base(config, tokenizer, folder / "base")
    for name, targets in ADAPTERS.items():
        _write_adapter(config, targets, folder / "adapters" / name)
    (folder / "images").mkdir()
    (folder / "sounds").mkdir()
    _picture().save(folder / "images" / "shapes.png")
    _write_sound(folder / "sounds" / "beeps.wav")
    prompts = [
        {"kind": "text", "prompt": "Which surface turns a great rudder?"},
        {"kind": "image", "prompt": "What is shown?", "image": "images/shapes.png"},
        {"kind": "audio", "prompt": "What is heard?", "audio": "sounds/beeps.wav"},
    ]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")


def _tokenizer() -> Any:
    """Return a tokenizer whose pieces are single characters, and bytes for all others."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import GemmaTokenizer

    special = [*NAMED_TOKENS.values(), *MODEL_TOKENS.values(), "<|video|>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n", *map(chr, range(33, 127))]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(special)
    return GemmaTokenizer(
        tokenizer_object=backend, **NAMED_TOKENS, extra_special_tokens=MODEL_TOKENS, padding_side="left"
    )


def _config(tokenizer: Any) -> Any:
    """Return a config with every quirk of the family; widths are multiples of 64, the block of a 4-bit format."""
    from transformers import Gemma4Config

    rows = math.ceil(len(tokenizer) / 64) * 64
    text = {
        "vocab_size": rows, "vocab_size_per_layer_input": rows, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "global_head_dim": 64, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
        "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(8)],
        "sliding_window": 64, "final_logit_softcapping": 30.0, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 32, "patch_size": 8, "pooling_kernel_size": 2,
        "position_embedding_size": 128, "use_clipped_linears": True,
    }  # fmt: skip
    audio = {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 192,
        "subsampling_conv_channels": [128, 32], "use_clipped_linears": True,
    }  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in MODEL_TOKENS.items()}
    config = Gemma4Config(
        text_config=text, vision_config=vision, audio_config=audio, boi_token_id=ids["boi_token"],
        eoi_token_id=ids["eoi_token"], image_token_id=ids["image_token"], boa_token_id=ids["boa_token"],
        eoa_token_index=ids["eoa_token"], audio_token_id=ids["audio_token"],
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
    )  # fmt: skip
    config.architectures, config.dtype = ["Gemma4ForConditionalGeneration"], torch.bfloat16
    return config


def _write_base(config: Any, tokenizer: Any, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import Gemma4ForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Gemma4ForConditionalGeneration(config)
    tensors = {
        name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    _write_processor(folder)
    generation = {"bos_token_id": 2, "eos_token_id": [1, tokenizer.convert_tokens_to_ids("<turn|>")], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _write_processor(folder: Path) -> None:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    # 70 is the smallest budget that the family knows: 8 x 8 soft tokens for a square picture of 128 pixels a side.
    image = {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70
    }  # fmt: skip
    processor = {
        "processor_class": "Gemma4Processor", "image_seq_length": 70, "audio_seq_length": 750, "audio_ms_per_token": 40,
        "image_processor": image,
        "feature_extractor": json.loads(Gemma4AudioFeatureExtractor(sampling_rate=RATE_HZ).to_json_string()),
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor", "patch_size": 8, "pooling_kernel_size": 2},
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_adapter(config: Any, targets: str, folder: Path) -> None:
    """Write an adapter in PEFT's format: float32 pairs A [R, D_in] and B [D_out, R] of every target, not zero."""
    from safetensors.torch import save_file
    from transformers import Gemma4ForConditionalGeneration

    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(SEED + len(targets))
    tensors: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and re.fullmatch(targets, path):
            a = torch.randn(RANK, module.in_features, generator=generator) / math.sqrt(module.in_features)
            b = torch.randn(module.out_features, RANK, generator=generator) / 10
            tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "trimtab-demo", "r": RANK,
        "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none", "target_modules": targets, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))


def _picture() -> Image.Image:
    image = Image.new("RGB", (PIXELS, PIXELS), (238, 238, 232))
    pen = ImageDraw.Draw(image)
    pen.ellipse((14, 14, 58, 58), fill=(200, 30, 50))
    pen.polygon([(92, 20), (116, 62), (68, 62)], fill=(30, 110, 60))
    pen.rectangle((40, 76, 92, 116), fill=(36, 70, 190))
    return image


def _write_sound(path: Path) -> None:
    """Write one second of three rising beeps, 16-bit mono at 16 kHz."""
    time_s = np.arange(RATE_HZ) / RATE_HZ
    samples = np.zeros(RATE_HZ)
    for place, frequency in enumerate((440.0, 550.0, 660.0)):
        inside = (time_s >= 0.1 + 0.3 * place) & (time_s < 0.25 + 0.3 * place)
        samples[inside] = 0.5 * np.sin(2 * np.pi * frequency * time_s[inside])
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((samples * 32767).round().astype("<i2").tobytes())
