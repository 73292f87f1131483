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
    own: Experts, x: Tensor, read: Tensor, rows: int, activation: str, store: AdapterStore, module: nvrtc.Module | None
) -> Tensor:  # fmt: skip
    """Return the experts' output for x [n, D], of which the router reads `read` [n, D]. rows: as `Experts.chosen` has it.
    module: of the kernels, None without."""
    numbers, weights = own.chosen(read, rows)
    table, adapters = store.table, vars(own.module).get("adapters", {})
    # Adapters that no table holds are added by the module's own way.
    is_apart = any(name in adapters for name in store.selection.active())
    lora = None if table is None else table.expert_args(own.module, len(x))
    # Of many tokens the kernels take packed stacks without adapters; torch's grouped product is for 16 bits.
    is_many = len(x) > kernels.MOST_ROWS and (lora is not None or not own.is_packed)
    if module is None or is_apart or is_many or not own.has_mixture:
        made: Tensor = own.module(x, numbers, weights)
        return made
    return kernels.experts(x, numbers, weights, own.mixture(activation), x.new_empty(x.shape), lora=lora, module=module)
