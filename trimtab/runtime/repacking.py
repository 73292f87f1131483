"""Repacking for AVX512-BF16: the 4-bit layers on the CPU in the layout of the stock stack (`decode="repacked"`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from trimtab.errors import RequestError, gib
from trimtab.runtime.leaves import Leaf, StillLeaf
from trimtab.runtime.quant import repacked_bytes
from trimtab.runtime.step_choice import Fallback

if TYPE_CHECKING:
    from trimtab.runtime.model import LoadedModel


def repack(model: LoadedModel) -> tuple[Fallback, ...]:
    """Repack every layer on the CPU that allows it; return one fallback if some layers do not.

    Errors: RequestError if no layer can be repacked, or if the rounded scales do not fit the budget that the plan leaves.
    """
    leaves = [module for module in model.hf_model.modules() if isinstance(module, Leaf) and module.quant_kind != "none"]
    reasons = {leaf: leaf.why_not_repacked() for leaf in leaves}
    chosen = [leaf for leaf in leaves if isinstance(leaf, StillLeaf) and reasons[leaf] is None]
    if not chosen:
        most_common = Counter(reasons.values()).most_common(1)
        raise RequestError(
            f"would change no layer: {most_common[0][0] if most_common else 'none is quantized'}", field="decode",
            value="repacked", hint="Leave it out",
        )  # fmt: skip
    _check_room(model, chosen)
    for leaf in chosen:
        leaf.repack()
    on_cpu = [leaf for leaf in leaves if isinstance(leaf, StillLeaf) and leaf.is_on_cpu]
    unchanged = [reason for leaf in on_cpu if (reason := reasons[leaf]) is not None]
    if not unchanged:
        return ()
    return (Fallback("repacked products", f"not of {len(unchanged)} layers: {unchanged[0]}"),)


def _check_room(model: LoadedModel, chosen: list[StillLeaf]) -> None:
    plan, needed_bytes = model.plan, sum(repacked_bytes(leaf.stored) for leaf in chosen)
    if model.device.type == "cpu":
        free_bytes = plan.gpu_budget_bytes - plan.gpu_needed_bytes
    else:
        free_bytes = plan.host_budget_bytes - plan.host_peak_bytes
    if needed_bytes > free_bytes:
        raise RequestError(
            f"the rounded scales of {len(chosen)} layers take {gib(needed_bytes)} beside the plan, whose budget leaves "
            f"{gib(max(free_bytes, 0))}", field="decode", value="repacked", hint="Plan with a larger budget, or leave it out",
        )  # fmt: skip
