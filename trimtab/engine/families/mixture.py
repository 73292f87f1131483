"""What do a layer's experts make of the tokens of a step or chunk? Kernels read chosen experts alone; else the module computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from trimtab.engine.kernels import experts as kernels

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.families.decoder import Experts
    from trimtab.engine.lora.store import AdapterStore


def experts_of(
    own: Experts, x: Tensor, read: Tensor, activation: str, store: AdapterStore, module: nvrtc.Module | None
) -> Tensor:  # fmt: skip
    """Return the experts' output for x [n, D], of which the router reads `read` [n, D]. module: of the kernels, None without."""
    numbers, weights = own.chosen(read)
    table, selection = store.table, store.selection
    # Adapters that no table holds are added by the module's own way.
    is_apart = table is None and bool(selection.name or selection.rows) and bool(vars(own.module).get("adapters"))
    if module is None or is_apart or not own.has_mixture or len(x) > kernels.MOST_ROWS:
        made: Tensor = own.module(x, numbers, weights)
        return made
    lora = None if table is None else table.expert_args(own.module, len(x))
    return kernels.experts(x, numbers, weights, own.mixture(activation), x.new_empty(x.shape), lora=lora, module=module)
