"""How are trimtab's CUDA sources compiled at load by NVRTC, the compiler in torch's CUDA wheels, and launched or captured?"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import glob
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from trimtab.engine.cuda.launch_config import CutKey, LaunchConfig
from trimtab.errors import DeviceError
from trimtab.process.user_cache import hashed, own_folder, prune, read_own, touch, write_own


@dataclass(eq=False)
class ProductCuts:
    """What the products of a module are launched with, by product.

    chosen: in use. known: tuned on this card by an earlier process, with how they were measured. shipped: those of this package,
    with the same; None until they are read. measured: products that were tuned on this card, now or before. prepared:
    products whose configuration was set. tables: address of a code -> (the weights of each byte value [256, 2] float16, the code).
    norm: as `gemv4.NormForm`, of the norms in front of products.
    """

    chosen: dict[CutKey, LaunchConfig] = field(default_factory=dict)
    known: dict[CutKey, tuple[LaunchConfig, str]] = field(default_factory=dict)
    shipped: tuple[dict[CutKey, LaunchConfig], str] | None = None
    measured: set[CutKey] = field(default_factory=set)
    prepared: set[CutKey] = field(default_factory=set)
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    norm: tuple[str, bool] = ("inside", True)


# Kernels that need no bf16 arithmetic are made for 7.5 too (cuda/values.cuh); bf16 and tensor cores' m16n8k16 begin with 8.0.
LEAST_CAPABILITY, BF16_CAPABILITY = (7, 5), (8, 0)
# Above this a kernel must request its dynamic shared memory (CUDA C++ Programming Guide, cudaFuncSetAttribute).
PLAIN_SHARED_BYTES = 48 * 1024
OPTIONS = ("--std=c++17", "-default-device")
# cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_MAX_DYNAMIC_SHARED = 8
_PROGRAMMATIC = 6
# cuda.h: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, ..._CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
_SHARED_PER_BLOCK = 97
_HOST_POINTERS = 91
LIBRARY_VARIABLE = "TRIMTAB_NVRTC"
# cuda.h: CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, ..._SHARED_SIZE_BYTES, ..._LOCAL_SIZE_BYTES, ..._NUM_REGS.
_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS = 0, 1, 3, 4
# Compiled kernels that are kept between processes: the ones used longest ago go first. One takes 20 to 300 KiB.
FOLDER = "compiled"
MOST_FILES, MOST_BYTES, MOST_CODE_BYTES = 2000, 256 * 2**20, 16 * 2**20


@dataclass(frozen=True)
class Long:
    """An argument that the kernel takes as int64 (a plain int is int32)."""

    value: int


Argument = Tensor | int | float | Long | None


def source(name: str) -> str:
    """Return one of this package's CUDA sources."""
    return (resources.files("trimtab.engine.kernels") / "cuda" / name).read_text(encoding="utf-8")


# The compiler ---------------------------------------------------------------------------------------------------------


def _candidates() -> list[str]:
    """Return where NVRTC may be, best first: named by the user, torch's own wheels, a toolkit, the system's search."""
    candidates = [os.environ[LIBRARY_VARIABLE]] if os.environ.get(LIBRARY_VARIABLE) else []
    windows = sys.platform == "win32"
    names = ("nvrtc64_*.dll",) if windows else ("libnvrtc.so*",)
    packages = [str(Path(torch.__file__).parent.parent), *sys.path]
    folders = [str(Path(torch.__file__).parent / "lib")]
    for root in dict.fromkeys(path for path in packages if path):
        folders += glob.glob(os.path.join(glob.escape(root), "nvidia", "*", "bin" if windows else "lib"))
        folders += glob.glob(os.path.join(glob.escape(root), "nvidia", "*", "bin", "x86_64")) if windows else []
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            folders += [os.path.join(os.environ[variable], part) for part in ("lib64", "bin", os.path.join("bin", "x64"))]
    if not windows:
        folders.append("/usr/local/cuda/lib64")
    for folder in dict.fromkeys(folders):
        for name in names:
            candidates += sorted(glob.glob(os.path.join(glob.escape(folder), name)), reverse=True)
    # ".alt" is the same compiler built for older allocators; "builtins" is a part of it.
    candidates = [path for path in candidates if ".alt." not in path and "builtins" not in os.path.basename(path)]
    system = ctypes.util.find_library("nvrtc")
    major = (torch.version.cuda or "").partition(".")[0]
    # Two CUDA releases side by side: the one torch was built with fits the driver that torch runs on.
    candidates.sort(key=lambda path: path != os.environ.get(LIBRARY_VARIABLE) and f".so.{major}" not in path and bool(major))
    return [*dict.fromkeys(candidates), *([system] if system else [])]


class Compiler:
    """NVRTC as loaded from one library file."""

    def __init__(self, path: str) -> None:
        self.path = path
        folder = os.path.dirname(os.path.realpath(path))
        # The library opens this part by its bare name, which a wheel's folder is not searched for.
        parts = glob.glob(os.path.join(glob.escape(folder), "*nvrtc-builtins*"))
        for part in (part for part in parts if ".alt." not in part):
            with suppress(OSError):
                ctypes.CDLL(part)
        self._lib = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.archs = tuple(sorted(archs))

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            raise OSError(f"{name} of {self.path} answered {code}")

    def target(self, capability: tuple[int, int]) -> str:
        """Return the target to compile for: "sm_90", or "compute_NN" for a card newer than the compiler."""
        arch = capability[0] * 10 + capability[1]
        if arch in self.archs:
            return f"sm_{arch}"
        older = [known for known in self.archs if known < arch]
        return f"compute_{older[-1]}" if older else f"sm_{arch}"

    def compile(self, source: str, target: str, options: Sequence[str] = (), *, name: str = "kernels.cu") -> bytes:
        """Return the machine code (for "sm_NN") or PTX ("compute_NN") of a source. Errors: DeviceError with the log."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            flags = [f"--gpu-architecture={target}".encode(), *(option.encode() for option in (*OPTIONS, *options))]
            code = self._lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            if code:
                log = self._take(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                raise DeviceError(f"{name} does not compile for {target}: {log or f'NVRTC answered {code}'}", device="cuda")
            return self._take(program, "nvrtcGetCUBIN" if target.startswith("sm_") else "nvrtcGetPTX")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _take(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(what, program, buffer)
        return buffer.raw


@lru_cache(maxsize=1)
def find_compiler() -> Compiler | None:
    """Return the first NVRTC of this machine that loads, or None."""
    for path in _candidates():
        with suppress(OSError, AttributeError):
            return Compiler(path)
    return None


def compiled(
    compiler: Compiler, source: str, target: str, options: Sequence[str] = (), *, driver: int = 0, name: str = "kernels.cu"
) -> bytes:
    """Return a source's machine code as an earlier process compiled it, or compile it and keep it for later ones.

    The cache has executable code: its folder is writable by the user alone, by its source, options, target, NVRTC's and the
    driver's releases, with its checksum; anything else is compiled again. Errors: DeviceError if it does not compile.
    """
    key = json.dumps([source, target, *OPTIONS, *options, str(compiler.version), driver])
    path = None
    with suppress(OSError):
        path = own_folder(FOLDER) / hashed(key)
        code = read_own(path, key, limit_bytes=MOST_CODE_BYTES)
        if code is not None:
            touch(path)
            return code
    code = compiler.compile(source, target, options, name=name)
    if path is not None:
        with suppress(OSError):
            # Another process may write the same file: both write the same bytes, and a rename is whole or nothing.
            write_own(path, key, code)
            prune(path.parent, most_files=MOST_FILES, most_bytes=MOST_BYTES)
    return code


@dataclass(frozen=True)
class Job:
    """Something to compile: a source with its options, and its name."""

    source: str
    options: tuple[str, ...]
    name: str


def keeps_compiled() -> bool:
    """Whether compiled code is cached for later processes."""
    try:
        own_folder(FOLDER)
    except OSError:
        return False
    return True


def compile_all(jobs: Sequence[Job], capability: tuple[int, int]) -> dict[Job, bytes]:
    """Compile several sources in parallel and return their code; `compiled` finds it too. One that does not compile is named by
    `compiled`."""
    compiler = find_compiler()
    if compiler is None:
        return {}
    target = compiler.target(capability)

    def run(job: Job) -> bytes | None:
        with suppress(DeviceError, OSError):
            return compiled(compiler, job.source, target, job.options, driver=driver_version(), name=job.name)
        return None

    # NVRTC compiles without Python's lock.
    wanted = dict.fromkeys(jobs)
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        return {job: code for job, code in zip(wanted, pool.map(run, wanted), strict=True) if code is not None}


# The driver -----------------------------------------------------------------------------------------------------------


class _Config(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    ]  # fmt: skip


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(code: int, what: str, device: torch.device) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        message = text.value.decode(errors="replace") if text.value else "no text"
        raise DeviceError(f"{what} failed: {message} (CUDA error {code})", device=str(device))


@lru_cache(maxsize=1)
def driver_version() -> int:
    """Return the CUDA release of the driver, such as 13000; 0 if it does not say."""
    version = ctypes.c_int()
    return version.value if _driver().cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def _number(device: torch.device) -> ctypes.c_int:
    number = ctypes.c_int()
    _check(_driver().cuInit(0), "starting the driver", device)
    _check(_driver().cuDeviceGet(ctypes.byref(number), device.index or 0), "finding the device", device)
    return number


def _attribute(which: int, device: torch.device) -> int:
    value = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(value), which, _number(device))
    _check(code, f"reading attribute {which} of the device", device)
    return value.value


def reads_registered_memory(device: torch.device) -> bool:
    """Whether a kernel can read page-locked memory of the host at the host's own address."""
    if torch.version.hip is not None:
        return False
    try:
        return bool(_attribute(_HOST_POINTERS, device))
    except (DeviceError, OSError):  # no driver of NVIDIA's
        return False


def why_not(device: torch.device | str, *, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Return why kernels cannot be compiled for and run on this device, or None if they can. least: compute capability."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device} is not a CUDA device"
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "torch has no CUDA here"
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        return f"compute capability {capability[0]}.{capability[1]} is below {least[0]}.{least[1]}"
    if find_compiler() is None:
        return "NVRTC, which is part of torch's CUDA wheels, is missing"
    try:
        _driver()
    except OSError as exc:
        return f"the CUDA driver's library does not load ({exc})"
    return None


def _c_argument(value: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_int | ctypes.c_float:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, Long):
        return ctypes.c_int64(value.value)
    if isinstance(value, int):
        return ctypes.c_int(value)
    return ctypes.c_float(value)


@dataclass(frozen=True)
class KernelLimits:
    """The driver's figures for a compiled kernel. local_bytes: per thread, for registers that were spilled."""

    registers: int
    max_threads: int
    static_shared_bytes: int
    local_bytes: int


class Module:
    """A CUDA source compiled and loaded on one device; its kernels are `extern "C"`.

    needs_bf16: whether it computes with bf16 for every type of model. Errors: DeviceError if it cannot run here, with the
    compiler's log if the source does not compile. `launch` queues a kernel on torch's current stream without synchronization, so
    that a CUDA graph can capture it.
    """

    def __init__(
        self, source: str, *, device: torch.device | str, options: Sequence[str] = (), name: str = "kernels.cu",
        needs_bf16: bool = False, _code: bytes | None = None,
    ) -> None:  # fmt: skip
        reason = why_not(device, least=BF16_CAPABILITY if needs_bf16 else LEAST_CAPABILITY)
        compiler = find_compiler()
        if reason is not None or compiler is None:
            raise DeviceError(reason or "NVRTC is not found", device=str(device))
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        properties = torch.cuda.get_device_properties(self.device)
        self.capability = (properties.major, properties.minor)
        self.multiprocessors = int(properties.multi_processor_count)
        # Blocks of one launch, the first ones, that surely run at once.
        self.side_by_side = self.multiprocessors
        # Of one block (torch has this property only in newer releases).
        self.shared_bytes = _attribute(_SHARED_PER_BLOCK, self.device)
        # Whether launches are dependent ones unless they say otherwise. Off until the caller has measured a gain.
        self.overlap = False
        # Tensors of the launches, by name: each launch leaves them as it finds them.
        self.scratch: dict[str, Tensor] = {}
        self.products = ProductCuts()
        # By their options: this source, and the attention of each kind of layer that belongs to the kernels of this module.
        self.variants: dict[tuple[str, ...], Module] = {}
        self.attention: dict[tuple[str, ...], Module] = {}
        self.common: tuple[str, ...] = ()  # of every variant, in addition to its own options
        self._source, self._name = source, name
        self._functions: dict[str, tuple[ctypes.c_void_p, int]] = {}
        self._handle = ctypes.c_void_p()
        self._codes: dict[tuple[str, ...], bytes] = {}  # of variants
        code = _code or compiled(compiler, source, compiler.target(self.capability), options, driver=driver_version(), name=name)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # makes the context in which the code is loaded
            self._enter_context()
            _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), code), f"loading {name}", self.device)

    def variant(self, options: tuple[str, ...]) -> Module:
        """Return the same source compiled with other options, made where this is the first use: not within a capture."""
        if options not in self.variants:
            self.variants[options] = Module(
                self._source, device=self.device, options=(*options, *self.common), name=self._name,
                _code=self._codes.pop(options, None),
            )  # fmt: skip
        return self.variants[options]

    def compile_variants(self, wanted: Sequence[tuple[str, ...]]) -> None:
        """Compile several variants in parallel, for `variant` to load. One that does not compile is named by `variant`."""
        missing = [options for options in wanted if options not in self.variants and options not in self._codes]
        jobs = {Job(self._source, (*options, *self.common), self._name): options for options in missing}
        self._codes.update((jobs[job], code) for job, code in compile_all([*jobs], self.capability).items())

    def _enter_context(self) -> ctypes.c_void_p:
        """Make torch's context of the device current in this thread: a thread that has called no CUDA function has none."""
        context = ctypes.c_void_p()
        _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "finding the context", self.device)
        if not context.value:
            code = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), _number(self.device))
            _check(code, "finding the context", self.device)
            _check(_driver().cuCtxSetCurrent(context), "entering the context", self.device)
        return context

    def _function(self, name: str, shared_bytes: int) -> ctypes.c_void_p:
        function, allowed = self._functions.get(name, (None, PLAIN_SHARED_BYTES))
        if function is None:
            function = ctypes.c_void_p()
            code = _driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode())
            _check(code, f"finding kernel {name}", self.device)
        if shared_bytes > allowed:
            code = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
            _check(code, f"{shared_bytes} B of shared memory for kernel {name}", self.device)
            allowed = shared_bytes
        self._functions[name] = (function, allowed)
        return function

    def limits(self, name: str) -> KernelLimits:
        """Return the registers, threads and memory of a compiled kernel. Errors: DeviceError if there is none of this name."""
        with torch.cuda.device(self.device):
            self._enter_context()
            function = self._function(name, 0)

            def attribute(which: int) -> int:
                value = ctypes.c_int()
                code = _driver().cuFuncGetAttribute(ctypes.byref(value), which, function)
                _check(code, f"reading attribute {which} of kernel {name}", self.device)
                return value.value

            return KernelLimits(attribute(_REGISTERS), attribute(_MAX_THREADS), attribute(_STATIC_SHARED), attribute(_LOCAL))

    def close(self) -> None:
        """Unload the machine code, variants included; nothing of the module may be running or be launched any more."""
        for options in list(self.variants):
            self.variants.pop(options).close()
        handle, self._handle = self._handle, ctypes.c_void_p()
        self._functions.clear()
        if handle.value:
            with torch.cuda.device(self.device):
                self._enter_context()
                _check(_driver().cuModuleUnload(handle), f"unloading {self._name}", self.device)

    def launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument], *,
        shared_bytes: int = 0, dependent: bool | None = None,
    ) -> None:  # fmt: skip
        """Queue a kernel on torch's current stream of the module's device; returns at once, also inside a capture.

        args: a Tensor goes in as its address, None as null, an int as int32, a Long as int64, a float as float32.
        dependent: the kernel may start before the one in front of it ends (compute capability 9.0 and newer; it must
        wait by itself, `griddepcontrol.wait`, in every thread and before it ends); None: as `overlap` says.
        Errors: DeviceError if CUDA refuses the launch.
        """
        assert all(not isinstance(value, Tensor) or value.device == self.device for value in args)
        with torch.cuda.device(self.device):
            self._enter_context()
            function = self._function(name, shared_bytes)
            values = [_c_argument(value) for value in args]
            pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values])
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = [*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)), shared_bytes]
            wanted = self.overlap if dependent is None else dependent
            if wanted and self.capability >= (9, 0):
                attribute = _Attribute(_PROGRAMMATIC, 0, 1, b"")
                config = _Config(*sizes, stream, ctypes.cast(ctypes.byref(attribute), ctypes.c_void_p), 1)
                code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
            else:
                code = _driver().cuLaunchKernel(function, *sizes, stream, pointers, None)
            _check(code, f"launching {name} with grid {grid}, block {block}, {shared_bytes} B shared", self.device)


class CaptureStreams:
    """The capture streams of a process, which its models share, and the lock of the thread that captures. cuBLAS keeps a workspace
    for every stream that it was called on (32 MiB on compute capability 9.0): torch's 32 streams would take 1 GiB that no plan
    counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def side(self, device: torch.device) -> Iterator[torch.cuda.Stream]:
        """Give a device's stream, as `side_stream`."""
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            collects = gc.isenabled()
            gc.disable()
            try:
                yield stream
            finally:
                if collects:
                    gc.enable()

    def wait_for_all(self, device: torch.device) -> None:
        """Wait for a GPU, as `wait_for_all`."""
        with self._lock, suppress(RuntimeError):
            torch.cuda.synchronize(device)


@cache
def of_this_process() -> CaptureStreams:
    """Return the process's streams: cuBLAS' workspaces belong to the process, not to a model."""
    return CaptureStreams()


def side_stream(device: torch.device) -> AbstractContextManager[torch.cuda.Stream]:
    """Give the stream, which waits for work queued on the current one; one thread at a time has it.

    Python's cyclic collector is off until the block ends: a graph, an event or page-locked memory that it frees in the middle
    of a capture is a call that CUDA forbids there, and the capture would be lost (error 901 at the next launch).
    """
    return of_this_process().side(device)


def wait_for_all(device: torch.device) -> None:
    """Wait for all work queued on a GPU, on every stream: replays of graphs copy from host memory on none of ours.

    While another thread captures, this waits for it: synchronizing the device would end its capture. The next CUDA call of the
    caller reports errors of failed work.
    """
    if device.type == "cuda":
        of_this_process().wait_for_all(device)
