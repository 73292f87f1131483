"""How do the last layers of a decoder (Gemma 4) compute the last token of a prompt with the kernels of a decode step?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.batched_lora.table import AdapterSlots, why_not_plain
from trimtab.engine.families.step import FusedStep, TokenPositions
from trimtab.engine.kernels import gemv4 as matvec
from trimtab.engine.kv.kv_cache import LayerCache, PagedLayer
from trimtab.engine.kv.sequence import PageTable

if TYPE_CHECKING:
    from trimtab.engine.families.decoder import Norm
    from trimtab.engine.passes.chunk_forward import Buffers


@dataclass(eq=False)
class _Pass:
    """State passed between layers, see FusedStep.layer. states: keys and values by layer."""

    h: Tensor
    x: Tensor
    norm: matvec.Norm | None
    turns: dict[str, tuple[Tensor, Tensor]]
    states: dict[int, tuple[Tensor, Tensor]]
    where: TokenPositions


class LastLayers:
    """The layers from `first` on, for one token in a row of the step's cache. All inputs of a pass have fixed addresses, and
    nothing is allocated in one: a pass may be captured. They read keys and values of earlier layers, so of a prompt they see the
    last token alone (chunk_forward.py). Results differ from the modules' by the order of sums. The modules compute keys and values
    in 8 bits, and several prompts in one pass."""

    def __init__(self, step: FusedStep, first: int, row: int) -> None:
        self.step, self.first, self.row = step, first, row
        self.layers = step.layers
        self.adapter_store = step.decoder.adapter_store
        self._groups = [group for layer in self.layers[first:] for group in layer.products]
        # The tables of each adapter, None where there are none; the key is the adapter's part of a graph's key.
        self._tables: dict[Hashable, AdapterSlots | None] = {}
        self._table: AdapterSlots | None = None
        self._multiplies = step.multiplies(self._groups)
        device = step.cache.device
        self._position, self._ring = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self._sources = sorted({own.source for own in step.decoder.attentions.values() if own.source is not None})
        self._pass: _Pass | None = None
        self._allocate()

    def select(self, key: Hashable, name: str | None, layouts: Collection[str]) -> None:
        """Use an adapter from now on. key: its part of a graph's key; name: in the layers; layouts: of adapters
        that are left."""
        if key not in self._tables:
            for old in [one for one in self._tables if self._is_gone(one, layouts)]:
                del self._tables[old]
            self._tables[key] = self._table_of(name)
        self._table = self._tables[key]

    def _is_gone(self, key: Hashable, layouts: Collection[str]) -> bool:
        if isinstance(key, tuple):
            return self.adapter_store.serials.get(key[0]) != key[1]
        return key is not None and key not in layouts

    def _table_of(self, name: str | None) -> AdapterSlots | None:
        leaves = [leaf for group in self._groups for leaf in group]
        held = {leaf: leaf.adapters[name] for leaf in leaves if name is not None and name in leaf.adapters}
        is_read = all(why_not_plain(one) is None for one in held.values())
        if not (held and is_read and self._multiplies):  # the layers add the adapter in their usual way
            return None
        table = AdapterSlots(leaves, self.adapter_store, 1, self._ring.device, module=self.step.kernels.matvec, slots=1)
        table.set_layers(held)
        return table

    # One pass --------------------------------------------------------------------------------------------------------

    def forward(self, number: int, buffers: Buffers) -> Callable[..., Tensor]:
        """Return the replacement of a layer's forward in a pass: from the tokens of a chunk [1, S, D] and the layer's own input
        [1, S, P] it gives [1, 1, D], which the last of these layers writes. buffers: of the chunk."""

        def forward(hidden_states: Tensor, per_layer_input: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
            with self.adapter_store.applying(self._table):
                return self._layer(number, hidden_states, per_layer_input, buffers.last, buffers.start)

        return forward

    def _layer(self, number: int, hidden: Tensor, extra: Tensor | None, last: Tensor, start: Tensor) -> Tensor:
        step = self.step
        if number == self.first:
            h = step.buffer("h", (1, hidden.shape[-1]), hidden.dtype)
            h.copy_(hidden[0].index_select(0, last) if hidden.shape[1] > 1 else hidden[0])
            torch.add(start, last, out=self._position)
            self._begin(h, *self._states())
        now = self._pass
        assert now is not None
        own = extra if extra is None or extra.shape[1] == 1 else extra.index_select(1, last)
        is_last = number + 1 == len(self.layers)
        following = None if is_last else self.layers[number + 1].before_attention
        self._through(now, number, None if own is None else own[0], following)
        if not is_last:
            return now.h[None]
        self._pass = None
        assert now.norm is not None
        return step.normed(now.x, now.norm)[None]

    def _through(self, now: _Pass, number: int, extra: Tensor | None, following: Norm | None) -> None:
        now.x, now.norm = self.step.layer(number, now.where, now.turns, now.states, now.h, now.x, now.norm, extra, following)

    def _begin(self, h: Tensor, states: dict[int, tuple[Tensor, Tensor]], pages: PageTable | None = None) -> None:
        step = self.step
        torch.remainder(self._position, step.ring, out=self._ring)
        step.empty(1)
        x = step.first_input(h, self.layers[self.first].before_attention)
        where = TokenPositions(self._position, self._ring, pages)
        self._pass = _Pass(h, x, None, step.turns(h[:, None], self._position), states, where)

    def _states(self) -> tuple[dict[int, tuple[Tensor, Tensor]], PageTable | None]:
        """Return the keys and values that these layers read, [1, H, places, D] by layer, and the row's pages where full
        layers have theirs in a pool [H, P, D]."""
        held, row, pool = {}, slice(self.row, self.row + 1), self.step.cache.pool
        for number in self._sources:
            layer = self.step.cache.layers[number]
            assert isinstance(layer, LayerCache)
            is_paged = isinstance(layer, PagedLayer)
            held[number] = (layer.keys, layer.values) if is_paged else (layer.keys[row], layer.values[row])
        return held, None if pool is None else PageTable(pool.table.table[row], pool.table.places)

    def _allocate(self) -> None:
        """Run once over zeros, so that every buffer exists before a pass, whose memory may be a graph's own."""
        step, device = self.step, self._position.device
        dtype = step.dtype
        h = step.buffer("h", (1, step.text.config.hidden_size), dtype)
        h.zero_()
        states = {}
        for number in self._sources:
            shape = self.step.decoder.attentions[number].shape
            sizes = (1, shape.kv_heads, step.ring, shape.dim)
            states[number] = torch.zeros(sizes, dtype=dtype, device=device), torch.zeros(sizes, dtype=dtype, device=device)
        width = step.decoder.per_layer
        own_input = torch.zeros(1, width, dtype=dtype, device=device) if width else None
        with torch.no_grad():
            self._begin(h, states)
            now = self._pass
            assert now is not None
            for number in range(self.first, len(self.layers)):
                self._through(now, number, own_input, None)
            assert now.norm is not None
            step.normed(now.x, now.norm)
            for group in self._groups:  # an adapter without tables has products of layers with a gate here
                step.buffer("wide", (1, sum(leaf.out_features for leaf in group)), dtype)
        self._pass = None
