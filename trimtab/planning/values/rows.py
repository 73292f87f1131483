"""The rows of a plan, and which of its items are outside torch's peak."""

from __future__ import annotations

from dataclasses import dataclass

# Items that count against the device budget but are not in torch's peak.
OUTSIDE_PEAK = ("kernels", "graphs", "prompt_graphs", "tower_graphs", "fragments", "cuda_context", "allocator_reserve")
# Phases of a request in the JSON of a plan that texts call otherwise.
PHASE_WORDS = {"pictures": "images", "sound": "audio"}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One block: its tier, the location of its bytes, its seconds per request and per decode step, and the reason.

    home: "device", "host" (memory), "disk" (the spill file) or "file" (the checkpoint itself). gpu_bytes: resident on the
    execution device, immovable tensors included; staging buffers are counted once for all blocks, not here.
    """

    block_path: str
    part: str
    tier: str
    home: str
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    request_s: float
    token_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The weights that a checkpoint's files hold in one format: how many modules, values and bytes, and whether they are tables."""

    format_name: str
    modules: int
    values: int
    bytes: int
    are_tables: bool

    @property
    def bits_per_value(self) -> float:
        return 8 * self.bytes / self.values


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The stacked experts of a model: their formats (None: 16 or 32 bits), how many modules, experts of each, values and bytes,
    whether loading packs them, and why experts that the files hold packed do not stay so."""

    format_name: str | None
    modules: int
    count: int
    values: int
    bytes: int
    is_made: bool
    reason: str

    @property
    def bits_per_value(self) -> float:
        return 8 * self.bytes / self.values


@dataclass(frozen=True, kw_only=True)
class Unquantized:
    """A weight that stays at full precision although the request quantizes."""

    module_path: str
    bytes: int
    reason: str
