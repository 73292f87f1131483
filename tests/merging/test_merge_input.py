"""Bad input to a merge is refused with every problem at once, before a byte of the new model is written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import trimtab
from tests import merged_models, pico
from tests.merged_models import peft_merged, state_of
from tests.raised import raised
from trimtab.errors import AdapterError, CheckpointError
from trimtab.merging import merge


def changed(adapter: Path, folder: Path, **tensors: Tensor | None) -> Path:
    """Write the adapter with tensors replaced or (None) left out; names are spelled layer_role."""
    folder.mkdir()
    found = load_file(adapter / "adapter_model.safetensors")
    for name, value in tensors.items():
        layer, role = name.rsplit("__", 1)
        (key,) = [key for key in found if f".0.self_attn.{layer}.{role}." in key]
        if value is None:
            del found[key]
        else:
            found[key] = value
    save_file(found, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    return folder


def problems(base: Path, tmp_path: Path, **adapters: Path) -> tuple[str, ...]:
    before = set(merged_models.left_over(tmp_path))
    error = raised(AdapterError, merge, base, tmp_path / "out", adapters=adapters)
    assert set(merged_models.left_over(tmp_path)) == before
    return error.problems


def test_an_adapter_of_another_model_is_refused_with_every_key(base: Path, tmp_path: Path) -> None:
    other = pico.build("gemma4", tmp_path / "gemma4")
    adapter = pico.adapter(other, tmp_path / "adapter")
    found = problems(base, tmp_path, a=adapter)
    # Three of Gemma 4's five text layers are beyond this model's two; they have a pair for each of their projections.
    assert len(found) == 2 * (7 + 5 + 5) and all("the model has no model.layers." in problem for problem in found)


def test_everything_wrong_with_every_adapter_is_said_at_once(base: Path, adapter: Path, tmp_path: Path) -> None:
    nan, huge = torch.zeros(4, 64), torch.zeros(128, 4)
    nan[0, 0], nan[1, 1], huge[0, 0] = math.nan, math.inf, -math.inf
    one = changed(adapter, tmp_path / "one", q_proj__lora_B=None, k_proj__lora_A=torch.zeros(3, 64))
    other = changed(adapter, tmp_path / "other", q_proj__lora_A=nan, q_proj__lora_B=huge)
    found = problems(base, tmp_path, one=one, other=other)
    words = "\n".join(found)
    assert "q_proj: lora_B missing" in words and "k_proj.lora_A.weight: shape [3, 64], expected [4, 64]" in words
    assert "q_proj.lora_A.weight: 2 of 256 values are NaN or infinite" in words
    assert "q_proj.lora_B.weight: 1 of 512 values are NaN or infinite" in words
    assert all(str(tmp_path) in problem for problem in found) and len(found) == 4


def test_a_product_that_overflows_is_refused_though_its_factors_are_finite(base: Path, adapter: Path, tmp_path: Path) -> None:
    a, b = torch.zeros(4, 64), torch.zeros(128, 4)
    a[0, 0], b[0, 0] = 3e38, 3e38
    adapter = changed(adapter, tmp_path / "adapter", q_proj__lora_A=a, q_proj__lora_B=b)
    (found,) = problems(base, tmp_path, a=adapter)
    assert found.startswith("model.layers.0.self_attn.q_proj.weight: 1 values would be NaN or infinite in bfloat16")


def test_a_result_too_large_for_the_dtype_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    a, b = torch.zeros(4, 64), torch.zeros(128, 4)
    a[0, 0], b[0, 0] = 1000.0, 1000.0
    adapter = changed(adapter, tmp_path / "adapter", q_proj__lora_A=a, q_proj__lora_B=b)
    error = raised(AdapterError, merge, base, tmp_path / "out", adapters={"a": adapter}, dtype="float16")
    assert "infinite in float16" in error.problems[0]
    assert merged_models.left_over(tmp_path) == ["adapter"]


@pytest.mark.parametrize("harm", ["cut", "missing", "index"])
def test_base_shards_that_are_cut_or_missing_are_refused(harm: str, adapter: Path, tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base", shards=2)
    shard = sorted(base.glob("*.safetensors"))[1]
    if harm == "cut":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif harm == "missing":
        shard.unlink()
    else:
        index = json.loads((base / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.more.weight"] = shard.name
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        merge(base, tmp_path / "out", adapters={"a": adapter})
    assert merged_models.left_over(tmp_path) == ["base"]


def test_a_base_that_changes_meanwhile_is_refused_and_nothing_is_left(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pico.build("llama", tmp_path / "base", shards=2)

    def touch(done: int, of: int) -> None:
        if done == of:
            (base / "config.json").write_text((base / "config.json").read_text() + " ")

    with pytest.raises(CheckpointError, match="changed since"):
        merge(base, tmp_path / "out", adapters={"a": adapter}, progress=touch)
    assert merged_models.left_over(tmp_path) == ["base"]


def test_a_folder_without_weights_is_refused(adapter: Path, tmp_path: Path) -> None:
    pico.e_series("e2b", tmp_path / "base")
    with pytest.raises(CheckpointError, match="nothing to merge into"):
        merge(tmp_path / "base", tmp_path / "out", adapters={"a": adapter})


def test_progress_ends_with_every_byte(base: Path, adapter: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (report.file_bytes, report.file_bytes) and {of for _, of in seen} == {report.file_bytes}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_folder_that_holds_an_adapter_too_is_not_taken_for_the_model_alone(base: Path, adapter: Path, tmp_path: Path) -> None:
    """transformers loads both; what a merge writes is a model alone."""
    both = Path(shutil.copytree(base, tmp_path / "both"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, both / name)
    for read in (lambda: trimtab.plan(both, device="cpu"), lambda: merge(both, tmp_path / "out", dtype="float16")):
        error = raised(CheckpointError, read, match="holds an adapter too")
        assert error.path == str(both) and "give it as an adapter" in str(error)
    assert trimtab.plan(both, adapters={"own": both}, device="cpu", quant="none").request.adapters == {"own": str(both)}
    merge(both, tmp_path / "out", adapters={"a": adapter})
    assert not list((tmp_path / "out").glob("adapter_*"))
    assert all(torch.equal(tensor, state_of(tmp_path / "out")[name]) for name, tensor in peft_merged(base, adapter).items())


def test_layers_that_bitsandbytes_packs_turned_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=2)).save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"cannot be packed: 4 layers are Conv1D \(transformer.h.0.attn.c_attn") as caught:
        merge(tmp_path / "base", tmp_path / "out", requantize="nf4")
    assert caught.value.path == str(tmp_path / "base") and [path.name for path in tmp_path.iterdir()] == ["base"]
