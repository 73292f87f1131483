"""Recurrent layers on the GPU: captured steps and chunks, packed, and in 16 bits around the stack's own products."""

import pytest

import trimtab
from tests import pico
from tests.engine.decode.test_graphs import joined
from tests.engine.families.test_decoders import ASKED, TOLERANCE, compare
from tests.engine.prefill.test_prefill import DEVICE, answered, differ, eager, ids, is_whole, read
from trimtab.engine.batch.batch import Batch


@pytest.mark.parametrize("quant, rows", [("none", 4), ("nf4-dq", 4), ("nf4-dq", 12), ("nf4-dq", 33)])
def test_steps_of_mixed_rows_and_prompts_are_captured_and_those_of_the_modules(quant, rows, tmp_path):
    base = pico.build("qwen3_5", tmp_path / "base")
    adapters = {name: pico.adapter(base, tmp_path / name, rank=rank, seed=rank) for name, rank in (("a", 4), ("b", 20))}
    plan = trimtab.plan(base, adapters=adapters, quant=quant, context=128, device=DEVICE, batch=rows)
    assert plan.execution.step.mode == "fused" and ("own products" in plan.execution.step.reason) == (quant == "none")
    with trimtab.load(plan, decode="auto") as model:
        asked = [ASKED[number % 3] for number in range(rows - 1)]
        expected, batch = (joined(model, way, asked, rows=rows) for way in ("eager", "auto"))
        compare(expected, batch, 4, 2 * TOLERANCE)
        assert batch.steps.captures and not [one for one in batch.steps.fallbacks if one.what in ("graph", "fused step")]
        alone, whole = Batch(model, rows=1), eager(model)
        for name in (None, "a", "b"):
            for tokens in (9, 40):
                for _ in range(3):  # as it is, captured, replayed
                    found = answered(alone, model.prepare(ids(tokens)), adapter=name)
                assert differ(found, answered(whole, model.prepare(ids(tokens)), adapter=name)) < 2 * TOLERANCE
            assert is_whole(model, read(alone, 40, name), 40, name, 2 * TOLERANCE)
        assert alone.prompts.captures, alone.steps.fallbacks
