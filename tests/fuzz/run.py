"""Requests made from the API's description, by the thousand, against a server with a worker that has no model.

    python -m tests.fuzz.run --save bench/results/fuzz.json

Schemathesis runs in an environment of its own (`make test-slow` makes it); TRIMTAB_FUZZ_PYTHON names its interpreter.
POST /api/verify is left out: each of its answers would start processes that compare a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.test_serve_run import ROOT, serving

VARIABLE = "TRIMTAB_FUZZ_PYTHON"
FEWEST_CASES = 5000
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance", "negative_data_rejection",
)  # fmt: skip
TIMEOUT_S = 3600


def run(examples: int = 850, seed: int = 1) -> dict:
    """Return what Schemathesis reports. examples: of each operation that has something to vary."""
    python = Path(os.environ[VARIABLE]).absolute()
    with (
        tempfile.TemporaryDirectory() as work,
        serving(adapter_root=str(ROOT / "trimtab" / "demo" / "adapters")) as server,
    ):
        report = Path(work) / "report.json"
        done = subprocess.run(
            [
                str(python), "-m", "schemathesis.cli", "run", f"{server.address}/openapi.json", "--max-examples", str(examples),
                "--seed", str(seed), "--workers", "2", "--exclude-path", "/api/verify", "--continue-on-failure",
                "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--suppress-health-check", "all",
                "--report", "json", "--report-json-path", str(report),
            ],
            cwd=ROOT, env={**os.environ, "SCHEMATHESIS_HOOKS": "tests/fuzz/hooks.py"}, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(
                f"Schemathesis ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        result = json.loads(report.read_text("utf-8"))
        is_healthy = server.ask("GET", "/health")[0] == 200
        server.process.terminate()
        log = server.process.communicate(timeout=60)[1]
    return {
        "schemathesis": result["schemathesis_version"], "python": ".".join(map(str, sys.version_info[:3])), "seed": seed,
        "examples": examples, "checks": list(CHECKS), "operations": result["operations"], "phases": result["phases"],
        "test_cases": result["test_cases"], "failures": result["failures"], "errors": result["errors"],
        "answers": result["valid_rates"], "seconds": round(result["running_time"], 1), "complete": result["complete"],
        "is_healthy": is_healthy, "log": log,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=850)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    record = run(options.examples)
    if options.save is not None:
        options.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: record[name] for name in ("test_cases", "failures", "errors", "seconds", "log")}, indent=1))


if __name__ == "__main__":
    main()
