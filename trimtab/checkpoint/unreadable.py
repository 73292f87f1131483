"""System errors while a folder is read (permissions, a stale network mount, a bad disk) become errors of that folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from trimtab.errors import AdapterError, CheckpointError, TrimtabError

Reader = TypeVar("Reader", bound=Callable[..., Any])


def checkpoint_refusal(path: str | os.PathLike[str], exc: OSError) -> TrimtabError:
    """Return the error of a model whose files cannot be read."""
    return CheckpointError(f"cannot be read ({exc.strerror or exc})", path=exc.filename or path)


def adapter_refusal(path: str | os.PathLike[str], exc: OSError) -> TrimtabError:
    """Return the error of an adapter whose files cannot be read."""
    return AdapterError(
        path, [f"{os.path.basename(exc.filename or '') or 'it'} cannot be read ({exc.strerror or exc})"]
    )


def check_reachable(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a path that may exist but cannot be inspected, for example because of a folder above it."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as exc:
        if exc.errno != errno.ENAMETOOLONG:
            raise


def reading(refusal: Callable[[Any, OSError], TrimtabError]) -> Callable[[Reader], Reader]:
    """Return a decorator for a function of a path: OSError becomes the folder's error."""

    def decorate(function: Reader) -> Reader:
        @wraps(function)
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(path, *args, **kwargs)
            except OSError as exc:
                raise refusal(path, exc) from exc

        return read  # type: ignore[return-value]

    return decorate
