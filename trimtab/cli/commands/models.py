"""`trimtab models`, `adapters` and `completion`: lists of local files, with the models that fit this machine."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import shtab

from trimtab.adapter_names import BASE, FOLDER, without_demo_name
from trimtab.adapters.adapter import describe, match_adapter, read_adapter
from trimtab.api import modules_of, plan_request
from trimtab.checkpoint.folder import CONFIG, hub_cache, read_checkpoint
from trimtab.checkpoint.unreadable import path_hint
from trimtab.cli.flags.flags import add_budgets, add_device, add_dtype, load_request
from trimtab.cli.flags.output import Command, print_json, print_text, show
from trimtab.errors import AdapterError, RequestError, TrimtabError, gib
from trimtab.formats.packed import split_packed
from trimtab.gguf.companion import is_model_file
from trimtab.gguf.header import file_kind
from trimtab.planning.values.execution import formats_on_gpu
from trimtab.report.document import Document, Table, Text
from trimtab.request import DECODE_MODES, HEAD_CHOICES, KV_FORMS, QUANTS, REQUANTIZE, SHORT_DTYPES, LoadRequest

SHELLS = ("bash", "zsh", "fish")
ADAPTER_CONFIG = "adapter_config.json"
# Limits of the search for models and adapters: depth below DIR, and number of folders. A home folder is not searched
# completely.
DEPTH, MOST_FOLDERS = 3, 10_000
# The flags of `models` that decide its plans.
PLACED = ("gpu_memory", "host_memory", "max_memory", "dtype", "device")
# Completions of a shell by metavar.
_FILES = {"FILE": shtab.FILE, **dict.fromkeys(("FOLDER", "MODEL", "ADAPTER", "DIR", "OUT"), shtab.DIRECTORY)}
# NAME=PATH: the folders after the equals sign. bash treats it as a separate word, which its default completion handles.
_NAMED_FOLDER: dict[str, str | dict[str, str]] = {
    "zsh": "{compset -P '*='; _files -/}",
    "fish": "(__fish_complete_directories (commandline -ct | string replace -r '^[^=]*=' '') | "
    "string replace -r '^' (commandline -ct | string match -r '^[^=]*=|^'))",
}
# Completed values by flag; the help of a flag lists the other accepted values.
_VALUES = {
    "--quant": QUANTS, "--head": HEAD_CHOICES, "--dtype": SHORT_DTYPES, "--decode": DECODE_MODES,
    "--device": ("auto", "cpu", "cuda"), "--kv": KV_FORMS, "--log-format": ("text", "json"),
    "--log-level": ("debug", "info", "warning", "error"), "--requantize": REQUANTIZE,
}  # fmt: skip
# shtab's script for zsh distinguishes `eval` and a folder of functions; a sourced script is a third case.
_ZSH_EVAL, _ZSH_EVAL_OR_SOURCE = "$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)"


def add(command: Command) -> None:
    """Add the three commands."""
    models = command("models", run_models, "list the models of the cache or a folder, and which of them fit here")
    models.add_argument("folder", metavar="DIR", nargs="?", help="the folder to search (default: the hub's cache)")
    models.add_argument("--quick", action="store_true", help="list without planning")
    add_budgets(models)
    add_dtype(models, "bfloat16; the plan decides on GPUs without it")
    add_device(models, "where they would run: ")
    adapters = command("adapters", run_adapters, "list the adapters below a folder, and which models they fit")
    adapters.add_argument("folder", metavar="DIR", help="the folder to search")
    adapters.add_argument(
        "--model", action="append", default=[], metavar="MODEL", help="match every adapter with this model; repeatable"
    )
    completion = command("completion", run_completion, "print a completion script for a shell")
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


# Models ---------------------------------------------------------------------------------------------------------------


def run_models(options: argparse.Namespace) -> int:
    folder = hub_cache() if options.folder is None else _listed(options.folder)
    for name in PLACED if options.quick else ():
        if getattr(options, name) is not None:
            raise RequestError("has no effect with --quick", field=f"--{name.replace('_', '-')}")
    options.model = ""
    request = None if options.quick else load_request(options, head="auto", dtype="auto")
    models = [_model(name, request) for name in _model_names(folder)]
    if options.json:
        print_json({"folder": str(folder), "models": models})
        return 0
    if not models:
        print_text(f"no models in {folder}", file=sys.stderr)
    else:
        head = ("model", "class", "size", "format", "fits")
        computed = {form["name"]: form["on_gpu"] for one in models for form in one.get("formats", ())}
        blocks = [Table(head, [_model_row(one) for one in models], has_note=True)]
        show(Document("", blocks + [Table(("format", "on a GPU"), sorted(computed.items()), has_note=True)] * bool(computed)))
    return 0


def _model_names(folder: Path) -> list[str]:
    """Return the checkpoints of a folder, hub ids if it is the hub's cache."""
    cached = [path for path in _sorted(folder) if path.name.startswith("models--")]
    if cached:
        is_default = folder.resolve() == hub_cache().resolve()
        return [path.name.removeprefix("models--").replace("--", "/", 1) if is_default else str(path) for path in cached]
    found = [path.parent for path in _below(folder, CONFIG) if not (path.parent / ADAPTER_CONFIG).is_file()]
    packed = _below(folder, "*.gguf")
    found += {file.parent for file in packed if file_kind(file) == "mmproj"} - set(found)  # models for images, of two files
    return [str(path) for path in sorted((*found, *filter(is_model_file, packed)))]


def _model(name: str, request: LoadRequest | None) -> dict[str, Any]:
    """Return the facts about a model. request: its plan's request, None for no plan."""
    about: dict[str, Any] = {"model": name}
    try:
        checkpoint = read_checkpoint(name)
        if not checkpoint.has_weights:
            return about | {"fits": False, "reason": "it has no safetensors weights"}
        about |= {
            "folder": str(checkpoint.folder), "class": (checkpoint.config.get("architectures") or ["-"])[0],
            "bytes": sum(entry.nbytes for entry in checkpoint.tensors.values()),
        }  # fmt: skip
        formats = formats_on_gpu(split_packed(checkpoint)[1])
        about["format"] = ", ".join(one["name"] for one in formats) or _dtype(checkpoint.tensors.values())
        about["formats"] = formats
        if request is None:
            return about
        plan = plan_request(replace(request, model=name))
    except TrimtabError as exc:
        return about | {"fits": False, "reason": str(exc).splitlines()[0]}
    tiers = Counter(plan.tiers().values())
    return about | {
        "fits": True, "device": plan.execution_device, "quant": plan.request.quant, "gpu_bytes": plan.gpu_peak_bytes,
        "host_bytes": plan.host_peak_bytes, "tiers": dict(sorted(tiers.items())),
    }  # fmt: skip


def _dtype(entries: Any) -> str:
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[str(entry.dtype)] += entry.nbytes
    return sizes.most_common(1)[0][0] if sizes else "-"


def _model_row(one: dict[str, Any]) -> tuple[str, ...]:
    size = gib(one["bytes"]) if "bytes" in one else "-"
    if "fits" not in one:
        fits = "not planned"
    elif not one["fits"]:
        fits = f"no: {one['reason']}"
    else:
        away = ", ".join(f"{count} {tier}" for tier, count in one["tiers"].items() if tier != "resident")
        memory = f"{gib(one['gpu_bytes'])} on {one['device']}"
        fits = f"{one['quant']}, {memory}" + (f", blocks elsewhere: {away}" if away else "")
    formats = ", ".join(f"{form['name']} ({form['bits_per_value']:.2f} bits)" for form in one.get("formats", ()))
    return one["model"], one.get("class", "-"), size, formats or one.get("format", "-"), fits


# Adapters -------------------------------------------------------------------------------------------------------------


def run_adapters(options: argparse.Namespace) -> int:
    folder = _listed(options.folder)
    anatomies = {model: modules_of(read_checkpoint(model)) for model in options.model}
    adapters = [_adapter(path.parent, folder, anatomies) for path in _below(folder, ADAPTER_CONFIG)]
    if options.json:
        print_json({"folder": str(folder), "adapters": adapters})
        return 0
    if not adapters:
        packed = sorted(file.name for file in folder.rglob("*.gguf"))
        note = f"; it has GGUF files ({packed[0]}), and trimtab reads PEFT's folders" if packed else ""
        print_text(f"no adapters below {folder}{note}", file=sys.stderr)
        return 0
    heads = ("adapter", "made for", "rank", "size", *options.model)
    errors = [f"{one['adapter']}: {one['error']}" for one in adapters if "error" in one]
    show(Document("", [Table(heads, [_adapter_row(one, options.model) for one in adapters]), *map(Text, errors)]))
    return 0


def _adapter(path: Path, folder: Path, anatomies: dict[str, Any]) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    try:
        file = read_adapter(str(path))
    except TrimtabError as exc:
        return {"adapter": path.name if name == "." else name, "path": str(path), "error": _first_line(exc)}
    report = describe(file, None)
    about: dict[str, Any] = {
        "adapter": path.name if name == "." else name, "path": str(path), "base_model": report["base_model"],
        "rank": report["config"].get("r"), "bytes": report["bytes"],
    }  # fmt: skip
    fits: dict[str, dict[str, Any]] = {}
    for model, anatomy in anatomies.items():
        try:
            fits[model] = {"fits": True, "modules": len({one.module_path for one in match_adapter(file, anatomy).targets})}
        except AdapterError as exc:
            fits[model] = {"fits": False, "problems": len(exc.problems), "reason": exc.problems[0]}
    return about | ({"models": fits} if anatomies else {})


def _first_line(exc: TrimtabError) -> str:
    return exc.problems[0] if isinstance(exc, AdapterError) else str(exc).splitlines()[0]


def _adapter_row(one: dict[str, Any], models: Sequence[str]) -> tuple[str, ...]:
    if "error" in one:
        return (one["adapter"], "cannot be used", "-", "-", *("no" for _ in models))
    fits = [one["models"][model] for model in models]
    fit_texts = [f"fits, {f['modules']} modules" if f["fits"] else f"no, {f['problems']} problems" for f in fits]
    return (one["adapter"], str(one["base_model"] or "-"), str(one["rank"] or "-"), gib(one["bytes"]), *fit_texts)


# Both -----------------------------------------------------------------------------------------------------------------


def _listed(text: str) -> Path:
    """Return the folder to list: that of the whole demo for its name. Errors: RequestError for none."""
    folder = FOLDER if without_demo_name(text) == str(BASE) else Path(text)
    if not folder.is_dir():
        raise RequestError("no such folder", field="DIR", value=text, hint=path_hint(text, holds=""))
    return folder


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _below(folder: Path, name: str) -> list[Path]:
    """Return the files of a name or pattern in a folder and up to DEPTH below it; links to folders are not followed below it."""
    paths: list[Path] = []
    for count, (at, folders, files) in enumerate(os.walk(folder)):
        path = Path(at)
        if count >= MOST_FOLDERS:
            print_text(f"stopped after {MOST_FOLDERS} folders", file=sys.stderr)
            break
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        paths += [path / one for one in sorted(fnmatch.filter(files, name))]
        if len(path.relative_to(folder).parts) >= DEPTH:
            folders.clear()
    return paths


# Completion -----------------------------------------------------------------------------------------------------------


def run_completion(options: argparse.Namespace) -> int:
    top = options.top
    commands = next(action for action in top._actions if action.dest == "name").choices
    for parser in commands.values():
        for action in parser._actions:
            kind = next((kind for word, kind in _FILES.items() if word in str(action.metavar or "").split("|")), None)
            if "PATH" in str(action.metavar):
                kind, action.metavar = _NAMED_FOLDER, "NAME=PATH"  # zsh reads brackets and colons of a metavar
            if kind is not None:
                action.complete = kind
            for flag in action.option_strings:
                action.choices = _VALUES.get(flag, action.choices)
    script = shtab.complete(top, shell=options.shell).replace(_ZSH_EVAL, _ZSH_EVAL_OR_SOURCE)
    script = script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F")
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print_text(script)
    return 0
