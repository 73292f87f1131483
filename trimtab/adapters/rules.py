"""The meaning of an adapter's configuration for modules, by PEFT's rules: rank and scale, targets, saved modules, idle
entries.

The patterns of a configuration are matched over all paths at once (patterns.py). Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trimtab.checkpoint.names import near_names
from trimtab.checkpoint.patterns import MAX_CHARS, Matcher, PatternError, is_plain, shown
from trimtab.errors import AdapterError

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
        """Return the layers that the model does not have. PEFT reads the number after the first named list, or after
        the first list.
        """
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
