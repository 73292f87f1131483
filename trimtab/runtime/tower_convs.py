"""Convolutions of towers that a CPU computes without oneDNN, cut into slices, so that answers go on in between.

    for unit in slow_convolutions(hf_model, blocks, layers): ...
    output = sliced(convolution, x, compute)       # the bits of `convolution(x)`

A CPU without instructions for bfloat16 or float16 computes such a convolution as copies of its windows and one dot product for
each output, about 1e9 multiplications per second. The first two convolutions of Gemma 4's audio tower take most of the tower's
time there. Each dot product is summed in the same order wherever its output lies, so that a slice has the bits of the whole.

What is not covered: what oneDNN computes (float32, and newer CPUs), because it is fast and may sum slices in another order;
convolutions within the repeated layers; those of three dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Multiplications of one slice: about 40 ms of one core (AMD EPYC, Zen 3, torch 2.13.0).
SLICE_PRODUCTS = 2**25
_KINDS = (nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class SlowConvolutions:
    """Convolutions of one unit: the module around them, or the convolution itself where that module contains layers."""

    unit: nn.Module
    convolutions: tuple[nn.Module, ...]


def is_slow(convolution: nn.Module) -> bool:
    """Whether the CPU computes this convolution without oneDNN, from a 16-bit weight."""
    weight = convolution.weight
    assert isinstance(weight, Tensor)
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return True
    if weight.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def slow_convolutions(
    hf_model: nn.Module, blocks: Iterable[str], layers: Collection[nn.Module]
) -> Iterator[SlowConvolutions]:
    """Yield the slow convolutions of these blocks that are outside the layers."""
    within = {module for layer in layers for module in layer.modules()}
    for path in blocks:
        for parent in hf_model.get_submodule(path).modules():
            if parent in within:
                continue
            slow = tuple(one for one in parent.children() if _can_slice(one) and one not in within and is_slow(one))
            if slow and any(module in within for module in parent.modules()):
                yield from (SlowConvolutions(one, (one,)) for one in slow)
            elif slow:
                yield SlowConvolutions(parent, slow)


def _can_slice(module: nn.Module) -> bool:
    """Whether a module is torch's own convolution, with zeros as padding."""
    return (
        type(module) in _KINDS and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        and "forward" not in vars(module)
    )  # fmt: skip


def sliced(
    convolution: nn.Module, x: Tensor, compute: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Tensor:
    """Return what a convolution returns, computed slice by slice along the first dimension in space.

    Shapes: x [B, C_in, T] or [B, C_in, T, F] -> [B, C_out, T_out] or [B, C_out, T_out, F_out]. compute: (function, slice of x)
    -> the function's output.
    """
    assert isinstance(convolution, _KINDS)
    stride, padding, reach = _axis(convolution, 0)

    def convolve(part: Tensor) -> Tensor:
        function = functional.conv2d if isinstance(convolution, nn.Conv2d) else functional.conv1d
        return function(
            part, convolution.weight, convolution.bias, convolution.stride, (0, *convolution.padding[1:]),
            convolution.dilation, convolution.groups,
        )  # fmt: skip

    borders = (
        _borders(_outputs(convolution, x, 0), _products(convolution, x)) if x.dim() == convolution.weight.dim() else []
    )
    if len(borders) <= 2:
        return compute(_whole(convolution), x)
    parts = []
    for first, last in zip(borders, borders[1:], strict=False):
        begin, end = first * stride - padding, (last - 1) * stride - padding + reach
        part = x[:, :, max(begin, 0) : max(end, 0)]
        missing = (max(-begin, 0), max(end - x.shape[2], 0))
        if any(missing):
            part = functional.pad(part, (0, 0) * (x.dim() - 3) + missing)
        parts.append(compute(convolve, part))
    return torch.cat(parts, dim=2)


def _whole(convolution: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return torch's own forward of a convolution, whatever covers it now."""

    def convolve(x: Tensor) -> Tensor:
        output: Tensor = type(convolution).forward(convolution, x)
        return output

    return convolve


def _axis(convolution: nn.Conv1d | nn.Conv2d, axis: int) -> tuple[int, int, int]:
    """Return stride, padding and the positions that one output reads along a dimension in space."""
    paddings = convolution.padding
    assert not isinstance(paddings, str)
    reach = convolution.dilation[axis] * (convolution.kernel_size[axis] - 1) + 1
    return convolution.stride[axis], paddings[axis], reach


def _outputs(convolution: nn.Conv1d | nn.Conv2d, x: Tensor, axis: int) -> int:
    """Return the number of output positions along a dimension in space."""
    stride, padding, reach = _axis(convolution, axis)
    return int((x.shape[axis + 2] + 2 * padding - reach) // stride + 1)


def _products(convolution: nn.Conv1d | nn.Conv2d, x: Tensor) -> int:
    """Return the multiplications of one output position along the first dimension in space."""
    across = 1
    for axis in range(1, x.dim() - 2):
        across *= max(_outputs(convolution, x, axis), 1)
    return int(x.shape[0] * across * convolution.weight.numel())


def _borders(outputs: int, products: int) -> list[int]:
    """Return the borders of the slices, 0 and `outputs` among them.

    Slices have an odd number of positions: the rows of copied windows then begin at addresses that share no sets of the cache
    (slices of 16 positions took twice as long as those of 25). The last one is at least half as large as the others.
    """
    positions = max(SLICE_PRODUCTS // max(products, 1), 2) | 1
    borders = [*range(0, outputs, positions), outputs]
    if len(borders) > 2 and borders[-1] - borders[-2] <= positions // 2:
        del borders[-2]
    return borders
