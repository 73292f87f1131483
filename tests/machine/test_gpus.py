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
