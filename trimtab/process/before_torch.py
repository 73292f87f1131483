"""What does a process prepare before torch is imported: CPU threads, imports, libraries and a context?"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from trimtab.errors import RequestError

VARIABLE = "TRIMTAB_THREADS"
# OpenMP, and so torch, reads this variable when it is loaded.
OPENMP = "OMP_NUM_THREADS"
MOST = 1024
CGROUP = Path("/sys/fs/cgroup")


def use_threads(requested: int | str | None, *, beside_others: bool = True, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the number of torch's threads, in this process and in its children.

    requested: a flag's value; None takes TRIMTAB_THREADS, else the user's OpenMP setting, else `choose`. beside_others:
    exclude the cores that other programs use now. Errors: RequestError.
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
    if torch is not None:  # the variable has no effect any more
        torch.set_num_threads(count)


def parse(value: int | str, *, field: str) -> int:
    """Return a number of threads. Errors: RequestError."""
    text = str(value).strip()
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise RequestError(f"must be an integer from 1 to {MOST}", field=field, value=value)
    return int(text)


def choose(*, beside_others: bool) -> int | None:
    """Return how many threads get a core each. None if every core is free: torch's default is right then. torch's threads spin
    while they wait for each other: in a container with a quota, threads without a core delay every small product."""
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
    """Return the system's load average of the last minute; 0 where the system has none."""
    try:
        return int(os.getloadavg()[0])
    except (AttributeError, OSError):
        return 0


def quota_cores(root: Path = CGROUP, member: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the number of whole cores that this process's control groups allow, at least 1; None without a quota.

    Format: cgroups v2 `cpu.max` ("200000 100000": quota and period in microseconds) of the group and those above it; v1
    `cpu.cfs_quota_us` and `cpu.cfs_period_us`. Source: docs.kernel.org, admin-guide/cgroup-v2 and scheduler/sched-bwc.
    """
    shares = [share for folder in control_groups("cpu", root, member) if (share := _share(folder)) is not None]
    return max(1, int(min(shares))) if shares else None


def control_groups(controller: str, root: Path, member: Path) -> list[Path]:
    """Return the folders of this process's control groups and of those above them, of versions 2 and 1."""
    try:
        lines = member.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::", f"1:{controller}:"]
    folders = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            # Inside a container, the path may be the host's: folders that do not exist have no limit.
            below = [part for part in path.split("/") if part not in ("", ".", "..")]
            folders += [top.joinpath(*below[:depth]) for depth in range(len(below) + 1)]
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


# Work during planning ------------------------------------------------------------------------------------------------

# In the order in which torch loads them itself (torch/__init__.py, 2.6 to 2.13).
LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.RTLD_LOCAL))

# Imports make a million permanent objects: garbage collection over them takes a tenth of the start.
LOADING_COLLECT_AFTER, COLLECT_AFTER = (2_000_000, 20, 1000), gc.get_threshold()


@contextmanager
def collecting_rarely(when: bool = True) -> Iterator[None]:
    """Look for garbage less often until `collect_again`, or the end of the block. when: whether to do so at all."""
    if not when:
        yield
        return
    gc.set_threshold(*LOADING_COLLECT_AFTER)
    try:
        yield
    finally:
        collect_again()


def keep_imports() -> None:
    """Never look for garbage among what there is now, the imported modules; outside of `collecting_rarely` nothing changes."""
    if gc.get_threshold()[0] == LOADING_COLLECT_AFTER[0]:
        gc.freeze()


def collect_again() -> None:
    """Look for garbage as often as before `collecting_rarely`; outside of it nothing changes."""
    if gc.get_threshold()[0] == LOADING_COLLECT_AFTER[0]:
        gc.set_threshold(*COLLECT_AFTER)


def import_module(name: str) -> threading.Thread:
    """Begin to import a module. Read the machine without torch before the import of torch begins."""
    return _begin("trimtab-imports", lambda: importlib.import_module(name))


def load_libraries() -> threading.Thread | None:
    """Begin to load torch's libraries on a thread; None if they are loaded already, or have other file names. Linking takes 0.6 s
    and a context 0.3 s, both without the GIL."""
    if not sys.platform.startswith("linux") or "torch" in sys.modules:
        return None
    # torch sets this before it queries the driver: kernels then take GPU memory when they are first used.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    spec = importlib.util.find_spec("torch")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"
    if folder is None or not folder.is_dir():
        return None
    return _begin("trimtab-libraries", lambda: _load(folder))


def _load(folder: Path) -> None:
    for name, mode in LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=mode)


def make_context(device: str) -> threading.Thread | None:
    """Begin to create this process's context on a GPU in a thread; None for a CPU. device: "cuda:N".

    It is the context that torch uses, and it lives as long as the process. Query the free memory of the device first.
    """
    if not device.startswith("cuda") or not sys.platform.startswith("linux"):
        return None
    index = int(device.partition(":")[2] or 0)
    return _begin("trimtab-context", lambda: _make(index))


def _make(index: int) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    number, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(number), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)


def _begin(name: str, work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
