"""One decode step of Gemma 4's text model in few kernels, on transformers' own modules and weights.

This step computes one token in a layer in about sixteen operations where transformers' layer takes forty: products that read one
input are one launch, and everything between two products is one. Roundings are transformers' own: each value that it
rounds to the model's dtype is rounded here. Towers and layers with experts stay with transformers' modules; chunks of prompts use
some of the kernels (chunk.py, last_layers.py).
Source: transformers 5.6.2 to 5.23.0, models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trimtab.engine.cuda import launch_config as cuts
from trimtab.engine.kernels import attention_and_norms as fused
from trimtab.engine.kernels import embed_and_logits as ends
from trimtab.engine.kernels import gemm4 as many_rows
from trimtab.engine.kernels import gemv4 as matvec
from trimtab.engine.kernels import selfcheck as fused_check
from trimtab.engine.kv.kv_cache import BatchedKVCache
from trimtab.engine.layers.embedding import Table
from trimtab.engine.layers.linear import Leaf, ResidentLeaf, packed_together, staged_in
from trimtab.engine.lora.layers import SavedModule
from trimtab.process import phases

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.kernels.device_kernels import DeviceKernels
    from trimtab.engine.kv.pages import PageTable
    from trimtab.engine.layers.unpacked import UnpackedWeights

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


def text_model(hf_model: HFModel) -> Any:
    """Return the decoder of a Gemma 4, None for another family."""
    for module in hf_model.modules():
        if type(module).__name__ == "Gemma4TextModel":
            return module
    return None


def why_not(hf_model: HFModel) -> str | None:
    """Return why this model's step cannot be made of these kernels, None if it can."""
    text = text_model(hf_model)
    if text is None:
        return f"there are no fused kernels for {type(hf_model).__name__}"
    config = text.config
    if getattr(config, "enable_moe_block", False):
        return "its layers have experts"
    if config.hidden_activation not in ACTIVATIONS:
        return f"its activation is {config.hidden_activation}"
    if getattr(config, "use_bidirectional_attention", None) == "all":
        return "its attention is not causal"
    return None


def choose_kernels(hf_model: HFModel, rows: int, *, is_invariant: bool = False) -> DeviceKernels:
    """Return the kernels that work and are faster for this model's steps of up to `rows` rows. is_invariant: of all of them, each
    with the bits that it has alone."""
    from trimtab.engine.kernels.device_kernels import DeviceKernels

    groups = product_groups(hf_model)
    progress = phases.counting("measuring kernels on this GPU (once),")
    kernels = DeviceKernels.choose(groups, attention_kinds(hf_model), rows=rows, sizes=_sizes(hf_model), progress=progress)
    if is_invariant and rows <= cuts.MAX_ROWS:
        kernels.compile_fixed(groups, groups[0][0][0].dtype, rows)
    return kernels


def product_groups(hf_model: HFModel) -> list[list[list[Leaf]]]:
    """Return for every shape of product the groups of layers that have it; a group reads one input."""
    groups: dict[tuple[int, ...], list[list[Leaf]]] = {}
    for layer in text_model(hf_model).layers:
        for group in products_of(layer):
            groups.setdefault((group[0].in_features, *(leaf.out_features for leaf in group)), []).append(group)
    front = getattr(text_model(hf_model), "per_layer_model_projection", None)
    if isinstance(front, Leaf):
        groups.setdefault((front.in_features, front.out_features), []).append([front])
    return list(groups.values())


def attention_kinds(hf_model: HFModel, of: str | None = None) -> list[tuple[int, int, int]]:
    """Return (heads, kv heads, head size) of each kind of layer. of: only layers of this entry of `layer_types`."""
    kinds: dict[tuple[int, int, int], None] = {}
    text = text_model(hf_model)
    for layer, kind in zip(text.layers, text.config.layer_types, strict=True):
        if of not in (None, kind):
            continue
        own = layer.self_attn
        heads = own.q_proj.out_features // own.head_dim
        kinds[heads, heads // own.num_key_value_groups, own.head_dim] = None
    return list(kinds)


def _sizes(hf_model: HFModel) -> ends.Sizes:
    config = text_model(hf_model).config
    per_layer = config.hidden_size_per_layer_input or 0
    return ends.Sizes(
        config.vocab_size, config.hidden_size, config.final_logit_softcapping,
        config.num_hidden_layers if per_layer else 0, per_layer,
    )  # fmt: skip


def products_of(layer: Any) -> list[list[Leaf]]:
    """Return the layer's linear modules, those that read one input together, in the order they run."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = [_projections(attention), [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    if getattr(layer, "hidden_size_per_layer_input", 0):
        groups += [[layer.per_layer_input_gate], [layer.per_layer_projection]]
    return groups


def _projections(attention: Any) -> list[Leaf]:
    if attention.is_kv_shared_layer:
        return [attention.q_proj]
    return [leaf for leaf in (attention.q_proj, attention.k_proj, attention.v_proj) if leaf is not None]


def _norm(residual: Tensor, post: NormLayer, following: NormLayer | None, scalar: Tensor | None, out_h: Tensor) -> matvec.Norm:
    return matvec.Norm(residual, post.weight, None if following is None else following.weight, post.eps, scalar, out_h)


def _ahead(leaves: Sequence[Leaf]) -> list[Tensor]:
    """Return the packed weights and scales of layers that stay on the device (a streamed one is not there yet), none if they are
    more than its L2 cache holds."""
    packed = [leaf.packed() for leaf in leaves if isinstance(leaf, ResidentLeaf)]
    tensors = [one.parts[name] for one in packed for name in ("weight", "absmax") if name in one.parts]
    if tensors and tensors[0].device.type == "cuda":
        near = getattr(torch.cuda.get_device_properties(tensors[0].device), "L2_cache_size", 0)
        return tensors if sum(one.nbytes for one in tensors) <= near else []
    return tensors


def _scale(table: Table) -> float:
    """Return the factor of a table's rows, in their own type. Reads the device."""
    return 1.0 if table.embed_scale is None else float(table.embed_scale.to(table.dtype))


class NormLayer(Protocol):
    """A norm of the text model."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class TokenPositions:
    """Where the tokens of a pass are in their rows of the cache. Shapes: positions, ring [n] int64: the position, and its place in
    a sliding layer's buffer. pages: of full layers that lie in a pool's."""

    positions: Tensor
    ring: Tensor
    pages: PageTable | None = None


class FusedStep:
    """A step of the rows of a cache: `step(count)` gives the logits [count, V] float32 of tokens[:count] at the cache's
    positions, and the most likely token of each row [count] int64, -1 where its scores are not numbers.

    tokens: [rows, 1], read where they are. Keys and values of the step are written into the cache.
    """

    def __init__(
        self, hf_model: HFModel, cache: BatchedKVCache, tokens: Tensor, kernels: DeviceKernels,
        unpacked: UnpackedWeights | None = None,
    ) -> None:  # fmt: skip
        self.hf_model, self.cache, self.tokens, self.kernels = hf_model, cache, tokens, kernels
        self.unpacked = unpacked
        self.least_many = cuts.MAX_ROWS + 1  # rows from which on products are those of many rows
        # For A x of their adapters, at the same time as the product over the same x.
        self.beside = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        self.text = text_model(hf_model)
        self.config = self.text.config
        self.kind = ACTIVATIONS[self.config.hidden_activation]
        self.pad_token_id = getattr(hf_model.config.get_text_config(), "pad_token_id", None)
        self._layers = list(self.text.layers)
        self._has_own_turns = self._turns_are_right()
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        # Checked before anything is captured: the check reads a table on the device.
        self._is_ours = {group[0]: self._can_multiply(group) for layer in self._layers for group in products_of(layer)}
        self._is_many = {group[0]: self._can_multiply_many(group) for layer in self._layers for group in products_of(layer)}
        front = getattr(self.text, "per_layer_model_projection", None)
        if isinstance(front, Leaf):
            self._is_ours[front] = self._can_multiply([front])
            self._is_many[front] = self._can_multiply_many([front])
        tables = (self.text.embed_tokens, getattr(self.text, "embed_tokens_per_layer", None))
        self._scales = {table: _scale(table) for table in tables if isinstance(table, Table)}
        self._staged = [next(iter(staged_in(layer)), None) for layer in self._layers]
        self._why_no_pages = self._wrong_pages()
        self._zeros = torch.zeros_like(cache.positions)

    def _can_multiply(self, group: Sequence[Leaf]) -> bool:
        if self.kernels.matvec is None or not self.kernels.pays(group):
            return False
        return not any(matvec.why_not(leaf.packed(), leaf.dtype, leaf.device) for leaf in group)

    def _can_multiply_many(self, group: Sequence[Leaf]) -> bool:
        return self.kernels.rows is not None and all(many_rows.why_not(leaf.packed(), leaf.dtype) is None for leaf in group)

    def _wrong_pages(self) -> str | None:
        """Return the error of the kernels of layers in pages; compiles them, which a capture forbids."""
        if self.cache.pool is None or self.cache.kv != "full" or self.kernels.small is None:
            return None
        kinds = attention_kinds(self.hf_model, "full_attention")
        return fused_check.check_pages(self.kernels.small, kinds, self.text.norm.weight.dtype)

    def multiplies(self, groups: Sequence[Sequence[Leaf]]) -> bool:
        """Whether one token's products of all these groups are those of the matrix-vector kernels."""
        return all(self._is_ours[group[0]] for group in groups)

    def why_not_rows(self) -> str | None:
        """Return why a step cannot be made of kernels now, None if it can."""
        if self._why_no_pages is not None:
            return self._why_no_pages
        if not self.cache.has_rings and "sliding_attention" in self.config.layer_types:
            return "this transformers release keeps the full cache of sliding layers"
        if any(isinstance(module, SavedModule) for module in self.text.modules()):
            return "an adapter replaces the weights of a norm"
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
        turns = self.turns(hidden, positions)
        norm: matvec.Norm | None = None  # of x, which is not applied yet
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        where = TokenPositions(
            positions,
            self.buffer("ring", (count,), torch.long),
            None if self.cache.pool is None else self.cache.pool.table,
        )
        for number in range(len(self._layers)):
            following = self._layers[number + 1].input_layernorm if number + 1 < len(self._layers) else self.text.norm
            own = None if extra is None else extra[:, number]
            x, norm = self.layer(number, where, turns, shared, h, x, norm, own, following)
        return self._head(self.normed(x, norm), next_tokens)

    def _rows(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the embeddings of the tokens [n, D], the input of the first layer [n, D] and, if one lookup gave both, the
        rows of the per-layer table [n, layers * P]. Also writes each row's position in a sliding-window buffer."""
        norm = self._layers[0].input_layernorm
        count = ids.shape[0]
        ring = self.buffer("ring", (count,), torch.long)
        first = self._lookup("h", self.text.embed_tokens, count)
        if first is None:
            torch.remainder(positions, self.ring, out=ring)
            hidden = self.text.embed_tokens(ids)
            h = self.buffer("h", (count, hidden.shape[-1]), hidden.dtype)
            h.copy_(hidden[:, 0])
            x = self.buffer("x", h.shape, h.dtype)
            self.add_norm(None, h, None, norm, None, None, x)
            return h, x, None
        second = None
        if self.text.hidden_size_per_layer_input:
            second = self._lookup("own", self.text.embed_tokens_per_layer, count)
        lookups = [first] if second is None else [first, second]
        x = self.buffer("x", first.out.shape, first.out.dtype)
        # The first of a graph: no earlier kernel overlaps with it.
        ends.rows(
            ids[:, 0], lookups, self.kernels.ends, norm=(norm.weight, norm.eps, x), ring=(positions, self.ring, ring),
            dependent=False,
        )  # fmt: skip
        return first.out, x, None if second is None else second.out

    def _lookup(self, name: str, table: Any, count: int) -> ends.Lookup | None:
        """Return the kernel's arguments for a table without adapters whose rows are on the device, None for other tables."""
        if self.kernels.ends is None or not isinstance(table, Table) or table.adapters:
            return None
        rows, scale = table.held(), self._scales.get(table)
        if rows is None or scale is None or rows[0].dtype != table.dtype:
            return None
        out = self.buffer(name, (count, rows[0].shape[1]), rows[0].dtype)
        return ends.Lookup(rows[0], scale, out, in_order=rows[1])

    def empty(self, count: int) -> None:
        """Prepare the scratch of the adapters for the products of a pass of this many rows; the first call of a pass."""
        if (table := self._layers[0].self_attn.q_proj.adapter_store.table) is not None:
            table.empty(count)

    def turns(self, hidden: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cos and sin [n, D] of the positions for every kind of layer."""
        count, kinds = positions.shape[0], list(dict.fromkeys(self.config.layer_types))
        by_kind: dict[str, tuple[Tensor, Tensor]] = {}
        if not self._has_own_turns:
            for kind in kinds:
                cos, sin = self.text.rotary_emb(hidden, positions[:, None], kind)
                by_kind[kind] = cos[:, 0], sin[:, 0]
            return by_kind
        wanted = []
        for kind in kinds:
            inv_freq, factor = self._angles(kind)
            shape = (count, 2 * inv_freq.numel())
            cos, sin = (self.buffer(f"{name} {kind}", shape, hidden.dtype) for name in ("cos", "sin"))
            by_kind[kind] = cos, sin
            wanted.append((inv_freq, factor, cos, sin))
        fused.turns(positions, wanted, self.kernels.small)
        return by_kind

    def _angles(self, kind: str) -> tuple[Tensor, float]:
        rotary = self.text.rotary_emb
        return getattr(rotary, f"{kind}_inv_freq"), float(getattr(rotary, f"{kind}_attention_scaling"))

    def _turns_are_right(self) -> bool:
        """Whether our cos and sin are the module's own, bit for bit, at positions all over the context."""
        kinds = list(dict.fromkeys(self.config.layer_types))
        if self.kernels.small is None or len(kinds) > 2:
            return False
        most = max(self.cache.context_tokens - 1, 1)
        positions = torch.tensor([0, 1, 7, 100, most // 3, most // 2, most - 1, most], device=self.cache.device)
        like = torch.empty(len(positions), 1, 1, dtype=self.text.norm.weight.dtype, device=self.cache.device)
        try:
            for kind in kinds:
                inv_freq, factor = self._angles(kind)
                shape = (len(positions), 2 * inv_freq.numel())
                cos, sin = (torch.full(shape, float("nan"), dtype=like.dtype, device=like.device) for _ in range(2))
                fused.turns(positions, [(inv_freq, factor, cos, sin)], self.kernels.small)
                own = self.text.rotary_emb(like, positions[:, None], kind)
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
        self, number: int, where: TokenPositions, turns: dict[str, tuple[Tensor, Tensor]], shared: dict[str, tuple[Tensor, Tensor]],
        h: Tensor, x: Tensor, norm: matvec.Norm | None, extra: Tensor | None, following: NormLayer | None,
    ) -> tuple[Tensor, matvec.Norm]:  # fmt: skip
        """Return the last product's output, and the norm that makes the next layer's input (and h) of it.

        Shapes: h [n, D], x [n, D] before `norm`; extra [n, P], the layer's own input. turns, shared: by kind of layer, see `turns`;
        keys and values that later layers read. following: the norm of the next layer's input, None for h alone.
        """
        layer, kind = self._layers[number], self.config.layer_types[number]
        made = self._layer(layer, number, kind, turns[kind], shared, where, h, x, norm, extra, following)
        if (staged := self._staged[number]) is not None:
            staged.leave()
        return made

    def _layer(
        self, layer: Any, number: int, kind: str, turn: tuple[Tensor, ...], shared: dict[str, tuple[Tensor, Tensor]],
        where: TokenPositions, h: Tensor, x: Tensor, norm: matvec.Norm | None, extra: Tensor | None, following: NormLayer | None,
    ) -> tuple[Tensor, matvec.Norm]:  # fmt: skip
        attention = layer.self_attn
        attended = self._attend(layer, number, kind, turn, shared, where, x, norm)
        y = self._products([attention.o_proj], attended)
        middle = self.buffer("middle", h.shape, h.dtype)
        norm = _norm(h, layer.post_attention_layernorm, layer.pre_feedforward_layernorm, None, middle)
        down = _ahead([layer.mlp.down_proj])
        gated = self._products([layer.mlp.gate_proj, layer.mlp.up_proj], y, matvec.Gate(self.kind), norm, down)
        y = self._products([layer.mlp.down_proj], gated)
        if extra is None:
            return y, _norm(middle, layer.post_feedforward_layernorm, following, layer.layer_scalar, h)
        after = self.buffer("after", h.shape, h.dtype)
        norm = _norm(middle, layer.post_feedforward_layernorm, None, None, after)
        # The first weights of the next layer: the memory bus is nearly idle until then.
        after_this = self._layers[number + 1 : number + 2]
        ahead = [leaf for one in after_this for leaf in (one.self_attn.q_proj, one.self_attn.o_proj)]
        mixed = self._products([layer.per_layer_input_gate], y, matvec.Gate(self.kind, extra), norm, _ahead(ahead))
        y = self._products([layer.per_layer_projection], mixed)
        return y, _norm(after, layer.post_per_layer_input_norm, following, layer.layer_scalar, h)

    def _attend(
        self, layer: Any, number: int, kind: str, turn: tuple[Tensor, ...],
        shared: dict[str, tuple[Tensor, Tensor]], where: TokenPositions, x: Tensor, norm: matvec.Norm | None,
    ) -> Tensor:  # fmt: skip
        attention = layer.self_attn
        count, dim = x.shape[0], attention.head_dim
        cos, sin = turn
        heads = attention.q_proj.out_features // dim
        joined = self._products(_projections(attention), x, None, norm)
        queries = self.buffer("queries", (count, heads, dim), x.dtype)
        is_ring = kind == "sliding_attention"
        places = where.ring if is_ring else where.positions
        if self.cache.kv == "int8":
            return self._attend_int8(attention, number, kind, joined, queries, turn, shared, places)
        mode, keys, values = "shared", None, None
        # Layers of one kind that share keys and values have them in pages, or all of them in one piece.
        pages = None if is_ring else where.pages
        if not attention.is_kv_shared_layer:
            mode = "own" if attention.v_proj is not None else "k_is_v"
            own = self.cache.layers[number]
            keys, values = own.keys, own.values
            if attention.store_full_length_kv:
                shared[kind] = (keys, values)
        weight = None if keys is None else attention.k_norm.weight
        if keys is None or values is None:
            keys, values = shared[kind]
        attended = self.buffer("looked", (count, heads * dim), x.dtype)
        fused.rope_and_attention(
            joined, heads, attention.q_norm.weight, weight, attention.q_norm.eps, cos, sin, keys, values, places,
            where.positions, attention.scaling, None, attended, queries, self._scratch(count, heads, dim),
            self.kernels.small, mode=mode, ahead=_ahead([layer.mlp.gate_proj, layer.mlp.up_proj]), pages=pages,
        )  # fmt: skip
        return attended

    def _attend_int8(
        self, attention: Any, number: int, kind: str, joined: Tensor, queries: Tensor, turn: tuple[Tensor, ...],
        shared: dict[str, tuple[Tensor, Tensor]], places: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return attention over keys and values in 8 bits: the step's own are rounded and written, and a copy is read."""
        count, heads, dim = queries.shape
        mode, weight, new_keys, new_values = "shared", None, None, None
        own = None if attention.is_kv_shared_layer else self.cache.layers[number]
        if own is not None:
            mode, weight = "own" if attention.v_proj is not None else "k_is_v", attention.k_norm.weight
            new_keys, new_values = (
                self.buffer(f"new {name}", (count, own.heads, 1, dim), joined.dtype) for name in ("keys", "values")
            )
        kv_heads = shared[kind][0].shape[1] if own is None else own.heads
        cos, sin = turn
        fused.rope_write(
            joined, heads, kv_heads, dim, attention.q_norm.weight, weight, attention.q_norm.eps, cos, sin, new_keys,
            new_values, self._zeros[:count], queries, module=self.kernels.small, mode=mode,
        )  # fmt: skip
        if own is None:
            keys, values = shared[kind]
        else:
            keys, values = own.written(new_keys, new_values, places)
            if attention.store_full_length_kv:
                shared[kind] = keys, values
        attended = self.buffer("looked", (count, heads * dim), joined.dtype)
        # Behind torch's operations: their results may be read only after they have ended.
        fused.attend(
            queries, keys, values, self.cache.positions[:count], attention.scaling, None, attended,
            self._scratch(count, heads, dim), self.kernels.small, dependent=False,
        )  # fmt: skip
        return attended

    def _products(
        self,
        leaves: Sequence[Leaf],
        x: Tensor,
        gate: matvec.Gate | None = None,
        norm: matvec.Norm | None = None,
        ahead: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return [n, all D_out] of linears that read one input, with each row's adapter; with a gate [n, D_out of one].

        norm: the norm that computes this input from x. ahead: weights to prefetch into L2 at the same time.
        """
        count, store = x.shape[0], leaves[0].adapter_store
        widths = [leaf.out_features for leaf in leaves]
        width = widths[0] if gate is not None else sum(widths)
        own = self._is_ours[leaves[0]] and count < self.least_many
        many = not own and count >= self.least_many and self._is_many.get(leaves[0], False)
        table, selection = store.table, store.selection
        # Adapters that no table holds are added by their own modules' way, to the plain products.
        is_apart = (own or many) and table is None and (selection.name or selection.rows) and any(leaf.adapters for leaf in leaves)
        out = self.buffer("out" if gate is None else "gated", (count, width), x.dtype)
        if own and not is_apart:
            args = None if table is None else table.args(leaves, count, is_empty=True)
            packed = packed_together(leaves)
            pair = gate is not None and gate.other is None
            if norm is not None and not matvec.takes_norm(packed, count, self.kernels.matvec, pair=pair):
                x, norm = self.normed(x, norm), None
            matvec.matvec4(
                x, packed, out, bias=[leaf.bias for leaf in leaves], lora=args, gate=gate, norm=norm,
                module=self.kernels.matvec, ahead=ahead,
            )  # fmt: skip
            return out
        x = self.normed(x, norm)
        wide = out if gate is None else self.buffer("wide", (count, sum(widths)), x.dtype)
        if own:
            packed = packed_together(leaves)
            matvec.matvec4(x, packed, wide, bias=[leaf.bias for leaf in leaves], module=self.kernels.matvec)
        if many:
            many_rows.linear(
                x, packed_together(leaves), wide, bias=[leaf.bias for leaf in leaves],
                lora=None if table is None else table.args(leaves, count), module=self.kernels.rows,
                unpacked=self._joined(leaves) if count > many_rows.PAYING_ROWS else None, beside=self.beside,
            )  # fmt: skip
        start = 0
        for leaf, size in zip(leaves if is_apart or not many else (), widths, strict=False):
            part = wide[:, start : start + size]
            part.copy_(leaf.adapted(x, part.clone()) if own or many else leaf(x))
            start += size
        if gate is not None:
            up = wide[:, width:] if gate.other is None else gate.other
            fused.gated(wide[:, :width], up, out, gate.kind, self.kernels.small)
        return out

    def _joined(self, leaves: Sequence[Leaf]) -> Tensor | None:
        """Return the weights of a group unpacked, where they are kept."""
        if self.unpacked is None or any(leaf.bias is not None for leaf in leaves):
            return None
        return self.unpacked.joined(leaves)

    def normed(self, y: Tensor, norm: matvec.Norm | None) -> Tensor:
        """Return a product's input, the norm in front of it applied by itself."""
        return y if norm is None else norm.apply(y, self.buffer("x", y.shape, y.dtype), self.kernels.small)

    def add_norm(
        self, y: Tensor | None, residual: Tensor, post: Any, following: Any, scalar: Tensor | None,
        out_h: Tensor | None, out_x: Tensor | None,
    ) -> None:  # fmt: skip
        fused.add_norm(
            y, residual, None if post is None else post.weight, None if following is None else following.weight,
            (post or following).eps, scalar, out_h, out_x, self.kernels.small,
        )  # fmt: skip

    def _per_layer(self, ids: Tensor, hidden: Tensor, own: Tensor | None) -> Tensor | None:
        """Return each layer's own input of the tokens: [n, layers, P]. own: their rows of the layers' table, if looked up."""
        if not self.text.hidden_size_per_layer_input:
            return None
        if own is None:
            own = self.text.get_per_layer_inputs(ids, hidden)
        own = own.view(len(ids), 1, -1, self.text.hidden_size_per_layer_input)
        projection = self.text.per_layer_model_projection
        if isinstance(projection, Leaf) and self._is_ours.get(projection) and not projection.adapters:
            # As project_per_layer_inputs does it, its product from our kernel.
            norm, out = self.text.per_layer_projection_norm, self.buffer("extra", own[:, 0].shape, hidden.dtype)
            ends.per_layer(
                self._products([projection], hidden[:, 0]), own[:, 0], norm.weight, norm.eps,
                self.text.per_layer_model_projection_scale, self.text.per_layer_input_scale, out, self.kernels.ends,
            )  # fmt: skip
            for staged in staged_in(projection):  # its module, which would report it, was not called
                staged.leave()
            return out
        extra: Tensor = self.text.project_per_layer_inputs(hidden, own)
        return extra[:, 0]

    def _head(self, x: Tensor, next_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        cap = self.config.final_logit_softcapping
        return ends.argmax_logits(self.hf_model.lm_head(x), cap, next_tokens, self.kernels.ends)

    # Buffers -----------------------------------------------------------------------------------------------------------

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer of this name and shape, the same in every step."""
        key = (name, tuple(shape), dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tuple(shape), dtype=dtype, device=self.cache.device)
        return self._buffers[key]

    def _scratch(self, count: int, heads: int, dim: int) -> Tensor | None:
        size = fused.scratch_values(count, heads, dim, self.cache.context_tokens)
        return self.buffer("scratch", (size,), torch.float32) if size else None
