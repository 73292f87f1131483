"""Which tensors of AWQ and GPTQ checkpoints belong together: integers packed into int32, stored [D_in, D_out]?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError
from trimtab.formats.record import SCALE_DTYPES, PackedEntry, Split, gathered, split

PARTS = ("qweight", "qzeros", "scales", "g_idx")
MOST_GROUP = 10**6


def read_awq(checkpoint: Checkpoint) -> Split:
    """Return (plain tensors, packed weights by name) of AWQ files. Errors: CheckpointError. AWQ (`version` gemm): `X.qweight`
    [D_in, D_out / 8] with the eight outputs of an int32 in the order 0 2 4 6 1 3 5 7, `X.qzeros` [groups, D_out / 8] in the same
    order, `X.scales` [groups, D_out]. Source: AutoAWQ 0.2.9, utils/packing_utils.py."""
    settings = checkpoint.quantization or {}
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refused(checkpoint, f"is packed for AWQ's {version[:50]!r}; 'gemm' is read")
    return _read(checkpoint, _bits(checkpoint, settings, "w_bit", (4,)), settings, "awq")


def read_gptq(checkpoint: Checkpoint) -> Split:
    """Return (plain tensors, packed weights by name) of GPTQ files. Errors: CheckpointError. GPTQ: `X.qweight` [D_in bits / 32,
    D_out], `X.qzeros` [groups, D_out bits / 32] with one less than the zero points (not in gptq_v2), `X.scales` [groups, D_out],
    `X.g_idx` [D_in], the group of each input. Source: GPTQModel 4, nn_modules/qlinear."""
    settings = checkpoint.quantization or {}
    form = str(settings.get("checkpoint_format") or "gptq")
    if settings.get("dynamic"):
        raise _refused(checkpoint, "has other settings for some modules (dynamic), which are not read")
    if settings.get("is_marlin_format"):
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise _refused(checkpoint, f"is packed as {form[:50]!r}; 'gptq' and 'gptq_v2' are read")
    return _read(checkpoint, _bits(checkpoint, settings, "bits", (4, 8)), settings, form)


def _refused(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        why, path=checkpoint.path, hint="Use the unquantized checkpoint of the same model: trimtab quantizes while it loads"
    )


def _bits(checkpoint: Checkpoint, settings: Mapping[str, Any], other: str, known: tuple[int, ...]) -> int:
    bits = settings.get("bits", settings.get(other))
    if bits not in known or isinstance(bits, bool):
        raise _refused(checkpoint, f"has {bits!s:.20} bits a weight; {', '.join(map(str, known))} are read")
    return int(bits)


def _read(checkpoint: Checkpoint, bits: int, settings: Mapping[str, Any], layout: str) -> Split:
    size = settings.get("group_size", settings.get("q_group_size", 128))

    weight = partial(_weight, bits=bits, size=size, layout=layout, desc_act=bool(settings.get("desc_act")))
    found = gathered(checkpoint.tensors, {"qweight": PARTS})
    return split(checkpoint, [(name, own, weight(name, parts)) for name, _, own, parts in found])


def _weight(
    name: str, parts: Mapping[str, TensorEntry], bits: int, size: object, layout: str, *, desc_act: bool
) -> PackedEntry | str:
    """Return a weight, or what is wrong with its file tensors."""
    missing = [part for part in ("qweight", "qzeros", "scales") if part not in parts]
    if missing:
        return f"has no {', '.join(missing)}"
    each, weight, scale, zero = 32 // bits, parts["qweight"], parts["scales"], parts["qzeros"]
    if weight.dtype != "int32" or len(weight.shape) != 2 or scale.dtype not in SCALE_DTYPES or len(scale.shape) != 2:
        return f"qweight is {weight.dtype} {list(weight.shape)}, scales are {scale.dtype} {list(scale.shape)}; matrices are needed"
    rows, columns = scale.shape[1], weight.shape[0] * (1 if layout == "awq" else each)
    wide = (columns, rows // each) if layout == "awq" else (columns // each, rows)
    if not rows or not columns or rows % each or columns % 2 or weight.shape != wide:
        return f"qweight is {list(weight.shape)}, scales for {rows} outputs need {list(wide)}, and inputs come in pairs"
    if size == -1 or size == columns:
        size = columns
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < MOST_GROUP:
        return f"group_size is {size!s:.20}"
    groups = scale.shape[0]
    if groups != -(-columns // size):
        return f"scales have {groups} groups, {columns} inputs in groups of {size} need {-(-columns // size)}"
    if zero.dtype != "int32" or zero.shape != (groups, rows // each):
        return f"qzeros are {zero.dtype} {list(zero.shape)}, int32 [{groups}, {rows // each}] is needed"
    index = parts.get("g_idx")
    if index is not None and (index.dtype != "int32" or index.shape != (columns,)):
        return f"g_idx is {index.dtype} {list(index.shape)}, int32 [{columns}] is needed"
    if index is None and groups > 1 and desc_act and layout != "awq":
        return "has no g_idx, but config.json says that inputs are in another order (desc_act)"
    # Without the order of activations (desc_act) the index says nothing that the size of groups does not: checked when it is read.
    is_ordered = index is not None and groups > 1 and desc_act
    marks = "-zp" + ("-idx" if is_ordered else "") + ("-f32" if scale.dtype == "float32" else "")
    kind = f"int{bits}-{'row' if groups == 1 else f'g{size}'}{marks}"
    kept = {"weight" if part == "qweight" else part: entry for part, entry in parts.items()}
    return PackedEntry(name, kind, (rows, columns), scale.dtype, kept, {"layout": layout})
