"""How much device memory is reserved in one segment for temporary tensors when a model is loaded?"""

from __future__ import annotations

from contextlib import suppress

import torch

from trimtab.planning import Plan
from trimtab.planning.values.execution import CAPTURED, SMALL_BUDGET_BYTES
from trimtab.planning.values.rows import OUTSIDE_PEAK

# Left to segments of 2 MiB for small tensors, and to those of other streams than the one that prompts run on.
LEFT_BYTES = 32 * 2**20
# Less than this is not worth a segment.
LEAST_BYTES = 16 * 2**20
# The plan's count of the driver's own memory, which is not torch's.
_DRIVER = tuple(name for name in OUTSIDE_PEAK if name not in ("allocator_reserve", "fragments"))


def torch_bytes(plan: Plan) -> int:
    """Return the bytes that the plan counts for torch: tensors at their peak, and its allocator's memory beyond them."""
    return plan.gpu_needed_bytes - sum(plan.gpu.get(name, 0) for name in _DRIVER)


def is_wanted(plan: Plan, device: torch.device) -> bool:
    """Whether torch reserves the rest of the bytes that the plan counts for it: then every graph is captured before.

    Within small budgets only, as a larger one leaves room for segments, and not where prompts are captured: their graphs have
    separate memory, and some are captured later.
    """
    is_small = plan.gpu_budget_bytes < SMALL_BUDGET_BYTES
    return device.type == "cuda" and is_small and plan.execution.prompt.mode not in CAPTURED


def take(plan: Plan, device: torch.device) -> int:
    """Let torch hold the rest of the planned bytes in one segment, if `is_wanted`. Returns its bytes, 0 if there is no rest.

    Unneeded memory that torch holds is freed first. If the device has less left, nothing is taken, and the memory is allocated when
    it is needed. torch takes segments of 20 MiB, or of a tensor's own size above 10 MiB, and never joins parts of two: it splits
    and joins one segment of the whole room.
    """
    if not is_wanted(plan, device):
        return 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    rest = min(torch_bytes(plan) - int(torch.cuda.memory_reserved(device)), free) - LEFT_BYTES
    if rest < LEAST_BYTES:
        return 0
    with suppress(torch.OutOfMemoryError):
        torch.empty(rest, dtype=torch.uint8, device=device)  # given up at once: torch keeps the segment
        return rest
    return 0
