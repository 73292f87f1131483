"""Tensors that hold no data but remember where they came from, so that another loader can be asked what it would do.

A `Traced` tensor has the dtype and shape of a file tensor on the meta device, and an `Expression`: a file tensor, or an
operation on expressions. transformers' own loader run on traced tensors renames, stacks, transposes and casts them as it
would real ones; afterwards every parameter says how to make it. What an operation cannot record fails loudly: the result
is a plain meta tensor without an expression, which the caller refuses. Knows nothing of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Fetch = Callable[[str], Tensor]


class Expression:
    """How to make one tensor: a file tensor (`leaf`), or an operation on other expressions and plain values."""

    __slots__ = ("args", "func", "kwargs", "leaf", "output")

    def __init__(
        self, leaf: str | None = None, func: Any = None, args: Any = (), kwargs: Any = None, output: int | None = None
    ) -> None:
        self.leaf, self.func, self.args, self.kwargs, self.output = leaf, func, args, kwargs or {}, output

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor is exactly the file's."""
        return self.leaf is not None

    @property
    def leaves(self) -> tuple[str, ...]:
        """The file tensors it is made of, in the order in which `replay` first asks for them."""
        return tuple(dict.fromkeys(self._walk()))

    def _walk(self) -> Iterator[str]:
        if self.leaf is not None:
            yield self.leaf
        else:
            for value in _flat((self.args, tuple(self.kwargs.values()))):
                if isinstance(value, Expression):
                    yield from value._walk()

    def replay(self, fetch: Fetch) -> Tensor:
        """Return the tensor, made from what fetch gives for each file tensor (asked once each)."""
        known: dict[str, Tensor] = {name: fetch(name) for name in self.leaves}
        with torch.no_grad():
            return self._replay(known)

    def _replay(self, known: dict[str, Tensor]) -> Tensor:
        if self.leaf is not None:
            return known[self.leaf]
        args = _mapped(self.args, lambda item: item._replay(known))
        kwargs = _mapped(self.kwargs, lambda item: item._replay(known))
        result = self.func(*args, **kwargs)
        found: Tensor = result if self.output is None else result[self.output]
        return found


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def _mapped(value: Any, change: Callable[[Expression], Any]) -> Any:
    if isinstance(value, Expression):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _recorded(value: Any) -> Any:
    """Return the value with every traced tensor replaced by its expression."""
    if isinstance(value, Traced):
        return value.expression
    if isinstance(value, (list, tuple)):
        return type(value)(_recorded(item) for item in value)
    if isinstance(value, dict):
        return {key: _recorded(item) for key, item in value.items()}
    return value


def _bare(value: Any) -> Any:
    if isinstance(value, Traced):
        return value.as_subclass(Tensor)
    if isinstance(value, (list, tuple)):
        return type(value)(_bare(item) for item in value)
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items()}
    return value


def _same(func: Any, *known: Any) -> bool:
    # Compared with ==: descriptors such as Tensor.device.__get__ are made anew at every look-up.
    return any(func == item for item in known)


class Traced(Tensor):
    """A tensor without data that carries an Expression. compare: answers torch.equal on two of them from the files."""

    expression: Expression
    compare: Callable[[Expression, Expression], bool]

    @staticmethod
    def of(
        shape: tuple[int, ...], dtype: torch.dtype, expression: Expression, compare: Callable[[Expression, Expression], bool]
    ) -> Traced:
        return _wrap(torch.empty(shape, dtype=dtype, device="meta"), expression, compare)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _same(func, Tensor.device.__get__):  # type: ignore[attr-defined]
            return torch.device("cpu")  # the loader treats meta as "not loaded"
        if _same(func, torch.equal, Tensor.equal) and len(args) == 2 and all(isinstance(a, Traced) for a in args):
            same = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
            return bool(same and args[0].compare(args[0].expression, args[1].expression))
        first = args[0] if args else None
        if _same(func, Tensor.to):
            return _cast(first, args[1:], kwargs)
        if _same(func, Tensor.cpu, Tensor.pin_memory):
            return first
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*_bare(args), **_bare(kwargs))
        return _traced_result(func, args, kwargs, result)


def _cast(tensor: Traced, args: Any, kwargs: dict[str, Any]) -> Traced:
    """Record only the dtype of a `.to`: devices are the replay's business."""
    wanted = [value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
    wanted += [value.dtype for value in (*args, kwargs.get("other")) if isinstance(value, Tensor)]
    if not wanted or wanted[0] == tensor.dtype:
        return tensor
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted[0], device="meta")
    return _wrap(bare, Expression(func=Tensor.to, args=(tensor.expression, wanted[0])), tensor.compare)


def _traced_result(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    first = next((value for value in _flat((args, kwargs)) if isinstance(value, Traced)), None)
    if first is None:
        return result
    if isinstance(result, Tensor):
        if _is_same_values(func, args):
            return _wrap(result, first.expression, first.compare)
        return _wrap(result, Expression(func=func, args=_recorded(args), kwargs=_recorded(kwargs)), first.compare)
    if isinstance(result, (list, tuple)) and result and all(isinstance(item, Tensor) for item in result):
        recorded, named = _recorded(args), _recorded(kwargs)
        made = [
            _wrap(item, Expression(func=func, args=recorded, kwargs=named, output=place), first.compare)
            for place, item in enumerate(result)
        ]
        return tuple(made)
    return result


def _is_same_values(func: Any, args: Any) -> bool:
    if _same(func, Tensor.detach, Tensor.requires_grad_, Tensor.data.__get__):  # type: ignore[attr-defined]
        return True
    return _same(func, Tensor.__getitem__) and len(args) == 2 and args[1] is Ellipsis


def _wrap(bare: Tensor, expression: Expression, compare: Callable[[Expression, Expression], bool]) -> Traced:
    with torch._C.DisableTorchFunctionSubclass():
        made = bare.detach().as_subclass(Traced)
    made.expression, made.compare = expression, compare
    return made
