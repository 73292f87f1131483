"""Which product multiplies the weight of a layer, by the number of rows of its input?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

# gemv4: few rows over packed weights; gemm4: more of them. kept: cuBLAS over unpacked weights that the plan keeps; dequantized:
# over one that is unpacked for this product; columns: either of them with the adapter in further columns of the weight.
MatmulName = Literal["gemv4", "gemm4", "kept", "dequantized", "columns"]
Run = TypeVar("Run")
# Of a layer, or of the layers over one input: (layer or layers, x [..., D_in]) -> [..., D_out].
LayerProduct = Callable[[Any, Tensor], Tensor | None]


@dataclass(frozen=True, eq=False)
class Matmul(Generic[Run]):
    """One way to multiply. layers: those that it is for, by the first of layers over one input. run: computes it, None where the
    values of an input are not as it reads them. least, most: rows of an input. has_adapter: whether the result has the adapters."""

    name: MatmulName
    layers: Container[Any]
    run: Run
    least: int = 1
    most: int = sys.maxsize
    has_adapter: bool = False


class MatmulTable(Generic[Run]):
    """The ways to multiply of one kind of pass, the preferred one first. Each was compared with float64 on this card when it was
    chosen (`DeviceKernels`, `PromptKernels`)."""

    def __init__(self, *matmuls: Matmul[Run] | None) -> None:
        self.matmuls = tuple(one for one in matmuls if one is not None)

    def ways(self, layer: object, rows: int) -> Iterator[Matmul[Run]]:
        """Yield the ways that are for a layer and this many rows."""
        return (one for one in self.matmuls if one.least <= rows <= one.most and layer in one.layers)

    def first(self, layer: object, rows: int) -> Matmul[Run] | None:
        """Return the preferred way, None where the layer's own product computes it."""
        return next(self.ways(layer, rows), None)
