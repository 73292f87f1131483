"""Which GPUs, memory and link rates does the machine have, measured once and cached?"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trimtab.engine.cuda import nvrtc
from trimtab.errors import DeviceError, gib
from trimtab.machine import gpus, machine_cache
from trimtab.machine.machine_cache import resolve
from trimtab.machine.memory import cpu_name, process_bytes, spill_folder
from trimtab.planning import Machine, Plan, Rates
from trimtab.planning.request.card_machine import THREAD_STACK_BYTES, context_bytes
from trimtab.planning.values.execution import SMALL_BUDGET_BYTES
from trimtab.request import DEFAULT_QUANT

# cuBLAS takes a workspace for every stream, 32 MiB on compute capability 9.0 and 8.1 MiB on most others, and keeps another one.
# Within a small budget it gets the smaller one everywhere.
WORKSPACE_CONFIG = ":4096:2:16:8"
# CU_LIMIT_STACK_SIZE (cuda.h).
_STACK_LIMIT = 0
ROOM_TOLERANCE_BYTES = 64 * 2**20
SAMPLE_BYTES = 64 * 2**20
# A machine is busy if its GPU was used for at least this share of the last second, or if threads of this process got at most this
# share of their cores: on two cores 0.99 to 1.00 without other programs, 0.49 next to two of them.
BUSY_GPU_PERCENT, BUSY_CPU_SHARE, BUSY_SAMPLE_S = 20, 0.8, 0.1
DISK_SAMPLE_BYTES = 32 * 2**20
SMALL_READ_BYTES = 4096
GEMV_SIDE = 2048
# Calls of torch in `_operation_s`'s norm, layer and sum.
SMALL_OPERATIONS = 12


# Memory ---------------------------------------------------------------------------------------------------------------


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda:N" for the requested device. Errors: RequestError if there is no such GPU."""
    return resolve(device, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def read_machine(device: str = "auto", *, budget_bytes: int | None = None) -> Machine:
    """Return the machine's memory as a plan needs it. budget_bytes: of the GPU, None for the free memory.

    Loading takes the memory of the libraries that `runtime.model` imports too: import it before this call, since a plan
    that counts the process without them counts too little.
    """
    resolved = resolve_device(device)
    if resolved == "cpu":
        return machine_cache.cpu_machine(process_bytes())
    torch.empty(1, device=resolved)  # the context exists from here on and is no longer counted as free
    bound_stacks(resolved)
    free, total = torch.cuda.mem_get_info(resolved)
    properties = torch.cuda.get_device_properties(resolved)
    # Memory that this process has already is available to it: its context, its kernels and torch's cache.
    own = gpu_process_bytes(resolved)
    available = free + own - torch.cuda.memory_allocated(resolved)
    bound_workspaces(min(available, budget_bytes or available))
    multiprocessors = int(properties.multi_processor_count)
    return machine_cache.gpu_machine(
        resolved, total_bytes=total, free_bytes=max(available - context_bytes(multiprocessors), 0), process=process_bytes(),
        capability=(properties.major, properties.minor), multiprocessors=multiprocessors,
        reads_host=nvrtc.reads_registered_memory(torch.device(resolved)),
    )  # fmt: skip


def bound_workspaces(budget_bytes: int) -> None:
    """Make cuBLAS use smaller workspaces where the budget is small; has no effect after the first matmul of the process."""
    if budget_bytes < SMALL_BUDGET_BYTES:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE_CONFIG)


def bound_stacks(device: str | torch.device) -> bool:
    """Make the context keep smaller stacks for the threads of kernels; returns whether the driver accepted it.

    The driver makes them larger for a kernel that needs more, at its launch; a kernel whose need it does not know (recursion, calls
    by address) has this much. Without it, or where the driver refuses, a context takes 1 MiB a multiprocessor more than is counted.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the context is there and current
            return int(driver.cuCtxSetLimit(_STACK_LIMIT, ctypes.c_size_t(THREAD_STACK_BYTES))) == 0
    except (OSError, AttributeError):
        return False


def gpu_process_bytes(device: str | torch.device) -> int:
    """Return the driver's bytes for this process on a GPU: its own figure, or an estimate where it does not tell."""
    return process_on_gpu(device)[0]


def process_on_gpu(device: str | torch.device) -> tuple[int, bool]:
    """Return the driver's bytes for this process on a GPU, and whether that is an estimate: the driver does not tell under
    Windows' display driver model and in most containers. An estimate leaves out kernels and graphs."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    nbytes = None if uuid is None else gpus.process_bytes(str(uuid))
    if nbytes is not None:
        return nbytes, False
    return context_bytes(int(properties.multi_processor_count)) + int(torch.cuda.memory_reserved(device)), True


def outside_torch(device: torch.device) -> int:
    """Return the driver's bytes for this process without torch's tensors; 0 without a GPU; an estimate has no graphs."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return gpu_process_bytes(device) - int(torch.cuda.memory_reserved(device))


def check_room(plan: Plan) -> None:
    """Raise DeviceError unless the GPU of a plan has the planned bytes free, or this process holds them already.

    Free memory changes a little from one moment to the next. A difference of that size is accepted.
    """
    free, _ = torch.cuda.mem_get_info(plan.execution_device)
    available = free + gpu_process_bytes(plan.execution_device) - torch.cuda.memory_allocated(plan.execution_device)
    needed = plan.gpu_needed_bytes
    if available < needed - ROOM_TOLERANCE_BYTES:
        raise DeviceError(
            f"the plan counts {gib(needed)} for this process, and {gib(available)} are free", device=plan.execution_device,
            planned_bytes=needed, free_bytes=int(free),
            hint=f"Close other programs on the GPU, or plan again with gpu_memory='{available // 2**20}MiB'",
        )  # fmt: skip


def gpu_names() -> list[tuple[str, int]]:
    """Return name and total bytes of every GPU that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [(device_name(f"cuda:{i}"), int(torch.cuda.get_device_properties(i).total_memory)) for i in range(count)]


def device_name(device: str) -> str:
    """Return the name of a GPU, or the processor's."""
    return str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else cpu_name()


# Link rates -----------------------------------------------------------------------------------------------------------


def measure_rates(device: str, *, cache: bool = True) -> Rates:
    """Return the machine's rates, measured now or from the cache. device: "cpu" or "cuda:N".

    Rates of a machine that others keep busy are too low, and kept for minutes only. Rates are medians of runs under half a second.
    The disk is the cache folder's; on Windows and macOS a file cannot be put out of the page cache, whose rate is then an upper
    bound.
    """
    key = (device_name(device), str(torch.__version__), torch.get_num_threads())
    if cache and (kept := machine_cache.read_rates(*key)) is not None:
        return kept
    before = _gpu_is_busy(torch.device(device))
    rates = _measure(torch.device(device))
    if cache:
        machine_cache.write_rates(*key, rates, is_busy=before or _cpu_is_busy())
    return rates


def _gpu_is_busy(device: torch.device) -> bool:
    """Whether a GPU computes for others: this process has not begun to."""
    return device.type == "cuda" and (gpus.busy_percent(device.index or 0) or 0) > BUSY_GPU_PERCENT


def _cpu_is_busy() -> bool:
    """Whether this process's threads get less than their share of the cores for a product that keeps all of them busy."""
    side = torch.ones(GEMV_SIDE, GEMV_SIDE)
    torch.mm(side, side)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall_s < BUSY_SAMPLE_S:
        torch.mm(side, side)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return cpu_s < BUSY_CPU_SHARE * wall_s * torch.get_num_threads()


def _median_s(run: Callable[[], object], repeat: int = 5) -> float:
    run()
    times_s = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return max(statistics.median(times_s), 1e-9)


def _measure(device: torch.device) -> Rates:
    host = torch.ones(SAMPLE_BYTES, dtype=torch.uint8)
    copy = torch.empty_like(host)
    host_rate = SAMPLE_BYTES / _median_s(lambda: copy.copy_(host))
    measured = {"host_Bps": host_rate, **_host_products(), **_measure_disk()}
    return Rates(**measured, **(_measure_cuda(device, host) if device.type == "cuda" else _as_device(measured)))


def _host_products() -> dict[str, float]:
    """Return bytes a second of one-row products by the form of the weight, and operations a second of one with many rows."""
    from trimtab.engine.formats.packed import keep
    from trimtab.engine.formats.weights import quantize, shell

    square = torch.randn(GEMV_SIDE, GEMV_SIDE).to(torch.bfloat16)
    # Larger than the processor's caches, as a model is.
    wide = torch.ones(SAMPLE_BYTES // (4 * GEMV_SIDE), GEMV_SIDE)
    forms = {
        "host_matmul_Bps": quantize(square, DEFAULT_QUANT), "host_16bit_Bps": keep(wide.to(torch.bfloat16)),
        "host_float32_Bps": keep(wide), "host_int8_Bps": quantize(square, "int8"),
    }  # fmt: skip
    many = torch.randn(128, GEMV_SIDE).to(torch.bfloat16)
    measured = {}
    with torch.no_grad():
        for name, packed in forms.items():
            dtype = torch.float32 if name == "host_float32_Bps" else torch.bfloat16
            layer, row = shell(packed, None, dtype), many[:1].to(dtype)
            measured[name] = packed.nbytes / _median_s(partial(layer, row))
        many_s = _median_s(lambda: torch.nn.functional.linear(many, square), repeat=3)
    return measured | {"host_flops": 2 * many.numel() * GEMV_SIDE / many_s}


def _as_device(measured: dict[str, float]) -> dict[str, float]:
    """Return the rates of the execution device when that is the CPU: its own, and no link."""
    small, other = torch.zeros(16), torch.zeros(16)
    return {
        "pinned_h2d_Bps": measured["host_Bps"], "pageable_h2d_Bps": measured["host_Bps"],
        "device_Bps": measured["host_matmul_Bps"], "device_flops": measured["host_flops"], "launch_s": _operation_s(),
        "transfer_s": _median_s(lambda: other.copy_(small), repeat=50),
    }  # fmt: skip


def _operation_s() -> float:
    """Return the mean seconds of one small operation: a norm, a linear layer and a sum as in a decoder, with this machine's Python,
    torch and other work."""
    from trimtab.engine.formats.packed import keep
    from trimtab.engine.formats.weights import shell

    row = torch.ones(1, 1, 64, dtype=torch.bfloat16)
    layer = shell(keep(row.new_ones(64, 64)), None, row.dtype)

    def small() -> Tensor:
        wide = row.float()
        normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
        return row + layer((normed * wide).to(row.dtype))

    with torch.no_grad():
        _median_s(small)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < BUSY_SAMPLE_S:
            small()
            count += 1
        return (time.perf_counter() - start) / (count * SMALL_OPERATIONS)


def _measure_cuda(device: torch.device, host: Tensor) -> dict[str, float]:
    from trimtab.engine.tiers.reader import HostMemory

    first, second = (torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)

    def taken_s(run: Callable[[], object], count: int = 1) -> float:
        def several() -> None:
            for _ in range(count):
                run()
            torch.cuda.synchronize(device)

        return _median_s(several) / count

    pinned = HostMemory(SAMPLE_BYTES, pinned=True)
    try:
        return {
            "pinned_h2d_Bps": SAMPLE_BYTES / taken_s(lambda: first.copy_(pinned.tensor, non_blocking=True)),
            "pageable_h2d_Bps": SAMPLE_BYTES / taken_s(lambda: first.copy_(host)),
            # Read and written: a copy moves every byte twice.
            "device_Bps": 2 * SAMPLE_BYTES / taken_s(lambda: second.copy_(first), count=4),
            "device_flops": 2 * 4096**3 / taken_s(lambda: torch.mm(square, square)),
            "launch_s": taken_s(lambda: first[:16].add_(1), count=200),
            "transfer_s": taken_s(lambda: first[:16].copy_(pinned.tensor[:16], non_blocking=True)),
        }
    finally:
        pinned.close()
        first = second = square = torch.empty(0)
        torch.cuda.empty_cache()


def _measure_disk() -> dict[str, float]:
    """Return the rate and the access time of reading the disk of the cache folder; nothing if it cannot be written."""
    folder = spill_folder(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(os.urandom(2**20) * (DISK_SAMPLE_BYTES // 2**20))
            os.fsync(file.fileno())
            buffer = bytearray(DISK_SAMPLE_BYTES)
            access_s = _median_s(lambda: _read_at_random(file.fileno()), repeat=9)
            _forget_cached(file.fileno())
            start = time.perf_counter()
            file.seek(0)
            file.readinto(buffer)  # type: ignore[attr-defined]
            return {"disk_Bps": DISK_SAMPLE_BYTES / (time.perf_counter() - start), "disk_access_s": access_s}
    except OSError:
        return {}


def _read_at_random(descriptor: int) -> None:
    _forget_cached(descriptor)
    os.lseek(descriptor, random.randrange(DISK_SAMPLE_BYTES // SMALL_READ_BYTES) * SMALL_READ_BYTES, os.SEEK_SET)
    os.read(descriptor, SMALL_READ_BYTES)


def _forget_cached(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
