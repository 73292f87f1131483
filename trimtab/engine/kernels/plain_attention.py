"""What do norms, rotation and attention compute, in torch with the roundings of transformers' modules?"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Growth(NamedTuple):
    """What queries are multiplied by, rounded to their type: 1 + beta log(1 + floor(position / length))."""

    beta: float
    length: int

    def of(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factors of positions, as Ministral 3 computes them."""
        return (1 + self.beta * torch.log(1 + torch.floor(positions / self.length))).to(dtype)


class Scores(NamedTuple):
    """What becomes of the products of queries and keys. sinks [Hq]: a score of each head that has no value. growth: of queries."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    growth: Growth | None = None


def norm_torch(x: Tensor, weight: Tensor | None, eps: float, form: str = "inside") -> Tensor:
    """Return the norm of x [..., D] as transformers' modules of this form compute it; weight [D], None for 1."""
    wide = x.float()
    square = wide.pow(2).mean(-1, keepdim=True) + eps
    wide = wide * (torch.pow(square, -0.5) if form == "inside" else torch.rsqrt(square))
    if weight is None:
        return wide.type_as(x)
    if form == "after":
        return weight * wide.type_as(x)
    return (wide * (weight.float() if form == "inside" else 1.0 + weight.float())).type_as(x)


def turned_torch(x: Tensor, cos: Tensor, sin: Tensor, *, in_pairs: bool = False) -> Tensor:
    """Return x [n, H, D] with the first R values of each head rotated; cos, sin [n, R]: float32 rounds once."""
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = x.shape[-1] // 2
    if in_pairs:
        cos, sin = (one[:, :half].repeat_interleave(2, dim=-1) for one in (cos, sin))
        other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    turned = ((x * cos[:, None]) + (other * sin[:, None])).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def attention_torch(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Return attention [B, Hq, T, D] of queries that have grown, as transformers' modules round it.

    Shapes: q [B, Hq, T, D], keys, values [B, Hkv, S, D], mask [B or 1, 1, T, S] of bool, or added to the scores; None for causal.
    Source: transformers 5.23.0, models/gemma2, gemma3, gemma4, llama, ministral3, glm4, olmo2 and gpt_oss.
    """
    keys, values = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (keys, values))
    if scores.softcap is None and scores.sinks is None:
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scores.scale)
    if mask is None:
        mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril()
    found = torch.matmul(q, keys.transpose(2, 3)) * scores.scale
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    found = found.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else found + mask
    if scores.sinks is not None:
        found = torch.cat((found, scores.sinks.view(1, -1, 1, 1).expand(*found.shape[:3], 1)), dim=-1)
    weights = torch.softmax(found, dim=-1, dtype=torch.float32).to(q.dtype)[..., : keys.shape[2]]
    return torch.matmul(weights, values)
