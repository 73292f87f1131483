"""Adapters at run time: PEFT's mathematics on trimtab's layers, selected per batch row.

`attach` puts a matched adapter on the model, all of it or nothing; `Route` says which adapter each row uses now; layers
call `apply_linear` and `apply_embedding` on their own output. Same operations in the same order and precision as PEFT
0.19.1 to 0.21.2, so equal bit for bit where the kernels are the same; norms of DoRA are computed once, at attach.
Unlike PEFT's mixed batches, which round once more, a row here equals the row run alone. Inference only.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.checkpoint.adapter import AdapterSpec, AdapterTarget
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.names import near_names
from trimtab.errors import AdapterError, RequestError
from trimtab.runtime.attached_adapter import AttachedAdapter
from trimtab.runtime.base_values import BaseValues, base_values, finished

if TYPE_CHECKING:
    from trimtab.runtime.short_ops import ShortAdapters
    from trimtab.runtime.slots import AdapterSlots

# Towers see images and audio, not rows: the first dimension of their input is another count.
TOWERS = ("vision", "audio", "connector")


class Route:
    """Which attached adapter each row uses now; one object per loaded model, shared by all its layers.

    `name` is the adapter of all rows (None for the base); while rows differ, `rows` has one name a row instead.
    """

    def __init__(self) -> None:
        self._attached = 0
        # The one registry of attached adapters, and how often a module was exchanged for one with an adapter's own values.
        self.holders: dict[str, Holders] = {}
        self.exchanges = 0
        # Set while a step chooses adapters by a table on the device instead (`runtime/slots.py`).
        self.slots: AdapterSlots | None = None
        # Set while a decode step computes plain LoRA from fewer operations (`runtime/short_ops.py`).
        self.short: ShortAdapters | None = None
        self.name: str | None = None
        self.rows: tuple[str | None, ...] | None = None
        self.towers: dict[str, tuple[str | None, ...]] = {}
        self.indices: dict[tuple[tuple[str | None, ...], torch.device], list[tuple[str, Tensor]]] = {}

    def none(self) -> None:
        """Use the base model for every row."""
        self.name, self.rows, self.towers = None, None, {}
        self.indices.clear()

    def set(self, name: str | None) -> None:
        """Use one adapter for every row. Errors: RequestError for a name that is not attached."""
        self._check([name])
        self.none()
        self.name = name

    def set_rows(self, rows: Sequence[str | None], *, towers: Mapping[str, Sequence[str | None]] | None = None) -> None:
        """Use rows[i] for batch row i (None: the base).

        towers: the same for the pictures ("vision", "connector") or audio clips ("audio") of the batch, in the order the
        tower gets them; needed only where rows differ and an adapter changes that part. Errors: RequestError.
        """
        towers = towers or {}
        for names in (rows, *towers.values()):
            self._check(names)
        for part in towers:
            if part not in TOWERS:
                raise RequestError("not a tower", field="towers", value=part, allowed=TOWERS)
        if not rows:
            raise RequestError("a batch has at least one row", field="rows", value=list(rows))
        wanted = {part: tuple(names) for part, names in towers.items()}
        if self.rows == tuple(rows) and self.towers == wanted:
            return
        self.none()
        if len(set(rows)) == 1:
            self.name = rows[0]
            return
        self.rows = tuple(rows)
        self.towers = wanted

    def attached(self, name: str, holders: Holders) -> None:
        """Take up a name whose tensors are in place."""
        self._attached += 1
        holders.serial = self._attached
        self.holders[name] = holders

    @property
    def names(self) -> KeysView[str]:
        """The names of the attached adapters."""
        return self.holders.keys()

    @property
    def serials(self) -> dict[str, int]:
        """Name -> serial of the attached adapters, in the order in which they were attached. A copy."""
        return {name: one.serial for name, one in list(self.holders.items())}

    def serial_of(self, name: str) -> int | None:
        """Return the serial of an attached adapter, None for a name that is not attached."""
        holders = self.holders.get(name)
        return None if holders is None else holders.serial

    @property
    def last_serial(self) -> int:
        """The number of the adapter that was attached last, whether or not it still is."""
        return self._attached

    def detached(self, name: str) -> None:
        """Forget a name; rows that used it use the base from now on."""
        self.holders.pop(name, None)
        if name in self.active():
            self.none()

    def active(self) -> tuple[str | None, ...]:
        """Return the adapters in use: one entry for all rows, or one per row."""
        return (self.name,) if self.rows is None else self.rows

    def groups(self, part: str, count: int, device: torch.device) -> list[tuple[str, Tensor]]:
        """Return (adapter, row numbers on the device) for a module of `part` whose input has `count` rows.

        Errors: RequestError if it is not known which adapter each of those rows belongs to.
        """
        assert self.rows is not None
        rows = self.towers.get(part) if part in TOWERS else self.rows
        if rows is None or len(rows) != count:
            known = f"{len(rows)} are routed" if rows is not None else f"pass towers={{{part!r}: [...]}}"
            raise RequestError(
                f"rows of this batch use different adapters, but which one each of the {count} inputs of the {part} "
                f"part belongs to is not known ({known})", field="adapter", value=sorted({n for n in self.rows if n}),
                hint="Run the requests one adapter at a time",
            )  # fmt: skip
        row_groups = self.indices.get((rows, device))
        if row_groups is None:
            row_groups = [
                (name, torch.tensor([i for i, row in enumerate(rows) if row == name], device=device))
                for name in dict.fromkeys(rows)
                if name is not None
            ]
            self.indices[rows, device] = row_groups
        return row_groups

    def _check(self, names: Sequence[str | None]) -> None:
        for name in names:
            if name is not None and name not in self.names:
                raise RequestError("no such adapter", field="adapter", value=name, allowed=sorted(self.names))


@dataclass(eq=False)
class LinearAdapter:
    """One adapter's change of one linear layer: y -> y + scale B A x, with DoRA also a rescaling of y.

    Shapes: A [R, D_in], B [D_out, R], B_bias [D_out], magnitude (DoRA: magnitude / norm) [1, D_out]. weight
    [D_out, D_in] and bias [D_out] replace the base's (modules_to_save). All on the execution device.
    """

    part: str
    scale: float = 1.0
    A: Tensor | None = None
    B: Tensor | None = None
    B_bias: Tensor | None = None
    magnitude: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def apply(self, leaf: Any, x: Tensor, y: Tensor) -> Tensor:
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
        # Over a quantized layer PEFT rounds the change before adding it; over a plain one it rounds the sum.
        return (y + delta).to(y.dtype) if leaf.quant_kind == "none" else y + delta.to(y.dtype)


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

    def apply(self, table: Any, ids: Tensor, rows: Tensor) -> Tensor:
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


class SavedModule(nn.Module):
    """Stands where a module of another kind (a norm, a convolution) was and runs it with an adapter's own parameters.

    Path, parameters, buffers and attributes are the original's; while all rows use one adapter, reading a parameter
    gives that adapter's. Rows with different adapters are run one adapter at a time.
    """

    def __init__(self, original: nn.Module, route: Route, part: str) -> None:
        super().__init__()
        # In __dict__, not as a child: parameter paths stay what they were.
        self.__dict__.update(
            original=original, route=route, part=part, adapters={}, training=original.training,
            _parameters=original._parameters, _buffers=original._buffers, _modules=original._modules,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        route, adapters = self.__dict__["route"], self.__dict__["adapters"]
        if route.rows is None:
            return self._run(adapters.get(route.name), args, kwargs)
        if not any(name in adapters for name in route.rows):
            return self._run(None, args, kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise RequestError(
                f"rows of this batch use different adapters and {type(self.__dict__['original']).__name__} takes more "
                "than one input", field="adapter", hint="Run the requests one adapter at a time",
            )  # fmt: skip
        (x,) = args
        result = self._run(None, (x,), {})
        for name, index in route.groups(self.__dict__["part"], x.shape[0], x.device):
            if name in adapters:
                result = result.index_copy(0, index, self._run(adapters[name], (x[index],), {}))
        return result

    def _run(self, saved: dict[str, Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = self.__dict__["original"]
        if saved is None:
            return original(*args, **kwargs)
        return torch.func.functional_call(original, saved, args, kwargs, tie_weights=False)

    def __getattr__(self, name: str) -> Any:
        inside = self.__dict__
        if "original" in inside:
            saved = inside["adapters"].get(inside["route"].name) if inside["route"].rows is None else None
            return saved[name] if saved is not None and name in saved else getattr(inside["original"], name)
        return super().__getattr__(name)


def apply_linear(leaf: Any, x: Tensor, base_output: Tensor) -> Tensor:
    """Return base_output [..., D_out] changed by the adapters that the route gives to the rows of x [B, ..., D_in].

    base_output may be overwritten. Errors: RequestError if rows use different adapters and x is not in batch rows.
    """
    short: ShortAdapters | None = leaf.route.short
    if short is not None and short.can(leaf, x):
        return short.apply(leaf, x, base_output)
    return _apply(leaf, x, base_output)


def apply_embedding(table: Any, ids: Tensor, base_output: Tensor) -> Tensor:
    """Return base_output [B, S, D] changed by the adapters that the route gives to the rows of ids [B, S]."""
    return _apply(table, ids, base_output)


def _apply(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    route: Route = layer.route
    adapters: dict[str, LinearAdapter | EmbeddingAdapter] = layer.adapters
    if route.rows is None:
        adapter = None if route.name is None else adapters.get(route.name)
        return y if adapter is None else adapter.apply(layer, x, y)
    used = [name for name in route.rows if name is not None and name in adapters]
    if not used:
        return y
    for name, index in route.groups(adapters[used[0]].part, x.shape[0], x.device):
        if name in adapters:
            y.index_copy_(0, index, adapters[name].apply(layer, x[index], y[index]))
    return y


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

    def linear(
        self, path: str, leaf: Any, lora: AdapterTarget | None, saved: AdapterTarget | None
    ) -> LinearAdapter | None:
        target = lora or saved
        assert target is not None
        adapter = LinearAdapter(target.part)
        if saved is not None and path not in self.base.same:
            replaced = {name: self.tensor(entry, leaf.weight.dtype) for name, entry in saved.tensors.items()}
            adapter.weight, adapter.bias = replaced.get("weight"), replaced.get("bias")
        if lora is None:
            return None if adapter.weight is None and adapter.bias is None else adapter
        adapter.scale = lora.scale
        adapter.A, adapter.B, adapter.B_bias = (self.lora(lora, role) for role in ("A", "B", "B_bias"))
        magnitude = self.lora(lora, "magnitude")
        if magnitude is not None:
            adapter.magnitude = (magnitude / self.base.norms[path].to(self.device)).view(1, -1)
        return adapter

    def embedding(
        self, path: str, table: Any, lora: AdapterTarget | None, saved: AdapterTarget | None
    ) -> EmbeddingAdapter | None:
        target = lora or saved
        assert target is not None
        adapter = EmbeddingAdapter(target.part)
        if saved is not None and path not in self.base.same:
            adapter.weight = self.tensor(saved.tensors["weight"], table.dtype)
        if lora is None:
            return None if adapter.weight is None else adapter
        adapter.scale = lora.scale
        A, adapter.B, magnitude = (self.lora(lora, role) for role in ("A", "B", "magnitude"))
        assert A is not None
        assert adapter.B is not None
        adapter.A = A.T.contiguous()
        if magnitude is not None:
            adapter.magnitude = magnitude / self.base.norms[path].to(self.device)
        return adapter


@dataclass(frozen=True)
class PlainPlace:
    """One linear layer that an adapter changes by A and B alone, which begin at values A_start and B_start of its piece.

    Shapes: A [rank, in_features], B [out_features, rank].
    """

    leaf: Any
    part: str
    scale: float
    rank: int
    A_start: int
    B_start: int


@dataclass(eq=False)
class Fitting:
    """The targets of one adapter on one model, matched and checked once, so that attaching it again is a short loop.

    plain: what is taken from one piece of memory that holds all of A and B. rest: by module path, all else, which is read
    tensor by tensor. kinds: of the decoder's linear layers that it changes (`kind_of`). largest_rank: there.
    """

    model: nn.Module
    plain: list[PlainPlace]
    rest: dict[str, dict[str, AdapterTarget]]
    kinds: frozenset[str]
    largest_rank: int


@dataclass(eq=False)
class Holders:
    """The modules that hold one attached adapter: those of its fitting's plain places, and `rest` with their paths.

    address: of the piece that the plain places count from, 0 if there is none. about: what the model tells about it, None where it
    was attached without a `LoadedModel`. serial: a new number whenever an adapter is attached, because the same name may stand for
    other tensors later.
    """

    fitting: Fitting
    rest: list[tuple[str, nn.Module]]
    address: int = 0
    about: AttachedAdapter | None = None
    serial: int = 0


def kind_of(module_path: str) -> str:
    """Return what modules at the same place of different layers have in common: the path without its numbers."""
    return ".".join("*" if part.isdigit() else part for part in module_path.split("."))


def fit(model: nn.Module, spec: AdapterSpec, starts: Mapping[tuple[Path, int], int] | None = None) -> Fitting:
    """Return the modules that an adapter changes, without changing them.

    starts: the offset of each tensor in one piece of memory, by its file and first byte there; without them every tensor is
    read separately. Errors: AdapterError for modules that the model does not have or that cannot be adapted.
    """
    by_module: dict[str, dict[str, AdapterTarget]] = {}
    for target in spec.targets:
        by_module.setdefault(target.module_path, {})["saved" if target.kind == "saved" else "lora"] = target
    modules = dict(model.named_modules())
    _check_modules(spec, by_module, modules)
    starts = starts or {}
    fitting = Fitting(model, [], {}, frozenset(), 0)
    kinds = set()
    for path, targets in by_module.items():
        target = targets["lora"] if "lora" in targets else targets["saved"]
        if target.kind == "linear" and target.part not in TOWERS:
            kinds.add(kind_of(path))
            fitting.largest_rank = max(fitting.largest_rank, target.rank)
        is_plain = target.kind == "linear" and set(targets) == {"lora"} and set(target.tensors) == {"A", "B"}
        if not is_plain or any((entry.file, entry.start) not in starts for entry in target.tensors.values()):
            fitting.rest[path] = targets
            continue
        A, B = (starts[entry.file, entry.start] for entry in (target.tensors["A"], target.tensors["B"]))
        fitting.plain.append(PlainPlace(modules[path], target.part, target.scale, target.rank, A, B))
    fitting.kinds = frozenset(kinds)
    return fitting


def attach(
    model: nn.Module, spec: AdapterSpec, name: str, *, read: Callable[[TensorEntry], Tensor],
    device: torch.device | str, route: Route, dtype: str = "float32",
) -> None:  # fmt: skip
    """Attach an adapter under a name: every tensor of it, or nothing and an error.

    read: gives a tensor of the file on the CPU. dtype: of the LoRA tensors; PEFT casts half precision up to float32.
    Errors: RequestError for a name in use; AdapterError for modules that the model does not hold or cannot adapt.
    """
    attach_fitted(fit(model, spec), name, read=read, device=device, route=route, dtype=dtype)


def attach_fitted(
    fitting: Fitting, name: str, *, read: Callable[[TensorEntry], Tensor], device: torch.device | str, route: Route,
    dtype: str = "float32", piece: Tensor | None = None, base: BaseValues | None = None,
    about: AttachedAdapter | None = None,
) -> None:  # fmt: skip
    """Attach an adapter to the model that it was fitted to: every tensor of it, or nothing and an error.

    piece: the values [N] that the plain places count in, of `dtype` and on the device; the adapter keeps it. base: of this
    adapter and model; None: computed now, which reads whole weights. about: kept beside it. Errors: RequestError for a name in
    use.
    """
    if name in route.names:
        raise RequestError("an adapter with this name is attached", field="adapter", value=name)
    model = fitting.model
    to, of = torch.device(device), getattr(torch, dtype)
    plain: list[LinearAdapter] = []
    attached: list[tuple[str, nn.Module, Any]] = []
    with torch.no_grad():
        if base is None:
            base = finished(base_values(model, fitting.rest, read=read, device=to, dtype=of))
        builder = _Builder(read, to, of, base)
        for path, targets in fitting.rest.items():
            module = model.get_submodule(path)
            attached.append((path, module, _make(builder, path, module, targets.get("lora"), targets.get("saved"))))
        if fitting.plain:
            assert piece is not None and piece.dtype == builder.dtype and piece.is_contiguous()
            for one in fitting.plain:
                wide, high, rank = one.leaf.in_features, one.leaf.out_features, one.rank
                A = piece.as_strided((rank, wide), (wide, 1), one.A_start)
                plain.append(
                    LinearAdapter(one.part, one.scale, A, piece.as_strided((high, rank), (rank, 1), one.B_start))
                )
    for one, linear in zip(fitting.plain, plain, strict=True):
        one.leaf.adapters[name] = linear
    holders = Holders(fitting, [], 0 if piece is None else piece.data_ptr(), about)
    for path, module, adapter in attached:
        if adapter is not None:
            holders.rest.append((path, _install(model, module, path, name, adapter, fitting.rest[path], route)))
    route.attached(name, holders)


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
        kind = "linear" if hasattr(module, "dense_weight") else "embedding" if hasattr(module, "rows") else "other"
        wanted = targets["lora"].kind if "lora" in targets else kind
        if kind != wanted:
            problems.append(f"{path} is a {type(module).__name__}, which takes no LoRA for a module of kind {wanted}")
        if "saved" in targets:
            own = {"linear": {"weight", "bias"}, "embedding": {"weight"}}.get(kind) or set(_tensors_of(module))
            lost = sorted(set(targets["saved"].tensors) - own)
            problems += [f"{path} has no {parameter} that could be replaced" for parameter in lost]
    if problems:
        raise AdapterError(spec.file.folder, problems)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _make(builder: _Builder, path: str, module: Any, lora: AdapterTarget | None, saved: AdapterTarget | None) -> Any:
    if hasattr(module, "dense_weight"):
        return builder.linear(path, module, lora, saved)
    if hasattr(module, "rows"):
        return builder.embedding(path, module, lora, saved)
    assert saved is not None
    own = _tensors_of(module)
    return {name: builder.tensor(entry, own[name].dtype) for name, entry in saved.tensors.items()}


def _install(
    model: nn.Module, module: nn.Module, path: str, name: str, adapter: Any, targets: Mapping[str, AdapterTarget],
    route: Route,
) -> nn.Module:  # fmt: skip
    if isinstance(adapter, dict) and not isinstance(module, SavedModule):
        module = SavedModule(module, route, targets["saved"].part)
        _replace(model, path, module, route)
    module.__dict__["adapters"][name] = adapter
    return module


def _replace(model: nn.Module, path: str, module: nn.Module, route: Route) -> None:
    route.exchanges += 1
    parent, _, last = path.rpartition(".")
    model.get_submodule(parent)._modules[last] = module


def detach(model: nn.Module, name: str, *, route: Route | None = None) -> None:
    """Take an adapter off the model and give its memory back; if it is in use, every row uses the base from now on.

    route: the model's, looked for if it is not given. Errors: RequestError for a name that is not attached.
    """
    route = route or _route_of(model)
    holders = None if route is None else route.holders.get(name)
    if route is None or holders is None:
        known = sorted(route.names) if route is not None else []
        raise RequestError("no such adapter", field="adapter", value=name, allowed=known)
    for one in holders.fitting.plain:
        one.leaf.adapters.pop(name, None)
    for path, module in holders.rest:
        module.__dict__["adapters"].pop(name, None)
        if isinstance(module, SavedModule) and not module.__dict__["adapters"]:
            _replace(model, path, module.__dict__["original"], route)
    route.detached(name)


def _route_of(model: nn.Module) -> Route | None:
    return next((module.__dict__["route"] for module in model.modules() if "route" in module.__dict__), None)
