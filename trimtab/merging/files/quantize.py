"""Quantizing a weight to NF4 with scales fitted to the error instead of the largest value.

Stock uses the largest magnitude of a block of 64 as its scale, which spends a level on one value. Here each block tries
a few smaller scales, refits each to its codes by least squares, and keeps the scale with the smallest squared error of
base plus change. With double quantization the scales are packed first and the codes chosen for the scales that will be
read back. Format: `formats/bitsandbytes.py`; the levels are bitsandbytes' tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from trimtab.engine.tiers.reader import bytes_of
from trimtab.formats.bitsandbytes import STATE
from trimtab.merging.changes.delta import Rows, row_pieces
from trimtab.merging.files.layout import BLOCKSIZE, NESTED_BLOCKSIZE, state_json
from trimtab.process.json_file import parse

# Candidate scales, as shares of a block's largest magnitude.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
PIECE_VALUES = 2**20
GRID_STEPS = 2**16


@cache
def levels() -> tuple[Tensor, Tensor]:
    """Return (the 16 NF4 levels, the 256 levels of packed scales), float32, both ascending, from bitsandbytes."""
    from trimtab.engine.formats.bitsandbytes import quantize

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
    """Return the scale of each block [N, 64] with the least squared error; [N] float32."""
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

    Source: bitsandbytes 0.50.2, functional.py quantize_4bit with compress_statistics, and quantize_blockwise.
    """
    table = levels()[1]
    mean = float(scales.mean())
    rest = scales - mean
    count = -(-rest.numel() // NESTED_BLOCKSIZE)
    padded = torch.zeros(count * NESTED_BLOCKSIZE)
    padded[: rest.numel()] = rest
    grouped = padded.view(count, NESTED_BLOCKSIZE)
    maxima = grouped.abs().amax(1)
    codes = nearest(grouped / _divisor(maxima), table)
    read = (table[codes] * maxima.unsqueeze(1)).view(-1)[: rest.numel()] + mean
    return codes.view(-1)[: rest.numel()].to(torch.uint8), maxima, mean, read


def read_scales(parts: Mapping[str, bytearray]) -> Tensor:
    """Return the block scales in the parts of one packed weight, float32."""
    if "w.nested_absmax" not in parts:
        return torch.frombuffer(parts["w.absmax"], dtype=torch.float32)
    codes = torch.frombuffer(parts["w.absmax"], dtype=torch.uint8)
    maxima = torch.frombuffer(parts["w.nested_absmax"], dtype=torch.float32)
    table = torch.frombuffer(parts["w.nested_quant_map"], dtype=torch.float32)
    mean = float(parse(bytes(parts[f"w.{STATE}nf4"]), "quant_state")["nested_offset"])
    return table[codes.int()] * maxima.repeat_interleave(NESTED_BLOCKSIZE)[: codes.numel()] + mean


def _blocks(rows: Tensor) -> Tensor:
    flat = rows.reshape(-1)
    if flat.numel() % BLOCKSIZE:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCKSIZE))
    return flat.view(-1, BLOCKSIZE)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield row ranges of whole blocks; if the width is no multiple of the block, one range has all rows."""
    if shape[1] % BLOCKSIZE:
        yield 0, shape[0]
    else:
        yield from row_pieces(shape, PIECE_VALUES)


def packed_parts(
    name: str, rows: Rows, shape: tuple[int, ...], dtype: str, *, nested: bool, shares: tuple[float, ...] | None = None
) -> Iterator[tuple[str, int, memoryview]]:
    """Yield (file tensor, byte offset in it, bytes) of a packed weight; its rows are read twice.

    dtype: of the unpacked weight according to the state; the values are rounded to it first, as a loader would.
    """
    table, scale_table = levels()
    kind = getattr(torch, dtype)

    def rounded(start: int, stop: int) -> Tensor:
        return _blocks(rows(start, stop).to(kind).float())

    scales = torch.cat([choose_scales(rounded(*piece), shares) for piece in _pieces(shape)])
    offset: float | None = None
    if nested:
        codes, maxima, offset, scales = pack_scales(scales)
        yield f"{name}.absmax", 0, bytes_of(codes)
        yield f"{name}.nested_absmax", 0, bytes_of(maxima)
        yield f"{name}.nested_quant_map", 0, bytes_of(scale_table.clone())
    else:
        yield f"{name}.absmax", 0, bytes_of(scales)
    yield f"{name}.quant_map", 0, bytes_of(table.clone())
    yield f"{name}.{STATE}nf4", 0, memoryview(bytearray(state_json(shape, dtype, offset=offset)))
    at = block = 0
    for piece in _pieces(shape):
        blocks = rounded(*piece)
        own = scales[block : block + blocks.shape[0]]
        index = nearest(blocks / _divisor(own), table).to(torch.uint8).view(-1)
        # If the last block is not full, padding follows the last value.
        values = (piece[1] - piece[0]) * shape[1]
        index = index[: values + values % 2]
        data = bytes_of((index[0::2] << 4) | index[1::2])
        yield name, at, data
        at += len(data)
        block += blocks.shape[0]
