"""Which placement blocks does a model have, with bytes and tiers, and what does a placement take of the budgets?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, ModuleRow, Part, TensorRow
from trimtab.errors import gib
from trimtab.formats.record import DEQUANTIZED_TRAFFIC, HEAD8, packed_bytes, packed_parts, stored_format
from trimtab.planning.values.byte_sizes import allocated_bytes, buffer_bytes
from trimtab.planning.values.rows import ExpertWeights, StoredWeights, Unquantized
from trimtab.request import DEFAULT_QUANT, TIERS

Paid = Literal["token", "image", "audio", "request"]
LINEAR_TIERS = ("resident", "stream", "disk", "host")
TABLE_TIERS = ("resident", "gather")
# Anatomies whose blocks are cached: both heads of a model in two formats.
KEPT = 4


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One movable weight: bytes by part as stored, and bytes at full precision.

    kind: its format. packs: whether loading packs it (quantized by us, not already packed in the file). load_transient_bytes: bytes
    on the execution device while that happens. reading_bytes: the part of them that rearranges a file's values.
    """

    tensor_path: str
    module_path: str
    kind: str
    shape: tuple[int, ...]
    parts: Mapping[str, int]
    dense_bytes: int
    packs: bool
    reading_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes when resident on a GPU: packed weights share one allocation, others have one each."""
        if len(self.parts) > 1:
            return buffer_bytes(self.parts)
        return sum(allocated_bytes(nbytes) for nbytes in self.parts.values())

    @property
    def load_transient_bytes(self) -> int:
        if len(self.shape) == 3 and (self.packs or len(self.parts) > 1):  # an expert at a time, of pieces that are joined
            return (2 * (self.dense_bytes if self.packs else self.nbytes) + self.nbytes + self.reading_bytes) // self.shape[0]
        if not self.packs:
            return self.nbytes + self.reading_bytes
        return stored_format(self.kind).packing_bytes(self.shape, self.dense_bytes)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One unit of placement.

    movable_bytes, fixed_bytes: exact. movable_allocated_bytes, fixed_allocated_bytes: the same as torch's CUDA
    allocator counts them when resident. buffer_bytes: the packed weights as one aligned buffer. leaves: module paths of
    the movable weights. refused: tier -> why it is not allowed.
    load_transient_bytes: the most that loading one weight takes at once. dense_bytes: file bytes of the weights that
    loading packs. flops_per_token: multiply-adds per row. row_bytes: one row of a table, 0 for other blocks.
    is_in_file: whether a table's rows can be read from the checkpoint: its tensors are there as they are computed with. pieces: the
    leaves of each piece that a captured pass copies separately; piece_bytes: of each, in the buffer. widened_bytes: bytes that
    a pass writes and reads again for weights that are stored in 16 bits and used in float32. expert_bytes: of stacked experts,
    expert_count of each stack, of which a token uses expert_share; are_apart: they do not move with it (memory/expert_slots.py);
    beside: which linears are next to them, as in `EXPERT_LAYER_S`. layer_s: `StoredFormat.layer_s` of its weights, the most.
    attended: values that its attention, or the layer in its place, gives of a token.

    A block is a decoder or tower layer, a gathered table, the head, or the rest of a part. Norms, convolutions, biases, buffers and
    embeddings that are not merely indexed stay on the execution device.
    """

    block_path: str
    part: Part
    movable_bytes: int
    fixed_bytes: int
    movable_allocated_bytes: int
    fixed_allocated_bytes: int
    buffer_bytes: int
    leaves: tuple[str, ...]
    allowed_tiers: tuple[str, ...]
    refused: Mapping[str, str] = field(hash=False)
    load_transient_bytes: int
    dense_bytes: int
    paid: Paid
    flops_per_token: int
    row_bytes: int = 0
    is_in_file: bool = True
    pieces: tuple[tuple[str, ...], ...] = ()
    piece_bytes: tuple[int, ...] = ()
    widened_bytes: int = 0
    expert_bytes: int = 0
    expert_count: int = 0
    expert_share: float = 1.0
    are_apart: bool = False
    beside: str = ""
    layer_s: float = 0.0
    attended: int = 0

    def read_bytes(self, rows: int) -> int:
        """Return the bytes that a step of `rows` rows reads, where each token's experts are any of them as likely."""
        whole = self.movable_bytes + self.are_apart * self.expert_bytes
        return whole - int(self.expert_bytes * (1 - self.expert_share) ** rows)

    @property
    def is_table(self) -> bool:
        return self.row_bytes > 0

    @cached_property
    def is_decoder_layer(self) -> bool:
        return self.part == "language" and self.block_path.rpartition(".")[2].isdecimal()


def quant_of(anatomy: Anatomy, quant: str) -> str:
    """Return the format of quantized weights; "auto" is the checkpoint's own if it is packed, else the default."""
    if quant != "auto":
        return quant
    return anatomy.prequantized or DEFAULT_QUANT


def tied_paths(anatomy: Anatomy) -> dict[str, str]:
    """Return tensor_path -> the tensor it shares storage with, in both directions."""
    shared: dict[str, str] = {}
    for row in anatomy.rows:
        for tensor in row.tensors:
            if tensor.tied_to is not None:
                shared[tensor.tensor_path] = tensor.tied_to
                shared.setdefault(tensor.tied_to, tensor.tensor_path)
    return shared


def leaves_of(row: ModuleRow, quant: str, tied: Mapping[str, str], *, prequantized: bool = False) -> tuple[Leaf, ...]:
    """Return the movable weights of one module: a linear's weight, the 3-D weights of fused experts, a gathered table."""
    if row.kind == "linear" or (row.kind == "embedding" and row.gather_only):
        tensors = [row.weight] if row.weight is not None else []
    elif row.kind == "experts":
        tensors = list(row.stacks)
    else:
        return ()
    is_packed = row.quantized or (row.stored and row.kind == "embedding")

    def leaf(tensor: TensorRow) -> Leaf:
        kind = HEAD8 if row.is_head8 else row.form_of(tensor) or row.stored or quant if is_packed else "none"
        is_stored = bool(row.stored or tensor.stored)
        return Leaf(
            tensor_path=tensor.tensor_path, module_path=row.module_path, kind=kind, shape=tensor.shape,
            parts=packed_parts(tensor.shape, kind, tensor.dtype), dense_bytes=tensor.nbytes,
            packs=kind == HEAD8 or (kind != "none" and (row.made is not None or not prequantized)),
            reading_bytes=stored_format(kind if is_packed else row.stored or kind).reading_bytes(tensor.shape) if is_stored else 0,
        )  # fmt: skip

    return tuple(leaf(tensor) for tensor in tensors if tensor.tensor_path not in tied)


@lru_cache(maxsize=KEPT)
def blocks_of(anatomy: Anatomy, quant: str, *, are_apart: bool = False) -> tuple[Block, ...]:
    """Return the blocks of a model in the order of its modules, every module in exactly one. are_apart: stacked experts."""
    quant, tied = quant_of(anatomy, quant), tied_paths(anatomy)
    grouped: dict[str, list[ModuleRow]] = {}
    for row in anatomy.rows:
        grouped.setdefault(row.block, []).append(row)
    return tuple(_block(path, rows, anatomy, quant, tied, are_apart) for path, rows in grouped.items())


# The linears of described families that read attention's output, or a recurrent layer's.
_ATTENDED = (".o_proj", ".out_proj")
# A path of the linears next to experts, by their name in `EXPERT_LAYER_S`.
_BESIDE = {"mlp": "mlp.down_proj", "shared": "shared_expert"}


def _block(
    path: str, rows: list[ModuleRow], anatomy: Anatomy, quant: str, tied: Mapping[str, str], are_apart: bool
) -> Block:  # fmt: skip
    packed_file = anatomy.prequantized is not None
    # A table moves only as a separate block; in a block with linears it stays.
    is_mixed = any(row.kind in ("linear", "experts") for row in rows)
    leaves = [
        leaf
        for row in rows
        if not (is_mixed and row.kind == "embedding")
        for leaf in leaves_of(row, quant, tied, prequantized=packed_file)
    ]
    moving, every = {leaf.tensor_path for leaf in leaves}, leaves
    stacked = [leaf for leaf in leaves if len(leaf.shape) == 3]
    leaves = [leaf for leaf in leaves if not (are_apart and len(leaf.shape) == 3)]
    fixed = [t for row in rows for t in row.tensors if t.tied_to is None and t.tensor_path not in moving]
    moving_rows = [row for row in rows if any(tensor.tensor_path in moving for tensor in row.tensors)]
    part = (moving_rows or rows)[0].part
    is_table = bool(moving_rows) and all(row.gather_only for row in moving_rows)
    allowed, refused = _tiers(path, rows, leaves, is_table, anatomy, tied)
    pieces = _pieces_of(leaves)
    places = {path: number for number, piece in enumerate(pieces) for path in piece}
    piece_bytes = [0] * len(pieces)
    for leaf in leaves:
        piece_bytes[places[leaf.module_path]] += buffer_bytes(leaf.parts)
    share = min((row.chosen / row.stacks[0].shape[0] for row in rows if row.chosen and row.stacks), default=1.0)
    return Block(
        block_path=path, part=part,
        movable_bytes=sum(leaf.nbytes for leaf in leaves), fixed_bytes=sum(tensor.nbytes for tensor in fixed),
        movable_allocated_bytes=sum(leaf.allocated_bytes for leaf in leaves),
        fixed_allocated_bytes=sum(allocated_bytes(tensor.nbytes) for tensor in fixed),
        buffer_bytes=sum(buffer_bytes(leaf.parts) for leaf in leaves),
        leaves=tuple(dict.fromkeys(leaf.module_path for leaf in leaves)),
        allowed_tiers=allowed, refused=refused,
        load_transient_bytes=max((leaf.load_transient_bytes for leaf in every), default=0),
        dense_bytes=sum(leaf.dense_bytes for leaf in every if leaf.packs),
        paid=_paid(path, part),
        flops_per_token=0 if is_table else sum(int(2 * prod(one.shape) * (share if len(one.shape) == 3 else 1)) for one in every),
        row_bytes=sum(leaf.dense_bytes // leaf.shape[0] for leaf in leaves) if is_table else 0,
        is_in_file=all(len(t.sources) == 1 for row in rows for t in row.tensors if t.tensor_path in moving)
        and all(row.stored is None or stored_format(row.stored).has_file_rows for row in rows),
        pieces=pieces, piece_bytes=tuple(piece_bytes), widened_bytes=sum(widened_bytes(row, anatomy.dtype) for row in rows),
        expert_bytes=sum(leaf.nbytes for leaf in stacked), expert_count=min((leaf.shape[0] for leaf in stacked), default=0),
        expert_share=min(share, 1.0), are_apart=are_apart and bool(stacked),
        beside=next((name for name, part in _BESIDE.items() if any(part in row.module_path for row in rows)), ""),
        layer_s=max((stored_format(leaf.kind).layer_s for leaf in leaves if len(leaf.shape) == 2), default=0.0),
        attended=max((one.shape[1] for one in every if one.module_path.endswith(_ATTENDED) and len(one.shape) == 2), default=0),
    )  # fmt: skip


def widened_bytes(row: ModuleRow, dtype: str) -> int:
    """Return the bytes that a product writes and reads again if a linear's weight is stored in fewer bits than the compute
    dtype, or in a format that is dequantized for each product."""
    weight = row.weight
    if weight is not None and row.quantized and row.stored and stored_format(row.stored).is_own:
        return DEQUANTIZED_TRAFFIC * weight.numel
    if weight is None or row.kind != "linear" or row.quantized or row.is_head8 or not weight.is_narrow(dtype):
        return 0
    return 2 * weight.numel * DTYPE_BYTES[dtype]


def _paid(path: str, part: Part) -> Paid:
    if part == "vision":
        return "image"
    if part == "audio":
        return "audio"
    if part == "connector":
        if "audio" in path or "speech" in path:
            return "audio"
        return "image" if any(word in path for word in ("vision", "visual", "image", "multi_modal")) else "request"
    return "token"


def _tiers(
    path: str, rows: list[ModuleRow], leaves: list[Leaf], is_table: bool, anatomy: Anatomy, tied: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    if not leaves:
        reasons = dict.fromkeys(why_fixed(row, anatomy, tied) for row in rows if row.tensors)
        why = "; ".join(reasons) or "it holds no tensors"
        return ("resident",), {tier: why for tier in TIERS if tier != "resident"}
    if is_table:
        why = (
            "only single rows of it are read: use gather, which leaves the table in host memory, or in the "
            "checkpoint file when host memory is short"
        )
        return TABLE_TIERS, {tier: why for tier in TIERS if tier not in TABLE_TIERS}
    why = f"only a table that is looked up by index can be gathered; this block computes with whole weights ({len(leaves)})"
    return LINEAR_TIERS, {"gather": why}


def why_fixed(row: ModuleRow, anatomy: Anatomy, tied: Mapping[str, str] | None = None) -> str:
    """Return why a module without movable weights stays on the execution device."""
    tied = tied_paths(anatomy) if tied is None else tied
    weight = row.weight
    partner = tied.get(weight.tensor_path) if weight is not None else None
    if row.kind == "embedding" and weight is not None:
        reasons = []
        if anatomy.model_type.startswith("gemma4") and any(other.gather_only for other in anatomy.rows):
            reasons.append("Gemma4Model.forward reads its weight outside the module at every step")
        if partner is not None:
            reasons.append(f"the tied {partner.removesuffix('.weight')} needs the whole matrix for every token")
        return f"{row.module_path} cannot move: " + (" and ".join(reasons) or "code outside the module reads its weight")
    if partner is not None and weight is not None:
        owner = partner.removesuffix(".weight")
        return f"{row.module_path} cannot move: it is tied to {owner}, one matrix of {gib(weight.nbytes)} read whole"
    return "norms, convolutions, biases, buffers and plain parameters stay on the execution device"


def places_of(block: Block) -> list[tuple[str, str]]:
    """Return the (tier, home) pairs that a block allows."""
    homes = {"resident": ("device",), "stream": ("host",), "host": ("host",), "disk": ("disk",), "gather": ("host", "file")}
    places = [(tier, home) for tier in block.allowed_tiers for home in homes[tier]]
    return places if block.is_in_file else [place for place in places if place != ("gather", "file")]


def unquantized_of(anatomy: Anatomy, quant: str) -> tuple[Unquantized, ...]:
    """Return the linears and experts that stay in full precision, with the reason; none if no format was chosen."""
    if quant == "none" and anatomy.prequantized is None:
        return ()
    tied = tied_paths(anatomy)
    kept = []
    for row in anatomy.rows:
        if (row.kind in ("linear", "experts") or row.is_read_linear) and not row.quantized and not row.is_head8:
            weights = [row.weight] if row.weight is not None else [t for t in row.tensors if len(t.shape) == 3]
            nbytes = sum(packed_bytes(t.shape, "none", t.dtype) for t in weights if t is not None)
            shared = "" if not any(t and t.tensor_path in tied for t in weights) else "shared with another module"
            kept.append(Unquantized(module_path=row.module_path, bytes=nbytes, reason=row.why_unquantized or shared))
    return tuple(kept)


def stored_of(anatomy: Anatomy) -> tuple[StoredWeights, ...]:
    """Return the formats in which a checkpoint's files hold its weights, that of the most values first, tables last."""
    found: dict[tuple[str, bool], list[TensorRow]] = {}
    for row in anatomy.rows:
        if row.stored and row.weight is not None:
            found.setdefault((row.stored, row.kind == "embedding"), []).append(row.weight)
    made = [
        StoredWeights(
            format_name=name, modules=len(weights), values=sum(one.numel for one in weights),
            bytes=sum(packed_bytes(one.shape, name, one.dtype) for one in weights), are_tables=are_tables,
        )
        for (name, are_tables), weights in found.items()
    ]  # fmt: skip
    return tuple(sorted(made, key=lambda one: (one.are_tables, -one.values)))


def _pieces_of(leaves: Sequence[Leaf]) -> tuple[tuple[str, ...], ...]:
    """Return the module paths of each piece of a block, in the order of the modules. Weights that one kernel may read together
    are never separated: the linears of one parent with the same D_in, and those of one module. Small neighbours are joined, up to
    the largest."""
    units: dict[tuple[str, int | str], list[Leaf]] = {}
    for leaf in leaves:
        is_linear = len(leaf.shape) == 2
        key = (leaf.module_path.rpartition(".")[0], leaf.shape[1] if is_linear else leaf.module_path)
        units.setdefault(key, []).append(leaf)
    most = max(map(_sum_of, units.values()), default=0)
    joined: list[list[Leaf]] = []
    for unit in units.values():
        if joined and _sum_of(joined[-1]) + _sum_of(unit) <= most:
            joined[-1] += unit
        else:
            joined.append(list(unit))
    return tuple(tuple(dict.fromkeys(leaf.module_path for leaf in piece)) for piece in joined)


def _sum_of(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def experts_of(anatomy: Anatomy) -> ExpertWeights | None:
    """Return what the stacked experts of a model take, None if it has none."""
    rows = [row for row in anatomy.rows if row.stacks]
    stacks = [(one, row.form_of(one) or "none") for row in rows for one in row.stacks]
    if not stacks:
        return None
    values: dict[str, int] = {}
    for one, kind in stacks:
        values[kind] = values.get(kind, 0) + one.numel
    names = sorted(values, key=lambda kind: (-values[kind], kind))
    return ExpertWeights(
        format_name=None if names == ["none"] else ", ".join("16 bits" if name == "none" else name for name in names),
        modules=len(rows), count=min(one.shape[0] for one, _ in stacks), values=sum(values.values()),
        bytes=sum(packed_bytes(one.shape, kind, one.dtype) for one, kind in stacks),
        is_made=any(row.made is not None for row in rows),
        reason=next((row.why_unquantized for row in rows if row.why_unquantized), "") if anatomy.prequantized else "",
    )  # fmt: skip


# A placement against the budgets --------------------------------------------------------------------------------------

STAGING_SLOTS = 2
DISK_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a plan is for, as machine/machine_cache.py and engine/memory/rates.py read it.

    execution_device: "cuda:0" or "cpu". gpu_*: of the execution device, 0 without one. *_free_bytes, *_available_bytes:
    bytes that can still be allocated in addition to context_bytes, the driver's share of the device that torch does not
    count, and process_bytes, the host memory of the process before any weight. Budgets include these two. capability:
    the compute capability, None if not read. reads_host: whether kernels read page-locked host memory at its own address.
    """

    execution_device: str
    gpu_total_bytes: int = 0
    gpu_free_bytes: int = 0
    host_available_bytes: int
    context_bytes: int = 300 * 2**20
    process_bytes: int = 2**30
    has_pinned: bool = True
    capability: tuple[int, int] | None = None
    reads_host: bool = True

    @property
    def on_cpu(self) -> bool:
        return self.execution_device == "cpu"

    def budget_bytes(self, requested: int | None) -> int:
        """Return the budget of the execution device: the requested one, else all free bytes."""
        free = self.host_available_bytes + self.process_bytes if self.on_cpu else self.gpu_free_bytes + self.context_bytes
        return requested or free


@dataclass(frozen=True)
class Choice:
    """One way to place a block: bytes on each device, bytes of its staging buffer, seconds of a whole request."""

    tier: str
    home: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    staged_bytes: int
    request_s: float
    step_s: float
    cost_s: float

    @property
    def is_far(self) -> bool:
        """Whether it is outside host memory too: spilled to disk, or left in the checkpoint file."""
        return self.home in ("disk", "file")


@dataclass(frozen=True)
class Item:
    """The choices that one block has; transient_bytes and dense_bytes as in `blocks.Block`."""

    choices: tuple[Choice, ...]
    is_table: bool
    transient_bytes: int
    dense_bytes: int

    def stay(self) -> Choice | None:
        return next((choice for choice in self.choices if choice.tier == "resident"), None)

    def leave(self, cap: int, *, far: bool) -> Choice | None:
        """Return the fastest choice off the device, to the host or to disk, within a staging buffer of cap."""
        fitting = [
            choice for choice in self.choices if choice.tier != "resident" and choice.is_far == far and choice.staged_bytes <= cap
        ]
        return min(fitting, key=lambda choice: choice.cost_s, default=None)


Placed = tuple[Choice, Item, int]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The cost of a placement: peaks of running and loading on the device, host and disk bytes, seconds per request.

    staged_bytes: one staging buffer, of which there are `slots`. buffer_bytes: the host buffers of the disk tier.
    """

    run_bytes: int
    load_bytes: int
    host_bytes: int
    disk_bytes: int
    slots: int
    staged_bytes: int
    buffer_bytes: int
    read_buffer_bytes: int
    cost_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.run_bytes, self.load_bytes)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Budgets, and the bytes that are taken in every placement.

    total_budget_bytes: device and host together, on a machine where both are the same memory. run_bytes, load_bytes: on
    the device in addition to the blocks, while running and while loading. host_bytes: base of the process.
    context_bytes: the driver's share. reserve: peak -> bytes that the allocator holds beyond it. While loading:
    host_load_bytes of read buffers.
    slots: staging buffers, at most.
    """

    device_budget_bytes: int
    host_budget_bytes: int
    disk_budget_bytes: int | None
    total_budget_bytes: int | None
    run_bytes: int
    load_bytes: int
    host_bytes: int
    host_load_bytes: int
    context_bytes: int
    reserve: Callable[[int], int]
    slots: int = STAGING_SLOTS

    def device_need(self, peak_bytes: int) -> int:
        """Return the device budget that a peak needs."""
        return peak_bytes + self.reserve(peak_bytes) + self.context_bytes

    def allows_device(self, totals: Totals) -> bool:
        return self.device_need(totals.peak_bytes) <= self.device_budget_bytes

    def allows_host(self, totals: Totals) -> bool:
        return totals.host_bytes <= self.host_budget_bytes

    def allows_disk(self, totals: Totals) -> bool:
        return self.disk_budget_bytes is None or totals.disk_bytes <= self.disk_budget_bytes

    def total_need(self, totals: Totals) -> int:
        return self.device_need(totals.peak_bytes) + totals.host_bytes

    def allows_total(self, totals: Totals) -> bool:
        return self.total_budget_bytes is None or self.total_need(totals) <= self.total_budget_bytes

    def allows(self, totals: Totals) -> bool:
        return self.allows_device(totals) and self.allows_host(totals) and self.allows_disk(totals) and self.allows_total(totals)


def slots_of(chosen: Iterable[Choice], limits: Limits) -> int:
    """Return how many staging buffers the blocks of a placement need: only the `slots` of its totals."""
    return min(sum(choice.staged_bytes > 0 for choice in chosen), limits.slots)


def totals_of(placed: Iterable[Placed], limits: Limits) -> Totals:
    """Return the totals of a placement; placed: (choice, item, how many identical blocks)."""
    resident = host = disk = staged_blocks = staged = spilled_blocks = spilled = 0
    transient = leaving_transient = 0
    cost_s = 0.0
    for choice, item, count in placed:
        resident += choice.device_bytes * count
        host += choice.host_bytes * count
        disk += choice.disk_bytes * count
        cost_s += choice.cost_s * count
        if choice.tier == "resident":
            if item.dense_bytes:
                transient = max(transient, item.transient_bytes)
        elif not item.is_table:
            leaving_transient = max(leaving_transient, item.transient_bytes)
        if choice.staged_bytes:
            staged_blocks, staged = staged_blocks + count, max(staged, choice.staged_bytes)
            if choice.tier == "disk":
                spilled_blocks, spilled = spilled_blocks + count, max(spilled, choice.staged_bytes)
    slots = min(staged_blocks, limits.slots)
    buffers = min(spilled_blocks, DISK_BUFFERS) * spilled
    running = resident + slots * staged
    # Loading: blocks that leave are packed first, while nothing is resident; then blocks that stay. Weights to pack
    # pass through two buffers of the largest one's size, allocated for the whole load.
    places = 2 * max(transient, leaving_transient)
    filling = resident + places
    reading = limits.host_load_bytes + spilled
    return Totals(
        run_bytes=limits.run_bytes + running, load_bytes=limits.load_bytes + max(filling, running),
        host_bytes=limits.host_bytes + host + max(buffers, reading), disk_bytes=disk, slots=slots, staged_bytes=staged,
        buffer_bytes=buffers, read_buffer_bytes=reading, cost_s=cost_s,
    )  # fmt: skip
