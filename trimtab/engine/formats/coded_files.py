"""How are weights whose values are levels times scales read from files and packed for files, exactly and a few rows at a time?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.formats.bitsandbytes import STATE, state_json
from trimtab.formats.record import DOUBLE, NESTED_BLOCK, WEIGHT_BLOCK, PackedEntry
from trimtab.process.json_file import parse

INT8_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes spells it
INT8_LEVELS = 127
# Candidate scales, as shares of a block's largest magnitude.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
# Range of a random 4-bit scale, as a share of it: packers choose within it.
RANDOM_SHARES = (0.85, 1.0)
PIECE_VALUES = 2**20
GRID_STEPS = 2**16
Rows = Callable[[int, int], Tensor]


# Reading --------------------------------------------------------------------------------------------------------------


class CodedRows:
    """Rows of a packed weight, float32: levels times the scale of a block. The scales are kept in memory.

    4-bit: two values per byte, the first in the high half; value = code[index] x the block's scale. Double quantization keeps
    scales as 8-bit codes of a second table, less their mean. int8: integer x row maximum / 127. Source: bitsandbytes 0.49.2 and
    0.50.2, functional.py, dequantize_4bit and int8_vectorwise_dequant, in float32 too.
    """

    def __init__(self, entry: PackedEntry, whole: Callable[[str], Tensor], stored: Rows) -> None:
        """whole: reads a file tensor by its part. stored: reads a range of the weight's bytes."""
        self.shape, self._stored, self._is_int8 = entry.shape, stored, entry.kind == "int8"
        if self._is_int8:
            self.scales, self.block = whole("SCB").float(), entry.shape[1]
            return
        self.block, self.code, self.scales = int(entry.state["blocksize"]), whole("quant_map"), whole("absmax")
        if entry.kind.endswith(DOUBLE):
            codes, blocks = whole("nested_quant_map"), whole("nested_absmax")
            size = int(entry.state["nested_blocksize"])
            self.scales = codes[self.scales.int()] * blocks.repeat_interleave(size)[: self.scales.numel()]
            self.scales += float(entry.state["nested_offset"])

    @property
    def levels(self) -> Tensor:
        """What scales are multiplied with, float64, ascending."""
        if self._is_int8:
            return torch.arange(-INT8_LEVELS, INT8_LEVELS + 1, dtype=torch.float64) / INT8_LEVELS
        return self.code.double().unique()

    def __call__(self, start: int, stop: int) -> Tensor:
        columns = self.shape[1]
        first, last = start * columns, stop * columns
        if self._is_int8:
            rows = self._stored(first, last).view(torch.int8).view(stop - start, columns)
            return rows.float() * self.scales[start:stop].view(-1, 1) * INT8_STEP
        low = first // 2
        packed = self._stored(low, math.ceil(last / 2))
        pairs = torch.stack((packed >> 4, packed & 15), 1).reshape(-1)
        index = pairs[first - 2 * low : last - 2 * low].int()
        blocks = self.scales[first // self.block : math.ceil(last / self.block)]
        scale = blocks.repeat_interleave(self.block)[first % self.block :][: last - first]
        return (self.code[index] * scale).view(stop - start, columns)


# Packing --------------------------------------------------------------------------------------------------------------


@cache
def levels() -> tuple[Tensor, Tensor]:
    """Return (the 16 NF4 levels, the 256 levels of packed scales), float32, both ascending, from bitsandbytes."""
    codes = quantize(torch.ones(64, 64), "nf4-dq").codes
    return codes["code"].float().cpu(), codes["nested_code"].float().cpu()


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Return the index of the nearest level of an ascending table for each value."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2)


@cache
def _grid() -> Tensor:
    """Return the nearest NF4 level of each of 65536 steps from -1 to 1. A search with branches takes ten times as long."""
    table = levels()[0]
    return table[nearest(torch.linspace(-1, 1, GRID_STEPS), table)]


def _units(blocks: Tensor, scale: Tensor) -> Tensor:
    """Return the levels of blocks over their scales; next to a boundary perhaps the second nearest."""
    half = (GRID_STEPS - 1) / 2
    steps = (blocks * (half / _divisor(scale))).add_(half + 0.5).clamp_(0, GRID_STEPS - 1).to(torch.int32)
    return _grid().index_select(0, steps.view(-1)).view(blocks.shape)


def choose_scales(blocks: Tensor, shares: tuple[float, ...] | None = None) -> Tensor:
    """Return the scale of each block [N, 64] with the least squared error; [N] float32. Stock's scale is the largest magnitude,
    which spends a level on one value. Smaller candidates are refitted to their codes by least squares."""
    largest = blocks.abs().amax(1)
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in SHARES if shares is None else shares:
        scale = largest * share
        for _ in range(2):
            units = _units(blocks, scale)
            error = (blocks - units * scale.unsqueeze(1)).square_().sum(1)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, scale, best)
            # The scale that fits these codes best; it is tried with its own codes.
            scale = (blocks * units).sum(1) / units.square().sum(1).clamp_min(1e-30)
    return best


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(1)


def pack_scales(scales: Tensor) -> tuple[Tensor, Tensor, float, Tensor]:
    """Return (8-bit codes, block maxima, mean, scales as they will be read back) of double quantization.

    Source: bitsandbytes 0.50.2, functional.py quantize_4bit with compress_statistics, and quantize_blockwise. The codes of values
    are chosen for the scales that will be read back.
    """
    table = levels()[1]
    mean = float(scales.mean())
    rest = scales - mean
    count = -(-rest.numel() // NESTED_BLOCK)
    padded = torch.zeros(count * NESTED_BLOCK)
    padded[: rest.numel()] = rest
    grouped = padded.view(count, NESTED_BLOCK)
    maxima = grouped.abs().amax(1)
    codes = nearest(grouped / _divisor(maxima), table)
    read = (table[codes] * maxima.unsqueeze(1)).view(-1)[: rest.numel()] + mean
    return codes.view(-1)[: rest.numel()].to(torch.uint8), maxima, mean, read


def _blocks(rows: Tensor) -> Tensor:
    flat = rows.reshape(-1)
    if flat.numel() % WEIGHT_BLOCK:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % WEIGHT_BLOCK))
    return flat.view(-1, WEIGHT_BLOCK)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield row ranges of whole blocks; if the width is no multiple of the block, one range has all rows."""
    if shape[1] % WEIGHT_BLOCK:
        yield 0, shape[0]
    else:
        step = max(1, PIECE_VALUES // shape[1])
        yield from ((start, min(shape[0], start + step)) for start in range(0, shape[0], step))


def packed_parts(
    kind: str, name: str, rows: Rows, shape: tuple[int, ...], dtype: str, *, shares: tuple[float, ...] | None = None
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (file tensor, byte offset in it, a part of its content) of a packed weight; its rows are read twice.

    dtype: of the unpacked weight according to the state; the values are rounded to it first, as a loader would.
    """
    table, scale_table = levels()
    own = getattr(torch, dtype)

    def rounded(start: int, stop: int) -> Tensor:
        return _blocks(rows(start, stop).to(own).float())

    scales = torch.cat([choose_scales(rounded(*piece), shares) for piece in _pieces(shape)])
    offset: float | None = None
    if kind.endswith(DOUBLE):
        codes, maxima, offset, scales = pack_scales(scales)
        yield f"{name}.absmax", 0, codes
        yield f"{name}.nested_absmax", 0, maxima
        yield f"{name}.nested_quant_map", 0, scale_table
    else:
        yield f"{name}.absmax", 0, scales
    yield f"{name}.quant_map", 0, table
    yield f"{name}.{STATE}nf4", 0, torch.frombuffer(bytearray(state_json(shape, dtype, offset=offset)), dtype=torch.uint8)
    at = block = 0
    for piece in _pieces(shape):
        blocks = rounded(*piece)
        divisor = _divisor(scales[block : block + blocks.shape[0]])
        index = nearest(blocks / divisor, table).to(torch.uint8).view(-1)
        # If the last block is not full, padding follows the last value.
        values = (piece[1] - piece[0]) * shape[1]
        index = index[: values + values % 2]
        data = index[0::2] << 4 | index[1::2]
        yield name, at, data
        at += len(data)
        block += blocks.shape[0]


def in_memory(kind: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> CodedRows:
    """Return the rows of a weight from the content of its file tensors, by what their names have behind the weight's."""
    state = parse(bytes(parts[f".{STATE}nf4"].numpy()), "quant_state")
    entry = PackedEntry("", kind, shape, state["dtype"], {}, state)
    types = {"absmax": torch.uint8 if kind.endswith(DOUBLE) else torch.float32}
    return CodedRows(
        entry, lambda part: parts[f".{part}"].view(types.get(part, torch.float32)), lambda first, last: parts[""][first:last]
    )


def nearest_values(values: Tensor, scales: Tensor, first: int) -> Tensor:
    """Return what NF4 values become under the scales of the whole weight. first: the index of the first of these values in it."""
    table = levels()[0]
    scale = scales[torch.arange(first, first + values.numel()) // WEIGHT_BLOCK].view(values.shape)
    return table[nearest(values / torch.where(scale == 0, torch.ones_like(scale), scale), table)] * scale


def packed_once(whole: Tensor, kind: str, generator: torch.Generator | None) -> Tensor:
    """Return a weight after packing and unpacking: with the best scales, or, given a generator, with random scales."""
    is_int8, is_nf4 = kind == "int8", kind.startswith("nf4")
    size = whole.shape[1] if is_int8 else WEIGHT_BLOCK
    flat = whole.float().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    largest = blocks.abs().amax(1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    low, high = RANDOM_SHARES
    if generator is not None:
        share = torch.rand(largest.shape, generator=generator, device=generator.device).to(blocks.device)
        largest = largest * (low + (high - low) * share)
    elif is_nf4:
        best = choose_scales(blocks.cpu()).to(blocks.device).unsqueeze(1)
        largest = torch.where(best == 0, largest, best)
    if is_int8:
        rounded = torch.round(blocks / largest * INT8_LEVELS).clamp(-INT8_LEVELS, INT8_LEVELS) / INT8_LEVELS * largest
    else:
        table = levels()[0] if is_nf4 else quantize(torch.ones(64, 64), kind).codes["code"].float().sort()[0]
        table = table.to(blocks.device)
        rounded = table[nearest(blocks / largest, table)] * largest
    return rounded.view(-1)[: flat.numel()].view(whole.shape).double()
