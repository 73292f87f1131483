"""What an environment says of an interpreter, the machine and the driver, and that it says nothing of a person."""

from __future__ import annotations

import ctypes
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import accelerate
import psutil
import pytest
import torch
import transformers

import trimtab
from tests.raised import refused
from trimtab.machine import environment, gpus
from trimtab.machine.environment import Environment, Gpu, Package, environment_document, read_environment
from trimtab.machine.environment_child import PACKAGES, how_installed, read_package, read_torch
from trimtab.process import redact
from trimtab.process.redact import scrubbed
from trimtab.report.render import Lines


@pytest.fixture(scope="module")
def here() -> Environment:
    return read_environment()


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def distribution(folder: Path, name: str = "thing", **files: str) -> metadata.Distribution:
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    for file, text in files.items():
        (info / file.replace("_json", ".json")).write_text(text)
    return metadata.PathDistribution(info)


# What it says ---------------------------------------------------------------------------------------------------------


def test_versions_are_those_that_import_here(here):
    assert here.version("torch") == torch.__version__ and here.version("transformers") == transformers.__version__
    assert here.version("accelerate") == accelerate.__version__ and here.version("trimtab") == trimtab.__version__
    assert set(here.packages) == {*PACKAGES, "trimtab"} and here.python == ".".join(map(str, sys.version_info[:3]))
    assert not here.is_other


def test_memory_and_torch_build_are_this_machines(here):
    assert here.host_total_bytes == psutil.virtual_memory().total
    assert 0 < here.host_available_bytes <= here.host_total_bytes and here.cuda == torch.version.cuda
    assert here.torch_error is None
    assert len(here.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_a_missing_package_has_no_version(here):
    assert read_package("no-such-distribution") == {"version": None, "installed": None}
    assert here.version("no-such-distribution") is None


def test_interpreter_without_packages_is_told_as_such(bare):
    found = read_environment(bare)
    assert found.is_other and set(found.versions) == {"trimtab"}
    assert found.torch_error is None and found.gpus == () and found.cuda is None
    assert ("torch", "not installed", "") in environment_document(found).blocks[1].rows


def test_python_that_does_not_exist_is_refused():
    assert refused(read_environment, "/no/such/python").field == "python"


def test_a_program_that_is_no_python_is_refused():
    error = refused(lambda: read_environment("/bin/true" if Path("/bin/true").exists() else sys.executable + "w"))
    assert error.field == "python"


def test_torch_that_kills_its_process_leaves_the_packages(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = read_environment()
    assert found.torch_error == "process crashed" and found.version("transformers") == transformers.__version__


def test_torch_that_cannot_be_imported_names_the_exception(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert read_torch() == {"error": None, "gpus": []}
    monkeypatch.delitem(sys.modules, "torch")
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_torch() == {"error": "OSError", "gpus": []}


# How each package was installed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "words"), [
    ({"INSTALLER": "pip\n"}, "index, pip"),
    ({"INSTALLER": "uv"}, "index, uv"),
    ({"INSTALLER": "conda"}, "conda"),
    ({}, "index, unknown installer"),
    ({"INSTALLER": "pip", "direct_url_json": '{"url": "file:///home/ann/x", "dir_info": {"editable": true}}'},
     "editable, pip"),
    ({"INSTALLER": "pip", "direct_url_json": '{"url": "file:///home/ann/x", "dir_info": {}}'}, "local folder, pip"),
    ({"INSTALLER": "pip", "direct_url_json": '{"url": "file:///home/ann/x.whl", "archive_info": {}}'},
     "local file, pip"),
    ({"INSTALLER": "pip", "direct_url_json": '{"url": "https://ann:key@example.org/x.whl", "archive_info": {}}'},
     "file from an address, pip"),
    ({"INSTALLER": "pip", "direct_url_json": json.dumps(
        {"url": "https://example.org/ann/x", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}})},
     "git 0123456789ab, pip"),
    ({"INSTALLER": "pip", "direct_url_json": "{"}, "unreadable direct_url.json, pip"),
    ({"INSTALLER": "pip", "direct_url_json": "[]"}, "unreadable direct_url.json, pip"),
])  # fmt: skip
def test_the_kind_of_an_installation_is_told_and_nothing_else(tmp_path, files, words):
    found = how_installed(distribution(tmp_path, **files))
    assert found == words and "ann" not in found and "example" not in found


# Nothing personal -----------------------------------------------------------------------------------------------------


def personal() -> list[str]:
    return [str(Path.home()), getpass.getuser(), socket.gethostname(), os.getcwd(), sys.prefix, tempfile.gettempdir()]


def test_no_user_host_or_folder_is_told(here):
    text = json.dumps(here.to_json()) + Lines().show(environment_document(here))
    assert [name for name in personal() if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text)] == []
    assert not re.search(r"/[a-z]+/[a-z]|[A-Z]:\\\\", text)


def test_scrubbed_text_starts_at_the_package_and_names_nobody(monkeypatch):
    monkeypatch.setattr(redact, "user_name", lambda: "annsmith")
    monkeypatch.setattr(socket, "gethostname", lambda: "annspc")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/annsmith"))
    text = 'File "/home/annsmith/env/lib/python3.12/site-packages/peft/tuners/lora/bnb.py", annspc, annsmith: x'
    assert scrubbed(text) == 'File "peft/tuners/lora/bnb.py", HOST, USER: x'
    assert scrubbed(r"C:\Users\ann\venv\Lib\site-packages\peft\x.py") == r"peft\x.py"
    assert scrubbed("/home/annsmith/models/a") == ".../models/a" and scrubbed("annsmithery") == "annsmithery"


def test_only_the_number_of_a_kernel_release_is_told(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(environment.platform, "release", lambda: "6.8.1-ann-special")
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    monkeypatch.setattr(environment.platform, "freedesktop_os_release", lambda: {"PRETTY_NAME": "Some Linux 9"})
    assert environment.os_name() == "Some Linux 9 (Linux 6.8.1)"
    monkeypatch.setattr(environment.platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert environment.os_name() == "Some Linux 9 (Linux 5.15.90.1, WSL)"


# The machine's parts --------------------------------------------------------------------------------------------------


def test_only_flags_that_decide_kernels_are_told(monkeypatch):
    monkeypatch.setattr(environment, "read_cpuinfo", lambda field: "fpu avx2 avx512_bf16 sse" if field == "flags" else "")
    assert environment.cpu_flags() == ("avx2", "avx512_bf16")


class _Nvml:
    def __init__(self, code: int) -> None:
        self.code, self.closed = code, False

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlSystemGetDriverVersion(self, buffer, size) -> int:
        buffer.value = b"580.65.06"
        return 0

    def nvmlShutdown(self) -> None:
        self.closed = True


def test_driver_is_what_nvml_says_and_nvml_is_closed(monkeypatch):
    library = _Nvml(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert environment.nvidia_driver() == "580.65.06"
    assert library.closed


def test_no_driver_without_nvml_or_when_it_refuses(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Nvml(9))
    assert environment.nvidia_driver() is None

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert environment.nvidia_driver() is None


# JSON and text --------------------------------------------------------------------------------------------------------


def test_gpus_are_shown():
    base = read_only_environment()
    text = Lines().show(environment_document(base))
    assert json.loads(json.dumps(base.to_json()))["gpus"][0]["name"] == "Tesla T4"
    assert "GPU 0   Tesla T4, compute capability 7.5, 7.74 GiB free of 14.56 GiB" in text
    assert "torch   is built for CUDA 12.8; driver 580.65.06" in text
    assert re.search(r"peft +0\.19\.1 +index, pip", text)


def read_only_environment(**changed) -> Environment:
    values = {
        "python": "3.12.13", "implementation": "CPython", "cuda": "12.8", "hip": None, "torch_error": None,
        "packages": {"peft": Package("0.19.1", "index, pip")},
        "gpus": (Gpu(0, "Tesla T4", int(14.563 * 2**30), int(7.742 * 2**30), "7.5"),), "driver": "580.65.06",
        "os": "Some Linux 9", "architecture": "x86_64", "cpu": "Some CPU", "cpu_flags": ("avx2",),
        "cpu_capability": "AVX2", "cores": 2, "threads": 2, "host_total_bytes": 2**34, "host_available_bytes": 2**33,
    } | changed  # fmt: skip
    return Environment(**values)


def test_broken_torch_is_shown():
    text = Lines().show(environment_document(read_only_environment(torch_error="OSError", cuda=None, gpus=(), driver=None)))
    assert "cannot be used: OSError" in text
    assert "none that torch can use" in text


class Driver:
    """libcuda: one GPU, number 0."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuInit(self, flags):
        return self.code

    def cuDeviceGet(self, device, index):
        return 0 if index.value == 0 else 101

    def cuDeviceGetUuid_v2(self, raw, device):
        raw._obj[:] = range(16)
        return 0


class Nvml:
    """libnvidia-ml: a card that computes for others a part of the time. is_slice: it is known by its slice alone."""

    def __init__(self, percent: int, *, is_slice: bool = False, code: int = 0) -> None:
        self.percent, self.is_slice, self.code, self.open = percent, is_slice, code, 0

    def nvmlInit_v2(self):
        self.open += 1
        return 0

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, named, handle):
        return int(named.startswith(b"GPU-") == self.is_slice)

    def nvmlDeviceGetUtilizationRates(self, handle, utilization):
        utilization._obj.gpu, utilization._obj.memory = self.percent, 99
        return self.code


class WholeDriver(Driver):
    """The same with what a plan asks. reads: whether kernels read host memory where it is."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.attributes = {16: 58, 75: 8, 76: 9, 91: reads}  # of cuda.h, by number

    def cuDriverGetVersion(self, version):
        version._obj.value = 13000
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 1
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA L4"
        return 0

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = 24 * 2**30
        return 0

    def cuDeviceGetAttribute(self, value, which, device):
        value._obj.value = self.attributes[which.value]
        return 0


@pytest.mark.parametrize("reads", [0, 1])
def test_a_gpu_says_whether_kernels_read_host_memory_where_it_is(reads, monkeypatch):
    driver, nvml = WholeDriver(reads), Nvml(0)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle, memory: setattr(memory._obj, "free", 20 * 2**30) or 0
    libraries(monkeypatch, driver, nvml)
    assert gpus.read_gpus() == (gpus.Gpu("NVIDIA L4", (8, 9), 58, 24 * 2**30, 20 * 2**30, (13, 0), bool(reads)),)


def libraries(monkeypatch, driver, nvml):
    monkeypatch.setattr(gpus.sys, "platform", "linux")
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: nvml if "nvidia-ml" in name else driver)


@pytest.mark.parametrize("is_slice", [False, True])
def test_how_busy_a_gpu_is_comes_from_nvml_which_is_closed_again(is_slice, monkeypatch):
    nvml = Nvml(37, is_slice=is_slice)
    libraries(monkeypatch, Driver(), nvml)
    assert gpus.busy_percent(0) == 37
    assert nvml.open == 0


def test_nothing_is_said_without_a_gpu_an_answer_or_a_driver(monkeypatch):
    for driver, nvml, index in (
        (Driver(100), Nvml(37), 0), (Driver(3), Nvml(37), 0), (Driver(), Nvml(37), 1), (Driver(), Nvml(37, code=3), 0),
        (object(), Nvml(37), 0),
    ):  # fmt: skip
        libraries(monkeypatch, driver, nvml)
        assert gpus.busy_percent(index) is None
        assert getattr(nvml, "open", 0) == 0

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    assert gpus.busy_percent(0) is None and gpus.read_gpus() == ()
