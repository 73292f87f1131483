"""Compiles a CUDA source with g++ and launches its kernels on arrays or CPU tensors.

`compile_for_cpu` takes numpy arrays, each with guards around it: what a kernel writes beside them is found. `CpuModule`
has the interface of `trimtab.engine.cuda.nvrtc.Module` and takes CPU tensors as they are, so that the code that cuts launches
and lists arguments is the code under test. What g++ made is kept in the user's cache folder for every later process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock  # a requirement of torch
import numpy as np
import pytest

from tests import cuda_on_cpu

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
# As on a GPU, a product and a sum become one operation only where the source says fmaf.
FLAGS = ("-std=c++17", "-Og", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")  # fmt: skip
if os.environ.get("TRIMTAB_TESTS_SANITIZED"):  # `make test-sanitized`; stacks of fibers are not known to it
    FLAGS += ("-fsanitize=address,alignment", "-fno-sanitize-recover=all", "--param", "asan-stack=0", "-g1")
_GUARD_BYTES = 512
_UNUSED_DAYS = 30


class LaunchError(Exception):
    """A launch that a GPU would refuse, hang in, or answer with an error."""


def why_not() -> str | None:
    """Return why sources cannot be run here, None if they can. A test that compiles one is then skipped."""
    if sys.platform == "win32":
        return "fibers need ucontext"
    return None if shutil.which("g++") else "there is no g++"


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Return the folder of compiled sources, without those that nothing used for a month."""
    folder = cuda_on_cpu.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a user without a home
        return Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in (*files, *folders)):
            with suppress(OSError):  # another process removes it too, or a folder has files
                if path.stat().st_mtime < time.time() - _UNUSED_DAYS * 86400:
                    path.rmdir() if path.name in folders else path.unlink()
    return folder


@lru_cache(maxsize=1)
def _compiler() -> str:
    """Return what tells one compiler and system from another: a home folder may be on several machines."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return repr((version, platform.system(), platform.machine(), platform.libc_ver()))


def _kept(text: str, flags: tuple[str, ...]) -> Path:
    facts = (text, HEADER.read_text(encoding="utf-8"), FLAGS, flags, _compiler())
    return _folder() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"


@lru_cache(maxsize=1)
def _header() -> Path:
    """Return a copy of the header beside what g++ made of it in advance: parsing it takes as long as most sources.

    A compiler that cannot use that file reads the copy itself.
    """
    text = HEADER.read_text(encoding="utf-8")
    path = _folder() / f"{hashlib.sha256(repr((text, FLAGS, _compiler())).encode()).hexdigest()}.h"
    made = path.with_suffix(".h.gch")
    with filelock.FileLock(path.with_suffix(".lock"), timeout=600):
        if not (path.exists() and made.exists()):
            part = made.with_suffix(f".{os.getpid()}")
            path.write_text(text, encoding="utf-8")
            subprocess.run(["g++", "-x", "c++-header", *FLAGS, str(path), "-o", str(part)], capture_output=True, timeout=300)
            if part.exists():
                part.replace(made)
        for file in (path, made):  # they are in use
            if file.exists():
                os.utime(file)
    return path


def _compiled(text: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Return the library of a source: the one that was kept under its digest, or g++ makes it."""
    path = _kept(text, flags)
    with filelock.FileLock(path.with_suffix(".lock"), timeout=600):  # processes that need the same one make it once
        try:
            os.utime(path)  # it is in use
            return ctypes.CDLL(str(path))
        except OSError:  # there is none, or it is damaged
            pass
        part = path.with_suffix(f".{os.getpid()}")
        command = ["g++", "-x", "c++", "-shared", *FLAGS, *flags, "-include", str(_header()), "-", "-o", str(part)]
        made = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
        if made.returncode:
            part.unlink(missing_ok=True)
            raise LaunchError(f"g++ does not compile this source:\n{made.stderr[:8000]}")
        part.replace(path)
    return ctypes.CDLL(str(path))


@lru_cache(maxsize=64)
def _library(source: str, names: tuple[str, ...], defines: tuple[str, ...]) -> ctypes.CDLL:
    # A block's dynamic shared memory has the size that the launch names.
    declared = r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\]\s*;"
    text = re.sub(declared, r"\1* const \2 = (\1*)cuda_on_cpu::shared_memory;", source)
    for name in names:
        text += f"""
extern "C" const char* cpu_signature_{name}() {{ return cuda_on_cpu::signature({name}); }}
extern "C" int cpu_start_{name}(void** args, const unsigned* grid, const unsigned* block, int shared_bytes, int order) {{
  return cuda_on_cpu::start({name}, args, grid, block, shared_bytes, order);
}}
"""
    library = _compiled(text, tuple(f"-D{define}" for define in ("TRIMTAB_CPU", *defines)))
    library.cpu_error.restype = ctypes.c_char_p
    for name in names:
        getattr(library, f"cpu_signature_{name}").restype = ctypes.c_char_p
    return library


def _three(sizes: int | Sequence[int]) -> Any:
    listed = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return (ctypes.c_uint * 3)(*listed, *(1,) * (3 - len(listed)))


def _start(library: ctypes.CDLL, name: str, grid: Any, block: Any, values: Sequence[Any], shared_bytes: int, order: int) -> None:
    wanted = getattr(library, f"cpu_signature_{name}")().decode()
    kinds = {ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_int64: "l", ctypes.c_float: "f"}
    given = "".join(kinds[type(value)] for value in values)
    if given != wanted:
        at = next((i for i, (a, b) in enumerate(zip(given, wanted)) if a != b), min(len(given), len(wanted)))
        raise LaunchError(f"{name} takes ({wanted}), not ({given}); they differ from argument {at} on")
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values])
    if getattr(library, f"cpu_start_{name}")(pointers, _three(grid), _three(block), shared_bytes, order):
        raise LaunchError(f"{name}: {library.cpu_error().decode()}")


def _plain(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, np.int64) or hasattr(value, "value"):  # np.int64, or nvrtc.Long
        return ctypes.c_int64(int(getattr(value, "value", value)))
    if isinstance(value, (bool, int, np.integer)):
        return ctypes.c_int(int(value))
    return ctypes.c_float(float(value))


def compile_for_cpu(source: str, name: str, defines: Mapping[str, Any] | Sequence[str] = ()) -> Callable[..., None]:
    """Return kernel(grid, block, args, *, shared_bytes=0, order=0) of the kernel `name` (extern "C").

    args: numpy arrays (pointers; changed in place), int (int32), np.int64, float (float32), None (null). order: which
    way round threads and blocks run: 0, 1 (backwards) or a seed. Errors: LaunchError.
    """
    listed = [f"{key}={value}" for key, value in defines.items()] if isinstance(defines, Mapping) else list(defines)
    library = _library(source, (name,), tuple(listed))

    def kernel(grid: Any, block: Any, args: Sequence[Any], *, shared_bytes: int = 0, order: int = 0) -> None:
        values, held = [], []
        for arg in args:
            if not isinstance(arg, np.ndarray):
                values.append(_plain(arg))
                continue
            assert arg.flags.c_contiguous and arg.flags.writeable, "arrays must be contiguous and writable"
            memory = np.full(arg.nbytes + 2 * _GUARD_BYTES + 256, 0xFF, np.uint8)
            start = _GUARD_BYTES + -(memory.ctypes.data + _GUARD_BYTES) % 256
            memory[start : start + arg.nbytes] = arg.view(np.uint8).reshape(-1) if arg.size else b""
            held.append((arg, memory, start))
            values.append(ctypes.c_void_p(memory.ctypes.data + start))
        _start(library, name, grid, block, values, shared_bytes, order)
        for number, (arg, memory, start) in enumerate(held):
            if not ((memory[:start] == 0xFF).all() and (memory[start + arg.nbytes :] == 0xFF).all()):
                raise LaunchError(f"{name} wrote beside array {number}")
            if arg.size:
                arg.view(np.uint8).reshape(-1)[:] = memory[start : start + arg.nbytes]

    return kernel


class CpuModule:
    """The interface of `nvrtc.Module` on CPU tensors. names: the kernels of the source. launches: their names, in order."""

    variant_names: Sequence[str] = ("matvec_4", "matvec_8")

    def __init__(
        self, source: str, names: Sequence[str], *, options: Sequence[str] = (), order: int = 0,
        capability: tuple[int, int] = (9, 0), multiprocessors: int = 4,
    ) -> None:  # fmt: skip
        import torch

        from trimtab.engine.cuda.nvrtc import ProductCuts

        self.device = torch.device("cpu")
        self.order, self.capability, self.multiprocessors = order, capability, multiprocessors
        self.shared_bytes, self.overlap, self.side_by_side = 227 * 1024, False, multiprocessors
        self.scratch: dict[str, Any] = {}
        self.products = ProductCuts()
        self.variants: dict[tuple[str, ...], CpuModule] = {}
        self.attention: dict[tuple[str, ...], CpuModule] = {}
        self.launches: list[str] = []
        self.common: tuple[str, ...] = ()  # of every variant, in addition to its own options
        defines = tuple(option.removeprefix("-D") for option in options if option.startswith("-D"))
        self._source, self._facts = (source, {"order": order, "capability": capability, "multiprocessors": multiprocessors})
        self._library = _library(source, tuple(names), defines)

    def variant(self, options: tuple[str, ...]) -> CpuModule:
        """The same source compiled with other options; its launches count as this module's."""
        if options not in self.variants:
            # Kernels that these options bring.
            names = ("matvec_held",) if any("HELD" in option for option in options) else self.variant_names
            made = CpuModule(self._source, names, options=(*options, *self.common), **self._facts)
            made.launches = self.launches
            self.variants[options] = made
        return self.variants[options]

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_bytes: int = 0,
        dependent: bool | None = None,
    ) -> None:  # fmt: skip
        import torch

        values = [ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else _plain(value) for value in args]
        self.launches.append(name)
        _start(self._library, name, grid, block, values, shared_bytes, self.order)
