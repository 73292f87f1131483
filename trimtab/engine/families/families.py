"""Which families are described, and what is each one's description? One function a family, one table.

    decoder = describe(hf_model)   # Errors: UndescribedError

A description is made of the modules' attributes: one that is missing in a release of transformers is named in the error, and the
model's own modules compute its steps. Source: transformers 5.6.2 to 5.23.0, models/*/modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.engine.families.decoder import Attention, Decoder, DeltaNet, Layer, Norm, PerLayerInput, Rope, UndescribedError
from trimtab.engine.kernels.attention_and_norms import AttentionShape
from trimtab.engine.kernels.delta_rule import DeltaShape
from trimtab.engine.layers.linear import ResidentLeaf
from trimtab.formats.record import stored_format

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
# Kinds of rotation whose angles depend on the length of the text: a captured step has one set of them.
_GROWING_ROPES = ("dynamic", "longrope")
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def describe(hf_model: HFModel) -> Decoder:
    """Return the description of a model's text decoder. Errors: UndescribedError."""
    for module in hf_model.modules():
        if (make := DESCRIBE.get(type(module).__name__)) is not None:
            try:
                return replace(make(module), head=_packed_head(getattr(hf_model, "lm_head", None)))
            except AttributeError as exc:
                raise UndescribedError(f"its {type(exc.obj).__name__} has no {exc.name}") from exc
    raise UndescribedError(f"there is no description of {type(hf_model).__name__}")


def _packed_head(head: object) -> ResidentLeaf | None:
    """Return a model's head where a file's own format is its weight's and kernels read it."""
    if not isinstance(head, ResidentLeaf):
        return None
    form = stored_format(head.quant_kind)
    return head if form.is_own and form.step_layout is not None else None


def why_not(hf_model: HFModel) -> str | None:
    """Return why there is no description of this model, None if there is one."""
    try:
        describe(hf_model)
    except UndescribedError as exc:
        return str(exc)
    return None


# What families have in common -----------------------------------------------------------------------------------------


def _kinds(text: Any, *more: str) -> list[str]:
    config = text.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [_SLIDING if getattr(config, "sliding_window", None) is not None else _FULL] * len(text.layers)
    if strange := sorted(set(kinds) - {_FULL, _SLIDING, *more}):
        raise UndescribedError(f"its layers are of kinds {strange}")
    return list(kinds)


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UndescribedError(f"its activation is {name}")
    return ACTIVATIONS[name]


def _ropes(text: Any, kinds: list[str], *, by_kind: bool = False) -> dict[str, Rope]:
    types = text.rotary_emb.rope_type
    for name in types.values() if isinstance(types, Mapping) else (types,):
        if name in _GROWING_ROPES:
            raise UndescribedError(f"its rotation is {name}")
    has_axes = hasattr(text.rotary_emb, "mrope_section")
    turning = [kind for kind in dict.fromkeys(kinds) if kind != _LINEAR]
    return {kind: Rope(text.rotary_emb, kind if by_kind else None, has_axes) for kind in turning}


def _attention(module: Any, kind: str, config: Any, *, form: str | None, norms_values: bool = False, **more: Any) -> Attention:
    """Return a layer's attention. form: of the norms of queries and keys, None without."""
    if getattr(module, "attn_logit_softcapping", None) is not None and config._attn_implementation != "sdpa":
        raise UndescribedError("its attention caps scores")  # torch's sdpa does not
    dim, heads = module.head_dim, module.q_proj.out_features // module.head_dim
    norms: dict[str, Any] = {}
    if form is not None:
        norms = {
            "q_norm": Norm(module.q_norm, form),
            "k_norm": None if more.get("source") is not None else Norm(module.k_norm, form),
        }
    has_rope = getattr(module, "use_rope", True)
    return Attention(
        module, module.q_proj, getattr(module, "k_proj", None), getattr(module, "v_proj", None), module.o_proj,
        AttentionShape(heads, heads // module.num_key_value_groups, dim, form, norms_values, None if has_rope else 0),
        module.scaling, kind if has_rope else None, window=config.sliding_window if kind == _SLIDING else None, **norms, **more,
    )  # fmt: skip


def _layer(module: Any, mixer: Attention | DeltaNet, form: str, *, is_sandwich: bool, **more: Any) -> Layer:
    """Return a layer. is_sandwich: whether there are norms behind attention and MLP too."""
    mlp = module.mlp
    behind = module.post_attention_layernorm
    names = (module.pre_feedforward_layernorm, behind, module.post_feedforward_layernorm) if is_sandwich else (behind, None, None)
    before_mlp, *after = (None if one is None else Norm(one, form) for one in names)
    assert before_mlp is not None
    return Layer(
        module, Norm(module.input_layernorm, form), mixer, after[0], before_mlp, mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        after[1], **more,
    )  # fmt: skip


# The families ----------------------------------------------------------------------------------------------------------


def _llama(text: Any, *, qk_norms: bool = False) -> Decoder:
    """Llama, Mistral, Qwen and what is built like them: norms in front of attention and MLP, which round before their weight."""
    config, kinds = text.config, _kinds(text)
    layers = (
        _layer(one, _attention(one.self_attn, kind, config, form="after" if qk_norms else None), "after", is_sandwich=False)
        for one, kind in zip(text.layers, kinds, strict=True)
    )
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, "after"), _ropes(text, kinds), _activation(config.hidden_act)
    )


def _qwen3_5(text: Any) -> Decoder:
    """Qwen3.5: gated delta layers next to attention, whose queries have a gate each; norms as Gemma 3's, in front alone."""
    config, kinds = text.config, _kinds(text, _LINEAR)
    layers = []
    for one, kind in zip(text.layers, kinds, strict=True):
        if kind == _LINEAR:
            own = one.linear_attn
            shape = DeltaShape(own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim, own.conv_kernel_size)
            mixer: Any = DeltaNet(own, own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a, own.out_proj, shape)
            if own.conv1d.bias is not None or own.activation != "silu":
                raise UndescribedError("its convolutions have a bias, or another activation than silu")
        else:
            plain, heads = _attention(one.self_attn, kind, config, form="plus_one"), one.self_attn.o_proj.in_features
            rotary = int(plain.shape.dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
            heads //= plain.shape.dim
            kv_heads = heads // one.self_attn.num_key_value_groups
            mixer = replace(plain, shape=AttentionShape(heads, kv_heads, plain.shape.dim, "plus_one", False, rotary, True))
        layers.append(_layer(one, mixer, "plus_one", is_sandwich=False))
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, "plus_one"), _ropes(text, kinds), _activation(config.hidden_act)
    )


def _gemma3(text: Any) -> Decoder:
    """Gemma 3: norms around attention and MLP, whose weights say how much more than 1 they are; one rotation a kind of layer."""
    config, kinds = text.config, _kinds(text)
    if getattr(config, "use_bidirectional_attention", None):
        raise UndescribedError("its attention is not causal")
    layers = (
        _layer(one, _attention(one.self_attn, kind, config, form="plus_one"), "plus_one", is_sandwich=True)
        for one, kind in zip(text.layers, kinds, strict=True)
    )
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, "plus_one"), _ropes(text, kinds, by_kind=True),
        _activation(config.hidden_activation), config.final_logit_softcapping,
    )  # fmt: skip


def _gemma4(text: Any) -> Decoder:
    """Gemma 4: as Gemma 3 with other roundings, keys and values of earlier layers, an input of each layer's own, and a scale."""
    config, kinds = text.config, _kinds(text)
    if getattr(config, "enable_moe_block", False):
        raise UndescribedError("its layers have experts")
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
        shared = {"source": source[kind] if own.is_kv_shared_layer else None, "is_read": own.store_full_length_kv}
        attention = _attention(own, kind, config, form="inside", norms_values=True, **shared)
        extra = None
        if per_layer:
            norm = Norm(one.post_per_layer_input_norm, "inside")
            extra = PerLayerInput(one.per_layer_input_gate, one.per_layer_projection, norm)
        layers.append(_layer(one, attention, "inside", is_sandwich=True, per_layer=extra, scale=one.layer_scalar))
    return Decoder(
        text, text.embed_tokens, tuple(layers), Norm(text.norm, "inside"), _ropes(text, kinds, by_kind=True),
        _activation(config.hidden_activation), config.final_logit_softcapping, per_layer,
    )  # fmt: skip


DESCRIBE: Mapping[str, Callable[[Any], Decoder]] = {
    "Gemma4TextModel": _gemma4, "Gemma3TextModel": _gemma3, "LlamaModel": _llama, "MistralModel": _llama, "Qwen2Model": _llama,
    "SmolLM3Model": _llama, "Qwen2_5_VLTextModel": _llama, "Qwen3Model": partial(_llama, qk_norms=True),
    "Qwen3VLTextModel": partial(_llama, qk_norms=True), "Qwen3_5TextModel": _qwen3_5,
}  # fmt: skip
