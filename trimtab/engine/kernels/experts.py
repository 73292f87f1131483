"""How do decode steps of few rows compute mixtures of experts with adapters of rows inside?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats.packed import Packed
from trimtab.engine.formats.weights import dequantize, exact_rows
from trimtab.engine.kernels import attention_and_norms, layouts
from trimtab.engine.kernels.dequantize import can_unpack, fits_type
from trimtab.engine.kernels.selfcheck import random_values, relative_error
from trimtab.engine.lora.layers import StackChange
from trimtab.engine.tiers.near_experts import NearExperts
from trimtab.formats.record import stored_format

# Changes of gate_up, which may be two (of gate and of up), and one of down.
MEMBERS = 3
MOST_ROWS, MOST_CHOSEN = 64, 32
NAMES = (
    "experts_low", "experts_gate_up", "experts_down", "experts_sort", "experts_many_low", "experts_many_gate_up",
    "experts_many_down", "experts_many_sum", "experts_assign", "experts_turns", "experts_fetch",
)  # fmt: skip
# As in cuda/experts.cu: columns of a warp, warps of a block, words of a change, and outputs of a block of stacks that are
# not packed: of gate and of up, and of down.
_CHUNK, _MOST_WARPS, _CHANGE_WORDS = 256, 24, 8
_EXACT_ROWS = 256  # of a matrix that the check decodes at once: whole blocks of every format
_TILE, _LOW_RANKS = 64, 8  # pairs of a block of many, and rows of a stack; ranks of a block
_FETCH_BLOCKS = 32  # that copy one expert
_UNPACKED_OUTPUTS = (4, 8)
# Seven roundings of each value, and codes in float16; the largest seen: 5.4e-3 and 7.2e-4.
CHECK_ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Of a block on any card.
_MOST_SHARED_BYTES = 64 * 1024


@dataclass(frozen=True, eq=False)
class Mixture:
    """The stacks of one module: gate_up [E, 2 I, D], whose first I outputs are the gate, and down [E, D, I]; each packed as
    `loader.pieces.pack` does it or 16 bits, contiguous. activation: one of `attention_and_norms.ACTIVATIONS`. near: slots on the
    card for experts of packed stacks that are in host memory."""

    gate_up: Packed | Tensor
    down: Packed | Tensor
    activation: str
    near: NearExperts | None = None

    def slots_of(self, stack: Packed | Tensor) -> Packed | None:
        """Return the slots of one of the stacks."""
        return None if self.near is None else self.near.stacks["gate_up_proj" if stack is self.gate_up else "down_proj"]


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The adapters of rows in S slots: members 0 and 1 change gate_up, one after the other, member 2 changes down.

    Shapes: A_ptr, B_ptr [3, S] int64, the addresses of `StackChange`, 0 without; rank [3, S] int32; scale [3, S] float32; outputs
    [3, S, 2] int32, the first output in the stack's and the end; pairs [3, S, E] int32, an expert's place in A and B, -1 without;
    row_slots [rows] int32, -1 without an adapter: each row has n / rows of the tokens, side by side. A, B: aligned to 16 bytes.
    largest_rank: of all slots, or more. dtype: of every A and B; a change is computed and rounded in it. changes: the same as
    tensors, [3][S], for the torch path alone.
    """

    A_ptr: Tensor
    B_ptr: Tensor
    rank: Tensor
    scale: Tensor
    outputs: Tensor
    pairs: Tensor
    row_slots: Tensor
    largest_rank: int
    dtype: torch.dtype = torch.float32
    changes: Sequence[Sequence[StackChange | None]] | None = None

    def numbers(self) -> tuple[Tensor, ...]:
        """Return the tables of slots."""
        return self.A_ptr, self.B_ptr, self.rank, self.scale, self.outputs, self.pairs


def lora_tables(changes: Sequence[Sequence[StackChange | None]], row_slots: Tensor, count: int) -> ExpertLora:
    """Return the tables of changes given as tensors, [3][S], which must outlive them. count: of experts."""
    given = [one for slots in changes for one in slots if one is not None]
    assert len({one.A.dtype for one in given} | {one.B.dtype for one in given}) <= 1
    assert all(one.A.is_contiguous() and one.B.is_contiguous() for one in given)

    def table(value: Callable[[StackChange], object], none: object, dtype: torch.dtype) -> Tensor:
        rows = [[none if one is None else value(one) for one in slots] for slots in changes]
        return torch.tensor(rows, dtype=dtype, device=row_slots.device)

    return ExpertLora(
        table(lambda one: one.A.data_ptr(), 0, torch.int64), table(lambda one: one.B.data_ptr(), 0, torch.int64),
        table(lambda one: one.A.shape[1], 0, torch.int32), table(lambda one: one.scale, 0.0, torch.float32),
        table(lambda one: [one.outputs.start, one.outputs.stop], [0, 0], torch.int32),
        table(lambda one: [one.pairs.get(expert, -1) for expert in range(count)], [-1] * count, torch.int32), row_slots,
        max((one.A.shape[1] for one in given), default=0), given[0].A.dtype if given else torch.float32, changes,
    )  # fmt: skip


def source() -> str:
    """Return the source as it is compiled."""
    return layouts.source("experts.cu") + nvrtc.source("experts_many.cu") + nvrtc.source("experts_near.cu")


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError if that is not possible here.

    Those of a stack's format are compiled when they are first needed, which must not be within a capture: `check` does it.
    """
    return nvrtc.Module(source(), device=device, name="experts.cu")


def jobs(mixture: Mixture, dtype: torch.dtype) -> list[nvrtc.Job]:
    """Return what `load` and `compiled` compile, each 2.5 s of a core (NVRTC 13.0)."""
    return [
        nvrtc.Job(source(), one, "experts.cu")
        for one in ((), *(options(stack, dtype) for stack in (mixture.gate_up, mixture.down)))
    ]


def compiled(module: nvrtc.Module, mixture: Mixture, dtype: torch.dtype) -> None:
    """Compile what a capture of this mixture needs, or find it in the cache."""
    for stack in (mixture.gate_up, mixture.down):
        module.variant(options(stack, dtype))


def options(stack: Packed | Tensor, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the compiler options of one stack's kernels."""
    own = ("-DFORMAT=16",) if isinstance(stack, Tensor) else layouts.options(stack)
    return (*own, f"-DHALF={dtype == torch.float16:d}")


def why_not(mixture: Mixture, n: int, top_k: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
    """Return why the kernels do not compute this mixture for n rows on this device, None if they do."""
    if (why := layouts.why_not_type(dtype)) is not None:
        return why
    if mixture.activation not in attention_and_norms.ACTIVATIONS:
        return f"the activation function is {mixture.activation}, not one of {', '.join(attention_and_norms.ACTIVATIONS)}"
    if not 1 <= n <= MOST_ROWS or not 1 <= top_k <= MOST_CHOSEN:
        return f"{n} rows with {top_k} experts each, more than {MOST_ROWS} with {MOST_CHOSEN}"
    (count, both, width), down = mixture.gate_up.shape, tuple(mixture.down.shape)
    if both % 2 or down != (count, width, both // 2) or not count:
        return f"stacks of {[count, both, width]} and {list(down)} do not fit each other"
    is_plain = isinstance(mixture.gate_up, Tensor) and isinstance(mixture.down, Tensor)
    for stack in (mixture.gate_up, mixture.down):
        why = _why_not_read(stack, dtype, multiple=8 if is_plain else 64)
        if why is not None:
            return why
    chunks, units = -(-width // _CHUNK), top_k * -(-both // 2 // _CHUNK)
    shared_bytes = max(_shared_bytes(mixture.gate_up, chunks, 2, 0), _shared_bytes(mixture.down, units, top_k, 1))
    if shared_bytes > _MOST_SHARED_BYTES:
        return f"the sums of {top_k} experts need {shared_bytes} B of shared memory, more than {_MOST_SHARED_BYTES}"
    return nvrtc.why_not(device)


def why_not_many(shapes: Sequence[Sequence[int]]) -> str | None:
    """Return why the kernels compute no more tokens than a step has over stacks that `why_not` knows, None if they do."""
    wrong = next((list(shape[1:]) for shape in shapes if any(size % _TILE for size in shape[1:])), None)
    return None if wrong is None else f"matrices of {wrong} are not multiples of {_TILE}"


def _why_not_read(stack: Packed | Tensor, dtype: torch.dtype, *, multiple: int) -> str | None:
    if stack.dtype != dtype and not (isinstance(stack, Packed) and fits_type(stack, dtype) and stack.dtype in layouts.TYPES):
        return f"the stack is {stack.dtype}, not {dtype}"
    if any(size % multiple for size in stack.shape[1:]):
        return f"matrices of {list(stack.shape[1:])} are not multiples of {multiple}"
    if isinstance(stack, Tensor):
        is_plain = stack.is_contiguous() and stack.data_ptr() % 16 == 0
        return None if is_plain else "the stack is not contiguous or not aligned to 16 bytes"
    why = layouts.why_not(stack)
    if why is None and (layouts.rounds_inputs(stack) or not can_unpack(stack.expert(0))):
        why = layouts.unread(stack)
    return why


def experts(
    x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, out: Tensor, *, lora: ExpertLora | None = None,
    module: nvrtc.Module | None = None, dependent: bool | None = None, fetched: Fetch | None = None,
) -> Tensor:  # fmt: skip
    """Return the mixture's output for x [n, D] in `out` [n, D]. index [n, K] int64, weights [n, K] in x's type or float32. fetched:
    of a step's index, if its experts are on their way. h = act(gate) up of each chosen expert; out = the sum over K of (down h)
    weight, in float32 in the order of K, rounded once. A row's bits do not depend on the other rows. The chosen experts are never
    read on the host. An index without an expert makes its row NaN. A module serves one stream at a time."""
    n = len(x)
    if module is None or x.device != module.device:
        return _experts_torch(x, index, weights, mixture, out, lora)
    assert x.stride(1) == out.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and out.dtype == x.dtype
    assert index.is_contiguous() and index.dtype == torch.int64 and weights.is_contiguous() and weights.shape == index.shape
    assert weights.dtype in (x.dtype, torch.float32) and (lora is None or lora.dtype in (x.dtype, torch.float32))
    assert lora is None or n % len(lora.row_slots) == 0
    near, is_many = mixture.near, n > MOST_ROWS
    # Scales are read as constants: not by a product that may begin while slots are written.
    launch = partial(_launch, module, x.dtype, dependent if near is None else False)
    if not is_many:
        fetched = None if near is None else fetched or fetch(index, mixture, module, x.dtype)
        return _few(x, index, weights, mixture, out, launch, lora, fetched)
    if near is not None and x.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device, threading.get_ident()))  # of a step that failed
    with nullcontext() if near is None else _forgetting(near):
        return _many(x, index, weights, mixture, out, launch, lora)


def _few(
    x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, out: Tensor, launch: Callable[..., None], lora: ExpertLora | None,
    fetched: Fetch | None,
) -> Tensor:  # fmt: skip
    """Do what `experts` does for the rows of a step."""
    (n, chosen), (count, _, width), inner = index.shape, mixture.gate_up.shape, mixture.down.shape[2]
    pairs = n * chosen
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    low, changes = _low(lora, pairs, x.device)
    if lora is not None and low is not None:
        launch(
            mixture.gate_up, "experts_low", (lora.largest_rank, 2 * chosen, n), 8,
            [x, x.stride(0), width, 0, index, chosen, count, 0, *_tables(lora, n), *changes[:2]],
        )  # fmt: skip
    if fetched is not None:
        fetched.gate_up()
    outputs, chunks = _outputs(mixture.gate_up)[0], -(-width // _CHUNK)
    launch(
        mixture.gate_up, "experts_gate_up", (inner // outputs, chosen, n), _warps(chunks),
        [
            x, x.stride(0), index, count, *_stack_arguments(mixture, mixture.gate_up), inner, width,
            attention_and_norms.ACTIVATIONS.index(mixture.activation), h, *changes,
        ],
        _shared_bytes(mixture.gate_up, chunks, 2, 0),
    )  # fmt: skip
    if lora is not None and low is not None:
        launch(
            mixture.down, "experts_low", (lora.largest_rank, chosen, n), 8,
            [h, inner, inner, 1, index, chosen, count, 2, *_tables(lora, n), *changes[:2]],
        )  # fmt: skip
    if fetched is not None:
        fetched.join()
    outputs, units = _outputs(mixture.down)[1], chosen * -(-inner // _CHUNK)
    launch(
        mixture.down, "experts_down", (width // outputs, n), _warps(units),
        [
            h, index, weights, int(weights.dtype == torch.float32), chosen, count, *_stack_arguments(mixture, mixture.down), inner,
            out, out.stride(0), *changes,
        ],
        _shared_bytes(mixture.down, units, chosen, 1),
    )  # fmt: skip
    return out


def _many(
    x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, out: Tensor, launch: Callable[..., None], lora: ExpertLora | None
) -> Tensor:  # fmt: skip
    """Do what `experts` does for the tokens of a prompt: it allocates [n K, D] and, of an adapter, [n K, 2 R + 16] float32, and
    [n K, I]."""
    (n, chosen), (count, _, width), inner = index.shape, mixture.gate_up.shape, mixture.down.shape[2]
    pairs, tiles = n * chosen, n * chosen // _TILE + min(count, n * chosen)
    order, first = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (pairs, count + 1))
    launch(mixture.gate_up, "experts_sort", (1,), 32, [index, pairs, count, order, first], 4 * (count + 1))
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    sorted_pairs: list[nvrtc.Argument] = [order, first, chosen, count]
    low, changes = _low(lora, pairs, x.device)

    def change(stack: Packed | Tensor, x: Tensor, width: int, member: int, members: int) -> None:
        if lora is not None and low is not None:
            launch(
                stack, "experts_many_low", (-(-lora.largest_rank // _LOW_RANKS), members, tiles), 8,
                [x, x.stride(0), width, int(member == 2), *sorted_pairs, member, *_tables(lora, n), *changes[:2]],
            )  # fmt: skip

    change(mixture.gate_up, x, width, 0, 2)
    turns = _Turns(mixture, first, launch)
    for turn in turns.of(mixture.gate_up):
        launch(
            mixture.gate_up, "experts_many_gate_up", (2 * inner // _TILE, tiles), 4,
            [
                x, x.stride(0), *sorted_pairs, *_stack_arguments(mixture, mixture.gate_up, turns.at), turns.turn, turn, width,
                inner, attention_and_norms.ACTIVATIONS.index(mixture.activation), h, *changes,
            ],
        )  # fmt: skip
    change(mixture.down, h, inner, 2, 1)
    parts = torch.empty(pairs, width, device=x.device)
    for turn in turns.of(mixture.down):
        launch(
            mixture.down, "experts_many_down", (width // _TILE, tiles), 4,
            [
                h, inner, *sorted_pairs, *_stack_arguments(mixture, mixture.down, turns.at), turns.turn, turn, inner, weights,
                int(weights.dtype == torch.float32), width, parts, *changes,
            ],
        )  # fmt: skip
    launch(
        mixture.down, "experts_many_sum", (-(-width // 512), n), 4, [parts, index, chosen, count, width, out, out.stride(0)]
    )  # fmt: skip
    return out


def _launch(
    module: nvrtc.Module, dtype: torch.dtype, dependent: bool | None, stack: Packed | Tensor, name: str, grid: tuple[int, ...],
    warps: int, given: Sequence[nvrtc.Argument], shared_bytes: int = 0,
) -> None:  # fmt: skip
    own = module.variant(options(stack, dtype))
    wanted = module.overlap if dependent is None else dependent
    own.launch(name, grid, (32 * warps,), given, shared_bytes=shared_bytes, dependent=wanted)


def _outputs(stack: Packed | Tensor) -> tuple[int, int]:
    return _UNPACKED_OUTPUTS if isinstance(stack, Tensor) else stored_format(stack.kind).expert_outputs


def _warps(units: int) -> int:
    """Return how many warps of a block share this many chunks evenly."""
    return -(-units // -(-units // _MOST_WARPS))


def _shared_bytes(stack: Packed | Tensor, units: int, changes: int, which: int) -> int:
    """Return the shared memory of a block of one kernel (0: gate and up, 1: down) with this many chunks and changes."""
    has_table = isinstance(stack, Packed) and layouts.tables(stack)[0] is not None
    front = 256 * 32 + 20 + _warps(units) * 144 if has_table else 0  # words: codes, zeros, x
    return 4 * (front + (units + changes) * _outputs(stack)[which] * (1 if which else 2) + changes * (_CHANGE_WORDS + 2))


def _stack_arguments(mixture: Mixture, stack: Packed | Tensor, where: Tensor | None = None) -> list[nvrtc.Argument]:
    """Return the arguments of one stack. where: of its experts' slots, if it is not the near ones' own."""
    if isinstance(stack, Tensor):
        return [stack, _each_bytes(stack), None, 0, None, 0, None, None, None, None, None, None, None]
    weight, scale, second, offset = layouts.tensors(stack)
    given: list[nvrtc.Argument] = []
    for part in (weight, scale, second):
        given += [part, 0 if part is None else _each_bytes(part)]
    near = mixture.slots_of(stack)
    places: list[nvrtc.Argument] = [None] * 4
    if mixture.near is not None and near is not None:
        places = [mixture.near.where if where is None else where, *layouts.tensors(near)[:3]]
    return [*given, offset, *reversed(layouts.tables(stack)), *places]


@dataclass(frozen=True, eq=False)
class Fetch:
    """Experts that are being copied to their slots, by a separate stream. gate_up: lets the stream of the caller wait for the
    first stack, join: for all. Every fetch is joined."""

    gate_up: Callable[[], None]
    join: Callable[[], None]


def fetch(index: Tensor, mixture: Mixture, module: nvrtc.Module, dtype: torch.dtype) -> Fetch:
    """Give the experts of a step's rows [n, K] slots, and begin to copy those that are new there."""
    near = mixture.near
    assert near is not None
    pairs, count, slots, launch = index.numel(), len(near.where), near.slots, partial(_launch, module, dtype, False)
    listed = torch.empty(1 + 2 * min(pairs, count), dtype=torch.int32, device=index.device)
    with _forgetting(near):
        launch(
            mixture.gate_up, "experts_assign", (1,), 32,
            [index, pairs, count, near.where, near.owner, near.used, near.clock, near.counts, slots, listed],
            4 * 2 * (count + slots),
        )  # fmt: skip
        if not index.is_cuda:
            for stack in (mixture.gate_up, mixture.down):
                _copy(mixture, stack, listed, min(pairs, slots), launch)
            return Fetch(lambda: None, lambda: None)
        waits, side = [], _side_stream(index.device, threading.get_ident())
        if not torch.cuda.is_current_stream_capturing():
            listed.record_stream(side)  # an error may end the caller before it joins
        side.wait_stream(torch.cuda.current_stream(index.device))
        with torch.cuda.stream(side):
            for stack in (mixture.gate_up, mixture.down):
                _copy(mixture, stack, listed, min(pairs, slots), launch)
                waits.append(side.record_event())
    return Fetch(*(partial(_wait, event, listed) for event in waits))


def _wait(event: torch.cuda.Event, kept: Tensor) -> None:
    """kept: what the other stream reads until then."""
    torch.cuda.current_stream(kept.device).wait_event(event)


@cache
def _side_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    # One a thread, and of another priority than torch's pool: no other code may use it while a capture has forked it.
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def _forgetting(near: NearExperts) -> Iterator[None]:
    """Empty the slots if a launch fails behind the one that says what they hold."""
    try:
        yield
    except BaseException:
        near.forget()
        raise


def _copy(mixture: Mixture, stack: Packed | Tensor, fetched: Tensor, most: int, launch: Callable[..., None]) -> None:
    """Copy what a list names of one stack to its slots. most: experts of the list."""
    own = mixture.slots_of(stack)
    assert own is not None and isinstance(stack, Packed)
    parts: list[nvrtc.Argument] = []
    for far, here in zip(layouts.tensors(stack)[:3], layouts.tensors(own)[:3], strict=True):
        parts += [far, here, 0 if far is None else _each_bytes(far)]
    launch(stack, "experts_fetch", (_FETCH_BLOCKS, most), 8, [fetched, *parts])


class _Turns:
    """The launches of a prompt's product, one after the other. first: as `experts_sort` made it. turn, at: as `experts_turns` makes
    them, None where all experts are resident."""

    def __init__(self, mixture: Mixture, first: Tensor, launch: Callable[..., None]) -> None:
        self._mixture, self._launch = mixture, launch
        self.turn: Tensor | None = None
        self.at: Tensor | None = None
        near = mixture.near
        if near is None:
            return
        count = len(near.where)
        self.turn, self.at = torch.empty_like(near.where), torch.empty_like(near.where)
        self._lists = near.where.new_empty(max(near.turns - 1, 1), 1 + 2 * near.turning)
        launch(
            mixture.gate_up, "experts_turns", (1,), 32,
            [
                first, count, near.where, near.owner, near.used, near.slots, near.turning, near.turns, self.turn, self.at,
                self._lists,
            ],
            4 * 2 * (count + near.slots),
        )  # fmt: skip

    def of(self, stack: Packed | Tensor) -> Iterator[int]:
        """Yield the turns of one stack, each when its experts are there."""
        near = self._mixture.near
        for turn in range(1 if near is None else near.turns):
            if turn and near is not None:
                _copy(self._mixture, stack, self._lists[turn - 1], near.turning, self._launch)
            yield turn


def _each_bytes(part: Tensor) -> int:
    return part.numel() * part.element_size() // part.shape[0]


def _low(lora: ExpertLora | None, pairs: int, device: torch.device) -> tuple[Tensor | None, list[nvrtc.Argument]]:
    """Return memory for the changes of pairs and A x, None without, and the kernels' arguments of it."""
    if lora is None or not lora.largest_rank:
        return None, [None, 0, 0]
    low = torch.empty(pairs, 2, _CHANGE_WORDS + -(-lora.largest_rank // 4) * 4, device=device)
    return low, [low, low.shape[2], int(lora.dtype == torch.float32)]


def _tables(lora: ExpertLora, n: int) -> list[nvrtc.Argument]:
    return [
        lora.A_ptr, lora.B_ptr, lora.rank, lora.scale, lora.outputs, lora.pairs, lora.row_slots, n // len(lora.row_slots),
        lora.rank.shape[1], int(lora.dtype == torch.float32),
    ]  # fmt: skip


def _experts_torch(
    x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, out: Tensor, lora: ExpertLora | None
) -> Tensor:  # fmt: skip
    """Round where `engine/lora/experts.py` does. Kernels differ in the order of sums, and packed weights enter unrounded."""
    known = index.clamp(0, mixture.gate_up.shape[0] - 1)
    wide, each = torch.promote_types(x.dtype, weights.dtype), 1 if lora is None else len(x) // len(lora.row_slots)
    sums = torch.zeros(x.shape, dtype=torch.promote_types(wide, torch.float32), device=x.device)
    for k in range(index.shape[1]):
        made = []
        for row in range(len(x)):
            expert, own = known[row, k : k + 1], row // each
            gate, up = _product(x[row : row + 1], mixture.gate_up, expert, own, lora, (0, 1)).chunk(2, dim=1)
            h = torch.empty_like(up)
            attention_and_norms.gated(gate, up, h, mixture.activation)
            made.append(_product(h, mixture.down, expert, own, lora, (2,)))
        sums += (torch.cat(made) * weights[:, k, None]).to(wide)
    return out.copy_(sums.to(x.dtype).masked_fill((known != index).any(dim=1, keepdim=True), torch.nan))


def _product(
    x: Tensor, stack: Packed | Tensor, expert: Tensor, row: int, lora: ExpertLora | None, members: Sequence[int]
) -> Tensor:  # fmt: skip
    """Return x [1, D_in] through the chosen expert [1] of a stack, with the changes of the row's adapter."""
    weight = _chosen(stack, expert)
    y = functional.linear(x.to(weight.dtype), weight)
    for member in members if lora is not None else ():
        assert lora is not None and lora.changes is not None
        for slot, change in enumerate(lora.changes[member]):
            if change is None:
                continue
            place = lora.pairs[member, slot].index_select(0, expert)
            A, B = (one.index_select(0, place.clamp(min=0))[0] for one in (change.A, change.B))
            part = y[:, change.outputs]
            own = functional.linear(functional.linear(x.to(A.dtype), A), B).mul_(change.scale)
            part.copy_(torch.where((place >= 0) & (lora.row_slots[row] == slot), (part + own).to(y.dtype), part))
    return y


def _chosen(stack: Packed | Tensor, expert: Tensor) -> Tensor:
    """Return the chosen expert's matrix [D_out, D_in]: its number [1] stays on the device."""
    if isinstance(stack, Tensor):
        return stack.index_select(0, expert)[0]
    parts = {name: part.index_select(0, expert)[0] for name, part in stack.parts.items()}
    return dequantize(replace(stack, shape=stack.shape[1:], parts=parts))


# At load ----------------------------------------------------------------------------------------------------------------


def check(
    module: nvrtc.Module, mixture: Mixture, top_k: int, dtype: torch.dtype, *, rows: Sequence[int] = (1, 3)
) -> str | None:  # fmt: skip
    """Return the error of the kernels over this mixture on this device, or None: random inputs of a type with and without adapters
    against float64; where the stacks fit many tokens, these too. Compiles what a capture needs. Takes up to one expert's matrices
    in float64 in addition to the mixture."""
    count, both, width = mixture.gate_up.shape
    inner = both // 2
    random = random_values(module.device, 1)

    def change(rank: int, columns: int, outputs: int, first: int) -> list[StackChange | None]:
        A, B = random(1, rank, columns) / columns**0.5, random(1, outputs, rank) / rank**0.5
        return [StackChange("", A, B, 0.5, slice(first, first + outputs), dict.fromkeys(range(0, count, 2), 0))]

    changes = [change(8, width, both, 0), change(3, width, inner, inner), change(8, inner, width, 0)]
    is_many = why_not_many((mixture.gate_up.shape, mixture.down.shape)) is None
    for n in (*rows, MOST_ROWS + 2) if is_many else rows:
        top_k = top_k if n <= MOST_ROWS else min(top_k, 2)
        x, weights = random(n, width).to(dtype), random(n, top_k).abs()
        index = random(n, count).argsort(dim=1)[:, :top_k].contiguous()
        slots = -(torch.arange(n if n <= MOST_ROWS else 2, device=module.device, dtype=torch.int32) % 2)
        tables = lora_tables(changes, slots, count)  # every other row has none
        for lora in (None, tables) if n <= MOST_ROWS else (tables,):
            out = experts(x, index, weights, mixture, torch.full_like(x, torch.nan), lora=lora, module=module)
            error = relative_error(out, _exact(x, index, weights, mixture, lora))
            if error > CHECK_ERROR[dtype]:
                return f"{n} rows of {top_k} experts{'' if lora is None else ' with adapters'}: relative error {error:.1e}"
    return None


def _exact(x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, lora: ExpertLora | None) -> Tensor:
    """Return the mixture's output in float64."""

    def product(x: Tensor, stack: Packed | Tensor, expert: int, row: int, members: Sequence[int]) -> Tensor:
        # Some rows at a time: decoding takes twenty bytes a value.
        pieces = [range(at, min(at + _EXACT_ROWS, stack.shape[1])) for at in range(0, stack.shape[1], _EXACT_ROWS)]
        if isinstance(stack, Tensor):
            y = torch.cat([stack[expert, rows.start : rows.stop].double() @ x for rows in pieces])
        else:
            own = stack.expert(expert)
            y = torch.cat([exact_rows(own, rows, torch.float64) @ x for rows in pieces])
        if lora is None or lora.changes is None or (slot := int(lora.row_slots[row * len(lora.row_slots) // len(index)])) < 0:
            return y
        for change in (lora.changes[member][slot] for member in members):
            if change is not None and expert in change.pairs:
                A, B = (one[change.pairs[expert]].double() for one in (change.A, change.B))
                y[change.outputs] += change.scale * (B @ (A @ x))
        return y

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, chosen in enumerate(index.tolist()):
        for k, expert in enumerate(chosen):
            gate, up = product(x[row].double(), mixture.gate_up, expert, row, (0, 1)).chunk(2)
            h = torch.empty_like(up)[None]
            attention_and_norms.gated(gate[None], up[None], h, mixture.activation)
            out[row] += weights[row, k].double() * product(h[0], mixture.down, expert, row, (2,))
    return out
