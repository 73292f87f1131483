"""Unpacked copies of the decoder's 4-bit weights in the model's dtype, where the plan reserves memory for both.

    unpacked = UnpackedWeights.of(model)         # None where the plan counts none
    unpacked.joined([q, k, v])                   # [sum of outputs, inputs]: layers over one input as one product
    unpacked.matmul(least=9)                     # a line of a MatmulTable: 9 rows and more by cuBLAS, no weight is unpacked

They are the bits that bitsandbytes unpacks, so a product equals its own up to the order of a sum. On a CPU bitsandbytes unpacks a
weight and multiplies as torch does: there every product of the layers reads the kept weight, and its bits are the same. All lie
in one piece of memory, in the order of the modules: layers that read the same input and follow one another are one matrix. Behind
each row there may be columns for the adapter of a prompt (columns.py), which nothing else reads.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.formats.matmul_table import LayerProduct, Matmul
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.layers.linear import Leaf, ResidentLeaf
from trimtab.formats.record import rounds_change, stored_format
from trimtab.planning.planner import ITEM, aligned, columns_of


class UnpackedWeights:
    """The weights of some layers, of one type. Shapes: each [D_out, D_in]. columns: values behind each row, zeros at first;
    holds: the adapter in them, None for none."""

    def __init__(self, leaves: Sequence[Leaf], columns: int = 0) -> None:
        self.columns = columns
        self.holds: Hashable = None
        # Each starts where torch would start a tensor: a product's sums may depend on the alignment of its operands.
        sizes = [aligned(leaf.out_features * (leaf.in_features + columns)) for leaf in leaves]
        make = torch.zeros if columns else torch.empty
        self._flat = make(sum(sizes), dtype=leaves[0].dtype, device=leaves[0].device)
        self._starts: dict[Leaf, int] = {}
        start = 0
        for leaf, size in zip(leaves, sizes, strict=True):
            self._starts[leaf] = start
            dequantize(leaf.packed(), self.weight(leaf))
            start += size

    @classmethod
    def of(cls, model: Any) -> UnpackedWeights | None:
        """Return the weights that a model's plan keeps unpacked, None if it keeps none."""
        if ITEM not in model.plan.gpu:
            return None
        leaves = [
            one for one in model.hf_model.get_decoder().modules()
            if isinstance(one, ResidentLeaf) and stored_format(one.quant_kind).is_dequantized and one.dtype == model.dtype
            # Products of several layers at once do not round activations (`mobile`); a plan counts none, an edited one might.
            and (model.device.type == "cpu" or not stored_format(one.quant_kind).has_rounding)
            # Of another type, releases of bitsandbytes round in different places.
            and (one.packed().dtype == one.dtype or not rounds_change(one.quant_kind))
        ]  # fmt: skip
        with torch.no_grad():
            return cls(leaves, columns_of(model.plan)) if leaves else None

    @property
    def nbytes(self) -> int:
        return int(self._flat.nbytes)

    def weight(self, leaf: Leaf) -> Tensor:
        """Return a layer's weight. Errors: KeyError for a layer that is not among them."""
        start, wide = self._starts[leaf], leaf.in_features + self.columns
        return self._flat[start : start + leaf.out_features * wide].view(-1, wide)[:, : leaf.in_features]

    def joined(self, leaves: Sequence[Leaf]) -> Tensor | None:
        """Return the weights of layers over one input as one [all D_out, D_in], None where they do not lie side by side."""
        extended = self.extended(leaves)
        return None if extended is None else extended[:, : leaves[0].in_features]

    def extended(self, leaves: Sequence[Leaf]) -> Tensor | None:
        """Return the same with its columns, [all D_out, D_in + columns]."""
        wide, start = leaves[0].in_features, self._starts.get(leaves[0])
        if start is None:
            return None
        end = start
        for leaf in leaves:
            if self._starts.get(leaf) != end or leaf.in_features != wide:
                return None
            end += leaf.out_features * (wide + self.columns)
        return self._flat[start:end].view(-1, wide + self.columns)

    def replace_products(self) -> None:
        """Let every product of the layers read these weights from now on, on a CPU: the same bits, and nothing is unpacked."""
        for leaf in self._starts:
            if isinstance(leaf, ResidentLeaf):
                leaf.keep_unpacked(self.weight(leaf))

    @property
    def layers(self) -> Collection[Leaf]:
        """The layers whose weights these are."""
        return self._starts.keys()

    def matmul(self, *, least: int = 1) -> Matmul[LayerProduct]:
        """Return the way to multiply `least` rows and more with these weights."""
        return Matmul("kept", self.layers, self.product, least)

    def product(self, leaf: Leaf, x: Tensor) -> Tensor | None:
        """Return a layer's product [..., D_out], None where x has another type than the weights."""
        weight = self.weight(leaf)
        return functional.linear(x, weight, leaf.bias) if x.dtype == weight.dtype else None


def keep_unpacked(model: Any) -> tuple[UnpackedWeights | None, int]:
    """Return the weights that a model's kernels multiply with, None for none, and the bytes of those that a CPU's layers keep."""
    kept = UnpackedWeights.of(model)
    if kept is None or model.device.type != "cpu":
        return kept, 0
    kept.replace_products()
    return None, kept.nbytes
