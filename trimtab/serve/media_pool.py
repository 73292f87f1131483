"""Decoding images and audio in a few threads, in an order in which no slow file delays other clients.

    MediaPool       the threads, and what they may hold
    MemoryReturner  the timer that gives freed memory back to the system

Three budgets bound it: bytes of media (being decoded, or decoded until their prompt is computed), decodes of one client at
once, and seconds of one request. A thread cannot be stopped: a request whose time is over is answered, and its thread is free
again when the decoder returns; the limits on pixels and seconds of sound bound that.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.errors import RequestError
from trimtab.plan.media_memory import LEAST_BUDGET_BYTES
from trimtab.serve.client_turns import ClientTurns
from trimtab.serve.job import Job

THREADS = 2
MEDIA_S = 20.0
# Media of so many bytes leave freed memory behind that is worth returning.
RETURNED_BYTES = 32 * 2**20
# Freed memory is returned so long after the first such media, and that of all that end meanwhile with it.
RETURN_AFTER_S = 1.0


@dataclass
class _Entry:
    job: Job
    future: Future[Any]
    nbytes: int
    then: Callable[[Job, Callable[[Any], None]], None]

    @property
    def client(self) -> str:
        return self.job.client


class MediaPool:
    """The threads; clients take turns. decode: returns a job with its media decoded. size: how many bytes they will take.

    most_bytes: of all media that are decoded or being decoded; a request that needs more is decoded alone. kept: the tensors of
    a prompt that was prepared; they count until they are dropped. most_s: of one request's decoding. No client has all threads:
    one is left for others, where clients have keys.
    """

    def __init__(
        self, decode: Callable[[Job], Job], size: Callable[[Job], int], *, threads: int = THREADS,
        most_bytes: int = LEAST_BUDGET_BYTES, most_s: float = MEDIA_S, kept: Callable[[Any], Iterable[Any]] = lambda _: (),
    ) -> None:  # fmt: skip
        self._decode, self._size, self._kept = decode, size, kept
        self._most_bytes, self._most_s, self._count = most_bytes, most_s, threads
        self._turns: ClientTurns[_Entry] = ClientTurns()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._returner = MemoryReturner(self._were_returned)
        # Bytes in use, and bytes that were freed since the last return of memory: the process has them still.
        self.used_bytes = self.freed_bytes = 0

    def submit(self, job: Job, future: Future[Any], then: Callable[[Job, Callable[[Any], None]], None]) -> None:
        """Decode a job's media and call `then` with the decoded job and what to call with its inputs (None for none) once the
        decoded media are not needed any more.

        future: is given the error, if there is one; cancelling it before its turn is enough to forget the job.
        """
        entry = _Entry(job, future, self._size(job), then)
        with self._changed:
            self._turns.add(entry)
            if len(self._threads) < self._count:
                name = f"trimtab-media-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()

    def _may_begin(self, entry: _Entry) -> bool:
        """Whether its client has a thread left, and its media have room."""
        of_client = max(1, self._count - 1)
        has_thread = not entry.client or self._turns.running(entry.client) < of_client
        return has_thread and (not self.used_bytes or self.used_bytes + entry.nbytes <= self._most_bytes)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (entry := self._turns.take(self._may_begin)) is None:
                    self._changed.wait()
                self.used_bytes += entry.nbytes
                is_short = self.freed_bytes > 0 and self.used_bytes + self.freed_bytes > self._most_bytes
            if is_short:
                self._returner.return_now()
            try:
                is_wanted = self._work(entry)
            finally:
                with self._changed:
                    self._turns.end(entry.client)
                    self._changed.notify_all()
            if not is_wanted:
                self._release(entry.nbytes)

    def _work(self, entry: _Entry) -> bool:
        """Decode one entry; whether its media are still needed."""
        future = entry.future
        if not future.set_running_or_notify_cancel():
            return False
        is_late = threading.Event()
        timer = threading.Timer(self._most_s, self._end, (future, is_late))
        timer.daemon = True
        timer.start()
        try:
            decoded = self._decode(entry.job)
        except BaseException as exc:
            timer.cancel()
            if not is_late.is_set():
                future.set_exception(exc)
            return False
        timer.cancel()
        timer.join()
        if is_late.is_set():
            return False
        entry.then(decoded, partial(self._pass_on, entry.nbytes))
        return True

    def _pass_on(self, nbytes: int, inputs: Any) -> None:
        """Count the inputs that were made of decoded media, until each is dropped, in place of the media."""
        for tensor in () if inputs is None else self._kept(inputs):
            nbytes -= tensor.nbytes
            weakref.finalize(tensor, self._release, tensor.nbytes).atexit = False
        self._release(nbytes)

    def _end(self, future: Future[Any], is_late: threading.Event) -> None:
        is_late.set()
        future.set_exception(RequestError(f"take longer than {self._most_s:g} s to decode", field="messages"))

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self.used_bytes -= nbytes
            self.freed_bytes += max(nbytes, 0)
            self._changed.notify_all()
        if nbytes >= RETURNED_BYTES:
            self._returner.memory_was_freed()

    def _were_returned(self) -> None:
        with self._changed:
            self.freed_bytes = 0


class MemoryReturner:
    """Returns freed memory to the system once `RETURN_AFTER_S` after memory was freed, on a thread of its own.

    A return is not free: glibc's malloc_trim walks through all arenas and locks each one, so that threads which allocate there
    wait. With 700 MiB freed it took 0.23 to 0.32 s on an AMD EPYC, and up to 15 ms where nothing was left to return. One return
    serves all media that end within a second, and the last one always gets its own.
    """

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        # Reentrant: a tensor may be dropped, and its bytes counted, wherever Python's collector runs.
        self._lock, self._then = threading.RLock(), then
        self._is_due = False

    def memory_was_freed(self) -> None:
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(RETURN_AFTER_S, self._return)
        timer.daemon = True
        timer.start()

    def _return(self) -> None:
        with self._lock:
            self._is_due = False  # what is freed from now on is returned by the next one
        self.return_now()

    def return_now(self) -> None:
        """Return freed memory on this thread."""
        self._then()
        return_freed_pages()


def return_freed_pages() -> None:
    """Return freed memory to the system where the C library keeps it: glibc has an arena per thread that decodes.

    Pillow holds an image in blocks of 16 MiB, which glibc does not return by itself. Source: malloc_trim(3), mallopt(3).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
