"""How is a quantized weight stored: its parts, their bytes, and its bits per value?

A format is a name in plans, in the anatomy and in the engine. `stored_format` makes its record from the name. The names:

    none, int8, fp4, nf4, nf4-dq     bitsandbytes (and none: full precision)
    head8                            the 8-bit output head that trimtab makes
    int4-g128, int8-g32, int4-row    integers with one scale for this many values of a row, or for the row; then in any order
                                     -zp (a zero point a group), -idx (the group of each column), -f32 (scales in float32)
    fp8-128x128, fp8-row, fp8-tensor float8 e4m3 with one float32 scale a block, a row or a weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, prod
from typing import Any, Literal

from trimtab.checkpoint.anatomy import DTYPE_BYTES
from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError

# Block sizes of bitsandbytes' 4-bit formats: one scale per 64 weights, and with double quantization one second-level
# scale per 256 of those (bitsandbytes functional.py, quantize_4bit).
WEIGHT_BLOCK = 64
NESTED_BLOCK = 256
# Look-up tables are shared by all weights of one model: 16 and 256 float32 entries.
CODE_BYTES = {"code": 64, "nested_code": 1024}
# An 8-bit head (engine/formats/int8_head.py).
HEAD8 = "head8"
SHOWN_PROBLEMS = 20
# File tensors that are read with the headers, not with the weights.
UNREAD_PARTS = ("quant_state", "weight_shape")
# Weights of files' own formats are dequantized this many values at a time, with at most this many bytes a value in addition: two
# float32 copies of float8 values and of their scales; 4-bit values, the same in a byte each and in the type of the scales.
DEQUANTIZED_VALUES = 2**20
DEQUANTIZED_BYTES = 10
# Bytes a value that these operations read and write in a pass, counted over the operations of engine/formats/grouped.py.
DEQUANTIZED_TRAFFIC = 18
# Of Gemma 4's mobile weights: values dequantized at a time, and of a product of a large weight.
MOBILE_VALUES, MOBILE_PIECE_VALUES = 2**22, 2**25
# Types of scales that are read.
SCALE_DTYPES = ("bfloat16", "float16", "float32")

Family = Literal["none", "codebook", "int8", "head8", "grouped", "float8", "mobile", "float4", "ggml"]
# Families that only torch's operations read.
OWN = ("grouped", "float8", "mobile", "float4", "ggml")
_PLAIN: dict[str, Family] = {
    "none": "none", "int8": "int8", HEAD8: "head8", "fp4": "codebook", "nf4": "codebook", "nf4-dq": "codebook",
    "nvfp4-g16": "float4", "mxfp4-g32": "float4",
}  # fmt: skip
_GROUPED = re.compile(r"int([48])-(?:g([1-9]\d{0,5})|row)((?:-zp|-idx|-f32)*)\Z", re.ASCII)
# ggml's types of matrices -> (values, bytes) of a block along a row. Source: ggml-common.h.
GGML_BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "f16": (1, 2), "bf16": (1, 2), "f32": (1, 4),
}  # fmt: skip
GGML_FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
# Of the types that kernels read: part -> bytes of it in a block (engine/formats/ggml.py), together those of the file.
GGML_PARTS: dict[str, dict[str, int]] = {
    "q4_0": {"weight": 16, "scale": 2}, "q4_1": {"weight": 16, "scale": 4}, "q8_0": {"weight": 32, "scale": 2},
    "q4_k": {"weight": 128, "scale": 16}, "q5_k": {"weight": 160, "scale": 16}, "q6_k": {"weight": 192, "scale": 16, "outer": 2},
}  # fmt: skip
INDEXED = "-idx"
_MOBILE = re.compile(r"mobile([248])-(?:g([1-9]\d{0,5})|row)(-a8)?\Z", re.ASCII)
_FLOAT8 = re.compile(r"fp8-(?:([1-9]\d{0,5})x([1-9]\d{0,5})|row|tensor)\Z", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """One way to store a weight [D_out, D_in].

    name: in plans. family: which code reads it (engine/formats). bits: of one value. group: values of a row that share a scale, 0
    for the whole row; of float8 blocks, block is (rows, columns), (1, 0) a row, (0, 0) the weight. has_zero, has_index: whether
    groups have a zero point, and columns the number of their group. scale_bytes: of one scale. has_rounding: whether inputs and
    outputs of its layer are rounded to 8 bits.
    """

    name: str
    family: Family
    bits: int
    group: int = 0
    block: tuple[int, int] = (0, 0)
    has_zero: bool = False
    has_index: bool = False
    scale_bytes: int = 4
    has_rounding: bool = False

    @property
    def is_dequantized(self) -> bool:
        """Whether a product without a separate kernel makes the whole weight in 16 bits."""
        return self.family in ("codebook", *OWN)

    @property
    def is_own(self) -> bool:
        """Whether only torch's operations read it: every product dequantizes the weight, also of one row."""
        return self.family in OWN

    @property
    def shares_tables(self) -> bool:
        """Whether a table that shares its weight with a head is kept in 16 bits; else such a file is refused."""
        return self.family == "ggml"

    @property
    def has_rows(self) -> bool:
        """Whether each of its parts has a row for each row of the weight: a table's rows can be looked up."""
        if self.family == "float8":
            return self.block[0] == 1
        is_whole = self.has_index or self.has_rounding or self.name == "nvfp4-g16"
        return self.family in ("none", "head8", "grouped", "mobile", "float4", "ggml") and not is_whole

    @property
    def has_file_rows(self) -> bool:
        """Whether a file's tensors are its parts, so that a table's rows can be read from there."""
        return self.family in ("mobile", "ggml")

    @property
    def layout(self) -> str | None:
        """Its name to trimtab's kernels (`LAYOUTS` in engine/cuda/launch_config.py), None if they do not read it."""
        if self.family == "codebook":
            return "nf4"
        if self.family == "float8":
            return "fp8" if self.block[1] in (0, 64, 128) or self.block[1] % 256 == 0 else None
        if self.family == "ggml":
            return self.name if self.name in GGML_PARTS else None
        if self.family == "float4":
            return "nvfp4" if self.group == 16 else None
        if self.family == "mobile":
            return None if self.group else f"mobile{self.bits}"
        is_known = self.group in (32, 64, 128) or self.group % 256 == 0
        if self.family != "grouped" or self.bits != 4 or self.has_index or not is_known:
            return None
        if self.has_zero and self.scale_bytes == 4:  # a scale of 16 bits leaves room for its zero point
            return None
        return "int4" + "-2" * (self.group == 32) + "-zp" * self.has_zero

    @property
    def has_exact_scale(self) -> bool:
        """Whether the rows of a table are multiplied with its own factor as it is, not rounded to their type."""
        return self.family == "mobile"

    def is_rounded(self, dtype: str) -> bool:
        """Whether values that stand in the file as they are become others in a type."""
        return dtype not in (GGML_FLOATS.get(self.name.removesuffix(INDEXED), dtype), "float32")

    def at_once(self, numel: int) -> tuple[int, int]:
        """Return, of a weight of this many values, (how many a product has in memory, how many are dequantized at a time)."""
        if self.family == "mobile":
            return min(numel, MOBILE_PIECE_VALUES), MOBILE_VALUES
        return numel, DEQUANTIZED_VALUES

    def reading_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes in addition to the file tensors of a weight while its values are rearranged."""
        if self.family == "ggml":  # the parts, while the file's blocks are there
            return sum(self.parts(shape, "").values())
        if self.family != "grouped":
            return 0
        return prod(shape) * (3 if self.has_zero else 2 if self.bits == 4 else 1)

    @property
    def tables(self) -> tuple[str, ...]:
        """The look-up tables (CODE_BYTES) that its weights share."""
        if self.family != "codebook":
            return ()
        return tuple(CODE_BYTES) if self.name == "nf4-dq" else ("code",)

    def why_not_stacked(self, rows: Sequence[int]) -> str | None:
        """Return why matrices of this format are not kept packed in a stack of experts, None if they are. rows: of the matrices
        of one expert, whose outputs follow each other there."""
        if self.family not in ("grouped", "float8", "float4", "ggml"):
            return "is not read in stacks"
        if self.name in GGML_FLOATS:
            return "is not packed"
        if self.has_index:
            return "has an order of inputs for each matrix"
        if len(rows) > 1 and ((self.family == "float4" and self.group == 16) or (self.family == "float8" and not self.block[0])):
            return "has a scale for each whole matrix"
        cut = next((count for count in rows[:-1] if self.family == "float8" and count % self.block[0]), None)
        return None if cut is None else f"has blocks of {self.block[0]} rows, which {cut} rows cut"

    def groups(self, columns: int) -> int:
        """Return the number of groups in a row of this many values."""
        return ceil(columns / self.group) if self.group else 1

    def parts(self, shape: Sequence[int], dtype: str) -> dict[str, int]:
        """Return the bytes of each part of a weight, by part name. shape: [D_out, D_in] or [E, D_out, D_in]. dtype: of family none.

        An odd number of 4-bit weights is padded to a whole byte, of a row where groups are of rows. Each expert of a stack is
        packed by itself, in bitsandbytes' formats as in its pull request 1965 (472b36a, nn/experts.py: open, and without double
        quantization). Source: bitsandbytes 0.50.2, quantize_4bit (absmax float32, or uint8 with float32 second-level scales and
        one float32 offset) and int8_vectorwise_quant (one float32 per output row).
        """
        numel, rows = prod(shape), prod(shape[:-1])
        if len(shape) == 3:
            return {name: shape[0] * nbytes for name, nbytes in self.parts(shape[1:], dtype).items()}
        if self.family == "none":
            return {"weight": numel * DTYPE_BYTES[dtype]}
        if self.family in ("int8", "head8"):
            return {"weight": numel, "SCB" if self.family == "int8" else "scale": 4 * rows}
        if self.family == "float8":
            high, wide = self.block
            scales = (ceil(rows / high) if high else 1) * (ceil(shape[-1] / wide) if wide else 1)
            return {"weight": numel, "scale": 4 * scales}
        if self.family == "ggml":
            kind = self.name.removesuffix(INDEXED)
            values, nbytes = GGML_BLOCKS[kind]
            found = {name: numel // values * count for name, count in GGML_PARTS.get(kind, {"weight": nbytes}).items()}
            return found | ({"index": 4 * shape[-1]} if self.has_index else {})
        if self.family == "float4":
            whole = {"global": 8} if self.group == 16 else {}
            return {"weight": rows * ceil(shape[-1] / 2), "scale": rows * self.groups(shape[-1])} | whole
        if self.family == "mobile":
            scales = 4 * rows * self.groups(shape[-1])
            return {"weight": rows * ceil(shape[-1] * self.bits / 8), "scale": scales} | (
                {"activation": 8} if self.has_rounding else {}
            )
        if self.family == "grouped":
            groups = rows * self.groups(shape[-1])
            parts = {"weight": rows * ceil(shape[-1] * self.bits / 8), "scale": self.scale_bytes * groups}
            zero = {"zero": groups} if self.has_zero else {}
            return parts | zero | ({"index": 4 * shape[-1]} if self.has_index else {})
        blocks = ceil(numel / WEIGHT_BLOCK)
        if self.name != "nf4-dq":
            return {"weight": (numel + 1) // 2, "absmax": 4 * blocks}
        nested = 4 * ceil(blocks / NESTED_BLOCK)
        return {"weight": (numel + 1) // 2, "absmax": blocks, "nested_absmax": nested, "offset": 4}


@lru_cache(maxsize=256)
def stored_format(name: str) -> StoredFormat:
    """Return the record of a format. Errors: ValueError for a name that is none."""
    if name in _PLAIN:
        family = _PLAIN[name]
        bits = {"none": 16, "codebook": 4, "float4": 4}.get(family, 8)
        return StoredFormat(name=name, family=family, bits=bits, group=int(name[-2:]) if family == "float4" else 0)
    if (found := _GROUPED.match(name)) is not None:
        bits, group, marks = int(found[1]), int(found[2] or 0), found[3].split("-")[1:]
        if len(set(marks)) == len(marks):
            return StoredFormat(
                name=name, family="grouped", bits=bits, group=group, has_zero="zp" in marks, has_index="idx" in marks,
                scale_bytes=4 if "f32" in marks else 2,
            )  # fmt: skip
    if (found := _MOBILE.match(name)) is not None:
        return StoredFormat(
            name=name, family="mobile", bits=int(found[1]), group=int(found[2] or 0), has_rounding=bool(found[3])
        )  # fmt: skip
    if (found := _FLOAT8.match(name)) is not None:
        block = (int(found[1]), int(found[2])) if found[1] else (1, 0) if name == "fp8-row" else (0, 0)
        return StoredFormat(name=name, family="float8", bits=8, block=block)
    if (blocks := GGML_BLOCKS.get(name.removesuffix(INDEXED))) is not None:
        return StoredFormat(name=name, family="ggml", bits=blocks[1] * 8 // blocks[0], has_index=name.endswith(INDEXED))
    raise ValueError(f"unknown weight format: {name!r}")


def is_dequantized(name: str) -> bool:
    """Return `StoredFormat.is_dequantized` of a format by its name."""
    return stored_format(name).is_dequantized


@cache
def rounds_change(name: str) -> bool:
    """Return whether PEFT rounds an adapter's change before it adds it, over weights in a format.

    So it does over bitsandbytes' layers. Weights of other formats are those of a plain Linear in the stock stack
    (`dequantize=True`), where the sum is rounded. Source: PEFT 0.21.2, lora/layer.py Linear.forward, lora/bnb.py
    Linear4bit.forward.
    """
    return stored_format(name).family in ("codebook", "int8", "head8")


def packed_parts(shape: Sequence[int], kind: str, dtype: str) -> dict[str, int]:
    """Return the bytes of each part of a stored weight, by part name. kind: a format's name."""
    return stored_format(kind).parts(shape, dtype)


def packed_bytes(shape: Sequence[int], kind: str, dtype: str) -> int:
    """Return the exact bytes of a stored weight, without padding between its parts."""
    return sum(packed_parts(shape, kind, dtype).values())


@dataclass(frozen=True)
class PackedEntry:
    """One packed weight of a checkpoint.

    kind: "nf4", "fp4", "int8", or a name of `stored_format`. shape, dtype: of the unpacked weight. parts: its file tensors, by
    their names in the layout of the file. state: what else its files say.
    """

    tensor_name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    blocksize: int | None
    nested: bool
    parts: Mapping[str, TensorEntry]
    state: Mapping[str, Any]

    @property
    def read_parts(self) -> dict[str, TensorEntry]:
        """The file tensors that are read with the weights."""
        return {name: part for name, part in self.parts.items() if name not in UNREAD_PARTS}

    @property
    def format_name(self) -> str:
        """The name of its format in plans."""
        return "nf4-dq" if self.kind == "nf4" and self.nested else self.kind


def refuse(checkpoint: Checkpoint, problems: Sequence[tuple[str, str]]) -> None:
    """Raise one CheckpointError for all (weight, what is wrong with it), if there are any."""
    if not problems:
        return
    names = list(dict.fromkeys(name for name, _ in problems))
    shown = "; ".join(f"{name}: {problem}" for name, problem in problems[:SHOWN_PROBLEMS])
    more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    raise CheckpointError(
        f"packed weights are inconsistent ({len(problems)} problems of {len(names)} weights): {shown}{more}",
        path=checkpoint.path, tensor_name=names[0] if len(names) == 1 else None,
    )  # fmt: skip
