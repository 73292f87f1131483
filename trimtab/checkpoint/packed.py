"""What a bitsandbytes checkpoint holds: packed weights grouped with their statistics, by the weight's own name.

4-bit: `X.weight` packed, beside it `X.weight.absmax`, `.quant_map`, with double quantization `.nested_absmax` and
`.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or `__fp4`), a small JSON. int8: `X.weight`, `X.SCB` and
`X.weight_format`. Source: bitsandbytes 0.49.2 to 0.50.2, functional.py QuantState.as_dict; modules.py Linear8bitLt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
MAX_STATE_BYTES = 65536
LOGICAL_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class PackedEntry:
    """One packed weight. shape, dtype: of the weight it stands for. parts: its file tensors. state: the 4-bit JSON."""

    tensor_name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    blocksize: int | None
    nested: bool
    parts: Mapping[str, TensorEntry]
    state: Mapping[str, Any]


def split_packed(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    """Return (plain tensors, packed weights by name); side tensors are in neither.

    Errors: CheckpointError with every inconsistent group.
    """
    plain = dict(checkpoint.tensors)
    packed: dict[str, PackedEntry] = {}
    problems: list[str] = []
    for name in checkpoint.tensors:
        if STATE in name:
            _take(lambda: _four_bit(name, plain), packed, problems)
        elif name.endswith(".SCB"):
            _take(lambda: _eight_bit(name, plain), packed, problems)
    problems += [f"{name}: statistics without a quant_state" for name in plain if _is_stray(name, plain)]
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise CheckpointError(f"{len(problems)} packed weights are inconsistent: {shown}", path=checkpoint.folder)
    return plain, packed


def _take(make: Any, packed: dict[str, PackedEntry], problems: list[str]) -> None:
    try:
        entry = make()
    except ValueError as exc:
        problems.append(str(exc))
        return
    packed[entry.tensor_name] = entry


def _is_stray(name: str, plain: Mapping[str, TensorEntry]) -> bool:
    weight, _, side = name.rpartition(".")
    return side in SIDES and weight in plain and plain[weight].dtype == "uint8"


def _four_bit(state_name: str, plain: dict[str, TensorEntry]) -> PackedEntry:
    name, _, kind = state_name.partition(STATE)
    state_entry = plain.pop(state_name)
    if kind not in KINDS:
        raise ValueError(f"{name}: unknown 4-bit type {kind!r}")
    if name not in plain:
        raise ValueError(f"{name}: a quant_state without its weight")
    state = _read_state(name, state_entry)
    parts = {"weight": plain.pop(name), "quant_state": state_entry}
    for side in SIDES:
        entry = plain.pop(f"{name}.{side}", None)
        if entry is not None:
            parts[side] = entry
    shape, blocksize, dtype = state.get("shape"), state.get("blocksize"), state.get("dtype")
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(f"{name}: bad logical shape {shape!r}")
    if not isinstance(blocksize, int) or blocksize <= 0 or dtype not in LOGICAL_DTYPES or state.get("quant_type") != kind:
        raise ValueError(f"{name}: bad quant_state (blocksize {blocksize!r}, dtype {dtype!r}, {state.get('quant_type')!r})")
    nested = "nested_absmax" in parts
    _check_counts(name, prod(shape), blocksize, nested, parts, state)
    return PackedEntry(name, kind, tuple(shape), str(dtype), blocksize, nested, parts, state)


def _check_counts(
    name: str, numel: int, blocksize: int, nested: bool, parts: Mapping[str, TensorEntry], state: Mapping[str, Any]
) -> None:
    blocks = -(-numel // blocksize)
    # Rounded up to whole values of the storage dtype.
    width = parts["weight"].nbytes // max(prod(parts["weight"].shape), 1)
    wanted = {"weight": -(-(-(-numel // 2)) // max(width, 1)), "absmax": blocks, "quant_map": 16}
    if nested:
        nested_blocksize = state.get("nested_blocksize")
        if not isinstance(nested_blocksize, int) or nested_blocksize <= 0 or "nested_offset" not in state:
            raise ValueError(f"{name}: double quantization without a nested blocksize and offset")
        wanted |= {"nested_absmax": -(-blocks // nested_blocksize), "nested_quant_map": 256}
    for part, count in wanted.items():
        if part not in parts:
            raise ValueError(f"{name}: {part} is missing")
        found = prod(parts[part].shape)
        if found != count:
            raise ValueError(f"{name}: {part} has {found} values, its quant_state needs {count}")
    if parts["absmax"].dtype != ("uint8" if nested else "float32"):
        raise ValueError(f"{name}: absmax is {parts['absmax'].dtype}")


def _read_state(name: str, entry: TensorEntry) -> dict[str, Any]:
    if entry.dtype != "uint8" or entry.nbytes > MAX_STATE_BYTES:
        raise ValueError(f"{name}: quant_state is not a small uint8 tensor")
    try:
        with open(entry.file, "rb") as handle:
            handle.seek(entry.start)
            found = json.loads(handle.read(entry.nbytes).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ValueError(f"{name}: quant_state cannot be read ({exc})") from exc
    if not isinstance(found, dict):
        raise ValueError(f"{name}: quant_state is not a JSON object")
    return found


def _eight_bit(scale_name: str, plain: dict[str, TensorEntry]) -> PackedEntry:
    name = scale_name.removesuffix("SCB") + "weight"
    scale = plain.pop(scale_name)
    plain.pop(f"{name}_format", None)
    if name not in plain:
        raise ValueError(f"{name}: an SCB without its weight")
    weight = plain.pop(name)
    if weight.dtype != "int8" or len(weight.shape) != 2:
        raise ValueError(f"{name}: has an SCB but is {weight.dtype} {list(weight.shape)}")
    if scale.dtype != "float32" or prod(scale.shape) != weight.shape[0]:
        raise ValueError(f"{name}: SCB is {scale.dtype} {list(scale.shape)}, {weight.shape[0]} float32 values are needed")
    parts = {"weight": weight, "SCB": scale}
    return PackedEntry(name, "int8", weight.shape, "float16", None, False, parts, {})
