"""What is a weight in its stored form, and which product multiplies with it, by the number of rows of its input?"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from trimtab.engine.formats import int8_head
from trimtab.errors import CheckpointError, DeviceError
from trimtab.formats.record import INDEXED, PackedEntry, stored_format
from trimtab.planning.values.byte_sizes import HEAD_CHUNK_VALUES

LOW_HALVES = 0x0F0F0F0F
# What code may read of a weight that is elsewhere.
_FORM = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_leaf", "grad", "nbytes")
_READABLE = frozenset((
    *(getattr(Tensor, name).__get__ for name in (*_FORM, "itemsize", "is_sparse", "is_quantized")), Tensor.size, Tensor.dim,
    Tensor.numel, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.stride,
    Tensor.__len__, Tensor.__hash__,
))  # fmt: skip


class NoValues(Tensor):
    """A tensor without data in place of a weight that is elsewhere: shape and type can be read, and all else is refused."""

    module_path: str

    @classmethod
    def of(cls, module_path: str, shape: tuple[int, ...], dtype: torch.dtype) -> NoValues:
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        vars(made)["module_path"] = module_path
        return made

    def __deepcopy__(self, memo: object) -> NoValues:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Errors: DeviceError with the module's path: torch 2.13 computes noise from such a tensor on a CPU, without an error."""
        if func in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        flat = [
            one for value in (*args, *(kwargs or {}).values()) for one in (value if isinstance(value, (list, tuple)) else [value])
        ]
        path = next((one.module_path for one in flat if isinstance(one, NoValues)), "")
        raise DeviceError(
            f"the model's code reads the weight of {path}, which is quantized or in another memory "
            f"({getattr(func, '__name__', func)})", device="meta", block=path, hint="Please report this architecture",
        )  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """One weight in its stored form.

    kind: its format's name (`trimtab/formats/record.py`). shape, dtype: of the unpacked weight, [D_out, D_in], or of a stack of
    experts. parts: "weight" always, and the others of its format. codes: its format's small look-up tables, shared between weights
    and never moved by a tier. blocks: of bitsandbytes' 4-bit weights, values with one scale, and scales with one of theirs. kernel:
    of an 8-bit head, what computes it. input_scale: of a layer that rounds its inputs, their static scale. order: of columns that
    lie in another order, a digest of it (`index`).
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Tensor]
    codes: Mapping[str, Tensor]
    blocks: tuple[int, ...] = ()
    kernel: int8_head.Kernel | None = None
    input_scale: float = 0.0
    order: str = ""

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def static_scales(self) -> Tensor | None:
        """The static scales [2] of inputs and outputs of a layer that rounds them to 8 bits, 0 for no rounding."""
        return self.parts.get("activation")

    @property
    def index(self) -> Tensor | None:
        """The input of each column int32 [D_in], where they lie in another order than the inputs."""
        return self.parts.get("index")

    def with_parts(self, parts: Mapping[str, Tensor], codes: Mapping[str, Tensor]) -> Packed:
        """Return the same weight over other tensors: views of a staging buffer, or copies on another device."""
        return replace(self, parts=dict(parts), codes=dict(codes))

    def as_it_lies(self) -> Packed:
        """Return the weight with its columns in the order in which they lie: what multiplies x[:, index]."""
        parts = {name: part for name, part in self.parts.items() if name != "index"}
        return replace(self, kind=self.kind.replace(INDEXED, ""), parts=parts, order="")

    def expert(self, number: int) -> Packed:
        """Return one expert [D_out, D_in] of a stack [E, D_out, D_in] whose parts are those of each expert, as views."""
        parts = {name: part[number] for name, part in self.parts.items()}
        return replace(self, shape=self.shape[1:], parts=parts)

    def part_rows(self, rows: range, device: torch.device, *whole: str) -> dict[str, Tensor]:
        """Return the parts of some rows on a device. whole: those that are of all rows."""
        own = slice(rows.start, rows.stop)
        return {name: (part if name in whole else part[own]).to(device) for name, part in self.parts.items()}

    def to(self, device: torch.device) -> Packed:
        """Return a copy whose every tensor is on the device (itself where it already is)."""
        return self.with_parts(
            {name: part.to(device) for name, part in self.parts.items()},
            {name: code.to(device) for name, code in self.codes.items()},
        )


@dataclass(frozen=True)
class Draw:
    """Random numbers for the parts of a weight, on one device. scale_dtype: of scales, where a format leaves it open."""

    generator: torch.Generator
    scale_dtype: torch.dtype

    def bytes(self, rows: int, columns: int) -> Tensor:
        count = rows * columns
        return torch.randint(0, 256, (count,), dtype=torch.uint8, device=self.generator.device, generator=self.generator).view(
            rows, -1
        )

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.generator.device, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.generator.device, generator=self.generator)

    def order(self, columns: int) -> Tensor:
        """Return an order of columns, the same for each weight of this many."""
        return torch.randperm(columns, generator=torch.Generator().manual_seed(columns)).int().to(self.generator.device)

    def values(self, *values: float) -> Tensor:
        return torch.tensor(values, device=self.generator.device)


def high_first(data: Tensor) -> Tensor:
    """Return the two 4-bit values of each byte [n, m], that of the high half first: uint8 [n, 2 m]."""
    wide = data.to(torch.int16)
    return ((wide >> 4 | wide << 8) & 0x0F0F).view(torch.uint8)


def low_first(data: Tensor) -> Tensor:
    """Return the two 4-bit values of each byte [n, m], that of the low half first: uint8 [n, 2 m]."""
    wide = data.to(torch.int16)
    return ((wide | wide << 4) & 0x0F0F).view(torch.uint8)


def in_words(words: Tensor, columns: int, bits: int) -> Tensor:
    """Return the values uint8 [D_out, columns bits / 8] of int32 words [D_out, m], which lie along a row, the first in the lowest
    bits: of two 4-bit values that of the high half first."""
    if bits == 4:
        words = (words & LOW_HALVES).bitwise_left_shift_(4).bitwise_or_((words >> 4).bitwise_and_(LOW_HALVES))
    return viewed(words, torch.uint8)[:, : -(-columns * bits // 8)].contiguous()


def viewed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of values [n, m] as values of another size, copied where they do not lie one behind the other or aligned.
    `contiguous` is not enough: it keeps the offset, and the stride of a single row or column."""
    flat = data.reshape(-1)
    if flat.storage_offset() * flat.element_size() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(len(data), data.shape[1] * data.element_size() // dtype.itemsize)


def digest_of(index: Tensor) -> str:
    """Return `Packed.order` of an order of columns."""
    return hashlib.sha256(index.cpu().numpy().tobytes()).hexdigest()


def in_input_order(values: Tensor, index: Tensor | None) -> Tensor:
    """Return values [n, D_in] whose columns lie in another order in that of the inputs."""
    return values if index is None else torch.empty_like(values).index_copy_(1, index.long(), values)


def refused(entry: PackedEntry, why: str) -> CheckpointError:
    """Return the error of a weight whose values cannot be used."""
    return CheckpointError(why, path=next((part.file for part in entry.parts.values()), ""), tensor_name=entry.tensor_name)


def check_finite(entry: PackedEntry, *scales: Tensor) -> None:
    """Raise CheckpointError unless all scales of a weight are finite."""
    if not all(bool(torch.isfinite(one).all()) for one in scales):
        raise refused(entry, "has scales that are not finite")


class CodeTables:
    """The look-up tables of one loaded model: one copy of each distinct table a device.

    Not a constant: bitsandbytes 0.49.2 writes into one entry of its dynamic table on the CPU, so a table is shared only
    after a comparison of all its bytes.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.device, str], list[Tensor]] = {}

    def share(self, packed: Packed) -> Packed:
        """Return the weight with its tables replaced by the shared equal ones."""
        return packed.with_parts(packed.parts, {name: self.one(name, code) for name, code in packed.codes.items()})

    def one(self, name: str, code: Tensor) -> Tensor:
        known = self._tables.setdefault((code.device, name), [])
        for table in known:
            if torch.equal(table, code):
                return table
        known.append(code.clone())
        return known[-1]

    def on(self, packed: Packed, device: torch.device) -> dict[str, Tensor]:
        """Return the weight's tables on another device, shared there as well."""
        return {name: self.one(name, code.to(device)) for name, code in packed.codes.items()}


def keep(weight: Tensor) -> Packed:
    """Return the weight as it is, not quantized."""
    return Packed("none", tuple(weight.shape), weight.dtype, {"weight": weight}, {})


Shell = Callable[[Tensor], Tensor]


class PlainShell(nn.Module):
    """`y = x W^T + b` over a weight that is not quantized. Its tensors are not parameters: the tier owns them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor | None
        self.__dict__["weight"], self.__dict__["bias"] = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dim() < 3 or self.bias is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        # The last token of a prompt is a view whose strides torch takes for no matrix where the weight needs no gradient: bfloat16
        # then takes 30 times as long on CPUs with AVX512-BF16 (I14 of the doctor's catalogue). The bits are those of a Parameter.
        rows = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], rows.shape[-1])


def is_narrow(stored: torch.dtype, computed: torch.dtype) -> bool:
    """Whether a weight is stored in fewer bits than it is computed with (`planning/values/byte_sizes.py::keeps_16bit`)."""
    return stored.itemsize < computed.itemsize


def widened(weight: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Return a weight in the computing dtype where it is stored in fewer bits, else in its own. copy: in separate memory."""
    return weight.to(dtype if is_narrow(weight.dtype, dtype) else weight.dtype, copy=copy)


class WideShell:
    """`y = x W^T + b` in x's type over a weight in a narrower one, [D_out, D_in]: a few rows of it are cast at a time.

    In addition to its output it takes HEAD_CHUNK_VALUES values of x's type. The cast is exact from 16 bits to float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.step = max(1, HEAD_CHUNK_VALUES // weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = torch.empty(flat.shape[0], self.weight.shape[0], dtype=x.dtype, device=x.device)
        for start in range(0, self.weight.shape[0], self.step):
            rows = slice(start, start + self.step)
            bias = None if self.bias is None else self.bias[rows]
            out[:, rows] = nn.functional.linear(flat, self.weight[rows].to(x.dtype), bias)
        return out.view(*x.shape[:-1], -1)


def unpacked_shell(weight: Tensor, bias: Tensor | None) -> Shell:
    """Return a callable layer over a weight that is kept unpacked, [D_out, D_in]: what bitsandbytes computes on a CPU after it has
    unpacked a 4-bit weight, so the same bits; and what `dequantized_shell` computes. Source: bitsandbytes 0.49.2 and 0.50.2,
    nn.Linear4bit.forward."""
    if bias is not None:
        bias = bias.to(weight.dtype)

    def product(x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

    return product


# (weight, some of its rows, a type, a device) -> their values [n, D_in], computed there in the type, not rounded to the weight's.
Exact = Callable[[Packed, range, torch.dtype, torch.device], Tensor]


def dequantized(
    exact: Exact, packed: Packed, start: int, stop: int, device: torch.device, dtype: torch.dtype | None = None,
    out: Tensor | None = None, at_once: int = 0,
) -> Tensor:  # fmt: skip
    """Return rows of a weight in its own type, or then cast to another. A few of them are in memory in addition at a time.

    They are computed in float32, or in the type of scales that have the weight's. out: where they are written. at_once: as of
    `weights.dequantize`.
    """
    form, columns = stored_format(packed.kind), packed.shape[1]
    wide = packed.parts["scale"].dtype if form.scales_in_type else torch.float32
    out = torch.empty(stop - start, columns, dtype=dtype or packed.dtype, device=device) if out is None else out
    step = max(1, max(at_once, form.at_once((stop - start) * columns)[1]) // columns)
    for first in range(start, stop, step):
        rows = range(first, min(first + step, stop))
        values = exact(packed, rows, wide, device)
        out[first - start : rows.stop - start].copy_(values if out.dtype == packed.dtype else values.to(packed.dtype))
    return out


def dequantized_shell(exact: Exact, packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return `y = x W^T + b` over a weight that is dequantized at each call: memory for the whole weight, or for the piece that its
    format takes at once, then torch's product."""
    own, count = None if bias is None else bias.to(compute_dtype), packed.shape[0]
    step = max(1, stored_format(packed.kind).at_once(count * packed.shape[1])[0] // packed.shape[1])

    def product(x: Tensor) -> Tensor:
        given = x.to(compute_dtype)
        out = None if step >= count else torch.empty(*x.shape[:-1], count, dtype=compute_dtype, device=x.device)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            weight = dequantized(exact, packed, rows.start, rows.stop, packed.parts["weight"].device, compute_dtype)
            part = nn.functional.linear(given, weight, None if own is None else own[rows])
            if out is None:
                return part.to(x.dtype)
            out[..., rows] = part
        assert out is not None
        return out.to(x.dtype)

    return product


# gemv4: few rows over packed weights; gemm4: more of them. dequantized: cuBLAS over weights that the plan keeps so, or over one
# that is dequantized for this product.
MatmulName = Literal["gemv4", "gemm4", "dequantized"]
Run = TypeVar("Run")
# Of a layer, or of the layers over one input: (layer or layers, x [..., D_in]) -> [..., D_out].
LayerProduct = Callable[..., Tensor | None]
# The operands of a product with the adapters of its layers in further columns: (layer or layers, x [..., D_in]) ->
# (input [n, K], weight [D_out, K]), None where they are not there.
Columns = Callable[[Any, Tensor], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, eq=False)
class Matmul(Generic[Run]):
    """One way to multiply. layers: those that it is for, by the first of layers over one input. run: computes it, None where the
    values of an input are not as it reads them. least, most: rows of an input. columns: the operands that `run` takes in place of
    the weight and x where it can multiply with adapters too."""

    name: MatmulName
    layers: Container[Any]
    run: Run
    least: int = 1
    most: int = sys.maxsize
    columns: Columns | None = None


class MatmulTable(Generic[Run]):
    """The ways to multiply of one kind of pass, the preferred one first. Each was compared with float64 on this card when it was
    chosen (`DeviceKernels`, `PromptKernels`)."""

    def __init__(self, *matmuls: Matmul[Run] | None) -> None:
        self.matmuls = tuple(one for one in matmuls if one is not None)

    def ways(self, layer: object, rows: int) -> Iterator[Matmul[Run]]:
        """Yield the ways that are for a layer and this many rows."""
        return (one for one in self.matmuls if one.least <= rows <= one.most and layer in one.layers)

    def first(self, layer: object, rows: int) -> Matmul[Run] | None:
        """Return the preferred way, None where the layer's own product computes it."""
        return next(self.ways(layer, rows), None)

    def product(self: MatmulTable[LayerProduct], layers: object, x: Tensor) -> tuple[Tensor, bool] | None:
        """Return the output [..., D_out] of a layer, or of layers over one input side by side, and whether their adapters are in
        it; None where the layer's own product computes it."""
        for way in self.ways(layers[0] if isinstance(layers, Sequence) else layers, x.numel() // x.shape[-1]):
            operands = None if way.columns is None else way.columns(layers, x)
            if (y := way.run(layers, *(operands or (x,)))) is not None:
                return y.view(*x.shape[:-1], y.shape[-1]), operands is not None
        return None
