"""Which layers replace Linears and embeddings in the module tree, each computing with a weight that a tier holds?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.engine.formats.packed import Columns, LayerProduct, Matmul, NoValues, Packed, Shell, is_narrow, widened
from trimtab.engine.formats.weights import dequantize, dequantize_at, dequantize_rows, shell, unpacked_shell
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.tiers.reader import PositionedFile, bytes_of, seen_by
from trimtab.engine.tiers.streaming import Group, Staged
from trimtab.formats.record import DEQUANTIZED_BYTES, rounds_change, stored_format
from trimtab.planning.planner import ITEM, aligned, columns_of
from trimtab.planning.values.execution import CHECK_BYTES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trimtab.engine.formats.hf_types import PlacedModel


class LayerOptions(TypedDict):
    device: torch.device
    dtype: torch.dtype
    store: AdapterStore


class LeafOptions(LayerOptions):
    bias: Tensor | None


class TableOptions(LayerOptions, total=False):
    embed_scale: Tensor | None
    padding_idx: int | None
    exact_scale: float | None


class Leaf(nn.Module):
    """A linear layer whose weight lives in a tier, with its adapters: x [..., D_in] -> y [..., D_out].

    It replaces the Linear at its module path. `weight` is the real tensor when it is resident, unquantized and in the computing
    dtype, otherwise a tensor without data of the weight's shape in that dtype, so that code which only reads a shape or a dtype is
    right (transformers 5.6.2 casts pixels to the dtype it finds there) and code that reads values is refused. A leaf whose block is
    not staged fetches it, so the answer never depends on the order of calls.
    """

    def __init__(
        self, module_path: str, shape: tuple[int, int], *, quant_kind: str, bias: Tensor | None, device: torch.device,
        dtype: torch.dtype, store: AdapterStore,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module_path, self.quant_kind, self.device, self.dtype = module_path, quant_kind, device, dtype
        self.out_features, self.in_features = shape
        self.adapter_store = store
        self.adapters: dict[str, lora.LinearAdapter] = {}
        # Not a Parameter: nothing may move, cast or save it behind the tier's back.
        self.bias: Tensor | None
        self.__dict__["bias"] = bias
        self.__dict__["ghost"] = NoValues.of(module_path, shape, dtype)

    @property
    def weight(self) -> Tensor:
        return self.__dict__["ghost"]

    def base(self, x: Tensor) -> Tensor:
        """Return the layer's output without any adapter, computed by its format's own library."""
        raise NotImplementedError

    def packed(self) -> Packed:
        """Return the weight in its stored form on the execution device, valid until the next call into the model."""
        raise NotImplementedError

    def dense_weight(self) -> Tensor:
        """Return the dequantized weight [D_out, D_in] on the execution device."""
        return self._widened(dequantize(self.packed()), copy=True)

    def dense_rows(self, start: int, stop: int) -> Tensor:
        """Return some rows of the dequantized weight, [stop - start, D_in], in separate memory on the execution device."""
        return self._widened(dequantize_rows(self.packed(), start, stop, self.device))

    def _widened(self, weight: Tensor, *, copy: bool = False) -> Tensor:
        """Return the weight in the type in which it is computed with: of bitsandbytes' formats in that of the format."""
        if self.quant_kind == "none":
            return widened(weight, self.dtype, copy=copy)
        return weight if rounds_change(self.quant_kind) else weight.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        table = self.adapter_store.matmuls
        y, has_adapter = (None if table is None else table.product(self, x)) or (self.base(x), False)
        return y if has_adapter else self.adapted(x, y)

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's base output y for x with the adapters of the selected rows; y may be overwritten."""
        return self.adapter_store.applier.apply(self, x, y)


class StationaryLinear(Leaf):
    """The weight stays where it is computed with."""

    def __init__(self, module_path: str, packed: Packed, own_bias: Tensor | None, **kwargs: Unpack[LeafOptions]) -> None:
        super().__init__(module_path, (packed.shape[0], packed.shape[1]), quant_kind=packed.kind, **kwargs)
        self._packed, self._own_bias = packed, own_bias
        self.__dict__["shell"] = shell(packed, own_bias, self.dtype)

    @property
    def stored(self) -> Packed:
        """The weight in its stored form, where it is."""
        return self._packed

    def dense_rows(self, start: int, stop: int) -> Tensor:
        return self._widened(dequantize_rows(self._packed, start, stop, self.device))


class ResidentLeaf(StationaryLinear):
    """The weight stays on the execution device."""

    def __init__(self, module_path: str, packed: Packed, **kwargs: Unpack[LeafOptions]) -> None:
        super().__init__(module_path, packed, kwargs["bias"], **kwargs)

    @property
    def weight(self) -> Tensor:
        if self.quant_kind == "none" and not is_narrow(self._packed.dtype, self.dtype):
            return self._packed.parts["weight"]
        return self.__dict__["ghost"]

    def base(self, x: Tensor) -> Tensor:
        return self.__dict__["shell"](x)

    def packed(self) -> Packed:
        return self.stored

    def keep_unpacked(self, weight: Tensor) -> None:
        """Compute with this copy of the weight, unpacked, [D_out, D_in]: the same bits on a CPU."""
        self.__dict__["shell"] = unpacked_shell(self._packed, weight, self._own_bias)


class StagedLinear(Leaf):
    """The weight is in host memory or on disk and is copied to the execution device block by block."""

    def __init__(self, module_path: str, staged: Staged, **kwargs: Unpack[LeafOptions]) -> None:
        shape = staged.packed.shape
        super().__init__(module_path, (shape[0], shape[1]), quant_kind=staged.packed.kind, **kwargs)
        self.staged = staged
        self._shells: dict[int, Shell] = {}

    def base(self, x: Tensor) -> Tensor:
        index, packed = self.staged.open()
        layer = self._shells.get(index)
        if layer is None:
            layer = self._shells[index] = shell(packed, self.bias, self.dtype)
        return layer(x)

    def packed(self) -> Packed:
        return self.staged.open()[1]


class HostLeaf(StationaryLinear):
    """The weight stays in host memory and the CPU computes with it; activations move."""

    def __init__(self, module_path: str, packed: Packed, **kwargs: Unpack[LeafOptions]) -> None:
        bias = kwargs["bias"]
        super().__init__(module_path, packed, None if bias is None else bias.cpu(), **kwargs)

    def base(self, x: Tensor) -> Tensor:
        y: Tensor = self.__dict__["shell"](x.cpu())
        return y.to(x.device)

    def packed(self) -> Packed:
        return self.stored.to(self.device)


def packed_together(leaves: Sequence[Leaf]) -> list[Packed]:
    """Return the packed weights of layers that one kernel reads.

    Errors: RuntimeError if streamed ones are in several pieces: opening the next would give the place of the one before to others.
    """
    staged = [leaf.staged for leaf in leaves if isinstance(leaf, StagedLinear)]
    if any((one.group, one.piece) != (staged[0].group, staged[0].piece) for one in staged):
        raise RuntimeError(f"{leaves[0].module_path} and what is computed with it are copied in several pieces")
    return [leaf.packed() for leaf in leaves]


def staged_in(module: nn.Module) -> Iterator[Staged]:
    """Yield the places of the streamed weights of a module's layers."""
    return (leaf.staged for leaf in module.modules() if isinstance(leaf, StagedLinear))


def last_reader(block: nn.Module, group: Group) -> nn.Module:
    """Return the module after which nothing reads a streamed block: the only one that reads it, or all of the block."""
    readers = [one for one in block.modules() if getattr(vars(one).get("staged"), "group", None) is group]
    return readers[0] if len(readers) == 1 else block


def stage_parameters(module: nn.Module, staged: Staged) -> None:
    """Make the named parameters of a module (fused experts, [E, D_out, D_in]) views of their staged block.

    The module keeps its path, class name and forward; only reading such a parameter enters the block.
    """

    def reader(name: str) -> property:
        return property(lambda self: self.__dict__["staged"].open()[1].parts[name])

    for name in staged.places:
        del module._parameters[name]
    module.__dict__["staged"] = staged
    original = type(module)
    module.__class__ = type(original.__name__, (original,), {name: reader(name) for name in staged.places})


def compute_on_host(module: nn.Module) -> None:
    """Make a module whose tensors are on the CPU (fused experts) compute there; its inputs and output move."""
    inner: Callable[..., Tensor] = module.forward

    def forward(*args: object, **kwargs: object) -> Tensor:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        on_cpu = [value.cpu() if isinstance(value, Tensor) else value for value in args]
        named = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        return inner(*on_cpu, **named).to(device)

    module.forward = forward  # type: ignore[method-assign]


class Dequantized:
    """The way to multiply by cuBLAS with weights of `Leaf`s that are dequantized: before, or for each product. Subclasses say where
    a weight is."""

    def dense(self, leaves: Sequence[Leaf], x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the input [..., K] and the weight [all D_out, K] of layers over x; None where there are none for these."""
        raise NotImplementedError

    def rounded(self, leaf: Leaf, y: Tensor) -> Tensor:
        """Return a layer's product as its format rounds it."""
        return y

    def product(self, layers: Leaf | Sequence[Leaf], x: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """Return the product [..., D_out] of a layer, or of layers over one input; None without operands. weight: theirs with
        columns, as x has them."""
        leaves = (layers,) if isinstance(layers, Leaf) else layers
        if len(leaves) > 1 and any(leaf.bias is not None for leaf in leaves):
            return None
        if weight is not None:
            return functional.linear(x, weight, leaves[0].bias)
        found = self.dense(leaves, x)
        return None if found is None else self.rounded(leaves[0], functional.linear(*found, leaves[0].bias))

    def way(self, layers: Collection[Leaf], least: int, columns: Columns | None) -> Matmul[LayerProduct]:
        """Return the line of a table, for `least` rows and more. columns: gives weights with adapters."""
        return Matmul("dequantized", layers, self.product, least, columns=columns)


class UnpackedWeights(Dequantized):
    """The weights of some layers, of one type. Shapes: each [D_out, D_in]. columns: values behind each row, zeros at first; holds:
    the adapter in them, None for none. at_once: as of `weights.dequantize`. They are the bits that bitsandbytes unpacks. They lie
    in one piece of memory in the order of the modules: layers over one input that follow one another are one matrix. Behind each
    row there may be columns for the adapter of a prompt (columns.py)."""

    def __init__(self, leaves: Sequence[Leaf], columns: int = 0, *, at_once: int = 0) -> None:
        self.columns = columns
        self.holds: Hashable = None
        # Each starts where torch would start a tensor: a product's sums may depend on the alignment of its operands.
        sizes = [aligned(leaf.out_features * (leaf.in_features + columns)) for leaf in leaves]
        make = torch.zeros if columns else torch.empty
        self._flat = make(sum(sizes), dtype=leaves[0].dtype, device=leaves[0].device)
        self._starts: dict[Leaf, int] = {}
        start = 0
        for leaf, size in zip(leaves, sizes, strict=True):
            self._starts[leaf] = start
            dequantize(leaf.packed(), self.weight(leaf), at_once=at_once)
            start += size

    @classmethod
    def of(cls, model: PlacedModel) -> UnpackedWeights | None:
        """Return the weights that a model's plan keeps unpacked, None if it keeps none."""
        if ITEM not in model.plan.gpu:
            return None
        leaves = [
            one for one in model.hf_model.get_decoder().modules()
            if isinstance(one, ResidentLeaf) and stored_format(one.quant_kind).is_dequantized and one.dtype == model.dtype
            # Products of several layers at once do not round activations (`mobile`); a plan counts none, an edited one might.
            and (model.device.type == "cpu" or not stored_format(one.quant_kind).has_rounding)
            # Of another type, releases of bitsandbytes round in different places.
            and (one.packed().dtype == one.dtype or not rounds_change(one.quant_kind))
        ]  # fmt: skip
        # The memory in which kernels are checked later.
        at_once = (
            CHECK_BYTES // DEQUANTIZED_BYTES if model.device.type == "cuda" and model.plan.execution.step.mode == "fused" else 0
        )
        with torch.no_grad():
            return cls(leaves, columns_of(model.plan), at_once=at_once) if leaves else None

    @property
    def nbytes(self) -> int:
        return int(self._flat.nbytes)

    def weight(self, leaf: Leaf) -> Tensor:
        """Return a layer's weight. Errors: KeyError for a layer that is not among them."""
        start, wide = self._starts[leaf], leaf.in_features + self.columns
        return self._flat[start : start + leaf.out_features * wide].view(-1, wide)[:, : leaf.in_features]

    def joined(self, leaves: Sequence[Leaf]) -> Tensor | None:
        """Return the weights of layers over one input as one [all D_out, D_in], None where they do not lie side by side."""
        extended = self.extended(leaves)
        return None if extended is None else extended[:, : leaves[0].in_features]

    def extended(self, leaves: Sequence[Leaf]) -> Tensor | None:
        """Return the same with its columns, [all D_out, D_in + columns]."""
        wide, start = leaves[0].in_features, self._starts.get(leaves[0])
        if start is None:
            return None
        end = start
        for leaf in leaves:
            if self._starts.get(leaf) != end or leaf.in_features != wide:
                return None
            end += leaf.out_features * (wide + self.columns)
        return self._flat[start:end].view(-1, wide + self.columns)

    def replace_products(self) -> None:
        """Let every product of the layers read these weights from now on, on a CPU: the same bits, and nothing is unpacked."""
        for leaf in self._starts:
            if isinstance(leaf, ResidentLeaf):
                leaf.keep_unpacked(self.weight(leaf))

    @property
    def layers(self) -> Collection[Leaf]:
        """The layers whose weights these are."""
        return self._starts.keys()

    def matmul(self, *, least: int = 1, columns: Columns | None = None) -> Matmul[LayerProduct]:
        """Return the way to multiply `least` rows and more with these weights. columns: gives them with adapters."""
        return self.way(self.layers, least, columns)

    def dense(self, leaves: Sequence[Leaf], x: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Dequantized`; None where x has another type than the weights, or where these do not lie side by side."""
        weight = self.joined(leaves)
        return None if weight is None or x.dtype != weight.dtype else (x, weight)


def keep_unpacked(model: PlacedModel) -> tuple[UnpackedWeights | None, int]:
    """Return the weights that a model's kernels multiply with, None for none, and the bytes of those that a CPU's layers keep."""
    kept = UnpackedWeights.of(model)
    if kept is None or model.device.type != "cpu":
        return kept, 0
    kept.replace_products()
    return None, kept.nbytes


# Embeddings -----------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """An embedding table with its adapters: ids [B, S] -> rows [B, S, D]. embed_scale: the factor of the original class, or
    None. exact_scale: that factor where it is not rounded to the rows' type first. Subclasses store the rows."""

    def __init__(
        self, module_path: str, shape: tuple[int, int], *, embed_scale: Tensor | None, device: torch.device,
        dtype: torch.dtype, store: AdapterStore, padding_idx: int | None,
        exact_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module_path, self.device, self.dtype, self.adapter_store = module_path, device, dtype, store
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx, self.exact_scale = padding_idx, exact_scale
        self.adapters: dict[str, lora.EmbeddingAdapter] = {}
        self.embed_scale: Tensor | None
        self.__dict__["embed_scale"] = embed_scale

    def rows(self, ids: Tensor) -> Tensor:
        """Return the unscaled rows of ids on the execution device."""
        raise NotImplementedError

    def held(self) -> tuple[Tensor, bool] | None:
        """Return the table that `rows` reads on the execution device [V, D], and whether its rows are those of the ids in order
        (instead of by id); None if they come from elsewhere."""
        return None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        if self.exact_scale is not None:
            rows = rows * self.exact_scale
        elif self.embed_scale is not None:
            rows = rows * self.embed_scale.to(rows.dtype)
        return self.adapter_store.applier.apply(self, ids, rows)


class ResidentTable(Table):
    """The whole table is on the execution device; a tied head may share it. Its rows are widened where it is stored in fewer bits
    than the model computes with; then it is no parameter, because transformers takes a model's dtype from its first parameter."""

    def __init__(self, module_path: str, weight: nn.Parameter, **kwargs: Unpack[TableOptions]) -> None:
        super().__init__(module_path, (weight.shape[0], weight.shape[1]), **kwargs)
        if is_narrow(weight.dtype, self.dtype):
            self.__dict__["weight"] = weight.data
        else:
            self.weight = weight

    def rows(self, ids: Tensor) -> Tensor:
        return widened(nn.functional.embedding(ids, self.weight), self.dtype)

    def held(self) -> tuple[Tensor, bool] | None:
        return self.weight, False


class PackedTable(Table):
    """The whole table is on the execution device as its file stores it; `read` dequantizes the rows of the tokens. `weight` is the
    first few rows, as in `GatheredTable`."""

    def __init__(self, module_path: str, packed: Packed, first_rows: int, **kwargs: Unpack[TableOptions]) -> None:
        super().__init__(module_path, (packed.shape[0], packed.shape[1]), **kwargs)
        self.stored = packed
        self.read: Callable[[Packed, Tensor], Tensor] = dequantize_at
        self.__dict__["weight"] = dequantize_rows(packed, 0, min(first_rows, packed.shape[0]), self.device).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.read(self.stored, ids.reshape(-1)).to(self.dtype).view(*ids.shape, self.embedding_dim)


class GatheredTable(Table):
    """The table stays in host memory or in the checkpoint file; only the requested rows are fetched.

    source: the table [V, D] on the CPU, or what reads its rows. `weight` is the first few rows on the
    execution device: Gemma4Model.forward reads the padding row of its token table on every call. `seen` is the table in host
    memory as the device itself reads it, None where that is unavailable: then the host has to fetch the rows of every step.
    """

    def __init__(
        self, module_path: str, shape: tuple[int, int], source: Tensor | FileRows | PackedRows, first_rows: int,
        **kwargs: Unpack[TableOptions],
    ) -> None:  # fmt: skip
        super().__init__(module_path, shape, **kwargs)
        self.source = source
        self.seen: Tensor | None
        cuda = self.device.type == "cuda"
        self._pinned = cuda
        # While `reads_staged`, rows are those that `stage` put on the device: a captured step cannot ask the host.
        self.reads_staged = False
        # By places: a captured step keeps reading the buffer of its batch size, so none is ever freed.
        self._buffers_of: dict[int, Tensor] = {}
        self._staged: Tensor | None = None
        self.__dict__["seen"] = seen_by(source, self.device) if isinstance(source, Tensor) else None
        self.stored = source.seen_by(self.device) if isinstance(source, PackedRows) else None
        self.read: Callable[[Packed, Tensor], Tensor] = dequantize_at
        ids = torch.arange(min(first_rows, shape[0]))
        self.__dict__["weight"] = widened(self._gather(ids).to(self.device), self.dtype)

    @property
    def asks_host(self) -> bool:
        """Whether the host fetches the rows of every step."""
        return self.seen is None and self.stored is None

    def _gather(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"{self.module_path}: token id outside 0..{self.num_embeddings - 1}")
        if isinstance(self.source, Tensor):
            rows = torch.empty(ids.numel(), self.embedding_dim, dtype=self.source.dtype, pin_memory=self._pinned)
            return torch.index_select(self.source, 0, ids, out=rows)
        return self.source.read(ids, self.dtype, pinned=self._pinned)

    def stage(self, ids: Tensor, places: int) -> None:
        """Fetch the rows of one step's tokens (ids [N] on the CPU) into a buffer of `places` rows that stays where it is."""
        if places not in self._buffers_of:
            self._buffers_of[places] = torch.zeros(places, self.embedding_dim, dtype=self.dtype, device=self.device)
        self._staged = self._buffers_of[places]
        self._staged[: ids.numel()].copy_(self._gather(ids), non_blocking=True)

    def rows(self, ids: Tensor) -> Tensor:
        if self.seen is not None:
            return widened(nn.functional.embedding(ids, self.seen), self.dtype)
        if self.stored is not None:
            return self.read(self.stored, ids.reshape(-1)).to(self.dtype).view(*ids.shape, self.embedding_dim)
        if self.reads_staged:
            assert self._staged is not None
            return self._staged[: ids.numel()].view(*ids.shape, self.embedding_dim)
        flat = ids.reshape(-1).cpu()
        rows = widened(self._gather(flat).to(self.device, non_blocking=True), self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    def held(self) -> tuple[Tensor, bool] | None:
        if self.seen is not None:
            return self.seen, False
        return (self._staged, True) if self.reads_staged and self._staged is not None else None


def asking_host(hf_model: nn.Module) -> list[GatheredTable]:
    """Return the tables of a model whose rows the host fetches."""
    return [one for one in hf_model.modules() if isinstance(one, GatheredTable) and one.asks_host]


@contextmanager
def reading_staged(staged: Sequence[GatheredTable]) -> Iterator[None]:
    """Let tables give the rows that `stage` put on the device while the block runs."""
    for table in staged:
        table.reads_staged = True
    try:
        yield
    finally:
        for table in staged:
            table.reads_staged = False


class FileRows:
    """The rows of a table left in its checkpoint file: nothing read at load, no memory, rows read as they are needed."""

    def __init__(self, path: Path, start: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.file, self.start, self.shape, self.dtype = PositionedFile(path), start, shape, dtype

    def read(self, ids: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return rows [N, D]. Errors: CheckpointError if the file changed since it was opened."""
        self.file.check()
        rows = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype, pin_memory=pinned)
        width = self.shape[1] * rows.element_size()
        view = bytes_of(rows) if rows.numel() else memoryview(b"")
        for place, row in enumerate(ids.tolist()):
            self.file.read_into(view[place * width : (place + 1) * width], self.start + row * width)
        return rows if rows.dtype == dtype else rows.to(dtype)

    def close(self) -> None:
        self.file.close()


class PackedRows:
    """The rows of a table that is packed, in host memory or with its parts left in the checkpoint file."""

    def __init__(self, packed: Packed, files: Mapping[str, FileRows] | None = None) -> None:
        self.packed, self.files = packed, files

    def seen_by(self, device: torch.device) -> Packed | None:
        """Return the table as a device reads it in host memory; None where that is impossible, or it is in a file."""
        parts = {} if self.files is not None else {name: seen_by(part, device) for name, part in self.packed.parts.items()}
        seen = {name: part for name, part in parts.items() if part is not None}
        if not seen or len(seen) < len(parts):
            return None
        return self.packed.with_parts(seen, {name: code.to(device) for name, code in self.packed.codes.items()})

    def read(self, ids: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return rows [N, D]. Errors: CheckpointError if the file changed since it was opened."""
        packed = self.packed
        if self.files is not None:
            parts = {name: rows.read(ids, rows.dtype, pinned=False) for name, rows in self.files.items()}
            packed, ids = replace(packed, shape=(len(ids), packed.shape[1]), parts=parts), torch.arange(len(ids))
        rows = dequantize_at(packed, ids).to(dtype)
        return rows.pin_memory() if pinned else rows
