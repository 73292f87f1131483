"""The choices of one request have one prompt: its media are decoded once, and its inputs are made once.

The inputs are shared by the jobs of a group that wait while they are made, or until the last of these is taken up. A job that comes
later has them made again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from trimtab.serve.contract.job import Job


class SharedInputs:
    """Futures of inputs. make: begins to make a job's. `submit` is called from one thread."""

    def __init__(self, make: Callable[[Job], Future[Any]]) -> None:
        self._make = make
        self._by_group: weakref.WeakValueDictionary[str, _Source] = weakref.WeakValueDictionary()

    def submit(self, job: Job) -> Future[Any]:
        """Return the inputs to be, which are also those of other jobs of its group. Cancelling a job's is enough to forget it; the
        last one cancels the work. Errors: those of `make`."""
        if not job.group:
            return self._make(job)
        source = self._by_group.get(job.group)
        if source is None or source.is_cancelled:
            source = _Source(self._make(job))
            self._by_group[job.group] = source
        return source.follow()


class _Source:
    """The work of one group. Its followers keep it, and it keeps them until the work is done: nothing refers to inputs in a circle
    then, and they are dropped with the last follower."""

    def __init__(self, work: Future[Any]) -> None:
        self._lock = threading.Lock()
        self._followers: list[Future[Any]] = []
        self._work: Future[Any] | None = work
        self._result: Any = None
        self._problem: BaseException | None = None
        self.is_cancelled = False
        work.add_done_callback(self._pass_on)

    def follow(self) -> Future[Any]:
        follower: Future[Any] = Future()
        follower.add_done_callback(self._left)
        with self._lock:
            is_done = self._work is None
            if not is_done:
                self._followers.append(follower)
        if is_done:
            self._tell(follower)
        return follower

    def _pass_on(self, work: Future[Any]) -> None:
        with self._lock:
            self.is_cancelled = work.cancelled()
            if not self.is_cancelled:
                self._problem = work.exception()
                self._result = None if self._problem is not None else work.result()
            self._work, followers, self._followers = None, self._followers, []
        for follower in followers:
            self._tell(follower)

    def _tell(self, follower: Future[Any]) -> None:
        with suppress(InvalidStateError):  # its client has left by now
            if self.is_cancelled:
                follower.cancel()
            elif self._problem is not None:
                follower.set_exception(self._problem)
            else:
                follower.set_result(self._result)

    def _left(self, follower: Future[Any]) -> None:
        if not follower.cancelled():
            return
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)
            work = None if self._followers else self._work
        if work is not None:
            work.cancel()
