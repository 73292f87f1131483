"""How is a changed parameter written back to file tensors that the loader renames, stacks or splits?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.engine.loader.tracing import Expression

Fetch = Callable[[str], Tensor]

_SAME_VALUES = ("to", "contiguous", "clone", "detach")
_TRANSPOSES = ("transpose", "swapaxes", "swapdims")
_RESHAPES = ("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze")
CUTS = ("chunk", "split", "tensor_split", "narrow", "select", "__getitem__", "unbind")


class CannotLayBackError(Exception):
    """A parameter is made from its files by an operation without an inverse."""


def name_of(expression: Expression) -> str:
    """Return the name of the outermost operation; "" for a file tensor."""
    return "" if expression.is_leaf else str(getattr(expression.func, "__name__", expression.func))


def is_cast(expression: Expression) -> bool:
    """Return whether a parameter is one unchanged file tensor, apart from its dtype."""
    return uncast(expression).is_leaf


def uncast(expression: Expression) -> Expression:
    """Return what a parameter is a cast or copy of."""
    while name_of(expression) in _SAME_VALUES and isinstance(expression.args[0], Expression):
        expression = expression.args[0]
    return expression


def without_casts(expression: Expression, fetch: Fetch) -> Tensor:
    """Return the parameter in float32, made from float32 file tensors, without the loader's casts."""

    def made(value: Any) -> Any:
        if isinstance(value, Expression):
            return without_casts(value, fetch)
        if isinstance(value, (list, tuple)):
            return type(value)(made(item) for item in value)
        return value

    if expression.leaf is not None:
        return fetch(expression.leaf)
    if name_of(expression) == "to":
        return without_casts(expression.args[0], fetch)
    result = expression.func(*made(expression.args), **{key: made(value) for key, value in expression.kwargs.items()})
    tensor: Tensor = result if expression.output is None else result[expression.output]
    return tensor


def lay_back(expression: Expression, leaf: str, parameter: Tensor, into: Tensor, shapes: Mapping[str, Any]) -> None:
    """Write the parameter's values into one of its file tensors.

    parameter: whole, float32. into: the file tensor, float32, whole; values outside the parameter do not change. shapes: of every
    file tensor. Errors: CannotLayBackError. A stack becomes a selection, a concatenation a part, a transposition its inverse. Any
    other operation is refused: a guess would write a wrong weight.
    """
    if expression.leaf is not None:
        into.copy_(parameter)
        return
    name, args = name_of(expression), expression.args
    if name in _SAME_VALUES:
        lay_back(args[0], leaf, parameter, into, shapes)
    elif name in ("cat", "concat", "concatenate", "stack"):
        child, part = _part(expression, leaf, parameter, shapes)
        lay_back(child, leaf, part, into, shapes)
    elif name in _TRANSPOSES:
        lay_back(args[0], leaf, parameter.transpose(int(args[1]), int(args[2])), into, shapes)
    elif name == "t":
        lay_back(args[0], leaf, parameter.t(), into, shapes)
    elif name == "permute":
        order = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        inverse = sorted(range(len(order)), key=lambda place: order[place] % len(order))
        lay_back(args[0], leaf, parameter.permute(inverse), into, shapes)
    elif name in _RESHAPES:
        lay_back(args[0], leaf, parameter.reshape(_shape(args[0], shapes)), into, shapes)
    elif name in CUTS:
        _write_over(expression, leaf, parameter, into)
    else:
        raise CannotLayBackError(f"{name} of {', '.join(expression.leaves[:3])}")


def _part(expression: Expression, leaf: str, parameter: Tensor, shapes: Mapping[str, Any]) -> tuple[Expression, Tensor]:
    """Return the operand of a stack or concatenation that contains the leaf, and its part of the parameter."""
    pieces = expression.args[0]
    dim = int(expression.kwargs.get("dim", expression.args[1] if len(expression.args) > 1 else 0))
    holders = [place for place, piece in enumerate(pieces) if leaf in piece.leaves]
    if len(holders) != 1:
        raise CannotLayBackError(f"{leaf} is used {len(holders)} times")
    place = holders[0]
    if name_of(expression) == "stack":
        return pieces[place], parameter.select(dim, place)
    sizes = [_shape(piece, shapes)[dim] for piece in pieces]
    return pieces[place], parameter.narrow(dim, sum(sizes[:place]), sizes[place])


def _shape(expression: Expression, shapes: Mapping[str, Any]) -> tuple[int, ...]:
    result = expression.replay(lambda leaf: torch.empty(shapes[leaf], device="meta"))
    return tuple(result.shape)


def _write_over(expression: Expression, leaf: str, parameter: Tensor, into: Tensor) -> None:
    """Write through the view of the file tensor that the recorded splits give."""
    if set(expression.leaves) != {leaf}:
        raise CannotLayBackError(f"{name_of(expression)} of several tensors")
    view = without_casts(expression, lambda _: into)
    if view.untyped_storage()._cdata != into.untyped_storage()._cdata or view.shape != parameter.shape:
        raise CannotLayBackError(f"{name_of(expression)} of {leaf}, which copies it")
    view.copy_(parameter)
