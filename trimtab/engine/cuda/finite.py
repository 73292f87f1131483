"""The check for NaN and infinity: such logits are an error, never an answer."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.errors import DeviceError


def check_logits(logits: Tensor, *, adapter: str | None) -> None:
    """Raise DeviceError unless the largest logit of every row is finite: from such a row no token can be chosen."""
    if not bool(logits.max(dim=-1).values.isfinite().all()):
        raise no_numbers(logits.device, adapter=adapter)


def no_numbers(device: torch.device, *, adapter: str | None) -> DeviceError:
    """Return the error for logits that are NaN or infinite."""
    hint = f"Check the weights of adapter {adapter!r}" if adapter else "Check the model's weights"
    return DeviceError("the model's logits are NaN or infinite", device=str(device), hint=hint)
