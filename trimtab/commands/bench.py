"""The command of how fast: bench."""

from __future__ import annotations

import argparse
from typing import Any

from trimtab.checkpoint.adapter import read_adapter
from trimtab.checkpoint.folder import find_folder
from trimtab.commands.flags import adapter_to_use, add_placement, plan_or_request
from trimtab.commands.saying import Command, give_report, saying
from trimtab.plan import Plan
from trimtab.request import DECODE_MODES


def add(command: Command) -> None:
    """Add the command."""
    timed = command(
        "bench", run_bench, "how fast a model answers, beside the stock stack and beside the memory's limit"
    )
    add_placement(timed, model_help="a checkpoint folder, a cached hub id, or a plan that `trimtab plan --save` wrote")
    timed.add_argument("--use", metavar="NAME", help="the adapter that answers (default: the only one given)")
    timed.add_argument(
        "--against", metavar="ENGINE", default="stock",
        help="stock (transformers, bitsandbytes, PEFT) or eager (trimtab without captured steps) (default: stock)",
    )  # fmt: skip
    timed.add_argument("--decode", metavar="HOW", default="auto", help=f"{', '.join(DECODE_MODES)} (default: auto)")
    timed.add_argument("--runs", type=int, default=3, metavar="N", help="processes of each engine (default: 3)")
    timed.add_argument("--new-tokens", type=int, default=64, metavar="N", help="length of the answers (default: 64)")
    timed.add_argument("--prompt-tokens", type=int, metavar="N", help="length of the prompt (default: 512)")
    timed.add_argument("--prompts", metavar="FILE", help="JSONL with id, text, image, audio, instead of one made here")
    timed.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    timed.add_argument("--audio", action="append", default=[], metavar="FILE", help="a sound; may be repeated")
    timed.add_argument("--picture", metavar="FILE", help="draw the figures as .svg or .png")
    timed.add_argument("--save", metavar="FILE", help="write every run, the medians and the machine as .json")


def run_bench(options: argparse.Namespace) -> int:
    from trimtab.speed.bench import bench
    from trimtab.speed.picture import check_picture_path, draw
    from trimtab.speed.report import check_save_path

    if options.save:
        check_save_path(options.save)
    if options.picture:
        check_picture_path(options.picture)
    report = bench(_request(options), say=saying(options))
    give_report(report, options, draw=draw)
    if report.ours.failure is None:
        return 0
    from trimtab.cli import exit_code

    return exit_code(report.ours.failure)


def _request(options: argparse.Namespace) -> Any:
    from trimtab.proof.prompts import read_prompts
    from trimtab.speed.bench import BenchRequest

    load = plan_or_request(options)
    request = load.request if isinstance(load, Plan) else load
    adapter = adapter_to_use(options.use, list(request.adapters))
    find_folder(request.model)  # before a process is started that needs them
    for path in request.adapters.values():
        read_adapter(path)
    return BenchRequest(
        load=load, adapter=adapter,
        against=options.against, runs=options.runs, new_tokens=options.new_tokens, prompt_tokens=options.prompt_tokens,
        prompts=read_prompts(options.prompts) if options.prompts else None, images=tuple(options.image),
        audios=tuple(options.audio), decode=options.decode,
    )  # fmt: skip
