"""How are the user's cache files kept private, whole and undamaged?"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from trimtab.process.files import write_private

DIGEST_BYTES = 64  # in hexadecimal
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_HAS_OWNERS = hasattr(os, "geteuid")
# A pipe is refused as not a regular file, instead of waiting for its writer.
_READ_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


def user_cache_path(name: str) -> Path:
    """Return the user's cache folder of an application. The library is imported when it is asked: a bare interpreter has none."""
    from platformdirs import user_cache_path as path

    return path(name)


class RefusedError(OSError):
    """Raised for a folder or file that others can change."""


def own_folder(name: str) -> Path:
    """Return a folder of the user's cache that only the user can write, made if it is missing.

    Errors: RefusedError, which is logged once per process, if others can write it; OSError if it cannot be made. Compiled kernels
    are executable code: a folder that others own or may write, or that is a link, is refused.
    """
    folder = user_cache_path("trimtab") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        _check(folder, os.lstat(folder), is_folder=True)
    except RefusedError as exc:
        _warn_once(str(exc))
        raise
    return folder


@cache
def _warn_once(refusal: str) -> None:
    logging.getLogger("trimtab").warning("%s; nothing is cached there", refusal)


def _check(path: Path, seen: os.stat_result, *, is_folder: bool) -> None:
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(seen.st_mode):
        raise RefusedError(f"{path} is no plain {'folder' if is_folder else 'file'}")
    if not _HAS_OWNERS:  # Windows: the access list keeps the user's folder private
        return
    if seen.st_uid != os.geteuid():
        raise RefusedError(f"{path} belongs to user {seen.st_uid}, not to {os.geteuid()}")
    if seen.st_mode & _WRITABLE_BY_OTHERS:
        raise RefusedError(f"{path} can be written by others (mode {stat.S_IMODE(seen.st_mode):o})")


def read_own(path: Path, key: str, *, limit_bytes: int) -> bytes | None:
    """Return the contents that `write_own` wrote for this key; None if they are missing, damaged or too large."""
    try:
        handle = os.open(path, _READ_FLAGS)
        with os.fdopen(handle, "rb") as file:
            seen = os.fstat(file.fileno())
            _check(path, seen, is_folder=False)
            if seen.st_size > limit_bytes + DIGEST_BYTES:
                return None
            text = file.read(limit_bytes + DIGEST_BYTES + 1)
    except OSError:
        return None
    contents = text[DIGEST_BYTES:]
    return contents if text[:DIGEST_BYTES] == _digest(key, contents) else None


def write_own(path: Path, key: str, contents: bytes) -> None:
    """Write contents for a key, whole or not at all. path: in an `own_folder`. A file begins with the SHA-256 of its key and
    contents; it is written under a temporary name and renamed."""
    write_private(path, _digest(key, contents) + contents)


def _digest(key: str, contents: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key.encode()).digest() + contents).hexdigest().encode()


def hashed(key: str) -> str:
    """Return the file name of a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]


def prune(folder: Path, *, most_files: int, most_bytes: int) -> None:
    """Remove the least recently used files until at most this many files and bytes are left."""
    with suppress(OSError):
        files = sorted(
            ((entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(folder)),
            key=lambda item: item[0].st_mtime_ns, reverse=True,
        )  # fmt: skip
        total = 0
        for count, (seen, path) in enumerate(files, start=1):
            total += seen.st_size
            if count > most_files or total > most_bytes:
                with suppress(OSError):
                    os.unlink(path)


def touch(path: Path) -> None:
    """Mark a file as used now."""
    with suppress(OSError):
        os.utime(path)
