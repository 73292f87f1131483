"""How is a quantized weight stored: its parts, their bytes, and its bits per value?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import ceil, inf, prod
from typing import Any, ClassVar, Literal

from trimtab.checkpoint.anatomy import DTYPE_BYTES
from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError, RequestError

# bitsandbytes' 4-bit formats, and what the names of those with packed scales end with.
CODEBOOKS, DOUBLE = ("nf4", "nf4-dq", "fp4", "fp4-dq"), "-dq"
# Block sizes of bitsandbytes' 4-bit formats: one scale per 64 weights, and with double quantization one second-level
# scale per 256 of those (bitsandbytes functional.py, quantize_4bit).
WEIGHT_BLOCK = 64
NESTED_BLOCK = 256
# Look-up tables are shared by all weights of one model: 16 and 256 float32 entries.
CODE_BYTES = {"code": 64, "nested_code": 1024}
# An 8-bit head (engine/formats/int8_head.py).
HEAD8 = "head8"
# It is made in pieces of this many values, each at most 13 bytes: as read, twice in float32 and once in 8 bits.
HEAD_PIECE_VALUES = 2 * 2**20
# Rows of stacks of experts that loading packs are multiples of it, and those that kernels read.
STACK_MULTIPLE = WEIGHT_BLOCK
# Of the choices for experts, the format of a stack where it has another name.
MADE_STACKS = {"int8": "q8_0"}
UNSTACKED_ORDER, UNSTACKED_SCALE = "has an order of inputs for each matrix", "has a scale for each whole matrix"
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
# TYPE and ROW_BYTES of ggml.cuh (the second with the bits above 4 of each value).
_GGML_TYPES = {"q4_0": (40, 16), "q4_1": (41, 32), "q8_0": (80, 8), "q4_k": (4, 16), "q5_k": (5, 48), "q6_k": (6, 82)}
INDEXED = "-idx"
_GROUPED = re.compile(r"int([48])-(?:g([1-9]\d{0,5})|row)((?:-zp|-idx|-f32)*)\Z", re.ASCII)
_MOBILE = re.compile(r"mobile([248])-(?:g([1-9]\d{0,5})|row)(-a8)?\Z", re.ASCII)
_FLOAT8 = re.compile(r"fp8-(?:([1-9]\d{0,5})x([1-9]\d{0,5})|row|tensor)\Z", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """One way to store a weight [D_out, D_in]: in full precision; other families of formats are subclasses.

    name: in plans. bits: of one value. group: values of a row that share a scale, 0 for the whole row; of float8 blocks, block is
    (rows, columns), (1, 0) a row, (0, 0) the weight. has_zero, has_index: whether groups have a zero point, and columns lie in
    another order than the inputs. scale_bytes: of one scale. has_rounding: whether inputs and outputs of its layer are rounded to 8
    bits. has_rows: whether each of its parts has a row for each row of the weight, so that a table's rows can be looked up. tables:
    look-up tables that its weights share, and their bytes.

    To kernels. layout: its name (`LAYOUTS` in formats/kernels.py), None if they do not read it. options: of its header, without
    those of a weight's types. stage_bytes: of scales and zero points of a row in a stage of rows.cu (`Many::ROW_BYTES`).
    most_scale: the largest with which a product of few rows has its weights in float16.

    Of a family. family: which code reads it (engine/formats). is_dequantized: whether a product without a separate kernel makes
    the whole weight in 16 bits. is_own: whether only torch's operations read it: every product dequantizes the weight, also of
    one row. rounds_change: whether PEFT rounds an adapter's change before it adds it. casts_inputs: whether a product has copies
    of its input in other types. layer_operations: of a layer on a CPU, without its product, counted as
    `planner.LINEAR_OPERATIONS`. layer_s: seconds of a layer of a fused step beyond bitsandbytes' 4-bit codes, on an H200
    (bench/results/formats.json). shares_tables: whether a table that shares its weight with a head is kept in 16 bits; else
    such a file is refused. has_file_rows: whether a file's tensors are its parts, so that a table's rows can be read from
    there. has_exact_scale: whether the rows of a table are multiplied with its own factor as it is, not rounded to their type.
    is_coded: whether values are levels times scales (engine/formats/coded_files.py).

    Of a family, to kernels. header: in engine/kernels/cuda, and number: its FORMAT; products of the first are compiled without
    options too. arguments: parts in the order of the kernels. is_cast: whether a weight is unpacked in another type than its own
    by a cast. scales_in_type: whether its scales have the weight's type. rounds_inputs: whether its header rounds inputs and
    outputs, so that activations have the weight's type. expert_outputs: of a block of experts.cu, of gate and of up, and of down.
    """

    name: str
    bits: int = 16
    group: int = 0
    block: tuple[int, int] = (0, 0)
    has_zero: bool = False
    has_index: bool = False
    scale_bytes: int = 4
    has_rounding: bool = False
    has_rows: bool = True
    tables: Mapping[str, int] = field(default_factory=dict, hash=False)
    layout: str | None = None
    options: Mapping[str, int] = field(default_factory=dict, hash=False)
    stage_bytes: int = 0
    most_scale: float = inf

    family: ClassVar[Family] = "none"
    is_dequantized: ClassVar[bool] = False
    is_own: ClassVar[bool] = False
    rounds_change: ClassVar[bool] = False
    casts_inputs: ClassVar[bool] = False
    layer_operations: ClassVar[int] = 0
    layer_s: ClassVar[float] = 0.0
    shares_tables: ClassVar[bool] = False
    has_file_rows: ClassVar[bool] = False
    has_exact_scale: ClassVar[bool] = False
    is_coded: ClassVar[bool] = False
    header: ClassVar[str] = ""
    number: ClassVar[int] = 0
    arguments: ClassVar[tuple[str, str, str, str]] = ("weight", "scale", "", "")
    is_cast: ClassVar[bool] = True
    scales_in_type: ClassVar[bool] = False
    rounds_inputs: ClassVar[bool] = False
    expert_outputs: ClassVar[tuple[int, int]] = (8, 16)

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        """Return the family's record of a name, None if it is none of it."""
        return cls(name=name) if name == "none" else None

    def unpacks(self, shape: Sequence[int], blocks: Sequence[int]) -> bool:
        """Whether the kernel that unpacks weights knows one of this shape. blocks: `Packed.blocks`."""
        is_whole = shape[-1] % 8 == 0 and self.group % 8 == 0 and shape[-1] % (self.group or 1) == 0
        return (self.layout is not None or self.rounds_inputs) and is_whole

    def why_not_blocks(self, blocks: Sequence[int]) -> str | None:
        """Return why products do not read a weight with these blocks, None if they do."""
        return None

    @property
    def stack_multiple(self) -> int:
        """Values of which the rows of experts that are packed while loading must be a multiple."""
        return STACK_MULTIPLE

    def is_rounded(self, dtype: str) -> bool:
        """Whether values that stand in the file as they are become others in a type."""
        return False

    def at_once(self, numel: int) -> tuple[int, int]:
        """Return, of a weight of this many values, (how many a product has in memory, how many are dequantized at a time)."""
        return numel, DEQUANTIZED_VALUES

    def reading_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes in addition to the file tensors of a weight while its values are rearranged."""
        return 0

    def packing_bytes(self, shape: Sequence[int], dense_bytes: int) -> int:
        """Return the bytes on the execution device while a weight is packed, itself included."""
        return dense_bytes + sum(self.parts(shape, "").values())

    def why_not_stacked(self, rows: Sequence[int]) -> str | None:
        """Return why matrices of this format are not kept packed in a stack of experts, None if they are. rows: of the matrices
        of one expert, whose outputs follow each other there."""
        return "is not read in stacks"

    def groups(self, columns: int) -> int:
        """Return the number of groups in a row of this many values."""
        return ceil(columns / self.group) if self.group else 1

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of float8 blocks."""
        high, wide = self.block
        return ceil(rows / high) if high else 1, ceil(columns / wide) if wide else 1

    def parts(self, shape: Sequence[int], dtype: str) -> dict[str, int]:
        """Return the bytes of each part of a weight, by part name. shape: [D_out, D_in] or [E, D_out, D_in]. dtype: of family none.

        An odd number of 4-bit weights is padded to a whole byte, of a row where groups are of rows. Each expert of a stack is
        packed by itself, in bitsandbytes' formats as in its pull request 1965 (472b36a, nn/experts.py: open, and without double
        quantization). Source: bitsandbytes 0.50.2, quantize_4bit (absmax float32, or uint8 with float32 second-level scales and
        one float32 offset) and int8_vectorwise_quant (one float32 per output row).
        """
        if len(shape) == 3:
            return {name: shape[0] * nbytes for name, nbytes in self.parts(shape[1:], dtype).items()}
        return self._parts(prod(shape[:-1]), shape[-1], dtype)

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        return {"weight": rows * columns * DTYPE_BYTES[dtype]}


class _Codebook(StoredFormat):
    """bitsandbytes' 4-bit codes; -dq: their scales are packed too."""

    family, is_dequantized, rounds_change, layer_operations = "codebook", True, True, 36
    header, number, is_coded, is_cast, arguments = "nf4.cuh", 0, True, False, ("weight", "absmax", "nested_absmax", "offset")
    expert_outputs = (16, 16)

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        if name not in CODEBOOKS:
            return None
        is_double = name.endswith(DOUBLE)
        return cls(
            name=name, bits=4, has_rows=False, tables=CODE_BYTES if is_double else {"code": CODE_BYTES["code"]},
            layout="nf4", options={"NESTED": is_double}, stage_bytes=16,
        )  # fmt: skip

    def unpacks(self, shape: Sequence[int], blocks: Sequence[int]) -> bool:
        return prod(shape) % 32 == 0 and all(size >= 32 and size & (size - 1) == 0 for size in blocks)

    def why_not_blocks(self, blocks: Sequence[int]) -> str | None:
        if blocks[0] != WEIGHT_BLOCK:
            return f"blocks of {blocks[0]}, not {WEIGHT_BLOCK}"
        return None if tuple(blocks[1:]) in ((), (NESTED_BLOCK,)) else f"nested blocks of {blocks[1]}, not {NESTED_BLOCK}"

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        weight, blocks = ceil(rows * columns / 2), ceil(rows * columns / WEIGHT_BLOCK)
        if not self.options["NESTED"]:
            return {"weight": weight, "absmax": 4 * blocks}
        return {"weight": weight, "absmax": blocks, "nested_absmax": 4 * ceil(blocks / NESTED_BLOCK), "offset": 4}


class _Int8(StoredFormat):
    """bitsandbytes' 8-bit rows."""

    family, is_coded, rounds_change, casts_inputs, layer_operations = "int8", True, True, True, 64

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        return cls(name=name, bits=8, has_rows=False) if name == "int8" else None

    def packing_bytes(self, shape: Sequence[int], dense_bytes: int) -> int:
        return super().packing_bytes(shape, dense_bytes) + 2 * prod(shape)  # the float16 copy

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        return {"weight": rows * columns, "SCB": 4 * rows}


class _Head8(StoredFormat):
    """The 8-bit output head (engine/formats/int8_head.py), made in pieces, directly in its final memory."""

    family, rounds_change = "head8", True

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        return cls(name=name, bits=8) if name == HEAD8 else None

    def packing_bytes(self, shape: Sequence[int], dense_bytes: int) -> int:
        return 13 * min(HEAD_PIECE_VALUES, prod(shape))

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        return {"weight": rows * columns, "scale": 4 * rows}


class _Own(StoredFormat):
    """A format of files that only torch's operations and trimtab's kernels read."""

    is_dequantized = is_own = True


class _Grouped(_Own):
    """Integers with a scale, and perhaps a zero point, a group."""

    family, header, number, arguments, scales_in_type = "grouped", "int4.cuh", 1, ("weight", "scale", "zero", ""), True

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        if (found := _GROUPED.match(name)) is None or len(set(marks := found[3].split("-")[1:])) < len(marks):
            return None
        bits, group, nbytes = int(found[1]), int(found[2] or 0), 4 if "f32" in marks else 2
        has_zero, has_index = "zp" in marks, "idx" in marks
        is_known = bits == 4 and (group in (32, 64, 128) or group % 256 == 0)
        is_read = is_known and not (has_zero and nbytes == 4)  # a scale of 16 bits leaves room for its zero point
        return cls(
            name=name, bits=bits, group=group, has_zero=has_zero, has_index=has_index, scale_bytes=nbytes, has_rows=not has_index,
            layout="int4" + "-2" * (group == 32) + "-zp" * has_zero if is_read else None,
            options={"GROUP": group, "WIDE_SCALE": nbytes == 4, "ZERO": has_zero},
            stage_bytes=(256 // group if group in (32, 64, 128) else 1) * (nbytes + has_zero),
        )  # fmt: skip

    def reading_bytes(self, shape: Sequence[int]) -> int:
        return prod(shape) * (3 if self.has_zero else 2 if self.bits == 4 else 1)

    def why_not_stacked(self, rows: Sequence[int]) -> str | None:
        return UNSTACKED_ORDER if self.has_index else None

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        groups = rows * self.groups(columns)
        parts = {"weight": rows * ceil(columns * self.bits / 8), "scale": self.scale_bytes * groups}
        zero = {"zero": groups} if self.has_zero else {}
        return parts | zero | ({"index": 4 * columns} if self.has_index else {})


class _Float8(_Own):
    """float8 e4m3 with a scale a block, a row or a weight."""

    family, header, number = "float8", "fp8.cuh", 2

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        if (found := _FLOAT8.match(name)) is None:
            return None
        high, wide = (int(found[1]), int(found[2])) if found[1] else (1, 0) if name == "fp8-row" else (0, 0)
        layout = "fp8" if wide in (0, 64, 128) or wide % 256 == 0 else None
        return cls(name=name, bits=8, block=(high, wide), has_rows=high == 1, layout=layout, options={"HIGH": high, "GROUP": wide})

    def why_not_stacked(self, rows: Sequence[int]) -> str | None:
        if len(rows) > 1 and not self.block[0]:
            return UNSTACKED_SCALE
        cut = next((count for count in rows[:-1] if count % self.block[0]), None)
        return None if cut is None else f"has blocks of {self.block[0]} rows, which {cut} rows cut"

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        return {"weight": rows * columns, "scale": 4 * prod(self.blocks(rows, columns))}


class _Mobile(_Own):
    """Gemma 4's mobile weights; without -a8 of tables."""

    family, has_file_rows, has_exact_scale, rounds_inputs, layer_s = "mobile", True, True, True, 22e-6
    header, number, arguments, is_cast = "mobile.cuh", 4, ("weight", "scale", "", "activation"), False

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        if (found := _MOBILE.match(name)) is None:
            return None
        bits, group, is_layer = int(found[1]), int(found[2] or 0), bool(found[3])
        return cls(
            name=name, bits=bits, group=group, has_rounding=is_layer, has_rows=not is_layer,
            layout=None if group else f"mobile{bits}", options={"BITS": bits, "GROUP": group},
        )  # fmt: skip

    def at_once(self, numel: int) -> tuple[int, int]:
        return min(numel, MOBILE_PIECE_VALUES), MOBILE_VALUES

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        parts = {"weight": rows * ceil(columns * self.bits / 8), "scale": 4 * rows * self.groups(columns)}
        return parts | ({"activation": 8} if self.has_rounding else {})


class _Float4(_Own):
    """4-bit floats: NVFP4 with a scale for the weight too, MXFP4 with exponents."""

    family, header, number, arguments = "float4", "fp4.cuh", 5, ("weight", "scale", "global", "")

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        if (group := {"nvfp4-g16": 16, "mxfp4-g32": 32}.get(name)) is None:
            return None
        is_read = group == 16
        return cls(
            name=name, bits=4, group=group, has_rows=not is_read, layout="nvfp4" if is_read else None, stage_bytes=256 // group
        )

    def why_not_stacked(self, rows: Sequence[int]) -> str | None:
        return UNSTACKED_SCALE if len(rows) > 1 and self.group == 16 else None

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        whole = {"global": 8} if self.group == 16 else {}
        return {"weight": rows * ceil(columns / 2), "scale": rows * self.groups(columns)} | whole


class _Ggml(_Own):
    """ggml's blocks, as GGUF files hold them."""

    family, shares_tables, has_file_rows, layer_s = "ggml", True, True, 18e-6
    header, number, arguments = "ggml.cuh", 3, ("weight", "scale", "outer", "")

    @property
    def stack_multiple(self) -> int:
        return GGML_BLOCKS[self.name][0]

    @classmethod
    def named(cls, name: str) -> StoredFormat | None:
        kind, has_index = name.removesuffix(INDEXED), name.endswith(INDEXED)
        if kind not in GGML_BLOCKS:
            return None
        number, stage_bytes = _GGML_TYPES.get(kind, (0, 0))
        return cls(
            name=name, bits=GGML_BLOCKS[kind][1] * 8 // GGML_BLOCKS[kind][0], has_index=has_index, has_rows=not has_index,
            layout=kind if kind in GGML_PARTS else None, options={"TYPE": number}, stage_bytes=stage_bytes,
            most_scale=256.0 if kind in ("q4_0", "q4_1", "q8_0") else inf,
        )  # fmt: skip

    def is_rounded(self, dtype: str) -> bool:
        return dtype not in (float_dtype(self.name) or dtype, "float32")

    def reading_bytes(self, shape: Sequence[int]) -> int:
        return sum(self.parts(shape, "").values())  # the parts, while the file's blocks are there

    def why_not_stacked(self, rows: Sequence[int]) -> str | None:
        return "is not packed" if self.name in GGML_FLOATS else UNSTACKED_ORDER if self.has_index else None

    def _parts(self, rows: int, columns: int, dtype: str) -> dict[str, int]:
        kind = self.name.removesuffix(INDEXED)
        values, nbytes = GGML_BLOCKS[kind]
        found = {name: rows * columns // values * count for name, count in GGML_PARTS.get(kind, {"weight": nbytes}).items()}
        return found | ({"index": 4 * columns} if self.has_index else {})


_FAMILIES = (StoredFormat, _Codebook, _Int8, _Head8, _Grouped, _Float8, _Ggml, _Mobile, _Float4)
# Of engine/kernels/cuda, in the order of their numbers.
HEADERS = tuple(family.header for family in sorted(_FAMILIES, key=lambda one: one.number) if family.header)


@lru_cache(maxsize=256)
def stored_format(name: str) -> StoredFormat:
    """Return the record of a format. Errors: RequestError for a name that is none.

    none, int8, nf4, nf4-dq, fp4     bitsandbytes (and none: full precision); -dq: with packed scales
    head8                            the 8-bit output head that trimtab makes
    int4-g128, int8-g32, int4-row    integers with one scale for this many values of a row, or for the row; then in any order
                                     -zp (a zero point a group), -idx (columns lie by group, in another order than the inputs),
                                     -f32 (scales in float32)
    fp8-128x128, fp8-row, fp8-tensor float8 e4m3 with one float32 scale a block, a row or a weight
    """
    if (found := next(filter(None, (family.named(name) for family in _FAMILIES)), None)) is None:
        raise RequestError("is no format of weights", field="quant", value=name)
    return found


def float_dtype(name: str) -> str | None:
    """Return the type of values that stand in a GGUF file as they are, None of other formats."""
    return GGML_FLOATS.get(name.removesuffix(INDEXED))


@cache
def rounds_change(name: str) -> bool:
    """Return whether PEFT rounds an adapter's change before it adds it, over weights in a format.

    So it does over bitsandbytes' layers. Weights of other formats are those of a plain Linear in the stock stack
    (`dequantize=True`), where the sum is rounded. Source: PEFT 0.21.2, lora/layer.py Linear.forward, lora/bnb.py
    Linear4bit.forward.
    """
    return stored_format(name).rounds_change


def packed_parts(shape: Sequence[int], kind: str, dtype: str) -> dict[str, int]:
    """Return the bytes of each part of a stored weight, by part name. kind: a format's name."""
    return stored_format(kind).parts(shape, dtype)


def packed_bytes(shape: Sequence[int], kind: str, dtype: str) -> int:
    """Return the exact bytes of a stored weight, without padding between its parts."""
    return sum(packed_parts(shape, kind, dtype).values())


@dataclass(frozen=True)
class PackedEntry:
    """One packed weight of a checkpoint.

    kind: its format, a name of `stored_format`. shape, dtype: of the unpacked weight. parts: its file tensors, by their names in
    the layout of the file. state: what else its files say.
    """

    tensor_name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, TensorEntry]
    state: Mapping[str, Any]

    @property
    def read_parts(self) -> dict[str, TensorEntry]:
        """The file tensors that are read with the weights."""
        return {name: part for name, part in self.parts.items() if name not in UNREAD_PARTS}


Split = tuple[dict[str, TensorEntry], dict[str, PackedEntry]]
# A weight's name, its file tensors, and the weight or what is wrong with it.
Found = tuple[str, list[str], PackedEntry | str]


def gathered(
    tensors: Mapping[str, TensorEntry], marks: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, list[str], dict[str, TensorEntry]]]:
    """Yield (a weight's name, its mark, its file tensors, they by their last names) for every tensor whose last name is a mark.
    marks: last name -> those of the tensors of the same module that belong to the weight."""
    for stem, dot, last in (name.rpartition(".") for name in tensors):
        if last in marks:
            parts = {part: tensors[f"{stem}{dot}{part}"] for part in marks[last] if f"{stem}{dot}{part}" in tensors}
            yield f"{stem}{dot}weight", last, [f"{stem}{dot}{part}" for part in parts], parts


def declared(weights: Iterable[Found], bits: Collection[Any]) -> Iterator[Found]:
    """Yield weights of floats; wrong is each whose bits are none of those that config.json declares."""
    for name, own, one in weights:
        if isinstance(one, PackedEntry) and stored_format(one.kind).bits not in bits:
            one = f"is {one.kind}, which config.json does not declare"
        yield name, own, one


def left_of(tensors: Mapping[str, TensorEntry], weights: Iterable[Found]) -> dict[str, TensorEntry]:
    """Return the file tensors that belong to none of the weights."""
    taken = {name for _, own, _ in weights for name in own}
    return {name: entry for name, entry in tensors.items() if name not in taken}


def split(checkpoint: Checkpoint, weights: Iterable[Found], used: Iterable[str] = ()) -> Split:
    """Return (plain tensors, packed weights by name). used: file tensors that are of no weight and not plain. Errors:
    CheckpointError with every wrong weight."""
    found = [("", list(used), ""), *weights]
    refuse(checkpoint, [(name, one) for name, _, one in found if isinstance(one, str) and one])
    return left_of(checkpoint.tensors, found), {name: one for name, _, one in found if isinstance(one, PackedEntry)}


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
