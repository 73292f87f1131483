"""Which parts does a text decoder have, and how does a layer use them?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.checkpoint.config_limits import USUAL_CHOSEN, experts_per_token
from trimtab.engine.kernels import routers
from trimtab.engine.kernels.attention_and_norms import AttentionShape, HeadNorms
from trimtab.engine.kernels.delta_rule import DeltaShape, DeltaWeights
from trimtab.engine.kernels.embed_and_logits import Sizes
from trimtab.engine.kernels.experts import Mixture, why_not_many
from trimtab.engine.kernels.gemv4 import NormForm
from trimtab.engine.kernels.plain_attention import Growth, Scores
from trimtab.engine.lora.experts import stack_facts, stack_of, stack_shape
from trimtab.engine.tiers.near_experts import NearExperts

if TYPE_CHECKING:
    from trimtab.engine.families import modules
    from trimtab.engine.layers.leaves import Leaf
    from trimtab.engine.lora.store import AdapterStore


class UndescribedError(Exception):
    """No description fits this model; the message says why, with the attribute's name where one is missing."""


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm. form: where it rounds, one of `attention_and_norms.FORMS`."""

    module: modules.RMSNorm
    form: str

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def eps(self) -> float:
        module = self.module
        return float(module.eps if hasattr(module, "eps") else module.variance_epsilon)


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of one kind of layers. module: transformers' own; kind: the layer type in the names of its buffers, which its
    forward takes too, None where there is one rotation. has_axes: positions count along three axes. limit: tokens of the longest
    text for which the angles stay as they are, None for any."""

    module: modules.RotaryEmbedding
    kind: str | None = None
    has_axes: bool = False
    limit: int | None = None

    @property
    def inv_freq(self) -> Tensor:
        """The angles of one position [R / 2] float32."""
        inv_freq: Tensor = getattr(self.module, f"{self.kind}_inv_freq" if self.kind else "inv_freq")
        return inv_freq

    @property
    def factor(self) -> float:
        """What cos and sin are multiplied by."""
        return float(getattr(self.module, f"{self.kind}_attention_scaling" if self.kind else "attention_scaling"))

    def cos_sin(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the module's own cos and sin [n, 1, R] of positions [n, 1], in the dtype of `like`, or float32 where it is so."""
        if self.has_axes:
            positions = positions.expand(3, *positions.shape)
        return self.whole(self.module(like, positions, self.kind) if self.kind else self.module(like, positions))

    def whole(self, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of both halves of a head, of modules that give one half too."""
        cos, sin = turn
        return (cos, sin) if cos.shape[-1] > self.inv_freq.numel() else (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


@dataclass(frozen=True, eq=False)
class Attention:
    """A layer's attention. q, k, v, o: linears; no v: values are keys before their norm; is_joined: q makes all three.
    rope: a key of `Decoder.ropes`, None where nothing turns. window: of a sliding layer. source: the layer whose keys and values
    are read, None for its own; is_read: whether later layers read these. is_wide: the norms of queries and keys are over all heads
    together. softcap, growth, has_sinks: as `Scores` has them. module: transformers' own."""

    module: modules.SelfAttention
    q: Leaf
    k: Leaf | None
    v: Leaf | None
    o: Leaf
    shape: AttentionShape
    scale: float
    rope: str | None
    window: int | None = None
    source: int | None = None
    is_read: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    softcap: float | None = None
    is_joined: bool = False
    is_wide: bool = False
    growth: Growth | None = None
    has_sinks: bool = False

    @property
    def mode(self) -> str:
        """The kernels' name of where keys and values come from."""
        return "shared" if self.source is not None else "own" if self.v is not None or self.is_joined else "k_is_v"

    @property
    def scores(self) -> Scores:
        """What becomes of the products of queries and keys."""
        return Scores(self.scale, self.softcap, self.module.sinks if self.has_sinks else None, self.growth)

    def parts(self, made: Sequence[Tensor]) -> list[Tensor]:
        """Return queries, keys and values [n, H D] of what `projections` made."""
        shape = self.shape
        return list(made[0].split([one * shape.dim for one in (shape.heads, *[shape.kv_heads] * 2)], 1) if self.is_joined else made)

    def gated(self, joined: Tensor, attended: Tensor) -> Tensor:
        """Return attention's output [n, Hq D] times its gates, which lie behind each head of queries in `joined`."""
        if not self.shape.is_gated:
            return attended
        heads, _, dim, *_ = self.shape
        gates = joined[:, : 2 * heads * dim].view(-1, heads, 2, dim)[:, :, 1]
        return attended.mul_(torch.sigmoid(gates).view(attended.shape))

    @property
    def wide_norms(self) -> list[Norm]:
        """The norms over all heads together, of queries and keys."""
        return [one for one in (self.q_norm, self.k_norm) if one is not None] if self.is_wide else []

    @property
    def projections(self) -> list[Leaf]:
        """The linears over the layer's input, in the order in which their products lie."""
        return [self.q] if self.source is not None else [one for one in (self.q, self.k, self.v) if one is not None]

    def norms(self) -> HeadNorms:
        """Return the norms of heads as kernels take them."""
        q, k, shape = self.q_norm, self.k_norm, self.shape
        if q is None or self.is_wide:
            return HeadNorms(None, None, 0.0, values=shape.norms_values, is_gated=shape.is_gated, in_pairs=shape.turn == "pairs")
        weight = None if k is None or self.source is not None else k.weight
        return HeadNorms(q.weight, weight, q.eps, q.form, shape.norms_values, shape.is_gated, shape.turn == "pairs")


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """A layer's gated delta rule, in attention's place. qkv, z, b, a: linears over the layer's input: what is convolved, the gate
    of the output, and of each head how much it takes and forgets; o: the last one. module: transformers' own."""

    module: modules.LinearAttention
    qkv: Leaf
    z: Leaf
    b: Leaf
    a: Leaf
    o: Leaf
    shape: DeltaShape

    def weights(self) -> DeltaWeights:
        """Return its own tensors as kernels take them."""
        own, norm = self.module, self.module.norm
        return DeltaWeights(own.conv1d.weight[:, 0], own.A_log, own.dt_bias, norm.weight, norm.variance_epsilon)


@dataclass(frozen=True, eq=False)
class Mlp:
    """A gated MLP of linears; no up: gate makes both."""

    gate: Leaf
    up: Leaf | None
    down: Leaf

    @property
    def gates(self) -> list[Leaf]:
        """The linears over its input."""
        return [one for one in (self.gate, self.up) if one is not None]


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """A layer's own input (Gemma 4), gated and added behind the MLP."""

    gate: Leaf
    projection: Leaf
    norm: Norm


@dataclass(frozen=True, eq=False)
class Route:
    """How a router makes scores [n, E] of h [n, D] and chooses: by a linear, or weight [E, D]. Of the norm in front: scale [D],
    factor and eps, None without a norm. expert_scale [E]: a factor of each expert's weight."""

    choice: routers.Choice
    linear: Leaf | None = None
    weight: Tensor | None = None
    scale: Tensor | None = None
    factor: float = 1.0
    eps: float = 0.0
    expert_scale: Tensor | None = None

    def takes(self, x: Tensor, count: int) -> bool:
        """Whether kernels compute it for x [n, D] and this many experts: every tensor has x's type."""
        own = [one for one in (self.weight, self.scale, self.expert_scale) if one is not None]
        return routers.why_not(count, x.shape[1], self.choice) is None and all(one.dtype == x.dtype for one in own)


# Routers that kernels know, by transformers' class: which attribute is what of a `Route` or its choice, and whether weights stay
# float32. An adapter that replaces a router has another class.
_PLAIN = {"weight": "weight", "chosen": "top_k"}
_ASKED = _PLAIN | {"is_normed": "norm_topk_prob"}
ROUTES: Mapping[str, tuple[Mapping[str, str], bool]] = {
    "Gemma4TextRouter": ({
        "linear": "proj", "chosen": "config.top_k_experts", "scale": "scale", "factor": "scalar_root_size", "eps": "eps",
        "expert_scale": "per_expert_scale",
    }, True),
    "Qwen2MoeTopKRouter": (_ASKED, False), "Qwen3MoeTopKRouter": (_ASKED, False), "Qwen3VLMoeTextTopKRouter": (_PLAIN, False),
    "Qwen3_5MoeTopKRouter": (_PLAIN, False), "MixtralTopKRouter": (_PLAIN, True),
}  # fmt: skip


def _route(router: object) -> Route | None:
    """Return how kernels choose, None where the router is computed as it is."""
    names, is_wide = ROUTES.get(type(router).__name__, ({}, False))
    found = {name: attrgetter(path)(router) for name, path in names.items()}
    if not found:
        return None
    choice = routers.Choice(found.pop("chosen"), found.pop("is_normed", True), is_wide)
    return Route(choice, **found)


@dataclass(frozen=True, eq=False)
class Experts:
    """A layer's experts, in its MLP's place or next to it. parent: transformers' module that has the router, by its name there: an
    adapter puts another module into its place. router: gives weights and numbers of a token's experts last; module: of stacks.
    shared: an MLP over the same input, whose output is added, times the sigmoid of what shared_gate makes, a linear with one
    output. Next to an MLP (Gemma 4) router and experts read the residual; before, after: the norms of the experts' input and of
    what they make; after_dense: of what the MLP makes."""

    parent: object
    router_name: str
    module: nn.Module
    shared: Mlp | None = None
    shared_gate: Leaf | None = None
    before: Norm | None = None
    after: Norm | None = None
    after_dense: Norm | None = None

    @property
    def stacks(self) -> modules.ExpertStacks:
        """The module, as what it is."""
        return vars(self)["module"]

    @property
    def router(self) -> nn.Module:
        return getattr(self.parent, self.router_name)

    @property
    def route(self) -> Route | None:
        """How kernels choose, None where the router is computed as it is."""
        return _route(self.router)

    @property
    def products(self) -> list[list[Leaf]]:
        """The linears of the shared expert, those that read one input together, in the order in which a step runs them."""
        groups = [] if self.shared is None else [self.shared.gates, [self.shared.down]]
        return groups if self.shared_gate is None else [*groups, [self.shared_gate]]

    @property
    def has_mixture(self) -> bool:
        """Whether kernels know how the module computes: two stacks, the first with gate and up one behind the other, no biases."""
        own = self.stacks
        is_plain = getattr(type(own)._apply_gate, "__module__", "") == "transformers.integrations.moe"
        return is_plain and own.has_gate and not (own.is_transposed or own.has_bias or hasattr(own, "post_expert_norm"))

    @property
    def is_packed(self) -> bool:
        """Whether its stacks are in 4 or 8 bits."""
        return "stacks" in vars(self.module)

    @property
    def takes_many(self) -> bool:
        """Whether kernels know how it computes more tokens than a step has. No streamed block is entered."""
        return self.has_mixture and why_not_many([stack_shape(self.module, name) for name in ("gate_up_proj", "down_proj")]) is None

    @property
    def near(self) -> NearExperts | None:
        """Its slots, where its experts are in host memory."""
        return vars(self.module).get("near")

    @property
    def key(self) -> tuple[object, ...]:
        """What of the stacks selects a kernel, as values that print the same in every process. No streamed block is entered."""
        slots = () if self.near is None else (self.near.slots,)
        return stack_facts(self.module, "gate_up_proj"), stack_facts(self.module, "down_proj"), *slots

    def mixture(self, activation: str) -> Mixture:
        """Return the stacks as kernels take them, of a module that they know; streamed ones are entered."""
        gate_up, down = stack_of(self.module, "gate_up_proj"), stack_of(self.module, "down_proj")
        return Mixture(gate_up, down, activation, self.near)

    def chosen(self, x: Tensor, rows: int = 1) -> tuple[Tensor, Tensor]:
        """Return the numbers [n, K] int64 of the experts of x [n, D], which the router reads, and their weights [n, K]. rows: of
        equally many neighbours each; a router that has linears adds each row's adapter there."""
        has_linears = any(hasattr(one, "dense_weight") for one in self.router.modules())
        _, weights, numbers = self.router(x.view(rows, -1, x.shape[-1]) if rows > 1 and has_linears else x)
        return numbers.reshape(len(x), -1), weights.reshape(len(x), -1)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer. mixer: what mixes tokens. Norms in front of attention and MLP, and behind them of what is added to the residual,
    None without; added: a factor of it. mlp: None where there are `experts` alone. scale: of the layer's output."""

    module: modules.DecoderLayer
    before_attention: Norm | None
    mixer: Attention | DeltaNet
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Mlp | None
    after_mlp: Norm | None
    per_layer: PerLayerInput | None = None
    scale: Tensor | None = None
    added: float | None = None
    experts: Experts | None = None

    @property
    def products(self) -> list[list[Leaf]]:
        """The layer's linears, those that read one input together, in the order in which they run."""
        mixer = self.mixer
        inputs = [mixer.projections] if isinstance(mixer, Attention) else [[mixer.qkv, mixer.z], [mixer.b, mixer.a]]
        groups = [*inputs, [mixer.o], *([self.mlp.gates, [self.mlp.down]] if self.mlp is not None else [])]
        groups += [] if self.experts is None else self.experts.products
        return groups + ([[self.per_layer.gate], [self.per_layer.projection]] if self.per_layer is not None else [])


@dataclass(frozen=True, eq=False)
class Decoder:
    """A text decoder. text: transformers' own module of it; activation: one of `attention_and_norms.ACTIVATIONS`; softcap: of the
    scores behind the head, which are divided by `divisor` first. per_layer: the size of each layer's own input, 0 without.
    embedding_scale: a factor of embeddings that their module does not have."""

    text: modules.TextModel
    embedding: nn.Module
    layers: tuple[Layer, ...]
    final_norm: Norm
    ropes: Mapping[str, Rope]
    activation: str
    softcap: float | None = None
    per_layer: int = 0
    embedding_scale: float | None = None
    divisor: float | None = None
    head: Leaf | None = None  # where kernels read its packed weight

    @property
    def norm(self) -> NormForm:
        """The form of the norms around products, which all layers share."""
        return NormForm(self.final_norm.form, self.layers[0].after_attention is not None)

    @property
    def front(self) -> Leaf | None:
        """The linear that makes all layers' own inputs, None without."""
        return getattr(self.text, "per_layer_model_projection", None) if self.per_layer else None

    @property
    def attentions(self) -> dict[int, Attention]:
        """The attention of each layer that has one, by number."""
        return {number: layer.mixer for number, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}

    @property
    def deltas(self) -> dict[int, DeltaNet]:
        """The gated delta rule of each layer that has one, by number."""
        return {number: layer.mixer for number, layer in enumerate(self.layers) if isinstance(layer.mixer, DeltaNet)}

    def mixtures(self) -> dict[tuple[object, ...], tuple[int, Callable[[], Mixture]]]:
        """Return how many experts a token has and what opens one mixture, of every shape and formats that kernels know, by what
        selects these."""
        known = [layer.experts for layer in self.layers if layer.experts is not None and layer.experts.has_mixture]
        chosen = experts_per_token(self.text.config) or USUAL_CHOSEN
        return {(*one.key, self.activation, chosen): (chosen, partial(one.mixture, self.activation)) for one in reversed(known)}

    @property
    def adapter_store(self) -> AdapterStore:
        """The store that all linears share."""
        return self.layers[0].mixer.o.adapter_store

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens [..., D]."""
        hidden: Tensor = self.embedding(ids)
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale

    def scored(self, logits: Tensor) -> Tensor:
        """Return what the head made, divided."""
        return logits if self.divisor is None else logits / self.divisor

    def following(self, number: int) -> Norm | None:
        """Return the norm behind a layer: of the next one's input, None where it has none, or the last."""
        return self.layers[number + 1].before_attention if number + 1 < len(self.layers) else self.final_norm

    def shapes(self, *, full_only: bool = False) -> list[AttentionShape]:
        """Return each kind of attention once. full_only: of layers without a window."""
        kinds = self.attentions.values()
        return list(dict.fromkeys(one.shape for one in kinds if not (full_only and one.window is not None)))

    def groups(self) -> list[list[list[Leaf]]]:
        """Return for every shape and formats of a product the groups of linears that have them; a group reads one input."""
        groups: dict[tuple[object, ...], list[list[Leaf]]] = {}
        for group in [
            *(group for layer in self.layers for group in layer.products),
            *([one] for one in (self.front, self.head, *self._routers()) if one is not None),
        ]:
            form = [(linear.out_features, getattr(linear, "quant_kind", "none")) for linear in group]
            groups.setdefault((group[0].in_features, *form), []).append(group)
        return list(groups.values())

    def _routers(self) -> list[Leaf]:
        """Return the linears of routers that have a packed weight."""
        routes = (layer.experts.route for layer in self.layers if layer.experts is not None)
        linears = (one.linear for one in routes if one is not None)
        return [one for one in linears if one is not None and getattr(one, "quant_kind", "none") != "none"]

    def sizes(self) -> Sizes:
        """Return the sizes of both ends of a step."""
        config = self.text.config
        layers = len(self.layers) if self.per_layer else 0
        norm = self.layers[0].before_attention or self.final_norm
        return Sizes(config.vocab_size, config.hidden_size, self.softcap, layers, self.per_layer, norm.form)
