"""Batch-invariant answers on the GPU: one graph of all rows, adapters by table, captured prompts; bits are compared.

The CPU's tests with the device changed, and the demo in bfloat16, captured as it is served.
"""

import pytest

from tests.engine.decode.test_batch_invariant import *
from tests.engine.decode.test_batch_invariant import TOKENS, alone, batch_of, began, beside, is_beginning, load, made, questions

GPU_ROWS = 8


@pytest.fixture(scope="module", params=["nf4-dq", "none"])
def captured_model(request):
    """The demo model as it is served: bfloat16, captured, adapters by table; with a prefix cache."""
    plan = made(rows=GPU_ROWS, quant=request.param, dtype="bfloat16", context=1280, prefix_cache="64MiB")
    with load(plan) as found:
        yield found


def prepared(model):
    batch = batch_of(model)
    batch.prepare()
    return batch


def test_captured_answers_have_the_same_bits_alone_and_beside_others(captured_model):
    # "rslora-dora" is in no table: its rows are computed by themselves.
    asked = questions(20, most=700)
    batch = prepared(captured_model)
    expected = [alone(batch, ask) for ask in asked]
    assert expected == [alone(batch, ask) for ask in asked]
    for seed in (1, 2, 3):
        said = beside(batch, asked, seed, leaves=0.05)
        assert [number for number, whole in enumerate(expected) if not is_beginning(said[number], whole)] == []
    assert batch.steps.captures == 1 and batch.steps.is_captured


def test_captured_prompts_behind_cached_prefixes_have_the_same_bits(captured_model):
    asked = questions(8, shared=600, most=300)
    batch = prepared(captured_model)
    assert max(batch.prompts.sizes) == 512
    expected = [alone(batch, ask) for ask in asked]
    for seed in (1, 2):
        said = beside(batch, asked, seed, client="a", leaves=0.0)
        assert [number for number, whole in enumerate(expected) if not is_beginning(said[number], whole)] == []
    again = began(batch, asked[0], client="a").compute()
    assert again.row.cached_tokens == 512
    batch.leave(batch.join(again).row)


def test_a_row_s_place_changes_no_bits(captured_model):
    """Requests that step beside each other in every order: a row is multiplied as any other."""
    asked = questions(GPU_ROWS, most=60)
    batch = prepared(captured_model)
    expected = [alone(batch, ask) for ask in asked]
    for turn in range(3):
        order = [(number * 3 + turn) % GPU_ROWS for number in range(GPU_ROWS)]
        rows = {}
        for number in order:
            drawn = batch.join(began(batch, asked[number]).compute())
            rows[drawn.row] = (number, [(drawn.token_id, drawn.logprob)])
        for _ in range(TOKENS - 1):
            for one in batch.step():
                rows[one.row][1].append((one.token_id, one.logprob))
        for row in list(batch.active):
            batch.leave(row)
        assert [number for number, said in rows.values() if said != expected[number]] == []
