"""On which threads are the schemas of answers compiled, and whose turn is it?"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.serve.contract.log import write_traceback
from trimtab.serve.grammar.prover import GrammarProver, Proof, ProverError
from trimtab.serve.grammar.source import GrammarSource
from trimtab.serve.scheduling.queue import FairPool, Turn, Work, WorkLine, settle
from trimtab.serve.scheduling.scheduler import MistakeError

# Threads, and so processes: while one client's grammar is slow in one and a second one restarts after it, others have the third.
# A process takes 35 MiB for a small vocabulary, 150 for one of 262,000 tokens.
MOST_AT_ONCE = 3
# Sources whose grammars are known to compile within the limits.
KEPT_PROOFS, KEPT_LETTERS = 256, 16 * 2**20
_OURS = "\0"  # no client's name


@dataclass(eq=False)
class _Compile(Work):
    do: Callable[[], Any]


class Compiling:
    """The compiles that wait; the processes and the pool's threads end when this is collected. most: how many are done at once. A
    client uses one thread at a time: its slow schemas delay no other client. The processes are killed at their limits and when the
    client leaves."""

    def __init__(self, pool: FairPool | None = None, *, most: int = MOST_AT_ONCE) -> None:
        self._line = _Line(pool or FairPool(), most)
        weakref.finalize(self, _close, weakref.ref(self._line.pool), self._line.provers)

    def submit(self, client: str, future: Future[Any], work: Callable[[], Any]) -> None:
        """Do a client's work in its turn, none of it while another work of the client is done.

        future: it becomes the result or the exception of `work`. Cancelling it ends its compile by `prove`; work whose future
        is cancelled before its turn is not begun. Errors, in the future: MistakeError if no thread can be started.
        """
        try:
            self._line.put(_Compile(Turn(client), future, work))
        except RuntimeError as exc:  # the system has no thread left; the next schema tries again
            if future.set_running_or_notify_cancel():
                future.set_exception(MistakeError(write_traceback(exc, "starting the thread that compiles schemas")))

    def prove(self, source: GrammarSource, vocabulary: bytes) -> Proof:
        """Compile a source in the process of this thread, or another's if it has none; known ones are not compiled again.

        Errors: as `GrammarProver.prove`.
        """
        key = hashlib.sha256(source.to_json().encode()).digest()
        if (proof := self._line.known(key)) is not None:
            return proof
        if (prover := getattr(self._line.here, "prover", None)) is None:
            future: Future[Proof] = Future()
            self.submit(_OURS, future, lambda: self.prove(source, vocabulary))
            return future.result()
        work = self._line.here.work
        proof = prover.prove(source, vocabulary, lambda: not work.future.cancelled())
        self._line.keep(key, proof)
        return proof

    def warm(self, vocabulary: bytes) -> Future[Any]:
        """Start the first process before a schema needs it. Returns its future."""
        future: Future[Any] = Future()
        self.submit(_OURS, future, lambda: self._line.here.prover.start(vocabulary))
        return future

    @property
    def pids(self) -> list[int]:
        """The processes that are running."""
        return [pid for prover in list(self._line.provers) if (pid := prover.pid) is not None]

    def after(self, earlier: Future[Any], client: str, work: Callable[[Any], Any]) -> Future[Any]:
        """Return the future of `work(result)` with the result of an earlier future, whose exception it has otherwise. Cancelling it
        cancels the earlier one, too."""
        future: Future[Any] = Future()
        # A future keeps its callbacks permanently: two that referred to each other would keep the inputs until they are collected.
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


class _Line(WorkLine[_Compile]):
    """The compiles, each with a prover. They do not refer to their owner, which ends them when it is collected."""

    def __init__(self, pool: FairPool, most: int) -> None:
        super().__init__(pool, most)
        self.provers: list[GrammarProver] = []
        self._free: list[GrammarProver] = []
        # The prover and the work of a thread that compiles.
        self.here = threading.local()
        self._proofs: OrderedDict[bytes, Proof] = OrderedDict()
        self._letters = 0

    def known(self, key: bytes) -> Proof | None:
        with self.changed:
            if key in self._proofs:
                self._proofs.move_to_end(key)
            return self._proofs.get(key)

    def keep(self, key: bytes, proof: Proof) -> None:
        with self.changed:
            if key in self._proofs:
                return
            self._proofs[key] = proof
            self._letters += proof.letters
            while len(self._proofs) > KEPT_PROOFS or self._letters > KEPT_LETTERS:
                self._letters -= self._proofs.popitem(last=False)[1].letters

    def choose(self) -> _Compile | None:
        """Return the next work of a client of which none is being done."""
        return next((work for work in self.turns.in_turn() if not self.turns.running(work.job.sender)), None)

    def do(self, work: _Compile) -> None:
        with self.changed:
            if not self._free:
                self._free.append(GrammarProver())
                self.provers += self._free
            self.here.prover, self.here.work = self._free.pop(), work
        settle(work.future, work.do)  # until it has ended it can be cancelled, which ends its process
        self.here.work = None

    def rest(self) -> None:
        prover, self.here.prover = self.here.prover, None
        try:
            prover.renew()
        except ProverError as exc:  # the next grammar tries again, and says so
            write_traceback(exc, "starting the process that compiles grammars")
        self._free.append(prover)


def _close(pool: weakref.ref[FairPool], provers: Sequence[GrammarProver]) -> None:
    if (threads := pool()) is not None:
        threads.close()
    for prover in provers:
        prover.close()


def _cancel_too(earlier: weakref.ref[Future[Any]], future: Future[Any]) -> None:
    if future.cancelled() and (prepared := earlier()) is not None:
        prepared.cancel()
