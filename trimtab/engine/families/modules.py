"""Which attributes do families read of transformers' text modules, each of which has some of them?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import Config
    from trimtab.engine.layers.leaves import Leaf

    class RMSNorm(nn.Module):
        weight: Tensor
        eps: float
        variance_epsilon: float  # the other name of eps

    class RotaryEmbedding(nn.Module):
        rope_type: str | dict[str, str]
        inv_freq: Tensor
        mrope_section: Sequence[int]

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
        _apply_gate: Callable[[Tensor], Tensor]

    class FeedForward(nn.Module):  # a gated MLP, or a mixture of experts
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
        config: Config
        embed_tokens: nn.Module
        embed_tokens_per_layer: nn.Module
        layers: Sequence[DecoderLayer]
        norm: RMSNorm
        rotary_emb: RotaryEmbedding
        embedding_multiplier: float
        per_layer_projection_norm: RMSNorm
        per_layer_model_projection_scale: float
        per_layer_input_scale: float
        get_per_layer_inputs: Callable[[Tensor, Tensor], Tensor]  # token ids and their embeddings
        project_per_layer_inputs: Callable[[Tensor, Tensor], Tensor]
