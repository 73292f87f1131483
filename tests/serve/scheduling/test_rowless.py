"""Embeddings and log-probabilities of prompts in pieces between turns, on a mock engine and a clock of its own."""

import json
from dataclasses import replace

import pytest

from tests.serve.scheduling.test_scheduler import MockEngine, ends, job, make, submit, take_turns, to_the_end
from tests.serving import RESULTS, USAGE, MockPool, client, words
from trimtab.errors import DeviceError
from trimtab.serve.contract.job import Event
from trimtab.serve.contract.quotas import KeyLimits
from trimtab.serve.contract.settings import Settings
from trimtab.serve.scheduling.in_progress import PIECE_S, PIECE_SIZES, Rowless

PIECE_TOKENS = 16


class Engine(MockEngine):
    """A job with `scored` pieces needs no row for them, one with `vector` pieces needs none at all. Each takes `piece_s`."""

    piece_s, fail_pieces = 0.05, ()

    def begin(self, job, inputs=None):
        answer = super().begin(job, inputs)
        answer.left = job.prompt.get("scored", 0) or job.prompt.get("vector", 0)
        answer.needs_no_row = answer.left > 0
        return answer

    def piece(self, answer, most_tokens):
        if answer.job.id in self.fail_pieces:
            raise DeviceError("no memory", device="cpu")
        self.log.append(("piece", answer.job.id))
        self.wait(self.piece_s)
        answer.left -= 1
        answer.needs_no_row = answer.left > 0
        if not answer.left and "vector" in answer.job.prompt:
            answer.pending.append(Event(answer.job.id, "done", finish="stop"))
        return PIECE_TOKENS, not answer.left

    def spent(self, answer):
        asked = answer.job.prompt.get("scored", 0) or answer.job.prompt.get("vector", 0)
        return {"prompt_tokens": PIECE_TOKENS * (asked - answer.left), "completion_tokens": 0}


def served(**fields):
    engine = Engine()
    for name, value in fields.items():
        setattr(engine, name, value)
    scheduler, engine, told, clock = make(engine)
    engine.wait = clock.wait
    return scheduler, engine, told, clock


def pieces_in(log):
    return sum(kind == "piece" for kind, _ in log)


@pytest.mark.parametrize("sender", ["the same", "another"])
@pytest.mark.parametrize("kind", ["scored", "vector"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_prompt_passes_between_two_pieces_whoever_sent_it(kind, sender, rows):
    scheduler, engine, told, _ = served(rows=rows)
    submit(scheduler, *(job(name, sender="the same", **{kind: 500}) for name in ("large", "larger")))
    take_turns(scheduler, 20)
    assert pieces_in(engine.log) == 20  # nobody else is there: one in each turn
    engine.log.clear()
    scheduler.submit(job("chat", tokens=1, sender=sender))
    while "chat" not in ends(told):
        scheduler.turn()
    assert pieces_in(engine.log) <= 1


def test_one_that_waits_for_the_memory_of_a_prompt_begins_before_the_next_prompt():
    scheduler, engine, told, _ = served(rows=4)
    engine.has_room = lambda answer: not (answer.needs_no_row and scheduler._prompts.begun)
    for name in ("first", "second", "third"):
        scheduler.submit(job(name, pieces=40))
    scheduler.turn()
    scheduler.submit(job("text", vector=1))
    while "third" not in ends(told):
        scheduler.turn()
    order = list(dict.fromkeys(name for kind, name in engine.log if kind in ("prefill", "piece")))
    assert order == ["first", "text", "second", "third"]


def test_one_goes_through_at_a_time_and_clients_take_turns():
    scheduler, engine, told, _ = served()
    submit(scheduler, *(job(name, sender="a", vector=2) for name in ("a1", "a2", "a3")))
    scheduler.turn()
    scheduler.submit(job("b1", sender="b", vector=2))
    to_the_end(scheduler)
    assert [name for _, name in engine.log] == ["a1", "a1", "b1", "b1", "a2", "a2", "a3", "a3"]
    assert set(ends(told).values()) == {"stop"} and scheduler.is_idle and not scheduler.running


def test_beside_answers_pieces_take_the_time_that_a_step_leaves():
    """Steps of 10 ms leave 20 ms for other work: pieces of 50 ms run in two of five turns at most."""
    scheduler, engine, _, clock = served()
    scheduler.submit(job("answer", tokens=10_000))
    take_turns(scheduler, 20)
    engine.log.clear()
    scheduler.submit(job("large", scored=500))
    start, turns = clock.now, 200
    take_turns(scheduler, turns)
    assert pieces_in(engine.log) == pytest.approx(turns * 2 / 5, abs=2)
    assert (clock.now - start) / turns <= 3.0 * engine.step_s + 1e-9
    # Prompts use that time too, and pieces go on.
    engine.log.clear()
    scheduler.submit(job("long", pieces=400))
    take_turns(scheduler, 100)
    assert 5 <= pieces_in(engine.log) <= 15 and engine.log.count(("prefill", "long")) == 100


def test_a_long_prompt_without_rows_leaves_every_second_turn():
    scheduler, engine, _, _ = served()
    submit(scheduler, job("large", scored=500), job("long", pieces=400))
    take_turns(scheduler, 100)
    assert pieces_in(engine.log) == 50 and engine.log.count(("prefill", "long")) == 100


def test_a_scored_prompt_has_a_row_after_its_pieces_and_other_choices_wait_for_it():
    scheduler, engine, told, _ = served(rows=1)
    scheduler.submit(replace(job("first", tokens=1, scored=3, pieces=2), group="g"))
    submit(scheduler, replace(job("second", tokens=1, pieces=2), group="g"), job("chat", tokens=1))
    assert (scheduler.waiting, scheduler.running) == (3, 0)
    to_the_end(scheduler)
    prompts = [name for kind, name in engine.log if kind == "prefill"]
    assert prompts == ["chat", "first", "first", "second", "second"]
    assert [event.job_id for event in told if event.kind == "started"] == ["first", "chat", "second"]


def test_other_choices_go_on_when_the_one_they_wait_for_ends():
    scheduler, _, told, _ = served(fail_pieces=("fails",))
    for name, mate in (("fails", "one"), ("leaves", "two")):
        submit(scheduler, replace(job(name, scored=3), group=name), replace(job(mate, tokens=1), group=name))
    scheduler.turn()
    scheduler.turn()
    scheduler.cancel("leaves")
    to_the_end(scheduler)
    assert ends(told) == {"fails": "error", "one": "length", "two": "length"}


def test_what_was_computed_is_told_of_those_that_leave_or_fail():
    scheduler, engine, told, _ = served()
    submit(scheduler, job("leaves", scored=9), job("fails", vector=9))
    take_turns(scheduler, 4)
    scheduler.cancel("leaves")
    take_turns(scheduler, 3)
    engine.fail_pieces = ("fails",)
    to_the_end(scheduler)
    found = {event.job_id: (event.kind, event.usage["prompt_tokens"]) for event in told if event.usage.get("prompt_tokens")}
    assert found == {"leaves": ("dropped", 4 * PIECE_TOKENS), "fails": ("error", 3 * PIECE_TOKENS)}
    scheduler.cancel("leaves")  # it is not told twice
    assert [event.kind for event in told].count("dropped") == 1


def test_an_adapter_that_a_piece_needs_is_not_kept_from_its_slot_for_ever():
    scheduler, _, told, _ = served(rows=2, slots=1)
    scheduler.submit(job("now", adapter="a", tokens=5))
    scheduler.turn()
    scheduler.submit(job("vector", adapter="b", vector=1))
    count = 0
    while "vector" not in ends(told):
        count += 1
        assert count < 100
        scheduler.submit(job(f"{count}", adapter="a", tokens=5, sender=str(count)))
        take_turns(scheduler, 4)


@pytest.mark.parametrize("kind", ["short", "long"])
def test_sizes_follow_the_seconds_of_earlier_pieces(kind):
    pace, sizes = Rowless(1000), []
    for _ in range(12):
        sizes.append(pace.most_tokens(None, kind))
        tokens = min(sizes[-1], 3 if kind == "short" else 10**6)
        pace.took(tokens, 0.001 * tokens, kind)  # 1 ms a token
    if kind == "short":
        assert sizes == [32] * 12  # what was short says nothing of long ones
        return
    assert sizes[:3] == [32, 64, 128] and set(sizes[3:]) == {128} and PIECE_S >= 0.001 * 128
    assert pace.most_tokens(0.04, kind) == 32 and pace.most_tokens(1e-6, kind) == PIECE_SIZES[0]
    pace.took(16, 2.0, kind)
    assert pace.most_tokens(None, kind) == PIECE_SIZES[0]


# Over HTTP ------------------------------------------------------------------------------------------------------------

KEYS = Settings(page=False, api_keys=("key-a",), key_limits={"key-a": KeyLimits(name="alice", tokens_per_day=100)})


def status_of_the_next(pool, path, **body):
    http = client(pool, KEYS)
    headers = {"authorization": "Bearer key-a"}
    first = http.post(path, json={"model": "style", **body}, headers=headers)
    pool.answers = lambda job: words(job, "fine")
    chat = {"model": "style", "messages": [{"role": "user", "content": "a"}]}
    return first.status_code, http.post("/v1/chat/completions", json=chat, headers=headers).status_code


@pytest.mark.parametrize(("spent", "status"), [(100, 429), (99, 200)])
def test_a_key_pays_for_what_a_failed_request_computed(spent, status):
    error = {"class": "DeviceError", "message": "no memory", "fields": {"device": "cpu"}}
    usage = {"prompt_tokens": spent, "completion_tokens": 0}
    pool = MockPool(lambda job: [Event(job.id, "error", finish="error", error=error, usage=usage)])
    assert status_of_the_next(pool, "/v1/completions", prompt="a", prompt_logprobs=1)[1] == status
    pool = MockPool(lambda job: [Event(job.id, "error", finish="error", error=error, usage=usage)])
    assert status_of_the_next(pool, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=True)[1] == status


@pytest.mark.parametrize(("spent", "status"), [(60, 429), (59, 200)])
def test_a_key_pays_for_the_texts_that_were_embedded_before_one_failed(spent, status):
    error = {"class": "DeviceError", "message": "no memory", "fields": {"device": "cpu"}}

    def answers(job):
        if job.prompt["text"] == "bad":
            return [Event(job.id, "error", finish="error", error=error, usage={"prompt_tokens": 40})]
        usage = {"prompt_tokens": spent, "completion_tokens": 0}
        return [Event(job.id, "done", finish="stop", usage=usage, result={"embedding": [1.0]})]

    assert status_of_the_next(MockPool(answers), "/v1/embeddings", input=["good", "bad", "good"]) == (503, status)


def test_a_second_pass_of_a_prompt_counts_for_its_key():
    usage = {**USAGE, "prompt_tokens": 50, "completion_tokens": 1, "scored_tokens": 49}
    pool = MockPool(lambda job: [*words(job, "a")[:-1], Event(job.id, "done", finish="stop", usage=usage)])
    assert status_of_the_next(pool, "/v1/completions", prompt="a", prompt_logprobs=1) == (200, 429)


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
])  # fmt: skip
def test_tokens_that_are_only_split_or_joined_cost_a_key_nothing(path, body):
    usage = {"prompt_tokens": 100, "completion_tokens": 0}
    pool = MockPool(lambda job: [Event(job.id, "done", finish="stop", usage=usage, result=RESULTS[job.kind])])
    assert status_of_the_next(pool, path, **body) == (200, 200)


def test_log_probabilities_of_a_worker_that_was_lost_are_not_shown_twice():
    def answers(job):
        again = [Event(job.id, "scores", result={"start": start}, data=data) for start, data in ((0, b"null,1"), (16, b"2"))]
        return [again[0], *again, *words(job, "a")]

    found = client(MockPool(answers)).post("/v1/completions", json={"model": "style", "prompt": "a", "prompt_logprobs": 0})
    assert found.json()["choices"][0]["prompt_logprobs"] == [None, 1, 2]
    assert found.content == json.dumps(found.json(), ensure_ascii=False, separators=(",", ":")).encode()
