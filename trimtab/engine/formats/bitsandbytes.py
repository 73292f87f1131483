"""How are bitsandbytes' 4-bit and 8-bit weights packed, computed with and unpacked?"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from trimtab.engine.formats.packed import Draw, Packed, Shell, check_finite
from trimtab.errors import DeviceError
from trimtab.formats.bitsandbytes import INT8_SETTINGS
from trimtab.formats.record import DOUBLE, NESTED_BLOCK, WEIGHT_BLOCK, PackedEntry, StoredFormat
from trimtab.process.packages import switch

NO_COMPILER = "TORCHDYNAMO_DISABLE"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make `torch.compile` return functions as they are, in a process that has not compiled anything yet. bitsandbytes gives four
    functions to `torch.compile` while it is imported, which loads inductor: two seconds of every start. torch's operators give the
    same bits. Source: bitsandbytes 0.50.2, backends/default/ops.py; torch 2.13, _dynamo/eval_frame.py."""
    if "torch._inductor.compile_fx" in sys.modules:  # a program that compiles: the import costs nothing more
        yield
        return
    with switch(NO_COMPILER):
        yield


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Make `import kernels` fail while bitsandbytes is imported, and suppress its warning. bitsandbytes 0.50 imports it on a CPU
    with AVX512-BF16, to download a product from the hub (backends/cpu/ops.py)."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, known = log.level, sys.modules.get("kernels")
    log.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        log.setLevel(level)
        if known is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = known


with without_hub_kernels(), without_compiler():
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise, int8_vectorwise_dequant, quantize_4bit

INT8_THRESHOLD = INT8_SETTINGS["llm_int8_threshold"]

# bitsandbytes says on every int8 call that inputs are cast to float16. That is the format, not an event.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


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
        nested = quant.endswith(DOUBLE)
        data, state = quantize_4bit(
            weight.contiguous(), blocksize=WEIGHT_BLOCK, compress_statistics=nested, quant_type=quant.removesuffix(DOUBLE),
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
    blocks: tuple[int, ...] = (int(state.blocksize),)
    if state.nested:
        parts |= {"nested_absmax": state.state2.absmax, "offset": state.offset.reshape(1)}
        codes["nested_code"], blocks = state.state2.code, (*blocks, int(state.state2.blocksize))
    return Packed(str(state.quant_type) + DOUBLE * state.nested, shape, dtype, parts, codes, blocks)


def read(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Return a weight that bitsandbytes packed in a checkpoint, as it is. dtype: not used; its state names its own."""
    check_finite(entry, *(part for name, part in parts.items() if name != "weight" and part.is_floating_point()))
    if entry.kind == "int8":
        return Packed("int8", entry.shape, torch.float16, {"weight": parts["weight"], "SCB": parts["SCB"]}, {})
    kept = {"weight": parts["weight"], "absmax": parts["absmax"]}
    codes = {"code": parts["quant_map"]}
    blocks: tuple[int, ...] = (int(entry.state["blocksize"]),)
    if entry.kind.endswith(DOUBLE):
        offset = torch.tensor([float(entry.state["nested_offset"])], device=parts["absmax"].device)
        kept |= {"nested_absmax": parts["nested_absmax"], "offset": offset}
        codes["nested_code"], blocks = parts["nested_quant_map"], (*blocks, int(entry.state["nested_blocksize"]))
    return Packed(entry.kind, entry.shape, getattr(torch, entry.dtype), kept, codes, blocks)


def quant_state(packed: Packed, shape: tuple[int, int] | None = None) -> QuantState:
    """Return bitsandbytes' own state object over the parts of a 4-bit weight. shape: of its values, None for the weight's own."""
    nested = None
    if "nested_absmax" in packed.parts:
        nested = QuantState(
            absmax=packed.parts["nested_absmax"], blocksize=packed.blocks[1], code=packed.codes["nested_code"],
            dtype=torch.float32,
        )  # fmt: skip
    return QuantState(
        absmax=packed.parts["absmax"], shape=torch.Size(shape or packed.shape), code=packed.codes["code"],
        blocksize=packed.blocks[0], quant_type=packed.kind.removesuffix(DOUBLE), dtype=packed.dtype,
        offset=packed.parts["offset"].reshape(()) if nested is not None else None, state2=nested,
    )  # fmt: skip


def dequantize(packed: Packed) -> Tensor:
    """Return the unpacked weight [D_out, D_in], in its own dtype, on its device."""
    if packed.kind == "int8":
        return int8_vectorwise_dequant(packed.parts["weight"], packed.parts["SCB"])
    shape = None
    if _begins_in_blocks(packed):
        count = prod(packed.shape)
        whole = count % packed.blocks[0] == 0  # then rows of one block each, which bitsandbytes unpacks side by side
        shape = (count // packed.blocks[0], packed.blocks[0]) if whole else (1, count)
    return dequantize_4bit(packed.parts["weight"], quant_state(packed, shape)).view(packed.shape)


def _begins_in_blocks(packed: Packed) -> bool:
    """Whether rows of a 4-bit weight on a CPU begin inside a block of values with one scale. bitsandbytes 0.49 and 0.50 take
    another block's scale for them on CPUs with AVX512 (I16 of the doctor's catalogue), but not for the same values as one row."""
    return packed.parts["weight"].device.type == "cpu" and packed.shape[-1] % packed.blocks[0] != 0


def dequantize_rows(packed: Packed, start: int, stop: int, device: torch.device) -> Tensor:
    """Return rows of the weight as `weights.dequantize_rows`: up to a block of 4-bit values more on both sides is unpacked."""
    parts = packed.parts
    if packed.kind == "int8":
        return int8_vectorwise_dequant(parts["weight"][start:stop].to(device), parts["SCB"][start:stop].to(device))
    rows, columns = packed.shape
    # A block of values with one scale may begin in the middle of a row.
    step = packed.blocks[0] // math.gcd(packed.blocks[0], columns)
    first, last = start // step * step, min(-(-stop // step) * step, rows)
    stored = parts["weight"].reshape(-1).view(torch.uint8)[first * columns // 2 : (last * columns + 1) // 2]
    facts = replace(packed, parts={name: part for name, part in parts.items() if name != "weight"}).to(device)
    state = quant_state(facts)
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    of_rows = slice(first * columns // packed.blocks[0], -(-last * columns // packed.blocks[0]))
    part = replace(facts, shape=(last - first, columns), parts={"weight": stored.to(device), "absmax": scales[of_rows]})
    return dequantize(part)[start - first : stop - first]


def exact_rows(packed: Packed, rows: range, dtype: torch.dtype) -> Tensor:
    """Return rows of a 4-bit weight, not rounded to its type; the scale of a block is float32. Errors: AssertionError if the rows
    are not whole blocks."""
    D_out, D_in = packed.shape
    start, stop, size = rows.start, rows.stop, packed.blocks[0]
    assert D_in % size == 0 or (start, stop) == (0, D_out)
    values = packed.parts["weight"].reshape(-1).view(torch.uint8)[start * D_in // 2 : stop * D_in // 2]
    code = packed.codes["code"].to(values.device)
    pairs = torch.stack((code[(values >> 4).int()], code[(values & 15).int()]), dim=1)
    blocks = torch.arange(start * D_in // size, -(-stop * D_in // size), device=values.device)
    absmax = packed.parts["absmax"].reshape(-1)[blocks]
    if "nested_absmax" in packed.parts:
        outer = packed.parts["nested_absmax"][blocks // packed.blocks[1]]
        absmax = torch.addcmul(packed.parts["offset"], packed.codes["nested_code"].to(values.device)[absmax.int()], outer)
    return (pairs.view(-1, size).to(dtype) * absmax[:, None].to(dtype)).view(stop - start, D_in)


def random_parts(form: StoredFormat, rows: int, columns: int, draw: Draw) -> dict[str, Tensor]:
    """Return the parts of a 4-bit weight whose values are about 0.03."""
    blocks = rows * columns // WEIGHT_BLOCK
    parts = {"weight": draw.bytes(rows * columns // 2, 1)}
    if not form.options["NESTED"]:
        return parts | {"absmax": draw.uniform(blocks) * 0.1}
    outer = draw.uniform(-(-blocks // NESTED_BLOCK)) * 0.01 + 0.01
    return parts | {"absmax": draw.bytes(blocks, 1).view(-1), "nested_absmax": outer, "offset": draw.values(0.05)}


def shell(packed: Packed, bias: Tensor | None, compute_dtype: torch.dtype) -> Shell:
    """Return bitsandbytes' own layer over the packed parts. Its forward is called because its kernels differ between releases."""
    rows, columns = packed.shape
    if packed.kind == "int8":
        layer = bnb.nn.Linear8bitLt(
            columns, rows, bias=bias is not None, has_fp16_weights=False, threshold=INT8_THRESHOLD, device="meta"
        )
        layer.weight = bnb.nn.Int8Params(packed.parts["weight"], requires_grad=False, has_fp16_weights=False)
        layer.state.CB, layer.state.SCB = packed.parts["weight"], packed.parts["SCB"]
    elif _begins_in_blocks(packed) or packed.parts["weight"].dim() == 1:  # which an expert's is
        return partial(_unpacked_product, packed, bias, compute_dtype)
    else:
        nested = "nested_absmax" in packed.parts
        layer = bnb.nn.Linear4bit(
            columns, rows, bias=bias is not None, compute_dtype=compute_dtype, compress_statistics=nested,
            quant_type=packed.kind.removesuffix(DOUBLE), quant_storage=packed.parts["weight"].dtype, device="meta",
        )  # fmt: skip
        state = quant_state(packed)
        layer.weight = bnb.nn.Params4bit(
            packed.parts["weight"], requires_grad=False, quant_state=state, blocksize=packed.blocks[0],
            compress_statistics=nested, quant_type=state.quant_type, quant_storage=packed.parts["weight"].dtype,
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
