"""Captured prompts on the GPU: the CPU's tests with the device changed."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.engine.prefill.test_prefill import *
