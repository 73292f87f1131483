"""Short answers on a busy CPU, torch's own number of threads beside the number that trimtab chooses, in turn, in one run.

    python -m bench.threads --save bench/results/threads.json [--busy 2] [--runs 5]

Each answer is a process of its own with the demo model, as a user would start it. `--busy` processes count without end beside
them; what else the machine does is in the load that is recorded. OMP_NUM_THREADS is taken out of the environment.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import parser_of, save

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 32
BUSY = "while True: pass"


def answer(flags: list[str]) -> dict[str, float]:
    """Return what one process took: seconds in all, of the prompt and of the steps, and tokens per second."""
    command = [
        sys.executable, "-m", "trimtab", "run", str(ROOT / "trimtab/demo/base"), "Count from one to thirty.", "--device", "cpu",
        "--context", "256", "--max-new-tokens", str(NEW_TOKENS), "--temperature", "100", "--seed", "1", "--json", *flags,
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRIMTAB_THREADS")}
    begun = time.monotonic()
    done = subprocess.run(
        command, env={**environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}, cwd=ROOT, capture_output=True,
        check=True,
    )  # fmt: skip
    values = json.loads(done.stdout)
    return {
        "process_s": time.monotonic() - begun, "ttft_s": values["ttft_s"], "decode_s": values["decode_s"],
        "tokens_per_s": values["tokens_per_s"],
    }  # fmt: skip


def measure(busy: int, runs: int) -> dict[str, Any]:
    """Return every run and the medians: `all_cores` is torch's own choice, `chosen` is without a flag."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ways = {"all_cores": ["--threads", str(cores)], "chosen": []}
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    made: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    loads = []
    try:
        until = time.monotonic() + 75  # the load average is of a minute
        while busy and os.getloadavg()[0] < busy * 0.6 and time.monotonic() < until:
            time.sleep(1)
        for number in range(runs):
            for name in sorted(ways, reverse=number % 2 == 1):
                loads.append(os.getloadavg()[0])
                made[name].append(answer(ways[name]))
    finally:
        for other in others:
            other.kill()
            other.wait()
    medians = {name: {key: statistics.median(one[key] for one in rows) for key in rows[0]} for name, rows in made.items()}
    ratio = {
        key: medians["all_cores"][key] / medians["chosen"][key] for key in ("process_s", "ttft_s", "decode_s")
    }  # above 1: the chosen number is faster
    return {
        "cores": cores, "busy": busy, "load_average": [round(one, 2) for one in loads], "new_tokens": NEW_TOKENS, "runs": made,
        "medians": medians, "all_cores_over_chosen": ratio,
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="processes that keep a core busy (default: 2)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="answers of each way (default: 5)")
    options = parser.parse_args()
    report = measure(options.busy, options.runs)
    save(options.save, report)
    print(json.dumps({"medians": report["medians"], "all_cores_over_chosen": report["all_cores_over_chosen"]}, indent=1))


if __name__ == "__main__":
    main()
