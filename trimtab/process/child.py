"""How a module of this package runs in a separate process, also under an interpreter without trimtab.

    EXE .../trimtab/process/child.py MODULE [REQUEST.json LINES.jsonl [held]]

imports MODULE (a dotted name below `trimtab`) and calls its `main(request, emit)`: request is the JSON object of the first
file, every `emit(dict)` becomes one line of the second, flushed at once, so that a killed process leaves what it had said. With
`held` the process ends when its standard input does: whoever held the other end is gone.
Without the files it calls `main()`, which reads standard input.
The other interpreter needs only what MODULE itself imports. It runs as a plain script: nothing of trimtab is imported
before the search path is right, and only the standard library above that line.
"""

from __future__ import annotations

import os
import sys

# A script's own folder comes first on the search path: our file names would hide other packages' modules of the same name.
if __name__ == "__main__" and sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import gc
import importlib
import importlib.abc
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


class _OnlyTrimtab(importlib.abc.MetaPathFinder):
    """Finds `trimtab` beside this file and nothing else: the folder above may be a site-packages of other versions."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "trimtab":
            return None
        return importlib.util.spec_from_file_location(
            "trimtab", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )


def prepare_path() -> None:
    """Make `import trimtab` find this copy."""
    sys.meta_path.insert(0, _OnlyTrimtab())


def end_with_parent() -> None:
    """End this process once its standard input ends, and give it an empty one."""
    pipe = os.dup(0)  # not inherited by processes that are started here
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        while os.read(pipe, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="trimtab-parent", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run one module's `main`; returns the exit code."""
    module, *files = arguments
    if not module.startswith("trimtab."):
        raise SystemExit(f"not a module of trimtab: {module}")
    if not files:
        importlib.import_module(module).main()
        return 0
    request_file, lines_file, *held = files
    if held:
        end_with_parent()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    with open(lines_file, "a", encoding="utf-8") as lines:

        def emit(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line, default=str) + "\n")
            lines.flush()

        importlib.import_module(module).main(request, emit)
        emit({"event": "end"})
    return 0


if __name__ == "__main__":
    prepare_path()
    code = main(sys.argv[1:])
    gc.freeze()  # the interpreter looks for garbage among all modules as it ends: more than a second
    sys.exit(code)
