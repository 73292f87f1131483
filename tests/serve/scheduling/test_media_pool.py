"""Who waits for whose images: slow ones, many of one client, more bytes than there is room for, and a request's time."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future

import pytest

from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling import media_pool
from trimtab.serve.scheduling.compiling import Compiling
from trimtab.serve.scheduling.media_pool import MediaPool
from trimtab.serve.scheduling.scheduler import MistakeError
from trimtab.serve.worker.prompt_inputs import Preparing

WAIT_S = 20.0


class Decoder:
    """Decodes at once, but images that are named "slow" only when they are let go."""

    def __init__(self):
        self.let_go, self.begun = threading.Event(), {}
        self.seen, self.lock = [], threading.Lock()

    def __call__(self, job):
        with self.lock:
            self.seen.append(job.id)
        self.begun.setdefault(job.id, threading.Event()).set()
        if image_of(job).startswith(b"slow"):
            assert self.let_go.wait(WAIT_S)
        if image_of(job) == b"wrong":
            raise RequestError("cannot be decoded", field="messages")
        return job

    def wait_for(self, name):
        assert self.begun.setdefault(name, threading.Event()).wait(WAIT_S)


def image_of(job):
    return job.prompt[0]["content"][0]["image"]


def job(name, image=b"", sender=""):
    content = [{"type": "image", "image": image}, {"type": "text", "text": "?"}]
    return Job(name, [{"role": "user", "content": content}], GenerateRequest(), sender=sender)


@pytest.fixture
def decoder():
    found = Decoder()
    yield found
    found.let_go.set()


def preparing(decoder, **limits):
    pool = MediaPool(decoder, lambda job: len(image_of(job)), **limits)
    return Preparing(lambda job: job.id, pool), pool


def idle(pool, but=0):
    """Wait until the threads have ended all but so many entries, and none of the others may begin."""
    with pool.changed:
        assert pool.changed.wait_for(lambda: sum(pool.turns._running.values()) == but, WAIT_S)


def test_a_slow_image_of_one_client_delays_nobody_elses(decoder):
    prepared, _ = preparing(decoder)
    slow = prepared.submit(job("a", b"slow"))
    decoder.wait_for("a")
    assert prepared.submit(job("b", b"fast")).result(WAIT_S) == "b"
    assert prepared.submit(Job("c", "a text", GenerateRequest())).result(WAIT_S) == "c"
    assert not slow.done()
    decoder.let_go.set()
    assert slow.result(WAIT_S) == "a"


def test_media_prompts_and_grammars_have_one_pool_and_none_waits_for_another_kind(decoder):
    prepared, pool = preparing(decoder)
    compiling, done = Compiling(pool.pool, most=1), [Future() for _ in range(2)]
    slow = [prepared.submit(job(name, b"slow", sender=name)) for name in "ab"]
    decoder.wait_for("a")
    decoder.wait_for("b")
    compiling.submit("c", done[0], lambda: decoder.let_go.wait(WAIT_S))
    compiling.submit("d", done[1], lambda: "compiled")
    texts = [prepared.submit(Job(f"text {number}", "a text", GenerateRequest(), sender="a")) for number in range(9)]
    assert [text.result(WAIT_S) for text in texts] == [f"text {number}" for number in range(9)]
    assert not any(one.done() for one in (*slow, *done)) and len(pool.pool.threads) <= 4  # two, one and one
    decoder.let_go.set()
    assert [one.result(WAIT_S) for one in (*slow, *done)] == ["a", "b", True, "compiled"]


def test_no_client_has_every_thread_while_others_come(decoder):
    now = [0.0]
    prepared, pool = preparing(decoder, clock=lambda: now[0])
    assert prepared.submit(job("c", b"fast", sender="c")).result(WAIT_S) == "c"
    idle(pool)
    slow = [prepared.submit(job(f"a{number}", b"slow", sender="a")) for number in range(4)]
    decoder.wait_for("a0")
    assert prepared.submit(job("b", b"fast", sender="b")).result(WAIT_S) == "b"
    assert decoder.seen == ["c", "a0", "b"]
    # Those who came last came long ago.
    now[0] = media_pool.LATELY_S + 1.0
    with pool.changed:
        pool.changed.notify_all()
    decoder.wait_for("a1")
    decoder.let_go.set()
    assert [future.result(WAIT_S) for future in slow] == ["a0", "a1", "a2", "a3"]


def test_a_client_alone_has_every_thread(decoder):
    prepared, _ = preparing(decoder)
    slow = [prepared.submit(job(f"a{number}", b"slow", sender="a")) for number in range(2)]
    decoder.wait_for("a0")
    decoder.wait_for("a1")
    decoder.let_go.set()
    assert [future.result(WAIT_S) for future in slow] == ["a0", "a1"]


@pytest.mark.parametrize("small", ["a", "c"])
def test_media_without_room_are_overtaken_a_few_times_only(decoder, small):
    """By media of a client that always has others waiting, or of many clients."""
    prepared, pool = preparing(decoder, threads=3, most_bytes=10)
    first = prepared.submit(job("a", b"slow67", sender="a"))
    decoder.wait_for("a")
    large = prepared.submit(job("large", b"x" * 10, sender="b"))
    names = [f"{small}{number}" for number in range(9)]
    others = [prepared.submit(job(name, b"1", sender=name if small == "c" else "a")) for name in names]
    assert [future.result(WAIT_S) for future in others[:3]] == names[:3]
    idle(pool, but=1)
    assert sorted(decoder.seen) == ["a", *names[:3]] and not large.done()
    decoder.let_go.set()
    assert [future.result(WAIT_S) for future in (first, large, *others)] == ["a", "large", *names]
    assert decoder.seen[4] == "large"


def test_media_that_waited_behind_a_client_who_left_begin_then(decoder):
    prepared, _ = preparing(decoder, threads=3, most_bytes=10)
    first = prepared.submit(job("a", b"slow67", sender="a"))
    decoder.wait_for("a")
    large = prepared.submit(job("large", b"x" * 10, sender="b"))
    names = [f"a{number}" for number in range(4)]
    others = [prepared.submit(job(name, b"1", sender="a")) for name in names]
    assert [future.result(WAIT_S) for future in others[:3]] == names[:3] and not others[3].done()
    assert large.cancel()
    assert others[3].result(WAIT_S / 2) == "a3"  # without the news the threads look again after LATELY_S
    decoder.let_go.set()
    assert first.result(WAIT_S) == "a"


def test_clients_with_many_images_leave_a_later_client_its_turn(decoder):
    prepared, _ = preparing(decoder, threads=1)
    first = prepared.submit(job("a0", b"slow", sender="a"))
    decoder.wait_for("a0")
    names = ("a1", "a2", "b0", "b1", "b2", "c0")
    others = [prepared.submit(job(name, b"fast", sender=name[0])) for name in names]
    decoder.let_go.set()
    assert [future.result(WAIT_S) for future in (first, *others)] == ["a0", *names]
    assert decoder.seen == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]


def test_the_bytes_of_all_media_are_bounded_and_come_back(decoder):
    prepared, pool = preparing(decoder, most_bytes=10)
    slow = prepared.submit(job("a", b"slow67"))
    decoder.wait_for("a")
    late = prepared.submit(job("b", b"12345"))  # 11 together
    assert prepared.submit(job("c", b"1234")).result(WAIT_S) == "c"
    assert not late.done() and decoder.seen == ["a", "c"]
    decoder.let_go.set()
    assert (slow.result(WAIT_S), late.result(WAIT_S)) == ("a", "b")
    # One that is larger than the whole budget goes alone.
    assert prepared.submit(job("d", b"x" * 50)).result(WAIT_S) == "d"
    with pool.changed:
        assert pool.changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


class Tensor:
    """Stands for a tensor: something with bytes that can be dropped."""

    nbytes = 6


def test_what_media_became_counts_until_it_is_dropped(decoder):
    pool = MediaPool(
        decoder, lambda job: len(image_of(job)), most_bytes=10,
        kept=lambda inputs: [one for one in inputs if isinstance(one, Tensor)],
    )  # fmt: skip
    prepared = Preparing(lambda job: [Tensor()] if job.id == "a" else job.id, pool)
    inputs = prepared.submit(job("a", b"fast12345")).result(WAIT_S)
    assert pool.used_bytes == 6
    late = prepared.submit(job("b", b"12345"))  # 11 together
    assert prepared.submit(job("c", b"1234")).result(WAIT_S) == "c"
    assert not late.done() and decoder.seen == ["a", "c"]
    inputs.clear()
    assert late.result(WAIT_S) == "b"
    with pool.changed:
        assert pool.changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


def test_memory_that_was_freed_is_returned_before_other_media_need_its_room(decoder, monkeypatch):
    """The process has freed memory until it is returned: beside new media it would be more than the budget."""
    seen, pool = [], MediaPool(decoder, lambda job: len(image_of(job)), most_bytes=10)
    monkeypatch.setattr(media_pool, "return_freed_pages", lambda: seen.append(list(decoder.seen)))
    prepared = Preparing(lambda job: job.id, pool)
    for name, image in (("a", b"1234"), ("b", b"123456"), ("c", b"1")):
        assert prepared.submit(job(name, image)).result(WAIT_S) == name
    assert seen == [["a", "b"]]  # 4 and 6 bytes have room together, another one has not
    assert pool.freed_bytes == 1


def test_memory_counts_as_freed_until_its_return_has_ended(monkeypatch):
    counted, pool = [], MediaPool(lambda job: job, lambda job: 0)
    pool.freed_bytes = 7

    def return_pages():
        counted.append(pool.freed_bytes)
        pool.freed_bytes += 5  # freed meanwhile: no one knows whether it is returned with the rest

    monkeypatch.setattr(media_pool, "return_freed_pages", return_pages)
    pool._returner.return_now()
    assert counted == [7] and pool.freed_bytes == 5


def test_media_that_were_never_decoded_leave_no_freed_memory(decoder, monkeypatch):
    _, pool = preparing(decoder)
    gone: Future = Future()
    # It is cancelled between its turn and its beginning.
    monkeypatch.setattr(gone, "set_running_or_notify_cancel", lambda: not gone.cancel())
    pool.submit(job("a", b"fast"), gone, lambda *_: None)
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    idle(pool)
    assert (pool.used_bytes, pool.freed_bytes) == (0, 0) and not decoder.seen


@pytest.mark.parametrize("fails", ["then", "kept", "return"])
def test_what_fails_around_decoding_ends_neither_the_thread_nor_the_turn(decoder, fails, monkeypatch):
    def then(decoded, pass_on):
        if fails == "then" and decoded.id == "a":
            raise MemoryError
        pass_on("inputs of " + decoded.id)
        done.set()

    def kept(inputs):
        return 1 / 0 if fails == "kept" and inputs == "inputs of a" else ()

    def return_pages():
        raise OSError

    done, failed = threading.Event(), Future()
    pool = MediaPool(decoder, lambda job: 5, threads=1, most_bytes=10, kept=kept)
    if fails == "return":
        pool.freed_bytes = 10
        monkeypatch.setattr(media_pool, "return_freed_pages", return_pages)
    pool.submit(job("a", b"fast"), failed, then)
    problem = failed.exception(WAIT_S)  # which the thread that makes tokens takes for the request's own
    assert isinstance(problem, MistakeError) and problem.__traceback__ is None
    monkeypatch.undo()
    pool.submit(job("b", b"fast"), Future(), then)
    assert done.wait(WAIT_S)
    idle(pool)
    assert pool.used_bytes == 0 and len(pool.pool.threads) == 1 and pool.pool.threads[0].is_alive()


def test_a_thread_that_does_not_start_is_not_counted(decoder, monkeypatch):
    prepared, pool = preparing(decoder)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert isinstance(prepared.submit(job("a", b"fast")).exception(WAIT_S), MistakeError)
    assert prepared.submit(job("b", b"fast")).result(WAIT_S) == "b"
    assert decoder.seen == ["b"] and len(pool.pool.threads) == 2  # one decodes, one prepares


def test_a_request_whose_media_take_too_long_is_answered(decoder):
    prepared, pool = preparing(decoder, most_s=0.05)
    with pytest.raises(RequestError, match="take longer than 0.05 s to decode"):
        prepared.submit(job("a", b"slow")).result(WAIT_S)
    assert pool.used_bytes == len(b"slow")  # until the decoder returns
    decoder.let_go.set()
    idle(pool)
    assert pool.used_bytes == 0
    assert preparing(decoder)[0].submit(job("b", b"fast")).result(WAIT_S) == "b"


def test_an_error_is_the_requests_own_and_a_cancelled_request_is_forgotten(decoder):
    prepared, pool = preparing(decoder, threads=1)
    slow = prepared.submit(job("a", b"slow"))
    decoder.wait_for("a")
    gone, wrong = prepared.submit(job("b", b"fast")), prepared.submit(job("c", b"wrong"))
    assert gone.cancel()
    decoder.let_go.set()
    problem = wrong.exception(WAIT_S)
    assert isinstance(problem, RequestError) and problem.__traceback__ is None  # its frames would keep the media
    assert slow.result(WAIT_S) == "a" and decoder.seen == ["a", "c"]
    with pool.changed:
        assert pool.changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


@pytest.fixture
def due(monkeypatch):
    """What timers would do, in their order."""
    works = []
    monkeypatch.setattr(media_pool, "call_later", lambda seconds, work: works.append(work))
    return works


def test_memory_of_large_media_goes_back_to_the_system_once_nothing_holds_them(due, monkeypatch):
    held = []

    def decode(job):
        decoded = Job(job.id, "text", GenerateRequest())
        held.append(weakref.ref(decoded))
        return decoded

    monkeypatch.setattr(media_pool, "return_freed_pages", lambda: held.append(held[-1]()))
    for size, returns in ((media_pool.RETURNED_BYTES - 1, 0), (media_pool.RETURNED_BYTES, 1)):
        pool = MediaPool(decode, lambda job, size=size: size)
        # The thread that decoded has let go before the prompt is prepared.
        prepared = Preparing(lambda job, pool=pool: idle(pool) or job.id, pool).submit(job("a", b"x"))
        assert prepared.result(WAIT_S) == "a"
        assert len(due) == returns
    due.pop()()
    assert held[-1] is None  # the decoded media were gone by then


def test_many_large_media_return_memory_once_in_a_while_and_once_after_the_last(due, monkeypatch):
    returns, decoded = [], []
    monkeypatch.setattr(media_pool, "return_freed_pages", lambda: returns.append(len(decoded)))
    pool = MediaPool(lambda job: job, lambda job: media_pool.RETURNED_BYTES, most_bytes=2**40)
    prepared = Preparing(lambda job: decoded.append(job.id), pool)
    for _ in range(2):
        for future in [prepared.submit(job(str(number), b"x")) for number in range(20)]:
            future.result(WAIT_S)
        assert len(due) == 1
        due.pop()()
    assert returns == [20, 40] and not due and pool.freed_bytes == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc has the resident memory")
def test_freed_pages_can_be_returned_later_by_a_thread_that_no_process_waits_for():
    done: Future = Future()
    media_pool.call_later(0, lambda: done.set_result((media_pool.return_freed_pages(), threading.current_thread().daemon)))
    assert done.result(WAIT_S) == (None, True)  # no error with glibc, musl or another C library


def test_futures_of_jobs_without_media_are_as_before():
    future: Future = Preparing(lambda job: 1 / 0).submit(Job("a", "text", GenerateRequest()))
    with pytest.raises(ZeroDivisionError):
        future.result(WAIT_S)


def test_media_whose_bytes_cannot_be_counted_end_their_own_request_alone(decoder, monkeypatch):
    prepared, pool = preparing(decoder)
    monkeypatch.setattr(pool, "_pass_on", lambda nbytes, inputs: 1 / 0)
    assert isinstance(prepared.submit(job("a", b"x")).exception(WAIT_S), MistakeError)
    assert prepared.submit(Job("b", "a text", GenerateRequest())).result(WAIT_S) == "b"


def test_the_thread_that_prepares_is_started_again_where_it_did_not_start_once(monkeypatch):
    prepared, start = Preparing(lambda job: job.id), threading.Thread.start

    def fail(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        prepared.start(lambda: None)
    assert prepared.submit(Job("a", "a text", GenerateRequest())).result(WAIT_S) == "a"


class Picture:
    """A decoded image, which a weak reference can watch."""


def test_a_prompt_that_fails_drops_its_media_before_their_bytes_are_free():
    def prepare(job):
        assert let_go.wait(WAIT_S)
        raise RequestError("is wrong", field="messages")

    prepared, future, picture, alive, let_go = Preparing(prepare), Future(), Picture(), [], threading.Event()
    watched = weakref.ref(picture)
    future.set_running_or_notify_cancel()
    prepared.put_prompt(job("a", picture), future, lambda inputs: alive.append(watched() is not None))
    del picture
    gc.disable()
    try:
        let_go.set()
        assert future.exception(WAIT_S).reason == "is wrong" and alive == [False]
    finally:
        gc.enable()


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


@pytest.mark.parametrize("problem", [ZeroDivisionError, Panic])
def test_what_fails_before_the_first_prompt_leaves_prompts_answered(problem):
    def fail():
        raise problem

    prepared = Preparing(lambda job: job.id)
    prepared.start(fail)
    assert prepared.submit(Job("a", "text", GenerateRequest())).result(WAIT_S) == "a"
