"""The report on one adapter, and what the rest of the package imports to read and match one.

`read_adapter` (adapter_file.py) reads a folder that PEFT wrote, without tensor data. `match_adapter` (adapter_match.py)
puts every tensor on a module of the model or refuses. `describe` is what `trimtab inspect` prints. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.checkpoint.adapter_config import names_module
from trimtab.checkpoint.adapter_file import AdapterFile, read_adapter
from trimtab.checkpoint.adapter_keys import own_path
from trimtab.checkpoint.adapter_match import AdapterSpec, AdapterTarget, match_adapter, parts_of

__all__ = ["AdapterFile", "AdapterSpec", "AdapterTarget", "describe", "match_adapter", "read_adapter"]


def describe(file: AdapterFile, spec: AdapterSpec | None) -> dict[str, Any]:
    """Return the report of `trimtab inspect` as JSON-ready values.

    Without a model (spec None): what the file holds, parts judged by names alone. With one also: targets by kind, what
    is without effect and why, the spelling rule, modules whose path was resolved to another, ranks and scales.
    """
    config = file.config
    shown = (
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
    )
    report: dict[str, Any] = {
        "path": str(file.folder),
        "base_model": config.get("base_model_name_or_path"),
        "peft_version": config.get("peft_version"),
        "tensors": len(file.tensors),
        "bytes": sum(entry.nbytes for entry in file.tensors.values()),
        "dtypes": dict(sorted(Counter(entry.dtype for entry in file.tensors.values()).items())),
        "parts": parts_of(file.tensors),
        "config": {name: config[name] for name in shown if config.get(name) not in (None, False, [], {})},
        "target_modules": config.get("target_modules"),
    }
    return report if spec is None else report | _describe_match(spec)


def _describe_match(spec: AdapterSpec) -> dict[str, Any]:
    lora = [target for target in spec.targets if target.kind != "saved"]
    config = spec.file.config
    renamed = [(t.adapter_path, t.module_path) for t in spec.targets if not _is_direct(t)]
    unnamed = [t.module_path for t in lora if not any(_is_named(config, path) for path in _spellings(t))]
    notes = list(spec.notes)
    if unnamed and config.get("target_modules") is not None:
        notes.append(
            f"target_modules does not name {len(unnamed)} of the {len(lora)} modules that have keys (first: "
            f"{unnamed[0]}), or exclude_modules or layers_to_transform leave them out; they are applied, PEFT would drop them "
            "silently"
        )
    notes += [
        f"{count} tensors have no effect, {why}" for why, count in Counter(why for _, why in spec.no_effect).items()
    ]
    named = config.get("target_modules")
    idle = [name for name in named if not any(_ends(t, name) for t in lora)] if isinstance(named, list) else []
    if idle:
        notes.append(f"target_modules names {', '.join(sorted(map(str, idle)))}, for which the file has no key")
    return spec.counts() | {
        "prefix": spec.prefix,
        "ranks": _tally(target.rank for target in lora),
        "scales": _tally(target.scale for target in lora),
        "dora": sum(target.use_dora for target in lora),
        "lora_bias": sum(target.has_bias for target in lora),
        "dropped": [{"key": key, "reason": reason} for key, reason in spec.no_effect],
        "remapped": [{"from": old, "to": new} for old, new in renamed],
        "bytes_attached": spec.nbytes("float32"),
        "notes": notes,
    }


def _is_named(config: Mapping[str, Any], path: str) -> bool:
    """Return whether PEFT would put LoRA on the module of a path.

    Source: PEFT 0.21.2, tuners/tuners_utils.py, check_target_module_exists.
    """
    if config.get("exclude_modules") and names_module({"target_modules": config["exclude_modules"]}, path):
        return False
    if not names_module(config, path):
        return False
    layers, names = config.get("layers_to_transform"), config.get("layers_pattern")
    if (
        layers is None or layers == [] or isinstance(config.get("target_modules"), str)
    ):  # PEFT reads them with a list only
        return True
    segments = path.split(".")
    names = [names] if isinstance(names, str) and names else names if isinstance(names, list) else []
    found = [
        int(number) for place, number in enumerate(segments[:-1])
        if number.isdigit() and (segments[place - 1] in names and place > 0 if names else place > 1)
    ]  # fmt: skip
    return bool(found) and found[0] in (layers if isinstance(layers, list) else [layers])


def _spellings(target: AdapterTarget) -> set[str]:
    paths = {own_path(target.adapter_path), target.module_path}
    return paths | ({path.removesuffix(".linear") for path in paths} if target.wrapped else set())


def _ends(target: AdapterTarget, name: object) -> bool:
    return any(path == name or path.endswith(f".{name}") for path in _spellings(target))


def _is_direct(target: AdapterTarget) -> bool:
    return own_path(target.adapter_path) == target.module_path


def _tally(values: Iterable[float]) -> dict[str, int]:
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}
