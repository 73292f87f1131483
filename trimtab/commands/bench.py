"""The command of how fast: bench."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trimtab.commands.flags import add_placement, plan_or_request
from trimtab.commands.saying import Command, print_json, saying
from trimtab.errors import RequestError
from trimtab.plan import Plan
from trimtab.request import DECODE_MODES


def add(command: Command) -> None:
    """Add the command."""
    found = command(
        "bench", run_bench, "how fast a model answers, beside the stock stack and beside the memory's limit"
    )
    add_placement(found, model_help="a checkpoint folder, a cached hub id, or a plan that `trimtab plan --save` wrote")
    found.add_argument("--use", metavar="NAME", help="the adapter that answers (default: the only one given)")
    found.add_argument(
        "--against", metavar="ENGINE", default="stock",
        help="stock (transformers, bitsandbytes, PEFT) or eager (trimtab without captured steps) (default: stock)",
    )  # fmt: skip
    found.add_argument("--decode", metavar="HOW", default="auto", help=f"{', '.join(DECODE_MODES)} (default: auto)")
    found.add_argument("--runs", type=int, default=3, metavar="N", help="processes of each engine (default: 3)")
    found.add_argument("--new-tokens", type=int, default=64, metavar="N", help="length of the answers (default: 64)")
    found.add_argument("--prompt-tokens", type=int, metavar="N", help="length of the prompt (default: 512)")
    found.add_argument("--prompts", metavar="FILE", help="JSONL with id, text, image, audio, instead of one made here")
    found.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    found.add_argument("--audio", action="append", default=[], metavar="FILE", help="a sound; may be repeated")
    found.add_argument("--picture", metavar="FILE", help="draw the figures as .svg or .png")
    found.add_argument("--save", metavar="FILE", help="write every run, the medians and the machine as .json")


def run_bench(options: argparse.Namespace) -> int:
    from trimtab.speed.bench import bench
    from trimtab.speed.picture import check_picture_path, draw
    from trimtab.speed.report import check_save_path

    if options.save:
        check_save_path(options.save)
    if options.picture:
        check_picture_path(options.picture)
    report = bench(_request(options), say=saying(options))
    if options.save:
        report.save(options.save)
    if options.picture:
        draw(report, options.picture)
    if options.json:
        print_json(report.to_json())
    else:
        print(report)
        for path in (options.save, options.picture):
            if path:
                print(f"written: {path}", file=sys.stderr)
    if report.ours.failure is None:
        return 0
    from trimtab.cli import exit_code

    return exit_code(report.ours.failure)


def _request(options: argparse.Namespace) -> Any:
    from trimtab.proof.prompts import read_prompts
    from trimtab.speed.bench import BenchRequest

    load = plan_or_request(options)
    adapters = list((load.request if isinstance(load, Plan) else load).adapters)
    if options.use is None and len(adapters) > 1:
        raise RequestError("several adapters are given; say which one answers", field="--use", allowed=adapters)
    return BenchRequest(
        load=load, adapter=options.use if options.use is not None else next(iter(adapters), None),
        against=options.against, runs=options.runs, new_tokens=options.new_tokens, prompt_tokens=options.prompt_tokens,
        prompts=read_prompts(options.prompts) if options.prompts else None, images=tuple(options.image),
        audios=tuple(options.audio), decode=options.decode,
    )  # fmt: skip
