"""What is the configuration for Ray Serve, as plain values and as a file?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError
from trimtab.request import LoadRequest
from trimtab.serve.contract.settings import Limits, Settings
from trimtab.serve.worker.registry import ServedModel

# Keys come from the command line or from this variable; on a cluster only from this variable.
KEY_VARIABLE, ADMIN_KEY_VARIABLE = "TRIMTAB_API_KEY", "TRIMTAB_ADMIN_KEY"
IMPORT_PATH = "trimtab.serve.ray.deploy:application"
NAME = "trimtab"
# The name of the HTTP deployment; no model's name begins like this.
FRONT = "_front"
_KEYS = {"api_keys": KEY_VARIABLE, "admin_keys": ADMIN_KEY_VARIABLE}
_TUPLES = (*_KEYS, "allow_fetch", "cors_origins")

HEAD = "".join(f"# {line}\n" for line in (
    "`serve deploy THIS_FILE` on a running Ray cluster. trimtab[ray] has to be installed on every node, and every node has to",
    "find the same models and adapters under the same paths. Keys are not in here: start Ray on each node with",
    f"{KEY_VARIABLE} in its environment, and {ADMIN_KEY_VARIABLE} to load adapters over HTTP.",
    "replicas: the fewest and the most copies of each model. gpus, cpus: what one copy takes.",
))  # fmt: skip


def read_replicas(text: str) -> tuple[int, int]:
    """Return the fewest and the most copies in "3" or "1..4". Errors: RequestError."""
    low, dots, high = text.partition("..")
    try:
        replicas = int(low), int(high if dots else low)
    except ValueError:
        replicas = (0, 0)
    if not 1 <= replicas[0] <= replicas[1]:
        raise RequestError("must be 1 or more, as N or LOW..HIGH", field="--replicas", value=text)
    return replicas


def arguments_of(
    models: Sequence[ServedModel], settings: Settings, *, replicas: tuple[int, int] = (1, 1), gpus: float | None = None,
    cpus: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the inputs of an application, as plain values. Paths that exist here become absolute.

    replicas: fewest and most copies of each model. gpus, cpus: one copy's share (gpus None: one for each copy of a model that may
    use one, if Ray has any). Errors: RequestError for settings without effect or without support on Ray.
    """
    if not cpus > 0:
        raise RequestError("must be above zero", field="--cpus-per-replica", value=cpus)
    if gpus is not None and (gpus < 0 or (gpus > 1 and gpus != int(gpus))):
        raise RequestError("must be zero, a part of one, or a whole number", field="--gpus-per-replica", value=gpus)
    for model in models:
        _check(model, gpus)
    shown = {item.name: _plain(getattr(settings, item.name)) for item in fields(Settings)}
    root = settings.adapter_root and _path(settings.adapter_root)
    shown |= {"key_limits": {}, "limits": _plain(asdict(settings.limits)), "adapter_root": root}
    tables = [_table(model) for model in models]
    return {"models": tables, "settings": shown, "replicas": list(replicas), "gpus": _plain(gpus), "cpus": _plain(cpus)}


def _check(model: ServedModel, gpus: float | None) -> None:
    device, field = model.request.device, "--gpus-per-replica"
    if model.idle_unload_s is not None:
        raise RequestError("has no effect on Ray, which stops copies itself", field="idle_unload", value=model.name)
    if model.weights:
        name, weight = next(iter(model.weights.items()))
        raise RequestError("not supported: the weight of an adapter with --ray", field="--adapter", value=f"{name}:{weight:g}")
    if device.startswith("cuda:"):
        raise RequestError("Ray gives each copy a separate GPU; use cuda", field="device", value=device)
    if device == "cpu" and gpus:
        raise RequestError("has no effect on a model that is kept on the CPU", field=field, value=gpus)
    if device == "cuda" and gpus == 0:
        raise RequestError("Ray hides every GPU from a copy that requests none", field=field, value=gpus)
    if gpus is not None and 0 < gpus < 1 and model.request.gpu_memory_bytes is None:
        raise RequestError("copies that share a GPU need a budget each", field="gpu_memory", value=None)


def _table(model: ServedModel) -> dict[str, Any]:
    request = replace(model.request, model=_path(model.request.model))
    if request.offload_dir is not None:
        request = replace(request, offload_dir=str(Path(request.offload_dir).absolute()))
    table = {item.name: _plain(getattr(model, item.name)) for item in fields(ServedModel) if item.name != "request"}
    adapters = {name: _path(path) for name, path in model.adapters.items()}
    return {**table, "request": _plain(request.to_json()), "adapters": adapters}


def _path(path: str | Path) -> str:
    """Return a path that other processes can use; a text that is no path here, such as a hub id, unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, float) else value  # YAML takes no subclass of float


def read_arguments(arguments: Mapping[str, Any]) -> tuple[list[ServedModel], Settings]:
    """Return models and settings of `arguments_of`'s values, with this machine's key. Errors: RequestError."""
    models = []
    for table in arguments["models"]:
        values = {**table, "request": LoadRequest.from_json(table["request"])}
        values |= {"kept": tuple(table["kept"]), "supports": tuple(table["supports"])}
        models.append(ServedModel(**values))
    settings = {**arguments["settings"], "limits": Limits(**arguments["settings"]["limits"])}
    settings["adapter_root"] = None if settings["adapter_root"] is None else Path(settings["adapter_root"])
    settings |= {name: tuple(settings.get(name, ())) for name in _TUPLES}
    for name, variable in _KEYS.items():
        key = os.environ.get(variable)
        if key and key not in settings[name]:
            settings[name] = (*settings[name], key)
    return models, Settings(**settings)


def gpus_of(arguments: Mapping[str, Any], device: str) -> float:
    """Return the number of GPUs that one copy of a model requests. device: as in its request."""
    return 0.0 if device == "cpu" else float(arguments["gpus"] or 0)


def config(arguments: Mapping[str, Any]) -> str:
    """Return the file for `serve deploy`, in YAML, without keys. Errors: RequestError for a port of 0."""
    import yaml

    settings = {**arguments["settings"], **{name: [] for name in _KEYS}}
    if settings["port"] == 0:
        raise RequestError("a file names the port", field="port", value=0)
    is_cpu = all(table["request"].get("device") == "cpu" for table in arguments["models"])
    gpus = (0 if is_cpu else 1) if arguments["gpus"] is None else arguments["gpus"]
    value = {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings["host"], "port": settings["port"]},
        "applications": [{
            "name": NAME, "route_prefix": "/", "import_path": IMPORT_PATH,
            "args": {**arguments, "gpus": gpus, "settings": settings},
        }],
    }  # fmt: skip
    return HEAD + str(yaml.safe_dump(value, sort_keys=False, width=120))


def deployment_name(model: str) -> str:
    """Return Ray's name of a model's copies: the model's name with file-name characters only ("+" is in no model's name)."""
    return model.replace("/", "+")
