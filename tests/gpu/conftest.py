"""GPU tests: the same assertions on CUDA. Run alone: `make test-gpu` (they choose the device of the shared tests)."""

import os

import pytest
import torch

if torch.cuda.is_available():
    os.environ.setdefault("TRIMTAB_TEST_DEVICE", "cuda:0")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
