"""bitsandbytes' 4-bit and 8-bit formats: packing, computing and unpacking.

A `Packed` weight is a few plain tensors (`parts`) plus facts. Tiers move the parts; a *shell* is bitsandbytes' own layer
built over parts that are already where they are computed, so that kernels and bytes are stock's. The only file that
imports bitsandbytes. Not covered here: which modules are quantized (`engine/loader/transformers_model.py::stock_unquantized`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from trimtab.checkpoint.prequantized import PackedEntry
from trimtab.engine.formats import int8_head as head8
from trimtab.engine.formats.importing import without_compiler, without_hub_kernels
from trimtab.errors import CheckpointError, DeviceError
from trimtab.planning.values.byte_sizes import HEAD8, HEAD_CHUNK_VALUES

with without_hub_kernels(), without_compiler():
    import bitsandbytes as bnb
    from bitsandbytes.functional import (
        QuantState,
        dequantize_4bit,
        dequantize_blockwise,
        int8_vectorwise_dequant,
        quantize_4bit,
    )

# transformers' BitsAndBytesConfig default; the outlier threshold changes the answer, so ours is stock's.
INT8_THRESHOLD = 6.0
BLOCKSIZE = 64
NESTED_BLOCKSIZE = 256

# bitsandbytes says on every int8 call that inputs are cast to float16. That is the format, not an event.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Packed:
    """One weight in its stored form.

    kind: "none", "int8", "fp4", "nf4" or, of an 8-bit head (`engine/formats/int8_head.py`), HEAD8. shape, dtype: of the unpacked
    weight, [D_out, D_in]. parts: "weight" always; 4-bit "absmax", with double quantization also "nested_absmax" and "offset";
    int8 "SCB"; HEAD8 "scale". codes: the small look-up tables of a 4-bit weight ("code" [16], "nested_code" [256]), shared between
    weights and never moved by a tier. kernel: the computation of an 8-bit head.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Tensor]
    codes: Mapping[str, Tensor]
    blocksize: int = BLOCKSIZE
    nested_blocksize: int = NESTED_BLOCKSIZE
    kernel: head8.Kernel | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def with_parts(self, parts: Mapping[str, Tensor], codes: Mapping[str, Tensor]) -> Packed:
        """Return the same weight over other tensors: views of a staging buffer, or copies on another device."""
        return replace(self, parts=dict(parts), codes=dict(codes))

    def to(self, device: torch.device) -> Packed:
        """Return a copy whose every tensor is on the device (itself where it already is)."""
        return self.with_parts(
            {name: part.to(device) for name, part in self.parts.items()},
            {name: code.to(device) for name, code in self.codes.items()},
        )


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


def quantize(weight: Tensor, quant: str) -> Packed:
    """Return the weight packed on the device where it is, byte for byte as stock bitsandbytes packs it there.

    Shapes: weight [D_out, D_in] in the model's dtype, taken whole: double quantization subtracts the mean of all block
    maxima, so a split weight gives other bytes. Errors: DeviceError if bitsandbytes has no kernel for this device.
    Source: bitsandbytes 0.49.2 and 0.50.2, Params4bit._quantize and Int8Params._quantize (which casts to float16 first).
    """
    try:
        if quant == "int8":
            data, scale, _ = bnb.functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
            return Packed("int8", tuple(weight.shape), torch.float16, {"weight": data, "SCB": scale}, {})
        nested = quant == "nf4-dq"
        kind = "fp4" if quant == "fp4" else "nf4"
        data, state = quantize_4bit(
            weight.contiguous(), blocksize=BLOCKSIZE, compress_statistics=nested, quant_type=kind,
            quant_storage=torch.uint8,
        )  # fmt: skip
    except (RuntimeError, NotImplementedError, AttributeError) as exc:
        if isinstance(exc, torch.OutOfMemoryError):
            raise
        raise DeviceError(
            f"bitsandbytes {bnb.__version__} cannot quantize to {quant} here ({exc})", device=str(weight.device),
            hint="Choose another quant= or device=",
        ) from exc  # fmt: skip
    return _from_state(data, state, tuple(weight.shape), weight.dtype)


def _from_state(data: Tensor, state: QuantState, shape: tuple[int, ...], dtype: torch.dtype) -> Packed:
    parts = {"weight": data, "absmax": state.absmax}
    codes = {"code": state.code}
    if state.nested:
        parts |= {"nested_absmax": state.state2.absmax, "offset": state.offset.reshape(1)}
        codes["nested_code"] = state.state2.code
    return Packed(
        str(state.quant_type), shape, dtype, parts, codes, int(state.blocksize),
        int(state.state2.blocksize) if state.nested else NESTED_BLOCKSIZE,
    )  # fmt: skip


def prequantized(entry: PackedEntry, parts: Mapping[str, Tensor]) -> Packed:
    """Return a weight that is already packed in a checkpoint. Nothing is quantized again. parts: the file tensors of the entry
    by their part names, on the device on which they are computed or packed."""
    if entry.kind == "int8":
        return Packed("int8", entry.shape, torch.float16, {"weight": parts["weight"], "SCB": parts["SCB"]}, {})
    kept = {"weight": parts["weight"], "absmax": parts["absmax"]}
    codes = {"code": parts["quant_map"]}
    if entry.nested:
        if "nested_offset" not in entry.state:
            raise CheckpointError("double-quantized without a nested offset", path="", tensor_name=entry.tensor_name)
        offset = torch.tensor([float(entry.state["nested_offset"])], device=parts["absmax"].device)
        kept |= {"nested_absmax": parts["nested_absmax"], "offset": offset}
        codes["nested_code"] = parts["nested_quant_map"]
    return Packed(
        entry.kind, entry.shape, getattr(torch, entry.dtype), kept, codes, entry.blocksize or BLOCKSIZE,
        int(entry.state.get("nested_blocksize", NESTED_BLOCKSIZE)),
    )  # fmt: skip


def quant_state(packed: Packed) -> QuantState:
    """Return bitsandbytes' own state object over the parts of a 4-bit weight."""
    nested = None
    if "nested_absmax" in packed.parts:
        nested = QuantState(
            absmax=packed.parts["nested_absmax"], blocksize=packed.nested_blocksize, code=packed.codes["nested_code"],
            dtype=torch.float32,
        )  # fmt: skip
    return QuantState(
        absmax=packed.parts["absmax"], shape=torch.Size(packed.shape), code=packed.codes["code"],
        blocksize=packed.blocksize, quant_type=packed.kind, dtype=packed.dtype,
        offset=packed.parts["offset"].reshape(()) if nested is not None else None, state2=nested,
    )  # fmt: skip


def dequantize(packed: Packed) -> Tensor:
    """Return the unpacked weight [D_out, D_in], in its own dtype, on its device."""
    if packed.kind == "none":
        return packed.parts["weight"]
    if packed.kind == HEAD8:
        return head8.dense(packed.parts["weight"], packed.parts["scale"], packed.dtype)
    if packed.kind == "int8":
        return int8_vectorwise_dequant(packed.parts["weight"], packed.parts["SCB"])
    state = quant_state(packed)
    if _begins_in_blocks(packed):
        count = prod(packed.shape)
        whole = count % packed.blocksize == 0  # then rows of one block each, which bitsandbytes unpacks side by side
        state.shape = torch.Size((count // packed.blocksize, packed.blocksize) if whole else (1, count))
    return dequantize_4bit(packed.parts["weight"], state).view(packed.shape)


def _begins_in_blocks(packed: Packed) -> bool:
    """Whether rows of a 4-bit weight on a CPU begin inside a block of values with one scale. bitsandbytes 0.49 and 0.50 take
    another block's scale for them on CPUs with AVX512 (I16 of the doctor's catalogue), but not for the same values as one row."""
    return packed.parts["weight"].device.type == "cpu" and packed.shape[-1] % packed.blocksize != 0


def dequantize_rows(packed: Packed, start: int, stop: int, device: torch.device) -> Tensor:
    """Return rows `start` to `stop` of the weight [D_out, D_in] in separate memory, on a device: the bits of `dequantize`.

    Only these rows are copied to the device and dequantized, with up to a block of 4-bit values more on both sides.
    """
    parts = packed.parts
    if packed.kind == "none":
        return parts["weight"][start:stop].to(device, copy=True)
    if packed.kind == HEAD8:
        return head8.dense(parts["weight"][start:stop].to(device), parts["scale"][start:stop].to(device), packed.dtype)
    if packed.kind == "int8":
        return int8_vectorwise_dequant(parts["weight"][start:stop].to(device), parts["SCB"][start:stop].to(device))
    rows, columns = packed.shape
    # A block of values with one scale may begin in the middle of a row.
    step = packed.blocksize // math.gcd(packed.blocksize, columns)
    first, last = start // step * step, min(-(-stop // step) * step, rows)
    stored = parts["weight"].reshape(-1).view(torch.uint8)[first * columns // 2 : (last * columns + 1) // 2]
    facts = replace(packed, parts={name: part for name, part in parts.items() if name != "weight"}).to(device)
    state = quant_state(facts)
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    of_rows = slice(first * columns // packed.blocksize, -(-last * columns // packed.blocksize))
    part = replace(facts, shape=(last - first, columns), parts={"weight": stored.to(device), "absmax": scales[of_rows]})
    return dequantize(part)[start - first : stop - first]


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
    """Whether a weight is stored in fewer bits than it is computed with (`planning/request/dtypes.py::keeps_16bit`)."""
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


def shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return a callable layer over the packed parts: x [..., D_in] -> y [..., D_out].

    The parts are used as they are, without a copy: a layer over views of a staging buffer computes with the buffer's current
    content. bitsandbytes' own forward is called because its kernels differ between releases.
    """
    if packed.kind == "none":
        kind = WideShell if is_narrow(packed.dtype, compute_dtype) else PlainShell
        return kind(packed.parts["weight"], bias)
    if packed.kind == HEAD8:
        return head8.Head(packed.parts["weight"], packed.parts["scale"], bias, packed.kernel)
    rows, columns = packed.shape
    if packed.kind == "int8":
        layer = bnb.nn.Linear8bitLt(
            columns, rows, bias=bias is not None, has_fp16_weights=False, threshold=INT8_THRESHOLD, device="meta"
        )
        layer.weight = bnb.nn.Int8Params(packed.parts["weight"], requires_grad=False, has_fp16_weights=False)
        layer.state.CB, layer.state.SCB = packed.parts["weight"], packed.parts["SCB"]
    elif _begins_in_blocks(packed):
        return partial(_unpacked_product, packed, bias, compute_dtype)
    else:
        nested = "nested_absmax" in packed.parts
        layer = bnb.nn.Linear4bit(
            columns, rows, bias=bias is not None, compute_dtype=compute_dtype, compress_statistics=nested,
            quant_type=packed.kind, quant_storage=packed.parts["weight"].dtype, device="meta",
        )  # fmt: skip
        state = quant_state(packed)
        layer.weight = bnb.nn.Params4bit(
            packed.parts["weight"], requires_grad=False, quant_state=state, blocksize=packed.blocksize,
            compress_statistics=nested, quant_type=packed.kind, quant_storage=packed.parts["weight"].dtype,
            module=layer, bnb_quantized=True,
        )  # fmt: skip
        layer.quant_state = state
        # On CPUs with AVX512-BF16 the first forward repacks weight and scales in place, and the inverse loses bits
        # (bitsandbytes #2078): a staged or shared weight would be destroyed.
        layer.support_avx512bf16_for_cpu = False
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer.eval()


def _unpacked_product(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype, x: Tensor) -> Tensor:
    """The computation of bitsandbytes' layer on a CPU, from `dequantize`. Source: as `unpacked_shell`."""
    weight = dequantize(replace(packed, dtype=compute_dtype))
    own = None if bias is None else bias.to(compute_dtype)
    return nn.functional.linear(x.to(compute_dtype), weight, own).to(x.dtype)


def unpacked_shell(weight: Tensor, bias: Tensor | None) -> Shell:
    """Return a callable layer over a 4-bit weight that is kept unpacked, [D_out, D_in]: bitsandbytes' own operations on a CPU
    after it has unpacked the weight, so the same bits. Source: bitsandbytes 0.49.2 and 0.50.2, nn.Linear4bit.forward."""
    if bias is not None:
        bias = bias.to(weight.dtype)

    def product(x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

    return product
