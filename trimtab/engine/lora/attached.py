"""An adapter on a loaded model: the third of its forms, after its description (a spec) and its values in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget


@dataclass(frozen=True)
class AttachedAdapter:
    """One entry of the model's registry. spec: None for a sum of adapters. nbytes: on the execution device. content: equal for two
    adapters only if they compute the same; "" without a prefix cache, its only user."""

    spec: AdapterSpec | None
    nbytes: int
    content: str = ""


@dataclass(frozen=True)
class PlainPlace:
    """One linear layer that an adapter changes by A and B alone, which begin at values A_start and B_start of its piece.

    Shapes: A [rank, in_features], B [out_features, rank].
    """

    leaf: Any
    part: str
    scale: float
    rank: int
    A_start: int
    B_start: int


@dataclass(eq=False)
class Fitting:
    """The targets of one adapter on one model, matched and checked once, so that attaching it again is a short loop.

    plain: targets in one piece of memory that has all of A and B. rest: by module path, all others, which are read
    tensor by tensor. kinds: of the decoder's linear layers that it changes (`kind_of`). largest_rank: there.
    """

    model: nn.Module
    plain: list[PlainPlace]
    rest: dict[str, dict[str, AdapterTarget]]
    kinds: frozenset[str]
    largest_rank: int


@dataclass(eq=False)
class Holders:
    """The modules that hold one attached adapter: those of its fitting's plain places, and `rest` with their paths.

    address: of the piece that the plain places count from, 0 if there is none. about: the model's entry for it, None where it
    was attached without a `LoadedModel`. serial: a new number whenever an adapter is attached, because the same name may mean
    other tensors later.
    """

    fitting: Fitting
    rest: list[tuple[str, nn.Module]]
    address: int = 0
    about: AttachedAdapter | None = None
    serial: int = 0

    @property
    def reads_on_host(self) -> bool:
        """Whether a pass with it reads on the host which experts were chosen, so that it cannot be captured."""
        return any(hasattr(module, "has_gate") for _, module in self.rest)
