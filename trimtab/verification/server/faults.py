"""Which known faults do servers have with adapters, each as a changed adapter folder?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget
from trimtab.adapters.config import own_path
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.verification.server.verdict import OTHER_VALUES

TOWERS = ("vision", "audio", "connector")
# An older version of an adapter is simulated by a random change of B, by this share of its size.
OTHER_BY, SEED = 0.1, 0
IGNORED = "ignored"
ONE_MODULE = "one module dropped"

Config = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """One fault. name: in a report. what: description. folder: the adapter with its effect; None for the base.

    is_part: whether only a part of the adapter, or slightly different values, are concerned. Noise hides such faults first. A
    second merge of DoRA cannot be expressed: its norm would need the merged weights.
    """

    name: str
    what: str
    folder: Path | None
    is_part: bool = False


def write_faults(spec: AdapterSpec, work: Path, others: Mapping[str, Path]) -> tuple[list[Fault], list[str]]:
    """Return the possible faults of this adapter, written below `work`, and the faults that are not tried, with the
    reason.

    others: name -> folder of adapters that the server may have mixed up with this one.
    """
    writer = _Writer(spec, work)
    faults = [Fault(IGNORED, "the adapter is ignored: the base answers", None)]
    faults += list(writer.faults())
    faults += [Fault(f"adapter {name}", f"the adapter {name} answers", folder) for name, folder in others.items()]
    return faults, writer.not_tried


class _Writer:
    def __init__(self, spec: AdapterSpec, work: Path) -> None:
        self.spec, self.work = spec, work
        self.config: Config = dict(spec.file.config)
        self.tensors: Tensors = load_file(str(spec.file.file))
        self.lora = [target for target in spec.targets if target.kind != "saved"]
        self.single = [target for target in self.lora if target.kind != "experts"]  # with one A and one B
        self.not_tried: list[str] = []

    def faults(self) -> Iterator[Fault]:
        made: tuple[tuple[str, str, Callable[[], tuple[Config, Tensors] | None], bool], ...] = (
            ("scale", self._scale_words(), self._other_scale, False),
            ("alpha_pattern ignored", "alpha_pattern is ignored: lora_alpha everywhere", self._no_alpha_pattern, False),
            ("rank_pattern ignored", "rank_pattern is ignored: every scale is that of r", self._no_rank_pattern, False),
            ("DoRA ignored", "the magnitudes of DoRA are ignored", self._no_dora, False),
            ("vision part dropped", "the vision tower's part is dropped", lambda: self._without("vision"), False),
            ("audio part dropped", "the audio tower's part is dropped", lambda: self._without("audio"), False),
            ("connector part dropped", "the connector's part is dropped", lambda: self._without("connector"), False),
            ("tower parts dropped", "only the language model's part acts", lambda: self._without(*TOWERS), False),
            ("expert part dropped", "the experts' part is dropped", self._without_experts, False),
            ("A and B swapped", "A and B are swapped in square modules", self._swapped, False),
            ("merged twice", "the change is added twice", self._twice, False),
            (ONE_MODULE, "", self._without_largest, True),
            (OTHER_VALUES, f"the values differ by {OTHER_BY:.0%}, as those of an older version", self._other_values, True),
        )
        for name, what, make, is_part in made:
            result = make()
            if result is not None:
                folder = self.work / name.replace(" ", "-").lower()
                write_adapter(folder, *result)
                yield Fault(name, what or f"{self._largest()} is dropped", folder, is_part)

    # Configurations ---------------------------------------------------------------------------------------------------

    def _scale_words(self) -> str:
        right, wrong = ("alpha / sqrt(r)", "alpha / r") if self.config.get("use_rslora") else ("alpha / r", "alpha / sqrt(r)")
        return f"the scale is {wrong} where {right} is right"

    def _other_scale(self) -> tuple[Config, Tensors] | None:
        if all(target.rank == 1 for target in self.lora):
            return None
        return {**self.config, "use_rslora": not self.config.get("use_rslora")}, self.tensors

    def _no_alpha_pattern(self) -> tuple[Config, Tensors] | None:
        return ({**self.config, "alpha_pattern": {}}, self.tensors) if self.config.get("alpha_pattern") else None

    def _no_rank_pattern(self) -> tuple[Config, Tensors] | None:
        if not self.config.get("rank_pattern"):
            return None
        rank = int(self.config.get("r", 8))
        power = 0.5 if self.config.get("use_rslora") else 1.0
        alphas = {
            re.escape(own_path(path)): target.scale * target.rank**power * (target.rank / rank) ** power
            for target in self.lora
            for path in _paths_of(target)
        }
        return {**self.config, "alpha_pattern": {**alphas, **(self.config.get("alpha_pattern") or {})}}, self.tensors

    def _no_dora(self) -> tuple[Config, Tensors] | None:
        if not self.config.get("use_dora"):
            return None
        magnitudes = {t.tensors["magnitude"].tensor_name for t in self.lora if "magnitude" in t.tensors}
        return {**self.config, "use_dora": False}, self._but(magnitudes)

    def _twice(self) -> tuple[Config, Tensors] | None:
        if self.config.get("use_dora"):
            self.not_tried.append("merged twice: the norm of DoRA would need the merged weights")
            return None
        patterns = {path: 2 * alpha for path, alpha in (self.config.get("alpha_pattern") or {}).items()}
        alpha = 2 * self.config.get("lora_alpha", 8)
        return {**self.config, "lora_alpha": alpha, "alpha_pattern": patterns}, self.tensors

    # Tensors ----------------------------------------------------------------------------------------------------------

    def _but(self, names: set[str]) -> Tensors:
        return {name: tensor for name, tensor in self.tensors.items() if name not in names}

    def _dropped(self, is_dropped: Callable[[AdapterTarget], bool]) -> tuple[Config, Tensors] | None:
        dropped = [target for target in self.spec.targets if is_dropped(target)]
        if not dropped or len(dropped) == len(self.spec.targets):
            return None  # none or all: the same as an ignored adapter
        names = {entry.tensor_name for target in dropped for entry in target.tensors.values()}
        kept = self._but(names)
        saved = {name for target in dropped if target.kind == "saved" for name in (target.module_path.rsplit(".", 1)[-1],)}
        config = self.config
        if saved:
            config = {**config, "modules_to_save": [n for n in config.get("modules_to_save") or () if n not in saved]}
        if any(target.kind == "experts" for target in dropped):
            config = {key: value for key, value in config.items() if key != "target_parameters"}
        return config, kept

    def _without(self, *parts: str) -> tuple[Config, Tensors] | None:
        if len(parts) > 1 and len({t.part for t in self.spec.targets if t.part in parts}) < 2:
            return None  # a single tower has a separate fault
        return self._dropped(lambda target: target.part in parts)

    def _without_experts(self) -> tuple[Config, Tensors] | None:
        return self._dropped(lambda target: target.kind == "experts" or ".experts." in f".{target.module_path}.")

    def _without_largest(self) -> tuple[Config, Tensors] | None:
        return self._dropped(lambda target: target.module_path == self._largest())

    def _other_values(self) -> tuple[Config, Tensors] | None:
        names = [
            entry.tensor_name
            for target in self.lora
            for role, entry in target.tensors.items()
            if role == "B" or role.startswith("B.")
        ]
        return (self.config, other_values(self.tensors, names, SEED)) if names else None

    def _largest(self) -> str:
        """Return the module whose weight the adapter changes most."""
        return max(self.single, key=self._size).module_path if self.single else ""

    def _size(self, target: AdapterTarget) -> float:
        a, b = self._pair(target)
        # |B A| without computing B A: from the inner products of the factors.
        return abs(target.scale) * math.sqrt(max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0))

    def _pair(self, target: AdapterTarget) -> tuple[Tensor, Tensor]:
        return tuple(self.tensors[target.tensors[role].tensor_name].float() for role in ("A", "B"))  # type: ignore[return-value]

    def _swapped(self) -> tuple[Config, Tensors] | None:
        square = []
        for target in self.single:
            a, b = self._pair(target)
            if target.kind == "linear" and a.shape[1] == b.shape[0]:
                square.append(target)
        if not square:
            self.not_tried.append("A and B swapped: no module is square")
            return None
        tensors = dict(self.tensors)
        for target in square:
            names = [target.tensors[role].tensor_name for role in ("A", "B")]
            a, b = (self.tensors[name] for name in names)
            tensors[names[0]], tensors[names[1]] = b.T.contiguous(), a.T.contiguous()
        return self.config, tensors


def _paths_of(target: AdapterTarget) -> list[str]:
    """Return the paths of a target in rank_pattern and alpha_pattern: of each expert's own layer where its file has these."""
    if target.stack is None or "A" in target.tensors:
        return [target.adapter_path]
    return [entry.tensor_name.partition(".lora_")[0] for role, entry in target.tensors.items() if role.startswith("A.")]


def other_values(tensors: Tensors, names: Sequence[str], seed: int) -> Tensors:
    """Return the tensors, those of `names` changed at random by OTHER_BY of their size (root mean square)."""
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    for name in names:
        values = tensors[name].float()
        change = torch.randn(values.shape, generator=generator) * values.square().mean().sqrt()
        changed[name] = (values + OTHER_BY * change).to(tensors[name].dtype)
    return changed


def write_adapter(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Return the folder, with an adapter written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # The format refuses tensors that share memory.
    pointers = [tensor.data_ptr() for tensor in kept.values()]
    if len(set(pointers)) < len(pointers):
        kept = {name: tensor.clone() for name, tensor in kept.items()}
    save_file(kept, str(folder / TENSORS_NAME), metadata={"format": "pt"})
    return folder
