"""The command line: flags become a request, the request one library call, and what comes back is printed.

Alone prints, exits and reads what the user's terminal is. Exit codes:

    0  done
    2  the question is wrong (usage, RequestError)
    3  a file is not what it claims (CheckpointError)
    4  no placement within the budgets (DoesNotFitError)
    5  adapter and model do not match (AdapterError)
    6  the machine refused while running (DeviceError)
    7  two routes differ (ParityError)
    8  a known bug of another package is in the way (UpstreamError)
    130  stopped by Ctrl-C
    141  the reader of the output went away

Anything else is a bug of trimtab and shows its traceback. Errors go to stderr; with --json to stdout, as one object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import trimtab
from trimtab import show
from trimtab.errors import (
    AdapterError,
    CheckpointError,
    DeviceError,
    DoesNotFitError,
    ParityError,
    RequestError,
    TrimtabError,
    UpstreamError,
)
from trimtab.request import DTYPES, QUANTS, TIERS, GenerateRequest, LoadRequest, parse_bytes

EXIT_CODES: tuple[tuple[type[TrimtabError], int], ...] = (
    (RequestError, 2),
    (CheckpointError, 3),
    (DoesNotFitError, 4),
    (AdapterError, 5),
    (DeviceError, 6),
    (ParityError, 7),
    (UpstreamError, 8),
)
STOPPED, READER_GONE = 130, 141


class UsageError(RequestError):
    """The command line cannot be read; `usage` says how it is written."""

    def __init__(self, message: str, *, usage: str) -> None:
        self.usage = usage
        super().__init__(message, field="command line")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, usage=self.format_usage().strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of one command. arguments: without the program's name; None takes the process's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    _prepare_terminal()
    try:
        options = parser().parse_args(given)
        return int(options.command(options))
    except TrimtabError as exc:
        _print_error(exc, as_json)
        return exit_code(exc)
    except KeyboardInterrupt as exc:
        _print_error(exc, as_json)
        return STOPPED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; that must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def exit_code(error: TrimtabError) -> int:
    """Return the exit code of an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _prepare_terminal() -> None:
    """Let a terminal that cannot show a character show a question mark, and upstream notes not hide the answer."""
    import logging
    import warnings

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _print_error(exc: BaseException, as_json: bool) -> None:
    if as_json:
        _print_json({"error": error_json(exc)})
    elif isinstance(exc, UsageError):
        print(f"{exc.usage}\ntrimtab: {exc}", file=sys.stderr)
    else:
        print(f"trimtab: {exc}" if str(exc) else "trimtab: stopped", file=sys.stderr)


def error_json(exc: BaseException) -> dict[str, Any]:
    """Return an error as class, message and the fields that code reads."""
    kind = RequestError if isinstance(exc, UsageError) else type(exc)
    fields = {name: value for name, value in vars(exc).items() if not name.startswith("_") and name != "usage"}
    return {"class": kind.__name__, "message": str(exc) or "stopped", "fields": fields}


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


# Flags ----------------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command; a command is the function in `command`."""
    top = _Parser(
        prog="trimtab", allow_abbrev=False,
        description="Any LoRA adapter on a quantized multimodal model that does not fit the GPU.",
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"trimtab {trimtab.__version__}")
    commands = top.add_subparsers(dest="name", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        found.set_defaults(command=function)
        return found

    planned = command("plan", run_plan, "where every block of a model goes, without loading it")
    _add_placement(planned, model_help="a checkpoint folder, or a hub id that is in the local cache")
    planned.add_argument("--batch", type=int, metavar="N", help="rows decoded together (default: 1)")
    planned.add_argument("--images", type=int, metavar="N", help="pictures in one prompt (default: 1)")
    planned.add_argument("--audio-s", type=float, metavar="S", help="seconds of sound in one prompt (default: 30)")
    planned.add_argument("--save", metavar="FILE", help="write the plan as JSON; `trimtab run FILE` loads it")
    planned.add_argument("--picture", metavar="FILE", help="draw the plan as .svg or .png")

    inspected = command("inspect", run_inspect, "what an adapter targets, and what of it a model would take")
    inspected.add_argument("adapter", metavar="ADAPTER", help="an adapter folder that PEFT wrote")
    inspected.add_argument("--model", metavar="MODEL", help="match every tensor of the adapter with this model")

    ran = command("run", run_run, "plan, load and answer one prompt")
    _add_placement(ran, model_help="a checkpoint folder, a cached hub id, or a plan that `trimtab plan --save` wrote")
    ran.add_argument("prompt", metavar="PROMPT", help="the question")
    ran.add_argument("--use", metavar="NAME", help="the adapter that answers (default: the only one given)")
    ran.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    ran.add_argument("--audio", action="append", default=[], metavar="FILE", help="a sound; may be repeated")
    ran.add_argument("--system", metavar="S", help="a system message")
    _add_sampling(ran)

    command("demo", run_demo, "the whole line on a small model: plan, load, adapt, answer, prove")
    for found in commands.choices.values():
        found.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return top


def _add_placement(found: argparse.ArgumentParser, *, model_help: str) -> None:
    """Add what decides a plan. Every default is None: LoadRequest has the values, and what was given is known."""
    found.add_argument("model", metavar="MODEL", help=model_help)
    group = found.add_argument_group("placement")
    group.add_argument("--adapter", action="append", metavar="NAME=PATH", help="load this adapter; may be repeated")
    group.add_argument("--gpu-memory", metavar="SIZE", help='budget, such as "4GiB" (default: what is free)')
    group.add_argument("--host-memory", metavar="SIZE", help='budget, such as "16GiB" (default: what is available)')
    group.add_argument(
        "--quant", metavar="FORMAT", help=f"{', '.join(QUANTS)} (default: the checkpoint's own, or nf4-dq)"
    )
    group.add_argument("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)} (default: bfloat16)")
    group.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer together (default: 4096)")
    group.add_argument(
        "--place", action="append", metavar="PATTERN=TIER",
        help=f"put blocks, modules or a part in a tier ({', '.join(TIERS)}); may be repeated, the last match wins",
    )  # fmt: skip
    group.add_argument("--device-map", metavar="FILE", help="a JSON device map in transformers' form")
    group.add_argument(
        "--keep-unquantized",
        action="append",
        metavar="PATTERN",
        help="leave these modules as they are; may be repeated",
    )
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument(
        "--offload-dir", metavar="FOLDER", help="where the disk tier's file goes (default: user's cache)"
    )


def _add_sampling(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="the longest answer (default: 256)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")
    group.add_argument("--top-k", type=int, metavar="N", help="draw from the N most likely tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from the most likely tokens that sum to P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the most likely one's share")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1 repeats less")
    group.add_argument("--seed", type=int, metavar="N", help="the same draws every time")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer here; may be repeated")


# What a flag of the placement group fills in LoadRequest. `run` counts pictures and sound itself.
_PLACEMENT = {
    "gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes", "quant": "quant", "dtype": "dtype",
    "context": "context_tokens", "batch": "batch", "images": "images", "audio_s": "audio_s", "device": "device",
    "offload_dir": "offload_dir", "adapter": "adapters", "place": "place", "device_map": "device_map",
    "keep_unquantized": "keep_unquantized",
}  # fmt: skip


def _given(options: argparse.Namespace) -> list[str]:
    return [name for name in _PLACEMENT if getattr(options, name, None) is not None]


def load_request(options: argparse.Namespace, **counted: Any) -> LoadRequest:
    """Return the request that the flags ask. counted: fields that a command knows without a flag."""
    values: dict[str, Any] = {"model": options.model, **counted}
    for name in _given(options):
        value = getattr(options, name)
        if name in ("gpu_memory", "host_memory"):
            value = parse_bytes(value, field_name=f"--{name.replace('_', '-')}")
        elif name == "adapter":
            value = _pairs(value, "--adapter", "NAME=PATH", first=True)
        elif name == "place":
            value = _pairs(value, "--place", "PATTERN=TIER", first=False)
        elif name == "device_map":
            value = _read_device_map(value)
        elif name == "keep_unquantized":
            value = tuple(value)
        values[_PLACEMENT[name]] = value
    return LoadRequest(**values)


def _pairs(texts: Sequence[str], flag: str, form: str, *, first: bool) -> dict[str, str]:
    """Return NAME -> VALUE of repeated NAME=VALUE flags; first: a value may hold "=" itself, else the name may."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=") if first else text.rpartition("=")
        if not (name and equals and value):
            raise RequestError("is not of the form", field=flag, value=text, allowed=(form,))
        if name in found:
            raise RequestError(f"{name} is given twice", field=flag, value=text)
        found[name] = value
    return found


def _read_device_map(path: str) -> dict[str, int | str]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise RequestError(f"cannot be read ({exc.strerror})", field="--device-map", value=path) from exc
    except ValueError as exc:
        raise RequestError(f"is not JSON ({exc})", field="--device-map", value=path) from exc
    is_map = isinstance(found, dict) and all(
        isinstance(v, (int, str)) and not isinstance(v, bool) for v in found.values()
    )
    if not is_map:
        raise RequestError(
            'must be an object of module paths and devices, such as {"": 0, "model.vision_tower": "cpu"}',
            field="--device-map", value=path,
        )  # fmt: skip
    return dict(found)


# Commands -------------------------------------------------------------------------------------------------------------


def run_plan(options: argparse.Namespace) -> int:
    from trimtab.api import plan_request

    plan = plan_request(load_request(options))
    if options.save:
        plan.save(options.save)
    if options.picture:
        from trimtab.plan.picture import draw

        draw(plan, options.picture)
    if options.json:
        _print_json(plan.to_json())
        return 0
    print(plan)
    for path in (options.save, options.picture):
        if path:
            print(f"written: {path}", file=sys.stderr)
    return 0


def run_inspect(options: argparse.Namespace) -> int:
    report = trimtab.inspect(options.adapter, model=options.model)
    if options.json:
        _print_json(report)
    else:
        print(show.adapter_text(report))
    return 0


def run_run(options: argparse.Namespace) -> int:
    answering = _generate_request(options)
    plan = _plan_to_run(options)
    adapter = _adapter_to_use(options.use, list(plan.request.adapters))
    question: dict[str, Any] = {
        "image": options.image or None, "audio": options.audio or None, "system": options.system, "adapter": adapter,
    }  # fmt: skip
    with show.loading_bar(sys.stderr) as progress:
        model = trimtab.load(plan, progress=progress)
    with model:
        if options.json:
            answer = model.answer(options.prompt, **question, **answering)
            _print_json(show.answer_json(answer, plan, model.memory(), adapter))
            return 0
        with closing(model.generate(options.prompt, **question, **answering)) as pieces:  # type: ignore[type-var]
            return _stream(pieces)


def _stream(pieces: Any) -> int:
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print()
    return 0


def _generate_request(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were given, checked before anything is read or loaded."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    GenerateRequest(**given)
    return given


def _plan_to_run(options: argparse.Namespace) -> trimtab.Plan:
    from trimtab.api import plan_request
    from trimtab.runtime.media import SAMPLE_RATE, read_audio, read_image

    for path in options.image:
        read_image(path)
    sound_s = sum(len(read_audio(path)) for path in options.audio) / SAMPLE_RATE
    if not (options.model.endswith(".json") and Path(options.model).is_file()):
        return plan_request(load_request(options, images=len(options.image), audio_s=sound_s))
    for name in _given(options):
        flag = f"--{name.replace('_', '-')}"
        raise RequestError(f"{flag} has no effect on a saved plan", field=flag, hint="Plan again with it")
    return trimtab.Plan.load(options.model)


def _adapter_to_use(use: str | None, names: Sequence[str]) -> str | None:
    if use is None and len(names) > 1:
        raise RequestError("several adapters are given; say which one answers", field="--use", allowed=names)
    if use is not None and use not in names:
        raise RequestError("no adapter of this name is given", field="--use", value=use, allowed=names)
    return use if use is not None else next(iter(names), None)


def run_demo(options: argparse.Namespace) -> int:
    from trimtab.demo import line

    report = line.run((lambda text: None) if options.json else (lambda text: print(text, flush=True)))
    if options.json:
        _print_json(report)
    return 0
