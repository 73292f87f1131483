"""How are kernels chosen on a card, and are the small ones right and fast there?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.cuda.nvrtc import side_stream
from trimtab.engine.kernels.attention_and_norms import (
    ACTIVATIONS,
    MODES,
    AttentionShape,
    HeadNorms,
    add_gated,
    add_norm,
    attend,
    gated,
    rope_and_attention,
    rope_write,
    scratch_values,
    turn,
)
from trimtab.engine.kernels.plain_attention import Growth
from trimtab.engine.kv.sequence import PagePool
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.memory.out_of_memory import reason_of
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

# name -> (ours, what it replaces), in microseconds
Times = dict[str, tuple[float, float]]
_Make = Callable[..., Tensor]
_Wrong = Callable[[str, Sequence[Tensor], Sequence[Tensor]], "str | None"]
# Norms of differences over norms. From torch's path: few values are one step of the type away (largest seen 1.5e-4, 1.2e-5).
LARGEST_DIFFERENCE = {torch.bfloat16: 1e-3, torch.float16: 1.25e-4}
# Of attention from float64: one rounding of the output (largest seen 1.7e-3, 2.1e-4).
LARGEST_ERROR = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
# Caches and the last place in them: one tile; splits that this block combines; a length that is no multiple of anything; the
# last place; a full ring.
LENGTHS = ((70, 0), (512, 511), (1100, 700), (1100, 1099), (512, 5000))
_PIECE = 2**20


@dataclass(frozen=True)
class KernelFamily:
    """Kernels that are used together, or not at all. name: in fallbacks. key: everything that decides the choice, None for one
    that is not kept. load: compiles them. check: returns their error against float64 or torch. unsupported: returns why they do not
    know the shapes, types or card. measure: returns times; None: not timed. theirs, of: in the reason of slow ones. is_each: one
    that is slower is not used, the others are."""

    name: str
    key: tuple[object, ...] | None
    load: Callable[[], nvrtc.Module]
    check: Callable[[nvrtc.Module], str | None]
    unsupported: Callable[[nvrtc.Module], str | None] = lambda module: None
    measure: Callable[[nvrtc.Module], Times] | None = None
    theirs: str = "torch's"
    of: str = ""
    is_each: bool = False

    def choose(
        self, checks: CardEntries, reasons: dict[str, str], measured: Times, device: torch.device | str = "cuda"
    ) -> nvrtc.Module | None:  # fmt: skip
        """Return the module, or None with its reason in `reasons`. A check that passed on this card before is not repeated.
        measured: gets the times. Errors: those of a lost device, and of one without memory."""
        times: Times = {}
        try:
            module = self.load()
            before = None if self.key is None else checks.find(self.name, *self.key)
            if before is not None:
                measured.update({one: (ours, theirs) for one, (ours, theirs) in before["us"].items()})
                return module
            with torch.no_grad():
                why = self.unsupported(module) or self.check(module)
                if why is None and self.measure is not None:
                    times = self.measure(module)
                    why = self.why_slower(times)
            measured.update(times)
        except Exception as exc:
            why = reason_of(exc, device)
        if why is None:
            if self.key is not None:
                checks.keep({"us": times}, self.name, *self.key)
            return module
        reasons[self.name] = why
        return None

    def choose_alone(self, device: torch.device, measured: Times | None = None) -> tuple[nvrtc.Module | None, str | None]:
        """Return the same, with the reason, of a family that is chosen by itself: its checks are read and kept here."""
        checks, reasons = CardEntries() if self.key is None else CardEntries.of(device), dict[str, str]()
        module = self.choose(checks, reasons, {} if measured is None else measured, device)
        checks.save()
        return module, reasons.get(self.name)

    def why_slower(self, times: Times) -> str | None:
        """Return how much slower ours are together than what they replace, None if they are faster."""
        ours = sum(min(pair) if self.is_each else pair[0] for pair in times.values())
        theirs = sum(pair[1] for pair in times.values())
        return None if ours < theirs else f"slower here: {ours:.1f} µs against {self.theirs} {theirs:.1f}{self.of}"


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """Return the first that is one; those behind it are not computed."""
    return next((one for one in reasons if one is not None), None)


def random_values(device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    """Return what draws a tensor of any shape, normally distributed: the same tensors in the same order each time."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, device=device, generator=generator).to(dtype)


def relative_error(actual: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference over the norm of the expected result, or over `least` if that is more, in float64
    (infinite if not finite)."""
    sums = torch.zeros(2, dtype=torch.float64, device=actual.device)
    pieces = (x.reshape(-1).split(_PIECE) for x in (actual, wanted.to(actual.device)))
    for a, b in zip(*pieces, strict=True):
        b = b.double()
        sums += torch.stack([(a.double() - b).square().sum(), b.square().sum()])
    off, whole = sums.sqrt().tolist()
    error = off / max(whole, least, 1e-30)
    return error if math.isfinite(error) else math.inf


def exact_changes(x: Tensor, adapters: Sequence[tuple[Tensor, Tensor, float] | None], slots: Sequence[int]) -> Tensor:
    """Return scale * B A x [n, D_out] in float64 for x [n, D_in] and row i's adapter (A, B, scale) adapters[slots[i]]; 0 where the
    slot is -1 or None is there."""
    values = next(one[1].shape[0] for one in adapters if one is not None)
    changes = torch.zeros(len(x), values, dtype=torch.float64, device=x.device)
    for slot, adapter in enumerate(adapters):
        if adapter is not None:
            A, B, scale = adapter
            rows = [i for i, own in enumerate(slots) if own == slot]
            changes[rows] = scale * (x[rows].double() @ A.double().T @ B.double().T)
    return changes


def attend_exact(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float, softcap: float | None,
    sinks: Tensor | None = None, growth: Growth | None = None,
) -> Tensor:  # fmt: skip
    """Return the exact result of `attend`, [n, Hq * D] in float64."""
    dtype = q.dtype
    n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    attended = torch.empty(n, kv_heads, heads // kv_heads, dim, dtype=torch.float64, device=q.device)
    queries = q.double().view_as(attended)
    for i in range(n):
        length = min(int(positions[i]) + 1, keys.shape[2])
        for j in range(kv_heads):
            scores = queries[i, j] @ keys[i, j, :length].double().T * scaling
            if growth is not None:
                scores = scores * growth.of(positions[i], dtype).double()
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(kv_heads, -1, 1)[j]), dim=-1)
            attended[i, j] = torch.softmax(scores, dim=-1)[:, :length] @ values[i, j, :length].double()
    return attended.view(n, heads * dim)


def check_bytes(attention: Sequence[AttentionShape], dtype: torch.dtype, *, rows: int) -> int:
    """Return about how many bytes of the device `check` takes for a while: two pairs of caches, one made in float32."""
    values = max((rows * shape[1] * max(LENGTHS)[0] * shape[2] for shape in attention), default=0)
    return values * (4 * dtype.itemsize + 4) + 4 * _PIECE * 8


def check(
    module: nvrtc.Module, *, widths: Sequence[int], attention: Sequence[AttentionShape],
    norm: tuple[str, bool] = ("inside", True), dtype: torch.dtype = torch.bfloat16, rows: Sequence[int] = (1, 3, 8),
) -> str | None:  # fmt: skip
    """Return the error of the kernels on this device, or None. Random inputs; outputs are poisoned first.

    widths: of the vectors that are normed or gated. attention: of each kind of layer. norm: as `gemv4.NormForm`. Norms,
    rotation and gates are compared with their torch path, attention with float64, each at a few lengths.
    """
    random = random_values(module.device, 1, dtype)

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=module.device)

    def wrong(what: str, actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
        error = max(relative_error(a, b) for a, b in zip(actual, wanted, strict=True))
        limit = (LARGEST_ERROR if wanted[0].dtype == torch.float64 else LARGEST_DIFFERENCE)[dtype]
        return None if error <= limit else f"{what}: relative error {error:.1e}"

    for n in rows:
        for width in widths:
            y, residual, scalar = random(n, width), random(n, width), random(1)
            post, following = random(width), random(width)
            for first in (y, None):
                actual, wanted = ((poisoned(n, width), poisoned(n, width)) for _ in range(2))
                for (h, x), one in ((actual, module), (wanted, None)):
                    add_norm(first, residual, post if norm[1] else None, following, 1e-6, scalar, h, x, one, form=norm[0])
                if reason := wrong(f"add_norm of {n} x {width}", actual, wanted):
                    return reason
            both = random(n, 2 * width)
            for kind in ACTIVATIONS:
                for out, one in ((actual[0].fill_(math.nan), module), (wanted[0].fill_(math.nan), None)):
                    gated(both[:, :width], both[:, width:], out, kind, one)
                if reason := wrong(f"gated ({kind}) of {n} x {width}", actual[:1], wanted[:1]):
                    return reason
            share = random(n, 1)
            for gate in (share, None):
                for out, one in ((actual[0], module), (wanted[0], None)):
                    add_gated(out.copy_(residual), y, gate, one)
                if reason := wrong(f"add_gated of {n} x {width}", actual[:1], wanted[:1]):
                    return reason
        for shape in attention:
            reason = _wrong_attention(module, n, AttentionShape(*shape), random, poisoned, wrong)
            if reason is not None:
                return reason
    return None


def _wrong_attention(
    module: nvrtc.Module, n: int, shape: AttentionShape, random: _Make, poisoned: _Make, wrong: _Wrong
) -> str | None:  # fmt: skip
    heads, kv_heads, dim = shape[:3]
    what = f"of {n} rows, {heads} heads over {kv_heads}, {dim} each"
    cos, sin = _turn_of(shape, n, random)
    norms = _norms_of(shape, random)
    sinks = random(heads) if shape.has_sinks else None
    places = torch.arange(n, device=module.device) * 3 % 70
    for mode, parts in MODES.items():
        qkv = random(n, (heads * norms.q_step + parts * kv_heads) * dim)
        written, wanted = ((poisoned(n, kv_heads, 70, dim), poisoned(n, kv_heads, 70, dim)) for _ in range(2))
        turned = [poisoned(n, heads, dim) for _ in range(2)]
        for (keys, values), q_out, one in ((written, turned[0], module), (wanted, turned[1], None)):
            keys.zero_(), values.zero_()
            rope_write(
                qkv, heads, kv_heads, dim, norms, cos, sin, keys, values, places, q_out, module=one, mode=mode,
            )  # fmt: skip
        if reason := wrong(f"rope_write ({mode}) {what}", [turned[0], *written], [turned[1], *wanted]):
            return reason
        # As a prompt's chunk has them: products apart, keys and values by head.
        own_keys, own_values = (random(n, kv_heads * dim) if parts > part else None for part in range(2))
        outs = [[poisoned(n, heads, dim), *(poisoned(kv_heads, n, dim) for _ in range(2 * (parts > 0)))] for _ in range(2)]
        for (q_out, *rest), one in zip(outs, (module, None), strict=True):
            k_out, v_out = rest or (None, None)
            turn(
                qkv[:, : heads * norms.q_step * dim], own_keys, own_values, dim, norms, cos, sin, q_out, k_out, v_out, module=one,
            )  # fmt: skip
        if reason := wrong(f"turn ({mode}) {what}", *outs):
            return reason
    for length, position in LENGTHS:
        keys, values = random(n, kv_heads, length, dim), random(n, kv_heads, length, dim)
        positions = torch.tensor([max(0, position - 37 * i) for i in range(n)], device=module.device)
        for i in range(n):  # places that a row does not read are NaN
            keys[i, :, int(positions[i]) + 1 :] = values[i, :, int(positions[i]) + 1 :] = math.nan
        given = (heads, cos, sin, norms, sinks, shape.growth)
        if reason := _wrong_turn(module, *given, keys, values, positions, random, poisoned, wrong):
            return f"{reason} {what} over {length} places at {position}"
        q, out = random(n, heads, dim), poisoned(n, heads * dim)
        for scaling, softcap in ((dim**-0.5, None), (0.1, 3.0)):
            attend(q, keys, values, positions, scaling, softcap, out, None, module, sinks=sinks, growth=shape.growth)
            exact = attend_exact(q, keys, values, positions, scaling, softcap, sinks, shape.growth)
            if reason := wrong(f"attend {what} over {length} places at {position}", [out], [exact]):
                return reason
            out.fill_(math.nan)
    return None


def _turn_of(shape: AttentionShape, n: int, random: _Make) -> tuple[Tensor, Tensor]:
    """Return cos and sin of n tokens; their halves are equal, as those of a rotation are."""
    half = (shape.dim if shape.rotary is None else shape.rotary) // 2
    cos, sin = (torch.cat((one, one), dim=1) for one in (random(n, half), random(n, half)))
    return (cos.float(), sin.float()) if shape.turn == "wide" else (cos, sin)


def _norms_of(shape: AttentionShape, random: _Make) -> HeadNorms:
    """Return the norms of a layer of this kind."""
    q, k = (None if shape.norm is None else random(shape.dim) for _ in range(2))
    return HeadNorms(q, k, 1e-6, shape.norm or "inside", shape.norms_values, shape.is_gated, shape.turn == "pairs")


def _wrong_turn(
    module: nvrtc.Module, heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms, sinks: Tensor | None, growth: Growth | None,
    keys: Tensor, values: Tensor, positions: Tensor, random: _Make, poisoned: _Make, wrong: _Wrong,
) -> str | None:  # fmt: skip
    """Compare rotation and attention in one launch with the rotation in torch, and attention in float64 behind it."""
    n, kv_heads, length, dim = keys.shape
    places, each = positions.remainder(length), torch.arange(n, device=keys.device)
    for mode, parts in MODES.items():
        qkv, out, q = random(n, (heads * norms.q_step + parts * kv_heads) * dim), poisoned(n, heads * dim), poisoned(n, heads, dim)
        if mode != "shared":  # the old content must not be read
            keys[each, :, places] = values[each, :, places] = math.nan
        written = keys.clone(), values.clone()
        rope_and_attention(
            qkv, heads, norms, cos, sin, *written, places, positions, dim**-0.5, None, out, q, None, module, mode=mode,
            sinks=sinks, growth=growth,
        )  # fmt: skip
        writes = mode != "shared"
        rope_write(
            qkv, heads, kv_heads, dim, norms, cos, sin, keys if writes else None, values if writes else None, places, q,
            mode=mode,
        )  # fmt: skip
        exact = attend_exact(q, keys, values, positions, dim**-0.5, None, sinks, growth)
        if reason := wrong(f"turn_and_attend ({mode})", [out], [exact]):
            return reason
        for i in range(n):  # the whole cache: nothing else may have been written
            one, other = ([x[i].nan_to_num() for x in pair] for pair in (written, (keys, values)))
            if reason := wrong(f"cache of turn_and_attend ({mode})", one, other):
                return reason
    return None


def check_pages(
    module: nvrtc.Module, attention: Sequence[AttentionShape], dtype: torch.dtype = torch.bfloat16
) -> str | None:  # fmt: skip
    """Return the error of attention over pages on this device, or None: it has the bits of attention over rows in one piece.

    attention: of each kind of layer that lies in pages. Its kernels are compiled here.
    """
    random = random_values(module.device, 2, dtype)
    n, length = 2, 4 * PAGE_TOKENS + 40
    pool = PagePool(10 * PAGE_TOKENS, n, length, module.device)
    pages = [pool.take(length)[::-1] for _ in range(n)]
    for row in range(n):
        pool.bind(row, pages[row])
    at = pool.table.written(torch.arange(length, device=module.device).expand(n, -1), pool.table.table).flatten()
    for shape in (AttentionShape(*one) for one in attention):
        heads, kv_heads, dim = shape[:3]
        whole = [random(n, kv_heads, length, dim) for _ in range(2)]
        paged = [torch.full((kv_heads, pool.places, dim), math.nan, dtype=dtype, device=module.device) for _ in range(2)]
        for to, source in zip(paged, whole, strict=True):
            to[:, at] = source.transpose(0, 1).flatten(1, 2)
        (cos, sin), scale, sinks = _turn_of(shape, n, random), dim**-0.5, random(heads) if shape.has_sinks else None
        norms = _norms_of(shape, random)
        positions = torch.tensor([length - 1, 2 * PAGE_TOKENS], device=module.device)
        for mode, parts in (("own", 2), ("shared", 0)):
            qkv, q = random(n, (heads * norms.q_step + parts * kv_heads) * dim), random(n, heads, dim)
            outs = [torch.full((n, heads * dim), math.nan, dtype=dtype, device=module.device) for _ in range(2)]
            for (keys, values), out, table in ((whole, outs[0], None), (paged, outs[1], pool.table)):
                rope_and_attention(
                    qkv, heads, norms, cos, sin, keys, values, positions, positions, scale, None, out, q, None, module,
                    mode=mode, pages=table, sinks=sinks, growth=shape.growth,
                )  # fmt: skip
            same = [(outs[0], outs[1])]
            same += [(a, b[:, at].view(kv_heads, n, length, dim).transpose(0, 1)) for a, b in zip(whole, paged, strict=True)]
            if not all(torch.equal(a, b) for a, b in same):
                return f"attention over pages ({mode}), {heads} heads over {kv_heads}, {dim} each: other bits"
    return None


def measure(
    module: nvrtc.Module, time_us: Callable[[Callable[[], None]], float], *, width: int, mlp: int,
    attention: Sequence[AttentionShape], dtype: torch.dtype = torch.bfloat16, n: int = 1, places: int = 1024,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return name -> (the kernel's, torch's) microseconds for one layer's sizes, n rows and full caches of `places`.

    time_us: takes a function, and returns the time of one run, best in a CUDA graph. width: of the hidden state. mlp:
    of one gate. attention: of each kind of layer.
    """
    random = random_values(module.device, 0, dtype)
    times: dict[str, tuple[float, float]] = {}

    def pair(name: str, run: Callable[..., None]) -> None:
        times[name] = time_us(lambda: run(module=module)), time_us(lambda: run(module=None))

    y, h, x, weight = random(n, width), random(n, width), random(n, width), random(width)
    both, out = random(n, 2 * mlp), random(n, mlp)
    pair("add_norm", partial(add_norm, y, h, weight, weight, 1e-6, None, h, x))
    pair("gated", partial(gated, both[:, :mlp], both[:, mlp:], out, "gelu_tanh"))
    positions = torch.full((n,), places - 1, device=module.device)
    for kind in (AttentionShape(*one) for one in attention):
        heads, kv_heads, dim = kind[:3]
        shape = f"{heads}/{kv_heads} x {dim}"
        if f"rope_write {shape}" in times:  # of one size, but it turns or norms in another way
            shape = f"{shape} (as {kind[3:]})"
        keys, values = random(n, kv_heads, places, dim), random(n, kv_heads, places, dim)
        qkv = random(n, (heads * (1 + kind.is_gated) + 2 * kv_heads) * dim)
        q, attended = random(n, heads, dim), random(n, heads * dim)
        cos, sin = _turn_of(kind, n, random)
        scratch = torch.empty(scratch_values(n, heads, kv_heads, dim, places, module.multiprocessors), device=module.device)
        norms = _norms_of(kind, random)
        rope = partial(rope_write, qkv, heads, kv_heads, dim, norms, cos, sin, keys, values, positions, q)
        both_at_once = partial(
            rope_and_attention, qkv, heads, norms, cos, sin, keys, values, positions, positions, dim**-0.5, None, attended, q,
            scratch,
        )  # fmt: skip
        look = partial(attend, q, keys, values, positions, dim**-0.5, None, attended, scratch)
        pair(f"rope_write {shape}", rope)
        pair(f"attend {shape}, {places} places", look)
        pair(f"both at once {shape}, {places} places", both_at_once)
    return times


def graph_us(run: Callable[[], object], device: torch.device, *, repeat: int = 3, calls: int = 1) -> float:
    """Return the microseconds of the work that `run` queues, inside a CUDA graph, where launching costs next to nothing: the
    shortest of a few replays of this many calls."""

    def several() -> None:
        for _ in range(calls):
            run()

    with torch.cuda.device(device):
        run()
        torch.cuda.synchronize()
        # Not torch.cuda.graph: that collects garbage first, which takes longer than all the rest.
        with side_stream(device) as side:
            graph, _ = GraphCache().record(side, several)
        graph.replay()
        times = []
        for _ in range(repeat):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(device))
            graph.replay()
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
    return min(times) / calls


def pair_us(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, *, calls: int = 1, most: int = 4
) -> tuple[float, float]:  # fmt: skip
    """Return the microseconds of two ways. Where the first is no faster, both are measured again, up to `most` times, and the
    shortest times count: another program on the card can only lengthen them. Of two equal ways the first mostly wins."""
    own = other = float("inf")
    for _ in range(most):
        own, other = min(own, graph_us(ours, device, calls=calls)), min(other, graph_us(theirs, device, calls=calls))
        if own < other:
            break
    return own, other
