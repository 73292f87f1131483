"""Host memory that a device reads in place: what happens where a driver or a torch will not, with both played by objects."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trimtab.engine.tiers import reader as read

GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """Plays the driver; `locked` holds the addresses that it has page-locked. The device's memory is the host's here."""
    played = SimpleNamespace(locked=set(), refuses=False, flushed=0, makes=lambda memory: memory.tensor.view(torch.uint8))

    def register(address, nbytes, flags):
        assert nbytes > 0 and flags == 0
        if played.refuses or address in played.locked:
            return 1
        played.locked.add(address)
        return 0

    def zeros(*args, device=None):
        played.flushed += 1
        raise RuntimeError("CUDA error: the refusal before")

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=played.locked.remove)
    monkeypatch.setattr(read.torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(read.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(read.torch, "zeros", zeros)
    monkeypatch.setattr(read.torch, "as_tensor", lambda memory, device: played.makes(memory))
    monkeypatch.setattr(read.nvrtc, "reads_registered_memory", lambda device: True)
    return played


def table():
    return torch.arange(24, dtype=torch.float32).view(6, 4).bfloat16()


def test_memory_is_locked_as_long_as_it_is_seen(driver):
    source, kept = table(), []

    def makes(memory):  # as torch does: the tensor keeps what described it
        kept.append(memory)
        return memory.tensor.view(-1).view(torch.uint8)

    driver.makes = makes
    seen = read.seen_by(source, GPU)
    assert seen.dtype == source.dtype and torch.equal(seen, source) and driver.locked == {source.data_ptr()}
    described = kept[0].__cuda_array_interface__
    assert (described["shape"], described["typestr"]) == ((source.nbytes,), "|u1")
    assert described["data"] == (source.data_ptr(), False)
    kept.clear()
    gc.collect()
    assert driver.locked == set()


def test_a_refusal_is_not_left_for_the_next_kernel_to_report(driver):
    driver.refuses = True
    assert read.seen_by(table(), GPU) is None and driver.flushed == 1 and driver.locked == set()


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_a_torch_that_makes_no_tensor_of_it_leaves_nothing_locked(driver, error):
    def makes(memory):
        raise error("host memory")

    driver.makes = makes
    assert read.seen_by(table(), GPU) is None
    gc.collect()
    assert driver.locked == set()


def test_a_copy_is_not_taken_for_it(driver):
    driver.makes = lambda memory: memory.tensor.clone().view(-1).view(torch.uint8)
    assert read.seen_by(table(), GPU) is None
    gc.collect()
    assert driver.locked == set()


def test_nothing_is_locked_for_what_cannot_be_seen(driver, monkeypatch):
    assert read.seen_by(table(), torch.device("cpu")) is None
    assert read.seen_by(table().T, GPU) is None
    monkeypatch.setattr(read.nvrtc, "reads_registered_memory", lambda device: False)
    assert read.seen_by(table(), GPU) is None
    assert driver.locked == set()


def test_a_device_without_a_driver_of_nvidias_reads_no_host_memory(monkeypatch):
    def no_driver():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(read.nvrtc, "_driver", no_driver)
    assert read.nvrtc.reads_registered_memory(GPU) is False
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert read.nvrtc.reads_registered_memory(GPU) is False
