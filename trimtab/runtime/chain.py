"""Several 4-bit products in one launch, each reading what the one in front of it made: a decode step's layer between two
attentions. 1 to 4 rows, one block of threads a multiprocessor.

What a product computes, and how it rounds, is `matvec.matvec4`'s: norm in front, adapters of each row, gate behind. Between two
products lies one trip through L2 instead of the end of one launch and the beginning of the next: every value is stored with a
tag of its launch, and whoever needs it reads it until the tag is there. Weights of the products behind are under way meanwhile.

A block waits for others, so all of them must run at once: nothing else may keep a multiprocessor for good. A module serves one
stream at a time. Nothing here synchronizes. How work is divided (`plan`) imports no tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import DeviceError
from trimtab.runtime import cuts, fused, matvec, nvrtc
from trimtab.runtime.cuts import BLOCK
from trimtab.runtime.matvec import Gate, LoraArgs
from trimtab.runtime.quant import Packed

NAME = "chain"
MAX_ROWS = 4
MAX_PRODUCTS = 8
WARPS = 20
HELPERS = 4  # warps beside them
PLAIN, WORDS, PARTS = range(3)
# As the kernel lays out its shared memory.
_TABLE_BYTES, _STRIDE, _PIECE_BYTES, _PAIR_BYTES = 65536, 20, 1024, 288
_STAGE_BYTES, _LOCAL_BYTES, _LORA_BYTES = 304, 64, 24
_MOST_DEPTH = 8
_LEAST_DEPTH = 2
_MOST_TURNS = 32  # one for each lane


@dataclass(frozen=True)
class Norm:
    """What stands in front of a product: h = (h + norm(y) post) scalar, x = norm(h) next (x = h without next), as
    `matvec.Norm`; the residual h is the launch's. out_h: where h goes then, if anywhere."""

    post: Tensor
    next: Tensor | None
    eps: float
    scalar: Tensor | None = None
    out_h: Tensor | None = None


@dataclass(frozen=True)
class Product:
    """1 to 3 layers over one input, which is what the product in front made (normed, where norm is given)."""

    weights: Sequence[Packed]
    lora: LoraArgs | None = None
    gate: Gate | None = None
    norm: Norm | None = None

    @property
    def is_pair(self) -> bool:
        return self.gate is not None and self.gate.other is None

    @property
    def width(self) -> int:
        rows = [packed.shape[0] for packed in self.weights]
        return rows[0] if self.gate is not None else sum(rows)


@dataclass(frozen=True)
class Share:
    """How one product is divided: splits of its columns, units of 16 rows a block, warps a unit and the pairs of blocks of 64
    that each takes. rounds: the most that a warp takes."""

    splits: int
    units: int
    k_warps: int
    steps: int
    all_units: int
    rounds: int

    @property
    def turns(self) -> int:
        """How many units a warp takes, one after the other."""
        return -(-self.units // (WARPS // self.k_warps))


@dataclass(frozen=True)
class Plan:
    """How a launch is divided: blocks of threads, each product's share, pieces of weights that a warp has on their way."""

    rows: int
    grid: int
    shares: tuple[Share, ...]
    depth: int
    x_blocks: int
    scales_at: tuple[int, ...]
    places: tuple[tuple[str, int], ...]
    shared_bytes: int

    def options(self, hidden: int) -> tuple[str, ...]:
        facts = {
            "ROWS": self.rows, "HIDDEN": hidden // BLOCK, "WARPS": WARPS, "DEPTH": self.depth, "STAGES": MAX_PRODUCTS,
            "XB": self.x_blocks, **{f"AT_{name}": at for name, at in self.places},
        }  # fmt: skip
        return tuple(f"-D{name}={value}" for name, value in facts.items())


# Shapes of a product: outputs of each layer, columns, whether two are multiplied, whether a norm stands in front.
Shape = tuple[tuple[int, ...], int, bool, bool]


def share(shape: Shape, grid: int, splits: int) -> Share:
    """Return how a product is divided among `grid` blocks with its columns in so many parts."""
    rows, columns, pair, _ = shape
    every, pairs = cuts.units_of(rows, pair=pair), columns // BLOCK // splits // 2
    units = -(-every // (grid // splits))
    units += units % 2 if pair else 0
    best = None
    for k_warps in range(1, min(WARPS, pairs) + 1):
        steps = -(-pairs // k_warps)
        rounds = -(-units // (WARPS // k_warps)) * steps
        if best is None or rounds < best.rounds:
            best = Share(splits, units, k_warps, steps, every, rounds)
    assert best is not None
    return best


def why_not_shapes(shapes: Sequence[Shape], hidden: int) -> str | None:
    """Return why such products cannot be one launch, None if they can."""
    if hidden % (8 * BLOCK):
        return f"a width of {hidden} is no multiple of {8 * BLOCK}"
    if not 2 <= len(shapes) <= MAX_PRODUCTS:
        return f"{len(shapes)} products, not 2 to {MAX_PRODUCTS}"
    for (rows, columns, pair, normed), before in zip(shapes, (None, *shapes), strict=False):
        if columns % (4 * BLOCK):
            return f"rows of {columns} are no multiple of {4 * BLOCK}"
        if normed and columns != hidden:
            return f"a norm over {columns} values, not over the residual's {hidden}"
        if any(count % 4 for count in rows):
            return f"outputs of {list(rows)} are no multiples of 4"
        if pair and (len(rows) != 2 or rows[0] != rows[1]):
            return f"gate and up of {list(rows)} outputs"
        if before is not None and columns != (before[0][0] if before[2] else sum(before[0])):
            return f"{list(before[0])} outputs in front of {columns} columns"
    return None


def plan(
    shapes: Sequence[Shape], hidden: int, rows: int, width: int, *, multiprocessors: int, shared_bytes: int,
    splits: int | None = None,
) -> Plan | None:  # fmt: skip
    """Return how a launch is divided, None if it does not fit. width: of A x, the largest rank. splits: of products whose parts
    the next norm may add; None: what should be fastest."""
    # Every block has a part of the largest product, and none more than it must.
    largest = max(shapes, key=lambda shape: sum(shape[0]) * shape[1])
    units = cuts.units_of(largest[0], pair=largest[2]) // (2 if largest[2] else 1)
    grid = -(-units // -(-units // multiprocessors))
    shares = []
    for shape, following in zip(shapes, (*shapes[1:], None), strict=False):
        found = [share(shape, grid, 1)]
        if following is not None and following[3] and not shape[2]:
            many = [2, 4] if splits is None else [splits] if splits > 1 else []
            found += [share(shape, grid, one) for one in many if shape[1] % (4 * BLOCK * one) == 0 and one <= grid]
        # A part more is a trip's worth of reading for every block.
        shares.append(min(found, key=lambda one: one.rounds + 0.7 * (one.splits - 1)) if splits is None else found[-1])
    if sum(one.turns for one in shares) > _MOST_TURNS:
        return None
    x_blocks = max(shape[1] // BLOCK // one.splits for shape, one in zip(shapes, shares, strict=True))
    quads = [shape[1] // BLOCK // one.splits // 4 for shape, one in zip(shapes, shares, strict=True)]
    pieces = -(-rows * hidden // 4 // (WARPS * 32))
    # One product's beside the next one's.
    scales = [one.units * 16 * (count | 1) * 16 for one, count in zip(shares, quads, strict=True)]
    sizes = {
        "STAGES": MAX_PRODUCTS * _STAGE_BYTES, "LOCALS": MAX_PRODUCTS * _LOCAL_BYTES, "CODES": 1024,
        "LORA": MAX_PRODUCTS * 3 * rows * _LORA_BYTES, "FACTORS": rows * x_blocks * 4, "ROW_SUMS": 2 * pieces * WARPS * 4,
        "DOTS": 2 * HELPERS * 4, "LOWS": 3 * rows * width * 4,
        "SUMS": max(one.units * one.k_warps for one in shares) * rows * _STRIDE * 4,
        "XS": rows * (x_blocks // 2 * _PAIR_BYTES + 16),
        "SCALES": max(first + second for first, second in zip(scales, (*scales[1:], 0), strict=True)),
    }  # fmt: skip
    places, depth, end = _placed(sizes, shared_bytes)
    if depth < _LEAST_DEPTH:
        return None
    scales_at = tuple(sizes["SCALES"] - size if number % 2 else 0 for number, size in enumerate(scales))
    return Plan(rows, grid, tuple(shares), depth, x_blocks, scales_at, places, end)


def _placed(sizes: dict[str, int], shared_bytes: int) -> tuple[tuple[tuple[str, int], ...], int, int]:
    """Return where everything lies, the pieces of weights of each warp, and the bytes in all."""
    places, end = {"TABLE": 0}, _TABLE_BYTES
    for name, size in sizes.items():
        places[name], end = end, end + -(-size // 16) * 16
    depth = min((shared_bytes - end) // (WARPS * _PIECE_BYTES), _MOST_DEPTH)
    return (*places.items(), ("RING", end)), depth, end + depth * WARPS * _PIECE_BYTES


class Stage(ctypes.Structure):
    """One product as the kernel reads it."""

    _fields_ = [
        *[(name, ctypes.c_uint64 * 3) for name in ("weight", "absmax", "nested", "offset")],
        *[
            (name, ctypes.c_uint64)
            for name in (
                "lora_A", "lora_B", "lora_rank", "lora_scale", "post", "next", "scalar", "other", "source", "target", "low", "h",
            )
        ],
        ("rows", ctypes.c_int * 3),
        *[
            (name, ctypes.c_int)
            for name in (
                "members", "blocks", "split_log", "units", "k_warps", "steps", "all_units", "gate", "kind", "from_kind", "from_parts",
                "from_width", "to_kind", "to_width", "lora_stride", "low_width", "other_stride",
            )
        ],
        ("eps", ctypes.c_float), *[(name, ctypes.c_int) for name in ("k_inverse", "first_turn", "turns", "scales_at")],
        ("spare", ctypes.c_int * 3),
    ]  # fmt: skip


def source() -> str:
    """Return the source as it is compiled."""
    return nvrtc.source("values.cuh") + nvrtc.source("chain.cu")


def load(products: nvrtc.Module) -> nvrtc.Module:
    """Return what the launches are compiled with, each shape where it is first used. products: of `matvec.load`.

    Errors: DeviceError if that is not possible.
    """
    module = nvrtc.Module(source(), device=products.device, name="chain.cu")
    module.common = products.common
    return module


class Chains:
    """The launches of one model's steps: their compiled kernels, descriptions and the words that pass between products.

    tags: how many launches a step has. Before its first launch a step calls `begin`, by a launch that does not overlap.
    module: what `nvrtc.Module` gives for values.cuh (or what stands for it), whose variants are compiled here.
    """

    def __init__(self, module: Any, tags: int) -> None:
        assert ctypes.sizeof(Stage) == _STAGE_BYTES
        self.module, self.tags = module, tags
        self.device: torch.device = module.device
        self.epoch = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._words: dict[Any, Tensor] = {}
        self._given: dict[bytes, Tensor] = {}
        self._plans: dict[Any, Plan | None] = {}

    def begin(self) -> None:
        """Give the step tags that no earlier one had."""
        self.epoch.add_(1)

    def plan(self, products: Sequence[Product], hidden: int, rows: int) -> Plan | None:
        """Return how these products would be divided, None if they cannot be one launch here."""
        shapes: list[Shape] = [
            (tuple(p.shape[0] for p in one.weights), one.weights[0].shape[1], one.is_pair, one.norm is not None)
            for one in products
        ]
        width = max((one.lora.low.shape[2] for one in products if one.lora is not None), default=0)
        key = (tuple(shapes), hidden, rows, width)
        if key not in self._plans:
            ok = rows in (1, 2, 4) and why_not_shapes(shapes, hidden) is None
            facts = {"multiprocessors": self.module.multiprocessors, "shared_bytes": self.module.shared_bytes}
            self._plans[key] = plan(shapes, hidden, rows, width, splits=self.module.kept.get("splits"), **facts) if ok else None
        return self._plans[key]

    def _buffer(self, key: Any, count: int, dtype: torch.dtype) -> Tensor:
        """Words that pass between two products: the same for all launches, as the tags differ."""
        if key not in self._words:
            self._words[key] = torch.zeros(count, dtype=dtype, device=self.device)
        return self._words[key]

    def launch(
        self, products: Sequence[Product], x: Tensor, h: Tensor, out: Tensor, number: int, *, dependent: bool | None = None
    ) -> None:
        """Write what the last product makes of x [n, D_in of the first] and the residual h [n, D] to out [n, D_out].

        number: which launch of the step this is, 0 to tags - 1. Errors: DeviceError where `plan` has none.
        """
        rows, hidden = h.shape
        made = self.plan(products, hidden, rows)
        if made is None:
            raise DeviceError("these products cannot be one launch", device=str(self.device))
        assert x.is_contiguous() and h.is_contiguous() and out.is_contiguous() and out.shape == (rows, products[-1].width)
        described = self._described(products, made, x, out)
        if described not in self._given:  # not within a capture: a step runs once before it is captured
            self._given[described] = torch.frombuffer(bytearray(described), dtype=torch.uint8).to(self.device)
        first = products[0].weights[0]
        slots = next((one.lora.row_slots for one in products if one.lora is not None), None)
        options = (
            f"-DHALF={int(x.dtype == torch.float16)}", f"-DNESTED={int('nested_absmax' in first.parts)}", *made.options(hidden)
        )  # fmt: skip
        self.module.variant(options).launch(
            NAME, (made.grid,), ((WARPS + HELPERS) * 32,),
            [
                self._given[described], len(products), slots, matvec.table(first.codes["code"], self.module),
                first.codes.get("nested_code"), h, self.epoch, self.tags, number,
            ],
            shared_bytes=made.shared_bytes, dependent=self.module.overlap if dependent is None else dependent,
        )  # fmt: skip

    def _described(self, products: Sequence[Product], made: Plan, x: Tensor, out: Tensor) -> bytes:
        stages = (Stage * len(products))()
        kind, parts, width, at, turns = PLAIN, 1, x.shape[1], x.data_ptr(), 0
        for number, (one, cut, stage) in enumerate(zip(products, made.shares, stages, strict=True)):
            for m, packed in enumerate(one.weights):
                stage.weight[m], stage.absmax[m] = packed.parts["weight"].data_ptr(), packed.parts["absmax"].data_ptr()
                stage.nested[m], stage.offset[m] = (
                    packed.parts[name].data_ptr() if name in packed.parts else 0 for name in ("nested_absmax", "offset")
                )
                stage.rows[m] = packed.shape[0]
            stage.members, stage.blocks = len(one.weights), one.weights[0].shape[1] // BLOCK
            for name in ("units", "k_warps", "steps", "all_units", "turns"):
                setattr(stage, name, getattr(cut, name))
            stage.split_log, stage.k_inverse = cut.splits.bit_length() - 1, 65536 // cut.k_warps + 1
            stage.first_turn, turns = turns, turns + cut.turns
            stage.scales_at = made.scales_at[number]
            if one.gate is not None:
                stage.gate, stage.kind = (1 if one.is_pair else 2), fused.ACTIVATIONS.index(one.gate.kind)
                if one.gate.other is not None:
                    stage.other, stage.other_stride = one.gate.other.data_ptr(), one.gate.other.stride(0)
            if one.norm is not None:
                norm = one.norm
                stage.post, stage.eps = norm.post.data_ptr(), norm.eps
                for name, value in (("next", norm.next), ("scalar", norm.scalar), ("h", norm.out_h)):
                    setattr(stage, name, 0 if value is None else value.data_ptr())
            if one.lora is not None:
                lora = one.lora
                stage.lora_A, stage.lora_B = lora.A_ptr.data_ptr(), lora.B_ptr.data_ptr()
                stage.lora_rank, stage.lora_scale = lora.rank.data_ptr(), lora.scale.data_ptr()
                stage.lora_stride, stage.low_width = lora.rank.stride(0), lora.low.shape[2]
                low = self._buffer(("low", number, cut.splits, made.rows, stage.low_width), cut.splits * made.rows * 3 * stage.low_width, torch.int64)
                stage.low = low.data_ptr()
            stage.from_kind, stage.from_parts, stage.from_width, stage.source = kind, parts, width, at
            width, parts = one.width, cut.splits
            if number + 1 == len(products):
                assert cut.splits == 1
                kind, at = PLAIN, out.data_ptr()
            else:
                kind = WORDS if parts == 1 else PARTS
                size = made.rows * width * parts
                at = self._buffer((number, size, kind), size, torch.int32 if kind == WORDS else torch.int64).data_ptr()
            stage.to_kind, stage.to_width, stage.target = kind, width, at
        return bytes(stages)
