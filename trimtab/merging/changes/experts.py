"""Adapters on stacked experts, which only a merge can apply: PEFT's target_parameters, and older per-expert keys.

A stack is one parameter [E, out, in] of the model, and one tensor or many in the files. PEFT keeps one pair for a whole
stack: A [R E, in] in expert order, B [out, R E] with the expert as the fastest index; which dimension of the stack is
`in` depends on the release (adapters/stack_layout.py). If several parameters of a module are adapted, the first one's
keys are deepest under `base_layer`. Adapters made before transformers 5 name one linear layer per expert, as the files
still do.
Source: PEFT 0.17.0 to 0.21.2, lora/layer.py, ParamWrapper (update_layer, get_delta_weight); tuners/tuners_utils.py,
_inject_parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trimtab.adapters.adapter import AdapterFile, read_adapter
from trimtab.adapters.keys import REWRITES, own_path
from trimtab.adapters.rules import Rules
from trimtab.adapters.stack_layout import VERSION, Layout, decided, shapes_of, unsure_words
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.loader.tracing import Expression
from trimtab.engine.loader.transformers_model import Probe
from trimtab.errors import AdapterError
from trimtab.merging.changes.inverse import name_of

_KEY = re.compile(r"(?P<path>.+?)(?<!\.base_layer)(?P<wraps>(\.base_layer)*)\.lora_(?P<role>[AB])(\.[^.]+)?\.weight")


@dataclass(frozen=True)
class Slice:
    """The part of a stack in one file tensor: an expert, and rows and columns of its matrix."""

    expert: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True)
class StackPair:
    """The pair of one stack [E, a, b], or of one matrix. is_swapped: lora_A runs along the stack's dimension before the last."""

    A: TensorEntry
    B: TensorEntry
    experts: int
    scale: float
    is_swapped: bool = False
    is_matrix: bool = False

    def factors(self, read: Callable[[TensorEntry], Tensor], part: Slice | None = None) -> tuple[Tensor, Tensor]:
        """Return (left, right) whose product is the change before the scale: of the stack, or of a part of it."""
        A, B = read(self.A), read(self.B)
        if self.is_matrix:
            return B, A
        A = A.reshape(self.experts, -1, A.shape[-1])
        B = B.reshape(B.shape[0], -1, self.experts).permute(2, 0, 1)
        left, right = (A.transpose(1, 2), B.transpose(1, 2)) if self.is_swapped else (B, A)
        if part is None:
            return left, right
        return left[part.expert][slice(*part.rows)], right[part.expert][:, slice(*part.columns)]


@dataclass(frozen=True)
class Stacks:
    """The changes of experts by an adapter: pairs by the stack's tensor_path, and pairs by the file tensor of one expert."""

    by_parameter: Mapping[str, StackPair]
    by_leaf: Mapping[str, StackPair]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.by_parameter) + len(self.by_leaf)

    def values(self) -> Iterator[StackPair]:
        yield from self.by_parameter.values()
        yield from self.by_leaf.values()


def read_with_stacks(path: str, probe: Probe, tensors: Mapping[str, TensorEntry]) -> tuple[AdapterFile, Stacks]:
    """Return the adapter without its keys for experts, and the changes of these keys.

    tensors: of the base's files. Errors: AdapterError, also for every key of a stack that does not fit.
    """
    file = read_adapter(path, takes=("target_parameters",))
    names = file.config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise AdapterError(file.folder, [f"target_parameters={str(names)[:60]!r}: must be a list of names"])
    names = tuple(names)
    if file.config.get("target_modules") is None and not names:
        return file, Stacks({}, {})
    stacked, rest, notes = _take_stacks(file, names, probe) if names else ({}, file.tensors, ())
    by_leaf, rest = _take_experts(file, rest, probe, tensors)
    config = {key: value for key, value in file.config.items() if key != "target_parameters"}
    return replace(file, config=config, tensors=rest), Stacks(stacked, by_leaf, notes)


# One pair per stack ---------------------------------------------------------------------------------------------------


def _take_stacks(
    file: AdapterFile, names: tuple[str, ...], probe: Probe
) -> tuple[dict[str, StackPair], dict[str, TensorEntry], tuple[str, ...]]:
    rest = dict(file.tensors)
    modules: dict[str, dict[tuple[int, str], TensorEntry]] = {}
    for key, entry in file.tensors.items():
        match = _KEY.fullmatch(key)
        if match is not None and any(_is_named(f"{own_path(match['path'])}.", names)):
            depth = match["wraps"].count(".base_layer")
            modules.setdefault(match["path"], {})[depth, match["role"]] = entry
            del rest[key]
    found: list[_Found] = []
    problems: list[str] = []
    parameters = {name.rpartition(".")[2] for name in names}
    rules = Rules(file.folder, file.config, (f"{own_path(path)}.{name}" for path in modules for name in parameters))
    for path, entries in modules.items():
        found += _pair_up(rules, path, entries, names, probe, problems)
    if not modules:
        problems.append(f"target_parameters={list(names)}, for which the file has no key")
    pairs = _in_layouts(found, file.config.get(VERSION), problems)
    if problems:
        raise AdapterError(file.folder, problems)
    old = [one.tensor_path for one in found if pairs[one.tensor_path].is_swapped and not one.is_transposed]
    notes = (f"{len(old)} stacks of experts (first: {old[0]}) are in the layout of PEFT 0.18 and older",) if old else ()
    return pairs, rest, notes


@dataclass(frozen=True)
class _Found:
    """A pair whose shapes fit its stack in one layout, or in both if it is square. path: of the module as the adapter
    spells it.
    """

    path: str
    tensor_path: str
    pair: StackPair
    layouts: tuple[Layout, ...]
    is_transposed: bool


def _in_layouts(found: list[_Found], version: object, problems: list[str]) -> dict[str, StackPair]:
    """Return the pairs by the stack's tensor_path, each in the layout in which its release wrote it."""
    pairs = {}
    for one in found:
        seen = (other.layouts[0] for other in found if len(other.layouts) == 1 and _is_alike(one, other))
        layout = decided(one.layouts, seen, version, is_transposed=one.is_transposed)
        if layout is None:
            problems.append(f"{one.path}: {one.tensor_path}: {unsure_words(version)}")
        else:
            pairs[one.tensor_path] = replace(one.pair, is_swapped=layout == "before")
    return pairs


def _is_alike(one: _Found, other: _Found) -> bool:
    return other.pair.experts > 1 and one.is_transposed == other.is_transposed


def _is_named(stem: str, names: tuple[str, ...]) -> Iterator[bool]:
    """Yield, for each name, whether it names a parameter of the module whose path with a dot is `stem`."""
    for name in names:
        module = name.rpartition(".")[0]
        yield not module or f".{stem}".endswith(f".{module}.")


def _pair_up(
    rules: Rules, path: str, entries: Mapping[tuple[int, str], TensorEntry], names: tuple[str, ...], probe: Probe,
    problems: list[str],
) -> Iterator[_Found]:  # fmt: skip
    own = own_path(path)
    modules = dict(probe.model.named_modules())
    spelled = next((new for rule in REWRITES if (new := rule.apply(path)) in modules), None)
    if spelled is None:
        problems.append(f"{path}: the model has no module of this name for target_parameters")
        return
    module = modules[spelled]
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    targeted = [name for name in parameters if any(f".{own}.{name}".endswith(f".{wanted}") for wanted in names)]
    depths = sorted({depth for depth, _ in entries}, reverse=True)
    if depths != list(range(len(targeted) - 1, -1, -1)):
        problems.append(f"{path}: keys for {len(depths)} parameters, target_parameters names {', '.join(targeted)}")
        return
    for depth, name in zip(depths, targeted, strict=True):
        if not all((depth, role) in entries for role in "AB"):
            problems.append(f"{path}: lora_A or lora_B of {name} is missing")
            continue
        shape = tuple(module.get_parameter(name).shape)
        found = _stack_pair(rules, path, (own, spelled, name), shape, entries[depth, "A"], entries[depth, "B"], module)
        if isinstance(found, str):
            problems.append(f"{path}: {found}")
        else:
            yield found


def _stack_pair(
    rules: Rules, path: str, names: tuple[str, str, str], shape: tuple[int, ...], A: TensorEntry, B: TensorEntry, module: Any
) -> _Found | str:
    """Return the pair of a parameter, or the reason why it has none. names: the module in the adapter and in the model,
    the parameter.
    """
    own, spelled, name = names
    key = f"{own}.{name}"
    rank, scale, words = rules.rank_and_scale((key,))
    if words or len(shape) not in (2, 3):
        return "; ".join(words) or f"{key} is {list(shape)}, only 2 and 3 dimensions are known"
    experts = shape[0] if len(shape) == 3 else 1
    is_transposed = len(shape) == 3 and bool(getattr(module, "is_transposed", False))
    # For a single matrix, PEFT adds B A without a transposition in every release.
    layouts: tuple[Layout, ...] = ("last",)
    if experts > 1:
        layouts = ("before", "last") if is_transposed else ("last", "before")
    shapes = [shapes_of(layout, (experts, *shape[-2:]), rank) for layout in layouts]
    fitting = tuple(layout for layout, wanted in zip(layouts, shapes, strict=True) if (A.shape, B.shape) == wanted)
    if not fitting:
        (first, second), *_ = shapes
        return (
            f"{key} has pairs of {list(A.shape)} and {list(B.shape)}, expected {list(first)} and {list(second)} "
            f"(rank {rank}, the model's is {list(shape)})"
        )
    pair = StackPair(A, B, experts, scale, is_matrix=len(shape) == 2)
    return _Found(path, f"{spelled}.{name}", pair, fitting, is_transposed)


# One pair per expert --------------------------------------------------------------------------------------------------


def _take_experts(
    file: AdapterFile, keys: Mapping[str, TensorEntry], probe: Probe, tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, StackPair], dict[str, TensorEntry]]:
    """Take the pairs that name one expert's linear layer as the files do. The other rules handle all other keys."""
    leaves = {leaf for path, expression in probe.sources.items() if not expression.is_leaf for leaf in expression.leaves}
    rest, pairs = dict(keys), {}
    matches = {key: _KEY.fullmatch(key) for key in keys}
    rules = Rules(file.folder, file.config, (own_path(match["path"]) for match in matches.values() if match is not None))
    for key, A in keys.items():
        match = matches[key]
        if match is None or match["role"] != "A" or match["wraps"]:
            continue
        leaf = next(
            (name for rule in REWRITES if (name := f"{rule.apply(match['path'])}.weight") in leaves), None
        )  # fmt: skip
        other = key.replace(".lora_A.", ".lora_B.")
        B = keys.get(other)
        if leaf is None or B is None or file.config.get("use_dora") or file.config.get("lora_bias"):
            continue
        rank, scale, words = rules.rank_and_scale((own_path(match["path"]),))
        shape = tensors[leaf].shape
        if words or len(shape) != 2 or (A.shape, B.shape) != ((rank, shape[1]), (shape[0], rank)):
            raise AdapterError(
                file.folder, [f"{key}: shapes {list(A.shape)} and {list(B.shape)}, rank {rank}, {leaf} is {list(shape)}"]
            )
        pairs[leaf] = StackPair(A, B, 1, scale, is_matrix=True)
        del rest[key], rest[other]
    return pairs, rest


# The part of a stack in a file tensor ---------------------------------------------------------------------------------


def slices(expression: Expression, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slice] | None:
    """Return the part of a stack in each file tensor, None if the stack is made in any other way.

    Known: matrices stacked by expert, and such stacks joined along rows or columns.
    """
    name = name_of(expression)
    dim = expression.kwargs.get("dim", expression.args[1] if len(expression.args) > 1 else 0)
    if name == "stack" and dim == 0 and all(piece.is_leaf for piece in expression.args[0]):
        parts = {}
        for place, piece in enumerate(expression.args[0]):
            shape = shapes[piece.leaf]
            if len(shape) != 2:
                return None
            parts[piece.leaf] = Slice(place, (0, shape[0]), (0, shape[1]))
        return parts
    if name not in ("cat", "concat", "concatenate") or dim not in (1, 2):
        return None
    joined: dict[str, Slice] = {}
    at = 0
    for piece in expression.args[0]:
        inner = slices(piece, shapes)
        if inner is None:
            return None
        size = 0
        for leaf, part in inner.items():
            rows, columns = part.rows, part.columns
            size = rows[1] if dim == 1 else columns[1]
            moved = (at, at + size)
            joined[leaf] = Slice(part.expert, moved if dim == 1 else rows, moved if dim == 2 else columns)
        at += size
    return joined
