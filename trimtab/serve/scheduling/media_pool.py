"""On which threads are images and audio decoded, so that no slow file delays other clients?"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.errors import RequestError, TrimtabError
from trimtab.planning.memory.media import LEAST_BUDGET_BYTES
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.log import drop_tracebacks, write_traceback
from trimtab.serve.scheduling.queue import FairPool, Turn, Work, WorkLine
from trimtab.serve.scheduling.scheduler import MistakeError

THREADS = 2
MEDIA_S = 20.0
# After media of this many bytes, freed memory is worth returning.
RETURNED_BYTES = 32 * 2**20
# Freed memory is returned this long after the first such media, together with that of all that end in this time.
RETURN_AFTER_S = 1.0
# A client leaves a thread to others for this long after the last request of another.
LATELY_S = 60.0


@dataclass(eq=False)
class _Entry(Work):
    """overtaken: how often another was begun in its turn because its media had no room."""

    media: Job
    nbytes: int
    then: Callable[[Job, Callable[[Any], None]], None]
    overtaken: int = 0


@dataclass(eq=False)
class _Share:
    """The bytes of one entry, which are given back once. It holds no media: it lives until their prompt is prepared."""

    nbytes: int
    is_held: bool = True


class MediaPool(WorkLine[_Entry]):
    """The media that wait; clients take turns. decode: returns a job with its media decoded. size: how many bytes they will take.

    most_bytes: of all media that are decoded or being decoded; a request that needs more is decoded alone. A request that has no
    room is overtaken by as many others as there are threads, then nothing else begins before it. kept: the tensors of a prompt that
    was prepared; they count until they are dropped. most_s: of one request's decoding. A client has all threads while it is alone:
    one is left for others while they wait, or have come in the last `LATELY_S`. clock: seconds. Three budgets bound it: bytes of
    media (being decoded, or decoded until their prompt is computed), decodes of one client at once, and seconds of one request. A
    thread cannot be stopped: it is free again when the decoder returns.
    """

    def __init__(
        self, decode: Callable[[Job], Job], size: Callable[[Job], int], *, threads: int = THREADS,
        most_bytes: int = LEAST_BUDGET_BYTES, most_s: float = MEDIA_S, kept: Callable[[Any], Iterable[Any]] = lambda _: (),
        clock: Callable[[], float] = time.monotonic, pool: FairPool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pool or FairPool(), threads, look_s=LATELY_S)
        self._decode, self._size, self._kept, self._clock = decode, size, kept, clock
        self._most_bytes, self._most_s = most_bytes, most_s
        # The two clients that came last, and when.
        self._came: dict[str, float] = {}
        self._returner = MemoryReturner(lambda: self.freed_bytes, self._were_returned)
        # Bytes in use, and bytes that were freed since the last return of memory: the process has them still.
        self.used_bytes = self.freed_bytes = 0

    def submit(self, job: Job, future: Future[Any], then: Callable[[Job, Callable[[Any], None]], None]) -> None:
        """Decode a job's media and call `then` with the decoded job and a function for its inputs (None for none) to call once the
        decoded media are not needed any more.

        future: is given the error, if there is one; cancelling it before its turn is enough to forget the job. Errors: RuntimeError
        if the system starts no thread and there is none.
        """
        entry = _Entry(Turn(job.sender), future, job, self._size(job), then)
        with self.changed:
            self.put(entry)
            self._came.pop(job.sender, None)
            self._came[job.sender] = self._clock()
            if len(self._came) > 2:
                del self._came[next(iter(self._came))]

    def choose(self) -> _Entry | None:
        """Return the next entry that has a thread and room, and count its bytes."""
        passed: list[_Entry] = []
        for entry in self.turns.in_turn():
            if not self._has_thread(entry.job.sender):
                continue
            if not self.used_bytes or self.used_bytes + entry.nbytes <= self._most_bytes:
                for other in passed:
                    other.overtaken += 1
                self.used_bytes += entry.nbytes
                return entry
            if entry.overtaken >= self.most:
                return None
            passed.append(entry)
        return None

    def _has_thread(self, client: str) -> bool:
        """Whether a client may have one more thread."""
        if self.turns.running(client) < max(1, self.most - 1):
            return True
        since = self._clock() - LATELY_S
        return not self.turns.has_other_than(client) and all(came < since for other, came in self._came.items() if other != client)

    def do(self, work: _Entry) -> None:
        """Decode one entry and pass it on. Every failure is the entry's: its bytes and its turn end, the thread does not."""
        share = _Share(work.nbytes)
        try:
            with self.changed:
                is_short = self.freed_bytes > 0 and self.used_bytes + self.freed_bytes > self._most_bytes
            if is_short:
                self._returner.return_now()
            self._work(work, share)
        except BaseException as exc:
            what = "decoding images and audio"
            drop_tracebacks(problem := exc if isinstance(exc, TrimtabError) else MistakeError(write_traceback(exc, what)))
            with suppress(InvalidStateError):  # it was answered, or cancelled
                work.future.set_exception(problem)
            self._give_back(share)

    def _work(self, entry: _Entry, share: _Share) -> None:
        """Decode one entry. Errors: those of decoding and of `then`."""
        future = entry.future
        if not future.set_running_or_notify_cancel():
            self._give_back(share, is_freed=False)
            return
        is_late = threading.Event()
        timer = threading.Timer(self._most_s, self._end, (future, is_late))
        timer.daemon = True
        timer.start()
        try:
            decoded = self._decode(entry.media)
        finally:
            timer.cancel()
            timer.join()
        if is_late.is_set():
            del decoded  # before its bytes count as free
            self._give_back(share)
        else:
            entry.then(decoded, partial(self._pass_on, share))

    def _pass_on(self, share: _Share, inputs: Any) -> None:
        """Count the inputs that were made of decoded media, until each is dropped, in place of the media."""
        kept_bytes = 0
        try:
            for tensor in () if inputs is None else self._kept(inputs):
                weakref.finalize(tensor, self._release, tensor.nbytes).atexit = False
                kept_bytes += tensor.nbytes
        finally:
            self._give_back(share, kept_bytes=kept_bytes)

    def _end(self, future: Future[Any], is_late: threading.Event) -> None:
        is_late.set()
        future.set_exception(RequestError(f"take longer than {self._most_s:g} s to decode", field="messages"))

    def _give_back(self, share: _Share, *, kept_bytes: int = 0, is_freed: bool = True) -> None:
        """End a share, but for bytes that inputs keep. is_freed: whether there was memory, which the process has still."""
        with self.changed:
            is_first, share.is_held = share.is_held, False
        if is_first:
            self._release(share.nbytes - kept_bytes, is_freed=is_freed)

    def _release(self, nbytes: int, *, is_freed: bool = True) -> None:
        with self.changed:
            self.used_bytes -= nbytes
            self.freed_bytes += max(nbytes, 0) if is_freed else 0
            self.changed.notify_all()
        if is_freed and nbytes >= RETURNED_BYTES:
            self._returner.memory_was_freed()

    def _were_returned(self, nbytes: int) -> None:
        with self.changed:
            self.freed_bytes -= nbytes


class MemoryReturner:
    """Returns freed memory to the system once `RETURN_AFTER_S` after memory was freed, on a separate thread.

    A return is not free: glibc's malloc_trim walks through all arenas and locks each one, so that threads which allocate there
    wait. With 700 MiB freed it took 0.23 to 0.32 s on an AMD EPYC, and up to 15 ms where nothing was left to return. One return
    serves all media that end within a second, and the last one always gets its own. freed: bytes that are freed and not returned.
    then: receives the bytes that were returned.
    """

    def __init__(self, freed: Callable[[], int] = lambda: 0, then: Callable[[int], None] = lambda _: None) -> None:
        # Reentrant: a tensor may be dropped, and its bytes counted, wherever Python's collector runs.
        self._lock, self._freed, self._then = threading.RLock(), freed, then
        self._returning = threading.Lock()
        self._is_due = False

    def memory_was_freed(self) -> None:
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        try:
            call_later(RETURN_AFTER_S, self._return)
        except RuntimeError:  # the system has no thread left: the next one returns it
            self._is_due = False

    def _return(self) -> None:
        with self._lock:
            self._is_due = False  # the next one returns memory that is freed from now on
        self.return_now()

    def return_now(self) -> None:
        """Return freed memory on this thread, after a return on another has ended."""
        with self._returning:
            nbytes = self._freed()
            return_freed_pages()
            self._then(nbytes)


def call_later(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def return_freed_pages() -> None:
    """Return freed memory to the system where the C library keeps it: glibc has an arena per thread that decodes.

    Pillow holds an image in blocks of 16 MiB, which glibc does not return by itself. Source: malloc_trim(3), mallopt(3).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
