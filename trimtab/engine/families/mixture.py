"""What do a layer's experts make of the tokens of a step or chunk? Kernels read chosen experts alone; else the module computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from trimtab.engine.batched_lora import expert_table
from trimtab.engine.kernels import experts as kernels
from trimtab.engine.kernels import routers

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.families.decoder import Experts, Layer
    from trimtab.engine.layers.leaves import Leaf
    from trimtab.engine.lora.experts import ExpertsAdapter
    from trimtab.engine.lora.store import AdapterStore


def hold(layers: Sequence[Layer], name: str | None) -> bool:
    """Make the tables of an adapter that every token of the next passes has; whether kernels add all that it changes of experts."""
    is_whole = True
    for own in (layer.experts for layer in layers if layer.experts is not None):
        adapter: ExpertsAdapter | None = vars(own.module).get("adapters", {}).get(name)
        if adapter is None or adapter in own.tables:
            continue
        if own.takes_many and expert_table.why_not(adapter) is None:
            own.tables[adapter] = expert_table.tables_of(adapter, int(own.module.num_experts))
        else:
            is_whole = False
    return is_whole


def routed(
    own: Experts, x: Tensor, rows: int, product: Callable[[Sequence[Leaf], Tensor], Tensor] | None, module: nvrtc.Module | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the numbers [n, K] and weights [n, K] of x's experts, x [n, D]. rows: as `Experts.chosen` has it. product: of a step,
    with the adapters of its rows; None: the router computes as it is. module: of kernels between products."""
    route = own.route if product is not None and module is not None else None
    if route is None or product is None or not route.takes(x, int(own.module.num_experts)):
        return own.chosen(x, rows)
    given = x if route.scale is None else routers.normed(x, route.scale, route.factor, route.eps, module)
    if route.linear is not None:
        logits = product([route.linear], given)
    else:
        assert route.weight is not None
        logits = functional.linear(given, route.weight)
    return routers.choose(logits, route.choice, route.expert_scale, module)


def experts_of(
    own: Experts, x: Tensor, chosen: tuple[Tensor, Tensor], rows: int, activation: str, store: AdapterStore,
    module: nvrtc.Module | None,
) -> Tensor:  # fmt: skip
    """Return the experts' output for x [n, D]. chosen: as `routed` gives it. rows: as `Experts.chosen` has it. module: of the
    kernels, None without."""
    numbers, weights = chosen
    table, adapters = store.table, vars(own.module).get("adapters", {})
    lora = None if table is None else table.expert_args(own.module, rows if rows > 1 else len(x))  # a step's tokens are rows
    used = [adapters[name] for name in store.selection.active() if name in adapters]
    if store.selection.rows is None and used:
        lora = own.tables.get(used[0])
    is_apart = bool(used) and lora is None  # adapters that no table holds are added by the module's own way
    # Many tokens without adapters over unpacked experts: torch's grouped product, unless only the kernels can be captured.
    is_many = len(x) > kernels.MOST_ROWS and lora is None
    is_plain = is_many and not (own.is_packed or (store.groups_on_host and own.takes_many))
    if module is None or is_apart or is_plain or not own.has_mixture:
        made: Tensor = own.module(x, numbers, weights)
        return made
    return kernels.experts(x, numbers, weights, own.mixture(activation), x.new_empty(x.shape), lora=lora, module=module)
