"""Is a LoRA in a GGUF file the adapter that it was converted from, and is any other refused by name?"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trimtab
from tests import gguf_files, pico, stock
from tests.raised import raised
from trimtab.adapters import file as adapters_file
from trimtab.adapters.file import for_peft, read_adapter
from trimtab.checkpoint.folder import find_folder
from trimtab.errors import AdapterError
from trimtab.gguf import adapter
from trimtab.gguf.header import read_gguf
from trimtab.serve.adapters.new_adapters import files_stamp


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function of a family: (the model's file, its folder, an adapter of PEFT with two ranks, the same in GGUF)."""
    root = tmp_path_factory.mktemp("lora")

    def of(family: str) -> tuple[Path, Path, Path, Path]:
        file, dense = gguf_files.model(family, "q8_0", root / family)
        folder = pico.adapter(dense, root / f"{family}-peft", rank_pattern={"down_proj": 2})
        return file, dense, folder, gguf_files.lora(family, folder, root / f"{family}.gguf")

    return of


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "llama", "mistral"])
def test_answers_are_those_of_the_adapter_of_peft(family, made, tmp_path):
    file, dense, folder, lora = made(family)
    found = read_adapter(lora)
    wanted = {name: tensor.float() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    config = json.loads((find_folder(file) / "config.json").read_text())
    written = load_file(for_peft(lora, config) / "adapter_model.safetensors")
    assert set(written) == set(wanted) and all(torch.equal(written[name], tensor) for name, tensor in wanted.items())
    assert (for_peft(lora, config) == found.peft_folder) is not bool(found.turned)  # one copy where no rows are moved
    assert found.config["r"] == 4 and set(found.config["rank_pattern"].values()) == {2} and found.config["lora_alpha"] == 8.0
    plan = trimtab.plan(file, adapters=lora, device="cpu", context=64, place={"*": "resident"})
    truth = stock.with_adapter(stock.load_stock(dense), folder)
    with trimtab.load(plan) as model:
        model.adapter_store.set(lora.name)
        logits = stock.logits(model.hf_model, pico.inputs("llama", model.hf_model.config))
    assert torch.equal(logits, stock.logits(truth, pico.inputs("llama", truth.config)))
    for number, given in enumerate((folder, lora)):
        trimtab.merge(file, tmp_path / str(number), adapters=given)
    merged = [(tmp_path / str(number) / "model.safetensors").read_bytes() for number in (0, 1)]
    assert merged[0] == merged[1]


def test_a_lora_of_another_architecture_with_equal_shapes_is_refused(made):
    lora, file = made("qwen3")[3], made("llama")[0]
    error = raised(AdapterError, trimtab.plan, file, adapters=lora, device="cpu", context=64)
    assert error.problems == ("is a LoRA for qwen3 (general.architecture), the model is of the type llama",)


def test_the_file_is_named_as_the_user_did_and_its_change_is_seen(made, tmp_path):
    lora = shutil.copy(made("qwen3")[3], tmp_path / "mine.gguf")
    plan = trimtab.plan(made("qwen3")[0], adapters={"one": lora}, device="cpu", context=64)
    assert plan.request.adapters == {"one": str(lora)} and files_stamp(lora) is not None
    with trimtab.load(plan) as model:
        assert not model.reload_adapter("one")
        os.utime(lora, ns=(1, 1))
        assert model.reload_adapter("one")
    assert raised(AdapterError, trimtab.load, plan, match="mine.gguf changed since the plan was made").path == str(lora)


def test_rows_that_are_too_many_to_move_are_counted(made, monkeypatch):
    file, _, _, lora = made("llama")
    monkeypatch.setattr(adapter, "MOST_TURNED_BYTES", 10)
    error = raised(AdapterError, trimtab.plan, file, adapters=lora, device="cpu", context=64)
    assert "blk.0.attn_k.weight.lora_b has 1024 B, of at most 10 B the rows are put in order" in error.problems[0]


def test_a_folder_of_the_cache_that_goes_away_is_named(tmp_path, monkeypatch):
    def removed(path):
        (path.parent / "gguf.json").unlink()
        return header(path)

    header = adapters_file.read_header
    monkeypatch.setattr(adapters_file, "read_header", removed)
    with pytest.raises(AdapterError, match="was removed from the cache while it was read"):
        read_adapter(lora_file(tmp_path))


def test_a_disk_without_room_and_a_short_file_are_named(tmp_path, monkeypatch):
    def full(pairs, turned, target):
        raise OSError(28, "No space left on device")

    file = lora_file(tmp_path)
    monkeypatch.setattr(adapter, "_write_tensors", full)
    error = raised(AdapterError, read_adapter, file, match="cannot be written \\(No space left on device\\)")
    assert error.path == str(file) and "XDG_CACHE_HOME" in error.hint
    monkeypatch.undo()
    monkeypatch.setattr(adapter, "read_gguf", lambda path: (read_gguf(path), os.truncate(path, 4096))[0])
    with pytest.raises(AdapterError, match="changed while it was read"):
        read_adapter(file)


def lora_file(tmp_path, keys=None, tensors=None):
    own = {"general.type": "adapter", "general.architecture": "qwen3", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    pair = {
        "blk.0.attn_q.weight.lora_a": ("F32", torch.ones(4, 256), (4, 256)),
        "blk.0.attn_q.weight.lora_b": ("F32", torch.ones(256, 4), (256, 4)),
    }
    given = {name: one for name, one in (own | (keys or {})).items() if one is not None}
    whole = {name: one for name, one in (pair | (tensors or {})).items() if one is not None}
    return gguf_files.write(tmp_path / "a.gguf", given, whole)


ONE = ("F32", torch.ones(4, 256), (4, 256))


@pytest.mark.parametrize(("keys", "tensors", "words"), [
    ({"general.type": "model"}, None, "is a model, and no LoRA\n`trimtab plan a.gguf` names its formats"),
    ({"adapter.type": "control_vector"}, None, "is a GGUF file, and no LoRA"),
    ({"general.architecture": "bert"}, None, "is of the architecture 'bert'"),
    ({"adapter.lora.alpha": None}, None, "adapter.lora.alpha is None"),
    ({"adapter.lora.alpha": 0.0}, None, "adapter.lora.alpha is 0.0"),
    ({"adapter.alora.invocation_tokens": [1, 2]}, None, "adapter.alora.invocation_tokens=[1, 2]: unknown key"),
    (
        {"general.architecture": "qwen35"}, {"blk.0.attn_qkv.weight.lora_a": ONE},
        "attn_qkv.weight.lora_a: its rows are in an order that the file does not tell",
    ),
    (None, {"blk.0.attn_q.weight.lora_b": None}, "self_attn.q_proj has lora_a alone"),
    (None, {"blk.0.attn_q.weight.lora_b": ("F32", torch.ones(256, 8), (256, 8))}, "lora_a [4, 256] and lora_b [256, 8]"),
    (None, {"blk.0.ssm_x.weight.lora_a": ONE}, "blk.0.ssm_x.weight.lora_a has no module of a linear layer"),
    (None, {"token_embd.weight.lora_a": ONE}, "token_embd.weight.lora_a has no module of a linear layer"),
    (None, {"blk.0.attn_q.weight.lora_a": ("F32", torch.ones(4), (4,))}, "is F32 [4]; matrices of F32, F16, BF16 are read"),
])  # fmt: skip
def test_an_adapter_that_is_not_read_is_refused_by_name(keys, tensors, words, tmp_path):
    error = raised(AdapterError, lambda: read_adapter(lora_file(tmp_path, keys, tensors)))
    assert words in str(error) and "a.gguf" in str(error)


def test_a_changed_file_is_read_again(tmp_path):
    for alpha in (8.0, 16.0):
        found = read_adapter(lora_file(tmp_path, {"adapter.lora.alpha": alpha}))
        assert json.loads((found.peft_folder / "adapter_config.json").read_text())["lora_alpha"] == alpha


def test_a_lora_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    file = lora_file(tmp_path)
    write = adapter._write_tensors
    monkeypatch.setattr(adapter, "_write_tensors", lambda *given: (write(*given), os.utime(file, (1, 1))))
    with pytest.raises(AdapterError, match="changed while it was read"):
        read_adapter(file)
