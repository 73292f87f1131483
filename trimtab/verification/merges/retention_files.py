"""The retained change of a merged checkpoint: base and merged files are read tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.adapters.adapter import AdapterTarget, match_adapter, read_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.errors import CheckpointError
from trimtab.formats.packed import split_packed
from trimtab.formats.record import stored_format
from trimtab.merging.changes.experts import StackPairs
from trimtab.process import phases
from trimtab.verification.merges.packed_grid import Grid, read_grid
from trimtab.verification.merges.retention import Survival, lora_delta, survival
from trimtab.verification.merges.weights import ModuleWeight, module_weight, saved_weight


class _Weights:
    """The weights of a checkpoint by their path in the model, one at a time and dense."""

    def __init__(self, folder: Path) -> None:
        from trimtab.engine.loader import transformers_model as hf

        self.checkpoint = read_checkpoint(folder)
        self.entries, self.packed = split_packed(self.checkpoint)
        self.probe: Any = hf.probe(self.checkpoint, "float32")  # represents every file dtype exactly
        self.anatomy: Any = hf.anatomy_of(self.probe, self.checkpoint, quant="none", keep_unquantized=())

    def weight(self, tensor_path: str) -> Tensor:
        path = self.probe.ties.get(tensor_path, tensor_path)
        expression = self.probe.sources.get(path)
        if expression is None:
            raise CheckpointError("is in no file of it", path=self.checkpoint.path, tensor_name=tensor_path)
        weight: Tensor = expression.replay(self._fetch)
        return weight

    def form(self, tensor_path: str) -> str:
        """Return the form of a weight in the files: the dtype of its tensors, or the packed form."""
        leaf = self.probe.sources[self.probe.ties.get(tensor_path, tensor_path)].leaves[0]
        return str(self.packed[leaf].kind if leaf in self.packed else self.entries[leaf].dtype)

    def grid(self, tensor_path: str) -> tuple[Grid, Tensor] | None:
        """Return the grid of a packed weight and its values, not rounded to any dtype; None if several tensors form the
        weight, or its format has no grid.
        """
        expression = self.probe.sources[self.probe.ties.get(tensor_path, tensor_path)]
        if not expression.is_leaf or expression.leaves[0] not in self.packed:
            return None
        return read_grid(self.packed[expression.leaves[0]])

    def is_plain(self, tensor_path: str) -> bool:
        """Whether the files contain the weight unpacked."""
        expression = self.probe.sources.get(self.probe.ties.get(tensor_path, tensor_path))
        return expression is not None and not any(leaf in self.packed for leaf in expression.leaves)

    def _fetch(self, name: str) -> Tensor:
        import torch

        from trimtab.engine.formats.weights import dequantize, prequantized
        from trimtab.engine.tiers.reader import read_small

        if name not in self.packed:
            return read_small({name: self.entries[name]})[name]
        entry = self.packed[name]
        return dequantize(prequantized(entry, read_small(entry.read_parts), torch.float32))


def survival_of_files(base: Path, merged: Path, adapter: Path) -> tuple[Survival, ...]:
    """Return one row for every module that the adapter changes with LoRA; saved modules are whole weights, not changes.

    base: the checkpoint before the merge. Memory: a few copies of the largest adapted weight in float32.
    """
    return read_merge(base, merged, adapter)[0]


def read_merge(base: Path, merged: Path, adapter: Path) -> tuple[tuple[Survival, ...], tuple[ModuleWeight, ...]]:
    """Return the share of an adapter's change in a merged checkpoint, and the test of each changed weight."""
    ours, theirs = _Weights(base), _Weights(merged)
    spec = match_adapter(read_adapter(adapter), ours.anatomy)
    saved = {target.module_path: _read(target) for target in spec.targets if target.kind == "saved"}
    changes = [target for target in spec.targets if target.kind not in ("saved", "experts")]
    stacks: dict[str, list[AdapterTarget]] = {}
    for target in spec.targets:
        if target.stack is not None:
            stacks.setdefault(f"{target.module_path}.{target.stack.parameter}", []).append(target)
    changed = {f"{target.module_path}.weight" for target in changes}
    rows, tests = [], []
    count = phases.counting("reading the merged weights, module")
    for done, target in enumerate(changes, 1):
        path, tensors = f"{target.module_path}.weight", _read(target)
        weight, merged_weight = ours.weight(path), theirs.weight(path)
        rows.append(survival(target.module_path, weight, merged_weight, target_delta(target, weight, tensors)))
        # PEFT saves an embedding with its LoRA: the change applies to the saved one.
        weight = saved.get(target.module_path, {}).get("weight", weight).float()
        delta = target_delta(target, weight, tensors)
        terms = None if "magnitude" in tensors else _terms(target, tensors)
        grid, values = theirs.grid(path) or (None, merged_weight)
        form = theirs.form(path)
        tests.append(module_weight(target.module_path, weight, values, delta, form, terms=terms, grid=grid))
        count(done, len(changes))
    for path, targets in stacks.items():
        delta, terms = _stack_delta(targets)
        weight, merged_weight = (one.weight(path).float().flatten(0, 1) for one in (ours, theirs))
        rows.append(survival(path, weight, merged_weight, delta))
        tests.append(module_weight(path, weight, merged_weight, delta, theirs.form(path), terms=terms))
    for module_path, tensors in saved.items():
        for name, tensor in tensors.items():
            path = f"{module_path}.{name}"
            if path not in changed and theirs.is_plain(path):
                tests.append(saved_weight(path, tensor, theirs.weight(path), theirs.form(path)))
    return tuple(rows), tuple(tests)


def packed_modules(folder: Path) -> dict[str, str]:
    """Return module path -> format of a checkpoint's packed weights. Errors: CheckpointError for one that no merge is packed in."""
    weights = _Weights(folder)
    paths = [path for path in weights.probe.sources if path.endswith(".weight") and not weights.is_plain(path)]
    found = {path.removesuffix(".weight"): weights.form(path) for path in paths}
    if unread := sorted({form for form in found.values() if not stored_format(form).is_coded}):
        raise CheckpointError(
            f"is packed in {', '.join(unread)}, whose rounding of a merged weight is not defined", path=folder,
            hint="Compare with merged files in 16 bits, or packed by bitsandbytes",
        )  # fmt: skip
    return found


def _read(target: AdapterTarget) -> dict[str, Tensor]:
    from trimtab.engine.tiers.reader import read_small

    return read_small(dict(target.tensors))


def _stack_delta(targets: Sequence[AdapterTarget]) -> tuple[Tensor, Tensor]:
    """Return the change of a stack of experts, and the size of its terms, with the experts below each other."""
    from trimtab.engine.tiers.reader import read_small

    left, right, scale = StackPairs(tuple(targets)).factors(lambda entry: read_small({"": entry})[""].float())
    return ((left @ right) * scale).flatten(0, 1), ((left.abs() @ right.abs()) * abs(scale)).flatten(0, 1)


def _terms(target: AdapterTarget, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the size of a change's terms: scale x |B| |A|."""
    A, B = tensors["A"].float().abs(), tensors["B"].float().abs()
    product = (A.T @ B.T) if target.kind == "embedding" or target.fan_in_fan_out else B @ A
    return product.mul_(abs(target.scale))


def target_delta(target: AdapterTarget, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the change of one LoRA target in float32, in the shape of its weight: [D_out, D_in], [V, D] for a table."""
    A, B, magnitude = tensors["A"], tensors["B"], tensors.get("magnitude")
    if target.kind == "embedding" or target.fan_in_fan_out:
        # A table's rows are tokens: PEFT keeps A as [R, V] and B as [D, R] and transposes their product; so for a Conv1D.
        return lora_delta(weight, B.T, A.T, target.scale, magnitude, dora_dim=0)
    return lora_delta(weight, A, B, target.scale, magnitude)
