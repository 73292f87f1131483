"""Qwen3-8B as a GGUF file of random blocks, mixed as llama.cpp's Q4_K_M, made on the GPU by plain torch."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

TYPES = {"F32": 0, "Q4_K": 12, "Q6_K": 14}
# Bytes of a block of 256 values, and the standard deviation of its values for a scale of 1 and random bits.
_BLOCKS = {"Q4_K": (144, 169.0), "Q6_K": (210, 1367.0)}
_ALIGN = 32
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm",
}  # fmt: skip


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def own_name(name: str) -> tuple[str, int | None]:
    """Return llama.cpp's name of a tensor, and its layer."""
    stem = name.removesuffix(".weight").removeprefix("model.")
    if not stem.startswith("layers."):
        return f"{_NAMES[stem]}.weight", None
    _, layer, path = stem.split(".", 2)
    return f"blk.{layer}.{_NAMES[path]}.weight", int(layer)


def type_of(name: str, layers: int) -> str:
    """Return the type of a matrix: Q6_K where llama.cpp's llama_tensor_get_type takes more bits for Q4_K_M."""
    own, layer = own_name(name)
    if layer is None:
        return "Q6_K" if own == "output.weight" else "Q4_K"
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if more and (".attn_v." in own or ".ffn_down." in own) else "Q4_K"


def blocks(kind: str, rows: int, columns: int, size: float, device: str) -> Any:
    """Return random blocks uint8 [n, bytes] of a weight whose values have the mean 0 and this standard deviation."""
    import torch

    nbytes, spread = _BLOCKS[kind]
    data = torch.randint(0, 256, (rows * columns // 256, nbytes), dtype=torch.uint8, device=device)
    scale = torch.tensor([size / spread, 7.5 * size / spread], dtype=torch.float16).view(torch.uint8).to(device)
    if kind == "Q6_K":
        data[:, 208:210] = scale[:2]
    else:  # each minimum is the middle of its group's values
        data[:, :4], data[:, 8:12] = scale, data[:, 4:8]
        data[:, 12:16] = (data[:, 12:16] & 15) * 17
    return data


def write(config: Any, file: Path, *, device: str = "cuda") -> Path:
    """Write a Qwen3 model of this config with random weights."""
    import torch

    from bench.checkpoints import empty_model

    layers = config.num_hidden_layers
    keys: dict[str, str | int | float] = {
        "general.architecture": "qwen3", "general.name": "random", "qwen3.block_count": layers,
        "qwen3.context_length": config.max_position_embeddings, "qwen3.embedding_length": config.hidden_size,
        "qwen3.feed_forward_length": config.intermediate_size, "qwen3.attention.head_count": config.num_attention_heads,
        "qwen3.attention.head_count_kv": config.num_key_value_heads, "qwen3.attention.key_length": config.head_dim,
        "qwen3.attention.value_length": config.head_dim, "qwen3.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "qwen3.rope.freq_base": 1000000.0, "qwen3.vocab_size": config.vocab_size, "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip
    tensors = [
        (name, tuple(empty.shape), type_of(name, layers) if empty.dim() == 2 else "F32")
        for name, empty in empty_model(config, "qwen3-8b").state_dict().items()
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_text(name) + _value(one) for name, one in keys.items())
    sizes = [shape[0] * 4 if kind == "F32" else shape[0] * shape[1] // 256 * _BLOCKS[kind][0] for _, shape, kind in tensors]
    start = 0
    for (name, shape, kind), nbytes in zip(tensors, sizes, strict=True):
        head += _text(own_name(name)[0]) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], TYPES[kind], start)
        start += nbytes + -nbytes % _ALIGN
    torch.manual_seed(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as out:
        out.write(head + bytes(-len(head) % _ALIGN))
        for (name, shape, kind), nbytes in zip(tensors, sizes, strict=True):
            if kind == "F32":
                # As bench.checkpoints: attention that does not amplify roundings.
                data = torch.full(shape, 1 / 16 if "q_norm" in name else 1.0).view(torch.uint8)
            else:
                rows, columns = shape
                size = 0.02 if "embed_tokens" in name else 0.3 / columns**0.5
                data = blocks(kind, rows, columns, size, device).cpu()
            out.write(data.numpy().tobytes() + bytes(-nbytes % _ALIGN))
    return file
