"""Several prompts in one pass on the GPU: the CPU's tests with the device changed, and the table of
adapters in bfloat16 with weights that are kept unpacked."""

import pytest

import trimtab
from tests.engine.kernels.test_fused_kernels import wide as wide_checkpoint
from tests.engine.prefill.test_packed_prompts import *
from tests.engine.prefill.test_packed_prompts import DEVICE, REQUEST, answered, both, differ, eager, ids, named, together, wide
from trimtab.engine.batch.batch import Batch
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.planning.planner import ITEM

# bfloat16: one rounding of a product in another order moves a score by a few steps of 2^-8 of the largest.
STEPS = 2**-5


@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_packed_prompts_and_many_rows_over_unpacked_weights_are_those_of_modules(family, tmp_path, monkeypatch):
    base, adapters = wide_checkpoint(family, monkeypatch, tmp_path)
    plan = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=256, device=DEVICE, images=0, audio_s=0.0, batch=16)
    assert plan.gpu[ITEM]
    # Captured steps, and the table of adapters that they share with passes of several prompts.
    with trimtab.load(plan, decode="auto") as model:
        assert model.unpacked is not None
        names = [("a", None)[number % 2] for number in range(9)]  # the other adapter's rank is too high for a pass
        counts = [5 + 3 * number for number in range(9)]
        alone = eager(model)
        expected = [answered(alone, model.prepare(ids(count)), adapter=name) for name, count in zip(names, counts)]
        batch = wide(Batch(model, rows=16), monkeypatch, 1024)
        batch.prompts = PrefillRunner(batch, "auto", (16, 64, 128))
        assert batch.prompts.packs.why_not() is None and batch.steps.is_captured and batch.steps.kernels.has_lora
        for _ in range(4):
            prompts = [batch.begin(model.prepare(ids(count)), REQUEST, adapter=name) for name, count in zip(names, counts)]
            assert together(batch, prompts) == 1
            for found, wanted in zip(both(batch, prompts), expected):
                assert differ(found, wanted) < STEPS
        assert not named(batch)
        packed = [key for key in batch.prompts._graphs if key[0].rows > 1]
        assert packed and all(key[0].by_table for key in packed)
