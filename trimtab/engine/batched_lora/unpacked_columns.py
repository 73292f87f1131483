"""The adapter of a prompt inside the products over weights that the plan keeps unpacked: columns.py has the method.

    columns = choose(prompts, groups)                # None where it is not possible or not right
    columns.hold(key, name, content)                 # before a pass: write its columns unless they are there
    columns.product(leaves, x)                       # in the pass

The columns are behind the rows of the weights and stay there. All of an adapter are written by one kernel before the first pass
that uses it, and not again until another adapter's turn: a captured graph reads the current ones. Products without an adapter use
the weights in front of them.

These are added to the products as before: layers over one input whose adapters have more than 64 ranks together, adapters that are
no plain LoRA, chunks of up to 16 tokens, and every adapter where the plan counted none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.cuda.check_cache import KeptChecks
from trimtab.engine.formats.matmul_table import Matmul
from trimtab.engine.layers.linear import Leaf
from trimtab.engine.lora import layers as lora
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.errors import DeviceError
from trimtab.planning.memory.unpacked import COLUMNS

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.layers.unpacked import UnpackedWeights

NAME = "adapters inside products of unpacked weights"
# Tables of adapters that are kept, beyond those of layouts in use.
MOST_TABLES = 8
# As in cuda/prompt.cu: columns of a block.
_WRITTEN = 2048
_THREADS = 256


@dataclass(eq=False)
class _Table:
    """One adapter's part in the groups, by their first layer: the layers that it changes. lines: of the kernel that writes its
    columns, with addresses alone: the tensors are the layers'. widest: columns of the largest weight."""

    name: str
    changed: dict[Leaf, tuple[Leaf, ...]]
    lines: Tensor | None
    widest: int


class UnpackedColumns:
    """Products of groups of layers over one input with an adapter inside. groups: the first layer of each tells it."""

    def __init__(
        self, unpacked: UnpackedWeights, groups: Sequence[Sequence[Leaf]], module: nvrtc.Module, device: torch.device
    ) -> None:
        self.unpacked, self.module, self.device = unpacked, module, device
        self.groups = [tuple(group) for group in groups if self._is_whole(group)]
        self._tables: OrderedDict[Hashable, _Table] = OrderedDict()
        self._table: _Table | None = None
        # One permanent piece: captured graphs have its address.
        tokens = adapter_columns.MOST_TOKENS // adapter_columns.TOKENS
        self._counts = torch.zeros(tokens, dtype=torch.int32, device=device)

    def matmul(self) -> Matmul[Callable[[Sequence[Leaf], Tensor], Tensor | None]]:
        """Return the way to compute base and adapter of the groups as one product."""
        firsts = {group[0] for group in self.groups}
        tokens = adapter_columns.LEAST_TOKENS, adapter_columns.MOST_TOKENS
        return Matmul("columns", firsts, self.product, *tokens, has_adapter=True)

    def _is_whole(self, group: Sequence[Leaf]) -> bool:
        return self.unpacked.extended(group) is not None and all(leaf.bias is None for leaf in group)

    def hold(self, key: Hashable, name: str | None, content: Hashable) -> None:
        """Use an adapter from now on. key: its part of a graph's key; name: in the layers; content: the digest that tells it
        from others of this key."""
        self._table = None
        if name is None:
            return
        if key not in self._tables:
            while len(self._tables) >= MOST_TABLES:
                self._tables.popitem(last=False)
            self._tables[key] = self._table_of(name)
        self._tables.move_to_end(key)
        table = self._table = self._tables[key]
        if table.lines is not None and self.unpacked.holds != (key, content):
            blocks = -(-table.widest // _WRITTEN)
            self.module.launch("write_columns", (blocks, len(table.lines)), (_THREADS,), [table.lines])
            self.unpacked.holds = (key, content)

    def _table_of(self, name: str) -> _Table:
        changed: dict[Leaf, tuple[Leaf, ...]] = {}
        lines: list[list[int]] = []
        widest = 0
        for group in self.groups:
            members = [(leaf, leaf.adapters.get(name)) for leaf in group]
            own = [one for _, one in members if one is not None]
            width, high = group[0].in_features, self.unpacked.columns
            if not own or not all(one is None or adapter_columns.fits(one, leaf) for leaf, one in members):
                continue
            end = adapter_columns.extended_width(width, sum(map(adapter_columns.rank_of, own)))
            if end > width + high:
                continue
            changed[group[0]] = tuple(leaf for leaf, one in members if one is not None)
            before = 0
            for leaf, one in members:
                rank = 0 if one is None else adapter_columns.rank_of(one)
                start = 0 if one is None or one.B is None else one.B.data_ptr()
                rows = self.unpacked.weight(leaf)
                lines.append([start, rows.data_ptr(), rank, before, leaf.out_features, width, end, width + high])
                before += rank
                widest = max(widest, leaf.out_features * (end - width))
        return _Table(name, changed, torch.tensor(lines, device=self.device) if lines else None, widest)

    def product(self, leaves: Sequence[Leaf], x: Tensor) -> Tensor | None:
        """Return [n, all D_out] of a group over x [n, D_in], its adapter inside; None where another way computes it."""
        table, (n, width) = self._table, x.shape
        changed = None if table is None else table.changed.get(leaves[0])
        if table is None or changed is None or not adapter_columns.LEAST_TOKENS <= n <= adapter_columns.MOST_TOKENS:
            return None
        if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            return None
        weight = self.unpacked.extended(leaves)
        assert weight is not None and leaves[0].in_features == width
        own = [leaf.adapters[table.name] for leaf in changed]
        extended = adapter_columns.extend(x, own, self._counts, self.module)
        return extended @ weight[:, : extended.shape[1]].T


def choose(prompts: Any, groups: Sequence[Sequence[Leaf]], fall_back: Callable[[str, str], None]) -> UnpackedColumns | None:
    """Return the products of a batch's prompts, None where there are no columns or where they are not right on this card.

    fall_back: called with the reason and the name if they could be but are not used.
    """
    model, kernels = prompts.model, prompts.kernels()
    if model.unpacked is None or not model.unpacked.columns or kernels.module is None or not kernels.adds:
        return None
    columns = UnpackedColumns(model.unpacked, groups, kernels.module, model.device)
    checks, key = KeptChecks.of(model.device), (NAME,)
    if checks.find(*key) is not None:
        return columns
    try:
        with torch.no_grad():
            why = wrong(kernels.module, model.device)
    except Exception as exc:  # a kernel that cannot be launched on this card, say: the slower way is correct
        if is_out_of_memory(exc):
            raise
        if not isinstance(exc, DeviceError):
            torch.zeros(1, device=model.device).item()  # raises if the device is lost: then nothing can run
        why = f"{type(exc).__name__}: {exc}"
    if why is not None:
        fall_back(why, NAME)
        return None
    checks.keep({"right": True}, *key)
    checks.save()
    return columns


class _Layer:
    """A layer as the check sees it."""

    bias, quant_kind = None, "nf4"

    def __init__(self, out_features: int, in_features: int, weight: Tensor) -> None:
        self.out_features, self.in_features, self.weight = out_features, in_features, weight
        self.adapters: dict[str, lora.LinearAdapter] = {}


class _Kept:
    """Weights with columns as the check has them, side by side."""

    def __init__(self, layers: Sequence[_Layer], columns: int) -> None:
        self.columns, self.holds = columns, None
        width, device = layers[0].in_features, layers[0].weight.device
        self._whole = torch.full((sum(one.out_features for one in layers), width + columns), float("nan"), device=device)
        self._whole = self._whole.bfloat16()
        self._starts: dict[_Layer, int] = {}
        start = 0
        for one in layers:
            self._starts[one] = start
            self._whole[start : start + one.out_features, :width] = one.weight
            start += one.out_features

    def extended(self, layers: Sequence[_Layer]) -> Tensor:
        return self._whole

    def weight(self, layer: _Layer) -> Tensor:
        start = self._starts[layer]
        return self._whole[start : start + layer.out_features, : layer.in_features]


def wrong(module: nvrtc.Module, device: torch.device, *, tokens: Sequence[int] = (17, 130)) -> str | None:
    """Return the error of products of adapters of several ranks, None if there is none, in float64: three layers over one input,
    one of them without an adapter; columns of the adapter before must not be left."""
    generator = torch.Generator(device=device).manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    width = 1104  # two slices of the sums, the second one not whole
    layers = [_Layer(rows, width, random(rows, width).bfloat16() / width**0.5) for rows in (96, 40, 64)]
    columns = UnpackedColumns(_Kept(layers, COLUMNS), [layers], module, device)  # type: ignore[arg-type, list-item]
    for number, (n, ranks) in enumerate(zip(tokens, ((20, None, 12), (None, 8, 4)), strict=False)):
        name = f"check {number}"
        for layer, rank in zip(layers, ranks, strict=True):
            if rank is not None:
                A, B = random(rank, width) / width**0.5, random(layer.out_features, rank)
                layer.adapters[name] = lora.LinearAdapter("language", 0.5, A, B)
        columns.hold(name, name, None)
        x = random(n, width).bfloat16()
        made = columns.product(layers, x)  # type: ignore[arg-type]
        if made is None:
            return f"{n} tokens of ranks {ranks}: no product"
        wanted = []
        for layer in layers:
            y, one = x.double() @ layer.weight.double().T, layer.adapters.get(name)
            if one is not None:
                assert one.A is not None and one.B is not None
                y = y + 0.5 * (x.double() @ one.A.double().T @ one.B.double().T)
            wanted.append(y)
        expected = torch.cat(wanted, dim=1)
        error = float((made.double() - expected).norm() / expected.norm())
        if not error < adapter_columns.LARGEST_ERROR:
            return f"{n} tokens of ranks {ranks}: relative error {error:.1e}"
        if bool(columns._counts.any()):
            return f"{n} tokens of ranks {ranks}: counts are left"
    return None
