"""Which families are described, and what is each one's description?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from trimtab.engine.families.decoder import (
    Attention,
    Decoder,
    DeltaNet,
    Experts,
    Layer,
    Mlp,
    Norm,
    PerLayerInput,
    Rope,
    UndescribedError,
)
from trimtab.engine.kernels.attention_and_norms import AttentionShape
from trimtab.engine.kernels.delta_rule import DeltaShape
from trimtab.engine.kernels.dequantize import packed_heads
from trimtab.engine.kernels.plain_attention import Growth

if TYPE_CHECKING:
    from trimtab.engine.families.modules import DecoderLayer, FeedForward, SelfAttention, TextModel
    from trimtab.engine.formats.hf_types import Config, HFModel
    from trimtab.engine.layers.leaves import Leaf

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
# Kinds of rotation whose angles depend on the length of the text: a captured step has one set of them.
_GROWING_ROPES = ("dynamic",)
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


class UnusableConfigError(UndescribedError, ValueError):
    """A config has values that the family's own class cannot compute with."""


def describe(hf_model: HFModel) -> Decoder:
    """Return the description of a model's text decoder. Errors: UndescribedError. Source: transformers 5.6.2 to 5.23.0,
    models/*/modeling_*.py. An attribute that a release does not have is named in the error."""
    for module in hf_model.modules():
        if _is_described(module):
            try:
                return replace(DESCRIBE[type(module).__name__](module), head=next(iter(packed_heads(hf_model)), None))
            except AttributeError as exc:
                raise UndescribedError(f"its {type(exc.obj).__name__} has no {exc.name}") from exc
            except KeyError as exc:
                raise UnusableConfigError(f"it has no {exc.args[0]}") from exc
    raise UndescribedError(f"there is no description of {type(hf_model).__name__}")


def _is_described(module: nn.Module) -> TypeGuard[TextModel]:
    return type(module).__name__ in DESCRIBE


def why_not(hf_model: HFModel) -> str | None:
    """Return why there is no description of this model, None if there is one. Errors: UnusableConfigError, for a model that its
    own modules cannot compute."""
    try:
        describe(hf_model)
    except UnusableConfigError:
        raise
    except UndescribedError as exc:
        return str(exc)
    return None


# What families have in common -----------------------------------------------------------------------------------------


def _kinds(text: TextModel, *more: str) -> list[str]:
    config = text.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [_SLIDING if getattr(config, "sliding_window", None) is not None else _FULL] * len(text.layers)
    if strange := sorted(set(kinds) - {_FULL, _SLIDING, *more}):
        raise UnusableConfigError(f"its layers are of kinds {strange}")
    return list(kinds)


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UndescribedError(f"its activation is {name}")
    return ACTIVATIONS[name]


def _ropes(text: TextModel, kinds: list[str], *, by_kind: bool = False) -> dict[str, Rope]:
    types = text.rotary_emb.rope_type
    for name in types.values() if isinstance(types, Mapping) else (types,):
        if name in _GROWING_ROPES:
            raise UndescribedError(f"its rotation is {name}")
    has_axes = hasattr(text.rotary_emb, "mrope_section")
    if has_axes and types != "longrope":  # whose module reads the longest position
        at = torch.zeros(3, 1, 1, dtype=torch.long, device=text.rotary_emb.inv_freq.device)
        try:
            text.rotary_emb(at.float(), at)
        except (RuntimeError, TypeError, LookupError) as exc:
            raise UnusableConfigError(f"its mrope_section is {text.rotary_emb.mrope_section}: {exc}") from exc
    limit = text.config.rope_parameters["original_max_position_embeddings"] if types == "longrope" else None
    turning = [kind for kind in dict.fromkeys(kinds) if kind != _LINEAR]
    return {kind: Rope(text.rotary_emb, kind if by_kind else None, has_axes, limit) for kind in turning}


def _attention(
    module: SelfAttention, kind: str, config: Config, *, form: str | None, norms_values: bool = False, turn: str = "write",
    source: int | None = None, is_read: bool = False, is_wide: bool = False, growth: Growth | None = None,
) -> Attention:  # fmt: skip
    """Return a layer's attention. form: of the norms of queries and keys, None without; turn: of `AttentionShape`."""
    dim, heads = module.head_dim, module.o_proj.in_features // module.head_dim
    joined: Leaf | None = getattr(module, "qkv_proj", None)
    q_norm = None if form is None else Norm(module.q_norm, form)
    k_norm = None if form is None or source is not None else Norm(module.k_norm, form)
    has_rope, has_sinks = getattr(module, "use_rope", True), hasattr(module, "sinks")
    factor = config.rope_parameters.get("partial_rotary_factor", 1.0)  # that of one kind of layers is in another place
    rotary = 0 if not has_rope else None if factor == 1.0 else int(dim * factor)
    shape = AttentionShape(
        heads, heads // module.num_key_value_groups, dim, None if is_wide else form, norms_values, rotary,
        turn=turn, has_sinks=has_sinks, growth=growth,
    )  # fmt: skip
    return Attention(
        module, joined if joined is not None else module.q_proj, getattr(module, "k_proj", None), getattr(module, "v_proj", None),
        module.o_proj, shape, module.scaling, kind if has_rope else None, config.sliding_window if kind == _SLIDING else None,
        source, is_read, q_norm, k_norm, softcap=getattr(module, "attn_logit_softcapping", None), is_joined=joined is not None,
        is_wide=is_wide, growth=growth, has_sinks=has_sinks,
    )  # fmt: skip


# The names of norms in front of attention and behind, in front of the MLP and behind; None where there is none.
_FRONT = ("input_layernorm", None, "post_attention_layernorm", None)
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _layer(
    module: DecoderLayer, mixer: Attention | DeltaNet, form: str, names: Sequence[str | None] = _FRONT, *,
    per_layer: PerLayerInput | None = None, scale: Tensor | None = None, added: float | None = None, experts: Experts | None = None,
) -> Layer:  # fmt: skip
    """Return a layer. names: of its norms."""
    mlp = module.mlp
    norms = [None if name is None else Norm(getattr(module, name), form) for name in names]
    if hasattr(mlp, "experts"):
        shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
        router = "router" if hasattr(mlp, "router") else "gate"
        gate = getattr(mlp, "shared_expert_gate", None)
        experts = Experts(mlp, router, mlp.experts, None if shared is None else _mlp(shared), gate)
    dense = None if hasattr(mlp, "experts") else _mlp(mlp)
    return Layer(module, norms[0], mixer, norms[1], norms[2], dense, norms[3], per_layer, scale, added, experts)


def _mlp(module: FeedForward) -> Mlp:
    joined: Leaf | None = getattr(module, "gate_up_proj", None)
    gate, up = (module.gate_proj, module.up_proj) if joined is None else (joined, None)
    return Mlp(gate, up, module.down_proj)


# The families ----------------------------------------------------------------------------------------------------------


def _llama(
    text: TextModel, *, qk_norms: bool = False, form: str = "after", names: Sequence[str | None] = _FRONT,
    attention: Callable[..., Attention] = _attention, added: float | None = None, ropes: Mapping[str, Rope] | None = None,
    softcap: float | None = None, embedding_scale: float | None = None, divisor: float | None = None,
) -> Decoder:  # fmt: skip
    """Llama, Mistral, Qwen and what is built like them: norms in front of attention and MLP, which round before their weight. form:
    of all norms; names: of a layer's; attention: describes a layer's; added: of a layer; the rest: of the decoder."""
    config, kinds = text.config, _kinds(text)
    layers = []
    for one, kind in zip(text.layers, kinds, strict=True):
        own = attention(one.self_attn, kind, config, form=form if qk_norms else None)
        layers.append(_layer(one, own, form, names, added=added))
    act = _activation(getattr(config, "hidden_activation", None) or config.hidden_act)
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, form), _ropes(text, kinds) if ropes is None else ropes, act,
        softcap, embedding_scale=embedding_scale, divisor=divisor,
    )  # fmt: skip


def _ministral3(text: TextModel) -> Decoder:
    """Ministral 3: Llama with queries that grow with their positions."""
    rope = text.config.rope_parameters
    growth = Growth(float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]))
    return _llama(text, attention=partial(_attention, growth=growth))


def _gemma2(text: TextModel) -> Decoder:
    """Gemma 2: Gemma 3 with one rotation, without norms of heads; attention caps scores."""
    return _llama(text, form="plus_one", names=_SANDWICH, softcap=text.config.final_logit_softcapping)


def _gemma3n(text: TextModel) -> Decoder:
    """Gemma 3n is not described: its layers carry several predictions of the residual from one to the next."""
    raise UndescribedError(
        "its layers keep several residuals (AltUp) and a low-rank branch (Laurel), for which there are no fields"
    )


def _olmo(text: TextModel, *, by_kind: bool = False) -> Decoder:
    """OLMo 2 and 3: norms behind attention and MLP alone, and of all heads together; rotations round once."""
    return _llama(
        text, qk_norms=True, form="inside", names=_BEHIND, attention=partial(_attention, is_wide=True, turn="wide"),
        ropes=_ropes(text, _kinds(text), by_kind=by_kind),
    )  # fmt: skip


def _granite(text: TextModel) -> Decoder:
    """Granite: Llama with factors of embeddings, of what is added to the residual, and of scores."""
    config, added = text.config, text.layers[0].residual_multiplier
    return _llama(text, added=added, embedding_scale=text.embedding_multiplier, divisor=config.logits_scaling)


def _glm4_moe(text: TextModel) -> Decoder:
    """GLM-4.5: Llama with mixtures, and norms of heads in some sizes."""
    return _llama(text, qk_norms=text.layers[0].self_attn.use_qk_norm)


def _qwen3_5(text: TextModel) -> Decoder:
    """Qwen3.5: gated delta layers next to attention, whose queries have a gate each; norms as Gemma 3's, in front alone."""
    config, kinds = text.config, _kinds(text, _LINEAR)
    layers = []
    for one, kind in zip(text.layers, kinds, strict=True):
        if kind == _LINEAR:
            own = one.linear_attn
            shape = DeltaShape(own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim, own.conv_kernel_size)
            mixer: Attention | DeltaNet = DeltaNet(
                own, own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a, own.out_proj, shape
            )
            if own.conv1d.bias is not None or own.activation != "silu":
                raise UndescribedError("its convolutions have a bias, or another activation than silu")
        else:
            plain = _attention(one.self_attn, kind, config, form="plus_one")
            mixer = replace(plain, shape=plain.shape._replace(is_gated=True))
        layers.append(_layer(one, mixer, "plus_one"))
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, "plus_one"), _ropes(text, kinds), _activation(config.hidden_act)
    )


def _gemma3(text: TextModel) -> Decoder:
    """Gemma 3: norms around attention and MLP, whose weights say how much more than 1 they are; one rotation a kind of layer."""
    if getattr(text.config, "use_bidirectional_attention", None):
        raise UndescribedError("its attention is not causal")
    ropes, softcap = _ropes(text, _kinds(text), by_kind=True), text.config.final_logit_softcapping
    return _llama(text, qk_norms=True, form="plus_one", names=_SANDWICH, softcap=softcap, ropes=ropes)


def _gemma4(text: TextModel) -> Decoder:
    """Gemma 4: as Gemma 3 with other roundings, keys and values of earlier layers, an input of each layer's own, and a scale."""
    config, kinds = text.config, _kinds(text)
    if getattr(config, "use_bidirectional_attention", None) == "all":
        raise UndescribedError("its attention is not causal")
    per_layer = config.hidden_size_per_layer_input or 0
    source: dict[str, int] = {}
    layers = []
    for number, (one, kind) in enumerate(zip(text.layers, kinds, strict=True)):
        own = one.self_attn
        if own.is_kv_shared_layer and kind not in source:
            raise UndescribedError(f"layer {number} reads keys and values that no layer before it keeps")
        if not own.is_kv_shared_layer and own.store_full_length_kv:
            source[kind] = number
        attention = _attention(
            own, kind, config, form="inside", norms_values=True, source=source[kind] if own.is_kv_shared_layer else None,
            is_read=own.store_full_length_kv,
        )  # fmt: skip
        extra = None
        if per_layer:
            norm = Norm(one.post_per_layer_input_norm, "inside")
            extra = PerLayerInput(one.per_layer_input_gate, one.per_layer_projection, norm)
        experts = None
        if getattr(config, "enable_moe_block", False):
            names = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
            experts = Experts(one, "router", one.experts, None, None, *(Norm(getattr(one, name), "inside") for name in names))
        layers.append(_layer(one, attention, "inside", _SANDWICH, per_layer=extra, scale=one.layer_scalar, experts=experts))
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, "inside"), _ropes(text, kinds, by_kind=True),
        _activation(config.hidden_activation), config.final_logit_softcapping, per_layer,
    )  # fmt: skip


_IN_PAIRS = partial(_attention, turn="pairs")
DESCRIBE: Mapping[str, Callable[[TextModel], Decoder]] = {
    "Gemma4TextModel": _gemma4, "Gemma3nTextModel": _gemma3n, "Gemma3TextModel": _gemma3, "Gemma2Model": _gemma2,
    "LlamaModel": _llama, "MistralModel": _llama, "Ministral3Model": _ministral3, "Qwen2Model": _llama, "SmolLM3Model": _llama,
    "Phi3Model": _llama, "Qwen2_5_VLTextModel": _llama, "Qwen3Model": partial(_llama, qk_norms=True),
    "Qwen3VLTextModel": partial(_llama, qk_norms=True), "Qwen3_5TextModel": _qwen3_5, "Olmo2Model": _olmo,
    "Olmo3Model": partial(_olmo, by_kind=True), "Glm4Model": partial(_llama, names=_GLM, attention=_IN_PAIRS),
    "GlmModel": partial(_llama, attention=_IN_PAIRS),
    "GraniteModel": _granite, "GptOssModel": partial(_llama, form="inside"), "MixtralModel": _llama,
    "GemmaModel": partial(_llama, form="plus_one"), "Qwen2MoeModel": _llama, "Qwen3MoeModel": partial(_llama, qk_norms=True),
    "Qwen3VLMoeTextModel": partial(_llama, qk_norms=True),
    "Qwen3_5MoeTextModel": _qwen3_5, "Glm4MoeModel": _glm4_moe, "SeedOssModel": _llama,
}  # fmt: skip
