"""How much host memory and disk do this machine and this process have, within their limits?"""

from __future__ import annotations

import platform
import sys
from itertools import product
from pathlib import Path

import psutil

from trimtab.errors import RequestError
from trimtab.process.before_torch import control_groups

# Control groups, version 2 and 1: limit, use, and in memory.stat the page cache that the kernel frees under pressure.
CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def cpu_name() -> str:
    """Return the processor's name; outside Linux only its family (`environment.full_cpu_name` has the name)."""
    return read_cpuinfo("model name") or platform.processor() or platform.machine()


def read_cpuinfo(field: str) -> str:
    """Return a field of the first processor in Linux's /proc/cpuinfo, "" without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def host_available_bytes() -> int:
    """Return the host memory that can still be allocated, within a container's limit if there is one."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_available_bytes()
    return available if limited is None else min(available, limited)


def cgroup_available_bytes(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that the control groups of this process still allow, None without a limit.

    Every group up to the root counts. The kernel counts the page cache as used, but frees it under pressure. It is
    subtracted: otherwise the weights' size would count as used after a checkpoint was read.
    """
    limits = []
    for folder, (limit_name, used_name, cache_keys) in product(control_groups("memory", root, membership), CGROUP_FILES):
        limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
        if limit is not None and used is not None and limit < 2**60:
            limits.append(max(limit - used + _stat_bytes(folder / "memory.stat", cache_keys), 0))
    return min(limits, default=None)


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
        # Not ru_maxrss: a child process inherits the peak of its parent there.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def spill_folder(offload_dir: str | None) -> Path:
    """Return the folder of the disk tier's file."""
    from platformdirs import user_cache_path  # here: an interpreter with the stock stack alone reads the rest of this file

    return Path(offload_dir) if offload_dir else user_cache_path("trimtab") / "spill"


def disk_free_bytes(offload_dir: str | None) -> int:
    """Return the free bytes of the spill folder's disk. Errors: RequestError if there is no such disk."""
    folder = spill_folder(offload_dir).absolute()
    while not folder.exists():
        if folder == folder.parent:
            raise RequestError("there is no such disk", field="offload_dir", value=offload_dir)
        folder = folder.parent
    return int(psutil.disk_usage(str(folder)).free)
