"""How does a module of this package run in a separate process, also under an interpreter without trimtab?"""

from __future__ import annotations

import os
import sys

# A script's folder comes first on the search path, so our files would hide other packages' modules of the same name.
if __name__ == "__main__" and sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import gc
import importlib
import importlib.abc
import importlib.util
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This file runs as a plain script: only the standard library is imported before the search path is right.
PACKAGE = Path(__file__).resolve().parents[1]


class _OnlyTrimtab(importlib.abc.MetaPathFinder):
    """Finds `trimtab` in the folder of this file and nothing else, because the folder above may be a site-packages with other
    versions."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "trimtab":
            return None
        return importlib.util.spec_from_file_location("trimtab", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)])


def end_with_parent() -> None:
    """End this process once its standard input ends, and give it an empty one."""
    pipe = os.dup(0)  # child processes do not inherit it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(pipe, 4096):
            pass

    end_after(wait)


def end_after(wait: Callable[[], object], *, grace_s: float = 0.0) -> None:
    """End this process, also within a computation, after `wait` has returned or failed on a thread: its parent has ended.
    grace_s: seconds in which it may end by itself."""

    def watch() -> None:
        try:
            wait()
        finally:
            time.sleep(grace_s)
            os._exit(1)

    threading.Thread(target=watch, name="trimtab-parent", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run one module's `main`; returns the exit code.

        EXE .../trimtab/process/child.py MODULE [REQUEST.json LINES.jsonl [held]]

    MODULE: a dotted name below `trimtab`. Every emitted dict is one line, flushed at once. With `held` the process ends when its
    standard input closes. Without files it calls MODULE's `main()`.
    """
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
    sys.meta_path.insert(0, _OnlyTrimtab())
    code = main(sys.argv[1:])
    gc.freeze()  # garbage collection at exit walks all modules: more than a second
    sys.exit(code)
