"""The order in which adapters are prepared: what somebody waits for first, whoever came when."""

import pytest

from trimtab.serve.adapters.new_adapters import AdapterQueue, Unprepared, Urgency


def entry(log, name, urgency, *, pieces=2, names=(), fails=False):
    def compute():
        for number in range(pieces):
            log.append(f"{name}{number}")
            yield
        if fails:
            raise ValueError(name)

    def finish(work):
        try:
            work()
        except ValueError as exc:
            log.append(f"{exc} failed")

    return Unprepared(compute(), finish, lambda: log.append(f"{name} ready"), urgency, set(names))


def nobody(name):
    return False


def run(queue, is_needed=nobody):
    while queue:
        queue.step(is_needed)


def test_who_is_waited_for_comes_before_changed_files_and_those_before_the_start():
    log, queue = [], AdapterQueue()
    queue.add(entry(log, "s", Urgency.START))
    queue.step(nobody)
    queue.add(entry(log, "c", Urgency.CHANGED))
    queue.add(entry(log, "x", Urgency.AWAITED))
    queue.add(entry(log, "y", Urgency.AWAITED))
    run(queue)
    assert log == ["s0", "x0", "x1", "x ready", "y0", "y1", "y ready", "c0", "c1", "c ready", "s1", "s ready"]


def test_an_adapter_that_a_request_needs_comes_first_as_long_as_it_is_needed():
    log, needed = [], set()
    queue = AdapterQueue()
    for name in ("s", "t"):
        queue.add(entry(log, name, Urgency.START, names={name}))
    needed.add("t")
    queue.step(needed.__contains__)
    needed.clear()
    run(queue)
    assert log == ["t0", "s0", "s1", "s ready", "t1", "t ready"]


def test_pieces_for_requests_alone_are_those_of_adapters_that_a_request_needs():
    log, needed = [], {"t"}
    queue = AdapterQueue()
    for name, urgency in (("s", Urgency.START), ("t", Urgency.START), ("c", Urgency.CHANGED), ("x", Urgency.AWAITED)):
        queue.add(entry(log, name, urgency, names={name} if urgency is Urgency.START else ()))
    for _ in range(10):
        queue.step(needed.__contains__, only_for_requests=True)
    assert log == ["t0", "t1", "t ready"]
    run(queue, needed.__contains__)
    assert log[3:6] == ["x0", "x1", "x ready"]


def test_one_that_fails_is_finished_with_its_error_and_the_next_goes_on():
    log, queue = [], AdapterQueue()
    queue.add(entry(log, "x", Urgency.AWAITED, fails=True))
    queue.add(entry(log, "y", Urgency.AWAITED, pieces=0))
    run(queue)
    assert log == ["x0", "x1", "x failed", "y ready"]
    queue.step(nobody)  # nothing is left


@pytest.mark.parametrize("names", [{"s"}, {"s", "again"}])
def test_an_unloaded_adapter_is_prepared_only_for_its_other_names(names):
    log, queue = [], AdapterQueue()
    queue.add(entry(log, "s", Urgency.START, names=names))
    assert queue.has("s")
    queue.forget("s")
    assert not queue.has("s") and queue.has("again") == bool(queue) == (len(names) == 2)


def test_changed_files_of_an_unloaded_or_changed_again_adapter_are_never_used():
    used = []

    def changed(name, what):
        return Unprepared(iter([None]), lambda work: work(), lambda: used.append(what), Urgency.CHANGED, replaces=name)

    queue = AdapterQueue()
    for one in (changed("a", "a1"), changed("b", "b1"), changed("a", "a2")):
        queue.add(one)
    queue.forget_changed("b")
    while queue:
        queue.step(nobody)
    assert used == ["a2"]
