"""Which targets of an adapter does the stock stack refuse, which keys does it drop, and which layers does it never fill?"""

from __future__ import annotations

import os
from dataclasses import dataclass

from trimtab.adapters.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.adapters.config import PEFT_HEAD, Rules, own_path
from trimtab.adapters.patch import short_pattern
from trimtab.doctor.preflight.shape import ModelShape
from trimtab.errors import AdapterError

# PEFT's default for an adapter without target_modules: language projections only (utils/constants.py, 0.19.0 on).
_DEFAULTS = {"gemma4": r".*language_model\..*\.(q_proj|v_proj)"}


@dataclass(frozen=True, kw_only=True)
class AdapterReading:
    """The adapter as the stock stack interprets it.

    path: its folder. spec: trimtab's match, None if it does not match (then `problems` has the reasons). wrappers:
    modules that target_modules names and that are wrappers, so that PEFT refuses the whole adapter. dropped: module
    paths with keys that target_modules does not name. unfilled: modules that it names without keys in the file.
    no_effect: keys of k/v projections that KV-shared layers do not have. plain_targets: a regular expression that names
    exactly the modules that have keys, inner paths included.
    """

    path: str
    wrappers: tuple[str, ...]
    spec: AdapterSpec | None = None
    problems: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    renamed: bool = False
    plain_targets: str = ""


def read_adapter_for(path: str | os.PathLike[str], shape: ModelShape) -> AdapterReading:
    """Return the stock stack's reading of the adapter in a folder.

    Errors: AdapterError if the folder is no adapter or of an unsupported kind. An adapter of another model is no error: its
    problems are reported. PEFT decides only from `target_modules` which modules get a LoRA layer. `exclude_modules`,
    `layers_to_transform` and `target_parameters` are not considered. Source: PEFT 0.19.1 and 0.21.2, tuners/tuners_utils.py,
    check_target_module_exists; utils/save_and_load.py.
    """
    file = read_adapter(os.fspath(path))
    config = dict(file.config)
    if config.get("target_modules") is None:
        config["target_modules"] = _DEFAULTS.get(shape.anatomy.model_type, [])
    # "all-linear" selects Linear modules, never a wrapper, and a saved adapter lists them anyway.
    rows = () if config["target_modules"] == "all-linear" else shape.anatomy.rows
    rules = Rules(file.folder, config, (row.module_path for row in rows))
    wrappers = tuple(row.module_path for row in rows if row.wraps and row.module_path in rules.named)
    try:
        spec = match_adapter(file, shape.anatomy)
    except AdapterError as exc:
        return AdapterReading(path=str(file.folder), wrappers=wrappers, problems=exc.problems)
    lora = [target for target in spec.targets if target.kind not in ("saved", "experts")]
    have = {target.module_path for target in lora}
    named = {
        row.module_path for row in rows
        if row.kind in ("linear", "embedding") and row.module_path in rules.named and not rules.is_saved(row.module_path)
    }  # fmt: skip
    outer = {row.wraps for row in rows if row.wraps in have and row.module_path in wrappers}
    return AdapterReading(
        path=str(spec.file.peft_folder), spec=spec, wrappers=wrappers,
        dropped=tuple(path for path in sorted(have - named) if rows and path not in outer),
        unfilled=tuple(sorted(named - have)), no_effect=tuple(key for key, _ in spec.no_effect),
        renamed=any(own_path(target.adapter_path) != target.module_path and not target.wrapped for target in lora)
        or not spec.prefix.startswith(PEFT_HEAD),
        plain_targets=short_pattern(sorted(have), [row.module_path for row in shape.anatomy.rows if row.module_path not in have]),
    )  # fmt: skip
