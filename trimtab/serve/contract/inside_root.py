"""Whether a client's adapter lies below the server's adapter folder, with every file of it, also while it is read.

Whoever may write below that folder can replace a file by a link between a look and a read. So each read stands between two looks,
which note every folder, link and file on the way with its inode and the time of its last change (ctime, which nobody can set): an
object that is moved, replaced or put back has another one. Links are followed below the root; those that lead out are refused, also
if they lead back in. Adapters that the operator named are read wherever they are.

Not covered: hard links to files elsewhere, which are files of the folder to every system; on Windows ctime is the time of creation,
so what is moved away and back during one read is not seen.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

from trimtab.errors import AdapterError, RequestError

# As Linux has it for a path.
MOST_LINKS = 40
MOST_ENTRIES = 4096
# Clocks of file systems have ticks of up to 10 ms: what has changed so recently could change again unseen.
TICK_S = 0.05
READS = 5
CHANGES = "its files changed while they were read"

Read = TypeVar("Read")


def outside() -> RequestError:
    """Return the error of a folder that is not below the server's adapter folder, or has a file that is not. Whether what is
    elsewhere exists is not said."""
    return RequestError("is not a folder below the server's adapter folder", field="lora_path")


def look(folder: Path, root: Path) -> Hashable:
    """Return what two looks share only if nothing on the way to a folder and its entries was replaced between them.

    folder, root: resolved. Errors: RequestError; also for what is no file, folder or link, and for too many entries.
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
    """Return what `read` gives, between two looks that are the same. It is called again if they are not.

    Errors: RequestError; AdapterError for files that change all the time; those of `read`.
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
    """Return a look after which every change is seen."""
    seen = look(folder, root)
    newest = max((changed for _, (_, _, changed) in seen), default=0)  # type: ignore[attr-defined]
    if 0 <= time.time_ns() - newest < TICK_S * 1e9:
        time.sleep(TICK_S)
        seen = look(folder, root)
    return seen


def _walk(path: Path, root: Path, seen: dict[str, tuple[int, int, int]]) -> Path:
    """Note every object on the way to a path, and return where it leads.

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
                # Its name of the root may be another one, such as a link to it.
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
