"""Which values do packed weights have by a second reading, without engine/formats?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.formats.record import PackedEntry, stored_format

# Values of a piece that is computed at a time.
PIECE_VALUES = 2**22
# The magnitudes of e2m1 by its lowest three bits.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Which output of eight the fields of AWQ's int32 hold, from the lowest bits.
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
# ggml's numbers of the types that are read (ggml.h), and those that are plain values.
GGML_NUMBERS = {"q4_0": 2, "q4_1": 3, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}
GGML_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# Rows [start, stop) of a weight -> its values [stop - start, D_in], as exact as the format computes them.
Rows = Callable[[int, int], Tensor]


def second_reading(entry: PackedEntry, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a weight [D_out, D_in] in the type of its scales, in `dtype` where these are float32 or of 8 bits.

    parts: its file tensors by their part names. Errors: ImportError where the installed transformers has no reader of GGUF. Values
    are computed in float64 from the published layouts. Source: AutoAWQ 0.2.9, utils/packing_utils.py; GPTQModel 4, utils/model.py
    (gptq_v2); compressed-tensors 0.20.0, compressors; OCP Microscaling Formats 1.0 (e2m1, e8m0); transformers'
    integrations/gguf/dequant.py for GGUF's types.
    """
    family = stored_format(entry.kind).family
    rows_of, own = {"grouped": _integers, "float8": _float8, "float4": _float4, "ggml": _ggml}[family](entry, parts)
    rows, columns = entry.shape
    out = torch.empty(rows, columns, dtype=own if own in (torch.float16, torch.bfloat16) else dtype)
    step = max(1, PIECE_VALUES // columns)
    for start in range(0, rows, step):
        out[start : start + step] = rows_of(start, min(start + step, rows)).to(out.dtype)
    return out if family != "ggml" else _ordered(out, entry.state)


def is_read(method: str) -> bool:
    """Return whether weights of a quant_method are read here with the packages that are installed."""
    if method != "gguf":
        return True
    try:
        import transformers.integrations.gguf.dequant  # noqa: F401
    except ImportError:
        return False
    return True


# Integers -------------------------------------------------------------------------------------------------------------


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields uint8 [n, m 32 / bits] of int32 words [n, m], from their lowest bits."""
    mask = (1 << bits) - 1
    return torch.stack([(words >> shift & mask).to(torch.uint8) for shift in range(0, 32, bits)], dim=-1).flatten(1)


def _integers(entry: PackedEntry, parts: Mapping[str, Tensor]) -> tuple[Rows, torch.dtype]:
    """(q - zero) * scale, with a zero and a scale [D_out, groups]: compressed-tensors, AWQ and GPTQ."""
    form, (rows, columns), layout = stored_format(entry.kind), entry.shape, entry.state["layout"]
    zero: Tensor | None = None
    if layout == "packed":
        q, scale = _fields(parts["weight"], form.bits), parts["weight_scale"].reshape(rows, -1)
        if (words := parts.get("weight_zero_point")) is not None:
            zero = _fields(words.t().contiguous(), form.bits)[:, :rows].t()
    elif layout == "awq":
        order = torch.tensor(AWQ_OUTPUTS).argsort()
        q, zero = (_fields(parts[name], 4).view(-1, rows // 8, 8)[..., order].flatten(1).t() for name in ("weight", "qzeros"))
        scale = parts["scales"].t()
    else:
        # One less than the zero point stands in each field, borrowed from the next: the word has one of each less.
        ones = sum(1 << shift for shift in range(0, 32, form.bits)) if layout == "gptq" else 0
        stored = (parts["qzeros"].long() + ones) & (2**32 - 1)
        q, scale = _fields(parts["weight"].t(), form.bits), parts["scales"].t()
        zero = _fields(stored, form.bits)[:, :rows].t()
    given = parts.get("g_idx", parts.get("weight_g_idx"))
    index = torch.arange(columns) // (form.group or columns) if given is None else given.long()

    def values(start: int, stop: int) -> Tensor:
        low = float(1 << (form.bits - 1)) if zero is None else zero[start:stop].double()[:, index]
        return (q[start:stop, :columns].double() - low) * scale[start:stop].double()[:, index]

    return values, scale.dtype


# Floats ---------------------------------------------------------------------------------------------------------------


def _factor(scale: Tensor) -> Tensor:
    """Return scales in float64; bytes are exponents (e8m0)."""
    return scale.double() if scale.dtype != torch.uint8 else torch.exp2(scale.double() - 127)


def _float8(entry: PackedEntry, parts: Mapping[str, Tensor]) -> tuple[Rows, torch.dtype]:
    """q * scale of a block, a row or the weight, in float32."""
    (high, wide), (rows, columns) = stored_format(entry.kind).block, entry.shape
    high, wide = high or rows, wide or columns
    scale = _factor(parts["scale"]).reshape(-(-rows // high), -(-columns // wide))
    across = torch.arange(columns) // wide

    def values(start: int, stop: int) -> Tensor:
        factor = scale[torch.arange(start, stop) // high][:, across]
        return (parts["weight"][start:stop].double() * factor).float()

    return values, parts["scale"].dtype


def _float4(entry: PackedEntry, parts: Mapping[str, Tensor]) -> tuple[Rows, torch.dtype]:
    """q * scale of 16 or 32 values, in float32; a scale is multiplied with the weight's in float32 before."""
    columns, scale = entry.shape[1], _factor(parts["scale"])
    if (divisor := parts.get("weight_global_scale")) is not None:
        scale = (scale / divisor.double().reshape(())).float().double()
    elif (whole := parts.get("weight_scale_2")) is not None:
        scale = (scale * whole.double().reshape(())).float().double()
    sizes = torch.tensor(E2M1, dtype=torch.float64)
    size = columns // scale.shape[1]

    def values(start: int, stop: int) -> Tensor:
        data = parts["weight"][start:stop].view(torch.uint8)
        codes = torch.stack((data % 16, data // 16), dim=-1).flatten(1).long()
        signed = torch.where(codes >= 8, -sizes[codes % 8], sizes[codes % 8])
        return (signed * scale[start:stop].repeat_interleave(size, dim=1)).float()

    return values, torch.float32


# GGUF -----------------------------------------------------------------------------------------------------------------


def _ggml(entry: PackedEntry, parts: Mapping[str, Tensor]) -> tuple[Rows, torch.dtype]:
    kind, data = entry.kind.partition("-")[0], parts["weight"]
    if kind in GGML_PLAIN:
        return lambda start, stop: data[start:stop].contiguous().view(GGML_PLAIN[kind]).float(), torch.float32
    from transformers.integrations.gguf.dequant import dequantize

    def values(start: int, stop: int) -> Tensor:
        found: Tensor = dequantize(data[start:stop].contiguous().view(-1), GGML_NUMBERS[kind], torch.float32)
        return found.view(stop - start, -1)

    return values, torch.float32


def _ordered(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return a weight with its rows and columns in the model's order: of each value of the model, where it stands in the file."""
    for side, name in enumerate(("rows", "columns")):
        if name in state:
            weight = weight.index_select(side, torch.tensor(list(_places(weight.shape[side], *state[name]))))
    return weight


def _places(count: int, offset: int, a: int, b: int, c: int, d: int) -> Iterator[int]:
    """Yield where the file, which has [a, b, c, d] from `offset` on, holds each place of the model, which has [a, c, b, d]."""
    yield from range(offset)
    for place in range(count - offset):
        one, rest = divmod(place, b * c * d)
        three, rest = divmod(rest, b * d)
        two, four = divmod(rest, d)
        yield offset + ((one * b + two) * c + three) * d + four
