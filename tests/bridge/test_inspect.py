"""What the scan says of live models: one model with the defect and one without for each kind of finding."""

from __future__ import annotations

import ast
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

import trimtab
from tests import pico, split, stock
from tests.adapter_files import rewritten
from tests.bridge.test_bridge import adapter_of, folder_of
from tests.raised import raised, refused
from trimtab.bridge import row_scales
from trimtab.bridge.inspect import Scan, scan, scan_text
from trimtab.bridge.inspect_findings import BY_NAME, KINDS, Finding
from trimtab.bridge.inspect_rules import View
from trimtab.errors import AdapterError

transformers.logging.disable_progress_bar()
logging.getLogger("accelerate").setLevel(logging.ERROR)
IS_OLDEST = peft.__version__.startswith("0.19.")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scan")


def llama(work: Path, quant: str = "none") -> Any:
    return stock.load_stock(folder_of(work, "llama"), quant)


def only(found: Scan, kind: str) -> Finding:
    (finding,) = found.of(kind)
    return finding


# Counting on a model of the real size ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def e2b() -> Any:
    with torch.device("meta"):
        return transformers.Gemma4ForConditionalGeneration._from_config(pico.e_series_config("e2b"), dtype=torch.bfloat16)


def test_targets_of_a_multimodal_adapter_on_an_empty_e2b(e2b: Any, tmp_path: Path) -> None:
    found = scan(e2b, adapter=pico.big_adapter_header(tmp_path / "big"))
    assert found.targets is not None
    assert found.targets["modules_by_class"] == {"Gemma4ClippableLinear": 148, "Linear": 205}
    assert found.targets["modules_by_part"] == {
        "audio": {"Gemma4ClippableLinear": 36}, "language": {"Linear": 205}, "vision": {"Gemma4ClippableLinear": 112},
    }  # fmt: skip
    assert found.targets["modules"] == 353
    assert found.targets["tensors_by_part"] == {"audio": 72, "language": 490, "vision": 224}
    assert found.targets["tensors"] == 786 and found.targets["no_effect"] == 80 and found.devices.keys() == {"meta"}
    assert "353 modules: 148 Gemma4ClippableLinear, 205 Linear; 80 tensors without effect" in scan_text(found)


def test_the_language_targets_are_what_transformers_would_quantize(e2b: Any, tmp_path: Path) -> None:
    """The 205 by a second route: names in the empty model, less what the quantizer leaves out."""
    from trimtab.engine.loader.transformers_model import stock_unquantized

    names = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    linears = {
        path for path, module in e2b.named_modules()
        if type(module) is nn.Linear and "language_model" in path and path.rpartition(".")[2] in names
    }  # fmt: skip
    assert len(linears - set(stock_unquantized(e2b, "nf4"))) == 205 and scan(e2b).classes["vision"]["Linear"] >= 112


def test_an_adapter_of_another_model_is_refused_with_all_problems(work: Path) -> None:
    assert len(raised(AdapterError, lambda: scan(llama(work), adapter=adapter_of(work, "gemma3"))).problems) > 1


def test_targets_of_a_model_with_adapters_are_refused(work: Path) -> None:
    model = stock.with_adapter(llama(work), adapter_of(work, "llama"))
    assert refused(lambda: scan(model, adapter=adapter_of(work, "llama"))).field == "model"


def test_what_is_no_model_is_refused() -> None:
    assert refused(scan, {"a": 1}).field == "model"


# Sound models ---------------------------------------------------------------------------------------------------------


def test_a_sound_model_has_no_findings(work: Path) -> None:
    found = scan(llama(work))
    assert found.findings == () and found.counts == {} and found.adapters == {}
    # Two layers of seven projections, the head, the word table.
    assert found.classes == {"language": {"Embedding": 1, "Linear": 14}, "head": {"Linear": 1}}
    assert found.said_quantized == "not quantized" and list(found.devices) == ["cpu"]
    assert scan_text(found).endswith("nothing found")


def test_bytes_are_counted_once_by_place(work: Path) -> None:
    base = split.load(folder_of(work), split.towers_off())
    whole = stock.load_stock(folder_of(work))
    found = scan(base)
    assert set(found.devices) == {"cpu", "offloaded to cpu"}
    seen = {id(tensor): tensor.nbytes for tensor in (*whole.parameters(), *whole.buffers())}
    assert sum(found.devices.values()) == sum(seen.values())
    assert set(scan(split.load(folder_of(work), split.towers_off("disk"))).devices) == {"cpu", "offloaded to disk"}
    assert found.device_map is not None and found.device_map["model.vision_tower"] == "cpu"


@pytest.mark.parametrize("quant, name", [("nf4", "Linear4bit"), ("int8", "Linear8bitLt")])
def test_a_quantized_model_is_counted_by_class(work: Path, quant: str, name: str) -> None:
    found = scan(llama(work, quant))
    assert found.class_counts() == {"Embedding": 1, "Linear": 1, name: 14} and found.findings == ()


def test_an_adapter_of_stock_peft_is_counted_by_part(work: Path) -> None:
    found = scan(stock.with_adapter(stock.load_stock(folder_of(work)), adapter_of(work)))
    facts = found.adapters["default"]
    assert (facts["modules"], facts["active"]) == (72, True)
    tensors = load_file(adapter_of(work) / "adapter_model.safetensors")
    assert sum(facts["tensors_by_part"].values()) == len(tensors) and set(facts["tensors_by_part"]) > {"vision", "audio"}
    assert found.findings == ()


def test_stock_hooks_on_adapter_weights_are_no_defect(work: Path) -> None:
    placed = {f"base_model.model.{key}": place for key, place in split.towers_off().items()}
    model = PeftModel.from_pretrained(split.load(folder_of(work), split.towers_off()), adapter_of(work), device_map=placed)
    assert any(value.device.type == "meta" for name, value in model.named_parameters() if "lora_" in name)
    assert not scan(model).of("lora-on-meta", "adapter-does-nothing", "map-key-names-nothing", "not-where-the-map-says")


# Quantization ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absmax", "code", "offset", "state2.absmax", "state2.code"])
def test_each_scale_on_meta_is_found(work: Path, name: str) -> None:
    model = llama(work, "nf4-dq")
    path = "model.layers.1.mlp.up_proj"
    holder: Any = model.get_submodule(path).weight.quant_state
    if name.startswith("state2."):
        holder = holder.state2
    setattr(holder, name.rpartition(".")[2], getattr(holder, name.rpartition(".")[2]).to("meta"))
    found = scan(model)
    assert only(found, "quant-state-on-meta") == Finding("quant-state-on-meta", path, f"{name} on meta")
    assert set(found.findings[0].bugs) == {"A1", "A2"} and found.findings[0].breaks == "forward"


def test_8bit_scales_on_meta_are_found(work: Path) -> None:
    model = llama(work, "int8")
    module = model.get_submodule("model.layers.0.mlp.up_proj")
    module.weight.SCB = module.weight.SCB.to("meta")
    assert only(scan(model), "quant-state-on-meta").detail == "SCB on meta"


@pytest.mark.skipif(IS_OLDEST, reason="accelerate 1.13.0 raises while it offloads (A3)")
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_what_dispatch_does_to_quantized_layers(work: Path, quant: str) -> None:
    model = llama(work, quant)
    dispatch_model(model, split.last_layer_off(folder_of(work, "llama")), main_device=split.GPU)
    given = split.to_device(pico.inputs("llama", model.config))
    if quant == "int8":  # its scale travels with the weight
        assert scan(model).findings == () and torch.isfinite(stock.logits(model, given)).all()
        return
    assert scan(model).counts == {"quant-state-on-meta": 7}
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        stock.logits(model, given)


def test_a_model_said_to_be_quantized_that_is_not(work: Path) -> None:
    placed = {"": "cpu"}
    found = scan(split.load(folder_of(work, "llama"), placed, "nf4"))
    assert found.said_quantized == "said to be in 4 bits" and "Linear4bit" not in found.class_counts()
    assert only(found, "nothing-quantized").detail == "0 of 15 linears"


def test_offloaded_modules_that_stay_in_full_precision_are_counted_by_map_key(work: Path) -> None:
    found = scan(split.load(folder_of(work), split.towers_off(), "nf4"))
    rows = {finding.module_path: finding.count for finding in found.of("left-unquantized")}
    assert rows == {"model.vision_tower": 15, "model.audio_tower": 24, "model.embed_vision": 1, "model.embed_audio": 1}
    assert found.class_counts()["Linear4bit"] == 42 and not found.of("nothing-quantized")


def test_linear_outside_every_skip_list_is_found(work: Path) -> None:
    model = llama(work, "nf4")
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
    finding = only(scan(model), "left-unquantized")
    assert (finding.module_path, finding.count) == ("model.layers.0.mlp", 1) and "no reason known" in finding.detail


def test_skip_list_of_the_user_is_no_finding(work: Path) -> None:
    model = split.load(folder_of(work), {"": split.GPU}, "nf4", skip=[*split.TOWERS, "lm_head"])
    assert scan(model).findings == ()


def test_fused_experts_stay_in_full_precision(work: Path) -> None:
    found = scan(stock.load_stock(pico.build("gemma4_moe", work / "moe"), "nf4"))
    assert found.counts["experts-unquantized"] == 2 and found.of("experts-unquantized")[0].bugs == ("H3",)


# Adapters -------------------------------------------------------------------------------------------------------------


def without(work: Path, folder: Path, dropped: str) -> Path:
    """Return a llama adapter without the tensors whose name holds the text."""
    return rewritten(adapter_of(work, "llama"), folder, lambda found: {key: found[key] for key in found if dropped not in key})


def test_adapter_whose_keys_did_not_fit_does_nothing(work: Path, tmp_path: Path) -> None:
    model = stock.with_adapter(llama(work), without(work, tmp_path / "none", "layers."))
    finding = only(scan(model), "adapter-does-nothing")
    assert (finding.count, finding.module_path) == (14, "") and "adapter default" in finding.detail
    given = pico.inputs("llama", model.config)
    with_it = stock.logits(model, given)
    with model.disable_adapter():
        assert torch.equal(stock.logits(model, given), with_it)


def test_modules_without_keys_do_nothing(work: Path, tmp_path: Path) -> None:
    found = scan(stock.with_adapter(llama(work), without(work, tmp_path / "part", "layers.1.mlp")))
    paths = [finding.module_path for finding in found.of("module-does-nothing")]
    assert sorted(paths) == [f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")]
    assert not found.of("adapter-does-nothing")


def test_adapter_scaled_to_nothing_does_nothing(work: Path) -> None:
    model = stock.with_adapter(llama(work), adapter_of(work, "llama"))
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] = 0.0
    assert scan(model).counts == {"adapter-does-nothing": 14}


def test_dora_without_b_still_does_something(work: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"], use_dora=True)
    assert scan(get_peft_model(llama(work), config)).findings == ()


def test_adapter_weights_on_meta_are_found(work: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(
            llama(work), without(work, tmp_path / "meta", "layers.1.mlp.up_proj"), low_cpu_mem_usage=True
        )
    finding = only(scan(model), "lora-on-meta")
    assert finding.module_path == "model.layers.1.mlp.up_proj" and finding.bugs == ("E2",)
    assert finding.detail == "adapter default: lora_A, lora_B"


def test_adapter_weights_away_from_their_layer_are_found(work: Path) -> None:
    model = stock.with_adapter(llama(work), adapter_of(work, "llama"))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    # The scan only reads: a hook whose device is a GPU says where the layer would compute.
    layer.base_layer._hf_hook = AlignDevicesHook(torch.device("cuda", 0))
    finding = only(scan(model), "lora-wrong-device")
    assert finding.module_path == "model.layers.0.self_attn.q_proj"
    assert finding.detail == "adapter default: lora_A on cpu, lora_B on cpu, computes on cuda:0"


def test_an_inactive_adapter_is_said(work: Path) -> None:
    model = stock.with_adapter(llama(work), adapter_of(work, "llama"))
    model.load_adapter(adapter_of(work, "llama", "second", seed=3), "second")
    assert {name: facts["active"] for name, facts in scan(model).adapters.items()} == {"default": True, "second": False}
    with model.disable_adapter():
        assert not scan(model).adapters["default"]["active"]


# Placement ------------------------------------------------------------------------------------------------------------


def test_a_catch_all_entry_leaves_sequential_hooks(work: Path) -> None:
    found = scan(split.load(folder_of(work), split.catch_all()))
    assert found.counts["sequential-hook"] == 112 and set(found.counts) == {"sequential-hook"}
    finding = found.of("sequential-hook")[0]
    assert (finding.bugs, finding.breaks) == (("C2", "C3"), "merge") and "AlignDevicesHook, AlignDevicesHook" in finding.detail
    assert not scan(split.load(folder_of(work), split.towers_off())).of("sequential-hook")


def test_map_key_that_no_module_has_is_found_with_near_names(work: Path) -> None:
    placed = split.catch_all() | {"model.multi_modal_projector": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = scan(split.load(folder_of(work), placed))
    finding = only(found, "map-key-names-nothing")
    assert finding.module_path == "model.multi_modal_projector" and "model.embed_vision" in finding.detail


def test_module_that_is_not_where_the_map_says_is_found(work: Path) -> None:
    base = split.load(folder_of(work), split.towers_off())
    base.hf_device_map["model.vision_tower.encoder.layers.0"] = split.GPU
    paths = [finding.module_path for finding in scan(base).of("not-where-the-map-says")]
    assert paths and all(path.startswith("model.vision_tower.encoder.layers.0.") for path in paths)


def test_offloaded_table_is_said_with_its_bytes(work: Path) -> None:
    placed = split.last_layer_off(folder_of(work)) | {"model.language_model.embed_tokens_per_layer": "cpu"}
    finding = only(scan(split.load(folder_of(work), placed)), "table-copied-whole")
    assert finding.detail == "200.0 KiB from cpu at every forward"  # 320 x 5 x 64 x 2 bytes
    assert finding.breaks == ""


def test_tied_weights_that_came_apart_are_found(work: Path) -> None:
    model = stock.load_stock(folder_of(work, "qwen3"))
    assert scan(model).findings == ()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert only(scan(model), "tied-weights-untied").module_path == "lm_head"


def test_hooks_that_copy_shared_keys_and_values(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock.load_stock(folder_of(work))
    for layer in model.model.language_model.layers:
        add_hook_to_module(layer, AlignDevicesHook(split.GPU))
    monkeypatch.setattr("trimtab.bridge.inspect_rules.SHARES_SAFELY", (99,))
    assert only(scan(model), "shared-kv-copied").count == 5
    # transformers' own dispatch names the keys that hooks must leave alone.
    assert not scan(split.load(folder_of(work), split.towers_off())).of("shared-kv-copied")
    given = split.to_device(pico.inputs("gemma4", model.config))
    if IS_OLDEST:
        with pytest.raises(KeyError):
            stock.logits(model, given)


# The value ------------------------------------------------------------------------------------------------------------


def test_inspect_goes_through_json(work: Path) -> None:
    found = scan(split.load(folder_of(work), split.catch_all(), "nf4"))
    data = json.loads(json.dumps(found.to_json()))
    assert data["counts"] == found.counts and data["findings"][0]["bugs"] == ["C2", "C3"]
    assert data["versions"]["torch"] == torch.__version__.partition("+")[0] or data["versions"]["torch"] == torch.__version__
    text = scan_text(found)
    assert "sequential-hook (C2, C3)" in text and "and 109 more" in text and "left-unquantized (A4)" in text


@pytest.mark.parametrize("is_wrong", [True, False])
def test_4_bit_rows_that_the_cpu_unpacks_with_other_scales_are_named(work: Path, monkeypatch: Any, is_wrong: bool) -> None:
    """What the CPU does is asked of a small weight; rows of whole blocks are not asked about."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(row_scales, "unpacks_wrong", lambda *key: asked.append(key) or is_wrong)
    model = nn.ModuleDict({"narrow": bnb.nn.Linear4bit(80, 24), "whole": bnb.nn.Linear4bit(128, 24)}).to("cpu")
    found = [one for one in View(model, model).findings() if one.kind == "wrong-scales"]
    assert found == ([Finding("wrong-scales", "narrow", "[24, 80] on the CPU")] if is_wrong else [])
    assert asked == [(24, 80, 64)]


def test_every_kind_says_what_to_do() -> None:
    assert len(BY_NAME) == len(KINDS)
    for kind in KINDS:
        assert kind.meaning and kind.way_round and kind.breaks in ("forward", "merge", "answer", "")


def test_inspect_moves_nothing(work: Path) -> None:
    base = split.load(folder_of(work), split.towers_off(), "nf4")
    before = split.placement(base)
    scan(base)
    assert split.placement(base) == before


def test_no_room_imports_the_doctor_but_the_commands():
    """What runs a model does not depend on the tables of known bugs."""
    package = Path(trimtab.__file__).parent
    importing = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if "trimtab.doctor" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trimtab.doctor"))
        or (isinstance(node, ast.Import) and any(one.name.startswith("trimtab.doctor") for one in node.names))
    }
    assert importing - {"__main__.py"} == {"doctor", "cli"}
