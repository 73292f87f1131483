"""How do captured kernels find the adapter of each row?"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trimtab.engine.cuda import launch_config
from trimtab.engine.kernels import dequantize, gemm4, gemv4
from trimtab.engine.kernels.experts import MEMBERS, ExpertLora, lora_tables
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.lora import layers
from trimtab.engine.lora.experts import DOWN, ExpertProduct
from trimtab.engine.lora.layers import ExpertsAdapter, StackChange
from trimtab.engine.lora.store import EAGER, TOWERS, AdapterStore, AdapterTable, Fitting, Groups
from trimtab.errors import RequestError
from trimtab.formats.record import rounds_change
from trimtab.planning.values.execution import ADAPTER_SLOTS

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.kernels.experts import ExpertLora
    from trimtab.engine.lora.store import AdaptedLayer

_COLUMNS = ("A_ptr", "B_ptr", "rank", "scale")
# `low` of a group is sized by the largest rank, in steps of this, so that one more rank is seldom a new capture.
RANK_STEP = 16
# A table has room for at least this many adapters, for any number of rows.
LEAST_SLOTS = ADAPTER_SLOTS
# Layers by the last part of their names, in a model's order, that families give one tensor.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class _Columns:
    """The values of a fitting's plain layers in the table's columns, on the host; 0 for unchanged layers.

    Shapes: integers [3, layers] int64: the offsets of A and B, in bytes from the start of the piece, and the rank; scale
    [layers] float32; is_there [layers] int64, 1 for a changed layer.
    """

    integers: Tensor
    scale: Tensor
    is_there: Tensor


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


class AdapterSlots:
    """The tables of the linear layers among `modules`, for passes of up to `rows` rows. module: the compiled kernels that read
    them; many: those for more rows than they take at once (gemm4.py); prompt: those for rows of several tokens (dequantize.py).
    is_fixed: as `gemv4.LoraArgs` has it. experts: modules of experts that kernels compute.

    Errors: RequestError for fewer slots than rows.

    Shapes: A_ptr, B_ptr [layers, slots] int64, rank [layers, slots] int32, scale [layers, slots] float32; row_slots [rows] int32. A
    slot of a layer has the addresses of A and B, the rank (0: the adapter does not touch the layer) and the scale. A row has the
    number of its slot, -1 for the base. Layers of every kind that an attached adapter changes look one up.
    """

    def __init__(
        self, modules: Iterable[nn.Module], store: AdapterStore, rows: int, device: torch.device, *, module: nvrtc.Module | None,
        slots: int = LEAST_SLOTS, many: nvrtc.Module | None = None, prompt: nvrtc.Module | None = None, is_fixed: bool = False,
        experts: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        if slots < rows:
            raise RequestError("each row may need a separate slot", field="slots", value=slots, hint=f"At least {rows}")
        self.adapter_store, self.device, self.slots, self.is_fixed = store, device, slots, is_fixed
        self.module, self.many, self.prompt = module, many, prompt
        self.experts = ExpertSlots(experts, device, slots)
        leaves = [one for one in modules if isinstance(one, Leaf)]
        self._place = {leaf: number for number, leaf in enumerate(leaves)}
        self._of_kind: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            self._of_kind.setdefault(layers.kind_of(leaf.module_path), []).append(leaf)
        self._columns: WeakKeyDictionary[Fitting, _Columns] = WeakKeyDictionary()
        # Layers that read one tensor, where all of them are there and next to each other.
        self._groups = {leaf: group for leaf, group in groups_of(leaves).items() if self._is_whole(group)}
        self._shared: tuple[weakref.ref[Tensor], int, tuple[Leaf, ...], gemv4.LoraArgs] | None = None
        shape = (len(leaves), slots)
        types = dict(zip(_COLUMNS, (torch.int64, torch.int64, torch.int32, torch.float32), strict=True))
        self._table = {name: torch.zeros(shape, dtype=dtype, device=device) for name, dtype in types.items()}
        self.row_slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        # Which adapter, by name and serial, is in which slot; the one used longest ago comes first.
        self._held: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._why: dict[tuple[str, int], str | None] = {}
        self._rows: tuple[tuple[str, int] | None, ...] | None = None
        self._covered: set[Leaf] = set()
        self._seen_serial = 0
        # By size, and never given back: a captured step has their addresses.
        self._low: dict[tuple[int, int], Tensor] = {}
        # The scratch that `empty` was last called for, and the layers whose part of it is still unused.
        self._empty: tuple[tuple[int, int], set[int]] = ((0, 0), set())
        self.largest_rank = 0

    def _is_whole(self, group: Sequence[Leaf]) -> bool:
        first = self._place[group[0]]
        names = tuple(leaf.module_path.rpartition(".")[2] for leaf in group)
        return names in TOGETHER and [self._place[leaf] for leaf in group] == list(range(first, first + len(group)))

    def why_not(self, name: str | None) -> str | None:
        """Return why this adapter cannot be used by table, None if it can."""
        if name is None:
            return None
        key = (name, self.adapter_store.holders[name].serial)
        if key not in self._why:
            self._why[key] = self._examine(name)
        return self._why[key]

    def _examine(self, name: str) -> str | None:
        # Adapters from one piece are plain LoRA in contiguous float32: attaching made them so.
        for path, module in self.adapter_store.holders[name].rest:
            adapter = module.__dict__["adapters"][name]
            part = getattr(adapter, "part", None) or module.__dict__.get("part")
            if part in TOWERS:
                continue
            if isinstance(adapter, ExpertsAdapter) and module in self.experts.place:
                if (why := why_not_experts(adapter)) is not None:
                    return f"adapter {name} {why} at {path}"
                continue
            if not isinstance(adapter, layers.LinearAdapter) or not isinstance(module, Leaf):
                return f"adapter {name} changes {path}, which is no linear layer"
            if (why := why_not_plain(adapter)) is not None:
                return f"adapter {name} {why} at {path}"
        return None

    @property
    def table(self) -> AdapterTable:
        """Itself: kernels look each row's adapter up here."""
        return self

    def apply(self, layer: AdaptedLayer, x: Tensor, y: Tensor, groups: Groups | None = None) -> Tensor:
        """See `AdapterApplier`: layers of the table that no attached adapter changes keep their output."""
        if layer in self._covered:
            return self.add(layer, x, y)
        return y if layer in self._place else EAGER.apply(layer, x, y, groups)

    def expert_args(self, module: nn.Module, rows: int) -> ExpertLora | None:
        """See `AdapterApplier`."""
        return self.experts.args(module, self.row_slots[:rows]) or EAGER.expert_args(module, rows)

    @property
    def shape_key(self) -> tuple[int, ...]:
        """The values that a captured step depends on: the largest rank that fits its scratch, and how many layers it looks up; the
        same of experts.

        It changes when an adapter is attached that is larger than any before, and never when rows switch.
        """
        self._cover_attached()
        return self.largest_rank, len(self._covered), *self.experts.shape_key

    def cover(self, fittings: Iterable[Fitting]) -> None:
        """Look up all layers that these adapters need: layers covered before the capture need no second capture."""
        for fitting in fittings:
            for kind in fitting.kinds:
                self._covered.update(self._of_kind.get(kind, ()))
            self.largest_rank = max(self.largest_rank, _stepped(fitting.largest_rank))

    def _cover_attached(self) -> None:
        if self._seen_serial == self.adapter_store.last_serial:
            return
        new = [name for name, serial in self.adapter_store.serials.items() if serial > self._seen_serial]
        self._seen_serial = self.adapter_store.last_serial
        fitting = {name: self.adapter_store.holders[name] for name in new if self.why_not(name) is None}
        self.cover(one.fitting for one in fitting.values())
        for name in fitting:
            self.experts.cover(self._experts_of(name))

    def _experts_of(self, name: str) -> dict[nn.Module, ExpertsAdapter]:
        """Return the adapters of this name of modules of experts in the table."""
        found = {module: vars(module)["adapters"][name] for _, module in self.adapter_store.holders[name].rest}
        return {module: one for module, one in found.items() if isinstance(one, ExpertsAdapter) and module in self.experts.place}

    def set_rows(self, names: Sequence[str | None]) -> None:
        """Let row i use names[i]; rows beyond use the base. Enqueued on the current stream, in order with the steps.

        Errors: RequestError for an adapter that `why_not` refuses.
        """
        self._cover_attached()
        wanted = tuple(None if name is None else (name, self.adapter_store.holders[name].serial) for name in names)
        if wanted == self._rows:
            return
        for key in dict.fromkeys(key for key in wanted if key is not None):
            if key in self._held:
                self._held.move_to_end(key)
            else:
                self._put(key, in_use={key for key in wanted if key is not None})
        numbers = [-1 if key is None else self._held[key] for key in wanted]
        numbers += [-1] * (self.row_slots.numel() - len(numbers))
        self.row_slots.copy_(_pinned(torch.tensor(numbers, dtype=torch.int32), self.device), non_blocking=True)
        self._rows = wanted

    def _put(self, key: tuple[str, int], in_use: set[tuple[str, int]]) -> None:
        name = key[0]
        why = self.why_not(name)
        if why is not None:
            raise RequestError(why, field="adapter", value=name)
        for old in [old for old in self._held if self.adapter_store.serial_of(old[0]) != old[1]]:
            self._free(old)  # its tensors are gone
        slot = next((number for number in range(self.slots) if number not in self._held.values()), None)
        if slot is None:
            slot = self._free(next(old for old in self._held if old not in in_use))
        holders = self.adapter_store.holders[name]
        columns = self._columns_of(holders.fitting)
        integers, scale = columns.integers.clone(), columns.scale.clone()
        integers[:2] += columns.is_there * holders.address
        self._write(slot, integers, scale, {leaf: leaf.adapters[name] for _, leaf in holders.rest if isinstance(leaf, Leaf)})
        self.experts.put(slot, self._experts_of(name))
        self._held[key] = slot

    @classmethod
    def of_experts(cls, adapters: Mapping[nn.Module, ExpertsAdapter], store: AdapterStore, device: torch.device) -> AdapterSlots:
        """Return the table of one row that has these adapters of modules of experts."""
        slots = cls((), store, 1, device, module=None, slots=1, experts=list(adapters))
        slots.set_experts(adapters)
        return slots

    def set_experts(self, adapters: Mapping[nn.Module, ExpertsAdapter]) -> None:
        """Let every row use these adapters, by module of experts. Ask `why_not_experts` about each first."""
        self.experts.cover(adapters)
        self.experts.put(0, adapters)
        self.row_slots.zero_()

    def set_layers(self, adapters: Mapping[Leaf, layers.LinearAdapter]) -> None:
        """Let every row use these adapters, by layer, which need no name in the store. Ask `why_not_plain` about each first."""
        self._covered = set(adapters)
        self.largest_rank = _stepped(max(rank_of(one) for one in adapters.values()))
        count = len(self._place)
        self._write(0, torch.zeros(3, count, dtype=torch.int64), torch.zeros(count), adapters)
        self.row_slots.zero_()
        self._lows(self.row_slots.numel())  # nothing is allocated in a pass

    def _write(self, slot: int, integers: Tensor, scale: Tensor, more: Mapping[Leaf, layers.LinearAdapter]) -> None:
        """Write the numbers of a slot to the device. integers, scale: as `_Columns` has them, A and B as addresses; more: of other
        layers."""
        for leaf, one in more.items():
            if one.A is not None and one.B is not None:
                integers[:, self._place[leaf]] = torch.tensor((one.A.data_ptr(), one.B.data_ptr(), rank_of(one)))
                scale[self._place[leaf]] = one.scale
        on_device = _pinned(integers, self.device).to(self.device, non_blocking=True)
        lines = (*on_device, _pinned(scale, self.device).to(self.device, non_blocking=True))
        for column, line in zip(_COLUMNS, lines, strict=True):
            self._table[column][:, slot].copy_(line)

    def _columns_of(self, fitting: Fitting) -> _Columns:
        """Return the columns, made once: an adapter that comes back has another address and nothing else."""
        columns = self._columns.get(fitting)
        if columns is None:
            integers = torch.zeros(3, len(self._place), dtype=torch.int64)
            columns = _Columns(integers, torch.zeros(len(self._place)), torch.zeros(len(self._place), dtype=torch.int64))
            # Lists first: a tensor takes its values much faster at once than one by one.
            numbers = torch.tensor([self._place[one.leaf] for one in fitting.plain], dtype=torch.int64)
            lines = [(4 * one.A_start, 4 * one.B_start, one.rank) for one in fitting.plain]
            integers[:, numbers] = torch.tensor(lines, dtype=torch.int64).reshape(-1, 3).T
            columns.scale[numbers] = torch.tensor([one.scale for one in fitting.plain])
            columns.is_there[numbers] = 1
            self._columns[fitting] = columns
        return columns

    def _free(self, key: tuple[str, int]) -> int:
        self._why.pop(key, None)
        return self._held.pop(key)

    def _lows(self, rows: int) -> Tensor:
        """Return the scratch buffer of all layers for this many rows. Each layer has its own part."""
        key = (rows, self.largest_rank)
        if key not in self._low:
            self._low[key] = torch.empty(len(self._place) * rows * self.largest_rank, device=self.device)
        return self._low[key]

    def empty(self, rows: int) -> None:
        """Prepare the scratch of a step's products; once per step, before `args(..., is_empty=True)`."""
        self._lows(rows).view(torch.int32).fill_(gemv4.EMPTY)
        self._empty = (rows, self.largest_rank), set(range(len(self._place)))
        self._shared = None

    def args(self, leaves: Sequence[Leaf], rows: int, *, is_empty: bool = False) -> gemv4.LoraArgs | None:
        """Return the kernels' arguments for layers that read one input, None if no adapter touches them.

        leaves: in the order of the model's modules, next to each other. is_empty: `empty` was called in this step.
        """
        if not any(leaf in self._covered for leaf in leaves):
            return None
        assert rows <= self.row_slots.numel(), "inputs of several tokens a row, without their rows"
        numbers = [self._place[leaf] for leaf in leaves]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ValueError(f"layers {numbers} are not next to each other")
        part = slice(numbers[0], numbers[-1] + 1)
        self._empty[1].difference_update(numbers)
        each = rows * self.largest_rank
        low = self._lows(rows)[part.start * each : part.stop * each]
        return gemv4.LoraArgs(
            A_ptr=self._table["A_ptr"][part], B_ptr=self._table["B_ptr"][part], rank=self._table["rank"][part],
            scale=self._table["scale"][part], row_slots=self.row_slots[:rows],
            low=low.view(rows, len(leaves), self.largest_rank), is_empty=is_empty, is_fixed=self.is_fixed,
        )  # fmt: skip

    def add(self, leaf: Leaf, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output with each row's adapter: x [n, ..., D_in], y [n, ..., D_out]. A row has several tokens only
        where there are kernels for them."""
        rows, tokens, round_change = x.shape[0], x.shape[1:-1].numel(), rounds_change(leaf.quant_kind)
        if self.prompt is not None and tokens > 1:
            number = self._place[leaf]
            line = gemv4.LoraColumns(*(self._table[name][number] for name in _COLUMNS))
            dequantize.add_rows(
                line, self.row_slots[:rows], tokens, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), self.prompt,
                largest_rank=self.largest_rank, round_change=round_change,
            )  # fmt: skip
            return y
        assert tokens == 1
        args, made_of = self._taken(leaf, x)
        if self.many is not None and rows > launch_config.MAX_ROWS:
            gemm4.add(y.view(rows, -1), args, self.many, x=made_of, round_change=round_change)
        else:
            gemv4.lora_add(y.view(rows, -1), args, self.module, x=made_of, round_change=round_change)
        return y

    def _taken(self, leaf: Leaf, x: Tensor) -> tuple[gemv4.LoraArgs, Tensor | None]:
        """Return a layer's adapters and the input of A x. For consecutive layers with the same input, the first layer's launch
        computes A x for all, and the others get None."""
        # Whether it was changed in between is not known of a tensor that counts no versions.
        group, version = ((leaf,), 0) if x.is_inference() else (self._groups.get(leaf, (leaf,)), x._version)
        if self._shared is not None:
            seen, seen_version, of_group, args = self._shared
            if seen() is x and seen_version == version and of_group is group and group[0] is not leaf:
                return args.member(group.index(leaf)), None
        leaves, rows = group if group[0] is leaf else (leaf,), x.shape[0]
        # The second call of a layer in a step finds the result of its first call.
        is_empty = self._empty[0] == (rows, self.largest_rank) and self._empty[1] >= {self._place[one] for one in leaves}
        arguments = self.args(leaves, rows, is_empty=is_empty)
        assert arguments is not None
        self._shared = None if len(leaves) == 1 else (weakref.ref(x), version, group, arguments)
        return arguments, x.reshape(rows, -1)


def why_not_plain(adapter: layers.LinearAdapter) -> str | None:
    """Return why kernels cannot read this adapter of a layer where it is, None if it is plain LoRA in contiguous float32."""
    A, B = adapter.A, adapter.B
    if A is None or B is None or adapter.weight is not None or adapter.bias is not None:
        return "replaces weights"
    if adapter.magnitude is not None or adapter.B_bias is not None:
        return f"uses {'DoRA' if adapter.magnitude is not None else 'a LoRA bias'}"
    is_read = A.dtype == B.dtype == torch.float32 and A.is_contiguous() and B.is_contiguous()
    return None if is_read else "is not stored in contiguous float32"


def rank_of(adapter: layers.LinearAdapter) -> int:
    """Return the rank of a LoRA."""
    assert adapter.A is not None
    return int(adapter.A.shape[0])


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host as a copy to this device reads them."""
    return values.pin_memory() if device.type == "cuda" else values


def _stepped(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


def why_not_experts(adapter: ExpertsAdapter) -> str | None:
    """Return why the changes of one adapter are in no table, None if they are."""
    if any(one.A.dtype != torch.float32 or not (one.A.is_contiguous() and one.B.is_contiguous()) for one in adapter.changes):
        return "is not held in contiguous float32"
    if any(matrix.data_ptr() % 16 for one in adapter.changes for matrix in (one.A, one.B)):
        return "is not aligned to 16 bytes"
    if len(_members(adapter.changes)) < len(adapter.changes):
        return "has more than two changes of one stack"
    return None


def _members(changes: Sequence[StackChange]) -> dict[int, StackChange]:
    """Return changes by their members: the first two of the first stack are 0 and 1, the first of the second is 2."""
    found = dict(enumerate([one for one in changes if one.parameter != DOWN][: MEMBERS - 1]))
    for one in changes:
        if one.parameter == DOWN:
            found[MEMBERS - 1] = one
    return found


class StandIn:
    """Stands in a module for the adapter whose changes `tables` have now, so that the module's own way computes the same."""

    weight = None

    def __init__(self, adapter: ExpertsAdapter, tables: ExpertLora | None) -> None:
        self.part, self.of, self.tables = adapter.part, weakref.ref(adapter), tables

    def apply(self, product: ExpertProduct, x: Tensor, y: Tensor) -> Tensor:
        """See `ExpertsAdapter`. The base's once the adapter is gone, whose name is then not selected."""
        adapter = self.of()
        return y if adapter is None else adapter.apply(product, x, y)


class ExpertSlots:
    """The tables of a model's modules of experts, all with as many experts. slots: how many adapters they hold at once."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, slots: int) -> None:
        self.place = {module: number for number, module in enumerate(modules)}
        self.device, self.largest_rank = device, 0
        self._covered: set[nn.Module] = set()
        self._count = max((int(vars(module)["num_experts"]) for module in self.place), default=0)
        none = lora_tables([[None] * slots] * MEMBERS, torch.zeros(1, dtype=torch.int32), self._count)
        self._tables = [one.expand(len(self.place), *one.shape).contiguous().to(device) for one in none.numbers()]
        # For the torch path, which reads no address.
        self._changes: dict[nn.Module, list[list[StackChange | None]]] = {
            module: [[None] * slots for _ in range(MEMBERS)] for module in self.place
        }

    @property
    def shape_key(self) -> tuple[int, int]:
        """As `AdapterSlots.shape_key`."""
        return self.largest_rank, len(self._covered)

    def cover(self, adapters: Mapping[nn.Module, ExpertsAdapter]) -> None:
        """Look the modules up that these adapters change."""
        self._covered.update(adapters)
        self.largest_rank = max([self.largest_rank, *(one.A.shape[1] for own in adapters.values() for one in own.changes)])

    def put(self, slot: int, adapters: Mapping[nn.Module, ExpertsAdapter]) -> None:
        """Let a slot have these adapters; enqueued on the current stream."""
        if not self._covered:
            return
        made, first = [], torch.zeros(1, dtype=torch.int32)
        for module, lines in self._changes.items():
            adapter = adapters.get(module)
            members = {} if adapter is None else _members(adapter.changes)
            own = lora_tables([[members.get(member)] for member in range(MEMBERS)], first, self._count)
            made.append(own.numbers())
            for member, line in enumerate(lines if self.device.type == "cpu" else ()):  # elsewhere the table has addresses alone
                line[slot] = members.get(member)
        for table, values in zip(self._tables, zip(*made, strict=True), strict=True):
            table[:, :, slot].copy_(_pinned(torch.stack(values)[:, :, 0], self.device), non_blocking=True)

    def args(self, module: nn.Module, row_slots: Tensor) -> ExpertLora | None:
        """Return the adapters of rows on a module, None if no adapter touches it."""
        if module not in self._covered:
            return None
        changes = self._changes[module] if self.device.type == "cpu" else None
        A, B, rank, scale, outputs, pairs = (table[self.place[module]] for table in self._tables)
        return ExpertLora(A, B, rank, scale, outputs, pairs, row_slots, self.largest_rank, changes=changes)
