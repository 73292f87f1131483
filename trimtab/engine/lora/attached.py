"""An adapter on a loaded model: the third of its forms, after its description (a spec) and its values in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.adapters.adapter import AdapterSpec


@dataclass(frozen=True)
class AttachedAdapter:
    """One entry of the model's registry. spec: None for a sum of adapters. nbytes: on the execution device. content: equal for two
    adapters only if they compute the same; "" without a prefix cache, its only user."""

    spec: AdapterSpec | None
    nbytes: int
    content: str = ""
