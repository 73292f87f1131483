"""The arguments of `load_peft`, and the copy of the adapter's configuration that PEFT receives.

The copy names every module by its path in the model, with its rank and alpha; the adapter's folder is only read.
Arguments of `PeftModel.from_pretrained` that would place modules again or have no effect are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.adapters.config import Rules
from trimtab.adapters.match import AdapterSpec
from trimtab.checkpoint.names import is_plain, is_quick, near_names
from trimtab.errors import AdapterError, RequestError

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
