"""Several answers to one prompt: it goes through the model once, and each answer is the one that it would be alone."""

import pytest

import trimtab
from tests import pico
from tests.serve.http.test_app import CHAT, client
from tests.serve.worker.test_serve_engine import LOOK, PATHS, run
from tests.serving import words
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.worker.engine import LoadedEngine

DRAWN = {"temperature": 1.5, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model():
    with trimtab.load(
        DEMO / "base", quant="none", dtype="float32", adapters=PATHS, context=384, audio_s=1.0, device="cpu", batch=4
    ) as loaded:
        yield loaded


@pytest.fixture
def forwards(monkeypatch):
    """Count the tokens of prompts that go through the model."""
    from trimtab.engine.batch.batch import Batch

    seen, prefill = [], Batch.prefill

    def counted(self, prompt, most_tokens=None):
        before = prompt.done_tokens
        try:
            return prefill(self, prompt, most_tokens)
        finally:
            seen.append(prompt.done_tokens - before)

    monkeypatch.setattr(Batch, "prefill", counted)
    return seen


def jobs(count, *, group, adapter=None, prompt=LOOK, tokens=12):
    return [
        Job(
            f"{group}{seed}",
            prompt,
            GenerateRequest(max_new_tokens=tokens, temperature=6.0, seed=seed),
            adapter=adapter,
            group=group,
        )
        for seed in range(count)
    ]


@pytest.mark.parametrize("adapter", [None, "style", "style:0.6+specialist:0.4"])
def test_choices_share_one_pass_and_answer_as_alone(model, forwards, adapter):
    engine = LoadedEngine(model, rows=4)
    alone = run(engine, *jobs(3, group="", adapter=adapter))
    once = sum(forwards)
    forwards.clear()
    together = run(engine, *jobs(3, group="g", adapter=adapter))
    for seed in range(3):
        mine, other = together[f"g{seed}"], alone[str(seed)]
        assert mine[0] == other[0] and mine[1].finish == other[1].finish
        assert mine[1].usage["prompt_tokens"] == other[1].usage["prompt_tokens"]
    assert len({text for text, *_ in together.values()}) > 1
    assert once == 3 * sum(forwards)
    prompt = together["g0"][1].usage["prompt_tokens"]
    assert [together[f"g{seed}"][1].usage["shared_tokens"] for seed in range(3)] == [0, prompt, prompt]


def test_more_choices_than_rows_and_other_requests_beside_them(model, forwards):
    engine = LoadedEngine(model, rows=2)
    other = Job("other", {"text": "three orange"}, GenerateRequest(max_new_tokens=30))
    expected = run(engine, *jobs(5, group=""), other)
    found = run(engine, other, *jobs(5, group="g"))
    assert {name.removeprefix("g"): text for name, (text, *_) in found.items()} == {n: text for n, (text, *_) in expected.items()}


def test_groups_with_other_adapters_do_not_share(model):
    engine = LoadedEngine(model, rows=4)
    mixed = [
        *jobs(1, group="g", adapter="style"),
        *(Job(f"b{job.id}", job.prompt, job.request, group="g") for job in jobs(1, group="g")),
    ]
    assert [last.usage["shared_tokens"] for _, last, _ in run(engine, *mixed).values()] == [0, 0]


def test_with_a_prefix_cache_choices_share_too():
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=384, device="cpu", batch=3, prefix_cache="16MiB")
    with trimtab.load(plan) as model:
        engine = LoadedEngine(model, rows=3)
        texts = [[text for text, *_ in run(engine, *jobs(3, group=group)).values()] for group in ("", "g", "h")]
        assert texts[0] == texts[1] == texts[2]


def test_pythons_answers_share_one_pass(model, forwards):
    alone = [model.answer(LOOK, adapter="style", seed=7 + number, **DRAWN).token_ids for number in range(3)]
    forwards.clear()
    found = model.answers(LOOK, 3, adapter="style", seed=7, rows=3, **DRAWN)
    assert [one.token_ids for one in found] == alone and len(forwards) == 1 and len(set(alone)) > 1
    # Two rows for five answers: a row that has gone on may still be copied where no window has passed.
    more = model.answers(LOOK, 5, adapter="style", seed=7, rows=2, **DRAWN)
    assert [one.token_ids for one in more][:3] == alone


@pytest.mark.parametrize("family", ["gemma4", "llama", "qwen2_5_vl"])
def test_a_window_that_has_passed_is_computed_again(family, tmp_path, forwards):
    """gemma4 has rings of keys and values; answers far longer than the window have overwritten the prompt's there."""
    folder = pico.build(family, tmp_path / "base")
    plan = trimtab.plan(folder, quant="none", dtype="float32", context=96, device="cpu", batch=2)
    ids = list(range(5, 45))
    with trimtab.load(plan) as model:
        options = {"temperature": 1.0, "max_new_tokens": 40}
        alone = [model.answer(ids, seed=number, **options).token_ids for number in range(4)]
        found = model.answers(ids, 4, seed=0, rows=2, **options)
    assert [one.token_ids for one in found] == alone


def test_usage_and_counts_have_the_prompt_once():
    from tests.serving import MockPool

    def answered(job):
        events = words(job, "Hi")
        shared = 0 if job.request.seed == 5 else 7
        last = Event(job.id, "done", finish="stop", usage={"prompt_tokens": 7, "completion_tokens": 2, "shared_tokens": shared})
        return [*events[:-1], last]

    pool = MockPool(answered)
    with client(pool) as found:
        usage = found.post("/v1/chat/completions", json={**CHAT, "n": 3, "seed": 5, "temperature": 1}).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 6)
        assert len({job.group for job in pool.jobs}) == 1 and pool.jobs[0].group
        text = found.get("/metrics").text
        assert 'kind="prompt"' in text and [
            line.split()[-1] for line in text.splitlines() if "tokens_total{" in line and 'kind="prompt"' in line
        ] == ["7.0"]
        found.post("/v1/chat/completions", json=CHAT)
        assert pool.jobs[-1].group == ""
