"""Which product multiplies the weight of a layer, by the number of rows of its input?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

# gemv4: few rows over packed weights; gemm4: more of them. kept: cuBLAS over unpacked weights that the plan keeps; dequantized:
# over one that is unpacked for this product.
MatmulName = Literal["gemv4", "gemm4", "kept", "dequantized"]
Run = TypeVar("Run")
# Of a layer, or of the layers over one input: (layer or layers, x [..., D_in]) -> [..., D_out].
LayerProduct = Callable[..., Tensor | None]
# The operands of a product with the adapters of its layers in further columns: (layer or layers, x [..., D_in]) ->
# (input [n, K], weight [D_out, K]), None where they are not there.
Columns = Callable[[Any, Tensor], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, eq=False)
class Matmul(Generic[Run]):
    """One way to multiply. layers: those that it is for, by the first of layers over one input. run: computes it, None where the
    values of an input are not as it reads them. least, most: rows of an input. columns: the operands that `run` takes in place of
    the weight and x where it can multiply with adapters too."""

    name: MatmulName
    layers: Container[Any]
    run: Run
    least: int = 1
    most: int = sys.maxsize
    columns: Columns | None = None


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

    def product(self: MatmulTable[LayerProduct], layers: object, x: Tensor) -> tuple[Tensor, bool] | None:
        """Return the output [..., D_out] of a layer, or of layers over one input side by side, and whether their adapters are in
        it; None where the layer's own product computes it."""
        for way in self.ways(layers[0] if isinstance(layers, Sequence) else layers, x.numel() // x.shape[-1]):
            operands = None if way.columns is None else way.columns(layers, x)
            if (y := way.run(layers, *(operands or (x,)))) is not None:
                return y.view(*x.shape[:-1], y.shape[-1]), operands is not None
        return None
