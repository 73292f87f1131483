"""Which attributes do families read of transformers' text modules, as types?

A module of one family has some of them: `describe` names one that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

from torch import Tensor, nn

from trimtab.engine.formats.hf_types import Config

if TYPE_CHECKING:
    from trimtab.engine.layers.leaves import Leaf


class RopeParameters(TypedDict, total=False):
    """The part of `rope_parameters` that all layers share."""

    partial_rotary_factor: float
    original_max_position_embeddings: int
    llama_4_scaling_beta: float


class TextConfig(Config, Protocol):
    rope_parameters: RopeParameters
    hidden_act: str
    hidden_activation: str
    final_logit_softcapping: float | None
    hidden_size_per_layer_input: int | None
    logits_scaling: float


if TYPE_CHECKING:

    class RMSNorm(nn.Module):
        weight: Tensor
        eps: float
        variance_epsilon: float  # the other name of eps

        def __call__(self, x: Tensor) -> Tensor: ...

    class RotaryEmbedding(nn.Module):
        rope_type: str | dict[str, str]
        inv_freq: Tensor
        mrope_section: Sequence[int]

        def __call__(self, like: Tensor, positions: Tensor, kind: str = ...) -> tuple[Tensor, Tensor]: ...

    class SelfAttention(nn.Module):
        layer_idx: int
        layer_type: str
        head_dim: int
        num_key_value_groups: int
        scaling: float
        sinks: Tensor
        q_proj: Leaf
        o_proj: Leaf
        q_norm: RMSNorm
        k_norm: RMSNorm
        use_qk_norm: bool
        is_kv_shared_layer: bool
        store_full_length_kv: bool

    class LinearAttention(nn.Module):
        num_k_heads: int
        num_v_heads: int
        head_k_dim: int
        head_v_dim: int
        conv_kernel_size: int
        activation: str
        conv1d: nn.Conv1d
        norm: RMSNorm
        A_log: Tensor
        dt_bias: Tensor
        in_proj_qkv: Leaf
        in_proj_z: Leaf
        in_proj_b: Leaf
        in_proj_a: Leaf
        out_proj: Leaf

    class ExpertStacks(nn.Module):
        num_experts: int
        has_gate: bool
        has_bias: bool
        is_transposed: bool

        def _apply_gate(self, gate_up: Tensor) -> Tensor: ...

    class FeedForward(nn.Module):
        """A gated MLP, or a mixture of experts."""

        gate_proj: Leaf
        up_proj: Leaf
        down_proj: Leaf
        experts: ExpertStacks

    class DecoderLayer(nn.Module):
        self_attn: SelfAttention
        linear_attn: LinearAttention
        mlp: FeedForward
        experts: ExpertStacks
        residual_multiplier: float
        per_layer_input_gate: Leaf
        per_layer_projection: Leaf
        post_per_layer_input_norm: RMSNorm
        layer_scalar: Tensor

    class TextModel(nn.Module):
        config: TextConfig
        embed_tokens: nn.Module
        embed_tokens_per_layer: nn.Module
        layers: Sequence[DecoderLayer]
        norm: RMSNorm
        rotary_emb: RotaryEmbedding
        embedding_multiplier: float
        per_layer_projection_norm: RMSNorm
        per_layer_model_projection_scale: float
        per_layer_input_scale: float

        def get_per_layer_inputs(self, ids: Tensor, embeddings: Tensor) -> Tensor: ...

        def project_per_layer_inputs(self, embeddings: Tensor, own: Tensor) -> Tensor: ...
