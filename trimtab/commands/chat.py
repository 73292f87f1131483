"""The command that holds a conversation: flags become a plan, the plan a model, then lines are read until the end."""

from __future__ import annotations

import argparse
import sys

from trimtab.api import plan_request
from trimtab.commands.chat_input import Reader, line_reader, terminal_reader
from trimtab.commands.chat_session import Session
from trimtab.commands.flags import (
    adapter_to_use,
    add_decode,
    add_placement,
    add_sampling,
    decode_of,
    plan_or_request,
    sampling_options,
    system_of,
)
from trimtab.commands.opening import opened, say_fallbacks
from trimtab.commands.saying import Command
from trimtab.plan import Plan

# A conversation keeps its images; `plan` counts one for a single prompt.
CHAT_IMAGES = 4


def add(command: Command) -> None:
    """Add the command."""
    found = command("chat", run_chat, "talk to a model: turns, images, sounds, adapters switched and compared")
    add_placement(found, model_help="a checkpoint folder, a cached hub id, or a plan that `trimtab plan --save` wrote")
    found.add_argument("--use", metavar="NAME", help="the adapter that answers first (default: the only one given)")
    found.add_argument("--images", type=int, metavar="N", help=f"images in one conversation (default: {CHAT_IMAGES})")
    found.add_argument("--audio-s", type=float, metavar="S", help="seconds of sound in one conversation (default: 30)")
    found.add_argument("--system", metavar="S", help="a system message")
    found.add_argument("--system-file", metavar="FILE", help="read the system message from a file")
    found.add_argument(
        "--no-history", action="store_true", help="do not keep typed lines for the arrow keys of later runs"
    )
    found.add_argument(
        "--eager", action="store_true", help="launch every kernel by itself, as transformers does, to compare with"
    )
    add_decode(found)
    add_sampling(found, longest="what is left of the context")


def run_chat(options: argparse.Namespace) -> int:
    answering, decode, system = sampling_options(options), decode_of(options), system_of(options)
    plan, adapter = _plan(options, decode)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not options.json
    with opened(plan, decode) as model:
        say_fallbacks(model)
        conversation = model.chat(system=system, adapter=adapter, when_full="drop", **answering)
        session = Session(conversation, model, as_json=options.json, is_terminal=is_terminal)
        reader: Reader = line_reader(sys.stdin)
        if is_terminal:
            reader = terminal_reader(session.completions, keep_history=not options.no_history)
        return session.run(reader)


def _plan(options: argparse.Namespace, decode: str) -> tuple[Plan, str | None]:
    counted = {} if options.images is not None else {"images": CHAT_IMAGES}
    given = plan_or_request(options, **counted, head="auto", decode=decode)
    request = given.request if isinstance(given, Plan) else given
    names = list(request.adapters)
    # With several, the base begins; `run` has one question and has to know.
    adapter = adapter_to_use(options.use, names) if options.use is not None or len(names) < 2 else None
    return (given if isinstance(given, Plan) else plan_request(given)), adapter
