"""Folders of a running command in the temporary directory: gone at its end, or with the next command once their process is gone.

A process that is killed leaves its folders. A folder's owner holds a lock on a file in it, which the system takes back when the
owner is gone, however that ended; a number of a process would be another one's some day, or one of another container. The first
folder that a process makes removes those whose lock is free. Folders of other users, and those without such a file, stay.
Imports nothing outside the standard library and trimtab.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path

from trimtab.process.files import lock

PREFIX, LOCK_NAME = "trimtab-", ".owner"
MOST_ENTRIES = 100_000  # of the temporary directory are looked at


@contextmanager
def work_folder(kind: str) -> Iterator[Path]:
    """Yield an empty folder (but for its lock) that is gone afterwards. kind: a word of its name. Errors: OSError."""
    _remove_left(tempfile.gettempdir())
    folder, handle = _owned(kind)
    try:
        yield folder
    finally:
        os.close(handle)  # Windows removes no open file
        shutil.rmtree(folder, ignore_errors=True)


def _owned(kind: str) -> tuple[Path, int]:
    """Return a new folder and the handle of its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        try:
            handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # a full disk
            folder.rmdir()
            raise
        try:
            lock(handle)
        except (BlockingIOError, PermissionError):  # another process removes it, as nobody had its lock
            os.close(handle)
            continue
        except OSError:  # a file system without locks: nobody else gets one either
            return folder, handle
        if (folder / LOCK_NAME).exists():
            return folder, handle
        os.close(handle)


@cache
def _remove_left(root: str) -> None:
    """Remove the folders of processes that are gone, once in the life of this one."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in islice(entries, MOST_ENTRIES):
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    """Remove a folder if it is this user's and its lock is free. Errors: OSError if its owner lives."""
    is_own = os.name != "posix" or entry.stat(follow_symlinks=False).st_uid == os.getuid()
    if not is_own or not entry.is_dir(follow_symlinks=False):
        return
    handle = os.open(
        Path(entry.path, LOCK_NAME), os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    )
    try:
        lock(handle)
        if os.name == "posix":
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(handle)
    shutil.rmtree(entry.path, ignore_errors=True)
