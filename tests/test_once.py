"""What the GPU's memory checker is given to follow: the same, run on the CPU, so that it is known to run."""

import pytest

from tests.cuda_on_cpu import modules, run
from tests.gpu import once

pytestmark = pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))


def test_every_kernel_runs_and_is_right(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[1:3])
    monkeypatch.setattr(once, "ATTENTION", once.ATTENTION[2:])
    parts = modules.products(), modules.small(), modules.step_ends()
    assert list(once.findings(*parts, rows=(1,), limit=2)) == []
    assert {"matvec_held", "attend", "rows", "add_norm"} <= {name for part in parts for name in modules.launches(part)}


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[3:])
    monkeypatch.setattr(once.fused_check, "check", lambda *args, **kwargs: "attention is wrong")
    said = list(once.findings(modules.products(), modules.small(), modules.step_ends(), rows=(1,), limit=1))
    assert said == ["attention is wrong"]
