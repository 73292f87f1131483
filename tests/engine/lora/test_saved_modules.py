"""Saved modules that return several tensors, or of which the model calls other methods than forward: PEFT's numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from tests import pico
from tests.merged_models import load
from tests.raised import refused
from tests.stock import with_adapter

IDS = [2, 5, 9, 44, 100, 7, 8, 33, 21]


def saved_adapter(base: Path, folder: Path, name: str, parameter: str) -> Path:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(base), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name]))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for path, value in model.named_parameters():
                if "modules_to_save" in path and parameter in path:
                    value.add_(0.5 * torch.randn(value.shape, generator=generator))
        model.save_pretrained(folder)
    return folder


def logprobs(model: Any, answer: Any) -> list[tuple[float, float]]:
    """Return (own, stock's) of the most likely tokens of each step."""
    with torch.no_grad():
        stock = model(input_ids=torch.tensor([[*IDS, *answer.token_ids]])).logits[0].log_softmax(-1)
    steps = enumerate(answer.logprobs)
    return [(value, float(stock[len(IDS) - 1 + place, token])) for place, step in steps for token, value in step.top]


def test_a_saved_router_answers_as_in_peft_next_to_other_rows(tmp_path: Path) -> None:
    base = pico.build("mixtral", tmp_path / "base", dtype="float32")
    adapter = saved_adapter(base, tmp_path / "a", "gate", "weight")
    plan = trimtab.plan(base, adapters={"a": adapter}, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model:
        asked = [{"prompt": IDS, "adapter": name} for name in ("a", None, "a")]
        found = list(model.batch(asked, rows=3, max_new_tokens=4, logprobs=5))
    assert found[0].logprobs != found[1].logprobs
    stock = {"a": with_adapter(load(base), adapter), None: load(base)}
    for request, answer in zip(asked, found, strict=True):
        own, expected = zip(*logprobs(stock[request["adapter"]], answer), strict=True)
        assert own == pytest.approx(expected, abs=2e-4)


def test_methods_of_a_saved_module_run_with_its_parameters(tmp_path: Path) -> None:
    base = pico.build("gemma3n", tmp_path / "base", dtype="float32")
    adapter = saved_adapter(base, tmp_path / "a", "altup", "correct_output_scale")
    plan = trimtab.plan(base, adapters={"a": adapter}, quant="none", dtype="float32", context=64, device="cpu", batch=2)
    with trimtab.load(plan) as model, torch.no_grad():
        for name, stock in (("a", with_adapter(load(base), adapter)), (None, load(base))):
            expected = stock(input_ids=torch.tensor([IDS])).logits[0]
            torch.testing.assert_close(model.logits(IDS, adapter=name), expected, rtol=2e-4, atol=2e-4)
        saved = next(module for path, module in model.hf_model.named_modules() if path.endswith("layers.0.altup"))
        model.adapter_store.set_rows(["a", None])
        for read in (lambda: saved.scale_corrected_output(torch.ones(1)), lambda: saved.correct_output_scale):
            assert refused(read, match="rows of this batch use different adapters").field == "adapter"
