"""Compiling the schemas of answers on a separate thread, on which clients take turns.

A schema may take seconds to compile. The thread delays neither tokens nor prompts, and a client whose schemas are slow delays
another client's by one of them. A compile cannot be stopped, so the thread is a daemon: the process ends without waiting for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from trimtab.serve.client_turns import ClientTurns


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
        before its turn is not begun."""
        with self._changed:
            self._turns.add(_Entry(client, future, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trimtab-schema", daemon=True)
                self._thread.start()
            self._changed.notify()

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
        entry.future.set_exception(exc)
    else:
        entry.future.set_result(result)
