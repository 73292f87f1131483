"""How are adapters loaded into a live base, and merged there?"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.adapters.config import Rules
from trimtab.adapters.match import AdapterSpec
from trimtab.bridge.attach import Filler, check_dora, follow_leaf_entries, inject_first, inject_next, keep_devices
from trimtab.bridge.hooks import HOOK, offload_hook
from trimtab.bridge.inspect import scan
from trimtab.bridge.inspect_findings import BY_NAME, Finding
from trimtab.bridge.live import read_live
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.names import is_plain, is_quick, near_names
from trimtab.errors import AdapterError, RequestError, UpstreamError

ALLOWED = ("autocast_adapter_dtype", "is_trainable")
_BASE = "the base was placed when it was loaded; nothing is placed a second time"
_LOCAL = "the adapter is a local folder; nothing is downloaded"
REFUSED: Mapping[str, str] = {
    "device_map": _BASE, "max_memory": _BASE, "offload_dir": _BASE, "offload_folder": _BASE, "offload_index": _BASE,
    "offload_buffers": f"{_BASE} (PEFT drops this argument silently)",
    "torch_device": "adapter weights go to the device that their layer computes on",
    "ephemeral_gpu_offload": "PEFT uses it only when a DoRA adapter is made, not when one is loaded",
    "low_cpu_mem_usage": "adapter weights are always made empty and filled from the file",
    "key_mapping": "keys are matched to the modules of this model",
    "config": "the configuration is read from the adapter's folder",
    "ignore_mismatched_sizes": "a tensor of another shape is an error",
    "use_safetensors": "only safetensors files are read",
    "subfolder": "name the folder that holds the adapter as the path",
    "revision": _LOCAL, "cache_dir": _LOCAL, "token": _LOCAL, "use_auth_token": _LOCAL, "local_files_only": _LOCAL,
    "force_download": _LOCAL, "proxies": _LOCAL,
}  # fmt: skip


def check_kwargs(peft_kwargs: Mapping[str, Any]) -> None:
    """Return nothing. Errors: RequestError for the first argument that is unknown or would have no effect."""
    for name, value in peft_kwargs.items():
        if name in REFUSED:
            raise RequestError(f"is not supported: {REFUSED[name]}", field=name, value=value, hint="Leave it out")
        if name not in ALLOWED:
            raise RequestError(
                "load_peft has no such argument", field=name, value=value, allowed=tuple(ALLOWED),
                near=near_names(name, (*ALLOWED, *REFUSED)),
            )  # fmt: skip
        if not isinstance(value, bool):
            raise RequestError("must be true or false", field=name, value=value)


def peft_config(spec: AdapterSpec, paths: Iterable[str], *, has_experts: bool, is_trainable: bool) -> Any:
    """Return PEFT's configuration object, which selects exactly the modules that the adapter has keys for.

    paths: of all modules of the model. The adapter's target_modules and patterns are kept if they select exactly those
    and are cheap for PEFT; otherwise every module is named. has_experts: then PEFT would take MLP names as adapters on
    fused experts. Errors: AdapterError with PEFT's reason if it does not accept the configuration.
    """
    import peft

    if routers := [target.module_path for target in spec.targets if target.kind == "router"]:
        problem = f"PEFT has no LoRA for routers ({routers[0]} and {len(routers) - 1} more); `trimtab.load` applies it"
        raise AdapterError(spec.file.folder, [problem])
    if stacks := [target.adapter_path for target in spec.targets if target.kind == "experts"]:
        problem = (
            f"LoRA on stacks of experts ({stacks[0]} and {len(stacks) - 1} more) is not loaded into PEFT; `trimtab.load` applies it"
        )
        raise AdapterError(spec.file.folder, [problem])
    try:
        config = peft.LoraConfig.from_pretrained(str(spec.file.peft_folder))
    except (TypeError, ValueError) as exc:
        raise AdapterError(spec.file.folder, [f"PEFT {peft.__version__} refuses the configuration: {exc}"]) from exc
    config.inference_mode = not is_trainable
    wanted = {target.module_path for target in spec.targets if target.kind != "saved"}
    selected = Rules(spec.file.folder, spec.file.config, paths).named
    targets = config.target_modules
    is_slow = isinstance(targets, str) and not is_quick(targets)
    if selected != wanted or is_slow or has_experts or _has_other_rules(config):
        config.target_modules = wanted
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        # PEFT matches these as regular expressions, and replaces a module only by its plain name.
        config.modules_to_save = [name for name in config.modules_to_save or () if is_plain(name)] or None
    # The initialization before training. Every weight is read from the file, and some initializations read the base.
    config.init_lora_weights = True
    _set_ranks(config, spec)
    return config


def _has_other_rules(config: Any) -> bool:
    """Return whether other fields than target_modules select PEFT's targets."""
    rules = (config.exclude_modules, config.layers_to_transform, config.layers_pattern, config.modules_to_save)
    return any(rule not in (None, "", [], set()) for rule in rules)


def _set_ranks(config: Any, spec: AdapterSpec) -> None:
    """Set ranks and alphas by full path if the adapter's patterns would give other values for the model's paths."""
    targets = [target for target in spec.targets if target.kind != "saved"]
    fields = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    stock = Rules(
        spec.file.folder, {name: getattr(config, name) for name in fields}, (target.module_path for target in targets)
    )  # fmt: skip
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    agrees = all(map(is_quick, (*(config.rank_pattern or ()), *(config.alpha_pattern or ()))))
    for target in targets:
        rank, scale, _ = stock.rank_and_scale((target.module_path,))
        divisor = target.rank**0.5 if config.use_rslora else target.rank
        agrees = agrees and rank == target.rank and abs(scale - target.scale) <= 1e-6 * abs(target.scale)
        # Undo the division exactly: alphas are whole numbers or short decimals in practice.
        ranks[target.module_path], alphas[target.module_path] = target.rank, round(target.scale * divisor, 9)
    if not agrees:
        config.rank_pattern, config.alpha_pattern = ranks, alphas


# With one of these findings, the first forward fails or is wrong, with or without an adapter.
BROKEN = (
    "quant-state-on-meta", "quantized-weight-offloaded", "weight-on-meta", "embedding-offloaded", "shared-kv-copied",
    "hooks-unknown", "wrong-scales",
)  # fmt: skip
LOG = logging.getLogger("trimtab.bridge")
# The anatomy and the specs of the loaded adapters, stored on the PeftModel so that they exist as long as it does.
ANATOMY, SPECS = "_trimtab_anatomy", "_trimtab_specs"


def load_first(base_model: Any, path: Path, adapter_name: str, peft_kwargs: Mapping[str, Any]) -> Any:
    """Return the PeftModel; see `trimtab.bridge.load_peft`."""
    check_kwargs(peft_kwargs)
    _check_name(adapter_name)
    _check_base(base_model)
    anatomy = read_live(base_model)
    spec = _match(path, anatomy, base_model, adapter_name)
    config = _config(spec, anatomy, base_model, is_trainable=bool(peft_kwargs.get("is_trainable", False)))
    peft_model = inject_first(base_model, config, adapter_name)
    peft_model.__dict__[ANATOMY], peft_model.__dict__[SPECS] = anatomy, {}
    peft_model.load_adapter = MethodType(_load_next, peft_model)
    _finish(peft_model, spec, adapter_name, peft_kwargs)
    return peft_model


def _load_next(peft_model: Any, model_id: str | Path, adapter_name: str, is_trainable: bool = False, **kwargs: Any) -> Any:
    """Load one more adapter as the first one; it is not activated. Returns PEFT's result: no key is left over.

    Errors: as `trimtab.bridge.load_peft`.
    """
    from torch.nn.modules.module import _IncompatibleKeys

    given = {**kwargs, "is_trainable": is_trainable}
    check_kwargs(given)
    _check_name(adapter_name)
    if adapter_name in peft_model.peft_config:
        raise RequestError(
            "an adapter with this name is loaded; delete_adapter removes it", field="adapter_name", value=adapter_name
        )
    # Not get_base_model(): it fails without an adapter.
    anatomy, base = peft_model.__dict__[ANATOMY], peft_model.base_model.model
    spec = _match(Path(model_id), anatomy, base, adapter_name)
    inject_next(peft_model, _config(spec, anatomy, base, is_trainable=is_trainable), adapter_name)
    if is_trainable and hasattr(peft_model, "set_requires_grad"):
        peft_model.set_requires_grad(adapter_name)
    _finish(peft_model, spec, adapter_name, given)
    return _IncompatibleKeys([], [])


def _finish(peft_model: Any, spec: AdapterSpec, adapter_name: str, given: Mapping[str, Any]) -> None:
    Filler(peft_model, spec, adapter_name).fill(autocast=bool(given.get("autocast_adapter_dtype", True)))
    follow_leaf_entries(peft_model, spec)
    keep_devices(peft_model)
    keep_merges(peft_model)
    peft_model.__dict__[SPECS][adapter_name] = spec
    for why, count in Counter(why for _, why in spec.no_effect).items():
        LOG.warning("%s: %d tensors have no effect, %s", spec.file.folder, count, why)
    if not given.get("is_trainable", False):
        peft_model.eval()


def _match(path: Path, anatomy: Anatomy, base: Any, adapter_name: str) -> AdapterSpec:
    from trimtab.bridge.inspect_rules import view

    spec = match_adapter(read_adapter(path, log_name=adapter_name), anatomy)
    check_dora(spec, view(base).modules)
    return spec


def _config(spec: AdapterSpec, anatomy: Anatomy, base: Any, *, is_trainable: bool) -> Any:
    from trimtab.bridge.inspect_rules import view

    has_experts = any(row.kind == "experts" for row in anatomy.rows)
    return peft_config(spec, view(base).modules, has_experts=has_experts, is_trainable=is_trainable)


def _check_name(adapter_name: str) -> None:
    if not adapter_name or "." in adapter_name:
        raise RequestError("a name is a text without a dot", field="adapter_name", value=adapter_name)


def _check_base(base_model: Any) -> None:
    """Return nothing. Errors: RequestError if it is no base model, UpstreamError if its forward would fail."""
    if not hasattr(base_model, "named_modules") or getattr(base_model, "config", None) is None:
        raise RequestError("is not a transformers model", field="base_model", value=type(base_model).__name__)
    if any(hasattr(module, "base_layer") for module in base_model.modules()):
        raise RequestError(
            f"this {type(base_model).__name__} already has adapters", field="base_model",
            hint="Further adapters: peft_model.load_adapter(path, name)",
        )  # fmt: skip
    scanned = scan(base_model)
    if all(place == "meta" for place in scanned.devices):
        raise RequestError("the model is empty: all its weights are on the meta device", field="base_model")
    broken = scanned.of(*BROKEN)
    if broken:
        raise _upstream(broken, scanned.versions)


def _upstream(broken: tuple[Finding, ...], versions: Mapping[str, str]) -> UpstreamError:
    kind = BY_NAME[broken[0].kind]
    mine = [finding for finding in broken if finding.kind == kind.name]
    others = sorted({finding.kind for finding in broken} - {kind.name})
    bugs = f" ({', '.join(kind.bugs)})" if kind.bugs else ""
    more = f"; also {', '.join(others)}" if others else ""
    return UpstreamError(
        f"{kind.name}{bugs}: {kind.meaning}. {sum(f.count for f in mine)} modules, first {mine[0].module_path}: "
        f"{mine[0].detail}{more}. The base {'is wrong' if kind.breaks == 'answer' else 'cannot answer'}, with or without "
        "an adapter",
        package=kind.package, installed=versions.get(kind.package, "?"),
        fixed_in="5.23.0" if kind.name == "shared-kv-copied" else None, hint=kind.way_round,
    )  # fmt: skip


def keep_merges(peft_model: Any) -> None:
    """Make all methods that merge, unmerge and unload reach the weights of offloaded layers.

    PEFT's `onload_layer` silently merges into a weight without data under a SequentialHook (a `""` entry in a map), loads
    everything offloaded below a module at once, and for a layer on disk reads all offloaded weights. So offload hooks are hidden
    from it. Source: PEFT 0.19.1 and 0.21.2, tuners/tuners_utils.py; accelerate 1.13.0 and 1.15.0, hooks.py, utils/offload.py.
    """
    tuner, is_split = peft_model.base_model, False
    for layer in tuner.modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(layer, "merge") and offload_hook(base) is not None:
            _wrap(layer, lambda layer: _brought(layer.base_layer), "merge", "unmerge")
        is_split = is_split or offload_hook(layer) is not None
    if is_split:
        _wrap(tuner, _hidden, "merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")


def _wrap(module: Any, around: Callable[[Any], AbstractContextManager[None]], *names: str) -> None:
    """Run methods of one object inside a block."""

    def inside(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with around(self):
                return getattr(type(self), name)(self, *args, **kwargs)

        return call

    for name in names:
        setattr(module, name, MethodType(inside(name), module))


class _Hidden:
    """Replaces a hook, so that PEFT finds none that it would use; keeps the hook for `_brought`."""

    def __init__(self, hook: Any) -> None:
        self.hooks = (hook,)


@contextmanager
def _hidden(tuner: nn.Module) -> Iterator[None]:
    """Hide offload hooks from PEFT; the hook objects are restored unchanged."""
    held = [(module, module.__dict__[HOOK]) for module in tuner.modules() if offload_hook(module) is not None]
    for module, hook in held:
        module.__dict__[HOOK] = _Hidden(hook)
    try:
        yield
    finally:
        for module, hook in held:
            module.__dict__[HOOK] = hook


@contextmanager
def _brought(base: nn.Module) -> Iterator[None]:
    """Load a base layer's weights on its device, and keep the result unless the call failed."""
    hook = offload_hook(base)
    own = [*base.named_parameters(recurse=False)]
    if hook is None or not any(tensor.device.type == "meta" for _, tensor in own):
        yield
        return
    hook.pre_forward(base)
    try:
        yield
        tensors = (*base.named_parameters(recurse=False), *base.named_buffers(recurse=False))
        hook.weights_map = {name: tensor.detach().to("cpu") for name, tensor in tensors}
    finally:
        hook.post_forward(base, torch.tensor([]))
