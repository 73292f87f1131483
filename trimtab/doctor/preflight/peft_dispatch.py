"""Which device map does the installed PEFT make for an adapter on a base that is partly on the CPU or disk?"""

from __future__ import annotations

import contextlib
import io
import re
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import Mock, patch

import accelerate.utils.modeling as accelerate_modeling
import torch
from peft import PeftConfig, peft_model

from trimtab.checkpoint.folder import read_checkpoint
from trimtab.doctor.preflight.device_map import OFF
from trimtab.doctor.preflight.shape import device_of
from trimtab.engine.loader import transformers_model
from trimtab.stock.load import load_adapter

_REQUIRED = re.compile(r"- (\S+): (\d+(?:\.\d+)?) bytes required")
_PACKED = "_trimtab_packed_bytes"


class _Planned(BaseException):
    """Raised when PEFT has its map; the rest of the load is not run."""


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Report the plan, or why PEFT stopped before it made one."""
    emit(plan_of(request))


def plan_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's plan as JSON-ready values.

    request: model (folder), dtype, adapter (folder), config (changes of its configuration), device_map (key -> device
    as text), devices (tensor_path -> device of the loaded base), main (the device that computes), quantized (module
    paths), quant (format), free ([device, bytes] pairs less the base, GPUs first). Returns {"runs": False, "why": text}
    if PEFT makes no plan, else map, budgets and required as [device or path, value] pairs, adapter ([device, bytes] of
    PEFT's layers), after (tensor_path -> device by the map), total_bytes, largest ([path, bytes] of the layer for which
    accelerate reserves memory), steps (accelerate's own lines).

    PEFT's `from_pretrained` runs on meta tensors with the sizes of the packed weights, until it has called accelerate's
    `infer_auto_device_map`. `max_memory` and a `device_map` that the caller passes to PEFT are not known.
    """
    base = empty_base(request["model"], request["dtype"])
    for path in request["quantized"]:
        weight = base.get_submodule(path).weight
        # A packed weight has one byte per 8-bit value or per two 4-bit values; its scales are no parameters.
        numel = weight.numel()
        setattr(base.get_submodule(path), _PACKED, numel if request["quant"] == "int8" else (numel + 1) // 2)
    base.hf_device_map = {key: int(text) if text.isdecimal() else text for key, text in request["device_map"].items()}
    plan: dict[str, Any] = {"runs": False, "why": "PEFT loads the adapter without a separate plan"}
    free = dict(request["free"])
    placed = _Placed(base, request["devices"], request["main"])
    with _accelerate_sees(free), _peft_stops_at_its_map(plan, placed, free), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = PeftConfig.from_pretrained(request["adapter"])
            for name, value in request["config"].items():
                setattr(config, name, value)
            load_adapter(base, request["adapter"], config=config, torch_device="cpu")
        except _Planned:
            pass
        except Exception as exc:  # any exception of PEFT for this adapter
            plan["why"] = f"PEFT stops before its plan: {type(exc).__name__}: {str(exc).splitlines()[0][:300]}"
    return plan


def empty_base(folder: str, dtype: str) -> Any:
    """Return transformers' model of a checkpoint on the meta device, with tied parameters."""
    model = transformers_model.probe(read_checkpoint(folder), dtype).model
    by_id: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                if id(value) not in by_id:
                    empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    is_parameter = held is module._parameters
                    by_id[id(value)] = torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty
                held[name] = by_id[id(value)]
    model.tie_weights()
    return model


def _pack(model: Any) -> None:
    """Give the marked linears weights of the packed size. Before that, PEFT computes with weights of the plain shape (DoRA)."""
    for module in model.modules():
        nbytes = module.__dict__.pop(_PACKED, None)
        if nbytes is not None:
            packed = torch.empty((nbytes, 1), dtype=torch.uint8, device="meta")
            module.weight = torch.nn.Parameter(packed, requires_grad=False)


class _Placed:
    """The devices of a base's tensors, which PEFT's model holds under other names, and of PEFT's own layers."""

    def __init__(self, base: Any, devices: Mapping[str, str], main: str) -> None:
        self.paths = {id(module): path for path, module in base.named_modules()}
        self.devices, self.main = devices, main

    def adapter_bytes(self, model: Any) -> dict[str, int]:
        """Return device -> bytes of the parameters that PEFT added: each is where the module is that it wraps."""
        modules = dict(model.named_modules())
        wrapped = {path.rpartition(".")[0]: self.paths[id(module)] for path, module in modules.items() if id(module) in self.paths}
        nbytes: Counter[str] = Counter()
        for path, module in modules.items():
            if id(module) not in self.paths:
                device = self.devices.get(f"{device_of(path, wrapped)}.weight", self.main)
                nbytes["cpu" if device in OFF else device] += sum(value.nbytes for value in module.parameters(recurse=False))
        return {device: count for device, count in nbytes.items() if count}

    def after(self, model: Any, device_map: Mapping[str, Any]) -> dict[str, str]:
        """Return tensor_path -> device by the map of PEFT's model; a tensor that it omits is not moved."""
        found = dict(self.devices)
        for path, module in model.named_modules():
            for name in (*module._parameters, *module._buffers) if id(module) in self.paths else ():
                tensor, device = f"{self.paths[id(module)]}.{name}".lstrip("."), device_of(f"{path}.{name}", device_map)
                if device is not None and tensor in found:
                    found[tensor] = str(device)
        return found


@contextlib.contextmanager
def _peft_stops_at_its_map(plan: dict[str, Any], placed: _Placed, free: dict[int | str, int]) -> Iterator[None]:
    """Record PEFT's calls of accelerate in `plan`, and end the load at the second one. free: less the adapter at the first."""
    if not hasattr(peft_model, "infer_auto_device_map") or not hasattr(peft_model, "get_balanced_memory"):
        plan["why"] = "this PEFT release does not call accelerate for a map"
        yield
        return
    balance, infer = peft_model.get_balanced_memory, peft_model.infer_auto_device_map
    adapter: dict[str, int] = {}

    def balanced(model: Any, *args: Any, **options: Any) -> Any:
        adapter.update(placed.adapter_bytes(model))
        # The driver reports no negative value: the load would have failed before.
        free.update({device: max(nbytes - adapter.get(str(device), 0), 0) for device, nbytes in free.items()})
        _pack(model)
        return balance(model, *args, **options)

    def inferred(model: Any, *args: Any, **options: Any) -> Any:
        _pack(model)
        budgets = dict(options.get("max_memory") or {})
        printed, largest, measure = io.StringIO(), [], accelerate_modeling.get_max_layer_size

        def measured(*args: Any, **options: Any) -> Any:
            nbytes, paths = measure(*args, **options)
            largest.append([paths[0] if paths else "", nbytes])
            return nbytes, paths

        with (
            patch.multiple(accelerate_modeling, get_max_layer_size=measured, logger=Mock()), contextlib.redirect_stdout(printed),
        ):  # fmt: skip
            device_map = infer(model, *args, **{**options, "verbose": True})
            logged = "\n".join(str(call.args[0]) for call in accelerate_modeling.logger.info.call_args_list)
        plan.clear()
        plan.update(
            runs=True, map=[*map(list, device_map.items())], budgets=[*map(list, budgets.items())],
            adapter=[*map(list, adapter.items())], after=placed.after(model, device_map),
            total_bytes=accelerate_modeling.compute_module_sizes(model)[""], largest=largest[0],
            required=[[device, float(nbytes)] for device, nbytes in _REQUIRED.findall(logged)],
            steps=[line for line in printed.getvalue().splitlines() if line],
        )  # fmt: skip
        raise _Planned

    with patch.multiple(peft_model, get_balanced_memory=balanced, infer_auto_device_map=inferred):
        yield


# Inputs of accelerate -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _accelerate_sees(free: Mapping[int | str, int]) -> Iterator[None]:
    """Make accelerate find these devices with this much free memory (bytes): the number of a device is a CUDA device, also on a
    machine without it."""
    read = accelerate_modeling.get_max_memory
    count = 1 + max((device for device in free if isinstance(device, int)), default=-1)

    def get_max_memory(max_memory: Any = None) -> Any:
        return dict(free) if max_memory is None else read(max_memory)

    def device(value: Any) -> Any:
        return types.SimpleNamespace(type="cuda") if isinstance(value, int) else torch.device(value)

    cuda = types.SimpleNamespace(device_count=lambda: count, is_available=lambda: False)
    seen = types.SimpleNamespace(**{**vars(torch), "cuda": cuda, "device": device})
    with patch.multiple(accelerate_modeling, torch=seen, get_max_memory=get_max_memory):
        yield
