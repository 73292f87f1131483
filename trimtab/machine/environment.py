"""What is the environment of an interpreter and its machine: versions, installations, GPUs, memory?"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from trimtab._version import __version__
from trimtab.errors import RequestError, gib
from trimtab.machine.gpus import nvidia_driver
from trimtab.machine.memory import read_cpuinfo
from trimtab.process.json_file import as_json
from trimtab.process.redact import scrubbed
from trimtab.process.runner import run_inside
from trimtab.report.document import Block, Document, Facts, Table

FORMAT = 1
TIMEOUT_S = 120.0
# CPU flags that decide which kernels torch and bitsandbytes use (bitsandbytes repacks 4-bit weights with AVX512-BF16).
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "avx512_vnni", "asimd", "bf16", "sve", "i8mm")


@dataclass(frozen=True)
class Package:
    """A distribution: version: None if it is not installed; installed: the kind of installation, as text."""

    version: str | None
    installed: str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch reports it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One interpreter on one machine, at one moment.

    packages: by distribution name, missing ones included; "trimtab" is the running copy. torch_error: the class of the exception
    from importing torch or listing its GPUs, None without one. driver: of NVIDIA, None without one. cuda, hip: what torch was built
    for. is_other: it is another interpreter than the running one. It has no names of users and hosts, folders, addresses, serial
    numbers or environment variables.
    """

    python: str
    implementation: str
    packages: Mapping[str, Package]
    cuda: str | None
    hip: str | None
    torch_error: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    os: str
    architecture: str
    cpu: str
    cpu_flags: tuple[str, ...]
    cpu_capability: str | None
    cores: int
    threads: int | None
    host_total_bytes: int
    host_available_bytes: int
    is_other: bool = False

    def version(self, package: str) -> str | None:
        """Return a package's version, None if it is not installed."""
        package_row = self.packages.get(package)
        return None if package_row is None else package_row.version

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the installed packages."""
        return {name: package.version for name, package in self.packages.items() if package.version is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the environment as JSON-ready values."""
        return {"format": FORMAT, **as_json(self)}


def read_environment(python: str | os.PathLike[str] | None = None) -> Environment:
    """Return the environment of an interpreter (None: this one) and of the machine. Takes a process and torch's import,
    a few seconds.

    Missing packages are reported as missing. Errors: RequestError if the interpreter cannot be started or reports
    nothing.
    """
    outcome = run_inside("trimtab.machine.environment_child", {}, python=python, timeout_s=TIMEOUT_S)
    reply: dict[str, Any] = {}
    for line in outcome.lines:
        reply |= line
    if "packages" not in reply:
        last = (outcome.stderr.strip().splitlines() or [outcome.ended])[-1]
        raise RequestError(
            f"is not a Python interpreter that runs: {scrubbed(last)}", field="python", value=os.fspath(python or "")
        )
    # Without the second line, the interpreter ended while it imported torch or listed GPUs.
    torch = reply.get("torch") or {"error": f"process {outcome.ended}", "gpus": []}
    packages = {name: Package(**package) for name, package in reply["packages"].items()}
    packages["trimtab"] = Package(__version__, None)
    return Environment(
        python=reply["python"]["version"], implementation=reply["python"]["implementation"], packages=packages,
        cuda=torch.get("cuda"), hip=torch.get("hip"), torch_error=torch["error"],
        gpus=tuple(Gpu(**gpu) for gpu in torch["gpus"]), driver=nvidia_driver(), os=os_name(),
        architecture=platform.machine(), cpu=full_cpu_name(), cpu_flags=cpu_flags(),
        cpu_capability=torch.get("cpu_capability"), cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        threads=torch.get("threads"), host_total_bytes=int(psutil.virtual_memory().total),
        host_available_bytes=int(psutil.virtual_memory().available), is_other=python is not None,
    )  # fmt: skip


# The machine ----------------------------------------------------------------------------------------------------------


def os_name() -> str:
    """Return the system's name and release; for Linux the distribution's and the kernel's version number."""
    if sys.platform == "win32":
        return f"Windows {platform.release()} ({platform.version()})"
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    # Only the number of the kernel's release: its builder may have added a name.
    number = re.match(r"[\d.]+\d", platform.release())
    kernel = f"{platform.system()} {number.group() if number else ''}".strip()
    wsl = ", WSL" if "microsoft" in platform.release().lower() else ""
    try:
        return f"{platform.freedesktop_os_release().get('PRETTY_NAME', 'unknown')} ({kernel}{wsl})"
    except OSError:
        return f"{kernel}{wsl}"


def full_cpu_name() -> str:
    """Return the processor's name, as far as the system reports it."""
    named = read_cpuinfo("model name") or read_cpuinfo("Hardware") or _registry_cpu() or _brand_of_mac()
    return named or platform.processor() or platform.machine()


def cpu_flags() -> tuple[str, ...]:
    """Return those of CPU_FLAGS that the processor has; only Linux reports all of them."""
    known = (read_cpuinfo("flags") or read_cpuinfo("Features")).split()
    return tuple(flag for flag in CPU_FLAGS if flag in known)


def _registry_cpu() -> str:
    if sys.platform != "win32":
        return ""
    import winreg

    with suppress(OSError), winreg.OpenKey(
        winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    ) as key:  # fmt: skip
        return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    return ""


def _brand_of_mac() -> str:
    if sys.platform != "darwin":
        return ""
    library = ctypes.CDLL(None)
    size = ctypes.c_size_t(256)
    buffer = ctypes.create_string_buffer(size.value)
    failed = library.sysctlbyname(b"machdep.cpu.brand_string", buffer, ctypes.byref(size), None, 0)
    return "" if failed else buffer.value.decode("utf-8", "replace")


# For people -----------------------------------------------------------------------------------------------------------


def environment_document(environment: Environment) -> Document:
    """Return what the environment is."""
    built = f"CUDA {environment.cuda}" if environment.cuda else f"ROCm {environment.hip}" if environment.hip else "the CPU alone"
    driver = f"driver {environment.driver}" if environment.driver else "no NVIDIA driver"
    flags = f" ({', '.join(environment.cpu_flags)})" if environment.cpu_flags else ""
    rows = [
        ("CPU", f"{environment.cpu}, {environment.cores} cores{flags}"),
        ("memory", f"{gib(environment.host_available_bytes)} available of {gib(environment.host_total_bytes)}"),
    ]
    rows += [
        (f"GPU {gpu.index}", f"{gpu.name}, compute capability {gpu.compute_capability}, {gib(gpu.free_bytes)} free of "
         f"{gib(gpu.total_bytes)}")
        for gpu in environment.gpus
    ] or [("GPU", "none that torch can use")]  # fmt: skip
    rows.append(("torch", f"is built for {built}; {driver}"))
    rows += [("", f"cannot be used: {environment.torch_error}")] if environment.torch_error else []
    packages = [(name, one.version or "not installed", one.installed or "") for name, one in environment.packages.items()]
    title = f"{environment.implementation} {environment.python}{' (another interpreter)' if environment.is_other else ''} on "
    blocks: list[Block] = [Facts(rows), Table(("package", "release", "installed by"), packages, has_note=True)]
    return Document(f"{title}{environment.os}, {environment.architecture}", blocks)
