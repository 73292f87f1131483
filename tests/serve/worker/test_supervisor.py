"""A worker that dies loses no answer: every job ends in an answer or a named error, and the worker comes back."""

import errno
import os
import queue
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import pytest

from tests import toy_worker, waiting
from tests.raised import raised
from trimtab.request import GenerateRequest
from trimtab.serve.contract.errors import error_json, error_response
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.scheduler import StoppingError
from trimtab.serve.worker.ipc import Patience, exit_code_of
from trimtab.serve.worker.supervisor import ModelFailedError, Supervisor, WorkerDiedError, WorkerError

WAIT_S = 30
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def job(name, prompt):
    return Job(name, prompt, GenerateRequest(max_new_tokens=4))


def loaded(supervisor):
    """Wait until a worker has loaded its model, or cannot; return the supervisor."""
    waiting.until(lambda: supervisor.state in ("ready", "failed"), WAIT_S)
    return supervisor


@pytest.fixture
def start():
    """Return a function that starts a supervisor of the toy, ready unless it is not waited for; all are stopped at the end."""

    def start_one(settings=None, *, is_waited_for=True, **options):
        made = Supervisor({"adapters": {}, **(settings or {})}, target=toy_worker.main, **options)
        stops.callback(made.stop)  # each is stopped though another's stop raises
        made.start()
        return loaded(made) if is_waited_for else made

    with ExitStack() as stops:
        yield start_one


@pytest.fixture
def supervisor(start):
    return start({"name": "demo"})


def ask(supervisor, *jobs):
    """Submit jobs; returns a queue of what they are told."""
    told = queue.Queue()
    for one in jobs:
        supervisor.submit(one, told.put)
    return told


def ends(told, count):
    found = {}
    while len(found) < count:
        event = told.get(timeout=WAIT_S)
        if event.kind in ("done", "error"):
            found[event.job_id] = event
    return found


def test_a_job_is_told_what_the_worker_says(supervisor):
    told = ask(supervisor, job("1", "echo"))
    assert [told.get(timeout=WAIT_S).kind for _ in range(3)] == ["started", "text", "done"]
    assert supervisor.in_flight == 0
    assert (supervisor.state, supervisor.loading, supervisor.restarts) == ("ready", (1, 2), 0)
    assert supervisor.phase == ("loading", "1 of 2 GiB")


def test_a_job_that_cannot_be_written_is_answered_and_the_next_one_is_sent(supervisor):
    endless = []
    endless.append(endless)
    for prompt in ([10**5000], endless):  # a number that Python does not write, and a list that contains itself
        found = ends(ask(supervisor, job("odd", prompt), job("next", "echo")), 2)
        assert found["odd"].error["class"] == "MistakeError" and found["next"].kind == "done"
    call = supervisor.call("numbers", odd=10**5000)
    with pytest.raises(WorkerError):
        call.result(WAIT_S)
    assert supervisor.in_flight == 0 and not supervisor.work.calls and supervisor.restarts == 0


def test_jobs_wait_while_the_worker_loads(start):
    assert ends(ask(start(is_waited_for=False), job("1", "echo")), 1)["1"].kind == "done"


def test_a_killed_worker_is_told_at_once_and_comes_back(supervisor, caplog):
    caplog.set_level("INFO", logger="trimtab.serve")
    pid = supervisor.pid
    told = ask(supervisor, job("1", "wait"), job("2", "speak, then wait"))
    assert told.get(timeout=WAIT_S).text == "so far"
    os.kill(pid, KILL)
    start = time.monotonic()
    found = ends(told, 2)
    assert time.monotonic() - start < WAIT_S / 2
    for event in found.values():
        assert event.error["class"] == WorkerDiedError.__name__ and event.error["fields"]["exit_code"] == -KILL
        assert "SIGKILL" in event.error["message"] or os.name != "posix"
    assert ends(ask(supervisor, job("3", "echo")), 1)["3"].kind == "done" and supervisor.restarts == 1 and supervisor.pid != pid
    ended, ready = caplog.records
    assert ended.levelname == "ERROR" and ended.getMessage().endswith(", and starts again")
    assert ended.fields == {"model": "demo", "worker_pid": pid, "lost_requests": 2}
    assert (ready.levelname, ready.fields) == ("INFO", {"model": "demo"})
    supervisor.stop()
    assert len(caplog.records) == 2  # a stop is not a death


def test_with_retry_what_has_said_nothing_yet_is_answered_by_the_next_worker(start):
    supervisor = start(retry=True)
    told = ask(supervisor, job("spoke", "speak, then wait"), job("silent", "wait"))
    assert told.get(timeout=WAIT_S).text == "so far"
    supervisor.work.flights["silent"].job = job("silent", "echo")
    os.kill(supervisor.pid, KILL)
    found = ends(told, 2)
    assert (found["spoke"].kind, found["silent"].kind) == ("error", "done")


def test_a_job_that_kills_the_worker_twice_is_given_up(start):
    supervisor = start(retry=True)
    event = ends(ask(supervisor, job("1", "die")), 1)["1"]
    assert (event.kind, event.error["fields"]["exit_code"]) == ("error", 7)
    assert ends(ask(supervisor, job("2", "echo")), 1)["2"].kind == "done" and supervisor.restarts == 2


def test_a_worker_that_hangs_with_work_is_killed(start):
    supervisor = start(patience=Patience(unresponsive_s=0.5, restart_s=1.0))
    assert ends(ask(supervisor, job("1", "hang")), 1)["1"].error["class"] == WorkerDiedError.__name__
    assert ends(ask(supervisor, job("2", "echo")), 1)["2"].kind == "done"


def test_a_model_that_cannot_be_loaded_is_a_failure_and_not_tried_again(start):
    supervisor = start({"fail": True})
    assert (supervisor.failure["class"], supervisor.state, supervisor.restarts) == ("CheckpointError", "failed", 0)
    error = raised(ModelFailedError, lambda: supervisor.submit(job("1", "echo"), print))
    assert "no model" in str(error)
    response = error_response(*error_json(error.to_dict()))
    assert response.status_code == 503 and response.headers["retry-after"] == "30"


def test_a_model_that_was_unloaded_and_cannot_be_loaded_again_fails_at_once(start, tmp_path, caplog):
    supervisor = start({"fail_after": str(tmp_path / "mark")})
    supervisor.stop()
    (tmp_path / "mark").touch()
    supervisor.start()
    error = ends(ask(supervisor, job("1", "echo")), 1)["1"].error
    assert (error["class"], "no model" in error["message"]) == ("ModelFailedError", True)
    assert (supervisor.state, supervisor.restarts) == ("failed", 0) and "starts again" not in caplog.text
    (tmp_path / "mark").unlink()
    supervisor.start()
    assert ends(ask(supervisor, job("2", "echo")), 1)["2"].kind == "done"


def test_a_worker_that_keeps_dying_is_given_up_in_the_end(start, tmp_path, monkeypatch):
    monkeypatch.setattr("trimtab.serve.worker.supervisor.PAUSES_S", (0.0, 0.0))
    mark = tmp_path / "mark"
    supervisor = start({"die_at_start_after": str(mark)})
    mark.touch()
    told = ask(supervisor, job("1", "wait"))
    os.kill(supervisor.pid, KILL)
    assert ends(told, 1)["1"].kind == "error" and ends(ask(supervisor, job("2", "echo")), 1)["2"].kind == "error"
    assert supervisor.state == "failed"


def test_what_no_worker_was_given_yet_outlives_those_that_die_while_loading(start, tmp_path):
    mark = tmp_path / "mark"
    supervisor = start({"die_at_start_after": str(mark)})
    mark.touch()
    os.kill(supervisor.pid, KILL)
    waiting.until(lambda: supervisor.state != "ready")
    told = ask(supervisor, job("1", "echo"))
    waiting.until(lambda: supervisor.restarts >= 2)
    mark.unlink()
    assert ends(told, 1)["1"].kind == "done"


@pytest.mark.parametrize("refused", ["process", "thread"])
def test_a_worker_that_the_system_does_not_start_at_once_is_started_later(supervisor, refused, monkeypatch):
    owner = BaseProcess if refused == "process" else threading.Thread
    start, processes = owner.start, []

    def fail_once(self):
        if refused == "process":
            monkeypatch.setattr(owner, "start", start)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if self.name == "trimtab-hear":
            processes.append(self._args[0].process)
            monkeypatch.setattr(owner, "start", start)
            raise RuntimeError("can't start new thread")
        start(self)

    pid = supervisor.pid
    monkeypatch.setattr("trimtab.serve.worker.supervisor.PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(owner, "start", fail_once)
    os.kill(pid, KILL)
    waiting.until(lambda: supervisor.restarts)
    assert ends(ask(supervisor, job("1", "echo")), 1)["1"].kind == "done" and supervisor.pid != pid and owner.start is start
    assert all(exit_code_of(process, WAIT_S) == -KILL for process in processes)  # nobody would end it


def test_a_worker_that_the_system_does_not_start_can_be_started_again(monkeypatch):
    def fail(self):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    supervisor = Supervisor({"adapters": {}}, target=toy_worker.main)
    with monkeypatch.context() as patched:
        patched.setattr(BaseProcess, "start", fail)
        with pytest.raises(BlockingIOError):
            supervisor.start()
    assert supervisor.state == "stopped"  # a pool starts what is stopped and asked for
    supervisor.start()
    try:
        assert loaded(supervisor).state == "ready"
    finally:
        supervisor.stop()


def test_a_worker_that_hangs_in_a_call_is_killed(start):
    supervisor = start(patience=Patience(unresponsive_s=0.5, restart_s=1.0))
    assert supervisor.call("numbers").result(WAIT_S)
    assert "did not respond" in str(raised(WorkerDiedError, lambda: supervisor.call("hang").result(WAIT_S)))
    assert ends(ask(supervisor, job("2", "echo")), 1)["2"].kind == "done" and supervisor.restarts == 1


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows has no SIGSTOP")
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stopped_worker_is_not_ready_and_is_put_back(start, is_asked):
    """With and without work: the next client would wait for it."""
    supervisor = start(patience=Patience(unresponsive_s=0.3, restart_s=0.9))
    told = ask(supervisor, *[job("running", "wait")] * is_asked)
    pid = supervisor.pid
    os.kill(pid, signal.SIGSTOP)
    waiting.until(lambda: supervisor.state == "unresponsive")
    assert supervisor.pid == pid  # it may go on
    late = ask(supervisor, job("late", "echo"))
    if is_asked:
        error = ends(told, 1)["running"].error
        assert error["class"] == "WorkerDiedError" and "did not respond for" in error["message"]
        response = error_response(*error_json(error))
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert late.get(timeout=WAIT_S).kind == "started" and late.get(timeout=WAIT_S).text == str(supervisor.pid) != str(pid)
    assert (supervisor.state, supervisor.restarts) == ("ready", 1)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows has no SIGSTOP")
def test_a_worker_that_goes_on_in_time_answers_what_came_meanwhile(start):
    supervisor = start(patience=Patience(unresponsive_s=0.3, restart_s=WAIT_S))
    pid = supervisor.pid
    os.kill(pid, signal.SIGSTOP)
    waiting.until(lambda: supervisor.state == "unresponsive")
    gone = ask(supervisor, job("gone", "echo"))
    told = ask(supervisor, job("late", "echo"))
    supervisor.cancel("gone")
    os.kill(pid, signal.SIGCONT)
    assert ends(told, 1)["late"].kind == "done"
    assert (supervisor.state, supervisor.pid, supervisor.restarts) == ("ready", pid, 0)
    assert gone.empty() and not supervisor.work.leaving


def test_a_worker_in_work_that_it_announced_is_ready(start):
    states = []
    supervisor = start(patience=Patience(unresponsive_s=0.1, restart_s=0.2), on_change=states.append)
    assert ends(ask(supervisor, replace(job("long", "announced"), deadline_s=1.0)), 1)["long"].kind == "done"
    assert states == ["loading", "ready"] and supervisor.restarts == 0


def test_calls_are_answered_or_end_with_the_worker(supervisor):
    assert supervisor.call("numbers").result(WAIT_S) == {"what": "numbers"}
    assert raised(WorkerError, lambda: supervisor.call("bad").result(WAIT_S)).error["fields"] == {"field": "what"}
    ask(supervisor, job("1", "hang"))
    waiting = supervisor.call("numbers")
    os.kill(supervisor.pid, KILL)
    with pytest.raises(WorkerDiedError):
        waiting.result(WAIT_S)


def test_a_new_worker_has_the_adapters_that_were_loaded_meanwhile(supervisor):
    supervisor.call("load_adapter", name="a", path="/a").result(WAIT_S)
    supervisor.call("load_adapter", name="b", path="/b").result(WAIT_S)
    supervisor.call("unload_adapter", name="a").result(WAIT_S)
    os.kill(supervisor.pid, KILL)
    waiting.until(lambda: supervisor.restarts)
    assert ends(ask(supervisor, job("1", "echo")), 1)["1"].kind == "done" and supervisor.numbers["adapters"] == ["b"]


def test_a_client_that_left_is_told_nothing_more(supervisor):
    told = ask(supervisor, job("1", "speak, then wait"))
    told.get(timeout=WAIT_S)
    supervisor.cancel("1")
    os.kill(supervisor.pid, KILL)
    ends(ask(supervisor, job("2", "echo")), 1)
    assert told.empty() and supervisor.in_flight == 0


def test_stopping_tells_everyone_and_refuses_the_next(supervisor):
    told = ask(supervisor, job("1", "wait"))
    supervisor.stop()
    assert "stopping" in ends(told, 1)["1"].error["message"]
    assert supervisor.pid is None and supervisor.state == "stopped"
    with pytest.raises(StoppingError):
        supervisor.submit(job("2", "echo"), print)
    supervisor.start()
    loaded(supervisor)
    assert ends(ask(supervisor, job("3", "echo")), 1)["3"].kind == "done"


def test_draining_lets_the_worker_end_by_itself(supervisor):
    process = supervisor._life.process
    supervisor.drain(WAIT_S)
    assert exit_code_of(process, WAIT_S) == 0 and supervisor.state == "stopped"


def test_the_exit_code_is_known_though_another_thread_stores_it_late(supervisor):
    process = supervisor._life.process  # the number of its sentinel is another file's once nobody has the process

    class Late:
        """A process whose exit status another thread was given, and stores after three looks."""

        sentinel, looks = process.sentinel, 0

        @property
        def exitcode(self):
            self.looks += 1
            return 7 if self.looks > 3 else None

    assert exit_code_of(Late(), 0) is None  # the process runs
    os.kill(supervisor.pid, KILL)
    assert exit_code_of(Late(), WAIT_S) == 7


@pytest.mark.parametrize(("ends_itself", "error_class"), [(True, StoppingError), (False, WorkerDiedError)])
def test_a_call_that_a_stopping_worker_never_took_is_told_why(supervisor, ends_itself, error_class):
    ask(supervisor, job("1", "hang"))  # the worker reads nothing more
    call = supervisor.call("load_adapter", name="a", path="/a")
    supervisor._is_stopping = True
    if ends_itself:
        process = supervisor._life.process
        supervisor._life.process = SimpleNamespace(exitcode=0, sentinel=process.sentinel)  # before the end is heard
        process.kill()
    else:
        os.kill(supervisor.pid, KILL)
    with pytest.raises(error_class):
        call.result(WAIT_S)
    assert supervisor.state == "stopped"
