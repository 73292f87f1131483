"""GGUF files written by plain torch and struct: no line of trimtab or of the gguf package.

`model(family, form, folder)` writes a tiny model as llama.cpp's converter does (names, order of rows, changed norms), in ggml's
types, and beside it the checkpoint of the same values unquantized: what stock transformers and PEFT compute with that is the truth.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import pico

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
WIDTH = 256


# The file -------------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(one: Any) -> bytes:
    """Return a key's value with its type: bool, int (uint32), float (float32), str, or a list of one of them."""
    if isinstance(one, list):
        inner = value(one[0])[:4] if one else struct.pack("<I", 4)
        return struct.pack("<I", 9) + inner + struct.pack("<Q", len(one)) + b"".join(value(item)[4:] for item in one)
    if isinstance(one, bool):
        return struct.pack("<I?", 7, one)
    if isinstance(one, int):
        return struct.pack("<II", 4, one) if one < 2**32 else struct.pack("<IQ", 10, one)
    if isinstance(one, float):
        return struct.pack("<If", 6, one)
    return struct.pack("<I", 8) + text(one)


def write(
    path: Path, keys: Mapping[str, Any], tensors: Mapping[str, tuple[str, Tensor, tuple[int, ...]]], *, version: int = 3
) -> Path:
    """Write a file. tensors: name -> (type, its bytes, its shape as torch has it)."""
    align = keys.get("general.alignment", 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(text(name) + value(one) for name, one in keys.items())
    data = b""
    for name, (kind, blocks, shape) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], TYPES[kind], len(data))
        raw = blocks.contiguous().view(torch.uint8).numpy().tobytes()
        data += raw + bytes(-len(raw) % align)
    path.write_bytes(head + bytes(-len(head) % align) + data)
    return path


# Types ----------------------------------------------------------------------------------------------------------------


def _half(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes [n, 2], the values that they hold in float64)."""
    half = values.to(torch.float16)
    return half.view(torch.uint8).view(-1, 2), half.double()


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    raw, d = _half(blocks.abs().amax(1, keepdim=True) / 7)
    q = (blocks / d.clamp(min=1e-9) + 8).round().clamp(0, 15).to(torch.uint8)
    return torch.cat((raw, q[:, :16] | q[:, 16:] << 4), 1), d * (q.double() - 8)


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    raw, d = _half((high - low) / 15)
    raw_low, m = _half(low)
    q = ((blocks - m) / d.clamp(min=1e-9)).round().clamp(0, 15).to(torch.uint8)
    return torch.cat((raw, raw_low, q[:, :16] | q[:, 16:] << 4), 1), (d * q.double()).float().double() + m


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    raw, d = _half(blocks.abs().amax(1, keepdim=True) / 127)
    q = (blocks / d.clamp(min=1e-9)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((raw, q.view(torch.uint8)), 1), d * q.double()


def _k_groups(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the first 16 bytes, q [n, 8, 32], values) of Q4_K and Q5_K: 8 groups with scales and minima of 6 bits."""
    groups, top = blocks.view(-1, 8, 32), (1 << bits) - 1
    low = (-groups.amin(2)).clamp(min=0)
    step = (groups.amax(2) + low) / top
    raw, d = _half(step.amax(1, keepdim=True) / 63)
    raw_min, dmin = _half(low.amax(1, keepdim=True) / 63)
    scale = (step / d.clamp(min=1e-9)).round().clamp(0, 63)
    minimum = (low / dmin.clamp(min=1e-9)).round().clamp(0, 63)
    a, b = d * scale, dmin * minimum
    q = ((groups + b[..., None]) / a.clamp(min=1e-9)[..., None]).round().clamp(0, top)
    s, m = scale.to(torch.uint8), minimum.to(torch.uint8)
    packed = torch.cat(
        (s[:, :4] | (s[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4), 1
    )
    values = (a[..., None] * q).float().double() - b[..., None]
    return torch.cat((raw, raw_min, packed), 1), q.to(torch.uint8), values.view(-1, 256)


def _nibbles(q: Tensor) -> Tensor:
    """Groups 0 and 1 share 32 bytes, then 2 and 3, ..."""
    return (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(-1, 128)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    head, q, values = _k_groups(blocks, 4)
    return torch.cat((head, _nibbles(q)), 1), values


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    head, q, values = _k_groups(blocks, 5)
    high = torch.zeros(len(q), 32, dtype=torch.uint8)
    for group in range(8):
        high |= (q[:, group] >> 4) << group
    return torch.cat((head, high, _nibbles(q)), 1), values


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    groups = blocks.view(-1, 16, 16)
    step = groups.abs().amax(2) / 31
    raw, d = _half(step.amax(1, keepdim=True) / 127)
    scale = (step / d.clamp(min=1e-9)).round().clamp(-128, 127)
    a = (d * scale)[..., None]
    q = (groups / a.clamp(min=1e-9) + 32).round().clamp(0, 63).to(torch.uint8)
    quarters = q.view(-1, 2, 4, 32)
    low = torch.cat((quarters[:, :, 0:2] & 15 | (quarters[:, :, 2:4] & 15) << 4,), 2).reshape(-1, 128)
    high = torch.zeros(len(q), 2, 32, dtype=torch.uint8)
    for place in range(4):
        high |= (quarters[:, :, place] >> 4) << (2 * place)
    return torch.cat((low, high.view(-1, 64), scale.to(torch.int8).view(torch.uint8), raw), 1), (a * (q.double() - 32)).view(
        -1, 256
    )


# type -> (values of a block, [n, values] -> (bytes, values in float64))
PACKERS: dict[str, tuple[int, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "Q4_0": (32, _q4_0), "Q4_1": (32, _q4_1), "Q8_0": (32, _q8_0), "Q4_K": (256, _q4_k), "Q5_K": (256, _q5_k), "Q6_K": (256, _q6_k),
}  # fmt: skip
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def pack(kind: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes of a weight [rows, bytes of a row], the values that they hold in float32)."""
    if kind in PLAIN:
        cast = weight.to(PLAIN[kind]).contiguous()
        return cast.view(torch.uint8).view(*weight.shape[:-1], -1), cast.float()
    block, packer = PACKERS[kind]
    raw, values = packer(weight.double().reshape(-1, block))
    return raw.view(weight.shape[0], -1), values.view(weight.shape).float()


# Models ---------------------------------------------------------------------------------------------------------------

_TEXT = pico._TEXT | {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 8}
NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
}  # fmt: skip
DENSE = NAMES | {"post_attention_layernorm": "ffn_norm"}


def _keys(arch: str, **other: Any) -> dict[str, Any]:
    text_config = _TEXT
    keys = {
        "context_length": text_config["max_position_embeddings"], "embedding_length": WIDTH, "feed_forward_length": 2 * WIDTH,
        "block_count": 2, "attention.head_count": 8, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }  # fmt: skip
    return {"general.architecture": arch, "general.name": f"tiny {arch}"} | {
        f"{arch}.{name}": one for name, one in (keys | other).items() if one is not None
    }


def _turned(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's permutation of Llama's queries and keys."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _llama(name: str, tensor: Tensor) -> Tensor:
    heads = {"q_proj": 8, "k_proj": 2}.get(name.split(".")[-2])
    return tensor if heads is None else _turned(tensor, heads)


def _same(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _plain(values: Tensor) -> Tensor:
    return values


def _config(class_name: str, **other: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, class_name)(**(_TEXT | other))

    return make


_SLIDING = [True, True, False, True, False]
_GEMMA = {
    "num_hidden_layers": 5, "layer_types": ["sliding_attention" if one else "full_attention" for one in _SLIDING],
    "num_kv_shared_layers": 2, "global_head_dim": 64, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 320,
    "use_double_wide_mlp": True, "sliding_window": 8, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_KEYS = _keys(
    "gemma4", block_count=5, feed_forward_length=[512, 512, 512, 1024, 1024],
    **{
        "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32, "attention.value_length_swa": 32,
        "rope.dimension_count": 64, "rope.dimension_count_swa": 32, "rope.freq_base": 1_000_000.0, "rope.freq_base_swa": 10_000.0,
        "attention.sliding_window": 8, "attention.sliding_window_pattern": _SLIDING, "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 256, "final_logit_softcapping": 30.0,
    },
)  # fmt: skip
_GEMMA_NAMES = NAMES | {
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}  # fmt: skip
_QWEN35 = {
    "num_hidden_layers": 4, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_QWEN35_KEYS = _keys(
    "qwen35", block_count=4,
    **{
        "attention.key_length": 32, "attention.value_length": 32, "full_attention_interval": 4, "ssm.conv_kernel": 4,
        "ssm.state_size": 32, "ssm.group_count": 4, "ssm.time_step_rank": 8, "ssm.inner_size": 256,
        "rope.dimension_sections": [3, 3, 2, 0], "rope.dimension_count": 16,
    },
)  # fmt: skip
_QWEN35_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate",
    "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta", "conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "out_proj": "ssm_out", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
}  # fmt: skip


def _tiled(values: Tensor, width: int, side: int) -> Tensor:
    """llama.cpp's order of value heads: those of all key heads in turn, where the model has a key head's together."""
    shape = values.shape
    heads = values.reshape(*shape[:side], 4, 2, width, *shape[side + 1 :])
    return heads.transpose(side, side + 1).reshape(shape)


def _qwen35(name: str, tensor: Tensor) -> Tensor:
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last in ("in_proj_qkv", "conv1d"):
        flat = tensor.reshape(tensor.shape[0], -1)
        return torch.cat((flat[:256], _tiled(flat[256:], 32, 0)))
    if last == "shared_expert_gate":
        return tensor.reshape(-1)
    if last == "in_proj_z":
        return _tiled(tensor, 32, 0)
    if last == "out_proj":
        return _tiled(tensor, 32, 1)
    return _tiled(tensor, 1, 0) if last in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else tensor


# What the converter does to values, and the inverse.
_QWEN35_VALUES = {
    ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight"): (lambda x: x + 1, lambda x: x - 1),
    ("A_log",): (lambda x: -torch.exp(x), lambda x: torch.log(-x)),
}  # fmt: skip
VALUES = {"qwen3_5": _QWEN35_VALUES, "qwen3_5_moe": _QWEN35_VALUES}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}
_QWEN35_EXPERTS = {"count": 4, "used_count": 2, "feed_forward_length": WIDTH, "shared_feed_forward_length": 2 * WIDTH}
_STACK_NAMES = {"experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down_proj": "ffn_down_exps"}
_SHARED_NAMES = (
    _STACK_NAMES
    | {"shared_expert_gate": "ffn_gate_inp_shexp"}
    | {f"shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
)
# family -> (class, config, keys, names, what the converter makes of a tensor)
FAMILIES: dict[str, tuple[str, Callable[[], Any], dict[str, Any], dict[str, str], Callable[[str, Tensor], Tensor]]] = {
    "llama": (
        "LlamaForCausalLM", _config("LlamaConfig", tie_word_embeddings=False),
        _keys("llama", **{"rope.dimension_count": 32, "vocab_size": pico.VOCABULARY}), DENSE, _llama,
    ),
    "mistral": (
        "MistralForCausalLM", _config("MistralConfig", tie_word_embeddings=False, sliding_window=None),
        _keys("llama", **{"rope.dimension_count": 32}) | {"general.name": "Tiny Mistral"}, DENSE, _llama,
    ),
    "qwen3": (
        "Qwen3ForCausalLM", _config("Qwen3Config", tie_word_embeddings=True),
        _keys("qwen3", **{"attention.key_length": 32, "attention.value_length": 32}), DENSE, _same,
    ),
    "qwen2": ("Qwen2ForCausalLM", _config("Qwen2Config", tie_word_embeddings=False), _keys("qwen2"), DENSE, _same),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", _config("Qwen3MoeConfig", **_MOE, tie_word_embeddings=False),
        _keys(
            "qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=WIDTH,
            expert_shared_feed_forward_length=0, **{"attention.key_length": 32, "attention.value_length": 32},
        ),
        _STACK_NAMES | DENSE | {"mlp.gate": "ffn_gate_inp"}, _same,
    ),
    "gemma4": ("Gemma4ForCausalLM", _config("Gemma4TextConfig", **_GEMMA), _GEMMA_KEYS, _GEMMA_NAMES, _same),
    "qwen3_5": ("Qwen3_5ForCausalLM", _config("Qwen3_5TextConfig", **_QWEN35), _QWEN35_KEYS, _QWEN35_NAMES, _qwen35),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        _config("Qwen3_5MoeTextConfig", **_QWEN35 | _MOE | {"shared_expert_intermediate_size": 2 * WIDTH}),
        {name.replace("qwen35.", "qwen35moe."): value for name, value in _QWEN35_KEYS.items() if "feed_forward" not in name}
        | {"general.architecture": "qwen35moe"}
        | {f"qwen35moe.expert_{name}": value for name, value in _QWEN35_EXPERTS.items()},
        _SHARED_NAMES | _QWEN35_NAMES | {"mlp.gate": "ffn_gate_inp"}, _qwen35,
    ),
}  # fmt: skip
# form -> the type of a tensor by its name, as llama.cpp mixes them; the widest type for the rest
FORMS: dict[str, tuple[str, str]] = {
    "q4_k": ("Q4_K", "Q6_K"), "q5_k": ("Q5_K", "Q6_K"), "q8_0": ("Q8_0", "Q8_0"), "q4_0": ("Q4_0", "Q6_K"),
    "q4_1": ("Q4_1", "Q8_0"), "f16": ("F16", "F16"), "bf16": ("BF16", "F32"),
}  # fmt: skip


def own_name(name: str, names: Mapping[str, str]) -> str:
    """Return llama.cpp's name of a model's tensor."""
    path, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
    if name.endswith("layer_scalar") or ".experts." in name:
        end = "weight"
    layer = re.search(r"\.layers\.(\d+)\.", name)
    stem = next((new for old, new in names.items() if path == old or path.endswith(f".{old}")), None)
    assert stem is not None, name
    return f"blk.{layer[1]}.{stem}.{end}".rstrip(".") if layer else f"{stem}.{end}"


def model(family: str, form: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **more: Any) -> tuple[Path, Path]:
    """Write a model of a family; returns (the GGUF file, the folder of the same values in `dtype`). more: other keys."""
    import transformers

    class_name, make_config, keys, names, change = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = getattr(transformers, class_name)._from_config(make_config(), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    usual, wide = FORMS[form]
    tensors: dict[str, tuple[str, Tensor, tuple[int, ...]]] = {}
    with torch.no_grad():
        for name, tensor in list(built.named_parameters()) + [one for one in built.named_buffers() if one[0] in built.state_dict()]:
            tensor.copy_(pico._value(name, tensor, 2, generator, unit_scores=not family.startswith("gemma4")))
            is_wide = any(part in name for part in ("embed", "lm_head", "v_proj", "down_proj"))
            is_matrix = (
                tensor.dim() == 2 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
            ) or ".experts." in name
            kind = (wide if is_wide else usual) if is_matrix else "F32"
            there, back = next((pair for ends, pair in VALUES.get(family, {}).items() if name.endswith(ends)), (_plain, _plain))
            stored = there(change(name, tensor.detach()))
            is_joined = name.endswith("gate_up_proj")  # of experts: two tensors of the file
            owns = [name.replace("gate_up_proj", end) for end in ("gate", "up")[: 1 + is_joined]]
            packed = [pack(kind, one) for one in stored.chunk(len(owns), dim=int(is_joined))]
            for own, (blocks, part) in zip(owns, packed, strict=True):
                tensors[own_name(own, names)] = (kind, blocks, tuple(part.shape))
            values = torch.cat([part for _, part in packed], dim=int(is_joined))
            # The converter's changes move rows and values of their own: the inverse of what it made of the model's tensor.
            tensor.copy_(_undone(name, tensor, back(values), change))
    if family == "gemma4":  # the full layers turn a quarter of a head
        frequencies = torch.tensor([1.0] * 8 + [1e30] * 24)
        tensors["rope_freqs.weight"] = ("F32", frequencies, (32,))
    folder.mkdir(parents=True, exist_ok=True)
    file = write(folder / f"tiny-{form}.gguf", keys | more, tensors)
    built.to(dtype).save_pretrained(folder / "dense")
    return file, folder / "dense"


def _undone(name: str, tensor: Tensor, values: Tensor, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Return the stored values in the model's order: where each value of the model went is asked of the change itself."""
    places = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    went = change(name, places).reshape(-1).long()
    out = torch.empty(tensor.numel())
    out[went] = values.reshape(-1)
    return out.view(tensor.shape)


def split(file: Path, folder: Path) -> list[Path]:
    """Write a file again as a set of two, as llama.cpp's gguf-split does."""
    from trimtab.gguf.header import read_gguf

    header, raw = read_gguf(file), file.read_bytes()
    names = list(header.tensors)
    parts = []
    for number, own in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        keys = header.keys if number == 0 else {"general.architecture": header.architecture}
        tensors = {}
        for name in own:
            one = header.tensors[name]
            data = torch.frombuffer(bytearray(raw[one.start : one.start + one.nbytes]), dtype=torch.uint8)
            tensors[name] = (one.type_name, data, one.shape)
        parts.append(
            write(
                folder / f"set-0000{number + 1}-of-00002.gguf",
                {**keys, "split.no": number, "split.count": 2, "split.tensors.count": len(names)}, tensors,
            )
        )  # fmt: skip
    return parts


# Tokenizers -----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or")]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer_keys() -> dict[str, Any]:
    """Return the keys of a byte-level vocabulary as Qwen's, of 267 tokens and as many unused ones as the models have."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), *("".join(pair) for pair in MERGES), *SPECIAL]
    rest = [f"[PAD{place}]" for place in range(len(tokens), pico.VOCABULARY)]
    types = [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL) + [5] * len(rest)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens + rest,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"), "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def lora(family: str, folder: Path, target: Path, **more: Any) -> Path:
    """Write an adapter of PEFT as llama.cpp's convert_lora_to_gguf.py does. more: other keys."""
    from safetensors.torch import load_file

    _, _, keys, names, change = FAMILIES[family]
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, role = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        values = tensor.float() if role == "lora_A" else change(f"{module}.weight", tensor.float())
        tensors[f"{own_name(f'{module}.weight', names)}.{role.lower()}"] = ("F32", values, tuple(values.shape))
    own = {"general.type": "adapter", "general.architecture": keys["general.architecture"], "adapter.type": "lora"}
    return write(target, own | {"adapter.lora.alpha": float(settings["lora_alpha"])} | more, tensors)
