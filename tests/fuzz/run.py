"""Requests made from the API's description, by the thousand, against a real server: most of them with a worker that has no
model, some hundreds with the demo model.

    python -m tests.fuzz.run --save bench/results/fuzz.json

Schemathesis runs in an environment of its own (`make test-slow` makes it); TRIMTAB_FUZZ_PYTHON names its interpreter.
Its coverage phase goes through every field of every operation at its edges; the fuzzing phase draws `examples` more of each
operation, the same ones at each run: what an earlier run found is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.served import DEMO, Served
from tests.serve.test_serve_run import ROOT, serving
from trimtab.serve.api.routes import BESIDE, CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from trimtab.serve.http.openapi import description

VARIABLE = "TRIMTAB_FUZZ_PYTHON"
RECORD = ROOT / "bench" / "results" / "fuzz.json"
FEWEST_CASES, FEWEST_REAL = 5000, 300
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance", "negative_data_rejection",
)  # fmt: skip
TIMEOUT_S = 1800
ADAPTERS = ROOT / "trimtab" / "demo" / "adapters"
# Short answers: what is fuzzed is the requests.
REAL = ["--adapter-root", str(ADAPTERS), *("--limit", "max_tokens=4"), *("--limit", "n=2"), *("--limit", "embeddings=2")]


def run(examples: int = 60, seed: int = 1) -> dict[str, Any]:
    """Return what Schemathesis reports with the toy. examples: of each operation, in the fuzzing phase."""
    with serving(adapter_root=str(ADAPTERS)) as server:
        record = _schemathesis(server.address, examples=examples, seed=seed, phases="coverage,fuzzing", model="toy")
        record["is_healthy"] = server.ask("GET", "/health")[0] == 200
        server.process.terminate()
        record["log"] = _errors(server.process.communicate(timeout=60)[1])
    return record


def run_real(examples: int = 40, seed: int = 2) -> dict[str, Any]:
    """Return the same with the demo model on the CPU."""
    with Served([*DEMO, *REAL]) as server:
        record = _schemathesis(f"http://{server.address}", examples=examples, seed=seed, phases="fuzzing", model="demo")
        record["is_healthy"] = server.status()["state"] == "ready" and not server.status()["restarts"]
        record["log"] = _errors(server.log)
    return record


def _schemathesis(address: str, *, examples: int, seed: int, phases: str, model: str) -> dict[str, Any]:
    python = Path(os.environ[VARIABLE]).absolute()
    with tempfile.TemporaryDirectory() as work:
        report, counts = Path(work) / "report.json", Path(work) / "counts.json"
        done = subprocess.run(
            [
                str(python), "-m", "schemathesis.cli", "run", f"{address}/openapi.json", "--max-examples", str(examples),
                "--seed", str(seed), "--workers", "2", "--continue-on-failure", "--checks", ",".join(CHECKS),
                "--phases", phases, "--suppress-health-check", "all", "--report", "json", "--report-json-path", str(report),
                "--request-timeout", "120", "--generation-database", "none",
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
            env={
                **os.environ, "SCHEMATHESIS_HOOKS": "tests/fuzz/hooks.py", "TRIMTAB_FUZZ_COUNTS": str(counts),
                "TRIMTAB_FUZZ_MODEL": model,
            },
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"Schemathesis ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        result = json.loads(report.read_text("utf-8"))
        statuses = json.loads(counts.read_text("utf-8"))
    return {
        "schemathesis": result["schemathesis_version"], "python": ".".join(map(str, sys.version_info[:3])), "seed": seed,
        "examples": examples, "checks": list(CHECKS), "operations": result["operations"], "phases": result["phases"],
        "test_cases": result["test_cases"], "failures": result["failures"], "errors": result["errors"],
        "statuses": {name: dict(sorted(found.items())) for name, found in sorted(statuses.items())},
        "seconds": round(result["running_time"], 1), "complete": result["complete"],
    }  # fmt: skip


def _errors(log: str) -> str:
    """Return the lines of a log that are no lines of the journal about a request or a change of state."""
    return "\n".join(line for line in log.splitlines() if " ERROR " in line or "Traceback" in line)


# What the demo model has to have answered.
ANSWERED = {f"POST {path}" for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS)}


def operations() -> set[str]:
    """Return "METHOD path" of all that today's description names."""
    paths = description(has_key=False, beside=BESIDE)["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} - {"GET /openapi.json"}


def problems(record: Mapping[str, Any], *, operations: Collection[str], accepted: Collection[str], fewest: int) -> list[str]:
    """Return what a run's record says against the server. operations: what it has to cover; accepted: what has to be answered
    with 200 at least once."""
    statuses = record["statuses"]
    found = [f"{name}: {record[name]}" for name in ("failures", "errors", "log") if record[name]]
    found += [f"{name} is false" for name in ("complete", "is_healthy") if not record[name]]
    found += [f"no case of {name}" for name in sorted(set(operations) - statuses.keys())]
    found += [f"no 200 of {name}" for name in sorted(accepted) if "200" not in statuses.get(name, {})]
    found += [f"{name} gave {status}" for name, seen in statuses.items() for status in seen if status >= "500"]
    count = sum(sum(seen.values()) for seen in statuses.values())
    return found + ([f"{count} cases, not {fewest}"] if count < fewest else [])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--real-examples", type=int, default=40)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    options = parser.parse_args()
    record = {"toy": run(options.examples), "demo": run_real(options.real_examples), "note": options.note}
    if options.save is not None:
        options.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in ("toy", "demo"):
        keys = ("test_cases", "failures", "errors", "seconds", "log", "statuses")
        print(json.dumps({name: {key: record[name][key] for key in keys}}, indent=1))


if __name__ == "__main__":
    main()
