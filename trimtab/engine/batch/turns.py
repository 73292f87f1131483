"""Turns of a loaded model: one answer at a time, in the order in which threads called."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from trimtab.errors import RequestError


class Turns:
    """One holder at a time; others wait, first come first served.

    A thread that has an unfinished answer and starts a second one would wait for itself: that is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._waiting: deque[tuple[threading.Event, int]] = deque()

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Wait for the turn and keep it inside. what: the field of the error. Errors: RequestError."""
        self._acquire(what)
        try:
            yield
        finally:
            self._release()

    def _acquire(self, what: str) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._owner is None:
                self._owner = me
                return
            if self._owner == me:
                raise RequestError(
                    "another answer is still running", field=what, hint="Read it to the end or close its generator first"
                )
            mine = (threading.Event(), me)
            self._waiting.append(mine)
        try:
            mine[0].wait()
        except BaseException:  # Ctrl-C while waiting
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    raise
            self._release()
            raise

    def _release(self) -> None:
        with self._lock:
            if not self._waiting:
                self._owner = None
                return
            event, self._owner = self._waiting.popleft()
            event.set()
