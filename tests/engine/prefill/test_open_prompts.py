"""A prompt whose last token goes through with the rows' next step says what it says alone: every family, adapters, pictures, cached
beginnings; and the places where it goes through by itself.

On a CPU nothing is captured: the same passes run as they are. tests/gpu runs the same tests with graphs.
"""

import pytest
import torch

from tests import pico
from tests.engine.prefill.test_prefill import ON_GPU, REQUEST, TOLERANCE, answered, differ, eager, ids, in_chunks, picture
from tests.engine.prefill.test_prefix_cache import keeping
from tests.lent import lent
from tests.long_runs import crossed
from trimtab.engine.kv import kv_cache
from trimtab.engine.prefill.packing import ADAPTER_INSIDE, PACKED_WEIGHTS, choose_shape
from trimtab.engine.prefill.rows import ends_in_step
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest

# On both sides of a chunk of 16 and of the families' window of 8, with the last token at the beginning of a chunk and at its end.
LENGTHS = (2, 7, 8, 9, 16, 17, 18, 40)


def company(batch, count=12):
    """Begin another answer in a batch, so that its steps have a row."""
    prompt = batch.begin(batch.model.prepare(ids(count)[::-1]), REQUEST).compute()
    assert not prompt.is_open
    return batch.join(prompt).row


def opened(batch, inputs, most_tokens=None, **options):
    """Return a prompt that has a place, all but its last token computed."""
    prompt = batch.begin(inputs, REQUEST, may_end_in_step=True, **options).compute(most_tokens)
    batch.place(prompt)
    return prompt


def both(batch, prompt):
    """Return the scores [2, V] of an open prompt's last token and of the step after it, and its row."""
    assert prompt.is_open
    batch.enter(prompt)
    row = prompt.row
    first = batch.logits()[row.number].clone()
    row.token_ids.append(7)
    batch.write_last_tokens()
    after = batch.logits()[row.number].clone()
    return torch.stack([first, after]).cpu(), row


BATCHES = {
    "chunks of 8 and 16": lambda model: in_chunks(model, (8, 16), rows=3),
    "transformers": lambda model: eager(model, rows=3),
}


@pytest.mark.parametrize(("family", "how"), crossed(pico.FAMILIES, BATCHES))
def test_a_step_computes_what_the_last_chunk_would_have_computed(family, how):
    with lent(family) as model:
        whole, batch = eager(model), BATCHES[how](model)
        beside = company(batch)
        for _ in range(3 if ON_GPU and "chunks" in how else 1):  # as it is, captured, replayed
            for count in LENGTHS:
                expected = answered(whole, model.prepare(ids(count)))
                found, row = both(batch, opened(batch, model.prepare(ids(count)), 16))
                assert differ(found, expected) < TOLERANCE, count
                assert row.written == count + 1 and row.answer_ids == [7]
                batch.leave(row)
        assert beside in batch.active


@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_answers_of_rows_beside_it_and_its_own_are_those_of_each_alone(family):
    with lent(family) as model:
        request = GenerateRequest(max_new_tokens=12)
        alone = [model.answer_inputs(model.prepare(ids(count)), request).token_ids for count in (21, 30)]
        batch = in_chunks(model, (8, 16), rows=2)
        batch.ends = frozenset()
        rows, late = [batch.join(batch.begin(model.prepare(ids(21)), request).compute()).row], None
        for turn in range(40):
            if turn == 3:
                late = batch.begin(model.prepare(ids(30)), request)
                late.may_end_in_step = True
            if late is not None and late.row not in batch.placed and late.row not in batch.active and late.step(8):
                batch.place(late)
            batch.step()
            if late is not None and late.row in batch.placed:
                batch.enter(late)
                rows.append(late.row)
            if len(rows) == 2 and all(row.finish for row in rows):
                break
        ends = hf_end_ids(model)
        for row, expected in zip(rows, alone, strict=True):
            common = [token for token in expected if token not in ends]
            assert row.answer_ids[: len(common)] == list(common) and len(row.answer_ids) == 12


def hf_end_ids(model):
    from trimtab.engine.chat.control_tokens import end_token_ids

    return frozenset(end_token_ids(model.hf_model))


@pytest.mark.parametrize("family", ["gemma4", "gemma3", "qwen3_vl"])
def test_a_picture_before_the_last_token_is_seen_by_it(family):
    with lent(family, images=1) as model:
        inputs = picture(model, family, before=5)
        expected = answered(eager(model), inputs)
        batch = in_chunks(model, (16, 32, 64), rows=2)
        company(batch)
        prompt = opened(batch, inputs)
        found, _ = both(batch, prompt)
        assert differ(found, expected) < TOLERANCE


@pytest.mark.parametrize(("family", "how"), crossed(["llama", "gemma4", "gemma3"], BATCHES, first=["gemma4"], rest=1))
def test_its_states_are_kept_behind_the_step_and_the_same_prompt_resumes_from_them(family, how):
    """With the last token's keys and values, and the logits of the step: before it, neither is complete."""
    with lent(family) as model:
        plain, cache = eager(model), None
        asked, longer = ids(29), [*ids(29), 250, 251, 252]
        expected = [answered(plain, model.prepare(one), client=None) for one in (asked, longer)]
        cache = keeping(model)
        batch = BATCHES[how](model)
        company(batch)
        added = cache.store.counts["added"] if cache.store else 0
        found, row = both(batch, opened(batch, model.prepare(asked)))
        assert differ(found, expected[0]) < TOLERANCE
        assert cache.store.counts["added"] > added
        batch.leave(row)
        has_rings = bool(kv_cache.windows(model.hf_model, 96))
        again = opened(batch, model.prepare(asked))
        assert again.row.cached_tokens == (29 if has_rings else 24) and again.is_open is not has_rings
        if again.is_open:
            found, row = both(batch, again)
        else:  # its logits were kept too
            assert differ(again.logits.cpu(), expected[0][0]) < TOLERANCE
            row = batch.join(again).row
        batch.leave(row)
        more = opened(batch, model.prepare(longer))
        assert more.row.cached_tokens == (29 if has_rings else 24)
        found, _ = both(batch, more)
        assert differ(found, expected[1]) < TOLERANCE


@pytest.mark.parametrize("how", BATCHES)
def test_a_prompt_that_leaves_before_its_step_is_kept_without_its_last_token(how):
    with lent("gemma4") as model:
        expected = answered(eager(model), model.prepare(ids(40)), client=None)
        keeping(model)
        batch = BATCHES[how](model)
        company(batch)
        batch.step()
        prompt = opened(batch, model.prepare(ids(40)))
        batch.enter(prompt)
        batch.leave(prompt.row)
        batch.step()
        again = opened(batch, model.prepare(ids(40)))
        assert again.row.cached_tokens == again.done_tokens == 39 and again.is_open and again.chunk_tokens == 0
        found, _ = both(batch, again)
        assert differ(found, expected) < TOLERANCE


def test_another_prompt_in_its_place_makes_it_start_again():
    """With as many rows as there are places, an earlier prompt takes the place where a later one's states are."""
    with lent("gemma4") as model:
        expected = answered(eager(model), model.prepare(ids(30)))
        batch = in_chunks(model, (8, 16), rows=2)
        company(batch)
        prompt = batch.begin(model.prepare(ids(30)), REQUEST, may_end_in_step=True).compute()
        batch.prompts.evict(batch.cache.prompt_row, None)
        assert prompt.done_tokens == 0 and not prompt.is_open
        prompt.compute()
        batch.place(prompt)
        found, _ = both(batch, prompt)
        assert differ(found, expected) < TOLERANCE


@pytest.mark.parametrize("why", ["nobody is answered", "one token", "a group", "not asked for", "a placeholder"])
def test_where_the_prompt_goes_through_by_itself(why):
    family = "gemma4" if why == "a placeholder" else "llama"
    with lent(family) as model:
        batch = in_chunks(model, (8, 16), rows=3)
        if why != "nobody is answered":
            company(batch)
        tokens = ids(1 if why == "one token" else 20)
        prompt = batch.begin(model.prepare(tokens), REQUEST, group="all" if why == "a group" else "")
        prompt.may_end_in_step = why != "not asked for"
        if why == "a placeholder":
            prompt.row.token_ids[-1] = next(iter(batch.prompts.placeholders))
            assert not ends_in_step(prompt, prompt.batch)
            return
        prompt.compute()
        assert not prompt.is_open and prompt.logits is not None
        with pytest.raises(RequestError):
            batch.enter(prompt)
        batch.join(prompt)


def test_batch_invariant_prompts_go_through_by_themselves():
    with lent("llama", batch=3, batch_invariant=True) as model:
        batch = in_chunks(model, (8, 16), rows=3)
        prompt = batch.begin(model.prepare(ids(20)), REQUEST)
        prompt.may_end_in_step = True
        batch.active.append(prompt.row)
        assert not ends_in_step(prompt, prompt.batch)


def test_it_cannot_join_with_a_token_that_nobody_has_drawn():
    with lent("llama") as model:
        batch = in_chunks(model, (8, 16), rows=3)
        company(batch)
        prompt = opened(batch, model.prepare(ids(20)))
        with pytest.raises(RequestError):
            batch.join(prompt)


def test_passes_of_several_pay_less_where_a_step_computes_the_last_tokens():
    """Four of 64 tokens: alone each takes half a pass, together they take more than that."""
    assert choose_shape([64] * 4, (64, 128, 256, 512), 1024, ADAPTER_INSIDE) is not None
    assert choose_shape([64] * 4, (64, 128, 256, 512), 1024, ADAPTER_INSIDE, share=0.4) is None
    assert choose_shape([64] * 4, (64, 128, 256, 512), 1024, PACKED_WEIGHTS, share=0.57) is not None
