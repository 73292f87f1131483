"""A server in a process of its own: started, waited for, asked for its worker's id and memory, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench import client
from trimtab.demo.demo import ADAPTERS, FOLDER

READY_S = 300.0
DEMO = [
    str(FOLDER / "base"), "--name", "demo", "--context", "512", "--audio-s", "1", "--device", "cpu",
    *(word for name in ADAPTERS for word in ("--adapter", f"{name}={FOLDER / 'adapters' / name}")),
]  # fmt: skip


# Told the server's process id. Its stdin ends with the process that started it; a byte before says that the server is gone.
GUARD = "import os, signal, sys; sys.stdin.buffer.read(1) or os.kill(int(sys.argv[1]), signal.SIGTERM)"


class Served:
    """`with Served(arguments) as server:` runs a server command until the block ends.

    command: what comes before the arguments. log: everything that it wrote to stderr so far. If the process that started it is
    killed, the server ends too: another process of its own waits for that (`GUARD`).
    """

    def __init__(
        self, arguments: Sequence[str] = DEMO, *, command: Sequence[str] = ("-m", "trimtab", "serve"),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._log = tempfile.NamedTemporaryFile("w+b", suffix=".log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *command, *arguments, "--port", "0"], stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, env={**os.environ, **(environment or {})}, start_new_session=os.name == "posix",
        )  # fmt: skip
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(self.process.pid)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=os.name == "posix",
        )  # fmt: skip
        self.address = ""

    def __enter__(self) -> Served:
        try:
            self.address = self._address()
            self.wait_ready(READY_S)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def _address(self) -> str:
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process.poll() is None:
            for word in self.log.split():
                if word.startswith("http://"):
                    return word[7:]
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start:\n{self.log[-2000:]}")

    def is_ready(self) -> bool:
        try:
            return client.get(self.address, "/ready")[0] == 200
        except OSError:
            return False

    def _has_failed(self) -> bool:
        try:
            return bool(self.status()["state"] == "failed")
        except (OSError, LookupError):  # LookupError: the server asks for a key
            return False

    def wait_ready(self, timeout_s: float) -> float:
        """Return the seconds until it was ready. Errors: RuntimeError if it ended or time is over."""
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log[-2000:]}")
            if self.is_ready():
                return time.monotonic() - start
            if self._has_failed():
                raise RuntimeError(f"the model cannot be loaded:\n{self.log[-2000:]}")
            time.sleep(0.02)
        raise RuntimeError(f"not ready after {timeout_s} s:\n{self.log[-2000:]}")

    def body_of(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request as this server takes it."""
        return body

    def notes(self) -> dict[str, Any]:
        """Return what a row of this server's figures has to say of it."""
        return {}

    def status(self) -> dict[str, Any]:
        """Return what the server says of its one model."""
        found: dict[str, Any] = client.get(self.address, "/api/status")[1]["models"][0]
        return found

    def wait_quiet(self, timeout_s: float) -> dict[str, Any]:
        """Return the status once no request is being answered, or the last one when time is over."""
        end = time.monotonic() + timeout_s
        while True:
            found = self.status()
            numbers = found["numbers"]
            is_quiet = not found["in_flight"] and not numbers.get("running") and not numbers.get("waiting")
            if is_quiet or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def worker_pid(self) -> int | None:
        """Return the process id of the worker, None while there is none. Linux only: read from /proc."""
        return next((pid for pid in _children(self.process.pid) if "spawn_main" in _command_of(pid)), None)

    def kill_worker(self) -> int | None:
        """End the worker with SIGKILL; returns which process that was."""
        pid = self.worker_pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid

    def resident_bytes(self) -> tuple[int, int]:
        """Return the resident memory of the API process and of the worker."""
        worker = self.worker_pid()
        return rss_bytes(self.process.pid), 0 if worker is None else rss_bytes(worker)

    def end(self, *, grace_s: float = 20.0) -> int:
        """Ask it to end, force it when time is over, and return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            if os.name == "posix":
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nobody else's process is in it
            else:
                self.process.kill()
            return self.process.wait()
        finally:
            self._log.close()
            with contextlib.suppress(OSError, ValueError):
                self._guard.communicate(b".", timeout=grace_s)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def rss_bytes(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
