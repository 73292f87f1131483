"""adapter_config.json: every field is supported, harmless or refused.

Fields are those of LoraConfig in PEFT 0.19.1 and 0.21.2. An unknown field is refused by name unless it is off (null,
false, empty), because PEFT adds new fields switched off. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from trimtab.checkpoint.config_limits import short
from trimtab.checkpoint.patterns import MAX_CHARS, PatternError, check_count, is_plain, parse, shown

# Of lora_B's columns on a stack of experts, where two programs give one file two meanings (adapters/experts.py): our own field.
STACKED_ORDER, STACKED_ORDERS = "stacked_lora_B", ("peft", "unsloth")

# Read by match_adapter or by the checks below.
SUPPORTED = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias",
    "modules_to_save", "fan_in_fan_out", "init_lora_weights", "ensure_weight_tying", "target_parameters", STACKED_ORDER,
)  # fmt: skip

# Training, bookkeeping, or how the file was made. velora_config changes the backward pass and monteclora_config draws
# noise in training mode only (PEFT 0.21.2, lora/variants.py): at inference both are plain LoRA.
HARMLESS = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core",
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "velora_config", "monteclora_config",
)  # fmt: skip

# Each of these changes the output, and this package does not compute it.
REFUSED: Mapping[str, str] = {
    "megatron_config": "LoRA on Megatron's parallel layers",
    "trainable_token_indices": "trained rows of an embedding (trainable tokens)",
    "alora_invocation_tokens": "activated LoRA, which switches on at an invocation text",
    "use_qalora": "QALoRA, which pools the input",
    "layer_replication": "replicated layers, which change the model",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing between adapters",
    "kasa_config": "KaSA, which truncates the base weight",
}
MERGED = "; PEFT's merge_and_unload() and save_pretrained() make a checkpoint that has it"
MOST_RANK = 2**20
_RANK = f"a rank is an integer of at least 1 and at most {MOST_RANK}"
FIELDS = frozenset((*SUPPORTED, *HARMLESS, *REFUSED))

# The effect of these in PEFT at load: "pissa*", "olora" and "loftq" replace the base weight, "corda" fails, "lora_ga"
# does not change the base although the adapter was trained against a changed one. save_pretrained with
# path_initial_model_for_weight_conversion writes true instead.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica", "true", "false")


def config_problems(config: Mapping[str, Any]) -> list[str]:
    """Return every reason why an adapter with this configuration cannot be applied as PEFT would, as text."""
    kind = config.get("peft_type")
    if kind != "LORA":
        shown = "is missing" if kind is None else f"is {kind!r}"
        return [f"peft_type {shown}: only LORA adapters can be applied"]
    problems = [
        f"{field}={short(config[field])}: {reason} is not supported{MERGED if field == 'trainable_token_indices' else ''}"
        for field, reason in REFUSED.items()
        if _is_on(config.get(field))
    ]
    problems += [
        f"{field}={short(value)}: unknown field, its effect is not known"
        for field, value in config.items()
        if field not in FIELDS and _is_on(value)
    ]
    for field in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"):
        if not isinstance(config.get(field), (bool, NoneType)):  # PEFT 0.21.2 reads null as false in these five
            problems.append(f"{field}={short(config[field])}: must be true or false")
    return problems + _value_problems(config)


def _value_problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if not _is_rank(config.get("r", 8)):
        problems.append(f"r={short(config['r'])}: {_RANK}")
    if not _is_number(config.get("lora_alpha", 8)):
        problems.append(f"lora_alpha={short(config['lora_alpha'])}: must be a finite number")
    problems += _pattern_problems(config, "rank_pattern", _is_rank, _RANK)
    problems += _pattern_problems(config, "alpha_pattern", _is_number, "must be a finite number")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        problems.append(f"bias={short(config['bias'])}: must be none, all or lora_only")
    if config.get("lora_bias") is True and config.get("use_dora") is True:
        problems.append("lora_bias and use_dora together: PEFT has no such adapter")
    saved = config.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list) and all(isinstance(name, str) and name for name in saved)):
        problems.append(f"modules_to_save={short(saved)}: must be a list of names")
    parameters = config.get("target_parameters")
    if parameters is not None and not (
        isinstance(parameters, list) and all(isinstance(name, str) and name for name in parameters)
    ):  # fmt: skip
        problems.append(f"target_parameters={short(parameters)}: must be a list of names")
    if config.get(STACKED_ORDER) not in (None, *STACKED_ORDERS):
        problems.append(f"{STACKED_ORDER}={short(config[STACKED_ORDER])}: must be one of {', '.join(STACKED_ORDERS)}")
    problems += _selection_problems(config)
    init = config.get("init_lora_weights", True)
    if init is not None and not isinstance(init, bool):
        text = str(init).lower()
        if text.startswith(_CHANGES_BASE):
            problems.append(
                f"init_lora_weights={short(init)}: the adapter was trained on a changed base weight; save it with "
                "path_initial_model_for_weight_conversion to turn it into a plain LoRA"
            )
        elif text not in _KEEPS_BASE:
            problems.append(f"init_lora_weights={short(init)}: unknown initialisation")
    return problems


# The regular expression that PEFT makes of each pattern of a field: the field as one text, and as a list or a mapping.
_FORMS: Mapping[str, tuple[str | None, str | None]] = {
    "rank_pattern": (None, r"(.*\.)?(%s)$"), "alpha_pattern": (None, r"(.*\.)?(%s)$"),
    "target_modules": ("%s", None), "exclude_modules": ("%s", None),
    "layers_pattern": (r"(?:^|.*?\.)%s\.(?P<idx>\d+)\.", r"(?:^|.*?\.)%s\.(?P<idx>\d+)\."),
    "modules_to_save": (None, r"(^|.*\.)%s($|\..*)"),
}  # fmt: skip


def _selection_problems(config: Mapping[str, Any]) -> list[str]:
    """Return the problems of the fields that select modules: their types, and their patterns as PEFT reads them.

    A pattern that is only too expensive is detected when it is matched.
    """
    problems: list[str] = []
    expressions: list[tuple[str, str, str]] = []
    for field, (of_text, of_entry) in _FORMS.items():
        value = config.get(field)
        entries, form = ([value], of_text) if isinstance(value, str) else (value, of_entry)
        if value is None or (isinstance(value, str) and of_text is None):
            continue  # a text instead of a list is reported with the field's own type
        is_mapping = field in ("rank_pattern", "alpha_pattern")
        if not isinstance(entries, dict if is_mapping else list) or not all(isinstance(entry, str) for entry in entries):
            if not is_mapping and field != "modules_to_save":
                problems.append(f"{field}={short(value)}: must be a list of names or a regular expression")
            continue
        try:
            check_count(entries, are_plain=form is None)
        except PatternError as exc:
            problems.append(f"{field} {exc}")
            continue
        if form is not None:
            expressions += [(field, entry, form) for entry in entries if not is_plain(entry)]
    if sum(len(pattern) for _, pattern, _ in expressions) > MAX_CHARS:
        return [*problems, f"the regular expressions of the configuration have more than {MAX_CHARS:,} characters"]
    for field, pattern, form in expressions:
        try:
            parse(form.replace("%s", pattern))
        except PatternError as exc:
            problems.append(f"{field}[{shown(pattern)}]: {exc}")
    return problems


def _pattern_problems(config: Mapping[str, Any], field: str, is_valid: Callable[[Any], bool], reason: str) -> list[str]:
    patterns = config.get(field)
    if patterns is None:
        return []
    if not isinstance(patterns, dict):
        return [f"{field}={short(patterns)}: must map module names to values"]
    problems = []
    for pattern, value in patterns.items():
        if not is_valid(value):
            problems.append(f"{field}[{shown(pattern)}]={short(value)}: {reason}")
    return problems


def _is_on(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_RANK


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False
