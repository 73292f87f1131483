"""How is an 8-bit output head quantized and multiplied?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.planning.values.byte_sizes import HEAD_CHUNK_VALUES

NAME = "8-bit head"
NAMES = ("head8",)
MAX_ROWS = 8
BLOCK = 64
_WARPS = 8
_BLOCKS_PER_MULTIPROCESSOR = 2


# Quantization --------------------------------------------------------------------------------------------------------


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


def forms(rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and type of each part of a head [rows, columns]."""
    return {"weight": ((rows, columns), torch.int8), "scale": ((rows,), torch.float32)}


def fill(pieces: Iterable[Tensor], parts: Mapping[str, Tensor]) -> bool:
    """Quantize pieces of a weight's rows, in order, into the parts of a head; returns whether every value was finite."""
    q, scale, start = parts["weight"], parts["scale"], 0
    for piece in pieces:
        quantized, scales = quantize_rows(piece)
        q[start : start + len(piece)].copy_(quantized)
        scale[start : start + len(piece)].copy_(scales)
        start += len(piece)
    assert start == len(q), (start, len(q))
    return bool(torch.isfinite(scale).all())


def is_same(parts: Mapping[str, Tensor], weight: Tensor, own: slice = slice(None)) -> bool:
    """Return whether a weight [n, D] on the same device would give the same 8 bits as these rows of a head's."""
    q, scale = parts["weight"][own], parts["scale"][own]
    for rows in pieces(q):
        quantized, scales = quantize_rows(weight[rows])
        if not (torch.equal(quantized, q[rows]) and torch.equal(scales, scale[rows])):
            return False
    return True


def dense(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [V, D] of the head."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for rows in pieces(q):
        out[rows] = q[rows].float() * scale[rows, None]
    return out


def pieces(q: Tensor) -> list[slice]:
    """Return the rows of [V, D] a chunk at a time."""
    step = max(1, HEAD_CHUNK_VALUES // q.shape[1])
    return [slice(start, start + step) for start in range(0, q.shape[0], step)]


# The product ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Kernel:
    """The computation of one model's head, wherever its bytes are at the time. module: None for torch."""

    module: nvrtc.Module | None = None


class Head:
    """The layer over q and scale: x [..., D] -> y [..., V] in x's dtype. q [V, D] int8, one float32 scale a row: the row's largest
    magnitude / 127, ties to even. y = round(scale * (x . q) + bias), sums in float32, rounded once."""

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None, kernel: Kernel | None = None) -> None:
        self.q, self.scale, self.bias, self.kernel = q, scale, bias, kernel or Kernel()

    @classmethod
    def of(cls, parts: Mapping[str, Tensor], bias: Tensor | None, kernel: Kernel | None = None) -> Head:
        return cls(parts["weight"], parts["scale"], bias, kernel)

    def __call__(self, x: Tensor) -> Tensor:
        flat, module = x.reshape(-1, x.shape[-1]), self.kernel.module
        if module is not None and flat.shape[0] <= MAX_ROWS and flat.dtype == torch.bfloat16:
            y = launched(flat, self.q, self.scale, self.bias, module)
        else:
            y = plain(flat, self.q, self.scale, self.bias)
        return y.view(*x.shape[:-1], -1)


def plain(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in torch: x [n, D] -> [n, V]. In addition to its output it takes HEAD_CHUNK_VALUES float32 values."""
    wide = x.float()
    out = torch.empty(x.shape[0], q.shape[0], dtype=x.dtype, device=x.device)
    for rows in pieces(q):
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
            [x, x.stride(0), n, q, scale, bias, out, out.stride(0), count, width], shared_bytes=shared_bytes_of(n, width),
        )  # fmt: skip
    return out


def shared_bytes_of(n: int, width: int) -> int:
    """Return the shared memory of a block for n rows of this width."""
    return n * (2 * width + 16)


# The kernel -----------------------------------------------------------------------------------------------------------


def source() -> str:
    """Return the source as it is compiled."""
    return nvrtc.source("values.cuh") + nvrtc.source("head8.cu")


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernel for a device. Errors: DeviceError if that is not possible here: compute capability 7.5 compiles it,
    and has no bf16 arithmetic to run it with."""
    return nvrtc.Module(source(), device=device, name="head8.cu", needs_bf16=True)
