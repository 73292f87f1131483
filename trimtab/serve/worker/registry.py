"""Which models does a server have: one on the command line, or several in a TOML file?"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trimtab.adapter_names import is_lora_file, split_weight, without_demo_name
from trimtab.adapters.adapter import read_adapter
from trimtab.adapters.file import check_is_adapter
from trimtab.checkpoint.folder import read_loadable
from trimtab.checkpoint.names import near_names
from trimtab.checkpoint.unreadable import address_hint, request_refusal
from trimtab.errors import AdapterError, CheckpointError, RequestError, TrimtabError, choices_text
from trimtab.machine import machine_cache
from trimtab.planning.values.byte_sizes import check_pool
from trimtab.process.json_file import JsonError, read_bytes
from trimtab.request import DECODE_MODES, LoadRequest, check_choice, parse_bytes
from trimtab.serve.contract.settings import Limits, Settings
from trimtab.serve.worker.row_count import PLANNED, check_rows

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
MEDIA = ("image", "audio")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model of a server.

    request: to plan, without adapters. rows: requests decoded together (None: as `row_count.plan_rows` plans).
    adapters: name -> folder. kept: never removed from the model. resident_limit: how many adapters may be on it at once
    (None: as many as fit). idle_unload_s: the worker is stopped after this many idle seconds (None: never). supports:
    which of "image" and "audio" clients may send; modalities that the model lacks are always refused. decode: as for
    `trimtab.load`. copies: workers for the same model, each with this many rows. weights: of adapters with another
    weight than 1 if a request names them alone or in a mix without a number. stop_at_turn_end: whether answers end at
    the chat template's end-of-turn token (None: if the tokenizer names that token).
    """

    name: str
    request: LoadRequest
    adapters: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    rows: int | None = None
    resident_limit: int | None = None
    idle_unload_s: float | None = None
    supports: tuple[str, ...] = MEDIA
    decode: str = "auto"
    copies: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)
    stop_at_turn_end: bool | None = None

    def __post_init__(self) -> None:
        check_choice(self.decode, DECODE_MODES, field_name="decode")
        if not _NAME.match(self.name):
            raise RequestError("a model name has letters, digits and ._/- only", field="name", value=self.name)
        # The worker, and the list of folders that clients never see, get the bundled model's path.
        object.__setattr__(self, "request", replace(self.request, model=without_demo_name(self.request.model)))
        LoadRequest(model=self.request.model, adapters=dict(self.adapters))  # checks the names
        for name in self.kept:
            if name not in self.adapters:
                raise RequestError(
                    "is not an adapter of this model", field="keep", value=name,
                    allowed=tuple(self.adapters), near=near_names(name, self.adapters),
                )  # fmt: skip
        check_rows(self.rows)
        check_pool(self.request.kv_tokens, rows=self.rows)
        if self.resident_limit is not None and self.resident_limit < max(1, len(self.kept)):
            raise RequestError(
                f"must be at least {max(1, len(self.kept))}: every kept adapter stays on the model", field="resident_adapters",
                value=self.resident_limit,
            )  # fmt: skip
        if self.idle_unload_s is not None and self.idle_unload_s <= 0:
            raise RequestError("must be above zero", field="idle_unload_s", value=self.idle_unload_s)

    @cached_property
    def expected_rows(self) -> int:
        """The most rows of all copies together, before they have planned."""
        return self.copies * (PLANNED[0] if self.rows is None else self.rows)

    def settings(self, queue_limit: int, limits: Limits) -> dict[str, Any]:
        """Return the settings of the worker. limits: of requests, some of which bound its memory."""
        # An absolute path, so that it can be recognized in the worker's messages.
        request = replace(self.request, model=in_full(self.request.model))
        adapters = {name: in_full(path) for name, path in self.adapters.items()}
        return {
            "name": self.name, "request": request.to_json(), "adapters": adapters, "kept": list(self.kept),
            "rows": self.rows, "queue_limit": queue_limit, "resident_limit": self.resident_limit,
            "prompt_tokens": limits.prompt_tokens, "decode": self.decode,
            "stop_at_turn_end": self.stop_at_turn_end,
            "media": {
                "kinds": self.supports, "request_pixels": limits.request_pixels, "request_audio_s": limits.request_audio_s,
                "all_body_bytes": limits.all_body_bytes,
            },
        }  # fmt: skip


# Keys of a model's table -> the types of their values: its own ones, and those that are fields of LoadRequest.
_OWN: Mapping[str, tuple[type, ...]] = {
    "path": (str,), "plan": (str,), "adapters": (dict,), "keep": (list,), "rows": (int,), "resident_adapters": (int,),
    "idle_unload_s": (int, float), "supports_image": (bool,), "supports_audio": (bool,), "decode": (str,),
    "stop_at_turn_end": (bool,),
}  # fmt: skip
_PLACEMENT: Mapping[str, tuple[type, ...]] = {
    "quant": (str,), "dtype": (str,), "context": (int,), "gpu_memory": (str, int), "host_memory": (str, int), "images": (int,),
    "audio_s": (int, float), "place": (dict,), "device_map": (dict,), "keep_unquantized": (list,), "device": (str,),
    "offload_dir": (str,), "head": (str,), "prefix_cache": (str, int), "batch_invariant": (bool,), "kv_tokens": (int,),
    "kv": (str,), "answer_tokens": (int,), "experts": (str,),
}  # fmt: skip
_KINDS = {**_OWN, **_PLACEMENT}
# Names of those fields, where they differ.
_FIELDS = {
    "context": "context_tokens", "gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes",
    "prefix_cache": "prefix_cache_bytes",
}  # fmt: skip

_WORDS: Mapping[type, str] = {
    str: "a text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "a table",
}  # fmt: skip


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """Return a TOML file. Errors: RequestError if it cannot be read, CheckpointError if it is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(read_bytes(path, "toml").decode("utf-8"))
    except OSError as exc:
        raise request_refusal(field, path, exc) from exc
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"is not TOML ({exc})", path=path) from exc


def read_registry(path: str | Path, *, is_config: bool = False) -> tuple[ServedModel, ...]:
    """Return the models of a registry file. is_config: its other keys are those of `config_file`, which has read them.

    Errors: RequestError if it cannot be read, CheckpointError with every problem. Relative paths are relative to the file.
    """
    document = read_toml(path := Path(path), "registry")
    problems = [f"unknown table or key {key!r} (known: models)" for key in document if key != "models" and not is_config]
    tables = document.get("models")
    models = []
    if not isinstance(tables, dict) or not tables:
        problems.append("has no [models.NAME] table")
        tables = {}
    for name, table in tables.items():
        model, wrong = _model(name, table, path.parent)
        problems += wrong
        if model is not None:
            models.append(model)
    refuse(path, [*problems, *_shared_names(models)])
    return tuple(models)


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError with every problem of a file, if there are any."""
    if problems:
        lines = "\n".join(f"  - {text}" for text in problems)
        raise CheckpointError(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}\n{lines}", path=path)


def check_present(models: Sequence[ServedModel]) -> None:
    """Raise CheckpointError with every model and adapter that is missing or incomplete on this machine, AdapterError
    for an unusable one, RequestError for a device that is not there. Reads only headers, and needs no torch."""
    problems, devices = [], []
    for model in models:
        try:
            if model.request.card is None:
                machine_cache.find_machine(model.request.device)
        except RequestError as exc:
            devices.append(exc)
            problems.append(f"model {model.name}: {exc}")
        try:
            read_loadable(model.request.model)
        except CheckpointError as exc:
            problems.append(f"model {model.name}: {exc}")
        for name, path in model.adapters.items():
            try:
                if not _is_adapter_path(path):
                    check_is_adapter(path, model=model.request.model)
            except AdapterError as exc:
                problems.append(f"adapter {name} of {model.name}: {path}: {exc.problems[0]}{exc.hint and f'. {exc.hint}'}")
    if devices and len(devices) == len(problems):
        raise devices[0]
    if problems:
        raise CheckpointError("nothing is served\n" + "\n".join(f"  - {text}" for text in problems), path="trimtab serve")
    first_uses = {path: (name, model.name) for model in reversed(models) for name, path in model.adapters.items()}
    for path, (name, model_name) in first_uses.items():
        try:
            read_adapter(path)
        except AdapterError as exc:  # over HTTP, an error has no path, so the name identifies the adapter
            told = [f"adapter {name} of {model_name}: {problem}" for problem in exc.problems]
            raise AdapterError(path, told, hint=exc.hint) from exc


def _model(name: str, table: Any, folder: Path) -> tuple[ServedModel | None, list[str]]:
    if not isinstance(table, dict):
        return None, [f"models.{name} is not a table"]
    problems = [f"models.{name}.{text}" for text in _table_problems(table, folder)]
    if problems:
        return None, problems
    try:
        return _made(name, table, folder), []
    except TrimtabError as exc:
        return None, [f"models.{name}: {exc}"]


def _table_problems(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return all problems of one model's table, each as "key: problem"."""
    problems = []
    for key, value in table.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            problems.append(f"{key}: unknown key{choices_text(tuple(_KINDS), near_names(key, _KINDS))}")
        elif not _is_of(value, kinds):
            problems.append(f"{key}: must be {' or '.join(_WORDS.get(kind, kind.__name__) for kind in kinds)}")
        elif key in ("keep", "keep_unquantized") and not all(isinstance(item, str) for item in value):
            problems.append(f"{key}: must be a list of texts")
        elif key == "adapters":
            problems += [f"adapters.{item}: {why}" for item, path in value.items() if (why := _folder_problem(path, folder))]
    if ("path" in table) == ("plan" in table):
        problems.append("path: give either path or plan")
    if "plan" in table:
        problems += [f"{key}: has no effect with a plan" for key in table if key in _PLACEMENT]
    return problems


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _folder_problem(path: Any, folder: Path) -> str | None:
    if not isinstance(path, str):
        return "must be a folder's path"
    try:
        found = _weighted(path, folder)[0]
        if not _is_adapter_path(found):
            check_is_adapter(found if address_hint(found) else folder.absolute() / found)
    except RequestError as exc:
        return str(exc)
    except AdapterError as exc:
        return f"{exc.problems[0]} ({path}){exc.hint and f'. {exc.hint}'}"
    return None


def _is_adapter_path(path: str) -> bool:
    return os.path.isdir(path) or is_lora_file(path)


def _weighted(text: str, folder: Path) -> tuple[str, float]:
    """Return the folder and weight of `PATH[:WEIGHT]`, the path in the form for the worker."""
    if _is_adapter_path(_path(text, folder)):
        return _path(text, folder), 1.0
    path, weight = split_weight(text, field="adapters")
    return _path(path, folder), weight


def _made(name: str, table: Mapping[str, Any], folder: Path) -> ServedModel:
    weighted = {key: _weighted(value, folder) for key, value in table.get("adapters", {}).items()}
    adapters = {key: path for key, (path, _) in weighted.items()}
    if "plan" in table:
        from trimtab.planning import Plan

        request = Plan.load(_path(table["plan"], folder)).request
        adapters = {**request.adapters, **adapters}
        request = replace(request, adapters={})
    else:
        values = {_FIELDS.get(key, key): value for key, value in table.items() if key in _PLACEMENT}
        for key in ("gpu_memory_bytes", "host_memory_bytes", "prefix_cache_bytes"):
            if key in values:
                values[key] = parse_bytes(values[key], field_name=key.removesuffix("_bytes"))
        values["keep_unquantized"] = tuple(values.get("keep_unquantized", ()))
        if "offload_dir" in values:
            values["offload_dir"] = str(folder / values["offload_dir"])
        request = LoadRequest(model=_path(table["path"], folder), **({"head": "auto", "dtype": "auto"} | values))
    supports = tuple(kind for kind in MEDIA if table.get(f"supports_{kind}", True))
    return ServedModel(
        name=name, request=request, adapters=adapters, kept=tuple(table.get("keep", ())), rows=table.get("rows"),
        resident_limit=table.get("resident_adapters"), idle_unload_s=table.get("idle_unload_s"), supports=supports,
        decode=table.get("decode", "auto"), weights={key: weight for key, (_, weight) in weighted.items() if weight != 1},
        stop_at_turn_end=table.get("stop_at_turn_end"),
    )  # fmt: skip


def in_full(path: str) -> str:
    """Return the absolute path of a local file or folder; a hub id is returned unchanged."""
    return os.path.abspath(path) if Path(path).exists() else path


def _path(value: Any, folder: Path) -> str:
    """Return a path in the form for the worker: relative paths from the file's folder, a hub id unchanged."""
    text = without_demo_name(str(value), folder)
    beside = folder / text
    return str(beside) if beside.exists() else text


def _shared_names(models: list[ServedModel]) -> list[str]:
    """Return a problem for every ambiguous name."""
    names = {model.name for model in models}
    return [
        f"models.{model.name}.adapters.{name}: is also the name of a model"
        for model in models
        for name in model.adapters
        if name in names
    ]


def check_sharing(models: Sequence[ServedModel], settings: Settings) -> None:
    """Raise RequestError if clients should share a prefix cache but no model has one."""
    if settings.share_prefixes and not any(model.request.prefix_cache_bytes for model in models):
        raise RequestError(
            "has no effect without a prefix cache", field="share_prefix_cache", value=True,
            hint="Give a model a size for it (prefix_cache), or leave it out",
        )  # fmt: skip
