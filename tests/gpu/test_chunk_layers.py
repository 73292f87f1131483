"""The layers of captured chunks on the GPU: the CPU's tests; the demo's are in test_last_layers.py."""

import pytest

from tests.engine.families.test_chunk_layers import *
from trimtab.engine.prefill import rows


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    """Those tests are of float32, so that a tolerance says something; there the modules would be faster."""
    monkeypatch.setattr(rows, "pays", lambda *_: True)
