"""Which modules, dtypes and skip rules does a model have as an interpreter's stock stack builds it?"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.errors import RequestError, TrimtabError
from trimtab.machine.machine_cache import read_anatomy, write_anatomy
from trimtab.process.runner import DONE, run_inside

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class OwnTensor:
    """A parameter or buffer that a module owns, in the unquantized model. tied_to: the first tensor_path of its tied group."""

    name: str
    numel: int
    dtype: str
    is_buffer: bool
    tied_to: str | None


@dataclass(frozen=True)
class ModuleShape:
    """A module of the empty model, with or without tensors, in the order of `named_modules`."""

    module_path: str
    class_name: str
    tensors: tuple[OwnTensor, ...]


@dataclass(frozen=True)
class ModelShape:
    """A model as the stock stack builds it.

    quant: the requested format, resolved. skipped_by_key: module_path
    of a linear -> the map's key that prevents its quantization, by the installed rule. loaded_to: tensor_path ->
    device, for tensors that loading places differently from their longest key (keys match as prefixes there).
    takes_sdpa: whether every sub-model takes attn_implementation="sdpa".
    """

    anatomy: Anatomy
    modules: tuple[ModuleShape, ...]
    quant: str
    skipped_by_key: Mapping[str, str]
    loaded_to: Mapping[str, str]
    takes_sdpa: bool

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "anatomy": write_anatomy(self.anatomy), "modules": [asdict(module) for module in self.modules]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelShape:
        modules = tuple(
            ModuleShape(module["module_path"], module["class_name"], tuple(OwnTensor(**own) for own in module["tensors"]))
            for module in values["modules"]
        )
        return cls(**{**values, "anatomy": read_anatomy(values["anatomy"]), "modules": modules})


# Reading in a process -------------------------------------------------------------------------------------------------


def read_shape(
    model: str | os.PathLike[str], device_map: Mapping[str, Any], *, quant: str, dtype: str,
    python: str | os.PathLike[str] | None = None,
) -> ModelShape:  # fmt: skip
    """Return the model's shape as the interpreter's (None: this one's) transformers makes it.

    Errors: CheckpointError; RequestError for a format that the checkpoint does not have, and for an interpreter that cannot build
    the model (a package is missing there). The installed transformers builds the empty model, and its own functions decide which
    modules a map's keys match. The other interpreter needs torch, transformers and safetensors.
    """
    devices = {key: str(value) for key, value in device_map.items()}
    if python is None:
        return shape_of(os.fspath(model), devices, quant, dtype)
    read_checkpoint(model)  # errors of the folder are found and reported here
    request = {"model": os.fspath(Path(model).absolute()) if os.path.isdir(model) else os.fspath(model)}
    request |= {"device_map": devices, "quant": quant, "dtype": dtype}  # type: ignore[dict-item]
    outcome = run_inside("trimtab.doctor.preflight.shape", request, python=python, timeout_s=TIMEOUT_S)
    reply = next((line for line in outcome.lines if "shape" in line or "error" in line), None)
    if outcome.ended == DONE and reply is not None and "shape" in reply:
        return ModelShape.from_json(reply["shape"])
    if reply is not None and "error" in reply:
        raise TrimtabError.from_dict(reply["error"])
    last = (outcome.stderr.strip().splitlines() or [outcome.ended])[-1]
    raise RequestError(f"cannot build the model: {last}", field="python", value=os.fspath(python))


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Report the shape, or trimtab's error."""
    try:
        shape = shape_of(request["model"], request["device_map"], request["quant"], request["dtype"])
    except TrimtabError as exc:
        emit({"error": exc.to_dict()})
        return
    emit({"shape": shape.to_json()})


# Reading, in the interpreter of the stack -----------------------------------------------------------------------------


def shape_of(model: str, device_map: Mapping[str, str], quant: str, dtype: str) -> ModelShape:
    """Return the shape by this interpreter's transformers."""
    from trimtab.api import resolve_quant
    from trimtab.engine.loader import transformers_model

    checkpoint = read_checkpoint(model)
    kind = resolve_quant(quant, checkpoint)
    probe = transformers_model.probe(checkpoint, dtype)
    anatomy = transformers_model.anatomy_of(probe, checkpoint, quant=kind)
    linears = [row.module_path for row in anatomy.rows if row.kind == "linear"]
    tensors = [tensor.tensor_path for row in anatomy.rows for tensor in row.tensors]
    away = [key for key, device in device_map.items() if device in ("cpu", "disk")]
    return ModelShape(
        anatomy=anatomy, modules=tuple(_modules(probe.model, probe.ties)),
        quant=kind,
        skipped_by_key=_skipped(linears, away), loaded_to=_loaded_to(tensors, device_map),
        takes_sdpa=all(
            getattr(module, "_supports_sdpa", True) for module in probe.model.modules() if hasattr(module, "post_init")
        ),
    )  # fmt: skip


def _modules(model: Any, ties: Mapping[str, str]) -> list[ModuleShape]:
    modules = []
    for path, module in model.named_modules():
        tensors = [
            OwnTensor(
                name, int(value.numel()), str(value.dtype).removeprefix("torch."), is_buffer,
                ties.get(f"{path}.{name}" if path else name),
            )
            for held, is_buffer in ((module._parameters, False), (module._buffers, True))
            for name, value in held.items()
            if value is not None
        ]  # fmt: skip
        modules.append(ModuleShape(path, type(module).__name__, tuple(tensors)))
    return modules


def _skipped(linears: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Return linear -> the first key that excludes it from quantization by stock's rule."""
    try:
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError:  # moved or renamed in another release

        def should_convert_module(full_name: str, patterns: list[str]) -> bool:
            return not any(re.match(key, full_name) or full_name.endswith(key) for key in patterns)

    reasons: dict[str, str] = {}
    for path in linears:
        key = next((key for key in keys if not should_convert_module(path, [key])), None)
        if key is not None:
            reasons[path] = key
    return reasons


def _loaded_to(tensors: Sequence[str], device_map: Mapping[str, str]) -> dict[str, str]:
    """Return tensor -> device, for tensors that are not loaded to the device of the longest key above them."""
    try:
        from transformers.integrations.accelerate import expand_device_map
    except ImportError:
        return {}
    if not device_map:
        return {}
    loaded = expand_device_map(dict(device_map), list(tensors))
    mapped = {name: device_of(name, device_map) for name in tensors}
    return {name: str(loaded[name]) for name in tensors if mapped[name] is not None and loaded[name] != mapped[name]}


def device_of(path: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of the longest key that is the path or above it ("" above all), None without one."""
    pieces = path.split(".")
    for end in range(len(pieces), -1, -1):
        key = ".".join(pieces[:end])
        if key in device_map:
            return device_map[key]
    return None
