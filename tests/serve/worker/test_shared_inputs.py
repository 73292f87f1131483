"""One prompt of several choices: made once, given to each, and dropped with the last one."""

import gc
import weakref
from concurrent.futures import Future

import pytest

from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.worker.prompt_inputs import SharedInputs


class Inputs:
    pass


class Maker:
    def __init__(self):
        self.made = []

    def __call__(self, job):
        self.made.append(Future())
        return self.made[-1]


@pytest.fixture
def maker():
    return Maker()


def job(group):
    return Job("a", {"text": "a"}, GenerateRequest(), group=group)


def test_choices_of_one_request_share_their_inputs_and_others_do_not(maker):
    shared = SharedInputs(maker)
    first, second, other, single = (shared.submit(job(group)) for group in ("g", "g", "h", ""))
    again = shared.submit(job(""))
    assert len(maker.made) == 4 and single is maker.made[2] and again is maker.made[3]
    maker.made[0].set_result("inputs")
    late = shared.submit(job("g"))
    assert [one.result(0) for one in (first, second, late)] == ["inputs"] * 3 and not other.done()
    assert len(maker.made) == 4


def test_every_choice_has_the_error(maker):
    shared = SharedInputs(maker)
    futures = [shared.submit(job("g")) for _ in range(3)]
    maker.made[0].set_exception(RequestError("cannot be decoded", field="messages"))
    assert {future.exception(0).field for future in futures} == {"messages"} and len(maker.made) == 1


def test_a_choice_that_leaves_takes_nothing_from_the_others_and_the_last_one_ends_the_work(maker):
    shared = SharedInputs(maker)
    first, second = shared.submit(job("g")), shared.submit(job("g"))
    assert first.cancel() and not maker.made[0].cancelled()
    assert second.cancel() and maker.made[0].cancelled()
    third = shared.submit(job("g"))
    maker.made[1].set_result("inputs")
    assert third.result(0) == "inputs" and first.cancelled()


def test_work_that_runs_though_all_have_left_ends_quietly(maker):
    shared = SharedInputs(maker)
    futures = [shared.submit(job("g")) for _ in range(2)]
    assert maker.made[0].set_running_or_notify_cancel()
    assert all(future.cancel() for future in futures)
    maker.made[0].set_result("inputs")
    assert all(future.cancelled() for future in futures)


@pytest.mark.parametrize("leaves", [False, True])
def test_inputs_are_dropped_with_the_last_choice_without_a_collection(maker, leaves):
    shared, inputs = SharedInputs(maker), Inputs()
    dropped = weakref.ref(inputs)
    futures = [shared.submit(job("g")) for _ in range(3)]
    gc.disable()
    try:
        if leaves:
            futures[1].cancel()
        maker.made.pop().set_result(inputs)
        del inputs
        assert dropped() is not None
        del futures[0]
        assert dropped() is not None
        futures.clear()
        assert dropped() is None
    finally:
        gc.enable()
