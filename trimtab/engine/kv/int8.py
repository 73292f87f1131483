"""How are keys and values kept in 8 bits and read in the model's dtype?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trimtab.planning.values.byte_sizes import SCALE_BYTES

LARGEST = 127
# Tokens of one head that a CPU reads at a time.
BLOCK_TOKENS = 512


def round_states(states: Tensor) -> Tensor:
    """Return keys or values [..., D] as integers and their scale: int8 [..., D + 4]. D is a multiple of 4. The D integers of
    -127..127 are followed by their scale, the largest magnitude x 1/127, four bytes of float32. Zeros read as zeros, NaN reads as
    NaN."""
    wide = states.float()
    # A product: torch divides by a number on a CPU, and multiplies with its inverse on a GPU.
    scale = wide.abs().amax(dim=-1, keepdim=True) * (1 / LARGEST)
    steps = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-LARGEST, LARGEST)
    return torch.cat((steps.to(torch.int8), scale.view(torch.int8)), dim=-1)


def read_states(held: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values [..., D] from the result of `round_states`: integer x scale in float32, rounded once to the dtype."""
    steps, scale = held[..., :-SCALE_BYTES], held[..., -SCALE_BYTES:].view(torch.float32)
    states = torch.empty(steps.shape, dtype=dtype, device=held.device)
    if held.is_cuda or steps.dim() < 3:
        return torch.mul(steps, scale, out=states)
    # A CPU makes copies of operands of other types: of some tokens of one head at a time, which no plan counts.
    for row in range(steps.shape[0]):
        for head in range(steps.shape[1]):
            parts = (one[row, head].split(BLOCK_TOKENS) for one in (steps, scale, states))
            for some_steps, some_scale, some_states in zip(*parts, strict=True):
                torch.mul(some_steps, some_scale, out=some_states)
    return states


# Prompts that transformers computes ----------------------------------------------------------------------------------


class Int8Layer(DynamicLayer):  # type: ignore[misc]
    """A growing full layer in 8 bits. Attention never sees a key or value that was not rounded, a prompt's own tokens included: an
    answer does not depend on how a prompt was cut, except for the order of sums."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Keep new keys and values. Return those that attention reads, in their dtype."""
        keys, values = super().update(round_states(key_states), round_states(value_states), *args, **kwargs)
        return read_states(keys, key_states.dtype), read_states(values, value_states.dtype)

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values that are in 8 bits already."""
        super().update(keys, values)


class Int8SlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A growing sliding layer in 8 bits."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Keep new keys and values of the window. Return those that attention reads, in their dtype."""
        keys, values = super().update(round_states(key_states), round_states(value_states), *args, **kwargs)
        return read_states(keys, key_states.dtype), read_states(values, value_states.dtype)

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values that are in 8 bits already."""
        super().update(keys, values)


_INT8 = {DynamicLayer: Int8Layer, DynamicSlidingWindowLayer: Int8SlidingLayer}
FULL_LAYERS = (DynamicLayer, Int8Layer)
SLIDING_LAYERS = (DynamicSlidingWindowLayer, Int8SlidingLayer)


def with_form(cache: DynamicCache) -> DynamicCache:
    """Return an empty cache whose layers keep 8 bits; layers of other kinds stay, and `BatchedKVCache` refuses them."""
    for layer in cache.layers:
        # Constructors have different arguments in different releases; the two classes are otherwise the same.
        layer.__class__ = _INT8.get(type(layer), type(layer))
    return cache


def extend(layer: DynamicLayer, keys: Tensor, values: Tensor) -> None:
    """Give a growing layer keys and values in the form that it keeps."""
    layer.extend(keys, values) if isinstance(layer, (Int8Layer, Int8SlidingLayer)) else layer.update(keys, values)
