"""A chunk of a prompt that goes through with the rows' step has the scores that it has by itself, and so have the rows.

What it is compared with is transformers' own pass of the prompt, and a step of the same rows without it.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

import trimtab
from tests import long_runs, pico
from tests.test_batch import STEP_TOLERANCE, through
from tests.test_company import batch_of, keeping_prefixes
from tests.test_prefill import differ, picture
from trimtab.demo.line import ADAPTERS
from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import DoesNotFitError, RequestError
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
        assert not beside.has_failed, batch.mixed.why_not()
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
        assert passes == {(1,): 50, (7,): 8, (16, 3): 7, (64,): 1}[sizes]


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
        assert beside.has_failed and not beside.is_through and mixed.mixed.why_not() is None
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


def breaking(error, at=9):
    """Return what stands for torch.cat: it fails when some layers have the chunk already."""
    real, calls = torch.cat, []

    def cat(tensors, *args, **kwargs):
        calls.append(len(calls))
        if len(calls) == at:
            raise error()
        return real(tensors, *args, **kwargs)

    return cat


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (AttributeError, False),
        (MemoryError, True),
        (lambda: RuntimeError("can't allocate memory"), True),
        (lambda: RequestError("no", field="adapter"), True),
    ],
)
def test_a_chunk_that_fails_costs_the_rows_nothing_and_begins_again(demo, monkeypatch, error, goes_on):
    batch, alone = Batch(demo, rows=4), Batch(demo, rows=4)
    for one in (batch, alone):
        through(one, demo.prepare(ids(9, 1)), REQUEST)
    expected, prompt = (one.begin(demo.prepare(ids(30)), REQUEST) for one in (alone, batch))
    while not expected.step():
        pass
    assert batch.mixed.takes(prompt)
    batch.step(beside=Beside(prompt, 8)), alone.step()
    beside = Beside(prompt, 16)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", breaking(error))
        drawn = batch.step(beside=beside)
    assert beside.has_failed and not beside.is_through and not beside.tokens and not prompt.done_tokens
    assert [one.token_id for one in drawn] == [one.token_id for one in alone.step()]
    assert differ(batch.logits(), alone.logits()) < STEP_TOLERANCE
    configs = [module.config._attn_implementation for module, _ in batch.mixed._modules]
    assert not any("mixed" in name for name in configs)  # the model is as it was
    # It goes through by itself now, and others with steps unless the failure was a mistake of ours.
    assert not batch.mixed.takes(prompt)
    assert (batch.mixed.why_not() is None) == goes_on == (not batch.steps.fallbacks)
    assert batch.mixed.takes(batch.begin(demo.prepare(ids(9)), REQUEST)) == goes_on
    while not prompt.step():
        pass
    assert differ(prompt.logits, expected.logits) < STEP_TOLERANCE


def test_what_is_the_rows_fault_is_not_the_chunks(demo, monkeypatch):
    batch = Batch(demo, rows=4)
    through(batch, demo.prepare(ids(9, 1)), REQUEST)
    prompt = batch.begin(demo.prepare(ids(30)), REQUEST)

    def fail(*args):
        raise ArithmeticError("the rows")

    with monkeypatch.context() as patched:
        patched.setattr(batch.cache, "begin", fail)
        with pytest.raises(ArithmeticError):
            batch.step(beside=Beside(prompt, 16))
    assert batch.mixed.why_not() is None and not batch.steps.fallbacks
    assert len(batch.step()) == 1 and not batch.mixed.takes(prompt)
    while not prompt.step():
        pass
    batch.join(prompt)


def test_nothing_of_a_failed_pass_is_alive_when_the_step_is_done_again(demo, monkeypatch):
    batch = Batch(demo, rows=4)
    through(batch, demo.prepare(ids(9, 1)), REQUEST)
    prompt, seen = batch.begin(demo.prepare(ids(30)), REQUEST), []
    assert batch.mixed.takes(prompt)
    real, run = batch.mixed._cache, batch.steps.run
    monkeypatch.setattr(batch.mixed, "_cache", lambda *args: (one := real(*args), seen.append(weakref.ref(one)))[0])
    monkeypatch.setattr(batch.steps, "run", lambda state: (seen.append(seen[0]() is None), run(state))[1])
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "cat", breaking(MemoryError))
            batch.step(beside=Beside(prompt, 16))
        freed, left = weakref.ref(prompt), seen[1]
        del prompt
        assert left and freed() is None
    finally:
        gc.enable()


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


@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_choices_of_one_prompt_take_over_what_the_first_computed(family, tmp_path):
    """They go behind steps: after one more the source's window has moved on."""
    with load(family, tmp_path, batch=4) as model:
        batch, alone = Batch(model, rows=4), Batch(model, rows=4)
        batch.ends = alone.ends = frozenset()
        through(batch, model.prepare(ids(9, 1)), REQUEST)
        first = batch.begin(model.prepare(ids(40)), REQUEST, group="g")
        beside_steps(batch, first, (16,))
        batch.join(first)
        for _ in range(2):
            prompt = batch.begin(model.prepare(ids(40)), REQUEST, group="g")
            assert not batch.mixed.takes(prompt)
            batch.step(lambda prompt=prompt: prompt.step() and batch.place(prompt) is None)
            batch.join(prompt)
        for row in batch.active[1:]:
            through(alone, model.prepare(row.token_ids[:-1]), REQUEST)
            alone.active[-1].token_ids[-1] = row.token_ids[-1]
        alone.tell_tokens(), batch.tell_tokens()
        assert differ(batch.logits()[1:], alone.logits()) < STEP_TOLERANCE


def test_no_room_in_the_pool_is_told_where_the_prompt_goes_by_itself(tmp_path):
    with load("llama", tmp_path, batch=3, kv_tokens=448) as model:
        batch = Batch(model, rows=3)
        through(batch, model.prepare(ids(60)), REQUEST)
        through(batch, model.prepare(ids(60, 2)), REQUEST)
        prompt = batch.begin(model.prepare(ids(100)), REQUEST)
        beside = Beside(prompt, 16)
        assert len(batch.step(beside=beside)) == 2 and beside.has_failed and batch.mixed.why_not() is None
        with pytest.raises(DoesNotFitError):
            prompt.step()


def test_a_prompt_is_cut_into_equal_chunks(demo):
    batch = Batch(demo, rows=4)
    batch.ends = frozenset()
    through(batch, demo.prepare(ids(9, 1)), REQUEST)
    for count, most, expected in ((100, 96, [50, 50]), (97, 48, [33, 32, 32]), (48, 48, [48]), (2, 64, [2])):
        prompt, found = batch.begin(demo.prepare(ids(count)), REQUEST), []
        while sum(found) < count:
            batch.step(beside=Beside(prompt, most))
            found.append(prompt.chunk_tokens)
        assert found == expected


def test_a_chunk_and_the_rows_are_no_more_tokens_than_a_plan_counts(demo, monkeypatch):
    monkeypatch.setattr(type(demo), "prefill_tokens", 24)
    batch = Batch(demo, rows=6)
    for number in range(4):
        through(batch, demo.prepare(ids(9, number)), REQUEST)
    prompt = batch.begin(demo.prepare(ids(40)), REQUEST)
    beside = Beside(prompt, 64)
    batch.step(beside=beside)
    assert beside.tokens == prompt.done_tokens == 20


def test_a_row_that_drew_a_placeholder_is_stepped_without_a_chunk(tmp_path):
    with load("gemma4", tmp_path, batch=3) as model:
        batch = Batch(model, rows=3)
        row = through(batch, model.prepare(ids(9)), REQUEST).row
        prompt = batch.begin(model.prepare(ids(9, 2)), REQUEST)
        assert batch.mixed.takes(prompt)
        row.token_ids[-1] = model.hf_model.config.image_token_id
        assert not batch.mixed.takes(prompt)


def test_a_snapshot_is_kept_where_a_prompt_was_cut_for_it(demo, monkeypatch):
    kept = []
    with keeping_prefixes(demo):
        batch = Batch(demo, rows=4)
        batch.ends = frozenset()
        through(batch, demo.prepare(ids(9, 1)), REQUEST, client=None)
        monkeypatch.setattr(batch.prefixes, "piece_done", lambda prompt: kept.append(prompt.done_tokens))
        beside_steps(batch, batch.begin(demo.prepare(ids(40)), REQUEST), (16,))
    assert kept == [14, 27, 40]


KINDS = {
    "head": {"modules_to_save": ["lm_head"]}, "norms": {"modules_to_save": ["norm"]}, "embeddings": {"embeddings": True},
    "dora": {"dora": True}, "bias": {"bias": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_every_kind_on_both_sides(kind, tmp_path):
    """An untied head, for one, sees fewer rows than the layers before it."""
    base = pico.build("llama", tmp_path / "base")
    paths = {
        kind: pico.adapter(base, tmp_path / kind, **KINDS[kind]),
        "plain": pico.adapter(base, tmp_path / "plain", seed=5),
    }
    plan = trimtab.plan(base, adapters=paths, quant="none", dtype="float32", context=CONTEXT, device="cpu", batch=4)
    with trimtab.load(plan) as model:
        for beside, name in ((None, kind), (kind, None), ("plain", kind), (kind, kind)):
            mixed, alone = Batch(model, rows=4), Batch(model, rows=4)
            for batch in (mixed, alone):
                through(batch, model.prepare(ids(9, 1)), REQUEST, adapter=beside)
            check(mixed, alone, model.prepare(ids(30)), (11,), adapter=name)


@pytest.mark.parametrize("options", [{"kv": "int8"}, {"kv_tokens": 448}], ids=["int8", "pages"])
def test_a_plan_counts_the_copies_of_a_step_beside_a_chunk(options, tmp_path):
    folder = pico.build("llama", tmp_path)
    asked = {"quant": "none", "dtype": "float32", "context": CONTEXT, "device": "cpu", "batch": 4, **options}
    beside, behind = (
        trimtab.plan(folder, **asked, batch_invariant=is_invariant).gpu_needed_bytes for is_invariant in (False, True)
    )
    assert beside > behind
