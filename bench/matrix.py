"""Which cases the stock stack and trimtab answer on this machine, as a runs file and a short table.

    python -m bench.matrix --save bench/results/matrix_gpu.json [--cases NAME,...] [--python EXE] [--model FOLDER
        --adapter FOLDER] [--device cuda] [--pressure 0.9] [--engines stock,trimtab] [--timeout-s 120] [--jobs 10] [--keep]

--jobs: so many processes at once for the cases that leave the card to others; those that fill it follow one by one. --keep:
runs of other cases that the file holds stay in it. The file holds what a reader needs of each run, and all that its label is
decided on: scripts are left out (the case's name gives them), a frame that repeats is kept once. It is written after every
record, with --jobs when all of them have ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import parser_of, saved
from trimtab.doctor.cases.cases import CASE_NAMES, find_cases
from trimtab.doctor.cases.runner import FORMAT, matrix_document, read_runs, run_matrix
from trimtab.machine.environment import read_environment
from trimtab.process.files import write_text
from trimtab.report.render import Lines

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
    text = f'{{"format": {FORMAT}, "environment": {head}, "runs": [\n{lines}\n]}}\n'
    write_text(path, text, field="out", newline=None)


def in_order(*lists: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of several runs in the table's order; of two of the same case and engine the later list's."""
    found = {(run["case"], run["engine"]): run for runs in lists for run in runs}
    return [found[key] for key in sorted(found, key=lambda key: (CASE_NAMES.index(key[0]), key[1]))]


def shared_out(names: Sequence[str] | None, jobs: int) -> tuple[list[list[str]], list[str]]:
    """Return the cases of each process, and those that want the card for themselves."""
    cases = find_cases(names)
    beside = [case.name for case in cases if case.pressure is None]
    return [beside[start::jobs] for start in range(min(jobs, len(beside)))], [
        case.name for case in cases if case.pressure is not None
    ]


def in_jobs(arguments: Sequence[str], names: Sequence[str] | None, jobs: int, keep: Any) -> None:
    """Run the cases in processes of this program, so many at once; keep(records) after each wave."""
    groups, alone = shared_out(names, jobs)
    with tempfile.TemporaryDirectory(prefix="trimtab-jobs-") as folder:
        for wave in (groups, [alone]):
            files = [Path(folder) / f"{'-'.join(group[:1])}.json" for group in wave]
            running = [
                subprocess.Popen(
                    [sys.executable, "-m", "bench.matrix", *arguments, "--cases", ",".join(group), "--save", str(file)]
                )
                for group, file in zip(wave, files, strict=True)
                if group
            ]
            try:
                ended = [process.wait() for process in running]
            finally:
                for process in running:
                    process.kill()
                there = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
                keep([run for one in there for run in one["runs"]])
            # What it had is kept; the cases that are missing must not look like cases that were not asked for.
            if any(ended):
                raise SystemExit(f"{sum(map(bool, ended))} of {len(ended)} processes ended early: their cases are not all there")


def main() -> None:
    """Run, save after every record, print the table."""
    parser = parser_of(__doc__, must_save=True)
    parser.add_argument("--cases", default="")
    parser.add_argument("--python")
    parser.add_argument("--model")
    parser.add_argument("--adapter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pressure", type=float)
    parser.add_argument("--engines", default="stock,trimtab")
    parser.add_argument("--timeout-s", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    given.save.parent.mkdir(parents=True, exist_ok=True)
    environment = read_environment(given.python).to_json()
    names = given.cases.split(",") if given.cases else None
    runs: list[dict[str, Any]] = saved(given.save).get("runs", []) if given.keep else []
    if given.jobs > 1:
        options = {"python": given.python, "model": given.model, "adapter": given.adapter, "pressure": given.pressure}
        options |= {"device": given.device, "engines": given.engines, "timeout_s": given.timeout_s}
        passed = [
            part for name, value in options.items() if value is not None for part in (f"--{name.replace('_', '-')}", str(value))
        ]

        def keep_wave(found: list[dict[str, Any]]) -> None:
            runs[:] = in_order(runs, found)
            write(given.save, environment, runs)

        # `timeout` and a person's kill end the run, not what it has found.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        in_jobs(passed, names, given.jobs, keep_wave)
        print(Lines().show(matrix_document(read_runs(given.save)["runs"])))
        return
    started = time.monotonic()

    def keep(record: dict[str, Any]) -> None:
        runs[:] = in_order(runs, [compact(record)])
        write(given.save, environment, runs)
        seconds = time.monotonic() - started
        print(f"{seconds:6.0f} s  {record['case']:42} {record['engine']:8} {record['label']}", flush=True)

    run_matrix(
        cases=names, python=given.python, model=given.model,
        adapter=given.adapter, device=given.device, pressure=given.pressure, timeout_s=given.timeout_s,
        engines=given.engines.split(","), on_record=keep,
    )  # fmt: skip
    print(Lines().show(matrix_document(read_runs(given.save)["runs"])))


if __name__ == "__main__":
    main()
