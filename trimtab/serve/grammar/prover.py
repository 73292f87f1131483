"""How is the process that compiles grammars started, limited and ended?"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trimtab.errors import RequestError
from trimtab.process.runner import INSIDE, leave_cores, resident_bytes
from trimtab.serve.grammar.child import MOST_BYTES, MOST_S, read_frame, write_frame
from trimtab.serve.grammar.source import GrammarSource

MODULE = "trimtab.serve.grammar.child"
# The interval of checks of its time, its memory and its client. An answer is read at once.
POLL_S = 0.05
# Reading the vocabulary takes 1.1 s for 262,000 tokens.
START_S = 60.0
# After that time a grammar leaves the cores to others. A process of low priority, or one that grew, is not used again.
SLOW_S, SLOW_NICE, GROWN_BYTES = 0.5, 10, 16 * 2**20


class ProverError(Exception):
    """The process cannot be started, or failed by itself."""


@dataclass(frozen=True)
class Proof:
    """The grammars of a source, which compile within the limits, by how many bytes that made the process larger, and how much
    processor time it took."""

    grammars: Mapping[str, str]
    nbytes: int
    seconds: float = 0.0

    @property
    def letters(self) -> int:
        return sum(map(len, self.grammars.values()))


class GrammarProver:
    """The process, which begins with `start` or the first grammar. command: another program to start, for tests.

    One thread uses it; `close` may be called by another. llguidance has no bound for some grammars, and a matcher cannot travel
    between processes: a source that compiled there is compiled here again (docs/decisions/0035).
    """

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, str(INSIDE), MODULE]
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._vocabulary = b""
        self._start_bytes, self._is_slow, self._is_closed = 0, False, False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, vocabulary: bytes = b"") -> None:
        """Have a process that waits for a grammar. vocabulary: known from then on. Errors: ProverError."""
        if self._process is not None and self._process.poll() is None:
            return
        self._vocabulary = self._vocabulary or vocabulary
        if not self._vocabulary or self._is_closed:
            return
        self._end()
        options: dict[str, Any] = {"start_new_session": True}
        if os.name == "nt":
            options = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options
            )
        except OSError as exc:
            raise ProverError(f"the process that compiles grammars cannot be started ({exc.strerror})") from exc
        self._process, self._answers, self._is_slow = process, queue.SimpleQueue(), False
        threading.Thread(target=_read, args=(process, self._answers), name="trimtab-grammar", daemon=True).start()
        try:
            assert process.stdin is not None
            write_frame(process.stdin, self._vocabulary)
            if self._answers.get(timeout=START_S) is None:
                raise EOFError
        except (OSError, EOFError, queue.Empty) as exc:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            code = process.poll()
            self._end()
            raise ProverError(f"the process that compiles grammars ended at its start (exit code {code})") from exc
        self._start_bytes = self._bytes()

    def renew(self) -> None:
        """Start another process where the last one was ended, grew or has a low priority. Errors: ProverError."""
        if self._process is not None and (self._is_slow or self._bytes() > self._start_bytes + GROWN_BYTES):
            self._end()
        self.start()

    def prove(self, source: GrammarSource, vocabulary: bytes, is_wanted: Callable[[], bool]) -> Proof:
        """Compile the grammars of a source in the process.

        is_wanted: asked every 50 ms; once it is False the process is ended. Errors: CancelledError then. RequestError for a source
        that cannot be enforced, or not within `MOST_S` and `MOST_BYTES`. ProverError.
        """
        self.start(vocabulary)
        process = self._process
        if process is None:  # closed
            raise CancelledError
        assert process.stdin is not None
        before = self._bytes()
        try:
            write_frame(process.stdin, source.to_json().encode())
            data = self._watched(source.field, is_wanted)
        except BrokenPipeError:
            data = None
        except BaseException:
            self._end()
            raise
        if data is None:
            code = process.wait()
            self._end()
            raise RequestError(
                "cannot be compiled: it ended the process that compiles it", field=source.field,
                hint=f"Exit code {code}. A grammar has {MOST_BYTES // 2**20} MiB; make the schema smaller",
            )  # fmt: skip
        answer = json.loads(data)
        if "mistake" in answer:
            raise ProverError(answer["mistake"])
        if "reason" in answer:
            raise RequestError(answer["reason"], field=answer["field"])
        return Proof(answer["grammars"], max(0, self._bytes() - before), answer["seconds"])

    def _watched(self, field: str, is_wanted: Callable[[], bool]) -> bytes | None:
        """Return the answer, None if the process ended. Errors: CancelledError, RequestError at a limit."""
        process = self._process
        assert process is not None
        start = time.monotonic()
        while True:
            with suppress(queue.Empty):
                return self._answers.get(timeout=POLL_S)
            if not is_wanted():
                raise CancelledError
            spent_s, nbytes = time.monotonic() - start, self._bytes() - self._start_bytes
            if nbytes > MOST_BYTES:
                raise _too_much(f"more than {MOST_BYTES // 2**20} MiB", field)
            if spent_s > MOST_S:
                raise _too_much(f"longer than {MOST_S:g} s", field)
            if spent_s > SLOW_S and not self._is_slow:
                self._is_slow = True
                leave_cores(process.pid, SLOW_NICE)

    def _bytes(self) -> int:
        return resident_bytes(self.pid)

    def close(self) -> None:
        """End the process permanently."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()


def _too_much(what: str, field: str) -> RequestError:
    return RequestError(
        f"takes {what} to compile, the limit of a grammar", field=field,
        hint="Make the schema simpler: fewer branches, shorter counted repeats, smaller multipleOf",
    )  # fmt: skip


def _read(process: subprocess.Popen[bytes], answers: queue.SimpleQueue[bytes | None]) -> None:
    assert process.stdout is not None
    with suppress(EOFError, OSError, ValueError):
        while True:
            answers.put(read_frame(process.stdout))
    answers.put(None)
