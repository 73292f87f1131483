"""Which stack of the model does each pair of an adapter on stacked experts change, and where in it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from trimtab.adapters.config import STACKED_ORDER, AdapterKey, Rules, own_path
from trimtab.adapters.file import AdapterFile
from trimtab.adapters.stack_layout import VERSION, Layout, Stack, decided, shapes_of, unsure_words
from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, TensorRow
from trimtab.checkpoint.headers import TensorEntry

# The linear layers of one expert before transformers 5 stacked them, by what they are. Source: its conversion_mapping.py,
# MergeModulelist.
_ROLES: Mapping[str, str] = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
}  # fmt: skip
EXPERT_LINEARS = tuple(_ROLES)
EXPERT_MATRICES: Mapping[str, str] = {"gate_up_projs": "gate_up_proj", "down_projs": "down_proj"}
_WHOLE = (0, 0, 1)  # outputs of a pair that names its stack
_WRAP = ".base_layer"
LOST_SHOWN = 5


@dataclass(frozen=True)
class StackTarget:
    """One adapter's pairs on a stack, of one rank and scale. tensors: "A" and "B" of all experts, or "A.3" and "B.3" of one."""

    row: ModuleRow
    stack: Stack
    rank: int
    scale: float
    tensors: dict[str, TensorEntry]
    adapter_path: str


@dataclass(frozen=True)
class _Target:
    """What a key's path means. depth: of `base_layer`, for a pair of a whole stack; parameter: where the path names it, or a linear
    layer of experts; outputs: of that layer; expert: None for all."""

    row: ModuleRow
    depth: int = 0
    parameter: str = ""
    expert: int | None = None
    outputs: tuple[int, int, int] = _WHOLE


@dataclass
class _Keys:
    """The keys of one pair, by role, and the path that the adapter spells."""

    path: str
    roles: dict[str, AdapterKey] = field(default_factory=dict)


def _unwrapped(path: str) -> str:
    end = len(path)
    while path.endswith(_WRAP, 0, end):
        end -= len(_WRAP)
    return path[:end]


def _stacks_of(row: ModuleRow) -> dict[str, TensorRow]:
    found = {tensor.tensor_path.rpartition(".")[2]: tensor for tensor in row.tensors}
    return {name: tensor for name, tensor in found.items() if len(tensor.shape) == 3 and not tensor.is_buffer}


def _high(row: ModuleRow, tensor: TensorRow) -> int:
    return tensor.shape[2] if row.is_transposed else tensor.shape[1]


class ExpertPaths:
    """The paths of a model with which an adapter can name its stacks."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._rows = {row.module_path: row for row in anatomy.rows if row.kind == "experts"}
        self._leaves: dict[str, _Target] = {}
        for row in self._rows.values():
            for name, tensor in _stacks_of(row).items():
                if not tensor.halves or row.is_transposed or len(tensor.sources) != tensor.halves * tensor.shape[0]:
                    continue
                size = tensor.shape[1] // tensor.halves
                for number, leaf in enumerate(tensor.sources):
                    half, expert = divmod(number, tensor.shape[0])
                    outputs = (half * size, (half + 1) * size, 1)
                    self._leaves[leaf.removesuffix(".weight")] = _Target(row, 0, name, expert, outputs)

    def target(self, path: str) -> _Target | None:
        """Return what a path in the model's spelling, or the files', means; None for one that names no experts."""
        if path in self._leaves:
            return self._leaves[path]
        base = _unwrapped(path)
        if base in self._rows:
            return _Target(self._rows[base], path.count(".base_layer", len(base)))
        module, _, name = path.rpartition(".")
        if module in self._rows:
            row = self._rows[module]
            return _Target(row, 0, name) if name in _stacks_of(row) else self._of_expert(row, None, name)
        module, _, number = module.rpartition(".")
        number, name = (name, number) if number in EXPERT_MATRICES else (number, name)
        of_expert = self._rows.get(module) if number.isdecimal() and len(number) <= 6 else None
        return None if of_expert is None else self._of_expert(of_expert, int(number), name)

    def _of_expert(self, row: ModuleRow, expert: int | None, name: str) -> _Target | None:
        """Return the target of a linear layer of one expert, or of all, by its name, None where the files of this model use another
        meaning."""
        if name in EXPERT_MATRICES:
            stack = _stacks_of(row).get(EXPERT_MATRICES[name])
            return None if stack is None else _Target(row, 0, EXPERT_MATRICES[name], expert, (0, _high(row, stack), 1))
        role, stacks = _ROLES.get(name), _stacks_of(row)
        if role is None:
            return None
        parameter = "down_proj" if role == "down" else "gate_up_proj" if "gate_up_proj" in stacks else f"{role}_proj"
        if parameter not in stacks:
            return None
        tensor = stacks[parameter]
        if tensor.halves and not row.is_transposed:  # the files say which half it is
            spelled = {alias for alias, other in _ROLES.items() if other == role}
            known = {
                leaf.split(".")[-2]: self._leaves[leaf.removesuffix(".weight")].outputs
                for leaf in tensor.sources if leaf.split(".")[-2] in spelled
            }  # fmt: skip
            return _Target(row, 0, parameter, expert, *known.values()) if len(known) == 1 else None
        high = _high(row, tensor)
        if parameter != "gate_up_proj":
            return _Target(row, 0, parameter, expert, (0, high, 1))
        second = role == "up"
        outputs = (int(second), high, 2) if row.is_interleaved else (high // 2 * second, high // 2 * (1 + second), 1)
        return _Target(row, 0, parameter, expert, outputs)


class StackBuilder:
    """Collects the keys of one adapter's experts, then checks them; problems are gathered, not raised.

    - PEFT's `target_parameters`: one pair for the stack. lora_A [E R, D_in] has expert after expert; in lora_B [D_out, R E] the
      expert is the fastest index. Several parameters of a module nest: the first one's keys are deepest below `base_layer`.
    - The same names from Unsloth, which computes lora_B as [D_out, E R]: expert after expert. Nothing in a file shows which of the
      two was trained, so a file that Unsloth has marked needs the field `stacked_lora_B`.
    - `experts.gate_up_proj.lora_A` with three dimensions: [E, R, D_in] and [E, D_out, R]. With two, B has either order: refused.
    - The same of gate, up and down apart: `experts.gate_proj.lora_A` (SGLang), `experts.w1.lora_A` (Tinker). There A or B may be
      shared by all experts, [1, ...]. With two dimensions: refused.
    - `experts.N.gate_proj` and `w1`, `w2`, `w3`: one pair for a linear layer of one expert, as PEFT wrote before transformers 5 and
      vLLM reads. Gate and up are halves of `gate_up_proj`, each with its own A.
    - The shared half of the former, [1, ...], with the other half of each expert of the latter (Megatron-Bridge).
    - `experts.gate_up_projs.N` and `down_projs.N`: the same for matrices of a stack, in Unsloth's gpt-oss checkpoints of 4 bits.

    Source: PEFT 0.17.0 to 0.21.2, lora/layer.py, ParamWrapper (update_layer, get_delta_weight), tuners/tuners_utils.py,
    _inject_parameters; unsloth-zoo ce232d6, temporary_patches/moe_utils.py, _canonical_lora_weights_for_grouped_mm, and
    saving_utils.py, _merge_moe_gate_or_up_expert, and 002c9b3, temporary_patches/gpt_oss.py; vLLM, lora/model_manager.py,
    _stack_moe_lora_weights (PEFT's order for pairs of a stack), and its names of one expert's layers, lora/layers/fused_moe.py;
    SGLang, lora/lora.py, and Tinker's files as it reads them (experts_shared_outer_loras).
    """

    def __init__(self, file: AdapterFile, paths: ExpertPaths) -> None:
        self.file, self.config, self._paths = file, file.config, paths
        names = file.config.get("target_parameters") or []
        self.names: tuple[str, ...] = tuple(names) if isinstance(names, list) else ()
        self._whole: dict[str, dict[int, _Keys]] = {}
        self._named: dict[tuple[str, str, tuple[int, int, int]], _Keys] = {}
        self._single: dict[tuple[str, str, tuple[int, int, int], int], _Keys] = {}
        self.notes: list[str] = []

    def names_parameter(self, path: str, parameter: str) -> bool:
        """Whether target_parameters names a parameter of the module with this path, in the adapter's spelling."""
        return any(f".{path}.{parameter}".endswith(f".{name}") for name in self.names)

    def add(self, path: str, key: AdapterKey, problems: list[str]) -> None:
        """Take a key whose path is one of `ExpertPaths`."""
        target = self._paths.target(path)
        assert target is not None
        if key.role not in ("A", "B"):
            what = "DoRA" if key.role == "magnitude" else "a LoRA bias"
            problems.append(
                f"{key.adapter_key}: {what} on fused experts ({target.row.module_path}) is not supported; PEFT has none"
            )
            return
        module, empty = target.row.module_path, _Keys(_unwrapped(key.path))
        if target.expert is not None:
            if target.expert >= target.row.tensors[0].shape[0]:
                problems.append(
                    f"{key.adapter_key}: expert {target.expert}, but {module} has {target.row.tensors[0].shape[0]} experts"
                )
                return
            keys = self._single.setdefault((module, target.parameter, target.outputs, target.expert), empty)
        elif target.parameter:
            path_of = key.path if target.outputs != _WHOLE else key.path.rpartition(".")[0]
            keys = self._named.setdefault((module, target.parameter, target.outputs), _Keys(path_of))
        else:
            keys = self._whole.setdefault(module, {}).setdefault(target.depth, empty)
        if key.role in keys.roles:
            problems.append(f"{key.adapter_key}: {keys.roles[key.role].adapter_key} is the same tensor of {path}")
        keys.roles[key.role] = key

    def targets(self, rows: Mapping[str, ModuleRow], problems: list[str]) -> Iterator[StackTarget]:
        """Yield the targets in the order of the file. rows: of the model, by path."""
        for option in ("use_dora", "lora_bias", "fan_in_fan_out"):
            if self.config.get(option) and (self._whole or self._named or (self._single and option != "fan_in_fan_out")):
                problems.append(f"{option}: PEFT has no such adapter on stacks of experts (target_parameters)")
        self._share_halves()
        spelled = [f"{own_path(keys.path)}.{name}" for module, keys in self._all_whole() for name in _stacks_of(rows[module])]
        own = dict.fromkeys(own_path(keys.path) for keys in self._single.values())
        every = self._of_all_experts(rows)
        rules = Rules(self.file.folder, self.config, (*spelled, *own, *every))
        paths = dict.fromkeys((*(own_path(keys.path) for _, keys in self._all_whole()), *own))
        problems += [f"{path}: LoRA on experts that modules_to_save replaces" for path in paths if rules.is_saved(path)]
        is_named = self.config.get("target_modules") is not None
        missing = {path: whole for path, whole in every.items() if path not in own}
        if lost := [path for path, whole in missing.items() if whole or not is_named or path in rules.targeted]:
            more = ", ..." if len(lost) > LOST_SHOWN else ""
            problems.append(
                f"{len(lost)} layers of experts have no pair, though target_modules or target_parameters names them and others "
                f"have one: {', '.join(lost[:LOST_SHOWN])}{more}. The file is of a model with fewer experts, or lacks tensors; "
                "target_modules must name the adapted experts alone if the others are to stay as they are"
            )
        yield from self._whole_targets(rows, rules, problems)
        yield from self._single_targets(rows, rules, problems)

    def _share_halves(self) -> None:
        """Give pairs of single experts the half that all of them share."""
        for (module, name, outputs), keys in list(self._named.items()):
            role, key = next(iter(keys.roles.items()))
            shape, any_outputs = self._entry(keys, role).shape, outputs == _WHOLE and name == "down_proj"
            own = [
                one for (of, stack, ends, _), one in self._single.items()
                if (of, stack) == (module, name) and (any_outputs or ends == outputs) and role not in one.roles
            ]  # fmt: skip
            if len(keys.roles) == 1 and len(shape) == 3 and shape[0] == 1 and own:
                del self._named[module, name, outputs]
                for one in own:
                    one.roles[role] = key

    def _of_all_experts(self, rows: Mapping[str, ModuleRow]) -> dict[str, bool]:
        """Return the paths, in all experts of a module, of the layers that the file adapts in one of them, each with whether
        target_parameters names the whole stack."""
        parts = [(module, stack, *own_path(keys.path).rsplit(".", 2)) for (module, stack, *_), keys in self._single.items()]
        stems = {(module, stack, head, *(("", a) if b.isdecimal() else (b, ""))) for module, stack, head, a, b in parts}
        return {
            f"{head}.{expert}.{name}" if name else f"{head}.{matrix}.{expert}": self.names_parameter(head, stack)
            for module, stack, head, name, matrix in sorted(stems) for expert in range(rows[module].tensors[0].shape[0])
        }  # fmt: skip

    def _all_whole(self) -> Iterator[tuple[str, _Keys]]:
        for module, depths in self._whole.items():
            yield from ((module, keys) for keys in depths.values())
        yield from ((module, keys) for (module, *_), keys in self._named.items())

    def _entry(self, keys: _Keys, role: str) -> TensorEntry:
        return self.file.tensors[keys.roles[role].adapter_key]

    # One pair for a stack ---------------------------------------------------------------------------------------------

    def _whole_targets(self, rows: Mapping[str, ModuleRow], rules: Rules, problems: list[str]) -> Iterator[StackTarget]:
        found: list[tuple[StackTarget, tuple[Layout, ...]]] = []
        for module, depths in self._whole.items():
            row, own = rows[module], own_path(next(iter(depths.values())).path)
            stacks = _stacks_of(row)
            targeted = [name for name in stacks if self.names_parameter(own, name)]
            if sorted(depths) != list(range(len(targeted))):
                named = ", ".join(targeted) or f"none of {', '.join(stacks)}"
                problems.append(f"{own}: keys for {len(depths)} parameters, target_parameters names {named}")
                continue
            for depth, name in zip(sorted(depths, reverse=True), targeted, strict=True):
                self._pair(row, name, depths[depth], rules, problems, found)
        for (module, name, outputs), keys in self._named.items():
            self._pair(rows[module], name, keys, rules, problems, found, outputs)
        old: list[str] = []
        for target, layouts in found:
            row, stack = target.row, target.stack
            alike = (
                other[0] for one, other in found
                if len(other) == 1 and one.stack.shape[0] > 1 and one.row.is_transposed == row.is_transposed
            )  # fmt: skip
            layout = decided(layouts, alike, self.config.get(VERSION), is_transposed=row.is_transposed)
            where = f"{row.module_path}.{stack.parameter}"
            if layout is None:
                problems.append(f"{target.adapter_path}: {where}: {unsure_words(self.config.get(VERSION))}")
                continue
            is_swapped = (layout == "before") != row.is_transposed
            if is_swapped and not row.is_transposed:
                old.append(where)
            yield StackTarget(
                row, replace(stack, is_swapped=is_swapped), target.rank, target.scale, target.tensors, target.adapter_path
            )
        if old:
            self.notes.append(f"{len(old)} stacks of experts (first: {old[0]}) are in the layout of PEFT 0.18 and older")

    def _pair(
        self, row: ModuleRow, name: str, keys: _Keys, rules: Rules, problems: list[str],
        found: list[tuple[StackTarget, tuple[Layout, ...]]], outputs: tuple[int, int, int] = _WHOLE,
    ) -> None:  # fmt: skip
        """Add the target of a pair of all experts, with outputs of their linear layers; or collect why there is none."""
        path, tensor = keys.path if outputs != _WHOLE else f"{keys.path}.{name}", _stacks_of(row)[name]
        key = own_path(path)
        if len(keys.roles) < 2:
            problems.append(f"{own_path(keys.path)}: lora_A or lora_B of {name} is missing")
            return
        rank, scale, words = rules.rank_and_scale((key,))
        A, B = (self._entry(keys, role) for role in "AB")
        experts, shape = tensor.shape[0], tensor.shape
        outputs = (0, _high(row, tensor), 1) if outputs == _WHOLE else outputs
        high, wide = len(range(*outputs)), tensor.shape[1] if row.is_transposed else tensor.shape[2]
        layouts: tuple[Layout, ...] = ("before", "last") if row.is_transposed else ("last", "before")
        layouts = layouts if experts > 1 else ("last",)  # PEFT adds B A to the stack of a single expert in every release
        shapes = [shapes_of(layout, (experts, shape[1], shape[2]), rank) for layout in layouts]
        if path == keys.path:
            shapes = [((experts, rank, wide), (experts, high, rank))] * len(layouts)
        is_apart = (A.shape[1:], B.shape[1:]) == ((rank, wide), (high, rank)) and {A.shape[0], B.shape[0]} <= {1, experts}
        fitting = tuple(layout for layout, wanted in zip(layouts, shapes, strict=True) if (A.shape, B.shape) == wanted)
        if is_apart:
            fitting = ("before",) if row.is_transposed else ("last",)
        if words or not fitting:
            (first, second), *_ = shapes
            made = max(A.shape[0], B.shape[0]) if len(A.shape) == len(B.shape) == 3 else experts
            made = A.shape[0] // rank if len(A.shape) == 2 and A.shape[0] % rank == 0 and len(shapes[0][0]) == 2 else made
            count = f"; it was made for {made} experts, the model has {experts}" if made != experts and not words else ""
            problems.append(
                "; ".join(words) or f"{key} has pairs of {list(A.shape)} and {list(B.shape)}, expected {list(first)} and "
                f"{list(second)} (rank {rank}, the model's is {list(shape)}){count}"
            )  # fmt: skip
            return
        order = "expert" if is_apart else self._order(key, rank, experts, keys, problems)
        stack = Stack(name, tuple(range(experts)), shape, outputs, row.is_transposed, is_expert_first=order == "expert")
        found.append((StackTarget(row, stack, rank, scale, {"A": A, "B": B}, path), fitting))

    def _order(self, key: str, rank: int, experts: int, keys: _Keys, problems: list[str]) -> str:
        """Return which of expert and rank comes first in lora_B's columns. Collects what nothing decides."""
        given, marks = self.config.get(STACKED_ORDER), self.config.get("auto_mapping")
        is_unsloths = isinstance(marks, dict) and bool(marks.get("unsloth_fixed"))
        if given is not None or rank == 1 or experts == 1:
            return "expert" if given == "unsloth" else "rank"
        is_named = not self.names_parameter(own_path(keys.path), key.rpartition(".")[2])
        if is_unsloths or is_named:
            who = "Unsloth wrote this file" if is_unsloths else "target_parameters does not name it"
            problems.append(
                f"{key}: {who}, so the order of lora_B's columns is ambiguous: Unsloth trains expert after expert, PEFT rank after "
                f'rank. Set {STACKED_ORDER} in adapter_config.json to "unsloth" or "peft"'
            )
        return "rank"

    # One pair for an expert -------------------------------------------------------------------------------------------

    def _single_targets(self, rows: Mapping[str, ModuleRow], rules: Rules, problems: list[str]) -> Iterator[StackTarget]:
        groups: dict[tuple[str, str, tuple[int, int, int], int, float], dict[int, _Keys]] = {}
        for (module, name, outputs, expert), keys in self._single.items():
            path, tensor = own_path(keys.path), _stacks_of(rows[module])[name]
            rank, scale, words = rules.rank_and_scale((path,))
            wide = tensor.shape[1] if rows[module].is_transposed else tensor.shape[2]
            high = len(range(*outputs))
            if len(keys.roles) < 2 or words:
                problems.append(f"{path}: {'; '.join(words) or 'lora_A or lora_B is missing'}")
                continue
            A, B = (self._entry(keys, role) for role in "AB")
            if A.shape not in ((rank, wide), (1, rank, wide)) or B.shape not in ((high, rank), (1, high, rank)):
                problems.append(
                    f"{path}: lora_A {list(A.shape)} and lora_B {list(B.shape)}, expected {[rank, wide]} and {[high, rank]} (rank "
                    f"{rank}, {module}.{name} is {list(tensor.shape)})"
                )
                continue
            groups.setdefault((module, name, outputs, rank, scale), {})[expert] = keys
        for (module, name, outputs, rank, scale), members in groups.items():
            experts, shape = tuple(sorted(members)), _stacks_of(rows[module])[name].shape
            tensors = {f"{role}.{expert}": self._entry(members[expert], role) for expert in experts for role in "AB"}
            stack = Stack(name, experts, shape, outputs, rows[module].is_transposed)
            yield StackTarget(rows[module], stack, rank, scale, tensors, members[experts[0]].path)
