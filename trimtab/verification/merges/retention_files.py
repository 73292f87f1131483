"""The retained change of a merged checkpoint: base and merged files are read tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimtab.adapters.adapter import AdapterTarget, match_adapter, read_adapter
from trimtab.errors import CheckpointError
from trimtab.formats.record import stored_format
from trimtab.merging.changes.experts import StackPairs
from trimtab.process import phases
from trimtab.verification.merges.retention import Survival, lora_delta, survival
from trimtab.verification.merges.unchanged import FileWeights, compare_others
from trimtab.verification.merges.weights import ModuleWeight, OtherTensors, module_weight, saved_weight


def survival_of_files(base: Path, merged: Path, adapter: Path) -> tuple[Survival, ...]:
    """Return one row for every module that the adapter changes with LoRA; saved modules are whole weights, not changes.

    base: the checkpoint before the merge. Memory: a few copies of the largest adapted weight in float32.
    """
    return _changed(FileWeights(base), FileWeights(merged), adapter)[0]


def read_merge(
    base: Path, merged: Path, adapter: Path
) -> tuple[tuple[Survival, ...], tuple[ModuleWeight, ...], OtherTensors]:  # fmt: skip
    """Return the share of an adapter's change in a merged checkpoint, the test of each changed weight, and whether every other
    tensor is the base's."""
    ours, theirs = FileWeights(base), FileWeights(merged)
    rows, tests, changed = _changed(ours, theirs, adapter)
    return rows, tests, compare_others(ours, theirs, changed)


def _changed(
    ours: FileWeights, theirs: FileWeights, adapter: Path
) -> tuple[tuple[Survival, ...], tuple[ModuleWeight, ...], set[str]]:  # fmt: skip
    """Return the rows and tests of all that an adapter changes, and the paths of these tensors."""
    spec = match_adapter(read_adapter(adapter), ours.anatomy)
    saved = {target.module_path: _read(target) for target in spec.targets if target.kind == "saved"}
    changes = [target for target in spec.targets if target.kind not in ("saved", "experts")]
    stacks: dict[str, list[AdapterTarget]] = {}
    for target in spec.targets:
        if target.stack is not None:
            stacks.setdefault(f"{target.module_path}.{target.stack.parameter}", []).append(target)
    changed = {f"{target.module_path}.weight" for target in changes} | stacks.keys()
    rows, tests = [], []
    count = phases.counting("reading the merged weights, module")
    for done, target in enumerate(changes, 1):
        path, tensors = f"{target.module_path}.weight", _read(target)
        weight, merged_weight = ours.weight(path), theirs.weight(path)
        rows.append(survival(target.module_path, weight, merged_weight, target_delta(target, weight, tensors)))
        # PEFT saves an embedding with its LoRA: the change applies to the saved one.
        replaced = saved.get(target.module_path, {}).get("weight")
        bases = _bases(ours, path) if replaced is None else [replaced.float]
        tests.append(_tested(target, path, bases, theirs, tensors))
        bias = f"{target.module_path}.bias"
        if target.has_bias and ours.source(bias) is not None:
            changed.add(bias)
            delta = tensors["B_bias"].float() * target.scale
            tests.append(module_weight(bias, ours.weight(bias), theirs.weight(bias), delta, theirs.form(bias), terms=delta.abs()))
        count(done, len(changes))
    for path, targets in stacks.items():
        delta, terms = _stack_delta(targets)
        weight, merged_weight = (one.weight(path).float().flatten(0, 1) for one in (ours, theirs))
        rows.append(survival(path, weight, merged_weight, delta))
        tests.append(_best(
            module_weight(path, base().float().flatten(0, 1), merged_weight, delta, theirs.form(path), terms=terms)
            for base in _bases(ours, path)
        ))  # fmt: skip
    for module_path, module_tensors in saved.items():
        for name, tensor in module_tensors.items():
            path = f"{module_path}.{name}"
            if path not in changed:
                tests.append(_saved(path, tensor, theirs))
            changed.add(path)
    return tuple(rows), tuple(tests), changed


def _bases(ours: FileWeights, path: str) -> list[Callable[[], Tensor]]:
    """Return the base's weights that a right merge may add to: exact, or, of a packed one, as its format unpacks it."""
    exact: list[Callable[[], Tensor]] = [lambda: ours.weight(path)]
    return exact if ours.is_plain(path) else [*exact, lambda: ours.weight(path, unpacked=True)]


def _tested(
    target: AdapterTarget, path: str, bases: Sequence[Callable[[], Tensor]], theirs: FileWeights, tensors: Mapping[str, Tensor]
) -> ModuleWeight:  # fmt: skip
    terms = None if "magnitude" in tensors else _terms(target, tensors)
    grid, values = theirs.grid(path) or (None, theirs.weight(path))
    form = theirs.form(path)

    def test(base: Tensor) -> ModuleWeight:
        delta = target_delta(target, base, tensors)
        return module_weight(target.module_path, base, values, delta, form, terms=terms, grid=grid)

    return _best(test(base().float()) for base in bases)


def _best(tests: Iterator[ModuleWeight]) -> ModuleWeight:
    """Return the first test without a value outside its bound, else the one with the fewest."""
    found: list[ModuleWeight] = []
    for test in tests:
        if not test.beyond:
            return test
        found.append(test)
    return min(found, key=lambda row: row.beyond)


def _saved(path: str, tensor: Tensor, theirs: FileWeights) -> ModuleWeight:
    if theirs.is_plain(path):
        return saved_weight(path, tensor, theirs.weight(path), theirs.form(path))
    grid, values = theirs.grid(path) or (None, theirs.weight(path))
    zeros = torch.zeros(1, 1).expand(values.shape)
    return module_weight(path, tensor.float(), values, zeros, theirs.form(path), terms=zeros, grid=grid)


def packed_modules(folder: Path) -> dict[str, str]:
    """Return module path -> format of a checkpoint's packed weights. Errors: CheckpointError for one that no merge is packed in."""
    weights = FileWeights(folder)
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
