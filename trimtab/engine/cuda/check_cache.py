"""What is cached of a card for later loads: results of checks and timings, and tuned launch configurations?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from trimtab.engine.cuda import nvrtc
from trimtab.process.json_file import parse
from trimtab.process.packages import deciding_versions
from trimtab.process.user_cache import hashed, own_folder, prune, read_own, touch, write_own

FOLDER = "checked"
MOST_FILES, MOST_BYTES, MOST_FILE_BYTES = 64, 64 * 2**20, 4 * 2**20
MOST_ENTRIES = 5000

Entry = Mapping[str, Any]


class CardEntries:
    """The cached entries of one card. key: the condition under which they are valid, as text; None: nothing is read or written."""

    def __init__(self, key: str | None = None) -> None:
        self._key = key
        self._entries = {} if key is None else _read(key)
        self._added: dict[str, Entry] = {}

    @classmethod
    def of(cls, device: torch.device | str) -> CardEntries:
        """Return the passed checks of a device; none for other devices than NVIDIA's GPUs. They are valid for the very card (name,
        identifier, size), driver, releases of packages, CUDA sources and the files of this room."""
        device = torch.device(device)
        return cls(facts(device) if device.type == "cuda" and nvrtc.why_not(device) is None else None)

    def find(self, *what: object) -> Entry | None:
        """Return an entry, None if there is none. what: the check and everything that decides it, or the product."""
        return self._entries.get(repr(what))

    def all(self) -> Collection[Entry]:
        """Return all entries."""
        return self._entries.values()

    def keep(self, entry: Entry, *what: object) -> None:
        """Record an entry in this object; `save` writes it. entry: JSON values."""
        self._entries[repr(what)] = self._added[repr(what)] = entry

    def save(self) -> None:
        """Write the new entries, together with those that other processes wrote at the same time. If the folder cannot be written,
        later processes check and tune again."""
        if self._key is None or not self._added:
            return
        whole = {**_read(self._key), **self._added}
        self._added = {}
        with suppress(OSError):
            folder = own_folder(FOLDER)
            if len(whole) <= MOST_ENTRIES:
                write_own(folder / hashed(self._key), self._key, json.dumps(whole).encode())
                prune(folder, most_files=MOST_FILES, most_bytes=MOST_BYTES)


def _read(key: str) -> dict[str, Entry]:
    with suppress(OSError, ValueError):
        path = own_folder(FOLDER) / hashed(key)
        text = read_own(path, key, limit_bytes=MOST_FILE_BYTES)
        whole = {} if text is None else parse(text, "own state")
        touch(path)
        if isinstance(whole, dict) and all(isinstance(entry, dict) for entry in whole.values()):
            return whole
    return {}


def facts(device: torch.device) -> str:
    """Return the conditions of a check's result on a device, as text."""
    card = torch.cuda.get_device_properties(device)
    compiler = nvrtc.find_compiler()
    return json.dumps(
        {
            "card": [card.name, str(getattr(card, "uuid", "")), card.total_memory, card.multi_processor_count],
            "capability": [card.major, card.minor], "driver": nvrtc.driver_version(),
            "nvrtc": None if compiler is None else compiler.version, "versions": deciding_versions(), "sources": sources(),
        },
        sort_keys=True,
    )  # fmt: skip


def sources() -> str:
    """Return a hash of the kernels and of the code that launches, checks and times them."""
    summed = hashlib.sha256()
    for entry in sorted((resources.files("trimtab.engine.kernels") / "cuda").iterdir(), key=lambda entry: entry.name):
        if entry.is_file():
            summed.update(entry.name.encode() + entry.read_bytes())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):  # an installation that is edited in place keeps its version
        status = file.stat()
        summed.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return summed.hexdigest()
