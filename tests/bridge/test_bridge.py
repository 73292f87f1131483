"""The bridge against stock PEFT on an unsplit base: the same logits, with the placement untouched."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from tests import pico, split, stock
from tests.adapter_files import rewritten
from tests.raised import raised, refused
from trimtab.bridge import check, load_peft
from trimtab.bridge.hooks import execution_device, hooks_of
from trimtab.bridge.inspect_findings import BY_NAME
from trimtab.bridge.load import REFUSED
from trimtab.errors import AdapterError, UpstreamError

transformers.logging.disable_progress_bar()
logging.getLogger("accelerate").setLevel(logging.ERROR)

DEVICE = split.DEVICE
IS_OLDEST = peft.__version__.startswith("0.19.")
# transformers 5.6.2 with PEFT 0.19.1: stock itself cannot adapt models with fused experts (WeightConverter TypeError).
FAMILIES = [
    "gemma4", "qwen3_vl", "mistral3", "llama", *([] if IS_OLDEST else ["mixtral"]),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma3", "gemma3n", "qwen2_5_vl", "qwen3", "gemma4_dense", "gemma4_moe")
    ),
]  # fmt: skip
QUANTS = ["nf4-dq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nf4", "int8"))]
# Left unquantized in a split base; the unsplit reference leaves them out by name.
SKIPPED = [*split.TOWERS, "lm_head"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bridge")


def folder_of(work: Path, family: str = "gemma4") -> Path:
    folder = work / family
    return folder if folder.exists() else pico.build(family, folder)


def adapter_of(work: Path, family: str = "gemma4", name: str = "all", **options: Any) -> Path:
    folder = work / f"{family}-{name}"
    options = {"targets": "all"} | options
    return folder if folder.exists() else pico.adapter(folder_of(work, family), folder, **options)


def inputs_of(model: Any, family: str = "gemma4", *, text_only: bool = False) -> dict[str, torch.Tensor]:
    found = split.to_device(pico.inputs(family, model.config))
    if text_only:
        found["input_ids"] = found["input_ids"].clamp(max=299)
        kept = ("input_ids", "attention_mask")
        return {name: value for name, value in found.items() if name in kept}
    return found


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two routes gave the same logits.

    On the CPU bit for bit: the same kernels run on the same weights, whoever brought them there. On a GPU cuBLAS may take
    another algorithm for a weight at another address; the logits are below 4, where a bf16 step is 2^-6.
    """
    return torch.equal(one, two) if DEVICE == "cpu" else bool((one - two).abs().max() <= 2 * 2**-6)


def bridged(base: Any, adapter: Path, *args: Any, **options: Any) -> Any:
    return stock.without_cpu_repacking(load_peft(base, adapter, *args, **options))


@pytest.fixture(scope="module")
def reference(work: Path) -> dict[str, torch.Tensor]:
    """Logits of stock PEFT on the unsplit gemma4: of the base, two adapters, and the first one merged."""
    base = stock.load_stock(folder_of(work), device=DEVICE)
    given = inputs_of(base)
    found = {"base": stock.logits(base, given)}
    model = stock.with_adapter(base, adapter_of(work))
    found["all"] = stock.logits(model, given)
    model.load_adapter(adapter_of(work, name="other", seed=7), "other")
    model.set_adapter("other")
    found["other"] = stock.logits(model, given)
    model.set_adapter("default")
    found["merged"] = stock.logits(model.merge_and_unload(), given)
    assert not torch.equal(found["base"], found["all"]) and not torch.equal(found["all"], found["other"])
    return found


def device_map(name: str) -> dict[str, Any]:
    return {"cpu": split.towers_off, "disk": lambda: split.towers_off("disk"), "catch-all": split.catch_all}[name]()


# The answer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_as_stock_peft_unsplit(work: Path, family: str) -> None:
    folder, adapter = folder_of(work, family), adapter_of(work, family)
    base = stock.load_stock(folder, device=DEVICE)
    given = inputs_of(base, family)
    plain = stock.logits(base, given)
    expected = stock.logits(stock.with_adapter(base, adapter), given)
    assert not torch.equal(plain, expected)
    unsplit = bridged(stock.load_stock(folder, device=DEVICE), adapter)
    assert isinstance(unsplit, PeftModel) and same(stock.logits(unsplit, given), expected)
    cut = bridged(split.load(folder, split.last_layer_off(folder)), adapter)
    assert same(stock.logits(cut, given), expected)


@pytest.mark.parametrize("quant", QUANTS)
def test_quantized_split_base_answers_as_unsplit(work: Path, quant: str) -> None:
    folder, adapter = folder_of(work), adapter_of(work)
    unsplit = stock.with_adapter(split.load(folder, {"": split.GPU}, quant, skip=SKIPPED), adapter)
    given = inputs_of(unsplit)
    model = bridged(split.load(folder, split.towers_off(), quant), adapter)
    assert same(stock.logits(model, given), stock.logits(unsplit, given))
    assert check(model).class_counts()["Linear8bitLt" if quant == "int8" else "Linear4bit"] == 42


@pytest.mark.parametrize("quant", QUANTS)
def test_quantized_unsplit_base_answers_as_stock(work: Path, quant: str) -> None:
    folder, adapter = folder_of(work), adapter_of(work)
    expected = stock.with_adapter(stock.load_stock(folder, quant, device=DEVICE), adapter)
    given = inputs_of(expected, text_only=True)
    model = bridged(stock.load_stock(folder, quant, device=DEVICE), adapter)
    assert same(stock.logits(model, given), stock.logits(expected, given))


@pytest.mark.parametrize("name", ["disk", "catch-all", pytest.param("cpu", marks=pytest.mark.slow)])
def test_picture_and_sound_on_a_split_base(work: Path, reference: dict[str, torch.Tensor], name: str) -> None:
    model = bridged(split.load(folder_of(work), device_map(name), offload_folder=str(work / "off")), adapter_of(work))
    assert same(stock.logits(model, inputs_of(model)), reference["all"])


def test_generate_gives_the_words_of_stock(work: Path) -> None:
    stock_model = stock.with_adapter(stock.load_stock(folder_of(work), device=DEVICE), adapter_of(work))
    given = inputs_of(stock_model)
    model = bridged(split.load(folder_of(work), split.towers_off()), adapter_of(work))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert model.generate(**given, **options).tolist() == stock_model.generate(**given, **options).tolist()


def test_broad_targets_reach_the_linear_inside_wrappers(work: Path, reference: dict[str, torch.Tensor]) -> None:
    adapter = work / "broad"
    source = adapter_of(work)
    adapter.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    # As the field's adapters: the configuration names the wrappers, the keys the linears inside. Connectors and other
    # plain linears are named too, so that the file is explained whole.
    paths = {key.split(".lora_")[0].removeprefix("base_model.model.") for key in load_file(source / "adapter_model.safetensors")}
    config["target_modules"] = sorted({path.removesuffix(".linear").rpartition(".")[2] for path in paths})
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    before = {file.name: file.read_bytes() for file in adapter.iterdir()}
    with pytest.raises(ValueError, match="Gemma4ClippableLinear"):
        PeftModel.from_pretrained(stock.load_stock(folder_of(work), device=DEVICE), adapter)
    model = bridged(split.load(folder_of(work), split.towers_off()), adapter)
    assert same(stock.logits(model, inputs_of(model)), reference["all"])
    assert {file.name: file.read_bytes() for file in adapter.iterdir()} == before


@pytest.mark.parametrize("saved", [["embed_vision", "patch_embedder"], pytest.param(
    ["vision_tower.patch_embedder.input_proj"], marks=() if IS_OLDEST else pytest.mark.slow,
)])  # fmt: skip
@pytest.mark.parametrize("name", ["cpu", pytest.param("catch-all", marks=pytest.mark.slow)])
def test_modules_to_save_on_offloaded_modules(work: Path, saved: list[str], name: str) -> None:
    if IS_OLDEST and "embed_vision" in saved:
        pytest.skip("PEFT 0.19.1 itself cannot wrap a module that is called with keywords alone")
    adapter = adapter_of(work, name=f"saved{len(saved)}", targets="text", modules_to_save=saved)
    expected = stock.with_adapter(stock.load_stock(folder_of(work), device=DEVICE), adapter)
    model = bridged(split.load(folder_of(work), device_map(name)), adapter)
    given = inputs_of(model)
    assert same(stock.logits(model, given), stock.logits(expected, given))
    assert same(stock.logits(model.merge_and_unload(), given), stock.logits(expected.merge_and_unload(), given))


@pytest.mark.parametrize("autocast, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_adapter_weights_have_the_dtype_of_stock(work: Path, autocast: bool, dtype: torch.dtype) -> None:
    model = bridged(split.load(folder_of(work), split.towers_off()), adapter_of(work), autocast_adapter_dtype=autocast)
    assert {value.dtype for name, value in model.named_parameters() if "lora_" in name} == {dtype}


@pytest.mark.parametrize("name, options", [
    ("patterns", {"rank_pattern": {"q_proj.linear": 8, "up_proj": 2}, "alpha_pattern": {"down_proj": 3}, "rslora": True}),
    ("dora-text", {"dora": True, "targets": "text"}),  # its modules are resident
], ids=["patterns", "dora"])  # fmt: skip
def test_patterns_and_dora_of_a_split_base_answer_as_stock(work: Path, name: str, options: dict[str, Any]) -> None:
    adapter = adapter_of(work, name=name, **options)
    expected = stock.with_adapter(stock.load_stock(folder_of(work), device=DEVICE), adapter)
    model = bridged(split.load(folder_of(work), split.towers_off()), adapter)
    given = inputs_of(model)
    assert same(stock.logits(model, given), stock.logits(expected, given))


# The placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["disk", pytest.param("cpu", marks=pytest.mark.slow), pytest.param("catch-all", marks=pytest.mark.slow)]
)
def test_placement_is_untouched(work: Path, name: str) -> None:
    base = split.load(folder_of(work), device_map(name), offload_folder=str(work / "off"))
    before = split.placement(base)
    assert before["hooks"]
    model = bridged(base, adapter_of(work))
    model.load_adapter(adapter_of(work, name="other", seed=7), "other")
    assert model.hf_device_map is base.hf_device_map
    with_adapters = split.placement(base)
    assert {path.replace(".base_layer", "") for path in with_adapters["hooks"]} == set(before["hooks"])
    assert {path.replace(".base_layer", ""): hook for path, hook in with_adapters["hooks"].items()} == before["hooks"]
    own = {name.replace(".base_layer", ""): is_at for name, is_at in with_adapters["tensors"].items() if "lora_" not in name}
    assert own == before["tensors"] and model.unload() is base and split.placement(base) == before


def test_stock_peft_undoes_the_same_split(work: Path) -> None:
    base = split.load(folder_of(work), split.towers_off())
    before = split.placement(base)
    model = PeftModel.from_pretrained(base, adapter_of(work))
    assert model.hf_device_map != before["map_is"]  # else the test above shows nothing


@pytest.mark.parametrize(
    "name", ["disk", pytest.param("cpu", marks=pytest.mark.slow), pytest.param("catch-all", marks=pytest.mark.slow)]
)
def test_adapter_weights_are_where_their_layer_computes(work: Path, name: str) -> None:
    base = split.load(folder_of(work), device_map(name), offload_folder=str(work / "off"))
    model = bridged(base, adapter_of(work))
    model.load_adapter(adapter_of(work, name="other", seed=7), "other")
    layers = [module for module in model.modules() if hasattr(module, "lora_A") and len(module.lora_A)]
    assert len(layers) == 72 and sum(bool(hooks_of(layer.base_layer)) for layer in layers) == 72
    for layer in layers:
        wanted = execution_device(layer.base_layer)
        for adapter_name in ("default", "other"):
            found = (layer.lora_A[adapter_name].weight.device, layer.lora_B[adapter_name].weight.device)
            assert found == (wanted, wanted)
    assert not check(model).of("lora-on-meta", "lora-wrong-device")


def test_leaves_with_a_device_of_their_own_get_their_input_there(work: Path) -> None:
    """gate_proj and up_proj elsewhere: their product is made there, and down_proj brings it back.

    A map that the stock base answers too. One projection of an attention elsewhere is none: its output meets the others'.
    """
    folder = folder_of(work, "llama")
    away = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    layer = {f"model.layers.0.{name}": split.GPU for name in ("mlp.down_proj", "self_attn", "mlp", "input_layernorm",
                                                              "post_attention_layernorm")}  # fmt: skip
    rest = {f"model.{name}": split.GPU for name in ("layers.0", "embed_tokens", "layers.1", "norm", "rotary_emb")}
    # "cpu:0" is another device than "cpu" by value; on a GPU machine the CPU is.
    other = torch.device("cpu:0" if DEVICE == "cpu" else "cpu")
    placed = dict.fromkeys(away, other) | layer | rest | {"lm_head": split.GPU}
    model = bridged(split.load(folder, placed), adapter_of(work, "llama"))
    inner = model.get_submodule("base_model.model.model.layers.0")
    computed = [[hook.execution_device for hook in hooks_of(getattr(inner.mlp, f"{name}_proj"))] for name in ("gate", "up")]
    assert computed == [[other], [other]]
    assert [hook.execution_device for hook in hooks_of(inner.mlp.down_proj)] == [split.GPU]
    assert not hooks_of(inner.self_attn.k_proj) and hooks_of(inner.self_attn.k_proj.base_layer)
    expected = stock.with_adapter(stock.load_stock(folder, device=DEVICE), adapter_of(work, "llama"))
    given = inputs_of(model, "llama")
    # On a GPU machine two projections are computed by the CPU's kernels, which sum bf16 products in another order.
    tolerance = 0.0 if DEVICE == "cpu" else 0.1
    assert (stock.logits(model, given) - stock.logits(expected, given)).abs().max() <= tolerance


# What a PeftModel does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", pytest.param("catch-all", marks=pytest.mark.slow)])
def test_second_adapter_switching_and_disabling(work: Path, reference: dict[str, torch.Tensor], name: str) -> None:
    model = bridged(split.load(folder_of(work), device_map(name)), adapter_of(work))
    given = inputs_of(model)
    result = model.load_adapter(adapter_of(work, name="other", seed=7), "other")
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert same(stock.logits(model, given), reference["all"])
    model.set_adapter("other")
    assert same(stock.logits(model, given), reference["other"])
    with model.disable_adapter():
        assert same(stock.logits(model, given), reference["base"])
    model.set_adapter("default")
    assert same(stock.logits(model, given), reference["all"])


def test_an_adapter_loaded_after_the_last_was_deleted_keeps_the_placement(work: Path, reference: dict[str, torch.Tensor]) -> None:
    # With one adapter PEFT would dispatch again: it goes by their number, not by whether it is the first.
    base = split.load(folder_of(work), split.towers_off())
    before = dict(base.hf_device_map)
    model = bridged(base, adapter_of(work))
    model.delete_adapter("default")
    model.load_adapter(adapter_of(work, name="other", seed=7), "other")
    model.set_adapter("other")
    assert model.hf_device_map == before and same(stock.logits(model, inputs_of(model)), reference["other"])


@pytest.mark.parametrize("name", ["disk", "catch-all", pytest.param("cpu", marks=pytest.mark.slow)])
def test_merge_keeps_every_module(work: Path, reference: dict[str, torch.Tensor], name: str) -> None:
    base = split.load(folder_of(work), device_map(name), offload_folder=str(work / "off"))
    merged = bridged(base, adapter_of(work)).merge_and_unload()
    assert merged is base and not any("lora" in path for path, _ in merged.named_modules())
    assert same(stock.logits(merged, inputs_of(merged)), reference["merged"])


def test_merge_brings_one_layer_at_a_time(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bridged(split.load(folder_of(work), split.towers_off()), adapter_of(work))
    away: list[int] = []
    merge = peft.tuners.lora.Linear.merge

    def counted(layer: Any, *args: Any, **kwargs: Any) -> None:
        away.append(sum(value.device.type == "meta" for value in base.parameters()))
        merge(layer, *args, **kwargs)

    base = model.base_model.model
    before = sum(value.device.type == "meta" for value in base.parameters())
    monkeypatch.setattr(peft.tuners.lora.Linear, "merge", counted)
    model.merge_and_unload()
    # PEFT alone brings every offloaded module for the first one, the whole model.
    assert set(away) <= {before, before - 1, before - 2} and min(away) < before  # one weight, some with a bias


def test_merge_that_fails_leaves_the_layer_as_it_was(work: Path) -> None:
    model = bridged(split.load(folder_of(work), split.catch_all()), adapter_of(work))
    given = inputs_of(model)
    before = stock.logits(model, given)
    layer = model.get_submodule("base_model.model.model.vision_tower.encoder.layers.0.mlp.up_proj.linear")
    weight = layer.lora_B["default"].weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(safe_merge=True)
    with torch.no_grad():
        weight.copy_(kept)
    assert layer.base_layer.weight.device.type == "meta"
    assert same(stock.logits(model, given), before)


def test_merge_by_layer_keeps_what_a_catch_all_map_would_lose(work: Path, reference: dict[str, torch.Tensor]) -> None:
    model = bridged(split.load(folder_of(work), split.catch_all()), adapter_of(work))
    assert check(model).counts["sequential-hook"] > 0
    given = inputs_of(model)
    model.merge_adapter()
    assert same(stock.logits(model, given), reference["merged"])
    model.unmerge_adapter()
    # Adding and taking away a delta rounds each bf16 weight twice (2^-8 of it): not the bits, but the answer.
    assert (stock.logits(model, given) - reference["all"]).abs().max() < 0.1
    assert (reference["all"] - reference["base"]).abs().max() > 0.5


def test_stock_merge_loses_the_same_modules(work: Path, reference: dict[str, torch.Tensor]) -> None:
    base = split.load(folder_of(work), split.catch_all())
    base.load_adapter(str(adapter_of(work)))
    for module in base.modules():
        if hasattr(module, "lora_A") and isinstance(getattr(module.base_layer, "_hf_hook", None), SequentialHook):
            assert module.get_base_layer().weight.device.type == "meta"
            with peft.tuners.tuners_utils.onload_layer(module):
                assert module.get_base_layer().weight.device.type == "meta"  # nothing was brought: it would be lost
            return
    pytest.fail("no LoRA on a module with a SequentialHook")


def test_merged_model_of_an_explicit_map_is_saved_whole(work: Path, tmp_path: Path) -> None:
    unsplit = stock.with_adapter(stock.load_stock(folder_of(work), device=DEVICE), adapter_of(work)).merge_and_unload()
    merged = bridged(split.load(folder_of(work), split.towers_off()), adapter_of(work)).merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = stock.load_stock(tmp_path).state_dict()
    expected = unsplit.state_dict()
    assert sorted(again) == sorted(expected)
    assert [name for name in again if not torch.equal(again[name], expected[name].cpu())] == []


def test_saved_adapter_comes_back_through_stock_peft(work: Path, tmp_path: Path, reference: dict[str, torch.Tensor]) -> None:
    model = bridged(split.load(folder_of(work), split.catch_all()), adapter_of(work))
    model.save_pretrained(tmp_path)
    source = load_file(adapter_of(work) / "adapter_model.safetensors")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(saved) == sorted(source)
    assert all(torch.equal(saved[key], source[key].to(saved[key].dtype)) for key in saved)
    again = stock.with_adapter(stock.load_stock(folder_of(work), device=DEVICE), tmp_path)
    assert same(stock.logits(again, inputs_of(again)), reference["all"])


def test_target_modules_stay_as_they_were_where_they_say_the_same(work: Path) -> None:
    source = json.loads((adapter_of(work, "llama") / "adapter_config.json").read_text())
    model = bridged(stock.load_stock(folder_of(work, "llama"), device=DEVICE), adapter_of(work, "llama"))
    assert sorted(model.peft_config["default"].target_modules) == sorted(source["target_modules"])
    folder = folder_of(work, "gemma4")
    text = adapter_of(work, name="names", targets="text")
    (text / "adapter_config.json").write_text(
        json.dumps(json.loads((text / "adapter_config.json").read_text()) | {"target_modules": ["q_proj", "up_proj"]})
    )
    # These names would reach towers too, for which the file has no keys, and leave out modules for which it has.
    model = bridged(stock.load_stock(folder, device=DEVICE), text)
    adapted = {path for path, module in model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert len(adapted) == 31 and all("language_model" in path for path in adapted)


def test_trainable_adapter_learns_and_the_base_does_not(work: Path) -> None:
    folder = folder_of(work, "llama")
    model = bridged(split.load(folder, split.last_layer_off(folder)), adapter_of(work, "llama"), is_trainable=True)
    assert model.training
    learns = {name for name, value in model.named_parameters() if value.requires_grad}
    assert learns == {name for name, _ in model.named_parameters() if "lora_" in name}
    frozen = bridged(split.load(folder, split.last_layer_off(folder)), adapter_of(work, "llama"))
    assert not frozen.training and not any(value.requires_grad for value in frozen.parameters())


@pytest.mark.parametrize("name", ["cpu", pytest.param("catch-all", marks=pytest.mark.slow)])
def test_further_adapters_that_peft_makes_have_their_weights(work: Path, name: str) -> None:
    model = bridged(split.load(folder_of(work), device_map(name)), adapter_of(work))
    model.load_adapter(adapter_of(work, name="other", seed=7), "other")
    model.add_adapter("new", peft.LoraConfig(target_modules=r".*vision_tower.*up_proj\.linear"))
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mix", combination_type="linear")
    found = check(model)
    assert not found.of("lora-on-meta", "lora-wrong-device")
    assert {name: facts["modules"] for name, facts in found.adapters.items()} == {"default": 72, "other": 72, "new": 2, "mix": 72}
    expected = stock.with_adapter(stock.load_stock(folder_of(work), device=DEVICE), adapter_of(work))
    expected.load_adapter(adapter_of(work, name="other", seed=7), "other")
    expected.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mix", combination_type="linear")
    given = inputs_of(model)
    for each in (model, expected):
        each.set_adapter("mix")
    assert same(stock.logits(model, given), stock.logits(expected, given))


def test_a_deep_copy_has_its_own_load_adapter(work: Path) -> None:
    model = bridged(stock.load_stock(folder_of(work, "llama"), device=DEVICE), adapter_of(work, "llama"))
    twin = copy.deepcopy(model)
    twin.load_adapter(adapter_of(work, "llama", "second", seed=3), "second")
    assert sorted(twin.peft_config) == ["default", "second"] and sorted(model.peft_config) == ["default"]


# Keys -----------------------------------------------------------------------------------------------------------------


def test_keys_of_kv_shared_layers_are_said_and_change_nothing(
    work: Path, tmp_path: Path, reference: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Layers 3 and 4 of 5 read the keys and values of earlier ones.
        old = {key: value for key, value in tensors.items() if re.search(r"layers\.0\.self_attn\.[kv]_proj\.lora", key)}
        new = {key.replace("layers.0", f"layers.{n}"): value.clone() for key, value in old.items() for n in (3, 4)}
        return tensors | {key: value for key, value in new.items() if "language_model" in key}

    adapter = rewritten(adapter_of(work), tmp_path / "shared", add)
    with caplog.at_level(logging.WARNING, logger="trimtab.bridge"):
        model = bridged(split.load(folder_of(work), split.towers_off()), adapter)
    assert same(stock.logits(model, inputs_of(model)), reference["all"])
    assert [record.args[1] for record in caplog.records if record.name == "trimtab.bridge"] == [8]
    found = check(model)
    assert found.adapters["default"]["no_effect"] == 8 and found.counts["keys-without-effect"] == 8


def test_every_key_that_fits_nothing_is_listed_and_nothing_is_changed(work: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        keys = [key for key in sorted(tensors) if "layers.0.mlp" in key and "language" in key]
        assert len(keys) == 6
        return {key.replace("layers.0.mlp", "layers.77.mlp") if key in keys else key: value for key, value in tensors.items()}

    base = split.load(folder_of(work), split.towers_off())
    before = split.placement(base)
    error = raised(AdapterError, lambda: load_peft(base, rewritten(adapter_of(work), tmp_path / "wrong", spoil)))
    assert sum("layers.77.mlp" in problem for problem in error.problems) == 6
    assert split.placement(base) == before and not any("lora" in path for path, _ in base.named_modules())


def test_half_a_pair_is_refused(work: Path, tmp_path: Path) -> None:
    key = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_B.weight"
    adapter = rewritten(adapter_of(work), tmp_path / "half", lambda tensors: {k: v for k, v in tensors.items() if k != key})
    error = raised(AdapterError, lambda: load_peft(split.load(folder_of(work), split.towers_off()), adapter))
    assert any("lora_B missing" in problem for problem in error.problems)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_before_the_base_is_changed(work: Path, tmp_path: Path, value: float) -> None:
    key = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_B.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[key].view(-1)[3] = value
        return tensors

    base = split.load(folder_of(work), split.towers_off())
    before = split.placement(base)
    error = raised(AdapterError, lambda: load_peft(base, rewritten(adapter_of(work), tmp_path / "spoiled", spoil)))
    assert [problem.split(":")[0] for problem in error.problems] == [key]
    assert split.placement(base) == before and not any("lora" in path for path, _ in base.named_modules())


def test_adapter_of_another_model_is_refused(work: Path) -> None:
    base = split.load(folder_of(work), split.towers_off())
    assert len(raised(AdapterError, lambda: load_peft(base, adapter_of(work, "gemma3"))).problems) > 1


def test_a_full_copy_of_a_base_weight_is_compared_not_written(work: Path, tmp_path: Path) -> None:
    name = "model.language_model.embed_tokens.weight"
    key = f"base_model.model.{name}"
    weight = stock.load_stock(folder_of(work)).state_dict()[name]
    same = rewritten(adapter_of(work), tmp_path / "same", lambda tensors: tensors | {key: weight.clone()})
    load_peft(split.load(folder_of(work), split.towers_off()), same)
    other = rewritten(adapter_of(work), tmp_path / "other", lambda tensors: tensors | {key: weight + 1})
    error = raised(AdapterError, lambda: load_peft(split.load(folder_of(work), split.towers_off()), other))
    assert [problem.split(":")[0] for problem in error.problems] == [key, key][: len(error.problems)]


def test_second_adapter_that_does_not_fit_leaves_the_first(work: Path, tmp_path: Path, reference: dict[str, torch.Tensor]) -> None:
    model = bridged(split.load(folder_of(work), split.towers_off()), adapter_of(work))
    with pytest.raises(AdapterError):
        model.load_adapter(adapter_of(work, "gemma3"), "wrong")
    assert refused(lambda: model.load_adapter(adapter_of(work), "default")).field == "adapter_name"
    assert list(model.peft_config) == ["default"] and same(stock.logits(model, inputs_of(model)), reference["all"])


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_argument_that_would_place_again_or_do_nothing_is_refused(work: Path, name: str) -> None:
    error = refused(lambda: load_peft(nn.Linear(1, 1), adapter_of(work), **{name: True}))
    assert error.field == name and REFUSED[name] in str(error)


def test_unknown_argument_is_refused_with_near_names(work: Path) -> None:
    error = refused(lambda: load_peft(nn.Linear(1, 1), adapter_of(work), is_trainabel=True))
    assert error.field == "is_trainabel" and "is_trainable" in error.allowed


@pytest.mark.parametrize("options", [{"is_trainable": "yes"}, {"adapter_name": ""}, {"adapter_name": "a.b"}])
def test_value_of_a_wrong_kind_is_refused(work: Path, options: dict[str, Any]) -> None:
    error = refused(lambda: load_peft(stock.load_stock(folder_of(work, "llama")), adapter_of(work, "llama"), **options))
    assert error.field in options


# Bases ----------------------------------------------------------------------------------------------------------------


def refusal(base: Any, adapter: Path) -> UpstreamError:
    before = dict(base.named_modules())
    error = raised(UpstreamError, load_peft, base, adapter)
    assert dict(base.named_modules()) == before
    return error


def is_about(error: UpstreamError, kind: str) -> bool:
    found = BY_NAME[kind]
    return kind in str(error) and error.package == found.package and error.hint == found.way_round


def offloaded_4bit(work: Path) -> Any:
    """Return a base whose last layer of 4-bit linears a hook takes away."""
    model = stock.load_stock(folder_of(work, "llama"), "nf4", device=DEVICE)
    for module in (*model.model.layers[-1].self_attn.children(), *model.model.layers[-1].mlp.children()):
        if hasattr(module, "quant_state"):
            module._hf_hook = AlignDevicesHook(split.GPU, offload=True, weights_map={"weight": module.weight.data})
    return model


def weight_without_data(work: Path) -> Any:
    model = stock.load_stock(folder_of(work, "llama"), device=DEVICE)
    model.model.layers[0].mlp.up_proj.to("meta")
    return model


def word_table_away(work: Path) -> Any:
    """Return a base whose word table is offloaded beside embeddings of each layer."""
    return split.load(folder_of(work), split.last_layer_off(folder_of(work)) | {"model.language_model.embed_tokens": "cpu"})


def two_offload_hooks(work: Path) -> Any:
    model = split.load(folder_of(work, "llama"), split.last_layer_off(folder_of(work, "llama")))
    module = model.model.layers[-1].mlp.up_proj
    module._hf_hook = SequentialHook(module._hf_hook, module._hf_hook)
    return model


@pytest.mark.parametrize(("kind", "make", "family", "modules", "path", "detail"), [
    ("quantized-weight-offloaded", offloaded_4bit, "llama", 7, "model.layers.1.self_attn.q_proj", "Linear4bit offloaded to cpu"),
    ("weight-on-meta", weight_without_data, "llama", 1, "model.layers.0.mlp.up_proj", "[128, 64]"),
    ("embedding-offloaded", word_table_away, "gemma4", 1, "model.language_model.embed_tokens", "offloaded to cpu"),
    ("hooks-unknown", two_offload_hooks, "llama", 1, "model.layers.1.mlp.up_proj", "2 hooks"),
])  # fmt: skip
def test_a_base_that_cannot_answer_is_found_and_refused(
    work: Path, kind: str, make: Any, family: str, modules: int, path: str, detail: str
) -> None:
    base = make(work)
    found = check(base).of(kind)
    assert len(found) == modules and found[0].module_path == path and detail in found[0].detail
    error = refusal(base, adapter_of(work, family))
    assert is_about(error, kind) and f"{modules} modules, first {path}" in str(error)
    assert all(bug in str(error) for bug in BY_NAME[kind].bugs)
    if kind == "embedding-offloaded":
        with pytest.raises(RuntimeError):  # the base itself cannot answer
            stock.logits(base, inputs_of(base))


@pytest.mark.skipif(IS_OLDEST, reason="accelerate 1.13.0 raises while it offloads (A3)")
def test_4bit_base_dispatched_by_hand_is_refused(work: Path) -> None:
    model = stock.load_stock(folder_of(work, "llama"), "nf4", device=DEVICE)
    dispatch_model(model, split.last_layer_off(folder_of(work, "llama")), main_device=split.GPU)
    assert is_about(refusal(model, adapter_of(work, "llama")), "quant-state-on-meta")


def test_hooks_that_copy_shared_keys_and_values_are_refused_before_the_release_that_fixed_it(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stock.load_stock(folder_of(work), device=DEVICE)
    add_hook_to_module(model.model.language_model.layers[3], AlignDevicesHook(split.GPU))
    monkeypatch.setattr("trimtab.bridge.inspect_rules.SHARES_SAFELY", (99,))
    error = refusal(model, adapter_of(work))
    assert is_about(error, "shared-kv-copied") and error.fixed_in == "5.23.0"
    monkeypatch.setattr("trimtab.bridge.inspect_rules.SHARES_SAFELY", (5, 0))
    assert isinstance(load_peft(model, adapter_of(work)), PeftModel)


@pytest.mark.parametrize("name", ["cpu", "catch-all"])
def test_dora_on_offloaded_modules_is_refused(work: Path, name: str) -> None:
    adapter = adapter_of(work, name="dora", dora=True)
    error = refusal(split.load(folder_of(work), device_map(name)), adapter)
    assert error.package == "peft" and "DoRA on" in str(error)


def test_base_with_adapters_is_refused(work: Path) -> None:
    model = load_peft(stock.load_stock(folder_of(work, "llama")), adapter_of(work, "llama"))
    error = refused(lambda: load_peft(model, adapter_of(work, "llama")))
    assert error.field == "base_model" and "load_adapter" in error.hint


def test_empty_model_is_refused(work: Path) -> None:
    error = refused(lambda: load_peft(split.empty(folder_of(work, "llama")), adapter_of(work, "llama")))
    assert error.field == "base_model" and "meta" in str(error)


@pytest.mark.parametrize("base", [nn.Linear(4, 4), object()])
def test_what_is_no_model_is_refused(work: Path, base: Any) -> None:
    assert refused(lambda: load_peft(base, adapter_of(work, "llama"))).field == "base_model"
