"""Which kernels compute what is between the products of a decode step: norms, rotary embedding, attention and gates?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.cuda import nvrtc
from trimtab.engine.kernels import layouts
from trimtab.engine.kernels.plain_attention import Growth, Scores, attention_torch, norm_torch, turned_torch
from trimtab.engine.kv.sequence import PageTable
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

ACTIVATIONS = ("gelu_tanh", "silu", "gelu")
# What a layer's products have in addition to queries -> how many parts: keys and values, keys that are both, none.
MODES = {"own": 2, "k_is_v": 1, "shared": 0}
# Where a norm rounds: behind its weight (Gemma 3n and 4), in front of it too (Llama, Qwen), or as the first, with a weight that
# says how much more than 1 it is (Gemma 2 and 3). The order is the kernels'.
FORMS = ("inside", "after", "plus_one")
MAX_WIDTH = 8192
MAX_HEAD = 512
MAX_GROUP = 16
# As in the kernels: places of a tile, splits of a row, splits x queries that one block may combine.
_TILE = 32
_MAX_SPLITS = 128
_MAX_SHARES = 512
# The bytes that a block combining alone reads in about the time of a second launch.
_COMBINE_BYTES = 96 * 1024
_COUNTERS = 4096
# How heads turn: values half of the turning part apart, neighbours, and as the first with float32 cos and sin, rounded once. The
# names are the kernels'.
ROPES = ("write", "pairs", "wide")
# `dependent` of each function: as `nvrtc.Module.launch` has it (None: the module's `overlap`). Attention does not wait for tensors
# older than the step: kernels that write these must not overlap later ones.
NAMES = (
    "add_norm", "route_input", "route_choose", "gated_1", "gated_8", "add_gated_1", "add_gated_8",
    *(f"rope_{way}_{v}" for way in ROPES for v in (1, 2, 4, 8)), "turns",
)  # fmt: skip


class AttentionShape(NamedTuple):
    """One kind of attention. norm: the form of the norms of queries and keys, None without; norms_values: whether values are
    normed, without a weight. rotary: the first values of a head, which turn, None for all. is_gated: a gate of its
    size lies behind each head of queries, and is not read here. turn: one of ROPES. has_sinks, growth: as `Scores` has them."""

    heads: int
    kv_heads: int
    dim: int
    norm: str | None = "inside"
    norms_values: bool = True
    rotary: int | None = None
    is_gated: bool = False
    turn: str = "write"
    has_sinks: bool = False
    growth: Growth | None = None


@dataclass(frozen=True)
class HeadNorms:
    """The norms of a layer's heads. q, k: weights [D], None for those without a norm; values: whether they are normed, without a
    weight; form: one of FORMS. is_gated: as in `AttentionShape`. in_pairs: its turn is pairs."""

    q: Tensor | None
    k: Tensor | None
    eps: float
    form: str = "inside"
    values: bool = True
    is_gated: bool = False
    in_pairs: bool = False

    @property
    def q_step(self) -> int:
        """How many heads' sizes lie from one head of queries to the next."""
        return 2 if self.is_gated else 1

    @property
    def number(self) -> int:
        """The kernels' number of the norms of queries and keys."""
        return len(FORMS) if self.q is None else FORMS.index(self.form)


def source(name: str = "fused.cu") -> str:
    """Return one of the two sources as it is compiled."""
    return nvrtc.source("values.cuh") + nvrtc.source(name)


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError if that is not possible here.

    Attention is compiled for each kind of layer when it is first needed, which must not be within a capture: the pass in front of
    one does it, `selfcheck.check` for the kinds it is given, `load_attention` for one. Each function launches one kernel where
    shapes suit (`why_not`), else it computes the same in torch. Kernels round where transformers 5.23.0 rounds, except in
    attention, which rounds once. A module serves one stream at a time: its launches share counters.
    """
    module = nvrtc.Module(source(), device=device, name="fused.cu")
    prepare(module)
    return module


def prepare(module: nvrtc.Module) -> None:
    """Give a module the counters of its launches, which every launch leaves at zero."""
    module.scratch["arrived"] = torch.zeros(_COUNTERS, dtype=torch.int32, device=module.device)


def attention_options(shape: AttentionShape, dtype: torch.dtype, *, turn: bool = False, is_paged: bool = False) -> tuple[str, ...]:
    """Return the compiler options of attend.cu for this kind of layer. turn: norms and rotation are a part of it. is_paged: keys
    and values lie in pages."""
    heads, kv_heads, dim, norm, norms_values, rotary, is_gated, _, has_sinks, growth = shape
    size = next(size for size in (128, 256, 512) if size >= dim)
    paged: tuple[str, ...] = (f"-DPAGE={PAGE_TOKENS}",) if is_paged else ()
    if turn and (norm, norms_values, dim if rotary is None else rotary) != ("inside", True, dim):
        number = len(FORMS) if norm is None else FORMS.index(norm)
        paged += (f"-DNORMS={number}", f"-DVALUES={norms_values:d}", f"-DROTARY={dim if rotary is None else rotary}")
    if has_sinks:
        paged += ("-DSINKS",)
    if growth is not None:
        paged += (f"-DGROWTH={float(growth.beta)!r}f", f"-DGROWS_AT={growth.length}.f")
    return (
        f"-DDIM={size}", f"-DHEAD={dim}", f"-DGROUP={heads // kv_heads}", f"-DHALF={int(dtype == torch.float16)}",
        f"-DROTATES={int(turn)}", *(("-DQ_STEP=2",) if turn and is_gated else ()), *paged,
    )  # fmt: skip


def load_attention(module: nvrtc.Module, options: tuple[str, ...]) -> nvrtc.Module:
    """Return the module of one kind of layer, compiled where this is the first use. Errors: DeviceError."""
    if options not in module.attention:
        module.attention[options] = nvrtc.Module(source("attend.cu"), device=module.device, options=options, name="attend.cu")
    return module.attention[options]


def why_not(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, width: int = 8) -> str | None:
    """Return why a layer of these shapes has no kernels (torch does its part), None if it has."""
    if (why := layouts.why_not_type(dtype)) is not None:
        return why
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return f"{heads} heads over {kv_heads}: not whole groups of up to {MAX_GROUP}"
    if dim % 16 or dim > MAX_HEAD:
        return f"a head of {dim} values is not a multiple of 16 up to {MAX_HEAD}"
    if width % 8 or width > MAX_WIDTH:
        return f"a width of {width} is not a multiple of 8 up to {MAX_WIDTH}"
    return None


def _fits(x: Tensor | None, like: Tensor, values: int) -> bool:
    """Whether a kernel may read x in pieces of `values`: same type, neighbours in memory, aligned rows."""
    if x is None:
        return True
    aligned = x.data_ptr() % (2 * values) == 0 and all(step % values == 0 for step in x.stride()[:-1])
    return x.dtype == like.dtype and x.stride(-1) == 1 and aligned


# As in the kernels: the unit of prefetches.
_PIECE_BYTES = 8192
MOST_AHEAD = 4


def ahead_arguments(ahead: Sequence[Tensor]) -> list[nvrtc.Argument]:
    """Return the last arguments of kernels that prefetch weights into L2 for a later one: up to four whole tensors."""
    assert len(ahead) <= MOST_AHEAD and all(one.is_contiguous() for one in ahead)
    arguments: list[nvrtc.Argument] = []
    for one in ahead:
        arguments += [one, one.numel() * one.element_size() // _PIECE_BYTES] if one.data_ptr() % 16 == 0 else [None, 0]
    return arguments + [None, 0] * (MOST_AHEAD - len(ahead))


# Norms ---------------------------------------------------------------------------------------------------------------


def add_norm(
    y: Tensor | None, residual: Tensor, post_weight: Tensor | None, next_weight: Tensor | None, eps: float,
    scalar: Tensor | None, out_h: Tensor | None, out_x: Tensor | None, module: nvrtc.Module | None = None, *,
    dependent: bool | None = None, form: str = "inside",
) -> None:  # fmt: skip
    """Write h = (residual + norm(y) * post_weight) * scalar to out_h and norm(h) * next_weight to out_x.

    Shapes: y, residual, out_h, out_x [n, D]; weights [D]; scalar [1]. No y: h = residual * scalar. No post_weight: y is added as
    it is. No scalar, no next_weight: 1. form: of both norms. An output may be one of the inputs.
    """
    tensors = (y, residual, post_weight, next_weight, scalar, out_h, out_x)
    n, width = residual.shape
    if module is None or not layouts.takes(module, residual) or width % 8 or width > MAX_WIDTH:
        _add_norm_torch(y, residual, post_weight, next_weight, eps, scalar, out_h, out_x, form)
        return
    if not all(_fits(x, residual, 1 if x is scalar else 8) for x in tensors):
        _add_norm_torch(y, residual, post_weight, next_weight, eps, scalar, out_h, out_x, form)
        return
    module.launch(
        "add_norm", (n,), (-(-width // 256) * 32,),
        [
            y, 0 if y is None else y.stride(0), residual, residual.stride(0), post_weight, next_weight, scalar,
            out_h, 0 if out_h is None else out_h.stride(0), out_x, 0 if out_x is None else out_x.stride(0),
            width, float(eps), FORMS.index(form), layouts.half(residual),
        ],
        dependent=dependent,
    )  # fmt: skip


def _add_norm_torch(
    y: Tensor | None, residual: Tensor, post_weight: Tensor | None, next_weight: Tensor | None, eps: float,
    scalar: Tensor | None, out_h: Tensor | None, out_x: Tensor | None, form: str,
) -> None:  # fmt: skip
    h = residual
    if y is not None:
        h = residual + (y if post_weight is None else norm_torch(y, post_weight, eps, form))
    if scalar is not None:
        h = h * scalar
    if out_x is not None:
        normed = norm_torch(h, next_weight, eps, form)
        if out_h is not None:
            out_h.copy_(h)
        out_x.copy_(normed)
    elif out_h is not None:
        out_h.copy_(h)


# Rotation and the cache ----------------------------------------------------------------------------------------------


def _way(norms: HeadNorms, cos: Tensor, like: Tensor) -> str:
    """Return the kernel's name of how heads turn."""
    return "pairs" if norms.in_pairs else "wide" if cos.dtype == torch.float32 and like.dtype in layouts.TYPES else "write"


def _turns_fit(norms: HeadNorms, cos: Tensor, sin: Tensor, like: Tensor, values: int) -> bool:
    """Whether a kernel may read cos and sin in pieces of `values`."""
    if _way(norms, cos, like) == "wide":
        return cos.stride(-1) == sin.stride(-1) == 1 and sin.dtype == cos.dtype
    return _fits(cos, like, values) and _fits(sin, like, values)


def _values_a_lane(dim: int) -> int:
    return next(count for count in (1, 2, 4, 8) if count * 64 >= dim or count == 8)


def rope_write(
    qkv: Tensor, heads: int, kv_heads: int, dim: int, norms: HeadNorms, cos: Tensor, sin: Tensor, keys: Tensor | None,
    values: Tensor | None, places: Tensor | None, q_out: Tensor, *, module: nvrtc.Module | None = None, mode: str = "own",
    dependent: bool | None = None,
) -> None:  # fmt: skip
    """Write normed and rotated queries to q_out, and keys and values to their places in the cache.

    Shapes: qkv [n, (Hq + Hkv + Hkv) * D] (queries, keys, values; k_is_v: without values; shared: queries alone), cos and sin
    [n, R] for the first R values of a head, keys and values [rows, Hkv, L, D] contiguous, places [n] int64 of 0..L-1, q_out
    [n, Hq, D]. Row i of qkv writes to row i of the cache. mode: "own", "shared" (no cache write), "k_is_v" (values are the keys
    before their norm). Values are not rotated.
    """
    assert mode in MODES, mode
    own = mode != "shared"
    assert (keys is not None and values is not None and places is not None) or not own
    assert qkv.shape[1] == (heads * norms.q_step + MODES[mode] * kv_heads) * dim
    v = _values_a_lane(dim)
    cache_fits = not own or (keys is not None and values is not None and keys.is_contiguous() and values.is_contiguous())
    tensors = (qkv, norms.q, norms.k, keys, values, q_out)
    if (
        module is None or not layouts.takes(module, qkv) or why_not(heads, kv_heads, dim, qkv.dtype) or not cache_fits
        or not q_out.is_contiguous() or not all(_fits(x, qkv, v) for x in tensors) or cos.shape[1] // 2 % v
        or not _turns_fit(norms, cos, sin, qkv, v)
    ):  # fmt: skip
        _rope_write_torch(qkv, heads, kv_heads, dim, norms, cos, sin, keys, values, places, q_out, mode)
        return
    own_queries, own_keys, own_values = _parts(qkv, heads * norms.q_step, kv_heads, dim, mode)
    _launch_rope(module, v, own_queries, own_keys, own_values, dim, norms, cos, sin, keys, values, places, q_out, mode, dependent)


def _parts(qkv: Tensor, heads: int, kv_heads: int, dim: int, mode: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the queries, keys and values of products that lie side by side."""
    ends = [heads * dim, (heads + kv_heads) * dim]
    keys = None if mode == "shared" else qkv[:, ends[0] : ends[1]]
    return qkv[:, : ends[0]], keys, qkv[:, ends[1] :] if mode == "own" else None


def _launch_rope(
    module: nvrtc.Module, v: int, own_queries: Tensor, own_keys: Tensor | None, own_values: Tensor | None, dim: int,
    norms: HeadNorms, cos: Tensor, sin: Tensor, keys: Tensor | None, values: Tensor | None, places: Tensor | None,
    q_out: Tensor, mode: str, dependent: bool | None,
) -> None:  # fmt: skip
    """keys, values [rows, Hkv, L, D]; places None: the first place of each row."""
    n, heads = own_queries.shape[0], own_queries.shape[1] // dim // norms.q_step
    kv_heads = 1 if own_keys is None else own_keys.shape[1] // dim
    steps = (0, 0, 0) if keys is None else (keys.stride(0), keys.stride(1), keys.shape[2])
    module.launch(
        f"rope_{_way(norms, cos, own_queries)}_{v}", (heads + MODES[mode] * kv_heads, n), (32,),
        [
            own_queries, own_queries.stride(0), own_keys, own_values, 0 if own_keys is None else own_keys.stride(0), heads,
            kv_heads, dim, norms.q, norms.k, float(norms.eps), cos, cos.stride(0), sin, sin.stride(0), keys, values,
            nvrtc.Long(steps[0]), nvrtc.Long(steps[1]), steps[2], places, q_out, int(mode == "k_is_v"), cos.shape[1],
            norms.number, int(norms.values), norms.q_step * dim, layouts.half(own_queries),
        ],
        dependent=dependent,
    )  # fmt: skip


def turn(
    queries: Tensor, keys: Tensor | None, values: Tensor | None, dim: int, norms: HeadNorms, cos: Tensor, sin: Tensor,
    q_out: Tensor, k_out: Tensor | None, v_out: Tensor | None, *, module: nvrtc.Module | None = None,
    dependent: bool | None = None,
) -> None:  # fmt: skip
    """Write the normed and rotated queries and keys, and normed values, of n tokens of one prompt, as attention reads them.

    Shapes: queries [n, Hq * D], keys, values [n, Hkv * D] (no values: they are the keys before their norm; no keys: queries
    alone), cos and sin [n, R], q_out [n, Hq, D], k_out and v_out [Hkv, n, D]. Rows of inputs may be strided.
    """
    mode = "shared" if keys is None else "k_is_v" if values is None else "own"
    heads = queries.shape[1] // dim // norms.q_step
    kv_heads = heads if keys is None else keys.shape[1] // dim
    v = _values_a_lane(dim)
    # A place of a token is a row of the cache here: [n, Hkv, 1, D].
    k_rows, v_rows = (None if one is None else one.transpose(0, 1)[:, :, None] for one in (k_out, v_out))
    tensors = (queries, keys, values, norms.q, norms.k, q_out, k_out, v_out)
    if (
        module is None or not layouts.takes(module, queries) or why_not(heads, kv_heads, dim, queries.dtype)
        or not q_out.is_contiguous() or not all(_fits(x, queries, v) for x in tensors) or cos.shape[1] // 2 % v
        or not _turns_fit(norms, cos, sin, queries, v)
        or (keys is not None and values is not None and keys.stride(0) != values.stride(0))
        or (k_out is not None and v_out is not None and k_out.stride() != v_out.stride())
    ):  # fmt: skip
        given = [one for one in (queries, keys, values) if one is not None]
        places = None if k_out is None else torch.zeros(len(queries), dtype=torch.long, device=queries.device)
        _rope_write_torch(torch.cat(given, dim=1), heads, kv_heads, dim, norms, cos, sin, k_rows, v_rows, places, q_out, mode)
        return
    _launch_rope(module, v, queries, keys, values, dim, norms, cos, sin, k_rows, v_rows, None, q_out, mode, dependent)


def _rope_write_torch(
    qkv: Tensor, heads: int, kv_heads: int, dim: int, norms: HeadNorms, cos: Tensor, sin: Tensor, keys: Tensor | None,
    values: Tensor | None, places: Tensor | None, q_out: Tensor, mode: str,
) -> None:  # fmt: skip
    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if norms.q is None else norm_torch(x, weight, norms.eps, norms.form)

    n = qkv.shape[0]
    step = norms.q_step
    queries = qkv[:, : heads * dim * step].view(n, heads, step * dim)[..., :dim]
    q_out.copy_(turned_torch(normed(queries, norms.q), cos, sin, in_pairs=norms.in_pairs))
    if mode == "shared" or keys is None or values is None:
        return
    own, *more = qkv[:, heads * dim * step :].split(kv_heads * dim, dim=1)
    own = own.view(n, kv_heads, dim)
    other = own if mode == "k_is_v" else more[0].view(n, kv_heads, dim)
    rows = torch.arange(n, device=qkv.device)
    keys[rows, :, places] = turned_torch(normed(own, norms.k), cos, sin, in_pairs=norms.in_pairs)
    values[rows, :, places] = norm_torch(other, None, norms.eps) if norms.values else other


def turns(
    positions: Tensor, kinds: Sequence[tuple[Tensor, float, Tensor, Tensor]], module: nvrtc.Module | None = None, *,
    dependent: bool | None = None,
) -> None:  # fmt: skip
    """Write cos and sin of each row's position for one or two kinds of layers. positions [n] int64; a kind is (inv_freq [R / 2]
    float32, the factor of cos and sin, cos and sin [n, R] to write)."""
    assert 1 <= len(kinds) <= 2
    if module is None or not layouts.takes(module, kinds[0][2]) or any(kind[0].numel() > 256 for kind in kinds):
        for inv_freq, factor, cos, sin in kinds:
            angles = torch.cat((positions[:, None].float() * inv_freq,) * 2, dim=-1)
            cos.copy_(angles.cos() * factor)
            sin.copy_(angles.sin() * factor)
        return
    given: list[nvrtc.Argument] = [positions]
    for inv_freq, factor, cos, sin in (*kinds, *[kinds[0]] * (2 - len(kinds))):
        assert inv_freq.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        given += [inv_freq, inv_freq.numel(), float(factor), cos, sin]
    module.launch("turns", (len(kinds), positions.shape[0]), (256,), [*given, layouts.half(kinds[0][2])], dependent=dependent)


# Attention -----------------------------------------------------------------------------------------------------------


def scratch_values(count: int, heads: int, kv_heads: int, dim: int, places: int, multiprocessors: int) -> int:
    """Return how many float32 values `attend` needs in addition to its output, for a cache of up to this many places."""
    splits = _splits(count, heads, kv_heads, dim, places, multiprocessors)
    return count * heads * splits * (dim + 2) if splits > 1 else 0


def _splits(count: int, heads: int, kv_heads: int, dim: int, places: int, multiprocessors: int) -> int:
    """Return over how many blocks the places of a row and head are split: about as many as the card runs at once, or up to a
    quarter fewer where one block can then combine their parts without a second launch."""
    resident = multiprocessors * (1 if dim > 256 else 3 if dim > 128 else 4)  # as their registers allow
    wanted = max(1, min(-(-places // _TILE), _MAX_SPLITS, resident // (count * kv_heads)))
    group = heads // kv_heads
    combined = min(_COMBINE_BYTES // (group * dim * 4), _MAX_SHARES // group)
    return combined if wanted > combined >= wanted * 3 // 4 else wanted


def attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float, softcap: float | None, out: Tensor,
    scratch: Tensor | None, module: nvrtc.Module | None = None, *, dependent: bool | None = None,
    pages: PageTable | None = None, sinks: Tensor | None = None, growth: Growth | None = None,
) -> None:  # fmt: skip
    """Write attention of each row over places 0..min(positions[i], L-1) of its cache row to out.

    Shapes: q [n, Hq, D], keys and values [rows, Hkv, L, D] with rows >= n, positions [n] int64, out [n, Hq * D], scratch float32
    with `scratch_values` places or None (made here). With `pages` keys and values are [Hkv, P, D], and a row's L places are where
    its table says. A full ring is read as a whole. softcap: scores become softcap * tanh(score / softcap). sinks, growth: as
    `Scores`. Places beyond a row's own are never read. Places are split as in arXiv 2311.01282 (Flash-Decoding). The kernel keeps
    scores, softmax and output in float32; weights enter the second product as two numbers, 2^-16 off in bfloat16.
    """
    heads, dim = q.shape[1:]
    if not _may_attend(q, heads, dim, keys, values, out, module) or not q.is_contiguous() or not _fits(sinks, q, 1):
        if pages is not None:
            keys, values = (pages.rows(x, q.shape[0]) for x in (keys, values))
        _attend_torch(q, keys, values, positions, Scores(scaling, softcap, sinks, growth), out)
        return
    given: list[nvrtc.Argument] = [q, heads * dim, None, None, 0.0, None, 0, None, 0, 0]
    _launch_attend(
        given, AttentionShape(heads, keys.shape[-3], dim, has_sinks=sinks is not None, growth=growth), keys, values, positions,
        Scores(scaling, softcap, sinks), out, scratch, module, dependent, turn=False, pages=pages,
    )  # fmt: skip


def rope_and_attention(
    qkv: Tensor, heads: int, norms: HeadNorms, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, places: Tensor,
    positions: Tensor, scaling: float, softcap: float | None, out: Tensor, queries: Tensor, scratch: Tensor | None,
    module: nvrtc.Module | None = None, *, mode: str = "own", dependent: bool | None = None, ahead: Sequence[Tensor] = (),
    pages: PageTable | None = None, sinks: Tensor | None = None, growth: Growth | None = None,
) -> None:  # fmt: skip
    """Do `rope_write` and then `attend`, in one launch where the shapes suit; queries [n, Hq, D] are for two.

    places: positions modulo L, which one launch works out itself. In one, a block turns the queries that it needs; the one whose
    share of the cache has a row's new place writes it. With mode "shared", an earlier layer of the step may have written the row's
    place in `places`, and no other. ahead: up to four tensors that a later kernel reads, prefetched into L2 at the same time.
    """
    kv_heads, dim = keys.shape[-3], keys.shape[-1]
    size = attention_options(AttentionShape(heads, kv_heads, min(dim, MAX_HEAD)), qkv.dtype)[0]
    values_a_lane = int(size.partition("=")[2]) // 64
    suits = (
        _may_attend(qkv, heads, dim, keys, values, out, module) and (dim // 2) % values_a_lane == 0 and not norms.in_pairs
        and cos.shape[1] // 2 % values_a_lane == 0
        and all(_fits(x, qkv, values_a_lane) for x in (qkv, norms.q, norms.k, cos, sin)) and _fits(sinks, qkv, 1)
    )  # fmt: skip
    if not suits:
        own, new_keys, new_values, at = mode != "shared", keys, values, places
        if own and pages is not None:  # written to one place a row, and from there to its page
            new_keys, new_values = (x.new_empty(qkv.shape[0], kv_heads, 1, dim) for x in (keys, values))
            at = torch.zeros_like(places)
        rope_write(
            qkv, heads, kv_heads, dim, norms, cos, sin, new_keys if own else None,
            new_values if own else None, at, queries, module=module, mode=mode, dependent=dependent,
        )  # fmt: skip
        if own and pages is not None:
            for pool, new in ((keys, new_keys), (values, new_values)):
                pool[:, pages.written(places)] = new[:, :, 0].transpose(0, 1)
        attend(
            queries, keys, values, positions, scaling, softcap, out, scratch, module, dependent=dependent, pages=pages,
            sinks=sinks, growth=growth,
        )  # fmt: skip
        return
    given: list[nvrtc.Argument] = [
        qkv, qkv.stride(0), norms.q, norms.k, float(norms.eps), cos, cos.stride(0), sin, sin.stride(0),
        {"shared": 0, "own": 1, "k_is_v": 2}[mode],
    ]  # fmt: skip
    norm, rotary = None if norms.q is None else norms.form, None if cos.shape[1] == dim else cos.shape[1]
    shape = AttentionShape(
        heads, kv_heads, dim, norm, norms.values, rotary, norms.is_gated, has_sinks=sinks is not None, growth=growth
    )  # fmt: skip
    _launch_attend(
        given, shape, keys, values, positions, Scores(scaling, softcap, sinks), out, scratch, module, dependent, turn=True,
        ahead=ahead, pages=pages,
    )  # fmt: skip


def _may_attend(
    q: Tensor, heads: int, dim: int, keys: Tensor, values: Tensor, out: Tensor, module: nvrtc.Module | None
) -> bool:  # fmt: skip
    kv_heads = keys.shape[-3]
    return (
        module is not None and layouts.takes(module, q) and why_not(heads, kv_heads, dim, q.dtype) is None
        and keys.is_contiguous() and values.is_contiguous() and out.is_contiguous()
        and q.shape[0] * kv_heads <= _COUNTERS and all(_fits(x, q, 8) for x in (q, keys, values, out))
    )  # fmt: skip


def _launch_attend(
    given: list[nvrtc.Argument], shape: AttentionShape, keys: Tensor, values: Tensor, positions: Tensor, scores: Scores,
    out: Tensor, scratch: Tensor | None, module: nvrtc.Module | None, dependent: bool | None, *, turn: bool,
    ahead: Sequence[Tensor] = (), pages: PageTable | None = None,
) -> None:  # fmt: skip
    assert module is not None
    heads, kv_heads, dim, *_ = shape
    n, places = out.shape[0], keys.shape[-2] if pages is None else pages.places
    splits = _splits(n, heads, kv_heads, dim, places, module.multiprocessors)
    needed = scratch_values(n, heads, kv_heads, dim, places, module.multiprocessors)
    if needed and (scratch is None or scratch.numel() < needed):
        scratch = torch.empty(needed, dtype=torch.float32, device=out.device)
    group = heads // kv_heads
    here = splits * group * dim * 4 <= _COMBINE_BYTES and splits * group <= _MAX_SHARES
    options = attention_options(shape, out.dtype, turn=turn, is_paged=pages is not None)
    table: list[nvrtc.Argument] = []
    if pages is not None:
        table = [pages.table, pages.table.stride(0), nvrtc.Long(keys.shape[-2])]
    if scores.sinks is not None:
        table.append(scores.sinks)
    own = load_attention(module, options)
    dependent = module.overlap if dependent is None else dependent
    parts = scratch if needed else None
    sums = None if not needed or scratch is None else scratch[n * heads * splits * dim :]
    own.launch(
        "attend", (splits, kv_heads, n), (int(options[0].partition("=")[2]) // 2,),
        [
            *given, keys, values, positions, parts, sums, module.scratch["arrived"], out, places, float(scores.scale),
            float(scores.softcap or 0.0), int(here), *table, *ahead_arguments(ahead),
        ],
        dependent=dependent,
    )  # fmt: skip
    if needed and not here:
        own.launch(
            "attend_combine", (-(-dim // 128), heads, n), (128,),
            [positions, parts, sums, out, places, splits],
            dependent=dependent,
        )  # fmt: skip


def _attend_torch(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scores: Scores, out: Tensor) -> None:
    n, heads, dim = q.shape
    length = keys.shape[2]
    if q.device.type == "cpu":  # elsewhere the length stays on the device
        length = min(length, int(positions.max()) + 1)
    mask = (torch.arange(length, device=q.device) <= positions[:, None])[:, None, None]
    k, v = (x[:n, :, :length] for x in (keys, values))
    if scores.growth is not None:
        q = q * scores.growth.of(positions, q.dtype)[:, None, None]
    out.copy_(attention_torch(q[:, :, None], k, v, mask, scores).reshape(n, heads * dim))


# Gates ---------------------------------------------------------------------------------------------------------------


def gated(
    gate: Tensor, up: Tensor, out: Tensor, kind: str, module: nvrtc.Module | None = None, *, dependent: bool | None = None
) -> None:
    """Write act(gate) * up. Shapes: [n, I] each, rows may be strided. kind: one of ACTIVATIONS."""
    assert kind in ACTIVATIONS, kind
    n, width = gate.shape
    if module is None or not layouts.takes(module, gate) or not all(_fits(x, gate, 1) for x in (gate, up, out)):
        gate = gate.contiguous()  # in float32, torch has other rounding over strided rows
        act = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate=_GELU[kind])
        out.copy_(act * up)
        return
    v = 8 if width % 8 == 0 and all(_fits(x, gate, 8) for x in (gate, up, out)) else 1
    module.launch(
        f"gated_{v}", (-(-width // (128 * v)), n), (128,),
        [gate, gate.stride(0), up, up.stride(0), out, out.stride(0), width, ACTIVATIONS.index(kind), layouts.half(gate)],
        dependent=dependent,
    )  # fmt: skip


def add_gated(y: Tensor, made: Tensor, gate: Tensor | None, module: nvrtc.Module | None = None) -> Tensor:
    """Add made, or with a gate sigmoid(gate) * made, to y, and return y. Shapes: [n, D], gate [n, 1]; rows may be strided."""
    given = (made, y) if gate is None else (gate, made, y)
    if module is None or not layouts.takes(module, y) or not all(_fits(x, y, 1) for x in given):
        return y.add_(made if gate is None else torch.sigmoid(gate) * made)
    n, width = y.shape
    v = 8 if width % 8 == 0 and all(_fits(x, y, 8) for x in given[-2:]) else 1
    module.launch(
        f"add_gated_{v}", (-(-width // (128 * v)), n), (128,),
        [y, y.stride(0), made, made.stride(0), gate, 0 if gate is None else gate.stride(0), width, layouts.half(y)],
    )  # fmt: skip
    return y


_GELU = {"gelu_tanh": "tanh", "gelu": "none"}
