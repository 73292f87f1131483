"""Which weights of a checkpoint are quantized, and in which format?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.writer import NewTensor
from trimtab.errors import CheckpointError
from trimtab.formats import bitsandbytes, compressed_tensors, float4, float8, gguf, mobile, transposed
from trimtab.formats.record import PackedEntry, float_dtype, packed_bytes, refuse, stored_format

Read = Callable[[Checkpoint], tuple[dict[str, TensorEntry], dict[str, PackedEntry]]]
# quant_method of config.json -> what reads that layout of files.
READERS: Mapping[str, Read] = {
    "bitsandbytes": bitsandbytes.read, "compressed-tensors": compressed_tensors.read, "fp8": float8.read,
    "fbgemm_fp8": float8.read, "awq": transposed.read_awq, "gptq": transposed.read_gptq,
    "gemma": mobile.read, "modelopt": float4.read_modelopt, "gguf": gguf.read,
}  # fmt: skip
# Family of formats -> what makes the tensors and the configuration of files that are written in them.
WRITERS = {"codebook": (bitsandbytes.written_tensors, bitsandbytes.written_config)}
# Side tensors that only quantized files have: a file without a quantization_config does not declare their meaning.
MARKS = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight", ".embedding_quantized")
# What no reader leaves over: a weight would be computed from its integers, or without a part of what it means.
LEFT_OVER = (
    *MARKS, ".qzeros", ".scales", ".g_idx", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale",
    ".weight_scale_2", ".embedding_scale",
)  # fmt: skip
# Scales of a rounded KV cache, of keys and values as a whole or of each head: trimtab's cache is not rounded.
CACHE = (".q_scale", ".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
INTEGERS = ("int8", "uint8", "int32")
HINT = "Use the unquantized checkpoint of the same model: trimtab quantizes while it loads"


def split_packed(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    """Return (plain tensors, packed weights by name); side tensors are in neither.

    Errors: CheckpointError with every inconsistent weight, for a format that is not read, and for a config that declares
    quantization although the files are not quantized.
    """
    if __name__ not in checkpoint.made:
        checkpoint.made[__name__] = _split(checkpoint)
    plain, packed = checkpoint.made[__name__]
    return dict(plain), dict(packed)


def _split(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    method = quant_method(checkpoint.quantization)
    if method is None:
        marked = next((name for name in checkpoint.tensors if name.endswith(MARKS)), None)
        if marked is not None:
            raise CheckpointError(
                "is quantized, but config.json has no quantization_config", path=checkpoint.path, tensor_name=marked,
                hint="Get config.json of the same release of the model again",
            )  # fmt: skip
        is_plain = not any(map(bitsandbytes.SIDE.search, checkpoint.tensors))
        plain, packed = (dict(checkpoint.tensors), {}) if is_plain else bitsandbytes.read(checkpoint)
    else:
        read = READERS.get(method)
        if read is None:
            named = f"is quantized with {method!r:.60}" if method else "is quantized, and config.json names no quant_method"
            raise CheckpointError(f"{named}; {', '.join(READERS)} are read", path=checkpoint.path, hint=HINT)
        plain, packed = read(checkpoint)
        plain = {name: entry for name, entry in plain.items() if not name.endswith(CACHE)}
    refuse(checkpoint, list(_left_over(plain, has_sides=method in (None, "bitsandbytes"))))
    if method is not None and checkpoint.has_weights and not packed:
        raise CheckpointError(
            "config.json says quantized, but no weight is packed", path=checkpoint.path,
            hint="Remove quantization_config from config.json if the weights are full precision",
        )  # fmt: skip
    return plain, packed


def _left_over(plain: Mapping[str, TensorEntry], *, has_sides: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, what is wrong) of tensors that are no plain weights and that no reader took. has_sides: whether tensors named as
    bitsandbytes' may be plain: what its reader left."""
    for name, entry in plain.items():
        if entry.dtype.startswith("float8") or (name.endswith("weight") and entry.dtype in INTEGERS):
            yield name, f"{entry.dtype} without its quantization statistics"
        elif name.endswith(LEFT_OVER) or (not has_sides and bitsandbytes.SIDE.search(name)):
            yield name, "belongs to a quantized weight that is not read"


def quant_method(quantization: Mapping[str, Any] | None) -> str | None:
    """Return the method that a quantization_config names, "" if it names none; old configs of bitsandbytes do not name it."""
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        return "bitsandbytes"
    return str(method or "")


def format_names(packed: Mapping[str, PackedEntry]) -> list[str]:
    """Return the formats of packed weights by their names in plans, that of the most values first, floats and tables last."""
    values: dict[str, int] = {}
    linear = {entry.kind for entry in packed.values() if not entry.state.get("is_table")}
    for entry in packed.values():
        values[entry.kind] = values.get(entry.kind, 0) + prod(entry.shape)
    return sorted(values, key=lambda name: (name not in linear, float_dtype(name) is not None, -values[name], name))


def formats_of(packed: Mapping[str, PackedEntry]) -> list[dict[str, Any]]:
    """Return the formats of packed weights in the order of `format_names`: name, number of weights, bits per value, whether tables
    alone have it; JSON-ready."""
    found = []
    for name in format_names(packed):
        entries = [entry for entry in packed.values() if entry.kind == name]
        nbytes = sum(packed_bytes(entry.shape, name, entry.dtype) for entry in entries)
        bits = 8 * nbytes / sum(prod(entry.shape) for entry in entries)
        is_table = all(entry.state.get("is_table") for entry in entries)
        found.append({"name": name, "weights": len(entries), "bits_per_value": round(bits, 3), "is_table": is_table})
    return found


def written_tensors(kind: str, name: str, shape: tuple[int, ...], dtype: str) -> list[NewTensor]:
    """Return the file tensors of a weight that is written in a format (one of `REQUANTIZE`). dtype: of its values."""
    return WRITERS[stored_format(kind).family][0](kind, name, shape, dtype)


def written_config(kind: str, compute_dtype: str) -> dict[str, Any]:
    """Return the quantization_config of files in a format."""
    return WRITERS[stored_format(kind).family][1](kind, compute_dtype)
