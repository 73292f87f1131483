"""What is reported about one adapter?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from trimtab.adapters.config import Rules, ends_of, own_path
from trimtab.adapters.file import AdapterFile, read_adapter
from trimtab.adapters.match import AdapterSpec, AdapterTarget, match_adapter, parts_of

__all__ = ["AdapterFile", "AdapterSpec", "AdapterTarget", "describe", "match_adapter", "read_adapter"]


def describe(file: AdapterFile, spec: AdapterSpec | None) -> dict[str, Any]:
    """Return the report of `trimtab inspect` as JSON-ready values.

    Without a model (spec None): the contents of the file, with parts judged by names alone. With a model also: targets
    by kind, tensors without effect and the reason, the spelling rule, modules whose path was resolved to another, ranks
    and scales.
    """
    config = file.config
    shown = ("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save")
    report: dict[str, Any] = {
        "path": str(file.folder), "base_model": config.get("base_model_name_or_path") or " or ".join(file.made_for) or None,
        "peft_version": config.get("peft_version"), "tensors": len(file.tensors),
        "bytes": sum(entry.nbytes for entry in file.tensors.values()),
        "dtypes": dict(sorted(Counter(entry.dtype for entry in file.tensors.values()).items())), "parts": parts_of(file.tensors),
        "config": {name: config[name] for name in shown if config.get(name) not in (None, False, [], {})},
        "target_modules": config.get("target_modules"),
    }  # fmt: skip
    return report if spec is None else report | _describe_match(spec)


def _describe_match(spec: AdapterSpec) -> dict[str, Any]:
    lora = [target for target in spec.targets if target.kind != "saved"]
    config = spec.file.config
    renamed = [(t.adapter_path, t.module_path) for t in spec.targets if not _is_direct(t)]
    rules = Rules(spec.file.folder, config, (path for target in lora for path in _spellings(target)))
    unnamed = [one.module_path for one in lora if one.stack is None and rules.targeted.isdisjoint(_spellings(one))]
    notes = list(spec.notes)
    if unnamed and config.get("target_modules") is not None:
        notes.append(
            f"target_modules does not name {len(unnamed)} of the {len(lora)} modules that have keys (first: "
            f"{unnamed[0]}), or exclude_modules or layers_to_transform leave them out; they are applied, PEFT would drop them "
            "silently"
        )
    notes += [f"{count} tensors have no effect, {why}" for why, count in Counter(why for _, why in spec.no_effect).items()]
    named = config.get("target_modules")
    ends = {end for target in lora for path in _spellings(target) for end in ends_of(path)}
    idle = set(named) - ends - set(spec.idle.get("target_modules", ())) if isinstance(named, list) else set()
    if idle:
        notes.append(f"target_modules names {', '.join(sorted(map(str, idle)))}, for which the file has no key")
    return spec.counts() | {
        "prefix": spec.prefix, "ranks": _tally(target.rank for target in lora), "scales": _tally(target.scale for target in lora),
        "dora": sum(target.use_dora for target in lora), "lora_bias": sum(target.has_bias for target in lora),
        "dropped": [{"key": key, "reason": reason} for key, reason in spec.no_effect],
        "remapped": [{"from": old, "to": new} for old, new in renamed], "bytes_attached": spec.nbytes("float32"), "notes": notes,
    }  # fmt: skip


def _spellings(target: AdapterTarget) -> set[str]:
    paths = {own_path(target.adapter_path), target.module_path}
    return paths | ({path.removesuffix(".linear") for path in paths} if target.wrapped else set())


def _is_direct(target: AdapterTarget) -> bool:
    own = own_path(target.adapter_path)
    return own == target.module_path or (target.stack is not None and own.startswith(f"{target.module_path}."))


def _tally(values: Iterable[float]) -> dict[str, int]:
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}
