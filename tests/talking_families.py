"""Which tokenizer, chat template and processor each family of `pico` talks with: small ones of the published kinds, no download.

The vocabularies have the size of `pico`'s models, with picture and sound at its ids; templates are in our own words and do what
the published ones do: trim, join parts, leave an old answer's thoughts out.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests import pico

_GEMMA = {
    "<pad>": True, "<eos>": True, "<bos>": True, "<unk>": True, "<mask>": True, "<start_of_turn>": True,
    "<end_of_turn>": True, "\n\n": False, "<h1>": False, "<unused0>": False,
    "<start_of_image>": pico.BEGIN, "<end_of_image>": pico.END, "<image_soft_token>": pico.IMAGE,
}  # fmt: skip
_GEMMA4 = {
    "<pad>": True, "<eos>": True, "<bos>": True, "<unk>": True, "<mask>": True, "<|channel>": True, "<channel|>": True,
    "<|turn>": True, "<turn|>": True, "<|think|>": True, "\n\n": False, "<|audio>": True, "<audio|>": True,
    "<|video|>": pico.VIDEO, "<|image>": pico.BEGIN, "<image|>": pico.END, "<|image|>": pico.IMAGE, "<|audio|>": pico.AUDIO,
}  # fmt: skip
_QWEN = {
    "<|endoftext|>": True, "<b>": False, "<|im_start|>": True, "<|im_end|>": True, "<|fim_prefix|>": False,
    "<think>": False, "</think>": False, "<tool_response>": False, "</tool_response>": False,
    "<|vision_start|>": pico.BEGIN, "<|vision_end|>": pico.END, "<|image_pad|>": pico.IMAGE, "<|video_pad|>": pico.VIDEO,
}  # fmt: skip
_LLAMA = {
    "<|end_of_text|>": True, "<|eot_id|>": True, "<|begin_of_text|>": True, "<|start_header_id|>": True,
    "<|end_header_id|>": True, "<|reserved_special_token_0|>": True,
}  # fmt: skip
_MISTRAL = {"<unk>": True, "</s>": True, "<s>": True}
_MISTRAL3 = {
    "<pad>": True, "</s>": True, "<s>": True, "<unk>": True, "[INST]": True, "[/INST]": True, "[SYSTEM_PROMPT]": True,
    "[/SYSTEM_PROMPT]": True, "[IMG]": pico.IMAGE, "[IMG_BREAK]": True, "[IMG_END]": True,
}  # fmt: skip

_GEMMA_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\n' }}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<start_of_image>' }}{%- elif part.type == 'text' -%}{{ part.text | trim }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
_GEMMA4_TEMPLATE = """{%- macro without_thoughts(text) -%}
{%- for part in text.split('<channel|>') -%}{{ part.split('<|channel>')[0] }}{%- endfor -%}
{%- endmacro -%}
{{ bos_token }}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<|turn>' + role + '\n' }}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{ without_thoughts(part.text) | trim if role == 'model' else part.text | trim }}
{%- elif part.type == 'image' -%}{{ '\n\n<|image|>\n\n' }}{%- elif part.type == 'audio' -%}{{ '<|audio|>' }}{%- endif -%}
{%- endfor -%}
{{ '<turn|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"""
_QWEN_TEMPLATE = """{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
_QWEN_VL_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
_LLAMA_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""
_MISTRAL_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ ' ' + message.content + eos_token }}
{%- else -%}{{ '[INST] ' + message.content + ' [/INST]' }}{%- endif -%}
{%- endfor -%}"""
_MISTRAL3_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ '[SYSTEM_PROMPT]' }}{%- elif message.role != 'assistant' -%}{{ '[INST]' }}{%- endif -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '[IMG]' }}{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- if message.role == 'system' -%}{{ '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'assistant' -%}{{ eos_token }}{%- else -%}{{ '[/INST]' }}{%- endif -%}
{%- endfor -%}"""

# Family -> added tokens, model of the tokenizer, names of tokens, template.
_GEMMA_NAMES = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
_GEMMA3_MEDIA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_GEMMA4_MEDIA = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
    "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip
_QWEN_NAMES = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
_LLAMA_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
_MISTRAL_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, str], dict[str, str], str]] = {
    "gemma4": (_GEMMA4, "pieces", _GEMMA_NAMES, _GEMMA4_MEDIA, _GEMMA4_TEMPLATE),
    "gemma3": (_GEMMA, "pieces", _GEMMA_NAMES, _GEMMA3_MEDIA, _GEMMA_TEMPLATE),
    "gemma3n": (_GEMMA, "pieces", _GEMMA_NAMES, {}, _GEMMA_TEMPLATE),
    "qwen2_5_vl": (_QWEN, "bytes", _QWEN_NAMES, {}, _QWEN_VL_TEMPLATE),
    "qwen3_vl": (_QWEN, "bytes", _QWEN_NAMES, {}, _QWEN_VL_TEMPLATE),
    "mistral3": (_MISTRAL3, "bytes", _MISTRAL_NAMES, {}, _MISTRAL3_TEMPLATE),
    "llama": (_LLAMA, "bytes", _LLAMA_NAMES, {}, _LLAMA_TEMPLATE),
    "qwen3": (_QWEN, "bytes", _QWEN_NAMES, {}, _QWEN_TEMPLATE),
    "mixtral": (_MISTRAL, "prefixed pieces", _MISTRAL_NAMES, {}, _MISTRAL_TEMPLATE),
    "qwen3_moe": (_QWEN, "bytes", _QWEN_NAMES, {}, _QWEN_TEMPLATE),
}
_MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("an", "d"), ("{}", "the"), ("{}", "and"), ("<", "|"), ("|", ">"))


def _kind(family: str) -> tuple[dict[str, Any], str, dict[str, str], dict[str, str], str]:
    return KINDS["gemma4" if family.startswith("gemma4") else "qwen3_vl" if family.startswith("qwen3_5") else family]


@cache
def tokenizer(family: str) -> Any:
    """Return the family's tokenizer, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    added, kind, names, media, template = _kind(family)
    is_bytes = kind == "bytes"
    fixed = {text: place for text, place in added.items() if not isinstance(place, bool)}
    pieces = [text for text in added if text not in fixed]
    if is_bytes:
        pieces += sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        pieces += [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdehiknoprstu<|>[]/\n")
    merges = []
    space = "Ġ" if is_bytes else "▁"
    for pair in _MERGES:
        left, right = (part.format(space) if part == "{}" else part for part in pair)
        if left in pieces and right in pieces and len(pieces) < min([*fixed.values(), pico.VOCABULARY]):
            merges.append((left, right))
            pieces.append(left + right)
    vocabulary = {piece: number for number, piece in enumerate(pieces)} | fixed
    if is_bytes:
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family == "llama"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        if family.startswith("qwen"):
            backend.normalizer = normalizers.NFC()
    else:
        backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if " " in kind else spaces
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [
        AddedToken(text, special=special is not False, normalized=False)
        for text, special in added.items() if text.strip() or special is False
    ]  # fmt: skip
    backend.add_tokens(tokens)
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, **names, extra_special_tokens=media)
    loaded.chat_template = template
    return loaded


def save(family: str, folder: Path) -> Path:
    """Write the family's tokenizer, template and processor into the folder of its checkpoint, and return it."""
    from transformers import Gemma3ImageProcessorPil, PixtralImageProcessorPil, Qwen2VLImageProcessorPil  # fmt: skip
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    made = tokenizer(family)
    made.save_pretrained(folder)
    processor: dict[str, Any] | None = None
    if family.startswith("gemma4"):
        image = Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)
        processor = {"processor_class": "Gemma4Processor", "image_seq_length": 70}
        processor["video_processor"] = {"video_processor_type": "Gemma4VideoProcessor", "patch_size": 8}
        processor["feature_extractor"] = json.loads(Gemma4AudioFeatureExtractor(sampling_rate=16_000).to_json_string())
    elif family == "gemma3":
        image = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    elif family == "mistral3":
        image = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
        processor = {"processor_class": "PixtralProcessor", "patch_size": 16, "spatial_merge_size": 2}
    elif family.endswith("_vl"):
        image = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=64 * 64)
        names = ("Qwen2_5_VLProcessor", "Qwen2VL") if family == "qwen2_5_vl" else ("Qwen3VLProcessor", "Qwen3VL")
        video = {"video_processor_type": f"{names[1]}VideoProcessor"}
        processor = {"processor_class": names[0], "video_processor": video}
    if processor is not None:
        settings = json.loads(image.to_json_string())
        settings["image_processor_type"] = settings["image_processor_type"].removesuffix("Pil")
        processor["image_processor"] = settings
        (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(made.chat_template, encoding="utf-8")
    return folder
