"""Mixtures of experts in decode steps of few rows, with adapters of rows inside.

    h = act(gate) up of each chosen expert;  out = the sum over K of (down h) weight

The torch path computes what `engine/lora/experts.py` computes and rounds where it does: products, an adapter's change of each, the
activation, gate times up, a product times its weight; the sum over K runs in float32, in the order of K, and is rounded once.
Which experts are chosen is never read on the host. An index without an expert makes its row NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats.packed import Packed
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import attention_and_norms as fused
from trimtab.engine.kernels import layouts
from trimtab.engine.kernels.dequantize import can_unpack
from trimtab.errors import DeviceError

# Changes of gate_up, which may be two (of gate and of up), and one of down.
MEMBERS = 3
MOST_ROWS, MOST_CHOSEN = 64, 32
_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The stacks of one module: gate_up [E, 2 I, D], whose first I outputs are the gate, and down [E, D, I]; each packed as
    `loader.pieces.pack` does it or 16 bits, contiguous. activation: one of `attention_and_norms.ACTIVATIONS`."""

    gate_up: Packed | Tensor
    down: Packed | Tensor
    activation: str

    @property
    def key(self) -> tuple[object, ...]:
        """What of the stacks selects a kernel, as values that print the same in every process."""
        stacks = (self.gate_up, self.down)
        forms = [(one.kind, *sorted(one.parts)) if isinstance(one, Packed) else str(one.dtype) for one in stacks]
        return (*(tuple(one.shape) for one in stacks), *forms, self.activation)


@dataclass(frozen=True, eq=False)
class Change:
    """One adapter's change of one member: A [n_pairs, R, D_in] and B [n_pairs, D_out_part, R] contiguous; first: of its outputs in
    the stack's; pairs: expert -> its place in A and B."""

    A: Tensor
    B: Tensor
    scale: float
    first: int
    pairs: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The adapters of n rows in S slots: members 0 and 1 change gate_up, one after the other, member 2 changes down.

    Shapes: A_ptr, B_ptr [3, S] int64, the addresses of `Change`, 0 without; rank [3, S] int32; scale [3, S] float32; outputs
    [3, S, 2] int32, the first output in the stack's and the end; pairs [3, S, E] int32, an expert's place in A and B, -1 without;
    row_slots [n] int32, -1 without an adapter. largest_rank: of all slots, or more. dtype: of every A and B; a change is computed
    and rounded in it. changes: the same as tensors, [3][S], for the torch path alone.
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
    changes: Sequence[Sequence[Change | None]] | None = None


def lora_tables(changes: Sequence[Sequence[Change | None]], row_slots: Tensor, count: int) -> ExpertLora:
    """Return the tables of changes given as tensors, [3][S], which must outlive them. count: of experts."""
    given = [one for slots in changes for one in slots if one is not None]
    assert len({one.A.dtype for one in given} | {one.B.dtype for one in given}) <= 1
    assert all(one.A.is_contiguous() and one.B.is_contiguous() for one in given)

    def table(value: Callable[[Change], object], none: object, dtype: torch.dtype) -> Tensor:
        rows = [[none if one is None else value(one) for one in slots] for slots in changes]
        return torch.tensor(rows, dtype=dtype, device=row_slots.device)

    return ExpertLora(
        table(lambda one: one.A.data_ptr(), 0, torch.int64), table(lambda one: one.B.data_ptr(), 0, torch.int64),
        table(lambda one: one.A.shape[1], 0, torch.int32), table(lambda one: one.scale, 0.0, torch.float32),
        table(lambda one: [one.first, one.first + one.B.shape[1]], [0, 0], torch.int32),
        table(lambda one: [one.pairs.get(expert, -1) for expert in range(count)], [-1] * count, torch.int32), row_slots,
        max((one.A.shape[1] for one in given), default=0), given[0].A.dtype if given else torch.float32, changes,
    )  # fmt: skip


def why_not(mixture: Mixture, n: int, top_k: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
    """Return why the kernels do not compute this mixture for n rows on this device, None if they do."""
    if dtype not in _TYPES:
        return f"the activation is {dtype}, not bfloat16 or float16"
    if mixture.activation not in fused.ACTIVATIONS:
        return f"the activation function is {mixture.activation}, not one of {', '.join(fused.ACTIVATIONS)}"
    if not 1 <= n <= MOST_ROWS or not 1 <= top_k <= MOST_CHOSEN:
        return f"{n} rows with {top_k} experts each, more than {MOST_ROWS} with {MOST_CHOSEN}"
    (count, both, width), down = mixture.gate_up.shape, tuple(mixture.down.shape)
    if both % 2 or down != (count, width, both // 2) or not count:
        return f"stacks of {[count, both, width]} and {list(down)} do not fit each other"
    for stack in (mixture.gate_up, mixture.down):
        why = _why_not_read(stack, dtype)
        if why is not None:
            return why
    return nvrtc.why_not(device) or "its kernels are not there yet"


def _why_not_read(stack: Packed | Tensor, dtype: torch.dtype) -> str | None:
    if stack.dtype != dtype:
        return f"the stack is {stack.dtype}, not {dtype}"
    multiple = 8 if isinstance(stack, Tensor) else 64
    if any(size % multiple for size in stack.shape[1:]):
        return f"matrices of {list(stack.shape[1:])} are not multiples of {multiple}"
    if isinstance(stack, Tensor):
        is_plain = stack.is_contiguous() and stack.data_ptr() % 16 == 0
        return None if is_plain else "the stack is not contiguous or not aligned to 16 bytes"
    why = layouts.why_not(stack)
    if why is None and (layouts.is_mobile(stack) or not can_unpack(stack.expert(0))):
        why = layouts.unread(stack)
    return why


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError."""
    raise DeviceError("its kernels are not there yet", device=str(device))


def check(module: nvrtc.Module, mixtures: Sequence[Mixture], dtype: torch.dtype) -> str | None:
    """Return the error of the kernels over these mixtures, None if they are right."""
    return "its kernels are not there yet"


def experts(
    x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, out: Tensor, *, lora: ExpertLora | None = None,
    module: nvrtc.Module | None = None, dependent: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return the mixture's output for x [n, D] in `out` [n, D]. index [n, K] int64, weights [n, K] in x's type or float32."""
    return _experts_torch(x, index, weights, mixture, out, lora)


def _experts_torch(
    x: Tensor, index: Tensor, weights: Tensor, mixture: Mixture, out: Tensor, lora: ExpertLora | None
) -> Tensor:  # fmt: skip
    known = index.clamp(0, mixture.gate_up.shape[0] - 1)
    wide = torch.promote_types(x.dtype, weights.dtype)
    sums = torch.zeros(x.shape, dtype=torch.promote_types(wide, torch.float32), device=x.device)
    for k in range(index.shape[1]):
        made = []
        for row in range(len(x)):
            expert = known[row, k : k + 1]
            gate, up = _product(x[row : row + 1], mixture.gate_up, expert, row, lora, (0, 1)).chunk(2, dim=1)
            h = torch.empty_like(up)
            fused.gated(gate, up, h, mixture.activation)
            made.append(_product(h, mixture.down, expert, row, lora, (2,)))
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
            part = y[:, change.first : change.first + len(B)]
            own = functional.linear(functional.linear(x.to(A.dtype), A), B).mul_(change.scale)
            part.copy_(torch.where((place >= 0) & (lora.row_slots[row] == slot), (part + own).to(y.dtype), part))
    return y


def _chosen(stack: Packed | Tensor, expert: Tensor) -> Tensor:
    """Return the chosen expert's matrix [D_out, D_in]: its number [1] stays on the device."""
    if isinstance(stack, Tensor):
        return stack.index_select(0, expert)[0]
    parts = {name: part.index_select(0, expert)[0] for name, part in stack.parts.items()}
    return dequantize(replace(stack, shape=stack.shape[1:], parts=parts))
