"""`trimtab doctor`: known bugs, predictions for one model, cases, bisection, drafts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.adapter_names import parse_unweighted, without_demo_name
from trimtab.adapters.adapter import read_adapter
from trimtab.checkpoint.folder import find_folder
from trimtab.cli.commands.traces import check_model, run_lanes, run_report, run_trace
from trimtab.cli.flags.flags import (
    MAX_MEMORY,
    Number,
    add_budgets,
    add_dtype,
    check_folder_of,
    pairs,
    read_device_map,
    read_json_object,
)
from trimtab.cli.flags.output import Command, print_json, print_text, saying, show
from trimtab.errors import RequestError
from trimtab.planning.request.max_memory import read_max_memory
from trimtab.process import phases
from trimtab.process.packages import STOCK, install_command, missing
from trimtab.request import DTYPES, QUANTS, check_choice, full_dtype, parse_bytes

STOPPED = 130
# The other flags that each flag needs to have an effect.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "adapter": ("model", "report"), "device_map": ("model", "report"),
    "quant": ("model",), "dtype": ("model",), "gpu_memory": ("model",), "host_memory": ("model",), "max_memory": ("model",),
    "case": ("matrix", "bisect"), "engine": ("matrix",), "pressure": ("matrix",), "timeout": ("matrix",),
    "memory_limit": ("matrix",), "device": ("matrix",), "save": ("matrix",),
    "overwrite": ("drafts",), "lanes": ("drafts",), "with_version": ("bisect",), "confirm": ("bisect",),
}  # fmt: skip


def add(command: Command) -> None:
    """Add the command."""
    examined = command("doctor", run_doctor, "find known bugs of the installed packages, and whose bug a failure is")
    examined.add_argument("model", metavar="MODEL", nargs="?", help="predict the failures of the stock stack with this model")
    examined.add_argument("--trace", metavar="FILE", help="identify a pasted error; - reads standard input")
    examined.add_argument("--report", action="store_true", help="print a block for a question or an issue, without private paths")
    examined.add_argument("--api-key-env", metavar="VARIABLE", help="the environment variable with the key of the server MODEL")
    examined.add_argument("--adapter", action="append", metavar="[NAME=]PATH", help="an adapter for MODEL")
    examined.add_argument("--device-map", metavar="FILE", help="the JSON device map for the stock stack")
    examined.add_argument("--quant", metavar="FORMAT", help="the quantization format for the stock stack")
    add_dtype(examined, "bfloat16")
    add_budgets(examined, "memory to assume as free")
    examined.add_argument("--python", metavar="EXE", help="examine the packages of this Python interpreter")
    examined.add_argument("--probe", action="append", metavar="ID", help="check only this known bug, such as A1; repeatable")
    cases = examined.add_argument_group("cases")
    cases.add_argument("--matrix", action="store_true", help="run the cases, each in its own process")
    cases.add_argument("--case", action="append", metavar="NAME", help="run only this case; repeatable")
    cases.add_argument("--engine", action="append", metavar="ENGINE", help="stock or trimtab (default: both)")
    cases.add_argument("--device", metavar="DEVICE", help="auto, cpu (used in place of the GPU) or cuda (default: auto)")
    cases.add_argument("--pressure", type=Number, metavar="SHARE", help="fill the GPU to this share, such as 0.9")
    cases.add_argument("--timeout", type=Number, metavar="S", help="most seconds per case (default: 120)")
    cases.add_argument("--memory-limit", metavar="SIZE", help="most host memory per case")
    cases.add_argument("--save", metavar="FILE", help="write the runs as JSON, after every case")
    cases.add_argument("--bisect", action="append", metavar="PACKAGE=LOW..HIGH", help="find the release in which --case changes")
    cases.add_argument(
        "--with", dest="with_version", action="append", metavar="PACKAGE=VERSION",
        help="other packages in the environments of --bisect (default: those of the interpreter)",
    )  # fmt: skip
    cases.add_argument("--confirm", action="store_true", help="run both sides of every change of --bisect again")
    written = examined.add_argument_group("issues and reports")
    written.add_argument("--runs", metavar="FILE", help="use these saved runs instead of new ones")
    written.add_argument("--lanes", metavar="FILE", help="a saved report of verify --lanes, for an issue on the merge in --drafts")
    written.add_argument("--drafts", metavar="DIR", help="write one issue per failure, from recorded runs only")
    written.add_argument("--overwrite", action="store_true", help="replace existing drafts")
    written.add_argument("--html", metavar="FILE", help="write one HTML page with everything")


def run_doctor(options: argparse.Namespace) -> int:
    if _asks_server(options):
        return _run_server(options)
    if options.trace is not None:
        return run_trace(options)
    options.adapter_name = None
    if options.adapter is not None:
        options.adapter_name, options.adapter = _only_adapter(options.adapter)
    _check(options)
    if options.report:
        return run_report(options)
    if options.lanes:
        return run_lanes(options)
    report = _examine(options)
    stopped = report["stopped"] or any(one.stopped for one in report["bisections"] or ())
    if options.json:
        print_json({name: _json(value) for name, value in report.items() if name != "document" and value not in (None, ())})
    else:
        show(report["document"])
        if report["html"]:
            print_text(f"\nwritten: {report['html']}")
        if report["stopped"]:
            print_text("\nstopped early: only the cases above were run, and no drafts were written")
    return STOPPED if stopped else 0


def _only_adapter(given: list[str]) -> tuple[str, str]:
    """Return the name and the folder of the one adapter that is examined. Errors: RequestError for several."""
    paths = parse_unweighted(given, field="--adapter")
    if len(paths) > 1:
        raise RequestError("doctor examines one adapter", field="--adapter", value=given[1], hint="Run it once for each")
    return next(iter(paths.items()))


def _check(options: argparse.Namespace) -> None:
    """Raise all errors before anything runs, in the order of all commands: arguments, files, the model, the adapter."""
    for name, needed in _NEEDS.items():
        is_given = getattr(options, name) not in (None, False)
        if is_given and not any(getattr(options, other) for other in needed):
            flag = f"--{name.replace('_', '-')}".removesuffix("-version")
            flags = " or ".join("MODEL" if other == "model" else f"--{other}" for other in needed)
            raise RequestError(f"has no effect without {flags}", field=flag)
    for name in ("gpu_memory", "host_memory", "memory_limit"):
        parse_bytes(getattr(options, name), field_name=f"--{name.replace('_', '-')}")
    if options.dtype is not None:
        check_choice(full_dtype(options.dtype) or "", DTYPES, field_name="dtype")
    if options.max_memory is not None:
        read_max_memory(read_json_object(options.max_memory, "--max-memory", MAX_MEMORY))
    if options.quant is not None:
        check_choice(options.quant, ("auto", *QUANTS), field_name="quant")
    if options.matrix and options.runs:
        raise RequestError("gives runs that were saved; --matrix makes new ones", field="--runs", value=options.runs)
    if options.timeout is not None and options.timeout <= 0:
        raise RequestError("must be above zero", field="--timeout", value=options.timeout)
    if options.case:
        from trimtab.doctor.cases.cases import find_cases

        find_cases(options.case)
    if options.drafts and not (options.matrix or options.runs or options.lanes):
        raise RequestError("drafts require recorded runs", field="--drafts", hint="Add --matrix, --runs FILE or --lanes FILE")
    if options.bisect and (not options.case or len(options.case) != 1):
        raise RequestError("needs exactly one --case", field="--bisect", value=options.bisect)
    if options.device_map is not None:
        read_device_map(options.device_map)
    if options.runs:
        from trimtab.doctor.cases.runner import read_runs

        read_runs(options.runs)
    for flag, path in (("--html", options.html), ("--save", options.save)):
        check_folder_of(path, flag)
    if options.drafts:
        from trimtab.doctor.issues.draft import check_folder

        check_folder(Path(options.drafts), overwrite=options.overwrite)
    check_model(options.model)
    if options.model is not None:
        options.model = without_demo_name(options.model)
        find_folder(options.model)
    if options.adapter is not None:
        read_adapter(options.adapter)


def _examine(options: argparse.Namespace) -> dict[str, Any]:
    from trimtab.machine.environment import read_environment

    report: dict[str, Any] = dict.fromkeys(
        ("trimtab", "environment", "verdicts", "preflight", "runs", "bisections", "drafts", "html", "stopped"), None
    )
    report["environment"] = environment = read_environment(options.python)
    if options.model and not options.matrix:
        report["preflight"] = _preflight(options, environment)
    if options.bisect:
        report["bisections"] = _bisect(options)
    if options.matrix:
        report["runs"], report["stopped"] = _matrix(options, environment)
    elif options.runs:
        from trimtab.doctor.cases.runner import read_runs

        report["runs"] = tuple(read_runs(options.runs)["runs"])
    # After Ctrl-C, no slow work: --runs makes drafts from the saved runs.
    is_other_work = options.bisect or options.matrix or options.runs or report["preflight"] is not None
    if not report["stopped"] and (not is_other_work or options.probe or options.drafts or options.html):
        report["verdicts"] = _probes(options)
    if not is_other_work and options.python is None:
        from trimtab.doctor.report import own_verdict

        report["trimtab"] = own_verdict(environment)
    if options.drafts and not report["stopped"]:
        from trimtab.doctor.issues.draft import make_drafts

        drafts = make_drafts(
            report["runs"], environment, verdicts=report["verdicts"] or (), python=options.python, say=saying(options)
        )
        report["drafts"] = drafts.written_to(options.drafts, overwrite=options.overwrite)
    if options.html or not options.json:
        from trimtab.doctor.report import document_of, write_report

        report["document"] = document = document_of(
            environment, own="" if report["trimtab"] is None else report["trimtab"].text, verdicts=report["verdicts"] or (),
            preflight=report["preflight"], bisections=report["bisections"] or (), records=report["runs"] or (),
            drafts=report["drafts"],
        )  # fmt: skip
        report["html"] = str(write_report(options.html, document)) if options.html else None
    return report


def _probes(options: argparse.Namespace) -> Any:
    from trimtab.doctor.probes.runner import run_probes

    absent = missing(STOCK) if options.python is None else ()
    if absent:
        is_one = len(absent) == 1
        print_text(
            f"{' and '.join(absent)} {'is' if is_one else 'are'} not installed here: probes that need "
            f"{'it' if is_one else 'them'} will say unknown ({install_command(absent)})", file=sys.stderr,
        )  # fmt: skip
    progress = phases.counting("checking known bugs,")
    return run_probes(python=options.python, ids=tuple(options.probe or ()), progress=progress)


def _preflight(options: argparse.Namespace, environment: Any) -> Any:
    from trimtab.doctor.preflight.preflight import preflight

    phases.begin("predicting failures of the stock stack")
    device_map = None if options.device_map is None else read_device_map(options.device_map)
    max_memory = None
    if options.max_memory is not None:
        max_memory = read_json_object(options.max_memory, "--max-memory", MAX_MEMORY)
    return preflight(
        options.model, adapter=options.adapter, device_map=device_map, quant=options.quant or "auto", max_memory=max_memory,
        dtype=full_dtype(options.dtype) or "bfloat16",
        gpu_memory=options.gpu_memory, host_memory=options.host_memory, python=options.python, environment=environment,
        called=options.adapter_name,
    )  # fmt: skip


def _matrix(options: argparse.Namespace, environment: Any) -> tuple[tuple[Any, ...], bool | None]:
    """Return the finished runs, and True if Ctrl-C ended them early."""
    from trimtab.doctor.cases.runner import run_matrix, saving

    arguments: dict[str, Any] = {
        "cases": options.case, "pressure": options.pressure, "python": options.python, "model": options.model,
        "adapter": options.adapter, "memory_bytes": parse_bytes(options.memory_limit, field_name="--memory-limit"),
    }  # fmt: skip
    for name, value in (("timeout_s", options.timeout), ("engines", options.engine), ("device", options.device)):
        if value is not None:
            arguments[name] = value
    runs: list[Any] = []
    keep = saving(options.save, environment) if options.save else None

    def on_record(record: Any) -> None:
        runs.append(record)
        if keep is not None:
            keep(record)

    try:
        phases.begin("running the cases")
        run_matrix(**arguments, on_record=on_record, progress=phases.counting("running the cases,"))
    except KeyboardInterrupt:
        if not runs:
            raise
        return tuple(runs), True
    return tuple(runs), None


def _bisect(options: argparse.Namespace) -> Any:
    from trimtab.doctor.bisect.bisect import bisect_each, parse_range

    ranges = [parse_range(text) for text in options.bisect]
    return bisect_each(
        ranges, case=options.case[0], python=options.python, model=options.model, adapter=options.adapter,
        say=saying(options), confirm=options.confirm,
        others=pairs(options.with_version or [], "--with", "PACKAGE=VERSION", first=True),
    )  # fmt: skip


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return value.to_json() if hasattr(value, "to_json") else value


# With a server's address, all other flags concern this machine and a model's files.
_SERVER_FLAGS = ("api_key_env", "json", "color", "threads", "help")


def _asks_server(options: argparse.Namespace) -> bool:
    """Return whether MODEL is a server's address. Errors: RequestError for a flag without effect with an address, or without
    one."""
    is_server = options.model is not None and options.model.startswith(("http://", "https://"))
    if not is_server:
        if options.api_key_env is not None:
            raise RequestError("has no effect without a server's address", field="--api-key-env")
        return False
    for action in options.parser._actions:
        is_given = getattr(options, action.dest, action.default) != action.default
        if action.option_strings and action.dest not in _SERVER_FLAGS and is_given:
            raise RequestError("has no effect on a server's address", field=action.option_strings[-1])
    return True


def _run_server(options: argparse.Namespace) -> int:
    """Print the kind of server and the known facts about it."""
    from trimtab.doctor.servers.report import examine
    from trimtab.verification.server.client import read_key

    phases.begin("asking the server")
    report = examine(options.model, key=read_key(options.api_key_env))
    if options.json:
        print_json(report.to_json())
    else:
        show(report)
    return 0
