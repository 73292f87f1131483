"""An 8-bit output head: its quantization from the checkpoint's weight, and its matmul.

q [V, D] int8 with one float32 scale a row: scale = the row's largest magnitude / 127, q = round(weight / scale), ties to
even. The product is y = round(scale * (x . q) + bias): x and q are taken as they are, sums are in float32, one rounding at
the end. In torch a few rows of q at a time become float32, never all of them; on a GPU up to MAX_ROWS rows of bfloat16 are
one launch of our own kernel, if that compiles, computes rightly and is faster here: `choose`, asked once a load. What is
left out is told by name among the model's fallbacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import DeviceError
from trimtab.plan.cost import HEAD_CHUNK_VALUES
from trimtab.runtime import nvrtc
from trimtab.runtime.kept_checks import KeptChecks
from trimtab.runtime.out_of_memory import is_out_of_memory

NAME = "8-bit head"
NAMES = ("head8",)
MAX_ROWS = 8
BLOCK = 64
_WARPS = 8
_BLOCKS_PER_MULTIPROCESSOR = 2
LARGEST_ERROR = 3e-3
_CHECKED_ROWS = 512


# How it is made -------------------------------------------------------------------------------------------------------


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q int8, scale float32) of whole rows: weight [N, D] -> [N, D], [N]. A row of zeros has the scale 0.

    The same on every device: one division and one rounding a value. A row that holds a value that is not finite has a
    scale that is not.
    """
    wide = weight.float()
    largest = torch.maximum(wide.amax(1), -wide.amin(1))
    scale = largest / torch.full_like(largest, 127)  # a GPU multiplies with 1 / 127 where that is a plain number
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def fill(pieces: Iterable[Tensor], q: Tensor, scale: Tensor) -> bool:
    """Quantize pieces of a weight's rows, in order, into q [V, D] and scale [V]; returns whether every value was finite."""
    start = 0
    for piece in pieces:
        quantized, scales = quantize_rows(piece)
        q[start : start + len(piece)].copy_(quantized)
        scale[start : start + len(piece)].copy_(scales)
        start += len(piece)
    assert start == len(q), (start, len(q))
    return bool(torch.isfinite(scale).all())


def is_same(q: Tensor, scale: Tensor, weight: Tensor) -> bool:
    """Return whether a weight [V, D] on the same device would give the same 8 bits."""
    for rows in _pieces(q):
        quantized, scales = quantize_rows(weight[rows])
        if not (torch.equal(quantized, q[rows]) and torch.equal(scales, scale[rows])):
            return False
    return True


def dense(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [V, D] that the head stands for."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for rows in _pieces(q):
        out[rows] = q[rows].float() * scale[rows, None]
    return out


def _pieces(q: Tensor) -> list[slice]:
    step = max(1, HEAD_CHUNK_VALUES // q.shape[1])
    return [slice(start, start + step) for start in range(0, q.shape[0], step)]


# The product ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Kernel:
    """What computes one model's head, wherever its bytes are at the time. module: None for torch."""

    module: nvrtc.Module | None = None


class Head:
    """The layer over q and scale: x [..., D] -> y [..., V] in x's dtype."""

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None, kernel: Kernel | None = None) -> None:
        self.q, self.scale, self.bias, self.kernel = q, scale, bias, kernel or Kernel()

    def __call__(self, x: Tensor) -> Tensor:
        flat, module = x.reshape(-1, x.shape[-1]), self.kernel.module
        if module is not None and flat.shape[0] <= MAX_ROWS and flat.dtype == torch.bfloat16:
            y = launched(flat, self.q, self.scale, self.bias, module)
        else:
            y = plain(flat, self.q, self.scale, self.bias)
        return y.view(*x.shape[:-1], -1)


def plain(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in torch: x [n, D] -> [n, V]. Beside its output it holds HEAD_CHUNK_VALUES float32 values."""
    wide = x.float()
    out = torch.empty(x.shape[0], q.shape[0], dtype=x.dtype, device=x.device)
    for rows in _pieces(q):
        part = wide @ q[rows].float().T
        part.mul_(scale[rows])
        out[:, rows] = part if bias is None else part.add_(bias[rows])
    return out


def launched(
    x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, module: nvrtc.Module, *, out: Tensor | None = None
) -> Tensor:
    """Return the product by the kernel: x [n, D] bfloat16, n up to MAX_ROWS; out [n, V] is written if given."""
    n, (count, width) = x.shape[0], q.shape
    if x.stride(-1) != 1 or x.stride(0) % 4 or x.data_ptr() % 8:
        x = x.contiguous().clone()
    if out is None:
        out = torch.empty(n, count, dtype=x.dtype, device=x.device)
    if n:
        tiles = -(-count // 16)
        grid = min(-(-tiles // _WARPS), module.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR)
        module.launch(
            "head8", (grid,), (_WARPS * 32,),
            [x, x.stride(0), n, q, scale, bias, out, out.stride(0), count, width], shared_bytes=_shared_bytes(n, width),
        )  # fmt: skip
    return out


def _shared_bytes(n: int, width: int) -> int:
    return n * (2 * width + 16)


# The kernel: loading, checking, measuring -----------------------------------------------------------------------------


def source() -> str:
    """Return the source as it is compiled."""
    return nvrtc.source("values.cuh") + nvrtc.source("head8.cu")


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernel for a device. Errors: DeviceError if that is not possible here."""
    return nvrtc.Module(source(), device=device, name="head8.cu", needs_bf16=True)


def module_of(hf_model: Any) -> nvrtc.Module | None:
    """Return the kernel that a loaded model's head uses, None if it uses torch or is no 8-bit head."""
    leaf = hf_model.get_output_embeddings()
    packed = getattr(leaf, "_packed", None) or getattr(getattr(leaf, "staged", None), "packed", None)
    kernel: Kernel | None = getattr(packed, "kernel", None)
    return None if kernel is None else kernel.module


def why_not(head: Head, dtype: torch.dtype, module: nvrtc.Module) -> str | None:
    """Return why the kernel cannot compute with this head, None if it can."""
    width = head.q.shape[1]
    if dtype != torch.bfloat16:
        return f"the model computes in {dtype}, not in bfloat16"
    if width % BLOCK:
        return f"rows of {width} values are not whole blocks of {BLOCK}"
    if _shared_bytes(MAX_ROWS, width) > module.shared_bytes:
        return f"{MAX_ROWS} rows of {width} values are more than {module.shared_bytes} B of shared memory"
    if head.bias is not None and head.bias.dtype != dtype:
        return f"its bias is {head.bias.dtype}"
    if not head.q.is_contiguous() or head.q.data_ptr() % 16 or not head.scale.is_contiguous():
        return "the weight is not contiguous or not aligned to 16 bytes"
    return None


def check(module: nvrtc.Module, head: Head, *, counts: Iterable[int] = (1, 3, MAX_ROWS)) -> str | None:
    """Return what is wrong with the kernel over this head: every output against torch's, some against float64."""
    q, scale, bias = head.q, head.scale, head.bias
    generator = torch.Generator(device=q.device).manual_seed(1)
    some = torch.randint(q.shape[0], (min(_CHECKED_ROWS, q.shape[0]),), device=q.device, generator=generator)
    for n in counts:
        x = torch.randn(n, q.shape[1], device=q.device, generator=generator).bfloat16()
        out = torch.full((n, q.shape[0]), math.nan, dtype=x.dtype, device=x.device)
        launched(x, q, scale, bias, module, out=out)
        if (error := _relative_error(out.float(), plain(x, q, scale, bias).float())) > LARGEST_ERROR:
            return f"{n} rows over {list(q.shape)}: relative error {error:.1e} against torch"
        exact = (x.double() @ q[some].double().T) * scale[some].double()
        exact = exact if bias is None else exact + bias[some].double()
        if (error := _relative_error(out[:, some], exact)) > LARGEST_ERROR:
            return f"{n} rows over {list(q.shape)}: relative error {error:.1e}"
    return None


def _relative_error(y: Tensor, wanted: Tensor) -> float:
    difference = float((y - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return difference if math.isfinite(difference) else math.inf


def measure(
    module: nvrtc.Module, head: Head, time_us: Callable[[Callable[[], Any]], float], *, weight: Tensor | None = None,
    n: int = 1,
) -> Mapping[str, tuple[float, float]]:  # fmt: skip
    """Return name -> microseconds of n rows: (the kernel's, torch's over the same 8 bits) and, given the whole weight
    [V, D], (the kernel's, the whole head's).

    time_us: takes what to run, and returns what one run of it takes, best in a CUDA graph.
    """
    x = torch.randn(n, head.q.shape[1], device=head.q.device).bfloat16()
    ours = time_us(lambda: launched(x, head.q, head.scale, head.bias, module))
    times = {NAME: (ours, time_us(lambda: plain(x, head.q, head.scale, head.bias)))}
    if weight is not None:
        whole = weight.bfloat16()
        times["whole head"] = (ours, time_us(lambda: torch.nn.functional.linear(x, whole)))
    return times


def wrong(
    module: nvrtc.Module, head: Head, dtype: torch.dtype, time_us: Callable[[Callable[[], Any]], float],
    measured: dict[Any, tuple[float, float]],
) -> str | None:  # fmt: skip
    """Return why the kernel is not used for this head, None if it computes rightly and faster than torch here.

    What was measured goes into `measured`.
    """
    why = why_not(head, dtype, module) or check(module, head)
    if why is not None:
        return why
    times = measure(module, head, time_us)
    measured.update(times)
    ours, theirs = times[NAME]
    return None if ours < theirs else f"slower here: {ours:.0f} µs against torch's {theirs:.0f}"


def choose(leaf: Any) -> str | None:
    """Let an 8-bit head on a GPU use the kernel if it works and is faster. Returns the reason if not, else None. leaf: the
    loaded layer in its tier."""
    from trimtab.runtime.tuning import graph_us

    packed = leaf.packed()
    head = Head(packed.parts["weight"], packed.parts["scale"], leaf.bias)
    device = head.q.device
    try:
        module = load(device)
        checks = KeptChecks.of(device)
        key = NAME, tuple(head.q.shape), str(leaf.dtype), head.bias is not None
        is_checked = why_not(head, leaf.dtype, module) is None and checks.find(*key) is not None
        why = None if is_checked else wrong(module, head, leaf.dtype, lambda run: graph_us(run, device), {})
        if why is None and not is_checked:
            checks.keep({}, *key)
            checks.save()
    except Exception as exc:  # a kernel that cannot be launched on this card, say: the slower way is right
        if is_out_of_memory(exc):
            raise
        if isinstance(exc, DeviceError):
            return str(exc)
        torch.zeros(1, device=device).item()  # raises if the device is lost: then nothing goes on
        return f"{type(exc).__name__}: {exc}"
    if why is None:
        packed.kernel.module = module
    return why
