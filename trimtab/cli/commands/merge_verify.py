"""`trimtab merge` and `trimtab verify`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import trimtab
from trimtab.cli.commands import verify_server
from trimtab.cli.flags.flags import (
    adapter_to_use,
    add_adapters,
    add_budgets,
    add_device,
    add_dtype,
    add_placement,
    load_request,
    plan_or_request,
)
from trimtab.cli.flags.output import Command, give_report, print_json, print_text, show
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning import Plan
from trimtab.process import interrupts
from trimtab.process.exit_codes import UNFINISHED
from trimtab.request import LoadRequest, token_count

DIFFERS = 1
# Flags that only --check uses, and the dtype's other spellings among verify's routes.
CHECK_FLAGS = ("gpu_memory", "host_memory", "max_memory", "device")
SHORT_ROUTES = {"bfloat16": "bf16"}


def add(command: Command) -> None:
    """Add both commands."""
    merged = command("merge", run_merge, "merge adapters into a new checkpoint, in little memory")
    merged.add_argument(
        "model", metavar="MODEL", help="a checkpoint folder, or a hub id in the local cache; demo is the bundled model"
    )
    merged.add_argument("out", metavar="OUT", help="the folder of the new checkpoint")
    add_adapters(merged, "an adapter to merge; a weight of -1 removes a merged one", weights=True, default=[])
    add_dtype(merged, "as the files have it")
    merged.add_argument("--requantize", metavar="FORMAT", help="nf4 or nf4-dq: write a 4-bit checkpoint for bitsandbytes")
    merged.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    merged.add_argument(
        "--check", action="store_true", help="read the result again, check every value, and compare the answers with the adapter's"
    )
    add_budgets(merged, "memory for each model of --check")
    add_device(merged, "where --check computes: ")

    verified = command("verify", run_verify, "check that two computations of the same answers agree")
    add_placement(verified, model_help="a checkpoint folder, a hub id in the local cache, or a saved plan", compares=True)
    verified.add_argument("--use", metavar="NAME", help="the adapter (default: the only one)")
    verified.add_argument(
        "--against", metavar="ROUTE", default="resident",
        help="resident, stock, base, bf16, full-head, single, alone, eager, the folder of a merged model, or a server: "
        "http://HOST:PORT/v1 or ollama:NAME (default: resident)",
    )  # fmt: skip
    verified.add_argument("--prompts", metavar="FILE", help="a JSONL file with id, text, image, audio (default: a built-in set)")
    verified.add_argument("--lanes", action="store_true", help="also try every way to merge, with one verdict each")
    verified.add_argument("--python", metavar="EXE", help="the Python interpreter of the stock side")
    verified.add_argument(
        "--max-new-tokens", type=token_count, metavar="N", help="tokens of each answer (default: 32; 8 for a server)"
    )
    verified.add_argument("--save", metavar="FILE", help="write the report as .json, .md or .html")
    verify_server.add(verified)


def run_merge(options: argparse.Namespace) -> int:
    from trimtab.merging import MergeRequest, merge_request, parse_adapters

    for name in CHECK_FLAGS:
        if getattr(options, name) is not None and not options.check:
            raise RequestError("has no effect without --check", field=f"--{name.replace('_', '-')}")
    request = MergeRequest(
        model=options.model, out=options.out, adapters=parse_adapters(options.adapter, field="--adapter"), dtype=options.dtype,
        requantize=options.requantize, overwrite=options.overwrite, check=options.check,
    )  # fmt: skip
    compared = _to_compare(options, request) if options.check else None
    report = merge_request(request)
    if not options.json:
        show(report)  # the files are written, with any result of the comparison
    parity, problem = None, None
    if compared is not None:
        adapter = request.adapters[0].name
        try:
            parity = trimtab.verify(compared, adapter=adapter, against=options.out)
        except TrimtabError as exc:
            if interrupts.was_raised():
                raise
            problem = exc
    if options.json:
        print_json(replace(report, parity=parity).to_json() | ({} if problem is None else {"not_compared": problem.to_dict()}))
    elif parity is not None:
        print_text()
        show(parity)
    if problem is not None:
        if not options.json:
            print_text(f"\nthe answers could not be compared: {problem}", file=sys.stderr)
        return UNFINISHED
    return 0 if parity is None or parity.ok else DIFFERS


def _to_compare(options: argparse.Namespace, request: Any) -> LoadRequest | None:
    """Return the request for comparing answers if there is one adapter with weight 1; None otherwise. Errors: RequestError."""
    budgets = {name: value for name, value in vars(options).items() if name in CHECK_FLAGS}
    adapters = [f"{part.name}={part.path}:1" for part in request.adapters if part.weight == 1.0]
    compared = load_request(argparse.Namespace(model=options.model, adapter=adapters, **budgets))
    return compared if len(request.adapters) == len(adapters) == 1 else None


def _new_tokens(options: argparse.Namespace) -> int:
    from trimtab.verification.verify import NEW_TOKENS

    return NEW_TOKENS if options.max_new_tokens is None else int(options.max_new_tokens)


def run_verify(options: argparse.Namespace) -> int:
    """Return 0 the same, 1 not; for a server 0 alive, 1 ignored or wrong, 9 cannot tell."""
    from trimtab.report.render import Report
    from trimtab.verification.routes.prompts import read_prompts

    source = None if verify_server.is_server(options) else _request(options)
    if options.save:
        Report.check_save_path(options.save)
    if options.prompts:
        read_prompts(options.prompts)
    if source is None:
        on_server = verify_server.report_on(options)
        give_report(on_server, options)
        return on_server.exit_code
    report = _compare(source, options)
    give_report(report, options)
    if report.ok and report.unfinished:
        return UNFINISHED
    return 0 if report.ok else DIFFERS


def _request(options: argparse.Namespace) -> Plan | LoadRequest:
    source = plan_or_request(options)
    if options.use is not None or options.against != "alone":
        adapter_to_use(options.use, list((source if isinstance(source, LoadRequest) else source.request).adapters))
    return source


def _compare(source: Plan | LoadRequest, options: argparse.Namespace) -> Any:
    return trimtab.verify(
        source, adapter=options.use, prompts=options.prompts,
        against=SHORT_ROUTES.get(options.against, options.against), python=options.python,
        new_tokens=_new_tokens(options), lanes=options.lanes,
    )  # fmt: skip
