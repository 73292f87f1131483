"""How long a chat's first token and a small embedding wait beside one large request, on a mock engine with the times of a CPU."""

import random
from dataclasses import replace

import pytest

from tests.serve.scheduling.test_scheduler import MockEngine, ends, job, make, started, submit, take_turns, to_the_end
from trimtab.serve.contract.job import Event

TOKEN_S, SCORED_S, VECTOR_S = (0.0022, 0.01, 0.0015)  # seconds of a token, of one with log-probabilities, and of an embedding's
SCORED_PIECE, LARGE = 16, 8_000


class Engine(MockEngine):
    """A prompt has `prompt_tokens` tokens. Before its row come so many that are `scored`; those of a `vector` have none."""

    def __init__(self, rows=8):
        super().__init__(rows)
        self.interleaves, self.chunk_sizes, self.beside_tokens = True, (), 4_096
        self.step_s, self.kept, self.released = 0.05, {}, []

    def begin(self, job, inputs=None):
        answer = super().begin(job, inputs)
        answer.left = job.prompt["prompt_tokens"]
        answer.needs_no_row = job.kind == "embedding" or "scored" in job.prompt
        return answer

    def passing_tokens(self, answer):
        return answer.job.prompt["prompt_tokens"]

    def goes_alone(self, answer):
        return True

    def kept_tokens(self, answer):
        return self.kept.get(answer.job.id, 0)

    def release(self, answer):
        self.released.append(answer.job.id)
        answer.left = self.kept.pop(answer.job.id)

    def piece(self, answer, most_tokens):
        is_vector = answer.job.kind == "embedding"
        tokens = min(answer.left, most_tokens if is_vector else SCORED_PIECE)
        self.log.append(("piece", answer.job.id))
        self.wait(tokens * (VECTOR_S if is_vector else SCORED_S))
        answer.left -= tokens
        if answer.left:
            return tokens, False
        if is_vector:
            answer.pending.append(Event(answer.job.id, "done", finish="stop"))
        else:
            answer.needs_no_row, self.kept[answer.job.id] = False, answer.job.prompt["prompt_tokens"]
        return tokens, True

    def prefill(self, answer, most_tokens):
        size = min(answer.left, most_tokens)
        self.log.append(("prefill", answer.job.id))
        self.wait(size * TOKEN_S)
        self.times += [(size, size * TOKEN_S)] if size else []
        answer.left -= size
        if not answer.left:
            self.kept.pop(answer.job.id, None)
            self.placed.append(answer)
        return size, not answer.left


def served(**options):
    scheduler, engine, told, clock = make(Engine(**options), queue_limit=1000)
    engine.wait = clock.wait
    return scheduler, engine, told, clock


def large(kind):
    """Return the large request of a kind: a plain prompt, one with log-probabilities, or an embedding."""
    one = job("large", sender="large", prompt_tokens=LARGE, **({"scored": True} if kind == "scored" else {}))
    return replace(one, kind="embedding") if kind == "embedding" else one


def embedding(name, tokens, sender=""):
    return replace(job(name, sender=sender, prompt_tokens=tokens), kind="embedding")


def is_told(told, name):
    return any(event.job_id == name and event.kind in ("text", "done") for event in told)


def wait_of(scheduler, told, clock, one):
    """Return the seconds until a job's first token or its end."""
    start = clock.now
    scheduler.submit(one)
    while not is_told(told, one.id):
        scheduler.turn()
    return clock.now - start


@pytest.mark.parametrize("tokens", [60, 900, 2_000])
@pytest.mark.parametrize("sender", ["large", "another"])
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "scored", "embedding"])
@pytest.mark.parametrize("turns", [1, 3, 9])
def test_a_chat_waits_for_about_a_second_beyond_its_own_prompt(kind, rows, sender, tokens, turns):
    waits = []
    for is_alone in (True, False):
        scheduler, _, told, clock = served()
        for number in range(rows):
            wait_of(scheduler, told, clock, job(f"row{number}", prompt_tokens=20, tokens=100_000))
        take_turns(scheduler, 9)
        if not is_alone:
            scheduler.submit(large(kind))
        take_turns(scheduler, turns)
        waits.append(wait_of(scheduler, told, clock, job("chat", sender=sender, prompt_tokens=tokens)))
    alone, beside = waits
    # Of three chunks one is the large prompt's: half of its own time.
    assert beside <= 1.5 * alone + 1.0, (alone, beside)


@pytest.mark.parametrize("sender", ["large", "another"])
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "scored", "embedding"])
def test_a_small_embedding_waits_for_a_few_pieces_of_a_large_request(kind, rows, sender):
    scheduler, engine, told, clock = served()
    for number in range(rows):
        wait_of(scheduler, told, clock, job(f"row{number}", prompt_tokens=20, tokens=100_000))
    take_turns(scheduler, 9)
    scheduler.submit(large(kind))
    take_turns(scheduler, 20)
    engine.log.clear()
    waited = wait_of(scheduler, told, clock, embedding("small", 100, sender))
    own = engine.log.count(("piece", "small"))
    assert engine.log.count(("piece", "large")) <= own / 2 + 1
    assert engine.log.count(("prefill", "large")) <= (2 if not rows else 40) * own + 1 and "large" not in ends(told)
    assert rows or kind == "plain" or waited <= 1.0


def scored_without_a_row(*more):
    """Return a scheduler with one row, which is taken, a prompt with log-probabilities that are complete, and more jobs."""
    scheduler, engine, told, clock = served(rows=1)
    wait_of(scheduler, told, clock, job("row", prompt_tokens=20, tokens=10_000))
    scheduler.submit(job("scored", sender="a", tokens=1, prompt_tokens=4_000, scored=True))
    while "scored" not in engine.kept:
        scheduler.turn()
    submit(scheduler, *more)
    engine.log.clear()
    take_turns(scheduler, 100)
    return scheduler, engine, told


def test_what_is_complete_and_waits_for_a_row_leaves_the_place_free():
    scheduler, engine, told = scored_without_a_row(embedding("small", 500, "b"), embedding("smaller", 100, "a"))
    assert ends(told) == {"small": "stop", "smaller": "stop"} and not engine.released
    assert (scheduler.running, scheduler.waiting) == (2, 0)
    scheduler.cancel("row")
    to_the_end(scheduler)
    assert ends(told)["scored"] == "length" and engine.log.count(("prefill", "scored")) == 1


def test_another_with_log_probabilities_waits_where_it_would_wait_for_a_row_and_embeddings_pass_it():
    more = [job(name, sender="b", tokens=1, prompt_tokens=64, scored=True) for name in ("second", "third")]
    scheduler, engine, told = scored_without_a_row(*more, embedding("small", 500, "b"))
    assert list(ends(told)) == ["small"] and ("piece", "second") not in engine.log
    scheduler.cancel("row")
    to_the_end(scheduler)
    assert list(ends(told)) == ["small", "scored", "second", "third"]


def test_a_large_embedding_takes_the_memory_of_one_that_waits_for_a_row_which_goes_through_again():
    scheduler, engine, told = scored_without_a_row(embedding("large", LARGE, "b"))
    assert engine.released == ["scored"] and ("piece", "large") in engine.log
    scheduler.cancel("row")
    to_the_end(scheduler)
    assert set(ends(told)) == {"large", "scored"} and engine.log.count(("prefill", "scored")) > 4


def test_a_large_embedding_takes_the_memory_of_one_of_several_that_wait_for_a_row():
    scheduler, engine, told, clock = served(rows=1)
    wait_of(scheduler, told, clock, job("row", prompt_tokens=20, tokens=10_000))
    for name, tokens in (("first", 4_000), ("second", 1_000)):  # the second one passes the first
        scheduler.submit(job(name, sender=name, tokens=1, prompt_tokens=tokens, scored=True))
    while len(engine.kept) < 2:
        scheduler.turn()
    scheduler.submit(embedding("large", LARGE, "b"))
    while "large" not in ends(told):
        scheduler.turn()
    assert engine.released == ["first"] and engine.kept == {"second": 1_000}
    scheduler.cancel("row")
    to_the_end(scheduler)
    assert set(ends(told)) == {"first", "second", "large"}


@pytest.mark.parametrize("rows", [1, 4])
def test_prompts_in_progress_hold_two_contexts_and_the_room_at_most(rows):
    """Large and small prompts of three kinds come all the time, more than there is room for."""
    scheduler, engine, told, _ = served(rows=rows)
    draw, lengths, most = random.Random(rows), (60, 500, 2_000, 4_000, 8_192), 0
    for number in range(400):
        if scheduler.waiting < 12:
            one = job(f"{number}", sender=f"{number % 5}", prompt_tokens=draw.choice(lengths), tokens=draw.choice((1, 40)))
            kind = draw.choice(("plain", "scored", "embedding"))
            one.prompt.update({"scored": True} if kind == "scored" else {})
            scheduler.submit(replace(one, kind="embedding") if kind == "embedding" else one)
        elif scheduler._known and draw.random() < 0.05:
            scheduler.cancel(draw.choice(list(scheduler._known)))
        take_turns(scheduler, 12)
        begun = {entry.job.id: entry.job for one in (scheduler._prompts.begun, scheduler._rowless.begun) for entry in one}
        held = {name: one.prompt["prompt_tokens"] for name, one in begun.items()} | engine.kept
        most = max(most, sum(held.values()))
    assert 2 * 8_192 < most <= 2 * 8_192 + engine.beside_tokens
    assert len(ends(told)) > 50


def test_prompts_that_pass_keep_neither_the_large_one_nor_the_next_large_one_waiting():
    """There is always a short prompt of another client, and a small embedding."""
    scheduler, _, told, clock = served(rows=4)
    for number, kind in enumerate(["plain", "embedding"] * 2):
        scheduler.submit(replace(large(kind), id=f"{kind}{number}", sender=str(number)))
    names = iter(range(100_000))
    while len(found := [name for name in ends(told) if name.startswith(("plain", "embedding"))]) < 4:
        assert clock.now < 4 * 3 * LARGE * (TOKEN_S + VECTOR_S), found
        while scheduler.waiting < 8:
            scheduler.submit(job(f"{next(names)}", sender=f"{next(names)}", prompt_tokens=200, tokens=1))
            scheduler.submit(embedding(f"{next(names)}", 100, f"{next(names)}"))
        scheduler.turn()
    assert [name for name in found if name.startswith("plain")] == ["plain0", "plain2"]


def test_the_choices_of_a_request_wait_for_the_prompt_that_they_share():
    scheduler, engine, told, _ = served()
    scheduler.submit(job("large", prompt_tokens=LARGE))
    scheduler.turn()
    submit(scheduler, *(replace(job(name, prompt_tokens=700), group="g") for name in ("one", "two")))
    scheduler.turn()
    assert started(told) == ["large", "one"]
    while ("prefill", "two") not in engine.log:
        scheduler.turn()
    assert is_told(told, "one") or any(entry.job.id == "one" for entry in scheduler._rows)
    assert "large" not in ends(told)


def test_prompts_of_about_one_length_keep_their_order():
    scheduler, _, told, _ = served()
    submit(scheduler, *(job(f"{number}", prompt_tokens=tokens) for number, tokens in enumerate([1_000, 900, 1_100, 600])))
    take_turns(scheduler, 2)
    scheduler.submit(job("short", prompt_tokens=500))
    to_the_end(scheduler)
    first_tokens = list(dict.fromkeys(event.job_id for event in told if event.kind == "text"))
    assert first_tokens == ["short", "0", "1", "2", "3"]


def test_one_that_leaves_between_its_chunks_is_forgotten():
    scheduler, engine, _, _ = served()
    for one in (large("plain"), job("chat", prompt_tokens=1_000), large("embedding"), embedding("small", 900)):
        scheduler.submit(replace(one, id=f"{one.kind} {one.id}"))
    take_turns(scheduler, 4)
    assert scheduler.running == 4
    for name in list(scheduler._known):
        scheduler.cancel(name)
    assert scheduler.is_idle and scheduler.running == scheduler.waiting == 0 and not scheduler.turn()
    assert not engine.active and not engine.placed


def test_where_prompts_cannot_be_in_progress_beside_each_other_each_is_computed_to_its_end():
    scheduler, engine, _, _ = served()
    engine.interleaves = False
    submit(scheduler, *(one for one in (large("plain"), job("chat", prompt_tokens=60))))
    to_the_end(scheduler)
    order = [name for kind, name in engine.log if kind == "prefill"]
    assert order == [*["large"] * (len(order) - 1), "chat"]
