"""How does a plan become a model: every tensor read once, quantized on the execution device and put into its tier?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, TensorRow
from trimtab.checkpoint.folder import Checkpoint, check_has_weights, read_checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats import int8_head
from trimtab.engine.formats.packed import CodeTables, Packed, is_narrow, keep
from trimtab.engine.formats.weights import prequantized, quantize, unpacked
from trimtab.engine.kv import sequence
from trimtab.engine.layers import leaves
from trimtab.engine.loader import head_kernel, pieces, transformers_model
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.passes import attention
from trimtab.engine.tiers import streaming
from trimtab.engine.tiers.near_experts import NearWriter
from trimtab.engine.tiers.reader import Arena, Part, Reader, Wanted
from trimtab.engine.tiers.streaming import Spill
from trimtab.errors import CheckpointError, TrimtabError
from trimtab.formats.packed import split_packed
from trimtab.formats.record import HEAD8, HEAD_PIECE_VALUES, PackedEntry, packed_parts, stored_format
from trimtab.machine.memory import spill_folder
from trimtab.planning import Plan
from trimtab.planning.memory.expert_slots import row_bytes
from trimtab.planning.plan.contents import FilesRead, anatomy_key
from trimtab.planning.values.blocks import blocks_of
from trimtab.planning.values.byte_sizes import buffer_bytes, keeps_16bit
from trimtab.planning.values.execution import groups_on_device
from trimtab.process import phases

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel

CPU = torch.device("cpu")
# A parameter of this many values is cast to a wider type a few rows at a time.
CAST_VALUES = 4 * HEAD_PIECE_VALUES
Progress = Callable[[int, int], None]


@dataclass
class Loaded:
    """The result of `fill`: the model tree and everything that must be closed with it. left_out: slower computation -> reason.
    packs_experts: whether modules hold packed experts."""

    hf_model: HFModel | None
    streamer: streaming.Streamer | None
    file_rows: list[leaves.FileRows] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    packs_experts: bool = False

    def close(self) -> None:
        if self.streamer is not None:
            self.streamer.close()
        for rows in self.file_rows:
            rows.close()
        if self.packs_experts:
            pieces.let_go(self.hf_model)
        self.hf_model, self.streamer, self.file_rows = None, None, []


def fill(
    plan: Plan, store: AdapterStore, *, progress: Progress | None = None, files: FilesRead[transformers_model.Probe] | None = None
) -> tuple[Loaded, Anatomy]:
    """Return the model of the plan with every tensor in its tier, and its anatomy.

    progress: called with (bytes read, bytes to read). files: what planning read, used up here; read if not given, or if it
    changed since. Errors: CheckpointError, DeviceError; nothing is left behind.
    """
    request, files = plan.request, files or FilesRead()
    if (checkpoint := files.checkpoint) is None or not checkpoint.is_unchanged():
        files, checkpoint = FilesRead(tree=files.tree), read_checkpoint(request.model)
    check_has_weights(checkpoint)
    plan.check_same_checkpoint(checkpoint)
    probe = files.tree or transformers_model.probe(checkpoint, dtype=request.dtype)
    is_narrow = keeps_16bit(request.dtype, plan.dtype_reason)
    anatomy = files.anatomies.get(anatomy_key(request, keeps_16bit=is_narrow)) or transformers_model.anatomy_of(
        probe, checkpoint, quant=request.quant, keep_unquantized=request.keep_unquantized, head=request.head, keeps_16bit=is_narrow,
        experts=request.experts,
    )  # fmt: skip
    plan.check_family(anatomy)
    with ExitStack() as undo:
        filler = _Filler(plan, checkpoint, probe, anatomy, store, undo)
        loaded = filler.run(progress)
        if anatomy.routers:
            pieces.check_routers(probe.model, anatomy.routers, str(checkpoint.path))
        sequence.turn_alone(probe.model, attention.growing_rotations(probe.model, request.context_tokens))
        undo.pop_all()
    return loaded, anatomy


class _Filler:
    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, probe: transformers_model.Probe, anatomy: Anatomy, store: AdapterStore,
        undo: ExitStack,
    ) -> None:  # fmt: skip
        self.plan, self.probe, self.adapter_store, self.undo = plan, probe, store, undo
        self.device = torch.device(plan.execution_device)
        self.dtype = getattr(torch, plan.request.dtype)
        self.rows = [row for row in anatomy.rows if row.tensors]
        self.entries, self.packed = split_packed(checkpoint)
        self.tier = plan.tiers()
        self.home = {placement.block_path: placement.home for placement in plan.placements}
        self.slots = plan.execution.expert_slots
        self.planned = {one.block_path: one for one in blocks_of(anatomy, plan.request.quant, are_apart=self.slots > 0)}
        self.codes = CodeTables()
        self.arena = Arena(sum(map(self._arena_bytes, self.rows)), self.device)
        self.owners: dict[str, nn.Parameter] = {}
        self.groups: list[streaming.Group] = []
        # Streamed weights are put in place at the end: which buffers they share is known when the last block is read.
        self.waiting: list[Callable[[streaming.Streamer], None]] = []
        self.on_host: list[nn.Module] = []
        self.file_rows: list[leaves.FileRows] = []
        self.spill: Spill | None = None
        self.uses: Counter[str] = Counter()
        owned = (tensor for row in self.rows for tensor in row.tensors if tensor.tied_to is None)
        self.shared = Counter(name for tensor in owned for name in self._leaves(tensor))
        self.held: dict[str, Tensor] = {}
        self.reader: Reader | None = None
        self.head: leaves.Leaf | None = None
        undo.callback(self._give_back)

    def _give_back(self) -> None:
        pieces.let_go(self.probe.model)
        self.owners.clear()
        self.held.clear()
        for held in (*(group.host for group in self.groups), *self.file_rows, self.spill):
            if held is not None:
                held.close()

    def run(self, progress: Progress | None) -> Loaded:
        blocks = self._blocks()
        order = list(self._reads(row for _, rows in blocks for row in rows))
        total = sum(wanted.entry.nbytes for wanted in order)
        count = phases.counting("loading", is_bytes=True)
        tried = attention.begin_trials(self.probe.model, self.device, self.dtype, self.undo)
        with Reader(order) as reader:
            self.reader = reader
            for block, rows in blocks:
                self._fill_block(block, rows)
                count(reader.read_bytes, total)
                if progress is not None:
                    progress(reader.read_bytes, total)
            self.reader = None
        assert not self.held, sorted(self.held)
        streamer = self._streamer()
        for module in self.on_host:  # with what its submodules were filled with since
            leaves.compute_on_host(module.to("cpu"))
        self._check_nothing_left()
        is_grouped = self.device.type == "cuda" and any(row.stacks and not row.packs_experts for row in self.rows)
        if is_grouped and not groups_on_device(self.plan.request.dtype, torch.cuda.get_device_capability(self.device)):
            self.adapter_store.set_groups_on_host()
        if next(self.probe.model.parameters(), None) is None:  # OLMo: transformers asks one for the model's device and type
            self.probe.model.register_parameter("_own", nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device), False))
        why = head_kernel.choose(self.head) if self.head is not None and self.device.type == "cuda" else None
        found = {int8_head.NAME: why, attention.WHAT: attention.use_in(self.probe.model, tried)}
        left_out = {what: why for what, why in found.items() if why is not None}
        return Loaded(self.probe.model, streamer, self.file_rows, left_out, any(row.packs_experts for row in self.rows))

    def _blocks(self) -> list[tuple[str, list[ModuleRow]]]:
        """Return blocks in loading order: those that leave the device first, because packing needs room for a whole weight and
        its packed form; ties after their owners."""
        grouped: dict[str, list[ModuleRow]] = {}
        for row in self.rows:
            grouped.setdefault(row.block, []).append(row)
        rank = {"disk": 0, "stream": 0, "host": 1, "gather": 2, "resident": 3}

        def key(item: tuple[str, list[ModuleRow]]) -> tuple[int, int]:
            tied = any(tensor.tied_to for row in item[1] for tensor in row.tensors)
            return rank[self.tier[item[0]]], int(tied)

        return sorted(((block, self._in_pieces(block, rows)) for block, rows in grouped.items()), key=key)

    def _in_pieces(self, block: str, rows: list[ModuleRow]) -> list[ModuleRow]:
        """Return the rows of a block piece by piece, in their own order where its modules are in that order."""
        place, numbers = 0, {path: number for number, piece in enumerate(self.planned[block].pieces) for path in piece}
        numbered: list[tuple[int, ModuleRow]] = []
        for row in rows:
            place = numbers.get(row.module_path, place)
            numbered.append((place, row))
        return [row for _, row in sorted(numbered, key=lambda pair: pair[0])]

    def _arena_bytes(self, row: ModuleRow) -> int:
        """Return the bytes of a module's packed weight in the arena: 0 unless it is quantized and stays."""
        if row.packs_experts and self.slots:
            return row_bytes(row, self.slots)
        if row.packs_experts and self.tier[row.block] == "resident":
            forms = [(one, row.form_of(one)) for one in row.stacks]
            return sum(buffer_bytes(packed_parts(one.shape, form, one.dtype)) for one, form in forms if form is not None)
        if (weight := row.weight) is None or weight.tied_to or self.tier[row.block] != "resident":
            return 0
        if row.is_head8:
            return buffer_bytes(packed_parts(weight.shape, HEAD8, weight.dtype))
        if not row.quantized and (row.kind == "linear" or not row.stored):
            return 0
        expression = self.probe.sources[weight.tensor_path]
        entry = self.packed.get(expression.leaves[0]) if expression.is_leaf else None
        kind = self.plan.request.quant if entry is None else entry.kind
        return buffer_bytes(packed_parts(weight.shape, kind, weight.dtype))

    # Reads, in order --------------------------------------------------------------------------------------------------

    def _reads(self, rows: Iterable[ModuleRow]) -> Iterator[Wanted]:
        """Yield every file tensor once, in the order in which it is first needed."""
        for row in rows:
            for tensor in self._in_order(row):
                if tensor.tied_to is not None or (self._on_host(row, tensor) and self.home[row.block] == "file"):
                    continue
                if row.is_head8 and tensor is row.weight:
                    yield from (Wanted(piece, self.device, True) for piece in self._head_pieces(tensor))
                    continue
                if row.made is not None and self._moves(row, tensor):
                    for own in pieces.experts_of(tensor, self.entries):
                        yield from (Wanted(piece, self.device, True) for piece in own)
                    continue
                if tensor.stored is not None:
                    matrices = (self.packed[name] for own in pieces.names_of(tensor) for name in own)
                    yield from (Wanted(part, self.device) for one in matrices for part in one.read_parts.values())
                    continue
                device = self._first_device(row, tensor)
                if (entry := self._cast_in_pieces(tensor)) is not None:
                    yield from (Wanted(piece, device, True) for piece in pieces.rows_of(entry))
                    continue
                for name in self._leaves(tensor):
                    self.uses[name] += 1
                    if self.uses[name] == 1:
                        packed = self.packed.get(name)
                        if packed is None:
                            yield Wanted(self.entries[name], device, self._passes(row, tensor))
                            continue
                        yield from (Wanted(part, device) for part in packed.read_parts.values())

    def _cast_in_pieces(self, tensor: TensorRow) -> TensorEntry | None:
        """Return the file tensor of a large parameter that is it in a wider type: whole, it would take memory next to its cast."""
        expression = self.probe.sources.get(tensor.tensor_path)
        name = None if expression is None or expression.is_leaf else expression.cast_leaf
        if name is None or name not in self.entries or self.shared[name] > 1 or tensor.numel < CAST_VALUES:
            return None
        stored, wanted = getattr(torch, self.entries[name].dtype), getattr(torch, tensor.dtype)
        return self.entries[name] if is_narrow(stored, wanted) else None

    def _in_order(self, row: ModuleRow) -> list[TensorRow]:
        """Return a module's tensors in the order in which they are requested: those that a tier can move before the rest."""
        return sorted(row.tensors, key=lambda tensor: not self._moves(row, tensor))

    def _moves(self, row: ModuleRow, tensor: TensorRow) -> bool:
        return tensor in row.stacks or tensor is row.weight

    def _first_device(self, row: ModuleRow, tensor: TensorRow) -> torch.device:
        """Return where a tensor is read to: a tensor that leaves the device unquantized is never read to it."""
        is_weight = row.kind in ("linear", "experts") and self._moves(row, tensor)
        if is_weight and not row.quantized and self.tier[row.block] not in ("resident", "gather"):
            return CPU
        return CPU if self._on_host(row, tensor) else self.device

    def _passes(self, row: ModuleRow, tensor: TensorRow) -> bool:
        """Return whether a tensor is packed from the one file tensor it is, and then no longer needed."""
        expression = self.probe.sources[tensor.tensor_path]
        return row.quantized and tensor is row.weight and len(expression.leaves) == 1

    def _leaves(self, tensor: TensorRow) -> tuple[str, ...]:
        expression = self.probe.sources.get(tensor.tensor_path)
        return () if expression is None else tuple(dict.fromkeys(expression.leaves))

    def _on_host(self, row: ModuleRow, tensor: TensorRow) -> bool:
        return self.tier[row.block] == "gather" and row.kind == "embedding" and not tensor.is_buffer

    def _fetch(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a file tensor. dtype: of one in a format that cannot stay packed: an expert of a fused stack, or floats."""
        if name in self.packed:
            return unpacked(self.packed[name], self._parts(self.packed[name]), dtype or self.dtype)
        if name not in self.held:
            assert self.reader is not None
            self.held[name] = self.reader.take(self.entries[name])
        self.uses[name] -= 1
        return self.held[name] if self.uses[name] else self.held.pop(name)

    def _parts(self, entry: PackedEntry) -> dict[str, Tensor]:
        assert self.reader is not None
        self.uses[entry.tensor_name] -= 1
        return {name: self.reader.take(part) for name, part in entry.read_parts.items()}

    def _fetch_packed(self, entry: PackedEntry) -> Packed:
        return prequantized(entry, self._parts(entry), self.dtype)

    def _dense(self, tensor: TensorRow) -> Tensor | None:
        """Return the tensor as stock would hold it, or as its file does where the anatomy says so; None when it comes from no file
        (already real)."""
        expression = self.probe.sources.get(tensor.tensor_path)
        if expression is None:
            return None
        if (entry := self._cast_in_pieces(tensor)) is not None:
            assert self.reader is not None
            return pieces.joined(tensor.shape, tensor.dtype, pieces.rows_of(entry), self.reader.take)
        name, dtype = expression.cast_leaf, getattr(torch, tensor.dtype)
        if name is not None and is_narrow(dtype, self.dtype) and (name in self.entries or name in self.packed):
            return self._fetch(name, dtype)
        try:
            return expression.replay(self._fetch)
        except TrimtabError:
            raise
        except (RuntimeError, ValueError) as exc:
            if isinstance(exc, torch.OutOfMemoryError):
                raise
            raise CheckpointError(
                f"cannot be converted from {', '.join(self._leaves(tensor))} ({exc})", path=self.plan.request.model,
                tensor_name=tensor.tensor_path,
            ) from exc  # fmt: skip

    # Where it goes ----------------------------------------------------------------------------------------------------

    def _fill_block(self, block: str, rows: list[ModuleRow]) -> None:
        tier = self.tier[block]
        is_pinned, planned = tier == "stream" and self.device.type == "cuda", self.planned[block]
        writer = streaming.GroupWriter(block, planned.buffer_bytes, pinned=is_pinned) if tier in ("stream", "disk") else None
        firsts = {piece[0] for piece in planned.pieces}
        for row in rows:
            if writer is not None and row.module_path in firsts:
                writer.begin_piece()
            module = self.probe.model.get_submodule(row.module_path)
            if row.is_head8:
                self._fill_head8(row, module, tier, writer)
            elif row.kind == "linear" and type(module) is nn.Linear:
                self._fill_linear(row, module, tier, writer)
            elif row.kind == "embedding":
                self._fill_embedding(row, module)
            elif row.packs_experts:
                self._fill_packed_experts(row, module, tier, writer)
            elif row.kind == "experts" and tier != "resident":
                self._fill_experts(row, module, tier, writer)
            else:
                self._fill_fixed(row, module)
        if writer is not None and writer.nbytes:
            if tier == "disk" and self.spill is None:
                self.spill = Spill(spill_folder(self.plan.request.offload_dir))
            self.groups.append(writer.finish(self.spill if tier == "disk" else None))

    def _fill_linear(self, row: ModuleRow, module: nn.Linear, tier: str, writer: streaming.GroupWriter | None) -> None:
        weight = row.weight
        assert weight is not None, row.module_path
        tied = weight.tied_to is not None
        packed = keep(self.owners[weight.tied_to].data) if weight.tied_to else self._packed(row, weight)
        self._fill_fixed(row, module, [weight])
        common = self._options(module)
        leaf: leaves.Leaf
        if tier == "resident" or tied:
            packed = self.arena.hold(packed) if row.quantized else packed
            leaf = leaves.ResidentLeaf(row.module_path, packed, **common)
            if packed.kind == "none" and not tied:
                self.owners[weight.tensor_path] = nn.Parameter(packed.parts["weight"], requires_grad=False)
        elif tier == "host":
            host = packed.with_parts({k: v.cpu() for k, v in packed.parts.items()}, self.codes.on(packed, CPU))
            leaf = leaves.HostLeaf(row.module_path, host, **common)
        else:
            assert writer is not None
            self._stage_linear(row, self._staged(packed, writer.add(packed.parts), writer), common)
            return
        self.probe.model.set_submodule(row.module_path, leaf.eval())

    def _options(self, module: nn.Module) -> leaves.LeafOptions:
        bias = module.bias.data if isinstance(module.bias, Tensor) else None
        return {"bias": bias, "device": self.device, "dtype": self.dtype, "store": self.adapter_store}

    def _fill_head8(self, row: ModuleRow, module: nn.Module, tier: str, writer: streaming.GroupWriter | None) -> None:
        """Make the 8-bit copy of the head in its tier, slice by slice, never complete next to its source."""
        weight = row.weight
        assert weight is not None, row.module_path
        shape = (weight.shape[0], weight.shape[1])
        forms = int8_head.forms(*shape)
        places: dict[str, Part] | None = None
        if tier == "resident":
            parts = self.arena.room(forms)
        elif tier == "host":
            parts = {name: torch.empty(form, dtype=dtype) for name, (form, dtype) in forms.items()}
        else:
            assert writer is not None
            parts, places = writer.room(forms), writer.places
        assert self.reader is not None
        is_finite = int8_head.fill(map(self.reader.take, self._head_pieces(weight)), parts)
        if not is_finite:
            raise CheckpointError("holds values that are not finite", path=self.plan.request.model, tensor_name=weight.tensor_path)
        self._fill_fixed(row, module, [weight])
        common = self._options(module)
        packed = Packed(HEAD8, shape, self.dtype, parts, {}, kernel=int8_head.Kernel())
        if places is not None:
            assert writer is not None
            self._stage_linear(row, self._staged(packed, places, writer), common)
            return
        leaf = (leaves.HostLeaf if tier == "host" else leaves.ResidentLeaf)(row.module_path, packed, **common)
        self.probe.model.set_submodule(row.module_path, leaf.eval())
        self.head = None if tier == "host" else leaf

    def _head_pieces(self, weight: TensorRow) -> list[TensorEntry]:
        """Return the head's weight in its file as pieces of whole rows, in the file's own type. Errors: CheckpointError if the
        head is more than a tensor of the file, cast at most."""
        entry = self._entry(weight, "so it cannot be made into 8 bits a piece at a time", hint="Leave head= out")
        if entry.dtype not in ("bfloat16", "float16", "float32"):
            raise CheckpointError(
                f"is {entry.dtype}: an 8-bit head is made from bfloat16, float16 or float32", path=entry.file,
                tensor_name=entry.tensor_name, hint="Leave head= out",
            )  # fmt: skip
        return pieces.rows_of(entry)

    def _entry(self, tensor: TensorRow, consequence: str, *, hint: str) -> TensorEntry:
        """Return the file tensor that a parameter is, or is a cast of. Errors: CheckpointError if it is made otherwise."""
        name = self.probe.sources[tensor.tensor_path].cast_leaf
        if name is None:
            raise CheckpointError(
                f"is made from the file by more than a cast, {consequence}", path=self.plan.request.model,
                tensor_name=tensor.tensor_path, hint=hint,
            )  # fmt: skip
        return self.entries[name]

    def _packed(self, row: ModuleRow, weight: TensorRow) -> Packed:
        expression = self.probe.sources.get(weight.tensor_path)
        entry = None if expression is None or not expression.is_leaf else self.packed.get(expression.leaves[0])
        if entry is not None and (row.quantized or row.kind == "embedding"):
            return self.codes.share(self._fetch_packed(entry))
        dense = self._dense(weight)
        assert dense is not None, weight.tensor_path
        return self.codes.share(quantize(dense, self.plan.request.quant)) if row.quantized else keep(dense)

    def _staged(
        self, packed: Packed, places: Mapping[str, Part], writer: streaming.GroupWriter
    ) -> Callable[[streaming.Streamer], streaming.Staged]:
        facts, piece = packed.with_parts({}, packed.codes), len(writer.piece_starts)
        return lambda streamer: streaming.Staged(streamer, writer.group, facts, places, piece)

    def _stage_linear(
        self, row: ModuleRow, staged: Callable[[streaming.Streamer], streaming.Staged], common: leaves.LeafOptions
    ) -> None:
        def put(streamer: streaming.Streamer) -> None:
            leaf = leaves.StagedLinear(row.module_path, staged(streamer), **common)
            self.probe.model.set_submodule(row.module_path, leaf.eval())
            if row.is_head8:
                self.head = leaf

        self.waiting.append(put)

    def _fill_experts(self, row: ModuleRow, module: nn.Module, tier: str, writer: streaming.GroupWriter | None) -> None:
        large = [tensor for tensor in row.tensors if self._moves(row, tensor)]
        dense = {tensor.tensor_path.rpartition(".")[2]: self._dense(tensor) for tensor in large}
        stacks = {name: tensor for name, tensor in dense.items() if tensor is not None}
        self._fill_fixed(row, module, large)
        if tier == "host":
            for name, tensor in stacks.items():
                module._parameters[name] = nn.Parameter(tensor.cpu(), requires_grad=False)
            self.on_host.append(module)
            return
        assert writer is not None
        first = next(iter(stacks.values()))
        packed = Packed("none", tuple(first.shape), first.dtype, {}, {})
        staged = self._staged(packed, writer.add(stacks), writer)
        self.waiting.append(lambda streamer: leaves.stage_parameters(module, staged(streamer)))

    def _fill_packed_experts(self, row: ModuleRow, module: nn.Module, tier: str, writer: streaming.GroupWriter | None) -> None:
        assert self.reader is not None
        near = NearWriter(self.device, self.slots, self.arena) if self.slots else None
        writer = None if near is not None else writer
        owner = near or writer or (self.arena if tier == "resident" else None)
        room = pieces.host_room if owner is None else owner.room
        pack = partial(pieces.stored, fetch=lambda name: self._fetch_packed(self.packed[name]), room=room)
        if row.made is not None:
            pack = partial(pieces.pack, kind=row.made, entries=self.entries, take=self.reader.take, codes=self.codes, room=room)
        stage = None if writer is None else lambda packed: self._staged(packed, writer.places, writer)
        put = pieces.hold(row, module, pack, self.codes, self.adapter_store, stage, near)
        self._fill_fixed(row, module, [tensor for tensor in row.tensors if self._moves(row, tensor)])
        if put is not None:
            self.waiting.append(put)
        elif tier == "host" and near is None:
            self.on_host.append(module)

    def _fill_embedding(self, row: ModuleRow, module: nn.Module) -> None:
        weight = row.weight
        plain = type(module) is nn.Embedding or hasattr(module, "embed_scale")
        if weight is None or not plain or getattr(module, "max_norm", None) is not None:
            self._fill_fixed(row, module)
            return
        is_resident = self.tier[row.block] != "gather"
        resident = self.arena.hold(self._packed(row, weight)) if is_resident and row.stored else None
        parameter = self._parameter(weight) if is_resident and resident is None else None
        source = None if is_resident else self._rows(row, weight)
        self._fill_fixed(row, module, [weight])
        scale = getattr(module, "embed_scale", None)
        if isinstance(scale, float):
            scale = torch.tensor(scale)
        common: leaves.TableOptions = {
            "embed_scale": scale.to(self.device) if isinstance(scale, Tensor) else None, "device": self.device,
            "dtype": self.dtype, "store": self.adapter_store, "padding_idx": getattr(module, "padding_idx", None),
        }  # fmt: skip
        if row.stored and stored_format(row.stored).has_exact_scale:
            common["exact_scale"] = float(getattr(module, "scalar_embed_scale", 1.0))
        table: leaves.Table
        first_rows = int(getattr(module, "padding_idx", None) or 0) + 1
        if resident is not None:
            table = leaves.PackedTable(row.module_path, resident, first_rows, **common)
        elif parameter is not None:
            table = leaves.ResidentTable(row.module_path, parameter, **common)
        else:
            assert source is not None
            table = leaves.GatheredTable(row.module_path, (weight.shape[0], weight.shape[1]), source, first_rows, **common)
        self.probe.model.set_submodule(row.module_path, table.eval())

    def _rows(self, row: ModuleRow, weight: TensorRow) -> Tensor | leaves.FileRows | leaves.PackedRows:
        """Return where the rows of a gathered table are: in host memory, or left in the checkpoint file."""
        is_in_file = self.home[row.block] == "file"
        if row.stored and is_in_file:
            stored = self.packed[self.probe.sources[weight.tensor_path].leaves[0]]
            files = {name: self._file_rows(part) for name, part in stored.parts.items()}
            return leaves.PackedRows(Packed(stored.kind, stored.shape, self.dtype, {}, {}), files)
        if row.stored:
            return leaves.PackedRows(self._packed(row, weight))
        if not is_in_file:
            dense = self._dense(weight)
            assert dense is not None
            return dense
        entry = self._entry(
            weight, "so its rows cannot be read from there",
            hint="Give the plan more host_memory, so that the table fits there",
        )  # fmt: skip
        return self._file_rows(entry)

    def _file_rows(self, entry: TensorEntry) -> leaves.FileRows:
        rows = leaves.FileRows(entry.file, entry.start, (entry.shape[0], entry.shape[1]), getattr(torch, entry.dtype))
        self.file_rows.append(rows)
        return rows

    def _parameter(self, tensor: TensorRow) -> nn.Parameter:
        """Return the parameter on the execution device; tied paths get one and the same object."""
        owner = tensor.tied_to or tensor.tensor_path
        if owner not in self.owners:
            dense = self._dense(tensor)
            assert dense is not None, tensor.tensor_path
            self.owners[owner] = nn.Parameter(dense, requires_grad=False)
        return self.owners[owner]

    def _fill_fixed(self, row: ModuleRow, module: nn.Module, but: Sequence[TensorRow] = ()) -> None:
        """Load a module's tensors but some, and every buffer computed at load, to the execution device."""
        for tensor in self._in_order(row):
            if tensor in but:
                continue
            name = tensor.tensor_path[len(row.module_path) + 1 :] if row.module_path else tensor.tensor_path
            if tensor.is_buffer:
                dense = self._dense(tensor)
                value = module._buffers[name] if dense is None else dense
                assert value is not None
                module._buffers[name] = value.to(self.device)
            elif self.probe.sources.get(tensor.tensor_path) is None and tensor.tied_to is None:
                value = module._parameters[name]
                assert value is not None
                module._parameters[name] = nn.Parameter(value.data.to(self.device), requires_grad=False)
            else:
                module._parameters[name] = self._parameter(tensor)

    # The end ----------------------------------------------------------------------------------------------------------

    def _check_nothing_left(self) -> None:
        """Raise CheckpointError if any tensor of the finished tree still holds no data."""
        model = self.probe.model
        for name, buffer in list(model.named_buffers()):  # computed at load, in no file: real on the CPU
            if buffer.device.type not in (self.device.type, "meta"):
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = buffer.to(self.device)
        unfilled = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.device.type == "meta"]
        if unfilled:
            raise CheckpointError(
                f"{len(unfilled)} tensors were not filled, for example {', '.join(unfilled[:3])}", path=self.plan.request.model,
                hint="This architecture keeps tensors where the loader does not look; please report it",
            )  # fmt: skip

    def _streamer(self) -> streaming.Streamer | None:
        if not self.groups:
            return None
        in_order = {row.block: place for place, row in reversed(list(enumerate(self.rows)))}
        self.groups.sort(key=lambda group: in_order[group.block])
        streamer = streaming.Streamer(self.device, self.groups, slot_count=self.plan.staging_slots, spill=self.spill)
        self.undo.callback(streamer.close)
        for put in self.waiting:
            put(streamer)
        for group in self.groups:
            block = self.probe.model.get_submodule(group.block)
            leaves.last_reader(block, group).register_forward_hook(lambda *_, group=group: streamer.leave(group))
        return streamer
