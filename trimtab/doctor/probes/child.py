"""What do probes find, one after the other in one process?"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.doctor.catalogue import Entry, read_entries
from trimtab.doctor.facts.bug import NOT_APPLICABLE, STATES, UNKNOWN, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure, quiet

STACK = ("torch", "transformers", "accelerate", "bitsandbytes", "peft")


def main(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emit {"event": "start", "id"} and {"event": "seen", "id", "state", "evidence", "seconds"} for every entry.

    request: ids and files of catalogue entries, folder (where probes may write), timeout_s (for one probe), gpu_hidden: whether
    entries that need a GPU are left for a process that may see it; ignored if torch has no GPU.
    """
    kit = Kit(Path(request["folder"]))
    known = {entry.bug.id: entry for file in request["files"] for entry in read_entries(Path(file))}
    entries = [known[bug_id] for bug_id in request["ids"]]
    _import_stack(kit, {affected.package for entry in entries for affected in entry.bug.affected})
    home = os.getcwd()
    for entry in entries:
        if request["gpu_hidden"] and entry.bug.needs_gpu and _is_built_for_gpu(kit):
            continue
        emit({"event": "start", "id": entry.bug.id})
        started = time.monotonic()
        faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=sys.stderr)
        seen = _seen(entry, kit)
        faulthandler.cancel_dump_traceback_later()
        os.chdir(home)
        gc.collect()
        emit(
            {"event": "seen", "id": entry.bug.id, "state": seen.state, "evidence": seen.evidence}
            | {"seconds": round(time.monotonic() - started, 3)}
        )


def _import_stack(kit: Kit, packages: set[str]) -> None:
    """Import the packages of the probes before the first measurement; a broken package fails in its own probes."""
    for package in STACK:
        if package in packages and kit.has(package):
            try:
                importlib.import_module(package)
            except Exception as error:
                print(failure(error), file=sys.stderr)
    # The stack's million objects are permanent: without them, a garbage collection after each probe is fast.
    gc.collect()
    gc.freeze()


def _is_built_for_gpu(kit: Kit) -> bool:
    if not kit.has("torch"):
        return False
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def _seen(entry: Entry, kit: Kit) -> Seen:
    """Return the probe's result; an unexpected error is "unknown" with that error."""
    for affected in entry.bug.affected:
        if not kit.has(affected.package):
            return Seen(NOT_APPLICABLE, f"{affected.package} is not installed")
    try:
        with quiet():
            seen = entry.probe(kit)
    except ModuleNotFoundError as error:
        if error.name in STACK:
            return Seen(NOT_APPLICABLE, f"{error.name} is not installed")
        return Seen(UNKNOWN, failure(error))
    except Exception as error:
        return Seen(UNKNOWN, failure(error))
    if seen.state not in STATES:
        return Seen(UNKNOWN, f"the probe said {seen.state!r}, which is no state")
    return Seen(seen.state, seen.evidence)
