"""How do adapters come or change while others answer, and which is prepared first?"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.adapter_names import is_lora_file
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.errors import SHOWN_PROBLEMS, AdapterError, RequestError, TrimtabError
from trimtab.printable import printable
from trimtab.serve.contract.inside_root import read_inside
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.scheduling.scheduler import StoppingError

if TYPE_CHECKING:
    from trimtab.engine.lora.store import HeldAdapter

LOOK_S = 1.0

log = logging.getLogger("trimtab.serve")


def lost_reason(exc: TrimtabError | OSError) -> str:
    """Return why an adapter is lost, for clients: without the hint, which may name other folders."""
    if isinstance(exc, AdapterError):
        more = len(exc.problems) - SHOWN_PROBLEMS
        return "; ".join([*exc.problems[:SHOWN_PROBLEMS], *([f"and {more} more"] if more > 0 else [])])
    if isinstance(exc, TrimtabError):
        return str(exc).removesuffix(printable(exc.hint)).strip()
    return exc.strerror or type(exc).__name__


@dataclass(eq=False)
class _Folder:
    """used: stamp of the files in use, or of refused files. root: the folder that must contain a client's adapter.
    seen: stamp of other files at the last check.
    """

    path: str | Path
    used: Hashable | None
    root: str | None = None
    seen: Hashable | None = None

    def is_new(self, stamp: Hashable | None) -> bool:
        """Record what a check found; return whether it has found other files twice."""
        is_other = stamp is not None and stamp != self.used
        before, self.seen = self.seen, stamp if is_other else None
        return is_other and before == stamp

    def use(self, stamp: Hashable) -> None:
        """Record which files are in use now, or refused."""
        self.used, self.seen = stamp, None


class Watcher:
    """read: reads an adapter, given its path and name; called on the watching thread. `read_again` has (name, adapter) of changed
    adapters. All methods except `look` may be called on any thread. A change is accepted when two checks in a row find the same
    files, so that a folder is not read while it is written.
    """

    def __init__(self, read: Callable[[str | Path, str], Any]) -> None:
        self._read = read
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.read_again: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def start(self) -> None:
        """Check once a second from now on."""
        threading.Thread(target=self._run, name="trimtab-watch", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def watch(self, name: str, path: str | Path, stamp: Hashable | None, root: str | None = None) -> None:
        """Watch an adapter's folder. stamp: `files_stamp` of its files before they were read. root: as in `_Folder`."""
        with self._lock:
            self._folders[name] = _Folder(path, stamp, root)

    def forget(self, name: str) -> None:
        with self._lock:
            self._folders.pop(name, None)

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception("internal error while checking the files of adapters")

    def look(self) -> None:
        """Check every folder once."""
        with self._lock:
            folders = list(self._folders.items())
        for name, folder in folders:
            stamp = files_stamp(folder.path)
            if folder.is_new(stamp):
                self._take(name, folder, stamp)

    def _take(self, name: str, folder: _Folder, stamp: Hashable) -> None:
        try:
            adapter = bounded(self._read, folder.path, name, folder.root)
        except Exception as exc:  # files can fail in unforeseen ways
            if files_stamp(folder.path) == stamp:  # else they changed while they were read
                log.warning("adapter %s was not reloaded: its changed files cannot be used: %s", name, exc)
                folder.use(stamp)
            return
        if files_stamp(folder.path) == stamp:
            folder.use(stamp)
            self.read_again.put((name, adapter))


def bounded(read: Callable[[str | Path, str], Any], path: str | Path, name: str, root: str | None) -> Any:
    """Return an adapter, read from inside the root if one is given. Errors: those of `read` and `read_inside`."""
    return read(path, name) if root is None else read_inside(lambda: read(path, name), path, root)


# The queue ------------------------------------------------------------------------------------------------------------


class Urgency(IntEnum):
    """The urgency of an adapter. A smaller number is prepared first. Adapters that a client loads or names come first, then those
    whose files changed, then those of the server's start; of one urgency in the order of arrival."""

    AWAITED = 0
    CHANGED = 1
    START = 2


@dataclass(eq=False)
class Unprepared:
    """An adapter whose files were read.

    pieces: the remaining work. finish: called with `work`, which makes the adapter available, or with a function that
    raises the error of a piece. names: of an adapter that requests may name already. replaces: the name whose adapter
    has changed files.
    """

    pieces: Iterator[None]
    finish: Callable[[Callable[[], Any]], None]
    work: Callable[[], Any]
    urgency: Urgency
    names: set[str] = field(default_factory=set)
    replaces: str | None = None


class AdapterQueue:
    """Adapters that are being prepared."""

    def __init__(self) -> None:
        self._waiting: list[Unprepared] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, one: Unprepared) -> None:
        if one.replaces is not None:
            self.forget_changed(one.replaces)
        self._waiting.append(one)

    def forget_changed(self, name: str) -> None:
        """Drop the changed files of an adapter: it was unloaded and its name may be reused, or there are newer files."""
        self._waiting = [one for one in self._waiting if one.replaces != name]

    def has(self, name: str) -> bool:
        """Whether requests that name this adapter should wait for it."""
        return any(name in one.names for one in self._waiting)

    def forget(self, name: str) -> None:
        """Drop the preparation for requests that name this adapter: it was unloaded, or has newer files."""
        for one in [one for one in self._waiting if name in one.names]:
            one.names.remove(name)
            if not one.names:
                self._waiting.remove(one)

    def step(self, is_needed: Callable[[str], bool], *, only_for_requests: bool = False) -> None:
        """Compute one piece of the most urgent adapter, or use the adapter if it is complete. is_needed: whether a request waits
        for the adapter of this name. only_for_requests: only of adapters that requests wait for.
        """
        requested = [one for one in self._waiting if any(map(is_needed, one.names))]
        able = requested if only_for_requests else self._waiting
        if not able:
            return
        one = min(able, key=lambda one: Urgency.AWAITED if one in requested else one.urgency)
        try:
            next(one.pieces)
        except StopIteration:
            self._waiting.remove(one)
            one.finish(one.work)
        except Exception as exc:
            self._waiting.remove(one)
            one.finish(partial(throw, exc))


def files_stamp(path: str | Path) -> Hashable | None:
    """Return a stamp that is equal only for the same unchanged files; None if they cannot be read."""
    known = []
    try:
        for file in (path,) if is_lora_file(path) else (Path(path) / CONFIG_NAME, Path(path) / TENSORS_NAME):
            found = os.stat(file)
            if not stat.S_ISREG(found.st_mode):  # opening a pipe waits for its writer
                return None
            known.append((found.st_dev, found.st_ino or os.path.realpath(file), found.st_size, found.st_mtime_ns))
    except OSError:
        return None
    return tuple(known)


class Shelf(Protocol):
    """The adapters of a server (`AdapterCache`), as those that come and change see them."""

    lost: dict[str, str]

    def read(self, path: str | Path, name: str) -> HeldAdapter: ...

    def check_new(self, name: str) -> None: ...

    def put(self, name: str, held: HeldAdapter) -> None: ...


class NewAdapters:
    """The adapters that come to a worker or change there. waiting: those that are prepared between steps.

    pieces: begins to compute what an adapter needs of the model. reload: uses an adapter's new files from the next answer on, given
    its name and them; returns whether they differ. reply: answers a client's call of this id with the result of work.
    """

    def __init__(
        self, shelf: Shelf, waiting: AdapterQueue, *, pieces: Callable[[Any], Iterator[None]],
        reload: Callable[[str, Any], bool], reply: Callable[[int, Callable[[], Any]], None],
    ) -> None:  # fmt: skip
        self._shelf, self.waiting, self._pieces, self._reload, self._reply = shelf, waiting, pieces, reload, reply
        self.watcher = Watcher(shelf.read)
        # Adapters whose files are read on other threads, so that the batch goes on at the same time: call id -> name, path, root.
        self._reading: dict[int, tuple[str, str, str | None]] = {}
        self._read: queue.SimpleQueue[tuple[int, Hashable | None, Any]] = queue.SimpleQueue()
        self._is_draining = False

    @property
    def is_reading(self) -> bool:
        """Whether files of a client's adapter are being read."""
        return bool(self._reading)

    def add(self, name: str, path: str, root: str | None, *, is_first: bool) -> None:
        """Read an adapter of the server's start. is_first: a later start goes on without one that cannot be read."""
        stamp = files_stamp(path)
        try:
            self._shelf.check_new(name)
            self._shelf.put(name, bounded(self._shelf.read, path, name, root))
        except TrimtabError as exc:
            if is_first:
                raise
            self._shelf.lost[name] = lost_reason(exc)
            return  # one client's adapter must not prevent the model's restart
        self.watcher.watch(name, path, stamp, root)

    def prepare(self, adapter: Any, names: set[str]) -> None:
        """Prepare an adapter of the server's start, which requests may name already."""
        self.waiting.add(Unprepared(self._pieces(adapter), _tried, _nothing, Urgency.START, names))

    def begin(self, call_id: int, name: str, path: str, root: str | None) -> None:
        """Begin to read the adapter of a client's call."""

        def read() -> None:
            stamp = None
            try:
                stamp = files_stamp(path)
                self._read.put((call_id, stamp, bounded(self._shelf.read, path, name, root)))
            except Exception as exc:
                self._read.put((call_id, stamp, exc))

        exc: TrimtabError | None = None
        if self._is_draining:
            exc = StoppingError()
        elif any(name == other for other, *_ in self._reading.values()):
            exc = RequestError("an adapter of this name is being loaded", field="lora_name", value=name)
        if exc is not None:
            self._reply(call_id, partial(throw, exc))
            return
        self._reading[call_id] = name, path, root
        try:
            threading.Thread(target=read, name="trimtab-read", daemon=True).start()
        except RuntimeError as no_thread:  # the system has no thread left: only this call fails
            self._loaded(call_id, partial(throw, no_thread))

    def take(self) -> None:
        """Let adapters whose files were read wait for their turn. Running answers finish with the old files of one that changed."""
        with suppress(queue.Empty):
            while True:
                call_id, stamp, result = self._read.get_nowait()
                if isinstance(result, Exception):
                    self._loaded(call_id, partial(throw, result))
                elif call_id in self._reading:
                    name, path, root = self._reading[call_id]
                    put = partial(self._put, name, path, root, stamp, result)
                    self.waiting.add(Unprepared(self._pieces(result), partial(self._loaded, call_id), put, Urgency.AWAITED))
        with suppress(queue.Empty):
            while True:
                name, adapter = self.watcher.read_again.get_nowait()
                pieces, change = self._pieces(adapter), partial(self._change, name, adapter)
                self.waiting.add(Unprepared(pieces, partial(_changed, name), change, Urgency.CHANGED, replaces=name))

    def drain(self) -> None:
        """Read no adapter from now on. One that is being loaded is not needed any more, and its files may be slow."""
        self._is_draining = True
        for call_id in list(self._reading):
            self._loaded(call_id, partial(throw, StoppingError()))

    def forget(self, name: str) -> None:
        """Forget an adapter that was unloaded."""
        self.watcher.forget(name)
        self.waiting.forget(name)
        self.waiting.forget_changed(name)

    def _loaded(self, call_id: int, work: Callable[[], Any]) -> None:
        """Answer a call for an adapter, once."""
        if self._reading.pop(call_id, None) is not None:
            self._reply(call_id, work)

    def _put(self, name: str, path: str, root: str | None, stamp: Any, adapter: Any) -> None:
        self._shelf.put(name, adapter)
        self.watcher.watch(name, path, stamp, root)

    def _change(self, name: str, adapter: Any) -> None:
        if self._reload(name, adapter):
            self.waiting.forget(name)
            log.info("adapter %s was reloaded: its files changed", name)


def _changed(name: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except TrimtabError as exc:
        log.warning("adapter %s was not reloaded: its changed files cannot be used: %s", name, exc)
    except Exception as exc:
        write_traceback(exc, "a changed adapter was not reloaded")


def _tried(work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception as exc:
        write_traceback(exc, "an adapter is prepared at its first use instead")


def _nothing() -> None:
    """Do nothing, because the adapter is already available."""


def throw(exc: Exception) -> None:
    raise exc
