"""Which tensors of float8 checkpoints belong together: a weight in e4m3, and the scale of each block, row or weight?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.formats.record import SCALE_DTYPES, Found, PackedEntry, Split, split

E4M3 = "float8_e4m3fn"
SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")


def read(checkpoint: Checkpoint) -> Split:
    """Return (plain tensors, packed weights by name). Errors: CheckpointError with every wrong weight."""
    return split(checkpoint, weights(checkpoint.tensors, (checkpoint.quantization or {}).get("weight_block_size")))


def weights(tensors: Mapping[str, TensorEntry], block: object) -> Iterator[Found]:
    """Yield the float8 weights. block: the [rows, columns] of a block, as the config declares it; anything else for none.

    `X.weight_scale_inv` [D_out / 128, D_in / 128] (quant_method fp8; also [1] or none of a dimension: the whole weight), or
    `X.weight_scale` [D_out, 1], [D_out], [1] or [blocks] (compressed-tensors, fbgemm_fp8), or `X.weight_scale` uint8 [D_out, D_in /
    32], powers of 2 (MXFP8). Source: transformers 5.23, integrations/finegrained_fp8.py, Fp8Dequantize.
    """
    is_pair = isinstance(block, list) and len(block) == 2
    sides = tuple(block) if isinstance(block, list) and is_pair and all(type(side) is int for side in block) else None
    for name, weight in tensors.items():
        if not weight.dtype.startswith("float8"):
            continue
        stem = name.removesuffix("weight")
        scales = {part: tensors[stem + part] for part in SCALES if stem + part in tensors}
        own = [name, *(stem + part for part in (*scales, *ACTIVATIONS) if stem + part in tensors)]
        yield name, own, _weight(name, weight, scales, block=sides)


def _weight(
    name: str, weight: TensorEntry, scales: Mapping[str, TensorEntry], *, block: tuple[int, ...] | None
) -> PackedEntry | str:
    """Return a weight, or what is wrong with its file tensors."""
    if weight.dtype != E4M3:
        return f"is {weight.dtype}; {E4M3} is read"
    if len(weight.shape) != 2 or not all(weight.shape) or not name.endswith("weight"):
        return f"is float8 of shape {list(weight.shape)}, not a matrix"
    if len(scales) != 1:
        return f"float8 needs one of {' and '.join(SCALES)}, has {len(scales)}"
    (scale,) = scales.values()
    stored = f"its scale is {scale.dtype} {list(scale.shape)}"
    if scale.dtype == "uint8" and scale.shape == (weight.shape[0], weight.shape[1] / 32):
        return PackedEntry(name, "fp8-1x32", weight.shape, "bfloat16", {"weight": weight, "scale": scale}, {})
    if scale.dtype not in SCALE_DTYPES:
        return f"{stored}; {', '.join(SCALE_DTYPES)} are read"
    rows, columns = weight.shape
    kind = _kind(rows, columns, scale.shape, block)
    if kind is None:
        declared = f"blocks of {list(block)}" if block else "blocks, of which config.json declares no size"
        return f"{stored}, which is no scale of a weight [{rows}, {columns}], of its rows, or of {declared}"
    return PackedEntry(name, kind, (rows, columns), scale.dtype, {"weight": weight, "scale": scale}, {})


def _kind(rows: int, columns: int, scale: tuple[int, ...], block: tuple[int, ...] | None) -> str | None:
    """Return the format's name for a scale of this shape, None if it is none."""
    if block and all(0 < side < 10**6 for side in block) and scale == (ceil(rows / block[0]), ceil(columns / block[1])):
        return f"fp8-{block[0]}x{block[1]}"
    if all(side == 1 for side in scale):
        return "fp8-tensor" if rows > 1 or not scale else "fp8-row"
    if scale in ((rows,), (rows, 1)):
        return "fp8-row"
    return None
