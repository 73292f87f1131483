"""Which modules and tensors does the empty model have, one row per module?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from trimtab.checkpoint.names import Rename, matches, near_names
from trimtab.errors import RequestError

Part = Literal["language", "vision", "audio", "connector", "table", "head"]
Kind = Literal["linear", "embedding", "experts", "other"]
PARTS: tuple[Part, ...] = ("language", "vision", "audio", "connector", "table", "head")

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorRow:
    """One parameter or buffer as the loaded model would hold it (before quantization).

    tensor_path: full path in the model. sources: the file tensors it is made of, empty when it is computed at load.
    tied_to: path of the tensor whose storage it shares, None for an owner. copy_of: path of the tensor that it would
    share if it had the same format (an 8-bit head). halves: 1 if `sources` are one matrix of each expert, in order; n if n
    such lists follow each other, joined along the outputs; else 0. stored: of a stack, the format in which the files hold each
    expert, and loading keeps it; None if the stack is in `dtype` or packed while it is loaded.
    """

    tensor_path: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool
    sources: tuple[str, ...]
    tied_to: str | None = None
    copy_of: str | None = None
    halves: int = 0
    stored: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    def is_narrow(self, dtype: str) -> bool:
        """Whether it is stored in fewer bits than this compute dtype has."""
        return DTYPE_BYTES[self.dtype] < DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class ModuleRow:
    """One module of the model that owns tensors, or that wraps one which does.

    block: path of the placement block it belongs to (a decoder or tower layer, a table, the head, the rest of a part). quantized:
    whether the request's quantization applies to its weight; otherwise why_unquantized says why not (empty for modules that have
    nothing to quantize). wraps: path of the inner linear of a wrapper such as Gemma4ClippableLinear. gather_only: an embedding
    whose table is only indexed, so rows can be fetched on demand. is_head8: the output head in 8 bits (`--head int8`). is_router: a
    router of experts that multiplies with its weight like a Linear; before transformers 5 it was one. stored: the format in which
    the checkpoint's files hold its weight, or its table, if they name one (`formats/record.py`); a linear of GGUF's floats has one
    and is not quantized. None for a plain tensor. Of experts: is_transposed: the stacks are [E, D_in, D_out]; is_interleaved: gate
    and up take turns in the outputs; takes_lora: their forward is known (`engine/lora/experts.py`); made: the format in which
    loading packs each expert, None if they stay as they are in the files (`TensorRow.stored`). chosen: how many of them a token
    uses, 0 where the config does not say.
    """

    module_path: str
    class_name: str
    part: Part
    kind: Kind
    block: str
    tensors: tuple[TensorRow, ...]
    quantized: bool = False
    why_unquantized: str = ""
    wraps: str | None = None
    gather_only: bool = False
    is_head8: bool = False
    is_router: bool = False
    stored: str | None = None
    is_transposed: bool = False
    is_interleaved: bool = False
    takes_lora: bool = False
    made: str | None = None
    chosen: int = 0

    @cached_property
    def weight(self) -> TensorRow | None:
        for row in self.tensors:
            if row.tensor_path == f"{self.module_path}.weight":
                return row
        return None

    @property
    def is_read_linear(self) -> bool:
        """Whether it is a Linear whose weight the module around it reads: it stays where it is computed with, unquantized."""
        return self.kind == "other" and self.class_name == "Linear"

    @cached_property
    def stacks(self) -> tuple[TensorRow, ...]:
        """The stacks of a module of experts."""
        return tuple(row for row in self.tensors if self.kind == "experts" and len(row.shape) == 3 and not row.is_buffer)

    def form_of(self, stack: TensorRow) -> str | None:
        """Return the format of each expert of a stack after loading, None for the stack's own type."""
        return self.made or stack.stored

    @cached_property
    def packs_experts(self) -> bool:
        """Whether its experts stay packed, or are packed while they are loaded."""
        return any(self.form_of(one) is not None for one in self.stacks)


@dataclass(frozen=True)
class KVLayer:
    """The cache of one decoder layer: shape [B, kv_heads, S, head_dim] for keys and the same for values.

    window: tokens a sliding layer keeps, None for full attention. shares: the layer whose cache it reads, None if it
    has its own. state_values: numbers per row that a linear-attention layer keeps instead, independent of the length;
    its kv_heads is 0.
    """

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None
    shares: int | None
    state_values: int = 0


@dataclass(frozen=True)
class Anatomy:
    """The whole empty model in rows, plus the few sizes a plan needs.

    missing_projections: paths of k/v projections that KV-shared layers do not have although their siblings do; an
    adapter key that aims at one has no effect. prequantized: the format of most values of a checkpoint that is
    already quantized. capture_unsupported, fused_unsupported: why decode steps of this family cannot be captured, or use the
    fused kernels; prompts_unsupported: why its prompts cannot be captured; None if they can. images_look_ahead: whether
    an image's tokens see later ones, so that a prompt is not cut inside it; True if unknown. can_chunk: whether a text is computed
    in chunks; else whole, of any length. unknown_towers: model types of towers whose look-ups are checked while they run. renames:
    transformers' renamings for checkpoints of this model, in order. answers_unsupported: why it gives no answers, None if it
    does; has_vectors: whether it still embeds texts.
    """

    model_class: str
    model_type: str
    dtype: str
    rows: tuple[ModuleRow, ...]
    kv_layers: tuple[KVLayer, ...]
    hidden_size: int
    vocab_size: int
    missing_projections: tuple[str, ...] = ()
    prequantized: str | None = None
    capture_unsupported: str | None = None
    fused_unsupported: str | None = None
    prompts_unsupported: str | None = None
    images_look_ahead: bool = True
    can_chunk: bool = True
    unknown_towers: tuple[str, ...] = ()
    renames: tuple[Rename, ...] = ()
    answers_unsupported: str | None = None
    has_vectors: bool = True

    def __hash__(self) -> int:
        """A hash of a few fields: of all rows it would cost as much as the results that are cached by anatomy. The two heads of
        one model, which a plan compares, must differ."""
        return hash((self.model_class, self.dtype, len(self.rows), self.vocab_size, self.has_head8))

    def by_path(self) -> dict[str, ModuleRow]:
        return {row.module_path: row for row in self.rows}

    @cached_property
    def head_rows(self) -> tuple[ModuleRow, ...]:
        """The modules of the output head. A search reads them for every placement."""
        return tuple(row for row in self.rows if row.part == "head" and row.weight is not None)

    @cached_property
    def has_head8(self) -> bool:
        """Whether the output head is in 8 bits."""
        return any(row.is_head8 for row in self.rows)

    @property
    def routers(self) -> tuple[ModuleRow, ...]:
        """The modules that choose experts, and those inside."""
        paths = {row.module_path for row in self.rows if row.is_router or "router" in row.class_name.lower()}
        return tuple(row for row in self.rows if not paths.isdisjoint((row.module_path, row.module_path.rpartition(".")[0])))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        present = {row.part for row in self.rows}
        return tuple(part for part in PARTS if part in present)


# Both heads of a few models.
_FIRST_KEPT = 8


@lru_cache(maxsize=_FIRST_KEPT)
def first_equal(anatomy: Anatomy) -> Anatomy:
    """Return the first anatomy of those equal to this one. One plan looks up cached results a thousand times. Equal anatomies
    that are different objects are compared row by row at each look-up, and here only once."""
    return anatomy


def check_keep(keep_unquantized: Sequence[str], rows: Sequence[ModuleRow]) -> None:
    """Raise RequestError for patterns that name no linear module of a model."""
    linears = [row.module_path for row in rows if row.kind == "linear" or row.is_read_linear]
    lost = [pattern for pattern in keep_unquantized if not any(matches(pattern, path) for path in linears)]
    if lost:
        near = [name for pattern in lost for name in near_names(pattern, linears)]
        raise RequestError(
            "names no linear module", field="keep_unquantized", value=lost, near=near,
            hint="A pattern is a module's path, or a part of it with *; `trimtab plan` lists the blocks",
        )  # fmt: skip
