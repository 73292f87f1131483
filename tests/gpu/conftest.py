"""On the GPU an answer is computed from captured steps, whose kernels round in another order than stock's."""

from functools import partial

import pytest

import trimtab


@pytest.fixture(autouse=True)
def one_kernel_after_the_other(monkeypatch):
    """What is compared bit for bit with stock is computed as stock does; tests of captured steps name their way.

    A model that a module's tests share is loaded before this: its fixture says `decode=` itself.
    """
    monkeypatch.setattr(trimtab, "load", partial(trimtab.load, decode="eager"))
