"""Whether values are numbers: NaN or infinity in an adapter or in logits is an error, never an answer."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from trimtab.errors import AdapterError, DeviceError


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite: one pass, nothing allocated."""
    if not values.is_floating_point() or not values.numel():
        return True
    # The 8-bit formats have no minimum of their own.
    low, high = torch.aminmax(values.float() if values.element_size() == 1 else values)
    return bool(low.isfinite() & high.isfinite())


def check_adapter(path: str | os.PathLike[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise AdapterError with every tensor of an adapter that holds values which are not finite. tensors: (name, values)."""
    problems = [
        f"{name}: {int((~values.float().isfinite()).sum())} of {values.numel()} values are NaN or infinite"
        for name, values in tensors
        if not is_finite(values)
    ]
    if problems:
        raise AdapterError(
            path, problems, hint="Its training diverged or the file is damaged: use an earlier checkpoint of it"
        )


def check_logits(logits: Tensor, *, adapter: str | None) -> None:
    """Raise DeviceError unless the largest logit of every row is finite: from such a row no token can be chosen."""
    if not bool(logits.max(dim=-1).values.isfinite().all()):
        raise no_numbers(logits.device, adapter=adapter)


def no_numbers(device: torch.device, *, adapter: str | None) -> DeviceError:
    """Return the error for logits that are NaN or infinite."""
    hint = f"Check the weights of adapter {adapter!r}" if adapter else "Check the model's weights"
    return DeviceError("the model's logits are NaN or infinite", device=str(device), hint=hint)
