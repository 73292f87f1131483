"""Proofs on the GPU: the tests of routes, verdicts and merge lanes with the device changed."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.verification.merges.test_lanes import *
from tests.verification.routes.test_routes import *
from tests.verification.test_verify import *
