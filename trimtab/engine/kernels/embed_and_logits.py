"""Which kernels compute both ends of a decode step: embedding rows and per-layer inputs, logits and argmax?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.cuda import nvrtc
from trimtab.engine.kernels import attention_and_norms, layouts, selfcheck

MAX_LAYER = 256  # values of one layer's own input
NAMES = ("rows", "per_layer", "likeliest_8", "likeliest_1")
_MAX_ROWS = 64  # of `argmax_logits`, whose blocks find each other by a counter a row
# A check at load must not need memory that the plan does not know of: few rows of a table, and whole rows of scores once.
_CHECKED_IDS, _CHECKED_SCORES = 64, 2**14


@dataclass(frozen=True)
class Sizes:
    """The sizes of both ends of a model's step. width: of the hidden state. layers, per_layer: of each layer's own input,
    0 without. softcap: of the scores, None without. norm: the form of the first layer's norm."""

    vocabulary: int
    width: int
    softcap: float | None = None
    layers: int = 0
    per_layer: int = 0
    norm: str = "inside"


@dataclass(frozen=True)
class Lookup:
    """Rows of one table: out [n, D] = table [V, D] of each id, times scale (a value of the table's own type).

    in_order: row i of the table belongs to row i, for any id.
    """

    table: Tensor
    scale: float
    out: Tensor
    in_order: bool = False


def source() -> str:
    """Return the source as it is compiled."""
    return nvrtc.source("values.cuh") + nvrtc.source("ends.cu")


def load(device: torch.device | str) -> nvrtc.Module:
    """Compile the kernels for a device. Errors: DeviceError if that is not possible here. As in attention_and_norms.py each
    function has a path in torch; these equal transformers' Gemma 4 modules bit for bit (5.6.2 to 5.23.0,
    models/gemma4/modeling_gemma4.py). A module serves one stream at a time: its launches share counters."""
    module = nvrtc.Module(source(), device=device, name="ends.cu")
    prepare(module)
    return module


def prepare(module: nvrtc.Module) -> None:
    """Give a module the counters that the blocks of a launch share, which every launch leaves at zero."""
    module.scratch["best"] = torch.zeros(_MAX_ROWS, dtype=torch.int64, device=module.device)
    module.scratch["arrived"] = torch.zeros(_MAX_ROWS, dtype=torch.int32, device=module.device)


# In front of the first layer ------------------------------------------------------------------------------------------


def rows(
    ids: Tensor, lookups: Sequence[Lookup], module: nvrtc.Module | None = None, *,
    norm: tuple[Tensor | None, float, Tensor] | None = None, ring: tuple[Tensor, int, Tensor] | None = None,
    dependent: bool | None = None, form: str = "inside",
) -> None:  # fmt: skip
    """Write the scaled rows of ids [n] int64 of one or two tables.

    norm: (weight [D] or None for 1, eps, out [n, D]): norm(row of the first table) * weight is written too, in this form. ring:
    (positions [n], places, out [n]) int64: position % places is written too. An id that a table has no row for gives values
    that are not numbers from the kernel, and is an error in torch (IndexError on a CPU).
    """
    like, widths = lookups[0].out, [one.table.shape[1] for one in lookups]
    tensors = [x for one in lookups for x in (one.table, one.out)] + ([] if norm is None else [norm[0], norm[2]])
    assert 1 <= len(lookups) <= 2 and (ring is None or ring[1] > 0)
    if (
        module is None or not layouts.takes(module, like) or not ids.is_contiguous() or widths[0] > attention_and_norms.MAX_WIDTH
        or any(width % 8 for width in widths)
        or any(x.dtype != like.dtype or not x.is_contiguous() or x.data_ptr() % 16 for x in tensors if x is not None)
    ):  # fmt: skip
        for one in lookups:
            embedded = one.table[: ids.numel()] if one.in_order else functional.embedding(ids, one.table)
            one.out.copy_(embedded * one.scale)
        if norm is not None:
            attention_and_norms.add_norm(None, like, None, norm[0], norm[1], None, None, norm[2], form=form)
        if ring is not None:
            torch.remainder(ring[0], ring[1], out=ring[2])
        return
    threads = max(128, -(-widths[0] // 256) * 32)
    blocks = 1 + sum(-(-width // (8 * threads)) for width in widths[1:])
    given: list[nvrtc.Argument] = [ids]
    for one in (*lookups, *[lookups[0]] * (2 - len(lookups))):
        given += [one.table, one.table.shape[0], one.table.shape[1], float(one.scale), int(one.in_order), one.out]
    given += [None, 0.0, None] if norm is None else [norm[0], float(norm[1]), norm[2]]
    given += [None, 1, None] if ring is None else list(ring)
    given += [attention_and_norms.FORMS.index(form), layouts.half(like)]
    module.launch("rows", (blocks, ids.numel()), (threads,), given, dependent=dependent)


def per_layer(
    product: Tensor, own: Tensor, weight: Tensor | None, eps: float, scale: float, factor: float, out: Tensor,
    module: nvrtc.Module | None = None, *, dependent: bool | None = None,
) -> None:  # fmt: skip
    """Write each layer's own input of the tokens: (norm(product * scale) * weight + own) * factor.

    Shapes: product [n, layers * P], own and out [n, layers, P], weight [P] or None for 1. The norm is over P.
    """
    n, layers, width = own.shape
    tensors = (product, own, out) if weight is None else (product, own, out, weight)
    if (
        module is None or not layouts.takes(module, product) or width % 8 or width > MAX_LAYER
        or not own[0].is_contiguous() or not out.is_contiguous()
        or any(x.dtype != product.dtype or x.stride(-1) != 1 or x.data_ptr() % 16 for x in tensors)
        or product.stride(0) % 8 or own.stride(0) % 8
    ):  # fmt: skip
        projected = (product * scale).reshape(-1, width)
        normed = torch.empty_like(projected)
        attention_and_norms.add_norm(None, projected, None, weight, eps, None, None, normed)
        out.copy_((normed.view(own.shape) + own) * factor)
        return
    module.launch(
        "per_layer", (-(-layers // 4), n), (128,),
        [
            product, product.stride(0), own, own.stride(0), weight, float(eps), float(scale), float(factor), out, layers,
            width, layouts.half(product),
        ],
        dependent=dependent,
    )  # fmt: skip


# Behind the head ------------------------------------------------------------------------------------------------------


def with_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [..., V] and the most likely token of each row [...], -1 where the largest score is not finite.

    `finite.check_logits` refuses the same rows.
    """
    best, token = logits.max(dim=-1)
    # The maximum of scores with a NaN is NaN.
    return logits, torch.where(best.isfinite(), token, -1)


def without(outputs: tuple[Tensor, Tensor], ids: Tensor | None, following: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits [..., V] as they are, and the most likely token of each row [...] that is none of `ids` [k] int64.

    outputs: of `with_argmax` or `argmax_logits`; its tokens are overwritten, and -1 stays. following: as in `argmax_logits`.
    """
    logits, tokens = outputs
    if ids is None:
        return outputs
    kept = logits.index_select(-1, ids)  # a copy of all logits would take memory that no plan counts
    best, allowed = logits.index_fill_(-1, ids, -math.inf).max(dim=-1)
    logits.index_copy_(-1, ids, kept)
    tokens.copy_(torch.where((tokens < 0) | ~best.isfinite(), -1, allowed))
    if following is not None:
        following.copy_(tokens.clamp(min=0))
    return outputs


def argmax_logits(
    logits: Tensor, softcap: float | None, following: Tensor | None = None, module: nvrtc.Module | None = None, *,
    out: tuple[Tensor, Tensor] | None = None, dependent: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the logits [n, V] in float32 and the most likely token of each row [n] int64, -1 where the largest score is NaN
    or infinite.

    logits: [n, V], rows may be strided. softcap: scores become softcap * tanh(logits / softcap), rounded after each of the
    three. Of equal scores the first one counts. following [n] int64: the tokens are written there too, 0 for -1. out: memory
    for the result, for the kernel to write; made here without it.
    """
    n, width = logits.shape
    if (
        module is None or not layouts.takes(module, logits) or n > _MAX_ROWS or logits.stride(1) != 1
        or (softcap is not None and not softcap > 0)
    ):  # fmt: skip
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        scores, tokens = with_argmax(logits.float())
        if following is not None:
            following.copy_(tokens.clamp(min=0))
        return scores, tokens
    if out is None:
        out = torch.empty(n, width, device=logits.device), torch.empty(n, dtype=torch.int64, device=logits.device)
    scores, tokens = out
    assert scores.is_contiguous() and tokens.is_contiguous() and scores.dtype == torch.float32
    aligned = width % 8 == 0 and logits.stride(0) % 8 == 0 and logits.data_ptr() % 16 == 0 and scores.data_ptr() % 16 == 0
    v = 8 if aligned else 1
    cap = 0.0 if softcap is None else float(softcap)
    inverse = float(torch.tensor(1.0) / torch.tensor(cap)) if cap else 0.0
    module.launch(
        f"likeliest_{v}", (-(-width // (256 * v)), n), (256,),
        [
            logits, logits.stride(0), cap, inverse, scores, tokens, following,
            0 if following is None else following.stride(0), module.scratch["best"], module.scratch["arrived"], width,
            layouts.half(logits),
        ],
        dependent=dependent,
    )  # fmt: skip
    return scores, tokens


# At load: is it right, does it pay ------------------------------------------------------------------------------------


def why_not(sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Return why a model of these sizes has no kernels (torch does its part), None if it has."""
    if (why := layouts.why_not_type(dtype)) is not None:
        return why
    if sizes.width % 8 or sizes.per_layer % 8 or sizes.per_layer > MAX_LAYER:
        return f"widths of {sizes.width} and {sizes.per_layer} are not multiples of 8, the second up to {MAX_LAYER}"
    return None


class _Inputs:
    """Random inputs of a model's sizes, n rows. Tables have few rows: which one is read does not matter."""

    def __init__(self, device: torch.device, sizes: Sizes, dtype: torch.dtype, n: int) -> None:
        generator = torch.Generator(device=device).manual_seed(n)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        count, layered = min(_CHECKED_IDS, sizes.vocabulary), sizes.layers * sizes.per_layer
        self.ids = torch.randint(count, (n,), device=device, generator=generator)
        self.ids[0] = count - 1
        widths = [width for width in (sizes.width, layered) if width]
        self.lookups = [
            Lookup(random(count, width), random(1).item(), torch.full((n, width), math.nan, dtype=dtype, device=device))
            for width in widths
        ]
        self.input_weight, self.normed = random(sizes.width), torch.full_like(self.lookups[0].out, math.nan)
        self.norm = sizes.norm
        self.positions = torch.arange(n, device=device) * 517
        self.places = torch.full_like(self.positions, -1)
        self.product, self.own = random(n, layered), random(n, layered).view(n, sizes.layers, sizes.per_layer)
        self.weight, self.mixed = random(sizes.per_layer), torch.full_like(self.own, math.nan)
        # About as far apart as a model's: a softcap bends the largest.
        self.logits, self.softcap = random(n, sizes.vocabulary) * 8, sizes.softcap
        self.following = torch.full_like(self.ids, -1)

    def rows(self, module: nvrtc.Module | None) -> None:
        norm = self.input_weight, 1e-6, self.normed
        rows(self.ids, self.lookups, module, norm=norm, ring=(self.positions, 512, self.places), form=self.norm)

    def per_layer(self, module: nvrtc.Module | None) -> None:
        per_layer(self.product, self.own, self.weight, 1e-6, self.weight.shape[0] ** -0.5, 2**-0.5, self.mixed, module)

    def argmax_logits(self, module: nvrtc.Module | None) -> tuple[Tensor, Tensor]:
        return argmax_logits(self.logits, self.softcap, self.following, module)


def check(
    module: nvrtc.Module, sizes: Sizes, *, dtype: torch.dtype = torch.bfloat16, rows: Sequence[int] = (1, 3, 8)
) -> str | None:
    """Return the error of the kernels on this device, or None. Random inputs; outputs are poisoned first.

    All are compared with their torch path: rows of tables bit for bit, sums and tanh as the small kernels are. The most likely
    token must be the one of the kernel's own scores.
    """
    for n in rows:
        scores = sizes.vocabulary if n == 1 else min(sizes.vocabulary, _CHECKED_SCORES + sizes.vocabulary % 8)
        inputs = _Inputs(module.device, replace(sizes, vocabulary=scores), dtype, n)
        reason = _wrong_front(module, inputs, sizes, n) or _wrong_scores(module, inputs)
        if reason is not None:
            return f"{reason} (n = {n})"
    if any(bool(module.scratch[name].any()) for name in ("best", "arrived")):
        return "argmax: its counters are not reset to zero"
    return None


def _wrong_front(module: nvrtc.Module, inputs: _Inputs, sizes: Sizes, n: int) -> str | None:
    for in_order in (False, True):
        lookups = [replace(one, in_order=in_order, out=torch.full_like(one.out, math.nan)) for one in inputs.lookups]
        if in_order:
            lookups = [replace(one, table=one.table[:n].contiguous()) for one in lookups]
        inputs.lookups = lookups
        inputs.normed.fill_(math.nan), inputs.places.fill_(-1)
        inputs.rows(module)
        outputs, normed = [one.out.clone() for one in lookups] + [inputs.places.clone()], inputs.normed.clone()
        inputs.rows(None)
        wanted = [one.out for one in lookups] + [inputs.places]
        if not all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True)):
            return f"rows of {[one.table.shape[1] for one in lookups]} values: not what the table holds"
        if (error := selfcheck.relative_error(normed, inputs.normed)) > selfcheck.LARGEST_DIFFERENCE[normed.dtype]:
            return f"rows of {sizes.width} values: relative error {error:.1e} of their norm"
    if sizes.per_layer:
        inputs.per_layer(module)
        mixed = inputs.mixed.clone()
        inputs.per_layer(None)
        if (error := selfcheck.relative_error(mixed, inputs.mixed)) > selfcheck.LARGEST_DIFFERENCE[mixed.dtype]:
            return f"per_layer of {sizes.layers} x {sizes.per_layer}: relative error {error:.1e}"
    return None


def _wrong_scores(module: nvrtc.Module, inputs: _Inputs) -> str | None:
    n, width = inputs.logits.shape
    plain = inputs.logits
    tied = plain.clone()
    tied[:, [width // 3, width // 2, width - 1]] = 100.0  # the first of them
    ends = plain.clone()
    ends[:, -1], ends[: n // 2, 0] = 101.0, 102.0
    broken = plain.clone()
    broken[n // 2, width // 2] = math.nan
    negative = plain.clone()
    negative[n // 2].view(torch.int16)[width // 2] = -1  # NaN with its sign set
    infinite = plain.clone()
    infinite[n // 2, width // 2] = math.inf
    cases = {
        "": plain, "ties": tied, "ends": ends, "nan": broken, "-nan": negative, "inf": infinite, "-inf": plain - math.inf,
    }  # fmt: skip
    for name, logits in cases.items():
        following, out = (
            torch.full_like(inputs.ids, -9),
            (torch.full_like(logits, math.nan, dtype=torch.float32), inputs.ids - 99),
        )
        scores, tokens = argmax_logits(logits, inputs.softcap, following, module, out=out)
        wanted = argmax_logits(logits, inputs.softcap)
        what = f"argmax of {width} scores{name and f' ({name})'}"
        finite = wanted[0].isfinite()
        if not torch.equal(finite, scores.isfinite()) or not torch.equal(wanted[0].isnan(), scores.isnan()):
            return f"{what}: not the logits of torch"
        error = selfcheck.relative_error(scores[finite], wanted[0][finite]) if finite.any() else 0.0
        if error > selfcheck.LARGEST_DIFFERENCE[logits.dtype]:
            return f"{what}: relative error {error:.1e}"
        # One wrong value of many hardly changes a norm.
        steps = 4 * torch.finfo(logits.dtype).eps
        if not torch.allclose(scores[finite], wanted[0][finite], rtol=steps, atol=1e-6):
            return f"{what}: one of them is not torch's"
        token = with_argmax(scores)[1]
        if not torch.equal(tokens, token) or not torch.equal(following, token.clamp(min=0)):
            return f"{what}: {tokens.tolist()} instead of {token.tolist()}"
    return None


def measure(
    module: nvrtc.Module, time_us: Callable[[Callable[[], object]], float], sizes: Sizes, *,
    dtype: torch.dtype = torch.bfloat16, n: int = 1,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return name -> (the kernel's, torch's) microseconds for a step of n rows.

    time_us: takes a function, and returns the time of one run, best in a CUDA graph.
    """
    inputs = _Inputs(module.device, sizes, dtype, n)
    runs: dict[str, Callable[[nvrtc.Module | None], object]] = {"rows": inputs.rows}
    if sizes.per_layer:
        runs["per_layer"] = inputs.per_layer
    runs[f"argmax of {sizes.vocabulary}"] = inputs.argmax_logits
    return {name: (time_us(partial(run, module)), time_us(partial(run, None))) for name, run in runs.items()}
