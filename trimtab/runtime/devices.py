"""What the machine has: memory by device, names, and link rates measured once and cached. Alone asks for memory.

Rates are medians of a few short runs (under half a second each) and go to a JSON file in the user's cache folder, keyed
by device and torch version; a file that cannot be read is measured again.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import psutil
import torch
from platformdirs import user_cache_path

from trimtab.errors import RequestError
from trimtab.plan import Machine, Rates

CONTEXT_BYTES = 500 * 2**20  # a CUDA context with cuBLAS and bitsandbytes loaded; measured where NVML can be asked
SAMPLE_BYTES = 64 * 2**20
CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda:N" for what the user asked. Errors: RequestError if there is no such GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device == "cpu":
        return "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        allowed = ["cpu", *(f"cuda:{i}" for i in range(count))]
        raise RequestError(f"this machine has {count} CUDA devices", field="device", value=device, allowed=allowed)
    return f"cuda:{index}"


def read_machine(device: str = "auto") -> Machine:
    """Return the machine's memory as a plan needs it."""
    resolved = resolve_device(device)
    if resolved == "cpu":
        return Machine(
            execution_device="cpu", host_available_bytes=host_available_bytes(), process_bytes=process_bytes(),
            has_pinned=False,
        )  # fmt: skip
    torch.cuda.init()
    torch.empty(1, device=resolved)  # the context exists from here on and is no longer counted as free
    free, total = torch.cuda.mem_get_info(resolved)
    free += torch.cuda.memory_reserved(resolved) - torch.cuda.memory_allocated(resolved)
    return Machine(
        execution_device=resolved, gpu_total_bytes=total, gpu_free_bytes=free,
        host_available_bytes=host_available_bytes(), context_bytes=CONTEXT_BYTES, process_bytes=process_bytes(),
    )  # fmt: skip


def device_name(device: str) -> str:
    """Return the name of a GPU, or the processor's."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return platform.processor() or platform.machine()


def host_available_bytes() -> int:
    """Return the host memory that can still be taken, within a container's limit where there is one."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in CGROUP_LIMITS:
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
            if limit.isdecimal() and int(limit) < 2**60:
                available = min(available, max(int(limit) - int(used), 0))
        except (OSError, ValueError):
            continue
    return available


def process_bytes() -> int:
    """Return the resident host memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_host_bytes() -> int:
    """Return the largest resident host memory that this process has had."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def spill_folder(offload_dir: str | None) -> Path:
    """Return the folder of the disk tier's file."""
    return Path(offload_dir) if offload_dir else user_cache_path("trimtab") / "spill"


def disk_free_bytes(offload_dir: str | None) -> int:
    """Return the free bytes of the disk that the spill folder is on."""
    folder = spill_folder(offload_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    return int(psutil.disk_usage(str(folder)).free)


# Link rates -----------------------------------------------------------------------------------------------------------


def measure_rates(device: str, *, cache: bool = True) -> Rates:
    """Return the machine's link rates in bytes per second, measured now or read from the cache."""
    file = user_cache_path("trimtab") / f"rates-{_slug(device_name(device))}-torch{_slug(torch.__version__)}.json"
    if cache and (found := _read_rates(file)) is not None:
        return found
    rates = _measure(torch.device(device))
    if cache:
        _write_rates(file, rates)
    return rates


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in text) or "unknown"


def _read_rates(file: Path) -> Rates | None:
    names = {item.name for item in fields(Rates)}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if set(found) != names or not all(isinstance(value, (int, float)) and value > 0 for value in found.values()):
            return None
        return Rates(**found)
    except (OSError, ValueError, TypeError):
        return None


def _write_rates(file: Path, rates: Rates) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as handle:
            json.dump(asdict(rates), handle)
        os.replace(handle.name, file)
    except OSError:
        return  # a cache that cannot be written costs time only


def _median_s(run: Callable[[], object], repeat: int = 5) -> float:
    run()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return max(statistics.median(taken), 1e-9)


def _measure(device: torch.device) -> Rates:
    host = torch.ones(SAMPLE_BYTES, dtype=torch.uint8)
    copy = torch.empty_like(host)
    measured: dict[str, float] = {"host_Bps": SAMPLE_BYTES / _median_s(lambda: copy.copy_(host))}
    measured["disk_Bps"] = _disk_rate()
    side = 2048
    weight, x = torch.randn(side, side).to(torch.bfloat16), torch.randn(1, side).to(torch.bfloat16)
    measured["host_matmul_Bps"] = weight.nbytes / _median_s(lambda: torch.nn.functional.linear(x, weight))
    many = torch.randn(256, side).to(torch.bfloat16)
    measured["host_flops"] = 2 * many.numel() * side / _median_s(lambda: torch.nn.functional.linear(many, weight), repeat=3)
    if device.type == "cuda":
        measured |= _measure_cuda(device, host)
    return Rates(**measured)


def _measure_cuda(device: torch.device, host: torch.Tensor) -> dict[str, float]:
    from trimtab.runtime.read import HostMemory

    pinned = HostMemory(SAMPLE_BYTES, pinned=True)
    first, second = (torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return SAMPLE_BYTES / _median_s(run)

    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)

    def product() -> None:
        torch.mm(square, square)
        torch.cuda.synchronize(device)

    rates = {
        "device_flops": 2 * 4096**3 / _median_s(product),
        "pinned_h2d_Bps": timed(first, pinned.tensor), "pageable_h2d_Bps": timed(first, host),
        "device_Bps": 2 * timed(second, first),
    }  # fmt: skip
    pinned.close()
    del first, second, square
    torch.cuda.empty_cache()
    return rates


def _disk_rate() -> float:
    """Return the rate of reading a file that was just written: the page cache's, an upper bound for the disk's."""
    folder = spill_folder(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as handle:
            handle.write(os.urandom(2**20) * (SAMPLE_BYTES // 2**20))
            buffer = bytearray(SAMPLE_BYTES)

            def run() -> None:
                handle.seek(0)
                handle.readinto(buffer)  # type: ignore[attr-defined]

            return SAMPLE_BYTES / _median_s(run, repeat=3)
    except OSError:
        return 500e6
