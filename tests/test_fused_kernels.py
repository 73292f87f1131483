"""A whole decode step from the CUDA sources themselves, run on the CPU: rows, adapters by table, attention, the cache.

Slow, thread by thread: few steps of the demo model. That the kernels are right one by one is in test_matvec and test_fused.
"""

from __future__ import annotations

import pytest

from tests.cuda_on_cpu import run
from tests.test_graphs import ASKED, answers, demo, joined, replayed  # noqa: F401 - replayed is a fixture
from trimtab.runtime import fused, graphs, kernels, matvec, nvrtc

pytestmark = pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))
# bfloat16: every product, norm and attention rounds once, in another order of sums than torch's.
STEP_TOLERANCE = 2**-4


MATVEC = ("matvec_1_4", "matvec_2_2", "lora_shrink", "lora_add")


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels of both sources, compiled by g++, in place of those of a GPU."""
    small = run.CpuModule(fused.source(), fused.NAMES)
    fused.prepare(small)
    products = run.CpuModule(nvrtc.source("matvec4.cu"), MATVEC)
    matvec.prepare(products)

    def attention(module, options):
        if options not in module.kept:
            module.kept[options] = run.CpuModule(fused.source("attend.cu"), fused.ATTEND_NAMES, options=options)
        return module.kept[options]

    chosen = kernels.Kernels(small, products)
    monkeypatch.setattr(nvrtc, "why_not", lambda device: None)
    monkeypatch.setattr(fused, "load_attention", attention)
    monkeypatch.setattr(graphs.Kernels, "none", staticmethod(lambda: chosen))
    return chosen


def test_a_step_of_mixed_rows_from_the_kernels_is_the_modules(on_cpu, replayed):  # noqa: F811
    asked = [ASKED[0], ASKED[1], ASKED[5]]
    with demo("streamed") as model:
        expected = joined(model, "eager", asked, rows=4)
        batch = joined(model, "fused", asked, rows=4)
        for step in range(3):
            wanted, found = expected.logits(), batch.logits()
            assert (found - wanted).abs().max() <= STEP_TOLERANCE * wanted.abs().max()
            assert found.argmax(-1).tolist() == wanted.argmax(-1).tolist()
            for one in (expected, batch):
                for row, token in zip(one.active, wanted.argmax(-1).tolist(), strict=True):
                    row.token_ids.append(token)
                one.tell_tokens()
            if step == 1:  # rows change their adapters: nothing is captured anew
                captured = batch.steps.captures
                for one in (expected, batch):
                    one.active[0].adapter, one.active[2].adapter = "specialist", None
        assert batch.steps.captures == captured == 1 and batch.steps.fallbacks == []
        assert {"lora_shrink", "matvec_1_4"} & set(on_cpu.matvec.launches)
        assert len(on_cpu.small.launches) > 50
