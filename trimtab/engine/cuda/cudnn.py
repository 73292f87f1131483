"""cuDNN's attention in this process: off while a model with a small GPU budget is open.

torch prefers it on compute capability 9.0 and 10.x. cuDNN compiles a kernel for every new length of a prompt and keeps it in the
driver's memory, which no plan can count and which is never given back; on a full card it fails (pytorch/pytorch#190321). Torch's
other implementations take no such memory.

torch has one setting for a process (`torch.backends.cuda.enable_cudnn_sdp`), so it also applies to larger models that are open
at the same time; `why_without` says so. The user's setting returns when the last small model is closed or dropped. A setting that
the user changes in between is seen only where it is on: an explicit off counts as this module's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache

import torch

from trimtab.planning import Plan
from trimtab.planning.values.execution import SMALL_BUDGET_BYTES

# Compute capabilities (major) on which torch prefers cuDNN's attention (2.9 and later).
PREFERRED_ON = (9, 10)


class AttentionGuard:
    """The open models that need a process without cuDNN's attention, and the setting that returns after them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may drop a model while this thread holds it
        self._models: list[object] = []
        self._before = False

    def leave_out(self, model: object) -> Callable[[], object]:
        """Switch cuDNN's attention off until the returned function is called, or the model is collected."""
        token = object()
        with self._lock:
            self._before = self._before or torch.backends.cuda.cudnn_sdp_enabled()
            self._models.append(token)
            torch.backends.cuda.enable_cudnn_sdp(False)
        release = weakref.finalize(model, self._release, token)
        release.atexit = False
        return release

    @property
    def is_forced(self) -> bool:
        """Whether cuDNN's attention would be on if it were not for an open model."""
        with self._lock:
            return bool(self._models) and self._before and not torch.backends.cuda.cudnn_sdp_enabled()

    def _release(self, token: object) -> None:
        with self._lock:
            self._models.remove(token)
            if not self._models and self._before:
                self._before = False
                torch.backends.cuda.enable_cudnn_sdp(True)


@cache
def of_this_process() -> AttentionGuard:
    """Return the process's guard: the setting belongs to the process, not to a model."""
    return AttentionGuard()


def is_left_out(plan: Plan) -> bool:
    """Whether a model of this plan computes without cuDNN's attention: on a GPU, within a small budget."""
    return plan.execution_device != "cpu" and plan.gpu_budget_bytes < SMALL_BUDGET_BYTES


def prefers_cudnn(device: torch.device) -> bool:
    """Whether torch would take cuDNN's attention on this device if it were on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in PREFERRED_ON


def why_without(plan: Plan, device: torch.device) -> str | None:
    """Return why a model whose own budget is large computes without cuDNN's attention now, None if it does not."""
    if is_left_out(plan) or not prefers_cudnn(device) or not of_this_process().is_forced:
        return None
    gib = SMALL_BUDGET_BYTES // 2**30
    return f"another open model of this process has a GPU budget below {gib} GiB, where it takes memory that no plan counts"
