"""Which values of the base weights does attaching an adapter need?"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from trimtab.adapters.adapter import AdapterTarget
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats import int8_head
from trimtab.formats.record import HEAD8
from trimtab.planning.values.byte_sizes import ADAPTER_PIECE_VALUES

if TYPE_CHECKING:
    from trimtab.engine.formats.packed import Packed

# A DoRA norm takes large weights in pieces of this many values.
NORM_VALUES = ADAPTER_PIECE_VALUES
# The same for a comparison, whose result does not depend on the pieces.
COMPARED_VALUES = 2 * 2**20

Read = Callable[[TensorEntry], Tensor]
# first row, end -> these rows of a weight on the device, in separate memory
Rows = Callable[[int, int], Tensor]
T = TypeVar("T")
Pieces = Generator[None, None, T]


class Product(Protocol):
    """A product with a weight, as the adapters that are added to it see it. quant_kind: "none" for a plain weight."""

    @property
    def quant_kind(self) -> str: ...

    @property
    def bias(self) -> Tensor | None: ...


class LinearLayer(Product, Protocol):
    """A linear layer as its adapters see it."""

    @property
    def weight(self) -> Tensor: ...

    def packed(self) -> Packed: ...

    def dense_rows(self, start: int, stop: int, /) -> Tensor: ...


class TableLayer(Protocol):
    """An embedding table as its adapters see it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def embed_scale(self) -> Tensor | None: ...

    def rows(self, ids: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class BaseValues:
    """The results for one adapter on one model.

    norms: module path -> the lengths of the rows of weight + scale B A, in float32 on the host: [D_out] of a linear layer, [D] of
    an embedding. same: paths of the modules whose saved tensors equal the model's own. They are computed in pieces, so that a
    server decodes a step after each. A piece takes at most the bytes that a plan with adapters counts for it
    (planning/memory/activations.py, `adapter_piece_bytes`).
    """

    norms: Mapping[str, Tensor]
    same: frozenset[str]


def finished(pieces: Pieces[T]) -> T:
    """Return the result of a computation in pieces, computed now."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def base_values(
    model: nn.Module, targets: Mapping[str, Mapping[str, AdapterTarget]], *, read: Read, device: torch.device,
    dtype: torch.dtype,
) -> Pieces[BaseValues]:  # fmt: skip
    """Compute the values of an adapter; yields after each piece.

    targets: module path -> {"lora" and "saved": target}. read: returns a tensor of the adapter, on any device. device, dtype: of
    the attached LoRA tensors.
    """
    norms: dict[str, Tensor] = {}
    same: set[str] = set()
    for path, of_module in targets.items():
        module: Any = model.get_submodule(path)
        is_linear = hasattr(module, "dense_weight")
        lora, saved = of_module.get("lora"), of_module.get("saved")
        is_turned = lora is not None and lora.fan_in_fan_out
        if not is_linear and not hasattr(module, "rows") and not is_turned:
            continue
        replaced = {} if saved is None else {name: read(entry) for name, entry in saved.tensors.items()}
        equals = _equals_linear if is_linear else _equals_embedding
        if saved is not None and (yield from equals(module, replaced, device)):
            same.add(path)
        if lora is None or "magnitude" not in lora.tensors:
            continue
        weight = None if path in same or "weight" not in replaced else replaced["weight"]
        A, B = (read(lora.tensors[role]) for role in ("A", "B"))
        if is_turned:
            turned = _rows_of(module.weight.detach().T, device, module.weight.dtype)
            norm = yield from _row_norms(turned, A.to(device=device, dtype=dtype), B, lora.scale)
        elif is_linear:
            own = module.dense_rows if weight is None else _rows_of(weight, device, module.weight.dtype)
            norm = yield from _row_norms(own, A.to(device=device, dtype=dtype), B, lora.scale)
        else:
            own = _looked_up(module, device) if weight is None else _rows_of(weight, device, module.dtype)
            norm = yield from _column_norms(own, A, B.to(device=device, dtype=dtype), lora.scale)
        norms[path] = norm.cpu()
    return BaseValues(norms, frozenset(same))


def _rows_of(weight: Tensor, device: torch.device, dtype: torch.dtype) -> Rows:
    return lambda start, stop: weight[start:stop].to(device=device, dtype=dtype, copy=True)


def _looked_up(table: TableLayer, device: torch.device) -> Rows:
    return lambda start, stop: table.rows(torch.arange(start, stop, device=device))


def _row_norms(rows: Rows, A: Tensor, B: Tensor, scale: float) -> Pieces[Tensor]:
    """Return the length of every row of weight + scale B A: rows of [D_out, D_in], [R, D_in], [D_out, R] -> [D_out].

    A is on the device in the type of the results, B anywhere. B A is computed the way PEFT's forward does it, as layers on an
    identity. Source: arXiv 2402.09353; PEFT 0.21.2, lora/dora.py, DoraLinearLayer.get_lora_weight and get_weight_norm.
    """
    columns = A.T.contiguous()
    step = max(1, NORM_VALUES // A.shape[1])
    norms = []
    for start in range(0, B.shape[0], step):
        stop = min(start + step, B.shape[0])
        # In place, so that two tensors of a piece in float32 are alive at most.
        weight = rows(start, stop).to(A.dtype)
        delta = nn.functional.linear(columns, B[start:stop].to(columns)).T
        norms.append(torch.linalg.norm(weight.add_(delta.mul_(scale)), dim=1))
        del weight, delta
        yield
    return torch.cat(norms)


def _column_norms(rows: Rows, A: Tensor, B: Tensor, scale: float) -> Pieces[Tensor]:
    """Return the length of every column of table + scale (B A)^T: rows of [V, D], A [R, V], B [D, R] -> [D].

    B is on the device in the type of the results, A anywhere. Source: PEFT 0.21.2, lora/dora.py, DoraEmbeddingLayer: the norm
    runs over the vocabulary.
    """
    step = max(1, NORM_VALUES // B.shape[0])
    pieces = []
    for start in range(0, A.shape[1], step):
        stop = min(start + step, A.shape[1])
        weight = rows(start, stop)
        weight = weight.to(torch.promote_types(weight.dtype, B.dtype))
        delta = A[:, start:stop].T.to(B).contiguous() @ B.T
        pieces.append(torch.linalg.norm(weight.add_(delta.mul_(scale)).T, dim=1).to(B.dtype))
        del weight, delta
        yield
    return pieces[0] if len(pieces) == 1 else torch.linalg.norm(torch.stack(pieces), dim=0)


def _equals_linear(leaf: LinearLayer, replaced: Mapping[str, Tensor], device: torch.device) -> Pieces[bool]:
    # PEFT writes the whole embedding and head next to LoRA, nearly always unchanged: then they cost nothing.
    if leaf.quant_kind == HEAD8 and set(replaced) == {"weight"}:
        for rows in int8_head.pieces(leaf.packed().parts["weight"]):
            weight = replaced["weight"][rows].to(device=device, dtype=leaf.weight.dtype)
            # Opened for every piece: a step in between may put another block into the staging buffer.
            if not int8_head.is_same(leaf.packed().parts, weight, rows):
                return False
            yield
        return True
    if leaf.quant_kind != "none":
        return False
    own: dict[str, Tensor | None] = {"weight": leaf.weight, "bias": leaf.bias}
    for name, value in replaced.items():
        mine = own[name]
        if mine is None or mine.shape != value.shape:
            return False
        step = max(1, COMPARED_VALUES * mine.shape[0] // max(1, mine.numel()))
        for start in range(0, mine.shape[0], step):
            stop = min(start + step, mine.shape[0])
            part = value[start:stop].to(device=device, dtype=leaf.weight.dtype)
            if not torch.equal(leaf.dense_rows(start, stop) if mine.is_meta else mine[start:stop], part):
                return False
            yield
    return True


def _equals_embedding(table: TableLayer, replaced: Mapping[str, Tensor], device: torch.device) -> Pieces[bool]:
    weight = replaced["weight"]
    step = max(1, COMPARED_VALUES // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step].to(device=device, dtype=table.dtype)
        if not torch.equal(table.rows(torch.arange(start, start + part.shape[0], device=device)), part):
            return False
        yield
    return True
