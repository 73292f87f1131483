"""Which kernels do prompt chunks use in addition to cuBLAS: packed weights unpacked in one launch, LoRA added in two?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.cuda import nvrtc
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.formats.packed import Columns, LayerProduct, Matmul, Packed
from trimtab.engine.formats.weights import dequantize, dequantize_at
from trimtab.engine.kernels import layouts, selfcheck
from trimtab.engine.kernels.gemv4 import LoraColumns
from trimtab.engine.kernels.selfcheck import KernelFamily, Times, first_reason, pair_us, random_values, relative_error
from trimtab.engine.layers.leaves import Dequantized, GatheredTable, Leaf, PackedTable, ResidentLeaf
from trimtab.engine.lora import fewer_ops, layers
from trimtab.formats.record import rounds_change, stored_format
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.layers.context import EngineContext

NAMES = (
    "unpack_nested", "unpack_plain", "lora_low", "lora_low_tensor", "lora_up", "lora_low_rows", "lora_low_rows_tensor",
    "lora_up_rows", "unpack_columns_nested", "unpack_columns_plain", "write_columns", "extend_input",
    "in_order",
)  # fmt: skip
UNPACKS, ADDS = "unpacked 4-bit weights", "adapters of a prompt"
# As in cuda/prompt.cu: values of a block that unpacks, tokens and columns of one that adds, and how much of x one sums.
_UNPACKED, _TOKENS, _COLUMNS, _SLICE, _THREADS = 8192, 8, 512, 1024, 256
# Tokens of one that sums by tensor cores, and the most of one that adds; blocks that a GPU of any size has work for.
_TENSOR_TOKENS, _MOST_TILE, _BLOCKS = 16, 64, 256
_MOST_RANK = nvrtc.PLAIN_SHARED_BYTES // (4 * _TOKENS)
# Beyond this rank torch's products in float32 are faster (bench/results/prompt_kernels.json, 512 tokens over E4B's gate: 26 us
# against 50 for rank 8, 234 against 71 for rank 64).
PAYING_RANK = 8
# Kernels are tried on a layer of up to this many weights.
TRIED_VALUES = 8 * 2**20
# bitsandbytes' own products of fewer rows read packed weights.
LEAST_TOKENS = 9
# Sums in float32 in another order, then one rounding of 16 bits: relative error of a whole tensor.
LARGEST_ERROR = 4e-3


def source() -> str:
    """Return the source as it is compiled."""
    return layouts.source("prompt.cu")


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError if that is not possible here."""
    return nvrtc.Module(source(), device=device, name="prompt.cu")


# 4-bit weights -------------------------------------------------------------------------------------------------------


def can_unpack(packed: Packed) -> bool:
    """Whether the kernel knows this form of a weight."""
    return packed.dtype in layouts.TYPES and stored_format(packed.kind).unpacks(packed.shape, packed.blocks)


def fits_type(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether a weight may be unpacked in this type: of some formats only in their own; others are then cast."""
    return packed.dtype == dtype or stored_format(packed.kind).is_cast


def unpack(packed: Packed, out: Tensor, module: nvrtc.Module | None = None) -> Tensor:
    """Return the dequantized weight [D_out, D_in], its columns as they lie, in the memory of `out` (as many values or more, of its
    dtype)."""
    values = packed.shape[0] * packed.shape[1]
    weight = out.view(-1)[:values].view(packed.shape[0], packed.shape[1])
    if module is None or not can_unpack(packed):
        return weight.copy_(dequantize(packed.as_it_lies()))
    own, name = unpacking(packed, module)
    own.launch(f"unpack_{name}", (-(-values // _UNPACKED),), (_THREADS,), unpack_arguments(packed, weight))
    return weight


def unpack_rows(packed: Packed, ids: Tensor, module: nvrtc.Module) -> Tensor:
    """Return the rows [n, D] of a table by their ids [n] int64, in its own type: the bits of `weights.dequantize_at`."""
    width = packed.shape[1]
    out, ids = torch.empty(len(ids), width, dtype=packed.dtype, device=ids.device), ids.long().contiguous()
    given = unpack_arguments(packed, out)
    unpacking(packed, module)[0].launch("unpack_rows", (-(-width // 2048), len(ids)), (_THREADS,), [*given, ids, width])
    return out


def read_tables(hf_model: HFModel, kernels: PromptKernels) -> None:
    """Let packed tables that the device reads give their rows by the kernel, where it is right on this card."""
    if (module := kernels.module) is None:
        return
    for table in hf_model.modules():
        if not isinstance(table, PackedTable | GatheredTable) or table.stored is None or not can_unpack(table.stored):
            continue
        count = len(table.stored.parts["weight"])
        ids = torch.tensor([0, count - 1, count // 2], device=module.device)

        def check(module: nvrtc.Module, packed: Packed = table.stored, ids: Tensor = ids) -> str | None:
            is_same = torch.equal(unpack_rows(packed, ids, module), dequantize_at(packed, ids))
            return None if is_same else "its kernel's values are not those of the format"

        # Not kept: the check compiles its variant.
        family = KernelFamily(f"rows of {table.module_path}", None, lambda: module, check)
        _, why = family.choose_alone(module.device)
        if why is None:
            table.read = partial(unpack_rows, module=module)
        else:
            kernels.reasons.append((family.name, why))


def unpacking(packed: Packed, module: nvrtc.Module) -> tuple[nvrtc.Module, str]:
    """Return the module with the kernels that unpack a weight's layout, and the end of their names. Where it is the first of its
    layout they are compiled: not within a capture."""
    return layouts.variant(packed, module), "plain" if layouts.tables(packed)[1] is None else "nested"


def unpack_arguments(packed: Packed, weight: Tensor) -> list[nvrtc.Argument]:
    """Return the unpacking kernel's arguments for a weight and its output memory."""
    code, nested_code = layouts.tables(packed)
    sizes = [*(size.bit_length() - 1 for size in packed.blocks), 0] if packed.blocks else [packed.shape[1], 0]
    return [
        *layouts.tensors(packed), nested_code, code, nvrtc.Long(packed.shape[0] * packed.shape[1]), *sizes[:2], weight,
        layouts.half(weight),
    ]  # fmt: skip


# LoRA ----------------------------------------------------------------------------------------------------------------


def add(
    A: Tensor, B: Tensor, scale: float, x: Tensor, y: Tensor, module: nvrtc.Module | None = None, *, round_change: bool
) -> Tensor:  # fmt: skip
    """Return y [n, D_out] + scale * B (A x), in place, for x [n, D_in]; A [R, D_in] and B [D_out, R] in float32.

    round_change: the change is rounded before it is added, as PEFT does over a quantized layer; else the sum alone is.
    """
    if module is None or not can_add(A, B, x, y):
        change = functional.linear(functional.linear(x.float(), A), B).mul_(scale)
        return y.copy_(y + change.to(y.dtype) if round_change else y.float() + change)
    n, rank, half = x.shape[0], A.shape[0], layouts.half(x)
    slices, columns = -(-x.shape[1] // _SLICE), -(-y.shape[1] // _COLUMNS)
    low = torch.empty(slices, n, rank, device=x.device)
    given: list[nvrtc.Argument] = [x, x.stride(0), n, x.shape[1], A, rank, low]
    if not half and x.shape[1] % 16 == 0:
        module.launch("lora_low_tensor", (-(-n // _TENSOR_TOKENS), slices), (_THREADS,), given)
    else:
        module.launch("lora_low", (-(-n // _TOKENS), slices), (_THREADS,), [*given, half])
    # As many tokens a block as leave enough blocks, and as its shared memory holds.
    tile = min(_MOST_TILE, max(n * columns // (_BLOCKS * _TOKENS), 1) * _TOKENS, _MOST_RANK * _TOKENS // rank // _TOKENS * _TOKENS)
    module.launch(
        "lora_up", (columns, -(-n // tile)), (_THREADS,),
        [low, slices, n, rank, B, float(scale), y, y.stride(0), y.shape[1], int(round_change), tile, half],
        shared_bytes=4 * tile * rank,
    )  # fmt: skip
    return y


def add_rows(
    lora: LoraColumns, row_slots: Tensor, tokens: int, x: Tensor, y: Tensor, module: nvrtc.Module, *,
    largest_rank: int, round_change: bool,
) -> Tensor:  # fmt: skip
    """Do what `add` does for rows of `tokens` neighbours each, a row with the adapter in its slot.

    Shapes: x [rows * tokens, D_in], y [rows * tokens, D_out], row_slots [rows] int32, -1 for a row without. tokens: a power of two,
    16 or more; D_in a multiple of 4. largest_rank: of all slots.
    """
    n, half = x.shape[0], layouts.half(x)
    assert n == row_slots.numel() * tokens and tokens >= _TENSOR_TOKENS and tokens & (tokens - 1) == 0
    assert x.dtype == y.dtype and x.dtype in layouts.TYPES and x.stride(1) == y.stride(1) == 1 and largest_rank <= _MOST_RANK
    assert x.shape[1] % 4 == 0 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    assert y.shape[1] % 2 == 0 and y.stride(0) % 2 == 0 and y.data_ptr() % 4 == 0
    slices, columns = -(-x.shape[1] // _SLICE), -(-y.shape[1] // _COLUMNS)
    low = torch.empty(slices, n, largest_rank, device=x.device)
    given: list[nvrtc.Argument] = [
        x, x.stride(0), n, x.shape[1], lora.A_ptr, lora.rank, row_slots, tokens, low, largest_rank,
    ]  # fmt: skip
    if not half and x.shape[1] % 16 == 0:
        module.launch("lora_low_rows_tensor", (n // _TENSOR_TOKENS, slices), (_THREADS,), given)
    else:
        module.launch("lora_low_rows", (n // _TOKENS, slices), (_THREADS,), [*given, half])
    # As many tokens a block as leave enough blocks, as its shared memory holds and as are of one row.
    tile = min(_MOST_TILE, tokens)
    while tile > _TOKENS and (n // tile * columns < _BLOCKS or tile * largest_rank > _MOST_RANK * _TOKENS):
        tile //= 2
    module.launch(
        "lora_up_rows", (columns, n // tile), (_THREADS,),
        [
            low, slices, n, largest_rank, lora.B_ptr, lora.rank, lora.scale, row_slots, tokens, y, y.stride(0), y.shape[1],
            int(round_change), tile, half,
        ],
        shared_bytes=4 * tile * largest_rank,
    )  # fmt: skip
    return y


def can_add(A: Tensor, B: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether the kernels know tensors of these shapes and types."""
    return (
        x.dtype == y.dtype and x.dtype in layouts.TYPES and A.dtype == B.dtype == torch.float32 and A.shape[0] <= _MOST_RANK
        and A.is_contiguous() and B.is_contiguous() and A.data_ptr() % 16 == 0 and x.shape[1] % 4 == 0
        and x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
        and y.shape[1] % 2 == 0 and y.stride(1) == 1 and y.stride(0) % 2 == 0 and y.data_ptr() % 4 == 0
    )  # fmt: skip


def add_plain(module: nvrtc.Module, leaf: Leaf, adapter: layers.LinearAdapter, x: Tensor, y: Tensor) -> bool:
    """Add a plain LoRA to y [..., D_out] in place by the kernels; return False, and change nothing, where they do not pay or do
    not know these tensors."""
    # As rows, where they lie; those of a part of a joined product are apart.
    has_rows = y.is_contiguous() or y.shape[:-1].numel() == y.shape[-2]
    A, B = adapter.A, adapter.B
    if A is None or B is None or not has_rows or A.shape[0] > PAYING_RANK:
        return False
    flat, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if not can_add(A, B, flat, out):
        return False
    add(A, B, adapter.scale, flat, out, module, round_change=rounds_change(leaf.quant_kind))
    return True


# The kernels that a model uses -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PromptKernels(Dequantized):
    """The compiled module, and which of its two parts are used; None and False where torch or bitsandbytes compute.

    reasons: (what, why) of the parts that are not used. measured_us: name -> (ours, theirs).
    """

    module: nvrtc.Module | None = None
    unpacks: bool = False
    adds: bool = False
    reasons: list[tuple[str, str]] = field(default_factory=list)
    measured_us: Times = field(default_factory=dict)
    _weights: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def matmul(self, leaves: Collection[Leaf], columns: Columns | None = None) -> Matmul[LayerProduct] | None:
        """Return the way to multiply many rows with a weight that is unpacked here, into memory that all of them share; None where
        it is not used. columns: unpacks it with adapters."""
        return self.way(set(leaves), LEAST_TOKENS, columns) if self.unpacks else None

    def dense(self, leaves: Sequence[Leaf], x: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Dequantized`; None where the kernel does not know x or the weight of the one layer."""
        if len(leaves) > 1 or x.dtype not in layouts.TYPES:
            return None
        packed, room = leaves[0].packed(), self._weights.get(x.dtype)
        if not fits_type(packed, x.dtype) or not can_unpack(packed):
            return None
        if room is None or room.numel() < packed.shape[0] * packed.shape[1]:  # kept unpacked, but for layers such as this one
            return None
        weight = unpack(packed, room, self.module)
        if packed.static_scales is None:
            return layouts.in_order(x, packed, self.module), weight
        return layouts.round_to_8(x.reshape(-1, x.shape[-1]), [packed], self.module, is_input=True), weight

    def rounded(self, leaf: Leaf, y: Tensor) -> Tensor:
        """See `Dequantized`."""
        if not stored_format(leaf.quant_kind).has_rounding or (packed := leaf.packed()).static_scales is None:
            return y
        return layouts.round_to_8(y, [packed], self.module, is_input=False)

    def reserve(self, leaves: Sequence[Leaf], *, columns: int = 0) -> None:
        """Make room for the largest weight with this many columns behind each row; a capture must find it there."""
        for leaf in leaves:
            dtype, values = leaf.dtype, leaf.out_features * (leaf.in_features + columns)
            if self.unpacks and (dtype not in self._weights or self._weights[dtype].numel() < values):
                self._weights[dtype] = torch.empty(values, dtype=dtype, device=leaf.device)

    def adapters(self, *, shares_inputs: bool = True) -> fewer_ops.ShortAdapters:
        """Return what adds adapters in a pass: plain LoRA by the kernels where they are used, others as in a short step."""
        add = partial(add_plain, self.module) if self.adds and self.module is not None else None
        return fewer_ops.ShortAdapters(add, shares_inputs=shares_inputs)

    def room(self, dtype: torch.dtype) -> Tensor | None:
        """Return the memory that weights of a type are unpacked into, None if there is none."""
        return self._weights.get(dtype)


def four_bit(hf_model: HFModel) -> list[Leaf]:
    """Return the decoder's layers over packed weights that kernels read."""
    decoder = hf_model.get_decoder()
    return [one for one in decoder.modules() if isinstance(one, Leaf) and is_read(one)]


def packed_heads(hf_model: HFModel) -> list[Leaf]:
    """Return a model's head, as a list, where a file's own format is its weight's and kernels read it; else an empty list."""
    head = getattr(hf_model, "lm_head", None)
    return [head] if isinstance(head, ResidentLeaf) and stored_format(head.quant_kind).is_own and is_read(head) else []


def is_read(leaf: Leaf) -> bool:
    """Whether kernels read weights in a layer's format."""
    return stored_format(leaf.quant_kind).layout is not None


def choose(hf_model: HFModel, device: torch.device, dtype: torch.dtype) -> PromptKernels:
    """Return the kernels that compile, compute rightly and are faster here, tried on one of the model's 4-bit layers.

    A model without such layers has nothing to unpack, and no reason is given for that.
    """
    if device.type != "cuda" or dtype not in layouts.TYPES:
        return PromptKernels()
    trials: list[_Trial] = []

    def loaded() -> nvrtc.Module:
        made = load(device)
        trials.append(_trial(hf_model))  # a layer that cannot be opened leaves these kernels out
        for one in {other.quant_kind: other for other in trials[0].leaves}.values():
            unpacking(one.packed(), made)  # a capture finds it compiled
        return made

    checks, measured, reasons = CardEntries.of(device), Times(), dict[str, str]()
    family = KernelFamily("kernels of a prompt", None, loaded, lambda module: None)
    if (module := family.choose(checks, reasons, measured, device)) is None:
        return PromptKernels(reasons=[*reasons.items()])
    leaves, leaf, kinds, form, width = trials[0]

    def one_of_each() -> Iterator[Packed]:
        tried = (tried_leaf([other for other in leaves if other.quant_kind == kind]) for kind in kinds)
        return (one.packed() for one in tried if one is not None)

    families = [KernelFamily(
        UNPACKS, (str(dtype), form), lambda: module,
        lambda module: first_reason(wrong_unpack(packed, module, dtype) for packed in one_of_each()),
        lambda _: "no layer is in a form that it reads" if leaf is None else None,
        lambda module: {UNPACKS: pair_us(*_unpack_runs(leaf.packed(), module, dtype), device)} if leaf is not None else {},
    )] if leaves else []  # fmt: skip
    families.append(KernelFamily(
        ADDS, (str(dtype), width), lambda: module, lambda module: wrong_add(module, dtype) or wrong_add_rows(module, dtype),
        measure=lambda module: {ADDS: pair_us(*_add_runs(width, dtype, module), device)},
    ))  # fmt: skip
    used = [one.name for one in families if one.choose(checks, reasons, measured, device) is not None]
    checks.save()
    torch.cuda.empty_cache()  # the tensors of checks and timings are free
    return PromptKernels(module, UNPACKS in used, ADDS in used, [*reasons.items()], measured)


class _Trial(NamedTuple):
    """What kernels are tried on: the layers over packed weights, the one of them (`tried_leaf`), all their formats, everything
    that decides the result, and the width of a product of an adapter."""

    leaves: list[Leaf]
    leaf: Leaf | None
    kinds: list[str]
    form: tuple[object, ...] | None
    width: int


def _trial(hf_model: HFModel) -> _Trial:
    leaves = four_bit(hf_model)
    leaf, kinds = tried_leaf(leaves), sorted({one.quant_kind for one in leaves})
    form = None if leaf is None else (
        leaf.quant_kind, leaf.out_features, leaf.in_features, sorted(leaf.packed().parts), kinds,
        *layouts.scale_type(leaf.packed()),
    )  # fmt: skip
    return _Trial(leaves, leaf, kinds, form, hf_model.config.get_text_config().hidden_size)


def tried_leaf(leaves: Sequence[Leaf]) -> Leaf | None:
    """Return the layer that kernels are tried on: the largest of up to TRIED_VALUES weights, else the smallest; None if none can be
    unpacked. A trial takes several times the unpacked weight in addition to a model that may fill the device."""

    def values(leaf: Leaf) -> int:
        return leaf.out_features * leaf.in_features

    fitting = sorted((leaf for leaf in leaves if can_unpack(leaf.packed())), key=values)
    return max((leaf for leaf in fitting if values(leaf) <= TRIED_VALUES), key=values, default=next(iter(fitting), None))


def has_adapters(model: EngineContext) -> bool:
    """Whether the plan counts the columns of adapters in the room for unpacked weights (planning/memory/prompts.py)."""
    return bool(model.plan.request.adapters)


def chosen_with_short_ops(
    model: EngineContext, fall_back: Callable[[str, str], None]
) -> tuple[PromptKernels, fewer_ops.ShortOps]:  # fmt: skip
    """Return the object that lets a pass take fewer operations, with our kernels chosen on its device. fall_back: called with
    the reason and the name of anything that is not used."""
    kernels = choose(model.hf_model, model.device, model.dtype)
    if model.unpacked is None:
        is_planned = has_adapters(model) and model.dtype == torch.bfloat16
        kernels.reserve(four_bit(model.hf_model), columns=ADAPTER_COLUMNS if is_planned else 0)
    read_tables(model.hf_model, kernels)
    for what, why in kernels.reasons:
        fall_back(why, what)
    short = fewer_ops.ShortOps(
        model.hf_model, model.adapter_store, model.device,
        lambda what, why: fall_back(f"{what}: {why}", "norm as one operation"), kernels.adapters(),
    )  # fmt: skip
    return kernels, short


def wrong_unpack(packed: Packed, module: nvrtc.Module, dtype: torch.dtype | None = None) -> str | None:
    """Return why the kernel's weight is not that of its format's own library, bit for bit, None if it is. dtype: as `fits_type`."""
    expected = dequantize(packed.as_it_lies()).to(dtype if dtype is not None and fits_type(packed, dtype) else packed.dtype)
    actual = unpack(packed, torch.full_like(expected, float("nan")), module)
    if torch.equal(actual, expected):
        return None
    count = int((actual != expected).sum())
    return f"{count} of {expected.numel()} values are not those of the format"


def wrong_add(module: nvrtc.Module, dtype: torch.dtype, *, tokens: Sequence[int] = (1, 9, 64, 515)) -> str | None:
    """Return the error of the kernels for LoRA, None if there is none: random values of several ranks, in float64."""
    random = random_values(module.device, 1)
    for number, n in enumerate(tokens):
        for rank, wide, high in ((4, 192, 320), (8, 2560, 1030), (20, 1032, 64)):
            A, B, x, y = (random(rank, wide) / wide**0.5, random(high, rank), random(n, wide).to(dtype), random(n, high).to(dtype))
            expected = y.double() + 0.5 * (x.double() @ A.double().T @ B.double().T)
            actual = add(A, B, 0.5, x, y.clone(), module, round_change=bool(number % 2))
            if (error := relative_error(actual, expected)) >= LARGEST_ERROR:
                return f"{n} tokens of {wide} values, rank {rank}: relative error {error:.1e}"
    return None


def wrong_add_rows(module: nvrtc.Module, dtype: torch.dtype, *, tokens: Sequence[int] = (16, 128)) -> str | None:
    """Return the error of the kernels for rows with separate adapters, None if there is none: rows with one of two ranks and
    without, in float64."""
    random = random_values(module.device, 2)
    wide, high, slots = 1040, 1030, (1, -1, 0, 1)
    pairs = [(random(rank, wide) / wide**0.5, random(high, rank), scale) for rank, scale in ((8, 0.5), (12, 2.0))]
    columns = LoraColumns(
        torch.tensor([A.data_ptr() for A, *_ in pairs], device=module.device),
        torch.tensor([B.data_ptr() for _, B, _ in pairs], device=module.device),
        torch.tensor([8, 12], dtype=torch.int32, device=module.device), torch.tensor([0.5, 2.0], device=module.device),
    )  # fmt: skip
    for number, count in enumerate(tokens):
        x, y = random(len(slots) * count, wide).to(dtype), random(len(slots) * count, high).to(dtype)
        of_tokens = [slot for slot in slots for _ in range(count)]
        expected = y.double() + selfcheck.exact_changes(x, pairs, of_tokens)
        row_slots = torch.tensor(slots, dtype=torch.int32, device=module.device)
        actual = add_rows(columns, row_slots, count, x, y.clone(), module, largest_rank=16, round_change=bool(number % 2))
        if (error := relative_error(actual, expected)) >= LARGEST_ERROR:
            return f"{len(slots)} rows of {count} tokens: relative error {error:.1e}"
    return None


def _unpack_runs(packed: Packed, module: nvrtc.Module, dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object]]:
    dtype = dtype if fits_type(packed, dtype) else packed.dtype
    out = torch.empty(packed.shape[0] * packed.shape[1], dtype=dtype, device=module.device)
    return lambda: unpack(packed, out, module), lambda: dequantize(packed)


def _add_runs(width: int, dtype: torch.dtype, module: nvrtc.Module) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the function that adds an adapter over a gate of four times the width here, and that of a short step."""
    A, B = (torch.zeros(shape, device=module.device) for shape in ((8, width), (4 * width, 8)))
    x, y = (torch.zeros(512, count, dtype=dtype, device=module.device) for count in (width, 4 * width))

    def plain() -> object:
        return y.add_(functional.linear(functional.linear(x.float(), A), B), alpha=0.5)

    return lambda: add(A, B, 0.5, x, y, module, round_change=True), plain
