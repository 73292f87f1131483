"""`trimtab serve`: flags or a registry file become models and settings, then the server runs until it is stopped."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.adapter_names import parse_adapters
from trimtab.cli.flags.flags import (
    InPlaceOf,
    Number,
    add_answer_tokens,
    add_decode,
    add_placement,
    add_pull,
    add_stop_at_turn_end,
    decode_of,
    given_flags,
    group_of,
    is_saved_plan,
    pairs,
    plan_or_request,
    read_text,
)
from trimtab.cli.flags.output import Command, print_text, use_color
from trimtab.cli.flags.pull import pull_if_asked
from trimtab.errors import RequestError
from trimtab.process import before_torch
from trimtab.process.files import write_text
from trimtab.serve.ray.config import ADMIN_KEY_VARIABLE, KEY_VARIABLE

if TYPE_CHECKING:
    from trimtab.serve.contract.settings import Settings
    from trimtab.serve.http.live import Reread
    from trimtab.serve.worker.registry import ServedModel

# Flags about copies; they have no effect on a single server.
RAY_FLAGS = {
    "replicas": "--replicas", "ray_address": "--ray-address", "gpus_per_replica": "--gpus-per-replica",
    "cpus_per_replica": "--cpus-per-replica", "print_config": "--print-config",
}  # fmt: skip
# Not argparse's defaults: a flag with one of these values still overrides the --config file.
DEFAULTS = {
    "host": "127.0.0.1", "port": 8000, "queue": 64, "grace": 30.0, "log_format": "text", "log_level": "info",
}  # fmt: skip
# Settings that are read once, at the start: a reload names those that the file has changed.
READ_ONCE = ("together", "log_format", "log_level", "threads", "color", "pull", "revision", "ray")
# Placeholder if a key is required and the file must not contain one.
NO_KEY = "from-the-environment"


def add(command: Command) -> None:
    """Add the command."""
    served = command("serve", run_serve, "serve many adapters through OpenAI's API")
    add_placement(
        served,
        model_help="a checkpoint folder, a hub id in the local cache, a saved plan, or a registry file (.toml)",
        weights=True,
    )
    group, network = group_of(served, "serving"), group_of(served, "network and keys")
    limits, log = group_of(served, "limits"), group_of(served, "log")
    group.add_argument(
        "--config", metavar="FILE", action=InPlaceOf, other=next(one for one in served._actions if one.dest == "model"),
        help="a TOML file with all settings and models; flags override it",
    )  # fmt: skip
    group.add_argument("--name", metavar="NAME", help="the model's name in the API (default: its folder's name)")
    group.add_argument("--images", type=int, metavar="N", help="most images of one prompt (default: 1)")
    group.add_argument("--audio-s", type=Number, metavar="S", help="most seconds of audio of one prompt (default: 30)")
    add_answer_tokens(group)
    add_stop_at_turn_end(group)
    group.add_argument(
        "--rows", type=int, metavar="N",
        help="requests decoded together, 1 to 64 (default: the most of 32, 16 and 8 that move no block off the GPU)",
    )  # fmt: skip
    group.add_argument(
        "--resident-adapters", type=int, metavar="N",
        help="adapters on the model at once; the others stay in host memory (default: all)",
    )  # fmt: skip
    add_pull(served)
    add_decode(served)
    group.add_argument("--keep", action="append", metavar="NAME", help="an adapter that always stays on the model; repeatable")
    group.add_argument("--together", type=int, metavar="N", help="models loaded at once (default: 1)")
    network.add_argument("--host", metavar="HOST", help="the address to listen on (default: 127.0.0.1)")
    network.add_argument("--port", type=int, metavar="PORT", help="the port, 0 for a free one (default: 8000)")
    network.add_argument(
        "--api-key", action="append", metavar="KEY",
        help=f"a key that clients must send, required where other machines can reach the host; also from {KEY_VARIABLE}",
    )  # fmt: skip
    network.add_argument(
        "--api-key-file", metavar="FILE", help="a file with one key per line, which keeps keys out of the process list"
    )
    network.add_argument(
        "--admin-key", action="append", metavar="KEY",
        help=f"a key for loading and unloading adapters; without one a server with API keys refuses "
        f"these; also from {ADMIN_KEY_VARIABLE}",
    )  # fmt: skip
    network.add_argument(
        "--admin-key-file", metavar="FILE", help="a file with one key per line, which keeps keys out of the process list"
    )
    network.add_argument("--adapter-root", metavar="FOLDER", help="allow clients to load adapters from below this folder")
    network.add_argument(
        "--allow-fetch", action="append", metavar="HOST", help="a public host from which images may be fetched; repeatable"
    )
    network.add_argument("--cors-origin", action="append", metavar="URL", help="a site whose pages may call the API; repeatable")
    limits.add_argument(
        "--limit", action="append", metavar="NAME=N",
        help="a limit on requests, such as image_pixels=4000000; repeatable",
    )  # fmt: skip
    limits.add_argument(
        "--share-prefix-cache", action="store_true",
        help="share cached prefixes between API keys; clients can then detect by timing what others have sent",
    )  # fmt: skip
    limits.add_argument("--queue", type=int, metavar="N", help="most requests in the queue (default: 64)")
    limits.add_argument(
        "--timeout", type=Number, metavar="S", help="most seconds of one answer and its time in the queue (default: none)"
    )
    limits.add_argument("--grace", type=Number, metavar="S", help="seconds for running answers at shutdown (default: 30)")
    group.add_argument("--idle-unload", type=Number, metavar="S", help="unload the model after this many idle seconds")
    limits.add_argument("--retry", action="store_true", help="resend a request once if the worker died before its first text")
    limits.add_argument(
        "--lenient", action="store_true",
        help="accept unsupported fields and list them in the header X-Trimtab-Ignored",
    )  # fmt: skip
    log.add_argument("--log-format", metavar="FORM", help="text or json, one line per event (default: text)")
    log.add_argument(
        "--log-level", metavar="LEVEL",
        help="debug, info, warning or error; info has one line per request, without its text (default: info)",
    )  # fmt: skip
    log.add_argument(
        "--otel", action="store_true",
        help="send one trace per request to OTEL_EXPORTER_OTLP_ENDPOINT; needs pip install 'trimtab[otel]'",
    )  # fmt: skip
    network.add_argument("--no-page", action="store_true", help="switch off the page at /")
    ray = served.add_argument_group("copies with Ray Serve (pip install 'trimtab[ray]')")
    ray.add_argument("--ray", action="store_true", help="deploy on Ray; starts a local Ray if none is reachable")
    ray.add_argument("--replicas", metavar="N", help="copies of each model; LOW..HIGH scales with the load (default: 1)")
    ray.add_argument("--ray-address", metavar="ADDRESS", help="the Ray cluster (default: the one that Ray detects)")
    ray.add_argument(
        "--gpus-per-replica", type=Number, metavar="X",
        help="GPUs of one copy, 0.5 for two on one GPU (default: 1 if Ray has any and the model may use one)",
    )  # fmt: skip
    ray.add_argument("--cpus-per-replica", type=Number, metavar="X", help="CPU cores of one copy (default: 1)")
    ray.add_argument("--print-config", metavar="FILE", help="write the file for `serve deploy` on a cluster and exit; - prints it")


def run_serve(options: argparse.Namespace) -> int:
    from trimtab.serve.contract import log as journal
    from trimtab.serve.worker.registry import check_sharing

    def say(text: str) -> None:
        if options.log_format == "json" and not options.json:  # every line of such a log is an object
            logging.getLogger("trimtab.serve").info(text)
        else:
            print_text(json.dumps({"say": text}) if options.json else text, file=sys.stderr, flush=True)

    command_line, options = options, configured(options)
    if options.color != command_line.color:
        use_color(options.color)
    if options.threads != command_line.threads:
        before_torch.use_threads(options.threads, beside_others=False)
    if options.print_config is None:  # else its file is the output
        journal.keep_streams()
    journal.set_up(options.log_format, options.log_level)
    asked_model = options.model
    pull_if_asked(options)
    _name_as_asked(options, asked_model)
    if options.ray:
        return _run_ray(options, say)
    for name, flag in RAY_FLAGS.items():
        if getattr(options, name) is not None:
            raise RequestError("has no effect without --ray", field=flag, value=getattr(options, name))

    def reread() -> tuple[Sequence[Any], Any, Sequence[str]]:
        now = configured(command_line)
        if now.model == asked_model:  # a pulled revision is resolved once
            now.model = options.model
            _name_as_asked(now, asked_model)
        waiting = [name for name in READ_ONCE if getattr(now, name) != getattr(options, name)]
        changed = served_models(now), settings_of(now)
        check_sharing(*changed)
        return *changed, waiting

    settings = settings_of(options)  # keys and limits are read before the models' files
    if _serve(served_models(options), settings, 1 if options.together is None else options.together, say, reread):
        raise KeyboardInterrupt  # answers had their grace time; the exit code shows what ended the command
    return 0


def _serve(models: Sequence[ServedModel], settings: Settings, together: int, say: Callable[[str], None], reread: Reread) -> bool:
    """Bind the address, start the workers, then import the HTTP modules: both take CPU time. Clients that connect early wait. As
    `serve`."""
    from trimtab.serve.http.listener import listen
    from trimtab.serve.pool import Pool

    pool = Pool(models, settings, together=together)
    with listen(settings.host, settings.port) as listener:
        try:
            pool.begin()
            from trimtab.serve.run import serve

            return serve(models, settings, together=together, say=say, reread=reread, pool=pool, listener=listener)
        finally:
            pool.stop()  # exit does not wait for a worker that is still loading


def _name_as_asked(options: argparse.Namespace, asked_model: str) -> None:
    """Give a model with a pulled revision the requested name, because its folder's name is a commit."""
    if options.model != asked_model and options.name is None:
        options.name = asked_model


def configured(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the values of the --config file, and with the defaults for unset ones.

    Errors: RequestError, CheckpointError.
    """
    from trimtab.serve.config_file import apply_config

    made = argparse.Namespace(**vars(options)) if options.config is None else apply_config(options, options.parser)
    for name, value in DEFAULTS.items():
        if getattr(made, name) is None:
            setattr(made, name, value)
    return made


def _run_ray(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    from trimtab.serve.ray.config import arguments_of, config, read_replicas
    from trimtab.serve.ray.deploy import check_ray, run
    from trimtab.serve.worker.registry import check_present, check_sharing

    check_ray()
    if options.together is not None:
        raise RequestError("has no effect with --ray: every model has separate copies", field="--together")
    replicas = read_replicas("1" if options.replicas is None else options.replicas)
    cpus = 1.0 if options.cpus_per_replica is None else options.cpus_per_replica
    models, settings = served_models(options), settings_of(options)
    check_sharing(models, settings)
    if settings.key_limits:
        raise RequestError("have no effect with --ray", field="keys", value=[one.name for one in settings.key_limits.values()])
    arguments = arguments_of(models, settings, replicas=replicas, gpus=options.gpus_per_replica, cpus=cpus)
    if options.print_config is None:
        if options.ray_address is None:
            check_present(models)
        if run(arguments, address=options.ray_address, say=say):
            raise KeyboardInterrupt
        return 0
    if options.ray_address is not None:
        raise RequestError("has no effect with --print-config: `serve deploy` chooses the cluster", field="--ray-address")
    text = config(arguments)
    if options.print_config == "-":
        sys.stdout.write(text)
        return 0
    write_text(options.print_config, text, field="--print-config", newline=None)
    say(f"{options.print_config}: serve deploy {options.print_config}")
    return 0


def served_models(options: argparse.Namespace) -> Sequence[Any]:
    """Return the models that the flags or the registry file name. Errors: RequestError, CheckpointError."""
    from trimtab.checkpoint.folder import find_folder
    from trimtab.serve.worker.registry import ServedModel, check_present, read_registry

    path = Path(options.model)
    if path.suffix == ".toml":
        own = {"name": "--name", "rows": "--rows", "resident_adapters": "--resident-adapters", "keep": "--keep"}
        own |= {"idle_unload": "--idle-unload", "eager": "--eager", "decode": "--decode"}
        own |= {"stop_at_turn_end": "--stop-at-turn-end"}
        flags = [f"--{name.replace('_', '-')}" for name in given_flags(options)]
        for flag in [*flags, *(flag for name, flag in own.items() if getattr(options, name) is not None)]:
            raise RequestError("has no effect with a registry file", field=flag, hint="Set it in the file")
        models = read_registry(path, is_config=options.config is not None and path == Path(options.config))
        if _is_here(options):
            check_present(models)
        return models
    request, adapters = _request(options)
    if _is_here(options):
        find_folder(request.model)  # before a name for clients is made from a missing folder
    served = ServedModel(
        name=options.name or _name(options), request=request, adapters=adapters, kept=tuple(options.keep or ()),
        rows=options.rows, resident_limit=options.resident_adapters,
        idle_unload_s=options.idle_unload, decode=decode_of(options), weights=weights_of(options),
        stop_at_turn_end=options.stop_at_turn_end,
    )  # fmt: skip
    if _is_here(options):
        check_present([served])
    return [served]


def weights_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the weights in `--adapter NAME=PATH:0.7` that differ from 1."""
    adapters = parse_adapters(options.adapter or (), field="--adapter")
    return {one.name: one.weight for one in adapters if one.weight != 1}


def _is_here(options: argparse.Namespace) -> bool:
    """Whether models are loaded on this machine, so that their folders must be here."""
    return options.print_config is None and options.ray_address is None and not options.ray


def _name(options: argparse.Namespace) -> str:
    """Return the clients' name of a model without --name: its folder's or plan's name; a hub id unchanged."""
    path = Path(options.model)
    if is_saved_plan(options):
        return path.stem
    return path.resolve().name if path.exists() else path.as_posix()


def _request(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    from dataclasses import replace

    from trimtab.planning import Plan

    source = plan_or_request(options, head="auto", dtype="auto")
    request = source.request if isinstance(source, Plan) else source
    return replace(request, adapters={}), dict(request.adapters)


def settings_of(options: argparse.Namespace) -> Any:
    """Return the server's settings. Errors: RequestError."""
    from trimtab.serve.contract.settings import Limits, Settings

    limits = pairs(options.limit or (), "--limit", "NAME=N", first=True)
    named = getattr(options, "named_keys", {})
    return Settings(
        host=options.host, port=options.port, api_keys=tuple(dict.fromkeys([*_keys(options, "api", KEY_VARIABLE), *named])),
        key_limits=named,
        admin_keys=tuple(_keys(options, "admin", ADMIN_KEY_VARIABLE)),
        adapter_root=None if options.adapter_root is None else Path(options.adapter_root),
        allow_fetch=tuple(options.allow_fetch or ()), cors_origins=tuple(options.cors_origin or ()),
        queue_limit=options.queue, retry=options.retry, grace_s=options.grace,
        timeout_s=options.timeout, page=not options.no_page, otel=options.otel, lenient=options.lenient,
        share_prefixes=options.share_prefix_cache, limits=Limits.of(limits),
    )  # fmt: skip


def _keys(options: argparse.Namespace, kind: str, variable: str) -> list[str]:
    """Return the keys of a kind, "api" or "admin", from flags, environment and file. Errors: RequestError."""
    keys_given, path = getattr(options, f"{kind}_key"), getattr(options, f"{kind}_key_file")
    flag = f"--{kind}-key-file"
    if options.print_config is not None:
        for name, value in ((f"--{kind}-key", keys_given), (flag, path)):
            if value is not None:
                hint = f"Start Ray on each node with {variable} in its environment"
                raise RequestError("cannot be used with --print-config: keys are not written into a file", field=name, hint=hint)
        return [NO_KEY] if kind == "api" else []  # `config` omits it
    keys = list(keys_given or ())
    if os.environ.get(variable):
        keys.append(os.environ[variable])
    if path is not None:
        lines = [line.strip() for line in read_text(path, flag).splitlines() if line.strip()]
        if not lines:
            raise RequestError("holds no key", field=flag, value=path)
        keys += lines
    return keys
