"""The program part of a tower layer's arguments and outputs, apart from the data: forms, with slots for tensors.

tensors = []
form = form_of((args, kwargs), tensors, lengths)      # hashable; tensors in their order
args, kwargs = filled(form, iter(tensors))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Lengths of attention's parts: transformers' sdpa attention splits by them, which waits for the device in every layer (5.23.0,
# Qwen2_5_VLVisionAttention.forward).
HOST_LENGTHS = ("cu_seqlens",)


class UnknownFormError(Exception):
    """A layer is given or returns something that is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class _Slot:
    """The slot of a tensor in a form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Values where they are part of the program, else None.
    values: tuple[int, ...] | None = None


def form_of(value: Any, tensors: list[Tensor], lengths: Callable[[Tensor], tuple[int, ...]], name: str = "") -> Hashable:
    """Return the part of a layer's arguments or output that belongs to a graph; other tensors are put into `tensors`.

    lengths: the values of a tensor in HOST_LENGTHS. Errors: UnknownFormError.
    """
    if isinstance(value, Tensor):
        if name in HOST_LENGTHS:
            return _Slot(tuple(value.shape), value.dtype, lengths(value))
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype)
    if value is None or type(value) in (bool, int, float, str):
        return (type(value).__name__, value)
    if type(value) in (tuple, list):
        return (type(value).__name__, *(form_of(one, tensors, lengths, name) for one in value))
    if type(value) is dict:
        return ("dict", *((key, form_of(one, tensors, lengths, key)) for key, one in value.items()))
    raise UnknownFormError(type(value).__name__)


def filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of a form with these tensors in it."""
    if isinstance(form, _Slot):
        return next(tensors) if form.values is None else torch.tensor(form.values, dtype=form.dtype)
    kind, *rest = form
    if kind == "dict":
        return {key: filled(one, tensors) for key, one in rest}
    if kind in ("tuple", "list"):
        values = [filled(one, tensors) for one in rest]
        return tuple(values) if kind == "tuple" else values
    return rest[0]
