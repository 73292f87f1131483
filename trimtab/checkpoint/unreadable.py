"""System errors while a folder is read (permissions, a bad disk) become errors of that folder; a mistyped path, a question."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from trimtab.checkpoint.names import near_names
from trimtab.errors import AdapterError, CheckpointError, RequestError, TrimtabError

Reader = TypeVar("Reader", bound=Callable[..., Any])


def checkpoint_refusal(path: str | os.PathLike[str], exc: OSError) -> TrimtabError:
    """Return the error of a model whose files cannot be read."""
    return CheckpointError(f"cannot be read ({exc.strerror or exc})", path=exc.filename or path)


def adapter_refusal(path: str | os.PathLike[str], exc: OSError) -> TrimtabError:
    """Return the error of an adapter whose files cannot be read."""
    return AdapterError(path, [f"{os.path.basename(exc.filename or '') or 'it'} cannot be read ({exc.strerror or exc})"])


def request_refusal(field: str, path: str | os.PathLike[str], exc: Exception, *, allowed: Sequence[str] = ()) -> RequestError:
    """Return the error of a request's file that cannot be read, with the files that it may mean, or that is not what it must be."""
    reason = f"cannot be read ({exc.strerror or exc})" if isinstance(exc, OSError) else str(exc)
    hint = path_hint(path) if isinstance(exc, FileNotFoundError) else ""
    return RequestError(reason, field=field, value=os.fspath(path), allowed=allowed, hint=hint)


def check_reachable(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a path that may exist but cannot be inspected, for example because of a folder above it."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as exc:
        if exc.errno != errno.ENAMETOOLONG:
            raise


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")


def address_hint(text: str, *, takes_hub_id: bool = False) -> str:
    """Return what to do with a web address that was given as a file or folder; "" for any other text.

    takes_hub_id: whether a hub id would do, which the address of a hub's page has in it.
    """
    if not _ADDRESS.match(text):
        return ""
    if takes_hub_id and (page := _HUB_PAGE.fullmatch(text)):
        return f"Nothing is read from an address. `trimtab pull {page[1]}` fetches it; then give {page[1]}"
    return "Nothing is read from an address: download it, and give the " + (
        "folder, or a hub id such as google/gemma-4-E4B-it" if takes_hub_id else "path on this machine"
    )


# How many entries are looked at for a mistyped path, and how many names a message has.
MOST_LOOKED_AT, MOST_NAMED = 500, 5


def path_hint(
    path: str | os.PathLike[str], *, holds: str | None = None, deeper: int = 0, also: Iterable[str] = (), lists: bool = False,
    takes_hub_id: bool = False,
) -> str:  # fmt: skip
    """Return what to do where nothing is: the hint of an address, or which paths in the same folder may be meant; "" without any.

    holds: None, files are meant; "", folders; a name or pattern, folders with such a file. deeper: how many levels of folders
    are searched below it. also: other names that may be meant. lists: whether the paths are named where none is near.
    """
    text = os.fspath(path)
    if hint := address_hint(text, takes_hub_id=takes_hub_id):
        return hint
    parent, last = os.path.split(text.rstrip("/\\"))
    found, also = [str(one) for one in _beside(Path(parent), holds, deeper)], tuple(also)
    by_name: dict[str, list[str]] = {}
    for one in (*found, *also):
        name = os.path.basename(one)
        by_name.setdefault(os.path.splitext(name)[0] if holds is None else name, []).append(one)
    alike = near_names(os.path.splitext(last)[0] if holds is None else last, by_name)
    alike = alike or near_names(text, also if takes_hub_id else ())
    near = list(dict.fromkeys(one for name in alike for one in by_name.get(name, [name])))[:MOST_NAMED]
    if near:
        return f"Did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?"
    if parent and not takes_hub_id and not os.path.isdir(parent):
        return f"There is no folder {parent}. {path_hint(parent, holds='')}".rstrip(". ")
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"There {'are' if found[1:] else 'is'} {', '.join(found[:MOST_NAMED])}{more}" if lists and found else ""


def _beside(folder: Path, holds: str | None, deeper: int) -> Iterator[Path]:
    """Yield the entries of a folder, and of those `deeper` levels below it, that `holds` describes."""
    level, left = [folder], MOST_LOOKED_AT
    for _ in range(deeper + 1):
        entries: list[Path] = []
        for one in level:
            with suppress(OSError, ValueError):  # a path may be too long, or a folder another user's
                entries += sorted(entry for entry in one.iterdir() if not entry.name.startswith("."))
        level = [entry for entry in entries[:left] if entry.is_dir() == (holds is not None)]
        left -= len(level)
        yield from (entry for entry in level if not holds or any(entry.glob(holds)))


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
