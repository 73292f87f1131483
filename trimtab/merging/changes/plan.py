"""Which file tensors does a merge change, and how?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget, match_adapter, read_adapter
from trimtab.adapters.file import check_vocabulary
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.loader.tracing import Expression
from trimtab.engine.loader.transformers_model import Probe
from trimtab.engine.tiers.reader import PositionedFile
from trimtab.errors import AdapterError
from trimtab.formats.packed import split_packed
from trimtab.merging.changes import experts
from trimtab.merging.changes.delta import Change, EntryRows, Rows, row_pieces
from trimtab.merging.changes.inverse import CUTS, CannotLayBackError, is_cast, lay_back, name_of
from trimtab.merging.changes.request import Part

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Ask:
    """The change of one parameter by one adapter (an index into the request); becomes a `Change` when it is needed."""

    place: int
    lora: AdapterTarget | None = None
    saved: TensorEntry | None = None
    stack: experts.StackPairs | None = None
    part: experts.Slice | None = None
    is_bias: bool = False


@dataclass(frozen=True)
class Edit:
    """One parameter that changes. tensor_path: in the model. expression: how stock makes it from file tensors."""

    tensor_path: str
    expression: Expression
    asks: tuple[Ask, ...]

    @property
    def by_rows(self) -> bool:
        return is_cast(self.expression)


@dataclass
class Recipe:
    """The changes of a merge to the files.

    edits: changes by file tensor; several only if a loader splits it. copies: file tensor -> (the file tensor with its
    values, edit): a tied partner that is stored too, or gets a separate tensor (`added`). untied: paths of parameters
    that no longer share their owner's weight.
    """

    edits: dict[str, list[Edit]] = field(default_factory=dict)
    copies: dict[str, tuple[str, Edit]] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    untied: tuple[str, ...] = ()


@dataclass
class Adapters:
    """The adapters of a merge, open for reading. specs, parts: in the order of the request."""

    parts: tuple[Part, ...]
    specs: tuple[AdapterSpec, ...]
    files: tuple[PositionedFile, ...]

    def rows(self, place: int, entry: TensorEntry) -> EntryRows:
        return EntryRows(self.files[place], entry)

    def tensor(self, place: int, entry: TensorEntry) -> Tensor:
        return self.rows(place, entry).all().float()

    def change(self, ask: Ask) -> Change:
        """Return the change of an ask, with its tensors read. Saved rows are read when they are used."""
        part = self.parts[ask.place]
        read = partial(self.tensor, ask.place)
        change = Change(part.name, part.weight, saved=None if ask.saved is None else self.rows(ask.place, ask.saved))
        if ask.stack is not None:
            left, right, scale = ask.stack.factors(read, ask.part)
            change = replace(change, left=left, right=right, scale=scale)
        if ask.lora is None:
            return change
        change, tensors = replace(change, scale=ask.lora.scale), ask.lora.tensors
        if ask.is_bias:
            return replace(change, add=read(tensors["B_bias"]))
        A, B = (read(tensors[role]) for role in ("A", "B"))
        # PEFT adds (B A)^T to a table, and to a Conv1D: the rows are A's columns.
        is_table = ask.lora.kind == "embedding" or ask.lora.fan_in_fan_out
        left, right = (A.T, B.T) if is_table else (B, A)
        magnitude = read(tensors["magnitude"]) if "magnitude" in tensors else None
        return replace(change, is_table=is_table, left=left, right=right, magnitude=magnitude)


def open_adapters(parts: Sequence[Part], checkpoint: Checkpoint, anatomy: Anatomy, probe: Probe, stack: ExitStack) -> Adapters:
    """Return the adapters, matched to the model and open; `stack` closes them.

    Errors: AdapterError with every problem of every adapter: mismatches, and values that are not finite.
    """
    specs, files = [], []
    problems: list[tuple[Path, str]] = []
    for part in parts:
        try:
            file = read_adapter(part.path)
            check_vocabulary(part.path, checkpoint.folder)
            spec = match_adapter(file, anatomy, computes=False)
            opened = PositionedFile(spec.file.file)
            stack.callback(opened.close)
        except AdapterError as exc:
            problems += [(Path(part.path), problem) for problem in exc.problems]
            continue
        specs.append(spec)
        files.append(opened)
        problems += [(file.folder, problem) for problem in _without_bias(spec, probe)]
    if problems:
        folders = list(dict.fromkeys(folder for folder, _ in problems))
        lines = [text if len(folders) == 1 else f"{folder}: {text}" for folder, text in problems]
        raise AdapterError(folders[0], lines)
    return Adapters(tuple(parts), tuple(specs), tuple(files))


def _without_bias(spec: AdapterSpec, probe: Probe) -> Iterator[str]:
    for target in spec.targets:
        if target.has_bias and f"{target.module_path}.bias" not in probe.sources:
            yield (
                f"{target.adapter_path}: lora_bias needs a bias to be added to, and {target.module_path} has none; it can "
                "be used unmerged only"
            )


# From parameters back to files ----------------------------------------------------------------------------------------


def make_recipe(adapters: Adapters, checkpoint: Checkpoint, probe: Probe, base: Callable[[str], Rows]) -> Recipe:
    """Return the changes of each file tensor.

    base: the rows of a file tensor. Errors: AdapterError with every parameter that cannot be traced back to the files. Tied
    parameters stay tied only if every adapter changes all of them equally.
    """
    asks = _without_copies(_asks(adapters), adapters, probe, base)
    _check_alone(asks, adapters)
    recipe = Recipe()
    problems: list[str] = []
    users = _users(probe)
    partners: dict[str, list[str]] = {}
    for path, owner in probe.ties.items():
        partners.setdefault(owner, []).append(path)
    untied: list[str] = []
    done: set[str] = set()
    shapes = {name: entry.shape for found in split_packed(checkpoint) for name, entry in found.items()}
    for path in asks:
        owner = probe.ties.get(path, path)
        if owner in done:
            continue
        done.add(owner)
        if _by_expert(path, asks[path], recipe, probe, shapes):
            continue
        group = [owner, *partners.get(owner, ())]
        leave = _leaving(adapters, group, asks)
        for member in group:
            _place(member, owner, member in leave, asks.get(member, ()), recipe, probe, checkpoint, problems)
        untied += leave
        _check_shared(owner, group, asks, probe, users, problems)
    recipe.untied = tuple(untied)
    _check_shapes(recipe, shapes, problems)
    if problems:
        first = adapters.specs[0].file.folder
        raise AdapterError(first, problems, hint="Load the adapter unmerged, which needs no inverse")
    return recipe


def _check_alone(asks: Mapping[str, tuple[Ask, ...]], adapters: Adapters) -> None:
    """Raise AdapterError for parameters that one adapter replaces and another changes: PEFT has no such result."""
    names, problems = [part.name for part in adapters.parts], []
    for path, found in asks.items():
        replacing = next((ask for ask in found if ask.saved is not None), None)
        if replacing is not None and len(found) > 1:
            others = [names[ask.place] for ask in found if ask is not replacing]
            problems.append(f"adapter {names[replacing.place]} replaces {path}, which {', '.join(others)} changes too")
        # PEFT's DoRA rescales an earlier adapter's change of a bias at run time, but not in PEFT's merge.
        biased = [ask.place for ask in found if ask.is_bias]
        weights = asks.get(f"{path.removesuffix('.bias')}.weight", ())
        after = [ask.place for ask in weights if ask.lora is not None and ask.lora.use_dora and biased]
        if after and min(biased) < max(after):
            problems.append(
                f"adapter {names[max(after)]} rescales (DoRA) what {names[min(biased)]} adds to {path}, which no merged bias "
                f"can do; name {names[max(after)]} first"
            )
    if problems:
        hint = "Merge them one after the other, in the order that you want"
        raise AdapterError(adapters.specs[0].file.folder, problems, hint=hint)


def _by_expert(path: str, asks: tuple[Ask, ...], recipe: Recipe, probe: Probe, shapes: Shapes) -> bool:
    """Return whether a stack of experts could be split: each file tensor then changes by its own rows."""
    expression = probe.sources[path]
    if expression.is_leaf or path in probe.ties or not all(ask.stack is not None for ask in asks):
        return False
    parts = experts.slices(expression, shapes)
    if parts is None:
        return False
    for leaf, part in parts.items():
        for ask in asks:
            if ask.stack is not None and ask.stack.in_part(part).targets:
                _add(recipe, leaf, replace(ask, part=part))
    return True


def _add(recipe: Recipe, leaf: str, ask: Ask) -> None:
    """Add a change to a file tensor that changes by rows, after those of earlier adapters."""
    known = recipe.edits.get(leaf, [])
    asks = [*known[0].asks, ask] if known else [ask]
    asks.sort(key=lambda one: one.place)
    recipe.edits[leaf] = [Edit(leaf, Expression(leaf=leaf), tuple(asks))]


def _asks(adapters: Adapters) -> dict[str, tuple[Ask, ...]]:
    """Return the edits of each adapter by tensor_path, in the order of the request."""
    asks: dict[str, list[Ask]] = {}
    for place, spec in enumerate(adapters.specs):
        own: dict[str, dict[str, Any]] = {}
        stacks: dict[str, list[AdapterTarget]] = {}
        for target in spec.targets:
            if target.kind == "saved":
                for name, entry in target.tensors.items():
                    own.setdefault(f"{target.module_path}.{name}", {})["saved"] = entry
                continue
            if target.stack is not None:
                stacks.setdefault(f"{target.module_path}.{target.stack.parameter}", []).append(target)
                continue
            own.setdefault(f"{target.module_path}.weight", {})["lora"] = target
            if target.has_bias:
                own.setdefault(f"{target.module_path}.bias", {}).update(lora=target, is_bias=True)
        for path, targets in stacks.items():
            own.setdefault(path, {})["stack"] = experts.StackPairs(tuple(targets))
        for path, options in own.items():
            asks.setdefault(path, []).append(Ask(place, **options))
    return {path: tuple(wanted) for path, wanted in asks.items()}


def _without_copies(
    asks: dict[str, tuple[Ask, ...]], adapters: Adapters, probe: Probe, base: Callable[[str], Rows]
) -> dict[str, tuple[Ask, ...]]:
    """Return the asks without full weights that equal the base's: PEFT also writes unchanged embeddings and heads."""
    kept: dict[str, tuple[Ask, ...]] = {}
    for path, found_asks in asks.items():
        left = []
        for ask in found_asks:
            expression = probe.sources[path]
            if ask.saved is not None and is_cast(expression):
                saved, own = adapters.rows(ask.place, ask.saved), base(expression.leaves[0])
                pieces = row_pieces(ask.saved.shape)
                if all(torch.equal(saved(*piece).float(), own(*piece).float()) for piece in pieces):
                    ask = replace(ask, saved=None)
            if ask.saved is not None or ask.lora is not None or ask.stack is not None:
                left.append(ask)
        if left:
            kept[path] = tuple(left)
    return kept


def _leaving(adapters: Adapters, group: Sequence[str], asks: Mapping[str, tuple[Ask, ...]]) -> list[str]:
    """Return the members of a tied group whose changes differ from the owner's."""
    if len(group) == 1:
        return []
    prints = {
        member: tuple(adapters.change(ask).fingerprint() for ask in asks.get(member, ())) for member in group
    }  # fmt: skip
    return [member for member in group[1:] if prints[member] != prints[group[0]]]


def _place(
    member: str, owner: str, leaves: bool, asks: tuple[Ask, ...], recipe: Recipe, probe: Probe, checkpoint: Checkpoint,
    problems: list[str],
) -> None:  # fmt: skip
    expression = probe.sources[owner]
    edit = Edit(member, expression, asks)
    if member == owner:
        if asks:
            for leaf in expression.leaves:
                recipe.edits.setdefault(leaf, []).append(edit)
        return
    is_stored = member in checkpoint.tensors and member not in expression.leaves
    if not leaves and not (is_stored and asks):
        return
    if not edit.by_rows:
        problems.append(f"{member} is tied to {owner}, which is made of {len(expression.leaves)} file tensors")
        return
    recipe.copies[member] = (expression.leaves[0], edit)
    if not is_stored:
        recipe.added[member] = checkpoint.tensors[expression.leaves[0]].file.name


def _users(probe: Probe) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for path, expression in probe.sources.items():
        for leaf in expression.leaves:
            users.setdefault(leaf, []).append(path)
    return users


def _check_shared(
    owner: str, group: Sequence[str], asks: Mapping[str, tuple[Ask, ...]], probe: Probe, users: Mapping[str, list[str]],
    problems: list[str],
) -> None:  # fmt: skip
    """Add a problem if a parameter outside the group is made from the same file tensor and would change too."""
    if owner not in asks:
        return
    for leaf in probe.sources[owner].leaves:
        others = [path for path in users[leaf] if path not in group]
        if others and not all(_cuts(probe.sources[path]) for path in (owner, *others)):
            problems.append(f"{owner} is made of {leaf}, of which {', '.join(others[:3])} is made as well")


def _cuts(expression: Expression) -> bool:
    while not expression.is_leaf:
        if name_of(expression) in CUTS:
            return True
        if not expression.args or not isinstance(expression.args[0], Expression):
            return False
        expression = expression.args[0]
    return False


def _check_shapes(recipe: Recipe, shapes: Shapes, problems: list[str]) -> None:
    """Try every inverse on tensors without data, so that none fails when half of the files are written."""
    for leaf, edits in recipe.edits.items():
        for edit in edits:
            if edit.by_rows:
                continue
            try:
                whole = edit.expression.replay(lambda name: torch.empty(shapes[name], device="meta"))
                lay_back(edit.expression, leaf, torch.empty_like(whole), _target(shapes[leaf]), shapes)
            except (CannotLayBackError, RuntimeError, IndexError, TypeError) as exc:
                problems.append(f"{edit.tensor_path} is made of {leaf} in a way that has no inverse ({exc})")


def _target(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")
