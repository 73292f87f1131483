"""The requests that wait for a row, in one line for each adapter: clients take turns, and a client's requests for one adapter
keep their order.

Between two turns of one client, every other client gets at most one turn, regardless of adapter. A client that arrives while the
prompt of another one is computed precedes the next prompt of that one. A client's own adapters take turns too. The choices of one
request (`Job.group`) share a prompt, so they are one turn. A client alone has every turn. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from typing import Generic, Protocol, TypeVar

from trimtab.serve.contract.job import Job


class Waiting(Protocol):
    """A request in a line."""

    job: Job


Entry = TypeVar("Entry", bound=Waiting)


class FairQueue(Generic[Entry]):
    """Requests by client (`Job.sender`) and adapter, the client whose turn is longest ago first. The client that had the last turn
    stays at the front and is skipped, so that clients that arrive before the next turn precede it."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, OrderedDict[str | None, deque[Entry]]] = OrderedDict()
        self._skipped: str | None = None
        # adapter -> its clients; the adapter that was served longest ago first.
        self._clients: OrderedDict[str | None, set[str]] = OrderedDict()
        # adapter -> how often others were taken although it came first.
        self.overtaken: dict[str | None, int] = {}

    def __len__(self) -> int:
        return sum(len(line) for lines in self._by_client.values() for line in lines.values())

    def __contains__(self, entry: Entry) -> bool:
        lines = self._by_client.get(entry.job.sender)
        return lines is not None and entry in lines.get(entry.job.adapter, ())

    @property
    def adapters(self) -> list[tuple[str | None, set[str]]]:
        """Each adapter that has a line and the clients in it, the one that was served longest ago first."""
        return list(self._clients.items())

    def add(self, entry: Entry) -> None:
        """Put a request behind the others of its client and adapter; a client without waiting requests comes behind the others."""
        client, adapter = entry.job.sender, entry.job.adapter
        self._by_client.setdefault(client, OrderedDict()).setdefault(adapter, deque()).append(entry)
        self._clients.setdefault(adapter, set()).add(client)
        self.overtaken.setdefault(adapter, 0)

    def first(self, may_begin: Container[str | None], fits: Callable[[Entry], bool] | None = None) -> Entry | None:
        """Return the request whose turn it is among those for certain adapters. None if there is none. fits: whether it can be
        taken now; others pass one that cannot."""
        clients = list(self._by_client)
        if clients and clients[0] == self._skipped:
            clients.append(clients.pop(0))
        for client in clients:
            for adapter, line in self._by_client[client].items():
                if adapter not in may_begin:
                    continue
                found = line[0] if fits is None else next((entry for entry in line if fits(entry)), None)
                if found is not None:
                    return found
        return None

    def take(self, entry: Entry) -> None:
        """Remove what `first` returned. If more choices of the same request follow, they are next."""
        client, adapter, group = entry.job.sender, entry.job.adapter, entry.job.group
        if self._skipped is not None and self._skipped in self._by_client:
            self._by_client.move_to_end(self._skipped)
        self.remove(entry)
        self._skipped = client
        if adapter in self._clients:
            self._clients.move_to_end(adapter)
            self.overtaken[adapter] = 0
        lines = self._by_client.get(client)
        if lines is None:
            return
        self._by_client.move_to_end(client, last=False)
        if adapter not in lines:
            return
        has_more = bool(group) and lines[adapter][0].job.group == group
        lines.move_to_end(adapter, last=not has_more)
        if has_more:
            self._skipped = None

    def remove(self, entry: Entry) -> None:
        """Remove a request: its client has left. Errors: KeyError or ValueError if it is not in a line."""
        client, adapter = entry.job.sender, entry.job.adapter
        lines = self._by_client[client]
        lines[adapter].remove(entry)
        if lines[adapter]:
            return
        del lines[adapter]
        self._clients[adapter].discard(client)
        if not self._clients[adapter]:
            del self._clients[adapter], self.overtaken[adapter]
        if not lines:
            del self._by_client[client]
