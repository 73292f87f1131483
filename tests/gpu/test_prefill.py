"""Captured prompts on the GPU: the tests of tests/test_prefill.py with the device changed."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.test_prefill import *
