"""What is the upper limit of the decode speed by the bytes that one token reads?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget
from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, KVLayer, ModuleRow, TensorRow
from trimtab.formats.record import packed_bytes
from trimtab.planning import Plan
from trimtab.planning.values.blocks import leaves_of, quant_of, tied_paths
from trimtab.planning.values.byte_sizes import position_bytes

# The parts of a model that a decode step computes.
STEP_PARTS = ("language", "head", "table")
WAYS = ("device", "link", "disk", "host")
ADAPTER_DTYPE = "float32"
# tier -> the paths of its bytes; a gathered or disk-tier block whose home is a file also uses "disk".
_WAYS_OF = {
    "resident": ("device",), "gather": ("link",), "stream": ("link", "device"), "disk": ("link", "disk", "device"),
    "host": ("host",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes that one token reads over one path ("device", "link", "disk", "host"). what: the reader, such as "decoder", "head" or
    "rows". device_bytes: from the device's own memory: decoder, head, adapter, keys and values, each as stored; one row of a table;
    of fused experts those of the token. host_bytes: of blocks in the tier host. link_bytes: of streamed blocks and gathered rows.
    disk_bytes: the part of these from the disk tier's file or the checkpoint. On a CPU streamed blocks count as device_bytes.
    """

    what: str
    way: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Measured bytes per second: of the execution device's memory, of host memory, of the link between them (None: there is
    none) and of the disk."""

    device_Bps: float
    host_Bps: float
    link_Bps: float | None
    disk_Bps: float

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above zero, not {value}")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most tokens per second that the bytes allow. seconds: by path. bound_by: the slowest path."""

    tok_s: float
    seconds: Mapping[str, float]
    bound_by: str
    nbytes: int

    def share(self, tok_s: float) -> float:
        """Return a measured rate as a share of the limit, 1.0 at the limit."""
        return tok_s / self.tok_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": dict(self.seconds)}


def limit_of(reads: tuple[Read, ...], bandwidth: Bandwidth) -> Limit:
    """Return the limit of a step that reads these bytes. Errors: ValueError for no bytes, or a missing link. token_s =
    max(device_bytes / device_Bps + host_bytes / host_Bps, link_bytes / link_Bps, disk_bytes / disk_Bps). Not counted: activations,
    writes, the towers. A model that fits a processor's cache can be faster."""
    total = {way: sum(read.nbytes for read in reads if read.way == way) for way in WAYS}
    if not any(total.values()):
        raise ValueError("a step that reads nothing has no limit")
    if total["link"] and bandwidth.link_Bps is None:
        raise ValueError("bytes over a link, and there is no link")
    rates = {
        "device": bandwidth.device_Bps, "link": bandwidth.link_Bps or 1.0, "disk": bandwidth.disk_Bps,
        "host": bandwidth.host_Bps,
    }  # fmt: skip
    seconds = {way: total[way] / rates[way] for way in WAYS}
    together = {"device": seconds["device"] + seconds["host"], "link": seconds["link"], "disk": seconds["disk"]}
    slowest = max(together, key=lambda way: together[way])
    bound_by = slowest if slowest != "device" else max("device", "host", key=lambda way: seconds[way])
    return Limit(tok_s=1 / together[slowest], seconds=seconds, bound_by=bound_by, nbytes=sum(total.values()))


# Reads of a step ------------------------------------------------------------------------------------------------------


def step_reads(
    plan: Plan, anatomy: Anatomy, *, context_tokens: float, adapter: AdapterSpec | None = None,
    experts_per_token: int | None = None, is_stock: bool = False,
) -> tuple[Read, ...]:  # fmt: skip
    """Return the reads of one token for a model placed by the plan. context_tokens: in the cache, on average. is_stock: completely
    on the device, keys and values in full."""
    homes = {} if is_stock else {row.block_path: (row.tier, row.home) for row in plan.placements}
    kv, on_cpu = "full" if is_stock else plan.request.kv, plan.execution_device == "cpu"
    targets = [target for target in adapter.targets if target.part in STEP_PARTS] if adapter is not None else []
    saved = _saved(targets, "bfloat16" if adapter is None else adapter.model_dtype)
    by_kind: dict[tuple[str, str], int] = {}

    def add(what: str, ways: tuple[str, ...], nbytes: float) -> None:
        for way in ways:
            by_kind[what, way] = by_kind.get((what, way), 0) + round(nbytes)

    quant, tied = quant_of(anatomy, plan.request.quant), tied_paths(anatomy)
    for row in anatomy.rows:
        if row.part not in STEP_PARTS:
            continue
        tier, home = homes.get(row.block, ("resident", "device"))
        packed = {leaf.tensor_path: leaf.nbytes for leaf in leaves_of(row, quant, tied)}
        for tensor in row.tensors:
            moves = tensor.tensor_path in packed and tensor.tensor_path not in saved
            # A table that is not gathered stays; with linears it is no separate block.
            moves = moves and (row.kind != "embedding" or tier == "gather")
            nbytes = saved.get(tensor.tensor_path, packed.get(tensor.tensor_path, tensor.nbytes))
            share = _share(row, tensor, experts_per_token)
            add(_what(row), _ways(tier, home, on_cpu) if moves else ("device",), nbytes * share)
    add("adapter", ("device",), sum(_target_bytes(target, experts_per_token) for target in targets))
    cached = sum(_cache_bytes(layer, context_tokens, anatomy.dtype, kv) for layer in anatomy.kv_layers)
    add("keys and values", ("device",), cached)
    return tuple(Read(what=what, way=way, nbytes=nbytes) for (what, way), nbytes in by_kind.items() if nbytes)


def _ways(tier: str, home: str, on_cpu: bool) -> tuple[str, ...]:
    ways = _WAYS_OF[tier]
    if tier == "gather" and home == "file":
        ways = (*ways, "disk")
    if not on_cpu:
        return ways
    # One memory: bytes that would cross a link are read once.
    return tuple(dict.fromkeys("disk" if way == "disk" else "device" for way in ways))


def _what(row: ModuleRow) -> str:
    if row.kind == "embedding":
        return "rows"
    return "head" if row.part == "head" else "decoder"


def _share(row: ModuleRow, tensor: TensorRow, experts_per_token: int | None) -> float:
    """Return the share of a tensor that a step of one row reads: one row of a table, some of the experts, else all."""
    if row.kind == "embedding" and len(tensor.shape) == 2:
        return 1 / tensor.shape[0]
    if row.kind == "experts" and len(tensor.shape) == 3 and experts_per_token is not None:
        return min(1.0, experts_per_token / tensor.shape[0])
    return 1.0


def _saved(targets: list[AdapterTarget], dtype: str) -> dict[str, int]:
    """Return tensor_path -> bytes of the parameters that an adapter replaces: read instead of the model's."""
    return {
        f"{target.module_path}.{parameter}": packed_bytes(entry.shape, "none", dtype)
        for target in targets if target.kind == "saved"
        for parameter, entry in target.tensors.items()
    }  # fmt: skip


def _target_bytes(target: AdapterTarget, experts_per_token: int | None) -> float:
    if target.kind == "saved":
        return 0
    total: float = 0
    share = min(1.0, (experts_per_token or target.stack.shape[0]) / target.stack.shape[0]) if target.stack is not None else 1.0
    for role, entry in target.tensors.items():
        nbytes = packed_bytes(entry.shape, "none", ADAPTER_DTYPE)
        # A of an embedding is [R, V]: one column is read, like one row of the table.
        total += nbytes / entry.shape[-1] if target.kind == "embedding" and role == "A" else nbytes
    return total * share


def _cache_bytes(layer: KVLayer, tokens: float, dtype: str, kv: str) -> float:
    """Return the bytes that a step reads of one layer's keys and values; a layer that shares them reads them again."""
    seen = tokens if layer.window is None else min(tokens, layer.window)
    return 2 * position_bytes(layer, dtype, kv) * seen + layer.state_values * DTYPE_BYTES[dtype]
