"""Which share of an adapter's change does a merged weight retain, and how large are other changes?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_PIECE_VALUES = 4 * 2**20


@dataclass(frozen=True)
class Survival:
    """The retained change of one module. delta_norm: its norm; delta_share: its norm relative to that of the base's weight."""

    module_path: str
    survived: float
    noise: float
    delta_norm: float
    delta_share: float

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready values."""
        return asdict(self)


def survival(module_path: str, base: Tensor, merged: Tensor, delta: Tensor) -> Survival:
    """Return the share of a change in a merged weight. Shapes: [D_out, D_in] each, any floating dtypes, one device.

    A change of length 0 has survived (1.0) if the merged weight is the base's, and not (0.0) otherwise. With D = merged - base:
    survived = <D, delta> / <delta, delta> (1: all of it is there; 0: rounded away; 2: merged twice), noise = ||D - survived x
    delta|| / ||delta||. A merge into 4 bits can keep 0.9 of the change and add ten times as much noise.
    """
    step = max(1, _PIECE_VALUES // max(1, base.shape[-1]))
    along = squared = changed = weight = 0.0
    for start in range(0, base.shape[0], step):
        rows = slice(start, start + step)
        w, d = base[rows].double(), delta[rows].double()
        apart = merged[rows].double() - w
        along += float((apart * d).sum())
        squared += float((d * d).sum())
        changed += float((apart * apart).sum())
        weight += float((w * w).sum())
    length, size = math.sqrt(squared), math.sqrt(weight)
    if squared == 0:
        return Survival(module_path, float(changed == 0), 0.0 if changed == 0 else math.inf, 0.0, 0.0)
    # ||D - s delta||^2 = ||D||^2 - <D, delta>^2 / ||delta||^2; rounding may take it a little below zero.
    rest = max(0.0, changed - along * along / squared)
    return Survival(module_path, along / squared, math.sqrt(rest) / length, length, length / size if size else math.inf)


def lora_delta(weight: Tensor, A: Tensor, B: Tensor, scale: float, magnitude: Tensor | None = None, *, dora_dim: int = 1) -> Tensor:
    """Return the exact change of a weight by a LoRA, in float32: scale x B A, and the rescaling of DoRA.

    Shapes: weight [D_out, D_in], A [R, D_in], B [D_out, R], magnitude [D_out] (dora_dim 1: one per row) or [D_in]
    (dora_dim 0, embeddings). Source: arXiv 2106.09685 section 4.1; arXiv 2402.09353 equation 5.
    """
    change = (B.float() @ A.float()) * scale
    if magnitude is None:
        return change
    whole = weight.float() + change
    length = torch.linalg.norm(whole, dim=dora_dim, keepdim=True)
    shape = (-1, 1) if dora_dim == 1 else (1, -1)
    return magnitude.float().reshape(shape) / length * whole - weight.float()


def mean_survival(rows: tuple[Survival, ...] | list[Survival]) -> tuple[float, float]:
    """Return (survived, noise) of all modules together, weighted by the squares of their changes' norms."""
    total = sum(row.delta_norm**2 for row in rows)
    if not total:
        return (1.0 if all(row.survived == 1.0 for row in rows) else 0.0, 0.0)
    survived = sum(row.survived * row.delta_norm**2 for row in rows) / total
    noise = math.sqrt(sum((row.noise * row.delta_norm) ** 2 for row in rows if row.delta_norm) / total)
    return survived, noise
