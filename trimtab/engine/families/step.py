"""How is one decode step of a described decoder computed in few kernels, on transformers' own modules and weights?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.engine.cuda import launch_config
from trimtab.engine.families.decoder import Attention, DeltaNet, Experts, Layer, Mlp, Norm
from trimtab.engine.families.families import describe
from trimtab.engine.families.mixture import Chosen, experts_of, routed
from trimtab.engine.formats.packed import Matmul, MatmulTable
from trimtab.engine.kernels import attention_and_norms, delta_rule, embed_and_logits, gemm4, gemv4, layouts
from trimtab.engine.kv.kv_cache import BatchedKVCache
from trimtab.engine.kv.recurrent import RecurrentLayer
from trimtab.engine.layers.leaves import Leaf, PackedTable, ResidentLeaf, Table, packed_together, staged_in
from trimtab.engine.lora.layers import SavedModule
from trimtab.process import phases

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.kernels.device_kernels import DeviceKernels
    from trimtab.engine.kv.sequence import PageTable
    from trimtab.engine.layers.leaves import UnpackedWeights


# Writes products over one input, x [n, D_in] -> out [n, all D_out], with the adapters of a table.
GroupProduct = Callable[[Sequence[Leaf], Tensor, Tensor, gemv4.LoraArgs | None], None]


def choose_kernels(hf_model: HFModel, rows: int, *, is_invariant: bool = False) -> DeviceKernels:
    """Return the kernels that work and are faster for this model's steps of up to `rows` rows. is_invariant: of all of them, each
    with the bits that it has alone."""
    from trimtab.engine.kernels.device_kernels import DeviceKernels

    decoder = describe(hf_model)
    groups = decoder.groups()
    progress = phases.counting("measuring kernels on this GPU (once),")
    kernels = DeviceKernels.choose(
        groups, decoder.shapes(), rows=rows, sizes=decoder.sizes(), norm=decoder.norm, progress=progress,
        deltas=list(dict.fromkeys(one.shape for one in decoder.deltas.values())), mixtures=decoder.mixtures(),
    )  # fmt: skip
    if is_invariant and rows <= launch_config.MAX_ROWS:
        kernels.compile_fixed(groups, groups[0][0][0].dtype, rows)
    return kernels


def _ahead(leaves: Sequence[Leaf]) -> list[Tensor]:
    """Return the packed weights and scales of layers that stay on the device (a streamed one is not there yet), none if they are
    more than its L2 cache holds."""
    packed = [leaf.packed() for leaf in leaves if isinstance(leaf, ResidentLeaf)]
    tensors = [tensor for one in packed for tensor in layouts.tensors(one)[:2] if tensor is not None]
    if tensors and tensors[0].device.type == "cuda":
        near = getattr(torch.cuda.get_device_properties(tensors[0].device), "L2_cache_size", 0)
        return tensors if sum(one.nbytes for one in tensors) <= near else []
    return tensors


def _scale(table: Table) -> float:
    """Return the factor of a table's rows, in their own type. Reads the device."""
    if table.exact_scale is not None:
        return table.exact_scale
    return 1.0 if table.embed_scale is None else float(table.embed_scale.to(table.dtype))


@dataclass(frozen=True)
class TokenPositions:
    """Where the tokens of a pass are in their rows of the cache. Shapes: positions, ring [n] int64: the place, and its place in
    a sliding layer's buffer. pages: of full layers that lie in a pool's."""

    positions: Tensor
    ring: Tensor
    pages: PageTable | None = None


class FusedStep:
    """A step of the rows of a cache: `step(count)` gives the logits [count, V] float32 of tokens[:count] at the cache's
    positions, and the most likely token of each row [count] int64, -1 where its scores are not numbers.

    tokens: [rows, 1], read where they are. Keys and values of the step are written into the cache. Each value that transformers
    rounds is rounded here.
    """

    def __init__(
        self, hf_model: HFModel, cache: BatchedKVCache, tokens: Tensor, kernels: DeviceKernels,
        unpacked: UnpackedWeights | None = None,
    ) -> None:  # fmt: skip
        self.hf_model, self.cache, self.tokens, self.kernels, self.unpacked = hf_model, cache, tokens, kernels, unpacked
        # For A x of their adapters, at the same time as the product over the same x.
        self.beside = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        self.decoder = describe(hf_model)
        self.text, self.kind = self.decoder.text, self.decoder.activation
        self.layers = self.decoder.layers
        self._has_own_turns = self._turns_are_right()
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        # Checked before anything is captured: the check reads a table on the device.
        self.matmuls = self.matmuls_of()
        tables = (self.decoder.embedding, getattr(self.text, "embed_tokens_per_layer", None))
        self._scales = {table: _scale(table) for table in tables if isinstance(table, Table)}
        self._staged = [next(iter(staged_in(layer.module)), None) for layer in self.layers]
        self._make_states()
        self._why_no_pages = self._wrong_pages()
        # Linears of the decoder that a step does not compute.
        inside = {leaf for layer in self.layers if layer.experts for leaf in layer.experts.router.modules()}
        inside |= {leaf for same in self.decoder.groups() for group in same for leaf in group}
        self._outside = [one for one in self.text.modules() if isinstance(one, Leaf) and one not in inside]
        self._zeros = torch.zeros_like(cache.positions)

    def _make_states(self) -> None:
        """Give recurrent layers memory, where none of a prompt's did: a capture allocates nothing that lasts."""
        for number, own in self.decoder.deltas.items():
            held = self.cache.layers[number] if self.cache.layers else None
            if isinstance(held, RecurrentLayer) and not held.is_initialized:
                held.make(own.shape, self.dtype, self.cache.device)

    def matmuls_of(self) -> MatmulTable[GroupProduct]:
        """Return the ways to multiply with groups of layers over one input, by the first of each."""
        groups = [group for same in self.decoder.groups() for group in same if isinstance(group[0], Leaf)]
        few = {group[0] for group in groups if self._can_multiply(group)}
        many = {group[0] for group in groups if self._can_multiply_many(group)}
        kept = {group[0] for group in groups if group[0] in many and self.joined(group) is not None}
        return MatmulTable(
            Matmul("gemv4", few, self._gemv4, most=launch_config.MAX_ROWS),
            Matmul("dequantized", kept, partial(self._gemm4, is_kept=True), max(launch_config.MAX_ROWS, gemm4.PAYING_ROWS) + 1),
            Matmul("gemm4", many, self._gemm4, launch_config.MAX_ROWS + 1),
        )

    def _can_multiply(self, group: Sequence[Leaf]) -> bool:
        if self.kernels.matvec is None or not self.kernels.pays(group):
            return False
        return not any(gemv4.why_not(leaf.packed(), leaf.dtype, leaf.device) for leaf in group)

    def _can_multiply_many(self, group: Sequence[Leaf]) -> bool:
        return self.kernels.rows is not None and all(gemm4.why_not(leaf.packed(), leaf.dtype) is None for leaf in group)

    def _gemv4(self, leaves: Sequence[Leaf], x: Tensor, out: Tensor, lora: gemv4.LoraArgs | None) -> None:
        """Multiply before adapters that no table holds; `_products` calls the kernel with all others, a gate and a norm."""
        packed = packed_together(leaves)
        gemv4.matvec4(x, packed, out, bias=[leaf.bias for leaf in leaves], lora=lora, module=self.kernels.matvec)

    def _gemm4(self, leaves: Sequence[Leaf], x: Tensor, out: Tensor, lora: gemv4.LoraArgs | None, *, is_kept: bool = False) -> None:
        gemm4.linear(
            x, packed_together(leaves), out, bias=[leaf.bias for leaf in leaves], lora=lora, module=self.kernels.rows,
            unpacked=self.joined(leaves) if is_kept else None, beside=self.beside,
        )  # fmt: skip

    def _wrong_pages(self) -> str | None:
        """Return the error of the kernels of layers in pages; compiles them, which a capture forbids."""
        if self.cache.pool is None or self.cache.kv != "full":
            return None
        return self.kernels.why_no_pages(self.decoder.shapes(full_only=True), self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self.decoder.final_norm.weight.dtype

    def multiplies(self, groups: Sequence[Sequence[Leaf]]) -> bool:
        """Whether one token's products of all these groups are those of the matrix-vector kernels."""
        return all(self.matmuls.first(group[0], 1) is not None for group in groups)

    def why_not_rows(self) -> str | None:
        """Return why a step cannot be made of kernels now, None if it can."""
        if self._why_no_pages is not None:
            return self._why_no_pages
        if self.decoder.deltas and self.kernels.delta is None and self.cache.device.type == "cuda":
            return "the gated delta rule has no kernels here"
        if any(isinstance(module, SavedModule) for module in self.text.modules()):
            return "an adapter replaces the weights of a norm"
        weights = [delta.weights() for delta in self.decoder.deltas.values()]
        if any(one.dtype != self.dtype for own in weights for one in (own.conv, own.dt_bias, own.norm)):
            return "its delta layers have weights of other types than the model's"
        if not self.cache.has_rings and any(own.window is not None for own in self.decoder.attentions.values()):
            return "this transformers release keeps the full cache of sliding layers"
        for rope in self.decoder.ropes.values():
            if rope.limit is not None and self.cache.context_tokens > rope.limit:
                return f"its rotation changes behind {rope.limit} tokens, and its context has {self.cache.context_tokens}"
        if len(self.cache.ring_places) > 1:
            return f"its layers have windows of {len(self.cache.ring_places)} lengths"
        if (name := next((leaf.module_path for leaf in self._outside if leaf.adapters), None)) is not None:
            return f"an adapter changes {name}, which its description does not have"
        return None

    # The step ----------------------------------------------------------------------------------------------------------

    def __call__(self, count: int, next_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """next_tokens [count] int64: the most likely tokens are written there too, 0 where there is none."""
        positions = self.cache.positions[:count]
        self.empty(count)
        ids = self.tokens[:count]
        h, x, own = self._rows(ids, positions)
        hidden = h[:, None]
        extra = self._per_layer(ids, hidden, own)
        turns = self.turns(hidden, self._turning(positions))
        norm: gemv4.Norm | None = None  # of x, which is not applied yet
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        where = TokenPositions(
            positions, self.buffer("ring", (count,), torch.long), None if self.cache.pool is None else self.cache.pool.table
        )
        for number in range(len(self.layers)):
            own = None if extra is None else extra[:, number]
            x, norm = self.layer(number, where, turns, shared, h, x, norm, own, self.decoder.following(number))
        return self._head(self.normed(x, norm), next_tokens)

    def _rows(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the embeddings of the tokens [n, D], the input of the first layer [n, D] and, if one lookup gave both, the
        rows of the per-layer table [n, layers * P]. Also writes each row's position in a sliding-window buffer."""
        norm = self.layers[0].before_attention
        count = ids.shape[0]
        ring = self.buffer("ring", (count,), torch.long)
        first = self._lookup("h", self.decoder.embedding, ids)
        if first is None:
            torch.remainder(positions, self.ring, out=ring)
            hidden = self.decoder.embedded(ids)
            h = self.buffer("h", (count, hidden.shape[-1]), hidden.dtype)
            h.copy_(hidden[:, 0])
            return h, self.first_input(h, norm), None
        second = None
        if self.decoder.per_layer:
            second = self._lookup("own", self.text.embed_tokens_per_layer, ids)
        lookups = [first] if second is None else [first, second]
        x = self.buffer("x", first.out.shape, first.out.dtype)
        # The first of a graph: no earlier kernel overlaps with it.
        embed_and_logits.rows(
            ids[:, 0], lookups, self.kernels.ends, norm=None if norm is None else (norm.weight, norm.eps, x),
            ring=(positions, self.ring, ring), dependent=False, form="inside" if norm is None else norm.form,
        )  # fmt: skip
        return first.out, first.out if norm is None else x, None if second is None else second.out

    def _lookup(self, name: str, table: nn.Module, ids: Tensor) -> embed_and_logits.Lookup | None:
        """Return the kernel's arguments for a table without adapters whose rows are on the device, None for other tables.
        ids: [n, 1]."""
        if self.kernels.ends is None or not isinstance(table, Table) or table.adapters:
            return None
        rows, scale = table.held(), self._scales.get(table)
        if isinstance(table, PackedTable):
            rows = table.rows(ids[:, 0]), True
        if scale is not None and table is self.decoder.embedding and self.decoder.embedding_scale is not None:
            if scale != 1.0:
                return None
            scale = self.decoder.embedding_scale
        if rows is None or scale is None or rows[0].dtype != table.dtype:
            return None
        out = self.buffer(name, (len(ids), rows[0].shape[1]), rows[0].dtype)
        return embed_and_logits.Lookup(rows[0], scale, out, in_order=rows[1])

    def empty(self, count: int) -> None:
        """Prepare the scratch of the adapters for the products of a pass of this many rows; the first call of a pass."""
        if (table := self.decoder.adapter_store.table) is not None:
            table.empty(count)

    def _turning(self, positions: Tensor) -> Tensor:
        """Return the positions that rotations count: those of families with three axes go on after an image at a lower one."""
        if not any(rope.has_axes for rope in self.decoder.ropes.values()):
            return positions
        return torch.add(positions, self.cache.offsets[: len(positions)], out=self.buffer("turning", positions.shape, torch.long))

    def turns(self, hidden: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cos and sin [n, R] of the positions [n], by kind of layer. hidden: [n, 1, D], for its dtype."""
        by_kind: dict[str, tuple[Tensor, Tensor]] = {}
        if not self._has_own_turns:
            for kind, rope in self.decoder.ropes.items():
                cos, sin = rope.cos_sin(hidden, positions[:, None])
                by_kind[kind] = cos[:, 0].contiguous(), sin[:, 0].contiguous()
            return by_kind
        wanted = []
        for kind, rope in self.decoder.ropes.items():
            shape = (positions.shape[0], 2 * rope.inv_freq.numel())
            cos, sin = (self.buffer(f"{name} {kind}", shape, hidden.dtype) for name in ("cos", "sin"))
            by_kind[kind] = cos, sin
            wanted.append((rope.inv_freq, rope.factor, cos, sin))
        attention_and_norms.turns(positions, wanted, self.kernels.small)
        return by_kind

    def _turns_are_right(self) -> bool:
        """Whether our cos and sin are the module's own, bit for bit, at positions all over the context."""
        ropes = self.decoder.ropes.values()
        if (
            self.kernels.small is None
            or len(ropes) > 2
            or any(own.shape.turn == "wide" for own in self.decoder.attentions.values())
        ):
            return False
        most = max(self.cache.context_tokens - 1, 1)
        positions = torch.tensor([0, 1, 7, 100, most // 3, most // 2, most - 1, most], device=self.cache.device)
        like = torch.empty(len(positions), 1, 1, dtype=self.dtype, device=self.cache.device)
        try:
            for rope in ropes:
                shape = (len(positions), 2 * rope.inv_freq.numel())
                cos, sin = (torch.full(shape, float("nan"), dtype=like.dtype, device=like.device) for _ in range(2))
                attention_and_norms.turns(positions, [(rope.inv_freq, rope.factor, cos, sin)], self.kernels.small)
                own = rope.cos_sin(like, positions[:, None])
                if not all(torch.equal(a, b[:, 0]) for a, b in zip((cos, sin), own, strict=True)):
                    return False
        except (AttributeError, AssertionError):  # a release whose rotation is made of other parts
            return False
        return True

    @property
    def ring(self) -> int:
        """The sliding layers' number of places."""
        return next(iter(self.cache.ring_places), self.cache.context_tokens)

    def layer(
        self, number: int, where: TokenPositions, turns: dict[str, tuple[Tensor, Tensor]], shared: dict[int, tuple[Tensor, Tensor]],
        h: Tensor, x: Tensor, norm: gemv4.Norm | None, extra: Tensor | None, following: Norm | None,
    ) -> tuple[Tensor, gemv4.Norm]:  # fmt: skip
        """Return the last product's output, and the norm that makes the next layer's input (and h) of it.

        Shapes: h [n, D], x [n, D] before `norm`; extra [n, P], the layer's own input. turns: see `turns`; shared: keys and values
        that later layers read, by layer. following: the norm of the next layer's input, None for h alone.
        """
        made = self._layer(self.layers[number], number, turns, shared, where, h, x, norm, extra, following)
        if (staged := self._staged[number]) is not None:
            staged.leave()
        return made

    def _layer(
        self, layer: Layer, number: int, turns: dict[str, tuple[Tensor, Tensor]], shared: dict[int, tuple[Tensor, Tensor]],
        where: TokenPositions, h: Tensor, x: Tensor, norm: gemv4.Norm | None, extra: Tensor | None, following: Norm | None,
    ) -> tuple[Tensor, gemv4.Norm]:  # fmt: skip
        if isinstance(layer.mixer, DeltaNet):
            attended = self._delta(layer.mixer, number, self.normed(x, norm))
        else:
            attended = self._attend(layer, layer.mixer, number, turns, shared, where, x, norm)
        y = self._added(layer, self._products([layer.mixer.o], attended))
        middle = self.buffer("middle", h.shape, h.dtype)
        norm = self.norm(h, layer.after_attention, layer.before_mlp, None, middle)
        own, chosen, of_shared = layer.experts, None, None
        if layer.mlp is None or (own is not None and own.near is not None):
            x, norm = self.normed(y, norm), None
            # Experts in host memory are copied while the MLP is computed.
            chosen = None if own is None else self.chosen(own, x if layer.mlp is None else middle, 1, is_step=True)
        if layer.mlp is not None:
            y = self._mlp(layer.mlp, y if chosen is None else x, norm)
        elif own is not None and own.shared is not None:
            of_shared = self._mlp(own.shared, x)
        if own is not None:
            y = self.mixture(own, chosen, middle, x if layer.mlp is None else None, y, is_step=True)
            if of_shared is not None:
                gate = None if own.shared_gate is None else self._products([own.shared_gate], x)
                y = attention_and_norms.add_gated(y, of_shared, gate, self.kernels.small)
        y = self._added(layer, y)
        if layer.per_layer is None or extra is None:
            return y, self.norm(middle, layer.after_mlp, following, layer.scale, h)
        after = self.buffer("after", h.shape, h.dtype)
        norm = self.norm(middle, layer.after_mlp, None, None, after)
        # The first weights of the next layer: the memory bus is nearly idle until then.
        after_this = [one.mixer for one in self.layers[number + 1 : number + 2]]
        ahead = _ahead([leaf for one in after_this if isinstance(one, Attention) for leaf in (one.q, one.o)])
        mixed = self._products([layer.per_layer.gate], y, gemv4.Gate(self.kind, extra), norm, ahead)
        y = self._products([layer.per_layer.projection], mixed)
        return y, self.norm(after, layer.per_layer.norm, following, layer.scale, h)

    def _mlp(self, own: Mlp, x: Tensor, norm: gemv4.Norm | None = None) -> Tensor:
        """Return what an MLP makes of x [n, D]. norm: as `_products` has it."""
        if own.up is not None:
            gated = self._products(own.gates, x, gemv4.Gate(self.kind), norm, _ahead([own.down]))
            return self._products([own.down], gated)
        wide = self._products(own.gates, x, None, norm, _ahead([own.down]))
        half = wide.shape[1] // 2
        gated = self.buffer("gated", (len(wide), half), wide.dtype)
        attention_and_norms.gated(wide[:, :half], wide[:, half:], gated, self.kind, self.kernels.small)
        return self._products([own.down], gated)

    def mixture(
        self, own: Experts, chosen: Chosen | None, h: Tensor, x: Tensor | None, y: Tensor | None = None, rows: int = 1,
        is_step: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return what a layer's experts but the shared one make of x [n, D]; next to an MLP: of the residual h [n, D], with what
        the MLP made, y. chosen: None if they are not yet."""
        given = (rows, self.kind, self.decoder.adapter_store, self.kernels.experts)
        if x is not None:
            return experts_of(own, x, chosen or self.chosen(own, x, rows, is_step), *given)
        assert y is not None and own.before is not None and own.after is not None and own.after_dense is not None
        dense, x, after = torch.empty_like(y), torch.empty_like(h), own.after
        self.add_norm(y, own.after_dense, dense)
        self.add_norm(h, own.before, x)
        # Behind the norm of y: a router with as many experts as the model is wide writes its scores there.
        made = experts_of(own, x, chosen or self.chosen(own, h, rows, is_step), *given)
        attention_and_norms.add_norm(
            made, dense, after.weight, None, after.eps, None, dense, None, self.kernels.small, form=after.form
        )
        return dense

    def chosen(self, own: Experts, x: Tensor, rows: int, is_step: bool) -> Chosen:
        """Return the experts of x [n, D], which is the residual next to an MLP. rows: as `Experts.chosen` has it."""
        live = self.cache.live
        return routed(own, x, self.kind, self._products, self.kernels, live) if is_step else Chosen(*own.chosen(x, rows))

    def _added(self, layer: Layer, y: Tensor) -> Tensor:
        """Return what is added to the residual."""
        return y if layer.added is None else y.mul_(layer.added)

    def norm(self, residual: Tensor, post: Norm | None, following: Norm | None, scale: Tensor | None, out_h: Tensor) -> gemv4.Norm:
        """Return the norms between two products, as they take them; see `gemv4.Norm`."""
        like = post or following or self.decoder.final_norm
        return gemv4.Norm(
            residual, None if post is None else post.weight, None if following is None else following.weight, like.eps, scale,
            out_h, like.form,
        )  # fmt: skip

    def _attend(
        self, layer: Layer, own: Attention, number: int, turns: dict[str, tuple[Tensor, Tensor]],
        shared: dict[int, tuple[Tensor, Tensor]], where: TokenPositions, x: Tensor, norm: gemv4.Norm | None,
    ) -> Tensor:  # fmt: skip
        count, (heads, _, dim, *_) = x.shape[0], own.shape
        turn = turns[own.rope] if own.rope is not None else (x[:, :0], x[:, :0])
        joined = self._products(own.projections, x, None, norm)
        start = 0
        for wide in own.wide_norms:
            part = joined[:, start : (start := start + wide.weight.numel())]
            self.add_norm(part, wide, part)
        queries = self.buffer("queries", (count, heads, dim), x.dtype)
        is_ring = own.window is not None
        places = where.ring if is_ring else where.positions
        if self.cache.kv == "int8":
            return self._attend_int8(own, number, joined, queries, turn, shared, places)
        # Layers of one kind that share keys and values have them in pages, or all of them in one piece.
        pages = None if is_ring else where.pages
        if own.source is None:
            held = self.cache.layers[number]
            keys, values = held.keys, held.values
            if own.is_read:
                shared[number] = (keys, values)
        else:
            keys, values = shared[own.source]
        attended, scores = self.buffer("looked", (count, heads * dim), x.dtype), own.scores
        attention_and_norms.rope_and_attention(
            joined, heads, own.norms(), *turn, keys, values, places, where.positions, scores.scale, scores.softcap, attended,
            queries, self._scratch(count, own), self.kernels.small, mode=own.mode,
            ahead=_ahead([] if layer.mlp is None else layer.mlp.gates), pages=pages, sinks=scores.sinks, growth=scores.growth,
        )  # fmt: skip
        return own.gated(joined, attended)

    def _attend_int8(
        self, own: Attention, number: int, joined: Tensor, queries: Tensor, turn: tuple[Tensor, Tensor],
        shared: dict[int, tuple[Tensor, Tensor]], places: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return attention over keys and values in 8 bits: the step's own are rounded and written, and a copy is read."""
        count, heads, dim = queries.shape
        new_keys, new_values = None, None
        if own.source is None:
            shape = (count, own.shape.kv_heads, 1, dim)
            new_keys, new_values = (self.buffer(f"new {name}", shape, joined.dtype) for name in ("keys", "values"))
        attention_and_norms.rope_write(
            joined, heads, own.shape.kv_heads, dim, own.norms(), *turn, new_keys, new_values, self._zeros[:count], queries,
            module=self.kernels.small, mode=own.mode,
        )  # fmt: skip
        if own.source is not None:
            keys, values = shared[own.source]
        else:
            keys, values = self.cache.layers[number].written(new_keys, new_values, places)
            if own.is_read:
                shared[number] = keys, values
        attended, scores = self.buffer("looked", (count, heads * dim), joined.dtype), own.scores
        # Behind torch's operations: their results may be read only after they have ended.
        attention_and_norms.attend(
            queries, keys, values, self.cache.positions[:count], scores.scale, scores.softcap, attended,
            self._scratch(count, own), self.kernels.small, dependent=False, sinks=scores.sinks, growth=scores.growth,
        )  # fmt: skip
        return own.gated(joined, attended)

    def _delta(self, own: DeltaNet, number: int, x: Tensor) -> Tensor:
        """Return the gated delta rule of the rows' next tokens [n, Hv Dv]; their states are written."""
        count, held = x.shape[0], self.cache.layers[number]
        assert isinstance(held, RecurrentLayer)
        joined, heads = self._products([own.qkv, own.z], x), self._products([own.b, own.a], x)
        width, channels = own.o.in_features, own.shape.channels
        buffers = self.buffer("mixed", (count, channels), x.dtype), self.buffer("core", (count, width), x.dtype)
        out = self.buffer("looked", (count, width), x.dtype)
        b, a = heads.split(own.shape.value_heads, dim=1)
        delta_rule.delta_net(
            (joined[:, :channels], joined[:, channels:], b, a), own.shape, own.weights(), *held.states(), buffers, out,
            live=self.cache.live, module=self.kernels.delta,
        )  # fmt: skip
        return out

    def _products(
        self,
        leaves: Sequence[Leaf],
        x: Tensor,
        gate: gemv4.Gate | None = None,
        norm: gemv4.Norm | None = None,
        ahead: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return [n, all D_out] of linears that read one input, with each row's adapter; with a gate [n, D_out of one]. norm: the
        norm that computes this input from x. ahead: weights to prefetch into L2 at the same time."""
        count, store = x.shape[0], leaves[0].adapter_store
        widths = [leaf.out_features for leaf in leaves]
        width = widths[0] if gate is not None else sum(widths)
        way = self.matmuls.first(leaves[0], count)
        table, selection = store.table, store.selection
        # Adapters that no table holds are added by their own modules' way, to the plain products.
        is_apart = table is None and bool(selection.name or selection.rows) and any(leaf.adapters for leaf in leaves)
        out = self.buffer("out" if gate is None else "gated", (count, width), x.dtype)
        if way is not None and way.name == "gemv4" and not is_apart:
            args = None if table is None else table.args(leaves, count, is_empty=True)
            packed = packed_together(leaves)
            pair = gate is not None and gate.other is None
            if norm is not None and not gemv4.takes_norm(packed, count, self.kernels.matvec, pair=pair):
                x, norm = self.normed(x, norm), None
            gemv4.matvec4(
                x, packed, out, bias=[leaf.bias for leaf in leaves], lora=args, gate=gate, norm=norm,
                module=self.kernels.matvec, ahead=ahead,
            )  # fmt: skip
            return out
        x = self.normed(x, norm)
        wide = out if gate is None else self.buffer("wide", (count, sum(widths)), x.dtype)
        if way is not None:
            # With an adapter that is apart there is no table.
            way.run(leaves, x, wide, None if table is None else table.args(leaves, count))
        start = 0
        for leaf, size in zip(leaves if is_apart or way is None else (), widths, strict=False):
            part = wide[:, start : start + size]
            part.copy_(leaf(x) if way is None else leaf.adapted(x, part.clone()))
            start += size
        if gate is not None:
            up = wide[:, width:] if gate.other is None else gate.other
            attention_and_norms.gated(wide[:, :width], up, out, gate.kind, self.kernels.small)
        return out

    def joined(self, leaves: Sequence[Leaf]) -> Tensor | None:
        """Return the weights of a group unpacked, where they are kept."""
        if self.unpacked is None or any(leaf.bias is not None for leaf in leaves):
            return None
        return self.unpacked.joined(leaves)

    def normed(self, y: Tensor, norm: gemv4.Norm | None) -> Tensor:
        """Return a product's input, the norm in front of it applied by itself."""
        return y if norm is None else norm.apply(y, self.buffer("x", y.shape, y.dtype), self.kernels.small)

    def first_input(self, h: Tensor, norm: Norm | None) -> Tensor:
        """Return the input of a first layer, for h [n, D]."""
        if norm is None:
            return h
        x = self.buffer("x", h.shape, h.dtype)
        self.add_norm(h, norm, x)
        return x

    def add_norm(self, h: Tensor, norm: Norm, out: Tensor) -> None:
        """Write norm(h) to out."""
        attention_and_norms.add_norm(None, h, None, norm.weight, norm.eps, None, None, out, self.kernels.small, form=norm.form)

    def _per_layer(self, ids: Tensor, hidden: Tensor, own: Tensor | None) -> Tensor | None:
        """Return each layer's own input of the tokens: [n, layers, P]. own: their rows of the layers' table, if looked up."""
        if not self.decoder.per_layer:
            return None
        if own is None:
            own = self.text.get_per_layer_inputs(ids, hidden)
        own = own.view(len(ids), 1, -1, self.decoder.per_layer)
        projection = self.decoder.front
        if isinstance(projection, Leaf) and self.matmuls.first(projection, 1) is not None and not projection.adapters:
            # As project_per_layer_inputs does it, its product from our kernel.
            norm, out = self.text.per_layer_projection_norm, self.buffer("extra", own[:, 0].shape, hidden.dtype)
            embed_and_logits.per_layer(
                self._products([projection], hidden[:, 0]), own[:, 0], norm.weight, norm.eps,
                self.text.per_layer_model_projection_scale, self.text.per_layer_input_scale, out, self.kernels.ends,
            )  # fmt: skip
            for staged in staged_in(projection):  # its module, which would report it, was not called
                staged.leave()
            return out
        extra: Tensor = self.text.project_per_layer_inputs(hidden, own)
        return extra[:, 0]

    def _head(self, x: Tensor, next_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        head = self.decoder.head
        scores = self.hf_model.lm_head(x) if head is None else self._products([head], x)
        return embed_and_logits.argmax_logits(self.decoder.scored(scores), self.decoder.softcap, next_tokens, self.kernels.ends)

    # Buffers -----------------------------------------------------------------------------------------------------------

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer of this name and shape, the same in every step."""
        key = (name, tuple(shape), dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tuple(shape), dtype=dtype, device=self.cache.device)
        return self._buffers[key]

    def _scratch(self, count: int, own: Attention) -> Tensor | None:
        module, shape = self.kernels.small, own.shape
        if module is None:
            return None
        size = attention_and_norms.scratch_values(count, *shape[:3], self.cache.context_tokens, module.multiprocessors)
        return self.buffer("scratch", (size,), torch.float32) if size else None
