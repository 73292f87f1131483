"""How is an out-of-memory error of a GPU recognized, and which numbers of the plan do users get?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trimtab.engine.memory.rates import gpu_process_bytes
from trimtab.errors import DeviceError, gib
from trimtab.planning import Plan

# Texts of torch (CUDA runtime), cuBLAS, cuDNN and the driver (engine/cuda/nvrtc.py), where they have no error class for it.
_WORDS = (
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "out of memory (CUDA error 2)",
)  # fmt: skip
# Texts of torch's allocator for host memory, which has no error class, and of oneDNN when it gets none.
_HOST_WORDS = ("can't allocate memory", "not enough memory", "could not create a primitive")
MIB = 2**20
# Of a suggested budget: the share left to other programs, and the step to which it is rounded.
_MARGIN_BYTES = 64 * MIB


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an error says that the GPU's memory did not suffice; host memory is another matter."""
    if isinstance(exc, DeviceError) and exc.planned_bytes is not None:
        return True
    return isinstance(exc, torch.OutOfMemoryError) or any(words in str(exc) for words in _WORDS)


def is_host_memory(exc: BaseException) -> bool:
    """Return whether an error says that the host's memory did not suffice."""
    return isinstance(exc, MemoryError) or any(words in str(exc) for words in _HOST_WORDS)


def reason_of(exc: Exception, device: torch.device | str) -> str:
    """Return why a kernel is not used whose check failed so: it cannot be launched on this card, say. The slower way is correct.

    Errors: `exc` itself where memory ran out, for nothing is wrong with the kernel then; CUDA's own where the device is lost.
    """
    if is_out_of_memory(exc):
        raise exc
    if isinstance(exc, DeviceError):
        return str(exc)
    torch.zeros(1, device=device).item()
    return f"{type(exc).__name__}: {exc}"


def memory_error(exc: BaseException, what: str, plan: Plan, device: torch.device) -> DeviceError:
    """Return the error of a device that ran out of memory, with the plan's figures and a budget that may fit."""
    if isinstance(exc, DeviceError) and exc.planned_bytes is not None:
        return exc
    free = process = 0
    if device.type == "cuda":
        free, process = torch.cuda.mem_get_info(device)[0], gpu_process_bytes(device)
    planned, budget = plan.gpu_needed_bytes, plan.gpu_budget_bytes
    # Memory of other programs is unavailable; memory of this process beyond its plan was counted too low.
    smaller = min(process + free, budget) - _MARGIN_BYTES if process else budget - _MARGIN_BYTES
    if process > planned:
        smaller = min(smaller, budget - (process - planned) - _MARGIN_BYTES)
    wanted = max(smaller, MIB) // MIB
    return DeviceError(
        f"out of memory while {what}: the plan counts {gib(planned)} for this process within a budget of {gib(budget)}, the "
        f"process holds {gib(process)} and {gib(free)} are free ({str(exc).splitlines()[0]})",
        device=str(device), planned_bytes=planned, free_bytes=free,
        hint=f"Close other programs on the GPU, or plan again with gpu_memory='{wanted}MiB'",
    )  # fmt: skip


@contextmanager
def naming_out_of_memory(what: str, plan: Plan, device: torch.device) -> Iterator[None]:
    """Raise DeviceError with the plan's figures where the block runs out of the device's memory; other errors stay themselves."""
    try:
        yield
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        named = memory_error(exc, what, plan, device)
        if named is exc:
            raise
        raise named from exc
