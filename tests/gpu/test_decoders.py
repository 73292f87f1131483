"""Families whose steps have no other test on a GPU: captured steps and prompts of mixed rows are those of the modules."""

import pytest

from tests.engine.families.test_decoders import ASKED, NEW, TOLERANCE, compare, joined, loaded
from tests.engine.prefill.test_prefill import answered, differ, eager, ids
from trimtab.engine.batch.batch import Batch


@pytest.mark.parametrize("family", [one for one in NEW if one != "gpt_oss"])
def test_captured_steps_and_prompts_are_those_of_the_modules(family, tmp_path):
    with loaded(family, tmp_path, device="cuda:0", batch=4) as model:
        assert model.plan.execution.step.mode == "fused"
        expected, batch = (joined(model, way, ASKED, rows=4) for way in ("eager", "auto"))
        compare(expected, batch, 4, 2 * TOLERANCE)
        assert batch.steps.captures and not [one for one in batch.steps.fallbacks if one.what in ("graph", "fused step")]
        alone, whole = Batch(model, rows=1), eager(model)
        for name in (None, "a", "b"):
            for _ in range(3):  # as it is, captured, replayed
                found = answered(alone, model.prepare(ids(40)), adapter=name)
            assert differ(found, answered(whole, model.prepare(ids(40)), adapter=name)) < 2 * TOLERANCE
        assert alone.prompts.captures, alone.steps.fallbacks
