"""On the GPU an answer is computed from captured steps, whose kernels round in another order than stock's."""

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import trimtab

if os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") != "cpu":
    gc.set_threshold(700, 10, 10)  # Python's own: what a test left on the device counts in the memory of the next one
# As a model with a small budget does while it is open: a stock model that answers before one is loaded rounds alike.
torch.backends.cuda.enable_cudnn_sdp(False)


class GpuFile(pytest.Module):
    """A file of tests, which is read only where there is a GPU."""

    def collect(self):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    return GpuFile.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Skip by name where the tests that these files take over would run on the CPU once more."""
    if os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") == "cpu":
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="TRIMTAB_TEST_DEVICE=cuda runs them on the GPU"))


@pytest.fixture(autouse=True)
def one_kernel_after_the_other(monkeypatch):
    """What is compared bit for bit with stock is computed as stock does; tests of captured steps name their way.

    A model that a module's tests share is loaded before this: its fixture says `decode=` itself.
    """
    monkeypatch.setattr(trimtab, "load", partial(trimtab.load, decode="eager"))
