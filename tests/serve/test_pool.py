"""Models that take turns: nobody starves, nobody waits for ever, and what waits can leave."""

import asyncio
import errno
import functools
import os
import threading
import time
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests import toy_worker
from tests.raised import raised
from tests.waiting import turns, until_async
from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve import slots
from trimtab.serve.api.other_routes import in_turn
from trimtab.serve.contract.errors import UnknownModelError
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.settings import Settings
from trimtab.serve.pool import Pool
from trimtab.serve.scheduling.scheduler import DeadlineError, QueueFullError, StoppingError
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.supervisor import ModelFailedError, Supervisor, WorkerError

toy = functools.partial(Supervisor, target=toy_worker.main)


def model(name="a", **options):
    return ServedModel(name=name, request=LoadRequest(model="none"), **options)


def job(name, prompt="echo", **options):
    return Job(name, prompt, GenerateRequest(max_new_tokens=4), **options)


class Told:
    """A supervisor's settings with more in them: the toy's own switches."""

    def __init__(self, **extra):
        self.extra = extra

    def __call__(self, told, **options):
        return toy({**told, **self.extra}, **options)


def run(*models, work, together=1, turn_s=30.0, make=toy, **settings):
    """Run work(pool) on a pool that is started before and drained after."""

    async def all_of_it():
        pool = Pool(models or (model(),), Settings(**settings), together=together, turn_s=turn_s, make=make)
        await pool.start()
        try:
            return await asyncio.wait_for(work(pool), 60)
        finally:
            await pool.drain(0.0)

    return asyncio.run(all_of_it())


async def ask(pool, name, one):
    """Return the text of an answer. Errors: what it was told."""
    text = ""
    async for event in pool.submit(name, one):
        text += event.text
        if event.kind == "error":
            raise WorkerError(event.error)
    return text


async def begun(pool, name):
    """Return an answer of model a that has said something and will not end."""
    stream = pool.submit("a", job(name, "speak, then wait"))
    while (await stream.__anext__()).kind != "text":
        pass
    return stream


def looks(pool):
    """Return a list that grows with each look of the keeper: whether the turn of model a was over."""
    found, give = [], pool.slots._give_places

    async def noted():
        await give()
        found.append(pool.slots._is_turn_over(pool._members["a"]))

    pool.slots._give_places = noted
    return found


def living(pool):
    return [name for name, member in pool._members.items() if member.supervisor.pid is not None]


# Names ----------------------------------------------------------------------------------------------------------------


def made(*models):
    return Pool(models, Settings(), make=toy)


def test_both_forms_of_an_adapters_name_are_known():
    pool = made(model("demo", adapters={"style": "x"}))
    assert pool.resolve("demo") == ("demo", None) and pool.resolve("style") == pool.resolve("demo:style") == ("demo", "style")
    assert [entry["id"] for entry in pool.models()] == ["demo", "style"]
    for name in ("nobody", "demo:nobody", "other:style", "", ":", "demo:"):
        assert raised(UnknownModelError, pool.resolve, name).field == "model"


def test_a_name_that_two_models_have_needs_its_model():
    pool = made(model("a", adapters={"x": "1", "y": "1"}), model("b", adapters={"x": "2"}))
    assert pool.resolve("b:x") == ("b", "x") and pool.resolve("y") == ("a", "y")
    assert [entry["id"] for entry in pool.models()] == ["a", "a:x", "a:y", "b", "b:x"]
    assert raised(RequestError, pool.resolve, "x").allowed == ("a:x", "b:x")


@pytest.mark.parametrize("together", [0, 3])
def test_more_models_together_than_there_are_is_refused(together):
    error = raised(RequestError, lambda: Pool((model("a"), model("b")), Settings(), together=together, make=toy))
    assert error.field == "together"
    with pytest.raises(RequestError, match=r"^together=\d: (has no effect with one model|must be between 1 and 1)$"):
        Pool((model("a"),), Settings(), together=together, make=toy)


# Answers --------------------------------------------------------------------------------------------------------------


def test_jobs_are_answered_and_counted():
    async def work(pool):
        texts = await asyncio.gather(*(ask(pool, "a", job(str(number))) for number in range(5)))
        assert pool.is_ready and pool.in_flight == 0
        return texts

    assert len(set(run(work=work))) == 1  # the toy says its process id


def test_a_job_that_is_left_is_cancelled():
    async def work(pool):
        stream = await begun(pool, "1")
        await stream.aclose()
        return pool.in_flight, pool._members["a"].supervisor.in_flight

    assert run(work=work) == (0, 0)


def test_more_than_the_queue_holds_is_refused_at_once_also_while_loading():
    async def work(pool):
        tasks = [asyncio.create_task(ask(pool, "a", job(str(number), "wait"))) for number in range(5)]
        await turns()
        with pytest.raises(QueueFullError) as caught:
            await ask(pool, "a", job("late"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await ask(pool, "a", job("again"))
        return caught.value.retry_after_s

    assert run(model(rows=2), work=work, queue_limit=3) >= 1


def test_a_deadline_counts_what_the_worker_never_answers():
    async def work(pool):
        with pytest.raises(DeadlineError):
            await ask(pool, "a", job("1", "wait", deadline_s=0.3))
        return pool.in_flight

    assert run(work=work) == 0


def test_the_jobs_of_one_request_share_its_time_and_the_error_names_the_whole_of_it():
    async def work(pool):
        await ask(pool, "a", job("1"))
        jobs, told = [job(str(number), "announced", deadline_s=0.2) for number in range(20)], []
        with pytest.raises(DeadlineError) as caught:
            async for event in in_turn(pool, "a", jobs):
                told.append(event)
        return caught.value.deadline_s, 0 < len(told) < 15  # each takes 0.1 s, and a worker has DEADLINE_SLACK_S

    assert run(work=work) == (0.2, True)


def test_a_worker_that_dies_is_named_and_the_next_job_is_answered():
    async def work(pool):
        with pytest.raises(WorkerError) as caught:
            await ask(pool, "a", job("1", "die"))
        assert caught.value.error["class"] == "WorkerDiedError"
        return await ask(pool, "a", job("2"))

    assert run(work=work)


def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again_later(monkeypatch):
    starts = []
    make = Told(fail=True)

    async def work(pool):
        supervisor = pool._members["a"].supervisor
        start = supervisor.start
        monkeypatch.setattr(supervisor, "start", lambda: (starts.append(1), start()))
        with pytest.raises((ModelFailedError, WorkerError)) as caught:
            await ask(pool, "a", job("1"))
        error = getattr(caught.value, "error", None) or {"class": "ModelFailedError", "message": str(caught.value)}
        assert error["class"] == "ModelFailedError" and "no model" in error["message"]
        await until_async(lambda: pool._members["a"].failed_at is not None)  # counted from the failure, not from the next request
        for number in range(3):
            with pytest.raises(ModelFailedError) as caught:
                await ask(pool, "a", job(f"at once {number}"))
            assert 26 - 9 * number < caught.value.retry_after_s <= 30 - 9 * number
            pool._members["a"].failed_at -= 9
        assert starts == [] and not pool.is_ready
        with pytest.raises(ModelFailedError):
            await pool.load_adapter("a", "x", "y")
        monkeypatch.setattr(slots, "FAILED_S", 0.0)
        supervisor.settings["fail"] = False
        return await ask(pool, "a", job("later"))

    assert run(work=work, make=make)
    assert starts == [1]


# Turns ----------------------------------------------------------------------------------------------------------------


def test_models_take_turns_and_never_live_together(monkeypatch):
    start, together = slots.Member.start, []

    async def work(pool):
        def noted(member):
            start(member)
            together.append(len(living(pool)))

        monkeypatch.setattr(slots.Member, "start", noted)
        texts = await asyncio.gather(*(ask(pool, name, job(f"{name}{i}")) for i in range(3) for name in "abc"))
        assert together == [1, 1]
        return texts

    texts = run(model("a"), model("b"), model("c"), work=work)
    # One process a model: what waits for a model is answered in one turn of it.
    assert len(set(texts)) == 3


def test_models_that_fit_live_together():
    async def work(pool):
        await asyncio.gather(*(ask(pool, name, job(name)) for name in "ab"))
        return living(pool)

    assert run(model("a"), model("b"), work=work, together=2) == ["a", "b"]


def test_a_busy_model_gives_its_place_up_when_its_turn_is_over():
    async def work(pool):
        stop = asyncio.Event()
        answered = []

        async def keep_busy(number):
            while not stop.is_set():
                answered.append(await ask(pool, "a", job(f"a{number}-{time.monotonic_ns()}")))

        busy = [asyncio.create_task(keep_busy(number)) for number in range(3)]
        await until_async(lambda: len(answered) > 10)
        await ask(pool, "b", job("b"))
        before = len(answered)
        await until_async(lambda: len(answered) > before + 3)  # and the first one comes back
        stop.set()
        await asyncio.gather(*busy)

    run(model("a"), model("b"), work=work, turn_s=0.3)


def test_a_running_answer_is_finished_before_its_model_goes(monkeypatch):
    monkeypatch.setattr(slots, "TICK_S", 0.01)

    async def work(pool):
        stream = await begun(pool, "long")
        turns_over = looks(pool)
        other = asyncio.create_task(ask(pool, "b", job("b")))
        await until_async(lambda: turns_over.count(True) >= 3)
        assert not other.done() and living(pool) == ["a"]
        await stream.aclose()
        return await other

    assert run(model("a"), model("b"), work=work, turn_s=0.0)


def test_one_that_leaves_while_it_waits_for_its_model_wants_nothing_more():
    async def work(pool):
        stream = await begun(pool, "long")
        other = asyncio.create_task(ask(pool, "b", job("b")))
        await until_async(lambda: pool._members["b"].waiting == 1)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        member = pool._members["b"]
        assert (member.waiting, member.wanted_since) == (0, None)
        assert await ask(pool, "a", job("next"))  # nobody waits: the turn goes on
        await stream.aclose()
        return living(pool)

    assert run(model("a"), model("b"), work=work, turn_s=0.1) == ["a"]


def test_the_time_to_wait_for_a_turn_counts_for_the_deadline():
    async def work(pool):
        stream = pool.submit("a", job("long", "speak, then wait"))
        await stream.__anext__()
        with pytest.raises(DeadlineError):
            await ask(pool, "b", job("b", deadline_s=0.2))
        await stream.aclose()

    run(model("a"), model("b"), work=work)


def test_an_idle_model_is_stopped_and_comes_back_when_it_is_asked(monkeypatch):
    monkeypatch.setattr(slots, "TICK_S", 0.05)

    async def work(pool):
        first = await ask(pool, "a", job("1"))
        await until_async(lambda: living(pool) == [])
        assert pool.is_ready  # it would answer
        return first, await ask(pool, "a", job("2"))

    first, second = run(model(idle_unload_s=0.2), work=work)
    assert first != second


def test_the_time_of_a_load_is_not_idle(monkeypatch):
    supervisor = SimpleNamespace(state="loading", plan=None)
    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=lambda: now))
    now, idle = 1.0, []
    member = slots.Member(model(idle_unload_s=3.0), supervisor, {}, last_used=now)
    for at, state in ((9, "loading"), (10, "ready"), (12, "ready"), (13, "restarting"), (20, "ready"), (21, "ready")):
        now, supervisor.state = float(at), state
        idle.append(member.idle_s)
    assert idle == [0.0, 0.0, 2.0, 0.0, 0.0, 1.0]
    member.last_used = 20.5
    assert member.idle_s == 0.5


@pytest.mark.parametrize(("options", "rows"), [({}, 32), ({"rows": 4}, 4), ({"rows": 4, "copies": 3}, 12)])
def test_the_most_jobs_are_those_of_the_plan_as_soon_as_there_is_one(options, rows):
    pool = Pool([model(**options)], Settings(queue_limit=5), make=toy)
    assert pool.most_jobs("a") == rows + 5
    pool._members["a"].supervisor.plan = {"request": {"batch": 8}}
    assert pool.most_jobs("a") == 8 * options.get("copies", 1) + 5


def test_requests_that_meet_an_idle_stop_are_answered(monkeypatch):
    monkeypatch.setattr(slots, "TICK_S", 0.01)

    async def work(pool):
        member = pool._members["a"]
        stop, is_stopping, is_asked = member.supervisor.stop, threading.Event(), threading.Event()

        def stop_once_asked():
            is_stopping.set()
            assert is_asked.wait(60)
            stop()

        monkeypatch.setattr(member.supervisor, "stop", stop_once_asked)
        assert await ask(pool, "a", job("1"))
        await until_async(is_stopping.is_set)
        meeting = asyncio.create_task(ask(pool, "a", job("2")))
        await until_async(lambda: member.waiting)
        is_asked.set()
        assert await meeting

    run(model(idle_unload_s=0.05), work=work)


# Ends -----------------------------------------------------------------------------------------------------------------


def test_a_pool_that_stops_takes_nothing_new_and_refuses_what_waits():
    async def work(pool):
        stream = await begun(pool, "long")
        waiting = asyncio.create_task(ask(pool, "b", job("b")))
        await until_async(lambda: pool._members["b"].waiting == 1)
        pool.refuse_new()
        with pytest.raises(StoppingError):
            await waiting
        with pytest.raises(StoppingError):
            await ask(pool, "a", job("new"))
        assert not pool.is_ready and pool.in_flight == 1
        await stream.aclose()

    run(model("a"), model("b"), work=work)


def test_draining_tells_what_is_still_being_answered():
    async def work(pool):
        stream = await begun(pool, "long")
        pool._members["a"].supervisor._life.process.kill()
        await pool.drain(0.1)
        return [event.kind async for event in stream]

    assert run(work=work) == ["error"]


# Adapters -------------------------------------------------------------------------------------------------------------


def test_what_the_operator_named_stays():
    async def work(pool):
        for name in ("own", "kept"):
            with pytest.raises(RequestError) as caught:
                await pool.unload_adapter("a", name)
            assert (caught.value.field, caught.value.value) == ("lora_name", name) and "stays" in str(caught.value)
            assert pool.resolve(name) == ("a", name)
        await pool.load_adapter("a", "theirs", "/theirs")
        with pytest.raises(UnknownModelError) as unknown:
            await pool.unload_adapter("a", "typo")
        assert unknown.value.allowed == ("theirs",)  # the only one that can be unloaded
        return pool.status()["models"][0]["named"]

    assert run(model(adapters={"own": "/own", "kept": "/kept"}, kept=("kept",)), work=work) == ["kept", "own"]


def test_adapters_come_and_go():
    async def work(pool):
        await pool.load_adapter(None, "x", "/x")
        assert pool.resolve("x") == ("a", "x") and pool._members["a"].adapters == {"x": "/x"}
        for name, field in (("x", "lora_name"), ("a", "lora_name")):
            with pytest.raises(RequestError) as caught:
                await pool.load_adapter("a", name, "/x")
            assert caught.value.field == field
        await pool.unload_adapter("a", "x")
        with pytest.raises(UnknownModelError):
            pool.resolve("x")
        with pytest.raises(RequestError) as caught:
            await pool.unload_adapter("a", "x")
        assert caught.value.field == "lora_name"
        return pool.in_flight

    assert run(work=work) == 0


def test_with_several_models_an_adapters_model_has_to_be_said():
    async def work(pool):
        with pytest.raises(RequestError) as caught:
            await pool.load_adapter(None, "x", "/x")
        assert caught.value.allowed == ("a", "b")
        with pytest.raises(UnknownModelError):
            await pool.load_adapter("c", "x", "/x")
        await pool.load_adapter("b", "x", "/x")  # its worker is started for it
        return pool.resolve("x")

    assert run(model("a"), model("b"), work=work) == ("b", "x")


def test_the_status_has_every_model_and_its_numbers():
    async def work(pool):
        await ask(pool, "a", job("1"))
        await pool.refresh()
        first, second = pool.status()["models"]
        assert (first["name"], first["state"], first["takes"]) == ("a", "ready", ("text", "image"))
        assert (second["name"], second["state"], second["plan"], second["tier_bytes"]) == ("b", "stopped", None, {})
        assert first["numbers"] == {"what": "numbers"}

    run(model("a", supports=("image",)), model("b"), work=work)


def test_numbers_are_requested_unread_where_a_refusal_or_the_next_reader_needs_them(monkeypatch):
    monkeypatch.setattr(slots, "NUMBERS_S", 0.02)

    async def is_asked(pool, member, why):
        asked, knows_step, is_late = [], why != "no step is known", why == "they come too late"

        def call(what):
            asked.append(Future())
            if not is_late:
                asked[-1].set_result(None)
            return asked[-1]

        member.supervisor.call, member.supervisor.numbers = call, {"counts": {"steps": 64 * knows_step, "step_s": 3.0}}
        await ask(pool, "a", job(f"an embedding, {why}", kind="embedding"))
        assert not asked  # it takes no step, and the keeper asks once a tick
        await ask(pool, "a", job(f"after {why}"))
        assert bool(asked) != knows_step and member.retry_after_s == (3.0 if knows_step else 5.0)
        monkeypatch.setattr(slots, "TICK_S", 0.01)
        await pool.refresh()
        if is_late:
            asked[0].set_result(None)
        known, member.in_flight = len(asked), {"requests wait": member.served.expected_rows + 1}.get(why, not is_late)
        looked = looks(pool)
        await until_async(lambda: len(looked) >= 4)
        member.in_flight = 0
        return len(asked) > known

    async def work(pool):
        await ask(pool, "a", job("1"))
        member = pool._members["a"]
        await until_async(member.numbers.done)
        whys = ("no step is known", None, "requests wait", "they come too late")
        return [why for why in whys if await is_asked(pool, member, why)]

    assert run(work=work) == ["no step is known", "requests wait", "they come too late"]


def test_the_status_says_nothing_of_a_worker_that_is_gone():
    block = {"part": "vision", "tier": "stream", "gpu_bytes": 1, "host_bytes": 5, "disk_bytes": 0}
    plan = {
        **dict.fromkeys(slots.SHOWN, 0), "placements": [block],
        "request": {"model": "x", "quant": "none", "context_tokens": 1, "batch": 1},
    }  # fmt: skip

    async def work(pool):
        await ask(pool, "a", job("1"))
        supervisor = pool._members["a"].supervisor
        supervisor.plan, supervisor.numbers = plan, {"resident": ["x"]}
        states = []
        for change in (lambda: None, supervisor.stop, lambda: supervisor._become("restarting")):
            change()
            (shown,) = pool.status()["models"]
            states.append((shown["state"], shown["numbers"], shown["tier_bytes"], shown["plan"]["placements"]))
        return states

    assert run(work=work) == [
        ("ready", {"resident": ["x"]}, {"stream": 6}, [block]), ("stopped", {}, {"stream": 0}, [block]),
        ("restarting", {}, {"stream": 0}, [block]),
    ]  # fmt: skip


def test_a_mistake_of_the_keeper_does_not_end_it(monkeypatch, caplog):
    monkeypatch.setattr(slots, "TICK_S", 0.02)

    async def work(pool):
        broken = iter([True])
        give = pool.slots._give_places

        async def give_once():
            if next(broken, False):
                raise ValueError("oops")
            await give()

        pool.slots._give_places = give_once
        return await ask(pool, "b", job("1"))

    assert run(model("a"), model("b"), work=work)
    assert "oops" in caplog.text


def test_what_the_system_refuses_is_tried_again_after_a_pause(monkeypatch):
    """A start in vain changes the state twice, and each change wakes the keeper."""
    starts = []
    monkeypatch.setattr(slots, "TICK_S", 0.05)

    def refused():
        starts.append(time.monotonic())
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    async def work(pool):
        await ask(pool, "a", job("1"))
        supervisor = pool._members["a"].supervisor
        with monkeypatch.context() as patched:
            patched.setattr(supervisor, "_start_life", refused)
            await asyncio.to_thread(supervisor.stop)
            waiting = asyncio.create_task(ask(pool, "a", job("2")))
            await until_async(lambda: len(starts) >= 4)
            assert all(later - earlier >= 0.05 for earlier, later in pairwise(starts))
        return await waiting

    assert run(work=work)


def test_the_pool_leaves_no_process_behind():
    pids = []

    async def work(pool):
        pids.append(int(await ask(pool, "a", job("1"))))

    run(work=work)
    with pytest.raises(OSError):
        os.kill(pids[0], 0)


def test_what_a_supervisor_refuses_leaves_no_count():
    async def work(pool):
        await ask(pool, "a", job("1"))
        supervisor = pool._members["a"].supervisor
        supervisor.submit = lambda *_: (_ for _ in ()).throw(DeviceError("no", device="worker"))
        with pytest.raises(DeviceError):
            await ask(pool, "a", job("2"))
        return pool.in_flight

    assert run(work=work) == 0


def test_the_list_of_models_says_which_output_head_answers_and_in_what_form_keys_and_values_are():
    async def work(pool):
        await ask(pool, "a", job("1"))
        pool._members["a"].supervisor.plan = {"execution": {"head": "int8"}, "request": {"kv": "int8"}}
        return [(entry["id"], entry.get("output_head"), entry.get("kv")) for entry in pool.models()]

    assert run(model("a"), model("b"), work=work) == [("a", "int8", "int8"), ("b", None, None)]


def test_workers_that_began_before_the_loop_are_not_started_again():
    started = []

    class Broken(Supervisor):
        """A worker that has failed before the loop runs."""

        def start(self):
            started.append(self.settings["request"]["model"])
            self.state = "failed"

    pool = Pool((model("a"), model("b")), Settings(), make=Broken)
    pool.begin()
    assert len(started) == 1

    async def loop_runs():
        await pool.start()
        await pool.drain(0.0)

    asyncio.run(loop_runs())
    assert len(started) == 1
