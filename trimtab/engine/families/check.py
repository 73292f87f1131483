"""Is a family's description right for this model, compared with transformers' modules?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.engine.families.decoder import Attention, Decoder, DeltaNet, Layer, Mlp, Norm, UndescribedError
from trimtab.engine.families.families import describe
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.kernels import attention_and_norms, delta_rule
from trimtab.engine.kernels.embed_and_logits import argmax_logits
from trimtab.engine.kernels.plain_attention import attention_torch, norm_torch, turned_torch
from trimtab.engine.kv.kv_cache import BatchedKVCache, prompt_cache
from trimtab.engine.kv.recurrent import RecurrentLayer
from trimtab.engine.layers.leaves import staged_in
from trimtab.engine.lora.store import EAGER
from trimtab.engine.memory.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.layers.context import EngineContext

TOKENS = 6  # more than a convolution's taps
# The norm of a difference over the norm of what a layer adds; a rounding of the layer's output comes on top. The operations are the
# modules' own in the same order; attention's sums are not.
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_PARTS = ("queries", "keys", "values")
_ACTS = {"silu": {}, "gelu": {"approximate": "none"}, "gelu_tanh": {"approximate": "tanh"}}

_FOUND: WeakKeyDictionary[HFModel, str | None] = WeakKeyDictionary()


def difference(model: EngineContext) -> str | None:
    """Return why a model's steps cannot be computed by its description: there is none, or what of it differs. None if they can."""
    hf_model, store = model.hf_model, model.adapter_store
    if hf_model not in _FOUND:
        selection = store.selection
        try:
            decoder = describe(hf_model)
            store.none()
            # Both sides multiply with the same weights: those that are kept unpacked are not dequantized twice more.
            kept = MatmulTable(None if model.unpacked is None else model.unpacked.matmul())
            with store.applying(EAGER, kept):
                _FOUND[hf_model] = wrong(decoder, hf_model, model.device, model.dtype, model.plan.request.context_tokens)
        except UndescribedError as exc:
            _FOUND[hf_model] = str(exc)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as exc:
            if is_out_of_memory(exc) or "CUDA" in str(exc):
                raise
            _FOUND[hf_model] = f"its description does not fit its modules ({type(exc).__name__}: {exc})"
        finally:
            store.select(selection)
    return _FOUND[hf_model]


@torch.no_grad()
def wrong(decoder: Decoder, hf_model: HFModel, device: torch.device, dtype: torch.dtype, context_tokens: int) -> str | None:
    """Return what of a description differs from the modules, by name, or None. No adapter may be selected. Norms and rotations must
    have the modules' bits, windows their values; each described layer gives the module's output up to roundings, over a few tokens
    in plain torch."""
    return (
        _wrong_widths(decoder)
        or _wrong_norms(decoder, device, dtype)
        or _wrong_ropes(decoder, device, dtype, context_tokens)
        or _wrong_attention(decoder)
        or _wrong_states(decoder, hf_model, device, dtype)
        or _wrong_layers(decoder, hf_model, device, context_tokens)
    )


def _norms(decoder: Decoder) -> dict[str, Norm]:
    found: dict[str, Norm | None] = {"the last norm": decoder.final_norm}
    for number, layer in enumerate(decoder.layers):
        own = decoder.attentions.get(number)
        found |= {
            f"layer {number}'s {name}": norm for name, norm in (
                ("norm before attention", layer.before_attention), ("norm after attention", layer.after_attention),
                ("norm before the MLP", layer.before_mlp), ("norm after the MLP", layer.after_mlp),
                ("norm of the per-layer input", None if layer.per_layer is None else layer.per_layer.norm),
                ("norm of queries", None if own is None else own.q_norm), ("norm of keys", None if own is None else own.k_norm),
            )
        }  # fmt: skip
    return {name: norm for name, norm in found.items() if norm is not None}


def _wrong_widths(decoder: Decoder) -> str | None:
    """Compare the widths of attention's products and norms with those of its heads."""
    for number, own in decoder.attentions.items():
        heads, kv_heads, dim, *_ = own.shape
        q, kv = heads * dim, kv_heads * dim
        parts = [own.norms().q_step * q, *([] if own.source is not None else [kv] * (2 if own.mode == "own" else 1))]
        wanted = [("input of its output", own.o.in_features, q)]
        made = [linear.out_features for linear in own.projections]
        wanted += [("products", sum(made), sum(parts))] if own.is_joined else list(zip(_PARTS, made, parts, strict=False))
        norms = (("norm of queries", own.q_norm, q), ("norm of keys", own.k_norm, kv))
        wanted += [(name, one.weight.numel(), width if own.is_wide else dim) for name, one, width in norms if one is not None]
        for what, found, width in wanted:
            if found != width:
                return f"layer {number}'s {what} has {found} values, its description {width}"
    return None


def _wrong_norms(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(1)
    inputs: dict[int, Tensor] = {}
    for name, norm in _norms(decoder).items():
        width = norm.weight.shape[0]
        if width not in inputs:
            inputs[width] = (torch.randn(4, width, generator=generator) * 2).to(device, dtype)
        if not torch.equal(norm_torch(inputs[width], norm.weight, norm.eps, norm.form), norm.module(inputs[width])):
            return f"{name} has other bits than {norm.form!r} gives"
    return None


def _wrong_ropes(decoder: Decoder, device: torch.device, dtype: torch.dtype, context_tokens: int) -> str | None:
    for kind, rope in decoder.ropes.items():
        most = max(min(context_tokens, rope.limit or context_tokens) - 1, 1)  # `FusedStep.why_not_rows` names a longer context
        positions = torch.tensor([0, 1, 7, most // 3, most], device=device)
        like = torch.empty(len(positions), 1, 1, dtype=dtype, device=device)
        angles = torch.cat((positions[:, None].float() * rope.inv_freq.to(device).float(),) * 2, dim=-1)
        is_wide = any(own.rope == kind and own.shape.turn == "wide" for own in decoder.attentions.values())
        ours = [(one * rope.factor).to(torch.float32 if is_wide else dtype) for one in (angles.cos(), angles.sin())]
        theirs = rope.cos_sin(like, positions[:, None])
        if not all(torch.equal(a, b[:, 0]) for a, b in zip(ours, theirs, strict=True)):
            return f"the rotation of {kind} has other bits"
    return None


def _wrong_attention(decoder: Decoder) -> str | None:
    for number, own in decoder.attentions.items():
        module = own.module
        config = decoder.text.config
        is_sliding = (getattr(config, "layer_types", None) or ["sliding_attention"] * (number + 1))[number] == "sliding_attention"
        window = getattr(module, "sliding_window", getattr(config, "sliding_window", None) if is_sliding else None)
        if own.window != window:
            return f"layer {number} has a window of {window}, its description {own.window}"
        rotary = own.shape.dim if own.shape.rotary is None else own.shape.rotary
        if own.rope is not None and decoder.ropes[own.rope].inv_freq.numel() * 2 != rotary:
            return f"layer {number} turns {decoder.ropes[own.rope].inv_freq.numel() * 2} values of a head"
    return None


def _wrong_states(decoder: Decoder, hf_model: HFModel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Whether the next row of a cache begins with the state of the one that left: of the first recurrent layer."""
    for number, own in list(decoder.deltas.items())[:1]:
        cache = BatchedKVCache(1, TOKENS, device)
        cache.lay_out(prompt_cache(hf_model))
        held = cache.layers[number]
        if not isinstance(held, RecurrentLayer):
            return f"layer {number} keeps a {type(held).__name__}, its description a state"
        held.make(own.shape, dtype, device)
        for state in held.tensors:
            state.fill_(1)
        cache.clear(0)
        if any(bool(state.any()) for state in held.tensors):
            return f"layer {number}'s state is that of a row that has left"
    return None


# A few tokens, in plain torch -------------------------------------------------------------------------------------------


def _wrong_layers(decoder: Decoder, hf_model: HFModel, device: torch.device, context_tokens: int) -> str | None:
    """Compare each layer's output, its attention's, and the scores, with the modules' for the modules' own inputs."""
    ids = torch.arange(3, 3 + TOKENS, device=device)[None] % decoder.text.config.vocab_size
    seen: list[Tensor] = []
    handles = []

    def before(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.append(_first(args or kwargs))

    def behind(_: object, args: object, output: object) -> None:
        seen.append(_first(output))

    config, heads = decoder.text.config, []
    probe = torch.linspace(-100, 100, config.vocab_size, device=device)

    def scored(_: object, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        heads.append(args[0])
        return probe.to(output.dtype).expand_as(output)

    for layer in decoder.layers:
        handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.mixer.module.register_forward_hook(behind))
    handles.append(decoder.text.register_forward_hook(lambda _, args, output: heads.append(output.last_hidden_state)))
    handles.append(hf_model.lm_head.register_forward_hook(scored))
    start = context_tokens - TOKENS if any(own.growth is not None for own in decoder.attentions.values()) else 0
    positions = torch.arange(start, start + TOKENS, device=device)[None]
    try:
        logits = hf_model(input_ids=ids, use_cache=False, **({"position_ids": positions} if start else {})).logits
    finally:
        for handle in handles:
            handle.remove()
    inputs, attentions = [one.clone() for one in seen[::2]], seen[1::2]
    if len(inputs) != len(decoder.layers) or len(attentions) != len(inputs):
        return "its modules run in another order"
    if not torch.equal(h := decoder.embedded(ids), inputs[0]):
        return "the embedding of its tokens differs"
    last, read = heads
    if not torch.equal(last, read):
        return "the head reads something else than the decoder's output"
    if not torch.equal(argmax_logits(decoder.scored(probe.to(last.dtype)[None]), decoder.softcap)[0][0], logits[0, -1].float()):
        return "the scores behind the head have other bits"
    extra = None
    if decoder.per_layer:
        extra = decoder.text.project_per_layer_inputs(h, decoder.text.get_per_layer_inputs(ids, h))
    turns = {kind: rope.cos_sin(h, positions) for kind, rope in decoder.ropes.items()}
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for number, layer in enumerate(decoder.layers):
        given = inputs[number]
        x = _normed(given, layer.before_attention)
        if isinstance(layer.mixer, DeltaNet):
            mixed = _delta(layer.mixer, x)
        else:
            mixed = _attended(layer.mixer, x, turns, kept, number, positions)
        attended = layer.mixer.o(mixed)
        out = _behind(decoder, layer, given, attended, None if extra is None else extra[:, :, number])
        for staged in staged_in(layer.module):  # its module, which would report it, was not called
            staged.leave()
        if differs(attended, attentions[number], torch.zeros_like(given)):
            return f"layer {number}'s attention differs"
        is_last = number + 1 == len(decoder.layers)
        theirs = last if is_last else inputs[number + 1]
        if differs(_normed(out, decoder.final_norm) if is_last else out, theirs, torch.zeros_like(given) if is_last else given):
            return f"layer {number} differs"
    return None


def _first(values: object) -> Tensor:
    """Return the first tensor of a module's arguments or output."""
    if isinstance(values, dict):
        values = values["hidden_states"]
    first = values[0] if isinstance(values, (tuple, list)) else values
    assert isinstance(first, Tensor)
    return first


def differs(ours: Tensor, theirs: Tensor, given: Tensor) -> bool:
    """Whether two outputs differ by more than roundings. given: the part of both that was not computed."""
    error = (ours.double() - theirs.double()).norm()
    added = (theirs.double() - given.double()).norm()
    return bool(error > LARGEST_DIFFERENCE[ours.dtype] * added + torch.finfo(ours.dtype).eps * theirs.double().norm())


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm_torch(x, norm.weight, norm.eps, norm.form)


def _behind(decoder: Decoder, layer: Layer, h: Tensor, attended: Tensor, extra: Tensor | None) -> Tensor:
    """Return a layer's output from its input and its attention's output."""

    def act(x: Tensor) -> Tensor:
        return functional.silu(x) if decoder.activation == "silu" else functional.gelu(x, **_ACTS[decoder.activation])

    def mlp(own: Mlp, x: Tensor) -> Tensor:
        gate, up = own.gate(x).chunk(2, dim=-1) if own.up is None else (own.gate(x), own.up(x))
        return own.down(act(gate) * up)

    added = 1.0 if layer.added is None else layer.added
    h = h + _normed(attended, layer.after_attention) * added
    x = _normed(h, layer.before_mlp)
    own = layer.experts
    if layer.mlp is None:
        assert own is not None
        made = own.module(x[0], *own.chosen(x[0]))[None]
        if own.shared is not None:
            made = attention_and_norms.add_gated(made, mlp(own.shared, x), None if own.shared_gate is None else own.shared_gate(x))
    else:
        made = mlp(layer.mlp, x)
        if own is not None:
            chosen = own.module(_normed(h[0], own.before), *own.chosen(h[0]))
            made = _normed(made, own.after_dense) + _normed(chosen, own.after)[None]
    h = h + _normed(made, layer.after_mlp) * added
    if layer.per_layer is not None and extra is not None:
        given = layer.per_layer
        h = h + _normed(given.projection(act(given.gate(h)) * extra), given.norm)
    return h if layer.scale is None else h * layer.scale


def _attended(
    own: Attention, x: Tensor, turns: Mapping[str, tuple[Tensor, Tensor]], kept: dict[int, tuple[Tensor, Tensor]], number: int,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    gates = None
    made = own.parts([linear(x)[0] for linear in own.projections])
    for wide, part in zip(own.wide_norms, made, strict=False):
        part.copy_(_normed(part, wide))

    def heads(part: Tensor, norm: Norm | None, *, turns_too: bool, step: int = 1) -> Tensor:
        nonlocal gates
        y = part.view(*x.shape[:2], -1, step * own.shape.dim)
        if step > 1:
            gates = torch.sigmoid(y[..., own.shape.dim :]).flatten(2)
        y = _normed(y[..., : own.shape.dim], None if own.is_wide else norm)
        if turns_too and own.rope is not None:
            cos, sin = turns[own.rope]
            y = turned_torch(y[0], cos[0], sin[0], in_pairs=own.shape.turn == "pairs")[None]
        return y.transpose(1, 2)

    queries = heads(made[0], own.q_norm, turns_too=True, step=2 if own.shape.is_gated else 1)
    if own.source is None:
        values = heads(made[-1], None, turns_too=False)
        if own.shape.norms_values:
            values = norm_torch(values, None, own.norms().eps)
        kept[number] = heads(made[1], own.k_norm, turns_too=True), values
    if own.growth is not None:
        queries = queries * own.growth.of(positions, x.dtype)[:, None, :, None]
    keys, values = kept[number if own.source is None else own.source]
    attended = attention_torch(queries, keys, values, None, own.scores).transpose(1, 2).reshape(*x.shape[:2], -1)
    return attended if gates is None else attended * gates


def _delta(own: DeltaNet, x: Tensor) -> Tensor:
    shape, tokens = own.shape, x.shape[1]
    conv = x.new_zeros(1, shape.channels, shape.taps)
    state = torch.zeros(1, shape.value_heads, shape.key_dim, shape.value_dim, device=x.device)
    out = x.new_empty(tokens, own.o.in_features)
    products = own.qkv(x)[0], own.z(x)[0], own.b(x)[0], own.a(x)[0]
    many, step = partial(delta_rule.delta_net, tokens=tokens - 1), delta_rule.delta_net  # the second one from the state
    for part, run in ((slice(tokens - 1), many), (slice(tokens - 1, tokens), step)):
        made = [one[part] for one in products]
        run(tuple(made), shape, own.weights(), conv, state, (out[part], out[part]), out[part])
    return out[None]
