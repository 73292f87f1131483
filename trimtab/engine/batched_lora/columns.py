"""LoRA of a prompt inside its layers' products: [x | v] times [W | B] with a longer inner dimension, and no pass over the output.

    columns = choose(model, kernels)              # None where it is not possible, not right or not faster
    columns.matmul()                              # a line of a MatmulTable: base and adapter in one product

v = scale * (A x) is computed in float32. v and B enter the product as bfloat16 parts, hi(v) = v rounded and lo(v) = v - hi(v)
rounded: hi(v) hi(B) + lo(v) hi(B) + hi(v) lo(B) is v B up to about 2^-17 of it. So a rank takes three columns. Layers that read
one tensor (q, k, v; gate, up) share one extended input [x | v of all of them | zeros]; a layer's weight has zeros in the columns of
the others. The kernel that unpacks the weight writes the columns of B in every pass: a captured graph reads the adapter that is in
its buffer then.

PEFT rounds the base product, the change and the sum. Here cuBLAS sums in float32 and rounds once, which is more precise.

`prompt_kernels.add` and torch compute the rest: float16, whose range the parts of v would leave; ranks above MOST_RANK; rows with
different adapters (table.py); DoRA and all but plain LoRA; weights that the plan keeps unpacked; models whose plan
counts no adapter, since the shared room for an unpacked weight then has no place for the columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.batched_lora.table import TOGETHER
from trimtab.engine.cuda.check_cache import KeptChecks
from trimtab.engine.formats.matmul_table import LayerProduct, Matmul
from trimtab.engine.formats.packed import Packed
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.gemm4 import PAYING_ROWS
from trimtab.engine.layers.linear import Leaf
from trimtab.engine.lora import fewer_ops as short_ops
from trimtab.engine.lora import layers as lora
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.errors import DeviceError
from trimtab.formats.record import stored_format
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS

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
NAME = "adapters inside products of a prompt"

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


def fits(adapter: Any, leaf: Leaf) -> bool:
    """Whether the kernels know this adapter of a layer."""
    if not short_ops.is_plain(adapter):
        return False
    A, B = adapter.A, adapter.B
    return bool(
        A.shape[0] <= MOST_RANK and B.dtype == torch.float32 and A.is_contiguous() and B.is_contiguous()
        and A.data_ptr() % 16 == 0 and leaf.in_features % 16 == 0
        and prompt_kernels.is_read(leaf) and not stored_format(leaf.quant_kind).has_rounding  # an adapter reads x as it was
    )  # fmt: skip


def groups_of(leaves: Sequence[Leaf]) -> dict[Leaf, tuple[Leaf, ...]]:
    """Return for each layer those that read its input, itself among them, in the order in which they run."""
    siblings: dict[tuple[str, int], dict[str, Leaf]] = {}
    for leaf in leaves:
        parent, _, last = leaf.module_path.rpartition(".")
        siblings.setdefault((parent, leaf.in_features), {})[last] = leaf
    groups: dict[Leaf, tuple[Leaf, ...]] = {leaf: (leaf,) for leaf in leaves}
    for here in siblings.values():
        for names in TOGETHER:
            group = tuple(here[name] for name in names if name in here)
            groups |= dict.fromkeys(group, group)
    return groups


class AdapterColumns:
    """Products of layers with their adapters inside, for one model's prompts. kernels: have the room that weights are unpacked
    into."""

    def __init__(self, leaves: Sequence[Leaf], kernels: PromptKernels, device: torch.device) -> None:
        self.leaves, self.kernels = list(leaves), kernels
        assert kernels.module is not None
        self.module = kernels.module
        self._groups = groups_of(self.leaves)
        # One permanent piece: captured graphs have its address.
        self.counts = torch.zeros(MOST_TOKENS // TOKENS, dtype=torch.int32, device=device)
        # The last extended input while layers of its group are still to run: x, its version, the adapters, the result.
        self._last: tuple[weakref.ref[Tensor], int, tuple[object, ...], Tensor] | None = None

    def matmul(self) -> Matmul[LayerProduct]:
        """Return the way to compute base and adapter of the layers as one product. Call `forget` after each pass."""
        return Matmul("columns", self._groups, self.product, LEAST_TOKENS, MOST_TOKENS, has_adapter=True)

    def forget(self) -> None:
        """Drop the extended input of a pass that has ended."""
        self._last = None

    def product(self, leaf: Leaf, x: Tensor) -> Tensor | None:
        """Return the layer's output with its adapter, [..., D_out], None where another way computes it."""
        store = leaf.adapter_store
        name = store.selection.name
        if name is None or store.table is not None or x.dtype != torch.bfloat16:
            return None
        flat = x.reshape(-1, x.shape[-1])
        if flat.stride(1) != 1 or flat.stride(0) % 8 or flat.data_ptr() % 16:
            return None
        # Whether a tensor that counts no versions was changed in between is not known.
        group = (leaf,) if x.is_inference() else self._groups[leaf]
        found = [(one, one.adapters.get(name)) for one in group]
        members = [(one, adapter) for one, adapter in found if adapter is not None and fits(adapter, one)]
        place = next((number for number, (one, _) in enumerate(members) if one is leaf), None)
        if place is None:
            return None
        adapters = tuple(adapter for _, adapter in members if adapter is not None)
        ranks = [rank_of(one) for one in adapters]
        wide = extended_width(leaf.in_features, sum(ranks))
        packed, room = leaf.packed(), self.kernels.room(x.dtype)
        # The plan counts an extended input that is at most twice x (planning/memory/activations.py).
        if wide > 2 * leaf.in_features or room is None or room.numel() < leaf.out_features * wide:
            return None
        if not prompt_kernels.fits_type(packed, x.dtype) or not prompt_kernels.can_unpack(packed):
            return None
        extended = self._extended(x, flat, adapters, is_last=place == len(members) - 1)
        B = adapters[place].B
        assert B is not None
        weight = unpack_extended(packed, B, sum(ranks[:place]), wide, room, self.module)
        return functional.linear(extended, weight, leaf.bias).view(*x.shape[:-1], leaf.out_features)

    def _extended(self, x: Tensor, flat: Tensor, adapters: tuple[lora.LinearAdapter, ...], *, is_last: bool) -> Tensor:
        """Return the extended input of a group, the one made for a layer before if x has not changed since."""
        if self._last is not None:
            seen, version, of, extended = self._last
            if seen() is x and version == x._version and of == adapters:
                self._last = None if is_last else self._last
                return extended
        self._last = None  # its memory is free for the next
        extended = extend(flat, adapters, self.counts, self.module)
        if not is_last:
            self._last = weakref.ref(x), x._version, adapters, extended
        return extended


def rank_of(adapter: lora.LinearAdapter) -> int:
    assert adapter.A is not None
    return int(adapter.A.shape[0])


# Whether a model uses it ---------------------------------------------------------------------------------------------


def choose(model: EngineContext, kernels: PromptKernels, fall_back: Callable[[str, str], None]) -> AdapterColumns | None:
    """Return the products with adapters inside, None where they are not possible, not right or not faster on this card.

    fall_back: called with the reason and the name if they could be but are not used.
    """
    leaves = prompt_kernels.four_bit(model.hf_model)
    if not kernels.unpacks or model.unpacked is not None or kernels.room(torch.bfloat16) is None:
        return None
    if not prompt_kernels.has_adapters(model):
        return None
    known = [one for one in leaves if one.in_features % 16 == 0 and one.dtype == torch.bfloat16]
    leaf = prompt_kernels.tried_leaf(known)
    if leaf is None:
        return None
    columns = AdapterColumns(leaves, kernels, model.device)
    why = _why_not(columns, leaf)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the tensors of checks and timings are free
    if why is not None:
        fall_back(why, NAME)
        return None
    return columns


def _why_not(columns: AdapterColumns, leaf: Leaf) -> str | None:
    kernels, device = columns.kernels, columns.counts.device
    checks = KeptChecks.of(device)
    key = (NAME, leaf.quant_kind, leaf.out_features, leaf.in_features, sorted(leaf.packed().parts), kernels.adds)
    before = checks.find(*key)
    if before is not None:
        kernels.measured_us[NAME] = (before["us"][0], before["us"][1])
        return None
    try:
        with torch.no_grad():
            room = kernels.room(torch.bfloat16)
            assert room is not None
            why = wrong(leaf.packed(), room, columns.module)
            if why is None:
                ours, theirs = runs([leaf.packed()], room, columns.counts, kernels)
                why = prompt_kernels.why_slower(kernels, NAME, ours, theirs, device)
    except Exception as exc:  # a kernel that cannot be launched on this card, say: the slower way is correct
        if is_out_of_memory(exc):
            raise
        if not isinstance(exc, DeviceError):
            torch.zeros(1, device=device).item()  # raises if the device is lost: then nothing can run
        return f"{type(exc).__name__}: {exc}"
    if why is None:
        checks.keep({"us": kernels.measured_us[NAME]}, *key)
        checks.save()
    return why


def wrong(
    packed: Packed, room: Tensor, module: nvrtc.Module, *, tokens: Sequence[int] = (17, 64, 515),
    ranks: Sequence[int] = (8, 4, 20, 32),
) -> str | None:  # fmt: skip
    """Return the error of the kernels on this weight, None if there is none: random adapters of several ranks for up to three
    layers over one input, in float64. room: for the extended weight; its old content must not matter."""
    device, (high, width) = room.device, packed.shape
    generator = torch.Generator(device=device).manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

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
            error = float((made - change).norm() / change.norm())
            if not error < LARGEST_COLUMN_ERROR:
                return f"{what}: relative error of the adapter {error:.1e}"
            rows = slice(0, CHECKED_ROWS)
            expected = x.double() @ expected_weight[rows].double().T + change[:, rows]
            error = float((functional.linear(extended, weight)[:, rows].double() - expected).norm() / expected.norm())
            if not error < LARGEST_ERROR:
                return f"{what}: relative error {error:.1e}"
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
