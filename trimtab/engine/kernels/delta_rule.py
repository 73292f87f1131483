"""How do recurrent layers compute the gated delta rule between their products, in three launches?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.cuda import nvrtc
from trimtab.engine.kernels import layouts
from trimtab.engine.kernels.selfcheck import LARGEST_ERROR, random_values, relative_error

NAMES = ("delta_conv", "delta_rule", "delta_norm")
_COLUMNS, _PART = 16, 32  # columns of a block; tokens of a block of the convolution
_EPS = 1e-6  # of the lengths of keys and queries


class DeltaShape(NamedTuple):
    """The sizes of one kind of layer. taps: of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class DeltaWeights:
    """A layer's own tensors: conv [C, K], A_log and dt_bias [Hv], norm [Dv] with its eps."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


def source() -> str:
    """Return the source as it is compiled."""
    return nvrtc.source("values.cuh") + nvrtc.source("delta.cu")


def options(shape: DeltaShape, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the compiler options of this kind of layer."""
    key_heads, value_heads, key_dim, value_dim, taps = shape
    return (
        f"-DDK={key_dim}", f"-DDV={value_dim}", f"-DK_HEADS={key_heads}", f"-DV_HEADS={value_heads}", f"-DTAPS={taps}",
        f"-DHALF={int(dtype == torch.float16)}",
    )  # fmt: skip


def job(shape: DeltaShape, dtype: torch.dtype) -> nvrtc.Job:
    """Return what `load` compiles."""
    return nvrtc.Job(source(), options(shape, dtype), "delta.cu")


def load(device: torch.device | str, shape: DeltaShape, dtype: torch.dtype) -> nvrtc.Module:
    """Compile the kernels of one kind of layer. Errors: DeviceError if that is not possible here."""
    return nvrtc.Module(source(), device=device, options=options(shape, dtype), name="delta.cu")


def why_not(shape: DeltaShape, dtype: torch.dtype) -> str | None:
    """Return why a layer of this shape has no kernels (torch does its part), None if it has."""
    if (why := layouts.why_not_type(dtype)) is not None:
        return why
    # A lane has 1 value of a key, or whole words of two.
    if shape.key_dim not in (32, 64, 128, 192, 256) or shape.value_dim % 32 or shape.value_heads % max(shape.key_heads, 1):
        return f"heads of {shape.key_dim} and {shape.value_dim} values: keys have 32, 64, 128, 192 or 256, values multiples of 32"
    return None


def delta_net(
    products: tuple[Tensor, Tensor, Tensor, Tensor], shape: DeltaShape, weights: DeltaWeights, conv: Tensor, state: Tensor,
    buffers: tuple[Tensor, Tensor], out: Tensor, *, tokens: int = 1, count: Tensor | None = None, live: Tensor | None = None,
    module: nvrtc.Module | None = None, dependent: bool | None = None,
) -> None:  # fmt: skip
    """Write what a layer's last product reads to out [R T, Hv Dv], and its states of R rows after T tokens.

    products: qkv [R T, C], z [R T, Hv Dv], b and a [R T, Hv], rows may be strided. Shapes: conv [R, C, K] and state [R, Hv, Dk, Dv]
    float32, contiguous; buffers [R T, C] and [R T, Hv Dv], scratch. count [1] int32: how many tokens of each row are there, None
    for all. live [1] int32: how many rows have states, None for all. Each head keeps a matrix [Dk, Dv] in float32: a token decays
    it, corrects what it has for the token's key, and reads it by the token's query. States of rows from `live` on do not change.
    Source: transformers 5.23.0, models/qwen3_5/modeling_qwen3_5.py; arXiv 2412.06464.
    """
    qkv, z, b, a = products
    rows, total = qkv.shape[0] // tokens, qkv.shape[0]
    if module is None or qkv.device != module.device or qkv.dtype not in layouts.TYPES:
        _delta_net_torch(products, shape, weights, conv[:rows], state[:rows], out, tokens, count, live)
        return
    assert conv.is_contiguous() and state.is_contiguous() and state.dtype == torch.float32 and out.is_contiguous()
    mixed, core = buffers
    channels = shape.channels
    launch = partial(module.launch, dependent=dependent)
    launch(
        "delta_conv", (-(-channels // 128), -(-tokens // _PART), rows), (128,),
        [qkv, qkv.stride(0), weights.conv, conv, mixed, tokens, count, live],
    )  # fmt: skip
    launch(
        "delta_rule", (shape.value_dim // _COLUMNS, shape.value_heads, rows), (128,),
        [
            mixed, b, b.stride(0), a, a.stride(0), weights.A_log, int(weights.A_log.dtype != torch.float32), weights.dt_bias,
            state, core, tokens, count, live,
        ],
    )  # fmt: skip
    launch("delta_norm", (-(-shape.value_heads // 4), total), (128,), [core, z, z.stride(0), weights.norm, float(weights.eps), out])


def _delta_net_torch(
    products: tuple[Tensor, Tensor, Tensor, Tensor], shape: DeltaShape, weights: DeltaWeights, conv: Tensor, state: Tensor,
    out: Tensor, tokens: int, count: Tensor | None, live: Tensor | None,
) -> None:  # fmt: skip
    (qkv, z, b, a), (key_heads, value_heads, key_dim, value_dim, taps) = products, shape
    rows, dtype, wide = qkv.shape[0] // tokens, qkv.dtype, state.dtype
    there = tokens if count is None else int(count)
    alive = rows if live is None else min(int(live), rows)
    whole = torch.cat((conv, qkv.view(rows, tokens, -1).transpose(1, 2).to(conv.dtype)), dim=2)
    mixed = functional.conv1d(whole, weights.conv[:, None], groups=shape.channels)[:, :, -tokens:]
    mixed = functional.silu(mixed).transpose(1, 2).to(dtype)
    conv[:alive] = whole[:alive, :, there : there + taps]
    keys = key_heads * key_dim
    q, k, v = mixed.to(wide).split([keys, keys, value_heads * value_dim], dim=2)
    q, k, v = (one.view(rows, tokens, -1, size) for one, size in ((q, key_dim), (k, key_dim), (v, value_dim)))
    q, k = (one.repeat_interleave(value_heads // key_heads, dim=2) for one in (q, k))
    q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + _EPS) for one in (q, k))
    q = q / math.sqrt(key_dim)
    beta = b.sigmoid().to(wide).view(rows, tokens, -1)
    g = (-weights.A_log.to(wide).exp() * functional.softplus(a.to(wide) + weights.dt_bias)).view(rows, tokens, -1)
    S, core = state.clone(), torch.zeros(rows, tokens, value_heads, value_dim, dtype=wide, device=qkv.device)
    for t in range(there):
        S = S * g[:, t].exp()[..., None, None]
        delta = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * delta[:, :, None]
        core[:, t] = (S * q[:, t, :, :, None]).sum(-2)
    state[:alive] = S[:alive]
    core = core.to(dtype).to(wide)
    core = core * torch.rsqrt(core.pow(2).mean(-1, keepdim=True) + weights.eps)
    gate = functional.silu(z.reshape(rows, tokens, value_heads, value_dim).to(wide))
    out.copy_((weights.norm * core.to(dtype) * gate).to(dtype).view(out.shape))


# At load ----------------------------------------------------------------------------------------------------------------


def check(module: nvrtc.Module, shape: DeltaShape, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return the error of the kernels on this device, or None: outputs and states against float64, of steps and of a padded chunk;
    a row without a state keeps what is there."""
    random = random_values(module.device, 1)
    heads, width = shape.value_heads, shape.value_heads * shape.value_dim
    weights = DeltaWeights(
        random(shape.channels, shape.taps).to(dtype) / 2, random(heads), random(heads).to(dtype),
        random(shape.value_dim).to(dtype), _EPS,
    )  # fmt: skip
    conv, A_log, dt_bias, norm = (one.double() for one in (weights.conv, weights.A_log, weights.dt_bias, weights.norm))
    exact = DeltaWeights(conv, A_log, dt_bias, norm, _EPS)
    for rows, tokens, there, live in ((3, 1, None, 2), (1, 40, 37, None), (1, 1, None, None)):
        total = rows * tokens
        products = [random(total, size).to(dtype) for size in (shape.channels, width, heads, heads)]
        conv, state = random(rows, shape.channels, shape.taps).to(dtype), random(rows, heads, shape.key_dim, shape.value_dim) / 4
        numbers = [None if one is None else torch.tensor([one], dtype=torch.int32, device=module.device) for one in (there, live)]
        results = []
        for one, own, kind in ((module, weights, lambda x: x.clone()), (None, exact, lambda x: x.double())):
            given, states = [kind(x) for x in products], (kind(conv), kind(state))
            out, mixed = (given[0].new_full((total, size), math.nan) for size in (width, shape.channels))
            delta_net(
                (given[0], given[1], given[2], given[3]), shape, own, *states, (mixed, torch.empty_like(out)), out, tokens=tokens,
                count=numbers[0], live=numbers[1], module=one,
            )  # fmt: skip
            results.append((out[: rows * (there or tokens)], *states))
        for what, found, wanted in zip(("output", "window", "state"), *results, strict=True):
            # An output is rounded four times on its way: what the window gives, the sum over a state, the norm and the gate.
            if (error := relative_error(found, wanted)) > (4 if what == "output" else 2) * LARGEST_ERROR[dtype]:
                return f"{what} of the delta rule, {rows} rows of {tokens} tokens: relative error {error:.1e}"
    return None
