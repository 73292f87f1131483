"""Which experts does a token use, and with which weights?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.engine.kernels import layouts
from trimtab.engine.kernels.plain_attention import norm_torch
from trimtab.engine.kernels.selfcheck import random_values, relative_error

# As in cuda/fused.cu.
MOST_EXPERTS, MOST_CHOSEN, MOST_WIDTH = 512, 32, 8192
# Two roundings of a value of the model's type, and chances in float32.
_CHECK_ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Choice:
    """How a router chooses: the `chosen` most likely of a softmax. is_normed: their weights add up to 1. is_wide: weights stay
    float32, else they are of the logits' type."""

    chosen: int
    is_normed: bool = True
    is_wide: bool = False


def why_not(count: int, width: int, form: Choice) -> str | None:
    """Return why the kernels do not compute this router, None if they do."""
    if count > MOST_EXPERTS or form.chosen > min(MOST_CHOSEN, count) or width > MOST_WIDTH or width % 8:
        return f"{form.chosen} of {count} experts over {width} values: at most {MOST_CHOSEN} of {MOST_EXPERTS} over {MOST_WIDTH}"
    return None


def normed(h: Tensor, scale: Tensor, factor: float, eps: float, module: nvrtc.Module | None) -> Tensor:
    """Return norm(h) scale factor for h [n, D] and scale [D]."""
    if module is None or h.device != module.device:
        return norm_torch(h, None, eps) * scale * factor
    n, width = h.shape
    assert scale.dtype == h.dtype and scale.is_contiguous() and h.stride(1) == 1
    x = torch.empty(n, width, dtype=h.dtype, device=h.device)
    given: list[nvrtc.Argument] = [h, h.stride(0), scale, factor, x, width, eps, layouts.half(h)]
    module.launch("route_input", (n,), (-(-width // 256) * 32,), given)
    return x


def choose(logits: Tensor, form: Choice, scales: Tensor | None, module: nvrtc.Module | None) -> tuple[Tensor, Tensor]:
    """Return index [n, K] int64 and weights [n, K] of logits [n, E]. scales [E]: a factor of each expert's weight. Of equal chances
    the lower number is chosen. Values are rounded as transformers' routers of these forms round them."""
    if module is None or logits.device != module.device:
        weights, index = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(form.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True) if form.is_normed else weights
        weights = weights if scales is None else weights * scales[index]
        return index, weights if form.is_wide else weights.to(logits.dtype)
    n, count = logits.shape
    assert logits.stride(1) == 1 and (scales is None or (scales.dtype == logits.dtype and scales.is_contiguous()))
    index = torch.empty(n, form.chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(n, form.chosen, dtype=torch.float32 if form.is_wide else logits.dtype, device=logits.device)
    module.launch(
        "route_choose", (n,), (32,),
        [
            logits, logits.stride(0), count, form.chosen, int(form.is_normed), scales, int(form.is_wide), index, weights,
            layouts.half(logits),
        ],
    )  # fmt: skip
    return index, weights


def check(module: nvrtc.Module, count: int, width: int, form: Choice, dtype: torch.dtype) -> str | None:
    """Return the error of the kernels on this device against float64, or None."""
    random = random_values(module.device, 1)
    h, scale, scales = (random(*size).to(dtype) for size in ((3, width), (width,), (count,)))
    exact = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double() * 0.1
    if (error := relative_error(normed(h, scale, 0.1, 1e-6, module), exact)) > _CHECK_ERROR[dtype]:
        return f"a router's input: relative error {error:.1e}"
    # Spaced so that no two are equal.
    logits = (random(3, count).argsort(dim=-1) / 16).to(dtype)
    index, weights = choose(logits, form, scales, module)
    chances = torch.softmax(logits.double(), dim=-1)
    most, wanted = chances.topk(form.chosen, dim=-1)
    most = (most / most.sum(dim=-1, keepdim=True) if form.is_normed else most) * scales.double()[wanted]
    # Equal logits are chosen by their numbers: their chances are compared.
    found = chances.gather(1, index.clamp(min=0))
    if index.min() < 0 or index.max() >= count or relative_error(found, chances.gather(1, wanted)) > 1e-6:
        return f"{form.chosen} of {count} experts: others are the most likely"
    own = found / found.sum(dim=-1, keepdim=True) if form.is_normed else found
    error = relative_error(weights, own * scales.double()[index])
    return None if error <= _CHECK_ERROR[dtype] else f"weights of experts: relative error {error:.1e}"
