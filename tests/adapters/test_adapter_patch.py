"""A patched copy of an adapter: inner linears named in short, the same bytes, the same effect; inputs where they belong."""

import json
import re
from pathlib import Path

import pytest
import torch

import trimtab
from trimtab.adapters.file import read_adapter
from trimtab.adapters.patch import short_pattern
from trimtab.checkpoint.headers import read_header
from trimtab.cli import main
from trimtab.errors import RequestError

DEMO = Path(trimtab.__file__).parent / "demo"
BASE = DEMO / "base"


def test_layer_numbers_become_one_pattern():
    paths = [f"m.layers.{layer}.attn.{name}" for layer in range(20) for name in ("q", "v")]
    pattern = short_pattern(paths, ["m.layers.3.attn.k", "m.norm"])
    assert pattern == r"m\.layers\.\d+\.(attn\.q|attn\.v)" and all(re.fullmatch(pattern, path) for path in paths)


def test_pattern_that_would_fit_another_module_is_spelled_out():
    paths = ["m.layers.0.q", "m.layers.2.q"]
    pattern = short_pattern(paths, ["m.layers.1.q"])
    assert [bool(re.fullmatch(pattern, f"m.layers.{layer}.q")) for layer in range(3)] == [True, False, True]


def patched(adapter, tmp_path, capsys):
    assert main.main(["inspect", str(adapter), "--model", str(BASE), "--patched", str(tmp_path / "out"), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["patched"]


def test_patched_copy_names_inner_linears_and_links_the_weights(tmp_path, capsys):
    source = DEMO / "adapters" / "specialist"
    made = patched(source, tmp_path, capsys)
    config = read_adapter(tmp_path / "out").config
    assert made["modules"] == 75 and made["renamed"] == 0 and len(config["target_modules"]) < 700
    assert re.fullmatch(config["target_modules"], "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear")
    assert not re.fullmatch(config["target_modules"], "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    assert config["r"] == read_adapter(source).config["r"]
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == (source / "adapter_model.safetensors").read_bytes()


def test_keys_that_name_the_wrapper_get_the_inner_path(tmp_path, capsys):
    source = DEMO / "adapters" / "specialist"
    folder = tmp_path / "in"
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text("utf-8"))
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"rank_pattern": {r".*vision_tower.*q_proj": config["r"]}}), "utf-8"
    )
    raw = (source / "adapter_model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    head = raw[8:start].replace(b".linear.lora_", b".lora_").rstrip()
    head += b" " * (-len(head) % 8)
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw[start:])
    made = patched(folder, tmp_path, capsys)
    assert made["renamed"] > 0 and made["linked"] is False
    assert read_adapter(tmp_path / "out").config["rank_pattern"] == {r"(.*vision_tower.*q_proj)(\.linear)?": config["r"]}
    wanted = read_header(source / "adapter_model.safetensors").tensors
    assert set(read_header(tmp_path / "out" / "adapter_model.safetensors").tensors) == set(wanted)


def test_stock_peft_takes_the_patched_copy_and_fills_every_target(tmp_path, capsys, recwarn):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    patched(DEMO / "adapters" / "specialist", tmp_path, capsys)
    base = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    assert sum(name.endswith(".lora_A.default") for name, _ in model.named_modules()) == 75
    assert not [one for one in recwarn if "missing adapter keys" in str(one.message)]


def test_folder_that_is_there_and_a_missing_model_are_refused(tmp_path, capsys):
    source = str(DEMO / "adapters" / "style")
    assert main.main(["inspect", source, "--patched", str(tmp_path / "out")]) == 2
    assert "--model" in capsys.readouterr().err
    assert main.main(["inspect", source, "--model", str(BASE), "--patched", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err


class Model(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def get_input_embeddings(self):
        return self.embedding


def test_inputs_go_where_the_embedding_computes_not_where_its_weight_is_kept():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    embedding = torch.nn.Embedding(4, 2)
    add_hook_to_module(embedding, AlignDevicesHook("cpu", offload=True))
    assert embedding.weight.device.type == "meta"
    given = {"input_ids": torch.tensor([1]), "use_cache": True, "pixel_values": torch.zeros(1, device="meta")}
    placed = trimtab.bridge.place_inputs(Model(embedding), {**given, "pixel_values": torch.zeros(1)})
    assert placed["input_ids"].device.type == placed["pixel_values"].device.type == "cpu" and placed["use_cache"] is True


def test_embedding_without_weights_or_hook_is_refused():
    with pytest.raises(RequestError, match="on meta"):
        trimtab.bridge.place_inputs(Model(torch.nn.Embedding(4, 2, device="meta")), {"input_ids": torch.tensor([1])})
    with pytest.raises(RequestError, match="no token embedding"):
        trimtab.bridge.place_inputs(torch.nn.Linear(2, 2), {})
