"""The order of work that waits for a thread: clients take turns, so that many jobs of one client delay others by at
most one.

A client is the same as in the queue of requests: an API key, or an address without keys (`Job.sender`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar


class Waiting(Protocol):
    """Work of one client. future: cancelled if the work is not needed any more."""

    @property
    def client(self) -> str: ...

    @property
    def future(self) -> Future[Any]: ...


Entry = TypeVar("Entry", bound=Waiting)


class ClientTurns(Generic[Entry]):
    """Waiting work, and the running work of each client. The caller holds a lock around every call."""

    def __init__(self) -> None:
        # The client whose last turn is the oldest comes first. Clients without waiting work are not stored.
        self._waiting: OrderedDict[str, list[Entry]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def running(self, client: str) -> int:
        return self._running[client]

    def add(self, entry: Entry) -> None:
        """Add an entry after all others of its client. Cancelled entries are dropped: otherwise a client that keeps
        cancelling would accumulate entries while the threads are busy.
        """
        self._drop_cancelled()
        self._waiting.setdefault(entry.client, []).append(entry)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def has_other_than(self, client: str) -> bool:
        """Whether work of another client waits."""
        return any(other != client for other in self._waiting)

    def in_turn(self) -> Iterator[Entry]:
        """Yield the waiting entries in order: the client with the least running work first, then the one whose last
        turn is the oldest, and the oldest entry of each first.
        """
        self._drop_cancelled()
        for client in sorted(self._waiting, key=self._running.__getitem__):
            yield from self._waiting[client]

    def take(self) -> Entry | None:
        """Begin the next entry and return it; None without a waiting entry."""
        entry = next(self.in_turn(), None)
        if entry is not None:
            self.begin(entry)
        return entry

    def begin(self, entry: Entry) -> None:
        """Count a waiting entry as running. The caller reports its end with `end`."""
        self._waiting[entry.client].remove(entry)
        self._drop_if_empty(entry.client)
        self._running[entry.client] += 1
        self._put_last(entry.client)

    def end(self, client: str) -> None:
        """Count the end of an entry that was begun."""
        self._running[client] -= 1
        self._running += Counter()  # clients without running work are dropped
        self._put_last(client)  # after those who arrived while it ran

    def _put_last(self, client: str) -> None:
        if client in self._waiting:
            self._waiting.move_to_end(client)

    def _drop_cancelled(self) -> None:
        for client in list(self._waiting):
            self._waiting[client] = [entry for entry in self._waiting[client] if not entry.future.cancelled()]
            self._drop_if_empty(client)

    def _drop_if_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]
