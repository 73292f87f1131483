"""Which NVIDIA GPUs does this machine have, and how much memory is free, by the driver's libraries without a context?"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

Answer = TypeVar("Answer")

# cuda.h: CUDA_ERROR_NO_DEVICE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ..._COMPUTE_CAPABILITY_MAJOR and _MINOR,
# ..._CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
_NO_DEVICE = 100
_NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR, _HOST_POINTERS = 16, 75, 76, 91


@dataclass(frozen=True)
class Gpu:
    """One GPU. free_bytes: of the device, before this process has a context there. driver: the CUDA release that it supports.
    reads_host: whether kernels read page-locked host memory at its own address."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    free_bytes: int
    driver: tuple[int, int]
    reads_host: bool = True


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class _UnknownError(Exception):
    """The driver's libraries cannot be queried."""


def read_gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs in CUDA's order, empty without a driver or a GPU; None if the driver cannot be queried. The driver numbers
    GPUs as CUDA does (CUDA_VISIBLE_DEVICES included); NVML is queried by UUID."""
    return _asked(lambda cuda, nvml: tuple(_gpu(cuda, nvml, index, _driver(cuda)) for index in range(_int(cuda.cuDeviceGetCount))))


def busy_percent(index: int) -> int | None:
    """Return the utilization of a GPU in about the last second, as NVML counts it; None if the driver does not report it."""

    def ask(cuda: ctypes.CDLL, nvml: ctypes.CDLL) -> tuple[int, ...]:
        utilization = _Utilization()
        device = ctypes.c_int(_int(cuda.cuDeviceGet, ctypes.c_int(index)))
        _check(nvml.nvmlDeviceGetUtilizationRates(_handle(cuda, nvml, device), ctypes.byref(utilization)))
        return (int(utilization.gpu),)

    return next(iter(_asked(ask) or ()), None)


def _asked(ask: Callable[[ctypes.CDLL, ctypes.CDLL], tuple[Answer, ...]]) -> tuple[Answer, ...] | None:
    """Return the GPUs from the driver's libraries, empty without a driver or a GPU; None if they cannot be queried."""
    if sys.platform == "darwin":
        return ()
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return ()
    try:
        code = cuda.cuInit(0)
        if code == _NO_DEVICE:
            return ()
        _check(code)
        with _opened_nvml() as nvml:
            return ask(cuda, nvml)
    except (OSError, AttributeError, _UnknownError):
        return None


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver, None without one. Source: NVML, nvmlSystemGetDriverVersion."""
    buffer = ctypes.create_string_buffer(96)
    with suppress(OSError, AttributeError, _UnknownError), _opened_nvml() as nvml:
        _check(nvml.nvmlSystemGetDriverVersion(buffer, ctypes.c_uint(len(buffer))))
        return buffer.value.decode("ascii", "replace")
    return None


@contextmanager
def _opened_nvml() -> Iterator[ctypes.CDLL]:
    """Yield NVIDIA's management library, initialized. Errors: OSError without it, _UnknownError if it refuses."""
    nvml = ctypes.CDLL(_NVML)
    _check(nvml.nvmlInit_v2())
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _driver(cuda: ctypes.CDLL) -> tuple[int, int]:
    driver = _int(cuda.cuDriverGetVersion)
    return driver // 1000, driver % 1000 // 10


def _check(code: int) -> None:
    if code:
        raise _UnknownError(code)


def _int(function: Callable[..., int], *args: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(function(ctypes.byref(value), *args))
    return value.value


def _gpu(cuda: ctypes.CDLL, nvml: ctypes.CDLL, index: int, driver: tuple[int, int]) -> Gpu:
    device = ctypes.c_int(_int(cuda.cuDeviceGet, ctypes.c_int(index)))
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(cuda.cuDeviceGetName(name, ctypes.c_int(256), device))
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))

    def attribute(which: int) -> int:
        return _int(cuda.cuDeviceGetAttribute, ctypes.c_int(which), device)

    return Gpu(
        name.value.decode(errors="replace"), (attribute(_MAJOR), attribute(_MINOR)), attribute(_MULTIPROCESSORS),
        total.value, _free_bytes(cuda, nvml, device), driver, bool(attribute(_HOST_POINTERS)),
    )  # fmt: skip


def _free_bytes(cuda: ctypes.CDLL, nvml: ctypes.CDLL, device: ctypes.c_int) -> int:
    memory = _Memory()
    _check(nvml.nvmlDeviceGetMemoryInfo(_handle(cuda, nvml, device), ctypes.byref(memory)))
    return int(memory.free)


def _handle(cuda: ctypes.CDLL, nvml: ctypes.CDLL, device: ctypes.c_int) -> ctypes.c_void_p:
    raw = (ctypes.c_ubyte * 16)()
    _check(cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device))
    named, handle = uuid.UUID(bytes=bytes(raw)), ctypes.c_void_p()
    # A slice of a shared card (MIG) has its own UUID.
    if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{named}".encode(), ctypes.byref(handle)):
        _check(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{named}".encode(), ctypes.byref(handle)))
    return handle


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
        library = ctypes.CDLL(_NVML)
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def process_bytes(uuid: str, pid: int | None = None) -> int | None:
    """Return the driver's bytes for a process (None: this one) on the GPU of a UUID: context, code, graphs, workspaces and torch's
    allocator together. None if NVIDIA's management library, the device or the figure is missing: Windows' display driver model
    does not report it, nor does a container whose process ids differ from the host's.

    Source: NVML API reference, nvmlDeviceGetComputeRunningProcesses_v3 (driver 510 and newer).
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
