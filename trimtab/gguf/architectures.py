"""Which architectures of GGUF files are read, and what are their keys and tensors in a checkpoint of transformers?"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trimtab.gguf.header import GgufHeader, GgufTensor, read_bytes, refuse

# (offset, a, b, c, d): rows from `offset` on are stored [a, b, c, d], and the model has them [a, c, b, d].
Order = tuple[int, int, int, int, int]
# Keys of a vocabulary that config.json takes.
TOKEN_IDS = ("bos", "eos", "padding", "eot", "eom")
MOST_FREQUENCIES, MOST_LAYERS, MOST_SIDE = 4096, 512, 2**31
# Of all layers: the largest released model has 48,000.
MOST_EXPERTS = 2**16
HINT = "Use the safetensors files that this file was made from"


def in_order(value: Any, order: Order) -> Any:
    """Return a torch tensor with its rows in the model's order, in memory for one more."""
    offset, *sides = order
    a, b, c, d = sides
    out, rest = value.new_empty(value.shape), value[offset:]
    out[:offset] = value[:offset]
    out[offset:].view(a, c, b, d, *rest.shape[1:]).copy_(rest.reshape(*sides, *rest.shape[1:]).transpose(1, 2))
    return out


@dataclass(frozen=True)
class Mapped:
    """A tensor under the model's name. rows, columns: the order of its rows or columns. change: "minus_one", "log_negate",
    "unsqueeze", "row", "patches", "scalar" or "frames", which undoes a change of the converter, or "whole"; only small tensors have
    one. second: the other part of a tensor of two ("frames")."""

    tensor_name: str
    source: GgufTensor
    rows: Order | None = None
    columns: Order | None = None
    change: str = ""
    second: GgufTensor | None = None

    @property
    def sources(self) -> tuple[GgufTensor, ...]:
        """The tensors of the file that it is made of."""
        return (self.source,) if self.second is None else (self.source, self.second)


@dataclass(frozen=True)
class Architecture:
    """model_types, class_name: of transformers; a file is of the first type, the others compute the same. names: stem of a tensor
    in a layer, or of the model -> the model's path ({} is the prefix of the layer). changes: stem -> change. orders: stem -> (side,
    order) of a config. config: what the keys do not name. experts: stem of a stack [E, D_out, D_in] -> the path of each matrix."""

    model_types: tuple[str, ...]
    class_name: str
    names: Mapping[str, str]
    config: Callable[[Keys, GgufHeader, dict[str, Any]], None]
    fields: Mapping[str, str]
    changes: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, Order]]] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)


class Keys:
    """The keys of an architecture; those that are not taken are refused in the end. hint: what its errors say to do."""

    def __init__(self, header: GgufHeader, hint: str = HINT) -> None:
        self.hint = hint
        self.header, self.prefix = header, f"{header.architecture}."
        self.left = {name.removeprefix(self.prefix): value for name, value in header.keys.items() if name.startswith(self.prefix)}

    def take(self, name: str, kind: type | tuple[type, ...] = int, default: Any = None) -> Any:
        """Return a value of a type. Errors: CheckpointError for another type, and for a missing one without a default."""
        value = self.left.pop(name, default)
        if value is None:
            refuse(self.header.files[0], f"has no {self.prefix}{name}", hint=self.hint)
        is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_right or (isinstance(value, float) and not math.isfinite(value)):
            refuse(self.header.files[0], f"{self.prefix}{name} is {value!r:.60}", hint=self.hint)
        return shortest(value) if isinstance(value, float) else value

    def expect(self, name: str, *wanted: Any) -> None:
        """Take a key that may be missing, and refuse any other value."""
        value = self.left.pop(name, None)
        if value is not None and value not in wanted:
            known = " or ".join(map(repr, wanted))
            refuse(self.header.files[0], f"{self.prefix}{name} is {value!r:.60}, {known} is read", hint=self.hint)

    def of_layers(self, name: str, layers: int) -> list[int]:
        """Return a number of every layer, of a key with one for all or a list."""
        value = self.take(name, (int, list))
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or not all(isinstance(one, int) and one > 0 for one in values):
            refuse(self.header.files[0], f"{self.prefix}{name} has no number for each of {layers} layers", hint=self.hint)
        return values

    def check_all_taken(self) -> None:
        """Refuse the keys that nothing has taken."""
        if self.left:
            shown = ", ".join(f"{self.prefix}{name} = {value!r:.40}" for name, value in list(self.left.items())[:5])
            refuse(self.header.files[0], f"has keys whose meaning is not known here: {shown}", hint=self.hint)


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is this float32: what stood in the original's config.json."""
    raw = struct.pack("<f", value) if abs(value) < 3e38 else b""
    digits = (float(f"{value:.{count}g}") for count in range(1, 10))
    return next((one for one in digits if raw and struct.pack("<f", one) == raw), value)


# Positions ------------------------------------------------------------------------------------------------------------


def _rope(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    keys.expect("rope.scaling.finetuned", True, False)
    for name in ("attn_factor", "yarn_log_multiplier", "yarn_attn_factor", "yarn_beta_slow"):
        keys.expect(f"rope.scaling.{name}", 1.0)
    keys.expect("rope.scaling.yarn_beta_fast", 32.0)
    rope: dict[str, Any] = {"rope_theta": keys.take("rope.freq_base", float, 10000.0), "rope_type": "default"}
    kind = keys.take("rope.scaling.type", str, "none")
    keys.expect("rope.scaling.yarn_ext_factor", 1.0 if kind == "yarn" else 0.0)
    original = keys.take("rope.scaling.original_context_length", int, 0)
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": keys.take("rope.scaling.factor", float)}
        if kind == "yarn" and original:
            rope["original_max_position_embeddings"] = original
    elif kind != "none":
        refuse(header.files[0], f"{keys.prefix}rope.scaling.type is {kind!r:.30}; none, linear and yarn are read", hint=HINT)
    else:
        keys.expect("rope.scaling.factor", 1.0, 0.0)
    if (tensor := header.tensors.get("rope_freqs.weight")) is not None:
        if kind != "none":
            refuse(header.files[0], f"has factors and a scaling of type {kind!r:.30}; one of the two is read", tensor.name, HINT)
        rope |= _llama3(header, frequencies(tensor), rope["rope_theta"], original or 8192)
    config["rope_parameters"] = rope


def frequencies(tensor: GgufTensor) -> tuple[float, ...]:
    """Return the values of a small tensor of float32."""
    if tensor.type_name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MOST_FREQUENCIES:
        refuse(tensor.file, f"is {tensor.type_name} {list(tensor.shape)}, F32 of at most {MOST_FREQUENCIES} is read", tensor.name)
    return struct.unpack(f"<{tensor.shape[0]}f", read_bytes(tensor))


def _llama3(header: GgufHeader, found: tuple[float, ...], theta: float, original: int) -> dict[str, Any]:
    """Return Llama 3's scaling whose factors the file has. Errors: CheckpointError for factors of another scaling."""
    factor, low, high = max(found), 1.0, 4.0
    if not 1 <= min(found) <= factor <= 1e6 or theta < 1 or not 0 < original < MOST_SIDE:
        refuse(header.files[0], "its factors are those of no scaling that is known", "rope_freqs.weight", HINT)
    for place, value in enumerate(found):
        length = 2 * math.pi * theta ** (place / len(found))
        smooth = min(max((original / length - low) / (high - low), 0.0), 1.0)
        if not math.isclose(value, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            refuse(header.files[0], "its factors are those of no scaling that is known", "rope_freqs.weight", HINT)
    return {
        "rope_type": "llama3", "factor": shortest(factor), "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


# Architectures --------------------------------------------------------------------------------------------------------

_FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_DENSE_FIELDS = _FIELDS | {"feed_forward_length": "intermediate_size", "attention.head_count_kv": "num_key_value_heads"}
_NAMES = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm", "attn_q": "{}.self_attn.q_proj",
    "attn_k": "{}.self_attn.k_proj", "attn_v": "{}.self_attn.v_proj", "attn_output": "{}.self_attn.o_proj",
    "attn_norm": "{}.input_layernorm", "ffn_gate": "{}.mlp.gate_proj", "ffn_up": "{}.mlp.up_proj", "ffn_down": "{}.mlp.down_proj",
}  # fmt: skip
_LLAMA_NAMES = _NAMES | {"ffn_norm": "{}.post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "{}.self_attn.q_norm", "attn_k_norm": "{}.self_attn.k_norm"}


def _dense(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    width, turned = keys.take("attention.key_length", int, 0), keys.take("rope.dimension_count", int, 0)
    config["head_dim"] = width or turned or config["hidden_size"] // config["num_attention_heads"]
    if turned not in (0, config["head_dim"]):
        refuse(header.files[0], f"turns {turned} of {config['head_dim']} values of a head (rope.dimension_count)", hint=HINT)
    keys.expect("attention.value_length", config["head_dim"])
    for name in ("expert_count", "expert_used_count"):
        keys.expect(name, 0)
    _rope(keys, header, config)
    config["attention_bias"] = "blk.0.attn_output.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors


def _experts_config(keys: Keys, header: GgufHeader, config: dict[str, Any], **known: float) -> None:
    """Every layer has experts: llama.cpp has no other kind of these architectures, and always norms the weights of the chosen.
    known: the only values of keys that are read."""
    file, layers = header.files[0], config["num_hidden_layers"]
    count, chosen, width = (keys.take(f"expert_{name}") for name in ("count", "used_count", "feed_forward_length"))
    if not 0 < chosen <= count or not 0 < count * layers <= MOST_EXPERTS or not 0 < width <= MOST_SIDE:
        refuse(
            file, f"has {count} experts in each of {layers} layers, {chosen} chosen, {width} wide; at most {MOST_EXPERTS} in all "
            "are read", hint=HINT,
        )  # fmt: skip
    for name, value in ({"weights_norm": True, "weights_scale": 1.0, "gating_func": 1} | known).items():
        keys.expect(f"expert_{name}", value)
    config |= {
        "num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width,
        "intermediate_size": keys.take("feed_forward_length", int, width),
    }  # fmt: skip


def _qwen3moe(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    _experts_config(keys, header, config, shared_count=0, shared_feed_forward_length=0)
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    _dense(keys, header, config)
    del config["mlp_bias"]


def _qwen3vl(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    """Without images its positions along three axes are the same, and it is Qwen3. towers.py reads both keys."""
    for name, kind in (("rope.dimension_sections", list), ("n_deepstack_layers", int)):
        keys.take(name, kind)
    _dense(keys, header, config)


def _llama(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    _dense(keys, header, config)
    # llama.cpp gives Mistral the name of Llama; what they compute is the same.
    if "mistral" in str(header.keys.get("general.name", "")).lower() and not config["attention_bias"] | config["mlp_bias"]:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


def _gemma4(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    file, layers = header.files[0], config["num_hidden_layers"]
    pattern, shared = keys.take("attention.sliding_window_pattern", list), keys.take("attention.shared_kv_layers", int, 0)
    heads, wide = keys.of_layers("attention.head_count_kv", layers), keys.of_layers("feed_forward_length", layers)
    if len(pattern) != layers or not 0 <= shared < layers:
        refuse(file, "attention.sliding_window_pattern or shared_kv_layers do not fit its count of layers", hint=HINT)
    widths = [keys.take(f"attention.key_length{end}") for end in ("", "_swa")]
    for end, width in zip(("", "_swa"), widths, strict=True):
        keys.expect(f"attention.value_length{end}", width)
        keys.expect(f"rope.dimension_count{end}", width)
    own_heads = {kind: {heads[layer] for layer in range(layers) if bool(pattern[layer]) is kind} for kind in (True, False)}
    first = layers - shared
    is_double = any(wide[layer] == 2 * wide[0] for layer in range(first, layers))
    if any(len(one) > 1 for one in own_heads.values()) or wide != [
        wide[0] * (2 if is_double and layer >= first else 1) for layer in range(layers)
    ]:
        refuse(file, "its layers have other sizes than Gemma 4's", hint=HINT)
    sliding = next(iter(own_heads[True] or own_heads[False]))
    full = next(iter(own_heads[False]), sliding)
    for name in ("expert_count", "expert_used_count"):
        keys.expect(name, 0)
    factors = frequencies(header.tensors["rope_freqs.weight"]) if "rope_freqs.weight" in header.tensors else (1.0,)
    turned = sum(value == 1.0 for value in factors)
    if any(value != (1.0 if place < turned else factors[-1]) or value < 1.0 for place, value in enumerate(factors)):
        refuse(file, "its factors are not Gemma 4's", "rope_freqs.weight", HINT)
    lacks_values = any(not pattern[layer] and f"blk.{layer}.attn_v.weight" not in header.tensors for layer in range(first))
    config |= {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in pattern], "num_kv_shared_layers": shared,
        "num_key_value_heads": sliding, "intermediate_size": wide[0], "use_double_wide_mlp": is_double, "head_dim": widths[1],
        "global_head_dim": widths[0], "attention_k_eq_v": lacks_values,
        "num_global_key_value_heads": full if lacks_values else None,
        "sliding_window": keys.take("attention.sliding_window"),
        "hidden_size_per_layer_input": keys.take("embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": header.tensors["per_layer_token_embd.weight"].shape[0]
        if "per_layer_token_embd.weight" in header.tensors else config["vocab_size"],
        "final_logit_softcapping": keys.take("final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": turned / len(factors),
                "rope_theta": keys.take("rope.freq_base", float, 1_000_000.0),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.take("rope.freq_base_swa", float, 10_000.0)},
        },
    }  # fmt: skip
    if full != sliding and not lacks_values:
        refuse(file, "has another number of key heads in full layers, with separate values", hint=HINT)


def _qwen35(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    width, heads = keys.take("attention.key_length"), keys.take("ssm.time_step_rank")
    config["num_hidden_layers"] -= keys.take("nextn_predict_layers", int, 0)
    keys.expect("attention.value_length", width)
    sections, turned = keys.take("rope.dimension_sections", list), keys.take("rope.dimension_count")
    inner = keys.take("ssm.inner_size")
    if "rope_freqs.weight" in header.tensors:
        refuse(header.files[0], "has factors of positions, which Qwen3.5 does not have", "rope_freqs.weight", HINT)
    if not width or not heads or inner % heads:
        refuse(header.files[0], f"{keys.prefix}ssm.inner_size is {inner} for {heads} heads", hint=HINT)
    config |= {
        "head_dim": width, "full_attention_interval": keys.take("full_attention_interval"),
        "linear_conv_kernel_dim": keys.take("ssm.conv_kernel"), "linear_key_head_dim": keys.take("ssm.state_size"),
        "linear_num_key_heads": keys.take("ssm.group_count"), "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": keys.take("rope.freq_base", float), "partial_rotary_factor": turned / width,
            "mrope_section": [one for one in sections if one], "mrope_interleaved": True,
        },
    }  # fmt: skip


def _qwen35moe(keys: Keys, header: GgufHeader, config: dict[str, Any]) -> None:
    _qwen35(keys, header, config)
    _experts_config(keys, header, config, shared_count=1)
    config["shared_expert_intermediate_size"] = keys.take("expert_shared_feed_forward_length")


def _halves(heads: str, config: Mapping[str, Any]) -> tuple[str, Order]:
    """The two halves that rope turns lie next to each other in the file."""
    return "rows", (0, config[heads], config["head_dim"] // 2, 2, 1)


def _tiled(side: str, config: Mapping[str, Any], *, width: bool = True, keys: bool = False) -> tuple[str, Order]:
    """Value heads stand tiled in the file and by their key head in the model. keys: whether queries and keys stand before."""
    count, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    offset = 2 * config["linear_key_head_dim"] * count if keys else 0
    return side, (offset, 1, values // max(count, 1), count, config["linear_value_head_dim"] if width else 1)


_NORMS = ("output_norm", "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
_MOE_FIELDS = _FIELDS | {"attention.head_count_kv": "num_key_value_heads"}
_EXPERTS = {f"ffn_{name}_exps": f"{{}}.mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_QWEN35 = Architecture(
    ("qwen3_5_text", "qwen3_5"), "Qwen3_5ForCausalLM",
    _NAMES | _QK_NORMS | {
        "post_attention_norm": "{}.post_attention_layernorm", "attn_qkv": "{}.linear_attn.in_proj_qkv",
        "attn_gate": "{}.linear_attn.in_proj_z", "ssm_alpha": "{}.linear_attn.in_proj_a",
        "ssm_beta": "{}.linear_attn.in_proj_b", "ssm_conv1d": "{}.linear_attn.conv1d", "ssm_norm": "{}.linear_attn.norm",
        "ssm_out": "{}.linear_attn.out_proj", "ssm_a": "{}.linear_attn.A_log", "ssm_dt": "{}.linear_attn.dt_bias",
    },
    _qwen35, _DENSE_FIELDS,
    changes=dict.fromkeys(_NORMS, "minus_one") | {"ssm_a": "log_negate", "ssm_conv1d": "unsqueeze"},
    orders={
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), partial(_tiled, "rows", keys=True)), "attn_gate": partial(_tiled, "rows"),
        **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), partial(_tiled, "rows", width=False)),
        "ssm_out": partial(_tiled, "columns"),
    },
)  # fmt: skip
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        ("llama", "mistral"), "LlamaForCausalLM", _LLAMA_NAMES, _llama, _DENSE_FIELDS,
        orders={"attn_q": partial(_halves, "num_attention_heads"), "attn_k": partial(_halves, "num_key_value_heads")},
    ),
    "qwen2": Architecture(("qwen2",), "Qwen2ForCausalLM", _LLAMA_NAMES, _dense, _DENSE_FIELDS),
    "qwen3": Architecture(("qwen3",), "Qwen3ForCausalLM", _LLAMA_NAMES | _QK_NORMS, _dense, _DENSE_FIELDS),
    "qwen3vl": Architecture(("qwen3", "qwen3_vl"), "Qwen3ForCausalLM", _LLAMA_NAMES | _QK_NORMS, _qwen3vl, _DENSE_FIELDS),
    "qwen3moe": Architecture(
        ("qwen3_moe",), "Qwen3MoeForCausalLM",
        {stem: path for stem, path in _LLAMA_NAMES.items() if ".mlp." not in path}
        | _QK_NORMS | {"ffn_gate_inp": "{}.mlp.gate"},
        _qwen3moe, _MOE_FIELDS, experts=_EXPERTS,
    ),
    "gemma4": Architecture(
        ("gemma4_text", "gemma4"), "Gemma4ForCausalLM",
        _NAMES | _QK_NORMS | {
            "ffn_norm": "{}.pre_feedforward_layernorm", "post_attention_norm": "{}.post_attention_layernorm",
            "post_ffw_norm": "{}.post_feedforward_layernorm", "layer_output_scale": "{}.layer_scalar",
            "inp_gate": "{}.per_layer_input_gate", "proj": "{}.per_layer_projection", "post_norm": "{}.post_per_layer_input_norm",
            "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        _gemma4, _FIELDS,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35, model_types=("qwen3_5_moe_text", "qwen3_5_moe"), class_name="Qwen3_5MoeForCausalLM",
        names={stem: path for stem, path in _QWEN35.names.items() if ".mlp." not in path}
        | {"ffn_gate_inp": "{}.mlp.gate", "ffn_gate_inp_shexp": "{}.mlp.shared_expert_gate"}
        | {f"ffn_{name}_shexp": f"{{}}.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        config=_qwen35moe, fields=_MOE_FIELDS, changes={**_QWEN35.changes, "ffn_gate_inp_shexp": "row"}, experts=_EXPERTS,
    ),
}  # fmt: skip
# Tensors whose whole name is the parameter's in the model.
_BARE = ("layer_output_scale", "ssm_a", "ssm_dt")
# Tensors that the config is made of.
_IN_CONFIG = ("rope_freqs.weight",)
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)", re.ASCII)


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return config.json of a file. Errors: CheckpointError for an architecture, a key or a value that is not read. Source:
    llama.cpp, convert_hf_to_gguf.py; transformers 5.23.0, integrations/gguf/gguf_config_mapping.py, gguf_conversion_mapping.py, and
    modeling_gguf_pytorch_utils.py."""
    file, kind = header.files[0], header.keys.get("general.type", "model")
    if kind == "adapter":
        refuse(file, "is an adapter in GGUF, not a model", hint="Give its base model as the model")
    if kind == "mmproj" or header.architecture == "clip":
        refuse(
            file, "has the towers of a model (mmproj), not its language model",
            hint="Give the file of the language model, or for images a folder with both files",
        )  # fmt: skip
    made = ARCHITECTURES.get(header.architecture)
    if made is None:
        refuse(file, f"is of the architecture {header.architecture!r:.60}; {', '.join(ARCHITECTURES)} are read", hint=HINT)
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        refuse(file, "has no token_embd.weight", hint=HINT)
    _check_vocabulary(header, table.shape[0])
    keys = Keys(header)
    keys.expect("vocab_size", table.shape[0])
    keys.expect("attention.causal", True)
    keys.take("pooling_type", int, 0)  # of what the decoder returns: a call names its own
    config: dict[str, Any] = {
        "model_type": made.model_types[0], "architectures": [made.class_name], "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors, "dtype": "bfloat16",
    }  # fmt: skip
    for name, its_field in made.fields.items():
        config[its_field] = value = keys.take(name, float if "epsilon" in name else int)
        most = MOST_LAYERS if name == "block_count" else MOST_SIDE
        if isinstance(value, int) and not 0 < value <= most:
            refuse(file, f"{keys.prefix}{name} is {value}, 1 to {most} is read", hint=HINT)
    made.config(keys, header, config)
    keys.expect("rope.scaling.type", "none")
    keys.expect("tensor_data_layout", "Meta AI original pth")
    keys.check_all_taken()
    return config | {"quantization_config": {"quant_method": "gguf"}}


def _check_vocabulary(header: GgufHeader, rows: int) -> None:
    """Refuse a vocabulary of another size than the table, and ids that are in neither."""
    for name in ("tokens", "token_type", "scores"):
        values = header.keys.get(f"tokenizer.ggml.{name}")
        if values is not None and (not isinstance(values, list) or len(values) != rows):
            count = len(values) if isinstance(values, list) else repr(values)[:40]
            refuse(header.files[0], f"tokenizer.ggml.{name} has {count} entries, token_embd.weight {rows} rows", hint=HINT)
    for name in TOKEN_IDS:
        value = header.keys.get(f"tokenizer.ggml.{name}_token_id", 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < rows:
            refuse(header.files[0], f"tokenizer.ggml.{name}_token_id is {value!r:.40}, 0 to {rows - 1} is read", hint=HINT)


def tensors_of(header: GgufHeader, config: Mapping[str, Any]) -> list[Mapped]:
    """Return the tensors by the model's names. Errors: CheckpointError with the tensors whose meaning is not known."""
    made, layers = ARCHITECTURES[header.architecture], config["num_hidden_layers"]
    mapped: list[Mapped] = []
    lost: list[str] = []
    for name, tensor in header.tensors.items():
        layer = _LAYER.fullmatch(name)
        stem, _, end = (layer[2] if layer else name).partition(".")
        path = made.names.get(stem)
        is_known = path is not None and ("{}" in path) is (layer is not None) and end in ("weight", "bias", "")
        if name in _IN_CONFIG or (layer and int(layer[1]) >= layers and "full_attention_interval" in config):
            continue  # the last are a second head for drafts, which transformers has no module for
        if stem in made.experts and end == "weight" and layer and int(layer[1]) < layers:
            mapped += _experts(tensor, config["num_experts"], made.experts[stem].replace("{}", f"model.layers.{layer[1]}", 1))
            continue
        if path is None or not is_known or (layer and int(layer[1]) >= layers):
            lost.append(name)
            continue
        path = path.format(f"model.layers.{layer[1]}" if layer else "")
        side, order = made.orders[stem](config) if stem in made.orders else ("", None)
        if order is not None:
            _check_order(tensor, side, order)
        mapped.append(
            Mapped(
                path if stem in _BARE else f"{path}.{end}", tensor, rows=order if side == "rows" else None,
                columns=order if side == "columns" else None, change=made.changes.get(stem, ""),
            )
        )  # fmt: skip
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        refuse(header.files[0], f"has tensors whose meaning is not known here: {shown}", hint=HINT)
    return mapped


def _experts(tensor: GgufTensor, count: int, path: str) -> Iterator[Mapped]:
    """Yield the matrix of each expert of a stack: its blocks are side by side in the file. path: {} is the expert's number."""
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        refuse(tensor.file, f"has the shape {list(tensor.shape)}, matrices of {count} experts are needed", tensor.name, HINT)
    nbytes = tensor.nbytes // count
    for expert in range(count):
        own = replace(tensor, shape=tensor.shape[1:], start=tensor.start + expert * nbytes, nbytes=nbytes)
        yield Mapped(f"{path.format(expert)}.weight", own)


def _check_order(tensor: GgufTensor, side: str, order: Order) -> None:
    offset, *sides = order
    have = tensor.shape[0 if side == "rows" else -1] - offset
    if min(sides) < 1 or math.prod(sides) != have:
        refuse(tensor.file, f"has the shape {list(tensor.shape)}, its {side} do not fit the heads of the model", tensor.name, HINT)
