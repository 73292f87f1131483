"""The order of work that waits for a thread: clients take turns, so that many jobs of one client delay others by one at most.

A client is what a request's turn in the queue goes by too: an API key, or an address where there are no keys (`Job.sender`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar


class Waiting(Protocol):
    """Work of one client. future: whoever cancels it needs the work no more."""

    @property
    def client(self) -> str: ...

    @property
    def future(self) -> Future[Any]: ...


Entry = TypeVar("Entry", bound=Waiting)


class ClientTurns(Generic[Entry]):
    """Work that waits, and how much of each client is being done. The caller holds a lock around every call."""

    def __init__(self) -> None:
        # The client whose turn is longest ago comes first. Clients without waiting work are not remembered.
        self._waiting: OrderedDict[str, list[Entry]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def running(self, client: str) -> int:
        return self._running[client]

    def add(self, entry: Entry) -> None:
        """Put an entry behind all others of its client. Cancelled entries are dropped: one that leaves again and again would
        otherwise leave entries behind while the threads are busy."""
        self._drop_cancelled()
        self._waiting.setdefault(entry.client, []).append(entry)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def has_other_than(self, client: str) -> bool:
        """Whether work of another client waits."""
        return any(other != client for other in self._waiting)

    def in_turn(self) -> Iterator[Entry]:
        """Give what waits in its order: the client with the least running work first, of those the one whose turn is longest ago,
        and the oldest of each first."""
        self._drop_cancelled()
        for client in sorted(self._waiting, key=self._running.__getitem__):
            yield from self._waiting[client]

    def take(self) -> Entry | None:
        """Begin the next entry and return it; None if nothing waits."""
        entry = next(self.in_turn(), None)
        if entry is not None:
            self.begin(entry)
        return entry

    def begin(self, entry: Entry) -> None:
        """Count an entry that waited as running. The caller reports its end with `end`."""
        self._waiting[entry.client].remove(entry)
        self._drop_if_empty(entry.client)
        self._running[entry.client] += 1
        self._put_last(entry.client)

    def end(self, client: str) -> None:
        """Count the end of an entry that was begun."""
        self._running[client] -= 1
        self._running += Counter()  # clients without running work are dropped
        self._put_last(client)  # behind those who came while it ran

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
