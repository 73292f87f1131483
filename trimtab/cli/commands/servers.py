"""`trimtab doctor` with a server's address."""

from __future__ import annotations

import argparse

from trimtab.cli.flags.output import print_json, print_text
from trimtab.errors import RequestError
from trimtab.process import phases

# All other flags of the command concern this machine and a model's files.
_TAKEN = ("api_key_env", "json", "name", "command", "model")


def is_asked(options: argparse.Namespace) -> bool:
    """Return whether MODEL is a server's address. Errors: RequestError for a flag without effect with an address, or
    without one.
    """
    is_server = options.model is not None and options.model.startswith(("http://", "https://"))
    if not is_server:
        if options.api_key_env is not None:
            raise RequestError("has no effect without a server's address", field="--api-key-env")
        return False
    for name, value in vars(options).items():
        if name not in _TAKEN and value not in (None, False):
            raise RequestError("has no effect on a server's address", field=f"--{name.replace('_', '-')}")
    return True


def run(options: argparse.Namespace) -> int:
    """Print the kind of server and the known facts about it."""
    from trimtab.doctor.servers.report import examine
    from trimtab.verification.server.client import read_key

    phases.begin("asking the server")
    report = examine(options.model, key=read_key(options.api_key_env))
    if options.json:
        print_json(report.to_json())
    else:
        print_text(report)
    return 0
