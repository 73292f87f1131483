"""Loads the first adapter into a live base, and further adapters in the same way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.adapters.match import AdapterSpec
from trimtab.bridge.attach import Filler, check_dora, follow_leaf_entries, inject_first, inject_next, keep_devices
from trimtab.bridge.config import check_kwargs, peft_config
from trimtab.bridge.inspect import scan
from trimtab.bridge.inspect_findings import BY_NAME, Finding
from trimtab.bridge.live import read_live
from trimtab.bridge.merging import keep_merges
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.errors import RequestError, UpstreamError

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
