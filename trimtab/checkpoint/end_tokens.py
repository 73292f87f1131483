"""Is a tokenizer's end token among the checkpoint's end tokens, by files alone?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import CONFIG
from trimtab.errors import CheckpointError
from trimtab.process.json_file import FOREIGN_FILES, read_object

# In tokenizer.json, added tokens come before the vocabulary (tokenizers 0.23, TokenizerImpl's serialization).
HEAD_BYTES = 4 * 2**20
_ADDED = '"added_tokens":'


def unlisted_end(folder: Path) -> str | None:
    """Return the text of the tokenizer's end token if its chat template has it and no end-token list does; None if in doubt."""
    try:
        tokenizer = _json(folder, "tokenizer_config.json")
        token = tokenizer.get("eos_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if not (text and isinstance(text, str)):
            return None
        template = _template(folder, tokenizer)
        number = _number(folder, text)
        if number is None or not (text in template or "eos_token" in template):
            return None
        chosen, config = _json(folder, "generation_config.json"), _json(folder, CONFIG)
    except (CheckpointError, OSError, ValueError, RecursionError):  # loading the tokenizer reports that
        return None
    inner = config.get("text_config")
    sources = (chosen, inner if isinstance(inner, Mapping) else {}, config)
    ids = next((one["eos_token_id"] for one in sources if one.get("eos_token_id") is not None), None)
    return None if ids is None or number in (ids if isinstance(ids, list) else [ids]) else text


def _json(folder: Path, name: str) -> dict[str, Any]:
    return read_object(folder / name, FOREIGN_FILES[name]) if (folder / name).is_file() else {}


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        with file.open("rb") as stream:
            return stream.read(HEAD_BYTES).decode("utf-8", "replace")
    for source in (_json(folder, "chat_template.json"), tokenizer):
        if isinstance(template := source.get("chat_template"), str):
            return template
    return ""


def _number(folder: Path, text: str) -> int | None:
    """Return the id of an added token; None if the first part of tokenizer.json does not have it."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES).decode("utf-8", "replace")
    start = head.find(_ADDED)
    if start < 0:
        return None
    tokens, _ = json.JSONDecoder().raw_decode(head[start + len(_ADDED) :].lstrip())
    for one in tokens if isinstance(tokens, list) else ():
        if isinstance(one, Mapping) and one.get("content") == text and isinstance(one.get("id"), int):
            return int(one["id"])
    return None
