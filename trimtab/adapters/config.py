"""What do an adapter's tensor names and the fields of adapter_config.json mean for modules, by PEFT's rules?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from trimtab.checkpoint.anatomy import Part
from trimtab.checkpoint.config_limits import short
from trimtab.checkpoint.names import MAX_CHARS, Matcher, PatternError, check_count, is_plain, near_names, parse, shown
from trimtab.errors import AdapterError

PEFT_HEAD = "base_model.model."
Role = Literal[
    "A", "B", "B_bias", "embedding_A", "embedding_B", "magnitude", "saved", "base_copy", "original", "training_only"
]  # fmt: skip

_LORA_ROLES: dict[str, Role] = {
    "lora_A": "A", "lora_B": "B", "lora_embedding_A": "embedding_A", "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "magnitude", "lora_velora_embed": "training_only",
    "lora_monteclora_sampler": "training_only",
}  # fmt: skip
_KNOWN_BUT_NOT_LORA = {
    "lora_diag": "KaSA's diagonal", "lora_arrow": "Arrow routing", "token_adapter": "trainable tokens",
    "trainable_tokens_delta": "trainable tokens", "trainable_tokens_indices": "trainable tokens",
    "lora_E": "AdaLoRA", "hada_w1_a": "LoHa", "lokr_w1": "LoKr", "vera_lambda_b": "VeRA", "oft_R": "OFT",
    "ia3_l": "IA3", "prompt_embeddings": "prompt tuning",
}  # fmt: skip

_PARTS: tuple[tuple[Part, frozenset[str]], ...] = (
    ("connector", frozenset(("embed_vision", "embed_audio", "multi_modal_projector", "mm_projector"))),
    ("vision", frozenset(("vision_tower", "vision_model", "visual", "image_tower", "video_tower", "vision_embedder"))),
    ("audio", frozenset(("audio_tower", "audio_model", "audio_encoder"))),
    ("head", frozenset(("lm_head",))),
)


@dataclass(frozen=True)
class AdapterKey:
    """The parts of one tensor name.

    path: the module as the adapter spells it, prefix included. role "original": the base's own tensor below a saved
    module. parameter: of a saved module, else "". name: the adapter's name if the key contains one ("default"), as in
    raw state dicts. problem: why the key cannot be used, else "".
    """

    adapter_key: str
    path: str
    role: Role
    parameter: str = ""
    name: str | None = None
    problem: str = ""


def parse_key(adapter_key: str) -> AdapterKey:
    """Return the parts of a key; a key that cannot be used has a `problem`.

    Source: PEFT 0.21.2, utils/save_and_load.py and tuners_utils.py, _remove_adapter_name_from_state_dict_key; DoRA's
    magnitude is written without ".weight" although the module has one (lora/model.py).
    """
    segments = adapter_key.split(".")
    for index in range(len(segments) - 1, 0, -1):
        if segments[index] in _LORA_ROLES:
            return _lora_key(adapter_key, segments, index)
    foreign = next((_KNOWN_BUT_NOT_LORA[segment] for segment in segments if segment in _KNOWN_BUT_NOT_LORA), None)
    if foreign is None and any(segment.startswith("lora_") for segment in segments):
        foreign = "an unknown kind of LoRA tensor"
    if foreign is not None:
        return AdapterKey(adapter_key, adapter_key, "saved", problem=f"{foreign} is not supported")
    if "modules_to_save" in segments[1:-1]:
        index = segments.index("modules_to_save", 1)
        before, after = segments[:index], segments[index + 1 :]
        name = after[0] if len(after) > 1 else None
        return AdapterKey(adapter_key, ".".join(before + after[1:-1]), "saved", after[-1], name)
    if "original_module" in segments[1:-1]:
        index = segments.index("original_module", 1)
        return AdapterKey(adapter_key, ".".join(segments[:index] + segments[index + 1 : -1]), "original", segments[-1])
    if len(segments) > 2 and segments[-2] == "base_layer":
        return AdapterKey(adapter_key, ".".join(segments[:-2]), "base_copy", segments[-1])
    if len(segments) == 1:
        return AdapterKey(adapter_key, adapter_key, "saved", problem="names no module")
    return AdapterKey(adapter_key, ".".join(segments[:-1]), "saved", segments[-1])


def _lora_key(adapter_key: str, segments: list[str], index: int) -> AdapterKey:
    path, rest = ".".join(segments[:index]), segments[index + 1 :]
    role = _LORA_ROLES[segments[index]]
    if role == "training_only":
        return AdapterKey(adapter_key, path, role)
    leaf = ""
    if role in ("A", "B"):
        leaf = rest.pop() if rest else ""
    elif role == "magnitude" and rest and rest[-1] == "weight":
        rest.pop()
    if leaf == "bias" and role == "B":
        role = "B_bias"
    elif leaf not in ("", "weight") or (role in ("A", "B") and not leaf):
        return AdapterKey(adapter_key, path, role, problem=f"PEFT writes no such tensor of {segments[index]}")
    if len(rest) > 1:
        return AdapterKey(adapter_key, path, role, problem="more name parts than PEFT writes")
    return AdapterKey(adapter_key, path, role, name=rest[0] if rest else None)


def own_path(path: str) -> str:
    """Return the path that the module had during training: the adapter's spelling without PEFT's head."""
    return path.removeprefix(PEFT_HEAD)


def part_of_key(adapter_key: str) -> Part:
    """Return the part of the model in which a name lies, judged by the name alone."""
    segments = set(adapter_key.split("."))
    return next((part for part, names in _PARTS if segments & names), "language")


@dataclass(frozen=True)
class Rewrite:
    """One spelling of module paths in adapters: `head` is removed, then the first matching move is applied.

    A start without a final dot matches that whole name and everything below it. An empty start matches everything.
    """

    head: str
    moves: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The rule as text: only the head, or "as written in the file -> as in the model"."""
        if not self.moves:
            return self.head
        start, target = self.moves[0]
        return f"{self.head}{start} -> {target}"

    def apply(self, path: str) -> str | None:
        """Return the model's spelling, or None for a path that this rule does not cover."""
        if not path.startswith(self.head):
            return None
        path = path[len(self.head) :]
        for start, target in self.moves:
            if start and not start.endswith("."):
                if path == start or path.startswith(f"{start}."):
                    return target + path[len(start) :]
            elif path.startswith(start):
                return target + path[len(start) :]
        return path

    def unapply(self, path: str) -> str | None:
        """Return the spelling of a model's path in this rule's adapters, without PEFT's head; None if they cannot name it."""
        for start, target in self.moves or (("", ""),):
            is_whole = bool(start) and not start.endswith(".")
            if path == target or path.startswith(f"{target}." if is_whole else target):
                old = start + path[len(target) :]
                if self.apply(self.head + old) == path:
                    return old
        return None


_HEAD = ("lm_head", "lm_head")
_MOVES: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    # A class without the language modelling head has no leading "model.".
    (("", "model."),),
    # Before transformers 4.52, multimodal classes had the text model with its head and the towers as siblings.
    (
        ("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head"), _HEAD,
        ("model.", "model."), ("", "model."),
    ),
    (("model.language_model.model.", "model.language_model."), ("model.language_model.lm_head", "lm_head")),
    # A text-only class, and Qwen2-VL before 4.52, call the text model "model".
    (("model.", "model.language_model."), ("visual.", "model.visual."), _HEAD),
    # The same without a head.
    (("", "model.language_model."),),
    # One "model." too many.
    (("model.model.", "model."), ("model.lm_head", "lm_head")),
    # The text part of a multimodal adapter on a text-only class.
    (("model.language_model.", "model."),),
    (("language_model.model.", "model."), ("language_model.lm_head", "lm_head")),
)  # fmt: skip

# PEFT writes its head before every path; servers and converters omit it.
REWRITES: tuple[Rewrite, ...] = tuple(Rewrite(head, moves) for head in (PEFT_HEAD, "") for moves in _MOVES)


# Fields of a configuration --------------------------------------------------------------------------------------------

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
    "use_qalora": "QALoRA, which pools the input", "layer_replication": "replicated layers, which change the model",
    "use_bdlora": "block-diagonal LoRA", "arrow_config": "Arrow routing between adapters",
    "kasa_config": "KaSA, which truncates the base weight",
}  # fmt: skip
MERGED = "; PEFT's merge_and_unload() and save_pretrained() make a checkpoint that has it"
MOST_RANK = 2**20
_RANK = f"a rank is an integer of at least 1 and at most {MOST_RANK}"
FIELDS = frozenset((*SUPPORTED, *HARMLESS, *REFUSED))

# What PEFT does with these at load: "pissa*", "olora", "loftq" replace the base weight, "corda" fails, "lora_ga" changes nothing,
# although the adapter was trained on a changed base. Saving with path_initial_model_for_weight_conversion writes true instead.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica", "true", "false")


def config_problems(config: Mapping[str, Any]) -> list[str]:
    """Return every reason why an adapter with this configuration cannot be applied as PEFT would, as text. Fields are those of
    LoraConfig in PEFT 0.19.1 and 0.21.2. An unknown field is refused by name unless it is off (null, false, empty), because PEFT
    adds new fields switched off."""
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
    for field in ("modules_to_save", "target_parameters"):
        names = config.get(field)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) and name for name in names)):
            problems.append(f"{field}={short(names)}: must be a list of names")
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
    """Return the problems of the fields that select modules. A pattern that is only too expensive is detected when it is
    matched."""
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


# What they mean for modules -------------------------------------------------------------------------------------------

# PEFT adds these to modules_to_save depending on the task, and ignores those that a model does not have. Source: PEFT
# 0.21.2, peft_model.py, PeftModelForSequenceClassification and the like; utils/constants.py.
_ADDED_BY_TASK = ("classifier", "score", "qa_outputs")
_TOLD = 5  # the most idle entries that are named; for more, their number


class Rules:
    """A configuration's rules for these paths. Errors: AdapterError for a pattern that cannot be matched."""

    def __init__(self, folder: Path, config: Mapping[str, Any], paths: Iterable[str]) -> None:
        self._folder, self._config = folder, config
        self._paths = list(dict.fromkeys(paths))
        saved = tuple(config.get("modules_to_save") or ())
        self._saved = frozenset(saved)
        self._saved_lengths = tuple({len(name) for name in saved})

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher(self._paths)

    @cached_property
    def _first(self) -> dict[str, dict[str, str]]:
        """For rank_pattern and alpha_pattern: path -> the first pattern that names it."""
        return {
            field: self._asked(field, self._matcher.first_of, self._config.get(field) or ())
            for field in ("rank_pattern", "alpha_pattern")
        }

    def _asked(self, field: str, ask: Callable[[Any], Any], patterns: Any) -> Any:
        try:
            return ask(patterns) if patterns else {}
        except PatternError as exc:
            named = field if exc.pattern is None else f"{field}[{shown(exc.pattern)}]"
            raise AdapterError(self._folder, [f"{named}: {exc}"]) from exc

    def rank_and_scale(self, spellings: Sequence[str]) -> tuple[int, float, list[str]]:
        """Return (rank, scale, problems) of a module, named by its path in the adapter and, if it differs, in the model.

        The scale is alpha / R, or alpha / sqrt(R) for rsLoRA. Source: arXiv 2106.09685 section 4.1, arXiv 2312.03732; PEFT
        0.21.2, lora/layer.py, LoraLayer.update_layer.
        """
        rank, rank_problem = self._value("rank_pattern", self._config.get("r", 8), spellings)
        alpha, alpha_problem = self._value("alpha_pattern", self._config.get("lora_alpha", 8), spellings)
        scale = alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank
        return rank, scale, [problem for problem in (rank_problem, alpha_problem) if problem]

    def _value(self, field: str, default: Any, spellings: Sequence[str]) -> tuple[Any, str]:
        # The adapter's spelling was the module's path during training, so it decides. The model's path is for
        # configurations that were edited to fit the model.
        first = self._first[field]
        values = [self._config[field][first[path]] for path in spellings if path in first]
        if not values:
            return default, ""
        if any(value != values[0] for value in values):
            return values[0], f"{field} gives different values for {' and '.join(map(repr, spellings))}"
        return values[0], ""

    @cached_property
    def named(self) -> frozenset[str]:
        """The paths that target_modules names; a list names whole last segments."""
        targets = self._config.get("target_modules")
        if targets == "all-linear":
            return frozenset(self._paths)
        if isinstance(targets, str):
            return frozenset(self._asked("target_modules", self._matcher.matching, targets))
        wanted = frozenset(targets or ())
        return frozenset(path for path in self._paths if not wanted.isdisjoint(ends_of(path)))

    @cached_property
    def targeted(self) -> frozenset[str]:
        """The paths to which PEFT adds LoRA: named, not excluded, and in a layer of layers_to_transform.

        Source: PEFT 0.21.2, tuners/tuners_utils.py, check_target_module_exists.
        """
        excluded = self._config.get("exclude_modules")
        others = Rules(self._folder, {"target_modules": excluded}, self._paths).named if excluded else frozenset()
        return frozenset(path for path in self.named - others if self._is_in_layers(path))

    def _is_in_layers(self, path: str) -> bool:
        layers, names = self._config.get("layers_to_transform"), self._config.get("layers_pattern")
        if layers is None or layers == [] or isinstance(self._config.get("target_modules"), str):
            return True  # PEFT reads them with a list of target_modules only
        segments = path.split(".")
        names = [names] if isinstance(names, str) and names else names if isinstance(names, list) else []
        found = [
            int(number) for place, number in enumerate(segments[:-1])
            if number.isdigit() and (segments[place - 1] in names and place > 0 if names else place > 1)
        ]  # fmt: skip
        return bool(found) and found[0] in (layers if isinstance(layers, list) else [layers])

    def is_saved(self, path: str) -> bool:
        """Return whether modules_to_save replaces the module at this path or a parent of it.

        Source: PEFT 0.21.2, utils/other.py, _set_trainable: a plain end-of-text test without a name boundary, so "norm"
        also means "input_layernorm".
        """
        return bool(self._saved) and not self._saved.isdisjoint(self._texts_before_a_dot(path))

    def _texts_before_a_dot(self, path: str) -> Iterable[str]:
        ends = [*(at for at, letter in enumerate(path) if letter == "."), len(path)]
        return (path[end - length : end] for end in ends for length in self._saved_lengths if length <= end)

    # Entries that name nothing ---------------------------------------------------------------------------------------

    def idle(self, others: Callable[[], Iterable[str]], former: frozenset[str] = frozenset()) -> dict[str, list[Any]]:
        """Return, by field, the entries that name none of the paths.

        others: further names of the model's modules, checked only if an entry names none of the paths. former: words of
        former module names; an entry with one of them is skipped, because it may mean a renamed module.
        """
        idle = {
            field: told
            for field, entries in self._idle()
            if (told := [entry for entry in entries if former.isdisjoint(re.findall(r"\w+", str(entry)[:MAX_CHARS]))])
        }
        if not idle:
            return {}
        config = {name: self._config.get(name) for name in ("layers_to_transform", "layers_pattern")}
        config |= {field: self._only(self._config[field], entries) for field, entries in idle.items()}
        left = dict(Rules(self._folder, config, others())._idle())
        return {field: [entry for entry in entries if entry in left[field]] for field, entries in idle.items() if field in left}

    @staticmethod
    def _only(value: Any, entries: list[Any]) -> Any:
        return value if isinstance(value, str) else dict.fromkeys(entries, 1) if isinstance(value, dict) else entries

    def idle_notes(self, idle: Mapping[str, list[Any]]) -> list[str]:
        """Return a remark for each field with such entries, with the names most similar to them."""
        notes = []
        for field, entries in idle.items():
            told = [f"{shown(str(entry))}{self._near(entry)}" for entry in entries[:_TOLD]]
            more = f" and {len(entries) - _TOLD:,} more" if len(entries) > _TOLD else ""
            what = "layer" if field == "layers_to_transform" else "module"
            notes.append(f"{field}: no {what} of the model for {', '.join(told)}{more}")
        return notes

    def _idle(self) -> Iterator[tuple[str, list[Any]]]:
        config, paths = self._config, self._paths
        for field in ("rank_pattern", "alpha_pattern"):
            if idle := self._asked(field, self._matcher.idle, config.get(field)):
                yield field, idle
        ends: frozenset[str] | None = None
        for field in ("target_modules", "exclude_modules"):
            entries = config.get(field)
            if isinstance(entries, str) and entries not in ("", "all-linear"):
                if not self._asked(field, self._matcher.matching, entries):
                    yield field, [entries]
            elif isinstance(entries, list):
                ends = ends or frozenset(end for path in paths for end in ends_of(path))
                if idle := [entry for entry in entries if entry not in ends]:
                    yield field, idle
        if self._saved:
            texts = {text for path in paths for text in self._texts_before_a_dot(path)}
            if idle := [name for name in config["modules_to_save"] if name not in texts and name not in _ADDED_BY_TASK]:
                yield "modules_to_save", idle
        yield from self._idle_layers()

    def _idle_layers(self) -> Iterator[tuple[str, list[Any]]]:
        """Return the layers that the model does not have. PEFT reads the number after the first named list, or after the first
        list."""
        layers, patterns = self._config.get("layers_to_transform"), self._config.get("layers_pattern") or ()
        layers = layers if isinstance(layers, list) else [layers]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if layers in ([None], []):
            return
        expressions = [rf"(?:^|.*?\.)(?:{pattern})\.\d+\..*" for pattern in patterns] or [r".*?\.[^.]*\.\d+\..*"]
        lists = [self._asked("layers_pattern", self._matcher.matching, expression) for expression in expressions]
        if idle := [pattern for pattern, found in zip(patterns, lists, strict=False) if not found]:
            yield "layers_pattern", idle
        numbers = {int(part) for path in set().union(*lists) for part in path.split(".") if part.isdecimal()}
        if idle := [layer for layer in layers if layer not in numbers]:
            yield "layers_to_transform", idle

    def _near(self, entry: Any) -> str:
        if not isinstance(entry, str):
            return ""
        # For an expression, the name at its end. A typo keeps the layer number, and time grows with the number of
        # names.
        name = entry if is_plain(entry) else (re.findall(r"\w+", entry[-200:]) or [""])[-1]
        numbers = [part for part in name.split(".") if part.isdecimal()]
        count = name.count(".") + 1
        choices = dict.fromkeys(".".join(path.split(".")[-count:]) for path in self._paths)
        alike = [choice for choice in choices if numbers == [part for part in choice.split(".") if part.isdecimal()]]
        near = near_names(name, alike[:500]) if name else []
        return f" (similar: {', '.join(near)})" if near else ""


def ends_of(path: str) -> list[str]:
    """Return the path and every suffix of it that begins with a whole segment."""
    return [path, *(path[at + 1 :] for at, letter in enumerate(path) if letter == ".")]
