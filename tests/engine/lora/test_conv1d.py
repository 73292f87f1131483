"""LoRA on GPT-2's Conv1D answers and merges as PEFT's: plain, rsLoRA and DoRA, per row of a batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from tests.engine.lora.test_experts import answered, loaded, of_peft
from tests.engine.lora.test_routers import IDS, gap, logprobs, of_model
from tests.merged_models import load, peft_merged, state_of
from trimtab.bridge import load_peft
from trimtab.errors import AdapterError

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"fan_in_fan_out": True, "lora_bias": True}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=128, n_embd=48, n_layer=2, n_head=2, n_inner=80, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    folder = tmp_path_factory.mktemp("gpt2") / "base"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    from peft import LoraConfig, get_peft_model

    for seed, (name, options) in enumerate(WAYS.items()):
        config = LoraConfig(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"], **options)
        model, generator = get_peft_model(load(base), config), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "lora_" in path:
                    change = 0.1 * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(parameter * (1 + change) if "magnitude" in path else change)
        model.save_pretrained(base.parent / name)
    return {name: base.parent / name for name in WAYS}


def test_rows_of_a_batch_answer_as_in_peft(base: Path, adapters: dict[str, Path]) -> None:
    expected = {name: of_peft(base, path) for name, path in adapters.items()} | {"base": of_model(load(base))}
    with loaded(base, adapters) as model:
        names = (*WAYS, "base")
        requests = [{"prompt": IDS, "adapter": None if name == "base" else name} for name in names]
        found = [logprobs(one) for one in model.batch(requests, rows=4, max_new_tokens=3, logprobs=8)]
        mix = answered(model, {"rslora": 2})
        for name in WAYS:
            model.unload_adapter(name)
        assert gap(answered(model, None), expected["base"]) < 2e-5
    assert max(gap(one, expected[name]) for one, name in zip(found, names, strict=True)) < 2e-5
    assert min(gap(one, expected["base"]) for one in (*found[:3], mix)) > 1e-2


@pytest.mark.parametrize("name", WAYS)
def test_a_merge_equals_pefts(name: str, base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    trimtab.merge(base, tmp_path / "merged", adapters={"a": adapters[name]}, check=True)
    found, expected = state_of(tmp_path / "merged"), peft_merged(base, adapters[name])
    # DoRA's norms are sums in another order.
    assert max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 2e-6


@pytest.mark.parametrize("name", WAYS)
def test_load_peft_fills_a_conv1d(name: str, base: Path, adapters: dict[str, Path]) -> None:
    assert float((of_model(load_peft(load(base), adapters[name]).eval()) - of_peft(base, adapters[name])).abs().max()) == 0


def test_the_weight_of_a_conv1d_in_target_parameters_is_refused(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """PEFT adds B A to such a weight as it lies; where it is square both ways have the same shapes."""
    folder = shutil.copytree(adapters["rslora"], tmp_path / "named")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": ["c_attn", "c_fc"], "target_parameters": ["attn.c_proj.weight"]})
    )
    with pytest.raises(AdapterError, match="weight of a Conv1D is not supported; name the module"):
        trimtab.plan(base, adapters={"a": folder}, quant="none", device="cpu", context=64)
