"""How is transformers' loader traced with tensors without data that record their origin?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

Fetch = Callable[[str], Tensor]

# Fresh values that depend on more than the inputs: a replay would give others.
FRESH = frozenset(("empty_like", "new_empty", "new_empty_strided", "rand_like", "randn_like", "randint_like"))
UNREPEATABLE = frozenset(("bernoulli", "dropout"))
IN_PLACE_DUNDERS = frozenset(f"__{name}__" for name in ("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ipow"))


class Expression:
    """How to make one tensor: a file tensor (`leaf`), or an operation on other expressions and plain values."""

    __slots__ = ("args", "func", "kwargs", "leaf", "output")

    def __init__(
        self,
        leaf: str | None = None,
        func: Any = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        output: int | None = None,
    ) -> None:
        self.leaf, self.func, self.args, self.kwargs, self.output = leaf, func, args, kwargs or {}, output

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor is exactly the file's."""
        return self.leaf is not None

    @property
    def cast_leaf(self) -> str | None:
        """The file tensor that it is, or is a cast of; None if it is made by more than a cast."""
        inner = self.args[0] if self.func == Tensor.to and self.args else self
        return inner.leaf if isinstance(inner, Expression) else None

    @property
    def leaves(self) -> tuple[str, ...]:
        """The file tensors it is made of, each once, in the order in which `replay` requests them."""
        return tuple(dict.fromkeys(self._walk()))

    def _walk(self) -> Iterator[str]:
        if self.leaf is not None:
            yield self.leaf
            return
        for value in _flat((self.args, self.kwargs)):
            if isinstance(value, Expression):
                yield from value._walk()

    def replay(self, fetch: Fetch) -> Tensor:
        """Return the tensor, made from fetch's result for each file tensor (called once each), on their device."""
        known = {tensor_name: fetch(tensor_name) for tensor_name in self.leaves}
        with torch.no_grad():
            return self._replay(known)

    def _replay(self, known: dict[str, Tensor]) -> Tensor:
        if self.leaf is not None:
            return known[self.leaf]
        device = next(iter(known.values())).device

        def made(value: object) -> object:
            if isinstance(value, Expression):
                return value._replay(known)
            return value.to(device) if isinstance(value, Tensor) and value.dim() else value

        result = self.func(*_mapped(self.args, made), **_mapped(self.kwargs, made))
        return result if self.output is None else result[self.output]


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value


def _mapped(value: object, change: Callable[[object], object]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return change(value)


class Trace:
    """One run of a loader: answers questions about values, and keeps every operation that failed or could not be followed.

    equal: whether two expressions give equal tensors; the only question about values that is answered.
    """

    def __init__(self, equal: Callable[[Expression, Expression], bool]) -> None:
        self.equal = equal
        self.problems: list[str] = []

    def tensor(self, tensor_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        """Return the stand-in of a file tensor."""
        return _wrap(torch.empty(shape, dtype=dtype, device="meta"), Expression(leaf=tensor_name), self)


class CannotFollowError(RuntimeError):
    """An operation on traced tensors that has no recordable meaning."""


# Functions of a form; functions whose answer is the same for all traced tensors (the loader treats meta as "not loaded"); functions
# that give the tensor itself. Looked up by ==: descriptors such as Tensor.device.__get__ are made again each time.
_ASKS = frozenset((
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "grad_fn")), Tensor.dim, Tensor.size, Tensor.numel,
    Tensor.is_floating_point,
))  # fmt: skip
_ANSWERS: dict[object, object] = {getattr(Tensor, name).__set__: None for name in ("requires_grad", "grad")}
_ANSWERS |= {getattr(Tensor, name).__get__: answer for name, answer in (("device", torch.device("cpu")), ("is_meta", False))}
_MOVES = frozenset((Tensor.cpu, Tensor.cuda, Tensor.pin_memory))
_SAME_VALUES = frozenset((Tensor.detach, Tensor.requires_grad_, *(getattr(Tensor, name).__get__ for name in ("data",))))


class Traced(Tensor):
    """A tensor without data that carries an Expression and the Trace of its run. A loader renames, stacks, transposes and casts it
    as a real one. An operation that cannot be recorded (it writes in place or reads a value) is refused at once and kept in
    `Trace.problems`."""

    expression: Expression
    run: Trace

    def adopt(self, values: Traced) -> None:
        """Have the values of another traced tensor of the same form."""
        self.expression = values.expression

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in _ASKS:  # most calls: the answer is the form's own
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if func in _ANSWERS:
            return _ANSWERS[func]
        kwargs = dict(kwargs or {})
        first = next(value for value in _flat((args, kwargs)) if isinstance(value, Traced))
        if func in (torch.equal, Tensor.equal):
            return _are_equal(args)
        if func == Tensor.to and args[0] is first:
            return _cast(first, args[1:], kwargs)
        if func in _MOVES:
            return first
        if func == Tensor.data.__set__ and _replaces(*args):  # type: ignore[attr-defined]
            return None
        if _name_of(func) in FRESH:
            kwargs["device"] = "meta"
            with torch._C.DisableTorchFunctionSubclass():
                return func(*_mapped(args, _bare), **_mapped(kwargs, _bare))
        try:
            _check_recordable(func, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*_mapped(args, _bare), **_mapped(kwargs, _bare))
        except Exception as exc:
            traced = (item for item in _flat((args, kwargs)) if isinstance(item, Traced))
            names = ", ".join(sorted({name for item in traced for name in item.expression.leaves})[:3])
            first.run.problems.append(f"{_name_of(func)} on {names}: {exc}")
            raise
        return _traced_result(func, args, kwargs, result, first.run)


def _bare(value: object) -> object:
    return value.as_subclass(Tensor) if isinstance(value, Traced) else value


def _name_of(func: object) -> str:
    return str(getattr(func, "__name__", func))


def _check_recordable(func: object, args: object, kwargs: Mapping[str, object]) -> None:
    name = _name_of(func)
    writes = name in IN_PLACE_DUNDERS or name == "__set__" or kwargs.get("out") is not None
    if writes or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
        raise CannotFollowError("it writes in place")
    if name in UNREPEATABLE:
        raise CannotFollowError("its result is not made from its inputs alone")
    for value in _flat((args, kwargs)):
        if isinstance(value, Tensor) and not isinstance(value, Traced) and value.is_meta:
            raise CannotFollowError("another operand has no data")


def _replaces(tensor: object, values: object) -> bool:
    """Whether one traced tensor took over another one's values, which have the same form."""
    if not isinstance(tensor, Traced) or not isinstance(values, Traced):
        return False
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        return False
    tensor.adopt(values)
    return True


def _are_equal(args: Sequence[object]) -> bool:
    a, b = args if len(args) == 2 else (None, None)
    if not isinstance(a, Traced) or not isinstance(b, Traced):
        return False
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.run.equal(a.expression, b.expression))


def _cast(tensor: Traced, args: Sequence[object], kwargs: Mapping[str, object]) -> Traced:
    """Record only the dtype of a `.to`: devices are the replay's business."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, (torch.dtype, Tensor))]
    wanted = next((value.dtype if isinstance(value, Tensor) else value for value in given), None)
    if wanted is None or wanted == tensor.dtype:
        return tensor
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="meta")
    return _wrap(bare, Expression(func=Tensor.to, args=(tensor.expression, wanted)), tensor.run)


def _traced_result(func: Callable[..., object], args: Sequence[object], kwargs: object, result: object, trace: Trace) -> object:
    def recorded(value: object) -> object:
        return value.expression if isinstance(value, Traced) else value

    made = partial(Expression, None, func, _mapped(args, recorded), _mapped(kwargs, recorded))
    if isinstance(result, Tensor):
        first = args[0] if _is_same_values(func, args) else None
        return _wrap(result, first.expression if isinstance(first, Traced) else made(), trace)
    if isinstance(result, (list, tuple)) and result and all(isinstance(item, Tensor) for item in result):
        return type(result)([_wrap(item, made(place), trace) for place, item in enumerate(result)])
    return result


def _is_same_values(func: object, args: Sequence[object]) -> bool:
    if func in _SAME_VALUES:
        return True
    if func == nn.functional.pad and len(args) > 1 and isinstance(args[1], (list, tuple)) and not any(args[1]):
        return True  # transformers pads a head's bias to its rows
    # Any other index, and `contiguous`, is recorded: it may change the strides.
    return func == Tensor.__getitem__ and len(args) == 2 and args[1] is Ellipsis


def _wrap(bare: Tensor, expression: Expression, trace: Trace) -> Traced:
    with torch._C.DisableTorchFunctionSubclass():
        traced = bare.detach().as_subclass(Traced)
    traced.expression, traced.run = expression, trace
    return traced


class TooLargeError(Exception):
    """A model that would have more modules, or larger buffers, than any model has."""


@contextmanager
def most_modules(most: int) -> Iterator[None]:
    """Raise TooLargeError once more than `most` modules were put into others: their number bounds the time of building."""
    count = 0

    def added(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise TooLargeError(f"would have more than {most} modules")

    hook = register_module_module_registration_hook(added)
    try:
        yield
    finally:
        hook.remove()


class NoAllocation(TorchFunctionMode):
    """While active, a parameter that no file holds costs nothing, and a buffer without a value is recognized.

    A loader replaces a missing parameter by `torch.empty_like(parameter, device="cpu")` and fills it at random; here it
    stays on meta and is marked as filled, so that no random numbers are drawn for it. Buffers made that way are real,
    filled with a value that `is_undefined` knows. Should a loader do it in another way, memory is spent and nothing else
    changes. most_buffer_bytes: of all such buffers together. Errors: TooLargeError beyond it, before the memory is taken.
    """

    def __init__(self, most_buffer_bytes: int) -> None:
        super().__init__()
        self._left_bytes = self._most_bytes = most_buffer_bytes

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is not torch.empty_like or not args or isinstance(args[0], Traced) or not args[0].is_meta:
            return func(*args, **kwargs)
        if isinstance(args[0], nn.Parameter):
            empty = nn.Parameter(func(*args, **(kwargs | {"device": "meta"})), requires_grad=args[0].requires_grad)
            empty._is_hf_initialized = True  # type: ignore[attr-defined]
            return empty
        self._left_bytes -= args[0].nbytes
        if self._left_bytes < 0:
            raise TooLargeError(f"would have more than {self._most_bytes} bytes of buffers that no file holds")
        result = func(*args, **kwargs)
        if not result.is_meta and result.dtype != torch.bool:
            result.fill_(_undefined(result.dtype))
        return result


def _undefined(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def is_undefined(buffer: Tensor) -> bool:
    """Return whether a buffer still has the value that `NoAllocation` wrote: no code gave it a value."""
    if not buffer.numel() or buffer.dtype == torch.bool:
        return False
    return bool((buffer.isnan() if buffer.is_floating_point() else buffer == _undefined(buffer.dtype)).all())
