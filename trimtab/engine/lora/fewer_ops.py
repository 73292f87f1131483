"""How do transformers' own modules take fewer operations in a decode step?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.engine.formats.packed import LayerProduct, MatmulTable
from trimtab.engine.lora import layers
from trimtab.engine.lora.store import TOWERS, AdaptedLayer, AdapterStore, EagerAdapters, Groups, Place, Selection, covered

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel

# Values of each trial, in rows whose size goes from 2^-11 (there eps decides) to 2^6.
_TRIAL_ROWS = 72
# A sum in another order and rsqrt for pow move a float32 value by a few steps of 2^-23 ...
MOST_STEPS_FLOAT32 = 16
# ... after rounding to 16 bits these move one value in 512 (float16) or 4,096 (bfloat16), and twice that in a sample, each by up to
# two steps. Rounding before instead of after the weight moves about every third.
MOST_MOVED_SHARE = 2**-8
# Adapters of different rows are joined by a copy; beyond this their own products are as fast.
STACK_BYTES = 8 * 2**20

# Operations for one row, for rows side by side, and for one adapter's rows gathered and scattered (`adapter_store.EagerAdapters`).
_RUN_OPS, _STACK_OPS, _GATHER_OPS = 3, 6, 9

Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]


# Norms ---------------------------------------------------------------------------------------------------------------


def _inside(x: Tensor, weight: Tensor | None, _: Tensor | None, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _after(x: Tensor, weight: Tensor | None, _: Tensor | None, eps: float) -> Tensor:
    normed = functional.rms_norm(x, x.shape[-1:], None, eps)
    return normed if weight is None else weight * normed


def _plus_one(x: Tensor, weight: Tensor | None, wide: Tensor | None, eps: float) -> Tensor:
    assert weight is not None
    wide = 1.0 + weight.float() if wide is None else wide
    return functional.rms_norm(x.float(), x.shape[-1:], wide, eps).type_as(x)


# (x [..., D], weight [D] or None, 1 + weight in float32 where kept, eps) -> [..., D], in the order they are tried. inside: float32
# weight, rounded once (Gemma 4, 3n). after: rounded, then times the weight (Llama, Qwen, Mistral). plus one: 1 + weight (Gemma 3).
FORMS: dict[str, Norm] = {"inside": _inside, "after": _after, "plus one": _plus_one}
# How often each rounds to 16 bits: two equal ones may differ by this number of steps.
ROUNDINGS = {"inside": 1, "after": 2, "plus one": 1}


def why_not(device: torch.device) -> str | None:
    """Return why no norm is one operation on this device, None if they can be."""
    name = "_fused_rms_norm"
    has_kernel = hasattr(torch.ops.aten, name) and (
        device.type == "cpu"  # one call there too, of several operations: for tests
        or torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device.type.upper())
    )
    return None if has_kernel else f"torch {torch.__version__} has no kernel for an RMS norm on {device.type}"


def why_other(actual: Tensor, expected: Tensor, *, roundings: int = 1) -> str | None:
    """Return by how much a norm's values differ from the module's own, None where only roundings do.

    roundings: how often the module rounds to 16 bits (`ROUNDINGS`).
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not bool(actual.isfinite().all()):
        return "values that are not finite"
    steps = (_ordered(actual) - _ordered(expected)).abs()
    most, share = int(steps.max()), float((steps > 0).float().mean())
    if actual.dtype == torch.float32:
        return None if most <= MOST_STEPS_FLOAT32 else f"values are up to {most} steps of float32 away"
    if most <= roundings and share <= MOST_MOVED_SHARE:
        return None
    return f"{share:.1%} of the values are up to {most} steps of {actual.dtype} away"


def _ordered(x: Tensor) -> Tensor:
    """Return whole numbers that go up by one from each value of the type to the next."""
    kind = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits = x.contiguous().view(kind).long()
    return torch.where(bits >= 0, bits, torch.iinfo(kind).min - bits)


def _is_capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class NormKind:
    """The key of a norm's short form: all norms that are equal in it share one trial."""

    module_class: type[nn.Module]
    width: int
    dtype: torch.dtype
    device: torch.device
    eps: float
    has_weight: bool


class _ShortNorm:
    """Replaces the forward of one norm module; a form that its owner has proved for one is valid for all of its kind."""

    def __init__(self, module: nn.Module, eps: float, owner: ShortOps) -> None:
        self.module, self.eps, self.owner = module, eps, owner
        self.own: Callable[..., Tensor] = module.forward
        self.parameter: Tensor | None = module._parameters.get("weight")
        self.wide: Tensor | None = None

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return self.own(*args, **kwargs)
        x = args[0]
        weight: Tensor | None = getattr(self.module, "weight", None)
        form = self._form(x, weight)
        if form is None:
            return self.own(x)
        return FORMS[form](x, weight, self._wide(x, weight) if form == "plus one" else None, self.eps)

    def _wide(self, x: Tensor, weight: Tensor | None) -> Tensor | None:
        # An adapter's weight is here only for its own rows: it is not kept.
        if weight is None or weight is not self.parameter:
            return None
        if self.wide is None and not _is_capturing(x):  # tensors made in a capture belong to its graph
            self.wide = 1.0 + weight.detach().float()
        return self.wide

    def _form(self, x: Tensor, weight: Tensor | None) -> str | None:
        if weight is not None and (weight.dtype != x.dtype or weight.device != x.device):
            return None
        kind = NormKind(type(self.module), x.shape[-1], x.dtype, x.device, self.eps, weight is not None)
        if kind not in self.owner.proved:
            if _is_capturing(x):  # a trial waits for the device; every capture comes after a step that is not captured
                return None
            self.owner.proved[kind] = self._prove(x, weight)
        return self.owner.proved[kind]

    def _prove(self, x: Tensor, weight: Tensor | None) -> str | None:
        """Return which form equals the module's own forward on random values; None, and a report to the owner, if none."""
        width = x.shape[-1]
        generator = torch.Generator(device=x.device).manual_seed(width)
        size = torch.logspace(-11, 6, _TRIAL_ROWS, base=2.0, device=x.device)[:, None, None]
        values = (torch.randn(_TRIAL_ROWS, 1, width, generator=generator, device=x.device) * size).to(x.dtype)
        twin = copy.copy(self.module)
        twin.__dict__.pop("forward", None)
        given = None
        if weight is not None:
            given = torch.randn(width, generator=generator, device=x.device).to(x.dtype)
            twin.__dict__["_parameters"] = {"weight": nn.Parameter(given, requires_grad=False)}
        name = f"{type(self.module).__name__} of width {width}"
        try:
            expected = twin(values)
        except Exception as exc:
            self.owner.leave_out(name, f"{type(exc).__name__}: {exc}")
            return None
        reasons = []
        for form, compute in FORMS.items():
            if given is None and form == "plus one":
                continue
            why = why_other(compute(values, given, None, self.eps), expected, roundings=ROUNDINGS[form])
            if why is None:
                return form
            reasons.append(f"{form}: {why}")
        self.owner.leave_out(name, "; ".join(reasons))
        return None


def _eps_of(module: nn.Module) -> float | None:
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return float(eps) if isinstance(eps, float) else None


def _is_rms_norm(module: nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return False
    kept = [name for name, value in module._parameters.items() if value is not None]
    return kept in ([], ["weight"]) and not module._buffers and not module._modules and "forward" not in vars(module)


# Adapters ------------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:

    class PlainAdapter(layers.LinearAdapter):
        A: Tensor
        B: Tensor


def is_plain(adapter: object) -> TypeGuard[PlainAdapter]:
    """Whether an adapter is y + scale B A x and nothing else."""
    return (
        isinstance(adapter, layers.LinearAdapter) and adapter.A is not None and adapter.B is not None
        and adapter.B_bias is None and adapter.magnitude is None and adapter.weight is None and adapter.bias is None
        and adapter.A.dtype == torch.float32
    )  # fmt: skip


# (layer, adapter, x [..., D_in], y [..., D_out]) -> whether it added the adapter to y.
PlainAdd = Callable[[AdaptedLayer, "PlainAdapter", Tensor, Tensor], bool]


class ShortAdapters(EagerAdapters):
    """Adds adapters while a short step runs: the same sum from fewer operations, rounded once.

    Products that read one tensor share its float32 form, unless `shares_inputs` is False. Rows that differ are taken as they lie:
    neighbours with one adapter are a slice, neighbours with several of one rank a batched product. add_plain: a kernel that adds
    one plain adapter in place, and says whether it knows these tensors. y + scale B A x is in float32, rounded once; PEFT rounds
    the change over a quantized layer before it adds it.
    """

    def __init__(self, add_plain: PlainAdd | None = None, *, shares_inputs: bool = True) -> None:
        self._add_plain, self._shares_inputs = add_plain, shares_inputs
        self._source: Tensor | None = None
        self._version = -1
        self._wide: Tensor | None = None

    def clear(self) -> None:
        """Forget the last input: a step must not read another step's tensors."""
        self._source, self._wide = None, None

    def wide(self, x: Tensor) -> Tensor:
        """Return x in float32, the one made before if x has not changed since."""
        if x.dtype == torch.float32:
            return x
        if not self._shares_inputs or x.is_inference():  # has no version: a change would be unseen
            return x.float()
        if self._wide is None or self._source is not x or self._version != x._version:
            self._source, self._version, self._wide = x, x._version, x.float()
        return self._wide

    def can(self, leaf: AdaptedLayer, x: Tensor) -> bool:
        """Whether the adapters of the rows of x are all plain at this layer, and this way is short."""
        selection: Selection = leaf.adapter_store.selection
        used = {name: leaf.adapters[name] for name in selection.active() if name is not None and name in leaf.adapters}
        if not all(is_plain(adapter) for adapter in used.values()):
            return False
        if selection.rows is None:
            return True
        if len(selection.rows) != x.shape[0] or any(adapter.part in TOWERS for adapter in used.values()):
            return False
        runs = list(_runs([None if name is None else leaf.adapters.get(name) for name in selection.rows]))
        return sum(_RUN_OPS if end - start == 1 else _STACK_OPS for start, end in runs) <= _GATHER_OPS * len(used)

    def apply(self, layer: AdaptedLayer, x: Tensor, y: Tensor, groups: Groups | None = None) -> Tensor:
        """See `AdapterApplier`. PEFT's operations add adapters other than plain LoRA, and those not shorter this way."""
        if not layer.adapters:
            return y
        return self.add(layer, x, y) if self.can(layer, x) else super().apply(layer, x, y, groups)

    def add(self, leaf: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Return y [B, ..., D_out] changed in place by the adapters of the rows of x [B, ..., D_in]; see `can`."""
        selection: Selection = leaf.adapter_store.selection
        if selection.rows is None:
            adapter = None if selection.name is None else leaf.adapters.get(selection.name)
            if adapter is None or (self._add_plain is not None and self._add_plain(leaf, adapter, x, y)):
                return y
            return _add(adapter, self.wide(x), y)
        adapters: list[PlainAdapter | None] = [None if name is None else leaf.adapters.get(name) for name in selection.rows]
        for start, end in _runs(adapters):
            run = [one for one in adapters[start:end] if one is not None]
            part = self.wide(x)[start:end]
            if all(adapter is run[0] for adapter in run):
                _add(run[0], part, y[start:end])
            else:
                _add_stacked(run, part, y[start:end])
        return y


def _add(adapter: PlainAdapter, x: Tensor, y: Tensor) -> Tensor:
    change = functional.linear(functional.linear(x, adapter.A), adapter.B)
    return y.add_(change, alpha=adapter.scale)


def _add_stacked(adapters: Sequence[PlainAdapter], x: Tensor, y: Tensor) -> None:
    """Add to y [n, ..., D_out] the change by adapters[i], all of one rank, for row i of x [n, ..., D_in]."""
    count, scales = len(adapters), [adapter.scale for adapter in adapters]
    low = torch.bmm(x.reshape(count, -1, x.shape[-1]), torch.stack([one.A for one in adapters]).mT)
    alpha = scales[0]
    if any(scale != alpha for scale in scales):
        torch._foreach_mul_(list(low.unbind(0)), scales)
        alpha = 1.0
    change = torch.bmm(low, torch.stack([one.B for one in adapters]).mT)
    y.add_(change.view_as(y), alpha=alpha)


def _runs(adapters: Sequence[PlainAdapter | None]) -> Iterator[tuple[int, int]]:
    """Return [start, end) of neighbouring rows that are one product: of one adapter, or of several of one rank."""
    start = 0
    while start < len(adapters):
        end = start + 1
        if adapters[start] is not None:
            while end < len(adapters) and _join(adapters[start : end + 1]):
                end += 1
            yield start, end
        start = end


def _join(adapters: Sequence[PlainAdapter | None]) -> bool:
    first = adapters[0]
    if first is None or all(one is first for one in adapters):
        return True
    if any(one is None or one.A.shape != first.A.shape or one.B.shape != first.B.shape for one in adapters):
        return False
    return len(adapters) * max(first.A.nbytes, first.B.nbytes) <= STACK_BYTES


# Both ----------------------------------------------------------------------------------------------------------------


class ShortOps:
    """The short forms of one model's norms and adapters. left_out: receives (what, why) for each kind of norm without one. On one
    token a kernel takes about as long as its launch. An RMS norm of transformers is eight operations, torch has one. The form of
    `FORMS` that equals a norm is tried, not looked up by family; a norm that equals none stays as it is."""

    def __init__(
        self, hf_model: HFModel, store: AdapterStore, device: torch.device, left_out: Callable[[str, str], None],
        adapters: ShortAdapters | None = None,
    ) -> None:  # fmt: skip
        self.hf_model, self.adapter_store, self._tell = hf_model, store, left_out
        self.adapters = adapters or ShortAdapters()
        self.proved: dict[NormKind, str | None] = {}  # a name of FORMS, None: no form is right
        self._norms: dict[nn.Module, _ShortNorm] = {}
        self._seen: tuple[int, ...] | None = None
        self._why = why_not(device)
        if self._why is not None:
            self.leave_out("all of them", self._why)

    def leave_out(self, what: str, why: str) -> None:
        """Report that norms of this kind stay as they are."""
        self._tell("norm as one operation", f"{what}: {why}")

    def norms(self) -> dict[nn.Module, _ShortNorm]:
        """Return the replacement of each norm's forward; an adapter may have wrapped some since."""
        serials = tuple(self.adapter_store.serials.values())
        if self._why is None and self._seen != serials:
            self._seen = serials
            modules = (vars(m)["original"] if isinstance(m, layers.SavedModule) else m for m in self.hf_model.modules())
            before, self._norms = self._norms, {}
            for module in modules:
                eps = _eps_of(module)
                if eps is not None and _is_rms_norm(module):
                    self._norms[module] = before.get(module) or _ShortNorm(module, eps, self)
        return self._norms

    @contextmanager
    def step(self, adapters: ShortAdapters | None = None, matmuls: MatmulTable[LayerProduct] | None = None) -> Iterator[None]:
        """Run norms and adapters in their short forms while the block runs. adapters: the applier, None for its own. Where
        adapters are looked up in a table they stay there. matmuls: as for `AdapterStore.applying`."""
        adapters = adapters or self.adapters
        adapters.clear()
        norms: dict[Place, object] = {module: short for module, short in self.norms().items() if "forward" not in vars(module)}
        try:
            with covered(norms), self.adapter_store.applying(None if self.adapter_store.table is not None else adapters, matmuls):
                yield
        finally:
            adapters.clear()
