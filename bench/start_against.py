"""What a start costs in two trees of trimtab: CPU seconds and wall seconds of the same commands, in alternation.

    python -m bench.start_against OTHER_TREE --runs 5 --save bench/results/start_cpu.json

OTHER_TREE is a checkout of another version; the tree of this file is the other side, or the only one (OTHER_TREE is .). Every run
is a process of its own, on the demo model, on a CPU with one thread, with what earlier processes keep in place; the first of each
is not counted. CPU seconds are user and system together, of the process and of those that it starts: other programs on the
machine change them less than the wall. A server's are those until it is ready, a run's those until its first token, and those
until it has ended. With --only, FILE keeps its other rows.
`files` are the modules, trimtab's own and all, that `trimtab run` has imported at its end.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench import parser_of, save, saved
from bench.served import Served

TREE = Path(__file__).resolve().parents[1]
COMMANDS: dict[str, tuple[str, ...]] = {
    "trimtab --help": ("--help",),
    "trimtab plan": ("plan", "MODEL", "--device", "cpu"),
    "trimtab run": ("run", "MODEL", "--device", "cpu", "--max-new-tokens", "1", "Hello"),
    "trimtab verify": ("verify", "MODEL", "--adapter", "style=ADAPTER", "--device", "cpu"),
    "trimtab merge --check": ("merge", "MODEL", "HOME/merged", "--adapter", "style=ADAPTER", "--check", "--overwrite"),
    "trimtab serve": ("serve", "MODEL", "--device", "cpu", "--images", "0", "--audio-s", "0"),
}
# The modules that a command has imported, written when it ends.
COUNT = """
import runpy, sys
sys.argv = ["trimtab", *sys.argv[1:]]
try:
    runpy.run_module("trimtab", run_name="__main__")
except SystemExit:
    print(sum(name.partition(".")[0] == "trimtab" for name in sys.modules), len(sys.modules), file=sys.stderr)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    other = Path(options.other).resolve()
    trees = {"now": TREE} if other == TREE else {"before": other, "now": TREE}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for what, words in COMMANDS.items():
            if options.only and options.only not in what:
                continue
            found: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for number in range(options.runs + 1):
                for name, tree in trees.items():
                    for part, taken in costs_of(tree, words, f"{home}/{name}").items():
                        if number:
                            found.setdefault((f"{what}, {part}", name), []).append(taken)
            load = round(os.getloadavg()[0], 1)
            made = [{"what": part, "tree": name, **summary(taken), "load": load} for (part, name), taken in sorted(found.items())]
            print(text_of(made), flush=True)
            rows += made
        files = {} if options.only else {name: _counted(tree, f"{home}/{name}") for name, tree in trees.items()}
    whole = {
        "about": {
            "model": "demo", "device": "cpu", "machine": platform.machine(), "cpu_count": os.cpu_count(), "runs": options.runs,
            "load": list(os.getloadavg()), "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "bitsandbytes")},
        },
        "rows": rows, "files": files,
    }  # fmt: skip
    if options.save and options.only:
        whole = saved(options.save)
        names = {row["what"] for row in rows}
        whole["rows"] = [row for row in whole["rows"] if row["what"] not in names] + rows
    save(options.save, whole)
    return 0


def summary(taken: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the best and the median of (CPU seconds, wall seconds)."""
    cpu, wall = zip(*taken, strict=True)
    return {
        "cpu_best_s": round(min(cpu), 2), "cpu_median_s": round(statistics.median(cpu), 2),
        "wall_best_s": round(min(wall), 2), "wall_median_s": round(statistics.median(wall), 2),
    }  # fmt: skip


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each row."""
    return "\n".join(
        f"{row['what']:<28} {row['tree']:<7} CPU {row['cpu_best_s']:6.2f} best {row['cpu_median_s']:6.2f} median, "
        f"wall {row['wall_best_s']:6.2f} {row['wall_median_s']:6.2f}"
        for row in rows
    )


def costs_of(tree: Path, words: Sequence[str], home: str) -> dict[str, tuple[float, float]]:
    """Return part -> (CPU seconds, wall seconds) of one command of a tree, from its start."""
    Path(home).mkdir(exist_ok=True)
    given = _words(tree, words, home)
    environment = _environment(tree, home)
    before, start = _children_s(), time.perf_counter()
    if words[0] == "serve":
        with Served(given[1:], environment=environment) as server:
            return {"ready": (_cpu_s(server.process.pid), time.perf_counter() - start)}
    found: dict[str, tuple[float, float]] = {}
    command = [sys.executable, "-m", "trimtab", *given]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if process.stdout.read(1) and words[0] == "run":
            found["first token"] = _cpu_s(process.pid), time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"trimtab {words[0]} ended with {process.returncode}")
    return found | {"ended": (_children_s() - before, time.perf_counter() - start)}


def _cpu_s(pid: int) -> float:
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def _words(tree: Path, words: Sequence[str], home: str) -> list[str]:
    demo = tree / "trimtab" / "demo"
    places = {"MODEL": demo / "base", "ADAPTER": demo / "adapters" / "style", "HOME": home}
    return [re.sub("MODEL|ADAPTER|HOME", lambda found: str(places[found[0]]), word) for word in words]


def _counted(tree: Path, home: str) -> dict[str, int]:
    words = _words(tree, COMMANDS["trimtab run"], home)
    made = subprocess.run(
        [sys.executable, "-c", COUNT, *words], env=_environment(tree, home), cwd=tree, check=True, capture_output=True, text=True
    )  # fmt: skip
    own, every = made.stderr.split()[-2:]
    return {"own": int(own), "every": int(every)}


def _environment(tree: Path, home: str) -> dict[str, str]:
    found = {**os.environ, "XDG_CACHE_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    found["PYTHONSAFEPATH"] = "1"  # the folder that this runs in has a trimtab too
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("other", metavar="OTHER_TREE", help="a checkout of the version to compare with")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", metavar="TEXT", help="commands whose name has it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
