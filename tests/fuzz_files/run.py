"""Mutated files by the thousand, and what came of each: an answer, or an error of this package, within bounds.

    python -m tests.fuzz_files.run --save bench/results/fuzz_files.json

A case is its kind, seed and number: `--kind configs --first 4711 --cases 1` tries one again. Time is the process's own, so that a
busy machine changes nothing; memory is the kernel's peak of the resident set, reset before each case (Linux; elsewhere what is
resident after it).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from tests.fuzz_files.kinds import KINDS, Input
from trimtab.checkpoint.config_limits import MODULES
from trimtab.errors import TrimtabError

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_S, MOST_BYTES = 1.0, 500 * 2**20
# Building the modules of a layer takes transformers about 12 ms: of 126 layers, the most of a published model, 1.5 s. A part that
# names no number has its class's default, such as 26 or 32.
LAYER_S, DEFAULT_LAYERS = 0.02, 32
HANG_S = 120.0
SHOWN = 20
RECORD = ROOT / "bench" / "results" / "fuzz_files.json"
_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def run(kind: str, cases: int, *, seed: int = 1, first: int = 0, step: int = 1) -> dict[str, Any]:
    """Return what came of `cases` mutated files of a kind. first, step: the numbers of the cases, so that processes share them."""
    counts: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    slowest_s = largest_bytes = 0.0
    with tempfile.TemporaryDirectory(prefix="trimtab-fuzz-") as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = KINDS[kind][0](Path(work))
        for one in inputs:
            one.use(one.folder)  # what is valid is taken; imports and caches are no case's cost
        for number in range(first, first + cases * step, step):
            random = Random(f"{kind} {seed} {number}")
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__)
            outcome, cpu_s, peak_bytes, trace, most_s = _case(random.choice(inputs), random)
            faulthandler.cancel_dump_traceback_later()
            counts[outcome if not trace else "foreign"] += 1
            slowest_s, largest_bytes = max(slowest_s, cpu_s), max(largest_bytes, peak_bytes)
            if trace or cpu_s > most_s or peak_bytes > MOST_BYTES:
                findings.append(
                    {
                        "number": number, "outcome": outcome, "cpu_s": round(cpu_s, 2), "mib": round(peak_bytes / 2**20),
                        "trace": trace,
                    }
                )  # fmt: skip
    return {
        "kind": kind, "cases": cases, "seed": seed, "outcomes": dict(sorted(counts.items())), "slowest_cpu_s": round(slowest_s, 3),
        "largest_mib": round(largest_bytes / 2**20, 1), "findings": findings,
    }  # fmt: skip


def _case(given: Input, random: Random) -> tuple[str, float, int, str, float]:
    """Return (outcome, CPU seconds, bytes above the process, trace of a foreign exception, the most CPU seconds) of one mutated
    file."""
    name, change = random.choice(given.files)
    file = given.folder / name
    valid = file.read_bytes()
    mutated = change(valid, random)
    file.write_bytes(mutated)
    before, begun = _resident(reset=True), time.process_time()
    outcome, trace = "taken", ""
    try:
        given.use(given.folder)
    except TrimtabError as exc:
        outcome = type(exc).__name__
    except Exception as exc:
        outcome, trace = type(exc).__name__, "".join(traceback.format_exception(exc)[-6:])[-2000:]
    finally:
        cpu_s = time.process_time() - begun
        peak = _resident() - before
        file.write_bytes(valid)
    return outcome, cpu_s, peak, trace, MOST_S + (LAYER_S * _layers(mutated) if outcome == "taken" else 0.0)


def _layers(mutated: bytes) -> int:
    """Return the largest number of layers of a config's parts; 0 for another file."""
    with suppress(ValueError, RecursionError, AttributeError, TypeError):
        config = json.loads(mutated)
        if "model_type" not in config and "architectures" not in config:
            return 0
        parts = (config, *(part for part in config.values() if isinstance(part, dict)))
        return max(min(int(part.get("num_hidden_layers", DEFAULT_LAYERS) or 0), MODULES) for part in parts)
    return 0


def _resident(*, reset: bool = False) -> int:
    """Return the peak of the resident set since the last reset, in bytes; what is resident now where the kernel does not say."""
    with suppress(OSError):
        if reset:
            _REFS.write_text("5")
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return int(psutil.Process().memory_info().rss)


def run_all(kinds: Sequence[str], cases: int | None, seed: int, processes: int) -> list[dict[str, Any]]:
    """Return the results of kinds, each shared by processes of its own. cases: None is the number of `make test-all`."""
    results = []
    for kind in kinds:
        count = KINDS[kind][1] if cases is None else cases
        begun = time.monotonic()
        commands = [
            [
                *(sys.executable, "-m", "tests.fuzz_files.run", "--json", "--kind", kind, "--seed", str(seed)),
                *("--cases", str(len(range(first, count, processes))), "--first", str(first), "--step", str(processes)),
            ]
            for first in range(processes)
        ]
        running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
        parts = []
        for process in running:
            output = process.communicate()[0]
            if process.returncode not in (0, 1):
                raise SystemExit(f"{kind}: a process ended with {process.returncode}; its last lines are above")
            parts.append(json.loads(output.splitlines()[-1]))
        whole = parts[0] | {
            "cases": sum(part["cases"] for part in parts),
            "wall_s": round(time.monotonic() - begun, 1),
            "outcomes": dict(sum((Counter(part["outcomes"]) for part in parts), Counter[str]())),
            "slowest_cpu_s": max(part["slowest_cpu_s"] for part in parts),
            "largest_mib": max(part["largest_mib"] for part in parts),
            "findings": [finding for part in parts for finding in part["findings"]],
        }
        results.append(whole)
        shown = {name: value for name, value in whole.items() if name != "findings"}
        print(f"{json.dumps(shown)}, {len(whole['findings'])} findings", file=sys.stderr, flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzz; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="default: all")
    parser.add_argument("--cases", type=int, help="of each kind; default: TRIMTAB_FUZZ_CASES, or those of `make test-all`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one kind in this process, its result as one line")
    parser.add_argument("--save", metavar="FILE")
    options = parser.parse_args(arguments)
    cases = int(os.environ.get("TRIMTAB_FUZZ_CASES", "0")) or None if options.cases is None else options.cases
    if options.json or options.first:
        (kind,) = options.kind
        result = run(kind, KINDS[kind][1] if cases is None else cases, seed=options.seed, first=options.first, step=options.step)
        print(json.dumps(result))
        return 1 if result["findings"] else 0
    results = run_all(options.kind or list(KINDS), cases, options.seed, os.cpu_count() or 1)
    findings = [finding for result in results for finding in result["findings"]]
    for finding in findings[:SHOWN]:
        print(json.dumps(finding, indent=1))
    if options.save:
        record = {"python": platform.python_version(), "seconds": MOST_S, "bytes": MOST_BYTES, "kinds": results}
        Path(options.save).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    # As the tests run: one thread, no network, a cache of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="trimtab-fuzz-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        gc.freeze()
        raise SystemExit(main())
