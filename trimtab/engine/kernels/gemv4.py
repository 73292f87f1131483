"""Which kernels multiply 1 to 8 rows with packed weights, with an adapter per row?"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.engine.cuda import launch_config, nvrtc, shipped_configs
from trimtab.engine.cuda.launch_config import BLOCK, MAX_ROWS, CutKey, LaunchConfig
from trimtab.engine.formats import weights as formats
from trimtab.engine.formats.packed import LayerProduct, Matmul, Packed
from trimtab.engine.formats.weights import exact_rows
from trimtab.engine.kernels import attention_and_norms, layouts
from trimtab.engine.layers.leaves import Leaf
from trimtab.errors import DeviceError
from trimtab.formats.kernels import LAYOUTS
from trimtab.formats.record import rounds_change, stored_format

MAX_MEMBERS = 3
# As in the kernel for adapters of other layers: threads of a block, outputs of one.
_LORA_THREADS, _LORA_OUTPUTS = 256, 64
NAMES = ("lora_add", "in_order")
# The content of `low` and parts of sums before a product makes them: all bits set, a NaN that no operation makes.
EMPTY = -1


@dataclass(frozen=True)
class Gate:
    """The gate directly after a product: act(y) times `other` [n, D_out], or times the second of two layers (other None)."""

    kind: str
    other: Tensor | None = None


class NormForm(NamedTuple):
    """The norms around a model's products. form: where they round, one of `attention_and_norms.FORMS`; has_post: whether what a
    product made is normed before it is added to the residual."""

    form: str = "inside"
    has_post: bool = True


PLAIN = NormForm()


@dataclass(frozen=True)
class Norm:
    """The norm before a product, whose input is then the outputs y [n, D_in] of the previous layer.

    h = (residual + norm(y) post) scalar, x = norm(h) next (x = h without next). Shapes: residual, out_h [n, D_in]; out_h is
    written and must not be residual; post, next [D_in]; scalar [1] or None. Without post h = (residual + y) scalar. form: as
    `attention_and_norms.FORMS`.
    """

    residual: Tensor
    post: Tensor | None
    next: Tensor | None
    eps: float
    scalar: Tensor | None
    out_h: Tensor
    form: str = "inside"

    def apply(self, y: Tensor, out_x: Tensor | None, module: nvrtc.Module | None, *, dependent: bool | None = None) -> Tensor:
        """Do it by itself (`attention_and_norms.add_norm`). Return the product's input: out_x, or out_h where there is no next."""
        attention_and_norms.add_norm(
            y, self.residual, self.post, self.next, self.eps, self.scalar, self.out_h, None if self.next is None else out_x,
            module, dependent=dependent, form=self.form,
        )  # fmt: skip
        if self.next is None:
            return self.out_h
        assert out_x is not None
        return out_x

    def arguments(self) -> list[nvrtc.Argument]:
        """Return the kernel's last arguments."""
        return [
            self.residual, self.residual.stride(0), self.post, self.next, self.scalar, self.out_h, self.out_h.stride(0),
            float(self.eps),
        ]  # fmt: skip


_NO_NORM: list[nvrtc.Argument] = [None, None, None, None, 0, 0.0]


@dataclass(frozen=True)
class LoraArgs:
    """The adapters of a group of M layers over the same input, in S slots, for n rows.

    Shapes: A_ptr, B_ptr [M, S] int64 (addresses of float32 [R, D_in] and [D_out, R], contiguous), rank [M, S] int32 (0:
    this member is not adapted), scale [M, S] float32; each contiguous along S. row_slots [n] int32 (-1: no adapter). low
    [n, M, R] float32 scratch, R at least the largest rank. adapters: the same as tensors, [M][S] of (A, B, scale) or
    None, for the torch path alone. is_empty: `low` is EMPTY in every bit, as a product's blocks must find it (else `matvec4`
    makes it so first). is_fixed: sums are shared among threads by R, not by the largest rank of these rows, so that a row's bits
    do not depend on the others' adapters.
    """

    A_ptr: Tensor
    B_ptr: Tensor
    rank: Tensor
    scale: Tensor
    row_slots: Tensor
    low: Tensor
    adapters: Sequence[Sequence[tuple[Tensor, Tensor, float] | None]] | None = None
    is_empty: bool = False
    is_fixed: bool = False

    def member(self, index: int) -> LoraArgs:
        """Return the adapters of one layer of the group; `low` is that layer's part, still strided over the group."""
        return self.members(slice(index, index + 1))

    def members(self, part: slice) -> LoraArgs:
        """Return the adapters of some layers of the group, as `member`."""
        adapters = None if self.adapters is None else self.adapters[part]
        return LoraArgs(
            self.A_ptr[part], self.B_ptr[part], self.rank[part], self.scale[part], self.row_slots, self.low[:, part],
            adapters, self.is_empty, self.is_fixed,
        )  # fmt: skip

    def rows(self, part: slice) -> LoraArgs:
        """Return the adapters of some of the rows."""
        return replace(self, row_slots=self.row_slots[part], low=self.low[part])


@dataclass(frozen=True)
class LoraColumns:
    """One layer's adapters in S slots: shapes and meaning as in `LoraArgs`, each [S]."""

    A_ptr: Tensor
    B_ptr: Tensor
    rank: Tensor
    scale: Tensor


# Torch: the same mathematics -----------------------------------------------------------------------------------------


def decoded(packed: Packed, dtype: torch.dtype = torch.float32, *, rows: slice = slice(None)) -> Tensor:
    """Return the unpacked weight [D_out, D_in], or some rows of it; not rounded to its type.

    Errors: AssertionError if rows are not whole blocks.
    """
    start, stop, _ = rows.indices(packed.shape[0])
    return exact_rows(packed, range(start, stop), dtype)


def lora_shrink_torch(x: Tensor, lora: LoraArgs) -> None:
    """Write low[i, m, :rank] = A x_i for every row and member that has an adapter."""
    assert lora.adapters is not None
    for i, slot in enumerate(lora.row_slots.tolist()):
        for m, slots in enumerate(lora.adapters):
            if slot >= 0 and (adapter := slots[slot]) is not None:
                lora.low[i, m, : adapter[0].shape[0]] = torch.nn.functional.linear(x[i].float(), adapter[0])


def _changes(lora: LoraArgs, i: int, m: int) -> Tensor | None:
    assert lora.adapters is not None
    slot = int(lora.row_slots[i])
    adapter = lora.adapters[m][slot] if slot >= 0 else None
    if adapter is None:
        return None
    A, B, scale = adapter
    return torch.nn.functional.linear(lora.low[i, m, : A.shape[0]], B) * scale


def matvec4_torch(
    x: Tensor, weights: Sequence[Packed], out: Tensor, *, bias: Sequence[Tensor | None] = (), lora: LoraArgs | None = None,
    gate: Gate | None = None, norm: Norm | None = None,
) -> None:  # fmt: skip
    """Do what `matvec4` does, in torch: products and sums in float32, rounded where the kernel rounds."""
    if norm is not None:
        x = norm.apply(x, torch.empty_like(x), None)
    if gate is not None:
        wide = torch.empty(x.shape[0], sum(packed.shape[0] for packed in weights), dtype=out.dtype, device=out.device)
        matvec4_torch(x, weights, wide, bias=bias, lora=lora)
        _apply_gate(wide, gate, out)
        return
    if lora is not None:
        lora_shrink_torch(x, lora)
    for m, (packed, part) in enumerate(zip(weights, out.split([one.shape[0] for one in weights], dim=1), strict=True)):
        y = torch.nn.functional.linear(formats.rounded(packed, x, is_input=True).float(), decoded(packed))
        if m < len(bias) and (added := bias[m]) is not None:
            y += added.float()
        part.copy_(formats.rounded(packed, y.to(out.dtype), is_input=False))
        for i in range(x.shape[0]):
            if lora is not None and (change := _changes(lora, i, m)) is not None:
                part[i] = part[i] + (change.to(out.dtype) if rounds_change(packed.kind) else change)


def _apply_gate(wide: Tensor, gate: Gate, out: Tensor) -> None:
    up = gate.other if gate.other is not None else wide[:, wide.shape[1] // 2 :]
    attention_and_norms.gated(wide[:, : out.shape[1]], up, out, gate.kind)


def lora_add_torch(y: Tensor, lora: LoraArgs, *, round_change: bool) -> None:
    """Add scale * (B low) to y [n, N] of one layer in place; round_change: rounded before the addition."""
    for i in range(y.shape[0]):
        if (change := _changes(lora, i, 0)) is not None:
            y[i] = y[i] + change.to(y.dtype) if round_change else (y[i].float() + change).to(y.dtype)


# Launches -------------------------------------------------------------------------------------------------------------


def source() -> str:
    """Return the source as it is compiled."""
    return layouts.source("matvec4.cu")


def source_hash() -> str:
    """Return the identifier of the source, without its comments, in files of launch configurations."""
    return hashlib.sha256(re.sub(r"\s*//.*", "", source()).encode()).hexdigest()[:16]


def load(device: torch.device | str, norm: NormForm = PLAIN) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError if that is not possible here."""
    module = nvrtc.Module(source(), device=device, name="matvec4.cu")
    prepare(module)
    base = torch.zeros(1, dtype=torch.int32, device=module.device)
    module.launch("where_shared", (1,), (32,), [base], shared_bytes=16)
    module.common = (f"-DSHARED_BASE={int(base)}",)
    if norm != PLAIN:
        module.common += (f"-DNORM_FORM={attention_and_norms.FORMS.index(norm.form)}", f"-DHAS_POST={norm.has_post:d}")
        module.products.norm = norm
    known = shipped_configs.kept(target_of(module))
    module.products.known = {key: (cut, shipped_configs.MEASURED) for key, cut in known.items()}
    module.products.measured = set(known)
    return module


def target_of(module: nvrtc.Module) -> shipped_configs.Target:
    """Return the card and source that launch configurations are kept for."""
    return shipped_configs.Target(
        torch.cuda.get_device_name(module.device), module.capability, module.multiprocessors, module.shared_bytes,
        source_hash(),
    )  # fmt: skip


def config_of(weights: Sequence[Packed], n: int, module: nvrtc.Module, *, pair: bool = False) -> tuple[LaunchConfig, str] | None:
    """Return the launch configuration of a product that is known without measuring, and how it is known: tuned on this card,
    shipped for such cards, or the best estimate. None if nothing fits the card."""
    if weights[0].order:  # its inputs are put in order behind a norm
        found = config_of([one.as_it_lies() for one in weights], n, module, pair=pair)
        return None if found is None else (replace(found[0], normed=False), found[1])
    key = cut_key(weights, n, pair=pair)
    products = module.products
    if key in products.known:
        return products.known[key]
    if products.shipped is None:
        products.shipped = shipped_configs.shipped(target_of(module))
    configs, status = products.shipped
    if key in configs:
        return configs[key], status
    # Other formats than bitsandbytes': what was the fastest for the same shape there.
    other = configs.get(("cut", *key[1:]))
    like = None if other is None else next((one for one in ways(weights, n, module, pair=pair) if one.is_like(other)), None)
    if like is not None and other is not None:
        is_normed = other.normed and like.may_be_normed and like.normed_bytes(weights[0].shape[1]) <= module.shared_bytes
        return replace(like, normed=is_normed), shipped_configs.ESTIMATED
    best = next(iter(ways(weights, n, module, pair=pair)), None)
    return None if best is None else (best, shipped_configs.ESTIMATED)


def is_tuned_before(weights: Sequence[Packed], n: int, module: nvrtc.Module, *, pair: bool = False) -> bool:
    """Whether an earlier process tuned this product on this card."""
    return cut_key(weights, n, pair=pair) in module.products.known


def prepare(module: nvrtc.Module) -> None:
    """Give a module the scratch of its launches: parts of sums, which every launch finds and leaves EMPTY."""
    module.scratch["parts"] = torch.full((launch_config.MOST_PARTS,), EMPTY, dtype=torch.int32, device=module.device)


def _table(code: Tensor, module: nvrtc.Module) -> Tensor:
    """Return the two weights of each of the 256 byte values: the weight of the high nibble in the low half, both as float16."""
    tables, key = module.products.tables, code.data_ptr()
    if key not in tables:
        high, low = code.half().repeat_interleave(16), code.half().repeat(16)
        # With the code: its address is not reused while this entry is kept.
        tables[key] = torch.stack((high, low), dim=1).contiguous(), code
    return tables[key][0]


def why_not(packed: Packed, dtype: torch.dtype, device: torch.device | str, *, n: int = 1) -> str | None:
    """Return why the kernel cannot compute with this weight, or None. Reads one small table: not for the inner loop."""
    form = stored_format(packed.kind)
    if form.layout is None:
        return layouts.unread(packed)
    if (why := layouts.why_not_type(dtype)) is not None:
        return why
    size = LAYOUTS[form.layout].whole
    if len(packed.shape) != 2 or packed.shape[1] % size:
        return f"the rows of a weight of shape {list(packed.shape)} are not whole blocks of {size}"
    if not 1 <= n <= MAX_ROWS:
        return f"{n} rows, not 1 to {MAX_ROWS}"
    code, scales = layouts.tables(packed)[0], layouts.tensors(packed)[1]
    if code is not None and float(code.abs().max()) > 2:
        return "codes beyond 2"
    if form.most_scale < math.inf and scales is not None and float(scales.abs().max()) > form.most_scale:
        return f"scales beyond {form.most_scale:g}"
    if form.rounds_inputs and dtype != packed.dtype:
        return f"the activation is {dtype}, and rounded in {packed.dtype}"
    return layouts.why_not_parts(packed) or nvrtc.why_not(device)


def _lora_arguments(lora: LoraArgs | None, makers: int, low_room: int) -> list[nvrtc.Argument]:
    if lora is None:
        return [*[None, 0] * 4, None, None, 0, 0, 0, 0, 0]
    return [
        lora.A_ptr, lora.A_ptr.stride(0), lora.B_ptr, lora.B_ptr.stride(0), lora.rank, lora.rank.stride(0), lora.scale,
        lora.scale.stride(0), lora.row_slots, lora.low, lora.low.stride(0), lora.low.stride(1), lora.low.shape[2], makers, low_room,
    ]  # fmt: skip


def _check_lora(lora: LoraArgs, members: int, n: int) -> None:
    assert lora.row_slots.shape == (n,) and lora.row_slots.dtype == torch.int32 and lora.row_slots.is_contiguous()
    assert lora.low.dtype == torch.float32 and lora.low.shape[:2] == (n, members) and lora.low.stride(2) == 1
    for table, dtype in (
        (lora.A_ptr, torch.int64),
        (lora.B_ptr, torch.int64),
        (lora.rank, torch.int32),
        (lora.scale, torch.float32),
    ):
        assert table.dtype == dtype and table.shape[0] == members and table.stride(1) == 1


def options(
    packed: Packed,
    dtype: torch.dtype,
    cut: LaunchConfig | None = None,
    *,
    members: int = 1,
    pair: bool = False,
    normed: bool = False,
    fixed: bool = False,
) -> tuple[str, ...]:
    """Return the compiler options of products of weights like this. fixed: as `LoraArgs.is_fixed`."""
    own = () if cut is None else cut.options(packed.shape[1] // BLOCK, members, pair=pair, normed=normed)
    format_of = (f"-DHALF={dtype == torch.float16:d}", *layouts.options(packed), f"-DWHOLE={packed.shape[1] % (4 * BLOCK) == 0:d}")
    return (*format_of, *own, *(("-DFIXED_RANKS=1",) if fixed else ()), *(("-DORDERED=1",) if packed.order else ()))


def _three(values: Sequence[nvrtc.Argument], empty: nvrtc.Argument = None) -> list[nvrtc.Argument]:
    return [*values, *[empty] * (MAX_MEMBERS - len(values))]


def arguments(
    x: Tensor, weights: Sequence[Packed], out: Tensor, cut: LaunchConfig, *, bias: Sequence[Tensor | None], lora: LoraArgs | None,
    gate: Gate | None, module: nvrtc.Module, low_room: int = 0, norm: Norm | None = None, ahead: Sequence[Tensor] = (),
    lora_x: Tensor | None = None,
) -> list[nvrtc.Argument]:  # fmt: skip
    """Return the kernel's arguments in its order; no part is read. lora_x: what adapters read, if it is not x."""
    bias = [*bias, *[None] * (len(weights) - len(bias))]
    code, nested_code = layouts.tables(weights[0])
    other = None if gate is None else gate.other
    in_front = [lora_x, 0 if lora_x is None else lora_x.stride(0), *_NO_NORM] if norm is None else norm.arguments()
    return [
        x, x.stride(0), x.shape[0], x.shape[1] // BLOCK, out, out.stride(0),
        *(one for tensors in zip(*map(layouts.tensors, weights), strict=True) for one in _three(tensors)), *_three(bias),
        *_three([packed.shape[0] for packed in weights], 0),
        None if code is None else _table(code, module), nested_code,
        *_lora_arguments(lora, module.side_by_side, low_room), len(weights), 0 if gate is None else 1 if other is None else 2,
        0 if gate is None else attention_and_norms.ACTIVATIONS.index(gate.kind), other, 0 if other is None else other.stride(0),
        module.scratch["parts"], cut.units, cut.k_warps, cut.groups, cut.chunk,
        cut.piece, cut.stages, cut.splits, cut.grid,
        launch_config.units_of([packed.shape[0] for packed in weights], pair=gate is not None and other is None),
        *in_front, *attention_and_norms.ahead_arguments(ahead),
    ]  # fmt: skip


def cut_key(weights: Sequence[Packed], n: int, *, pair: bool = False) -> CutKey:
    """Return under which name a module keeps the cut of a product."""
    return (
        launch_config.key_name(layouts.layout(weights[0]) or ""), tuple(packed.shape[0] for packed in weights),
        weights[0].shape[1], n, pair,
    )  # fmt: skip


def takes_norm(weights: Sequence[Packed], n: int, module: nvrtc.Module | None, *, pair: bool = False) -> bool:
    """Whether the norm in front of this product is to be a part of it on this card."""
    if module is None or not layouts.is_same(weights) or weights[0].order:
        return False
    return choose(weights, n, module, pair=pair).normed


def tuned_cuts(module: nvrtc.Module) -> dict[CutKey, LaunchConfig]:
    """Return the cuts that were measured."""
    products = module.products
    return {key: products.chosen[key] for key in products.measured if key in products.chosen}


def ways(weights: Sequence[Packed], n: int, module: nvrtc.Module, *, pair: bool = False) -> list[LaunchConfig]:
    """Return the cuts of this product that fit the module's device, the most likely to be fast first."""
    rows, columns = [packed.shape[0] for packed in weights], weights[0].shape[1]
    facts = {"multiprocessors": module.multiprocessors, "shared_bytes": module.shared_bytes}
    return launch_config.cuts(rows, columns, n, pair=pair, layout=layouts.layout(weights[0]) or "", **facts)


def choose(weights: Sequence[Packed], n: int, module: nvrtc.Module, *, pair: bool = False) -> LaunchConfig:
    """Return the cut of this product: the one set for it (`DeviceKernels.prepare`, `tune`), or the best estimate of those
    without a separate kernel."""
    key = cut_key(weights, n, pair=pair)
    chosen = module.products.chosen
    if key not in chosen:
        configs = ways(weights, n, module, pair=pair)
        if not configs:
            raise DeviceError(
                f"no launch configuration of {list(key[1])} x {key[2]} for {n} rows fits {module.shared_bytes} B of shared memory",
                device=str(module.device),
            )
        chosen[key] = next((cut for cut in configs if not cut.held), configs[0])
    return chosen[key]


def matvec4(
    x: Tensor, weights: Sequence[Packed], out: Tensor, *, bias: Sequence[Tensor | None] = (), lora: LoraArgs | None = None,
    gate: Gate | None = None, norm: Norm | None = None, module: nvrtc.Module | None, dependent: bool | None = None,
    cut: LaunchConfig | None = None, ahead: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Write the outputs of 1 to 3 layers over the same input: x [n, D_in] -> out [n, D_out of all], in x's dtype.

    bias: one per layer ([D_out], x's dtype) or nothing. lora: each row's adapter; its `low` is written. gate: out is then
    [n, D_out of one]. norm: x is the layer before's output; only with a cut that may be normed (`takes_norm`).
    dependent: start before the kernel in front ends (9.0 and newer) and load weights at the same time; None: as the module's
    `overlap` says. ahead: up to four tensors that a later kernel reads, prefetched into L2 at the same time (9.0 and newer).
    module None or of another device: in torch. Ask `why_not` about each weight first.

    y = round(x W^T [+ bias]); with an adapter: y = round(y + round(scale * (B @ low))), low = A @ x in float32; with a gate:
    round(round(act(y)) * up). W is never rounded to the model's type: codes enter tensor cores as float16 (2^-12 off), scales and
    sums are float32. The blocks make `low` together before they multiply. The same input gives the same bits on one device. A
    module serves one stream at a time.
    """
    pair = gate is not None and gate.other is None
    wide = sum(packed.shape[0] for packed in weights)
    assert 1 <= len(weights) <= MAX_MEMBERS and x.dim() == 2 and out.dtype == x.dtype
    assert out.shape == (x.shape[0], wide // 2 if pair else wide) and (len(weights) == 2 or not pair)
    if module is None or x.device != module.device:
        matvec4_torch(x, weights, out, bias=bias, lora=lora, gate=gate, norm=norm)
        return
    assert x.stride(1) == 1 and out.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if not layouts.is_same(weights):
        assert norm is None
        parts = torch.empty(x.shape[0], wide, dtype=x.dtype, device=x.device) if pair else out
        start = 0
        for part in layouts.runs(weights):
            stop = start + sum(packed.shape[0] for packed in weights[part])
            own = None if lora is None else lora.members(part)
            matvec4(x, weights[part], parts[:, start:stop], bias=bias[part], lora=own, module=module, dependent=dependent)
            start = stop
        if gate is not None:
            _apply_gate(parts, gate, out)
        return
    if lora is not None:
        _check_lora(lora, len(weights), x.shape[0])
    if gate is not None and gate.other is not None:
        assert len(weights) == 1 and gate.other.shape == out.shape and gate.other.stride(1) == 1
        assert gate.other.dtype == x.dtype
    cut = cut or choose(weights, x.shape[0], module, pair=pair)
    assert cut.needed_bytes(x.shape[0]) <= cut.shared_bytes and cut.n == x.shape[0]
    assert not pair or (cut.units % 2 == 0 and weights[0].shape == weights[1].shape)
    shared_bytes = cut.shared_bytes if norm is None else cut.normed_bytes(x.shape[1])
    low_room = 0
    if lora is not None:
        if not lora.is_empty:
            lora.low.view(torch.int32).fill_(EMPTY)
        low_bytes = -(-lora.low.numel() * 4 // 16) * 16
        low_room = int(bool(cut.held) and shared_bytes + low_bytes <= module.shared_bytes)
        shared_bytes += low_room * low_bytes
        if not low_room and low_bytes > LAYOUTS[cut.layout].first_bytes:
            raise DeviceError(
                f"{x.shape[0]} rows with ranks up to {lora.low.shape[2]} need {low_bytes} B of shared memory for A x",
                device=str(module.device),
            )
    if norm is not None:
        assert module.products.norm == (norm.form, norm.post is not None)
        assert cut.may_be_normed and not weights[0].order and norm.residual.shape == norm.out_h.shape == x.shape
        assert norm.residual.data_ptr() != norm.out_h.data_ptr() != x.data_ptr() and x.dtype == norm.out_h.dtype
    wanted = options(
        weights[0], x.dtype, cut, members=len(weights), pair=pair, normed=norm is not None,
        fixed=lora is not None and lora.is_fixed,
    )  # fmt: skip
    own_x = layouts.in_order(x, weights[0], module, dependent=dependent)
    module.variant(wanted).launch(
        cut.kernel, (cut.grid * cut.splits,), (cut.threads,),
        arguments(
            own_x, weights, out, cut, bias=bias, lora=lora, gate=gate, module=module, low_room=low_room, norm=norm, ahead=ahead,
            lora_x=None if own_x is x else x,
        ),
        shared_bytes=shared_bytes,
        dependent=module.overlap if dependent is None else dependent,
    )  # fmt: skip


def lora_add(
    y: Tensor, lora: LoraArgs, module: nvrtc.Module | None, *, x: Tensor | None = None, round_change: bool = False,
    dependent: bool | None = None,
) -> None:  # fmt: skip
    """Add scale * (B low) to y [n, D_out] in place, of the first layer of a group that was computed elsewhere.

    x [n, D_in]: the group's input; low[i, m, :rank] = A_m x_i is then made in the same launch for all members, and the others
    need no x afterwards (`LoraArgs.member`). Without it `low` is there already. round_change: the change is rounded before
    it is added, as over a quantized (int8) layer; else the sum alone is.
    """
    if module is None or y.device != module.device:
        if x is not None:
            lora_shrink_torch(x, lora)
        lora_add_torch(y, lora, round_change=round_change)
        return
    n, members, width = lora.low.shape
    if n > MAX_ROWS:
        for first in range(0, n, MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            given = None if x is None else x[rows]
            lora_add(y[rows], lora.rows(rows), module, x=given, round_change=round_change, dependent=dependent)
        return
    _check_lora(lora, members, y.shape[0])
    assert members <= MAX_MEMBERS and y.stride(1) == 1 and (x is None or x.stride(1) == 1)
    makers, shift = 0, 8
    if x is not None:
        if not lora.is_empty:
            lora.low.view(torch.int32).fill_(EMPTY)
        # One value a block at a time, or as many more as leave each warp one, before a second round.
        makers = min(lora.low.numel(), module.side_by_side)
        while shift > 5 and (makers * _LORA_THREADS >> shift) < lora.low.numel():
            shift -= 1
    blocks = max(-(-y.shape[1] // _LORA_OUTPUTS), -(-makers // n))
    module.launch(
        "lora_add", (blocks, n), (_LORA_THREADS,),
        [
            x, 0 if x is None else x.stride(0), n, 0 if x is None else x.shape[1], layouts.half(y),
            y, y.stride(0), y.shape[1], int(round_change), lora.A_ptr, lora.A_ptr.stride(0), lora.B_ptr, lora.rank,
            lora.rank.stride(0), lora.scale, lora.row_slots, lora.low, lora.low.stride(0), lora.low.stride(1), members,
            makers, shift,
        ],
        shared_bytes=-(-width // 4) * 16, dependent=dependent,
    )  # fmt: skip


def matmul(leaves: Collection[Leaf], module: nvrtc.Module | None) -> Matmul[LayerProduct] | None:
    """Return the way to multiply few rows by the kernel, None without one."""
    return None if module is None else Matmul("gemv4", set(leaves), partial(product, module=module), most=MAX_ROWS)


def product(leaf: Leaf, x: Tensor, module: nvrtc.Module) -> Tensor | None:
    """Return a layer's product [n, D_out], None where x is not as the kernel reads it or a step chose no configuration."""
    flat, weights = x.reshape(-1, x.shape[-1]), [leaf.packed()]
    if flat.data_ptr() % 16 or flat.stride(0) % 8 or cut_key(weights, len(flat)) not in module.products.chosen:
        return None
    out = torch.empty(len(flat), leaf.out_features, dtype=x.dtype, device=x.device)
    matvec4(flat, weights, out, bias=[leaf.bias], module=module)
    return out


# Tables ----------------------------------------------------------------------------------------------------------------


def lora_args(adapters: Sequence[Sequence[tuple[Tensor, Tensor, float] | None]], row_slots: Tensor, width: int) -> LoraArgs:
    """Return the tables of adapters given as tensors, [M][S] of (A, B, scale) or None. The tensors must outlive it."""
    device = row_slots.device

    def table(value: Callable[[tuple[Tensor, Tensor, float]], float], dtype: torch.dtype) -> Tensor:
        rows = [[0 if adapter is None else value(adapter) for adapter in slots] for slots in adapters]
        return torch.tensor(rows, dtype=dtype, device=device)

    return LoraArgs(
        table(lambda a: a[0].data_ptr(), torch.int64), table(lambda a: a[1].data_ptr(), torch.int64),
        table(lambda a: a[0].shape[0], torch.int32), table(lambda a: a[2], torch.float32), row_slots,
        torch.empty(row_slots.shape[0], len(adapters), width, dtype=torch.float32, device=device), adapters,
    )  # fmt: skip
