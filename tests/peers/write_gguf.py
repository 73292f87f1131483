"""Write a Llama checkpoint and a LoRA adapter as GGUF files: `python write_gguf.py base CHECKPOINT OUT` or `lora ... OUT`.

Run by the servers' own Python, which has the gguf package: names and layouts are llama.cpp's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"
}  # fmt: skip


def own_name(module: str) -> str:
    """Return llama.cpp's name of model.layers.N.MODULE."""
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def turned(rows: Any, module: str, config: dict[str, Any]) -> Any:
    """Return the rows of a query or key weight in llama.cpp's order: the halves that rope pairs lie beside each other."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(module.rsplit(".", 1)[-1])
    if heads is None:
        return rows
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_base(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tensors = {}
    for name, tensor in load_file(str(checkpoint / "model.safetensors")).items():
        values = tensor.float().numpy()
        module = name.removesuffix(".weight")
        tensors[ENDS.get(name) or f"{own_name(module)}.weight"] = turned(values, module, config)
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_tokenizer(writer, checkpoint, config)
    write(writer, tensors)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    pieces: dict[int, str] = {number: piece for piece, number in tokenizer["model"]["vocab"].items()}
    specials = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    pieces |= specials
    tokens, types = [], []
    for number in range(config["vocab_size"]):
        tokens.append(pieces.get(number, f"[unused{number}]"))
        kind = gguf.TokenType.CONTROL if number in specials else gguf.TokenType.NORMAL
        types.append(kind if number in pieces else gguf.TokenType.UNUSED)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def write_lora(checkpoint: Path, adapter: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = {}
    for name, tensor in load_file(str(adapter / "adapter_model.safetensors")).items():
        module, _, role = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        values = tensor.float().numpy()
        if role == "lora_B":
            values = turned(values, module, config)
        tensors[f"{own_name(module)}.weight.{role.lower()}"] = values
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    write(writer, tensors)


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    {"base": write_base, "lora": write_lora}[what](*map(Path, paths))
