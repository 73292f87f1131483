"""The last layers of captured prompts on the GPU: the CPU's tests, and the demo in 4 bits."""

import pytest
import torch

import trimtab
from tests.engine.families.test_last_layers import *
from tests.engine.families.test_last_layers import BFLOAT16_TOLERANCE
from tests.engine.prefill.test_prefill import DEVICE, answered, differ, eager, ids, read
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batched_lora.table import AdapterSlots
from trimtab.engine.calls.embedding import Embedding

NAMES = ("specialist", "style", None, "rslora-dora")


@pytest.mark.parametrize("budget", [None, "2GiB"])  # the latter with the memory that graphs share
def test_graphs_have_the_bits_of_the_same_pass_and_the_scores_of_the_modules(budget):
    adapters = {name: DEMO / "adapters" / name for name in NAMES if name is not None}
    given = {} if budget is None else {"gpu_memory": budget}
    plan = trimtab.plan(DEMO / "base", adapters=adapters, quant="nf4-dq", device=DEVICE, context=512, **given)
    with trimtab.load(plan, decode="auto") as model:
        expected, batch = eager(model), Batch(model, rows=1)
        assert batch.prompts.is_on and batch.prompts.captures, batch.steps.fallbacks
        batch.prepare()
        for tokens in (9, 30, 100, 300):
            for name in NAMES:
                found = [answered(batch, model.prepare(ids(tokens)), adapter=name) for _ in range(3)]
                assert batch.prompts._forward.lasts.__self__ is batch.prompts.lasts
                assert isinstance(batch.prompts.lasts._table, AdapterSlots) == (name in ("specialist", "style"))
                # As it is, captured, replayed: the prompt's scores, bit for bit.
                assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[1][0], found[2][0])
                wanted = answered(expected, model.prepare(ids(tokens)), adapter=name)
                assert differ(found[2], wanted) < BFLOAT16_TOLERANCE
                vectors = [read(batch, tokens, name)[0] for _ in range(2)]
                assert torch.equal(*vectors)
                whole = Embedding(model, model.prepare(ids(tokens)), adapter=name, pooling="mean")
                while not whole.step():
                    pass
                assert differ(vectors[1], whole.pooled.cpu()) < BFLOAT16_TOLERANCE
        assert not [one for one in batch.steps.fallbacks if one.what in ("captured prompts", "fused step")]
