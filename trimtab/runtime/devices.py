"""What the machine has: memory by device, names, and link rates measured once and cached. Alone asks for memory.

Rates are medians of a few short runs (each under half a second) and go to a JSON file in the user's cache folder, keyed
by device, torch release and thread count; a file that cannot be used is measured again.

What it does not know: the rates of another disk than the cache folder's, and on Windows and macOS, where a file cannot
be put out of the page cache, the disk's own rate (the page cache's is an upper bound).
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import psutil
import torch
from platformdirs import user_cache_path
from torch import Tensor

from trimtab.errors import RequestError
from trimtab.plan import Machine, Rates

# A CUDA context with the kernels of torch and bitsandbytes that a request loads; not part of torch's own count. It grows
# with the number of multiprocessors: an H200 with 132 of them took 525 MiB at first and 689 MiB after the first products.
CONTEXT_BYTES = 500 * 2**20
# Host memory that the first forward on a GPU adds for good: code of cuBLAS, cuDNN and bitsandbytes, and the driver's
# tables. 0.85 GiB with torch 2.11, CUDA 13 on an H200 (bench/results/memory.json: resident, host peak over base).
FIRST_FORWARD_BYTES = 850 * 2**20
SAMPLE_BYTES = 64 * 2**20
DISK_SAMPLE_BYTES = 32 * 2**20
SMALL_READ_BYTES = 4096
GEMV_SIDE = 2048
# Control groups, version 2 and 1: limit, use, and in memory.stat the page cache that is given back under pressure.
CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


# Memory ---------------------------------------------------------------------------------------------------------------


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda:N" for what the user asked. Errors: RequestError if there is no such GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device == "cpu":
        return "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        allowed = ["auto", "cpu", *(f"cuda:{i}" for i in range(count))]
        raise RequestError(f"this machine has {count} CUDA devices", field="device", value=device, allowed=allowed)
    return f"cuda:{index}"


def read_machine(device: str = "auto") -> Machine:
    """Return the machine's memory as a plan needs it."""
    # Loading takes these libraries' memory too; a plan that counts the process without them counts too little.
    import trimtab.runtime.model  # noqa: F401

    resolved = resolve_device(device)
    if resolved == "cpu":
        return Machine(
            execution_device="cpu", host_available_bytes=host_available_bytes(), process_bytes=process_bytes(),
            has_pinned=False,
        )  # fmt: skip
    torch.empty(1, device=resolved)  # the context exists from here on and is no longer counted as free
    free, total = torch.cuda.mem_get_info(resolved)
    free += torch.cuda.memory_reserved(resolved) - torch.cuda.memory_allocated(resolved)
    return Machine(
        execution_device=resolved, gpu_total_bytes=total, gpu_free_bytes=free,
        host_available_bytes=host_available_bytes(), context_bytes=CONTEXT_BYTES,
        process_bytes=process_bytes() + FIRST_FORWARD_BYTES,
    )  # fmt: skip


def gpu_names() -> list[tuple[str, int]]:
    """Return name and total bytes of every GPU that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [(device_name(f"cuda:{i}"), int(torch.cuda.get_device_properties(i).total_memory)) for i in range(count)]


def device_name(device: str) -> str:
    """Return the name of a GPU, or the processor's."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def host_available_bytes() -> int:
    """Return the host memory that can still be taken, within a container's limit where there is one."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_available_bytes()
    return available if limited is None else min(available, limited)


def cgroup_available_bytes(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return what the control groups of this process still let it take, None without a limit.

    Every group up to the root counts. The page cache is counted as use by the kernel but given back under pressure:
    after a checkpoint was read it would otherwise look as if the weights' size were taken already.
    """
    found = []
    for folder, (limit_name, used_name, cache_keys) in _cgroup_folders(membership, root):
        limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
        if limit is not None and used is not None and limit < 2**60:
            found.append(max(limit - used + _stat_bytes(folder / "memory.stat", cache_keys), 0))
    return min(found, default=None)


def _cgroup_folders(membership: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "memory", CGROUP_FILES[1]) if controllers else (root, CGROUP_FILES[0])
        # Inside a container the path may be the outer machine's: folders that are not there have no limit to read.
        pieces = [piece for piece in path.split("/") if piece not in ("", "..")]
        for end in range(len(pieces), -1, -1):
            yield base.joinpath(*pieces[:end]), files


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat_bytes(path: Path, keys: tuple[str, ...]) -> int:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return sum(int(value) for key, value in pairs if key in keys)
    except (OSError, ValueError):
        return 0


def process_bytes() -> int:
    """Return the resident host memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_host_bytes() -> int:
    """Return the largest resident host memory that this process has had."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # Not ru_maxrss: a process started by a large one inherits the large one's peak there.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def spill_folder(offload_dir: str | None) -> Path:
    """Return the folder of the disk tier's file."""
    return Path(offload_dir) if offload_dir else user_cache_path("trimtab") / "spill"


def disk_free_bytes(offload_dir: str | None) -> int:
    """Return the free bytes of the disk that the spill folder is on. Errors: RequestError if there is no such disk."""
    folder = spill_folder(offload_dir).absolute()
    while not folder.exists():
        if folder == folder.parent:
            raise RequestError("there is no such disk", field="offload_dir", value=offload_dir)
        folder = folder.parent
    return int(psutil.disk_usage(str(folder)).free)


# Link rates -----------------------------------------------------------------------------------------------------------


def measure_rates(device: str, *, cache: bool = True) -> Rates:
    """Return the machine's rates, measured now or read from the cache. device: "cpu" or "cuda:N"."""
    file = rates_file(device)
    if cache and (found := _read_rates(file)) is not None:
        return found
    rates = _measure(torch.device(device))
    if cache:
        _write_rates(file, rates)
    return rates


def rates_file(device: str) -> Path:
    """Return where the rates of a device are cached."""
    key = "-".join(_slug(part) for part in (device_name(device), f"torch{torch.__version__}"))
    return user_cache_path("trimtab") / f"rates-{key}-{torch.get_num_threads()}threads.json"


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in text) or "unknown"


def _read_rates(file: Path) -> Rates | None:
    names = {item.name for item in fields(Rates)}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Rates(**found) if set(found) == names else None
    except (OSError, ValueError, TypeError):
        return None


def _write_rates(file: Path, rates: Rates) -> None:
    sibling = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        sibling.write_text(json.dumps(asdict(rates), indent=1) + "\n", encoding="utf-8")
        sibling.replace(file)
    except OSError:  # a cache that cannot be written costs time only
        with suppress(OSError):
            sibling.unlink()


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
    host_rate = SAMPLE_BYTES / _median_s(lambda: copy.copy_(host))
    matmul_rate, host_flops = _host_matmul()
    measured = {"host_Bps": host_rate, "host_matmul_Bps": matmul_rate, "host_flops": host_flops, **_measure_disk()}
    return Rates(**measured, **(_measure_cuda(device, host) if device.type == "cuda" else _as_device(measured)))


def _host_matmul() -> tuple[float, float]:
    """Return (packed bytes a second of a one-row product in NF4, operations a second of a product with many rows)."""
    from trimtab.runtime import quant

    weight = torch.randn(GEMV_SIDE, GEMV_SIDE).to(torch.bfloat16)
    packed = quant.quantize(weight, "nf4-dq")
    layer = quant.shell(packed, None, torch.bfloat16)
    row, many = (torch.randn(count, GEMV_SIDE).to(torch.bfloat16) for count in (1, 128))
    with torch.no_grad():
        rate = packed.nbytes / _median_s(lambda: layer(row), repeat=3)
        flops = 2 * many.numel() * GEMV_SIDE / _median_s(lambda: torch.nn.functional.linear(many, weight), repeat=3)
    return rate, flops


def _as_device(measured: dict[str, float]) -> dict[str, float]:
    """Return the rates of the execution device when that is the CPU: its own, and no link."""
    small, other = torch.zeros(16), torch.zeros(16)
    launch = _median_s(lambda: small.add_(1), repeat=50)
    return {
        "pinned_h2d_Bps": measured["host_Bps"], "pageable_h2d_Bps": measured["host_Bps"],
        "device_Bps": measured["host_matmul_Bps"], "device_flops": measured["host_flops"], "launch_s": launch,
        "transfer_s": _median_s(lambda: other.copy_(small), repeat=50),
    }  # fmt: skip


def _measure_cuda(device: torch.device, host: Tensor) -> dict[str, float]:
    from trimtab.runtime.read import HostMemory

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
