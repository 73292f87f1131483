"""How do a decoder's layers compute a chunk of a prompt, and the last layers its last token, with the kernels of a step?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trimtab.engine.batched_lora.table import AdapterSlots, why_not_plain
from trimtab.engine.families.decoder import DeltaNet
from trimtab.engine.families.step import FusedStep, TokenPositions
from trimtab.engine.formats.packed import LayerProduct, MatmulTable
from trimtab.engine.kernels import attention_and_norms, delta_rule, gemv4
from trimtab.engine.kernels.plain_attention import attention_torch
from trimtab.engine.kv.kv_cache import LayerCache, PagedLayer
from trimtab.engine.kv.sequence import PageTable
from trimtab.engine.layers.leaves import Leaf

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from trimtab.engine.batched_lora.columns import Columns, KeptWeights
    from trimtab.engine.families.decoder import Attention, Layer, Mlp, Norm
    from trimtab.engine.passes.chunk_forward import Buffers, ChunkState

Turn = tuple[Tensor, Tensor]  # cos and sin
Shared = dict[str | int, tuple[Tensor, Tensor]]  # keys and values of earlier layers, by kind and number


class ChunkLayers:
    """The layers in front of those that see the last token alone. They use the kernels of `step`. A layer of transformers' modules
    takes 26 operations other than products, adapters, attention and cache; here it takes six. Roundings are the modules' own.
    Passes of several prompts use them too."""

    def __init__(self, step: FusedStep, first_shared: int, columns: Columns[KeptWeights] | None = None) -> None:
        self.step, self.first_shared, self.columns = step, first_shared, columns
        self.layers = step.layers
        # Whether kernels add all that the adapter of the next pass changes of experts.
        self.adds_experts = True
        self.takes_many = all(layer.experts is None or layer.experts.takes_many for layer in step.layers)
        inside = None if columns is None else columns.operands
        self.matmuls = MatmulTable[LayerProduct](None if step.unpacked is None else step.unpacked.matmul(columns=inside))
        # The output of the layer before, and the next one's input, which the same kernel made.
        self._made: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Drop the tensors of a failed pass."""
        self._made = None

    def forward(self, number: int, mask: Tensor | None) -> Callable[..., Tensor]:
        """Return the replacement of a layer's forward in a pass. mask: added to the scores, None for a causal one."""
        layer, module = self.layers[number], self.step.kernels.small
        is_last = number + 1 >= self.first_shared
        following = None if is_last else self.layers[number + 1].before_attention

        def forward(
            hidden_states: Tensor, per_layer_input: Tensor | None = None, shared_kv_states: Shared | None = None,
            position_embeddings: Turn | None = None, past_key_values: Cache | None = None, position_ids: Tensor | None = None,
            **kwargs: object,
        ) -> Tensor:  # fmt: skip
            rows, width = hidden_states.shape[0], hidden_states.shape[-1]
            h = hidden_states.reshape(-1, width)
            assert past_key_values is not None
            x = self._input(hidden_states, h, layer.before_attention)
            if isinstance(layer.mixer, DeltaNet):
                attended = self._delta(layer.mixer, x, past_key_values.layers[number])
            else:
                assert position_embeddings is not None
                attended = self._attend(
                    layer.mixer, x, rows, mask, shared_kv_states, position_embeddings, past_key_values, position_ids
                )
            (y,) = self._products([layer.mixer.o], attended, rows)
            middle = torch.empty_like(h)
            x = middle if layer.before_mlp is None else torch.empty_like(h)
            self._add(y, h, layer.after_attention, layer.before_mlp, None, middle, x, layer.added)
            y = self._mlp(layer, x, rows, middle)
            post = layer.after_mlp
            if per_layer_input is not None and layer.per_layer is not None:
                after = torch.empty_like(h)
                self._add(y, middle, post, None, None, after, None)
                (gate,) = self._products([layer.per_layer.gate], after, rows)
                gated = torch.empty_like(gate)
                attention_and_norms.gated(gate, per_layer_input.flatten(0, 1), gated, self.step.kind, module)
                (y,) = self._products([layer.per_layer.projection], gated, rows)
                middle, post = after, layer.per_layer.norm
            out, made = torch.empty_like(h), None if following is None else torch.empty_like(h)
            self._add(y, middle, post, following, layer.scale, out, made, layer.added)
            result = out.view(hidden_states.shape)
            self._made = None if made is None else (result, made)
            return result

        return forward

    def _add(
        self, y: Tensor, residual: Tensor, post: Norm | None, following: Norm | None, scale: Tensor | None, out_h: Tensor,
        out_x: Tensor | None, added: float | None = None,
    ) -> None:  # fmt: skip
        norm = self.step.norm(residual, post, following, scale, out_h)
        attention_and_norms.add_norm(
            y if added is None else y * added, residual, norm.post, norm.next, norm.eps, scale, out_h,
            None if following is None else out_x, self.step.kernels.small, form=norm.form,
        )  # fmt: skip

    def _input(self, hidden_states: Tensor, h: Tensor, norm: Norm | None) -> Tensor:
        made, self._made = self._made, None
        if norm is None:
            return h
        if made is not None and made[0] is hidden_states:
            return made[1]
        x = torch.empty_like(h)
        self.step.add_norm(h, norm, x)
        return x

    def _attend(
        self, own: Attention, x: Tensor, rows: int, mask: Tensor | None, shared: Shared | None, turn: Turn, cache: Cache,
        positions: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return attention's input of its last product, [n, Hq * D], for x [n, D] of that many rows of as many tokens; keys and
        values are in the cache then."""
        n, dim, module = x.shape[0], own.shape.dim, own.module
        tokens = n // rows
        if own.rope is not None:
            turn = self.step.decoder.ropes[own.rope].whole(turn)
        cos, sin = (one.expand(rows, tokens, -1).reshape(n, -1)[:, : own.shape.rotary] for one in turn)
        made = own.parts(self._products(own.projections, x, rows))
        for wide, part in zip(own.wide_norms, made, strict=False):
            self.step.add_norm(part, wide, part)
        queries = torch.empty(n, own.shape.heads, dim, dtype=x.dtype, device=x.device)
        keys, values = (torch.empty(own.shape.kv_heads, n, dim, dtype=x.dtype, device=x.device) for _ in range(2))
        attention_and_norms.turn(
            made[0], made[1], made[2] if len(made) > 2 else None, dim, own.norms(), cos, sin, queries, keys, values,
            module=self.step.kernels.small,
        )  # fmt: skip
        by_row = [one.view(-1, rows, tokens, dim).transpose(0, 1) for one in (keys, values)]
        seen = cache.update(*by_row, module.layer_idx)
        if own.is_read:
            assert shared is not None
            # transformers up to 5.6 finds them by number
            shared[module.layer_type] = shared[module.layer_idx] = seen
        by_head, scores = queries.view(rows, tokens, -1, dim).transpose(1, 2), own.scores
        if scores.growth is not None:
            assert positions is not None
            by_head = by_head * scores.growth.of(positions, x.dtype).view(-1, 1, tokens, 1)
        if scores.softcap is not None or scores.sinks is not None:
            attended = attention_torch(by_head, seen[0], seen[1], mask, scores).transpose(1, 2)
        else:
            attended, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
                module, by_head, *seen, mask, dropout=0.0, scaling=own.scale, sliding_window=own.window
            )  # fmt: skip
        return own.gated(made[0], attended.reshape(n, -1))

    def _delta(self, own: DeltaNet, x: Tensor, held: ChunkState) -> Tensor:
        """Return the gated delta rule of a prompt's tokens [n, Hv Dv]; the row's states are those behind them then."""
        (qkv, z), (b, a) = (self._products(linears, x, 1) for linears in ([own.qkv, own.z], [own.b, own.a]))
        out, mixed = x.new_empty(x.shape[0], own.o.in_features), x.new_empty(x.shape[0], own.shape.channels)
        delta_rule.delta_net(
            (qkv, z, b, a), own.shape, own.weights(), *held.states(own.shape, x), (mixed, torch.empty_like(out)), out,
            tokens=x.shape[0], count=held.count, module=self.step.kernels.delta,
        )  # fmt: skip
        return out

    def _mlp(self, layer: Layer, x: Tensor, rows: int, residual: Tensor) -> Tensor:
        own, y = layer.experts, None if layer.mlp is None else self._gated(layer.mlp, x, rows)
        if own is None:
            assert y is not None
            return y
        y = self.step.mixture(own, None, residual, x if y is None else None, y, rows)
        if own.shared is not None:
            gate = None if own.shared_gate is None else self._products([own.shared_gate], x, rows)[0]
            attention_and_norms.add_gated(y, self._gated(own.shared, x, rows), gate, self.step.kernels.small)
        return y

    def _gated(self, own: Mlp, x: Tensor, rows: int) -> Tensor:
        made = self._products(own.gates, x, rows)
        gate, up = made if own.up is not None else made[0].chunk(2, dim=1)
        gated = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
        attention_and_norms.gated(gate, up, gated, self.step.kind, self.step.kernels.small)
        return self._products([own.down], gated, rows)[0]

    def _products(self, leaves: Sequence[Leaf], x: Tensor, rows: int) -> list[Tensor]:
        """Return [n, D_out] of each of the layers over x [n, D_in], with its adapter. Those of one product lie side by side."""
        batch = x.view(rows, -1, x.shape[-1])  # one object for all: its adapter inputs are made once
        made = None if leaves[0].adapter_store.table is not None else self.matmuls.product(leaves, x)
        if made is None:
            return [leaf(batch).flatten(0, 1) for leaf in leaves]
        parts = made[0].split([leaf.out_features for leaf in leaves], dim=1)
        if made[1]:
            return list(parts)
        return [
            leaf.adapted(batch, part.view(rows, -1, part.shape[1])).flatten(0, 1) for leaf, part in zip(leaves, parts, strict=True)
        ]


def pays(step: FusedStep, device: torch.device) -> bool:
    """Whether these layers are faster than the modules. On a GPU without the small kernels each would be several of torch's:
    float32 has none, nor has a card where they are wrong."""
    return step.kernels.small is not None or device.type != "cuda"


@dataclass(eq=False)
class _Pass:
    """State passed between layers, see FusedStep.layer. states: keys and values by layer."""

    h: Tensor
    x: Tensor
    norm: gemv4.Norm | None
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
