"""How do answers change by the rounding that no merge can avoid?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.engine.formats.coded_files import packed_once
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.lora.layers import EmbeddingAdapter, LinearAdapter
from trimtab.engine.lora.store import Fitting, Holders
from trimtab.verification.routes import teacher_forcing
from trimtab.verification.routes.alarm_rate import DRAWS

NEAREST = "change added to the weights, rounded to the nearest"
PACKED = "change added to the weights, packed to 4 bits"
_NAME = "rounded once"


def rounded_order(
    model: Any, adapter: str, inputs: Mapping[str, Tensor], packed: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (description, a call that gives logits [S, V]) for the rounding of the changed weights to the nearest.

    packed: module path -> 4-bit form of the modules that the merged model has packed. Needs a second copy of those weights and of
    the adapted ones on their device during a call, where the base has them unpacked. A merge in bf16 rounds every changed weight
    once, a packed merge every packed weight to 4 bits. A packed layer makes its new weight in each call.
    """
    yield PACKED if packed else NEAREST, lambda: _answer(model, adapter, inputs, None, packed)


def rounded_draws(
    model: Any, adapter: str, inputs: Mapping[str, Tensor], packed: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the same for random roundings of the weights and of every layer's output."""
    for seed in range(1, DRAWS + 1):
        name = f"change added to the weights, {'packed' if packed else 'rounded'} at random ({seed})"
        yield name, lambda seed=seed: _answer(model, adapter, inputs, seed, packed)  # type: ignore[misc]


def _answer(model: Any, adapter: str, inputs: Mapping[str, Tensor], seed: int | None, packed: Mapping[str, str]) -> Tensor:
    model.lend_prompt_room()
    with merged_in_memory(model, adapter, seed, packed):
        if seed is None:
            return teacher_forcing.forward(model.hf_model, inputs)[0][0]
        with teacher_forcing.rounded_layers(model.hf_model, seed):
            return teacher_forcing.forward(model.hf_model, inputs)[0][0]


@contextmanager
def merged_in_memory(model: Any, adapter: str, seed: int | None, packed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Make every layer that a merge changes compute with its new weight, rounded once to its dtype or to 4 bits."""
    store = model.adapter_store
    before = store.selection.name
    forms = packed or {}
    changed = [
        module for module in model.hf_model.modules()
        if adapter in module.__dict__.get("adapters", {})
        or (isinstance(module, Leaf) and forms.get(module.module_path, module.quant_kind) != module.quant_kind)
    ]  # fmt: skip
    generator = None if seed is None else torch.Generator(device=model.device).manual_seed(seed)
    try:
        with torch.no_grad():
            for module in changed:
                own = module.__dict__["adapters"].get(adapter)
                form = forms.get(getattr(module, "module_path", ""))
                module.__dict__["adapters"][_NAME] = _rounded(module, own, form, generator)
        # Without a serial number, no step captures it.
        store.holders[_NAME] = Holders(Fitting(model.hf_model, [], {}, frozenset(), 0), [])
        store.set(_NAME)
        yield
    finally:
        for module in changed:
            module.__dict__["adapters"].pop(_NAME, None)
        store.holders.pop(_NAME, None)
        store.set(before)


@dataclass(eq=False)
class _Merged(LinearAdapter):
    """The merged weight [D_out, D_in] of a packed layer, made in each call. seed: of a random rounding, None to the nearest."""

    merged: LinearAdapter | None = None
    form: str | None = None
    seed: int | None = None

    def apply(self, leaf: Any, x: Tensor, y: Tensor) -> Tensor:
        generator = None if self.seed is None else torch.Generator(device=leaf.device).manual_seed(self.seed)
        return _new_linear(leaf, self.merged or self, self.form, generator).apply(leaf, x, y)


def _rounded(module: Any, adapter: Any, form: str | None, generator: torch.Generator | None) -> Any:
    if adapter is None:
        adapter = LinearAdapter("language")
    if isinstance(adapter, LinearAdapter) and isinstance(module, Leaf):
        if form is None and (adapter.A is None or adapter.B is None):
            return adapter
        if module.quant_kind == "none":
            return _new_linear(module, adapter, form, generator)
        seed = None if generator is None else int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return _Merged(adapter.part, merged=adapter, form=form, seed=seed)
    return _rounded_table(module, adapter, generator) if isinstance(adapter, EmbeddingAdapter) else adapter


def _new_linear(leaf: Any, adapter: LinearAdapter, form: str | None, generator: torch.Generator | None) -> LinearAdapter:
    whole, bias = _merged_linear(leaf, adapter)
    kind = leaf.weight.dtype
    weight = rounded(whole, kind, generator) if form is None else packed_once(whole, form, generator).to(kind)
    return LinearAdapter(adapter.part, weight=weight, bias=bias)


def _merged_linear(leaf: Any, adapter: LinearAdapter) -> tuple[Tensor, Tensor | None]:
    """Return the weight with the adapter's change in float64, and the bias."""
    weight = leaf.dense_weight() if adapter.weight is None else adapter.weight
    bias = leaf.bias if adapter.bias is None else adapter.bias
    if adapter.A is None or adapter.B is None:
        return weight.double(), bias
    weight = weight.to(adapter.A.device)
    whole = weight.double() + (adapter.B.double() @ adapter.A.double()) * adapter.scale
    if adapter.magnitude is not None:
        whole *= adapter.magnitude.double().reshape(-1, 1)
    if adapter.B_bias is not None:
        more = adapter.B_bias.double() * adapter.scale
        bias = (more if bias is None else bias.double() + more).to(leaf.weight.dtype)
    return whole, bias


def _rounded_table(table: Any, adapter: EmbeddingAdapter, generator: torch.Generator | None) -> EmbeddingAdapter:
    if adapter.A is None or adapter.B is None:
        return adapter
    ids = torch.arange(adapter.A.shape[0], device=adapter.A.device)
    weight = table.rows(ids) if adapter.weight is None else adapter.weight
    whole = weight.double() + (adapter.A.double() @ adapter.B.double().T) * adapter.scale
    if adapter.magnitude is not None:
        whole *= adapter.magnitude.double()
    return EmbeddingAdapter(adapter.part, weight=rounded(whole, weight.dtype, generator))


def rounded(values: Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """Return float64 values in a dtype: to the nearest, or, given a generator, up or down at random without bias.

    At random: a uniform number within one step of the dtype is added first. A value between two neighbours is then
    rounded to each with a probability by its distance.
    """
    if generator is None:
        return values.to(dtype)
    noise = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float64).sub_(0.5)
    return noise.mul_(teacher_forcing.steps_of(values, dtype)).add_(values).to(dtype)
