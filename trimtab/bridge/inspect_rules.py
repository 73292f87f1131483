"""Which problems does a scan of a live model look for?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.adapters.config import part_of_key
from trimtab.bridge.hooks import CPU, DISK, execution_device, hooks_of, is_sequential, offload_hook, offloaded_to
from trimtab.bridge.inspect_findings import Finding
from trimtab.bridge.live import QUANTIZED, is_linear
from trimtab.bridge.row_scales import layers_of
from trimtab.checkpoint.names import is_under, near_names
from trimtab.errors import gib
from trimtab.process.packages import versions_of

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
# The first release in which layers share keys and values through an object that hooks do not copy.
SHARES_SAFELY = (5, 23, 0)


def read_versions() -> dict[str, str]:
    """Return the installed version of each package of the stock stack."""
    return versions_of(PACKAGES)


def view(model: Any) -> View:
    """Return the view of a model; of a PeftModel, of the transformers model in it. Modules of transformers, accelerate, PEFT and
    bitsandbytes are recognized by attributes and class names: none of the four is imported."""
    # Not get_base_model(): it fails on a PeftModel whose last adapter was deleted.
    base = model.base_model.model if hasattr(model, "get_base_model") else model
    return View(model, base)


def own_name(path: str) -> str:
    """Return the path that a module has without adapters."""
    return ".".join(segment for segment in path.split(".") if segment not in ("base_layer", "original_module"))


class View:
    """A model's modules under their names without adapters. Nothing is kept after the scan."""

    def __init__(self, model: Any, base: Any) -> None:
        self.model, self.base, self.model_class = model, base, type(base).__name__
        self.modules: dict[str, Any] = {}
        self.layers: dict[str, Any] = {}
        for path, module in base.named_modules():
            if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
                self.layers[own_name(path)] = module
            elif hasattr(module, "original_module") and "modules_to_save" in module._modules:
                continue
            elif not re.search(r"\.(lora_\w+|modules_to_save|token_adapter)(\.|$)", f".{path}"):
                self.modules[own_name(path)] = module
        self.map: Mapping[str, Any] = getattr(base, "hf_device_map", None) or {}

    # Placement --------------------------------------------------------------------------------------------------------

    def said_quantized(self) -> str:
        if getattr(self.base, "is_loaded_in_4bit", False):
            return "said to be in 4 bits"
        return "said to be in 8 bits" if getattr(self.base, "is_loaded_in_8bit", False) else "not quantized"

    @cached_property
    def is_empty(self) -> bool:
        tensors = [*self.base.parameters()]
        return bool(tensors) and all(tensor.device.type == "meta" for tensor in tensors) and not any(
            hooks_of(module) for module in self.modules.values()
        )  # fmt: skip

    def classes(self) -> dict[str, dict[str, int]]:
        classes: dict[str, Counter[str]] = {}
        for path, module in self.modules.items():
            if is_linear(module) or isinstance(module, nn.Embedding) or _is_experts(module):
                classes.setdefault(part_of_key(f"{path}.weight"), Counter())[type(module).__name__] += 1
        return {part: dict(sorted(counts.items())) for part, counts in classes.items()}

    def devices(self) -> dict[str, int]:
        devices: Counter[str] = Counter()
        seen: set[int] = set()
        for module in self.modules.values():
            away = offloaded_to(module)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                is_away = away is not None and tensor.device.type == "meta"
                devices[f"offloaded to {away}" if is_away else str(tensor.device)] += tensor.numel() * tensor.element_size()
        return dict(sorted(devices.items()))

    def shown_map(self) -> dict[str, str] | None:
        return {key: str(value) for key, value in self.map.items()} if self.map else None

    def adapters(self) -> dict[str, dict[str, Any]]:
        adapters: dict[str, dict[str, Any]] = {}
        for path, layer in self.layers.items():
            for name in _adapter_names(layer):
                facts = adapters.setdefault(name, {"modules": 0, "tensors_by_part": Counter(), "active": False})
                facts["modules"] += 1
                facts["active"] = facts["active"] or (name in layer.active_adapters and not layer.disable_adapters)
                facts["tensors_by_part"][part_of_key(f"{path}.weight")] += len(list(_lora_tensors(layer, name)))
        for name, facts in adapters.items():
            facts["tensors_by_part"] = dict(facts["tensors_by_part"])
            facts["no_effect"] = len(self._idle_keys(name))
        return adapters

    def _idle_keys(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return (key, reason) of the keys without effect in an adapter that the bridge loaded."""
        spec = self.model.__dict__.get("_trimtab_specs", {}).get(name)
        return () if spec is None else tuple(spec.no_effect)

    # Findings ---------------------------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        if not self.is_empty:
            yield from self._quant_states()
            yield from self._scales()
            yield from self._on_meta()
            yield from self._hooks()
            yield from self._embedding()
            yield from self._lora()
            yield from self._ties()
            yield from self._moved()
        yield from self._unquantized()
        yield from self._keys()

    def _quant_states(self) -> Iterator[Finding]:
        for path, module in self.modules.items():
            name = type(module).__name__
            if name not in QUANTIZED:
                continue
            away = offloaded_to(module)
            lost = list(_lost_scales(module, has_hook=away is not None))
            if lost:
                yield Finding("quant-state-on-meta", path, f"{', '.join(lost)} on meta")
            elif away is not None and name == "Linear4bit":
                yield Finding("quantized-weight-offloaded", path, f"{name} offloaded to {away}")

    def _scales(self) -> Iterator[Finding]:
        for path, (rows, width) in layers_of(self.modules.items()):
            yield Finding("wrong-scales", path, f"[{rows}, {width}] on the CPU")

    def _on_meta(self) -> Iterator[Finding]:
        for path, module in self.modules.items():
            hook = offload_hook(module)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.device.type == "meta" and hook is None:
                    yield Finding("weight-on-meta", path, f"{name} {list(tensor.shape)} has no data and no offload hook")

    def _hooks(self) -> Iterator[Finding]:
        copies = []
        for path, module in self.modules.items():
            away = [hook for hook in hooks_of(module) if getattr(hook, "offload", False)]
            if len(away) > 1:
                yield Finding("hooks-unknown", path, f"{len(away)} hooks take its weights away")
            elif is_sequential(module) and away:
                names = ", ".join(type(hook).__name__ for hook in hooks_of(module))
                yield Finding("sequential-hook", path, f"SequentialHook({names})")
            if hooks_of(module) and self._shares_kv and not hooks_of(module)[-1].skip_keys:
                copies.append(path)
        if copies and _release("transformers") < SHARES_SAFELY:
            yield Finding("shared-kv-copied", copies[0], f"{len(copies)} hooks without skip_keys", len(copies))

    @cached_property
    def _shares_kv(self) -> bool:
        config = getattr(self.base, "config", None)
        text = getattr(config, "text_config", config)
        return bool(getattr(text, "num_kv_shared_layers", 0))

    def _embedding(self) -> Iterator[Finding]:
        for path, module in self.modules.items():
            if not isinstance(module, nn.Embedding) or (away := offloaded_to(module)) is None:
                continue
            parent, _, last = path.rpartition(".")
            size = module.weight.numel() * module.weight.element_size()
            if last == "embed_tokens" and f"{parent}.embed_tokens_per_layer" in self.modules:
                yield Finding("embedding-offloaded", path, f"offloaded to {away} next to per-layer embeddings")
            elif module.num_embeddings > 1:
                yield Finding("table-copied-whole", path, f"{gib(size)} from {away} at every forward")

    def _lora(self) -> Iterator[Finding]:
        idle: dict[str, list[str]] = {}
        busy: Counter[str] = Counter()
        for path, layer in self.layers.items():
            device = execution_device(layer.get_base_layer())
            for name in _adapter_names(layer):
                tensors = list(_lora_tensors(layer, name))
                if any(offload_hook(module) is not None for module in _lora_modules(layer, name)):
                    busy[name] += 1  # accelerate loads it for each forward; its values are not checked
                    continue
                away = [label for label, tensor in tensors if tensor.device.type == "meta"]
                if away:
                    yield Finding("lora-on-meta", path, f"adapter {name}: {', '.join(away)}")
                    continue
                wrong = [f"{label} on {tensor.device}" for label, tensor in tensors if _differ(tensor.device, device)]
                if wrong:
                    yield Finding("lora-wrong-device", path, f"adapter {name}: {', '.join(wrong)}, computes on {device}")
                if _is_idle(layer, name, tensors):
                    idle.setdefault(name, []).append(path)
                else:
                    busy[name] += 1
        for name in {*idle, *busy}:
            if keys := self._idle_keys(name):
                detail = f"adapter {name}: {len(keys)} tensors, first {keys[0][0]}: {keys[0][1]}"
                yield Finding("keys-without-effect", "", detail, len(keys))
        for name, paths in idle.items():
            if busy[name]:
                yield from (Finding("module-does-nothing", path, f"adapter {name}: B is zero") for path in paths)
            else:
                yield Finding("adapter-does-nothing", "", f"adapter {name}: B is zero on all modules", len(paths))

    def _ties(self) -> Iterator[Finding]:
        ask = getattr(self.base, "get_expanded_tied_weights_keys", None)
        pairs = ask(all_submodels=True) if ask is not None else {}
        for first, second in pairs.items():
            one, two = self._parameter(first), self._parameter(second)
            if one is None or two is None or one is two:
                continue
            if one.device.type == "meta" or two.device.type == "meta" or one.data_ptr() != two.data_ptr():
                yield Finding("tied-weights-untied", first.rpartition(".")[0], f"{first} is no longer {second}")

    def _parameter(self, tensor_path: str) -> Tensor | None:
        path, _, name = tensor_path.rpartition(".")
        value = self.modules[path]._parameters.get(name) if path in self.modules else None
        return value if isinstance(value, Tensor) else None

    def _moved(self) -> Iterator[Finding]:
        main = [value for value in self.map.values() if value not in (CPU, DISK)]
        shared = Counter(id(tensor) for module in self.modules.values() for tensor in module._parameters.values())
        for path, module in self.modules.items():
            own = [tensor for tensor in module._parameters.values() if tensor is not None]
            keys = [key for key in self.map if is_under(path, key)]
            if not own or not keys or any(shared[id(tensor)] > 1 for tensor in own):
                continue
            mapped = self.map[max(keys, key=len)]
            have = offloaded_to(module) or own[0].device
            should_be_away = mapped == DISK or (mapped == CPU and bool(main))
            if should_be_away == isinstance(have, str) and (should_be_away or not _differ(own[0].device, torch.device(mapped))):
                continue
            other = [key for key in self.map if key and path.startswith(key) and not is_under(path, key)]
            why = f"; the key {other[0]} begins like it" if other else ""
            yield Finding("not-where-the-map-says", path, f"on {have}, the map says {mapped}{why}")

    def _unquantized(self) -> Iterator[Finding]:
        if self.said_quantized() == "not quantized":
            return
        linears = {path: module for path, module in self.modules.items() if is_linear(module)}
        plain = {path for path, module in linears.items() if type(module) is nn.Linear}
        if len(plain) == len(linears):
            yield Finding("nothing-quantized", "", f"0 of {len(linears)} linears", len(linears))
        groups: Counter[tuple[str, str]] = Counter()
        for path in plain:
            keys = [key for key, value in self.map.items() if value in (CPU, DISK) and path.startswith(key)]
            if keys:
                key = max(keys, key=len)
                groups[key, f"the map has them on {self.map[key]}"] += 1
            elif not self._is_kept(path):
                groups[path.rpartition(".")[0], "no reason known"] += 1
        for (key, why), count in sorted(groups.items()):
            yield Finding("left-unquantized", key, f"{count} Linear in full precision: {why}", count)
        for path, module in self.modules.items():
            if _is_experts(module):
                yield Finding("experts-unquantized", path, type(module).__name__)

    def _is_kept(self, path: str) -> bool:
        """Return whether transformers excludes the linear on purpose (the head, tied weights, a skip list)."""
        quantizer = getattr(self.base, "hf_quantizer", None)
        kept = list(getattr(quantizer, "modules_to_not_convert", None) or ())
        settings = getattr(getattr(self.base, "config", None), "quantization_config", None)
        skipped = settings.get("llm_int8_skip_modules") if isinstance(settings, dict) else getattr(
            settings, "llm_int8_skip_modules", None
        )  # fmt: skip
        names = {*kept, *(skipped or ()), "lm_head"}
        return any(path.endswith(name) or is_under(path, name) or f".{name}." in f".{path}." for name in names)

    def _keys(self) -> Iterator[Finding]:
        tensors = {name for name, _ in (*self.base.named_parameters(), *self.base.named_buffers())}
        for key in self.map:
            if key and key not in self.modules and own_name(key) not in self.modules and key not in tensors:
                bare = key.removeprefix("base_model.model.")
                if key in ("base_model", "base_model.model") or bare in self.modules:
                    continue
                near = near_names(key, [path for path in self.modules if path.count(".") <= key.count(".") + 1])
                yield Finding(
                    "map-key-names-nothing", key, f"similar names: {', '.join(near)}" if near else "no module has a similar name"
                )


def _is_experts(module: nn.Module) -> bool:
    fused = any(value is not None and value.dim() == 3 for value in module._parameters.values())
    return fused and "expert" in type(module).__name__.lower()


def _lost_scales(module: Any, *, has_hook: bool) -> Iterator[str]:
    """Yield the names of a quantized module's scales that hold no data."""
    if type(module).__name__ == "Linear8bitLt":
        # An offload hook moves SCB with the weight; without a hook it must be on the device.
        scales = {"SCB": getattr(module.weight, "SCB", None), "state.SCB": getattr(module.state, "SCB", None)}
        tensors = {name: value for name, value in scales.items() if isinstance(value, Tensor)}
        if not has_hook:
            yield from (name for name, value in tensors.items() if value.device.type == "meta")
        return
    state = getattr(module.weight, "quant_state", None)
    nested = getattr(state, "state2", None)
    holders = (("", state, ("absmax", "code", "offset")), ("state2.", nested, ("absmax", "code")))
    for prefix, holder, names in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, Tensor) and value.device.type == "meta":
                yield f"{prefix}{name}"


def _adapter_names(layer: Any) -> list[str]:
    holders = (getattr(layer, name, None) for name in ("lora_A", "lora_embedding_A"))
    return list(dict.fromkeys(name for holder in holders if holder is not None for name in holder))


def _lora_tensors(layer: Any, adapter_name: str) -> Iterator[tuple[str, Tensor]]:
    for attribute in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        holder = getattr(layer, attribute, None)
        item = holder[adapter_name] if holder is not None and adapter_name in holder else None
        if isinstance(item, Tensor):
            yield attribute, item
        elif isinstance(item, nn.Module):
            yield from ((attribute if name == "weight" else f"{attribute}.{name}", t) for name, t in item.named_parameters())


def _lora_modules(layer: Any, adapter_name: str) -> Iterator[nn.Module]:
    yield layer
    for attribute in ("lora_A", "lora_B"):
        holder = getattr(layer, attribute, None)
        if holder is not None and adapter_name in holder:
            yield holder[adapter_name]


def _is_idle(layer: Any, name: str, tensors: list[tuple[str, Tensor]]) -> bool:
    # DoRA changes the output through its magnitude alone; LoRA on an embedding starts with a zero A.
    if any(label == "lora_magnitude_vector" for label, _ in tensors):
        return False
    factors = [tensor for label, tensor in tensors if label in ("lora_B", "lora_embedding_A", "lora_embedding_B")]
    has_bias = any(label == "lora_B.bias" and bool(tensor.any()) for label, tensor in tensors)
    return not has_bias and (not layer.scaling.get(name, 1) or any(not bool(tensor.any()) for tensor in factors))


def _differ(one: torch.device, two: torch.device | None) -> bool:
    """Return whether two devices differ; a device without an index has index 0."""
    return two is not None and (one.type != two.type or (one.index or 0) != (two.index or 0))


def _release(package: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", read_versions().get(package, "0"))
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else (0,)
