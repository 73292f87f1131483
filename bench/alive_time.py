"""How long `trimtab verify --against` takes on the demo, by the clock and in CPU time: our own server, asked over HTTP.

    python -m bench.alive_time --save bench/results/alive_time.json

The time starts with the command and ends with its report: imports, loading, choosing questions, the server's answers. CPU time is
that of the command alone, and is what a busy machine leaves unchanged; the load average says how busy it was.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from bench import parser_of, save
from bench.served import Served
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.process.packages import stack_versions

STYLE = DEMO / "adapters" / "style"
SERVED = [str(DEMO / "base"), "--name", "demo", "--adapter", f"style={STYLE}", "--quant", "none", "--context", "1024"]


def verify(url: str) -> dict[str, Any]:
    """Return the times of one run and what it said."""
    command = [sys.executable, "-m", "trimtab", "verify", str(DEMO / "base"), "--adapter", f"style={STYLE}", "--against", url,
               "--remote-model", "style", "--remote-base", "demo", "--json"]  # fmt: skip
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall_s, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout)
    return {
        "wall_s": round(wall_s, 1), "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "waited_for_server_s": report["server_s"], "load_average": round(os.getloadavg()[0], 1), "cores": os.cpu_count(),
        "verdict": report["verdict"], "requests": report["requests"],
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, must_save=True)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with Served(SERVED) as server:
        runs = [verify(f"http://{server.address}/v1") for _ in range(options.runs)]
    result = {
        "what": "python -m bench.alive_time: `trimtab verify` of the demo's adapter style against `trimtab serve` of the demo",
        "versions": stack_versions(), "runs": runs,
    }  # fmt: skip
    save(options.save, result)
    print(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
