"""Which tensors of Gemma 4 mobile checkpoints belong together: weights of 2, 4 and 8 bits, tables, scales of activations?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.names import Matcher, PatternError, shown
from trimtab.errors import CheckpointError
from trimtab.formats.record import PackedEntry, Split, gathered, split

TABLE = ("embedding_quantized", "embedding_scale")
LINEAR = ("weight", "weight_scale")
ACTIVATIONS = ("input_activation_scale", "output_activation_scale")
CACHE = (".k_cache_scale", ".v_cache_scale")
BITS = (2, 4, 8)
HINT = "Get config.json of the same release of the model again"


def read(checkpoint: Checkpoint) -> Split:
    """Return (plain tensors, packed weights by name). Errors: CheckpointError with every wrong weight.

    `X.weight` uint8 [D_out, D_in bits / 8], 2 or 4 bits plus half the range, the first value in the lowest bits, or int8 [D_out,
    D_in]; `X.weight_scale` float32 [D_out, 1]; `X.input_activation_scale`, `X.output_activation_scale` float32, 0 where not
    calibrated. A table: `X.embedding_quantized`, `X.embedding_scale` float32 [V, groups]. Source: transformers 5.23,
    integrations/gemma_quant.py.
    """
    found = list(gathered(checkpoint.tensors, {TABLE[0]: TABLE, LINEAR[1]: (*LINEAR, *ACTIVATIONS)}))
    bits_of = _bits(checkpoint, [name for name, *_ in found])
    weights = [(name, own, _weight(name, parts, bits_of[name], is_table=last == TABLE[0])) for name, last, own, parts in found]
    return split(checkpoint, weights, (name for name in checkpoint.tensors if name.endswith(CACHE)))


def _bits(checkpoint: Checkpoint, weights: Sequence[str]) -> dict[str, object]:
    """Return the bits of weights by name: those of the pattern found leftmost in a module's name, as transformers joins them.
    Errors: CheckpointError for patterns that are none, or too much work to match."""
    settings = checkpoint.quantization or {}
    default, listed = settings.get("num_bits", 4), settings.get("module_quant_configs") or {}
    if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise CheckpointError("module_quant_configs is no object of objects", path=checkpoint.path, hint=HINT)
    modules = {name: name.removesuffix(".weight") for name in weights}
    try:
        patterns = Matcher(list(modules.values())).leftmost(listed)
    except PatternError as exc:
        which = "" if exc.pattern is None else f": {shown(exc.pattern)}"
        raise CheckpointError(f"module_quant_configs{which} {exc}", path=checkpoint.path, hint=HINT) from exc
    return {name: listed[patterns[one]].get("num_bits", default) if one in patterns else default for name, one in modules.items()}


def _weight(name: str, parts: Mapping[str, TensorEntry], bits: object, *, is_table: bool) -> PackedEntry | str:
    """Return a weight, or what is wrong with its file tensors."""
    data, side = TABLE if is_table else LINEAR
    weight, scale = parts.get(data), parts.get(side)
    if weight is None or scale is None:
        return f"has no {data if weight is None else side}"
    if bits not in BITS or isinstance(bits, bool) or not isinstance(bits, int):
        return f"has {bits!s:.20} bits a value in config.json; {', '.join(map(str, BITS))} are read"
    dtype = "int8" if bits == 8 else "uint8"
    if weight.dtype != dtype or len(weight.shape) != 2 or not prod(weight.shape):
        return f"{data} is {weight.dtype} {list(weight.shape)}; config.json says {bits} bits, a matrix of {dtype}"
    rows, columns = weight.shape[0], weight.shape[1] * (8 // bits)
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if scale.dtype != "float32" or scale.shape[:1] != (rows,) or not groups or columns % groups or (groups > 1 and not is_table):
        needed = f"float32 [{rows}, {f'groups of {columns}' if is_table else 1}]"
        return f"{side} is {scale.dtype} {list(scale.shape)}, {needed} is needed"
    rounding = {part: parts[part] for part in ACTIVATIONS if part in parts}
    wrong = next((part for part, entry in rounding.items() if entry.dtype != "float32" or prod(entry.shape) != 1), None)
    if wrong is not None:
        return f"{wrong} is {rounding[wrong].dtype} {list(rounding[wrong].shape)}, one float32 is needed"
    kind = f"mobile{bits}-{'row' if groups == 1 else f'g{columns // groups}'}{'-a8' if rounding else ''}"
    kept = {"weight": weight, "scale": scale} | rounding
    return PackedEntry(name, kind, (rows, columns), "bfloat16", kept, {"is_table": is_table})
