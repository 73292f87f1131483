"""Who waits for whose images: slow ones, many of one client, more bytes than there is room for, and a request's time."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve import media_pool
from trimtab.serve.job import Job
from trimtab.serve.media_pool import MediaPool
from trimtab.serve.preparing import Preparing
from trimtab.serve.scheduler import MistakeError

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


def job(name, image=b"", client=""):
    content = [{"type": "image", "image": image}, {"type": "text", "text": "?"}]
    return Job(name, [{"role": "user", "content": content}], GenerateRequest(), client=client)


@pytest.fixture
def decoder():
    found = Decoder()
    yield found
    found.let_go.set()


def preparing(decoder, **limits):
    pool = MediaPool(decoder, lambda job: len(image_of(job)), **limits)
    return Preparing(lambda job: job.id, pool), pool


def test_a_slow_image_of_one_client_delays_nobody_elses(decoder):
    prepared, _ = preparing(decoder)
    slow = prepared.submit(job("a", b"slow"))
    decoder.wait_for("a")
    assert prepared.submit(job("b", b"fast")).result(WAIT_S) == "b"
    assert prepared.submit(Job("c", "a text", GenerateRequest())).result(WAIT_S) == "c"
    assert not slow.done()
    decoder.let_go.set()
    assert slow.result(WAIT_S) == "a"


def test_no_client_has_every_thread(decoder):
    prepared, _ = preparing(decoder)
    slow = [prepared.submit(job(f"a{number}", b"slow", client="a")) for number in range(4)]
    decoder.wait_for("a0")
    assert prepared.submit(job("b", b"fast", client="b")).result(WAIT_S) == "b"
    assert decoder.seen == ["a0", "b"]
    decoder.let_go.set()
    assert [future.result(WAIT_S) for future in slow] == ["a0", "a1", "a2", "a3"]


def test_clients_with_many_images_leave_a_later_client_its_turn(decoder):
    prepared, _ = preparing(decoder, threads=1)
    first = prepared.submit(job("a0", b"slow", client="a"))
    decoder.wait_for("a0")
    names = ("a1", "a2", "b0", "b1", "b2", "c0")
    others = [prepared.submit(job(name, b"fast", client=name[0])) for name in names]
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
    with pool._changed:
        assert pool._changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


class Tensor:
    """Stands for a tensor: something with bytes that can be dropped."""

    nbytes = 6


def test_what_media_became_counts_until_it_is_dropped(decoder):
    pool = MediaPool(
        decoder,
        lambda job: len(image_of(job)),
        most_bytes=10,
        kept=lambda inputs: [one for one in inputs if isinstance(one, Tensor)],
    )
    prepared = Preparing(lambda job: [Tensor()] if job.id == "a" else job.id, pool)
    inputs = prepared.submit(job("a", b"fast12345")).result(WAIT_S)
    assert pool.used_bytes == 6
    late = prepared.submit(job("b", b"12345"))  # 11 together
    assert prepared.submit(job("c", b"1234")).result(WAIT_S) == "c"
    assert not late.done() and decoder.seen == ["a", "c"]
    inputs.clear()
    assert late.result(WAIT_S) == "b"
    with pool._changed:
        assert pool._changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


def test_memory_that_was_freed_is_returned_before_other_media_need_its_room(decoder, monkeypatch):
    """The process has freed memory until it is returned: beside new media it would be more than the budget."""
    seen, pool = [], MediaPool(decoder, lambda job: len(image_of(job)), most_bytes=10)
    monkeypatch.setattr(media_pool, "return_freed_pages", lambda: seen.append(list(decoder.seen)))
    prepared = Preparing(lambda job: job.id, pool)
    for name, image in (("a", b"1234"), ("b", b"123456"), ("c", b"1")):
        assert prepared.submit(job(name, image)).result(WAIT_S) == name
    assert seen == [["a", "b"]]  # 4 and 6 bytes have room together, another one has not
    assert pool.freed_bytes == 1


def test_a_request_whose_media_take_too_long_is_answered(decoder):
    prepared, pool = preparing(decoder, most_s=0.05)
    with pytest.raises(RequestError, match="take longer than 0.05 s to decode"):
        prepared.submit(job("a", b"slow")).result(WAIT_S)
    assert prepared.submit(job("b", b"fast")).result(WAIT_S) == "b"
    decoder.let_go.set()  # its thread and its bytes are free again
    with pool._changed:
        assert pool._changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


def test_an_error_is_the_requests_own_and_a_cancelled_request_is_forgotten(decoder):
    prepared, pool = preparing(decoder, threads=1)
    slow = prepared.submit(job("a", b"slow"))
    decoder.wait_for("a")
    gone, wrong = prepared.submit(job("b", b"fast")), prepared.submit(job("c", b"wrong"))
    assert gone.cancel()
    decoder.let_go.set()
    with pytest.raises(RequestError, match="cannot be decoded"):
        wrong.result(WAIT_S)
    assert slow.result(WAIT_S) == "a" and decoder.seen == ["a", "c"]
    with pool._changed:
        assert pool._changed.wait_for(lambda: pool.used_bytes == 0, WAIT_S)


def test_memory_of_large_media_goes_back_to_the_system_once_nothing_holds_them(decoder, monkeypatch):
    held, returned = [], threading.Event()

    def decode(job):
        decoded = Job(job.id, "text", GenerateRequest())
        held.append(weakref.ref(decoded))
        return decoded

    monkeypatch.setattr(media_pool, "RETURN_AFTER_S", 0.01)
    monkeypatch.setattr(media_pool, "return_freed_pages", lambda: (held.append(held[-1]()), returned.set()))
    for size, is_returned in ((media_pool.RETURNED_BYTES - 1, False), (media_pool.RETURNED_BYTES, True)):
        pool = MediaPool(decode, lambda job, size=size: size)
        # The thread that decoded has let go before the prompt is prepared.
        prepared = Preparing(lambda job: time.sleep(0.2) or job.id, pool).submit(job("a", b"x"))
        assert prepared.result(WAIT_S) == "a"
        assert returned.wait(WAIT_S if is_returned else 0.2) == is_returned
    assert held[-1] is None  # the decoded media were gone by then


def test_many_large_media_return_memory_once_in_a_while_and_once_after_the_last(monkeypatch):
    returns, after_last, after_s = [], threading.Event(), 0.3
    decoded = []

    def return_pages():
        returns.append((time.monotonic(), len(decoded)))
        if len(decoded) == 40:
            after_last.set()

    monkeypatch.setattr(media_pool, "RETURN_AFTER_S", after_s)
    monkeypatch.setattr(media_pool, "return_freed_pages", return_pages)
    pool = MediaPool(lambda job: (time.sleep(0.02), job)[1], lambda job: media_pool.RETURNED_BYTES, most_bytes=2**40)
    prepared = Preparing(lambda job: decoded.append(job.id), pool)
    for future in [prepared.submit(job(str(number), b"x")) for number in range(40)]:
        future.result(WAIT_S)
    assert after_last.wait(WAIT_S)
    time.sleep(2 * after_s)
    times = [at for at, _ in returns]
    assert all(later - earlier >= after_s for earlier, later in zip(times, times[1:], strict=False))
    # The last medium may end while the return before is due.
    assert [count for _, count in returns].count(40) in (1, 2) and len(returns) < 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc has the resident memory")
def test_freed_pages_can_be_returned():
    media_pool.return_freed_pages()  # no error with glibc, musl or another C library


def test_futures_of_jobs_without_media_are_as_before():
    future: Future = Preparing(lambda job: 1 / 0).submit(Job("a", "text", GenerateRequest()))
    with pytest.raises(ZeroDivisionError):
        future.result(WAIT_S)


def test_media_whose_bytes_cannot_be_counted_end_their_own_request_alone(decoder, monkeypatch):
    prepared, pool = preparing(decoder)
    monkeypatch.setattr(pool, "_pass_on", lambda nbytes, inputs: 1 / 0)
    assert isinstance(prepared.submit(job("a", b"x")).exception(WAIT_S), MistakeError)
    assert prepared.submit(Job("b", "a text", GenerateRequest())).result(WAIT_S) == "b"


class Picture:
    """A decoded image, which a weak reference can watch."""


def test_a_prompt_that_fails_drops_its_media_before_their_bytes_are_free():
    def prepare(job):
        raise RequestError("is wrong", field="messages")

    prepared, future, picture, alive = Preparing(prepare), Future(), Picture(), []
    watched = weakref.ref(picture)
    future.set_running_or_notify_cancel()
    prepared._put(job("a", picture), future, lambda inputs: alive.append(watched() is not None))
    del picture
    gc.disable()
    try:
        prepared._prepare_next()
    finally:
        gc.enable()
    assert alive == [False] and future.exception().reason == "is wrong"


def test_what_fails_before_the_first_prompt_leaves_prompts_answered():
    prepared = Preparing(lambda job: job.id)
    prepared.start(lambda: 1 / 0)
    assert prepared.submit(Job("a", "text", GenerateRequest())).result(WAIT_S) == "a"
