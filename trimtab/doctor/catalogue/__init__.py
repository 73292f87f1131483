"""Which bugs of other packages are known, in one file for each topic?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from trimtab.doctor.facts.bug import Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Entry:
    """A known bug, its probe, and the file of both."""

    bug: Bug
    probe: Callable[[Kit], Seen]
    path: Path


@cache
def read_catalogue(folder: Path = FOLDER) -> tuple[Entry, ...]:
    """Return every entry of a folder in the order of the ids."""
    entries = [entry for path in folder.glob("[a-z]*.py") for entry in read_entries(path)]
    return tuple(sorted(entries, key=lambda entry: (entry.bug.id[0], int(entry.bug.id[1:]))))


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of one file: `A1_META_ITEM = Bug(...)` has the id A1, the name meta-item and the probe `a1_meta_item`."""
    spec = importlib.util.spec_from_file_location(f"{__name__}.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entries = []
    for variable, bug in vars(module).items():
        if isinstance(bug, Bug):
            bug_id, _, name = variable.partition("_")
            named = replace(bug, id=bug_id, name=name.lower().replace("_", "-"))
            entries.append(Entry(named, getattr(module, variable.lower()), path))
    return entries
