"""Is a client's adapter below the server's adapter folder, with every file, also while it is read?"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

from trimtab.errors import AdapterError, RequestError

# Linux' limit for a path.
MOST_LINKS = 40
MOST_ENTRIES = 4096
# Clocks of file systems have ticks of up to 10 ms: a second change within one tick would not be detected.
TICK_S = 0.05
READS = 5
CHANGES = "its files changed while they were read"

Read = TypeVar("Read")


def outside() -> RequestError:
    """Return the error of a folder that is not below the server's adapter folder, or has a file that is not. The error
    does not reveal whether outside paths exist.
    """
    return RequestError("is not a folder below the server's adapter folder", field="lora_path")


def look(folder: Path, root: Path) -> Hashable:
    """Return a stamp that is equal in two checks only if no object on the path to a folder and its entries was
    replaced.

    folder, root: resolved. Errors: RequestError, also for objects other than files, folders and links, and for too many entries.
    The stamp has every folder, link and file with its inode and ctime, which no user can set. Hard links to files elsewhere count
    as files of the folder. On Windows, ctime is the creation time: a file that is moved away and back during one read is not
    detected.
    """
    seen: dict[str, tuple[int, int, int]] = {}
    try:
        is_root = _walk(folder, root, seen) == root
        names = sorted(os.listdir(folder))
        if is_root or len(names) > MOST_ENTRIES:
            raise outside()
        for name in names:
            _walk(folder / name, root, seen)
    except (OSError, ValueError, RuntimeError) as exc:
        raise outside() from exc
    return tuple(seen.items())


def read_inside(read: Callable[[], Read], folder: str | Path, root: str | Path) -> Read:
    """Return the result of `read` between two equal checks. It is called again if they differ.

    Errors: RequestError; AdapterError for files that change continuously; those of `read`.
    """
    folder, root = Path(folder), Path(root)
    for _ in range(READS):
        before = _settled(folder, root)
        try:
            result, problem = read(), None
        except Exception as exc:
            problem = exc
        if look(folder, root) != before:
            continue
        if problem is not None:
            raise problem
        return result
    raise AdapterError(folder, [CHANGES])


def _settled(folder: Path, root: Path) -> Hashable:
    """Return a check after which every change is detected."""
    seen = look(folder, root)
    newest = max((changed for _, (_, _, changed) in seen), default=0)  # type: ignore[attr-defined]
    if 0 <= time.time_ns() - newest < TICK_S * 1e9:
        time.sleep(TICK_S)
        seen = look(folder, root)
    return seen


def _walk(path: Path, root: Path, seen: dict[str, tuple[int, int, int]]) -> Path:
    """Record every object on the way to a path, and return the resolved path.

    Errors: RequestError at the first step out of the root; OSError, ValueError.
    """
    at, left, links = root, [*reversed(path.relative_to(root).parts)], 0
    while left:
        part = left.pop()
        if part == "..":
            if at == root:
                raise outside()
            at = at.parent
            continue
        step = at / part
        found = os.lstat(step)
        seen[str(step)] = found.st_dev, found.st_ino, found.st_ctime_ns
        if _is_link(found):
            links += 1
            if links > MOST_LINKS:
                raise outside()
            target = Path(os.readlink(step))
            if target.is_absolute():
                # The client may use another name of the root, such as a link to it.
                at, target = root, Path(os.path.realpath(step)).relative_to(root)
            left += reversed(target.parts)
        elif stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
            at = step
        else:  # reading a pipe or a device may never end
            raise outside()
    return at


def _is_link(found: os.stat_result) -> bool:
    junction = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", None)
    return stat.S_ISLNK(found.st_mode) or (junction is not None and getattr(found, "st_reparse_tag", 0) == junction)
