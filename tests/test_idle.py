"""Tuning in idle time: only when it is quiet, a candidate at a time, given up at once, and never an end of the worker."""

import threading

import pytest

from trimtab.serve.idle import QUIET_S, IdleTuning


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Card:
    """Records what is compiled, timed, kept and given back. broken: a candidate whose timing fails."""

    def __init__(self, products=2, candidates=3, broken=None):
        self.log, self.clock, self.broken = [], Clock(), broken
        self.tuning = IdleTuning(
            [lambda number=number: self.trial(number, candidates) for number in range(products)],
            compile=lambda number, candidate: self.log.append(("compile", number, candidate)),
            keep=lambda: self.log.append("keep"), close=lambda: self.log.append("close"), clock=self.clock,
        )  # fmt: skip

    def trial(self, number, candidates):
        for candidate in range(candidates):
            yield candidate
            if (number, candidate) == self.broken:
                raise RuntimeError("out of memory")
            self.log.append(("time", number, candidate))

    def step(self):
        """Take one step, and wait for what it compiles."""
        self.tuning.step()
        if self.tuning._thread is not None:
            self.tuning._thread.join()

    def wait(self):
        self.clock.now += QUIET_S


def test_nothing_happens_before_it_is_quiet():
    card = Card()
    card.step()
    card.clock.now += QUIET_S - 0.1
    card.step()
    assert card.log == []
    card.clock.now += 0.1
    card.step()
    assert card.log == [("compile", 0, 0)]


def test_each_step_is_one_candidate_and_each_product_is_kept_when_it_is_done():
    card = Card(products=2, candidates=2)
    card.wait()
    seen = []
    while not card.tuning.is_over:
        before = len(card.log)
        card.step()
        seen.append(len(card.log) - before)
    assert card.log == [
        ("compile", 0, 0), ("time", 0, 0), ("compile", 0, 1), ("time", 0, 1), "keep",
        ("compile", 1, 0), ("time", 1, 0), ("compile", 1, 1), ("time", 1, 1), "keep", "close",
    ]  # fmt: skip
    assert max(seen) <= 3
    card.step()
    assert card.log[-1] == "close"


def test_a_request_gives_the_product_up_and_it_begins_anew_later():
    card = Card(products=1, candidates=2)
    card.wait()
    card.step()
    card.step()
    card.tuning.disturb()
    card.step()
    assert card.log == [("compile", 0, 0), ("time", 0, 0), ("compile", 0, 1)]
    card.wait()
    while not card.tuning.is_over:
        card.step()
    assert card.log[3:] == [
        ("compile", 0, 0), ("time", 0, 0), ("compile", 0, 1), ("time", 0, 1), "keep", "close",
    ]  # fmt: skip


def test_a_candidate_is_not_timed_while_it_is_being_compiled():
    card = Card(products=1)
    card.wait()
    running = type("Thread", (), {"is_alive": lambda self: True, "join": lambda self: None})()
    card.tuning._thread = running
    card.tuning.step()
    assert card.log == []


@pytest.mark.parametrize("broken", [(0, 0), (1, 2)])
def test_an_error_ends_the_tuning_and_nothing_else(broken, capsys, caplog):
    card = Card(broken=broken)
    card.wait()
    for _ in range(20):
        card.step()
    assert card.tuning.is_over and card.log[-1] == "close" and card.log.count("close") == 1
    assert card.log.count("keep") == broken[0]
    # A test before may have set up the server's log, whose lines go to stderr and no farther.
    assert "out of memory" in caplog.text + capsys.readouterr().err


def test_a_thread_that_does_not_start_ends_the_tuning_and_nothing_else(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    card = Card()
    card.wait()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    card.tuning.step()
    assert card.tuning.is_over and card.log == ["close"]


def test_the_end_of_the_worker_gives_back_what_was_taken_once():
    card = Card()
    card.wait()
    card.step()
    card.tuning.end()
    card.tuning.end()
    assert card.log == [("compile", 0, 0), "close"]


def test_nothing_to_tune_is_over_at_once():
    assert Card(products=0).tuning.is_over
