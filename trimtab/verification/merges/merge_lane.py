"""trimtab's merge in a separate process, so that the measured peak memory is the merge's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Merge request["adapter"] into request["folder"] at request["out"]; emits seconds and the process's peak."""
    from trimtab.machine.memory import peak_host_bytes
    from trimtab.merging import merge

    merged = merge(request["folder"], request["out"], adapters={"adapter": request["adapter"]}, requantize=request["requantize"])
    emit(
        {"event": "merge", "seconds": merged.seconds,
         "memory": {"host_peak_bytes": peak_host_bytes(), "gpu_peak_bytes": 0}}
    )  # fmt: skip
