"""What do a layer's experts make of the tokens of a step or chunk?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.batched_lora import table
from trimtab.engine.kernels import experts, routers

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.families.decoder import Experts, Layer
    from trimtab.engine.kernels.device_kernels import DeviceKernels
    from trimtab.engine.layers.leaves import Leaf
    from trimtab.engine.lora.layers import ExpertsAdapter
    from trimtab.engine.lora.store import AdapterStore


def hold(layers: Sequence[Layer], store: AdapterStore) -> bool:
    """Make the tables of the adapter of all tokens of the next passes; whether kernels add all that it changes of experts."""
    is_whole = True
    for own in (layer.experts for layer in layers if layer.experts is not None):
        adapter: ExpertsAdapter | None = vars(own.module).get("adapters", {}).get(store.selection.name)
        if adapter is None or adapter.tables is not None:
            continue
        if own.takes_many and table.why_not_experts(adapter) is None:
            slots = table.AdapterSlots.of_experts({own.module: adapter}, store, adapter.changes[0].A.device)
            adapter.hold(slots.expert_args(own.module, 1))
        else:
            is_whole = False
    return is_whole


class Chosen(NamedTuple):
    """The numbers [n, K] and weights [n, K] of tokens' experts; fetch: of those that are being copied to the device."""

    numbers: Tensor
    weights: Tensor
    fetch: experts.Fetch | None = None


def routed(
    own: Experts, x: Tensor, activation: str, product: Callable[[Sequence[Leaf], Tensor], Tensor], made: DeviceKernels, live: Tensor
) -> Chosen:  # fmt: skip
    """Return the experts of a step's rows x [n, D], of which the first `live` are used; those that are in host memory are on their
    way then. product: with the adapters of the rows. made: the kernels of the step."""
    numbers, weights = _routed(own, x, product, made.small)
    if own.near is None:
        return Chosen(numbers, weights)
    if len(x) > 1:
        # Padding rows choose what the first row does: they bring no expert to the device.
        is_used = torch.arange(len(x), dtype=torch.int32, device=x.device) < live
        numbers = torch.where(is_used[:, None], numbers, numbers[:1])
    if made.experts is None or len(x) > experts.MOST_ROWS:  # a step that is not captured may have more rows
        return Chosen(numbers, weights)
    return Chosen(numbers, weights, experts.fetch(numbers, own.mixture(activation), made.experts, x.dtype))


def _routed(
    own: Experts, x: Tensor, product: Callable[[Sequence[Leaf], Tensor], Tensor], module: nvrtc.Module | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    route = own.route if module is not None else None
    if route is None or not route.takes(x, own.stacks.num_experts):
        return own.chosen(x)
    given = x if route.scale is None else routers.normed(x, route.scale, route.factor, route.eps, module)
    if route.linear is not None:
        logits = product([route.linear], given)
    else:
        assert route.weight is not None
        logits = functional.linear(given, route.weight)
    return routers.choose(logits, route.choice, route.expert_scale, module)


def experts_of(
    own: Experts, x: Tensor, chosen: Chosen, rows: int, activation: str, store: AdapterStore,
    module: nvrtc.Module | None,
) -> Tensor:  # fmt: skip
    """Return the experts' output for x [n, D]. rows: as `Experts.chosen` has it. module: of the kernels, None without."""
    numbers, weights, fetch = chosen
    lora: experts.ExpertLora | None = store.applier.expert_args(
        own.module, rows if rows > 1 else len(x)
    )  # a step's tokens are rows
    adapters = vars(own.module).get("adapters", ())
    # Adapters that no table holds are added by the module's own way.
    is_apart = lora is None and any(name in adapters for name in store.selection.active())
    # Many tokens without adapters over unpacked experts: torch's grouped product, unless only the kernels can be captured.
    is_many = len(x) > experts.MOST_ROWS and lora is None
    is_plain = is_many and not (own.is_packed or (store.groups_on_host and own.takes_many))
    if module is None or is_apart or is_plain or not own.has_mixture:
        if fetch is not None:
            fetch.join()
        return own.module(x, numbers, weights)
    mixture, out = own.mixture(activation), x.new_empty(x.shape)
    return experts.experts(x, numbers, weights, mixture, out, lora=lora, module=module, fetched=fetch)
