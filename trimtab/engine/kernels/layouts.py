"""How do the kernels read a stored weight: which sources, compiler options and tensors, and which forms of it do they not know?

`cuda/nf4.cuh` and the other headers of formats hold what a layout is; here a record and its parts become options and arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats import mobile
from trimtab.engine.formats.packed import Packed
from trimtab.formats.record import NESTED_BLOCK, WEIGHT_BLOCK, stored_format

TYPES = (torch.bfloat16, torch.float16)
# One header a family of formats, each compiled where FORMAT names it.
HEADERS = ("nf4.cuh", "int4.cuh", "fp8.cuh", "ggml.cuh", "mobile.cuh", "fp4.cuh")
_FORMATS = {"codebook": 0, "grouped": 1, "float8": 2, "ggml": 3, "mobile": 4, "float4": 5}
# As TYPE in ggml.cuh.
_GGML = {"q4_0": 40, "q4_1": 41, "q8_0": 80, "q4_k": 4, "q5_k": 5, "q6_k": 6}
# The largest scale with which a product of few rows has its weights in float16.
MOST_SCALE = 256.0


def source(name: str) -> str:
    """Return a source of products behind the headers of every format."""
    return "".join(map(nvrtc.source, ("values.cuh", *HEADERS, name)))


def layout(packed: Packed) -> str | None:
    """Return `StoredFormat.layout` of a weight."""
    return stored_format(packed.kind).layout


def is_mobile(packed: Packed) -> bool:
    """Whether a weight is one of Gemma 4's mobile files: its layer may round inputs and outputs, and an adapter reads them as they
    were."""
    return stored_format(packed.kind).family == "mobile"


def options(packed: Packed) -> tuple[str, ...]:
    """Return the compiler options that name a weight's layout."""
    form = stored_format(packed.kind)
    number = _FORMATS[form.family]
    if form.family == "codebook":
        return (f"-DNESTED={'nested_absmax' in packed.parts:d}",)
    facts: dict[str, int] = {"FORMAT": number}
    if form.family == "mobile":
        facts |= {"BITS": form.bits, "GROUP": form.group}
    elif form.family == "ggml":
        facts |= {"TYPE": _GGML[packed.kind]}
    elif form.family == "float8":
        facts |= {"HIGH": form.block[0], "GROUP": form.block[1]}
    elif form.family == "grouped":
        facts |= {"GROUP": form.group, "WIDE_SCALE": packed.parts["scale"].dtype == torch.float32, "ZERO": form.has_zero}
    own = packed.parts["scale"].dtype if form.family == "grouped" else packed.dtype
    facts |= {"SCALE_HALF": own == torch.float16}
    return tuple(f"-D{name}={value:d}" for name, value in facts.items())


def scale_type(packed: Packed) -> tuple[str, ...]:
    """Return the type of a weight's scales, nothing where its format names it."""
    return (str(packed.parts["scale"].dtype),) if "scale" in packed.parts else ()


def tensors(packed: Packed) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (weight, scales, scales of scales or zero points, offset) as the kernels take them."""
    parts: Mapping[str, Tensor] = packed.parts
    if "absmax" in parts:
        return parts["weight"], parts["absmax"], parts.get("nested_absmax"), parts.get("offset")
    second = next((parts[name] for name in ("zero", "outer", "global") if name in parts), None)
    return parts["weight"], parts["scale"], second, parts.get("activation")


def is_same(weights: Sequence[Packed]) -> bool:
    """Whether one launch can read all these weights: for one layout, with one table of codes, and inputs rounded once."""
    if len({(options(packed), packed.input_scale) for packed in weights}) > 1:
        return False
    names = ("code", "nested_code")
    return all(len({one.codes[name].data_ptr() if name in one.codes else None for one in weights}) == 1 for name in names)


def round_to_8(x: Tensor, weights: Sequence[Packed], module: nvrtc.Module | None, *, is_input: bool) -> Tensor:
    """Return the inputs [n, D_in] of layers over one, rounded as the first one's, elsewhere; or their outputs [n, all D_out], each
    rounded as its own, in place. module: of products of many rows or of prompts; None: in torch."""
    scales = [None if (found := one.parts.get("activation")) is None else found[1 - is_input :] for one in weights]
    widths = [x.shape[1]] if is_input else [one.shape[0] for one in weights]
    if not is_mobile(weights[0]) or all(one is None for one in scales):
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if is_input else x
    if module is None:
        for part, given, scale in zip(out.split(widths, dim=1), x.split(widths, dim=1), scales, strict=False):
            part.copy_(given if scale is None else mobile.rounded(given, scale[0]))
        return out
    assert x.stride(1) == 1
    module.variant(options(weights[0])).launch(
        "round_to_8", (-(-x.shape[1] // 2048), x.shape[0]), (256,),
        [
            x, x.stride(0), out, out.stride(0), *[*widths, 0, 0][:3], *[*scales[: len(widths)], None, None][:3],
            int(x.dtype == torch.float16),
        ],
    )  # fmt: skip
    return out


def runs(weights: Sequence[Packed]) -> list[slice]:
    """Return the neighbours among these weights that one launch can read together, in order."""
    starts = [i for i in range(len(weights)) if i == 0 or not is_same(weights[i - 1 : i + 1])]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)]


def why_not(packed: Packed) -> str | None:
    """Return why no kernel reads this weight, None if they do."""
    return unread(packed) if layout(packed) is None else why_not_parts(packed)


def unread(packed: Packed) -> str:
    """Return that no kernel reads a weight's format."""
    return f"the weight is {packed.kind}, which no kernel reads"


def why_not_parts(packed: Packed) -> str | None:
    """Return why no kernel reads a weight's parts as they are, None if they do."""
    if "absmax" in packed.parts:
        if packed.blocksize != WEIGHT_BLOCK:
            return f"blocks of {packed.blocksize}, not {WEIGHT_BLOCK}"
        if "nested_absmax" in packed.parts and packed.nested_blocksize != NESTED_BLOCK:
            return f"nested blocks of {packed.nested_blocksize}, not {NESTED_BLOCK}"
    for name, part in packed.parts.items():
        if not part.is_contiguous() or part.data_ptr() % (4 if part.numel() == 1 else 16):
            return f"{name} is not contiguous or not aligned to 16 bytes"
    return None
