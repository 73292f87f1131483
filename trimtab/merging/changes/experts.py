"""How does an adapter change stacked experts, as two factors of a stack or of the part that one file tensor holds?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.adapters.adapter import AdapterTarget
from trimtab.adapters.stack_layout import Stack
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.loader.tracing import Expression
from trimtab.engine.lora.experts import matrices
from trimtab.merging.changes.inverse import is_cast, name_of, uncast


@dataclass(frozen=True)
class Slice:
    """The part of a stack in one file tensor: an expert, and rows and columns of its matrix."""

    expert: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True)
class StackPairs:
    """The targets of one adapter on one stack."""

    targets: tuple[AdapterTarget, ...]

    def in_part(self, part: Slice) -> StackPairs:
        """Return the targets that change a part of the stack."""
        return StackPairs(tuple(target for target in self.targets if _reaches(_stack_of(target), part)))

    def factors(self, read: Callable[[TensorEntry], Tensor], part: Slice | None = None) -> tuple[Tensor, Tensor, float]:
        """Return (left, right, scale), whose product is the change: of the stack, or of a part of it."""
        targets = self.targets if part is None else self.in_part(part).targets
        scales = {target.scale for target in targets}
        lefts, rights = [], []
        for target in targets:
            left, right = _factors(_stack_of(target), {role: read(entry) for role, entry in target.tensors.items()}, part)
            lefts.append(left if len(scales) == 1 else left * target.scale)
            rights.append(right)
        left, right = (lefts[0], rights[0]) if len(lefts) == 1 else (torch.cat(lefts, dim=-1), torch.cat(rights, dim=-2))
        return left, right, scales.pop() if len(scales) == 1 else 1.0


def _stack_of(target: AdapterTarget) -> Stack:
    assert target.stack is not None
    return target.stack


def _reaches(stack: Stack, part: Slice) -> bool:
    own = range(*(part.columns if stack.is_transposed else part.rows))
    return part.expert in stack.experts and any(output in own for output in range(*stack.outputs))


def _factors(stack: Stack, tensors: Mapping[str, Tensor], part: Slice | None) -> tuple[Tensor, Tensor]:
    """Return the factors of one target, [E, a, R] and [E, R, b], or of one expert's part."""
    A, B = matrices(stack, tensors)
    high = stack.shape[2] if stack.is_transposed else stack.shape[1]
    if part is not None:
        number = stack.experts.index(part.expert)
        A, B = A[number], B[number]
    elif stack.experts != tuple(range(stack.shape[0])):
        A, B = (_spread(matrix, (stack.shape[0], *matrix.shape[1:]), list(stack.experts)) for matrix in (A, B))
    if len(range(*stack.outputs)) != high:
        outputs = list(range(*stack.outputs))
        B = _spread(B.transpose(0, -2), (high, *B.transpose(0, -2).shape[1:]), outputs).transpose(0, -2)
    left, right = (A.mT, B.mT) if stack.is_transposed else (B, A)
    return (left, right) if part is None else (left[slice(*part.rows)], right[:, slice(*part.columns)])


def _spread(matrix: Tensor, shape: tuple[int, ...], places: list[int]) -> Tensor:
    whole = matrix.new_zeros(shape)
    whole[places] = matrix
    return whole


def slices(expression: Expression, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slice] | None:
    """Return the part of a stack in each file tensor, None if the stack is made in any other way.

    Known: matrices stacked by expert, and such stacks joined along rows or columns, with casts of any of them.
    """
    expression = uncast(expression)
    name = name_of(expression)
    dim = expression.kwargs.get("dim", expression.args[1] if len(expression.args) > 1 else 0)
    if name == "stack" and dim == 0 and all(is_cast(piece) for piece in expression.args[0]):
        parts = {}
        for place, piece in enumerate(expression.args[0]):
            (leaf,) = piece.leaves
            shape = shapes[leaf]
            if len(shape) != 2:
                return None
            parts[leaf] = Slice(place, (0, shape[0]), (0, shape[1]))
        return parts
    if name not in ("cat", "concat", "concatenate") or dim not in (1, 2):
        return None
    joined: dict[str, Slice] = {}
    at = 0
    for piece in expression.args[0]:
        inner = slices(piece, shapes)
        if inner is None:
            return None
        size = 0
        for leaf, part in inner.items():
            rows, columns = part.rows, part.columns
            size = rows[1] if dim == 1 else columns[1]
            moved = (at, at + size)
            joined[leaf] = Slice(part.expert, moved if dim == 1 else rows, moved if dim == 2 else columns)
        at += size
    return joined
