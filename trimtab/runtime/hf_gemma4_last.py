"""The last layers of Gemma 4 for the last token of a prompt, in the kernels of a decode step.

    key, serial = route(prompts, forward, adapter)   # before a pass of hf_prefill.ChunkForward

These layers read keys and values of earlier ones, and of a prompt they see the last token alone (hf_prefill.py). One token
through a layer is what a decode step computes, so the step's kernels compute it: about sixteen launches a layer where
transformers' modules take forty, and adapters inside the products. Results differ from those of the modules by the order of sums,
as those of a step do.

What stays with the modules: keys and values in 8 bits or in pages, several prompts in one pass, adapters that are not plain LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from trimtab.runtime import hf_gemma4, lora, matvec
from trimtab.runtime.hf_gemma4 import FusedStep, Where
from trimtab.runtime.hf_slots import LayerCache
from trimtab.runtime.leaves import Leaf
from trimtab.runtime.short_ops import is_plain
from trimtab.runtime.slots import RANK_STEP

if TYPE_CHECKING:
    from trimtab.runtime.hf_prefill import Buffers, ChunkForward
    from trimtab.runtime.prefill_graphs import Prompts


class OneAdapter:
    """Tables as slots.AdapterSlots has them, with one adapter, which is the only row's. groups: layers that read one input;
    adapters: by layer, of those that it changes."""

    def __init__(
        self, groups: Sequence[Sequence[Leaf]], adapters: Mapping[Leaf, lora.LinearAdapter], device: torch.device
    ) -> None:
        self._held = dict(adapters)  # graphs have their addresses
        lines: list[list[int]] = []
        ranks: list[int] = []
        scales, starts = [], []
        for group in groups:
            starts.append(len(lines))
            for leaf in group:
                one = adapters.get(leaf)
                lines.append(
                    [0, 0] if one is None or one.A is None or one.B is None else [one.A.data_ptr(), one.B.data_ptr()]
                )
                ranks.append(0 if one is None or one.A is None else int(one.A.shape[0]))
                scales.append(0.0 if one is None else float(one.scale))
        width = -(-max(ranks) // RANK_STEP) * RANK_STEP
        addresses = torch.tensor(lines).T.contiguous().to(device)[:, :, None]
        rank = torch.tensor(ranks, dtype=torch.int32).to(device)[:, None]
        scale = torch.tensor(scales, dtype=torch.float32).to(device)[:, None]
        row = torch.zeros(1, dtype=torch.int32, device=device)
        self._low = torch.empty(len(lines), width, device=device)
        self._args: dict[Leaf, matvec.LoraArgs] = {}
        for group, start in zip(groups, starts, strict=True):
            part = slice(start, start + len(group))
            if any(ranks[part]):
                self._args[group[0]] = matvec.LoraArgs(
                    A_ptr=addresses[0, part], B_ptr=addresses[1, part], rank=rank[part], scale=scale[part], row_slots=row,
                    low=self._low[None, part], is_empty=True,
                )  # fmt: skip

    def empty(self, count: int) -> None:
        """As AdapterSlots.empty."""
        self._low.view(torch.int32).fill_(matvec.EMPTY)

    def args(self, leaves: Sequence[Leaf], count: int, *, is_empty: bool = False) -> matvec.LoraArgs | None:
        """As AdapterSlots.args."""
        return self._args.get(leaves[0])


def _is_whole(part: Tensor | None) -> bool:
    return part is not None and part.is_contiguous()


class LastLayers:
    """The layers from `first` on, for one token in a row of the step's cache. Everything that a pass reads stays where it is, and
    nothing is allocated in one: a pass may be captured."""

    def __init__(self, step: FusedStep, first: int, row: int) -> None:
        self.step, self.first, self.row = step, first, row
        self.layers = list(step.text.layers)
        self.route = self.layers[0].self_attn.q_proj.route
        self._groups = [group for layer in self.layers[first:] for group in hf_gemma4.products_of(layer)]
        # By what of an adapter is part of a graph: its tables, None for one that is read by no table.
        self._tables: dict[Hashable, OneAdapter | None] = {}
        self._table: OneAdapter | None = None
        self._multiplies = step.multiplies(self._groups)
        device = step.cache.device
        self._position, self._ring = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        # Of the last layer with keys and values of its own of each kind.
        self._sources = {
            kind: number for number, kind in enumerate(step.config.layer_types)
            if not self.layers[number].self_attn.is_kv_shared_layer and self.layers[number].self_attn.store_full_length_kv
        }  # fmt: skip
        self._pass: Any = None
        self._allocate()

    def route_to(self, key: Hashable, name: str | None, layouts: Collection[str]) -> None:
        """Use an adapter from now on. key: what of it is part of a graph; name: by which the layers know it; layouts: of adapters
        that are left."""
        if key not in self._tables:
            for old in [one for one in self._tables if self._is_gone(one, layouts)]:
                del self._tables[old]
            self._tables[key] = self._table_of(name)
        self._table = self._tables[key]

    def _is_gone(self, key: Hashable, layouts: Collection[str]) -> bool:
        if isinstance(key, tuple):
            return self.route.serials.get(key[0]) != key[1]
        return key is not None and key not in layouts

    def _table_of(self, name: str | None) -> OneAdapter | None:
        leaves = [leaf for group in self._groups for leaf in group]
        held = {leaf: leaf.adapters[name] for leaf in leaves if name is not None and name in leaf.adapters}
        fits = all(is_plain(one) and _is_whole(one.A) and _is_whole(one.B) for one in held.values())
        # Without a table the layers add the adapter as they do elsewhere.
        return OneAdapter(self._groups, held, self._ring.device) if held and fits and self._multiplies else None

    # One pass --------------------------------------------------------------------------------------------------------

    def forward(self, number: int, buffers: Buffers) -> Callable[..., Tensor]:
        """Return what stands for a layer's forward in a pass: from the tokens of a chunk [1, S, D] and the layer's own input
        [1, S, P] it gives [1, 1, D], which the last of these layers writes. buffers: of the chunk."""

        def forward(hidden_states: Tensor, per_layer_input: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            before, self.route.slots = self.route.slots, cast(Any, self._table)
            try:
                return self._layer(number, hidden_states, per_layer_input, buffers.last, buffers.start)
            finally:
                self.route.slots = before

        return forward

    def _layer(self, number: int, hidden: Tensor, extra: Tensor | None, last: Tensor, start: Tensor) -> Tensor:
        step = self.step
        if number == self.first:
            h = step.buffer("h", (1, hidden.shape[-1]), hidden.dtype)
            h.copy_(hidden[0].index_select(0, last) if hidden.shape[1] > 1 else hidden[0])
            torch.add(start, last, out=self._position)
            self._begin(h, self._states())
        h, x, norm, turns, shared, where = self._pass
        own = extra if extra is None or extra.shape[1] == 1 else extra.index_select(1, last)
        is_last = number + 1 == len(self.layers)
        following = None if is_last else self.layers[number + 1].input_layernorm
        x, norm = step.layer(number, where, turns, shared, h, x, norm, None if own is None else own[0], following)
        self._pass = None if is_last else (h, x, norm, turns, shared, where)
        return step.normed(x, norm)[None] if is_last else h[None]

    def _begin(self, h: Tensor, shared: dict[str, tuple[Tensor, Tensor]]) -> None:
        step = self.step
        torch.remainder(self._position, step.ring, out=self._ring)
        step.empty(1)
        x = step.buffer("x", h.shape, h.dtype)
        step.add_norm(None, h, None, self.layers[self.first].input_layernorm, None, None, x)
        self._pass = h, x, None, step.turns(h[:, None], self._position), shared, Where(self._position, self._ring)

    def _states(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the keys and values [1, H, places, D] that these layers read, by kind of layer."""
        held = {}
        for kind, number in self._sources.items():
            layer = self.step.cache.layers[number]
            assert isinstance(layer, LayerCache)
            held[kind] = layer.keys[self.row : self.row + 1], layer.values[self.row : self.row + 1]
        return held

    def _allocate(self) -> None:
        """Run once over zeros, so that every buffer is there before a pass, whose memory may be a graph's own."""
        step, device = self.step, self._position.device
        dtype = step.text.norm.weight.dtype
        h = step.buffer("h", (1, step.config.hidden_size), dtype)
        h.zero_()
        shared = {}
        for kind, number in self._sources.items():
            own = self.layers[number].self_attn
            shape = (1, own.k_proj.out_features // own.head_dim, step.ring, own.head_dim)
            shared[kind] = (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
        width = getattr(step.text, "hidden_size_per_layer_input", 0)
        own_input = torch.zeros(1, width, dtype=dtype, device=device) if width else None
        with torch.no_grad():
            self._begin(h, shared)
            h, x, norm, turns, shared, where = self._pass
            for number in range(self.first, len(self.layers)):
                x, norm = step.layer(number, where, turns, shared, h, x, norm, own_input, None)
            step.normed(x, norm)
        self._pass = None


def route(prompts: Prompts, forward: ChunkForward, name: str | None) -> tuple[Hashable, int | None]:
    """Route the next pass to an adapter and return what Layouts.set_adapter does. Where the batch's steps are made of kernels, its
    last layers are computed here."""
    key, serial = prompts.layouts.set_adapter(name)
    forward.lasts, cache = None, prompts.batch.cache
    if forward.first_shared == len(forward.layers) or cache.kv != "full" or cache.pool is not None:
        return key, serial
    step = prompts.batch.steps.fused_step()
    if step is not None:
        if prompts.lasts is None or prompts.lasts.step is not step:
            prompts.lasts = LastLayers(step, forward.first_shared, cache.prompt_row)
        prompts.lasts.route_to(key, prompts.model.route.name, prompts.layouts.names)
        forward.lasts = prompts.lasts.forward
    return key, serial
