"""How are the packed weights of bitsandbytes checkpoints grouped with their statistics?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.writer import NewTensor
from trimtab.errors import CheckpointError
from trimtab.formats.record import DOUBLE, NESTED_BLOCK, WEIGHT_BLOCK, PackedEntry, refuse
from trimtab.process.json_file import parse

STATE = "quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
# Names of tensors that only such files have.
SIDE = re.compile(rf"(?:^|\.)(?:{'|'.join(SIDES)}|SCB|weight_format)$|\.{re.escape(STATE)}")
STATE_KEYS = ("quant_type", "blocksize", "dtype", "shape")
NESTED_KEYS = ("nested_blocksize", "nested_dtype", "nested_offset")
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STORAGE_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
LOGICAL_DTYPES = ("float16", "bfloat16", "float32")
MAX_STATE_BYTES = 65536
# Settings of int8 layers that change what they compute -> the values that are read, which are transformers' defaults.
INT8_SETTINGS = {"llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
ROW_FORMAT = 0  # the only entry of LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING that bitsandbytes still reads


@dataclass
class _Group:
    """The file tensors of one weight by their part, and the 4-bit types that its states name."""

    tensor_name: str
    parts: dict[str, TensorEntry] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def want(self, is_right: bool, problem: str) -> bool:
        if not is_right:
            self.problems.append(problem)
        return is_right


def read(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    """Return (plain tensors, packed weights by name) of bitsandbytes' layout. Errors: CheckpointError with every wrong weight, and
    for settings of int8 layers that are not read. 4-bit: `X.weight` packed [n, 1], with `X.weight.absmax`, `.quant_map`,
    `.quant_state.bitsandbytes__nf4` (or `__fp4`), a small JSON, and for double quantization `.nested_absmax` and
    `.nested_quant_map`. int8: `X.weight`, `X.SCB` and `X.weight_format`. Source: bitsandbytes 0.49.2 to 0.50.2, functional.py
    QuantState.as_dict; modules.py Linear8bitLt."""
    plain, groups = _groups(checkpoint.tensors)
    packed: dict[str, PackedEntry] = {}
    for group in groups.values():
        entry = _eight_bit(group) if "SCB" in group.parts or "weight_format" in group.parts else _four_bit(group)
        if entry is not None:
            packed[group.tensor_name] = entry
    problems = [(group.tensor_name, problem) for group in groups.values() for problem in group.problems]
    problems += [
        (name, f"{entry.dtype} without its quantization statistics")
        for name, entry in plain.items() if name.endswith("weight") and entry.dtype in ("uint8", "int8")
    ]  # fmt: skip
    refuse(checkpoint, problems)
    if any(entry.kind == "int8" for entry in packed.values()):
        _check_settings(checkpoint)
    return plain, packed


def _check_settings(checkpoint: Checkpoint) -> None:
    """Refuse int8 layers that compute in another way: outliers of another size in 16 bits, or weights that are quantized again."""
    given = checkpoint.quantization or {}
    for name, wanted in INT8_SETTINGS.items():
        if (value := given.get(name)) is not None and value != wanted:
            raise CheckpointError(
                f"its int8 layers have {name} {value!r:.40}, {wanted!r} is read", path=checkpoint.path,
                hint=f"Set {name} to {json.dumps(wanted)} in config.json to compute with it, or use the unquantized checkpoint",
            )  # fmt: skip


def _groups(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], dict[str, _Group]]:
    """Return the tensors that are in no group, and the groups by their weight's name."""
    groups: dict[str, _Group] = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        weight, part, kind = _place(name, tensors)
        if not part:
            continue
        used.add(name)
        group = groups.setdefault(weight, _Group(weight))
        if part == "quant_state":
            group.kinds.append(kind)
        group.parts[part] = entry
    for weight, group in groups.items():
        if weight in tensors:
            used.add(weight)
            group.parts["weight"] = tensors[weight]
    return {name: entry for name, entry in tensors.items() if name not in used}, groups


def _place(name: str, tensors: Mapping[str, TensorEntry]) -> tuple[str, str, str]:
    """Return (weight name, part, 4-bit type) of a side tensor; the part is empty for any other tensor."""
    weight, marker, kind = name.partition("." + STATE)
    if marker:
        return weight, "quant_state", kind
    stem, _, last = name.rpartition(".")
    if last in SIDES and (stem in tensors or stem.endswith("weight")):
        return stem, last, ""
    if last in ("SCB", "weight_format"):
        return f"{stem}.weight" if stem else "weight", last, ""
    return name, "", ""


# 4-bit ----------------------------------------------------------------------------------------------------------------


def _four_bit(group: _Group) -> PackedEntry | None:
    parts = group.parts
    missing = [part for part in ("weight", "absmax", "quant_map", "quant_state") if part not in parts]
    group.want(not missing, f"has no {', '.join(missing)}")
    if "quant_state" not in parts:
        return None
    kind = group.kinds[0]
    group.want(len(group.kinds) == 1, f"has {len(group.kinds)} quant_states ({', '.join(group.kinds)})")
    if not group.want(kind in KINDS, f"unknown 4-bit type {kind!r} (known: {', '.join(KINDS)})"):
        return None
    try:
        state = _read_state(parts["quant_state"])
    except (OSError, ValueError) as exc:
        group.problems.append(f"quant_state cannot be read ({exc})")
        return None
    if not isinstance(state, dict):
        group.problems.append("quant_state is not a JSON object")
        return None
    nested = "nested_absmax" in parts or "nested_quant_map" in parts or any(key in state for key in NESTED_KEYS)
    if not _check_state(group, state, kind, nested):
        return None
    _check_parts(group, math.prod(state["shape"]), state, nested)
    return PackedEntry(group.tensor_name, kind + DOUBLE * nested, tuple(state["shape"]), state["dtype"], parts, state)


def _read_state(entry: TensorEntry) -> Any:
    """Return the JSON of a quant_state. Errors: OSError and ValueError with the reason why it cannot be read."""
    if entry.dtype != "uint8" or entry.nbytes > MAX_STATE_BYTES:
        raise ValueError(f"it is {entry.dtype} of {entry.nbytes} B, not a small uint8 tensor")
    with open(entry.file, "rb") as handle:
        handle.seek(entry.start)
        return parse(handle.read(entry.nbytes), "quant_state")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_state(group: _Group, state: Mapping[str, Any], kind: str, nested: bool) -> bool:
    """Return whether the state's values can be used; errors are added to the group's problems."""
    before = len(group.problems)
    keys = STATE_KEYS + (NESTED_KEYS if nested else ())
    unknown, absent = sorted(state.keys() - set(keys)), [key for key in keys if key not in state]
    group.want(not unknown, f"quant_state has unknown keys: {', '.join(unknown)}")
    if not group.want(not absent, f"quant_state has no {', '.join(absent)}"):
        return False
    shape, dtype, offset = state["shape"], state["dtype"], state.get("nested_offset")
    group.want(state["quant_type"] == kind, f"quant_state says {state['quant_type']!r}, its name says {kind!r}")
    is_matrix = isinstance(shape, list) and len(shape) == 2 and all(map(_is_count, shape))
    group.want(is_matrix, f"logical shape {shape!r} is not a matrix")
    group.want(dtype in LOGICAL_DTYPES, f"logical dtype {dtype!r} (known: {', '.join(LOGICAL_DTYPES)})")
    for key in ("blocksize", "nested_blocksize") if nested else ("blocksize",):
        size = state[key]
        group.want(_is_count(size) and size in BLOCKSIZES, f"{key} {size!r} is not one of {BLOCKSIZES}")
    if nested:
        nested_dtype = state["nested_dtype"]
        group.want(nested_dtype == "float32", f"nested_dtype {nested_dtype!r} is not 'float32'")
        is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool) and math.isfinite(offset)
        group.want(is_number, f"nested_offset {offset!r} is not a finite number")
    return len(group.problems) == before


def _check_parts(group: _Group, numel: int, state: Mapping[str, Any], nested: bool) -> None:
    """Add a problem for each part with another type or size than the state needs."""
    blocks = -(-numel // state["blocksize"])
    expected: dict[str, tuple[str, int]] = {
        "absmax": ("uint8" if nested else "float32", blocks), "quant_map": ("float32", 16),
    }  # fmt: skip
    if nested:
        nested_blocks = -(-blocks // state["nested_blocksize"])
        expected |= {"nested_absmax": ("float32", nested_blocks), "nested_quant_map": ("float32", 256)}
        missing = [part for part in ("nested_absmax", "nested_quant_map") if part not in group.parts]
        group.want(not missing, f"has no {', '.join(missing)}")
    for part, (dtype, count) in expected.items():
        if (entry := group.parts.get(part)) is not None:
            stored = f"{part} is {entry.dtype} {list(entry.shape)}"
            is_right = entry.dtype == dtype and entry.shape == (count,)
            group.want(is_right, f"{stored}, its quant_state needs {dtype} [{count}]")
    if (weight := group.parts.get("weight")) is None:
        return
    stored = f"weight is {weight.dtype} {list(weight.shape)}"
    width = STORAGE_BYTES.get(weight.dtype)
    if width is None:
        group.problems.append(f"{stored} (packed values are stored as {', '.join(STORAGE_BYTES)})")
        return
    count = -(-numel // (2 * width))  # two values per byte, rounded up to whole values of the storage dtype
    group.want(weight.shape == (count, 1), f"{stored}, its quant_state needs [{count}, 1]")


# int8 -----------------------------------------------------------------------------------------------------------------


def _eight_bit(group: _Group) -> PackedEntry | None:
    parts = group.parts
    missing = [part for part in ("weight", "SCB") if part not in parts]
    sides = [part for part in (*SIDES, "quant_state") if part in parts]
    group.want(not missing, f"has no {', '.join(missing)}")
    group.want(not sides, f"has 8-bit and 4-bit statistics ({', '.join(sides)})")
    if "weight_format" in parts:
        row_format = _format_of(parts["weight_format"])
        group.want(row_format == ROW_FORMAT, f"weight_format is {row_format}, only {ROW_FORMAT} (rows) is known")
    if missing:
        return None
    weight, scale = parts["weight"], parts["SCB"]
    is_matrix = weight.dtype == "int8" and len(weight.shape) == 2 and all(weight.shape)
    if not group.want(is_matrix, f"has an SCB but is {weight.dtype} {list(weight.shape)}, not an int8 matrix"):
        return None
    is_right = scale.dtype == "float32" and scale.shape == weight.shape[:1]
    group.want(is_right, f"SCB is {scale.dtype} {list(scale.shape)}, float32 [{weight.shape[0]}] is needed")
    # float16: bitsandbytes casts to it before it quantizes (Int8Params._quantize).
    return PackedEntry(group.tensor_name, "int8", weight.shape, "float16", {"weight": weight, "SCB": scale}, {})


def _format_of(entry: TensorEntry) -> int | str:
    """Return the format number, or the reason why there is none."""
    if entry.dtype != "uint8" or entry.nbytes != 1:
        return f"{entry.dtype} {list(entry.shape)}"
    try:
        with open(entry.file, "rb") as handle:
            handle.seek(entry.start)
            return int.from_bytes(handle.read(1), "little")
    except OSError as exc:
        return f"unreadable ({exc.strerror})"


# Files that are written -----------------------------------------------------------------------------------------------


def state_json(shape: tuple[int, ...], dtype: str, *, offset: float | None) -> bytes:
    """Return bitsandbytes' quant_state, for double quantization padded to one length for every offset.

    Source: bitsandbytes 0.50.2, functional.py QuantState.as_dict: these keys in this order.
    """
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": WEIGHT_BLOCK, "dtype": dtype, "shape": list(shape)}
    if offset is None:
        return json.dumps(state).encode()
    nested = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
    longest = len(json.dumps(state | nested | {"nested_offset": -1.2345678901234567e-300}))
    return json.dumps(state | nested | {"nested_offset": offset}).encode().ljust(longest + 2)


def written_tensors(kind: str, name: str, shape: tuple[int, ...], dtype: str) -> list[NewTensor]:
    """Return the file tensors of one NF4 weight, as bitsandbytes writes them. dtype: of its values."""
    nested = kind.endswith(DOUBLE)
    numel = shape[0] * shape[1]
    blocks = -(-numel // WEIGHT_BLOCK)
    tensors = [
        NewTensor(name, "uint8", (-(-numel // 2), 1)),
        NewTensor(f"{name}.absmax", "uint8" if nested else "float32", (blocks,)),
        NewTensor(f"{name}.quant_map", "float32", (16,)),
    ]
    if nested:
        tensors += [
            NewTensor(f"{name}.nested_absmax", "float32", (-(-blocks // NESTED_BLOCK),)),
            NewTensor(f"{name}.nested_quant_map", "float32", (256,)),
        ]
    size = len(state_json(shape, dtype, offset=0.0 if nested else None))
    return [*tensors, NewTensor(f"{name}.{STATE}nf4", "uint8", (size,))]


def written_config(kind: str, compute_dtype: str) -> dict[str, Any]:
    """Return the config that transformers' BitsAndBytesConfig writes for these weights. Source: quantization_config.py,
    to_dict."""
    return {
        "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind.endswith(DOUBLE),
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
    }  # fmt: skip
