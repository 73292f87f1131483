"""The cases as data: names, near names, maps for a model's own modules, adapter copies, scripts."""

import ast
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.adapter_files import write_adapter
from tests.raised import raised, refused
from trimtab.doctor.cases import runner
from trimtab.doctor.cases.cases import (
    BROAD_TARGETS,
    CASE_NAMES,
    CASES,
    GEMMA4,
    Case,
    device_map,
    find_cases,
    find_parts,
    skip_modules,
)
from trimtab.doctor.cases.engine_run import EngineRun
from trimtab.errors import AdapterError

LANGUAGE = "model.language_model"
LLAMA = ("", "model", "model.embed_tokens", "model.layers", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def case(name: str) -> Case:
    return find_cases([name])[0]


def test_names_are_unique_and_the_fields_are_there():
    assert len(set(CASE_NAMES)) == len(CASES) >= 35 and {"R05_ALL_GPU_4BIT", "R03_SPLIT_4BIT"} <= set(CASE_NAMES)


def test_unknown_case_is_refused_with_near_names():
    error = refused(find_cases, ["r03-split-4bits"])
    assert error.field == "case" and error.value == "r03-split-4bits"
    assert "R03_SPLIT_4BIT" in error.near and len(error.near) <= 3


def test_name_like_nothing_is_refused_with_all_names():
    assert refused(find_cases, ["xyzzy"]).allowed == CASE_NAMES


def test_cases_come_in_the_tables_order_and_once():
    asked = ["MERGE_FRESH_BF16", "R05_ALL_GPU_4BIT", "MERGE_FRESH_BF16"]
    assert [found.name for found in find_cases(asked)] == ["R05_ALL_GPU_4BIT", "MERGE_FRESH_BF16"]


def test_case_comes_back_from_json_whole():
    for found in CASES:
        assert Case.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_reference_has_the_cases_own_formats():
    wanted = {
        "R03_SPLIT_4BIT": "nf4+towers", "R05_ALL_GPU_4BIT": "nf4+towers", "AUDIO_TOWER_QUANTIZED": "nf4",
        "MERGE_FRESH_BF16": "none", "SPLIT_INT8": "int8+towers", "NOTHING_QUANTIZED": "none", "AUTO_MAP_4BIT": "nf4",
    }  # fmt: skip
    assert {name: case(name).reference for name in wanted} == wanted
    assert case("MERGE_DEQUANTIZE_IN_PLACE").line_reference == "none" and case("NOTHING_QUANTIZED").line_reference == "nf4"


# Maps -----------------------------------------------------------------------------------------------------------------


def test_first_reports_map_sends_the_towers_away_and_keeps_the_rest_with_a_catch_all():
    assert device_map("towers", GEMMA4) == {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0}


def test_prefixed_map_names_the_modules_as_peft_does():
    found = device_map("prefixed:towers-explicit", GEMMA4)
    assert found["base_model.model.model.vision_tower"] == "cpu" and found["base_model.model.lm_head"] == 0
    assert "" not in found and len(found) == 6


def test_prefixed_map_keeps_the_catch_all_as_it_is():
    assert device_map("prefixed:towers", GEMMA4)[""] == 0


def test_block_map_gives_half_of_the_layers_away_one_key_a_layer():
    found = device_map("blocks", GEMMA4)
    assert [found[f"{LANGUAGE}.layers.{index}"] for index in range(5)] == [0, 0, "cpu", "cpu", "cpu"]
    assert f"{LANGUAGE}.layers" not in found and found["model.vision_tower"] == 0


def test_embedding_map_keeps_the_per_layer_table():
    found = device_map("embed", GEMMA4)
    assert found[f"{LANGUAGE}.embed_tokens"] == "cpu" and found[f"{LANGUAGE}.embed_tokens_per_layer"] == 0


def test_explicit_maps_cover_every_child_once():
    for name in ("towers-explicit", "disk-explicit"):
        assert list(device_map(name, GEMMA4)) == list(GEMMA4.children)


def test_parts_of_a_text_model_have_no_tower():
    parts = find_parts(LLAMA)
    assert (parts.towers, parts.language, parts.layers, parts.layer_count) == ((), "model", "model.layers", 2)
    assert device_map("blocks", parts) == {
        "lm_head": 0, "model.embed_tokens": 0, "model.norm": 0, "model.layers.0": 0, "model.layers.1": "cpu",
    }  # fmt: skip
    assert skip_modules(parts) == ["lm_head"]


def test_skip_list_names_towers_and_head_alone():
    assert skip_modules(GEMMA4) == ["model.vision_tower", "model.audio_tower", "lm_head"]


# Adapter copies -------------------------------------------------------------------------------------------------------


def adapter(folder):
    head, shape = "base_model.model.", {}
    for path in (f"{LANGUAGE}.layers.0.self_attn.q_proj", "model.vision_tower.encoder.layers.0.mlp.up_proj.linear"):
        shape |= {f"{head}{path}.lora_A.weight": (4, 16), f"{head}{path}.lora_B.weight": (16, 4)}
    return write_adapter(folder, shape, target_modules=["q_proj", "up_proj"])


def config_of(folder):
    with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
        return json.load(file)


def test_patched_copy_targets_exactly_what_the_keys_name(tmp_path):
    found = runner.write_variants(adapter(tmp_path / "adapter"), tmp_path)
    assert config_of(found["patched"])["target_modules"] == (
        r"model\.language_model\.layers\.0\.self_attn\.q_proj"
        r"|model\.vision_tower\.encoder\.layers\.0\.mlp\.up_proj\.linear"
    )
    assert config_of(found["patched"])["lora_alpha"] == 8


def test_narrow_copy_leaves_the_towers_out_and_broad_names_projections(tmp_path):
    found = runner.write_variants(adapter(tmp_path / "adapter"), tmp_path)
    assert config_of(found["narrow"])["target_modules"] == r"model\.language_model\.layers\.0\.self_attn\.q_proj"
    assert config_of(found["broad"])["target_modules"] == list(BROAD_TARGETS)


def test_original_adapter_is_not_written(tmp_path):
    folder = adapter(tmp_path / "adapter")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    found = runner.write_variants(folder, tmp_path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before and found["original"] == str(folder)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "adapter-patched" / weights).read_bytes() == before[weights]


def test_folder_that_is_no_adapter_is_refused(tmp_path):
    assert raised(AdapterError, runner.write_variants, tmp_path, tmp_path / "out").path == str(tmp_path)


# Scripts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", CASES, ids=CASE_NAMES)
def test_script_stands_alone(found):
    text = runner.script_of(found)
    imported = set()
    for node in ast.walk(ast.parse(text)):
        imported |= {name.name.split(".")[0] for name in node.names} if isinstance(node, ast.Import) else set()
        imported |= {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    stock = {"json", "pathlib", "tempfile", "traceback", "warnings", "torch", "peft", "transformers", "accelerate"}
    assert imported <= stock and found.name in text and "/work" not in text


@pytest.mark.slow
def test_script_of_the_first_report_shows_its_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", runner.script_of(case("R03_SPLIT_4BIT"))], capture_output=True, text=True, cwd=tmp_path,
        timeout=120,
    )  # fmt: skip
    result = done.stdout.strip().splitlines()[-1]
    oldest = "RESULT: TypeError at adapter: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'"
    newest = "RESULT: NotImplementedError at first forward: Cannot copy out of meta tensor; no data!"
    import accelerate
    from packaging.version import Version

    # accelerate 1.14.0 takes the attribute off; bitsandbytes 0.50.0 lets it pass.
    is_old = Version(accelerate.__version__) < Version("1.14.0")
    assert result == (oldest if is_old else newest), done.stderr


def test_a_record_keeps_the_first_mode_that_failed_and_its_stage(tmp_path):
    """Later modes are asked too, and may fail in another stage for the same reason."""

    class Run(EngineRun):
        def run(self):
            raise NotImplementedError

    def answer(mode, tensors, enter):
        enter("forward" if mode == "text" else "generate")
        if mode != "image":
            raise ValueError(f"{mode} does not work")
        return torch.zeros(3), [1], [1, 3]

    save_file({f"{mode}.input_ids": torch.zeros(1, 2) for mode in ("text", "image", "audio")}, tmp_path / "inputs")
    said = []
    request = {
        "names": {}, "case": CASES[0].to_json(), "model": str(tmp_path), "work": str(tmp_path), "pressure": None,
        "reference": None, "inputs": str(tmp_path / "inputs"),
    }  # fmt: skip
    Run(request, said.append).ask("cpu", answer)
    assert [one["stage"] for one in said if "stage" in one] == ["forward", "forward", "forward", "forward"]
    facts = [one["facts"] for one in said if "facts" in one]
    assert [one["exception"]["message"] for one in facts if "exception" in one] == ["text does not work"]
    modes = facts[-1]["modes"]
    assert {mode: (found["ok"], found.get("stage")) for mode, found in modes.items()} == {
        "text": (False, "forward"), "image": (True, None), "audio": (False, "generate"),
    }  # fmt: skip
