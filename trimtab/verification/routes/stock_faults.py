"""Faults of the stock side that a comparison meets. Each is reported with its entry in the doctor's catalogue. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# I13: torch's memory-efficient kernel treats a last block of one query of 32 as a decode step, in heads wider than
# these.
BLOCK, WIDEST = 32, 256


def one_wide_key_head(config: Mapping[str, Any]) -> bool:
    """Whether a model has layers with one key head for all query heads, wider than 256. config: a config.json's
    content.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        return False
    heads = [text.get(name) for name in ("num_key_value_heads", "num_global_key_value_heads")]
    widths = [text.get(name) for name in ("head_dim", "global_head_dim")]
    return 1 in heads and any(isinstance(width, int) and width > WIDEST for width in widths)


def wrong_last_positions(config: Mapping[str, Any], device: str, passes: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line if stock's attention is wrong in some of these passes. device: on which it ran; passes: (prompt, tokens) of
    those that differ."""
    if not device.startswith("cuda") or not one_wide_key_head(config):
        return []
    named = [f"{prompt} ({tokens} tokens)" for prompt, tokens in passes if tokens > 1 and tokens % BLOCK == 1]
    if not named:
        return []
    return [
        f"the stock stack's attention is wrong at the last position of {', '.join(dict.fromkeys(named))}: see I13 in "
        "docs/upstream.md; compare prompts of other lengths"
    ]


def wrong_layers(paths: Sequence[str]) -> list[str]:
    """Return a line if stock computed 4-bit layers with wrong scales. paths: of these layers, as its process reported
    them.
    """
    if not paths:
        return []
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return [
        f"the stock stack unpacks 4-bit weights with wrong scales on this CPU: {paths[0]}{more}; see I16 in docs/upstream.md; "
        "compare on a GPU or without quantization"
    ]
