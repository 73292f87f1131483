"""The anatomy: rows, parts, blocks, formats and caches of every family are those of the model that stock loads."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests import pico, stock
from tests.raised import refused
from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader import transformers_model


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return cache(lambda family: pico.build(family, folder / family))


@pytest.fixture(scope="module")
def anatomy(built):
    return cache(lambda family, quant="nf4-dq": anatomy_of(built(family), quant))


@pytest.fixture(scope="module")
def e2b(tmp_path_factory):
    return anatomy_of(pico.e_series("e2b", tmp_path_factory.mktemp("e2b")))


def anatomy_of(folder: Path, quant: str = "nf4-dq", **options: Any) -> Anatomy:
    return transformers_model.read_anatomy(read_checkpoint(folder), quant=quant, dtype="bfloat16", **options)


def config_only(folder: Path, config: Any, architecture: str) -> Anatomy:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return anatomy_of(folder)


def load_reference(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.bfloat16).eval()


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_every_tensor_of_the_model_is_in_one_row_and_ties_are_the_model_s(family, built, anatomy):
    model, rows = load_reference(built(family)), anatomy(family).rows
    expected = {
        path: (tuple(value.shape), str(value.dtype).removeprefix("torch."), is_buffer)
        for named, is_buffer in ((model.named_parameters, False), (model.named_buffers, True))
        for path, value in named(remove_duplicate=False)
    }
    found = [tensor for row in rows for tensor in row.tensors]
    assert len(found) == len(expected)
    assert {tensor.tensor_path: (tensor.shape, tensor.dtype, tensor.is_buffer) for tensor in found} == expected
    assert all(row.tensors or row.wraps for row in rows)
    in_file = {name for tensor in found for name in tensor.sources}
    assert in_file == set(read_checkpoint(built(family)).tensors)
    tied = {tensor.tensor_path: tensor.tied_to for tensor in found if tensor.tied_to}
    assert all(model.get_parameter(path) is model.get_parameter(owner) for path, owner in tied.items())
    assert bool(tied) == (len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())))


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_what_is_quantized_is_what_stock_quantizes(family, built, anatomy):
    reference = stock.load_stock(built(family), "nf4-dq")
    converted = {path for path, module in reference.named_modules() if type(module).__name__ == "Linear4bit"}
    rows = anatomy(family).rows
    assert {row.module_path for row in rows if row.quantized} == converted
    assert all(row.why_unquantized for row in rows if row.kind in ("linear", "experts") and not row.quantized)
    assert not any(row.why_unquantized for row in rows if row.quantized)
    assert not any(row.quantized or row.why_unquantized for row in anatomy(family, "none").rows)


def test_fused_experts_are_named_with_their_reason(anatomy):
    for family in ("mixtral", "qwen3_moe", "gemma4_moe"):
        experts = [row for row in anatomy(family).rows if row.kind == "experts"]
        assert experts and all("packed only on request" in row.why_unquantized for row in experts)
        assert all(any(len(tensor.shape) == 3 for tensor in row.tensors) for row in experts)
    stacked = next(t for row in anatomy("mixtral").rows for t in row.tensors if t.tensor_path.endswith("gate_up_proj"))
    assert len(stacked.sources) == 8


def test_wrappers_name_their_inner_linear(built, anatomy):
    model = load_reference(built("gemma4"))
    wrappers = {path for path, module in model.named_modules() if type(module).__name__ == "Gemma4ClippableLinear"}
    assert {row.module_path: row.wraps for row in anatomy("gemma4").rows if row.wraps} == {
        path: f"{path}.linear" for path in wrappers
    }
    bounds = anatomy("gemma4").by_path()["model.vision_tower.encoder.layers.0.mlp.up_proj"].tensors
    assert {row.tensor_path.rpartition(".")[2] for row in bounds} == {"input_min", "input_max", "output_min", "output_max"}


def test_other_projections_say_why_they_stay(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=320)
    rows = config_only(tmp_path, config, "GPT2LMHeadModel").by_path()
    assert "Conv1D" in rows["transformer.h.0.attn.c_attn"].why_unquantized


def test_keep_unquantized_is_obeyed_and_named(built):
    kept = anatomy_of(built("llama"), keep_unquantized=("*.o_proj", "model.layers.1.mlp"))
    reasons = {row.module_path: row.why_unquantized for row in kept.rows if row.kind == "linear" and not row.quantized}
    assert sorted(reasons) == sorted([
        "lm_head", *(f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)),
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ])  # fmt: skip
    assert all("keep_unquantized" in why for path, why in reasons.items() if path != "lm_head")


def test_a_keep_pattern_that_names_nothing_is_refused_with_near_names(built):
    error = refused(lambda: anatomy_of(built("llama"), keep_unquantized=("model.layers.0.self_attn.out_proj",)))
    assert error.field == "keep_unquantized" and "model.layers.0.self_attn.o_proj" in error.near


@pytest.mark.parametrize(("quant", "label"), [("nf4", "nf4"), ("nf4-dq", "nf4-dq"), ("int8", "int8")])
def test_a_packed_checkpoint_says_what_it_packs(quant, label, built, tmp_path):
    stock.load_stock(built("gemma3"), quant).save_pretrained(tmp_path)
    packed, plain = anatomy_of(tmp_path, label), anatomy_of(built("gemma3"), quant)
    assert packed.prequantized == label
    assert {r.module_path for r in packed.rows if r.quantized} == {r.module_path for r in plain.rows if r.quantized}
    assert packed.by_path()["lm_head"].why_unquantized == "the checkpoint stores it unpacked"
    assert [row.block for row in packed.rows] == [row.block for row in plain.rows]


# Parts and blocks -----------------------------------------------------------------------------------------------------

BLOCKS = {
    "gemma4": {
        "language": ["model.language_model", *(f"model.language_model.layers.{i}" for i in range(5))],
        "vision": ["model.vision_tower", *(f"model.vision_tower.encoder.layers.{i}" for i in range(2))],
        "audio": ["model.audio_tower", *(f"model.audio_tower.layers.{i}" for i in range(2))],
        "connector": ["model.embed_audio", "model.embed_vision"], "table": ["model.language_model.embed_tokens_per_layer"],
        "head": ["lm_head"],
    },
    "gemma3": {
        "language": ["model.language_model", "model.language_model.layers.0", "model.language_model.layers.1"],
        "vision": ["model.vision_tower", *(f"model.vision_tower.encoder.layers.{i}" for i in range(2))],
        "connector": ["model.multi_modal_projector"], "head": ["lm_head"],
    },
    "qwen2_5_vl": {
        "language": ["model.language_model", "model.language_model.layers.0", "model.language_model.layers.1"],
        "vision": ["model.visual", "model.visual.blocks.0", "model.visual.blocks.1"],
        "table": ["model.language_model.embed_tokens"], "head": ["lm_head"],
    },
    "llama": {"language": ["model", "model.layers.0", "model.layers.1"], "table": ["model.embed_tokens"], "head": ["lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize("family", BLOCKS)
def test_parts_and_blocks(family, anatomy):
    found: dict[str, set[str]] = {}
    for row in anatomy(family).rows:
        found.setdefault(row.part, set()).add(row.block)
    assert {part: sorted(blocks) for part, blocks in found.items()} == BLOCKS[family]


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_a_block_is_of_one_part_and_holds_what_lies_under_it(family, anatomy):
    rows = anatomy(family).rows
    parts: dict[str, set[str]] = {}
    for row in rows:
        parts.setdefault(row.block, set()).add(row.part)
        assert row.block in ("", row.module_path) or row.module_path.startswith(f"{row.block}."), row
    assert all(len(found) == 1 for found in parts.values())


def test_a_model_that_is_its_own_language_model_keeps_its_layers(tmp_path):
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Phi4MultimodalConfig(
        **pico._TEXT, vision_config=tower | {"image_size": 28, "patch_size": 14},
        audio_config={"hidden_size": 64, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 64},
    )  # fmt: skip
    parts = {row.block: row.part for row in config_only(tmp_path, config, "Phi4MultimodalForCausalLM").rows}
    assert parts["model.layers.1"] == parts["model"] == "language"
    assert parts["model.embed_tokens_extend.image_embed.img_processor.encoder.layers.0"] == "vision"
    assert parts["model.embed_tokens_extend.audio_embed.encoder.encoders.0"] == "audio"
    assert parts["model.embed_tokens_extend.image_embed.img_projection_up"] == "connector"


# Tables ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_a_gathered_table_is_only_indexed(family, built, anatomy):
    """Every other use of its weight would show: outside its own forward it is a tensor without data."""
    tables = [row.module_path for row in anatomy(family).rows if row.gather_only]
    assert tables == {
        "gemma4": ["model.language_model.embed_tokens_per_layer"], "gemma3n": ["model.embed_tokens_per_layer"],
        "qwen2_5_vl": ["model.language_model.embed_tokens"], "llama": ["model.embed_tokens"], "mixtral": ["model.embed_tokens"],
        "qwen3_moe": ["model.embed_tokens"],
    }.get(family, [])  # fmt: skip
    model = load_reference(built(family))
    inputs = pico.inputs(family, model.config)
    expected = stock.logits(model, inputs)
    for path in tables:
        module = model.get_submodule(path)
        real, hidden = module.weight, nn.Parameter(torch.empty_like(module.weight, device="meta"))
        module.register_forward_pre_hook(lambda module, _, real=real: setattr(module, "weight", real))
        module.register_forward_hook(lambda module, *_, hidden=hidden: setattr(module, "weight", hidden))
        module.weight = hidden
    assert torch.equal(stock.logits(model, inputs), expected)


def test_untied_words_of_an_e_series_model_can_be_gathered(tmp_path):
    config = pico._gemma4()
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    found = config_only(tmp_path, config, "Gemma4ForConditionalGeneration").by_path()
    assert found["model.language_model.embed_tokens"].gather_only and found["model.language_model.embed_tokens"].part == "table"
    assert found["lm_head"].why_unquantized == "the output head"


def test_position_tables_are_never_gathered(anatomy):
    for family in ("gemma3", "qwen3_vl"):
        embeddings = [row for row in anatomy(family).rows if row.kind == "embedding" and row.part == "vision"]
        assert embeddings and not any(row.gather_only for row in embeddings)


# Caches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_caches_are_those_that_a_forward_leaves(family, built, anatomy):
    model = load_reference(built(family))
    with torch.no_grad():
        cache_made = model(**pico.inputs(family, model.config), use_cache=True).past_key_values
    layers = anatomy(family).kv_layers
    storing = [layer for layer in layers if layer.shares is None]
    assert [layer.layer for layer in layers] == list(range(len(layers)))
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    assert len(cache_made.layers) >= len(storing)
    for layer in storing:
        made = cache_made.layers[layer.layer]
        assert made.keys.shape[1] == layer.kv_heads and made.keys.shape[3] == made.values.shape[3] == layer.head_dim
        assert getattr(made, "sliding_window", None) == layer.window
    for layer in layers:
        if layer.shares is not None:
            source = layers[layer.shares]
            assert source.shares is None and (source.window, source.head_dim) == (layer.window, layer.head_dim)


def test_linear_attention_keeps_a_state_instead(tmp_path):
    text = pico._TEXT | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_num_value_heads": 4, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    config = transformers.Qwen3NextConfig(**text, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    found = config_only(tmp_path, config, "Qwen3NextForCausalLM").kv_layers
    # conv state [2 x 2 x 32 + 4 x 32, 4] and recurrent state [4, 32, 32], as the model's cache allocates them
    assert found[0].state_values == 256 * 4 + 4 * 32 * 32
    assert (found[0].kv_heads, found[1].kv_heads, found[1].state_values) == (0, 2, 0)


# Real sizes -----------------------------------------------------------------------------------------------------------


def test_e2b_is_the_field_s_model(e2b):
    """The counts of a multimodal adapter on the released E2B; the parameter count is the class's own."""
    assert sum(layer.shares is not None for layer in e2b.kv_layers) == 20
    assert max(layer.layer for layer in e2b.kv_layers if layer.shares is None and layer.window) == 13
    assert Counter(layer.shares for layer in e2b.kv_layers if layer.shares is not None) == {13: 16, 14: 4}
    assert len(e2b.missing_projections) == 40
    assert e2b.missing_projections[0] == "model.language_model.layers.15.self_attn.k_proj"
    assert (e2b.hidden_size, e2b.vocab_size, e2b.model_type) == (1536, 262144, "gemma4")
    table = e2b.by_path()["model.language_model.embed_tokens_per_layer"]
    assert table.weight is not None and table.weight.shape == (262144, 35 * 256) and table.gather_only
    widths = [e2b.by_path()[f"model.language_model.layers.{i}.mlp.up_proj"].weight.shape[0] for i in (14, 15)]
    assert widths == [6144, 12288]


def test_e4b_s_last_sliding_layer_that_stores(tmp_path):
    found = anatomy_of(pico.e_series("e4b", tmp_path))
    assert sum(layer.shares is not None for layer in found.kv_layers) == 18
    assert max(layer.layer for layer in found.kv_layers if layer.shares is None and layer.window) == 22
    table = found.by_path()["model.language_model.embed_tokens_per_layer"].weight
    assert table is not None and table.nbytes == 5_637_144_576


def test_the_field_s_adapter_on_e2b(e2b, tmp_path):
    file = read_adapter(pico.big_adapter_header(tmp_path))
    assert len(file.tensors) == 786
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"][0] == "q_proj"
    spec = match_adapter(file, e2b)
    assert Counter(target.part for target in spec.targets) == {"language": 205, "vision": 112, "audio": 36}
    assert sum(target.wrapped for target in spec.targets) == 148 and len(spec.no_effect) == 80


@pytest.mark.parametrize("family", ["gemma4", "gemma3", "mixtral", "llama"])
def test_stock_adapters_match(family, built, anatomy, tmp_path):
    spec = match_adapter(read_adapter(pico.adapter(built(family), tmp_path, targets="all")), anatomy(family))
    assert not spec.no_effect and 2 * len(spec.targets) == len(spec.file.tensors)
