"""The rates of this machine as an earlier process measured them, in the user's cache.

Rates of a busy machine are cached for minutes only. That spares consecutive processes a new measurement.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.planning.values.byte_sizes import Rates
from trimtab.process.json_file import parse
from trimtab.process.user_cache import own_folder, read_own, write_own

FOLDER = "machine"
MOST_BYTES = 64 * 1024
# Further key: the time of the measurement in seconds since 1970, if the machine was busy.
BUSY, BUSY_S = "busy_at_s", 600


def path_of(device_name: str, torch_version: str, threads: int) -> Path:
    """Return the file of a device, a torch release and a thread count. Errors: OSError if its folder cannot be made."""
    key = "-".join(_slug(part) for part in (device_name, f"torch{torch_version}"))
    return own_folder(FOLDER) / f"rates-{key[:150]}-{threads}threads"


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in text) or "unknown"


def read(device_name: str, torch_version: str, threads: int) -> Rates | None:
    """Return the cached rates; None if there are none, or they are invalid or too old."""
    names = {item.name for item in fields(Rates)}
    try:
        path = path_of(device_name, torch_version, threads)
        text = read_own(path, path.name, limit_bytes=MOST_BYTES)
        values = {} if text is None else parse(text, "own state")
        if (busy_at := values.pop(BUSY, None)) is not None and not 0 <= time.time() - busy_at < BUSY_S:
            return None
        return Rates(**values) if set(values) == names else None
    except (OSError, ValueError, TypeError, AttributeError, RequestError):
        return None


def write(device_name: str, torch_version: str, threads: int, rates: Rates, *, is_busy: bool = False) -> None:
    """Cache rates. A folder that cannot be written is ignored: the next process measures again. is_busy: keep them for
    `BUSY_S` seconds.
    """
    values = asdict(rates) | ({BUSY: time.time()} if is_busy else {})
    with suppress(OSError):
        path = path_of(device_name, torch_version, threads)
        write_own(path, path.name, json.dumps(values, indent=1).encode())
