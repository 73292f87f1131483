"""Prompts whose last token goes through with a step, on the GPU: the CPU's tests with the device changed,
and with the kernels of captured steps of a quantized model."""

import pytest

import trimtab
from tests.engine.kernels.test_fused_kernels import wide as wide_checkpoint
from tests.engine.prefill.test_open_prompts import *
from tests.engine.prefill.test_open_prompts import answered, both, differ, eager, ids, opened
from trimtab.engine.batch.batch import Batch
from trimtab.request import GenerateRequest

# bfloat16: one rounding of a product in another order moves a score by a few steps of 2^-8 of the largest.
STEPS = 2**-5


@pytest.mark.parametrize("family", ["gemma4", "llama"])
@pytest.mark.parametrize("rows", [4, 16])
def test_captured_steps_compute_last_tokens_with_adapters(family, rows, tmp_path, monkeypatch):
    base, adapters = wide_checkpoint(family, monkeypatch, tmp_path)
    plan = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=256, device="cuda:0", images=0, audio_s=0.0, batch=rows)
    name = next(iter(adapters))
    with trimtab.load(plan, decode="auto") as model:
        whole = eager(model)
        batch = Batch(model, rows)
        batch.prepare()
        assert batch.steps.is_captured and batch.prompts.is_on and batch.prompts.captures
        batch.join(batch.begin(model.prepare(ids(12)), GenerateRequest(max_new_tokens=200)).compute())
        for adapter in (None, name):
            for count in (9, 40, 130):
                expected = answered(whole, model.prepare(ids(count)), adapter=adapter)
                for _ in range(3):
                    found, row = both(batch, opened(batch, model.prepare(ids(count)), adapter=adapter))
                    assert differ(found, expected) < STEPS, (adapter, count)
                    batch.leave(row)
