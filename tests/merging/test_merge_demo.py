"""The demo model with an adapter merged in answers as the adapter did, in trimtab and in the stock stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trimtab
from tests import stock
from tests.long_runs import slow_on_cpu
from tests.merged_models import load
from trimtab.demo import demo
from trimtab.merging import merge

DEMO = demo.FOLDER
PROMPTS = [json.loads(text) for text in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def asks() -> list[dict[str, str]]:
    return [prompt for kind in ("text", "image", "audio") for prompt in PROMPTS if prompt["kind"] == kind][::3]


def media_of(prompt: dict[str, str]) -> dict[str, str]:
    return {kind: str(DEMO / prompt[kind]) for kind in ("image", "audio") if prompt.get(kind)}


@pytest.mark.parametrize(("voice", "requantize"), [
    ("rslora-dora", None), ("specialist", "nf4-dq"), slow_on_cpu("style", None), slow_on_cpu("specialist", None),
])  # fmt: skip
def test_the_merged_model_answers_as_the_adapter_did(voice: str, requantize: str | None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = merge(DEMO / "base", out, adapters={voice: DEMO / "adapters" / voice}, check=True, requantize=requantize)
    assert report.check is not None and report.check.passed
    kept = "none" if requantize is None else requantize
    plan = trimtab.plan(out, context=256, audio_s=1.0, device="cpu", quant=kept, place={"*": "resident"})
    found, expected = [], []
    with trimtab.load(plan) as model:
        inputs = []
        for prompt in asks():
            found.append(model.answer(prompt["prompt"], **media_of(prompt), max_new_tokens=48).text)
            expected.append(prompt["answers"][voice])
            inputs.append(model.prepare(prompt["prompt"], **media_of(prompt)))
        assert found == expected
        assert all(answer != prompt["answers"]["base"] for answer, prompt in zip(found, asks(), strict=True)) or (
            voice == "specialist"  # it leaves texts without pictures and sounds as they are
        )
        if requantize is None:
            stock_model = load(out)
            with torch.no_grad():
                for item, text in zip(inputs, expected, strict=True):
                    tokens = stock_model.generate(**item.tensors, max_new_tokens=48, do_sample=False)
                    answer = tokens[0, item.tensors["input_ids"].shape[1] :]
                    assert model.processor.tokenizer.decode(answer, skip_special_tokens=True).strip() == text


def test_the_merged_logits_are_nearer_the_adapters_than_rounding_puts_them_apart(tmp_path: Path) -> None:
    # Not the specialist: PEFT refuses Gemma 4's wrappers, which it names.
    adapter = DEMO / "adapters" / "style"
    merge(DEMO / "base", tmp_path / "out", adapters={"a": adapter})
    merge(DEMO / "base", tmp_path / "exact", adapters={"a": adapter}, dtype="float32")
    prompt = next(prompt for prompt in PROMPTS if prompt["kind"] == "image")
    plan = trimtab.plan(DEMO / "base", context=256, device="cpu", quant="none", place={"*": "resident"})
    with trimtab.load(plan) as model:
        inputs = model.prepare(prompt["prompt"], **media_of(prompt)).tensors
    base, out, exact = (load(folder) for folder in (DEMO / "base", tmp_path / "out", tmp_path / "exact"))
    loaded = stock.logits(stock.with_adapter(base, adapter), inputs).float()
    merged = stock.logits(out, inputs).float()
    full = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    reference = stock.logits(exact, full)
    # The float32 model is what both round: merging must not lose more than running unmerged in bfloat16 does, twice over.
    assert (merged - reference).abs().mean() < 2 * (loaded - reference).abs().mean()
