"""A chunk of a prompt that goes through with the rows' step has the scores that it has by itself, and so have the rows.

What it is compared with is transformers' own pass of the prompt, and a step of the same rows without it.
"""

from __future__ import annotations

import random

import pytest
import torch

import trimtab
from tests import long_runs, pico
from tests.test_batch import STEP_TOLERANCE, through
from tests.test_company import batch_of, keeping_prefixes
from tests.test_prefill import differ, picture
from trimtab.demo.line import ADAPTERS
from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.runtime.batch import Batch
from trimtab.runtime.hf_mixed_pass import Beside
from trimtab.runtime.hf_slots import PagedLayer

CONTEXT = 192
REQUEST = GenerateRequest(max_new_tokens=70)


def ids(count, seed=3):
    chance = random.Random(seed)
    return [chance.randrange(100, 290) for _ in range(count)]


def load(family, folder, **options):
    plan = trimtab.plan(
        pico.build(family, folder),
        **{"quant": "none", "dtype": "float32", "context": CONTEXT, "device": "cpu"} | options,
    )
    return trimtab.load(plan)


def beside_steps(batch, prompt, sizes):
    """Put a prompt through with steps, in chunks of these sizes in turn."""
    sizes = [*sizes] * prompt.inputs.prompt_tokens
    while True:
        assert batch.mixed.takes(prompt)
        beside = Beside(prompt, sizes.pop(0))
        assert batch.step(beside=beside)
        if beside.error is not None:
            raise beside.error
        if beside.is_through:
            return


def check(mixed, alone, inputs, sizes, **options):
    """Put a prompt through both ways and compare its scores, and those of all rows in the steps after it. The batches hold the
    same rows."""
    expected = alone.begin(inputs, REQUEST, **options)
    while not expected.step():
        pass
    mixed.ends = alone.ends = frozenset()
    prompt = mixed.begin(inputs, REQUEST, **options)
    passes = mixed.mixed.passes
    beside_steps(mixed, prompt, sizes)
    assert differ(prompt.logits, expected.logits) < STEP_TOLERANCE
    while len(alone.active[0].token_ids) < len(mixed.active[0].token_ids):
        alone.step()
    assert [row.token_ids for row in mixed.active] == [row.token_ids for row in alone.active]
    mixed.join(prompt), alone.join(expected)
    for _ in range(3):
        assert differ(mixed.logits(), alone.logits()) < STEP_TOLERANCE
    return mixed.mixed.passes - passes


@pytest.mark.parametrize("family", long_runs.FAMILIES)
@pytest.mark.parametrize("sizes", [(1,), (7,), (16, 3), (64,)], ids=str)
def test_scores_are_those_of_two_passes(family, sizes, tmp_path):
    with load(family, tmp_path, batch=4) as model:
        mixed, alone = Batch(model, rows=4), Batch(model, rows=4)
        for batch in (mixed, alone):
            for number, count in enumerate((3, 21)):
                through(batch, model.prepare(ids(count, number)), REQUEST)
        passes = check(mixed, alone, model.prepare(ids(50)), sizes)
        assert passes == {(1,): 50, (7,): 8, (16, 3): 5, (64,): 1}[sizes]


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl"])
def test_rows_with_a_picture_keep_their_positions(family, tmp_path):
    with load(family, tmp_path, batch=3, images=1) as model:
        mixed, alone = Batch(model, rows=3), Batch(model, rows=3)
        inputs = picture(model, family, 10)
        for batch in (mixed, alone):
            through(batch, inputs, REQUEST)
        other = mixed.begin(inputs, REQUEST)
        assert not mixed.mixed.takes(other)  # media go through by themselves
        beside = Beside(other, 64)
        mixed.step(beside=beside), alone.step()
        assert isinstance(beside.error, RequestError)
        check(mixed, alone, model.prepare(ids(30)), (13,))


@pytest.mark.parametrize("options", [{"kv": "int8"}, {"kv_tokens": 448}], ids=["int8", "pages"])
def test_other_forms_of_the_cache(options, tmp_path):
    with load("gemma4", tmp_path, batch=4, **options) as model:
        mixed, alone = Batch(model, rows=4), Batch(model, rows=4)
        for batch in (mixed, alone):
            through(batch, model.prepare(ids(21)), REQUEST)
        check(mixed, alone, model.prepare(ids(50, 5)), (7, 16))
        assert ("kv" in options) or any(isinstance(layer, PagedLayer) for layer in mixed.cache.layers)


@pytest.fixture(scope="module")
def demo():
    paths = {name: DEMO / "adapters" / name for name in ADAPTERS}
    plan = trimtab.plan(
        DEMO / "base", adapters=paths, quant="none", dtype="float32", context=CONTEXT, images=0, audio_s=0.0, device="cpu", batch=6
    )  # fmt: skip
    with trimtab.load(plan) as model:
        yield model


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_a_prompt_has_its_own_adapter_beside_rows_with_theirs(demo, name):
    mixed, alone = Batch(demo, rows=6), Batch(demo, rows=6)
    for batch in (mixed, alone):
        for number, one in enumerate((None, *ADAPTERS)):
            through(batch, demo.prepare(ids(5 + 9 * number, number)), REQUEST, adapter=one)
    check(mixed, alone, demo.prepare(ids(40)), (16,), adapter=name)


def test_a_cached_beginning_is_taken_over_and_what_is_computed_is_kept(demo):
    with keeping_prefixes(demo):
        mixed, alone = batch_of(demo, "eager", (), 4), Batch(demo, rows=4)
        mixed.ends = frozenset()
        for batch in (mixed, alone):
            through(batch, demo.prepare(ids(9, 1)), REQUEST, client=None)
        first = ids(110)
        prompt = mixed.begin(demo.prepare(first), REQUEST)
        beside_steps(mixed, prompt, (48,))
        assert prompt.row.cached_tokens == 0
        mixed.leave(mixed.join(prompt).row)
        again = mixed.begin(demo.prepare([*first, *ids(10, 7)]), REQUEST)
        expected = alone.begin(demo.prepare([*first, *ids(10, 7)]), REQUEST, client=None)
        while not expected.step():
            pass
        beside_steps(mixed, again, (48,))
        assert again.row.cached_tokens >= 64 and differ(again.logits, expected.logits) < STEP_TOLERANCE


def test_a_prompt_that_the_cache_holds_whole_needs_no_pass(demo):
    with keeping_prefixes(demo):
        batch = Batch(demo, rows=4)
        through(batch, demo.prepare(ids(9, 1)), REQUEST, client=None)
        for passes in (1, 1):
            prompt = batch.begin(demo.prepare(ids(64)), REQUEST)
            beside = Beside(prompt, 64)
            assert len(batch.step(beside=beside)) == 1 and beside.is_through
            assert batch.mixed.passes == passes
            batch.leave(batch.join(prompt).row)


def test_a_chunk_that_fails_costs_the_rows_nothing(demo, monkeypatch):
    batch, alone = Batch(demo, rows=4), Batch(demo, rows=4)
    for one in (batch, alone):
        through(one, demo.prepare(ids(9, 1)), REQUEST)
    prompt = batch.begin(demo.prepare(ids(30)), REQUEST)
    last = batch.mixed._modules, batch.mixed.why_not()
    assert last[1] is None
    real, layers = torch.cat, []

    def broken(tensors, *args, **kwargs):
        layers.append(len(layers))
        if len(layers) == 9:  # some layers have the chunk already
            raise RuntimeError("no more")
        return real(tensors, *args, **kwargs)

    beside = Beside(prompt, 16)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", broken)
        drawn = batch.step(beside=beside)
    assert "no more" in str(beside.error) and not beside.is_through and prompt.done_tokens == 0
    assert [one.token_id for one in drawn] == [one.token_id for one in alone.step()]
    assert differ(batch.logits(), alone.logits()) < STEP_TOLERANCE
    configs = [module.config._attn_implementation for module, _ in batch.mixed._modules]
    assert not any("mixed" in name for name in configs)  # the model is as it was


def test_who_goes_behind_steps_is_said(demo, tmp_path):
    assert Batch(demo, rows=1).mixed.why_not() == "the batch has one row"
    assert batch_of(demo, "eager", (16,), 4).mixed.why_not() == "steps or chunks are not transformers' own"
    assert Batch(demo, rows=2, decode="fused").mixed.why_not() == "steps or chunks are not transformers' own"
    batch = Batch(demo, rows=2)
    assert batch.mixed.why_not() is None
    prompt = batch.begin(demo.prepare(ids(30)), REQUEST)
    assert not batch.mixed.takes(prompt)  # there are no rows
    for module in demo.hf_model.get_decoder().layers[0].modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
            break
    before = module.config
    module.config = type("Config", (), {"_attn_implementation": "flex_attention"})()
    try:
        assert "flex_attention" in Batch(demo, rows=2).mixed.why_not()
    finally:
        module.config = before


def test_one_of_a_group_takes_over_the_prompt_of_another(demo):
    batch = Batch(demo, rows=4)
    first = through(batch, demo.prepare(ids(20)), REQUEST, group="g")
    prompt = batch.begin(demo.prepare(ids(20)), REQUEST, group="g")
    beside = Beside(prompt, 16)
    batch.step(beside=beside)
    assert beside.is_through and batch.mixed.passes == 0 and prompt.source is first.row


def test_no_room_in_the_pool_is_the_prompts_error(tmp_path):
    with load("llama", tmp_path, batch=3, kv_tokens=448) as model:
        batch = Batch(model, rows=3)
        through(batch, model.prepare(ids(60)), REQUEST)
        through(batch, model.prepare(ids(60, 2)), REQUEST)
        prompt = batch.begin(model.prepare(ids(100)), REQUEST)
        beside = Beside(prompt, 16)
        assert len(batch.step(beside=beside)) == 2
        assert beside.error is not None and not isinstance(beside.error, RequestError)
