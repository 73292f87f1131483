"""4-bit layers on a CPU that bitsandbytes unpacks with the scales of wrong blocks (I16 in the doctor's catalogue)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def wrong_scales(model: Any) -> list[str]:
    """Return the paths of such layers in a live model, without PEFT's wrappers."""
    found = layers_of(model.named_modules())
    # A wrapper of PEFT has its layer's weight too.
    return list(dict.fromkeys(path.removeprefix("base_model.model.").removesuffix(".base_layer") for path, _ in found))


def layers_of(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path and the shape of each such layer. A small weight with rows of the same length is enough for the test.
    Blocks of more than 1,024 values use other code. modules: (path, module)."""
    known: dict[tuple[int, int, int], bool] = {}
    for path, module in modules:
        weight: Any = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is None or weight.device.type != "cpu" or state.shape[-1] % state.blocksize == 0 or state.blocksize > 1024:
            continue
        key = (min(state.shape[0], state.blocksize), state.shape[-1], state.blocksize)
        if key not in known:
            known[key] = unpacks_wrong(*key)
        if known[key]:
            yield path, (int(state.shape[0]), int(state.shape[-1]))


def unpacks_wrong(rows: int, width: int, blocksize: int) -> bool:
    """Return whether bitsandbytes on the CPU unpacks a 4-bit weight [rows, width] differently from the same values as one
    row."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(0), device="cpu")
    packed, state = quantize_4bit(weight, blocksize=blocksize, quant_type="nf4")
    unpacked = dequantize_4bit(packed, state).flatten()
    state.shape = torch.Size((1, weight.numel()))
    return not torch.equal(unpacked, dequantize_4bit(packed, state).flatten())
