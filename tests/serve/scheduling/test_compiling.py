"""Whose schema is compiled next, and what a compile that is slow, fails or never ends does to the others."""

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future

import pytest

from trimtab.serve.scheduling.compiling import Compiling
from trimtab.serve.scheduling.scheduler import MistakeError

WAIT_S = 20.0


class Compiler:
    """Compiles of one thread: "slow" ones end when they are let go. order: the names of those that began."""

    def __init__(self):
        self.order, self.begun, self.let_go = [], threading.Event(), threading.Event()
        self.thread = Compiling(most=1)

    def submit(self, name, *, is_slow=False, error=None):
        """Queue the compile of a schema; the first letter of its name is the client."""

        def work():
            self.order.append(name)
            if is_slow:
                self.begun.set()
                assert self.let_go.wait(WAIT_S)
            if error is not None:
                raise error
            return name.upper()

        future = Future()
        self.thread.submit(name[0], future, work)
        return future

    def hold(self, name):
        future = self.submit(name, is_slow=True)
        assert self.begun.wait(WAIT_S)
        return future


@pytest.fixture
def compiler():
    made = Compiler()
    yield made
    made.let_go.set()


def results(futures):
    return [future.result(WAIT_S) for future in futures]


def test_a_clients_schema_waits_for_one_of_another_client_and_not_for_all(compiler):
    slow = [compiler.hold("a0"), *(compiler.submit(f"a{number}") for number in (1, 2, 3))]
    others = [compiler.submit(name) for name in ("b0", "b1", "c0")]
    compiler.let_go.set()
    assert results(slow + others) == ["A0", "A1", "A2", "A3", "B0", "B1", "C0"]
    assert compiler.order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_clients_who_send_one_after_the_other_keep_nobody_waiting_for_ever(compiler):
    """Each of two clients sends its next schema when the one before is compiled; a third client's have waited since the start."""
    waiting = [compiler.hold("a0"), *(compiler.submit(f"a{number}") for number in (1, 2))]
    ended = threading.Event()

    def send(client, number):
        if number == 20:
            ended.set()
            return
        compiler.submit(f"{client}{number}").add_done_callback(lambda _: send(client, number + 1))

    send("b", 0), send("c", 0)
    compiler.let_go.set()
    assert results(waiting) == ["A0", "A1", "A2"] and ended.wait(WAIT_S)
    assert compiler.order.index("a1") <= 3 and compiler.order.index("a2") <= 6


def test_schemas_of_cancelled_jobs_are_not_compiled_and_not_kept(compiler):
    held = compiler.hold("a0")
    left = []
    for number in range(5):  # a client that leaves and comes back while the thread is busy

        class Work:
            def __call__(self):
                compiler.order.append("left")

        work, future = Work(), Future()
        left.append(weakref.ref(work))
        compiler.thread.submit("ab"[number % 2], future, work)
        assert future.cancel()
    del work
    last = compiler.submit("a1")
    gc.collect()
    assert [one() for one in left] == [None] * 5
    compiler.let_go.set()
    assert results([held, last]) == ["A0", "A1"] and compiler.order == ["a0", "a1"]


class Panic(BaseException):
    """As the panic of a library in Rust, which is no Exception."""


@pytest.mark.parametrize("error", [ValueError("wrong"), Panic("wrong")])
def test_an_exception_ends_its_own_compile_alone(compiler, error):
    held = compiler.hold("a0")
    failed, after = compiler.submit("a1", error=error), [compiler.submit("a2"), compiler.submit("b0")]
    compiler.let_go.set()
    assert failed.exception(WAIT_S) is error
    assert results([held, *after]) == ["A0", "A2", "B0"]


def test_a_thread_that_does_not_start_once_ends_that_compile_alone(compiler, monkeypatch):
    start = threading.Thread.start

    def fail(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert isinstance(compiler.submit("a0").exception(WAIT_S), MistakeError)
    assert compiler.submit("a1").result(WAIT_S) == "A1" and compiler.order == ["a1"]


class Inputs:
    """Stands for the inputs of a request."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_compile_was_made_of_is_dropped_with_its_future_without_a_collection(compiler, fails):
    inputs, earlier = Inputs(), Future()
    is_dropped = threading.Event()
    weakref.finalize(inputs, is_dropped.set)

    def work(inputs):
        if fails:
            raise ValueError("wrong")
        return inputs

    gc.disable()
    try:
        future = compiler.thread.after(earlier, "a", work)
        earlier.set_result(inputs)
        assert isinstance(future.exception(WAIT_S), ValueError) == fails
        del inputs, earlier, future
        assert is_dropped.wait(WAIT_S)
    finally:
        gc.enable()


def test_cancelling_what_comes_after_cancels_what_comes_before(compiler):
    earlier = Future()
    assert compiler.thread.after(earlier, "a", str).cancel() and earlier.cancelled()


ENDLESS = """
import threading
from concurrent.futures import Future
from trimtab.serve.scheduling.compiling import Compiling

compiling, begun = Compiling(), threading.Event()
compiling.submit("a", Future(), lambda: (begun.set(), threading.Event().wait()))
compiling.submit("a", Future(), lambda: print("the second one was compiled"))
assert begun.wait(20)
print("ends")
"""


def test_the_process_ends_while_schemas_are_compiled():
    ended = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")
