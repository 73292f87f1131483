"""Which cases the stock stack and trimtab answer on this machine, as a runs file and a short table.

    python -m bench.matrix --save bench/results/matrix_gpu.json [--cases NAME,...] [--python EXE] [--model FOLDER
        --adapter FOLDER] [--device cuda] [--pressure 0.9] [--engines stock,trimtab] [--timeout-s 120]

The file holds what a reader needs of each run, and all that its label is decided on: scripts are left out (the case's name
gives them), a frame that repeats is kept once. It is written after every record.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from trimtab.doctor.environment import read_environment
from trimtab.doctor.matrix import FORMAT, matrix_text, read_runs, run_matrix

TAIL_LINES, LINES = 30, 8


def compact(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without its script, with the end of a trace's text and the commonest warnings.

    Frames and maps stay whole: labels are decided on them, and must come out the same from the file.
    """
    kept = {key: value for key, value in record.items() if key not in ("script", "stderr_tail")}
    kept["warnings"] = dict(list(record["warnings"].items())[:LINES])
    kept["log_lines"] = record["log_lines"][:LINES]
    kept["exception"] = _trimmed(record["exception"])
    kept["modes"] = {
        mode: {**found, "exception": None if found["exception"] is None else found["exception"]["type"]}
        for mode, found in record["modes"].items()
    }
    kept["scan"] = record["scan"][:LINES]
    return kept


def _trimmed(failure: dict[str, Any] | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    frames = failure["frames"]
    tail = failure["tail"].splitlines()
    return {
        **failure, "message": failure["message"][:400],
        "frames": [frame for before, frame in zip((None, *frames), frames, strict=False) if frame != before],
        "tail": "\n".join(line[:200] for line in tail[-TAIL_LINES:]),
    }  # fmt: skip


def write(path: Path, environment: Any, runs: list[dict[str, Any]]) -> None:
    """Write the runs file, a run a line."""
    lines = ",\n".join(json.dumps(run) for run in runs)
    head = json.dumps(environment)
    beside = path.with_suffix(".part")
    beside.write_text(f'{{"format": {FORMAT}, "environment": {head}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(beside, path)


def main() -> None:
    """Run, save after every record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--cases", default="")
    parser.add_argument("--python")
    parser.add_argument("--model")
    parser.add_argument("--adapter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pressure", type=float)
    parser.add_argument("--engines", default="stock,trimtab")
    parser.add_argument("--timeout-s", type=float, default=120)
    given = parser.parse_args()
    given.save.parent.mkdir(parents=True, exist_ok=True)
    environment = read_environment(given.python).to_json()
    runs: list[dict[str, Any]] = []
    started = time.monotonic()

    def keep(record: dict[str, Any]) -> None:
        runs.append(compact(record))
        write(given.save, environment, runs)
        seconds = time.monotonic() - started
        print(f"{seconds:6.0f} s  {record['case']:42} {record['engine']:8} {record['label']}", flush=True)

    run_matrix(
        cases=given.cases.split(",") if given.cases else None, python=given.python, model=given.model,
        adapter=given.adapter, device=given.device, pressure=given.pressure, timeout_s=given.timeout_s,
        engines=given.engines.split(","), on_record=keep,
    )  # fmt: skip
    print(matrix_text(read_runs(given.save)["runs"]))


if __name__ == "__main__":
    main()
