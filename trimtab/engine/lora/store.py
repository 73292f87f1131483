"""Which adapters does a loaded model have, which one does each row of a pass use, and how does a layer add it?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget
from trimtab.adapters.file import TENSORS_NAME, check_values
from trimtab.checkpoint.names import near_names
from trimtab.engine.formats.packed import LayerProduct, MatmulTable
from trimtab.engine.tiers.reader import HostMemory, Part, PositionedFile, aligned, bytes_of, read_small
from trimtab.errors import AdapterError, RequestError

# Towers see images and audio, not rows: the first dimension of their input is another count.
TOWERS = ("vision", "audio", "connector")
# (adapter, the places in x of its rows, on the device)
Groups: TypeAlias = Sequence[tuple[str, Tensor]]


class AdaptedLayer(Protocol):
    """A layer, router or embedding table as an applier sees it. adapters: by name, each with `apply` for such a layer."""

    @property
    def adapters(self) -> Mapping[str, Any]: ...

    @property
    def adapter_store(self) -> AdapterStore: ...


class AdapterTable(Protocol):
    """A table on the device from which kernels read each row's adapter."""

    def empty(self, count: int) -> None:
        """Prepare the scratch of a pass of `count` rows for its products. Called once for each pass."""

    def args(self, leaves: Sequence[Any], rows: int, *, is_empty: bool = False) -> Any:
        """Return a `gemv4.LoraArgs` for layers that read one input, None if no adapter changes them."""


class AdapterApplier(Protocol):
    """Adds the adapters of the selected rows to the output of a layer, and of each expert."""

    @property
    def table(self) -> AdapterTable | None:
        """Where kernels look adapters up instead of `apply`, None where no adapter can be looked up."""

    def apply(self, layer: AdaptedLayer, x: Tensor, y: Tensor, groups: Groups | None = None) -> Tensor:
        """Return the output y [B, ..., D_out] of a layer or embedding table for x [B, ..., D_in] (or ids [B, S]) with each row's
        adapter. groups: of an expert's product, whose x is the tokens that chose it, while rows differ. y may be overwritten.
        Errors: RequestError if rows use different adapters and x is not in batch rows."""

    def expert_args(self, module: nn.Module, rows: int) -> Any:
        """Return an `ExpertLora` (engine/kernels/experts.py) with which kernels compute a module of experts, None if no adapter
        changes it or if the module asks `apply` for each expert."""


@dataclass(frozen=True)
class Selection:
    """The adapter of every row of a pass: `name` for all of them (None: the base) or, while rows differ, rows[i].

    towers: the same for the images ("vision", "connector") or audio clips ("audio") of the batch, in the order in which the tower
    gets them; needed only where rows differ and an adapter changes that part.
    """

    name: str | None = None
    rows: tuple[str | None, ...] | None = None
    towers: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict, hash=False)
    # The row numbers of each adapter, by rows and device: on the device they are tensors that a graph reads by address.
    indices: dict[tuple[tuple[str | None, ...], torch.device], list[tuple[str, Tensor]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of_rows(cls, rows: Sequence[str | None], towers: Mapping[str, Sequence[str | None]] | None = None) -> Selection:
        """Return the selection of rows[i] for row i. Errors: RequestError for no rows or an unknown tower."""
        towers = towers or {}
        for part in towers:
            if part not in TOWERS:
                raise RequestError("not a tower", field="towers", value=part, allowed=TOWERS)
        if not rows:
            raise RequestError("a batch has at least one row", field="rows", value=list(rows))
        if len(set(rows)) == 1:
            return cls(rows[0])
        return cls(None, tuple(rows), {part: tuple(names) for part, names in towers.items()})

    def active(self) -> tuple[str | None, ...]:
        """Return the adapters in use: one entry for all rows, or one per row."""
        return (self.name,) if self.rows is None else self.rows

    def groups(self, part: str, count: int, device: torch.device) -> list[tuple[str, Tensor]]:
        """Return (adapter, row numbers on the device) for a module of `part` whose input has `count` rows.

        Errors: RequestError if it is not known which adapter each of those rows belongs to.
        """
        assert self.rows is not None
        rows = self.towers.get(part) if part in TOWERS else self.rows
        if rows is None or len(rows) != count:
            known = f"{len(rows)} are selected" if rows is not None else f"pass towers={{{part!r}: [...]}}"
            raise RequestError(
                f"rows of this batch use different adapters, but which one each of the {count} inputs of the {part} "
                f"part belongs to is not known ({known})", field="adapter", value=sorted({n for n in self.rows if n}),
                hint="Run the requests one adapter at a time",
            )  # fmt: skip
        row_groups = self.indices.get((rows, device))
        if row_groups is None:
            row_groups = [
                (name, torch.tensor([i for i, row in enumerate(rows) if row == name], device=device))
                for name in dict.fromkeys(rows)
                if name is not None
            ]
            self.indices[rows, device] = row_groups
        return row_groups


BASE = Selection()


class EagerAdapters:
    """PEFT's operations, one adapter after the other, in PEFT's order and precision."""

    table: AdapterTable | None = None

    def apply(self, layer: AdaptedLayer, x: Tensor, y: Tensor, groups: Groups | None = None) -> Tensor:
        """See `AdapterApplier`."""
        adapters = layer.adapters
        if not adapters:
            return y
        selection: Selection = layer.adapter_store.selection
        if selection.rows is None:
            adapter = None if selection.name is None else adapters.get(selection.name)
            return y if adapter is None else adapter.apply(layer, x, y)
        used = [name for name in selection.rows if name is not None and name in adapters]
        if not used:
            return y
        groups = selection.groups(adapters[used[0]].part, x.shape[0], x.device) if groups is None else groups
        for name, index in groups:
            if name in adapters:
                y.index_copy_(0, index, adapters[name].apply(layer, x[index], y[index]))
        return y

    def expert_args(self, module: nn.Module, rows: int) -> Any:
        """See `AdapterApplier`: for rows that all have one adapter, whose tables were made before."""
        own = vars(module)
        selection: Selection = own["adapter_store"].selection if own.get("adapters") else BASE
        adapter = None if selection.name is None else own["adapters"].get(selection.name)
        return None if adapter is None else adapter.tables


EAGER = EagerAdapters()
_ABSENT = object()  # the value of an attribute that an object does not have itself
Place: TypeAlias = "nn.Module | tuple[object, str]"  # what a pass changes: a module's forward, or a named attribute


class AdapterStore:
    """The attached adapters of one loaded model, which of them each row uses now, and the applier.

    applier: adds adapters, `EagerAdapters` where no block of `applying` says otherwise. matmuls: the products of layers, None
    for their formats' own.
    """

    def __init__(self) -> None:
        self._attached = 0
        self.reads_experts = self.groups_on_host = False
        # The one registry of attached adapters, and how often it changed.
        self.holders: dict[str, Holders] = {}
        self.changes = 0
        self.selection = BASE
        self.applier: AdapterApplier = EAGER
        self.matmuls: MatmulTable[LayerProduct] | None = None

    # Attached adapters ------------------------------------------------------------------------------------------------

    def attached(self, name: str, holders: Holders) -> None:
        """Take up a name whose tensors are in place."""
        self._attached += 1
        self.changes += 1
        holders.serial = self._attached
        self.holders[name] = holders

    def detached(self, name: str) -> None:
        """Forget a name; rows that used it use the base from now on."""
        self.holders.pop(name, None)
        self.changes += 1
        if name in self.selection.active():
            self.none()

    @property
    def names(self) -> KeysView[str]:
        """The names of the attached adapters."""
        return self.holders.keys()

    @property
    def serials(self) -> dict[str, int]:
        """Name -> serial of the attached adapters, in the order in which they were attached. A copy."""
        return {name: one.serial for name, one in list(self.holders.items())}

    def serial_of(self, name: str) -> int | None:
        """Return the serial of an attached adapter, None for a name that is not attached."""
        holders = self.holders.get(name)
        return None if holders is None else holders.serial

    def set_reads_experts(self) -> None:
        """Say that modules of packed stacks read on the host which experts were chosen."""
        self.reads_experts = True

    def set_groups_on_host(self) -> None:
        """Say that torch's product over unpacked stacks reads on the host how many tokens each expert has."""
        self.groups_on_host = True

    def reads_on_host(self, names: Sequence[str | None] | None = None) -> bool:
        """Whether a pass with these adapters (None: those in use) reads chosen experts on the host: it cannot be captured."""
        return self.reads_experts or self.groups_on_host or self.changes_experts(names)

    def changes_experts(self, names: Sequence[str | None] | None = None) -> bool:
        """Whether one of these adapters (None: those in use) changes experts."""
        names = self.selection.active() if names is None else names
        return any(self.holders[name].reads_on_host for name in names if name in self.holders)

    @property
    def last_serial(self) -> int:
        """The number of the adapter that was attached last, whether or not it still is."""
        return self._attached

    # Adapters of rows -------------------------------------------------------------------------------------------------

    def select(self, selection: Selection) -> None:
        """Use this selection from now on. Its names are those that layers know; nothing is checked."""
        if selection != self.selection:  # an equal one has its row numbers on the device already
            self.selection = selection

    def none(self) -> None:
        """Use the base model for every row."""
        self.selection = BASE

    def set(self, name: str | None) -> None:
        """Use one adapter for every row. Errors: RequestError for a name that is not attached."""
        self._check([name])
        self.select(Selection(name))

    def set_rows(self, rows: Sequence[str | None], *, towers: Mapping[str, Sequence[str | None]] | None = None) -> None:
        """Use rows[i] for batch row i (None: the base); towers as in `Selection`. Errors: RequestError."""
        for names in (rows, *(towers or {}).values()):
            self._check(names)
        self.select(Selection.of_rows(rows, towers))

    def _check(self, names: Sequence[str | None]) -> None:
        for name in names:
            if name is not None and name not in self.names:
                known = sorted(self.names)
                near = near_names(name, known)
                raise RequestError("no such adapter", field="adapter", value=name, allowed=known, near=near)

    # How they are added ----------------------------------------------------------------------------------------------

    @property
    def table(self) -> AdapterTable | None:
        """The table that kernels look adapters up in now, None where layers add them."""
        return self.applier.table

    def applying(
        self, applier: AdapterApplier | None, matmuls: MatmulTable[LayerProduct] | None = None
    ) -> AbstractContextManager[None]:  # fmt: skip
        """Let this add adapters, and layers ask this table for their products, while the block runs; None changes nothing."""
        given = {"applier": applier, "matmuls": matmuls}
        return covered({(self, name): value for name, value in given.items() if value is not None})


@contextmanager
def covered(changes: Mapping[Place, object]) -> Iterator[None]:
    """Let each module compute with another forward while the block runs, or a named attribute of an object be another; no class is
    touched. All that a pass changes of modules is changed here."""
    places = {place if isinstance(place, tuple) else (place, "forward"): value for place, value in changes.items()}
    before = {(owner, name): vars(owner).get(name, _ABSENT) for owner, name in places}
    try:
        for (owner, name), value in places.items():
            vars(owner)[name] = value
        yield
    finally:
        for (owner, name), own in before.items():
            vars(owner).pop(name, None)
            if own is not _ABSENT:
                vars(owner)[name] = own


# In host memory -------------------------------------------------------------------------------------------------------

ADAPTER_DTYPE = "float32"  # PEFT's own rule: half-precision adapters are cast up when they are loaded


@dataclass(frozen=True, eq=False)
class HeldAdapter:
    """An adapter in host memory, matched with one model: ready to be put on it without touching the disk.

    tensors: by file and the byte where each starts there, as the file holds them. The LoRA ones are views of `memory`,
    one piece that is page-locked for a GPU, so that putting an adapter on a model is one copy; places: where they lie.
    dtype: the one type of all values in `memory`, None if they differ.
    """

    spec: AdapterSpec
    tensors: Mapping[tuple[Path, int], Tensor]
    memory: HostMemory
    places: Mapping[tuple[Path, int], Part]
    dtype: torch.dtype | None = None

    @classmethod
    def read(cls, spec: AdapterSpec, *, pinned: bool) -> HeldAdapter:
        """Return an adapter, read once: each LoRA tensor straight to its place in one piece of memory.

        Errors: AdapterError for values that are not finite, of tensors without effect too; CheckpointError if the file is short.
        """
        entries = {(one.file, one.start): one for target in spec.targets for one in target.tensors.values()}
        # A saved whole module often equals the model's and is then dropped: its neighbours must not keep its memory. Pairs of
        # experts are sorted by expert on the device: the copies of the piece do not hold them a second time.
        saved = {
            (entry.file, entry.start) for target in spec.targets if target.kind in ("saved", "experts")
            for entry in target.tensors.values()
        }  # fmt: skip
        places: dict[tuple[Path, int], Part] = {}
        end = 0
        for key, entry in entries.items():
            if key not in saved:
                places[key] = Part(end, entry.nbytes, entry.shape, getattr(torch, entry.dtype))
                end += aligned(entry.nbytes)
        memory = HostMemory(end, pinned=pinned)
        tensors = {key: place.view(memory.tensor) for key, place in places.items()}
        whole = bytes_of(memory.tensor)
        with closing(PositionedFile(spec.file.file)) as file:
            is_own = spec.file.peft_folder == spec.file.folder  # not of a GGUF file
            if is_own and spec.file.stamps and (TENSORS_NAME, *file.stamp) not in spec.file.stamps:
                raise AdapterError(spec.file.folder, [f"{TENSORS_NAME} changed after its header was read"])
            for (_, start), place in sorted(places.items(), key=lambda one: one[0][1]):
                stop = place.offset + place.nbytes
                file.read_into(whole[place.offset : stop], start)
                whole[stop : place.offset + aligned(place.nbytes)] = bytes(aligned(place.nbytes) - place.nbytes)
        types = {place.dtype for place in places.values()}
        dtype = types.pop() if len(types) == 1 else None
        seen = set(places) if dtype is not None and _has_finite_sum(memory.tensor.view(dtype)) else set()
        file_tensors = spec.file.tensors.items()
        others = {name: entry for name, entry in file_tensors if (entry.file, entry.start) not in seen}
        check_values(replace(spec.file, tensors=others))
        tensors |= read_small({key: entries[key] for key in saved})
        return cls(spec, tensors, memory, places, dtype)

    def starts(self) -> dict[tuple[Path, int], int]:
        """Return at which value of `memory` each LoRA tensor begins; empty if the values are of several types."""
        if self.dtype is None:
            return {}
        return {key: place.offset // self.dtype.itemsize for key, place in self.places.items()}

    @cached_property
    def host_bytes(self) -> int:
        """Its bytes in host memory."""
        beside = (tensor.nbytes for key, tensor in self.tensors.items() if key not in self.places)
        return int(self.memory.tensor.nbytes + sum(beside))

    @cached_property
    def content(self) -> str:
        """A digest of everything that it changes: equal for two adapters only if they compute the same."""
        return content_of(self.spec, self.tensors)

    @cached_property
    def device_bytes(self) -> int:
        """Its bytes on the execution device."""
        return self.spec.nbytes(ADAPTER_DTYPE)


def _has_finite_sum(values: Tensor) -> bool:
    """Whether the sum of all values is finite, which it is only if each of them is. False proves nothing: a sum can overflow."""
    if values.dtype.itemsize == 1:  # torch sums no 8-bit floats
        return False
    return math.isfinite(float(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))))


def content_of(spec: AdapterSpec, tensors: Mapping[tuple[Path, int], Tensor]) -> str:
    """Return a digest of an adapter's places, scales and values. tensors: by file and the byte where each starts there."""
    digest = hashlib.sha256(repr(spec.model_dtype).encode())
    for target in spec.targets:
        entries = sorted(target.tensors.items())
        how = (target.kind, target.rank, target.scale, target.use_dora, target.has_bias, len(entries), target.stack)
        digest.update(repr((target.module_path, *how)).encode())
        for role, entry in entries:
            tensor = tensors[entry.file, entry.start]
            digest.update(repr((role, tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class AttachedAdapter:
    """One entry of the model's registry. spec: None for a sum of adapters. nbytes: on the execution device. content: equal for two
    adapters only if they compute the same; "" without a prefix cache, its only user."""

    spec: AdapterSpec | None
    nbytes: int
    content: str = ""


@dataclass(frozen=True)
class PlainPlace:
    """One linear layer that an adapter changes by A and B alone, which begin at values A_start and B_start of its piece.

    Shapes: A [rank, in_features], B [out_features, rank].
    """

    leaf: Any
    part: str
    scale: float
    rank: int
    A_start: int
    B_start: int


@dataclass(eq=False)
class Fitting:
    """The targets of one adapter on one model, matched and checked once, so that attaching it again is a short loop.

    plain: targets in one piece of memory that has all of A and B. rest: by module path, all others, which are read
    tensor by tensor. kinds: of the decoder's linear layers that it changes (`kind_of`). largest_rank: there.
    """

    model: nn.Module
    plain: list[PlainPlace]
    rest: dict[str, dict[str, AdapterTarget]]
    kinds: frozenset[str]
    largest_rank: int


@dataclass(eq=False)
class Holders:
    """The modules that hold one attached adapter: those of its fitting's plain places, and `rest` with their paths.

    address: of the piece that the plain places count from, 0 if there is none. about: the model's entry for it, None where it
    was attached without a `LoadedModel`. serial: a new number whenever an adapter is attached, because the same name may mean
    other tensors later.
    """

    fitting: Fitting
    rest: list[tuple[str, nn.Module]]
    address: int = 0
    about: AttachedAdapter | None = None
    serial: int = 0

    @property
    def reads_on_host(self) -> bool:
        """Whether a pass with it reads on the host which experts were chosen, so that it cannot be captured."""
        return any(hasattr(module, "has_gate") for _, module in self.rest)
