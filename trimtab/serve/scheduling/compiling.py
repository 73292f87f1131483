"""Compiling the schemas of answers on separate threads, where clients take turns, each with a process that can be ended.

A schema may take seconds to compile, and some never end. The threads delay neither tokens nor prompts, and a client uses one of
them at a time: slow schemas of one client delay no other client. Each grammar is compiled first in the thread's process
(prover.py), which is killed at its limits and when the client leaves. Threads are daemons: the worker ends without waiting for
them, and the processes end with it.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.serve.contract.log import drop_tracebacks, write_traceback
from trimtab.serve.contract.turns import ClientTurns
from trimtab.serve.grammar.prover import GrammarProver, Proof, ProverError
from trimtab.serve.grammar.source import GrammarSource
from trimtab.serve.scheduling.scheduler import MistakeError

# Threads, and so processes: while one client's grammar is slow in one and a second one restarts after it, others have the third.
# A process takes 35 MiB for a small vocabulary, 150 for one of 262,000 tokens.
MOST_AT_ONCE = 3
# Sources whose grammars are known to compile within the limits.
KEPT_PROOFS, KEPT_LETTERS = 256, 16 * 2**20
_OURS = "\0"  # no client's name


@dataclass(eq=False)
class _Entry:
    client: str
    future: Future[Any]
    work: Callable[[], Any]


class Compiling:
    """The threads, which begin with the first work and end when this is collected. most: how many there are."""

    def __init__(self, *, most: int = MOST_AT_ONCE) -> None:
        self._most, self._state = most, _State()
        weakref.finalize(self, self._state.close)

    def submit(self, client: str, future: Future[Any], work: Callable[[], Any]) -> None:
        """Do a client's work in its turn, none of it while another work of the client is done.

        future: it becomes the result or the exception of `work`. Cancelling it ends its compile by `prove`; work whose future
        is cancelled before its turn is not begun. Errors, in the future: MistakeError if no thread can be started.
        """
        state = self._state
        try:
            with state.changed:
                if not state.idle and len(state.provers) < self._most:
                    prover = GrammarProver()
                    thread = threading.Thread(target=_run, args=(state, prover), name="trimtab-schema", daemon=True)
                    thread.start()
                    state.provers.append(prover)
                state.turns.add(_Entry(client, future, work))
                state.changed.notify()
        except RuntimeError as exc:  # the system has no thread left; the next schema tries again
            if state.provers:  # another thread takes it in its turn
                with state.changed:
                    state.turns.add(_Entry(client, future, work))
            elif future.set_running_or_notify_cancel():
                future.set_exception(MistakeError(write_traceback(exc, "starting the thread that compiles schemas")))

    def prove(self, source: GrammarSource, vocabulary: Callable[[], bytes]) -> Proof:
        """Compile a source in the process of this thread, or another's if it has none; known ones are not compiled again.

        Errors: as `GrammarProver.prove`.
        """
        key = hashlib.sha256(source.to_json().encode()).digest()
        if (proof := self._state.known(key)) is not None:
            return proof
        if (prover := getattr(self._state.thread, "prover", None)) is None:
            future: Future[Proof] = Future()
            self.submit(_OURS, future, lambda: self.prove(source, vocabulary))
            return future.result()
        entry = self._state.thread.entry
        proof = prover.prove(source, vocabulary, lambda: not entry.future.cancelled())
        self._state.keep(key, proof)
        return proof

    def warm(self, vocabulary: Callable[[], bytes]) -> Future[Any]:
        """Start the first process before a schema needs it. Returns its future."""
        future: Future[Any] = Future()
        self.submit(_OURS, future, lambda: self._state.thread.prover.start(vocabulary))
        return future

    @property
    def pids(self) -> list[int]:
        """The processes that are running."""
        return [pid for prover in list(self._state.provers) if (pid := prover.pid) is not None]

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


class _State:
    """The shared state of the threads. It does not refer to its owner, which ends them when it is collected."""

    def __init__(self) -> None:
        self.turns: ClientTurns[_Entry] = ClientTurns()
        self.changed = threading.Condition()
        self.idle = 0
        self.is_closed = False
        self.provers: list[GrammarProver] = []
        # The prover and the entry of each thread.
        self.thread = threading.local()
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

    def take(self) -> _Entry | None:
        """Return the next entry of a client of which none is being done; None once there is no owner."""
        with self.changed:
            self.idle += 1
            while not self.is_closed:
                for entry in self.turns.in_turn():
                    if not self.turns.running(entry.client):
                        self.turns.begin(entry)
                        self.idle -= 1
                        return entry
                self.changed.wait()
            return None

    def end(self, client: str) -> None:
        with self.changed:
            self.turns.end(client)
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        for prover in self.provers:
            prover.close()


def _run(state: _State, prover: GrammarProver) -> None:
    state.thread.prover = prover
    while (entry := state.take()) is not None:
        state.thread.entry = entry
        if not entry.future.cancelled():
            _do(entry)
        state.thread.entry = None
        state.end(entry.client)
        del entry  # its inputs, while the thread waits
        try:
            prover.renew()
        except ProverError as exc:  # the next grammar tries again, and says so
            write_traceback(exc, "starting the process that compiles grammars")


def _do(entry: _Entry) -> None:
    result: Any = None
    problem: BaseException | None = None
    try:
        result = entry.work()
    except BaseException as exc:  # a panic of a library in Rust is no Exception; the thread goes on with the next entry
        drop_tracebacks(exc)
        problem = exc
    # Until now it could be cancelled, which ends its process.
    if not entry.future.set_running_or_notify_cancel():
        return
    if problem is None:
        entry.future.set_result(result)
    else:
        entry.future.set_exception(problem)


def _cancel_too(earlier: weakref.ref[Future[Any]], future: Future[Any]) -> None:
    if future.cancelled() and (prepared := earlier()) is not None:
        prepared.cancel()
