"""`trimtab chat`: plans and loads a model, then reads lines until the end."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from trimtab.adapter_names import MIX_FORM
from trimtab.cli.chat.input import Reader, line_reader, terminal_reader
from trimtab.cli.chat.session import Session
from trimtab.cli.flags.flags import (
    Number,
    add_decode,
    add_placement,
    add_pull,
    add_sampling,
    chosen,
    decode_of,
    group_of,
    is_saved_plan,
    plan_or_request,
    sampling_options,
    system_of,
)
from trimtab.cli.flags.opening import opened, planned, say_fallbacks
from trimtab.cli.flags.output import Command, has_color, print_text
from trimtab.cli.flags.pull import pull_if_asked
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.planning import Plan
from trimtab.request import parse_bytes

# A conversation keeps its images; `plan` counts one for a single prompt.
CHAT_IMAGES = 4
PREFIX_CACHE = "256MiB"


def add(command: Command) -> None:
    """Add the command."""
    parser = command("chat", run_chat, "chat with a model: images, audio, adapters to switch and compare")
    add_placement(
        parser, model_help="a checkpoint folder, a hub id in the local cache, or a saved plan", weights=True,
        prefix_cache=f"{PREFIX_CACHE} where the budget allows it; off: no cache",
    )  # fmt: skip
    talk = group_of(parser, "conversation")
    talk.add_argument(
        "--use",
        metavar="NAME",
        help=f"the first adapter, `base` for none, or a mix: {MIX_FORM} (default: the only one, or all if they have weights)",
    )
    talk.add_argument("--images", type=int, metavar="N", help=f"images of one conversation (default: {CHAT_IMAGES})")
    talk.add_argument("--audio-s", type=Number, metavar="S", help="seconds of audio of one conversation (default: 30)")
    talk.add_argument("--system", metavar="TEXT", help="the system message")
    talk.add_argument("--system-file", metavar="FILE", help="read the system message from a file")
    talk.add_argument("--no-history", action="store_true", help="keep no input history")
    add_pull(parser)
    add_decode(parser)
    add_sampling(parser, longest="the rest of the context")


def run_chat(options: argparse.Namespace) -> int:
    answering, decode, system = sampling_options(options), decode_of(options), system_of(options)
    pull_if_asked(options)
    plan, adapter = _plan(options, decode)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not options.json
    with opened(plan, decode, stop_at_turn_end=options.stop_at_turn_end, is_told=not options.json) as model:
        say_fallbacks(model)
        conversation = model.chat(system=system, adapter=adapter, when_full="drop", **answering)
        session = Session(conversation, model, as_json=options.json, is_terminal=is_terminal)
        reader: Reader = line_reader(sys.stdin)
        if is_terminal:
            reader = terminal_reader(session.completions, keep_history=not options.no_history, has_color=has_color(sys.stdout))
        return session.run(reader)


def _plan(options: argparse.Namespace, decode: str) -> tuple[Plan, Any]:
    """Return the plan, and the adapter or mix that answers first."""
    is_default, is_off = options.prefix_cache is None, options.prefix_cache == "off"
    counted = {} if options.images is not None else {"images": CHAT_IMAGES}
    if is_off:
        options.prefix_cache = None
    elif is_default and decode != "eager" and not is_saved_plan(options):
        counted["prefix_cache_bytes"] = parse_bytes(PREFIX_CACHE, field_name="--prefix-cache") or 0
    source = plan_or_request(options, **counted, head="auto", dtype="auto", decode=decode)
    adapter = chosen(options, source)
    if isinstance(source, Plan):
        return source, adapter
    try:
        return planned(source), adapter
    except (DoesNotFitError, RequestError) as exc:
        if not is_default or (isinstance(exc, RequestError) and exc.field != "prefix_cache"):
            raise
        is_large = isinstance(exc, DoesNotFitError)
        why = "the host budget has no room for a prefix cache" if is_large else f"the default prefix cache {exc.reason}"
    plan = planned(replace(source, prefix_cache_bytes=0))
    print_text(f"{why}: every turn computes the whole prompt again", file=sys.stderr)
    return plan, adapter
