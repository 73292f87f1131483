"""How is the output folder of a merge written, so that never half a model is at OUT?"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.adapter_names import NAMED, without_demo_name
from trimtab.adapters.file import CONFIG_NAME
from trimtab.checkpoint.writer import sync_folder, write_synced
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.process.files import lock
from trimtab.process.json_file import read_own

STATE_NAME, LOCK_NAME = ".merge-state.json", ".merge-lock"
_FULL = (errno.ENOSPC, errno.EDQUOT if hasattr(errno, "EDQUOT") else errno.ENOSPC, errno.EFBIG)


def check_place(out: Path, model: Path, adapters: Mapping[str, Path], *, overwrite: bool) -> None:
    """Raise RequestError unless OUT can be made without changing the merge's inputs."""
    here = Path(os.path.realpath(out))
    for what, folder in (("the model", model), *((f"the adapter {name}", path) for name, path in adapters.items())):
        there = Path(os.path.realpath(folder))
        if here == there:
            raise RequestError(f"is {what} itself", field="out", value=str(out), hint="Name another folder")
        if there in here.parents:
            raise RequestError(f"is inside {what}", field="out", value=str(out), hint="Name another folder")
        if here in there.parents:
            raise RequestError(f"holds {what}", field="out", value=str(out), hint="Name another folder")
    if any(here == Path(os.path.realpath(name)) and without_demo_name(name) != name for name in NAMED):
        why = "is a name of the bundled demo: later commands would take one for the other"
        raise RequestError(why, field="out", value=str(out), hint="Name another folder")
    parent = here.parent
    if not parent.is_dir():
        raise RequestError("its parent folder does not exist", field="out", value=str(out))
    if here.exists() and not here.is_dir():
        raise RequestError("is a file", field="out", value=str(out))
    if (here / CONFIG_NAME).exists():
        raise RequestError(
            "is an adapter; the merged checkpoint needs a separate folder", field="out", value=str(out),
            hint="Give the adapter as adapters= and another folder",
        )  # fmt: skip
    if here.is_dir() and any(here.iterdir()) and not overwrite:
        raise RequestError("exists and is not empty", field="out", value=str(out), hint="Give overwrite=True to replace it")


def check_room(out: Path, needed_bytes: int) -> None:
    """Raise DoesNotFitError if the disk has too little free space."""
    free = shutil.disk_usage(out.parent).free
    if needed_bytes > free:
        raise DoesNotFitError(
            "the disk has too little space for the merged model", block=None, device="disk", needed_bytes=needed_bytes,
            budget_bytes=free, hint="Nothing was written: free some space or name a folder on another disk",
        )  # fmt: skip


class Workplace:
    """The folder in which a merge is made. key: equal for runs of the same merge.

    finished: file -> record of it by this or an earlier run. As a context manager: the folder is removed on errors of the merge
    itself. If the machine failed or the user stopped the merge, it is kept if it has a finished file. It is a hidden sibling of OUT
    until one rename. A crash, a kill or a full disk leaves it, and the next run of the same merge reuses the finished files,
    checked by their hashes.
    """

    def __init__(self, out: Path, key: str) -> None:
        self.out = Path(os.path.realpath(out))
        self.folder = self.out.with_name(f".{self.out.name}.merging")
        self.key = key
        self.finished: dict[str, dict[str, Any]] = {}
        self._lock: int | None = None
        self._is_published = False

    def __enter__(self) -> Workplace:
        self._recover()
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = _lock(self.folder / LOCK_NAME)
        except OSError as exc:
            with suppress(OSError):  # kept if it is not empty
                self.folder.rmdir()
            raise _refused(self.out, exc) from exc
        state = read_own(self.folder / STATE_NAME, "merge record")
        if state.get("key") == self.key:
            self.finished = dict(state.get("finished", {}))
        else:
            self._clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        _unlock(self._lock)
        is_resumable = self.finished and (not isinstance(exc, Exception) or isinstance(exc, (OSError, DoesNotFitError)))
        if not self._is_published and not is_resumable:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _recover(self) -> None:
        """Restore a model after a crash between the two renames of an overwrite."""
        old = self._old()
        if old.is_dir():
            if self.out.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, self.out)

    def _old(self) -> Path:
        return self.out.with_name(f".{self.out.name}.replaced")

    def _clear(self) -> None:
        for child in self.folder.iterdir():
            if child.name != LOCK_NAME:
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def note(self, name: str, facts: dict[str, Any]) -> None:
        """Record a file as finished, once it is on the disk."""
        self.finished[name] = facts
        content = json.dumps({"key": self.key, "finished": self.finished}, indent=1).encode()
        temporary = self.folder / f"{STATE_NAME}.new"
        write_synced(temporary, content)
        os.replace(temporary, self.folder / STATE_NAME)

    def forget(self, name: str) -> None:
        self.finished.pop(name, None)

    def publish(self, *, overwrite: bool) -> None:
        """Rename the folder to OUT: the last step, after which OUT is complete."""
        for name in (STATE_NAME, f"{STATE_NAME}.new"):
            (self.folder / name).unlink(missing_ok=True)
        _unlock(self._lock)
        self._lock = None
        (self.folder / LOCK_NAME).unlink(missing_ok=True)
        for folder in {self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())}:
            sync_folder(folder)
        try:
            self._rename(overwrite)
        except OSError as exc:
            raise _refused(self.out, exc) from exc
        self._is_published = True
        sync_folder(self.out.parent)

    def _rename(self, overwrite: bool) -> None:
        if not self.out.exists():
            os.rename(self.folder, self.out)
            return
        if not any(self.out.iterdir()):
            self.out.rmdir()
            os.rename(self.folder, self.out)
            return
        if not overwrite:
            raise RequestError("appeared while the merge ran", field="out", value=str(self.out))
        if _exchange(self.folder, self.out):
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        # Two renames: the next run repairs a crash between them (`_recover`).
        os.rename(self.out, self._old())
        os.rename(self.folder, self.out)
        shutil.rmtree(self._old(), ignore_errors=True)


def _refused(out: Path, exc: OSError) -> RequestError:
    return RequestError(f"cannot be written ({exc.strerror or exc})", field="out", value=str(out))


def disk_error(exc: OSError, out: Path, *, needed_bytes: int, is_resumable: bool) -> DoesNotFitError | RequestError:
    """Return trimtab's error for a write that the system refused. is_resumable: whether finished files are kept."""
    if exc.errno in _FULL:
        kept = "finished files are kept, and the same command resumes" if is_resumable else "nothing is left"
        free = 0
        with suppress(OSError):
            free = shutil.disk_usage(out.parent).free
        return DoesNotFitError(
            f"the disk is full ({exc.strerror or exc})", block=None, device="disk", needed_bytes=needed_bytes,
            budget_bytes=free, hint=f"OUT is unchanged; {kept}",
        )  # fmt: skip
    return _refused(out, exc)


def _exchange(one: Path, other: Path) -> bool:
    """Return whether two names were swapped in one step; only Linux can (renameat2)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
    return bool(call(at_here, os.fsencode(one), at_here, os.fsencode(other), exchange) == 0)


def _lock(path: Path) -> int:
    """Take a lock that ends with the process. Errors: RequestError if another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        lock(handle)
    except OSError as exc:
        os.close(handle)
        raise RequestError("another merge is writing it now", field="out", value=str(path.parent)) from exc
    return handle


def _unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)
