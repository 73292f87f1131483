"""What lies between the products of a decode step, few launches each: norms, rotation, attention, gates.

The torch paths round where transformers' Gemma 4 modules round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_GATES = {"gelu_tanh": "tanh", "gelu": "none"}


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (wide if weight is None else wide * weight.float()).type_as(x)


def add_norm(
    y: Tensor | None, residual: Tensor, post_weight: Tensor | None, next_weight: Tensor | None, eps: float,
    scalar: Tensor | None, out_h: Tensor | None, out_x: Tensor | None, module: Any = None,
) -> None:  # fmt: skip
    """Write h = (residual + norm(y)) * scalar to out_h and norm(h) to out_x, [n, D] each."""
    h = residual if y is None else residual + _norm(y, post_weight, eps)
    if scalar is not None:
        h = h * scalar
    if out_x is not None:
        out_x.copy_(_norm(h, next_weight, eps))
    if out_h is not None:
        out_h.copy_(h)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos[:, None]) + (other * sin[:, None])


def rope_write(
    qkv: Tensor, heads: int, kv_heads: int, dim: int, q_weight: Tensor, k_weight: Tensor | None, eps: float, cos: Tensor,
    sin: Tensor, keys: Tensor | None, values: Tensor | None, places: Tensor | None, q_out: Tensor, *, module: Any = None,
    mode: str = "own",
) -> None:  # fmt: skip
    """Write normed and rotated queries to q_out [n, Hq, D], and keys and values to their places in the cache."""
    count = qkv.shape[0]
    queries = qkv[:, : heads * dim].view(count, heads, dim)
    q_out.copy_(_turned(_norm(queries, q_weight, eps), cos, sin))
    if keys is None or values is None or places is None:
        return
    own = qkv[:, heads * dim : (heads + kv_heads) * dim].view(count, kv_heads, dim)
    other = own if mode == "k_is_v" else qkv[:, (heads + kv_heads) * dim :].view(count, kv_heads, dim)
    rows = torch.arange(count, device=qkv.device)
    keys[rows, :, places] = _turned(_norm(own, k_weight, eps), cos, sin)
    values[rows, :, places] = _norm(other, None, eps)


def scratch_values(count: int, heads: int, dim: int, places: int) -> int:
    """Return how many float32 values `attend` needs beside its output."""
    return 0


def attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float, softcap: float | None, out: Tensor,
    scratch: Tensor | None, module: Any = None,
) -> None:  # fmt: skip
    """Write attention of q [n, Hq, D] over places 0..positions of each row to out [n, Hq * D]."""
    count, heads, dim = q.shape
    mask = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    group = heads // keys.shape[1]
    found = functional.scaled_dot_product_attention(
        q[:, :, None], keys[:count].repeat_interleave(group, 1), values[:count].repeat_interleave(group, 1),
        attn_mask=mask[:, None, None], scale=scaling,
    )  # fmt: skip
    out.copy_(found.reshape(count, heads * dim))


def gated(gate: Tensor, up: Tensor, out: Tensor, kind: str, module: Any = None) -> None:
    """Write act(gate) * up, [n, I]."""
    act = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate=_GATES[kind])
    out.copy_(act * up)
