"""The number of CPU threads: as many as this process really gets, chosen before torch is imported.

torch takes one thread a core and lets them spin while they wait for each other. In a container with a quota, or beside
other work, threads without a core of their own hold up the rest at every one of the thousand small products of a token.
Environment variables carry the choice to the processes that a command starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from trimtab.errors import RequestError

VARIABLE = "TRIMTAB_THREADS"
# What OpenMP, and with it torch, reads when it is loaded.
OPENMP = "OMP_NUM_THREADS"
MOST = 1024
CGROUP = Path("/sys/fs/cgroup")


def use(
    requested: int | str | None, *, beside_others: bool = True, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the number of torch's threads, in this process and in its children.

    requested: a flag's value; None takes TRIMTAB_THREADS, else what the user has set for OpenMP, else `choose`. beside_others:
    leave out the cores that other programs keep busy now. Errors: RequestError.
    """
    if requested is None and environ.get(VARIABLE):
        count: int | None = parse(environ[VARIABLE], field=VARIABLE)
    elif requested is not None:
        count = parse(requested, field="--threads")
    else:
        count = None if environ.get(OPENMP) else choose(beside_others=beside_others)
    if count is None:
        return
    environ[OPENMP] = str(count)
    torch = sys.modules.get("torch")
    if torch is not None:  # too late for the variable
        torch.set_num_threads(count)


def parse(value: int | str, *, field: str) -> int:
    """Return a number of threads. Errors: RequestError."""
    text = str(value).strip()
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise RequestError(f"must be an integer from 1 to {MOST}", field=field, value=value)
    return int(text)


def choose(*, beside_others: bool) -> int | None:
    """Return how many threads have a core of their own, None where every core is free: torch's own choice is right then."""
    cores = _cores()
    free = min(cores, quota_cores() or cores)
    if beside_others:
        free -= _busy_cores()
    return None if free >= cores else max(1, free)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _busy_cores() -> int:
    """Return how many processes wanted a core in the last minute, on average; 0 where the system does not count them."""
    try:
        return int(os.getloadavg()[0])
    except (AttributeError, OSError):
        return 0


def quota_cores(root: Path = CGROUP, member: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return how many whole cores the control groups of this process allow, at least 1; None without a quota.

    Format: cgroups v2 `cpu.max` ("200000 100000": quota and period in microseconds) of the group and those above it; v1
    `cpu.cfs_quota_us` and `cpu.cfs_period_us`. Source: docs.kernel.org, admin-guide/cgroup-v2 and scheduler/sched-bwc.
    """
    shares = [share for folder in _groups(root, member) if (share := _share(folder)) is not None]
    return max(1, int(min(shares))) if shares else None


def _groups(root: Path, member: Path) -> list[Path]:
    try:
        lines = member.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return [root, root / "cpu"]
    folders = [root, root / "cpu"]
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        top = root if not controllers else root / "cpu" if "cpu" in controllers.split(",") else None
        if top is not None:
            below = [part for part in path.split("/") if part not in ("", ".", "..")]
            folders += [top.joinpath(*below[: depth + 1]) for depth in range(len(below))]
    return folders


def _share(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
