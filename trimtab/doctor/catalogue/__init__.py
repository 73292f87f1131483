"""Which bugs of other packages are known, one file each?"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
# In the order of the ids.
FILES = tuple(sorted((file.stem for file in FOLDER.glob("[a-z]*.py")), key=lambda name: (name[0], int(name[1 : name.index("_")]))))


def read_entry(path: Path) -> ModuleType:
    """Return the module of one catalogue file: its `BUG` and its `probe`."""
    spec = importlib.util.spec_from_file_location(f"trimtab.doctor.catalogue.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    number, _, name = path.stem.partition("_")
    bug = module.BUG
    vars(module)["BUG"] = replace(bug, id=bug.id or number.upper(), name=bug.name or name.replace("_", "-"))
    return module
