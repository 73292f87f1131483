"""Configs that no class can compute, descriptions and images that do not fit: each is named before anything is answered."""

import json

import pytest

import trimtab
from tests import pico
from tests.engine.loader.test_load import OLD
from tests.engine.prefill.test_prefill import answered, differ, eager, in_chunks, picture
from tests.lent import lent
from trimtab.engine.prefill import tower_passes
from trimtab.errors import CheckpointError

pytestmark = pytest.mark.skipif(OLD, reason="its modules differ from the descriptions")

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
    with pytest.raises(CheckpointError) as caught:
        trimtab.plan(base, quant="none", context=96, device="cpu")
    assert words in str(caught.value) and str(caught.value.path).startswith(str(base))


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
