"""Changed adapter files: a thread of the worker checks once a second and reads complete files.

A change is accepted when two checks in a row find the same files, so that a folder is not read while it is written.
Unreadable files are logged once, and the old adapter stays.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.gguf.adapter import is_lora_file
from trimtab.serve.contract.inside_root import read_inside

LOOK_S = 1.0

log = logging.getLogger("trimtab.serve")


@dataclass(eq=False)
class _Folder:
    """used: stamp of the files in use, or of refused files. root: the folder that must contain a client's adapter.
    seen: stamp of other files at the last check.
    """

    path: str | Path
    used: Hashable | None
    root: str | None = None
    seen: Hashable | None = None


class Watcher:
    """read: reads an adapter, given its path and name; called on the watching thread. `read_again` has (name, adapter)
    of changed adapters. All methods except `look` may be called on any thread.
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
            if stamp is None or stamp == folder.used:
                folder.seen = None
            elif stamp != folder.seen:
                folder.seen = stamp
            else:
                self._take(name, folder, stamp)

    def _take(self, name: str, folder: _Folder, stamp: Hashable) -> None:
        try:
            adapter = bounded(self._read, folder.path, name, folder.root)
        except Exception as exc:  # files can fail in unforeseen ways
            if files_stamp(folder.path) == stamp:  # else they changed while they were read
                log.warning("adapter %s was not reloaded: its changed files cannot be used: %s", name, exc)
                folder.used = stamp
            return
        if files_stamp(folder.path) == stamp:
            folder.used, folder.seen = stamp, None
            self.read_again.put((name, adapter))


def bounded(read: Callable[[str | Path, str], Any], path: str | Path, name: str, root: str | None) -> Any:
    """Return an adapter, read from inside the root if one is given. Errors: those of `read` and `read_inside`."""
    return read(path, name) if root is None else read_inside(lambda: read(path, name), path, root)


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
