"""A folder is read strictly or refused with the file and the next step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adapter_files import PEFT_HEAD, TEXT, q_proj, refused, write_adapter
from trimtab.adapters.adapter import read_adapter
from trimtab.errors import AdapterError, CheckpointError, DeviceError, TrimtabError


def test_a_sound_folder_gives_configuration_and_header(tmp_path: Path) -> None:
    found = read_adapter(write_adapter(tmp_path, q_proj(), dtype="bfloat16", use_rslora=True))
    assert found.folder == tmp_path
    assert found.file == tmp_path / "adapter_model.safetensors"
    assert found.config["use_rslora"] is True
    name = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj.lora_A.weight"
    assert found.tensors[name].shape == (4, 16)
    assert found.tensors[name].dtype == "bfloat16"


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == ("no such folder",)


def test_a_path_to_the_file_itself_asks_for_the_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj())
    assert "folder" in refused(tmp_path / "adapter_model.safetensors")[0]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / name).unlink()
    assert refused(tmp_path) == (f"{name} is missing",)


@pytest.mark.parametrize(
    ("name", "word"),
    [("adapter_model.bin", "pickle"), ("adapters.safetensors", "mlx-lm"), ("pytorch_lora_weights.safetensors", "diffusers")],
)
def test_another_format_is_refused_by_name_with_the_next_step(name: str, word: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_model.safetensors").rename(tmp_path / name)
    first, second = refused(tmp_path)
    assert first == "adapter_model.safetensors is missing"
    assert second.startswith(name)
    assert word in second


def test_adapters_in_folders_inside_are_pointed_to(tmp_path: Path) -> None:
    write_adapter(tmp_path / "medical", q_proj())
    assert any("'medical'" in problem for problem in refused(tmp_path))


@pytest.mark.parametrize("text", ["{", '{"r": NaN}', "[]", "", '"LORA"', '{"a": ' + "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_config.json").write_text(text)
    assert len(refused(tmp_path)) == 1
    assert "adapter_config.json" in refused(tmp_path)[0]


def test_a_configuration_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_config.json").write_bytes(b'{"peft_type": "\xff"}')
    assert "not JSON" in refused(tmp_path)[0]


def test_a_broken_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError):
        read_adapter(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert refused(write_adapter(tmp_path, {})) == ("adapter_model.safetensors has no tensors",)


def test_a_hint_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    error = AdapterError(tmp_path, ["no file"], hint="Train it again")
    assert str(error).splitlines() == [f"{tmp_path}: 1 problem", "  - no file", "Train it again"]
    assert error.hint == "Train it again"


def test_an_error_of_another_process_is_raised_as_it_was() -> None:
    there = AdapterError("a", ["x", "y"], hint="z")
    here = TrimtabError.from_dict(json.loads(json.dumps(there.to_dict())))
    assert type(here) is AdapterError and str(here) == str(there) and vars(here) == vars(there)
    assert isinstance(TrimtabError.from_dict({"class": "WorkerDiedError", "message": "gone", "fields": {}}), DeviceError)
