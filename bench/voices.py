"""How a random checkpoint is given words: the demo's tokenizer, with a word for every token id that the model can draw.

    voices.give(folder)

A model that hears and sees gets the demo's chat template and processor too. One that only reads gets the ChatML template of its
family, whose turn tokens take the place of the demo's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trimtab.demo.demo import FOLDER

TURN_TOKENS = {"<|turn>": "<|im_start|>", "<turn|>": "<|im_end|>"}
CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def give(folder: Path) -> None:
    """Write a tokenizer, a chat template, end tokens and, where there are towers, a processor into a random checkpoint."""
    base = FOLDER / "base"
    config = json.loads((folder / "config.json").read_text())
    known = json.loads((base / "config.json").read_text())
    tokens = {name: known["text_config"].get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    if config["model_type"].startswith("gemma") and "text_config" in config:
        config |= {name: value for name, value in known.items() if name.endswith(("_token_id", "_token_index"))}
        config["text_config"] |= tokens
        for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(base / name, folder / name)
        _write_processor(folder, config["vision_config"])
        vocabulary = config["text_config"]["vocab_size"]
    else:
        config |= tokens
        shutil.copy(base / "generation_config.json", folder / "generation_config.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
        (folder / "chat_template.jinja").write_text(CHATML)
        _rename(tokenizer, TURN_TOKENS)
        vocabulary = config.get("text_config", config)["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    words = tokenizer["model"]["vocab"]
    words |= {f"▁w{number}": number for number in range(len(words), vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


def _rename(tokenizer: dict[str, Any], names: dict[str, str]) -> None:
    """Call some special tokens of a tokenizer something else."""
    words = tokenizer["model"]["vocab"]
    for before, after in names.items():
        if before in words:
            words[after] = words.pop(before)
        for token in tokenizer["added_tokens"]:
            if token["content"] == before:
                token["content"] = after


def _write_processor(folder: Path, vision: dict[str, Any]) -> None:
    processor = json.loads((FOLDER / "base" / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        processor[part] |= {name: vision[name] for name in ("patch_size", "pooling_kernel_size")}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=1))
