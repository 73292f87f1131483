"""What merging does to an adapter, lane by lane: labels, KL, survival and peak memory, each lane in its own process.

    python -m bench.lanes --work FOLDER --size e2b --save bench/results/lanes.json     (a GPU; random weights)
    python -m bench.lanes --work FOLDER --demo --save bench/results/lanes_demo.json    (a CPU; the demo's adapters)

At a real size the weights are random and mean nothing: what survives of a small change, the warnings, the seconds and the
peaks are what is measured there. The demo's adapters mean something, and its answers can be right.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import environment, parser_of, save
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.process.packages import stack_versions

SIZE_LANES = ("direct_4bit_merge", "fresh_bf16_merge")
NEW_TOKENS = 16


def lanes_of(folder: Path, adapter: Path, prompts: Any, work: Path, names: Any, device: str) -> Any:
    from trimtab.verification.merges.runs import run_lanes
    from trimtab.verification.routes import runner

    rows = runner.prepare(folder, "bfloat16", prompts, work)
    return run_lanes(
        folder, adapter, rows, work / "lanes", device=device, new_tokens=NEW_TOKENS, names=names,
        say=lambda text: print(f"  {text}", flush=True),
    )  # fmt: skip


def summary(report: Any) -> list[dict[str, Any]]:
    """Return the lanes as JSON, the survival of hundreds of modules as quantiles."""
    rows = []
    for run in report.lanes:
        row = run.to_json()
        shares = sorted(item.survived for item in run.survival)
        row["survival"] = {
            "modules": len(shares), "least": shares[0], "median": statistics.median(shares), "most": shares[-1],
        } if shares else None  # fmt: skip
        rows.append({key: _rounded(value) for key, value in row.items()})
    return rows


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def where(device: str) -> dict[str, Any]:
    found = environment(device, **stack_versions())
    return {"device": found.pop("gpu") or "CPU"} | found


def run_demo(work: Path, device: str) -> list[dict[str, Any]]:
    from trimtab.verification.routes.prompts import demo_prompts

    rows = []
    for adapter in sorted((DEMO / "adapters").iterdir()):
        print(f"demo, {adapter.name}", flush=True)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            report = lanes_of(DEMO / "base", adapter, demo_prompts(1), Path(folder), None, device)
        print(report, flush=True)
        rows.append({"model": "demo", "adapter": adapter.name, "lanes": summary(report)})
    return rows


def run_size(size: str, work: Path, names: Any, device: str) -> list[dict[str, Any]]:
    import torch

    from bench.cards import prepare
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.verification.routes.prompts import built_in

    folder = work / size
    prepare(size, work, device=device)
    torch.cuda.empty_cache()
    prompts = built_in(folder, read_checkpoint(folder).config, work)
    with tempfile.TemporaryDirectory(dir=work) as place:
        report = lanes_of(folder, work / f"{size}-r8", prompts, Path(place), names, device)
    print(report, flush=True)
    return [{"model": f"{size} size, random weights", "adapter": "rank 8, all parts", "lanes": summary(report)}]


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--size", default="e2b", choices=("e2b", "e4b"))
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--lanes", default=",".join(SIZE_LANES), help="names, or 'all'; not with --demo")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    from trimtab.engine.memory.rates import resolve_device

    device = resolve_device(given.device)
    names = None if given.lanes == "all" else given.lanes.split(",")
    start = time.perf_counter()
    rows = run_demo(given.work, device) if given.demo else run_size(given.size, given.work, names, device)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    save(given.save, {"environment": where(device), "new_tokens": NEW_TOKENS, "runs": rows})


if __name__ == "__main__":
    main()
