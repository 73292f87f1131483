"""Which temporary folders does a running command have, and who removes those of a killed one?"""

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
MOST_ENTRIES = 100_000  # entries of the temporary directory that are checked


@contextmanager
def work_folder(kind: str) -> Iterator[Path]:
    """Yield a folder that holds only its lock file, and remove it afterwards. kind: a word in its name. Errors: OSError. The owner
    holds a lock on a file in it, which the system releases when the owner ends.
    """
    _remove_left(tempfile.gettempdir())
    folder, handle = _owned(kind)
    try:
        yield folder
    finally:
        os.close(handle)  # Windows cannot remove an open file
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
        except (BlockingIOError, PermissionError):  # another process removed it before it was locked
            os.close(handle)
            continue
        except OSError:  # a file system without locks: no other process gets one either
            return folder, handle
        if (folder / LOCK_NAME).exists():
            return folder, handle
        os.close(handle)


@cache
def _remove_left(root: str) -> None:
    """Remove the folders of ended processes. Runs once in each process."""
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
    handle = os.open(Path(entry.path, LOCK_NAME), os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        lock(handle)
        if os.name == "posix":
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(handle)
    shutil.rmtree(entry.path, ignore_errors=True)
