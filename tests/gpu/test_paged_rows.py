"""Keys and values in pages on the GPU: the CPU's tests with the device changed, captured steps, and the kernels at the
sizes of Gemma 4."""

import pytest
import torch

import trimtab
from tests.engine.batch.test_company import alone, asks, begun
from tests.engine.kv.test_paged_rows import *
from tests.engine.kv.test_paged_rows import CONTEXT, DEVICE, with_pool
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kernels import attention_and_norms, selfcheck
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

ROWS = 4
# Of rows that find their adapters in a table, and with one beside them that no table holds: DoRA.
ASKED = ((None, "style", "specialist"), (None, *ADAPTERS))


@pytest.fixture
def replayed():
    """Nothing in the place of graphs: here they are captured."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_pages_has_the_same_bits_at_every_size_of_gemma_4(dtype):
    module = attention_and_norms.load("cuda")
    kinds = [(8, 2, 512), (8, 1, 512), (16, 1, 512), (8, 2, 256), (8, 4, 256), (32, 8, 128)]
    assert selfcheck.check_pages(module, kinds, dtype) is None


def said(model, decode, names):
    """Return every row's (token, its log-probability), all rows at once, and a second time, when everything is captured."""
    batch = Batch(model, rows=ROWS, decode=decode)
    found = []
    for _ in range(2):
        whose = {}
        for number, (_, text) in enumerate(asks(ROWS)):
            drawn = batch.join(begun(batch, (names[number % len(names)], text), client=None).compute())
            whose[drawn.row] = number, [(drawn.token_id, drawn.logprob)]
        while any(row.finish is None for row in whose):
            for drawn in batch.step():
                whose[drawn.row][1].append((drawn.token_id, drawn.logprob))
        for row in whose:
            batch.leave(row)
        found += [pairs for _, pairs in sorted(whose.values())]
    return found, batch


def slower(batch):
    return {one.what for one in batch.steps.fallbacks}


# Fused steps are of 4-bit weights.
@pytest.mark.parametrize(
    "decode, quant", [("eager", "nf4-dq"), ("eager", "none"), ("graph", "nf4-dq"), ("graph", "none"), ("fused", "nf4-dq")]
)
def test_the_demo_says_the_same_in_pages_to_the_last_bit(decode, quant):
    adapters = {name: DEMO / "adapters" / name for name in ADAPTERS}
    plan = trimtab.plan(
        DEMO / "base", adapters=adapters, quant=quant, context=CONTEXT, device=DEVICE, batch=ROWS, images=0, audio_s=0.0,
        decode=decode,
    )  # fmt: skip
    for names in ASKED:
        with trimtab.load(plan, decode=decode) as model:
            whole, batch = said(model, decode, names)
            assert batch.cache.pool is None
            of_whole = slower(batch)
            assert ("adapters by table" in of_whole) == (decode != "eager" and "rslora-dora" in names)
            del batch
            with_pool(model, CONTEXT + 2 * PAGE_TOKENS)
            paged, batch = said(model, decode, names)
            assert batch.cache.pool.tokens == CONTEXT + 2 * PAGE_TOKENS
            # Nothing takes a slower way because of the pages.
            assert batch.steps.is_captured == (decode != "eager") and slower(batch) <= of_whole
            assert [[token for token, _ in one] for one in paged] == [[token for token, _ in one] for one in whole]
            if decode == "fused":
                assert paged == whole
            else:
                # torch takes another kernel for a copy of the pages than for rows that lie apart, maybe.
                assert max(abs(a[1] - b[1]) for x, y in zip(paged, whole, strict=True) for a, b in zip(x, y, strict=True)) < 0.05
            assert len(alone(batch, asks(1)[0])) > 1
