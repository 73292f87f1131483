"""Compiling the schemas of answers on a separate thread, on which clients take turns.

A schema may take seconds to compile. The thread delays neither tokens nor prompts, and a client whose schemas are slow delays
another client's by one of them. A compile cannot be stopped, so the thread is a daemon: the process ends without waiting for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.serve.client_turns import ClientTurns
from trimtab.serve.journal import drop_tracebacks, write_traceback
from trimtab.serve.scheduler import MistakeError


@dataclass(eq=False)
class _Entry:
    client: str
    future: Future[Any]
    work: Callable[[], Any]


class Compiling:
    """The thread, which begins with the first work."""

    def __init__(self) -> None:
        self._turns: ClientTurns[_Entry] = ClientTurns()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, client: str, future: Future[Any], work: Callable[[], Any]) -> None:
        """Do a client's work in its turn. future: it becomes the result or the exception of `work`; work whose future is cancelled
        before its turn is not begun. Errors, in the future: MistakeError if the thread cannot be started."""
        try:
            with self._changed:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="trimtab-schema", daemon=True)
                    thread.start()
                    self._thread = thread
                self._turns.add(_Entry(client, future, work))
                self._changed.notify()
        except RuntimeError as exc:  # the system has no thread left; the next schema tries again
            if future.set_running_or_notify_cancel():
                future.set_exception(MistakeError(write_traceback(exc, "starting the thread that compiles schemas")))

    def after(self, earlier: Future[Any], client: str, work: Callable[[Any], Any]) -> Future[Any]:
        """Return the future of `work(result)` with the result of an earlier future, whose exception it has otherwise. Cancelling it
        cancels the earlier one, too."""
        future: Future[Any] = Future()
        # A future keeps its callbacks for ever: two that referred to each other would keep the inputs until they are collected.
        future.add_done_callback(partial(_cancel_too, weakref.ref(earlier)))
        earlier.add_done_callback(partial(self._submit_after, client, future, work))
        return future

    def _submit_after(self, client: str, future: Future[Any], work: Callable[[Any], Any], earlier: Future[Any]) -> None:
        if earlier.cancelled() or future.cancelled():
            return
        if (exc := earlier.exception()) is None:
            self.submit(client, future, partial(work, earlier.result()))
        elif future.set_running_or_notify_cancel():
            future.set_exception(exc)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (entry := self._turns.take()) is None:
                    self._changed.wait()
            if entry.future.set_running_or_notify_cancel():
                _do(entry)
            with self._changed:
                self._turns.end(entry.client)
            del entry  # its inputs, while the thread waits


def _do(entry: _Entry) -> None:
    try:
        result = entry.work()
    except BaseException as exc:  # a panic of a library in Rust is no Exception; the thread goes on with the next entry
        drop_tracebacks(exc)
        entry.future.set_exception(exc)
    else:
        entry.future.set_result(result)


def _cancel_too(earlier: weakref.ref[Future[Any]], future: Future[Any]) -> None:
    if future.cancelled() and (prepared := earlier()) is not None:
        prepared.cancel()
