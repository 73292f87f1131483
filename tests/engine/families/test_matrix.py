"""Every family in every tier with every adapter says what stock PEFT says; configs that no class computes are named."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch

import trimtab
from tests import pico, stock
from tests.engine.loader.test_load import OLD
from tests.engine.prefill.test_prefill import answered, differ, eager, ids, in_chunks, picture
from tests.lent import lent
from tests.long_runs import skip_without_rings, slow_on_cpu
from tests.raised import raised
from trimtab.engine.batch.batch import Batch
from trimtab.engine.prefill import tower_passes
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import CheckpointError, RequestError
from trimtab.request import GenerateRequest

pytestmark = pytest.mark.skipif(OLD, reason="its modules differ from the descriptions")

FAMILIES = (*pico.FAMILIES, *pico._OTHERS)
TIERS = ("resident", "stream", "disk", "host", "gather")
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None, "lora": {"targets": "all"}, "rslora": {"rslora": True, "rank": 8}, "dora": {"dora": True},
    "saved head": {"modules_to_save": ["lm_head"]}, "saved norm": {"modules_to_save": ["norm"]},
}  # fmt: skip
PAIRS = list(product(TIERS, KINDS))
# float32: attention, the delta rule, experts and adapters add in another order (largest seen: 2.3e-5). An adapter changes 1e-3.
TOLERANCE = 5e-5


def cases() -> list[Any]:
    """Every combination; of each family one in every run, another pair of tier and kind each."""
    return [
        pytest.param(family, *pair) if number % len(PAIRS) == place else slow_on_cpu(family, *pair)
        for number, family in enumerate(FAMILIES) for place, pair in enumerate(PAIRS)
    ]  # fmt: skip


class Theirs:
    """The stock model with two adapters, and without."""

    def __init__(self, folder: Any, adapters: dict[str, Any]) -> None:
        self.model = stock.load_stock(folder, dtype=torch.float32)
        for name, path in adapters.items():
            if name == "a":
                self.model = stock.with_adapter(self.model, path)
            else:
                self.model.load_adapter(str(path), name)

    def logits(self, adapter: str | None, inputs: Any, token_ids: list[int]) -> torch.Tensor:
        if adapter is not None:
            self.model.set_adapter("default" if adapter == "a" else adapter)
        with self.model.disable_adapter() if adapter is None and hasattr(self.model, "disable_adapter") else nullcontext():
            return stock.next_logits(self.model, inputs.tensors, token_ids)


def planned(folder: Any, adapters: dict[str, Any], tier: str) -> Any:
    options = {"quant": "none", "dtype": "float32", "context": 96, "device": "cpu", "images": 1, "audio_s": 1.0}
    try:
        return trimtab.plan(folder, adapters=adapters, place={"*": tier}, **options)
    except RequestError:
        assert tier == "gather"  # a tied table alone leaves nothing to gather
        return trimtab.plan(folder, adapters=adapters, **options)


@pytest.mark.parametrize(("family", "tier", "kind"), cases())
def test_rows_say_what_stock_says(family, tier, kind, tmp_path):
    base = pico.built(family)
    options = KINDS[kind]
    if kind == "saved norm" and family.startswith("qwen3_5"):  # those inside recurrent layers are refused
        options = {"modules_to_save": ["language_model.norm" if family.endswith("_vl") else "model.norm"]}
    names = [] if options is None else ["a", "b"]
    adapters = {name: pico.adapter(base, tmp_path / name, **options, seed=number) for number, name in enumerate(names)}
    theirs = Theirs(base, adapters)
    with trimtab.load(planned(base, adapters, tier)) as model:
        skip_without_rings(model)
        if model.streamer is not None:
            model.streamer.poison = True
        looks = bool(pico.inputs(family, model.hf_model.config).keys() & {"pixel_values", "input_features"})
        is_described = model.anatomy.fused_unsupported is None
        for rows, asked in ((1, [names[0] if names else None]), (4, [None, *names])):
            batch = Batch(model, rows=rows, decode="fused" if is_described else "eager")
            batch.steps.mode = "auto" if kind == "saved norm" else batch.steps.mode  # such a norm is a fallback, as on a GPU
            batch.prompts = PrefillRunner(batch, "static", (8, 16))
            going = []
            for number, name in enumerate(asked):
                inputs = model.prepare(ids(9 + 8 * number))
                if looks and number == len(asked) - 1:
                    inputs = picture(model, family, 3)
                prompt = batch.begin(inputs, GenerateRequest(max_new_tokens=30), adapter=name).compute()
                wanted = theirs.logits(name, inputs, list(inputs.token_ids))
                assert differ(prompt.logits, wanted) < TOLERANCE, (rows, name)
                assert name is None or differ(theirs.logits(None, inputs, list(inputs.token_ids)), wanted) > 20 * TOLERANCE
                going.append((batch.join(prompt).row, inputs))
            for step in range(2):
                found = batch.logits()
                for row, inputs in going:
                    wanted = theirs.logits(row.adapter, inputs, row.token_ids)
                    assert differ(found[row.number], wanted) < TOLERANCE, (rows, row.adapter, step)
                    row.token_ids.append(int(wanted.argmax()))
                batch.write_last_tokens()
            fallbacks = {one.why for one in batch.steps.fallbacks}
            assert fallbacks == ({"an adapter replaces the weights of a norm"} if is_described and kind == "saved norm" else set())


FULL, SLIDING = "full_attention", "sliding_attention"
SECTIONS = "rope_parameters.mrope_section"
# Family, field of its text config, value, and what the error says.
UNUSABLE = [
    ("qwen3", "layer_types", [FULL, "strange_attention"], "strange_attention"),
    ("qwen3", "layer_types", [FULL, "linear_attention"], "its layers are of kinds ['linear_attention']"),
    ("gpt_oss", "layer_types", [FULL, "conv"], "its layers are of kinds ['conv']"),
    ("gemma2", "layer_types", [FULL, "chunked_attention"], "attention_chunk_size"),
    ("qwen3_5_vl", "layer_types", [FULL] * 3, "layer_types"), ("gemma3", "layer_types", [3, 3], "layer_types"),
    ("olmo3", "sliding_window", None, "NoneType"), ("gemma2", "sliding_window", 0, "a sliding window of 0 tokens"),
    ("llama", "sliding_window", -3, "a sliding window of -3 tokens"),
    ("qwen2_5_vl", SECTIONS, [4, 6, 5], "its mrope_section is [4, 6, 5]"),
    ("qwen3_vl", SECTIONS, [8, 8], "its mrope_section is [8, 8]"), ("qwen3_5_vl", SECTIONS, None, "its mrope_section is None"),
    ("ministral3", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "it has no llama_4_scaling_beta"),
    ("qwen3_5_vl", "linear_num_key_heads", 3, "linear_attn.in_proj_qkv.weight is [256, 64], the model's is [320, 64]"),
]  # fmt: skip


def changed(family, field, value, folder):
    base = pico.build(family, folder)
    config = json.loads((base / "config.json").read_text())
    holder = config.get("text_config", config)
    *parents, last = field.split(".")
    for name in parents:
        holder = holder[name]
    holder[last] = value
    (base / "config.json").write_text(json.dumps(config))
    return base


@pytest.mark.parametrize(("family", "field", "value", "words"), UNUSABLE)
def test_a_config_that_no_class_can_compute_is_refused_by_the_plan(family, field, value, words, tmp_path):
    base = changed(family, field, value, tmp_path)
    error = raised(CheckpointError, trimtab.plan, base, quant="none", context=96, device="cpu")
    assert words in str(error) and str(error.path).startswith(str(base))


# What the modules compute, and no description: how a plan for a GPU has it, with the reason.
FALLBACKS = [
    ("qwen3", "hidden_act", "relu", "its activation is relu"),
    ("gemma3n", "vocab_size", pico.VOCABULARY, "its layers keep several residuals"),
]


@pytest.mark.parametrize(("family", "field", "value", "words"), FALLBACKS)
def test_a_model_without_a_description_is_planned_with_its_modules_and_the_reason(family, field, value, words, tmp_path):
    base = changed(family, field, value, tmp_path)
    step = trimtab.plan(base, quant="nf4-dq", context=96, card="h100").execution.step
    assert step.mode == "graph" and words in step.reason


@pytest.mark.parametrize("family", [*pico.FAMILIES, *pico._OTHERS])
def test_a_plan_says_of_every_family_how_it_runs_and_why(family):
    plan = trimtab.plan(pico.built(family), quant="nf4-dq", context=96, card="h100")
    step, prompt = plan.execution.step, plan.execution.prompt
    is_described = family != "gemma3n"
    assert (step.mode, prompt.mode) == ("fused" if is_described else "graph", "graph")
    assert step.reason.startswith("its decoder is described" if is_described else "no fused steps: its layers keep")
    assert f"{step.mode}" in str(plan) and step.reason[:40] in " ".join(str(plan).split())


def test_images_whose_positions_do_not_fit_go_the_way_of_transformers(monkeypatch):
    """Named, and the answer is what it was."""
    with lent("qwen3_5_vl") as model:
        inputs = picture(model, "qwen3_5_vl", 5)
        expected = answered(eager(model), inputs)
        monkeypatch.setattr(
            tower_passes, "media_of", lambda *_: (_ for _ in ()).throw(RuntimeError("positions of shape [3, 3] for 9 tokens"))
        )
        batch = in_chunks(model, (8, 16))
        assert differ(answered(batch, inputs), expected) < 2e-5
        assert [(one.what, one.why) for one in batch.steps.fallbacks] == [
            ("captured prompts with media", "RuntimeError: positions of shape [3, 3] for 9 tokens")
        ]
