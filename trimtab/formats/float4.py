"""Which tensors of NVFP4 and MXFP4 checkpoints belong together: 4-bit floats (e2m1) and their scales?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError
from trimtab.formats import float8
from trimtab.formats.record import Found, PackedEntry, Split, declared, gathered, left_of, split

# Type of the scales of groups -> size of a group, name of the format, whether the weight has a scale too.
GROUPS = {float8.E4M3: (16, "nvfp4-g16", True), "uint8": (32, "mxfp4-g32", False)}
# Name of the packed values -> name of the scale of the weight: compressed-tensors, ModelOpt.
LAYOUTS = {"weight_packed": "weight_global_scale", "weight": "weight_scale_2"}
# Scales of activations are left out: trimtab does not round activations.
ACTIVATIONS = ("input_global_scale", "input_scale")
# ModelOpt's algorithm -> bits of the floats that its files have.
ALGORITHMS = {"NVFP4": (4,), "W4A16_NVFP4": (4,), "W4A8_NVFP4_FP8": (4,), "FP8": (8,), "MIXED_PRECISION": (4, 8)}


def read_modelopt(checkpoint: Checkpoint) -> Split:
    """Return (plain tensors, packed weights by name) of ModelOpt's files. Errors: CheckpointError for what is not read, and with
    every wrong weight. ModelOpt: `X.weight`, `X.weight_scale` and `X.weight_scale_2`, by which scales are multiplied; its FP8
    weights have one `X.weight_scale` (float8.py). Source: ModelOpt, torch/quantization/qtensor/nvfp4_tensor.py (read, not run)."""
    algorithm = str((checkpoint.quantization or {}).get("quant_algo"))
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"is quantized by ModelOpt with {algorithm:.60}; {', '.join(ALGORITHMS)} are read", path=checkpoint.path,
            hint="Use the unquantized checkpoint of the same model: trimtab quantizes while it loads",
        )  # fmt: skip
    packed = list(weights(checkpoint.tensors))
    left = left_of(checkpoint.tensors, packed)
    why = "its inputs are scaled (pre_quant_scale), which is not read"
    scaled: list[Found] = [(name, [], why) for name in left if name.endswith("pre_quant_scale")]
    return split(checkpoint, [*declared([*packed, *float8.weights(left, None)], ALGORITHMS[algorithm]), *scaled])


def weights(tensors: Mapping[str, TensorEntry]) -> Iterator[Found]:
    """Yield the weights of 4-bit floats. compressed-tensors: `X.weight_packed` uint8 [D_out, D_in / 2], the first value in the low
    half, `X.weight_scale` float8_e4m3fn [D_out, D_in / 16], and `X.weight_global_scale` float32 [1], by which scales are divided.
    MXFP4 has `X.weight_scale` uint8 [D_out, D_in / 32], powers of 2 (e8m0), alone."""
    marks = {last: (last, "weight_scale", whole, *ACTIVATIONS) for last, whole in LAYOUTS.items()}
    for name, last, own, parts in gathered(tensors, marks):
        if parts[last].dtype == "uint8":
            yield name, own, _weight(name, parts[last], parts, LAYOUTS[last])


def _weight(name: str, weight: TensorEntry, sides: Mapping[str, TensorEntry], whole: str) -> PackedEntry | str:
    """Return a weight, or what is wrong with its file tensors. whole: the name of the scale of the weight."""
    scale, of_all = sides.get("weight_scale"), sides.get(whole)
    size, kind, has_whole = GROUPS[float8.E4M3 if scale is None or scale.dtype not in GROUPS else scale.dtype]
    if scale is None or (of_all is None) == has_whole:
        return f"is uint8 and has no {'weight_scale' if scale is None else whole}, or one too many; NVFP4 and MXFP4 are read"
    if len(weight.shape) != 2 or not prod(weight.shape):
        return f"its values are {list(weight.shape)}, not a matrix"
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    if scale.dtype not in GROUPS or columns % size or scale.shape != (rows, columns // size):
        needed = f"{' or '.join(GROUPS)} [{rows}, {columns / size:g}]"
        return f"weight_scale is {scale.dtype} {list(scale.shape)}, {needed} is needed for [{rows}, {columns}]"
    if of_all is not None and (of_all.dtype != "float32" or prod(of_all.shape) != 1):
        return f"{whole} is {of_all.dtype} {list(of_all.shape)}, one float32 is needed"
    parts = {"weight": weight, "scale": scale} | ({} if of_all is None else {whole: of_all})
    return PackedEntry(name, kind, (rows, columns), "bfloat16", parts, {})
