"""The driver's memory for this process on a GPU: context, code, graphs, workspaces and torch's allocator together.

None if NVIDIA's management library, the device or the figure is missing: Windows' display driver model does not report
it, nor does a container whose process ids differ from the host's.

Source: NVML API reference, nvmlDeviceGetComputeRunningProcesses_v3 (driver 510 and newer).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache

_MOST_PROCESSES = 256
_NOT_KNOWN = 2**64 - 1
_MORE_ROOM = 7  # NVML_ERROR_INSUFFICIENT_SIZE


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """Return the library, initialized until the process ends; None if it is missing or fails."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def process_bytes(uuid: str, pid: int | None = None) -> int | None:
    """Return the bytes that the driver holds for a process (None: this one) on the GPU of a UUID; None if it does not
    report them.
    """
    library, handle = _library(), ctypes.c_void_p()
    function = None if library is None else getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if library is None or function is None:
        return None
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
        return None
    count, rows = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if function(handle, ctypes.byref(count), rows) not in (0, _MORE_ROOM):
        return None
    wanted = os.getpid() if pid is None else pid
    used = [row.used for row in rows[: count.value] if row.pid == wanted]
    return None if not used or used[0] == _NOT_KNOWN else int(used[0])
