"""How is an adapter attached to a model without moving its modules?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.adapters.match import AdapterSpec, AdapterTarget
from trimtab.bridge.hooks import HOOK, execution_device, hooks_aside, hooks_of, offload_hook, offloaded_to
from trimtab.errors import AdapterError, UpstreamError
from trimtab.process.packages import version_of

HEAD = "base_model.model."


def inject_first(base_model: Any, config: Any, adapter_name: str) -> Any:
    """Return PEFT's model around the base, with the adapter's layers injected and still without data."""
    import peft

    model_class = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
    with _quiet(), hooks_aside(base_model):
        return model_class(base_model, config, adapter_name, low_cpu_mem_usage=True)


def inject_next(peft_model: Any, config: Any, adapter_name: str) -> None:
    """Attach the layers of one more adapter, without data and inactive."""
    with _quiet(), hooks_aside(peft_model):
        peft_model.add_adapter(adapter_name, config, low_cpu_mem_usage=True)


class _quiet(warnings.catch_warnings):  # noqa: N801 - a context manager
    """Suppresses PEFT's warnings about tied modules and names that look like prefixes; trimtab checks the cases that change the
    output."""

    def __enter__(self) -> Any:
        recorded = super().__enter__()
        warnings.simplefilter("ignore")
        return recorded


def check_dora(spec: AdapterSpec, modules: Mapping[str, nn.Module]) -> None:
    """Return nothing. Errors: UpstreamError if a DoRA target is offloaded.

    Source: PEFT 0.19.1 and 0.21.2, tuners/lora/dora.py, forward: reads base_layer.weight outside the layer's forward.
    """
    lost = [t.module_path for t in spec.targets if t.use_dora and offloaded_to(modules[t.module_path]) is not None]
    if lost:
        raise UpstreamError(
            f"DoRA on {len(lost)} offloaded modules (first: {lost[0]}): PEFT reads the weight of the base layer outside "
            "its forward, where an offloaded layer has none",
            package="peft", installed=version_of("peft") or "?",
            hint="Keep those modules on the GPU, or load the adapter with trimtab.load, which computes DoRA in every tier",
        )  # fmt: skip


class Filler:
    """Makes and fills the tensors of one adapter. PEFT injects its layers empty. Each tensor is made on the device that its layer
    computes on, in PEFT's dtype. `PeftModel.load_adapter`, which dispatches a split model a second time, is never called."""

    def __init__(self, peft_model: Any, spec: AdapterSpec, adapter_name: str) -> None:
        self.model, self.spec, self.name = peft_model, spec, adapter_name
        self.modules = dict(peft_model.base_model.model.named_modules())
        self.problems: list[str] = []

    def fill(self, *, autocast: bool) -> None:
        """Make every tensor of the adapter on its layer's device, and fill it from the file.

        Errors: AdapterError with every tensor of the file without a parameter, and every parameter without a tensor.
        """
        from safetensors import safe_open

        lora = [target for target in self.spec.targets if target.kind != "saved"]
        for layer in self._layers():
            self._make(layer)
        self._make_saved()
        self.model.base_model._cast_adapter_dtype(adapter_name=self.name, autocast_adapter_dtype=autocast)
        with safe_open(str(self.spec.file.file), framework="pt") as file, torch.no_grad():
            for target in lora:
                self._fill_lora(target, file)
            for target in self.spec.targets:
                if target.kind == "saved":
                    self._fill_saved(target, file)
        self.problems += [
            f"{path}: {tensor_name} is on the meta device, and the file has no tensor for it" for path, tensor_name in self._empty()
        ]
        if self.problems:
            raise AdapterError(self.spec.file.folder, self.problems, hint="Load the base again: it is partly changed")

    def _layers(self) -> Iterator[Any]:
        """Yield PEFT's layers with tensors of this adapter."""
        for module in self.modules.values():
            if hasattr(module, "adapter_layer_names") and hasattr(module, "get_base_layer"):
                if any(self.name in container for _, container in _containers(module)):
                    yield module

    def _make(self, layer: Any) -> None:
        device = execution_device(layer.get_base_layer())
        assert device is not None, "a target without a device was refused with the base"
        for _, container in _containers(layer):
            if self.name not in container:
                continue
            item = container[self.name]
            if isinstance(item, nn.Module):
                item.to_empty(device=device)
            elif isinstance(item, nn.Parameter):
                made = torch.empty_like(item, device=device)
                container[self.name] = nn.Parameter(made, requires_grad=item.requires_grad)
        layer._move_adapter_to_device_of_base_layer(self.name, device=device)

    def _fill_lora(self, target: AdapterTarget, file: Any) -> None:
        layer: Any = self.modules.get(target.module_path)
        places = {
            "A": ("lora_A", "weight"), "B": ("lora_B", "weight"), "B_bias": ("lora_B", "bias"),
            "magnitude": ("lora_magnitude_vector", "weight"), "embedding_A": ("lora_embedding_A", ""),
            "embedding_B": ("lora_embedding_B", ""),
        }  # fmt: skip
        if target.kind == "embedding":
            places |= {"A": places["embedding_A"], "B": places["embedding_B"]}
        for role, entry in target.tensors.items():
            attribute, leaf = places[role]
            container = getattr(layer, attribute, None)
            item = container[self.name] if container is not None and self.name in container else None
            place = getattr(item, leaf, None) if leaf else item
            self._copy(place, file.get_tensor(entry.tensor_name), entry.tensor_name)
        scale = getattr(layer, "scaling", {}).get(self.name)
        if scale is None or abs(scale - target.scale) > 1e-6 * abs(target.scale):
            self.problems.append(f"{target.module_path}: scale {scale} in PEFT, {target.scale} by the configuration")

    def _make_saved(self) -> None:
        """Give PEFT's copies of saved modules separate memory."""
        for wrapper in self.modules.values():
            copies = getattr(wrapper, "modules_to_save", None)
            if isinstance(copies, nn.ModuleDict) and self.name in copies:
                originals = dict(wrapper.original_module.named_modules())
                for path, copy in copies[self.name].named_modules():
                    _free_copy(copy, originals[path])

    def _fill_saved(self, target: AdapterTarget, file: Any) -> None:
        own = self._saved_copy(target.module_path)
        if own is not None:
            for name, entry in target.tensors.items():
                self._copy(getattr(own, name, None), file.get_tensor(entry.tensor_name), entry.tensor_name)
            return
        module: Any = self.modules.get(target.module_path)
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        for name, entry in target.tensors.items():
            have = kept_value(base, name)
            if have is None or not torch.equal(file.get_tensor(entry.tensor_name).to(have.dtype), have.cpu()):
                self.problems.append(
                    f"{entry.tensor_name}: a full copy of a weight of the base, and another one; PEFT would write it "
                    "over the base for every adapter"
                )

    def _saved_copy(self, module_path: str) -> nn.Module | None:
        """Return this adapter's copy of a module that modules_to_save names, directly or through a parent."""
        segments = module_path.split(".")
        for count in range(len(segments), 0, -1):
            copies = getattr(self.modules.get(".".join(segments[:count])), "modules_to_save", None)
            if isinstance(copies, nn.ModuleDict) and self.name in copies:
                return copies[self.name].get_submodule(".".join(segments[count:]))
        return None

    def _copy(self, place: Any, value: Tensor, tensor_name: str) -> None:
        if not isinstance(place, Tensor) or place.shape != value.shape or place.device.type == "meta":
            self.problems.append(f"{tensor_name}: PEFT created no such tensor in this model")
        else:
            place.copy_(value)

    def _empty(self) -> Iterator[tuple[str, str]]:
        """Yield (module path, tensor) of this adapter's tensors that still hold no data."""
        for path, module in self.modules.items():
            for attribute, container in _containers(module):
                # Not get(): PEFT's BufferDict has none in 0.19.1.
                item = container[self.name] if self.name in container else None  # noqa: SIM401
                tensors = {"": item} if isinstance(item, Tensor) else {}
                if isinstance(item, nn.Module):
                    tensors = {**dict(item.named_parameters()), **dict(item.named_buffers())}
                for name, value in tensors.items():
                    if value.device.type == "meta":
                        yield path, f"{attribute}.{name}".rstrip(".")


def _containers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield (attribute, container with one item per adapter) of one of PEFT's modules."""
    names = (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()))
    for name in dict.fromkeys(names):
        container = getattr(module, name, None)
        if isinstance(container, (nn.ModuleDict, nn.ParameterDict)) or type(container).__name__ == "BufferDict":
            yield name, container


def kept_value(module: nn.Module, name: str) -> Tensor | None:
    """Return a tensor of a module, from its offload hook's storage if it is offloaded; None if there is none."""
    value = getattr(module, name, None)
    if isinstance(value, Tensor) and value.device.type == "meta":
        hook = offload_hook(module)
        return None if hook is None else hook.weights_map[name]
    return value


def _free_copy(copy: nn.Module, original: nn.Module) -> None:
    """Give PEFT's copy of a saved module separate memory on the device where the original computes, and plain hooks."""
    device = execution_device(original)
    hooks = hooks_of(original)
    for name in ("forward", "_old_forward", HOOK):
        copy.__dict__.pop(name, None)
    for name, parameter in list(copy._parameters.items()):
        if parameter is not None and parameter.device.type == "meta":
            made = torch.empty_like(parameter, device=device)
            copy._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for name, buffer in list(copy._buffers.items()):
        if buffer is not None and buffer.device.type == "meta":
            kept = kept_value(original, name)
            copy._buffers[name] = None if kept is None else kept.to(device, copy=True)
    if hooks:
        follow(copy, hooks[-1])


def keep_devices(peft_model: Any) -> None:
    """Make PEFT create further adapters (`add_adapter`, `add_weighted_adapter`) on the device where an offloaded layer
    computes.

    PEFT moves new weights to the device of the base layer's weight, which is meta between forwards.
    """
    for layer in peft_model.base_model.modules():
        if hasattr(layer, "_move_adapter_to_device_of_base_layer") and offload_hook(layer.get_base_layer()) is not None:
            layer._move_adapter_to_device_of_base_layer = MethodType(_move_to_execution_device, layer)


def _move_to_execution_device(layer: Any, adapter_name: str, device: torch.device | None = None) -> None:
    device = execution_device(layer.get_base_layer()) if device is None else device
    type(layer)._move_adapter_to_device_of_base_layer(layer, adapter_name, device=device)


def follow(module: nn.Module, hook: Any) -> None:
    """Move a module's inputs to the device of another module's hook; the module itself is not moved."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(module, AlignDevicesHook(hook.execution_device, skip_keys=hook.skip_keys))


def follow_leaf_entries(peft_model: Any, spec: AdapterSpec) -> None:
    """Add a hook that moves the input to PEFT's layers whose input may come from another device.

    Such a layer, or a sibling (whose output it may get), has its own entry in the device map. accelerate's hook moves
    the base layer's input, but not LoRA's.
    """
    modules = dict(peft_model.base_model.model.named_modules())
    for path in dict.fromkeys(target.module_path for target in spec.targets if target.kind != "saved"):
        layer, parent = modules[path], modules[path.rpartition(".")[0]]
        base = getattr(layer, "base_layer", None)
        if not isinstance(base, nn.Module) or HOOK in layer.__dict__ or not hooks_of(base) or not hooks_of(parent):
            continue
        own = execution_device(base)
        beside = (getattr(module, "base_layer", module) for module in parent.children())
        sources = (execution_device(parent), *(execution_device(module) for module in beside if hooks_of(module)))
        if any(device != own for device in sources):
            follow(layer, hooks_of(base)[-1])
