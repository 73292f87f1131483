"""Which kernels multiply 9 to 128 rows with 4-bit weights on tensor cores, with an adapter per row?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from trimtab.engine.cuda import launch_config, nvrtc
from trimtab.engine.formats import weights as formats
from trimtab.engine.formats.packed import LayerProduct, Matmul, Packed
from trimtab.engine.formats.weights import dequantize, dequantize_rows
from trimtab.engine.kernels import gemv4, layouts
from trimtab.engine.kernels.dequantize import fits_type
from trimtab.engine.kernels.gemv4 import LoraArgs
from trimtab.engine.kernels.selfcheck import exact_changes, random_values
from trimtab.engine.layers.leaves import Leaf
from trimtab.formats.record import rounds_change, stored_format
from trimtab.planning.values.execution import CHECK_BYTES

MOST_ROWS, MOST_TOKENS = 64, 128
# Up to here prompts use the kernel. Beyond, a weight that is unpacked for cuBLAS has the adapter in its columns
# (columns.py). All products of E4B's step: bench/results/many_rows.json.
PAYING_ROWS = 16
NAMES = ("rows_product_16", "rows_product_32", "rows_product_64", "rows_low", "rows_up", "in_order")
# As in cuda/rows.cu.
_CHUNK, _UNIT, _THREADS, _UP, _RANKS = 256, 128, 256, 256, 8
_TILES, _STAGES = (16, 32, 64), 2
# Blocks that one multiprocessor runs at once.
_BLOCKS = 2
# Shared memory in front of the stages: codes of each lane's own, codes of scales, sums of 8 rows; and to a multiple of 2048.
_FRONT_BYTES = 4 * (16 * 32 + 256 + 8 * (_UNIT + 1)) + 2032
# Weights rounded to 16 bits and sums in float32 in another order: relative error of a whole tensor.
LARGEST_ERROR = 6e-3
# Values of a weight that a check has in float64 at once.
PIECE_VALUES = 2**20


def source() -> str:
    """Return the source as it is compiled."""
    return layouts.source("rows.cu")


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError if that is not possible here."""
    return nvrtc.Module(source(), device=device, name="rows.cu")


def why_not(packed: Packed, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot multiply with this weight, None if it can."""
    if layouts.layout(packed) is None:
        return layouts.why_not(packed)
    if dtype not in layouts.TYPES or not fits_type(packed, dtype):
        return f"the activation is {dtype}, the weight is {packed.dtype}"
    if len(packed.shape) != 2 or packed.shape[1] % (chunk := chunk_of(packed)):
        return f"the rows of a weight of shape {list(packed.shape)} are not whole chunks of {chunk}"
    return layouts.why_not(packed)


def chunk_of(packed: Packed) -> int:
    """Return the columns that a block has at a time (`Many::COLUMNS`)."""
    return 128 if stored_format(packed.kind).bits == 8 else 256


def shared_bytes(tile: int, scales: int) -> int:
    """Return the shared memory of a block that multiplies `tile` rows. scales: `StoredFormat.stage_bytes`. 109 KiB for 64 rows, 77
    for 32, 61 for 16: compute capability 8.6, 8.9 and 12.0 (99 KiB) take at most 32 at once, 7.5 (64 KiB) 16."""
    return _FRONT_BYTES + _STAGES * (tile * 2 * _CHUNK + _UNIT * 128 + _UNIT * scales)


def why_no_room(module: nvrtc.Module, kind: str) -> str | None:
    """Return why a card has too little shared memory for products with weights of a format, None if it has."""
    needed = shared_bytes(_TILES[0], stored_format(kind).stage_bytes)
    if needed <= module.shared_bytes:
        return None
    return f"a block needs {needed} B of shared memory, this card has {module.shared_bytes}"


def _tile(n: int, module: nvrtc.Module, scales: int) -> int:
    """Return how many rows a block multiplies: all of them, or as many as there is shared memory for."""
    fitting = [size for size in _TILES if shared_bytes(size, scales) <= module.shared_bytes]
    return next((size for size in fitting if size >= n), fitting[-1])


def each_of(
    rows: Sequence[int], columns: int, multiprocessors: int, pieces: int = 1, *, chunk: int = _CHUNK
) -> tuple[int, int, int]:  # fmt: skip
    """Return (items of a block, all items, the most blocks that share a unit): an item is a chunk of the columns of a unit of
    outputs. rows: outputs of each member. pieces: of the rows of x."""
    units, chunks = sum(-(-count // _UNIT) for count in rows), columns // chunk
    items = units * chunks
    each = -(-items * pieces // (_BLOCKS * multiprocessors))
    shared = max(((unit + 1) * chunks - 1) // each - unit * chunks // each + 1 for unit in range(units))
    return each, items, shared


def linear(
    x: Tensor, weights: Sequence[Packed], out: Tensor, *, bias: Sequence[Tensor | None] = (), lora: LoraArgs | None = None,
    module: nvrtc.Module | None = None, round_change: bool | None = None, unpacked: Tensor | None = None,
    beside: torch.cuda.Stream | None = None,
) -> None:  # fmt: skip
    """Write x W^T (+ bias), with each row's adapter, for up to three weights over the same x, side by side.

    unpacked: the same weights as one [all D_out, D_in] of x's type; cuBLAS then multiplies, and there is no bias. beside: a stream
    for A x, which then runs at the same time as the product.

    Shapes: x [n, D_in], out [n, all D_out], n up to MOST_ROWS; bias [D_out] each. module None: in torch. Ask `why_not` about each
    weight first. A weight is decoded once for up to 64 rows, rounded once to the type of x, so a product equals `functional.linear`
    over the unpacked weight up to the order of its sum. A change is rounded first over a quantized layer, as PEFT does.
    """
    round_change = rounds_change(weights[0].kind) if round_change is None else round_change
    biases = [*bias, *[None] * (gemv4.MAX_MEMBERS - len(bias))][: len(weights)]
    if module is None:
        if lora is not None:
            gemv4.lora_shrink_torch(x, lora)
        for m, (packed, part) in enumerate(zip(weights, out.split([one.shape[0] for one in weights], dim=1), strict=True)):
            part.copy_(formats.unpacked_shell(packed, dequantize(packed), biases[m])(x))
            if lora is not None:
                gemv4.lora_add_torch(part, lora.member(m), round_change=round_change)
        return
    n, columns = x.shape
    rows = [packed.shape[0] for packed in weights]
    if unpacked is None and len(parts_of := layouts.runs(weights)) > 1:
        for run in parts_of:
            one = None if lora is None else lora.members(run)
            to = out[:, sum(rows[: run.start]) : sum(rows[: run.stop])]
            linear(x, weights[run], to, bias=biases[run], lora=one, module=module, round_change=round_change, beside=beside)
        return
    assert n <= MOST_TOKENS and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    assert out.shape == (n, sum(rows)) and out.stride(1) == 1 and out.dtype == x.dtype and len(weights) <= gemv4.MAX_MEMBERS
    fork = None if lora is None else beside
    if lora is not None and fork is not None:
        fork.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(fork):
            shrink(x, lora, module, dependent=False)
    if unpacked is not None:
        assert all(own is None for own in biases)
        torch.mm(x, unpacked.T, out=out)
        if lora is not None:
            _meet(x, lora, module, fork)
            _up(out, rows, lora, module, round_change=round_change, dependent=None if fork is None else False)
        return
    own_x = layouts.in_order(layouts.round_to_8(x, weights, module, is_input=True), weights[0], module)
    scales = stored_format(weights[0].kind).stage_bytes
    tile = _tile(n, module, scales)
    pieces = -(-n // tile)
    each, items, shared = each_of(rows, columns, module.multiprocessors, pieces, chunk=chunk_of(weights[0]))
    parts = torch.empty(shared, n, sum(rows), device=x.device) if shared > 1 else None
    members: list[nvrtc.Argument] = []
    for packed, own in zip(weights, biases, strict=True):
        members += [*layouts.tensors(packed), own, packed.shape[0]]
    members += [None, None, None, None, None, 0] * (gemv4.MAX_MEMBERS - len(weights))
    layouts.variant(weights[0], module).launch(
        f"rows_product_{tile}", (-(-items // each), 1, pieces), (_THREADS,),
        [
            own_x, own_x.stride(0), n, columns, *members, *layouts.tables(weights[0]), out, out.stride(0), parts, sum(rows), each,
            items, layouts.half(x),
        ],
        shared_bytes=shared_bytes(tile, scales),
    )  # fmt: skip
    sums = partial(_up, out, rows, parts=parts, bias=biases, chunks=columns // chunk_of(weights[0]), each=each)
    if rounds := layouts.rounds_inputs(weights[0]):
        if parts is not None:
            sums(None, module, round_change=False)
        layouts.round_to_8(out, weights, module, is_input=False)
        sums = partial(_up, out, rows)
    if lora is not None:
        _meet(x, lora, module, fork)
    if lora is not None or (parts is not None and not rounds):
        sums(lora, module, round_change=round_change, dependent=None if fork is None else False)


def _meet(x: Tensor, lora: LoraArgs, module: nvrtc.Module, fork: torch.cuda.Stream | None) -> None:
    """Complete `low` for the next launch."""
    if fork is None:
        shrink(x, lora, module)
    else:
        torch.cuda.current_stream(x.device).wait_stream(fork)


def shrink(x: Tensor, lora: LoraArgs, module: nvrtc.Module, *, dependent: bool | None = None) -> None:
    """Write low[i, m, :rank] = A x_i for every row and member that has an adapter."""
    n, members, width = lora.low.shape
    assert lora.A_ptr.shape[0] == members and lora.low.stride(2) == 1 and x.shape[0] == n and x.stride(1) == 1
    module.launch(
        "rows_low", (n, members, -(-width // _RANKS)), (256,),
        [
            x, x.stride(0), x.shape[1], lora.A_ptr, lora.A_ptr.stride(0), lora.rank, lora.rank.stride(0), lora.row_slots, lora.low,
            lora.low.stride(0), lora.low.stride(1), layouts.half(x),
        ],
        dependent=dependent,
    )  # fmt: skip


def add(y: Tensor, lora: LoraArgs, module: nvrtc.Module, *, x: Tensor | None = None, round_change: bool = False) -> None:
    """Do what `gemv4.lora_add` does, for any number of rows: add scale * (B low) to y [n, D_out] of a group's first layer in
    place. x [n, D_in]: the group's input; `low` is then made first, for all members."""
    if x is not None:
        shrink(x, lora, module)
    _up(y, [y.shape[1]], lora, module, round_change=round_change)


def _up(
    y: Tensor, rows: Sequence[int], lora: LoraArgs | None, module: nvrtc.Module, *, round_change: bool, parts: Tensor | None = None,
    bias: Sequence[Tensor | None] = (), chunks: int = 1, each: int = 1, dependent: bool | None = None,
) -> None:  # fmt: skip
    three = [*rows, *[0] * (3 - len(rows))]
    given: list[nvrtc.Argument] = [None, 0, None, 0, None, 0, None, None, 0, 0]
    if lora is not None:
        given = [
            lora.B_ptr, lora.B_ptr.stride(0), lora.rank, lora.rank.stride(0), lora.scale, lora.scale.stride(0), lora.row_slots,
            lora.low, lora.low.stride(0), lora.low.stride(1),
        ]  # fmt: skip
    module.launch(
        "rows_up", (-(-sum(rows) // _UP), y.shape[0]), (_UP,),
        [
            y, y.stride(0), y.shape[0], *three, parts, *[*bias, None, None, None][:3], *given, int(round_change),
            layouts.half(y), chunks, each,
        ],
        dependent=dependent,
    )  # fmt: skip


# In a step of transformers' own modules ---------------------------------------------------------------------------------


def matmul(
    leaves: Collection[Leaf], module: nvrtc.Module | None, *, least: int = launch_config.MAX_ROWS + 1, most: int = MOST_ROWS
) -> Matmul[LayerProduct] | None:
    """Return the way to multiply `least` to `most` rows by the kernel, None without one."""
    return None if module is None else Matmul("gemm4", set(leaves), partial(product, module=module), least, most)


def product(leaf: Leaf, x: Tensor, module: nvrtc.Module) -> Tensor | None:
    """Return a layer's product [n, D_out], None where the kernel does not read x or the weight."""
    flat, packed = x.reshape(-1, x.shape[-1]), leaf.packed()
    if why_not(packed, x.dtype) is not None or flat.data_ptr() % 16 or flat.stride(0) % 8:
        return None
    out = torch.empty(flat.shape[0], leaf.out_features, dtype=x.dtype, device=x.device)
    linear(flat, [packed], out, bias=[leaf.bias], module=module)
    return out


# At load: is it right, does it pay ------------------------------------------------------------------------------------


def wrong(
    weights: Sequence[Packed], module: nvrtc.Module, dtype: torch.dtype, *, counts: Sequence[int] = (9, 27, 64, 101)
) -> str | None:
    """Return the error of the kernels over these weights (a group over one input), None if there is none: random rows, rows with an
    adapter of either of two ranks and without, in float64. A wide head is tried with fewer rows, so that it takes CHECK_BYTES."""
    device, columns = weights[0].parts["weight"].device, weights[0].shape[1]
    random = random_values(device, columns)
    adapters = [
        [(random(rank, columns) / columns**0.5, random(packed.shape[0], rank) / 8, 0.5) for rank in (8, 12)]
        for packed in weights
    ]  # fmt: skip
    outputs = [packed.shape[0] for packed in weights]
    row_bytes = 12 * sum(outputs)  # its parts in float32 and its outputs
    for n in [one for one in counts if one * row_bytes <= CHECK_BYTES] or counts[:1]:
        x = random(n, columns).to(dtype)
        numbers = [i % 3 - 1 for i in range(n)]
        args = gemv4.lora_args(adapters, torch.tensor(numbers, dtype=torch.int32, device=device), 16)
        actual = torch.empty(n, sum(outputs), dtype=dtype, device=device)
        linear(x, weights, actual, lora=args, module=module)
        off, size = 0.0, 0.0
        for packed, own, part in zip(weights, adapters, actual.split(outputs, dim=1), strict=True):
            for rows in pieces_of(packed):
                wanted = _exact(x, packed, rows) + exact_changes(x, [(A, B[rows], scale) for A, B, scale in own], numbers)
                off += float((part[:, rows].double() - wanted).square().sum())
                size += float(wanted.square().sum())
        error = (off / size) ** 0.5
        if not error < LARGEST_ERROR:
            return f"{n} rows over {outputs} x {columns}: relative error {error:.1e}"
    return None


def _exact(x: Tensor, packed: Packed, rows: slice) -> Tensor:
    """Return some outputs of a layer in float64; one that rounds its outputs to 8 bits has weights in its own type."""
    if packed.static_scales is None:
        return x.double() @ gemv4.decoded(packed, torch.float64, rows=rows).T
    weight = dequantize_rows(packed, rows.start, rows.stop, x.device).double()
    y = (formats.rounded(packed, x, is_input=True).double() @ weight.T).to(x.dtype)
    return formats.rounded(packed, y, is_input=False).double()


def pieces_of(packed: Packed) -> list[slice]:
    """Return the outputs of a weight in pieces that take little memory in float64."""
    each = max(1, PIECE_VALUES // packed.shape[1])
    return [slice(at, min(at + each, packed.shape[0])) for at in range(0, packed.shape[0], each)]
