"""`trimtab bench`: speed against the stock stack and the bandwidth limit."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from trimtab.adapters.adapter import read_adapter
from trimtab.checkpoint.folder import find_folder
from trimtab.cli.flags.flags import adapter_to_use, add_placement, check_folder_of, check_media, group_of, plan_or_request
from trimtab.cli.flags.output import Command, give_report
from trimtab.planning import Plan
from trimtab.process import phases
from trimtab.process.exit_codes import exit_code
from trimtab.request import DECODE_MODES, LoadRequest, token_count


def add(command: Command) -> None:
    """Add the command."""
    timed = command("bench", run_bench, "measure the speed, compared with transformers + PEFT and the bandwidth limit")
    add_placement(timed, model_help="a checkpoint folder, a hub id in the local cache, or a saved plan", compares=True)
    ask, output = group_of(timed, "measurement"), group_of(timed, "output")
    ask.add_argument("--use", metavar="NAME", help="the adapter (default: the only one)")
    ask.add_argument(
        "--against", metavar="ENGINE", default="stock",
        help="stock (transformers, bitsandbytes, PEFT) or eager (trimtab, kernel by kernel) (default: stock)",
    )  # fmt: skip
    ask.add_argument(
        "--decode", metavar="HOW", default="auto", help=f"how decode steps run: {', '.join(DECODE_MODES)} (default: auto)"
    )
    ask.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each engine, each a process (default: 3)")
    ask.add_argument("--new-tokens", type=token_count, metavar="N", help="tokens of each answer (default: 64)")
    ask.add_argument("--prompt-tokens", type=token_count, metavar="N", help="tokens of the prompt (default: 512)")
    ask.add_argument("--prompts", metavar="FILE", help="a JSONL file with id, text, image, audio, instead of a generated prompt")
    ask.add_argument("--image", action="append", default=[], metavar="FILE", help="an image; repeatable")
    ask.add_argument("--audio", action="append", default=[], metavar="FILE", help="an audio file; repeatable")
    output.add_argument("--picture", metavar="FILE", help="draw the results as .svg")
    output.add_argument("--save", metavar="FILE", help="write every run, the medians and the machine as .json")


def run_bench(options: argparse.Namespace) -> int:
    request = _request(options)
    from trimtab.benchmark.bench import bench
    from trimtab.benchmark.chart import draw

    report = bench(request)
    give_report(report, options, draw=draw)
    if report.ours.failure is None:
        return 0
    return exit_code(report.ours.failure)


def _request(options: argparse.Namespace) -> Any:
    load = plan_or_request(options)
    request = load.request if isinstance(load, Plan) else load
    adapter = adapter_to_use(options.use, list(request.adapters))
    phases.begin_imports()
    from trimtab.benchmark.bench import NEW_TOKENS, BenchRequest
    from trimtab.benchmark.report import check_save_path
    from trimtab.report.charts import check_path
    from trimtab.verification.routes.prompts import read_prompts

    if options.save:
        check_save_path(options.save)
    if options.picture:
        check_path(options.picture, field="--picture")
        check_folder_of(options.picture, "--picture")
    timed = BenchRequest(
        load=load, adapter=adapter,
        against=options.against, runs=options.runs, prompt_tokens=options.prompt_tokens,
        new_tokens=NEW_TOKENS if options.new_tokens is None else options.new_tokens,
        prompts=read_prompts(options.prompts) if options.prompts else None, images=tuple(options.image),
        audios=tuple(options.audio), decode=options.decode,
    )  # fmt: skip
    if options.new_tokens is not None and isinstance(load, LoadRequest):  # already checked
        timed = replace(timed, load=replace(load, answer_tokens=options.new_tokens))
    if options.image or options.audio:
        check_media(options.image, options.audio)
    find_folder(request.model)  # before a process that needs them is started
    for name, path in request.adapters.items():
        read_adapter(path, log_name=name)
    return timed
