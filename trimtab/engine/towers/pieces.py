"""How is a pass of the towers cut between layers, so that answers go on in between?"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Lengths of attention's parts: transformers' sdpa attention splits by them, which waits for the device in every layer (5.23.0,
# Qwen2_5_VLVisionAttention.forward).
HOST_LENGTHS = ("cu_seqlens",)


class UnknownFormError(Exception):
    """A layer is given or returns something that is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class _Slot:
    """The slot of a tensor in a form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Values where they are part of the program, else None.
    values: tuple[int, ...] | None = None


def form_of(value: object, tensors: list[Tensor], lengths: Callable[[Tensor], tuple[int, ...]], name: str = "") -> Hashable:
    """Return the part of a layer's arguments or output that belongs to a graph; other tensors are put into `tensors`.

    lengths: the values of a tensor in HOST_LENGTHS. Errors: UnknownFormError.
    """
    if isinstance(value, Tensor):
        if name in HOST_LENGTHS:
            return _Slot(tuple(value.shape), value.dtype, lengths(value))
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype)
    if value is None or type(value) in (bool, int, float, str):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return (type(value).__name__, *(form_of(one, tensors, lengths, name) for one in value))
    if type(value) is dict:
        return ("dict", *((key, form_of(one, tensors, lengths, key)) for key, one in value.items()))
    raise UnknownFormError(type(value).__name__)


def filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of a form with these tensors in it."""
    if isinstance(form, _Slot):
        return next(tensors) if form.values is None else torch.tensor(form.values, dtype=form.dtype)
    kind, *rest = form
    if kind == "dict":
        return {key: filled(one, tensors) for key, one in rest}
    if kind in ("tuple", "list"):
        values = [filled(one, tensors) for one in rest]
        return tuple(values) if kind == "tuple" else values
    return rest[0]


# Positions times layers of one piece. E4B's vision tower takes 43 ms for 16 layers of 2,520 positions (NVIDIA H200,
# bench/results/prompts.json): 11 ms, between one and two steps of 32 rows.
PIECE_POSITIONS = 10_080
# Seconds after which a piece ends on a CPU. The operations that run again in each piece come on top, and the layer in progress.
PIECE_S = 0.1


class PausedError(Exception):
    """A pass of the towers has stopped between two layers."""


class TowersDoneError(PausedError):
    """The towers are complete, and the pass has stopped before the decoder."""


class OtherInputsError(RuntimeError):
    """A layer is given other inputs than when an earlier piece computed it."""


class NotKeptError(RuntimeError):
    """An output of an earlier piece is read and was not kept."""


class _NotKept(Tensor):
    """A placeholder for a tensor that was not kept. It has a shape and a type, and can be passed on."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in _OF_SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotKeptError(f"{getattr(func, '__name__', func)} reads what a layer returned in an earlier piece of this pass")


_OF_SHAPES = (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.dim, Tensor.numel, Tensor.size)  # type: ignore[attr-defined]


class _Output:
    """The outputs of a layer. given: the form of its inputs. tensors: available until another layer receives them, or as a
    pause kept them; None if nothing references them any more."""

    def __init__(self, given: Hashable, form: Hashable, tensors: Sequence[Tensor]) -> None:
        self.given, self.form = given, form
        self.shapes = [(one.shape, one.dtype) for one in tensors]
        self.tensors: list[Tensor] | None = list(tensors)
        self._versions = [one._version for one in tensors]
        self._returned: list[tuple[weakref.ref[Tensor], int]] = []
        self._watch(tensors)

    def _watch(self, tensors: Sequence[Tensor]) -> None:
        self._returned = [(weakref.ref(one), one._version) for one in tensors]

    def again(self) -> object:
        """Return it again, as tensors that may be written into."""
        if self.tensors is None:
            empty = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.shapes]
            outputs: list[Tensor] = [torch.Tensor._make_subclass(_NotKept, one) for one in empty]
        else:
            outputs = [one.clone() for one in self.tensors]
            self._watch(outputs)
        return filled(self.form, iter(outputs))

    def given_on(self, tensors: Sequence[Tensor]) -> None:
        """Drop the reference where a layer receives it now: other users have their own."""
        if self.tensors is not None and any(reference() is one for reference, _ in self._returned for one in tensors):
            self.tensors = None

    def keep(self) -> bool:
        """Keep tensors that are still referenced elsewhere; False if they were written into."""
        if self.tensors is not None:
            return all(one._version == version for one, version in zip(self.tensors, self._versions, strict=True))
        returned = [(reference(), version) for reference, version in self._returned]
        if any(one is not None and one._version != version for one, version in returned):
            return False
        if returned and all(one is not None for one, _ in returned):
            self.tensors = [one for one, _ in returned if one is not None]
            self._versions = [version for _, version in returned]
        return True

    def copy(self) -> None:
        """Replace the kept tensors by copies."""
        if self.tensors is not None:
            self.tensors = [one.clone() for one in self.tensors]
            self._versions = [one._version for one in self.tensors]


class TowerPieces:
    """A pass of one prompt's towers and how far it has come. serial: of the adapter that it began with. now: a clock in seconds.
    After `begin` the model's pass raises PausedError between two layers; the next pass begins from the start, but layers that have
    run return their earlier outputs. A pause keeps the outputs of layers that no other layer received, and those that are still
    referenced; NotKeptError: the caller runs the pass again, uncut. Models that write into a layer's output are not cut."""

    def __init__(self, serial: int | None, now: Callable[[], float] = time.perf_counter) -> None:
        self.serial, self._now = serial, now
        self.is_cut = False  # whether a pause has happened
        self.is_done = False  # whether one has happened behind the last layer
        self._outputs: list[_Output] = []  # of layers in their order
        self._number, self._left, self._has_run = 0, 0, False
        self._may_end = True  # whether a piece may end before the pass does
        self._seconds: float | None = None
        self._until: float | None = None
        self._kept = 0  # layers whose outputs are from earlier pieces

    def begin(self, positions: int | None, seconds: float | None = None) -> None:
        """Begin the next piece, of at most this many positions times layers, at least one layer; None for the rest. seconds:
        it also ends before the next layer once it has computed for that time."""
        self._number, self._has_run = 0, False
        self._left, self._may_end = positions or 0, positions is not None
        self._seconds, self._until = seconds, None

    def run(self, compute: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return a layer's output. Errors: PausedError where this piece ends before it."""
        number, self._number = self._number, self._number + 1
        given = _given(args, kwargs)
        known = self._known(number, given)
        if isinstance(known, _Output):
            self._give_on(args, kwargs, number)
            return known.again()
        if self._has_run and self._may_end and self._is_over() and self._may_pause(number):
            self.is_cut = True
            raise PausedError
        if self._until is None and self._seconds is not None:
            self._until = self._now() + self._seconds
        self._give_on(args, kwargs, len(self._outputs))
        output = compute(*args, **kwargs)
        self._has_run = True
        self._left -= _positions(args, kwargs)
        self._add(given, output)
        return output

    def copy_kept(self) -> None:
        """Replace the tensors that a pause keeps by copies: other passes use this pass's memory until the next piece."""
        for one in self._outputs:
            one.copy()

    def end(self) -> None:
        """Tell that only the decoder is left. Errors: TowersDoneError if this piece has computed a layer and may end."""
        if self._has_run and self._may_end and self._may_pause(self._number):
            self.is_cut = self.is_done = True
            raise TowersDoneError

    def _known(self, number: int, given: Hashable) -> _Output | None:
        """Return the output of a layer in earlier pieces; None for one that they did not reach."""
        if number >= self._kept:
            return None
        if self._outputs[number].given == given:
            return self._outputs[number]
        if number:
            raise OtherInputsError("a pass of the towers that was cut goes on with other inputs")
        self._outputs.clear()  # another pass: one of the images is cached, or no longer
        self._kept = 0
        return None

    def _is_over(self) -> bool:
        return self._left <= 0 or (self._until is not None and self._now() >= self._until)

    def _add(self, given: Hashable, output: object) -> None:
        tensors: list[Tensor] = []
        try:
            form = form_of(output, tensors, lambda one: ())
        except UnknownFormError:
            self._may_end = False
            return
        self._outputs.append(_Output(given, form, tensors))

    def _give_on(self, args: tuple[object, ...], kwargs: dict[str, object], before: int) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        for output in self._outputs[:before]:
            output.given_on(tensors)

    def _may_pause(self, number: int) -> bool:
        """Keep the needed outputs of the layers before this one; False, and no pause any more, where that is not possible."""
        if len(self._outputs) != number:
            self._may_end = False
            return False
        if all(one.keep() for one in self._outputs):
            self._kept = len(self._outputs)
            return True
        self._may_end = False
        return False


def _given(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """Return the form of a layer's arguments, None for one that has none."""
    try:
        return form_of((args, kwargs), [], lambda one: ())
    except UnknownFormError:
        return None


def _positions(args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    """Return the positions of the first tensor of a layer's arguments: all of its dimensions but the last."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return int(value.numel() // max(value.shape[-1], 1))
    return 0
