"""How a pass of the towers is cut between layers, so that answers go on in between.

    pieces = TowerPieces(serial)
    pieces.begin(PIECE_POSITIONS)
    hf_model(**tensors)                # raises PausedError between two layers, the towers' layers being run by `pieces.run`
    ...                                # a decode step
    pieces.begin(PIECE_POSITIONS)
    hf_model(**tensors)                # from the start again, but layers that have run return what they returned

What lies between the layers runs again in every piece: a few small operations. Of what layers returned, a pause keeps what no other
layer was given, and what somebody still holds; of the rest nothing is there but the shape. Code that reads it after all gets an
error, never a wrong number (`NotKeptError`); whoever runs the pass then runs it again, uncut.

What is not covered: models that write into a layer's output; their passes are not cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.runtime.tower_forms import UnknownFormError, filled, form_of

# Positions times layers of one piece. E4B's vision tower takes 43 ms for 16 layers of 2,520 positions (NVIDIA H200,
# bench/results/prompts.json): 11 ms, between one and two steps of 32 rows.
PIECE_POSITIONS = 10_080


class PausedError(Exception):
    """A pass of the towers has stopped between two layers."""


class NotKeptError(RuntimeError):
    """What a layer returned in an earlier piece is read, and was not kept."""


class _NotKept(Tensor):
    """A placeholder for a tensor that was not kept. It has a shape and a type, and can be passed on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotKeptError(
            f"{getattr(func, '__name__', func)} reads what a layer returned in an earlier piece of this pass"
        )


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

    def again(self) -> Any:
        """Return it once more, as tensors that may be written into."""
        if self.tensors is None:
            empty = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.shapes]
            outputs: list[Tensor] = [torch.Tensor._make_subclass(_NotKept, one) for one in empty]
        else:
            outputs = [one.clone() for one in self.tensors]
            self._watch(outputs)
        return filled(self.form, iter(outputs))

    def given_on(self, tensors: Sequence[Tensor]) -> None:
        """Let go of it where a layer is given it now: who else needs it holds it."""
        if self.tensors is not None and any(reference() is one for reference, _ in self._returned for one in tensors):
            self.tensors = None

    def keep(self) -> bool:
        """Hold what somebody else still holds; False if it was written into."""
        if self.tensors is not None:
            return all(one._version == version for one, version in zip(self.tensors, self._versions, strict=True))
        returned = [(reference(), version) for reference, version in self._returned]
        if any(one is not None and one._version != version for one, version in returned):
            return False
        if returned and all(one is not None for one, _ in returned):
            self.tensors = [one for one, _ in returned if one is not None]
            self._versions = [version for _, version in returned]
        return True


class TowerPieces:
    """A pass of one prompt's towers and how far it has come. serial: of the adapter that it began with."""

    def __init__(self, serial: int | None) -> None:
        self.serial = serial
        self.is_cut = False  # whether a pause has happened
        self._outputs: list[_Output] = []
        self._number, self._left, self._has_run = 0, 0, False
        self._kept = 0  # layers whose outputs are from earlier pieces

    def begin(self, positions: int | None) -> None:
        """Begin the next piece, of at most this many positions times layers, at least one layer; None for the rest."""
        self._number, self._has_run = 0, False
        self._left = 2**62 if positions is None else positions

    def run(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer returns. Errors: PausedError where this piece ends before it."""
        number, self._number = self._number, self._number + 1
        given = _given(args, kwargs)
        if number < self._kept:
            if self._outputs[number].given == given:
                self._give_on(args, kwargs, number)
                return self._outputs[number].again()
            if number:
                raise RuntimeError("a pass of the towers that was cut goes on with other inputs")
            self._outputs.clear()  # another pass: one of the images is cached, or no longer
            self._kept = 0
        if self._has_run and self._left <= 0 and self._may_pause():
            self.is_cut = True
            raise PausedError
        self._give_on(args, kwargs, len(self._outputs))
        output = compute(*args, **kwargs)
        self._has_run = True
        self._left -= _positions(args, kwargs)
        self._add(given, output)
        return output

    def _add(self, given: Hashable, output: Any) -> None:
        tensors: list[Tensor] = []
        try:
            form = form_of(output, tensors, lambda one: ())
        except UnknownFormError:
            self._left = 2**62
            return
        self._outputs.append(_Output(given, form, tensors))

    def _give_on(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: int) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        for output in self._outputs[:before]:
            output.given_on(tensors)

    def _may_pause(self) -> bool:
        """Keep what has to be kept; False, and no pause any more, where that is not possible."""
        if len(self._outputs) != self._number - 1:
            self._left = 2**62
            return False
        if all(one.keep() for one in self._outputs):
            self._kept = len(self._outputs)
            return True
        self._left = 2**62
        return False


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the form of a layer's arguments, None for one that has none."""
    try:
        return form_of((args, kwargs), [], lambda one: ())
    except UnknownFormError:
        return None


def _positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the positions of the first tensor of a layer's arguments: all of its dimensions but the last."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return int(value.numel() // max(value.shape[-1], 1))
    return 0
