"""Rotations whose angles depend on the length of a text: every text turns as if it were computed alone and whole.

    most = limit(hf_model)                          # tokens of a text up to which angles are fixed, None for any
    turn_alone(hf_model, context_tokens)            # at load
    with text_of(hf_model, tokens): hf_model(...)   # a piece of a text of so many tokens

"longrope" has other angles behind `original_max_position_embeddings`, "dynamic" for each length. transformers (5.6.2 to 5.23,
modeling_rope_utils.py) chooses those of all rows of a pass by its longest position; "dynamic" keeps an earlier, longer text's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel


class _Config(Protocol):
    rope_parameters: Mapping[str, object]


class _Rotary(Protocol):
    """A module that makes cos and sin [..., B, S, D] of x and positions [..., B, S]."""

    rope_type: str | Mapping[str, str]
    config: _Config
    original_max_seq_len: int


def limit(hf_model: HFModel) -> int | None:
    """Return how many tokens a text has at most before its rotations change, None if they never do."""
    return min((most for module in hf_model.modules() for most in _limits(module)), default=None)


def turn_alone(hf_model: HFModel, context_tokens: int) -> None:
    """Make each row's angles those of its own text, whatever was computed before and is computed beside it, where a text of the
    context's length changes them."""
    if context_tokens <= (limit(hf_model) or context_tokens):
        return
    own = _ALONE[hf_model] = _Alone()
    for module in hf_model.modules():
        if any(_limits(module)):
            module.register_forward_hook(own.turn, with_kwargs=True)


def text_of(hf_model: HFModel, tokens: int) -> AbstractContextManager[None]:
    """Within: passes compute pieces of one text of at least `tokens` tokens."""
    own = _ALONE.get(hf_model)
    return nullcontext() if own is None else own.text_of(tokens)


class _Alone:
    """tokens: of the text whose pieces are computed; 0 where each row is as long as its last position says."""

    tokens = 0

    @contextmanager
    def text_of(self, tokens: int) -> Iterator[None]:
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = 0

    def turn(self, rotary: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
        x, positions, *kind = *args, *kwargs.values()  # in the order of the signature
        assert isinstance(x, Tensor) and isinstance(positions, Tensor)
        more = {"layer_type": kind[0]} if kind else {}
        count = positions.shape[-1]
        if self.tokens:
            positions = torch.cat((positions, torch.full_like(positions[..., :1], self.tokens - 1)), dim=-1)
        rows = []
        for row in positions.split(1, dim=-2):
            rotary.forward(x, torch.zeros_like(row), **more)  # a short text: "dynamic" forgets an earlier one
            rows.append(rotary.forward(x, row, **more))
        if isinstance(output, Tensor):  # cos and sin as complex numbers
            return torch.cat([row for row in rows if isinstance(row, Tensor)], dim=-3)[..., :count, :]
        return tuple(torch.cat(parts, dim=-3)[..., :count, :] for parts in zip(*rows, strict=True))


_ALONE: WeakKeyDictionary[HFModel, _Alone] = WeakKeyDictionary()


def _turns(module: object) -> TypeGuard[_Rotary]:
    return hasattr(module, "rope_type") and hasattr(module, "original_max_seq_len")


def _limits(module: nn.Module) -> Iterator[int]:
    if not _turns(module):
        return
    kinds, parameters = module.rope_type, module.config.rope_parameters
    for name, kind in ((None, kinds),) if isinstance(kinds, str) else kinds.items():
        own = parameters if name is None else parameters[name]
        if kind == "longrope":
            assert isinstance(own, Mapping)
            yield int(own["original_max_position_embeddings"])
        elif "dynamic" in kind:
            yield int(module.original_max_seq_len)
