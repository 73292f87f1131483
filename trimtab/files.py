"""Writing a file as a whole: a temporary file beside it, then a rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trimtab.errors import RequestError


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object], *, field: str) -> None:
    """Write a temporary file with `write`, then rename it: readers see the old file or the new one, never a part.

    Errors: RequestError if the place cannot be written; nothing is left behind.
    """
    target = Path(path)
    sibling = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(sibling)
        os.replace(sibling, target)
    except OSError as exc:
        raise RequestError(f"cannot be written ({exc.strerror})", field=field, value=str(path)) from exc
    finally:
        with suppress(OSError):  # a parent that is a file has no sibling to remove either
            sibling.unlink(missing_ok=True)
