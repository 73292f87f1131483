"""What is foreseen for the stock stack from headers alone, and which call is given instead."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from bench.checkpoints import config_of, empty_model
from tests import ROOT, pico
from tests.adapter_files import pair
from tests.adapter_files import write_adapter as write_by_hand
from tests.machine.test_environment import read_only_environment
from tests.raised import raised, refused
from trimtab.adapters.patch import short_pattern
from trimtab.cli import main
from trimtab.doctor.preflight import peft_dispatch, second_plan
from trimtab.doctor.preflight import preflight as module
from trimtab.doctor.preflight import shape as shape_module
from trimtab.doctor.preflight.answer import ALL_ON_GPU, DOES_NOT_FIT, ON_CPU, SPLIT, TOWERS_OFF, adapter_name, towers_map
from trimtab.doctor.preflight.device_map import device_text
from trimtab.doctor.preflight.findings import FAILS, NOTE, SEVERITIES, TEXTS, WASTES, WRONG, is_met
from trimtab.doctor.preflight.preflight import Preflight, preflight, preflight_document
from trimtab.doctor.preflight.shape import ModelShape, read_shape, shape_of
from trimtab.doctor.traces.answer import known_bugs
from trimtab.errors import AdapterError, CheckpointError, RequestError
from trimtab.machine.environment import Environment, Package, read_environment
from trimtab.planning.values.blocks import Machine
from trimtab.process.runner import DONE, Outcome
from trimtab.report.render import Lines

DEMO = ROOT / "trimtab" / "demo"
BASE, SPECIALIST, STYLE = DEMO / "base", DEMO / "adapters" / "specialist", DEMO / "adapters" / "style"
# The map of the first report: towers off, a projector that this family does not have, the rest on the GPU.
REPORTED = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "model.audio_tower": "cpu", "": 0}
OLD = {"transformers": "5.6.2", "accelerate": "1.13.0", "peft": "0.19.1", "bitsandbytes": "0.49.2", "torch": "2.10.0"}
NEW = {"transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2", "bitsandbytes": "0.50.2", "torch": "2.13.0"}


def environment(versions: dict[str, str]) -> Environment:
    return read_only_environment(packages={name: Package(text, None) for name, text in versions.items()})


def gpu(free_gib: float, host_gib: float = 32) -> Machine:
    free = int(free_gib * 2**30)
    return Machine(
        execution_device="cuda:0", gpu_total_bytes=free + 2**29, gpu_free_bytes=free,
        host_available_bytes=int(host_gib * 2**30),
    )  # fmt: skip


def bugs(found: Preflight, severity: str | None = None) -> list[str]:
    return [one.bug for one in found.findings if severity in (None, one.severity)]


def finding(found: Preflight, bug: str):
    return next(one for one in found.findings if one.bug == bug)


def judge(model: Path = BASE, *, versions: dict[str, str] = NEW, machine: Machine | None = None, **options) -> Preflight:
    return preflight(model, environment=environment(versions), machine=machine or gpu(1), **options)


@cache
def _shape(model: str, items: tuple, quant: str, dtype: str) -> ModelShape:
    return read_shape(model, dict(items), quant=quant, dtype=dtype)


@cache
def _planned(text: str) -> dict:
    return peft_dispatch.plan_of(json.loads(text))


@pytest.fixture(autouse=True)
def questions_are_answered_once(monkeypatch):
    """A model of real size takes a second to build, a process three to start; the same question has the same answer."""
    monkeypatch.setattr(second_plan, "run_peft", lambda request, python: _planned(json.dumps(request)))
    monkeypatch.setattr(
        module, "read_shape",
        lambda model, device_map, *, quant, dtype, python: _shape(str(model), tuple(device_map.items()), quant, dtype),
    )  # fmt: skip


@cache
def sized(size: str, root: Path) -> Path:
    folder = root / size
    config = config_of(size)
    config.architectures, config.dtype = ["Gemma4ForConditionalGeneration"], torch.bfloat16
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def e2b(tmp_path_factory) -> Path:
    return sized("e2b", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def e4b(tmp_path_factory) -> Path:
    return sized("e4b", tmp_path_factory.getbasetemp())


@cache
def shape_at(folder: Path) -> ModelShape:
    return shape_of(str(folder), {}, "nf4-dq", "bfloat16")


def write_e4b_adapter(folder: Path) -> Path:
    """An adapter of one linear of E4B."""
    shapes = pair("model.language_model.layers.0.self_attn.q_proj", 2048, 2560, rank=1)
    targets = r".*language_model\.layers\.0\.self_attn\.q_proj"
    return write_by_hand(folder, shapes, r=1, lora_alpha=1, target_modules=targets)


NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def e2b_adapter(e2b, tmp_path_factory) -> Path:
    """The reported adapter's shape: 786 tensors of rank 1, towers by their inner paths, targets by the outer names."""
    anatomy = shape_at(e2b).anatomy
    wanted = re.compile(
        r"model\.(language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
        r"|vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.linear"
        r"|audio_tower\.layers\.\d+\.self_attn\.(q|k|v)_proj\.linear)"
    )
    shapes = {}
    for row in anatomy.rows:
        if row.kind == "linear" and row.weight is not None and wanted.fullmatch(row.module_path):
            shapes |= pair(row.module_path, *row.weight.shape, rank=1)
    for path in anatomy.missing_projections:
        shapes |= pair(path, 256, 1536, rank=1)
    folder = tmp_path_factory.mktemp("adapter")
    return write_by_hand(folder, shapes, r=1, lora_alpha=1, target_modules=NAMES)


# The reported case, at full size --------------------------------------------------------------------------------------


def test_reported_map_and_adapter_on_e2b(e2b, e2b_adapter):
    found = judge(e2b, versions=OLD, adapter=e2b_adapter, device_map=REPORTED, machine=gpu(7.5))
    assert found.adapter is not None and found.adapter.spec is not None and found.adapter.spec.counts()["tensors"] == 786
    assert found.adapter.spec.counts()["parts"] == {"audio": 72, "language": 490, "vision": 224}
    # Of the 148 wrapped modules all are named by their outer path, the others of the towers as well.
    assert len(found.adapter.wrappers) >= 148 and len(found.adapter.no_effect) == 80
    assert {"D1", "B1", "C5", "C2", "C4", "A4"} <= set(bugs(found)) and bugs(found, FAILS)[0] == "D1"
    assert "model.embed_vision" in finding(found, "C5").detail


def test_unquantized_towers_of_e2b_are_named_and_cost_what_they_cost(e2b):
    found = judge(e2b, device_map=REPORTED)
    kept = [row for row in found.map.kept if row.reason.startswith("the map's key")]
    assert {row.part for row in kept} == {"vision", "audio"}
    assert sum(row.bytes for row in kept) - sum(row.quantized_bytes for row in kept) == found.map.map_cost_bytes
    # Half a byte and the nested scales (1/64 + 4/16384 byte a weight, 4 bytes each) instead of two bytes.
    numel = sum(row.bytes for row in kept) // 2
    scales = numel / 64 + 4 * numel / (64 * 256)
    assert found.map.map_cost_bytes == pytest.approx(1.5 * numel - scales, rel=1e-3)
    assert len(found.map.quantized) == len(shape_at(e2b).anatomy.rows) - sum(
        1 for row in shape_at(e2b).anatomy.rows if row.module_path not in found.map.quantized
    )
    assert not any(path.startswith(("model.vision_tower", "model.audio_tower")) for path in found.map.quantized)
    tied = next(row for row in found.map.kept if row.module_path == "lm_head")
    assert (tied.bytes, tied.quantized_bytes) == (0, 0)


def test_free_memory_is_reckoned_line_by_line(e2b, e2b_adapter):
    found = judge(e2b, adapter=e2b_adapter, device_map=REPORTED, machine=gpu(7.5))
    second = found.second
    assert second is not None and second.runs
    free, base = {line.text: line.bytes for line in second.lines}["free on GPU 0 now"], second.lines[1].bytes
    assert free == int(7.5 * 2**30)
    assert -base == found.map.bytes_on["0"]
    adapter = second.lines[2].bytes
    assert second.free_bytes == free + base + adapter == second.lines[3].bytes
    budget = next(line.bytes for line in second.lines if line.text.startswith("GPU 0: budget"))
    assert budget == int(0.9 * second.free_bytes) and second.total_bytes == second.lines[-1].bytes
    # Of the map's own two parts the towers are what the map keeps off.
    assert found.map.bytes_on["0"] + found.map.bytes_on["cpu"] == sum(found.map.bytes_on.values())


def test_under_pressure_the_second_plan_puts_e4b_on_the_cpu_and_explains_the_log_line(e4b, tmp_path):
    found = judge(e4b, versions=OLD, adapter=write_e4b_adapter(tmp_path / "a"), device_map=REPORTED, machine=gpu(9.5))
    assert found.second is not None and found.second.required is not None
    whole = "Gemma4VisionPatchEmbedder" in empty_model(config_of("e4b"))._no_split_modules
    assert found.second.required == {0: 5669781506 if whole else 5668601858}
    assert found.second.device_map == {"": "cpu"} or found.second.device_map == {"base_model": "cpu"}
    assert "embed_tokens_per_layer, 99.4 %" in found.second.required_words[0] and finding(found, "B2").when == "first forward"
    assert f"{found.second.required[0]} bytes required" in Lines().show(preflight_document(found))


def test_second_plan_that_spills_to_disk_fails_for_want_of_a_folder(e4b, tmp_path):
    adapter = write_e4b_adapter(tmp_path / "a")
    found = judge(e4b, versions=OLD, adapter=adapter, device_map=REPORTED, machine=gpu(12, host_gib=8))
    assert found.second is not None and found.second.disk_keys and not found.second.all_on_cpu
    spilled = finding(found, "B7")
    assert (spilled.severity, spilled.when) == ("fails", "adapter") and "We need an `offload_dir`" in spilled.detail
    assert str(len(found.second.disk_keys)) in spilled.title
    # The call ends there: what later calls would meet is not foretold.
    assert not {"B2", "B4", "A1", "A3"} & set(bugs(found))


def partly_offloaded(e2b: Path, adapter: Path, versions: dict[str, str], quant: str = "nf4-dq") -> Preflight:
    """Free memory for a part of the model only, once the base is there."""
    whole = judge(e2b, versions=versions, device_map=REPORTED, machine=gpu(30), quant=quant)
    base = whole.map.bytes_on["0"] / 2**30
    return judge(e2b, versions=versions, adapter=adapter, device_map=REPORTED, machine=gpu(base + 6), quant=quant)


@pytest.mark.parametrize(("versions", "quant", "fails"), [
    (NEW, "nf4-dq", {"A1"}), (OLD, "int8", {"A3"}), (NEW, "int8", set()),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((OLD, "nf4-dq", {"A3"}), (NEW, "nf4", {"A2"}))),
])  # fmt: skip
def test_offloading_quantized_layers_fails_as_the_versions_do(e2b, e2b_adapter, versions, quant, fails):
    found = partly_offloaded(e2b, e2b_adapter, versions, quant)
    assert found.second is not None and found.second.offloaded_quantized and fails <= set(bugs(found, FAILS))
    assert {"A1", "A2", "A3"} & set(bugs(found)) == fails


def test_shared_keys_fail_with_the_layer_of_the_report(e2b, e2b_adapter):
    assert "KeyError: 13" in finding(partly_offloaded(e2b, e2b_adapter, OLD), "B4").detail
    assert "B4" not in bugs(partly_offloaded(e2b, e2b_adapter, NEW))


def test_room_to_spare_undoes_the_offload(e2b, e2b_adapter):
    found = judge(e2b, adapter=e2b_adapter, device_map=REPORTED, machine=gpu(60))
    assert found.second is not None and set((found.second.device_map or {}).values()) == {0}
    assert found.second.moved_to_main_bytes == found.map.bytes_on["cpu"] and finding(found, "B1").severity == WASTES


def test_without_offload_there_is_no_second_plan():
    found = judge(adapter=STYLE, device_map={"": 0})
    assert found.second is not None and not found.second.runs and "B1" not in bugs(found)
    assert judge(device_map=REPORTED).second is None


# Keys of the map ------------------------------------------------------------------------------------------------------


def test_key_that_names_nothing_is_told_with_near_names():
    found = judge(device_map=REPORTED)
    assert [(row.key, "model.embed_vision" in row.near) for row in found.map.unknown] == [("model.multi_modal_projector", True)]


def test_prefix_collisions_are_those_of_the_installed_transformers():
    found = judge(device_map={"model.language_model.embed_tokens": "cpu", "": 0})
    hit = next(row for row in found.map.collisions)
    assert hit.key == "model.language_model.embed_tokens"
    assert hit.example.startswith("model.language_model.embed_tokens_per_layer") and (hit.goes_to, hit.asked) == ("cpu", "0")
    assert found.map.tensor_devices[f"{hit.key}_per_layer.weight"] == "cpu"
    assert found.map.bytes_on["cpu"] > shape_at(BASE).anatomy.by_path()[f"{hit.key}_per_layer"].weight.nbytes
    assert finding(found, "C6").severity == WASTES
    own = judge(device_map={"model.language_model.embed_tokens": 0, "model.language_model.embed_tokens_per_layer": 0, "": 0})
    assert own.map.collisions == ()


def test_skipped_linears_follow_the_installed_rule_for_longer_names(tmp_path):
    folder = pico.build("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 12
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    shape = read_shape(folder, {"model.layers.1": "cpu", "": 0}, quant="nf4", dtype="bfloat16")
    skipped = {path.split(".")[2] for path in shape.skipped_by_key}
    # 5.6.2 has no boundary after a name, the newest has.
    from transformers.quantizers.quantizers_utils import should_convert_module

    has_boundary = should_convert_module("model.layers.11.mlp.up_proj", ["model.layers.1"])
    assert skipped == ({"1"} if has_boundary else {"1", "10", "11"})
    assert {path.split(".")[2] for path in shape.loaded_to} == {"10", "11"}


@pytest.mark.parametrize(("device_map", "bug", "severity"), [
    ({"model.vision_tower": "disk", "": 0}, "C1", FAILS), ({"model.vision_tower": "cpu", "": 0}, "C2", WRONG),
    ({"model.vision_tower": "cpu", "": 0}, "C4", WASTES), ({"": "cpu"}, "A5", WASTES),
    ({"model.language_model.embed_tokens": "cpu", "": 0}, "D4", FAILS),
    ({"model.language_model.embed_tokens_per_layer": "cpu", "": 0}, "D6", WASTES), ({"": 0}, "D6", NOTE),
    ({"model.vision_tower": "disk", "": torch.device("cpu")}, "C7", FAILS),
    ({"model.vision_tower": "cpu", "": 0}, "A4", WASTES),
])  # fmt: skip
def test_a_map_meets_the_entry_of_the_catalogue(device_map, bug, severity):
    assert finding(judge(device_map=device_map), bug).severity == severity


def test_an_explicit_map_meets_none_of_them():
    device_map = towers_map(shape_at(BASE))
    assert device_map is not None and "" not in device_map
    found = judge(device_map=device_map)
    assert not {"C1", "C2", "C4", "C5", "C6", "C7", "D4"} & set(bugs(found)) and found.map.uncovered == ()


def test_a_map_that_forgets_modules_fails():
    found = judge(device_map={"model.vision_tower": "cpu", "model.language_model": 0})
    assert any(path.startswith("model.audio_tower") for path in found.map.uncovered)
    assert found.findings[0].severity == FAILS and "does not give any device" in found.findings[0].detail


@pytest.mark.parametrize("device_map", [{}, "auto", ["cpu"], {"a": "gpu"}, {1: "cpu"}, {"a": True}, {"a": None}])
def test_what_is_no_map_is_refused(device_map):
    assert refused(judge, device_map=device_map).field == "device_map"


def test_devices_as_text():
    assert [device_text(value) for value in (0, "cuda", "cuda:1", torch.device("cpu"), "disk", "gpu")] == [
        "0", "0", "1", "cpu", "disk", "",
    ]  # fmt: skip


# The model and the versions -------------------------------------------------------------------------------------------


def test_experts_stay_unquantized(tmp_path):
    found = judge(pico.build("qwen3_moe", tmp_path / "moe"))
    assert finding(found, "H3").severity == WASTES
    assert any(
        row.reason.startswith("stacked experts: bitsandbytes has no") and row.bytes > row.quantized_bytes for row in found.map.kept
    )


def test_unquantized_model_costs_nothing_by_its_map():
    found = judge(device_map=REPORTED, quant="none")
    assert found.map.quantized == frozenset() and found.map.map_cost_bytes == 0
    assert not {"A4", "A5", "H1", "D2"} & set(bugs(found))


def test_oldest_versions_are_blind_and_deaf():
    old, new = judge(versions=OLD), judge(versions=NEW)
    assert finding(old, "H1").severity == WRONG and finding(old, "D2").severity == FAILS
    assert not {"H1", "D2"} & set(bugs(new))


@pytest.mark.parametrize(("bug", "versions", "met"), [
    ("A3", OLD, True), ("A3", NEW, False), ("A3", {**OLD, "accelerate": "1.14.0"}, False),
    ("A3", {**OLD, "bitsandbytes": "0.50.0"}, False), ("B4", {"transformers": "5.22.2"}, True),
    ("B4", {"transformers": "5.23.0"}, False), ("D3", {"transformers": "5.19.0"}, False),
    ("D3", {"transformers": "5.20.0"}, True), ("B1", NEW, True), ("A3", {}, True), ("A3", {"accelerate": "x"}, True),
])  # fmt: skip
def test_versions_decide_by_the_catalogue(bug, versions, met):
    assert is_met(bug, versions) is met


def test_every_finding_names_an_entry_of_the_catalogue_and_a_severity():
    assert {name.partition(" ")[0] for name in TEXTS} - {"-"} <= set(known_bugs())
    assert {name for name, texts in TEXTS.items() if texts.get("severity") not in SEVERITIES} == {"C6"}  # by the device


# The adapter ----------------------------------------------------------------------------------------------------------


def test_disk_and_an_adapter_fail_and_copy_the_checkpoint():
    assert {"B5", "B6"} <= set(bugs(judge(adapter=STYLE, device_map={"model.vision_tower": "disk", "": 0})))


def test_keys_that_target_modules_does_not_name_are_dropped(tmp_path):
    path = "model.language_model.layers.0.self_attn"
    rows = shape_at(BASE).anatomy.by_path()
    shapes = {}
    for name in ("q_proj", "k_proj"):
        shapes |= pair(f"{path}.{name}", *rows[f"{path}.{name}"].weight.shape)
    adapter = write_by_hand(tmp_path / "a", shapes, target_modules=[f"{path}.q_proj", f"{path}.o_proj"])
    found = judge(adapter=adapter)
    assert found.adapter is not None and found.adapter.dropped == (f"{path}.k_proj",)
    assert found.adapter.unfilled == (f"{path}.o_proj",)
    assert finding(found, "E3").severity == finding(found, "E1").severity == WRONG


def test_adapter_of_another_model_is_told_and_nothing_is_planned_for_it(tmp_path):
    adapter = write_by_hand(tmp_path / "a", pair("model.layers.0.self_attn.query", 8, 8), target_modules=["query"])
    found = judge(adapter=adapter, device_map=REPORTED)
    assert found.adapter is not None and found.adapter.spec is None and found.adapter.problems
    assert finding(found, "E3").severity == WRONG and "--adapter" not in found.answer.command


def test_pattern_names_exactly_the_modules():
    paths = ["a.layers.0.q", "a.layers.1.q", "a.layers.0.k", "a.b.c.linear", "x.2.y.3", "x.4.y.5"]
    others = ("a.layers.1.k", "a_layers.0.q", "x.2.y.5", "a.b.c")
    pattern = short_pattern(paths, others)
    assert all(re.fullmatch(pattern, path) for path in paths) and not any(re.fullmatch(pattern, other) for other in others)


# The answer -----------------------------------------------------------------------------------------------------------


def test_answer_goes_down_the_tree_as_memory_shrinks(e2b, e2b_adapter):
    kinds = {}
    for free in (12, 6.6, 2.2, 0.2):
        found = judge(e2b, adapter=e2b_adapter, machine=gpu(free, 24)).answer
        kinds[free] = found.kind
        ast.parse(found.stock), ast.parse(found.python)
        assert (found.plan is None) == (found.kind == DOES_NOT_FIT) == (not found.command)
    assert kinds[12] == ALL_ON_GPU and kinds[2.2] == SPLIT
    assert kinds[0.2] == DOES_NOT_FIT and kinds[6.6] in (ALL_ON_GPU, TOWERS_OFF, SPLIT)


def test_answer_that_does_not_fit_says_which_settings_would(e2b, e2b_adapter):
    hopeless = judge(e2b, adapter=e2b_adapter, machine=gpu(0.2, 24)).answer
    assert hopeless.kind == DOES_NOT_FIT and "No smaller context, head or prompt fits." in hopeless.reason
    least = float(re.search(r"smallest placement needs ([\d.]+) GiB", hopeless.reason).group(1))
    found = judge(e2b, adapter=e2b_adapter, machine=gpu(1.15, 24)).answer
    assert found.kind == DOES_NOT_FIT
    ways = re.findall(r"(--[^;(]+) \(([\d.]+) GiB\)", found.reason)
    assert ways and all(float(size) <= least for _, size in ways), found.reason


def test_towers_leave_only_where_that_is_enough(e2b, e2b_adapter):
    whole = judge(e2b, adapter=e2b_adapter, machine=gpu(1)).answer.needed_bytes
    just_short = (whole - gpu(1).context_bytes - 2**25) / 2**30
    found = judge(e2b, adapter=e2b_adapter, machine=gpu(just_short)).answer
    assert found.kind == TOWERS_OFF
    assert "trimtab.bridge.load_peft" in found.stock and "llm_int8_enable_fp32_cpu_offload=True" in found.stock
    device_map = ast.literal_eval(re.search(r"device_map=(\{.*?\})", found.stock).group(1))
    assert device_map["model.vision_tower"] == device_map["model.audio_tower"] == "cpu"
    assert device_map["model.language_model"] == 0 and "" not in device_map
    assert set(device_map) <= {found.module_path for found in shape_at(e2b).modules}


def test_stock_call_resolves_wrappers_on_a_copy_of_the_config():
    found = judge(adapter=SPECIALIST, machine=gpu(24))
    assert found.answer.kind == ALL_ON_GPU and "config.target_modules" in found.answer.stock
    tree = ast.parse(found.answer.stock)
    pattern = next(
        node.value.value for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "config.target_modules"
    )  # fmt: skip
    assert found.adapter is not None and found.adapter.spec is not None
    lora = [target.module_path for target in found.adapter.spec.targets if target.kind != "saved"]
    assert all(re.fullmatch(pattern, path) for path in lora)
    named = [row.module_path for row in shape_at(BASE).anatomy.rows if re.fullmatch(pattern, row.module_path)]
    assert sorted(named) == sorted(lora)


def test_stock_call_keeps_towers_dense_where_quantized_ones_fail():
    old, new = (judge(versions=versions, machine=gpu(24)).answer for versions in (OLD, NEW))
    skipped = re.search(r"llm_int8_skip_modules=(\[.*?\])", old.stock)
    assert skipped is not None and "llm_int8_skip_modules" not in new.stock
    # A list of the caller's replaces stock's own, so the tied head has to be in it.
    assert set(ast.literal_eval(skipped.group(1))) == {"lm_head", "model.vision_tower", "model.audio_tower"}
    assert "must not quantize" in old.reason


@pytest.mark.parametrize("versions", [OLD, NEW])
def test_stock_call_runs_and_fills_every_module_of_the_adapter(versions):
    """On the CPU in place of the GPU, and without the processor, which needs torchvision."""
    found = judge(adapter=SPECIALIST, machine=gpu(24), versions=versions)
    lines = found.answer.stock.replace('{"": 0}', '{"": "cpu"}').splitlines()
    code = "\n".join(line for line in lines if not line.startswith("processor"))
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code.replace("AutoProcessor, ", ""), "stock call", "exec"), names)
    assert found.adapter is not None and found.adapter.spec is not None
    lora = {target.module_path for target in found.adapter.spec.targets if target.kind != "saved"}
    filled = {
        path.removeprefix("base_model.model.").split(".lora_")[0] for path, value in names["model"].named_parameters()
        if ".lora_B." in path and bool(value.any())
    }  # fmt: skip
    assert filled == lora
    modules = dict(names["base"].named_modules())
    is_tower_packed = type(modules["model.vision_tower.patch_embedder.input_proj"]).__name__ == "Linear4bit"
    assert is_tower_packed == (versions is NEW)


def test_without_a_gpu_trimtab_computes_on_the_cpu():
    machine = Machine(execution_device="cpu", host_available_bytes=2**34)
    found = judge(adapter=STYLE, device_map=REPORTED, machine=machine)
    assert found.answer.kind == ON_CPU and found.answer.plan is not None and found.answer.stock == ""
    assert any(one.severity == FAILS and "torch can use no GPU here" in one.title for one in found.findings)


def test_memory_asked_for_is_in_the_calls():
    found = preflight(BASE, adapter=STYLE, gpu_memory="8GiB", host_memory="8GiB", environment=environment(NEW))
    assert "--gpu-memory 8GiB --host-memory 8GiB" in found.answer.command
    assert main.parser().parse_args(shlex.split(found.answer.command)[1:]).name == "run"
    assert "--adapter" in found.answer.command and "--use style" in found.answer.command
    assert "gpu_memory='8GiB'" in found.answer.python and found.free[0] < 8 * 2**30 and found.free["cpu"] == 8 * 2**30


def test_a_named_adapter_keeps_its_name_in_the_calls(capsys):
    assert main.main(["doctor", str(BASE), "--adapter", f"b={STYLE}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["preflight"]["answer"]
    assert f"--adapter b={STYLE} --use b " in answer["command"]
    assert f"'b': '{STYLE}'" in answer["python"] and "adapter='b'" in answer["python"]


def test_adapter_names_are_ones_that_requests_take():
    assert [adapter_name(path) for path in ("a/style", "a/my adapter!", "a/..x", "/")] == ["style", "my-adapter-", "x", "adapter"]


# Bad input, other interpreters, output --------------------------------------------------------------------------------


def test_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        judge(tmp_path)
    assert "is an adapter" in str(raised(CheckpointError, judge, STYLE))


def test_folder_that_is_no_adapter_is_refused(tmp_path):
    assert raised(AdapterError, judge, adapter=tmp_path).path == str(tmp_path)


def test_shape_comes_back_equal_from_json():
    shape = shape_at(BASE)
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


def in_order(shape: ModelShape) -> ModelShape:
    """The shape with every module's tensors by name: 5.6.2 makes rotary buffers in the order of a set."""
    rows = tuple(
        replace(row, tensors=tuple(sorted(row.tensors, key=lambda tensor: tensor.tensor_path))) for row in shape.anatomy.rows
    )
    modules = tuple(replace(one, tensors=tuple(sorted(one.tensors, key=lambda own: own.name))) for one in shape.modules)
    return replace(shape, anatomy=replace(shape.anatomy, rows=rows), modules=modules)


def test_shape_of_another_process_is_the_same():
    own = read_shape(BASE, REPORTED, quant="nf4-dq", dtype="bfloat16")
    told = read_shape(BASE, REPORTED, quant="nf4-dq", dtype="bfloat16", python=sys.executable)
    assert in_order(told) == in_order(own)


def test_errors_of_another_process_are_ours(tmp_path, monkeypatch):
    def here(module, request, **_):
        lines = []
        try:
            shape_module.main(json.loads(json.dumps(request)), lines.append)
        except BaseException:
            return Outcome("failed", tuple(lines), 0.0, 0, 1, "", "")
        return Outcome(DONE, tuple(json.loads(json.dumps(lines))), 0.0, 0, 0, "", "")

    monkeypatch.setattr(shape_module, "run_inside", here)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    error = raised(CheckpointError, read_shape, tmp_path, {}, quant="nf4-dq", dtype="bfloat16", python=sys.executable)
    assert error.path == str(tmp_path) and "no_such_type" in str(error)


def test_judgement_is_json_and_text():
    found = judge(adapter=SPECIALIST, device_map=REPORTED, versions=OLD)
    values = json.loads(json.dumps(found.to_json()))
    assert values["second_plan"]["runs"] is True and values["second_plan"]["steps"]
    assert values["adapter"]["wrappers"] and values["map"]["unknown_keys"][0]["key"] == "model.multi_modal_projector"
    assert [one["bug"] for one in values["findings"]] == bugs(found)
    text = Lines().show(preflight_document(found))
    for one in found.findings:
        assert one.title in text
    assert "What works here" in text and "PEFT plans again" in text


def test_versions_are_of_the_interpreter_that_is_asked():
    found = preflight(BASE, machine=gpu(4), environment=read_environment())
    assert found.versions["transformers"] == transformers.__version__ and found.findings[0].severity in SEVERITIES


def test_max_memory_is_both_budgets_and_a_machine_without_the_gpu_that_it_does_not_name():
    asked = preflight(BASE, adapter=STYLE, max_memory={"0": "8GiB", "cpu": "8GiB"}, environment=environment(NEW))
    apart = preflight(BASE, adapter=STYLE, gpu_memory="8GiB", host_memory="8GiB", environment=environment(NEW))
    assert asked.free == apart.free and asked.answer.kind == apart.answer.kind == ALL_ON_GPU
    assert f"--gpu-memory {8 * 2**30}" in asked.answer.command
    cpu = preflight(BASE, adapter=STYLE, max_memory={"cpu": "8GiB"}, environment=environment(NEW))
    assert list(cpu.free) == ["cpu"] and cpu.answer.kind == ON_CPU
    with pytest.raises(RequestError, match="both set a budget"):
        preflight(BASE, max_memory={"0": "8GiB"}, gpu_memory="8GiB", environment=environment(NEW))
