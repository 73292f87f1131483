"""One allocation for the packed weights of a model that stay on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Packed

# One warp reads 128 bytes at a time and bitsandbytes loads 16-byte vectors; 256 keeps every part aligned for both.
ALIGN_BYTES = 256


def aligned(byte_count: int) -> int:
    """Return the size rounded up to the alignment of a part inside a block buffer."""
    return -(-byte_count // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Part:
    """The place of one tensor inside its block's buffer."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Arena:
    """One allocation for all packed weights that stay on the device, filled from its beginning.

    torch gives a tensor of 10 MiB and more a separate segment in steps of 2 MiB and leaves the rest unused: with a
    tensor a weight that is 3 % of a 4-bit model, and holes that a small card cannot spare.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self._buffer: Tensor | None = None
        self._used = 0

    def hold(self, packed: Packed) -> Packed:
        """Return the weight with its parts in the arena, itself if the arena is full."""
        if self._buffer is None:  # allocated at first use: weights that leave the device are packed first
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        needed = sum(aligned(part.numel() * part.element_size()) for part in packed.parts.values())
        if self._used + needed > self.nbytes:
            return packed
        parts = {}
        for name, part in packed.parts.items():
            parts[name] = self._next(tuple(part.shape), part.dtype)
            parts[name].copy_(part)
        return packed.with_parts(parts, packed.codes)

    def room(self, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return tensors of these shapes and types to be filled, in the arena, which was made with room for them."""
        if self._buffer is None:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return {name: self._next(shape, dtype) for name, (shape, dtype) in forms.items()}

    def _next(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._buffer is not None
        place = Part(self._used, prod(shape) * dtype.itemsize, shape, dtype)
        self._used += aligned(place.nbytes)
        return place.view(self._buffer)
