"""Work that overlaps with planning in a process that will load a model: imports, torch's libraries, a context on the
GPU.

Linking a gigabyte of libraries takes 0.6 s and making a context 0.3 s, both without the GIL; the import of torch then
finds them loaded. All of it is optional: work that fails here is done, or reported, where it is needed. Imports no
torch.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    """Begin to load torch's libraries on a thread; None if they are loaded already, or have other file names."""
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
