"""Where captured prompts read adapters: a buffer for each layout, and the values that are copied into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trimtab.runtime import lora


@dataclass(eq=False)
class PromptLayout:
    """Where graphs read adapters of one layout: `name` routes layers to tensors in `buffer`. holds: (name, serial) of whose
    values are there."""

    name: str
    buffer: Tensor
    leaves: list[Any]
    holds: tuple[str, int] | None = None


def part_of(module: Any, name: str) -> str | None:
    """Return the part of the model that an adapter's piece in a module belongs to."""
    found = module.__dict__["adapters"][name]
    part: str | None = getattr(found, "part", None) or module.__dict__.get("part")
    return part


def values_of(name: str, holders: lora.Holders) -> Tensor:
    """Return the values [N] that an attached adapter's plain places count in."""
    first = holders.fitting.plain[0]
    A: Tensor = first.leaf.adapters[name].A
    begins = A.storage_offset() - first.A_start
    count = A.untyped_storage().nbytes() // A.element_size() - begins
    return A.as_strided((count,), (1,), begins)
