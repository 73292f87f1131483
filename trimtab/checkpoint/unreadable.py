"""System errors while a folder is read (permissions, a bad disk) become errors of that folder; a mistyped path, a question."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import islice
from pathlib import Path
from types import ModuleType
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
_HUB_PAGE = re.compile(r"https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")


def as_typed(path: str | os.PathLike[str]) -> str:
    """Return a path as text; an address with both slashes, of which a path keeps one."""
    text = os.fspath(path)
    return re.sub(r":/(?!/)", "://", text, count=1) if _ADDRESS.match(text) else text


def address_hint(text: str, *, takes_hub_id: bool = False, is_adapter: bool = False) -> str:
    """Return what to do with a web address that was given as a file or folder; "" for any other text.

    takes_hub_id: whether a hub id would do, which the address of a hub's page has in it. is_adapter: whether a hub's page
    would have what was meant, which is given as the folder.
    """
    if not _ADDRESS.match(text):
        return ""
    if (takes_hub_id or is_adapter) and (page := _HUB_PAGE.fullmatch(text)):
        then = "prints its folder: give that" if is_adapter else f"fetches it; then give {page[1]}"
        return f"Nothing is read from an address. `trimtab pull {page[1]}` {then}"
    return "Nothing is read from an address: download it, and give the " + (
        "folder, or a hub id such as google/gemma-4-E4B-it" if takes_hub_id else "path on this machine"
    )


# How many entries are looked at for a mistyped path, hidden ones too, how many names a message lists, and how many it proposes.
MOST_LOOKED_AT, MOST_NAMED, MOST_NEAR = 500, 5, 3
# Endings of files of one kind.
KINDS = (
    (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), (".wav", ".flac", ".mp3", ".ogg", ".m4a"),
    (".json", ".jsonl"), (".txt", ".log", ".md"),
)  # fmt: skip


def path_hint(
    path: str | os.PathLike[str], *, holds: str | None = None, deeper: int = 0, also: Iterable[str] = (), lists: bool = False,
    takes_hub_id: bool = False,
) -> str:  # fmt: skip
    """Return what to do where nothing is: the hint of an address, or which paths in the same folder may be meant; "" without any.

    holds: None, files are meant; "", folders; a name, folders with such a file. deeper: how many levels of folders
    are searched below it. also: other names that may be meant. lists: whether the paths are named where none is near.
    """
    text = os.fspath(path)
    if hint := address_hint(text, takes_hub_id=takes_hub_id):
        return hint
    parent, last = os.path.split(text.rstrip("/\\"))
    found, also = _beside(parent, holds, deeper), tuple(also)
    by_name: dict[str, list[str]] = {}
    for one in (*found, *also):
        name = os.path.basename(one)
        by_name.setdefault(os.path.splitext(name)[0] if holds is None else name, []).append(one)
    alike = near_names(os.path.splitext(last)[0] if holds is None else last, by_name, MOST_LOOKED_AT)
    alike = alike or near_names(text, also if takes_hub_id else ())
    of_name = dict.fromkeys(one for name in alike for one in by_name.get(name, [name]))
    near = list(islice((one for one in of_name if one in also or _is_meant(one, holds, text)), MOST_NEAR))
    if near:
        return f"Did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?"
    if parent and not takes_hub_id and not os.path.isdir(parent):
        missing = first_missing(parent)
        is_beside = os.path.isdir(os.path.dirname(missing) or os.curdir)
        return f"There is no folder {missing}. {path_hint(missing, holds='') if is_beside else ''}".rstrip(". ")
    found = [one for one in found if _is_meant(one, holds)] if lists else []
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"There {'are' if found[1:] else 'is'} {', '.join(found[:MOST_NAMED])}{more}" if found else ""


def first_missing(folder: str, paths: ModuleType = os.path) -> str:
    """Return the highest folder of a path that is missing: what is above it exists, or nothing is above it (a drive)."""
    while (above := paths.dirname(folder)) not in ("", folder) and not paths.isdir(above):
        folder = above
    return str(folder)


def _beside(folder: str, holds: str | None, deeper: int) -> list[str]:
    """Return the entries of a folder and of those `deeper` levels below it, MOST_LOOKED_AT in all: folders unless holds is None."""
    level, left = [Path(folder)], MOST_LOOKED_AT
    found: list[str] = []
    for _ in range(deeper + 1):
        below: list[Path] = []
        for one in level:
            if not left:
                break
            with suppress(OSError, ValueError), os.scandir(one) as entries:  # a path may be too long, or another user's
                looked_at = list(islice(entries, left))
                left -= len(looked_at)
                below += sorted(Path(entry.path) for entry in looked_at if _may_be_meant(entry, holds))
        found, level = [*found, *map(str, below)], below
    return found


def _may_be_meant(entry: os.DirEntry[str], holds: str | None) -> bool:
    """Whether a visible entry is a folder, or no folder if holds is None. A link's file system may not answer."""
    with suppress(OSError, ValueError):
        return not entry.name.startswith(".") and entry.is_dir() == (holds is not None)
    return False


def _is_meant(path: str, holds: str | None, typed: str = "") -> bool:
    """Whether a path has what is meant: of a file, the name or the kind of the typed one."""
    if holds is None and typed:
        (stem, ending), (own, kind) = (os.path.splitext(os.path.basename(one).lower()) for one in (typed, path))
        return stem == own or not ending or _kind(ending) == _kind(kind)
    return not holds or os.path.isfile(os.path.join(path, holds))


def _kind(ending: str) -> object:
    return next((kind for kind in KINDS if ending in kind), ending)


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
