"""Whose turn is it among requests that wait for a row and work that waits for a thread?"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from trimtab.serve.contract.job import Job
from trimtab.serve.contract.log import drop_tracebacks


class Turn(NamedTuple):
    """Whose turn a piece of work is, as the fields of a job say it."""

    sender: str
    adapter: str | None = None
    group: str = ""


class Waiting(Protocol):
    """A request or piece of work in a queue."""

    @property
    def job(self) -> Job | Turn: ...


Entry = TypeVar("Entry", bound=Waiting)


class FairQueue(Generic[Entry]):
    """Requests by client (`Job.sender`) and adapter, the client whose turn is longest ago first. The client that had the last turn
    stays at the front and is skipped, so that clients that arrive before the next turn precede it. Between two turns of one client,
    every other client gets at most one turn. A client's adapters take turns too; its requests for one adapter keep their order. The
    choices of one request (`Job.group`) are one turn. A client is an API key, or an address without keys (`Job.sender`)."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, OrderedDict[str | None, deque[Entry]]] = OrderedDict()
        self._skipped: str | None = None
        # adapter -> its clients; the adapter that was served longest ago first.
        self._clients: OrderedDict[str | None, set[str]] = OrderedDict()
        # adapter -> how often others were taken although it came first.
        self.overtaken: dict[str | None, int] = {}
        self._running: Counter[str] = Counter()

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
        in_turn = (entry for entry in self.in_turn() if entry.job.adapter in may_begin and (fits is None or fits(entry)))
        return next(in_turn, None)

    def in_turn(self) -> Iterator[Entry]:
        """Yield the requests in the order of their turns; clients with less that was begun and has not ended come first."""
        clients = list(self._by_client)
        if clients and clients[0] == self._skipped:
            clients.append(clients.pop(0))
        for client in sorted(clients, key=self._running.__getitem__):
            for line in self._by_client[client].values():
                yield from line

    def running(self, client: str) -> int:
        """Return how much of a client was begun and has not ended."""
        return self._running[client]

    def has_other_than(self, client: str) -> bool:
        """Whether another client waits."""
        return any(other != client for other in self._by_client)

    def begin(self, entry: Entry) -> None:
        """Remove work that is begun on a thread; `end` is called once it has ended."""
        self.take(entry)
        self._running[entry.job.sender] += 1

    def end(self, client: str) -> None:
        """Let a client come after those that arrived while its work was done."""
        self._running[client] -= 1
        self._running += Counter()  # clients without running work are dropped
        if client in self._by_client:
            self._by_client.move_to_end(client)
        if self._skipped == client:
            self._skipped = None

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


@dataclass(eq=False)
class Work:
    """Work of a client. future: cancelled if it is not needed any more; before its turn that is enough to forget it."""

    job: Turn
    future: Future[Any]


AnyWork = TypeVar("AnyWork", bound=Work)


class FairPool:
    """The threads that do the work of several lines, each up to its limit; one begins when work may begin and none is free.

    They are daemons: the process ends without waiting for them.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lines: list[WorkLine[Any]] = []
        self.threads: list[threading.Thread] = []
        self._idle, self.is_closed = 0, False

    def needs_thread(self, line: WorkLine[Any]) -> bool:
        """Whether no thread is free for one more work of a line that may begin it. Called with the lock."""
        waiting = sum(len(one.turns) for one in self.lines)
        return waiting >= self._idle and line.busy < line.most and len(self.threads) < sum(one.most for one in self.lines)

    def start_thread(self) -> None:
        """Start one more. Errors: RuntimeError if the system starts no thread and there is none."""
        thread = threading.Thread(target=self._run, name="trimtab-pool", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left: those that run do the work
            if not self.threads:
                raise
        else:
            self.threads.append(thread)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            line, work = taken
            try:
                line.do(work)
            finally:
                line.end(work)
            del work, taken  # its inputs, while the thread waits
            line.rest()
            line.leave_thread()

    def _next(self) -> tuple[WorkLine[Any], Any] | None:
        with self.changed:
            self._idle += 1
            while not self.is_closed:
                for line in self.lines:
                    if len(line.turns) and line.busy < line.most and (work := line.choose()) is not None:
                        self._idle -= 1
                        line.begin(work)
                        return line, work
                self.changed.wait(min((one.look_s for one in self.lines if len(one.turns)), default=None))
            return None

    def close(self) -> None:
        """Let the threads end, each after its work."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class WorkLine(Generic[AnyWork]):
    """Work of one kind that waits for threads; clients take turns. most: how much is done at once. look_s: seconds after which a
    free thread looks for work that may begin, if nothing changed.

    A line has its own turns: a client whose image is slow has its turn for a text.
    """

    def __init__(self, pool: FairPool, most: int, *, look_s: float = threading.TIMEOUT_MAX) -> None:
        self.pool, self.changed, self.most, self.look_s = pool, pool.changed, most, look_s
        self.turns: FairQueue[AnyWork] = FairQueue()
        self.busy = 0
        with self.changed:
            pool.lines.append(self)

    @abstractmethod
    def choose(self) -> AnyWork | None:
        """Return the work that is begun next, None if none may begin now. Called with the lock."""

    @abstractmethod
    def do(self, work: AnyWork) -> None:
        """Do the work and set its future."""

    def rest(self) -> None:
        """Called on the thread after each work, before it does another."""

    def begin(self, work: AnyWork) -> None:
        """Take work to a thread. Called with the lock."""
        self.busy += 1
        self.turns.begin(work)

    def end(self, work: AnyWork) -> None:
        with self.changed:
            self.turns.end(work.job.sender)
            self.changed.notify_all()

    def leave_thread(self) -> None:
        with self.changed:
            self.busy -= 1
            self.changed.notify_all()

    def put(self, work: AnyWork) -> None:
        """Let work wait for its turn. Errors: RuntimeError if the system starts no thread and there is none."""
        with self.changed:
            if self.pool.needs_thread(self):
                self.pool.start_thread()
            self.turns.add(work)
            self.changed.notify_all()
        work.future.add_done_callback(partial(self._is_done, weakref.ref(work)))

    def _is_done(self, waiting: weakref.ref[AnyWork], future: Future[Any]) -> None:
        """Forget work whose client has left, and let others begin that waited behind it."""
        if future.cancelled():
            with self.changed:
                if (work := waiting()) is not None and work in self.turns:
                    self.turns.remove(work)
                self.changed.notify_all()


def settle(future: Future[Any], work: Callable[[], Any], *, is_running: bool = False) -> None:
    """Set a future to the result of work, or to its exception without its frames. is_running: whether it was begun; if not, it can
    be cancelled until the work has ended."""
    result: Any = None
    problem: BaseException | None = None
    try:
        result = work()
    except BaseException as exc:  # a panic of a library in Rust is no Exception; the thread goes on
        drop_tracebacks(exc)
        problem = exc
    if not is_running and not future.set_running_or_notify_cancel():
        return
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(problem)
