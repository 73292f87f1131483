"""What do benches share: where they run, their options, a process for each case, and what they save?

`DEVICE=cpu` tries a bench on sizes of `bench.checkpoints.TINY`, to see that it will run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

DEVICE = os.environ.get("DEVICE", "cuda")
PACKAGES = ("transformers", "bitsandbytes", "peft", "accelerate", "triton", "starlette", "uvicorn", "sse-starlette")


def parser_of(about: str | None, *, work: bool = False, must_save: bool = False) -> argparse.ArgumentParser:
    """Return a parser of `--save FILE`, and of `--work FOLDER` for a bench that makes checkpoints. about: the module's text."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if work:
        parser.add_argument("--work", type=Path, required=True, help="where checkpoints are made")
    parser.add_argument("--save", type=Path, required=must_save, metavar="FILE", help="write the figures as JSON")
    return parser


def saved(path: Path | None) -> dict[str, Any]:
    """Return what an earlier run saved, {} if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
    return found


def save(path: Path | None, values: Any) -> None:
    """Write figures as JSON; without a path nothing is written."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def row_of(words: Sequence[str], *, timeout_s: float | None = None, left_s: float = math.inf) -> dict[str, Any] | None:
    """Return what `python -m WORDS` prints behind "ROW ": one case, in a process of its own. A row that is missing has the reason
    as its "error", and "over_s" where it took longer than timeout_s. None: it was ended because left_s is less than that."""
    limit_s = left_s if timeout_s is None else min(timeout_s, left_s)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, timeout=None if limit_s == math.inf else limit_s
        )
    except subprocess.TimeoutExpired as exc:
        told = exc.stderr or b""
        print(told[-9000:] if isinstance(told, str) else told[-9000:].decode(errors="replace"), flush=True)
        return {"error": f"longer than {limit_s:g} s", "over_s": limit_s} if limit_s == timeout_s else None
    rows = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if rows and done.returncode == 0:
        row: dict[str, Any] = json.loads(rows[-1])
        return row
    print(done.stderr[-9000:], flush=True)
    return {"error": done.stderr.strip()[-1500:] or f"exit {done.returncode}"}


def environment(device: str = DEVICE, /, **more: Any) -> dict[str, Any]:
    """Return the GPU (None: a CPU), the cores and the versions of packages, "?" for one that is not installed."""
    import torch

    gpu = torch.cuda.get_device_name(0) if device.startswith("cuda") and torch.cuda.is_available() else None
    found = {"gpu": gpu, "cpu_count": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, **more}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "?"
    return found


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return these columns of rows as lines of text."""
    shown = [["" if row.get(name) is None else " ".join(str(row[name]).split())[-80:] for name in names] for row in rows]
    cells = [names, *shown]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()


def timed_s(call: Any) -> float:
    """Return the seconds of a call, the GPU's work included."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def median_ms(call: Any, repeat: int = 3) -> float:
    return median(timed_s(call) for _ in range(repeat)) * 1000


def generated(model: Any, inputs: dict[str, Any], count: int) -> Any:
    """Return prompt and answer of exactly so many greedy tokens, as transformers generates them."""
    import torch

    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)


def empty_cache() -> None:
    """Give back the GPU memory that making a checkpoint left in torch's allocator, which no plan counts."""
    if DEVICE == "cuda":
        import torch

        torch.cuda.empty_cache()
