"""Who is answered next, with a mock engine and a clock of the test's own: no model, no time that passes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.raised import raised, refused
from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.scheduling import scheduler as scheduler_module
from trimtab.serve.scheduling.in_progress import RATIO, TOWERS
from trimtab.serve.scheduling.scheduler import DeadlineError, QueueFullError, Scheduler


@dataclass(eq=False)
class MockAnswer:
    job: Job
    pieces: int
    tokens_left: int
    pending: list[Event] = field(default_factory=list)
    needs_towers: bool = False
    is_open: bool = False


class MockEngine:
    """A job's prompt is {"pieces": turns of its prompt}; it answers max_new_tokens tokens."""

    def __init__(self, rows=2, slots=None):
        self.rows, self.slots, self.pool, self.reserved = rows, slots, None, {}
        self.active, self.placed, self.log = [], [], []
        self.chosen, self.together, self.fail_together = [], 1, []
        self.chunk_sizes, self.times, self.asked_for = (16, 64, 128, 256, 512, 1024), [], []
        self.step_s, self.owed_s = 0.01, 0.0
        self.chunk_s = lambda size: 0.010 + 0.00002 * size
        self.wait = lambda seconds: None
        self.fail_prefill, self.fail_steps = {}, deque()
        self.begun, self.fail_late = {}, deque()
        self.preparing = {}  # job id -> the future of its inputs
        self.unprepared = set()  # adapters
        self.beside_tokens, self.interleaves = 500, False

    def passing_tokens(self, answer):
        """A job says how many tokens its prompt has; without that it passes none."""
        return answer.job.prompt.get("prompt_tokens", 0) if self.interleaves else 0

    def kept_tokens(self, answer):
        return 0

    def prepare(self, job):
        return self.preparing.get(job.id)

    def begin(self, job, inputs=None):
        self.begun[job.id] = inputs
        if job.prompt.get("refuse"):
            raise RequestError("too long", field="prompt")
        answer = MockAnswer(job, job.prompt.get("pieces", 1), job.request.max_new_tokens)
        answer.needs_towers = "towers_s" in job.prompt
        return answer

    def is_prepared(self, adapter):
        return adapter not in self.unprepared

    def is_ready(self, adapter):
        if adapter in self.unprepared:
            return False
        used = {answer.job.adapter for answer in (*self.active, *self.chosen)} | {adapter}
        return self.slots is None or len(used - {None}) <= self.slots

    def has_room(self, answer):
        return self.pool is None or answer.tokens_left + sum(self.reserved.values()) <= self.pool

    def goes_alone(self, answer):
        return answer.job.prompt.get("pieces", 1) > 1 or "alone" in answer.job.prompt

    def choose(self, answer):
        self.chosen.append(answer)
        self.reserved[answer.job.id] = answer.tokens_left
        assert self.pool is None or sum(self.reserved.values()) <= self.pool

    def prefill_together(self, answers, most_tokens):
        """Those of one piece go together, of `together` at most, the first among them."""
        if self.fail_together:
            raise self.fail_together.pop()
        able = [answer for answer in answers if answer.pieces == 1 and answer.job.prompt.get("alone") is None]
        able = able[: self.together]
        if len(able) < 2 or able[0] is not answers[0]:
            return 0, []
        self.log.append(("together", tuple(answer.job.id for answer in able)))
        assert len(self.active) + len(self.placed) + len(able) <= self.rows
        self.placed += able
        for answer in able:
            self.chosen.remove(answer)
        return 64 * len(able), able

    def spent(self, answer):
        return {"prompt_tokens": 0, "completion_tokens": 0}

    def chunk_times(self):
        found, self.times = self.times, []
        return found

    def prefill(self, answer, most_tokens):
        if answer.job.id in self.fail_prefill:
            raise self.fail_prefill.pop(answer.job.id)
        self.log.append(("prefill", answer.job.id))
        if answer in self.chosen:
            self.chosen.remove(answer)
        if answer.needs_towers:
            answer.needs_towers, towers_s = False, answer.job.prompt["towers_s"]
            self.times.append((TOWERS, towers_s))
            self.owed_s += towers_s
            return TOWERS, False
        self.asked_for.append(most_tokens)
        answer.pieces -= 1
        asked = min(most_tokens, answer.job.prompt.get("size", 64))
        size = next((size for size in self.chunk_sizes if size >= asked), asked)
        self.times.append((size, self.chunk_s(size)))
        self.owed_s += self.chunk_s(size)
        if answer.pieces:
            return size, False
        assert len(self.active) + len(self.placed) < self.rows
        self.placed.append(answer)
        return size, True

    def arrive(self, answer):
        assert self.placed.pop(0) is answer
        self.active.append(answer)
        self._token(answer)

    def step(self, behind=None):
        if self.fail_steps:
            raise self.fail_steps.popleft()
        stepping = list(self.active)
        if self.fail_late:
            raise self.fail_late.popleft()
        self.log.append(("step", tuple(answer.job.id for answer in stepping)))
        # What was given to the device behind the last step comes before this one.
        self.wait(self.owed_s + self.step_s)
        self.owed_s = 0.0
        if behind is not None:
            behind()
        for answer in stepping:
            if answer in self.active:
                self._token(answer)

    def _token(self, answer):
        answer.tokens_left -= 1
        answer.pending.append(Event(answer.job.id, "text", text="x"))
        if answer.tokens_left == 0:
            answer.pending.append(Event(answer.job.id, "done", finish="length"))

    def news(self, answer):
        found, answer.pending = answer.pending, []
        return found

    def drop(self, answer):
        self.reserved.pop(answer.job.id, None)
        for rows in (self.active, self.placed, self.chosen):
            if answer in rows:
                rows.remove(answer)


def job(name, *, adapter=None, pieces=1, tokens=3, deadline_s=None, sender="", **prompt):
    return Job(
        name, {"pieces": pieces, **prompt}, GenerateRequest(max_new_tokens=tokens), adapter=adapter,
        deadline_s=deadline_s, sender=sender,
    )  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def make(engine=None, **options):
    engine = engine or MockEngine()
    told, clock = [], Clock()
    return Scheduler(engine, told.append, now=clock, **options), engine, told, clock


def submit(scheduler, *jobs):
    for one in jobs:
        scheduler.submit(one)


def take_turns(scheduler, count):
    for _ in range(count):
        scheduler.turn()


def to_the_end(scheduler, limit=10_000):
    for _ in range(limit):
        if not scheduler.turn():
            return
    raise AssertionError("never idle")


def ends(told):
    return {event.job_id: event.finish for event in told if event.kind in ("done", "error")}


def test_a_job_is_told_that_it_started_its_text_and_its_end():
    scheduler, _, told, _ = make()
    scheduler.submit(job("a", tokens=3))
    to_the_end(scheduler)
    assert [event.kind for event in told] == ["started", "text", "text", "text", "done"]
    assert scheduler.is_idle and scheduler.counts["finished"] == 1


def test_a_request_without_room_for_its_keys_and_values_waits_and_is_not_overtaken():
    engine = MockEngine(rows=8)
    engine.pool = 20
    scheduler, _, told, _ = make(engine, queue_limit=2)
    scheduler.submit(job("first", tokens=15))
    scheduler.turn()
    submit(scheduler, job("large", tokens=18), *(job(name, tokens=2, pieces=2) for name in ("small", "other")))
    scheduler.turn()
    assert (scheduler.running, scheduler.waiting) == (1, 3)
    to_the_end(scheduler)
    assert started(told) == ["first", "large", "small", "other"]
    assert set(ends(told).values()) == {"length"} and not engine.reserved


def test_room_is_free_again_when_a_client_leaves_before_its_row():
    engine = MockEngine(rows=4)
    engine.pool = 20
    scheduler, _, told, _ = make(engine)
    scheduler.submit(job("gone", tokens=20, pieces=9))
    scheduler.turn()
    scheduler.submit(job("next", tokens=20))
    scheduler.turn()
    assert scheduler.waiting == 1
    scheduler.cancel("gone")
    to_the_end(scheduler)
    assert ends(told) == {"next": "length"}


def test_a_long_prompt_lets_the_others_step_between_its_pieces():
    scheduler, engine, _, _ = make()
    scheduler.submit(job("short", tokens=20))
    scheduler.turn()
    scheduler.submit(job("long", pieces=5))
    take_turns(scheduler, 5)
    kinds = [entry for entry in engine.log if entry[0] == "prefill" or "short" in entry[1]][2:]
    assert kinds[:8] == [("prefill", "long"), ("step", ("short",))] * 4


def test_prompts_that_wait_go_through_together_as_far_as_there_are_rows():
    scheduler, engine, told, _ = make(MockEngine(rows=4))
    engine.together = 16
    submit(scheduler, *(job(name, adapter=name, tokens=4) for name in "abcdef"))
    scheduler.turn()
    assert engine.log[0] == ("together", ("a", "b", "c", "d"))
    assert started(told) == ["a", "b", "c", "d"]
    assert scheduler.running == 4 and scheduler.waiting == 2
    to_the_end(scheduler)
    assert ends(told) == dict.fromkeys("abcdef", "length") and not engine.chosen


def test_a_prompt_that_goes_by_itself_lets_those_behind_it_go_together():
    scheduler, engine, told, _ = make(MockEngine(rows=8))
    engine.together = 16
    submit(scheduler, job("long", pieces=3), job("picture", alone=True), *(job(name) for name in "abc"))
    to_the_end(scheduler)
    passes = [entry for entry in engine.log if entry[0] != "step"]
    assert passes == [*[("prefill", "long")] * 3, ("prefill", "picture"), ("together", ("a", "b", "c"))]
    assert set(ends(told).values()) == {"length"}


def test_where_a_pass_of_several_fails_each_goes_by_itself():
    scheduler, engine, told, _ = make(MockEngine(rows=4))
    engine.together = 16
    engine.fail_together.append(DeviceError("out of memory while reading prompts", device="cuda:0"))
    engine.fail_prefill["b"] = DeviceError("out of memory while reading a prompt", device="cuda:0")
    submit(scheduler, *(job(name) for name in "abc"))
    to_the_end(scheduler)
    assert [entry for entry in engine.log if entry[0] != "step"] == [("prefill", "a"), ("prefill", "c")]
    assert ends(told) == {"a": "length", "b": "error", "c": "length"}
    for name in "de":  # the next ones go together again
        scheduler.submit(job(name))
    to_the_end(scheduler)
    assert ("together", ("d", "e")) in engine.log


def test_a_client_that_leaves_before_its_pass_is_forgotten():
    scheduler, engine, told, _ = make(MockEngine(rows=4))
    engine.together = 1
    submit(scheduler, *(job(name) for name in "abc"))
    scheduler.turn()
    assert [answer.job.id for answer in engine.chosen] == ["b", "c"]
    scheduler.cancel("b")
    to_the_end(scheduler)
    assert ends(told) == {"a": "length", "c": "length"} and scheduler.is_idle and not engine.chosen


def test_an_adapter_of_a_chosen_prompt_keeps_its_slot():
    scheduler, engine, told, _ = make(MockEngine(rows=4, slots=1))
    engine.together = 16
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        scheduler.submit(job(name, adapter=adapter, tokens=4))
    scheduler.turn()
    assert engine.log[0] == ("together", ("a", "d", "c"))
    to_the_end(scheduler)
    assert ends(told) == dict.fromkeys("abcd", "length")


def timed(rows=32, step_s=0.01, **chunk):
    """Return a scheduler whose engine's steps and chunks take time, and (job id, when) of every text."""
    engine = MockEngine(rows=rows)
    engine.step_s = step_s
    engine.chunk_s = chunk.get("chunk_s", engine.chunk_s)
    clock, texts = Clock(), []
    engine.wait = clock.wait
    scheduler = Scheduler(engine, lambda event: texts.append((event.job_id, clock.now, event.kind)), now=clock, queue_limit=500)
    return scheduler, engine, clock, texts


def gaps_of(texts, name):
    times = [at for job_id, at, kind in texts if job_id == name and kind == "text"]
    return [after - before for before, after in zip(times, times[1:])]


def test_no_answer_waits_for_anothers_long_prompt():
    scheduler, engine, _, texts = timed(step_s=0.012)
    submit(scheduler, *(job(f"row{number}", tokens=400, size=512) for number in range(8)))
    take_turns(scheduler, 60)
    submit(scheduler, job("long", pieces=40, size=1024), *(job(f"other{number}", size=512) for number in range(12)))
    to_the_end(scheduler)
    gaps = sorted(gaps_of(texts, "row0")[20:])
    # A step and chunks of no more than two more.
    assert gaps[int(len(gaps) * 0.99)] <= 3 * 0.012 + 1e-6 and gaps[len(gaps) // 2] < 0.036
    assert max(engine.asked_for[30:]) == 512  # one of 1,024 takes 30 ms
    assert ("long", "done") in {(one[0], one[2]) for one in texts}


@pytest.mark.parametrize("towers_s", [0.015, 0.03])  # the second takes longer than there is time for
def test_a_pass_of_towers_goes_behind_a_step_of_its_own_where_a_chunk_beside_it_would_take_too_long(towers_s):
    scheduler, engine, _, texts = timed(step_s=0.012)
    submit(scheduler, *(job(f"row{number}", tokens=400, size=512) for number in range(8)))
    take_turns(scheduler, 60)
    for number in range(12):
        submit(scheduler, job(f"picture{number}", size=512, towers_s=towers_s), job(f"other{number}", size=512))
    to_the_end(scheduler)
    gaps = sorted(gaps_of(texts, "row0")[20:])
    # Until it has run once, nothing is known of how long it takes: a chunk of 512 tokens, which takes 20 ms, is beside it.
    assert gaps[-1] < 0.035 + towers_s and gaps[-2] <= max(RATIO * 0.012, 0.012 + towers_s) + 1e-6
    assert sum(size == 512 for size in engine.asked_for) >= 20
    assert {(f"picture{number}", "done") for number in range(12)} <= {(one[0], one[2]) for one in texts}


def test_prompts_go_on_where_even_the_least_chunk_takes_longer_than_there_is_time_for():
    scheduler, engine, _, texts = timed(step_s=0.002, chunk_s=lambda size: 0.1 + size / 10_000)
    scheduler.submit(job("row", tokens=300))
    take_turns(scheduler, 30)
    scheduler.submit(job("long", pieces=6, size=1024))
    to_the_end(scheduler)
    assert ("long", "done") in {(one[0], one[2]) for one in texts}
    assert max(gaps_of(texts, "row")) < 0.21 and engine.asked_for[-1] == 256


def test_several_short_prompts_go_through_behind_one_step():
    scheduler, engine, _, _ = timed(step_s=0.012, chunk_s=lambda size: 0.001 + size / 100_000)
    scheduler.submit(job("row", tokens=300))
    take_turns(scheduler, 30)
    submit(scheduler, *(job(f"short{number}", size=64, tokens=50) for number in range(20)))
    before = len(engine.log)
    scheduler.turn()
    kinds = [kind for kind, _ in engine.log[before:]]
    assert kinds == ["step"] + ["prefill"] * kinds.count("prefill") and 5 <= kinds.count("prefill") <= 20
    to_the_end(scheduler)


def test_a_prompt_that_went_through_joins_in_the_next_turn_and_can_leave_before():
    scheduler, engine, _, texts = timed(chunk_s=lambda size: 0.001)
    scheduler.submit(job("row", tokens=100))
    take_turns(scheduler, 30)
    submit(scheduler, job("gone", tokens=5), job("stays", adapter="x", tokens=5))
    scheduler.turn()
    assert scheduler.running == 3 and len(engine.placed) == 2
    scheduler.cancel("gone")
    assert [answer.job.id for answer in engine.placed] == ["stays"]
    to_the_end(scheduler)
    assert [one[0] for one in texts if one[2] == "done"] == ["stays", "row"] and engine.placed == []


def test_a_prompt_whose_last_token_a_step_computes_has_its_row_before_that_step():
    """It waits for one step less than a prompt that arrives while the next step is on its way, in its place in the order."""
    scheduler, engine, _, _ = timed(chunk_s=lambda size: 0.001)
    scheduler.submit(job("row", tokens=100))
    take_turns(scheduler, 30)
    for name, is_open in (("open", True), ("closed", False), ("behind", True)):
        scheduler.submit(job(name, adapter=name, tokens=9))
        scheduler._admit()
        scheduler._known[name].answer.is_open = is_open
    scheduler.turn()
    assert len(engine.placed) == 3
    active = []
    real = engine.step
    engine.step = lambda behind=None: (active.append([one.job.id for one in engine.active]), real(behind))
    scheduler.turn()
    scheduler.turn()
    assert active == [["row", "open"], ["row", "open", "closed", "behind"]]


def test_adapters_take_turns_however_many_requests_one_of_them_has():
    scheduler, _, told, _ = make(MockEngine(rows=1))
    submit(scheduler, *(job(f"greedy{number}", adapter="greedy", tokens=2) for number in range(6)))
    scheduler.submit(job("late", adapter="modest", tokens=2))
    to_the_end(scheduler)
    order = started(told)
    assert order == ["greedy0", "late", *(f"greedy{number}" for number in range(1, 6))]
    assert scheduler.counts["by_adapter"] == {"greedy": 6, "modest": 1}
    for name in ("greedy", "never used"):  # a client that may load adapters cannot let the names grow without end
        scheduler.forget(name)
    assert scheduler.counts["by_adapter"] == {"(unloaded)": 6, "modest": 1}


def started(told):
    return [event.job_id for event in told if event.kind == "started"]


def test_long_prompts_of_a_client_delay_another_client_by_one_of_them():
    scheduler, engine, told, _ = make(MockEngine(rows=16))
    submit(scheduler, *(job(f"a{number}", sender="a", pieces=10) for number in range(8)))
    scheduler.turn()
    submit(scheduler, *(job(name, sender="b", pieces=2) for name in ("b0", "b1")))
    to_the_end(scheduler)
    assert started(told) == ["a0", "b0", "a1", "b1", *(f"a{number}" for number in range(2, 8))]
    pieces = [entry[1] for entry in engine.log if entry[0] == "prefill"]
    assert pieces[:24] == ["a0"] * 10 + ["b0"] * 2 + ["a1"] * 10 + ["b1"] * 2


def test_long_prompts_of_one_client_leave_a_row_to_another_that_comes_while_they_wait():
    scheduler, _, told, _ = make(MockEngine(rows=3))
    submit(scheduler, *(job(f"a{number}", sender="a", pieces=5, tokens=100) for number in range(6)))
    scheduler.turn()
    scheduler.submit(job("b0", sender="b"))
    scheduler.turn()
    assert scheduler.running < 3
    to_the_end(scheduler)
    assert started(told)[:2] == ["a0", "b0"]


def test_a_client_alone_has_every_row_at_once():
    scheduler, engine, _, _ = make(MockEngine(rows=4))
    engine.together = 16
    submit(scheduler, *(job(f"a{number}", sender="a") for number in range(6)))
    scheduler.turn()
    assert engine.log[0] == ("together", ("a0", "a1", "a2", "a3"))
    to_the_end(scheduler)


def test_short_prompts_go_together_whichever_clients_they_are_of_and_whatever_long_one_is_among_them():
    scheduler, engine, _, _ = make(MockEngine(rows=8))
    engine.together = 16
    submit(scheduler, *(job(name, sender="a") for name in ("a0", "a1", "a2")))
    submit(scheduler, *(job(name, sender="b", pieces=4) for name in ("b0", "b1")))
    to_the_end(scheduler)
    assert engine.log[0] == ("together", ("a0", "a1"))  # the second long one is not passed
    passes = [entry for entry in engine.log if entry[0] != "step"]
    assert passes == [("together", ("a0", "a1")), *[("prefill", "b0")] * 4, *[("prefill", "b1")] * 4, ("prefill", "a2")]


@given(jobs=st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([None, "x", "y"]), st.integers(1, 4), st.integers(0, 3)),
    max_size=25,
), rows=st.integers(1, 6))  # fmt: skip
@settings(deadline=None, max_examples=examples(60))
def test_a_client_with_a_waiting_prompt_is_passed_by_each_other_client_once(jobs, rows):
    """jobs: (client, adapter, pieces of the prompt, turns before the next one comes). Between two of its prompts that start, no
    other client starts two while it waits, whichever adapters they ask for."""
    scheduler, _, told, _ = make(MockEngine(rows=rows), queue_limit=100)
    owner, waits_since, seen = {}, {}, 0

    def look():
        nonlocal seen
        for event in told[seen:]:
            if event.kind == "started":
                client = owner[event.job_id]
                waits_since.pop(event.job_id)
                others = {owner[name] for name in waits_since} - {client}
                passed.pop(client, None)
                for other in others:
                    passed.setdefault(other, []).append(client)
                    assert len(set(passed[other])) == len(passed[other])
        seen = len(told)

    passed = {}
    for number, (client, adapter, pieces, turns) in enumerate(jobs):
        name = str(number)
        owner[name] = client
        waits_since[name] = True
        scheduler.submit(job(name, adapter=adapter, sender=client, pieces=pieces, tokens=2))
        for _ in range(turns):
            scheduler.turn()
            look()
    while scheduler.turn():
        look()
    look()
    assert set(ends(told).values()) <= {"length"} and len(ends(told)) == len(jobs)


@pytest.mark.parametrize("own", [False, True])
def test_prompts_for_many_adapters_of_one_client_delay_another_client_by_one_of_them(own):
    """own: the client with many adapters has a prompt in the other client's line, too, which came before."""
    scheduler, _, told, _ = make(MockEngine(rows=1), queue_limit=100)
    for number in range(40):
        scheduler.submit(job(f"a{number}", adapter=f"x:0.{number:03}+y:0.5", sender="a", pieces=3, tokens=1))
    if own:
        scheduler.submit(job("a", sender="a", pieces=3, tokens=1))
    scheduler.turn()
    submit(scheduler, *(job(f"b{number}", sender="b", tokens=1) for number in range(2)))
    to_the_end(scheduler)
    assert started(told)[:5] == ["a0", "b0", "a1", "b1", "a2"]


def test_many_adapters_of_one_client_that_wait_for_a_slot_keep_no_slot_from_another_client():
    """One slot: each time as many prompts as there are rows have passed, one of the waiting adapters has it, not all of them."""
    scheduler, _, told, _ = make(MockEngine(rows=2, slots=1), queue_limit=100)
    submit(scheduler, *(job(f"b{number}", adapter="z", sender="b", tokens=3) for number in range(20)))
    scheduler.turn()
    submit(scheduler, *(job(f"a{number}", adapter=f"x{number}", sender="a", tokens=3) for number in range(20)))
    to_the_end(scheduler)
    order = "".join(name[0] for name in started(told))
    assert order.index("a") <= 6 and "aaa" not in order[: order.rindex("b")], order


def test_an_adapter_that_has_no_slot_waits_and_others_pass():
    scheduler, _, told, _ = make(MockEngine(rows=3, slots=1))
    submit(scheduler, job("a1", adapter="a", tokens=5), job("b1", adapter="b"), job("base"), job("a2", adapter="a"))
    to_the_end(scheduler)
    assert started(told).index("b1") == 3
    assert set(ends(told)) == {"a1", "a2", "b1", "base"}


def test_who_waits_for_a_slot_is_overtaken_by_no_more_than_there_are_rows():
    scheduler, _, told, _ = make(MockEngine(rows=3, slots=1), queue_limit=100)
    scheduler.submit(job("b", adapter="b"))
    names = iter(range(1000))
    for turn in range(60):  # somebody always asks for adapter a, whose answers keep its slot
        while scheduler.uses("a") < 4:
            scheduler.submit(job(f"a{next(names)}", adapter="a", tokens=6))
        if turn == 0:
            scheduler.cancel("b")
        if turn == 2:
            scheduler.submit(job("b", adapter="b"))
        scheduler.submit(job(f"base{turn}", tokens=1)) if turn % 3 == 0 else None
        scheduler.turn()
    order = [event.job_id for event in told if event.kind == "started" and not event.job_id.startswith("base")]
    assert order.index("b") <= 2 + 3 + 1
    assert order[-1].startswith("a")  # and those whose slot it took get it back
    assert ends(told)["b"] == "length"


def test_an_adapter_that_is_not_prepared_yet_keeps_nobody_back():
    engine = MockEngine(rows=2, slots=2)
    engine.unprepared.add("new")
    scheduler, _, told, _ = make(engine, queue_limit=100)
    submit(scheduler, job("first of new", adapter="new"), *(job(f"a{number}", adapter="a") for number in range(12)))
    take_turns(scheduler, 100)
    assert ends(told) == {f"a{number}": "length" for number in range(12)}
    assert scheduler._queue.lines.overtaken == {"new": 0}
    engine.unprepared.clear()
    to_the_end(scheduler)
    assert ends(told)["first of new"] == "length"


@given(moves=st.lists(
    st.one_of(st.sampled_from([None, "a", "b", "a:0.5+b:0.5", "a:1+c:-1"]), st.integers(min_value=0, max_value=30)),
    max_size=40,
))  # fmt: skip
@settings(deadline=None, max_examples=examples(100))
def test_uses_counts_the_jobs_of_an_adapter_whatever_came_and_left(moves):
    scheduler, _, _, _ = make(queue_limit=100)
    names = iter(range(100))
    for move in moves:
        if isinstance(move, int):
            scheduler.cancel(str(move))
        else:
            scheduler.submit(job(str(next(names)), adapter=move))
        if not move:
            scheduler.turn()
        known = [entry.job.adapter for entry in scheduler._known.values()]
        assert scheduler.uses(None) == known.count(None)
        for name in "abc":
            assert scheduler.uses(name) == sum(name in (adapter or "") for adapter in known)
    to_the_end(scheduler)
    assert not any(scheduler.uses(name) for name in (None, "a", "b", "c"))


def test_uses_does_not_look_through_the_jobs():
    scheduler, _, _, _ = make(queue_limit=1000)
    submit(scheduler, *(job(str(number), adapter="a") for number in range(500)))
    scheduler._known = None  # it fails if it is read
    assert scheduler.uses("a") == 500


def test_many_arrivals_are_prepared_between_the_steps_of_those_who_are_answered(monkeypatch):
    scheduler, engine, _, clock = make(MockEngine(rows=2))
    scheduler.submit(job("first", tokens=50))
    scheduler.turn()
    begin = engine.begin

    def slow(job, inputs):
        clock.now += 0.015
        engine.log.append(("begin", job.id))
        return begin(job, inputs)

    monkeypatch.setattr(engine, "begin", slow)
    submit(scheduler, *(job(f"picture{number}") for number in range(6)))
    assert scheduler.waiting == 6
    for _ in range(3):
        before = len(engine.log)
        scheduler.turn()
        kinds = [entry[0] for entry in engine.log[before:]]
        assert kinds.count("begin") == 2 and "step" in kinds
    scheduler.cancel("picture5")
    to_the_end(scheduler)


def test_a_prompt_that_is_being_prepared_delays_nobody_and_can_be_cancelled():
    scheduler, engine, told, _ = make()
    engine.preparing = {name: Future() for name in ("slow", "broken", "left")}
    submit(scheduler, *(job(name) for name in engine.preparing))
    assert scheduler.is_preparing and scheduler.waiting == 3
    scheduler.submit(job("text"))
    assert not scheduler.is_preparing
    take_turns(scheduler, 4)
    assert ends(told) == {"text": "length"} and scheduler.is_preparing
    engine.preparing["broken"].set_exception(RequestError("cannot be decoded", field="messages"))
    engine.preparing["slow"].set_result("inputs")
    scheduler.cancel("left")
    assert engine.preparing["left"].cancelled()
    to_the_end(scheduler)
    assert ends(told) == {"text": "length", "broken": "error", "slow": "length"} and scheduler.is_idle
    assert engine.begun["slow"] == "inputs"


def test_what_has_just_arrived_can_leave_and_be_late():
    scheduler, engine, told, clock = make()
    submit(scheduler, job("left"), job("late", deadline_s=1.0))
    scheduler.cancel("left")
    clock.now = 2.0
    assert scheduler.turn() is False
    assert ends(told) == {"late": "error"} and engine.log == []


def test_a_full_queue_refuses_with_a_time_to_come_back():
    scheduler, _, told, _ = make(queue_limit=2)
    for name in "abcd":  # two go to the free rows, although nobody has looked at them yet
        scheduler.submit(job(name, tokens=9))
    assert raised(QueueFullError, lambda: scheduler.submit(job("e"))).retry_after_s >= 1
    take_turns(scheduler, 2)
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    with pytest.raises(QueueFullError):
        scheduler.submit(job("e"))
    assert scheduler.counts["refused"] == 2
    to_the_end(scheduler)
    assert ends(told) == dict.fromkeys("abcd", "length")


def test_what_cannot_fit_is_told_before_it_queues():
    scheduler, _, told, _ = make(queue_limit=1)
    scheduler.submit(job("a", refuse=True))
    scheduler.turn()
    assert [(event.kind, event.error["class"], event.error["fields"]["field"]) for event in told] == [
        ("error", "RequestError", "prompt")
    ]
    assert scheduler.is_idle


def test_an_id_in_use_is_refused():
    scheduler, _, _, _ = make()
    scheduler.submit(job("a"))
    error = refused(lambda: scheduler.submit(job("a")))
    assert (error.field, error.value) == ("id", "a")


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_deadline_ends_a_job_wherever_it_is(turns):
    scheduler, engine, told, clock = make()
    scheduler.submit(replace(job("a", pieces=2, tokens=100, deadline_s=4.0), waited_s=3.0))
    take_turns(scheduler, turns)
    clock.now = 1.5
    assert scheduler.turn() is False
    (error,) = [event.error for event in told if event.kind == "error"]
    assert error["class"] == DeadlineError.__name__ and error["fields"]["value"] == 4.0
    assert ("waited" in error["message"]) == (turns == 0)
    assert engine.active == []


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_client_that_leaves_frees_everything_before_the_next_step(turns):
    scheduler, engine, told, _ = make()
    scheduler.submit(job("a", pieces=2, tokens=100))
    take_turns(scheduler, turns)
    scheduler.cancel("a")
    assert scheduler.is_idle and engine.active == []
    before = len(told)
    assert scheduler.turn() is False and len(told) == before and scheduler.counts["cancelled"] == 1
    scheduler.cancel("a")  # it has just been answered, or was never here
    assert scheduler.counts["cancelled"] == 1


def test_running_out_of_memory_in_a_prompt_refuses_that_job_alone():
    scheduler, engine, told, _ = make()
    engine.fail_prefill["big"] = DeviceError("out of memory", device="cuda:0")
    submit(scheduler, job("good"), job("big", adapter="x"), job("after", adapter="y"))
    to_the_end(scheduler)
    assert ends(told) == {"good": "length", "big": "error", "after": "length"}


@pytest.mark.parametrize("error", [DeviceError("out of memory", device="cuda:0"), RequestError(
    "rows of this batch use different adapters", field="adapter",
)])  # fmt: skip
def test_a_step_without_memory_or_of_rows_that_do_not_go_together_ends_the_one_that_came_last(error):
    scheduler, engine, told, _ = make()
    submit(scheduler, job("first", tokens=9), job("second", adapter="x", tokens=9))
    take_turns(scheduler, 3)
    engine.fail_steps.append(error)
    to_the_end(scheduler)
    assert ends(told) == {"first": "length", "second": "error"}


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([None, "a", "b", "c"]), st.integers(1, 4), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30)), st.tuples(st.just("turn")), st.tuples(st.just("oom")),
        st.tuples(st.just("late")), st.tuples(st.just("bad"), st.integers(0, 30)), st.tuples(st.just("wait"), st.floats(0, 2)),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(actions, st.integers(1, 3), st.one_of(st.none(), st.integers(1, 2)), st.booleans())
def test_whatever_happens_every_job_ends_once_and_nothing_is_left(steps, rows, slots, interleaves):
    scheduler, engine, told, clock = make(MockEngine(rows=rows, slots=slots), queue_limit=5)
    engine.interleaves = interleaves
    names, cancelled = [], set()
    for step in steps:
        match step:
            case ("submit", adapter, pieces, tokens):
                name = str(len(names))
                try:
                    one = job(name, adapter=adapter, pieces=pieces, tokens=tokens, deadline_s=3.0)
                    scheduler.submit(replace(one, prompt={**one.prompt, "prompt_tokens": 100 * pieces**2}))
                except QueueFullError:
                    continue
                names.append(name)
            case ("cancel", number):
                if number < len(names) and names[number] not in ends(told):
                    cancelled.add(names[number])
                scheduler.cancel(str(number))
            case ("turn",):
                scheduler.turn()
            case ("oom",):
                engine.fail_steps.append(DeviceError("out of memory", device="x"))
            case ("late",):
                engine.fail_late.append(DeviceError("out of memory", device="x"))
            case ("bad", number):
                engine.fail_prefill[str(number)] = RequestError("bad", field="prompt")
            case ("wait", seconds):
                clock.now += seconds
        assert len(engine.active) <= rows
    to_the_end(scheduler)
    endings = [event.job_id for event in told if event.kind in ("done", "error")]
    assert sorted(endings) == sorted(set(names) - cancelled)
    assert engine.active == [] and scheduler.waiting == scheduler.running == 0
    for name in endings:
        mine = [event.kind for event in told if event.job_id == name]
        assert mine[-1] in ("done", "error") and mine.count("started") <= 1


@pytest.mark.parametrize("what", ["prepare", "parts_of"])
def test_a_job_that_cannot_be_taken_leaves_nothing_behind(what, monkeypatch):
    scheduler, engine, told, _ = make(queue_limit=1)

    def fail(job):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine if what == "prepare" else scheduler_module, what, fail)
        for _ in range(8):  # more than there are places
            with pytest.raises(ZeroDivisionError):
                scheduler.submit(job("a", adapter="x"))
    assert scheduler.is_idle and scheduler.uses("x") == 0
    scheduler.cancel("a")
    scheduler.submit(job("a"))
    to_the_end(scheduler)
    assert told[-1].kind == "done"


def test_prompts_that_need_no_chunk_do_not_keep_others_waiting_behind_a_step():
    engine = MockEngine(rows=4)
    engine.chunk_sizes, engine.chunk_s = (), lambda size: 0.00002 * size
    scheduler, _, _, clock = make(engine)
    engine.wait = clock.wait
    scheduler.submit(job("first", size=1024, tokens=400))
    take_turns(scheduler, 5)
    for name in ("second", "third"):
        scheduler.submit(job(name, size=0, tokens=2))  # it takes over what another one computed
    engine.log.clear()
    scheduler.turn()
    assert [one for one in engine.log if one[0] == "prefill"] == [("prefill", "second"), ("prefill", "third")]
