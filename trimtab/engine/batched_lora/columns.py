"""How is the LoRA of a prompt a part of its layers' products, with no pass over the output?"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.batched_lora.table import groups_of, rank_of, why_not_plain
from trimtab.engine.formats.packed import MatmulTable, Packed
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels import layouts
from trimtab.engine.kernels.gemm4 import PAYING_ROWS
from trimtab.engine.kernels.selfcheck import KernelFamily, pair_us, random_values, relative_error
from trimtab.engine.layers.leaves import Leaf, ResidentLeaf, UnpackedWeights
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.store import AdapterStore, Selection
from trimtab.formats.record import stored_format
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS
from trimtab.planning.planner import COLUMNS

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.kernels.dequantize import PromptKernels
    from trimtab.engine.layers.context import EngineContext

# Columns that one rank takes, and the largest rank: the planned columns are those of three layers of that rank.
PARTS, MOST_RANK, MOST_LAYERS = 3, 32, 3
# An extended row is a multiple of this many values: its rows begin at multiples of 128 bytes, and cuBLAS' tiles of it are whole.
STEP = 64
# Tokens of a product: fewer are multiplied with packed weights (gemm4.py), and there is a counter for each 16.
LEAST_TOKENS, MOST_TOKENS = PAYING_ROWS + 1, 65536
# As in cuda/prompt.cu: values of a block that unpacks, columns of one that writes B, tokens and values of x of one that sums.
_UNPACKED, _WRITTEN, TOKENS, _SLICE, _THREADS, _RANKS = 8192, 2048, 16, 1024, 256, 8
# The relative error of v B by parts of bfloat16, which is about 2^-17, and of a product that is rounded to bfloat16 once.
LARGEST_COLUMN_ERROR, LARGEST_ERROR = 2**-14, 4e-3
# Rows of a weight that a check multiplies in float64.
CHECKED_ROWS = 256
# Tokens and rank that are timed.
TIMED_TOKENS, TIMED_RANK = 512, 8
NAME, NAME_KEPT = "adapters inside products of a prompt", "adapters inside products of unpacked weights"
# Adapters whose lines for the kernel that writes columns are kept.
MOST_ADAPTERS = 8

assert MOST_LAYERS * PARTS * MOST_RANK + STEP <= ADAPTER_COLUMNS


def extended_width(width: int, rank: int, step: int = STEP) -> int:
    """Return the values of a row of `width` values with the columns of this many ranks."""
    return -(-(width + PARTS * rank) // step) * step


def extend(
    x: Tensor, adapters: Sequence[lora.LinearAdapter], counts: Tensor, module: nvrtc.Module, *, step: int = STEP,
    out: Tensor | None = None, low: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return [x | v of each adapter | zeros], [n, extended width], for x [n, D_in] bfloat16.

    adapters: of up to three layers over x, see `fits`. counts: zeros for each 16 tokens [n / 16] int32, which are zeros again
    afterwards. out, low: memory for the result and for sums in float32.
    """
    n, width = x.shape
    ranks = [rank_of(one) for one in adapters]
    wide, slices = extended_width(width, sum(ranks), step), -(-width // _SLICE)
    out = torch.empty(n, wide, dtype=x.dtype, device=x.device) if out is None else out
    low = torch.empty(slices, n, sum(ranks), device=x.device) if low is None else low
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and width % 16 == 0
    assert counts.numel() * TOKENS >= n and len(adapters) <= MOST_LAYERS and out.shape == (n, wide)
    members: list[nvrtc.Argument] = [value for one in adapters for value in (one.A, rank_of(one), float(one.scale))]
    members += [None, 0, 0.0] * (MOST_LAYERS - len(adapters))
    groups = sum(-(-rank // _RANKS) for rank in ranks)
    module.launch(
        "extend_input", (-(-n // TOKENS), slices, 1 + groups), (_THREADS,),
        [x, x.stride(0), n, width, *members, low, counts, out, wide],
    )  # fmt: skip
    return out


def unpack_extended(packed: Packed, B: Tensor, before: int, wide: int, out: Tensor, module: nvrtc.Module) -> Tensor:
    """Return [W | columns of B] as [D_out, wide] in the memory of `out` (as many values or more, bfloat16).

    B: [D_out, R] float32. before: ranks of the extended input that belong to layers in front of this one.
    """
    high, width = packed.shape
    values = high * width
    weight = out.view(-1)[: high * wide].view(high, wide)
    assert prompt_kernels.can_unpack(packed) and prompt_kernels.fits_type(packed, out.dtype) and out.dtype == torch.bfloat16
    assert width % 8 == 0 and wide % 8 == 0 and wide >= width + PARTS * (before + B.shape[1]) and B.is_contiguous()
    own, name = prompt_kernels.unpacking(packed, module)
    own.launch(
        f"unpack_columns_{name}", (-(-values // _UNPACKED) + -(-high * (wide - width) // _WRITTEN),), (_THREADS,),
        [*prompt_kernels.unpack_arguments(packed, weight), B, B.shape[1], before, width, wide],
    )  # fmt: skip
    return weight


def fits(adapter: lora.LinearAdapter, leaf: Leaf) -> bool:
    """Whether the kernels know this adapter of a layer. They do not know float16, ranks above MOST_RANK and DoRA: `add` of
    engine/kernels/dequantize.py or torch computes these, and rows with different adapters (table.py)."""
    A = adapter.A
    return (
        why_not_plain(adapter) is None and A is not None and A.shape[0] <= MOST_RANK and A.data_ptr() % 16 == 0
        and leaf.in_features % 16 == 0 and prompt_kernels.is_read(leaf)
        and not stored_format(leaf.quant_kind).has_rounding  # an adapter reads x as it was
    )  # fmt: skip


# Of layers over one input: those whose adapter is inside the product, in the order of their columns.
Inside = Mapping[Leaf, lora.LinearAdapter]


def inside_of(group: Sequence[Leaf], name: str) -> Inside:
    """Return the layers of a group that have an adapter of this name which the kernels know."""
    return {leaf: leaf.adapters[name] for leaf in group if name in leaf.adapters and fits(leaf.adapters[name], leaf)}


def are_inside(leaves: Sequence[Leaf], name: str, inside: Inside) -> bool:
    """Whether these layers have adapters of this name, all of which are inside."""
    own = [leaf for leaf in leaves if name in leaf.adapters]
    return bool(own) and all(leaf in inside for leaf in own)


def width_of(inside: Inside) -> int:
    """Return the values of a row of the extended input."""
    return extended_width(next(iter(inside)).in_features, sum(map(rank_of, inside.values())))


# The weights ---------------------------------------------------------------------------------------------------------


class ColumnWeights(Protocol):
    """Where the weights with columns are."""

    def find(self, leaves: Sequence[Leaf], name: str, inside: Inside) -> Callable[[], Tensor] | None:
        """Return the function that gives [all D_out, values of a row] of layers over one input; None where there is none. name: of
        the adapter."""


class DequantizedWeights:
    """Weights that each product unpacks, with the columns, into memory that all of them share."""

    def __init__(self, kernels: PromptKernels) -> None:
        self.kernels = kernels

    def find(self, leaves: Sequence[Leaf], name: str, inside: Inside) -> Callable[[], Tensor] | None:
        """See `ColumnWeights`: of one layer."""
        (leaf,) = leaves
        packed, room, wide = leaf.packed(), self.kernels.room(torch.bfloat16), width_of(inside)
        # The plan counts an extended input that is at most twice x (planning/memory/activations.py).
        if wide > 2 * leaf.in_features or room is None or room.numel() < leaf.out_features * wide:
            return None
        if not prompt_kernels.fits_type(packed, room.dtype) or not prompt_kernels.can_unpack(packed):
            return None
        B, module = inside[leaf].B, self.kernels.module
        assert B is not None and module is not None
        before = [rank_of(one) for one in inside.values()][: list(inside).index(leaf)]
        return partial(unpack_extended, packed, B, sum(before), wide, room, module)


class KeptWeights:
    """Weights that the plan keeps unpacked, with columns behind their rows for one adapter at a time. groups: of layers over one
    input."""

    def __init__(self, unpacked: UnpackedWeights, groups: Sequence[Sequence[Leaf]], module: nvrtc.Module) -> None:
        self.unpacked, self.module = unpacked, module
        self.groups = [group for group in groups if unpacked.extended(group) is not None and all(one.bias is None for one in group)]
        # By an adapter's part of a graph's key: lines of the kernel, with addresses alone, and the columns of the largest weight.
        self._lines: OrderedDict[Hashable, tuple[Tensor | None, int]] = OrderedDict()
        self._name: str | None = None

    def hold(self, key: Hashable, name: str | None, content: Hashable) -> None:
        """Use an adapter from now on: write its columns unless they are there. key: its part of a graph's key; name: in the layers;
        content: the digest that tells it from others of this key."""
        self._name = None
        if name is None:
            return
        if key not in self._lines:
            while len(self._lines) >= MOST_ADAPTERS:
                self._lines.popitem(last=False)
            self._lines[key] = self._lines_of(name)
        self._lines.move_to_end(key)
        lines, widest = self._lines[key]
        if lines is not None and self.unpacked.holds != (key, content):
            self.module.launch("write_columns", (-(-widest // _WRITTEN), len(lines)), (_THREADS,), [lines])
            self.unpacked.holds = (key, content)
        self._name = name

    def _lines_of(self, name: str) -> tuple[Tensor | None, int]:
        lines: list[list[int]] = []
        widest = 0
        for group in self.groups:
            inside, width, columns = inside_of(group, name), group[0].in_features, self.unpacked.columns
            if not are_inside(group, name, inside) or (end := width_of(inside)) > width + columns:
                continue
            before = 0
            for leaf in group:
                one = inside.get(leaf)
                rank, start = (0, 0) if one is None or one.B is None else (rank_of(one), one.B.data_ptr())
                rows = self.unpacked.weight(leaf)
                lines.append([start, rows.data_ptr(), rank, before, leaf.out_features, width, end, width + columns])
                before += rank
                widest = max(widest, leaf.out_features * (end - width))
        return torch.tensor(lines, device=self.module.device) if lines else None, widest

    def find(self, leaves: Sequence[Leaf], name: str, inside: Inside) -> Callable[[], Tensor] | None:
        """See `ColumnWeights`: with the adapter that `hold` wrote."""
        weight, wide = self.unpacked.extended(leaves), width_of(inside)
        if name != self._name or weight is None or wide > weight.shape[1]:
            return None
        part = weight[:, :wide]
        return lambda: part


# The operands of products ------------------------------------------------------------------------------------------

Weights = TypeVar("Weights", bound=ColumnWeights)


class Columns(Generic[Weights]):
    """Operands of products with the layers' adapters inside, for one model's prompts. groups: of layers over one input.

    [x | v] times [W | B], with v = scale (A x) in float32. v and B enter as bfloat16 parts, hi(v) = v rounded and lo(v) = v - hi(v)
    rounded: hi(v) hi(B) + lo(v) hi(B) + hi(v) lo(B) is v B up to about 2^-17. Reasons: docs/decisions/0026."""

    def __init__(self, weights: Weights, groups: Sequence[Sequence[Leaf]], module: nvrtc.Module, device: torch.device) -> None:
        self.weights, self.module = weights, module
        self.groups = {leaf: tuple(group) for group in groups for leaf in group}
        # One permanent piece: captured graphs have its address.
        self.counts = torch.zeros(MOST_TOKENS // TOKENS, dtype=torch.int32, device=device)
        # The last extended input while layers of its group are still to run: x, its version, its order and adapters, the result.
        self._last: tuple[weakref.ref[Tensor], int, tuple[object, ...], Tensor] | None = None

    def forget(self) -> None:
        """Drop the extended input of a pass that has ended."""
        self._last = None

    def operands(self, layers: Leaf | Sequence[Leaf], x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the extended input [n, K] and weight [D_out, K] of a layer, or of all layers of a group side by side; None where
        the adapters are added otherwise. Call `forget` after each pass."""
        leaves = (layers,) if isinstance(layers, Leaf) else tuple(layers)
        store = leaves[0].adapter_store
        name = store.selection.name
        if name is None or store.table is not None or x.dtype != torch.bfloat16 or leaves[0] not in self.groups:
            return None
        flat = x.reshape(-1, x.shape[-1])
        if not LEAST_TOKENS <= len(flat) <= MOST_TOKENS or flat.stride(1) != 1 or flat.stride(0) % 8 or flat.data_ptr() % 16:
            return None
        # Whether a tensor that counts no versions was changed in between is not known.
        inside = inside_of(leaves if x.is_inference() else self.groups[leaves[0]], name)
        if not are_inside(leaves, name, inside) or (weight := self.weights.find(leaves, name, inside)) is None:
            return None
        packed = leaves[0].packed() if isinstance(self.weights, DequantizedWeights) else None
        extended = self._extended(x, flat, tuple(inside.values()), packed, is_last=list(inside)[-1] in leaves)
        return extended, weight()

    def _extended(
        self, x: Tensor, flat: Tensor, adapters: tuple[lora.LinearAdapter, ...], packed: Packed | None, *, is_last: bool
    ) -> Tensor:  # fmt: skip
        """Return the extended input of a group, the one made for a layer before if x has not changed since. packed: the weight
        whose columns lie in the order of the result."""
        key = ("" if packed is None else packed.order, *adapters)
        if self._last is not None:
            seen, version, of, extended = self._last
            if seen() is x and version == x._version and of == key:
                self._last = None if is_last else self._last
                return extended
        self._last = None  # its memory is free for the next
        extended = extend(flat, adapters, self.counts, self.module)
        if packed is not None:
            layouts.in_order(flat, packed, self.module, out=extended[:, : flat.shape[1]])
        if not is_last:
            self._last = weakref.ref(x), x._version, key, extended
        return extended


# Whether a model uses it ---------------------------------------------------------------------------------------------


def choose(
    model: EngineContext, kernels: PromptKernels, fall_back: Callable[[str, str], None]
) -> Columns[DequantizedWeights] | None:  # fmt: skip
    """Return the columns of weights that each product unpacks, None where they are not possible, not right or not faster on this
    card.

    fall_back: called with the reason and the name if they could be but are not used.
    """
    leaves, room = prompt_kernels.four_bit(model.hf_model), kernels.room(torch.bfloat16)
    if not kernels.unpacks or kernels.module is None or model.unpacked is not None or room is None:
        return None
    if not prompt_kernels.has_adapters(model):
        return None
    leaf = prompt_kernels.tried_leaf([one for one in leaves if one.in_features % 16 == 0 and one.dtype == torch.bfloat16])
    if leaf is None:
        return None
    packed, module = leaf.packed(), kernels.module
    columns = Columns(DequantizedWeights(kernels), list(groups_of(leaves).values()), module, model.device)

    _, why = KernelFamily(
        NAME, (leaf.quant_kind, leaf.out_features, leaf.in_features, sorted(packed.parts), kernels.adds), lambda: module,
        lambda module: wrong(packed, room, module),
        measure=lambda _: {NAME: pair_us(*runs([packed], room, columns.counts, kernels), model.device)},
    ).choose_alone(model.device, kernels.measured_us)  # fmt: skip
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the tensors of checks and timings are free
    if why is not None:
        fall_back(why, NAME)
    return columns if why is None else None


def choose_kept(
    model: EngineContext, kernels: PromptKernels, groups: Sequence[Sequence[Leaf]], fall_back: Callable[[str, str], None]
) -> Columns[KeptWeights] | None:  # fmt: skip
    """Return the columns of weights that the plan keeps unpacked, None where these have none or a product is not right on this
    card. groups: of layers over one input; fall_back: as above."""
    unpacked, module = model.unpacked, kernels.module
    if unpacked is None or not unpacked.columns or module is None or not kernels.adds:
        return None
    _, why = KernelFamily(NAME_KEPT, (), lambda: module, lambda module: wrong_kept(module)).choose_alone(model.device)
    if why is not None:
        fall_back(why, NAME_KEPT)
        return None
    weights = KeptWeights(unpacked, groups, module)
    return Columns(weights, weights.groups, module, model.device)


def wrong(
    packed: Packed, room: Tensor, module: nvrtc.Module, *, tokens: Sequence[int] = (17, 64, 515),
    ranks: Sequence[int] = (8, 4, 20, 32),
) -> str | None:  # fmt: skip
    """Return the error of the kernels on this weight, None if there is none: random adapters of several ranks for up to three
    layers over one input, in float64. room: for the extended weight; its old content must not matter."""
    packed, device, (high, width) = packed.as_it_lies(), room.device, packed.shape
    random = random_values(device, 3)
    expected_weight = dequantize(packed).to(room.dtype)
    counts = torch.zeros(-(-max(tokens) // TOKENS), dtype=torch.int32, device=device)
    for number, n in enumerate(tokens):
        for layers in range(1, MOST_LAYERS + 1):
            own = [ranks[(number + layer) % len(ranks)] for layer in range(layers)]
            wide = extended_width(width, sum(own))
            if wide * high > room.numel():
                continue
            # Values of x lie between others that are not its own.
            x = random(n, width + 8).bfloat16()[:, :width]
            pairs = [(random(rank, width) / width**0.5, random(high, rank)) for rank in own]
            adapters = [lora.LinearAdapter("language", 0.5 + layer, A, B) for layer, (A, B) in enumerate(pairs)]
            room.fill_(torch.nan)
            out = torch.full((n, wide), torch.nan, dtype=x.dtype, device=device)
            low = torch.full((-(-width // _SLICE), n, sum(own)), torch.nan, device=device)
            extended = extend(x, adapters, counts, module, out=out, low=low)
            place, what = layers - 1, f"{n} tokens of {width} values, ranks {own}"
            A, B = pairs[place]
            weight = unpack_extended(packed, B, sum(own[:place]), wide, room, module)
            if not torch.equal(extended[:, :width], x) or not torch.equal(weight[:, :width], expected_weight):
                return f"{what}: the values in front of the columns are not x and the weight"
            if bool(counts.any()):
                return f"{what}: counters are not zero afterwards"
            change = adapters[place].scale * (x.double() @ A.double().T @ B.double().T)
            made = extended[:, width:].double() @ weight[:, width:].double().T
            if (error := relative_error(made, change)) >= LARGEST_COLUMN_ERROR:
                return f"{what}: relative error of the adapter {error:.1e}"
            rows = slice(0, CHECKED_ROWS)
            expected = x.double() @ expected_weight[rows].double().T + change[:, rows]
            if (error := relative_error(functional.linear(extended, weight)[:, rows], expected)) >= LARGEST_ERROR:
                return f"{what}: relative error {error:.1e}"
    return None


def wrong_kept(module: nvrtc.Module) -> str | None:
    """Return the error of products over weights that are kept with columns, None if there is none, in float64: three layers over
    one input, one of them without an adapter; columns of the adapter before must not be left."""
    from trimtab.engine.kernels.autotune import RandomWeights

    device, store = module.device, AdapterStore()
    random, make = random_values(device, 4), RandomWeights(device).make
    width = 1104  # two slices of the sums, the second one not whole
    layers: list[Leaf] = [
        ResidentLeaf(f"{rows} rows", make(rows, width), bias=None, device=device, dtype=torch.bfloat16, store=store)
        for rows in (96, 40, 64)
    ]
    unpacked = UnpackedWeights(layers, COLUMNS)
    for leaf in layers:
        whole = unpacked.extended([leaf])
        assert whole is not None
        whole[:, width:] = torch.nan
    weights = KeptWeights(unpacked, [layers], module)
    columns = Columns(weights, [layers], module, device)
    for number, (n, ranks) in enumerate(((17, (20, None, 12)), (130, (None, 8, 4)))):
        name, what = f"check {number}", f"{n} tokens of ranks {ranks}"
        x, wanted = random(n, width).bfloat16(), []
        for leaf, rank in zip(layers, ranks, strict=True):
            y = x.double() @ unpacked.weight(leaf).double().T
            if rank is not None:
                A, B = random(rank, width) / width**0.5, random(leaf.out_features, rank)
                leaf.adapters[name] = lora.LinearAdapter("language", 0.5, A, B)
                y += 0.5 * (x.double() @ A.double().T @ B.double().T)
            wanted.append(y)
        weights.hold(name, name, None)
        store.select(Selection(name))
        made, expected = MatmulTable(unpacked.matmul(columns=columns.operands)).product(layers, x), torch.cat(wanted, dim=1)
        if made is None or not made[1]:
            return f"{what}: no product with adapters"
        if (error := relative_error(made[0], expected)) >= LARGEST_ERROR:
            return f"{what}: relative error {error:.1e}"
        if bool(columns.counts.any()):
            return f"{what}: counts are left"
    return None


def runs(
    weights: Sequence[Packed], room: Tensor, counts: Tensor, kernels: PromptKernels, *, tokens: int = TIMED_TOKENS,
    rank: int = TIMED_RANK, step: int = STEP,
) -> tuple[Callable[[], object], Callable[[], object]]:  # fmt: skip
    """Return the function that computes layers over one input with their adapters here, and the one without this module."""
    module, device, width = kernels.module, room.device, weights[0].shape[1]
    adapters = [
        lora.LinearAdapter(
            "language", 0.5, torch.zeros(rank, width, device=device), torch.zeros(packed.shape[0], rank, device=device)
        )
        for packed in weights
    ]
    assert module is not None
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
    wide = extended_width(width, rank * len(weights), step)

    def ours() -> None:
        extended = extend(x, adapters, counts, module, step=step)
        for number, (packed, one) in enumerate(zip(weights, adapters, strict=True)):
            assert one.B is not None
            weight = unpack_extended(packed, one.B, rank * number, wide, room, module)
            functional.linear(extended, weight)

    def theirs() -> None:
        for packed, one in zip(weights, adapters, strict=True):
            assert one.A is not None and one.B is not None
            y = functional.linear(x, prompt_kernels.unpack(packed, room, module))
            if kernels.adds and rank <= prompt_kernels.PAYING_RANK:
                prompt_kernels.add(one.A, one.B, 0.5, x, y, module, round_change=True)
            else:
                y.add_(functional.linear(functional.linear(x.float(), one.A), one.B), alpha=0.5)

    return ours, theirs
