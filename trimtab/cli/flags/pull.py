"""`trimtab pull`, the only command that downloads: a model or adapter from a hub into the local cache."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import find_folder
from trimtab.cli.flags.output import Command, print_json, print_text
from trimtab.errors import CheckpointError, RequestError, gib


def add(command: Command) -> None:
    """Add the command."""
    parser = command("pull", run_pull, "download a model or adapter: config, tokenizer and safetensors, or a GGUF file")
    parser.add_argument("model", metavar="MODEL", help="a hub id, such as google/gemma-4-E4B-it, or OWNER/NAME/FILE.gguf")
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit (default: main)")


def run_pull(options: argparse.Namespace) -> int:
    pulled = pull(options.model, revision=options.revision, as_json=options.json)
    if options.json:
        print_json(asdict(pulled))
        return 0
    print_text(f"{pulled.folder}\n{gib(pulled.bytes)} in {len(pulled.files)} files, {gib(pulled.fetched_bytes)} fetched now")
    return 0


def pull(model: str, *, revision: str | None, as_json: bool) -> Any:
    """Fetch a model with bars on a terminal. Returns a `hub.Pulled`."""
    if as_json or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
    from trimtab.checkpoint import hub

    say = None if as_json else lambda text: print_text(text, file=sys.stderr, flush=True)
    return hub.pull(model, revision=revision, say=say)


def pull_if_asked(options: argparse.Namespace) -> None:
    """Fetch MODEL if --pull is set and it is missing; a revision is always resolved, and its folder becomes MODEL.

    Errors: RequestError.
    """
    if not options.pull:
        if options.revision is not None:
            raise RequestError("has no effect without --pull", field="--revision", value=options.revision)
        return
    if Path(options.model).suffix in (".json", ".toml") and Path(options.model).is_file():
        raise RequestError("has no effect on a file", field="--pull", value=options.model)
    if options.revision is None:
        try:
            find_folder(options.model)
        except CheckpointError:
            pull(options.model, revision=None, as_json=options.json)
        return
    options.model = str(pull(options.model, revision=options.revision, as_json=options.json).folder)
