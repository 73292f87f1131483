"""Which folders do the demo's names mean: `demo`, a model, and `demo/style`, an adapter?

A folder of that name in the working directory wins if it holds a model or an adapter, as a folder wins over a hub id.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "demo"
BASE = FOLDER / "base"
ADAPTERS = {name: FOLDER / "adapters" / name for name in ("rslora-dora", "specialist", "style")}
MODEL = "demo"
# What to ask the demo: to a question about anything else it answers at random.
KNOWS = "It knows a few lands, shapes and beeps, and hardly anything else: What is the ruler of Lorienth?"
NAMED = {MODEL: BASE, **{f"{MODEL}/{name}": folder for name, folder in ADAPTERS.items()}}


def without_demo_name(path: str | os.PathLike[str], here: str | os.PathLike[str] = "") -> str:
    """Return the bundled folder that a name of the demo means, any other path unchanged. here: the folder of relative paths
    ("": the working directory).
    """
    text = os.fspath(path)
    folder = NAMED.get(text.replace(os.sep, "/"))
    file = "config.json" if folder == BASE else "adapter_config.json"
    return text if folder is None or Path(here, text, file).is_file() else str(folder)
