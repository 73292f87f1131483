"""Merge time and peak memory of trimtab, of PEFT's merge_and_unload with save_pretrained, and of a plain copy, in one run.

    python -m bench.merge --work FOLDER [--sizes e2b,e4b] [--save bench/results/merge.json]
    python -m bench.merge --work FOLDER --sizes demo --save -          a dry run on a CPU, seconds
    python -m bench.merge --work FOLDER --scales [--save FILE]         what chosen NF4 scales are worth, on the demo model

Every engine runs in its own process on the same files, one after another; peak memory is what the process has resident
beyond its imports (a merge holds no file mapped; PEFT's checkpoint is mapped while it is read, which counts as well). The
peak is the system's own count (VmHWM). Records before this version sampled it: every 5 ms, PEFT's every 20 ms. A copy is
`shutil.copyfile` of the same files, each brought to the disk like the merge's. Before each of the two the disk is let come
to rest for a few seconds: a copy into memory that was freed a moment ago is up to twice as fast as any other on a virtual
machine, which gives free memory back to its host. Random weights, one adapter on language, vision and audio. Room on the
disk: twice the checkpoint, one size after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from bench import row_of, save
from trimtab.demo.demo import FOLDER as DEMO

GIB = 2**30
REST_S = 10


def make(size: str, work: Path) -> tuple[Path, Path]:
    """Return (checkpoint, adapter) of a size, written into work unless it is the demo's."""
    if size == "demo":
        return DEMO / "base", DEMO / "adapters" / "style"
    if size == "pico":
        from tests import pico

        base = pico.build("gemma4", work / "base", shards=3)
        return base, pico.adapter(base, work / "adapter")
    import torch

    from bench.checkpoints import write_adapter, write_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = write_checkpoint(size, work / "base", device=device)
    return base, write_adapter(base, work / "adapter", 16)


def copy(base: Path, out: Path) -> float:
    """Copy the weight files and bring them to the disk; returns seconds."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    rest()
    started = time.perf_counter()
    for file in sorted(base.glob("*.safetensors")):
        shutil.copyfile(file, out / file.name)
        with open(out / file.name, "rb+") as handle:
            os.fsync(handle.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


def rest() -> None:
    """Wait until the disk has what was written, and free memory is where it goes when nobody asks for it."""
    if hasattr(os, "sync"):
        os.sync()
    time.sleep(REST_S)


def run(engine: str, request: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return what one engine took, in a process of its own."""
    from bench import merge_inside

    shutil.rmtree(out, ignore_errors=True)
    rest()
    if engine == "peft":
        return run_peft(request)
    try:
        found = merge_inside.run(request, timeout_s=600)
    except (RuntimeError, subprocess.TimeoutExpired) as exc:
        return {"engine": engine, "error": type(exc).__name__, "stderr": str(exc)[-500:]}
    row = {
        "engine": engine, "seconds": round(found["seconds"], 2),
        "peak_gib": round((found["peak_bytes"] - found["baseline_bytes"]) / GIB, 3),
    }  # fmt: skip
    check = found["report"]["check"]
    if check is not None:
        row |= {key: check[key] for key in ("applied", "expected", "error_ulps", "equal", "passed")}
        row["check_s"] = found["report"]["check_seconds"]
    return row


def run_peft(request: dict[str, Any]) -> dict[str, Any]:
    """Return what PEFT took, in a process of its own."""
    return {"engine": "peft"} | (row_of(["bench.merge", "--peft", json.dumps(request)]) or {})


def peft(request: dict[str, Any]) -> None:
    """Load, merge_and_unload and save as PEFT's own documentation does it; prints one line of JSON."""
    import peft  # noqa: F401 - as transformers: imported before the clock starts
    import torch
    import transformers  # noqa: F401

    from trimtab.machine.memory import peak_host_bytes, process_bytes
    from trimtab.stock.load import load_adapter, load_base

    baseline = process_bytes()
    started = time.perf_counter()
    model = load_base(request["model"], dtype=torch.bfloat16)
    merged = load_adapter(model, request["adapters"][0][1]).merge_and_unload()
    merged.save_pretrained(request["out"])
    for file in Path(request["out"]).glob("*.safetensors"):
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
    seconds = time.perf_counter() - started
    peak_gib = round((peak_host_bytes() - baseline) / GIB, 3)
    print("ROW " + json.dumps({"seconds": round(seconds, 2), "peak_gib": peak_gib}))


def compare(ours: Path, theirs: Path) -> dict[str, int]:
    """Return how many tensors of the two merged models are equal bit for bit, and how many are not."""
    from safetensors import safe_open

    where = {}
    for file in ours.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)
    equal = different = 0
    for file in theirs.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a file, not a dict
                if name not in where:
                    continue
                with safe_open(where[name], "pt") as own:
                    same = own.get_tensor(name).equal(opened.get_tensor(name))
                equal, different = equal + same, different + (not same)
    return {"equal": equal, "different": different}


def measure(size: str, work: Path, *, check: bool, packed: bool, repeat: int) -> list[dict[str, Any]]:
    base, adapter = make(size, work)
    total = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    request: dict[str, Any] = {"model": str(base), "adapters": [["a", str(adapter), 1.0]]}
    rows: list[dict[str, Any]] = []
    # A copy before and after each merge: what the disk and its cache give changes while a run goes on.
    ours, theirs = work / "trimtab", work / "peft"
    copies, merges = [copy(base, work / "copy")], []
    for _ in range(repeat):
        merges.append(run("trimtab", request | {"out": str(ours)}, ours))
        copies.append(copy(base, work / "copy"))
    copied = sum(copies) / len(copies)
    rows.append({"engine": "copy", "seconds": round(copied, 2), "peak_gib": 0.0, "both": copies})
    rows.append(next((row for row in merges if "error" in row), merges[-1]))
    if "error" not in rows[-1]:
        every = [row["seconds"] for row in merges]
        rows[-1] |= {"seconds": round(sum(every) / repeat, 2), "every": every}
    rows.append(run("peft", request | {"out": str(theirs)}, theirs))
    if "error" not in rows[-1] and "error" not in rows[1]:
        rows[-1] |= compare(ours, theirs)
    shutil.rmtree(theirs, ignore_errors=True)
    if check:
        checked = run("trimtab", request | {"out": str(ours), "check": True}, ours)
        rows.append(checked | {"engine": "trimtab --check"})
    shutil.rmtree(ours, ignore_errors=True)
    if packed:
        row = run("trimtab", {"model": str(base), "adapters": [], "requantize": "nf4-dq", "out": str(ours)}, ours)
        rows.append(row | {"engine": "trimtab --requantize nf4-dq", "bytes": _bytes(ours)})
        shutil.rmtree(ours, ignore_errors=True)
    for row in rows:
        row |= {"size": size, "checkpoint_gib": round(total / GIB, 3)}
        if "seconds" in row:
            row["ratio_to_copy"] = round(row["seconds"] / copied, 2)
        print(json.dumps({key: value for key, value in row.items() if key != "both"}), flush=True)
    return rows


def scales(work: Path) -> list[dict[str, Any]]:
    """Return what NF4 leaves of each demo adapter: the largest value as scale (stock), chosen scales, and not merging.

    weight_error: rms error of the merged weights over their rms. survival: share of the change that is in the packed
    weights. kl: of the teacher-forced next-token distributions to the bf16 base with the adapter loaded, mean over all
    positions of the demo's prompts. noise_kl: the same of bf16 merged (unpacked), for size.
    """
    from trimtab.demo import demo as line
    from trimtab.engine.formats import coded_files
    from trimtab.merging import merge

    demo = line.FOLDER
    prompts = [json.loads(text) for text in (demo / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = []
    for voice in line.ADAPTERS:
        adapters = {voice: demo / "adapters" / voice}
        wanted = _logits(demo / "base", prompts, quant="none", adapters=adapters, voice=voice)
        merge(demo / "base", work / "dense", adapters=adapters, overwrite=True)
        row: dict[str, Any] = {"adapter": voice}
        row["noise_kl"] = _kl(wanted, _logits(work / "dense", prompts, quant="none"))
        for form in ("nf4", "nf4-dq"):
            row[f"unmerged {form}"] = {
                "kl": _kl(wanted, _logits(demo / "base", prompts, quant=form, adapters=adapters, voice=voice))
            }  # fmt: skip
            for name, shares in (("largest", ()), ("chosen", coded_files.SHARES)):
                kept, coded_files.SHARES = coded_files.SHARES, shares
                try:
                    report = merge(
                        demo / "base", work / "packed", adapters=adapters, requantize=form, check=True, overwrite=True
                    )  # fmt: skip
                finally:
                    coded_files.SHARES = kept
                assert report.check is not None
                survived = sorted(tensor.survival or 0.0 for tensor in report.check.changed)
                row[f"{name} {form}"] = {
                    "kl": _kl(wanted, _logits(work / "packed", prompts, quant=form)),
                    "survival": [round(survived[0], 4), round(survived[len(survived) // 2], 4), round(survived[-1], 4)],
                    "weight_error": _weight_error(work / "dense", work / "packed"),
                }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _logits(folder: Path, prompts: list[Any], *, quant: str, adapters: Any = None, voice: str | None = None) -> Any:
    import trimtab
    from trimtab.demo.demo import FOLDER

    plan = trimtab.plan(
        folder, adapters=adapters or {}, context=256, audio_s=1.0, quant=quant, place={"*": "resident"}
    )  # fmt: skip
    found = []
    with trimtab.load(plan) as model:
        for prompt in prompts:
            media = {kind: str(FOLDER / prompt[kind]) for kind in ("image", "audio") if prompt.get(kind)}
            found.append(model.logits(prompt["prompt"], **media, adapter=voice).cpu().double())
    return found


def _kl(wanted: list[Any], found: list[Any]) -> float:
    total = positions = 0
    for a, b in zip(wanted, found, strict=True):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
        positions += len(a)
    return round(total / positions, 6)


def _weight_error(dense: Path, packed: Path) -> float:
    from contextlib import ExitStack

    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.tiers.reader import PositionedFile
    from trimtab.formats.packed import split_packed
    from trimtab.merging.changes.delta import EntryRows
    from trimtab.merging.changes.dequantize import packed_rows

    one, other = read_checkpoint(dense), read_checkpoint(packed)
    error = size = 0.0
    with ExitStack() as stack:
        files = {file: PositionedFile(file) for file in (*one.files, *other.files)}
        for file in files.values():
            stack.callback(file.close)
        for name, entry in split_packed(other)[1].items():
            source = one.tensors[name]
            exact = EntryRows(files[source.file], source).all().double()
            got = packed_rows(entry, lambda part: files[part.file])(0, entry.shape[0]).double()
            error, size = error + float((got - exact).square().sum()), size + float(exact.square().sum())
    return round((error / size) ** 0.5, 5)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def environment() -> dict[str, Any]:
    from importlib.metadata import version

    import psutil

    return {
        "cpu_count": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": platform.system(), "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes", "safetensors")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--sizes", default="e2b,e4b", help="pico, demo, e2b, e4b")
    parser.add_argument("--save", default="bench/results/merge.json", help="a file, or - for none")
    parser.add_argument("--no-check", action="store_true", help="leave out the second merge with its check")
    parser.add_argument("--no-pack", action="store_true", help="leave out packing to NF4, which takes minutes on a CPU")
    parser.add_argument("--repeat", type=int, default=1, help="how many merges, with a copy before and after each")
    parser.add_argument("--scales", action="store_true", help="measure chosen NF4 scales on the demo model instead")
    parser.add_argument("--peft", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peft:
        peft(json.loads(options.peft))
        return
    if options.scales:
        options.work.mkdir(parents=True, exist_ok=True)
        _save(options.save, scales(options.work))
        return
    rows = []
    for size in options.sizes.split(","):
        work = options.work / f"merge-{size}"
        work.mkdir(parents=True, exist_ok=True)
        try:
            rows += measure(
                size, work, check=not options.no_check, packed=not options.no_pack, repeat=options.repeat
            )  # fmt: skip
        finally:
            shutil.rmtree(work, ignore_errors=True)
        _save(options.save, rows)


def _save(name: str, rows: list[dict[str, Any]]) -> None:
    if name != "-":
        save(Path(name), {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
