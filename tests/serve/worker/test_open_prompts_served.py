"""A server whose prompts end in a step: arrivals, departures, cached beginnings and failures, against each request alone."""

from __future__ import annotations

import random

import pytest
import torch

import trimtab
from tests.engine.prefill.test_open_prompts import company, opened
from tests.engine.prefill.test_prefill import REQUEST, TOLERANCE, answered, differ, eager, ids, in_chunks, load
from tests.engine.prefill.test_prefix_cache import keeping
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.prefill.prefix_cache import PrefixCache
from trimtab.engine.prefill.rows import ends_in_step
from trimtab.errors import DeviceError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.scheduler import Scheduler
from trimtab.serve.worker.engine import LoadedEngine

PATHS = {name: DEMO / "adapters" / name for name in ADAPTERS}


def ahead(batch):
    """Let steps write the tokens that they go on to, and their scores to the same place, as captured ones do: then the next one is
    queued before the tokens are read."""
    steps, run, kept = batch.steps, batch.steps.run, {}

    def written(state):
        outputs = run(state)
        logits, greedy = kept.setdefault(outputs[0].shape, tuple(output.clone() for output in outputs))
        logits.copy_(outputs[0])
        greedy.copy_(outputs[1])
        steps.tokens[: greedy.shape[0], 0].copy_(greedy.clamp_min(0))
        steps.wrote_tokens = True
        return logits, greedy

    steps.run = written
    steps.may_look_ahead = lambda: True
    return batch


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(
        DEMO / "base", quant="none", dtype="float32", adapters={"style": PATHS["style"]}, context=384, images=0, audio_s=0.0,
        device="cpu", batch=4,
    )  # fmt: skip
    with trimtab.load(plan) as loaded:
        yield loaded


def asked(number, chance):
    """Return the number-th job: equal beginnings of many lengths, greedy or sampled, each adapter."""
    begin = [300 + (place * 7) % 190 for place in range(160)]
    tokens = begin[: chance.choice((2, 9, 16, 17, 40, 64, 65, 66, 81, 150))]
    if chance.random() < 0.4:
        tokens = [*tokens[:-1], 290 + number % 5]
    options = {"max_new_tokens": chance.choice((1, 2, 3, 12, 30))}
    if chance.random() < 0.3:
        options |= {"temperature": 0.9, "seed": chance.randrange(99)}
    elif chance.random() < 0.3:
        options |= {"repetition_penalty": 1.3}
    return Job(
        f"j{number}", tokens, GenerateRequest(**options), adapter=chance.choice((None, "style", "specialist")),
        client=chance.choice("ab"), top_logprobs=2 if chance.random() < 0.2 else None,
    )  # fmt: skip


def words(told, name):
    events = [event for event in told if event.job_id == name]
    return "".join(event.text for event in events), events[-1]


@pytest.mark.parametrize(("way", "looks_ahead"), [
    ("captured", False), ("modules", True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("captured", True), ("modules", False))),
])  # fmt: skip
def test_every_answer_of_a_busy_server_is_the_one_that_its_request_gets_alone(model, way, looks_ahead, monkeypatch):
    """way: prompts in chunks of still shapes behind steps, or in transformers' own passes behind them."""
    monkeypatch.setattr(model, "prefix_cache", PrefixCache(model, 2**22, block_tokens=8))
    chance, entered, told = random.Random(7), [], []
    real = Batch.enter
    monkeypatch.setattr(Batch, "enter", lambda self, prompt: (entered.append(prompt.row), real(self, prompt))[1])
    engine = LoadedEngine(model, rows=4, resident_limit=2)
    engine.shelf.add("specialist", PATHS["specialist"])
    try:
        if way == "captured":
            engine.batch.prompts = PrefillRunner(engine.batch, "static", (16, 64))
            engine.batch.cache.has_prompt_row = True
        if looks_ahead:
            ahead(engine.batch)
        scheduler, jobs, gone = Scheduler(engine, told.append), [], set()
        while len(jobs) < 60 or not scheduler.is_idle:
            if len(jobs) < 60 and chance.random() < 0.4 and len(scheduler._known) < 7:
                jobs.append(asked(len(jobs), chance))
                scheduler.submit(jobs[-1])
            if chance.random() < 0.02 and scheduler._known:
                gone.add(chance.choice(sorted(scheduler._known)))
                scheduler.cancel(next(iter(gone & set(scheduler._known))))
            scheduler.turn()
            assert set(engine._by_row) == set(engine.batch.active)
        assert len(entered) > 15 and not engine.batch.placed
        finished = [job for job in jobs if job.id not in gone]
        assert len(finished) > 40
        for job in finished:
            text, end = words(told, job.id)
            one: list = []
            alone = Scheduler(engine, one.append)
            alone.submit(Job(f"{job.id}-alone", job.prompt, job.request, adapter=job.adapter, client=None))
            while alone.turn():
                pass
            expected, expected_end = words(one, f"{job.id}-alone")
            assert (text, end.finish) == (expected, expected_end.finish), job
            counts = ("prompt_tokens", "completion_tokens")
            assert [end.usage[name] for name in counts] == [expected_end.usage[name] for name in counts]
            assert end.usage["ttft_s"] > 0 and end.usage["decode_s"] >= 0
    finally:
        for name in list(engine.shelf.resident):
            model.unload_adapter(name)
        model.load_adapter("style", PATHS["style"])


def beside_another(model, looks_ahead, count):
    """Return a batch whose rows are an answer and, behind it, an open prompt of so many tokens; what it computes is kept."""
    keeping(model)
    batch = in_chunks(model, (8, 16), rows=3)
    batch.ends = frozenset()
    company(batch)
    if looks_ahead:
        ahead(batch)
    prompt = opened(batch, model.prepare(ids(count)))
    batch.enter(prompt)
    assert prompt.row.number == 1
    return batch, prompt


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_the_same_prompt_again_resumes_from_what_its_own_step_computed(family, looks_ahead, tmp_path):
    """Not from another row's logits, nor from what a step computed later."""
    with load(family, tmp_path) as model:
        expected = answered(eager(model), model.prepare(ids(33)), client=None)
        batch, prompt = beside_another(model, looks_ahead, 33)
        for _ in range(3):
            batch.step()
        batch.leave(prompt.row)
        again = opened(batch, model.prepare(ids(33)))
        if again.is_open:  # no snapshots without sliding windows: a prompt resumes behind a whole block
            assert family == "llama" and again.row.cached_tokens == 32
        else:
            assert again.row.cached_tokens == 33 and differ(again.logits.cpu(), expected[0]) < TOLERANCE
            assert int(again.logits.argmax()) == int(expected[0].argmax()) == prompt.row.answer_ids[0]


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_scores_that_are_not_numbers_are_not_kept(looks_ahead, tmp_path):
    with load("gemma4", tmp_path) as model:
        batch, prompt = beside_another(model, looks_ahead, 29)
        run = batch.steps.run

        def broken(state):
            logits, greedy = (tensor.clone() for tensor in run(state))
            logits[prompt.row.number], greedy[prompt.row.number] = torch.nan, -1
            return logits, greedy

        batch.steps.run = broken
        batch.step()
        assert prompt.row.finish == "error"
        batch.steps.run = run
        batch.write_last_tokens()
        batch.step()
        assert not batch.prefixes._unsaved
        batch.leave(prompt.row)
        batch.write_last_tokens()
        again = opened(batch, model.prepare(ids(29)))
        assert again.is_open and again.row.cached_tokens == 0
        batch.enter(again)
        batch.step()
        assert again.row.finish is None and len(again.row.answer_ids) == 1


def test_a_failure_while_a_prompt_gets_its_row_leaves_no_row_behind(tmp_path, monkeypatch):
    with load("gemma4", tmp_path) as model:
        batch = in_chunks(model, (8, 16), rows=3)
        company(batch)
        for is_open in (True, False):
            prompt = batch.begin(model.prepare(ids(20)), REQUEST, may_end_in_step=is_open).compute()
            batch.place(prompt)

            def fail(prompt):
                raise DeviceError("no memory", device="cpu")

            with monkeypatch.context() as patched:
                patched.setattr(batch.prefixes, "joined", fail)
                with pytest.raises(DeviceError):
                    (batch.enter if is_open else batch.join)(prompt)
            assert len(batch.active) == 1 and not batch.placed
            batch.step()


def test_a_prompt_that_may_not_end_before_its_last_token_goes_through_whole(tmp_path):
    with load("llama", tmp_path) as model:
        batch = in_chunks(model, (8, 16), rows=3)
        company(batch)
        prompt = batch.begin(model.prepare([5, 6, 7]), REQUEST)
        prompt.may_end_in_step = True
        assert ends_in_step(prompt, prompt.batch)
        assert not ends_in_step(prompt, prompt.batch, lambda place: place != 2)
