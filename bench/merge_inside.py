"""Time and memory of one merge beyond its imports, of a process of its own; what `bench.merge` and a test of memory start.

    python -m bench.merge_inside '{"model": ..., "out": ..., "adapters": [[name, path, weight]], ...}'

prints one line of JSON: seconds, baseline and peak bytes, the merge's report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(request: Mapping[str, Any], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what `measured` does, of a process of its own. Errors: RuntimeError with what it wrote to stderr."""
    command = [sys.executable, "-m", "bench.merge_inside", json.dumps(dict(request))]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "PYTHONPATH": path, **(environment or {})}
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the requested merge; returns its time and memory."""
    import torch

    from trimtab.engine.loader import transformers_model  # noqa: F401
    from trimtab.engine.tiers import reader  # noqa: F401 - imported before the baseline is taken
    from trimtab.machine.memory import peak_host_bytes, process_bytes
    from trimtab.merging import merge

    torch.ones(8, 8) @ torch.ones(8, 8)  # the library's own buffers belong to the baseline
    baseline = process_bytes()
    started = time.perf_counter()
    adapters = {name: (path, weight) for name, path, weight in request.get("adapters", ())}
    options = {name: request[name] for name in ("dtype", "requantize", "overwrite", "check") if name in request}
    report = merge(request["model"], request["out"], adapters=adapters, **options)
    seconds = time.perf_counter() - started
    # As the system counted it: a thread that looks now and then misses short peaks on a busy machine.
    peak = peak_host_bytes()
    return {"seconds": seconds, "baseline_bytes": baseline, "peak_bytes": peak, "report": report.to_json()}


if __name__ == "__main__":
    print(json.dumps(measured(json.loads(sys.argv[1])), default=str))
