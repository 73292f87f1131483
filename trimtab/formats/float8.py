"""float8 checkpoints: `X.weight` in e4m3 with the factor of each block, row or weight beside it.

`X.weight_scale_inv` [D_out / 128, D_in / 128] (quant_method fp8; also [1] or none of a dimension: the whole weight), or
`X.weight_scale` [D_out, 1], [D_out], [1] or [blocks] (compressed-tensors, fbgemm_fp8). Scales of activations are left out:
trimtab does not round activations. Source: transformers 5.23, integrations/finegrained_fp8.py, Fp8Dequantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.formats.record import SCALE_DTYPES, PackedEntry, refuse

E4M3 = "float8_e4m3fn"
SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")


def read(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    """Return (plain tensors, packed weights by name). Errors: CheckpointError with every wrong weight."""
    problems: list[tuple[str, str]] = []
    packed, used = weights(checkpoint.tensors, problems)
    refuse(checkpoint, problems)
    return {name: entry for name, entry in checkpoint.tensors.items() if name not in used}, packed


def weights(
    tensors: Mapping[str, TensorEntry], problems: list[tuple[str, str]]
) -> tuple[dict[str, PackedEntry], set[str]]:
    """Return (the float8 weights by name, the names of their tensors); what is wrong with a weight is added to the problems."""
    packed: dict[str, PackedEntry] = {}
    used: set[str] = set()
    for name, weight in tensors.items():
        if not weight.dtype.startswith("float8"):
            continue
        stem = name.removesuffix("weight")
        sides = {part: tensors[stem + part] for part in SCALES if stem + part in tensors}
        used |= {name, *(stem + part for part in (*sides, *ACTIVATIONS) if stem + part in tensors)}
        found = _weight(name, weight, sides)
        if isinstance(found, str):
            problems.append((name, found))
        else:
            packed[name] = found
    return packed, used


def _weight(name: str, weight: TensorEntry, sides: Mapping[str, TensorEntry]) -> PackedEntry | str:
    """Return a weight, or what is wrong with its file tensors."""
    if weight.dtype != E4M3:
        return f"is {weight.dtype}; {E4M3} is read"
    if len(weight.shape) != 2 or not all(weight.shape) or not name.endswith("weight"):
        return f"is float8 of shape {list(weight.shape)}, not a matrix"
    if len(sides) != 1:
        return f"float8 needs one of {' and '.join(SCALES)}, has {len(sides)}"
    (scale,) = sides.values()
    stored = f"its scale is {scale.dtype} {list(scale.shape)}"
    if scale.dtype not in SCALE_DTYPES:
        return f"{stored}; {', '.join(SCALE_DTYPES)} are read"
    rows, columns = weight.shape
    kind = _kind(rows, columns, scale.shape)
    if kind is None:
        return f"{stored}, which is no scale of a weight [{rows}, {columns}], of its rows, or of equal blocks"
    return PackedEntry(name, kind, (rows, columns), scale.dtype, None, False, {"weight": weight, "scale": scale}, {})


def _kind(rows: int, columns: int, scale: tuple[int, ...]) -> str | None:
    """Return the format's name for a scale of this shape, None if it is none."""
    if all(side == 1 for side in scale):
        return "fp8-tensor" if rows > 1 or not scale else "fp8-row"
    if scale in ((rows,), (rows, 1)):
        return "fp8-row"
    if len(scale) != 2 or not all(scale):
        return None
    # Blocks are squares of 128 in every published layout; another size has to divide the weight, so that it is certain.
    if scale == (ceil(rows / 128), ceil(columns / 128)):
        return "fp8-128x128"
    if rows % scale[0] or columns % scale[1]:
        return None
    return f"fp8-{rows // scale[0]}x{columns // scale[1]}"
