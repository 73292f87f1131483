"""Private data that must not leave the machine in a draft or report: paths, user and host names, addresses, tokens.

`clean` takes them out of what was recorded, `check_clean` refuses a finished text that still has one.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError

LIBRARIES = (
    "accelerate", "bitsandbytes", "huggingface_hub", "numpy", "peft", "safetensors", "tokenizers", "torch", "transformers",
    "trimtab",
)  # fmt: skip
# A name shorter than this, or one of these, is also an ordinary word of a trace: taking it out would hide the trace.
SHORTEST_NAME = 4
ORDINARY = frozenset(
    {"root", "user", "users", "home", "model", "base", "main", "local", "localhost", "test", "admin", *LIBRARIES}
)

_PART = r"[\w.@+~%$#-]+"
# A path of one name ("/base") tells nothing, unless it is where people's folders are.
_POSIX = re.compile(rf"(?<![\w.:/<>\\*)\]-])/(?:{_PART}(?:/{_PART})+|(?:home|root|Users|tmp|mnt)\b)/?")
_POSIX_QUOTED = re.compile(r"""(?<=["'])/[^"'\n/]+(?:/[^"'\n/]+)+(?=["'])""")
_DRIVE = r"(?:(?<![\w\\])[A-Za-z]:[\\/]{1,2}|(?<![\w\\])\\\\[\w.-]+\\)"
_WINDOWS = re.compile(rf"""{_DRIVE}[^\s"'<>|:*?;,)\]]+""")
_WINDOWS_QUOTED = re.compile(rf"""(?<=["']){_DRIVE}[^"'\n]+(?=["'])""")
_HOME = re.compile(rf"(?<!\w)~(?:/{_PART})+")
_PATHS = (_WINDOWS_QUOTED, _POSIX_QUOTED, _WINDOWS, _HOME, _POSIX)
_FILE_URL = re.compile(r"file://[^\s\"']+")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+\w")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_IN_LIBRARY = re.compile(rf"(?:^|[\\/])(?:site|dist)-packages[\\/]+(.+)$|[\\/]((?:{'|'.join(LIBRARIES)})[\\/].+\.py)$")


def clean(text: str) -> str:
    """Return the text without them: a library's file keeps its path from the package on, other paths their last name."""
    text = _FILE_URL.sub("<path>", text)
    for pattern in _PATHS:
        text = pattern.sub(_short, text)
    text = _TOKEN.sub("<token>", _MAIL.sub("<address>", text))
    for name, stand_in in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text)
    return text


def _short(match: re.Match[str]) -> str:
    path = match.group(0)
    if inside := _IN_LIBRARY.search(path):
        return re.sub(r"[\\/]+", "/", inside[1] or inside[2])
    ending = path[-1] if path[-1] in "." else ""
    last = re.split(r"[\\/]+", path.rstrip("\\/."))[-1]
    # The last name of a folder may be a user's; a file's name says which file it was.
    return f"<path>/{last}{ending}" if "." in last[1:] else f"<path>{ending}"


def _names() -> list[tuple[str, str]]:
    pairs = [(_user(), "<user>"), (socket.gethostname(), "<host>"), (Path.home().name, "<user>")]
    return [(name, stand_in) for name, stand_in in pairs if len(name) >= SHORTEST_NAME and name.lower() not in ORDINARY]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a process may run under a number that has no name
        return os.environ.get("USERNAME", "")


def clean_all(value: Any) -> Any:
    """Return a JSON value with every string in it cleaned, keys too."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean_all(key) if isinstance(key, str) else key: clean_all(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean_all(inner) for inner in value]
    return value


def check_clean(text: str, *, what: str) -> None:
    """Raise RequestError if the text still holds a path of this machine, a user or host name, an address or a token."""
    left = [match.group(0) for pattern in (*_PATHS, _FILE_URL, _MAIL, _TOKEN) for match in pattern.finditer(text)]
    left += [name for name, _ in _names() if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    if left:
        raise RequestError(f"still holds personal data ({', '.join(sorted(set(left))[:5])})", field=what)
