"""Which weights of compressed-tensors checkpoints are integers, float8 and 4-bit floats, as config.json declares them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.checkpoint.folder import Checkpoint
from trimtab.errors import CheckpointError
from trimtab.formats import float4, float8, grouped
from trimtab.formats.record import Split, declared, left_of, split

# Formats of weights that are not read, with what they are, for the message.
NOT_READ = {
    "mxfp6-pack-quantized": "6-bit floats (MXFP6)", "int-quantized": "8-bit integers with rounded activations",
    "marlin-24": "2:4 sparse weights",
    "sparse-24-bitmask": "2:4 sparse weights", "sparse-bitmask": "sparse weights",
}  # fmt: skip
MOST_GROUPS = 64
HINT = "Use the unquantized checkpoint of the same model, or one in pack-quantized with 4 or 8 bits"


def read(checkpoint: Checkpoint) -> Split:
    """Return (plain tensors, packed weights by name). Errors: CheckpointError for what is not read, and with every wrong weight.
    Source: compressed-tensors 0.20.0, compressors."""
    schemes = list(_schemes(checkpoint))
    blocks = [one["block_structure"] for one in schemes if one.get("block_structure")]
    found = list(float4.weights(checkpoint.tensors))
    found += float8.weights(left_of(checkpoint.tensors, found), blocks[0] if blocks else None)
    found = list(declared(found, [one.get("num_bits") for one in schemes if one.get("type") == "float"]))
    return split(checkpoint, [*found, *grouped.weights(left_of(checkpoint.tensors, found), schemes)])


def _schemes(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Yield the `weights` of each config group. Errors: CheckpointError for formats and transforms that are not read."""
    quantization = checkpoint.quantization or {}
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= MOST_GROUPS:
        raise _refused(checkpoint, f"config_groups is no object of 1 to {MOST_GROUPS} groups", None)
    if quantization.get("transform_config"):
        raise _refused(checkpoint, "its weights are rotated (transform_config)", quantization["transform_config"])
    sparsity = quantization.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise _refused(checkpoint, "its weights are sparse (sparsity_config)", sparsity.get("format"))
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        form = str(group.get("format") or quantization.get("format"))
        if form in NOT_READ:
            raise _refused(checkpoint, f"its weights are {NOT_READ[form]}", form)
        rounded = group.get("input_activations")
        if isinstance(rounded, dict) and rounded.get("type") == "int":
            raise _refused(checkpoint, "its activations are rounded to integers (input_activations)", rounded.get("num_bits"))
        yield weights


def _refused(checkpoint: Checkpoint, why: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"cannot be read: {why}" + ("" if value is None else f": {value!s:.100}"), path=checkpoint.path, hint=HINT
    )
