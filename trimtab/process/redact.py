"""How are paths, names of users and machines, addresses and tokens removed from texts?"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError

LIBRARIES = (
    "accelerate", "bitsandbytes", "huggingface_hub", "numpy", "peft", "safetensors", "tokenizers", "torch", "transformers",
    "trimtab",
)  # fmt: skip
# In a draft, shorter names and these names are also ordinary words of a trace, so they are kept.
SHORTEST_NAME = 4
ORDINARY = frozenset({"root", "user", "users", "home", "model", "base", "main", "local", "localhost", "test", "admin", *LIBRARIES})
_SHORT_NAME = 3  # in a report from this machine


def user_name() -> str:
    """Return the name of the user that this process runs as; "" if there is none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # no entry in the password file, as in some containers
        return ""


def map_texts(value: Any, change: Callable[[str], str], *, keys: bool) -> Any:
    """Return a JSON value with every text changed. keys: the keys of mappings too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if keys and isinstance(key, str) else key: map_texts(item, change, keys=keys) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [map_texts(item, change, keys=keys) for item in value]
    return value


# Clients of the server ------------------------------------------------------------------------------------------------

# Characters that may follow a known folder. A space ends the name, because the rest may be the sentence.
_BELOW = r"""(?:[\\/][^\s'"`,;()<>|:]*)?(?![\w-])"""
# Python's default text of an object.
_ADDRESS = re.compile(r"<[\w.]+(?: [\w.]+)* at 0x[0-9a-fA-F]+>")
# An absolute path of POSIX or Windows: at least two parts, so that "/v1" and "and/or" are kept.
_PATH = re.compile(r"""(?<![\w.:/\\-])(?:[A-Za-z]:[\\/]|\\\\|/)[^\s'"`,;()<>|/\\]+[\\/][^\s'"`,;()<>|]*""")


def own_folders(paths: Iterable[str | Path | None]) -> tuple[str, ...]:
    """Return every spelling of the server's folders that a message could contain, longest first.

    paths: those from the command line; the working directory is added. A path with spaces can only be recognized from
    this list, because a sentence does not mark its end. Names that do not exist on this machine, such as hub ids, are
    not paths.
    """
    existing = [Path(path) for path in paths if path is not None and Path(path).exists()]
    around = [Path.cwd(), Path(sys.prefix), Path(tempfile.gettempdir()), Path(os.path.expanduser("~"))]
    folders = set()
    for path in [*existing, *around]:
        for one in (Path(os.path.abspath(path)), path.resolve()):
            if one != one.parent:  # "/" alone would match every slash
                folders |= {str(one), one.as_posix(), str(one).replace("\\", "\\\\")}
    return tuple(sorted(folders, key=lambda text: (-len(text), text)))


def without_paths(value: Any, *known: str, folders: Sequence[str] = ()) -> Any:
    """Return plain values with every path of this machine removed from their texts. known: paths to look for first.

    folders: as `own_folders` gives them.
    """

    def change(text: str) -> str:
        for path in known:
            text = text.replace(path, "the file") if path else text
        for folder in folders:
            if folder in text:
                text = re.sub(rf"(?<!\w){re.escape(folder)}{_BELOW}", "[path]", text)
        return _PATH.sub("[path]", _ADDRESS.sub("[object]", text))

    return map_texts(value, change, keys=False)


# Reports from this machine --------------------------------------------------------------------------------------------


# From the first slash of a word on.
_SITE_PACKAGES = re.compile(
    r"(?<![^\s'\"<>|*?])(?P<before>[^\s'\"<>|*?/\\]*?)(?:[A-Za-z]:)?[/\\][^\s'\"<>|*?]*[/\\]site-packages[/\\]"
)


def scrubbed(text: str) -> str:
    """Return text without the user's and the machine's name; paths of packages start at the package, others at "..."."""
    text = _SITE_PACKAGES.sub(r"\g<before>", text)
    for folder in sorted({str(Path.home()), os.getcwd(), tempfile.gettempdir(), sys.prefix}, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(folder, "...")
    for name, stand_in in ((user_name(), "USER"), (socket.gethostname(), "HOST"), (platform.node(), "HOST")):
        if len(name) >= _SHORT_NAME:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", stand_in, text)
    return text


# Records of a run -----------------------------------------------------------------------------------------------------

# The folder of an interpreter's packages can identify the machine.
_PACKAGES = re.compile(r"(?<![^\s\"'(])[^\s\"'(]*[\\/](site|dist)-packages[\\/]")


class Cleaner:
    """Replaces this machine's paths in a text by descriptions. names: path -> description."""

    def __init__(self, names: Mapping[str, str]) -> None:
        replacements = {**names, str(Path.home()): "~", tempfile.gettempdir(): "<tmp>"}
        self.names = sorted(((path, name) for path, name in replacements.items() if len(path) > 1), key=lambda item: -len(item[0]))

    def __call__(self, text: str) -> str:
        for path, name in self.names:
            text = text.replace(path, name)
        return _PACKAGES.sub("", text)


# Drafts for the public ------------------------------------------------------------------------------------------------

_PART = r"[\w.@+~%$#-]+"
# A path of one name ("/base") is not private, unless users' home folders are there.
_POSIX = re.compile(rf"(?<![\w.:/<>\\*)\]-])/(?:{_PART}(?:/{_PART})+|(?:home|root|Users|tmp|mnt)\b)/?")
_POSIX_QUOTED = re.compile(r"""(?<=["'])/[^"'\n/]+(?:/[^"'\n/]+)+(?=["'])""")
_DRIVE = r"(?:(?<![\w\\])[A-Za-z]:[\\/]{1,2}|(?<![\w\\])\\\\[\w.-]+\\)"
_WINDOWS = re.compile(rf"""{_DRIVE}[^\s"'<>|:*?;,)\]]+""")
_WINDOWS_QUOTED = re.compile(rf"""(?<=["']){_DRIVE}[^"'\n]+(?=["'])""")
_HOME = re.compile(rf"(?<!\w)~(?:/{_PART})+")
_PATHS = (_WINDOWS_QUOTED, _POSIX_QUOTED, _WINDOWS, _HOME, _POSIX)
_FILE_URL = re.compile(r"file://[^\s\"']+")
_MAIL = re.compile(r"[\w.+-]{1,64}@[\w-]+\.[\w.-]+\w")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_INSTALLED = re.compile(r"(?:^|[\\/])(?:site|dist)-packages[\\/]+(.+)$")
_LIBRARY_FILE = re.compile(rf"[\\/]((?:{'|'.join(LIBRARIES)})[\\/].+\.py)$")


def clean(text: str) -> str:
    """Return the text without private data: a library's file keeps its path from the package on, other paths their last name."""
    text = _FILE_URL.sub("<path>", text)
    for pattern in _PATHS:
        text = pattern.sub(_short, text)
    text = _TOKEN.sub("<token>", _MAIL.sub("<address>", text))
    for name, stand_in in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text)
    return text


def clean_all(value: Any) -> Any:
    """Return a JSON value with every string in it cleaned, keys too."""
    return map_texts(value, clean, keys=True)


def check_clean(text: str, *, what: str) -> None:
    """Raise RequestError if the text still holds a path of this machine, a user or host name, an address or a token."""
    left = [match.group(0) for pattern in (*_PATHS, _FILE_URL, _MAIL, _TOKEN) for match in pattern.finditer(text)]
    left += [name for name, _ in _names() if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    if left:
        raise RequestError(f"still holds personal data ({', '.join(sorted(set(left))[:5])})", field=what)


def _short(match: re.Match[str]) -> str:
    path = match.group(0)
    patterns = (_INSTALLED, _LIBRARY_FILE) if path.endswith(".py") else (_INSTALLED,)
    if inside := [found for pattern in patterns if (found := pattern.search(path))]:
        return re.sub(r"[\\/]+", "/", min(inside, key=re.Match.start)[1])
    ending = path[-1] if path[-1] in "." else ""
    last = re.split(r"[\\/]+", path.rstrip("\\/."))[-1]
    # The last part of a folder's path may be a user's name. A file's name is kept: it identifies the file.
    return f"<path>/{last}{ending}" if "." in last[1:] else f"<path>{ending}"


def _names() -> list[tuple[str, str]]:
    pairs = [(user_name(), "<user>"), (socket.gethostname(), "<host>"), (Path.home().name, "<user>")]
    return [(name, stand_in) for name, stand_in in pairs if len(name) >= SHORTEST_NAME and name.lower() not in ORDINARY]
