"""How is a weighted sum of loaded adapters computed?"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.adapter_names import check_weight, mix_name
from trimtab.checkpoint.names import near_names
from trimtab.engine.lora import layers
from trimtab.engine.lora.base_values import Product, TableLayer
from trimtab.engine.lora.layers import EmbeddingAdapter, ExpertsAdapter, LinearAdapter, RouterAdapter
from trimtab.engine.lora.store import (
    ADAPTER_DTYPE,
    TOWERS,
    AdapterStore,
    AttachedAdapter,
    Fitting,
    HeldAdapter,
    Holders,
    PlainPlace,
)
from trimtab.errors import DoesNotFitError, RequestError, gib

MOST_MIXES = 8
# Values between two matrices, so that each begins where a kernel may read four at once.
ALIGNED_VALUES = 64

_Parts = list[tuple[float, Any]]


@dataclass(eq=False)
class SummedLinear(LinearAdapter):
    """Several adapters of a layer's output, each with its weight, in their order. A, B and magnitude are the first rescaling one's:
    they show the kind of this adapter."""

    parts: _Parts = field(default_factory=list)

    def apply(self, leaf: Product, x: Tensor, y: Tensor) -> Tensor:
        return _in_turn(self.parts, leaf, x, y)


@dataclass(eq=False)
class SummedEmbedding(EmbeddingAdapter):
    """Several adapters of an embedding's rows, each with its weight, in their order."""

    parts: _Parts = field(default_factory=list)

    def apply(self, table: TableLayer, ids: Tensor, rows: Tensor) -> Tensor:
        return _in_turn(self.parts, table, ids, rows)


def _in_turn(parts: _Parts, layer: object, x: Tensor, y: Tensor) -> Tensor:
    value = y.float()
    for weight, adapter in parts:
        new = adapter.apply(layer, x, value.clone())
        value = new if weight == 1 else value + weight * (new - value)
    return value.to(y.dtype)


class Mixes:
    """The mixes of one loaded model, the one used longest ago first. A mix of plain LoRA is one adapter of the summed rank: A =
    [A1; A2], B = [w1 s1 B1, w2 s2 B2]. With DoRA each adapter rescales the output of those before it, and modules compute it. A mix
    is made at its first use. Source: PEFT 0.21.2, lora/layer.py; lora/variants.py."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # The serials of each mix's adapters when it was made.
        self._made: OrderedDict[str, dict[str, int]] = OrderedDict()
        # Those of `add`; the caller of `add` removes them.
        self._added: set[str] = set()

    def check(self, weights: Mapping[str, float]) -> None:
        """Raise RequestError for a mix of nothing, an adapter that is not loaded, a weight that is 0 or no number."""
        if not weights:
            raise RequestError("a mix needs at least one adapter", field="adapter", hint="None is the base")
        known = self._model.adapters
        for name, weight in weights.items():
            if name not in known:
                raise RequestError(
                    "no adapter of this name is loaded", field="adapter", value=name,
                    allowed=known, near=near_names(str(name), known),
                )  # fmt: skip
            check_weight(name, weight)

    def name_of(self, weights: Mapping[str, float], in_use: Collection[str | None] = ()) -> str:
        """Return the name under which a mix is attached, after attaching it. in_use: mixes that must stay.

        Errors: RequestError; DoesNotFitError if the plan leaves no room for it.
        """
        self.check(weights)
        if len(weights) == 1 and next(iter(weights.values())) == 1:
            return next(iter(weights))
        holders, serials = self._model.adapter_store.holders, self._model.adapter_store.serials
        if _rescaled({one: holders[one].fitting for one in weights}) is None:
            weights = dict(sorted(weights.items()))  # the order of a sum rounds
        name = mix_name(weights, is_ordered=True)
        made_of = {one: serials[one] for one in weights}
        if self._made.get(name) == made_of:
            self._made.move_to_end(name)
            return name
        self._drop(name)
        while len(self._made) >= MOST_MIXES and self._drop_oldest(in_use):
            pass
        self._attach(name, weights, in_use)
        self._made[name] = made_of
        return name

    def forget(self, adapter: str) -> None:
        """Take off the mixes that an adapter is part of."""
        for name in [name for name, made_of in self._made.items() if adapter in made_of]:
            self._drop(name)

    def clear(self) -> None:
        """Take off all mixes of `name_of`; they are made again when they are used."""
        for name in [name for name in self._made if name not in self._added]:
            self._drop(name)

    # Made by a server ------------------------------------------------------------------------------------------------

    def is_plain(self, parts: Sequence[HeldAdapter]) -> bool:
        """Whether a mix of these needs none of them on the device: whether each is A and B alone, from one piece of memory."""
        return all(one.dtype is not None and not self._model.fitting(one).rest for one in parts)

    def needed_bytes(self, parts: Sequence[HeldAdapter]) -> int:
        """Return the bytes of a mix, not counting its adapters where they have to be on the device too."""
        by_leaf: dict[nn.Module, int] = {}
        for held in parts:
            for place in self._model.fitting(held).plain:
                by_leaf[place.leaf] = by_leaf.get(place.leaf, 0) + place.rank
        values = 0
        for leaf, rank in by_leaf.items():
            wide: Any = leaf
            values = _aligned(_aligned(values + rank * wide.in_features) + rank * wide.out_features)
        return int(self._model.bytes_with_copies(values * 4))

    def check_unordered(self, parts: Mapping[str, HeldAdapter]) -> None:
        """Raise RequestError for adapters whose order would change the result. parts: by name."""
        rescaled = _rescaled({name: self._model.fitting(held) for name, held in parts.items()})
        if rescaled is not None:
            path, name, other = rescaled
            raise RequestError(
                f"adapter {name} rescales {path} (DoRA), which {other} changes too: the result depends on their order, and a "
                "mix in a request has none", field="adapter", value=f"{name}+{other}",
                hint="Merge them in the order that you want (trimtab merge), or mix them in Python, where the order counts",
            )  # fmt: skip

    def add(self, name: str, parts: Mapping[str, tuple[float, HeldAdapter]]) -> None:
        """Attach a mix under a name until `remove`. parts: name -> (weight, adapter); attached too, unless all are plain.

        Errors: RequestError, also where the order would matter; DoesNotFitError.
        """
        parts = dict(sorted(parts.items()))  # the order of a sum rounds
        self.check_unordered({one: held for one, (_, held) in parts.items()})
        self._drop(name)
        content = ""
        if self._model.prefix_cache is not None:
            made_of = [(weight, held.content) for weight, held in parts.values()]
            content = hashlib.sha256(repr(made_of).encode()).hexdigest()
        if self.is_plain([held for _, held in parts.values()]):
            self._attach_parts(name, self._parts_held(parts), self._added, content)
        else:
            self._attach(name, {one: weight for one, (weight, _) in parts.items()}, self._added, content)
        self._made[name] = {}
        self._added.add(name)

    def remove(self, name: str) -> None:
        """Take off a mix of `add`."""
        self._drop(name)

    def _parts_held(self, parts: Mapping[str, tuple[float, HeldAdapter]]) -> dict[nn.Module, tuple[str, _Parts]]:
        """Return the same as `_parts_of`, read from host memory."""
        by_module: dict[nn.Module, tuple[str, _Parts]] = {}
        for weight, held in parts.values():
            assert held.dtype is not None
            values = held.memory.tensor.view(held.dtype)
            for place in self._model.fitting(held).plain:
                wide, high, rank = place.leaf.in_features, place.leaf.out_features, place.rank
                A = values.as_strided((rank, wide), (wide, 1), place.A_start)
                B = values.as_strided((high, rank), (rank, 1), place.B_start)
                adapter = LinearAdapter(place.part, place.scale, A, B)
                by_module.setdefault(place.leaf, (place.leaf.module_path, []))[1].append((weight, adapter))
        return by_module

    # Attaching --------------------------------------------------------------------------------------------------------

    def _drop_oldest(self, in_use: Collection[str | None]) -> bool:
        oldest = next((name for name in self._made if name not in in_use and name not in self._added), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, name: str) -> None:
        if self._made.pop(name, None) is not None:
            self._added.discard(name)
            layers.detach(self._model.hf_model, name, store=self._model.adapter_store)

    def _attach(self, name: str, weights: Mapping[str, float], in_use: Collection[str | None], content: str = "") -> None:
        self._attach_parts(name, _parts_of(self._model.adapter_store, weights), in_use, content)

    def _attach_parts(
        self, name: str, parts: Mapping[nn.Module, tuple[str, _Parts]], in_use: Collection[str | None],
        content: str = "",
    ) -> None:  # fmt: skip
        model = self._model
        plain = {module: adapters for module, (path, adapters) in parts.items() if _is_plain(module, adapters)}
        places, values = _places(plain)
        needed = values * 4
        while needed > model.free_adapter_bytes() and self._drop_oldest(in_use):
            pass
        free = model.free_adapter_bytes()
        if needed > free:
            raise DoesNotFitError(
                f"the plan leaves {gib(max(free, 0))} for a mix of adapters", block=f"adapter {name}",
                device=str(model.device), needed_bytes=needed, budget_bytes=max(free, 0),
                hint="Unload another adapter, or plan with a larger budget",
            )  # fmt: skip
        piece = torch.zeros(values, dtype=getattr(torch, ADAPTER_DTYPE), device=model.device)
        rest = {module: _rest(path, adapters) for module, (path, adapters) in parts.items() if module not in plain}
        for place in places:
            _fill(place, piece, plain[place.leaf])
        kinds = frozenset(layers.kind_of(path) for path, adapters in parts.values() if _in_decoder(adapters))
        ranks = [place.rank for place in places if place.part not in TOWERS]
        fitting = Fitting(model.hf_model, places, {}, kinds, max(ranks, default=0))
        # `attach_fitted` reads all but plain LoRA from files: these come from adapters on the device.
        for place in places:
            A = piece.as_strided((place.rank, place.leaf.in_features), (place.leaf.in_features, 1), place.A_start)
            B = piece.as_strided((place.leaf.out_features, place.rank), (place.rank, 1), place.B_start)
            place.leaf.adapters[name] = LinearAdapter(place.part, 1.0, A, B)
        for module, adapter in rest.items():
            module.__dict__["adapters"][name] = adapter
        address, about = piece.data_ptr() if places else 0, AttachedAdapter(None, needed, content)
        holders = Holders(fitting, [(parts[module][0], module) for module in rest], address, about)
        model.adapter_store.attached(name, holders)


def _rescaled(fittings: Mapping[str, Fitting]) -> tuple[str, str, str] | None:
    """Return (module path, an adapter that rescales it, another that changes it too), None if the order does not matter."""
    rescaling = {
        path: name for name, one in fittings.items() for path, targets in one.rest.items()
        if "lora" in targets and targets["lora"].use_dora
    }  # fmt: skip
    for name, one in fittings.items() if rescaling else ():
        for path in [*(place.leaf.module_path for place in one.plain), *one.rest]:
            if rescaling.get(path, name) != name:
                return path, rescaling[path], name
    return None


def _parts_of(store: AdapterStore, weights: Mapping[str, float]) -> dict[nn.Module, tuple[str, _Parts]]:
    """Return module -> (its path, the change by each adapter of the mix). Errors: RequestError for replaced values."""
    parts: dict[nn.Module, tuple[str, _Parts]] = {}
    for name, weight in weights.items():
        holders = store.holders[name]
        held = [(place.leaf.module_path, place.leaf) for place in holders.fitting.plain]
        for path, module in [*held, *holders.rest]:
            adapter = module.__dict__["adapters"][name]
            if isinstance(adapter, dict) or adapter.weight is not None or getattr(adapter, "bias", None) is not None:
                raise _no_sum(name, path)
            parts.setdefault(module, (path, []))[1].append((weight, adapter))
    return parts


def _no_sum(name: str, path: str) -> RequestError:
    return RequestError(
        f"adapter {name} replaces the weights of {path}, which cannot be mixed", field="adapter", value=name, hint="Use it alone"
    )


def _is_plain(module: nn.Module, parts: _Parts) -> bool:
    return hasattr(module, "dense_weight") and all(
        isinstance(one, LinearAdapter) and one.A is not None and one.B_bias is None and one.magnitude is None for _, one in parts
    )


def _in_decoder(parts: _Parts) -> bool:
    return isinstance(parts[0][1], LinearAdapter) and parts[0][1].part not in TOWERS


def _places(plain: Mapping[nn.Module, _Parts]) -> tuple[list[PlainPlace], int]:
    """Return where each layer's A and B begin in one piece, and how many values that has."""
    places: list[PlainPlace] = []
    end = 0
    for module, parts in plain.items():
        leaf: Any = module
        rank = sum(one.A.shape[0] for _, one in parts)
        A_start = end
        B_start = _aligned(A_start + rank * leaf.in_features)
        end = _aligned(B_start + rank * leaf.out_features)
        places.append(PlainPlace(leaf, parts[0][1].part, 1.0, rank, A_start, B_start))
    return places, end


def _aligned(values: int) -> int:
    return -(-values // ALIGNED_VALUES) * ALIGNED_VALUES


def _fill(place: PlainPlace, piece: Tensor, parts: _Parts) -> None:
    A = piece.as_strided((place.rank, place.leaf.in_features), (place.leaf.in_features, 1), place.A_start)
    B = piece.as_strided((place.leaf.out_features, place.rank), (place.rank, 1), place.B_start)
    start = 0
    for weight, one in parts:
        end = start + one.A.shape[0]
        A[start:end].copy_(one.A)
        B[:, start:end].copy_(one.B).mul_(weight * one.scale)
        start = end


def _rest(path: str, parts: Sequence[tuple[float, Any]]) -> LinearAdapter | EmbeddingAdapter | RouterAdapter | ExpertsAdapter:
    """Return one change equal to all parts in their order, for a module where one of them is more than A and B."""
    kinds = {type(one) for _, one in parts}
    if kinds <= {ExpertsAdapter}:
        return ExpertsAdapter(parts[0][1].part, [change for weight, one in parts for change in one.times(weight)])
    if kinds <= {RouterAdapter}:
        linears = [(weight, one.linear) for weight, one in parts]
        first = linears[0][1]
        return RouterAdapter(SummedLinear(first.part, 1.0, first.A, first.B, parts=linears))
    if kinds <= {EmbeddingAdapter}:
        first = parts[0][1]
        return SummedEmbedding(first.part, 1.0, first.A, first.B, first.magnitude, parts=list(parts))
    if kinds <= {LinearAdapter}:
        first = next((one for _, one in parts if one.magnitude is not None), parts[0][1])
        return SummedLinear(first.part, 1.0, first.A, first.B, first.B_bias, first.magnitude, parts=list(parts))
    raise RequestError(f"the adapters change {path} in different ways", field="adapter", hint="Use one at a time")
