"""How do the kernels read a stored weight: which sources, compiler options and tensors, and which forms of it do they not know?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats import weights as formats
from trimtab.engine.formats.packed import Packed
from trimtab.formats.record import HEADERS, stored_format

TYPES = (torch.bfloat16, torch.float16)


def why_not_type(dtype: torch.dtype) -> str | None:
    """Return why no kernel computes with activations of a type, None if they do."""
    return None if dtype in TYPES else f"the activation is {dtype}, not bfloat16 or float16"


def takes(module: nvrtc.Module, x: Tensor) -> bool:
    """Whether the kernels of a module may compute with x: of their device, in a type of theirs."""
    return x.device.type == module.device.type and x.dtype in TYPES


def half(x: Tensor) -> int:
    """Return the kernels' number of a type."""
    return int(x.dtype == torch.float16)


def source(name: str) -> str:
    """Return a source of products behind the headers of every format."""
    return "".join(map(nvrtc.source, ("values.cuh", "packed.cuh", *HEADERS, name)))


def layout(packed: Packed) -> str | None:
    """Return `StoredFormat.layout` of a weight."""
    return stored_format(packed.kind).layout


def rounds_inputs(packed: Packed) -> bool:
    """Whether a weight's layer may round inputs and outputs; an adapter reads them as they were."""
    return stored_format(packed.kind).rounds_inputs


def options(packed: Packed) -> tuple[str, ...]:
    """Return the compiler options that name a weight's layout."""
    form = stored_format(packed.kind)
    facts = dict(form.options)
    if form.number:
        scales = tensors(packed)[1]
        own = scales.dtype if form.scales_in_type and scales is not None else packed.dtype
        facts = {"FORMAT": form.number, **facts, "SCALE_HALF": own == torch.float16}
    return tuple(f"-D{name}={value:d}" for name, value in facts.items())


def variant(packed: Packed, module: nvrtc.Module) -> nvrtc.Module:
    """Return the module whose products read a weight's layout. The first weight of one compiles it: not within a capture.
    module: of a source that is compiled without options too."""
    return module.variant(options(packed)) if stored_format(packed.kind).number else module


def scale_type(packed: Packed) -> tuple[str, ...]:
    """Return the type of a weight's scales, nothing where its format names it."""
    scales = tensors(packed)[1] if stored_format(packed.kind).number else None
    return () if scales is None else (str(scales.dtype),)


def tensors(packed: Packed) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return (weight, scales, scales of scales or zero points, offset) as the kernels take them."""
    weight, scales, second, offset = (packed.parts.get(name) for name in stored_format(packed.kind).arguments)
    assert weight is not None
    return weight, scales, second, offset


def tables(packed: Packed) -> tuple[Tensor | None, Tensor | None]:
    """Return the tables (of codes, of codes of scales) that a weight has."""
    found = [*(packed.codes[name] for name in stored_format(packed.kind).tables), None, None]
    return found[0], found[1]


def is_same(weights: Sequence[Packed]) -> bool:
    """Whether one launch can read all these weights: for one layout, with one table of codes, and inputs rounded or in order
    once."""
    if len({(options(packed), packed.input_scale, packed.order) for packed in weights}) > 1:
        return False
    return len({tuple(None if table is None else table.data_ptr() for table in tables(one)) for one in weights}) == 1


def in_order(
    x: Tensor, packed: Packed, module: nvrtc.Module | None, *, out: Tensor | None = None, dependent: bool | None = None
) -> Tensor:  # fmt: skip
    """Return the inputs [..., D_in] of a weight in the order in which its columns lie: x itself, or a copy by one launch. out: rows
    [n, D_in] for it. module None: in torch."""
    if (index := packed.index) is None:
        return x
    if module is None:
        return x.index_select(-1, index)
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    to, (n, width) = torch.empty(flat.shape, dtype=x.dtype, device=x.device) if out is None else out, flat.shape
    assert flat.stride(1) == to.stride(1) == 1 and width % 4 == to.stride(0) % 4 == 0 and x.dtype in TYPES
    given: list[nvrtc.Argument] = [flat, flat.stride(0), index, to, to.stride(0), width]
    module.launch("in_order", (n, -(-width // 1024)), (256,), given, dependent=dependent)
    return to.view(x.shape) if out is None else out


def round_to_8(x: Tensor, weights: Sequence[Packed], module: nvrtc.Module | None, *, is_input: bool) -> Tensor:
    """Return the inputs [n, D_in] of layers over one, rounded as the first one's, elsewhere; or their outputs [n, all D_out], each
    rounded as its own, in place. module: of products of many rows or of prompts; None: in torch."""
    scales = [None if (found := one.static_scales) is None else found[1 - is_input :] for one in weights]
    widths = [x.shape[1]] if is_input else [one.shape[0] for one in weights]
    if all(one is None for one in scales):
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if is_input else x
    if module is None:
        for part, given, one in zip(out.split(widths, dim=1), x.split(widths, dim=1), weights, strict=False):
            part.copy_(formats.rounded(one, given, is_input=is_input))
        return out
    assert x.stride(1) == 1
    module.variant(options(weights[0])).launch(
        "round_to_8", (-(-x.shape[1] // 2048), x.shape[0]), (256,),
        [
            x, x.stride(0), out, out.stride(0), *[*widths, 0, 0][:3], *[*scales[: len(widths)], None, None][:3], half(x),
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
    if (why := stored_format(packed.kind).why_not_blocks(packed.blocks)) is not None:
        return why
    for name, part in packed.parts.items():
        if not part.is_contiguous() or part.data_ptr() % (4 if part.numel() == 1 else 16):
            return f"{name} is not contiguous or not aligned to 16 bytes"
    return None
