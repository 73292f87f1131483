"""A chunk of a prompt that goes through with the rows' step has the scores that it has by itself, and so have the rows."""

from __future__ import annotations

import pytest
import torch

import trimtab
from tests import long_runs, pico
from tests.test_batch import STEP_TOLERANCE, through
from trimtab.request import GenerateRequest
from trimtab.runtime.batch import Batch
from trimtab.runtime.hf_mixed_pass import Beside

CONTEXT = 128


def ids(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 60, (count,), generator=generator).tolist()


def differ(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", long_runs.FAMILIES)
@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_scores_are_those_of_two_passes(family, size, tmp_path):
    plan = trimtab.plan(
        pico.build(family, tmp_path), quant="none", dtype="float32", context=CONTEXT, device="cpu", batch=4
    )
    with trimtab.load(plan) as model:
        request = GenerateRequest(max_new_tokens=70)
        batch, alone = Batch(model, rows=4), Batch(model, rows=4)
        for one in (batch, alone):
            for number, count in enumerate((3, 21)):
                through(one, model.prepare(ids(count, number)), request)
        inputs = model.prepare(ids(50))
        expected = alone.begin(inputs, request)
        while not expected.step():
            pass
        prompt = batch.begin(inputs, request)
        while True:
            assert batch.mixed.takes(prompt)
            beside = Beside(prompt, size)
            batch.step(beside=beside)
            if beside.error:
                raise beside.error
            alone.step()
            assert [row.token_ids for row in batch.active] == [row.token_ids for row in alone.active]
            if beside.is_through:
                break
        assert differ(prompt.logits, expected.logits) < STEP_TOLERANCE
        batch.join(prompt), alone.join(expected)
        for _ in range(4):
            assert differ(batch.logits(), alone.logits()) < STEP_TOLERANCE
