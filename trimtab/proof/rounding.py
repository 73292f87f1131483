"""What the rounding that no merge can avoid does to the answers: the change added to the weights, and rounded once.

A merge in bf16 cannot give the bits of the adapter loaded beside its base: every changed weight is rounded to bf16 once.
How far that moves the answers is measured, not assumed: the same model answers with its changed weights rounded to the
nearest value, and rounded up or down at random. For layers that are not quantized; the model is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.proof import forced
from trimtab.runtime.lora import EmbeddingAdapter, LinearAdapter

NEAREST = "change added to the weights, rounded to the nearest"
RANDOM_SEEDS = (1, 2)
_NAME = "rounded once"


def rounded_orders(
    model: Any, adapter: str, inputs: Mapping[str, Tensor]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (what is done, a call that gives logits [S, V]) for every rounding of the changed weights.

    Takes a second copy of the adapted weights on their device for the time of a call.
    """
    for seed in (None, *RANDOM_SEEDS):
        name = NEAREST if seed is None else f"change added to the weights, rounded at random ({seed})"
        yield name, lambda seed=seed: _answer(model, adapter, inputs, seed)  # type: ignore[misc]


def _answer(model: Any, adapter: str, inputs: Mapping[str, Tensor], seed: int | None) -> Tensor:
    with merged_in_memory(model, adapter, seed):
        logits: Tensor = forced.forward(model.hf_model, inputs)[0][0]
    return logits


@contextmanager
def merged_in_memory(model: Any, adapter: str, seed: int | None) -> Iterator[None]:
    """Let every layer that the adapter changes compute with its changed weight, rounded once to its own dtype."""
    route = model.route
    before = route.name
    changed = [m for m in model.hf_model.modules() if adapter in m.__dict__.get("adapters", {})]
    generator = None if seed is None else torch.Generator(device=model.device).manual_seed(seed)
    try:
        with torch.no_grad():
            for module in changed:
                module.__dict__["adapters"][_NAME] = _rounded(module, module.__dict__["adapters"][adapter], generator)
        route.names.add(_NAME)
        route.set(_NAME)
        yield
    finally:
        for module in changed:
            module.__dict__["adapters"].pop(_NAME, None)
        route.names.discard(_NAME)
        route.set(before)


def _rounded(module: Any, adapter: Any, generator: torch.Generator | None) -> Any:
    if isinstance(adapter, LinearAdapter):
        return _rounded_linear(module, adapter, generator)
    return _rounded_table(module, adapter, generator) if isinstance(adapter, EmbeddingAdapter) else adapter


def _rounded_linear(leaf: Any, adapter: LinearAdapter, generator: torch.Generator | None) -> LinearAdapter:
    if adapter.A is None or adapter.B is None or leaf.quant_kind != "none":
        return adapter
    weight = leaf.dense_weight() if adapter.weight is None else adapter.weight
    weight = weight.to(adapter.A.device)
    whole = weight.double() + (adapter.B.double() @ adapter.A.double()) * adapter.scale
    if adapter.magnitude is not None:
        whole *= adapter.magnitude.double().reshape(-1, 1)
    bias = leaf.bias if adapter.bias is None else adapter.bias
    if adapter.B_bias is not None:
        more = adapter.B_bias.double() * adapter.scale
        bias = (more if bias is None else bias.double() + more).to(weight.dtype)
    return LinearAdapter(adapter.part, weight=rounded(whole, weight.dtype, generator), bias=bias)


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
    """Return float64 values in a dtype: to the nearest, or with a generator up or down at random, right on average.

    At random: a uniform number of one step of the dtype is added first, so that a value between two neighbours goes to
    each with the probability of its nearness.
    """
    if generator is None:
        return values.to(dtype)
    step = torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), torch.frexp(values).exponent - 1)
    noise = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float64) - 0.5
    return (values + noise * step).to(dtype)
