"""How does work run in a separate process with limits on time and memory?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trimtab.errors import RequestError
from trimtab.process.work_folder import work_folder

INSIDE = Path(__file__).with_name("child.py")
POLL_S = 0.05
# To find children, psutil reads all processes of the machine: at every poll, that took a tenth of a core.
CHILDREN_EVERY_S = 0.5
DONE, FAILED, TIMEOUT, OOM_HOST, CRASHED = "done", "failed", "timeout", "oom-host", "crashed"
# A process that hangs uses less CPU time than this share of one core, including all its threads.
IDLE_SHARE = 0.05


@dataclass(frozen=True)
class Activity:
    """Resource use of a process since its start. reads: bytes read, and major page faults."""

    cpu_s: float
    reads: int = 0

    def is_more(self, before: Activity, seconds: float) -> bool:
        """Whether the process was active in the seconds between two measurements."""
        return self.cpu_s - before.cpu_s > IDLE_SHARE * seconds or self.reads > before.reads


def activity_of(pid: int | None) -> Activity | None:
    """Return the activity of a process, None if it is stopped or cannot be inspected."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_STOPPED:
            return None
        times = process.cpu_times()
        reads = 0
        with suppress(AttributeError, psutil.Error):  # macOS has no such counters
            reads = int(process.io_counters().read_bytes)
        if sys.platform == "linux":
            # Field 12, counted after the name in brackets, which may contain spaces.
            reads += int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
        return Activity(float(times.user + times.system), reads)
    except (psutil.Error, OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Outcome:
    """The result of the work.

    ended: "done" (`main` returned), "failed" (an exception left `main`), "timeout" and "oom-host" (killed at the limit,
    by this process or by the system's out-of-memory killer), "crashed" (a signal or an exit inside native code). lines:
    the values given to `emit`, in order. peak_host_bytes: the largest resident size of the process and its children,
    sampled every 50 ms; new children are looked for every half second. stdout, stderr: their last 20,000 characters.
    """

    ended: str
    lines: tuple[dict[str, Any], ...]
    seconds: float
    peak_host_bytes: int
    exit_code: int | None
    stdout: str
    stderr: str


def run_inside(
    module: str,
    request: Mapping[str, Any],
    *,
    python: str | os.PathLike[str] | None = None,
    timeout_s: float = 600.0,
    memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Outcome:
    """Return the outcome of `module.main(request, emit)`.

    python: the interpreter (None: this one). environment: variables to add. on_event: called with each line as it arrives. Errors:
    RequestError if the interpreter cannot be started. Ctrl-C kills the process tree and continues as KeyboardInterrupt. The process
    is started fresh, because a CUDA context does not survive a fork. It ends by itself when its parent ends: its standard input is
    a pipe that the parent holds.
    """
    with work_folder("process") as folder:
        paths = {name: folder / name for name in ("request.json", "lines.jsonl", "stdout", "stderr")}
        paths["request.json"].write_text(json.dumps(dict(request), default=str), encoding="utf-8")
        paths["lines.jsonl"].touch()
        command = [
            os.fspath(python) if python is not None else sys.executable, str(INSIDE), module,
            str(paths["request.json"]), str(paths["lines.jsonl"]), "held",
        ]  # fmt: skip
        with paths["stdout"].open("wb") as out, paths["stderr"].open("wb") as err:
            started = time.monotonic()
            process = _start(command, out, err, environment, cwd)
            reader = _Lines(paths["lines.jsonl"], on_event)
            try:
                killed, peak = _watch(process, reader, started + timeout_s, memory_bytes)
            finally:
                kill_tree(process)
                process.stdin.close()
            seconds = time.monotonic() - started
        reader.read()
        lines = tuple(reader.lines)
        ended = killed or _ending(process.returncode, lines)
        return Outcome(
            ended, tuple(line for line in lines if line.get("event") != "end"), seconds, peak, process.returncode,
            _tail(paths["stdout"]), _tail(paths["stderr"]),
        )  # fmt: skip


def check_python(python: str | os.PathLike[str]) -> None:
    """Raise RequestError if there is no such interpreter. Starts nothing."""
    name = os.fspath(python)
    if shutil.which(name) is None and shutil.which(f"{name}.exe") is None:  # Windows adds ".exe"
        raise RequestError("cannot be started (no such program)", field="python", value=name)


def _start(command: list[str], out: Any, err: Any, environment: Mapping[str, str] | None, cwd: Any) -> Any:
    given = {
        **os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1",
        **(environment or {}),
    }  # fmt: skip
    try:
        return subprocess.Popen(
            command, stdout=out, stderr=err, stdin=subprocess.PIPE, env=given, cwd=cwd,
            start_new_session=os.name == "posix",
        )  # fmt: skip
    except OSError as exc:
        raise RequestError(f"cannot be started ({exc.strerror})", field="python", value=command[0]) from exc


class _Lines:
    """Reads the lines of a growing file. An incomplete last line is read once it is complete."""

    def __init__(self, path: Path, on_event: Callable[[dict[str, Any]], None] | None) -> None:
        self._path, self._on_event, self._at, self._rest = path, on_event, 0, b""
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        for text in whole:
            line = json.loads(text)
            self.lines.append(line)
            if self._on_event is not None and line.get("event") != "end":
                self._on_event(line)


def _watch(process: Any, reader: _Lines, deadline: float, memory_bytes: int | None) -> tuple[str | None, int]:
    peak, tree = 0, _Tree(process.pid)
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
        reader.read()
        peak = max(peak, tree.resident_bytes())
        if process.returncode is not None:
            return None, peak
        if memory_bytes is not None and peak > memory_bytes:
            return OOM_HOST, peak
        if time.monotonic() > deadline:
            return TIMEOUT, peak


def resident_bytes(pid: int | None) -> int:
    """Return the resident bytes of one process now; 0 if it has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
    return 0


def leave_cores(pid: int, nice: int) -> None:
    """Lower the priority of a process permanently. nice: the POSIX value; Windows uses "below normal"."""
    with suppress(psutil.Error, OSError):
        lower = nice if os.name == "posix" else getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", None)
        psutil.Process(pid).nice(lower)


class _Tree:
    """A process and the children that it had when they were last looked for."""

    def __init__(self, pid: int) -> None:
        self._root: psutil.Process | None = None
        self._children: list[psutil.Process] = []
        self._looked_s = float("-inf")
        with suppress(psutil.Error):
            self._root = psutil.Process(pid)

    def resident_bytes(self) -> int:
        """Return the resident bytes of all of them now; 0 for those that have ended."""
        if self._root is None:
            return 0
        if time.monotonic() - self._looked_s >= CHILDREN_EVERY_S:
            self._looked_s = time.monotonic()
            with suppress(psutil.Error):
                self._children = self._root.children(recursive=True)
        total = 0
        for process in (self._root, *self._children):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total


def kill_tree(process: Any) -> None:
    """Kill a process with all its children, and wait for it."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def _ending(exit_code: int, lines: tuple[dict[str, Any], ...]) -> str:
    if exit_code == 0 and lines and lines[-1].get("event") == "end":
        return DONE
    # SIGKILL that this process did not send: the system's out-of-memory killer (a user's `kill -9` looks the same).
    if hasattr(signal, "SIGKILL") and exit_code == -signal.SIGKILL:
        return OOM_HOST
    return FAILED if exit_code == 1 else CRASHED


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        return file.read().decode("utf-8", "replace")
