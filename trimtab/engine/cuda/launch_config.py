"""Which launch configurations of a 4-bit matmul fit a card, the probably fastest first?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.formats.kernels import FIRST_LAYOUT, LAYOUTS

BLOCK = 64
MAX_ROWS = 8
MAX_WARPS = 20  # in addition to the one that requests weights
MOST_STAGES = 32
MOST_PARTS = 2**21
# As the kernel lays out its shared memory: barriers, LoRA entries; at the end sums of A x.
_FIXED_BYTES = 2 * MOST_STAGES * 8 + 24 * 24 + 2 * 32 * 4
# 22 warps: as many as there are pairs of blocks in 2,816 columns. How much more a ring takes than this model says, next to a held
# one: 1.3 in steps of two mixtures (H200); of the 90 shapes that were timed a ring is the fastest in none.
_HELD_WARPS, _RING = 22, 1.3
# A batch is four blocks of 64; a row of sums has four places more than it needs.
_BATCH, _STRIDE = 4, 20
# "cut" or another layout than bitsandbytes'; outputs of each member, columns, rows of x, whether two members are multiplied.
CutKey = tuple[str, tuple[int, ...], int, int, bool]


@dataclass(frozen=True)
class LaunchConfig:
    """One launch configuration for n rows of x.

    Its numbers: units (of 16 rows) per block, warps per unit and units in flight, blocks of 64 per piece and pieces in flight,
    blocks along K and the share of each, and pairs of blocks held in registers (0: a ring). A block computes `units` units of 16
    rows: `k_warps` warps share a unit's columns, `groups` of them take units in turn. Columns come in pieces of `piece` blocks of
    64 through a ring of `stages`; `splits` blocks share a unit. With `held` each warp loads that many pairs of blocks into
    registers instead: a group takes one unit, there is no ring, and the kernel is compiled for the shape.
    """

    n: int
    units: int
    k_warps: int
    groups: int
    piece: int
    stages: int
    splits: int
    chunk: int
    grid: int
    shared_bytes: int
    estimated_us: float
    held: int = 0
    normed: bool = False  # the norm in front was measured to be faster as a part of it
    layout: str = FIRST_LAYOUT

    @property
    def kernel(self) -> str:
        if self.held:
            return "matvec_held"
        return "matvec_4" if self.n <= 4 else "matvec_8"

    @property
    def threads(self) -> int:
        return (self.k_warps * self.groups + (not self.held)) * 32

    @property
    def stage_bytes(self) -> int:
        layout = LAYOUTS[self.layout]
        return 16 * (-(-self.piece * layout.block_bytes // 128) * 128 + layout.pads[self.n > layout.few_rows])

    def needed_bytes(self, n: int) -> int:
        """Return the shared memory that the kernel uses with n rows of x (its layout is in matvec4.cu)."""
        layout = LAYOUTS[self.layout]
        scales = self.units * 16 * ((self.chunk // _BATCH * layout.scales) | 1) * 16
        factors = self.chunk * 4 * (n if n <= layout.few_rows else MAX_ROWS) * (1 + layout.scales * layout.has_zero)
        sums = self.units * self.k_warps * n * _STRIDE * 4
        x = n * (self.chunk // 2 * 288 + 16)
        return layout.first_bytes + _FIXED_BYTES + self.stages * self.stage_bytes + scales + x + factors + sums

    def normed_bytes(self, columns: int) -> int:
        """Return the shared memory of a launch with the norm in front: its two weights are kept there, and an x for adapters."""
        return self.shared_bytes + 2 * (2 + self.n * LAYOUTS[self.layout].rounds_inputs) * columns

    @property
    def resident(self) -> int:
        """How many blocks one multiprocessor runs at once (its registers, threads and shared memory as on 9.0)."""
        return max(1, min(65536 // (self.threads * self._registers), 2048 // self.threads, 233472 // (self.shared_bytes + 1024)))

    @property
    def _registers(self) -> int:
        """About how many registers a thread has: those of weights in flight, and the rest."""
        batches = self.chunk // 2 // self.k_warps // self.held if self.held else 0
        return -(-(56 + min(2, batches) * self.held * LAYOUTS[self.layout].block_bytes // 4) // 8) * 8 if self.held else 80

    @property
    def may_be_normed(self) -> bool:
        """Whether the norm in front can be a part of it: a block has whole rows, and warps enough that each holds at most
        three pieces of 256 values of one."""
        each = min(self.k_warps * self.units // self.n, self.chunk // 4)
        return bool(self.held) and self.splits == 1 and each > 0 and -(-(self.chunk // 4) // each) <= 3

    def is_like(self, other: LaunchConfig) -> bool:
        """Whether it cuts the product as a configuration of another layout does."""
        a, b = (replace(one, shared_bytes=0, estimated_us=0.0, normed=False, layout=FIRST_LAYOUT) for one in (self, other))
        return a == b

    def options(self, blocks: int, members: int, *, pair: bool, normed: bool = False) -> tuple[str, ...]:
        """Return the compiler options of a kernel for rows of this many blocks of 64."""
        if not self.held:
            return ()
        facts = {
            "HELD": self.held, "ROWS": self.n, "BLOCKS": blocks, "UNITS": self.units, "K_WARPS": self.k_warps,
            "CHUNK": self.chunk, "SPLITS": self.splits, "PAIRED": int(pair), "NORMED": int(normed), "LAYERS": members,
        }  # fmt: skip
        return tuple(f"-D{name}={value}" for name, value in facts.items())

    def __str__(self) -> str:
        if self.held:
            return (
                f"{self.kernel} units {self.units} warps {self.k_warps} held {self.held} of "
                f"{self.chunk // 2 // self.k_warps} splits {self.splits} grid {self.grid}"
            )
        return (
            f"{self.kernel} units {self.units} warps {self.k_warps} x {self.groups} "
            f"piece {self.piece} x {self.stages} splits {self.splits} grid {self.grid}"
        )


def key_name(layout: str) -> str:
    """Return the first value of a CutKey."""
    return "cut" if layout == FIRST_LAYOUT else layout


def units_of(rows: Sequence[int], *, pair: bool) -> int:
    """Return the units of 16 rows of all members. pair: one of each in turn, as many of both."""
    return 2 * -(-rows[0] // 16) if pair else sum(-(-count // 16) for count in rows)


def cuts(
    rows: Sequence[int], columns: int, n: int, *, multiprocessors: int, shared_bytes: int, pair: bool = False,
    bandwidth: float = 4.2e12, layout: str = FIRST_LAYOUT,
) -> list[LaunchConfig]:  # fmt: skip
    """Return the launch configurations of a matmul, the probably fastest first; empty if none fits.

    rows: D_out of each member. shared_bytes: the limit of a block. pair: the outputs of two members are multiplied, so both are
    in one block. layout: of LAYOUTS. The estimate (µs) is a rough model of measurements on an H200.
    """
    blocks = columns // BLOCK
    units = units_of(rows, pair=pair)
    nbytes = columns * sum(rows) * LAYOUTS[layout].value_bytes
    configs = []
    for splits in (1, 2, 3, 4, 6, 8, 14):
        whole = math.ceil(blocks / splits / _BATCH) * _BATCH
        if splits > 1 and whole * (splits - 1) >= blocks:
            continue
        for piece in sorted({_piece(whole, most) for most in (16, 40)}):
            chunk = -(-whole // piece) * piece
            if splits > 1 and chunk * (splits - 1) >= blocks:
                continue
            for each in _sizes(units, splits, multiprocessors, pair):
                grid = -(-units // each)
                if splits > 1 and splits * grid * each * 16 * n > MOST_PARTS:
                    continue
                for k_warps, groups in _warps(piece // _BATCH, each):
                    bare = LaunchConfig(n, each, k_warps, groups, piece, 0, splits, chunk, grid, 0, 0.0, layout=layout)
                    if (cut := _with_stages(bare, shared_bytes)) is not None:
                        cost = _estimate(cut, nbytes, multiprocessors, bandwidth)
                        configs.append(replace(cut, estimated_us=cost))
    configs += _held(rows, columns, n, multiprocessors, shared_bytes, pair, bandwidth, layout)
    return sorted(configs, key=lambda cut: cut.estimated_us)


def _held(
    rows: Sequence[int], columns: int, n: int, multiprocessors: int, shared_bytes: int, pair: bool, bandwidth: float,
    layout: str,
) -> list[LaunchConfig]:  # fmt: skip
    """Return the cuts whose weights go straight into registers: every warp has as many pairs of blocks as every other."""
    blocks, units, configs = columns // BLOCK, units_of(rows, pair=pair), []
    nbytes, most = columns * sum(rows) * LAYOUTS[layout].value_bytes, 6 * 32 // LAYOUTS[layout].block_bytes
    for splits in (1, 2, 4, 8):
        # Gate and up of a wide layer fill the card by their rows; in a step their parts cost more than a product alone shows.
        if blocks % (4 * splits) or (pair and splits > 1 and units >= 8 * multiprocessors):
            continue
        chunk = blocks // splits
        for k_warps in (k for k in range(1, MAX_WARPS + 1) if chunk // 2 % k == 0):
            steps = chunk // 2 // k_warps
            # Two batches, or all of them, are in flight: no more than the thread's other registers leave room for.
            for held in (h for h in (1, 2, 3, 4, 5) if steps % h == 0 and h * min(2, steps // h) <= most and steps <= 40):
                for each in (2, 4, 6, 8, 10, 12, 20) if pair else (1, 2, 3, 4, 5, 8, 10, 16, 20):
                    grid, warps = -(-units // each), k_warps * each
                    if not 4 <= warps <= _HELD_WARPS or each > units:
                        continue
                    if splits > 1 and splits * grid * each * 16 * n > MOST_PARTS:
                        continue
                    cut = LaunchConfig(n, each, k_warps, each, chunk, 0, splits, chunk, grid, 0, 0.0, held, layout=layout)
                    cut = replace(cut, shared_bytes=cut.needed_bytes(n))
                    if cut.shared_bytes <= shared_bytes:
                        cost = _estimate_held(cut, nbytes, multiprocessors, bandwidth)
                        configs.append(replace(cut, estimated_us=cost))
    return configs


def _piece(chunk: int, most: int) -> int:
    """Return the blocks of a piece: as many whole batches as divide the chunk best, up to `most`."""
    count = -(-chunk // most)
    return -(-chunk // count // _BATCH) * _BATCH


def _warps(batches: int, units: int) -> list[tuple[int, int]]:
    """Return warps a unit, and groups of them that take units in turn."""
    counts = set()
    for k_warps in {min(k, batches) for k in (1, 2, 4, 5, 8, 10)}:
        most = min(MAX_WARPS // k_warps, units)
        counts |= {(k_warps, groups) for groups in {1, min(2, most), most} if k_warps * groups > 2 or groups == most}
    return sorted(counts)


def _sizes(units: int, splits: int, multiprocessors: int, pair: bool) -> list[int]:
    """Return units a block: those that give every multiprocessor one, two or three blocks, and small ones."""
    step = 2 if pair else 1
    wanted = {-(-units * splits // (blocks * multiprocessors)) for blocks in (1, 2, 3)} | {1, 2, 4, 8}
    return sorted({min(-(-each // step) * step, -(-units // step) * step) for each in wanted if each <= 24})


def _with_stages(cut: LaunchConfig, shared_bytes: int) -> LaunchConfig | None:
    """Return the cut with as many pieces under way as fit and as there are; None if not even two (or all) fit."""
    pieces = -(-cut.units // cut.groups) * (cut.chunk // cut.piece)  # of a group
    room = (shared_bytes - cut.needed_bytes(cut.n)) // cut.stage_bytes // cut.groups
    depth = min(pieces, room, MOST_STAGES // cut.groups, 16)
    if depth < min(2, pieces):
        return None
    stages = depth * cut.groups
    staged = replace(cut, stages=stages)
    return replace(staged, shared_bytes=staged.needed_bytes(cut.n))


def _estimate(cut: LaunchConfig, nbytes: float, multiprocessors: int, bandwidth: float) -> float:
    count, warps = cut.grid * cut.splits, cut.k_warps * cut.groups
    waves = -(-count // (cut.resident * multiprocessors))
    each = -(-count // multiprocessors)  # blocks that one multiprocessor gets, in all waves
    batches = cut.chunk // _BATCH * cut.units
    blocks = batches * _BATCH * each
    # Instructions of a block of 64 (four issued a cycle at best), shared memory (one access a cycle); table and x before.
    prepared = 500 + cut.n * cut.chunk * 9 + cut.units * cut.chunk * 3
    issue_us = (blocks * (44 if cut.n <= 4 else 52) + prepared * each) / 4 / 0.7 / 1750
    shared_us = (blocks * (24 if cut.n <= 4 else 28) + (300 + cut.units * cut.chunk) * each) / 1750
    busy = min(1.0, 1.1 * count / multiprocessors)
    under_way = min(each, cut.resident) * cut.stages * cut.stage_bytes
    memory_us = nbytes / (bandwidth * busy * min(1.0, under_way / 40e3)) * 1e6
    alone_us = waves * (1.8 + prepared / warps * 0.003 + batches / warps)
    alone_us += 0.03 * cut.groups  # warps of one unit wait for one piece, not for several
    parts = (issue_us, shared_us, memory_us)
    whole_us = max(alone_us, 1.8 + max(parts)) + 0.2 * sum(parts) + (1.5 if cut.splits > 1 else 0.0)
    return _RING * whole_us


def _estimate_held(cut: LaunchConfig, nbytes: float, multiprocessors: int, bandwidth: float) -> float:
    count = cut.grid * cut.splits
    each = -(-count // multiprocessors)  # blocks that one multiprocessor gets, in all waves
    waves = -(-count // (cut.resident * multiprocessors))
    warps = cut.k_warps * cut.units
    steps = cut.chunk // 2 // cut.k_warps
    pairs = each * warps * steps
    # As for a ring; a lane asks the table 32 times a pair, and a warp's share of it comes once in about 0.25 µs.
    layout = LAYOUTS[cut.layout]
    asked, table = (32, 400) if layout.has_table else (0, 0)
    shared_us = (pairs * (8 + asked if cut.n <= 4 else 16 + asked) + each * (200 + table + cut.units * cut.chunk // 2)) / 1750
    prepared_us = (0.4 + cut.n * cut.chunk * 1.5 / (warps * 32)) * 0.7
    under_way = min(each, cut.resident) * warps * min(2 * cut.held, steps) * 32 * layout.block_bytes
    memory_us = nbytes / (bandwidth * min(1.0, 1.1 * count / multiprocessors) * min(1.0, under_way / 60e3)) * 1e6
    alone_us = waves * (1.6 + prepared_us + steps * 0.25)
    return max(alone_us, 1.6 + max(shared_us, memory_us)) + 0.2 * (shared_us + memory_us) + (0.8 if cut.splits > 1 else 0.0)


def unlike(configs: Sequence[LaunchConfig], limit: int) -> list[LaunchConfig]:
    """Return up to `limit` of the best estimates that really differ: two of three hold weights in registers."""
    held = _unlike([cut for cut in configs if cut.held], limit - limit // 3)
    return [*held, *_unlike([cut for cut in configs if not cut.held], limit - len(held))]


def _unlike(configs: Sequence[LaunchConfig], limit: int) -> list[LaunchConfig]:
    # Of each number of splits, then of block sizes.
    by_splits = {cut.splits: cut for cut in reversed(configs)}
    best = [*configs[:1], *[by_splits[splits] for splits in (1, 2, 4) if splits in by_splits]]
    others: dict[tuple[int, ...], LaunchConfig] = {}
    for cut in configs:
        others.setdefault((cut.units.bit_length(), cut.k_warps * cut.groups, cut.k_warps, cut.piece, cut.held), cut)
    return list(dict.fromkeys([*best, *others.values()]))[:limit]
