"""The requests that wait for one adapter: clients take turns, and the requests of one client keep their order.

While a client waits for its turn, every other client has at most one. A client that comes while the prompt of another one is
computed precedes the next prompt of that one. The choices of one request (`Job.group`) share a prompt, so they are one turn. A
client alone has every turn. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, Protocol, TypeVar

from trimtab.serve.job import Job


class Waiting(Protocol):
    """A request in a line."""

    job: Job


Entry = TypeVar("Entry", bound=Waiting)


class Line(Generic[Entry]):
    """Requests by client (`Job.sender`), the client whose turn is longest ago first. The client that had the last turn stays at the
    front and is skipped, so that clients who come before the next turn precede it."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, deque[Entry]] = OrderedDict()
        self._skipped: str | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._by_client.get(entry.job.sender, ())

    @property
    def first(self) -> Entry:
        """The request whose turn it is. The line must not be empty."""
        clients = iter(self._by_client)
        client = next(clients)
        if client == self._skipped:
            client = next(clients, client)
        return self._by_client[client][0]

    def add(self, entry: Entry) -> None:
        """Put a request behind the others of its client; a client without waiting requests comes behind the other clients."""
        self._by_client.setdefault(entry.job.sender, deque()).append(entry)

    def take(self) -> Entry:
        """Remove and return `first`. If more choices of the same request follow, they are next."""
        entry = self.first
        client, group = entry.job.sender, entry.job.group
        if self._skipped is not None and self._skipped in self._by_client:
            self._by_client.move_to_end(self._skipped)
        self.remove(entry)
        self._skipped = client
        if client in self._by_client:
            self._by_client.move_to_end(client, last=False)
            if group and self._by_client[client][0].job.group == group:
                self._skipped = None
        return entry

    def remove(self, entry: Entry) -> None:
        """Remove a request: its client has left. Errors: KeyError or ValueError if it is not in the line."""
        client = entry.job.sender
        self._by_client[client].remove(entry)
        if not self._by_client[client]:
            del self._by_client[client]
