"""Does an 8-bit output head use its kernel on this card?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats import int8_head
from trimtab.engine.kernels import autotune
from trimtab.engine.kernels.selfcheck import KernelFamily, Times, relative_error

if TYPE_CHECKING:
    from trimtab.engine.layers.leaves import Leaf

LARGEST_ERROR = 3e-3
_CHECKED_ROWS = 512


def why_not(head: int8_head.Head, dtype: torch.dtype, module: nvrtc.Module) -> str | None:
    """Return why the kernel cannot compute with this head, None if it can."""
    width = head.q.shape[1]
    if dtype != torch.bfloat16:
        return f"the model computes in {dtype}, not in bfloat16"
    if width % int8_head.BLOCK:
        return f"rows of {width} values are not whole blocks of {int8_head.BLOCK}"
    if int8_head.shared_bytes_of(int8_head.MAX_ROWS, width) > module.shared_bytes:
        return f"{int8_head.MAX_ROWS} rows of {width} values are more than {module.shared_bytes} B of shared memory"
    if head.bias is not None and head.bias.dtype != dtype:
        return f"its bias is {head.bias.dtype}"
    if not head.q.is_contiguous() or head.q.data_ptr() % 16 or not head.scale.is_contiguous():
        return "the weight is not contiguous or not aligned to 16 bytes"
    return None


def check(module: nvrtc.Module, head: int8_head.Head, *, counts: Iterable[int] = (1, 3, int8_head.MAX_ROWS)) -> str | None:
    """Return the error of the kernel over this head: every output against torch's, some against float64."""
    q, scale, bias = head.q, head.scale, head.bias
    generator = torch.Generator(device=q.device).manual_seed(1)
    some = torch.randint(q.shape[0], (min(_CHECKED_ROWS, q.shape[0]),), device=q.device, generator=generator)
    for n in counts:
        x = torch.randn(n, q.shape[1], device=q.device, generator=generator).bfloat16()
        out = torch.full((n, q.shape[0]), math.nan, dtype=x.dtype, device=x.device)
        int8_head.launched(x, q, scale, bias, module, out=out)
        if (error := relative_error(out.float(), int8_head.plain(x, q, scale, bias).float())) > LARGEST_ERROR:
            return f"{n} rows over {list(q.shape)}: relative error {error:.1e} against torch"
        exact = (x.double() @ q[some].double().T) * scale[some].double()
        exact = exact if bias is None else exact + bias[some].double()
        if (error := relative_error(out[:, some], exact)) > LARGEST_ERROR:
            return f"{n} rows over {list(q.shape)}: relative error {error:.1e}"
    return None


def measure(
    module: nvrtc.Module, head: int8_head.Head, time_us: Callable[[Callable[[], object]], float], *, weight: Tensor | None = None,
    n: int = 1,
) -> Times:  # fmt: skip
    """Return name -> microseconds of n rows: (the kernel's, torch's over the same 8 bits) and, given the whole weight
    [V, D], (the kernel's, the whole head's).

    time_us: takes a function, and returns the time of one run, best in a CUDA graph.
    """
    x = torch.randn(n, head.q.shape[1], device=head.q.device).bfloat16()
    ours = time_us(lambda: int8_head.launched(x, head.q, head.scale, head.bias, module))
    times = {int8_head.NAME: (ours, time_us(lambda: int8_head.plain(x, head.q, head.scale, head.bias)))}
    if weight is not None:
        whole = weight.bfloat16()
        times["whole head"] = (ours, time_us(lambda: torch.nn.functional.linear(x, whole)))
    return times


def family(head: int8_head.Head, dtype: torch.dtype) -> KernelFamily:
    """Return how the kernel of a head is chosen."""
    device = head.q.device
    return KernelFamily(
        int8_head.NAME, (tuple(head.q.shape), str(dtype), head.bias is not None), lambda: int8_head.load(device),
        lambda module: check(module, head), lambda module: why_not(head, dtype, module),
        lambda module: measure(module, head, lambda run: autotune.graph_us(run, device)),
    )  # fmt: skip


def choose(leaf: Leaf) -> str | None:
    """Let an 8-bit head on a GPU use the kernel if it works and is faster. Returns the reason if not, else None. leaf: the
    loaded layer in its tier."""
    packed = leaf.packed()
    head = int8_head.Head.of(packed.parts, leaf.bias)
    module, why = family(head, leaf.dtype).choose_alone(head.q.device)
    why = why if module is None else why_not(head, leaf.dtype, module)  # of this head: a kept check is of its shape
    if why is None:
        assert packed.kernel is not None
        packed.kernel.module = module
    return why
