"""Make the demo checkpoint and its adapters, or check what the bundled ones are worth.

    python tools/train_demo.py                 train what is missing under trimtab/demo (one GPU, under 15 minutes)
    python tools/train_demo.py --fresh         train everything again
    python tools/train_demo.py --evaluate      the card's accuracies from the bundled files, on the CPU, within minutes
    python tools/train_demo.py --quick         a smoke run of a few steps into a scratch folder

A maintainer's script: it needs transformers, peft, tokenizers, Pillow and rich, and the network for nothing. Seeds are
fixed; an interrupted stage goes on from its last saved state; figures go to bench/results/demo_training.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from demo_card import write_card
from demo_samples import write_samples
from demo_scoring import evaluate, shortfalls
from demo_stages import QUICK, SCHEDULES, STAGES, Place, Sizes, run_stage, training_media
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parent.parent
CONSOLE = Console(stderr=True, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if everything asked for was done and what was scored keeps the card's promises."""
    options = _parser().parse_args(arguments)
    demo = options.out or (ROOT / "build/demo_quick" if options.quick else ROOT / "trimtab/demo")
    log_file = options.log or (demo / "training.json" if options.quick else ROOT / "bench/results/demo_training.json")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() and not options.evaluate else "cpu"))
    if options.evaluate:
        return _evaluate(demo, device)
    # float32 weights; TF32 products are exact enough here and several times faster.
    torch.set_float32_matmul_precision("high")
    place = Place(demo, options.work or ROOT / "build/demo_training", device)
    log = _read_log(log_file)
    _train_all(options, place, log, log_file)
    if options.no_score:
        return 0
    log["sample_leads"] = write_samples(demo, str(device))
    began = time.perf_counter()
    with _bar("scoring", None) as tick:
        results = evaluate(demo, device=str(device), tick=tick)
    log["scored"] = {"device": _device_name(device), "seconds": round(time.perf_counter() - began, 1), "voices": results}
    _write_log(log, log_file)
    _show(results)
    write_card(demo, log)
    return _verdict(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="score the bundled files; train nothing")
    parser.add_argument("--quick", action="store_true", help="a smoke run: little data, few steps, a scratch folder")
    parser.add_argument("--fresh", action="store_true", help="train stages again that are already there")
    parser.add_argument("--no-score", action="store_true", help="train only: no samples, no scoring, no card")
    parser.add_argument("--stages", default=",".join(STAGES), help="which to train, by commas (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of every stage instead of its own number")
    parser.add_argument("--device", help="cuda or cpu (default: cuda for training if there is one, cpu for scoring)")
    parser.add_argument("--out", type=Path, help="the demo's folder (default: trimtab/demo)")
    parser.add_argument("--work", type=Path, help="where unfinished stages are kept (default: build/demo_training)")
    parser.add_argument("--log", type=Path, help="where the figures go (default: bench/results/demo_training.json)")
    return parser


def _train_all(options: argparse.Namespace, place: Place, log: dict[str, Any], log_file: Path) -> None:
    wanted = [voice for voice in STAGES if voice in options.stages.split(",")]
    missing = [voice for voice in wanted if options.fresh or options.quick or not place.is_done(voice)]
    if not missing:
        CONSOLE.print("everything is there; --fresh trains it again")
        return
    sizes = QUICK if options.quick else Sizes()
    steps = options.steps or (20 if options.quick else None)
    CONSOLE.print(f"rendering pictures and sounds for {', '.join(missing)} on {_device_name(place.device)}")
    began = time.perf_counter()
    media = training_media(sizes).to(place.device)
    log["environment"] = _environment(place.device)
    log["rendering_seconds"] = round(time.perf_counter() - began, 1)
    for voice in missing:
        total = steps or SCHEDULES[voice].steps
        with _bar(voice, total) as advance:
            last = [0]

            def report(figures: dict[str, Any]) -> None:
                advance(figures["step"] - last[0])  # noqa: B023 - called within this turn of the loop only
                last[0] = figures["step"]  # noqa: B023
                if "held_out" in figures or figures["step"] % 250 == 0:
                    CONSOLE.print(f"{voice} {json.dumps(figures)}")  # noqa: B023

            stage_log = run_stage(voice, place, media, sizes, steps=steps, report=report, say=lambda text: CONSOLE.print(text))
        log.setdefault("stages", {})[voice] = stage_log
        _write_log(log, log_file)


def _evaluate(demo: Path, device: torch.device) -> int:
    began = time.perf_counter()
    with _bar("scoring", None) as tick:
        results = evaluate(demo, device=str(device), tick=tick)
    _show(results)
    CONSOLE.print(f"{time.perf_counter() - began:.0f} s on {_device_name(device)}")
    return _verdict(results)


def _show(results: dict[str, Any]) -> None:
    for voice, result in results.items():
        line = {"voice": voice, "questions": result["questions"], "right": result["right"]}
        if "base_without_it" in result:
            line["base_without_it"] = result["base_without_it"]
        print(json.dumps(line))
        for mistake in result["mistakes"][:5]:
            print("   wrong:", json.dumps(mistake, ensure_ascii=False))


def _verdict(results: dict[str, Any]) -> int:
    problems = shortfalls(results)
    print("\n".join(problems) if problems else "every voice keeps its promises")
    return 1 if problems else 0


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _environment(device: torch.device) -> dict[str, Any]:
    packages = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "pillow")
    return {
        "device": _device_name(device), "python": platform.python_version(), "system": platform.platform(),
        "packages": {name: version(name) for name in packages}, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _read_log(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _write_log(log: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
