"""An independent reference of 8-bit keys and values: plain transformers with a cache of its own, rounded in float64 and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache


def rounded(states: Tensor) -> Tensor:
    """Return keys or values [..., D] as 8 bits have them: 127 steps on both sides of zero to a token's and head's largest value.

    The scale is a float32, as it is kept: that value times the float32 next to 1/127. A step times it is rounded to the dtype once.
    """
    values = states.to("cpu", torch.float64).numpy()
    scale = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32) * np.float32(1 / 127)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.rint((values.astype(np.float32) / scale).astype(np.float32))
    steps = np.where(scale == 0, 0, np.clip(steps, -127, 127)).astype(np.float32)
    return torch.from_numpy(steps * scale).to(states.device, states.dtype)


class RoundedCache(DynamicCache):
    """Transformers' growing cache in full precision, which is given what 8 bits would have kept."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def greedy(hf_model: Any, token_ids: list[int], count: int) -> tuple[list[int], Tensor]:
    """Return the greedy answer of `count` tokens to a prompt, token by token, and the logits [count, V] it was taken from."""
    cache = RoundedCache(config=hf_model.config.get_text_config())
    ids, answer, logits = torch.tensor([token_ids], device=hf_model.device), [], []
    with torch.no_grad():
        for _ in range(count):
            step = hf_model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1].float()
            logits.append(step)
            answer.append(int(step.argmax()))
            ids = torch.tensor([answer[-1:]], device=hf_model.device)
    return answer, torch.stack(logits).cpu()
