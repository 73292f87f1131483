"""When a worker counts as unresponsive, and when it is ended: on told seconds, with told signs of work."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import waiting
from tests.serve.scheduling.test_scheduler import Clock
from trimtab.process.runner import Activity, activity_of
from trimtab.serve.worker.ipc import FIRST_S, LEAST_S, MOST_S, Patience, Pulse, Silence

PATIENCE = Patience()
LOOK_S = PATIENCE.look_s


class Worker:
    """A silent worker: `load` is the share of a core that it uses, None while it is stopped."""

    def __init__(self, load=0.0, reads=0.0, **silence):
        self.now = self.cpu_s = self.read = 0.0
        self.load, self.reads = load, reads
        self.silence = Silence(silence.pop("patience", PATIENCE), self.work)

    def work(self):
        return None if self.load is None else Activity(self.cpu_s, int(self.read))

    def until(self, is_true, *, most_s=2000.0, look_s=LOOK_S, is_loading=False):
        """Return the seconds until something is true, None if it never is."""
        while self.now < most_s:
            self.now += look_s
            self.cpu_s += (self.load or 0.0) * look_s
            self.read += self.reads * look_s
            self.silence.looked(look_s)
            if is_true(self.silence.is_over(is_loading=is_loading)):
                return self.now
        return None

    def ended_after_s(self, **options):
        return self.until(lambda is_over: is_over, **options)

    def unresponsive_after_s(self):
        return self.until(lambda _: self.silence.is_unresponsive)


def test_a_silent_worker_is_not_ready_within_5_s_and_ended_within_30():
    for load in (0.0, None):
        worker = Worker(load)
        assert worker.unresponsive_after_s() < 5 and worker.ended_after_s() < 30


def test_a_worker_that_beats_is_ready():
    worker = Worker()
    for _ in range(1000):
        assert worker.until(lambda _: True) and not worker.silence.is_unresponsive
        worker.silence.heard()


@pytest.mark.parametrize(("load", "reads"), [(0.3, 0), (0.0, 4096)])
def test_a_slow_machine_ends_no_worker_that_computes_or_reads(load, reads):
    worker = Worker(load, reads)
    assert worker.ended_after_s(most_s=290) is None and worker.silence.is_unresponsive
    worker.silence.heard()
    assert not worker.silence.is_unresponsive
    # Without end it is a loop that nobody waits for.
    assert Worker(load, reads).ended_after_s() == pytest.approx(PATIENCE.most_s, abs=1)


def test_a_worker_that_stops_computing_is_ended():
    worker = Worker(1.0)
    assert worker.ended_after_s(most_s=60) is None
    worker.load = 0.0
    assert worker.ended_after_s() - 60 < 2 * PATIENCE.restart_s


def test_announced_work_is_neither_unready_nor_ended_within_its_bound():
    worker = Worker()
    worker.silence.announced(120.0)
    assert worker.unresponsive_after_s() == pytest.approx(120, abs=1)
    assert worker.ended_after_s() < 120 + 2 * LOOK_S + PATIENCE.restart_s
    worker.silence.heard()  # the bound was of that work alone
    assert worker.unresponsive_after_s() - worker.now < 5


def test_shorter_work_within_long_work_keeps_its_bound():
    worker = Worker()
    worker.silence.announced(100.0)
    worker.until(lambda _: worker.now >= 40)
    worker.silence.announced(30.0)
    assert worker.unresponsive_after_s() == pytest.approx(100, abs=1)


def test_time_in_which_this_process_was_stopped_too_does_not_count():
    """A suspended laptop: both go on, and the first look comes hours late."""
    worker = Worker()
    for _ in range(3):
        worker.silence.looked(10_000.0)
        assert not worker.silence.is_over(is_loading=False)
    assert not worker.silence.is_unresponsive


def test_a_worker_that_loads_has_more_time():
    assert Worker().ended_after_s(is_loading=True) == pytest.approx(PATIENCE.loading_s, abs=1)


def test_work_is_announced_where_it_is_expected_to_be_long_or_not_known():
    sent, clock = [], Clock()
    pulse = Pulse(sent.append, now=clock)

    def run(units, seconds):
        sent.clear()
        with pulse.work("a prompt", units):
            clock.now += seconds
        return [message["most_s"] for message in sent]

    clock.now = 1.0
    assert run(16, 0.16) == [FIRST_S] and run(64, 0.64) == []
    assert run(1024, 60.0) == [pytest.approx(102.4)]  # 10 ms a token, and ten times that
    assert run(2, 0.02) == [] and run(1024, 0.1) == [pytest.approx(0.9 * 600)] and run(10**6, 0.1) == [MOST_S]
    with pytest.raises(ValueError, match="failed"), pulse.work("fails"):
        raise ValueError("failed")
    pulse.unit_s["slow"] = 1.5
    sent.clear()
    with pulse.work("slow"):
        pass
    assert sent == [{"say": "busy", "what": "slow", "most_s": LEAST_S}] and "fails" not in pulse.unit_s


def test_signs_of_work_are_the_processes_own():
    before = activity_of(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert activity_of(os.getpid()).is_more(before, 0.5)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        first = activity_of(child.pid)
        assert first is not None and not first.is_more(first, 1.0)
        if hasattr(signal, "SIGSTOP"):
            child.send_signal(signal.SIGSTOP)
            waiting.until(lambda: activity_of(child.pid) is None)
            child.send_signal(signal.SIGCONT)
        child.communicate(b"\n")
    assert activity_of(child.pid) is None
