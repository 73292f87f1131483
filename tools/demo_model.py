"""What the demo checkpoint is made of: its config, tokenizer, processor and chat template, and how they are written.

The model is the real `Gemma4ForConditionalGeneration`, only small: per-layer embeddings, KV-shared layers (fed by one
sliding and one full layer), double-wide MLPs in those, logit softcap, tied head, vision and audio towers with clipped
linears. Every linear's input width is a multiple of 64, so that a row is a whole number of NF4 blocks of 64.
config.json is written in the published checkpoints' spelling (`global_head_dim`), which every release reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_media import RATE_HZ
from demo_world import tokenizer_text

# Names and order of the published Gemma 4 tokenizer's special tokens; the ids are our own.
NAMED_TOKENS = {
    "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip
MODEL_TOKENS = {
    "std_token": "<|tool>", "etd_token": "<tool|>", "stc_token": "<|tool_call>", "etc_token": "<tool_call|>",
    "str_token": "<|tool_response>", "etr_token": "<tool_response|>", "escape_token": '<|"|>',
    "think_token": "<|think|>", "soc_token": "<|channel>", "eoc_token": "<channel|>", "sot_token": "<|turn>",
    "eot_token": "<turn|>", "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip
SPECIAL_TOKENS = (*NAMED_TOKENS.values(), *MODEL_TOKENS.values(), "<|video|>")
WORD_PIECES = 1664
LAYERS, SHARED = 8, 4
LAYER_TYPES = ["full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(LAYERS)]
SHARD_BYTES = "7MB"

# Our own words for the form of Gemma 4's template: one marker per medium, trimmed text, a turn per message.
CHAT_TEMPLATE = """{%- macro argument(value) -%}
    {%- if value is string -%}
        {{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, item in value | dictsort -%}
            {{- key + ':' -}}{{- argument(item) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for item in value -%}{{- argument(item) -}}{{- ',' if not loop.last -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}
        {{- value | tojson -}}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
    {{- '<|turn>system\\n' -}}
    {%- for tool in tools -%}
        {{- '<|tool>declaration:' + tool['function']['name'] + argument(tool['function']) + '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- if role not in ['system', 'user', 'model', 'tool'] -%}
        {{- raise_exception('This model knows the roles system, user, assistant and tool, not ' + role) -}}
    {%- endif -%}
    {{- '<|turn>' + role + '\\n' -}}
    {%- if role == 'tool' -%}
        {{- '<|tool_response>' -}}
    {%- endif -%}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<|tool_call>call:' + call['function']['name'] + argument(call['function']['arguments']) + '<tool_call|>' -}}
    {%- endfor -%}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] | trim -}}
            {%- elif part['type'] in ['image', 'image_url'] -%}
                {{- '<|image|>' -}}
            {%- elif part['type'] in ['audio', 'input_audio'] -%}
                {{- '<|audio|>' -}}
            {%- elif part['type'] == 'video' -%}
                {{- '<|video|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if role == 'tool' -%}
        {{- '<tool_response|>' -}}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def train_tokenizer() -> Any:
    """Return a `GemmaTokenizer` trained on the world's text: BPE with byte fallback and Gemma 4's special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import GemmaTokenizer

    scratch = Tokenizer(models.BPE())
    scratch.normalizer = normalizers.Replace(" ", "▁")
    # Merges are learnt within words ("▁word" with its space before it) or runs of signs only: a name is the same piece
    # before a comma as before a full stop.
    words = Regex(r"▁?[\p{L}\p{N}]+|▁?[^▁\p{L}\p{N}]+|▁")
    scratch.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    trainer = trainers.BpeTrainer(vocab_size=WORD_PIECES, show_progress=False, min_frequency=1)
    scratch.train_from_iterator(tokenizer_text(), trainer)
    learnt = json.loads(scratch.to_str())["model"]
    pieces = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in sorted(learnt["vocab"], key=learnt["vocab"].get) if piece not in pieces]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return GemmaTokenizer(
        tokenizer_object=backend, **NAMED_TOKENS, extra_special_tokens=MODEL_TOKENS, padding_side="left",
        model_max_length=8192,
    )  # fmt: skip


def build_config(tokenizer: Any) -> Any:
    """Return the `Gemma4Config` of the demo base."""
    from transformers import Gemma4Config

    rows = -(-len(tokenizer) // 64) * 64
    text = {
        "vocab_size": rows, "vocab_size_per_layer_input": rows, "hidden_size": 128, "intermediate_size": 512,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "global_head_dim": 64, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": SHARED,
        "layer_types": LAYER_TYPES, "sliding_window": 64, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
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
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"), eos_token_id=[1, ids["eot_token"]],
    )  # fmt: skip
    config.architectures = ["Gemma4ForConditionalGeneration"]
    return config


def build_model(config: Any, seed: int) -> Any:
    """Return the model with fresh float32 weights from a seed.

    Two starting values differ from transformers': the patch positions start at a normal 0.02 instead of one (a constant
    tells no place), and the layer scalars, which training never touches, differ from layer to layer as in the published
    checkpoints, so that a runtime which forgets them is found out.
    """
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(config)
    table = model.model.vision_tower.patch_embedder.position_embedding_table
    torch.nn.init.normal_(table, std=0.02)
    for number, layer in enumerate(model.model.language_model.layers):
        layer.layer_scalar.fill_((0.875, 1.0, 0.9375, 1.0625)[number % 4])
    return model


def build_feature_extractor() -> Any:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    return Gemma4AudioFeatureExtractor(sampling_rate=RATE_HZ)


def build_image_processor() -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    # 70 is the smallest budget Gemma 4 knows: 8 x 8 soft tokens for a square picture of 128 pixels a side.
    return Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)


def save_processor(tokenizer: Any, folder: Path) -> None:
    """Write tokenizer, image processor, feature extractor and chat template as `AutoProcessor` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    _edit_json(folder / "tokenizer_config.json", lambda config: config.update(extra_special_tokens=["<|video|>"]))
    image, sound = (json.loads(part.to_json_string()) for part in (build_image_processor(), build_feature_extractor()))
    # The name without a backend: transformers picks the PIL or the torchvision class by what is installed.
    image["image_processor_type"] = "Gemma4ImageProcessor"
    video = {"video_processor_type": "Gemma4VideoProcessor", "patch_size": 8, "pooling_kernel_size": 2}
    processor = {
        "processor_class": "Gemma4Processor", "image_seq_length": 70, "audio_seq_length": 750, "audio_ms_per_token": 40,
        "image_processor": image, "feature_extractor": sound, "video_processor": video,
    }  # fmt: skip
    _write_json(folder / "processor_config.json", processor)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def save_base(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the whole checkpoint: bf16 shards with an index, configs, processor. Weights are rounded, not changed."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    _edit_json(folder / "config.json", _published_spelling)
    stops = [1, tokenizer.convert_tokens_to_ids("<turn|>")]
    generation = {"bos_token_id": 2, "do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    _write_json(folder / "generation_config.json", generation)
    save_processor(tokenizer, folder)


def save_weights(model: Any, folder: Path) -> None:
    """Write the shards, the index and config.json. The tied head is not written: it is the embedding."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    exact = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    del exact["lm_head.weight"]
    model.save_pretrained(folder, state_dict=exact, max_shard_size=SHARD_BYTES)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)


def _published_spelling(config: dict[str, Any]) -> None:
    text = config["text_config"]
    if text.pop("per_layer_config", None) is not None or "global_head_dim" not in text:
        text["global_head_dim"] = 64
    config["dtype"] = text["dtype"] = "bfloat16"
    # Left out, each release fills in its own spelling of the same rotary embedding.
    config["vision_config"].pop("rope_parameters", None)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    _write_json(path, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
