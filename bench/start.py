"""How long a start takes: a plan, imports, a first answer on a card that was never seen, a server that answers.

    python -m bench.start                                                                     (the demo model, on a CPU)
    python -m bench.start --work FOLDER --size e4b --device cuda --gpu-memory 6GiB --save bench/results/start.json       (a GPU)

Every row is a process of its own. "unseen" has an empty folder for what is kept between runs (module trees, rates, compiled
kernels, launch configurations), "seen" the one that the process before it filled. Files of the checkpoint are read once before
anything is timed, so that they are in the page cache. Seconds are of the wall clock, the median of `--runs` processes; other
programs on the machine are in them, and its load is saved beside them. Imports are `python -X importtime`, whose own cost is in the
figures. Parts of a worker's start are samples of one more server. With `--size` random weights stand for a model's own: their words
mean nothing, their costs do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import parser_of, save, start_parts
from bench.load import demo, sized
from bench.served import Served

# What a start may import, and what imports it: shown by themselves, whatever package they are part of.
PACKAGES = (
    "torch", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers",
    "transformers.modeling_utils", "transformers.processing_utils", "bitsandbytes", "accelerate", "PIL", "numpy", "trimtab",
    "trimtab.engine.model",
)  # fmt: skip
# A first and a second answer of one process; the time to its first text and of what came before.
ANSWER = """
import json, sys, time
began = time.perf_counter()
import trimtab
given = json.loads(sys.argv[1])
plan = trimtab.plan(given["model"], **given["options"])
planned = time.perf_counter()
with trimtab.load(plan) as model:
    loaded = time.perf_counter()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        pieces = model.generate("Describe what is there.", adapter=given["adapter"], max_new_tokens=2)
        for _ in pieces:
            break
        pieces.close()
        times.append(time.perf_counter() - start)
    print(json.dumps({"plan": planned - began, "load": loaded - planned, "first answer": times[0], "second answer": times[1]}))
"""
# As a worker imports them.
IMPORTS = """
import trimtab.api, trimtab.engine.model, trimtab.engine.loader.transformers_model, trimtab.engine.loader.processor
"""
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, adapters = _given(options)
    adapter = next(iter(adapters.values()))
    for file in model.glob("*.safetensors"):
        with file.open("rb") as stream:
            while stream.read(2**24):
                pass
    names = dict(list(adapters.items())[: options.adapters])
    flags = [word for name, path in names.items() for word in ("--adapter", f"{name}={path}")]
    flags += ["--device", options.device, "--images", "0", "--audio-s", "0"]
    flags += ["--gpu-memory", options.gpu_memory] if options.gpu_memory else []
    parts: dict[str, Any] = {}
    rows = [
        *_processes("an empty Python", lambda home: _timed([sys.executable, "-c", "pass"], home), options.runs),
        *_processes(
            "import trimtab", lambda home: _timed([sys.executable, "-c", "import trimtab"], home), options.runs
        ),
        *_pairs("trimtab plan", lambda home: _timed(_command("plan", model, flags), home), options.runs),
        *([] if options.servers_only else _runs(model, adapter, options)),
        *([] if options.servers_only else _answers(model, adapter, options)),
        *_pairs(
            "trimtab serve, ready", lambda home: _served(model, flags, home), options.runs,
            last=lambda home: parts.update(_parts(model, flags, home)),
        ),
    ]  # fmt: skip
    imports = _imports(options.device)
    whole = {
        "about": {
            "model": str(options.size or "demo"), "device": options.device, "gpu_memory": options.gpu_memory,
            "adapters": len(names), "packed": options.packed,
            "machine": platform.machine(), "cpu_count": os.cpu_count(), "load": list(os.getloadavg()), "runs": options.runs,
            "python": platform.python_version(), "versions": {name: version(name) for name in ("torch", "transformers")},
            "gpu": _gpu(options.device),
        },
        "rows": rows, "parts": parts, "imports": imports,
    }  # fmt: skip
    print(text_of(whole))
    save(options.save, whole)
    return 0


def _given(options: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """Return the model's folder and its adapters: the demo's, or random ones of a size."""
    work = Path(options.work)
    if options.packed:
        from bench import families

        folder = families.prepare(options.size, work)
        return folder, {f"a{number}": work / f"{folder.name}-r8" / f"a{number}" for number in range(8)}
    given = demo() if options.size is None else sized(options.size, work, options.adapters, device=options.device)
    return given.folder, dict(given.adapters)


def text_of(whole: dict[str, Any]) -> str:
    """Return the figures as three short tables."""
    lines = [f"{'start':<44}  {'seconds':>8}"]
    lines += [f"{row['what']:<44}  {row['s']:>8.2f}" for row in whole["rows"]]
    lines += ["", f"{'part of a worker start, seen':<44}  {'seconds':>8}"]
    lines += [f"{name:<44}  {seconds:>8.2f}" for name, seconds in whole["parts"]["parts"].items()]
    lines += ["", f"{'import':<44}  {'seconds':>8}"]
    lines += [f"{row['package']:<44}  {row['s']:>8.2f}" for row in whole["imports"]]
    return "\n".join(lines)


def parse_imports(text: str) -> dict[str, float]:
    """Return package -> seconds with all that it imports first, from the output of `python -X importtime`."""
    found: dict[str, float] = {}
    for match in map(LINE.match, text.splitlines()):
        if match is not None:
            found[match.group(4)] = int(match.group(2)) / 1e6
    return found


def _imports(device: str) -> list[dict[str, Any]]:
    code = IMPORTS.format(device=device)
    made = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    seconds = parse_imports(made.stderr)
    return [{"package": name, "s": seconds[name]} for name in PACKAGES if name in seconds]


def _command(name: str, model: Path, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "trimtab", name, str(model), *flags]


def _environment(home: str) -> dict[str, str]:
    # Where platformdirs looks on Linux; elsewhere the user's own folder is used, and "unseen" is not.
    return {**os.environ, "XDG_CACHE_HOME": home, "HF_HUB_OFFLINE": "1"}


def _timed(command: Sequence[str], home: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=_environment(home), check=True, stdout=subprocess.DEVNULL)
    return _said("a process", time.perf_counter() - start)


def _said(what: str, seconds: float) -> float:
    print(f"# {what}: {seconds:.2f} s", flush=True)
    return seconds


def _served(model: Path, flags: Sequence[str], home: str) -> float:
    start = time.perf_counter()
    with Served([str(model), "--name", "m", *flags], environment=_environment(home)):
        return _said("a server is ready", time.perf_counter() - start)


def _parts(model: Path, flags: Sequence[str], home: str) -> dict[str, Any]:
    """Return what the start of a worker consists of, of one more server: see `bench.start_parts`."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(start_parts.__file__, Path(folder) / "sitecustomize.py")
        found = Path(folder) / "parts.json"
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        added = {start_parts.VARIABLE: str(found), "PYTHONPATH": os.pathsep.join(paths)}
        with Served([str(model), "--name", "m", *flags], environment={**_environment(home), **added}):
            end = time.monotonic() + 10
            while not found.exists() and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(0.2)
        whole: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return whole


def _processes(what: str, run: Any, runs: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        return [{"what": what, "s": statistics.median(run(home) for _ in range(runs))}]


def _pairs(what: str, run: Any, runs: int, *, last: Any = None) -> list[dict[str, Any]]:
    """Return the row of processes that see everything for the first time, and of those after them. last: called after the last."""
    unseen, seen = [], []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as home:
            unseen.append(run(home))
            seen.append(run(home))
            if last is not None and number == runs - 1:
                last(home)
    return [{"what": f"{what}, {when}", "s": statistics.median(times)} for when, times in (("unseen", unseen), ("seen", seen))]


def _runs(model: Path, adapter: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `trimtab run`: seconds from the start of its process to the first byte of its answer."""
    flags = ["--adapter", f"a={adapter}", "--device", options.device, "--max-new-tokens", "2"]
    flags += ["--gpu-memory", options.gpu_memory] if options.gpu_memory else []
    command = [*_command("run", model, flags), "Describe what is there."]
    return _pairs("trimtab run, first text", lambda home: first_byte_s(command, _environment(home)), options.runs)


def first_byte_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the seconds until a command writes its first byte. Errors: CalledProcessError if it fails or writes none."""
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds


def _answers(model: Path, adapter: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"adapters": {"a": str(adapter)}, "device": options.device, "images": 0, "audio_s": 0.0}
    asked |= {"gpu_memory": options.gpu_memory} if options.gpu_memory else {}
    given = json.dumps({"model": str(model), "options": asked, "adapter": "a"})
    found: dict[str, list[float]] = {}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as home:
            for when in ("unseen", "seen"):
                made = subprocess.run(
                    [sys.executable, "-c", ANSWER, given], env=_environment(home), check=True, capture_output=True, text=True
                )  # fmt: skip
                for name, seconds in json.loads(made.stdout.splitlines()[-1]).items():
                    found.setdefault(f"in Python: {name}, {when}", []).append(seconds)
    return [{"what": name, "s": statistics.median(times)} for name, times in found.items()]


def _gpu(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    import torch

    return str(torch.cuda.get_device_name(device))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--work", default=tempfile.gettempdir(), help="where checkpoints of random weights are made")
    parser.add_argument("--size", help="a size that bench.checkpoints makes, such as e4b (default: the demo model)")
    parser.add_argument("--packed", action="store_true", help="with --size: its linears are in NF4 in the file")
    parser.add_argument("--adapters", type=int, default=1, help="of plans and servers; the demo model has two at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--servers-only", action="store_true", help="without answers in Python")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
