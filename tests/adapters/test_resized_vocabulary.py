"""Adapters trained after resize_token_embeddings, as PEFT writes them, are applied to the resized base as PEFT reloads them."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import pico, stock
from tests.raised import raised
from trimtab.errors import AdapterError
from trimtab.merging import merge

IDS = list(range(5, 25))
TOLERANCE = 1e-4
ROWS = pico.VOCABULARY + 64
SAVED = {
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]}, "head": {"modules_to_save": ["lm_head"]},
    "table": {"modules_to_save": ["embed_tokens"]}, "lora on the table": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]}, "neither": {},
}  # fmt: skip


def resized(base: Path, seed: int) -> Any:
    model = stock.load_stock(base, dtype=torch.float32)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(ROWS)
    with torch.no_grad():  # new rows are near the mean otherwise
        table = model.get_input_embeddings().weight
        table[pico.VOCABULARY :] = 0.1 * torch.randn(64, table.shape[1])
    return model


def saved_adapter(base: Path, folder: Path, **options: Any) -> Any:
    """Return the live model after its adapter was written: a base that was resized, and trained in every adapter weight."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(resized(base, 9), LoraConfig(**({"r": 2, "target_modules": ["q_proj"]} | options)))
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "lora_" in path or "modules_to_save" in path:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "qwen3"], ids=["untied", "tied"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a base, it resized as for training, and it resized with other new rows."""
    folder = tmp_path_factory.mktemp(request.param)
    base = pico.build(request.param, folder / "base", dtype="float32")
    for name, seed in (("same", 9), ("other", 1)):
        resized(base, seed).save_pretrained(folder / name)
        for file in base.iterdir():
            if not (folder / name / file.name).exists() and "safetensors" not in file.name:
                shutil.copy(file, folder / name)
    return base, folder / "same", folder / "other"


def logits(base: Path, adapter: Path) -> torch.Tensor:
    plan = trimtab.plan(base, adapters={"a": adapter}, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model:
        return model.logits(IDS, adapter="a")


@pytest.mark.parametrize("kind", SAVED)
def test_an_adapter_of_a_resized_model_is_applied_as_peft_reloads_it(
    kind: str, folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, same, other = folders
    adapter = tmp_path / "adapter"
    live = stock.logits(saved_adapter(base, adapter, **SAVED[kind]), {"input_ids": torch.tensor([IDS])})[0]
    torch.testing.assert_close(logits(same, adapter), live, rtol=TOLERANCE, atol=TOLERANCE)
    # A base with other new rows: PEFT's loader decides which of them stay.
    for folder in (same, other):
        model = stock.with_adapter(stock.load_stock(folder, dtype=torch.float32), adapter)
        expected = stock.logits(model, {"input_ids": torch.tensor([IDS])})[0]
        torch.testing.assert_close(logits(folder, adapter), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert f"resize_token_embeddings({ROWS}) on the base" in str(raised(AdapterError, logits, base, adapter))
    merge(other, tmp_path / "out", adapters={"a": adapter}, check=True)
    merged = stock.logits(stock.load_stock(tmp_path / "out", dtype=torch.float32), {"input_ids": torch.tensor([IDS])})[0]
    torch.testing.assert_close(merged, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_copies_that_peft_does_not_read_are_told_by_inspect(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, same, _ = folders
    adapter = tmp_path / "adapter"
    saved_adapter(base, adapter, **SAVED["head"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    stem = "base_model.model.lm_head"
    assert {f"{stem}.weight", f"{stem}.modules_to_save.weight", f"{stem}.original_module.weight"} <= set(tensors)
    reasons = {entry["key"]: entry["reason"] for entry in trimtab.inspect(adapter, model=same)["dropped"]}
    assert "second copies" in reasons[f"{stem}.modules_to_save.weight"]
    assert "the base's own weights" in reasons[f"{stem}.original_module.weight"]
    # PEFT reads the short name, whatever the copy holds.
    expected = stock.with_adapter(stock.load_stock(same, dtype=torch.float32), adapter)
    tensors[f"{stem}.modules_to_save.weight"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    again = stock.with_adapter(stock.load_stock(same, dtype=torch.float32), adapter)
    given = {"input_ids": torch.tensor([IDS])}
    assert torch.equal(stock.logits(again, given), stock.logits(expected, given))
    torch.testing.assert_close(logits(same, adapter), stock.logits(again, given)[0], rtol=TOLERANCE, atol=TOLERANCE)


def test_an_untrained_copy_of_a_module_that_is_not_saved_is_refused(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, same, _ = folders
    adapter = tmp_path / "adapter"
    saved_adapter(base, adapter, **SAVED["head"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": None}))
    error = raised(AdapterError, logits, same, adapter)
    assert any(re.search(r"original_module.*modules_to_save does not name", text) for text in error.problems)
