"""Which folders of the user's cache are made of GGUF files, and are they whole?"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.errors import CheckpointError
from trimtab.gguf.header import SPLIT, refuse
from trimtab.process.user_cache import hashed, own_folder, read_own, write_own

FOLDER, TABLE = "gguf", "gguf.json"
FORM = 6
PREFIX = "trimtab-gguf-"
KEPT_S = 30 * 24 * 3600.0
MOST_TABLE_BYTES = 64 * 2**20


def folder_for(file: Path, write: Callable[[Path], dict[str, Any]], *more: Any) -> Path:
    """Return the folder of a GGUF file, or of the set that it is in. write: fills a new folder and returns its table. more: on
    which the contents depend as well. Errors: CheckpointError if the file changes, or the cache cannot be written. A folder belongs
    to its files' names, sizes and times. Its table, `gguf.json`, is written last, with a checksum and the sizes of the other
    files."""
    try:
        key = _key_of(file, *more)
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror or exc})", path=file) from exc
    # Its last name is the file's, for messages.
    folder = home_of() / key / file.name
    if read_table(folder) is None:
        _prune(home_of())
        try:
            _make(file, folder, write, key, more)
        except OSError as exc:
            raise CheckpointError(
                f"its folder in the cache cannot be written ({exc.strerror or exc})", path=file,
                hint=f"Free space in {home_of()}, or name another cache folder with XDG_CACHE_HOME",
            ) from exc  # fmt: skip
    with suppress(OSError):  # a folder in use is not removed for its age
        os.utime(folder.parent)
    return folder


def _make(file: Path, folder: Path, write: Callable[[Path], dict[str, Any]], key: str, more: tuple[Any, ...]) -> None:
    folder.parent.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        table = write(made)
        sizes = {one.name: one.stat().st_size for one in made.iterdir() if one.is_file()}
        write_own(made / TABLE, key, json.dumps({"sizes": sizes, **table}).encode())
        if _key_of(file, *more) != key:  # the table would name offsets of the earlier file
            refuse(file, "changed while it was read", hint="Try again when the file is complete")
        with suppress(OSError):
            made.replace(folder)
            return
        if read_table(folder) is None:  # else another process made it first
            shutil.rmtree(folder)
            made.replace(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_table(folder: Path) -> dict[str, Any] | None:
    """Return the table of a folder that `folder_for` made; None if it is missing or damaged."""
    raw = read_own(folder / TABLE, folder.parent.name, limit_bytes=MOST_TABLE_BYTES)
    if raw is None:
        return None
    table: dict[str, Any] = json.loads(raw)
    with suppress(OSError):
        return table if all((folder / name).stat().st_size == size for name, size in table["sizes"].items()) else None
    return None


def stamp(file: Path) -> tuple[int, int]:
    """Return (size, mtime in ns) of a file. Errors: OSError."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _key_of(file: Path, *more: Any) -> str:
    """Return the name of the folder of a file, or of the set that it is in by its name, as the files are now."""
    named, files = SPLIT.fullmatch(file.name), [file]
    if named is not None:
        found = [(other, SPLIT.fullmatch(other)) for other in sorted(os.listdir(file.parent))]
        files = [file.parent / other for other, parts in found if parts and parts[1] == named[1] and parts[3] == named[3]]
    from importlib.metadata import version

    return hashed(json.dumps([FORM, [(str(one), *stamp(one)) for one in files], version("transformers"), *more]))


def is_made_here(folder: Path) -> bool:
    """Return whether a folder is one that `folder_for` made: no other folder can name files elsewhere."""
    home = folder.absolute().parent.parent
    if ".." in folder.parts:
        return False
    return home == home_of() or (home.name.startswith(PREFIX) and home.parent == Path(tempfile.gettempdir()) and _is_own(home))


def _is_own(home: Path) -> bool:
    """Whether a folder is this user's own, and no link: another user can make one of any name in the temporary folder."""
    try:
        found = home.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())


@cache
def home_of() -> Path:
    """Return the folder of all these folders: in the user's cache, else one of this process."""
    with suppress(OSError):
        return own_folder(FOLDER)
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def _prune(home: Path) -> None:
    """Remove the folders that were not used for a month."""
    with suppress(OSError):
        for entry in os.scandir(home):
            if entry.stat(follow_symlinks=False).st_mtime < time.time() - KEPT_S:
                shutil.rmtree(entry.path, ignore_errors=True)
