"""How is a file or a folder written as a whole, and how is a table of texts of the package read?"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trimtab.errors import RequestError

# Windows locks one byte, also against readers: this one, behind the content.
UNREAD_BYTE = 2**31 - 2


def read_sections(path: Path) -> dict[str, dict[str, str]]:
    """Return section -> name -> text of an .ini file of the package; a text goes on in indented lines.

    `%(name)s` represents a text of the section DEFAULT, which the result omits. Names are in lower case.
    """
    from configparser import ConfigParser

    parser = ConfigParser(delimiters=("=",))
    parser.read_string(path.read_text(encoding="utf-8"), str(path))
    names = {section: [name for name in parser[section] if name not in parser.defaults()] for section in parser.sections()}
    return {section: {name: parser[section][name] for name in own} for section, own in names.items()}


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object], *, field: str) -> None:
    """Write a temporary file with `write`, then rename it.

    Errors: RequestError if the path cannot be written; no temporary file remains.
    """
    target = Path(path)
    sibling = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(sibling)
        os.replace(sibling, target)
    except OSError as exc:
        raise RequestError(f"cannot be written ({exc.strerror})", field=field, value=str(path)) from exc
    finally:
        with suppress(OSError):  # if the parent is a file, there is no sibling to remove
            sibling.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, *, field: str, newline: str | None = "\n") -> None:
    """Write a text as a whole, in UTF-8. newline: None uses the system's line ends. Errors: as `write_whole`."""
    write_whole(path, lambda sibling: sibling.write_text(text, encoding="utf-8", newline=newline), field=field)


def write_private(path: Path, contents: bytes) -> None:
    """Write bytes as a whole, readable by this user alone. Errors: OSError; no temporary file remains."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def lock(handle: int) -> None:
    """Lock an open file until its handle is closed or the process ends. Errors: OSError if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        place = os.lseek(handle, 0, os.SEEK_CUR)
        os.lseek(handle, UNREAD_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, place, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def whole_folder(folder: Path, *, field: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new sibling folder of `folder`, and rename it to `folder` at the end. overwrite: an existing one is
    replaced.

    Errors: RequestError if it cannot be written; no temporary folder remains, and an existing folder is unchanged.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    except OSError as exc:
        raise _refused(folder, exc, field) from exc
    try:
        partial.chmod(0o755)
        yield partial
        old = partial.with_suffix(".old")
        if overwrite and folder.exists():
            os.replace(folder, old)
        try:
            os.replace(partial, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as exc:
        raise _refused(folder, exc, field) from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # already renamed on success


def _refused(folder: Path, exc: OSError, field: str) -> RequestError:
    return RequestError(f"cannot be written ({exc.strerror or exc})", field=field, value=str(folder))
