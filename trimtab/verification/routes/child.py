"""Errors and phases across processes: the child sends class, message and fields, and the parent raises the same error."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.process import before_torch, phases

PHASE = "phase"


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Run the `main` of request["module"]; an error of trimtab is reported, any other ends the process as usual."""
    try:
        with phases.watched(lambda phase, far: emit({"event": PHASE, "phase": phase, "far": far})):
            phases.begin_imports()
            with before_torch.collecting_rarely():
                module = importlib.import_module(request["module"])
                before_torch.keep_imports()
            module.main(request["request"], emit)
    except TrimtabError as exc:
        emit({"event": "error", **exc.to_dict()})
