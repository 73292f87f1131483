"""What the driver's libraries are asked, with stand-ins for them."""

from __future__ import annotations

import pytest

from trimtab.machine import gpus


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
