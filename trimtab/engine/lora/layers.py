"""How does an adapter change the layers of a model, by PEFT's mathematics?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.names import near_names
from trimtab.engine.lora.base_values import BaseValues, LinearLayer, Product, TableLayer, base_values, finished
from trimtab.engine.lora.experts import ExpertProduct, cover, matrices, uncover, why_no_lora
from trimtab.engine.lora.routers import RouterModule, takes_lora
from trimtab.engine.lora.store import TOWERS, AdaptedLayer, AdapterStore, AttachedAdapter, Fitting, Holders, PlainPlace
from trimtab.errors import AdapterError, RequestError
from trimtab.formats.record import rounds_change


@dataclass(eq=False)
class LinearAdapter:
    """One adapter's change of one linear layer: y -> y + scale B A x, with DoRA also a rescaling of y.

    Shapes: A [R, D_in], B [D_out, R], B_bias [D_out], magnitude (DoRA: magnitude / norm) [1, D_out]. weight [D_out, D_in] and bias
    [D_out] replace the base's (modules_to_save). All on the execution device. Operations, order and precision are those of PEFT
    0.19.1 to 0.21.2. PEFT's mixed batches round once more; here a row equals the row run alone.
    """

    part: str
    scale: float = 1.0
    A: Tensor | None = None
    B: Tensor | None = None
    B_bias: Tensor | None = None
    magnitude: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def apply(self, leaf: Product, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output with this adapter; y is the base's output for x.

        Source: PEFT 0.21.2, lora/layer.py Linear.forward, lora/bnb.py Linear4bit.forward, lora/dora.py.
        """
        bias = leaf.bias if self.bias is None else self.bias
        if self.weight is not None:
            y = nn.functional.linear(x.to(self.weight.dtype), self.weight, bias).to(y.dtype)
        if self.A is None or self.B is None:
            return y
        low = nn.functional.linear(x.to(self.A.dtype), self.A)
        delta = nn.functional.linear(low, self.B, self.B_bias)
        if self.magnitude is not None:
            plain = y if bias is None else y - bias
            return (y + ((self.magnitude - 1) * plain + self.magnitude * delta * self.scale)).to(y.dtype)
        delta.mul_(self.scale)
        return y + delta.to(y.dtype) if rounds_change(leaf.quant_kind) else (y + delta).to(y.dtype)


@dataclass(eq=False)
class EmbeddingAdapter:
    """One adapter's change of one embedding table: rows + scale (B A)^T rows, times the table's own scale.

    Shapes: A [V, R] (transposed, so that a token is one row), B [D, R], magnitude (DoRA: magnitude / norm) [D]. weight
    [V, D] replaces the table (modules_to_save).
    """

    part: str
    scale: float = 1.0
    A: Tensor | None = None
    B: Tensor | None = None
    magnitude: Tensor | None = None
    weight: Tensor | None = None

    def apply(self, table: TableLayer, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of ids with this adapter; `rows` are the base's, already scaled.

        Source: PEFT 0.21.2, lora/layer.py Embedding.forward, lora/variants.py DoraEmbeddingVariant.forward.
        """
        dtype, own_scale = rows.dtype, table.embed_scale
        if self.weight is not None:
            rows = nn.functional.embedding(ids, self.weight)
            rows = rows if own_scale is None else rows * own_scale.to(rows.dtype)
        if self.A is None or self.B is None:
            return rows.to(dtype)
        delta = nn.functional.embedding(ids, self.A) @ self.B.T
        delta = delta * self.scale if self.magnitude is None else self.magnitude * delta * self.scale
        if own_scale is not None:
            delta = delta * own_scale.to(delta.dtype)
        return ((rows if self.magnitude is None else self.magnitude * rows) + delta).to(dtype)


@dataclass(eq=False)
class StackChange:
    """scale B A on some outputs of some experts of one stack: A [n, R, D_in], B [n, D_out, R]; pairs: expert -> its place there."""

    parameter: str
    A: Tensor
    B: Tensor
    scale: float
    outputs: slice
    pairs: Mapping[int, int]


class ExpertsAdapter:
    """One adapter's changes of the stacks of one module. tables: an `ExpertLora` with which kernels compute passes whose tokens all
    have it, once it is made."""

    weight = None

    def __init__(self, part: str, changes: Sequence[StackChange]) -> None:
        self.part, self.changes = part, tuple(changes)
        self.tables: object | None = None

    def hold(self, tables: object) -> None:
        """Keep its tables, which are on the device as long as it is."""
        self.tables = tables

    def apply(self, product: ExpertProduct, x: Tensor, y: Tensor) -> Tensor:
        """Return the product y [N, D_out] of one expert for x [N, D_in] with this adapter, in the memory of y."""
        for one in self.changes:
            pair = one.pairs.get(product.expert) if one.parameter == product.parameter else None
            if pair is not None:
                part = y[:, one.outputs]
                part.copy_(LinearAdapter(self.part, one.scale, one.A[pair], one.B[pair]).apply(product, x, part))
        return y

    def values(self) -> Iterator[Tensor]:
        """Return its tensors."""
        return (tensor for change in self.changes for tensor in (change.A, change.B))

    def times(self, weight: float) -> Iterator[StackChange]:
        """Return its changes, each multiplied by a weight."""
        return (replace(change, scale=weight * change.scale) for change in self.changes)


class SavedModule(nn.Module):
    """Replaces a module of another kind (a norm, a convolution) and runs it with an adapter's own parameters.

    Path, parameters, buffers and attributes are the original's; while all rows use one adapter, reading a parameter
    gives that adapter's, and a method of the class runs with that adapter's. Rows with different adapters are run one adapter
    at a time. Errors: RequestError where they cannot be: several inputs, another method than forward, a parameter that is read.
    """

    def __init__(self, original: nn.Module, store: AdapterStore, part: str) -> None:
        super().__init__()
        # In __dict__, not as a child: parameter paths stay the same.
        self.__dict__.update(
            original=original, adapter_store=store, part=part, adapters={}, training=original.training,
            _parameters=original._parameters, _buffers=original._buffers, _modules=original._modules,
        )  # fmt: skip

    def forward(self, *args: object, **kwargs: object) -> object:
        selection, adapters = self.__dict__["adapter_store"].selection, self.__dict__["adapters"]
        if selection.rows is None:
            return self._run(adapters.get(selection.name), args, kwargs)
        if not any(name in adapters for name in selection.rows):
            return self._run(None, args, kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise self._mixed("takes more than one input")
        x = args[0]
        result: object = self._run(None, (x,), {})
        for name, index in selection.groups(self.__dict__["part"], x.shape[0], x.device):
            if name in adapters:
                result = self._with_rows(result, index, self._run(adapters[name], (x[index],), {}), x.shape[0])
        return result

    def _with_rows(self, whole: object, index: Tensor, rows: object, count: int) -> object:
        """Return an output of `count` rows with some replaced: one tensor, or a tuple of such (a router's)."""
        if type(whole) is tuple and isinstance(rows, tuple):
            return tuple(self._with_rows(one, index, other, count) for one, other in zip(whole, rows, strict=True))
        if isinstance(whole, Tensor) and isinstance(rows, Tensor) and whole.shape[:1] == (count,):
            return whole.index_copy(0, index, rows)
        raise self._mixed("returns more than one tensor by row")

    def _mixed(self, what: str) -> RequestError:
        why = f"rows of this batch use different adapters and {type(self.__dict__['original']).__name__} {what}"
        return RequestError(why, field="adapter", hint="Run the requests one adapter at a time")

    def _run(self, saved: dict[str, Tensor] | None, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        original = self.__dict__["original"]
        if saved is None:
            return original(*args, **kwargs)
        return torch.func.functional_call(original, saved, args, kwargs, tie_weights=False)

    def _method(self, plain: Callable[..., object]) -> Callable[..., object]:
        """Return a method of the original that runs with the parameters of the rows' adapter."""
        store, adapters, call = self.__dict__["adapter_store"], self.__dict__["adapters"], _Method(self.__dict__["original"], plain)

        def run(*args: object, **kwargs: object) -> object:
            active = set(store.selection.active())
            if active.isdisjoint(adapters):
                return plain(*args, **kwargs)
            if len(active) > 1:
                raise self._mixed(f"is called by {plain.__name__}")
            saved = {f"original.{name}": value for name, value in adapters[active.pop()].items()}
            return torch.func.functional_call(call, saved, args, kwargs, tie_weights=False)

        return run

    def __getattr__(self, name: str) -> Any:
        inside = self.__dict__
        if "original" in inside:
            selection, original = inside["adapter_store"].selection, inside["original"]
            saved = inside["adapters"].get(selection.name) if selection.rows is None else None
            if saved is not None and name in saved:
                return saved[name]
            if selection.rows is not None and any(name in inside["adapters"].get(row, ()) for row in selection.rows):
                raise self._mixed(f"has its {name} read")
            value = getattr(original, name)
            return self._method(value) if getattr(value, "__self__", None) is original else value
        return super().__getattr__(name)


class _Method(nn.Module):
    """A method of a module as a separate module, so that torch can run it with other parameters."""

    def __init__(self, original: nn.Module, method: Callable[..., object]) -> None:
        super().__init__()
        self.original, self.method = original, method

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.method(*args, **kwargs)


@dataclass
class _Builder:
    """Reads tensors and makes the adapters of one attach; a tensor that several targets name is read and kept once. base: of this
    adapter."""

    read: Callable[[TensorEntry], Tensor]
    device: torch.device
    dtype: torch.dtype
    base: BaseValues
    kept: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def tensor(self, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
        tensor = self.kept.get((entry.tensor_name, dtype))
        if tensor is None:
            tensor = self.read(entry).to(device=self.device, dtype=dtype)
            self.kept[entry.tensor_name, dtype] = tensor
        return tensor

    def lora(self, target: AdapterTarget, role: str) -> Tensor | None:
        entry = target.tensors.get(role)
        return None if entry is None else self.tensor(entry, self.dtype)

    def linear(self, path: str, leaf: LinearLayer, lora: AdapterTarget | None, saved: AdapterTarget | None) -> LinearAdapter | None:
        target = lora or saved
        assert target is not None
        entries = {} if saved is None or path in self.base.same else saved.tensors
        replaced = {name: self.tensor(entry, leaf.weight.dtype) for name, entry in entries.items()}
        weight, bias = replaced.get("weight"), replaced.get("bias")
        if lora is None:
            return None if weight is None and bias is None else LinearAdapter(target.part, weight=weight, bias=bias)
        A, B, B_bias, magnitude = (self.lora(lora, role) for role in ("A", "B", "B_bias", "magnitude"))
        if magnitude is not None:
            magnitude = (magnitude / self.base.norms[path].to(self.device)).view(1, -1)
        return LinearAdapter(target.part, lora.scale, A, B, B_bias=B_bias, magnitude=magnitude, weight=weight, bias=bias)

    def experts(self, targets: Iterable[AdapterTarget]) -> ExpertsAdapter:
        changes, part = [], ""
        for one in targets:
            assert one.stack is not None
            part, own = one.part, one.stack
            read = {role: self.read(entry) for role, entry in one.tensors.items()}
            A, B = (matrix.to(device=self.device, dtype=self.dtype).contiguous() for matrix in matrices(own, read))
            pairs = {expert: number for number, expert in enumerate(own.experts)}
            changes.append(StackChange(own.parameter, A, B, one.scale, slice(*own.outputs), pairs))
        return ExpertsAdapter(part, changes)

    def embedding(
        self, path: str, table: TableLayer, lora: AdapterTarget | None, saved: AdapterTarget | None
    ) -> EmbeddingAdapter | None:
        target = lora or saved
        assert target is not None
        weight = None if saved is None or path in self.base.same else self.tensor(saved.tensors["weight"], table.dtype)
        if lora is None:
            return None if weight is None else EmbeddingAdapter(target.part, weight=weight)
        A, B, magnitude = (self.lora(lora, role) for role in ("A", "B", "magnitude"))
        assert A is not None
        assert B is not None
        if magnitude is not None:
            magnitude = magnitude / self.base.norms[path].to(self.device)
        return EmbeddingAdapter(target.part, lora.scale, A.T.contiguous(), B, magnitude, weight)


class RouterAdapter:
    """One adapter's change of one router. Not a `LinearAdapter`, so that no kernel looks it up in a table of linear layers."""

    weight = None

    def __init__(self, linear: LinearAdapter) -> None:
        self.linear, self.part = linear, linear.part
        self.A, self.B = linear.A, linear.B


def kind_of(module_path: str) -> str:
    """Return the common name of modules at the same place of different layers: the path without its numbers."""
    return ".".join("*" if part.isdigit() else part for part in module_path.split("."))


def fit(model: nn.Module, spec: AdapterSpec, starts: Mapping[tuple[Path, int], int] | None = None) -> Fitting:
    """Return the modules that an adapter changes, without changing them.

    starts: the offset of each tensor in one piece of memory, by its file and first byte there; without them every tensor is
    read separately. Errors: AdapterError for modules that the model does not have or that cannot be adapted.
    """
    by_module: dict[str, dict[str, AdapterTarget]] = {}
    for number, target in enumerate(spec.targets):
        role = target.kind if target.kind == "saved" else "lora" if target.stack is None else f"stack {number}"
        by_module.setdefault(target.module_path, {})[role] = target
    modules = dict(model.named_modules())
    _check_modules(spec, by_module, modules)
    starts = starts or {}
    plain: list[PlainPlace] = []
    rest: dict[str, dict[str, AdapterTarget]] = {}
    ranks: dict[str, int] = {}
    for path, targets in by_module.items():
        target = targets["lora"] if "lora" in targets else next(iter(targets.values()))
        if target.kind == "linear" and target.part not in TOWERS:
            kind = kind_of(path)
            ranks[kind] = max(ranks.get(kind, 0), target.rank)
        is_plain = target.kind == "linear" and not target.fan_in_fan_out and set(targets) == {"lora"}
        is_plain = is_plain and set(target.tensors) == {"A", "B"}
        if not is_plain or any((entry.file, entry.start) not in starts for entry in target.tensors.values()):
            rest[path] = targets
            continue
        A, B = (starts[entry.file, entry.start] for entry in (target.tensors["A"], target.tensors["B"]))
        plain.append(PlainPlace(modules[path], target.part, target.scale, target.rank, A, B))
    return Fitting(model, plain, rest, frozenset(ranks), max(ranks.values(), default=0))


def attach_fitted(
    fitting: Fitting, name: str, *, read: Callable[[TensorEntry], Tensor], device: torch.device | str, store: AdapterStore,
    dtype: str = "float32", piece: Tensor | None = None, base: BaseValues | None = None,
    about: AttachedAdapter | None = None,
) -> None:  # fmt: skip
    """Attach an adapter to the model that it was fitted to: every tensor of it, or nothing and an error.

    piece: the values [N] that the plain places count in, of `dtype` and on the device; the adapter keeps it. base: of this
    adapter and model; None: computed now, which reads whole weights. about: kept with it. Errors: RequestError for a name in
    use.
    """
    if name in store.names:
        raise RequestError("an adapter with this name is attached", field="adapter", value=name)
    model = fitting.model
    to, of = torch.device(device), getattr(torch, dtype)
    plain: list[LinearAdapter] = []
    attached: list[tuple[str, nn.Module, object]] = []
    with torch.no_grad():
        if base is None:
            base = finished(base_values(model, fitting.rest, read=read, device=to, dtype=of))
        builder = _Builder(read, to, of, base)
        for path, targets in fitting.rest.items():
            module = model.get_submodule(path)
            attached.append((path, module, _make(builder, path, module, targets)))
        if fitting.plain:
            assert piece is not None and piece.dtype == builder.dtype and piece.is_contiguous()
            for one in fitting.plain:
                wide, high, rank = one.leaf.in_features, one.leaf.out_features, one.rank
                A = piece.as_strided((rank, wide), (wide, 1), one.A_start)
                plain.append(LinearAdapter(one.part, one.scale, A, piece.as_strided((high, rank), (rank, 1), one.B_start)))
    for one, linear in zip(fitting.plain, plain, strict=True):
        one.leaf.adapters[name] = linear
    holders = Holders(fitting, [], 0 if piece is None else piece.data_ptr(), about)
    for path, module, adapter in attached:
        if adapter is not None:
            holders.rest.append((path, _install(model, module, path, name, adapter, fitting.rest[path], store)))
    store.attached(name, holders)


def _check_modules(
    spec: AdapterSpec, by_module: Mapping[str, Mapping[str, AdapterTarget]], modules: Mapping[str, nn.Module]
) -> None:
    problems = []
    for path, targets in by_module.items():
        module = modules.get(path)
        if module is None:
            near = ", ".join(near_names(path, list(modules)))
            problems.append(f"the model holds no module {path} (similar names: {near})")
            continue
        kind = _kind_of(module)
        wanted = next((target.kind for target in targets.values() if target.kind != "saved"), kind)
        if kind != wanted:
            problems.append(f"{path} is a {type(module).__name__}, which takes no LoRA for a module of kind {wanted}")
        if isinstance(module, RouterModule) and "saved" in targets:
            problems.append(f"{path}: another attached adapter has LoRA on this router; it cannot have a replaced weight too")
        if kind == "router" and "lora" not in targets:
            kind = "other"
        if "saved" in targets:
            own = {"linear": {"weight", "bias"}, "embedding": {"weight"}}.get(kind) or set(_tensors_of(module))
            lost = sorted(set(targets["saved"].tensors) - own)
            problems += [f"{path} has no {parameter} that could be replaced" for parameter in lost]
    if problems:
        raise AdapterError(spec.file.folder, problems)


def _kind_of(module: nn.Module) -> str:
    if hasattr(module, "dense_weight") or hasattr(module, "rows"):
        return "linear" if hasattr(module, "dense_weight") else "embedding"
    if isinstance(module, RouterModule) or takes_lora(module):
        return "router"
    if _is_conv1d(module):
        return "linear"
    return "experts" if why_no_lora(module) is None else "other"


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a weight [D_in, D_out]. Source: transformers 5.23.0, pytorch_utils.py."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _cover_conv1d(module: nn.Module, store: AdapterStore, path: str, part: str) -> None:
    """Let a Conv1D add the adapters of the selected rows to what transformers computes."""
    plain, own, layer = type(module).forward, module.__dict__, cast(AdaptedLayer, module)
    if "adapters" not in own:
        own.update(adapters={}, adapter_store=store, module_path=path, part=part, quant_kind="none")
        own["forward"] = lambda x: store.applier.apply(layer, x, plain(module, x))


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _make(builder: _Builder, path: str, module: Any, targets: Mapping[str, AdapterTarget]) -> object:
    if any(target.stack is not None for target in targets.values()):
        return builder.experts(targets.values())
    lora, saved = targets.get("lora"), targets.get("saved")
    if hasattr(module, "dense_weight") or (lora is not None and lora.fan_in_fan_out):
        return builder.linear(path, module, lora, saved)
    if hasattr(module, "rows"):
        return builder.embedding(path, module, lora, saved)
    if lora is not None:
        linear = LinearAdapter(lora.part, lora.scale, builder.lora(lora, "A"), builder.lora(lora, "B"))
        return RouterAdapter(linear)
    assert saved is not None
    own = _tensors_of(module)
    return {name: builder.tensor(entry, own[name].dtype) for name, entry in saved.tensors.items()}


def _install(
    model: nn.Module, module: nn.Module, path: str, name: str, adapter: object, targets: Mapping[str, AdapterTarget],
    store: AdapterStore,
) -> nn.Module:  # fmt: skip
    if _is_conv1d(module) and "lora" in targets:
        _cover_conv1d(module, store, path, targets["lora"].part)
    if isinstance(adapter, ExpertsAdapter):
        cover(module, store, path, adapter.part)
    if isinstance(adapter, RouterAdapter) and not isinstance(module, RouterModule):
        module = RouterModule(module, store, path, targets["lora"].part)
        _replace(model, path, module)
    if isinstance(adapter, dict) and not isinstance(module, SavedModule):
        module = SavedModule(module, store, targets["saved"].part)
        _replace(model, path, module)
    module.__dict__["adapters"][name] = adapter
    return module


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    model.get_submodule(parent)._modules[last] = module


def detach(model: nn.Module, name: str, *, store: AdapterStore | None = None) -> None:
    """Take an adapter off the model and free its memory; if it is in use, every row uses the base from now on.

    store: the model's, looked for if it is not given. Errors: RequestError for a name that is not attached.
    """
    store = store or _store_of(model)
    holders = None if store is None else store.holders.get(name)
    if store is None or holders is None:
        known = sorted(store.names) if store is not None else []
        raise RequestError("no such adapter", field="adapter", value=name, allowed=known, near=near_names(name, known))
    for one in holders.fitting.plain:
        one.leaf.adapters.pop(name, None)
    for path, module in holders.rest:
        last = module.__dict__["adapters"].pop(name, None)
        if isinstance(module, (SavedModule, RouterModule)) and not module.__dict__["adapters"]:
            _replace(model, path, module.__dict__["original"])
        elif not module.__dict__["adapters"] and (isinstance(last, ExpertsAdapter) or _is_conv1d(module)):
            uncover(module)
    store.detached(name)


def _store_of(model: nn.Module) -> AdapterStore | None:
    return next((module.__dict__["adapter_store"] for module in model.modules() if "adapter_store" in module.__dict__), None)
