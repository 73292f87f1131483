"""`trimtab verify` against a server: its flags, and the report on the server's adapter."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from trimtab.cli.flags.flags import Number, is_saved_plan, load_request
from trimtab.errors import RequestError
from trimtab.process import phases

if TYPE_CHECKING:
    from trimtab.verification.server.report import RemoteReport

# Flags of `verify` for comparisons of trimtab's routes; they do not apply to a server.
_NO_EFFECT = ("head", "kv", "python", "lanes", "context", "images", "audio_s", "batch")
_FLAGS = ("remote_model", "remote_base", "api_key_env", "send_prompts", "deadline")


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = command.add_argument_group("a server (--against http://HOST:PORT/v1 or ollama:NAME)")
    group.add_argument("--remote-model", metavar="NAME", help="the server's name for the model with the adapter")
    group.add_argument("--remote-base", metavar="NAME", help="the server's name for the base, to measure precision and noise")
    group.add_argument("--api-key-env", metavar="VARIABLE", help="the environment variable that holds the server's key")
    group.add_argument("--send-prompts", action="store_true", help="send your own --prompts to the server")
    group.add_argument("--deadline", type=Number, metavar="S", help="seconds to wait for the server in total (default: 300)")


def is_server(options: argparse.Namespace) -> bool:
    """Return whether a server is verified. Errors: RequestError for a server's flag without a server."""
    if options.against.startswith(("http://", "https://", "ollama:")):
        return True
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/\S*)?", options.against):
        raise RequestError("begins with http:// or https://, if it is a server", field="--against", value=options.against)
    for name in _FLAGS:
        if getattr(options, name) not in (None, False):
            raise RequestError(
                "has no effect without a server", field=f"--{name.replace('_', '-')}",
                hint="Give its address: --against http://HOST:PORT/v1",
            )  # fmt: skip
    return False


def report_on(options: argparse.Namespace) -> RemoteReport:
    """Return the report on a server's adapter. Errors: RequestError for a flag without effect; as `verify_remote`."""
    for name in _NO_EFFECT:
        if getattr(options, name, None) not in (None, False):
            raise RequestError("has no effect on the answers of a server", field=f"--{name.replace('_', '-')}")
    if is_saved_plan(options):
        raise RequestError("a saved plan is in one precision; name the checkpoint", field="MODEL", value=options.model)
    if options.deadline is not None and not 0 < options.deadline <= 86_400:
        raise RequestError("must be between 0 and 86400 seconds", field="--deadline", value=options.deadline)
    new_tokens = options.max_new_tokens
    if new_tokens is not None and not 1 <= new_tokens <= 64:
        raise RequestError("must be between 1 and 64 for a server", field="--max-new-tokens", value=new_tokens)
    placed = load_request(options)
    phases.begin_imports()
    from trimtab.verification.server.client import DEADLINE_S
    from trimtab.verification.server.verify import NEW_TOKENS, verify_remote

    return verify_remote(
        options.model, adapters=placed.adapters, placed=placed, adapter=options.use,
        against=options.against, remote_model=options.remote_model, remote_base=options.remote_base,
        prompts=options.prompts, send_prompts=options.send_prompts, quant=options.quant, api_key_env=options.api_key_env,
        deadline_s=options.deadline or DEADLINE_S, new_tokens=NEW_TOKENS if new_tokens is None else new_tokens,
    )  # fmt: skip
