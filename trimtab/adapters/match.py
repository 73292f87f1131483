"""Which module of a model does every tensor of an adapter change, or why none?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from trimtab.adapters.config import FIELDS, MERGED, REWRITES, AdapterKey, Rewrite, Rules, own_path, parse_key, part_of_key
from trimtab.adapters.experts import EXPERT_LINEARS, EXPERT_MATRICES, ExpertPaths, StackBuilder
from trimtab.adapters.file import AdapterFile
from trimtab.adapters.stack_layout import Stack
from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, ModuleRow
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.names import Rename, former_words, near_names, renamed
from trimtab.errors import AdapterError

_FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_SHARED_KV = (
    "for a k/v projection of a KV-shared layer, which the model does not have: the layer reads the keys and values of "
    "an earlier one"
)
_SECOND_COPY = "second copies of saved modules, which PEFT writes with a resized vocabulary and does not read"
_UNTRAINED = "the base's own weights of saved modules, which PEFT writes with a resized vocabulary"
_EMBEDDINGS = ("embed_tokens", "lm_head")
_NEAR_LIMIT = 20  # near names are searched only for the problems that are printed, not for thousands of wrong keys


@dataclass(frozen=True)
class AdapterTarget:
    """The adapter's change of one module.

    kind: "linear" and "embedding" add scale x B A (with rank, scale, use_dora, has_bias); "router" is the same for a
    router of experts, "experts" for the matrices of a stack (`stack`, one target for each rank and scale); "saved" replaces
    parameters (rank 0). One module can have a LoRA target and a saved one. wrapped: the module is the inner linear of a wrapper
    such as Gemma4ClippableLinear. tensors: by role, "A" [R, D_in] ([R, V] for an embedding), "B" [D_out, R], "B_bias"
    [D_out], "magnitude" [D_out]; for "saved" by parameter name, for "experts" as `adapters/experts.py` has them.
    adapter_path: the module as the adapter spells it. fan_in_fan_out: the weight is [D_in, D_out], of a Conv1D.
    """

    module_path: str
    part: str
    kind: Literal["linear", "embedding", "saved", "experts", "router"]
    rank: int
    scale: float
    use_dora: bool
    has_bias: bool
    wrapped: bool
    tensors: dict[str, TensorEntry]
    adapter_path: str = ""
    stack: Stack | None = None
    fan_in_fan_out: bool = False


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter matched to a model: the target of each module, the tensors without effect and the reason, and the path
    rewrites.

    prefix: the one spelling rule that fits every key. model_dtype: the type of saved parameters. idle: by field, the
    entries of the configuration that name no module of the model.
    """

    file: AdapterFile
    targets: tuple[AdapterTarget, ...]
    no_effect: tuple[tuple[str, str], ...]
    prefix: str
    model_dtype: str = "bfloat16"
    notes: tuple[str, ...] = ()
    idle: Mapping[str, list[Any]] = field(default_factory=dict)

    def nbytes(self, dtype: str, *, on_experts: bool = False) -> int:
        """Return the device memory of the attached adapter with its LoRA tensors in `dtype`; on_experts: of its part on stacks.

        An upper bound: a saved weight that equals the base weight is not kept.
        """
        shared: dict[str, int] = {}
        for target in self.targets if not on_experts else (one for one in self.targets if one.stack is not None):
            size = DTYPE_BYTES[self.model_dtype if target.kind == "saved" else dtype]
            for entry in target.tensors.values():
                is_shared = target.stack is not None and len(entry.shape) == 3 and entry.shape[0] == 1  # held for each expert
                shared[entry.tensor_name] = (
                    prod(entry.shape) * size * (len(target.stack.experts) if is_shared and target.stack else 1)
                )
        return sum(shared.values())

    def counts(self) -> dict[str, Any]:
        """Return the number of tensors in the file per part, and the number of changed modules per kind."""
        kinds = Counter("wrapped" if t.wrapped and t.kind == "linear" else t.kind for t in self.targets)
        targets = {name: kinds[name] for name in ("wrapped", "linear")}
        targets |= {name: kinds[name] for name in ("embedding", "router", "experts", "saved") if kinds[name]}
        return {
            "tensors": len(self.file.tensors), "parts": parts_of(self.file.tensors),
            "targets": targets | {"total": len(self.targets)}, "no_effect": len(self.no_effect),
        }  # fmt: skip


class _Places:
    """The targets of a model's paths: a module, the inner module of a wrapper, or none by design."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.rows = anatomy.by_path()
        self.order = {path: index for index, path in enumerate(self.rows)}
        self.inner = {row.wraps for row in anatomy.rows if row.wraps}
        self.missing = frozenset(anatomy.missing_projections)
        self.renames = anatomy.renames
        self.experts = ExpertPaths(anatomy) if any(row.kind == "experts" for row in anatomy.rows) else None

    def find(self, path: str, key: AdapterKey) -> str | None:
        """Return the path of the module that the key changes, or None. It may be in `missing`."""
        if self.is_experts(path, key):
            return path
        row = self.rows.get(path)
        if key.role in ("saved", "base_copy", "original"):
            if row is not None and any(t.tensor_path == f"{path}.{key.parameter}" for t in row.tensors):
                return path
        elif row is not None:
            return row.wraps if row.wraps in self.rows else path
        return path if path in self.missing else None

    def is_experts(self, path: str, key: AdapterKey) -> bool:
        """Whether a path names stacked experts or one of them, and the key is of a LoRA."""
        is_lora = key.role in ("A", "B", "B_bias", "magnitude")
        return is_lora and self.experts is not None and self.experts.target(path) is not None

    def near(self, path: str) -> str:
        # A typo keeps the layer number, and comparing with every module of a large model would take seconds.
        numbers = _numbers(path)
        choices = [name for name in self.rows if _numbers(name) == numbers][:500]
        return ", ".join(f"{name} {self._shape(name)}".strip() for name in near_names(path, choices))

    def _shape(self, path: str) -> str:
        weight = self.rows[path].weight
        return "" if weight is None else str(list(weight.shape))


def _numbers(path: str) -> list[str]:
    return [segment for segment in path.split(".") if segment.isdigit()]


def _choose_rewrite(keys: list[AdapterKey], places: _Places) -> tuple[Rewrite, dict[str, str | None], list[str]]:
    """Return the one rule that maps every key to the model, the module path by adapter key, and problems."""
    full: list[tuple[Rewrite, dict[str, str | None]]] = []
    # Try one key of each part of the model first: most rules fail at one of them.
    heads = {tuple(key.path.split(".", 5)[:5]): key for key in keys}
    ordered = [*heads.values(), *keys]
    # Try former names only if present ones do not fit every key.
    for renames in ((), places.renames):
        for rewrite in REWRITES if not full else ():
            paths = _explained(ordered, rewrite, places, renames)
            if len(paths) == len(keys) and all(paths != other for _, other in full):
                full.append((rewrite, paths))
    if len(full) == 1:
        return *full[0], []
    if full:
        labels = " or ".join(f"{rewrite.label!r}" for rewrite, _ in full)
        return *full[0], [f"every key fits the model in more than one way: {labels}"]
    # No rule maps every key to the model: take the one that maps most of them, for the error message.
    every = [_explained(keys, rewrite, places, places.renames, is_whole=True) for rewrite in REWRITES]
    counts = [sum(path is not None for path in paths.values()) for paths in every]
    best = counts.index(max(counts))
    return REWRITES[best], every[best], []


def _explained(
    keys: list[AdapterKey], rewrite: Rewrite, places: _Places, renames: tuple[Rename, ...], *, is_whole: bool = False
) -> dict[str, str | None]:
    """Return the module path that a rule gives each key, None for one that it does not map to the model; up to the first such key
    unless is_whole."""
    paths: dict[str, str | None] = {}
    for key in keys:
        path = rewrite.apply(key.path)
        found = None if path is None else places.find(path, key)
        if found is None and path is not None and renames and (new := renamed(path, renames)) != path:
            found = places.find(new, key)
        if found is None and not is_whole:
            break
        paths[key.adapter_key] = found
    return paths


def match_adapter(file: AdapterFile, anatomy: Anatomy, *, computes: bool = True) -> AdapterSpec:
    """Return which module every tensor of the adapter changes.

    computes: whether the adapter is to be computed with; a merge needs no forward of the experts. Errors: AdapterError with every
    problem of the file: keys that name nothing (with near names and shapes), wrong shapes or ranks, half of a pair, tensors that
    the configuration does not declare, modules that do not support LoRA.
    """
    problems = []
    if file.made_for and anatomy.model_type not in file.made_for:
        problems.append(f"is a LoRA for {file.made_for[0]} (general.architecture), the model is of the type {anatomy.model_type}")
    elif file.turned:
        file = _with_heads(file, anatomy)
    keys = [parse_key(name) for name in file.tensors]
    problems += [f"{key.adapter_key}: {key.problem}" for key in keys if key.problem]
    names = sorted({key.name for key in keys if key.name is not None})
    if len(names) > 1:
        problems.append(f"the file holds several adapters ({', '.join(names)}); save them one by one")
    keys = [key for key in keys if not key.problem]
    places = _Places(anatomy)
    rewrite, paths, ambiguous = _choose_rewrite(keys, places)
    problems += ambiguous
    no_effect: list[tuple[str, str]] = []
    matched: dict[tuple[str, str], dict[str, AdapterKey]] = {}
    lost: list[AdapterKey] = []
    originals: dict[str, AdapterKey] = {}
    saved = Rules(file.folder, file.config, ())
    stacks = None if places.experts is None else StackBuilder(file, places.experts)
    for key in keys:
        path = paths[key.adapter_key]
        if path is None:
            lost.append(key)
        elif stacks is not None and places.is_experts(path, key):
            stacks.add(path, key, problems)
        elif _is_second_copy(key, file):
            no_effect.append((key.adapter_key, _SECOND_COPY))
        elif key.role == "original" and not saved.is_saved(own_path(key.path)):
            problems.append(f"{key.adapter_key}: the untrained copy of a module that modules_to_save does not name")
        elif key.role == "original":
            no_effect.append((key.adapter_key, _UNTRAINED))
            originals[path] = key
        elif path in places.missing:
            no_effect.append((key.adapter_key, _SHARED_KV))
        elif key.role == "training_only":
            no_effect.append((key.adapter_key, "used in training only"))
        else:
            _sort_in(matched, path, key, problems)
    problems += [_lost_words(key, file, rewrite, places, index < _NEAR_LIMIT) for index, key in enumerate(lost)]
    spelled = [text for key in keys for text in (own_path(key.path), paths[key.adapter_key]) if text]
    rules = Rules(file.folder, file.config, (*spelled, *places.rows, *anatomy.missing_projections))
    builder = _Builder(file, anatomy, places, rules, problems)
    targets = [builder.target(path, group, roles) for (path, group), roles in matched.items()]
    targets += builder.stacked(stacks, computes=computes)
    read = dict.fromkeys(one.module_path for one in targets if computes and places.rows[one.module_path].is_read_linear)
    problems += [f"{path}: the module around this Linear reads its weight; only a merged adapter changes it" for path in read]
    builder.check_promises(matched)
    builder.check_tying(targets)
    if not problems and not targets:
        problems.append(f"nothing to apply: all {len(keys)} tensors have no effect on this model")
    if problems:
        raise AdapterError(file.folder, problems, about=_made_for(file) if lost or builder.is_other_shape else "")
    idle = rules.idle(lambda: _other_names(anatomy, rewrite), former_words(anatomy.renames, places.rows))
    notes = [*builder.notes(), *([] if stacks is None else stacks.notes), *rules.idle_notes(idle)]
    targets += builder.tied_copies(targets)
    targets += builder.tied_originals(targets, originals)
    targets.sort(key=lambda target: places.order[target.module_path])
    return AdapterSpec(file, tuple(targets), tuple(no_effect), rewrite.label, anatomy.dtype, tuple(notes), idle)


def _with_heads(file: AdapterFile, anatomy: Anatomy) -> AdapterFile:
    """Return a LoRA in GGUF with the rows of queries and keys in the model's order. Errors: AdapterError."""
    widths = {layer.head_dim for layer in anatomy.kv_layers}
    if len(widths) != 1:
        raise AdapterError(
            file.folder, [f"its rows of {file.turned[0]} are ordered by heads, the model's have {len(widths)} widths"]
        )
    return file.with_heads(widths.pop())


def _made_for(file: AdapterFile) -> str:
    """Return what an error about names and shapes begins with: the model that the adapter was trained on, as its file has it."""
    base = file.config.get("base_model_name_or_path")
    return f"was made for {base}, and this model differs: " if isinstance(base, str) and base else ""


def _other_names(anatomy: Anatomy, rewrite: Rewrite) -> Iterator[str]:
    """Yield the names other than paths that a configuration may use for modules: the adapter's spelling, parameters and single
    experts."""
    for row in anatomy.rows:
        yield from (old for path in (row.module_path, row.wraps) if path and (old := rewrite.unapply(path)))
        if row.kind == "experts":
            for tensor in row.tensors:
                yield tensor.tensor_path
            yield from (f"{row.module_path}.{name}" for name in EXPERT_LINEARS)
            for expert in range(max((tensor.shape[0] for tensor in row.tensors), default=0)):
                yield from (f"{row.module_path}.{expert}.{name}" for name in EXPERT_LINEARS)
                yield from (f"{row.module_path}.{name}.{expert}" for name in EXPERT_MATRICES)


def _is_second_copy(key: AdapterKey, file: AdapterFile) -> bool:
    """Whether the file also has this saved tensor under PEFT's short name, the only one that PEFT reads
    (set_peft_model_state_dict)."""
    head, mark, tail = key.adapter_key.partition(".modules_to_save.")
    return bool(mark) and key.role == "saved" and key.name is None and f"{head}.{tail}" in file.tensors


def _sort_in(matched: dict[tuple[str, str], dict[str, AdapterKey]], path: str, key: AdapterKey, problems: list[str]) -> None:
    saved = key.role in ("saved", "base_copy")
    roles = matched.setdefault((path, "saved" if saved else "lora"), {})
    role = key.parameter if saved else key.role
    if role in roles:
        problems.append(f"{key.adapter_key}: {roles[role].adapter_key} is the same tensor of {path}")
    roles[role] = key


def _lost_words(key: AdapterKey, file: AdapterFile, rewrite: Rewrite, places: _Places, search: bool) -> str:
    shape = list(file.tensors[key.adapter_key].shape)
    path = rewrite.apply(key.path) or key.path
    parents = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)]
    if any(parent in places.rows and places.rows[parent].kind == "experts" for parent in parents):
        return (
            f"{key.adapter_key} {shape}: names no part of the stacked experts that is known; names are {', '.join(EXPERT_LINEARS)}"
        )
    near = places.near(path) if search else ""
    what = f"{path}.{key.parameter}" if key.parameter else path
    return f"{key.adapter_key} {shape}: the model has no {what}" + (f"; similar names: {near}" if near else "")


def _resized_words(rows: int) -> str:
    return (
        f"; the vocabulary was resized: call resize_token_embeddings({rows}) on the base, save it with its tokenizer, and "
        "name that folder as the model"
    )


def _is_turned(row: ModuleRow) -> bool:
    return row.class_name == "Conv1D"


class _Builder:
    """Checks the tensors of one module against its row and the configuration; problems are collected, not raised."""

    def __init__(
        self, file: AdapterFile, anatomy: Anatomy, places: _Places, rules: Rules, problems: list[str]
    ) -> None:  # fmt: skip
        self.file, self.config, self.anatomy, self.places = file, file.config, anatomy, places
        self.rules, self.problems = rules, problems
        self.is_other_shape = False  # whether a tensor has another shape than the module that it names

    def target(self, path: str, group: str, roles: dict[str, AdapterKey]) -> AdapterTarget:
        row = self.places.rows[path]
        entries = {role: self.file.tensors[key.adapter_key] for role, key in roles.items()}
        for entry in entries.values():
            if entry.dtype not in _FLOATS:
                self.problems.append(f"{entry.tensor_name}: {entry.dtype} values, expected floating point")
        spelled = next(iter(roles.values())).path
        wrapped = path in self.places.inner
        if group == "saved":
            self._check_saved(row, roles, entries)
            return AdapterTarget(path, row.part, "saved", 0, 1.0, False, False, wrapped, entries, spelled)
        spellings = tuple(dict.fromkeys((own_path(spelled), path)))
        if self.is_parameter(own_path(spelled)):
            spellings = tuple(f"{spelling}.weight" for spelling in spellings)
            if _is_turned(row):  # PEFT adds B A to the weight as it lies, and (B A)^T where the module is named
                self.problems.append(f"{spelled}: target_parameters with the weight of a Conv1D is not supported; name the module")
        rank, scale, words = self.rules.rank_and_scale(spellings)
        self.problems += [f"{spelled}: {problem}" for problem in words]
        embedding = row.kind == "embedding"
        if self._supports_lora(row, roles) and self._is_right_kind(row, roles, embedding):
            self._check_roles(row, spelled, roles, embedding)
            self._check_shapes(row, entries, rank, embedding)
        named = {role.removeprefix("embedding_"): entry for role, entry in entries.items()}
        return AdapterTarget(
            path, row.part, "embedding" if embedding else "router" if row.is_router else "linear", rank, scale,
            "magnitude" in named, "B_bias" in named, wrapped, named, spelled, fan_in_fan_out=_is_turned(row),
        )  # fmt: skip

    def is_parameter(self, path: str) -> bool:
        """Whether the adapter names the weight of a module, spelled so, in target_parameters instead of the module."""
        names = self.config.get("target_parameters") or ()
        return any(f".{path}.weight".endswith(f".{name}") for name in names) and path not in self.rules.targeted

    def stacked(self, stacks: StackBuilder | None, *, computes: bool) -> list[AdapterTarget]:
        """Return the targets on stacks of experts."""
        found = []
        for one in () if stacks is None else stacks.targets(self.places.rows, self.problems):
            row, path = one.row, one.adapter_path
            if computes and not row.takes_lora:
                self.problems.append(f"{path}: how {row.class_name} ({row.module_path}) computes is not known")
            if any(entry.dtype not in _FLOATS for entry in one.tensors.values()):
                self.problems.append(f"{path}: expected floating point values")
            options = (False, False, False, one.tensors, path, one.stack)
            found.append(AdapterTarget(row.module_path, row.part, "experts", one.rank, one.scale, *options))
        if self.config.get("target_parameters") and not found and not self.problems:
            names = ", ".join(self.config["target_parameters"])
            if not any(self.is_parameter(own_path(key.path)) for key in map(parse_key, self.file.tensors)):
                self.problems.append(f"target_parameters names {names}, for which the file has no key")
        return found

    def _supports_lora(self, row: ModuleRow, roles: dict[str, AdapterKey]) -> bool:
        first = next(iter(roles.values())).adapter_key
        if (
            (row.kind in ("linear", "embedding") or row.is_read_linear or _is_turned(row))
            and row.weight is not None
            and len(row.weight.shape) == 2
        ):
            return True
        if row.is_router and not {"magnitude", "B_bias"} & roles.keys():
            return True
        kind = row.class_name
        kind += " with DoRA or a bias" if row.is_router else ""
        self.problems.append(f"{first}: LoRA on {kind} ({row.module_path}) is not supported")
        return False

    def _is_right_kind(self, row: ModuleRow, roles: dict[str, AdapterKey], embedding: bool) -> bool:
        others = ("A", "B", "B_bias") if embedding else ("embedding_A", "embedding_B")
        wrong = [role for role in others if role in roles]
        if wrong:
            what = "LoRA for a linear layer" if embedding else "LoRA for an embedding"
            self.problems.append(f"{roles[wrong[0]].adapter_key}: {what} on {row.module_path}, a {row.class_name}")
        return not wrong

    def _check_roles(self, row: ModuleRow, spelled: str, roles: dict[str, AdapterKey], embedding: bool) -> None:
        names = {"embedding_A": "lora_embedding_A", "embedding_B": "lora_embedding_B"}
        names = names if embedding else {"A": "lora_A", "B": "lora_B"}
        lost = [name for role, name in names.items() if role not in roles]
        if lost:
            self.problems.append(f"{spelled}: {' and '.join(lost)} missing")
        for role, option, word in (("magnitude", "use_dora", "lora_magnitude_vector"), ("B_bias", "lora_bias", "lora_B.bias")):
            is_on = bool(self.config.get(option))
            if is_on and role not in roles:
                self.problems.append(f"{spelled}: {option} is true but {word} is missing")
            elif role in roles and not is_on:
                self.problems.append(f"{roles[role].adapter_key}: {word} is there but {option} is false")
        if self.rules.is_saved(own_path(spelled)):
            self.problems.append(f"{spelled}: LoRA on a module that modules_to_save replaces")

    def _check_shapes(self, row: ModuleRow, entries: Mapping[str, TensorEntry], rank: int, embedding: bool) -> None:
        assert row.weight is not None
        out_size, in_size = row.weight.shape
        if embedding or _is_turned(row):
            in_size, out_size = row.weight.shape
        expected = {
            "A": (rank, in_size), "embedding_A": (rank, in_size), "B": (out_size, rank),
            "embedding_B": (out_size, rank), "B_bias": (out_size,), "magnitude": (out_size,),
        }  # fmt: skip
        for role, entry in entries.items():
            if entry.shape != expected[role]:
                self.is_other_shape = True
                own, wanted = entry.shape, expected[role]
                # The vocabulary is the last dimension of a table's A, and the first of a head's B.
                resized = ""
                if embedding and own[:-1] == wanted[:-1] and own:
                    resized = _resized_words(own[-1])
                elif row.part == "head" and own[1:] == wanted[1:] and own:
                    resized = _resized_words(own[0])
                self.problems.append(
                    f"{entry.tensor_name}: shape {list(own)}, expected {list(wanted)} (rank {rank} by "
                    f"the configuration, {row.module_path} is {list(row.weight.shape)}){resized}"
                )

    def _check_saved(self, row: ModuleRow, roles: dict[str, AdapterKey], entries: Mapping[str, TensorEntry]) -> None:
        tensors = {tensor.tensor_path.removeprefix(f"{row.module_path}."): tensor for tensor in row.tensors}
        if row.kind == "experts":
            self.problems.append(f"{next(iter(entries.values())).tensor_name}: saved fused experts are not supported{MERGED}")
        if row.kind == "other" and self._is_in_recurrent(row):
            # Its parameters are read as such, and its state has advanced when a module finds that rows differ.
            self.problems.append(f"{row.module_path}: a saved {row.class_name} inside a recurrent layer is not supported{MERGED}")
        vocabulary = row.kind == "embedding" or row.part == "head"
        for name, entry in entries.items():
            own = tensors[name].shape
            if entry.shape != own:
                self.is_other_shape = True
                why = _resized_words(entry.shape[0]) if vocabulary and entry.shape[1:] == own[1:] and own else ""
                self.problems.append(f"{entry.tensor_name}: shape {list(entry.shape)}, the model's is {list(own)}{why}")
            if not self._is_announced(row, roles[name]):
                option = self.config.get("bias", "none")
                # PEFT loads biases that its option names; other full tensors it may drop, so a merge would lose them.
                is_named = name == "bias" and option != "none"
                why = f" (bias={option!r}) is not supported{MERGED}" if is_named else " is not supported"
                self.problems.append(f"{entry.tensor_name}: a full {name} that modules_to_save does not name{why}")

    def _is_in_recurrent(self, row: ModuleRow) -> bool:
        """Whether a module is inside what mixes the tokens of a layer that keeps a state; the layer's own norms are not."""
        states = {layer.layer for layer in self.anatomy.kv_layers if layer.state_values}
        inside, number = row.module_path.removeprefix(f"{row.block}."), row.block.rpartition(".")[2]
        is_state = row.part == "language" and number.isdigit() and int(number) in states
        return is_state and "." in inside and not row.is_router

    def _is_announced(self, row: ModuleRow, key: AdapterKey) -> bool:
        # PEFT writes full embeddings and heads next to LoRA (save_embedding_layers) without an entry in the config.
        is_copy = key.parameter == "weight" and (row.kind == "embedding" or row.part == "head")
        return is_copy or (key.role == "saved" and self.rules.is_saved(own_path(key.path)))

    def check_promises(self, matched: Mapping[tuple[str, str], dict[str, AdapterKey]]) -> None:
        """Collect parameters that modules_to_save declares and the file lacks; PEFT fails on them too."""
        for path, row in self.places.rows.items():
            if not self.rules.is_saved(path):
                continue
            have = matched.get((path, "saved"), {})
            for tensor in row.tensors:
                name = tensor.tensor_path.removeprefix(f"{path}.")
                if not tensor.is_buffer and name not in have:
                    self.problems.append(f"modules_to_save names {path}, but the file has no {name} for it")

    def check_tying(self, targets: Iterable[AdapterTarget]) -> None:
        """Collect changed modules whose tied partner does not change although ensure_weight_tying is set.

        PEFT ties nothing unless the configuration names an embedding by its bare name. Source: PEFT 0.21.2,
        tuners/tuners_utils.py, _check_tied_modules; utils/constants.py, EMBEDDING_LAYER_NAMES.
        """
        if not self.config.get("ensure_weight_tying"):
            return
        wanted = self.config.get("target_modules") or ()
        listed = {*(self.config.get("modules_to_save") or ()), *(() if isinstance(wanted, str) else wanted)}
        pattern = {"target_modules": wanted} if isinstance(wanted, str) and wanted != "all-linear" else {}
        if not Rules(self.file.folder, pattern, _EMBEDDINGS).named and not any(one.split(".")[-1] in _EMBEDDINGS for one in listed):
            return
        have = {target.module_path for target in targets}
        for path in sorted(have):
            for partner in self._partners(path):
                if partner not in have:
                    self.problems.append(f"ensure_weight_tying is true, but of {path} and {partner} only the first has keys")

    def tied_copies(self, targets: Iterable[AdapterTarget]) -> list[AdapterTarget]:
        """Return saved targets for modules tied to one whose full weight PEFT loads into the base itself.

        PEFT wraps a module of modules_to_save, so that a tied partner keeps the base weight; any other full weight it
        copies into the base parameter, and the partner changes with it (utils/save_and_load.py, load_state_dict).
        """
        have = {target.module_path for target in targets if target.kind == "saved"}
        copies = []
        for target in targets:
            if target.kind != "saved" or self.rules.is_saved(own_path(target.adapter_path)):
                continue
            for path in self._partners(target.module_path):
                if path not in have:
                    row = self.places.rows[path]
                    copies.append(replace(target, module_path=path, part=row.part, wrapped=False))
        return copies

    def tied_originals(self, targets: Iterable[AdapterTarget], originals: Mapping[str, AdapterKey]) -> list[AdapterTarget]:
        """Return saved targets for modules tied to a saved one, if the file also has its untrained weight: PEFT loads
        `original_module` into the base's parameter, which a tied partner still uses."""
        have = {target.module_path for target in targets if target.kind == "saved"}
        copies = []
        for path, key in originals.items():
            entry = self.file.tensors[key.adapter_key]
            for partner in self._partners(path):
                row = self.places.rows[partner]
                if partner not in have and row.weight is not None and entry.shape == row.weight.shape:
                    copies.append(
                        AdapterTarget(partner, row.part, "saved", 0, 1.0, False, False, False, {"weight": entry}, key.path)
                    )
        return copies

    def _partners(self, path: str) -> list[str]:
        def owner(row: ModuleRow) -> str | None:
            return None if row.weight is None else row.weight.tied_to or row.weight.copy_of or row.weight.tensor_path

        own = owner(self.places.rows[path])
        if own is None:
            return []
        return [other for other, row in self.places.rows.items() if other != path and owner(row) == own]

    def notes(self) -> list[str]:
        """Return remarks about an adapter that has no error."""
        notes = list(self.file.notes)
        if self.config.get("fan_in_fan_out") and not any(map(_is_turned, self.places.rows.values())):
            notes.append("fan_in_fan_out is true; it has no effect on Linear modules (PEFT ignores it too)")
        if self.config.get("bias", "none") != "none":
            notes.append(f"bias is {self.config['bias']!r} but the file holds no bias of the base")
        unknown = [name for name in self.config if name not in FIELDS]
        if unknown:
            notes.append(f"unknown fields that are off: {', '.join(sorted(unknown))}")
        return notes


def parts_of(tensor_names: Iterable[str]) -> dict[str, int]:
    """Return how many of the tensors belong to each part of a model, judged by their names."""
    return dict(sorted(Counter(part_of_key(name) for name in tensor_names).items()))
