"""Time and memory of one merge beyond its imports; runs in a separate process.

`main` is called by `process.run_inside`: {"model", "out", "adapters", ...} in; seconds, baseline and peak bytes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def main(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Run the requested merge and report its time and memory."""
    import torch

    from trimtab.machine.memory import peak_host_bytes
    from trimtab.merge import merge
    from trimtab.runtime import hf, read  # noqa: F401 - imported before the baseline is taken
    from trimtab.runtime.devices import process_bytes

    torch.ones(8, 8) @ torch.ones(8, 8)  # the library's own buffers belong to the baseline
    baseline = process_bytes()
    started = time.perf_counter()
    adapters = {name: (path, weight) for name, path, weight in request.get("adapters", ())}
    options = {name: request[name] for name in ("dtype", "requantize", "overwrite", "check") if name in request}
    report = merge(request["model"], request["out"], adapters=adapters, **options)
    seconds = time.perf_counter() - started
    # As the system counted it: a thread that looks now and then misses short peaks on a busy machine.
    peak = peak_host_bytes()
    emit(
        {
            "seconds": seconds, "baseline_bytes": baseline, "peak_bytes": peak,
            "report": report.to_json(),
        }
    )  # fmt: skip
