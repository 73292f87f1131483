"""Merge lanes: labels by what was said, survival by an independent computation, what stock raises kept as evidence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import ROOT, merged_models, pico
from tests.raised import refused
from trimtab.verification.merges import stock_merge, variants
from trimtab.verification.merges.retention import Survival, lora_delta, mean_survival, survival
from trimtab.verification.merges.runs import run_lanes
from trimtab.verification.merges.variants import BY_NAME, LANES, LanePrompt, classify, lane_verdict
from trimtab.verification.routes import runner
from trimtab.verification.routes.prompts import Prompt, demo_prompts

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
DEMO = ROOT / "trimtab" / "demo"
PROMPTS = (Prompt("one", token_ids=tuple(range(40, 52))), Prompt("two", token_ids=tuple(range(90, 97))))
# NormalFloat of 4 bits: arXiv 2305.14314, appendix E.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


# Labels ---------------------------------------------------------------------------------------------------------------


def row(base_differs: bool, adapter_is_merged: bool | None, base_is_merged: bool | None = False) -> LanePrompt:
    return LanePrompt(
        id="p", classification="", base_differs=base_differs, adapter_is_merged=adapter_is_merged,
        base_is_merged=base_is_merged, kl_to_adapter=None, kl_base=None, kl_to_bf16=None, texts={},
    )  # fmt: skip


@pytest.mark.parametrize("name, is_adapter, is_base, label", [
    ("direct_4bit_merge", True, False, "DIRECT_4BIT_MERGED_MATCHES_ADAPTER"),
    ("direct_4bit_merge", False, True, "DIRECT_4BIT_MERGED_MATCHES_BASE"),
    ("direct_4bit_merge", False, False, "DIRECT_4BIT_MERGED_MATCHES_NEITHER"),
    ("fresh_bf16_merge", True, True, "BF16_MERGED_MATCHES_BF16_ADAPTER"),
    ("fresh_bf16_merge", False, True, "BF16_MERGED_MATCHES_BF16_BASE"),
    ("trimtab_requantized_merge", False, False, "TRIMTAB_REQUANTIZED_MERGED_MATCHES_NEITHER"),
])  # fmt: skip
def test_a_prompt_is_named_after_the_answer_it_matches(name, is_adapter, is_base, label):
    assert classify(BY_NAME[name], adapter_is_merged=is_adapter, base_is_merged=is_base) == label


@pytest.mark.parametrize("name, rows, verdict", [
    ("direct_4bit_merge", [row(True, True), row(True, False)], "DIRECT_4BIT_MERGE_STILL_DIVERGES"),
    ("direct_4bit_merge", [row(True, True)], "DIRECT_4BIT_MERGE_NO_LONGER_DIVERGES"),
    ("fresh_bf16_merge", [row(True, True), row(False, True)], "FRESH_BF16_MERGE_STILL_PASSES"),
    ("fresh_bf16_merge", [row(True, True), row(False, False)], "FRESH_BF16_MERGE_NO_LONGER_PASSES"),
    ("fresh_bf16_merge", [row(False, True)], "FRESH_BF16_MERGE_SHOWS_NOTHING"),
    ("trimtab_merge", [row(True, True)], "TRIMTAB_MERGE_PASSES"),
    ("adapter_vs_base", [row(False, None), row(True, None)], "ADAPTER_ACTIVE"),
    ("adapter_vs_base", [row(False, None)], "ADAPTER_INACTIVE"),
])  # fmt: skip
def test_a_lane_is_judged_by_its_prompts(name, rows, verdict):
    assert lane_verdict(BY_NAME[name], rows) == verdict


def test_the_seven_lanes_have_names():
    assert [lane.name for lane in LANES] == [
        "adapter_vs_base", "direct_4bit_merge", "fresh_bf16_merge", "dequantize_then_merge",
        "base_dequantize_then_merge", "trimtab_merge", "trimtab_requantized_merge",
    ]  # fmt: skip
    assert [lane.name for lane in variants.check_names(["trimtab_merge"])] == ["adapter_vs_base", "trimtab_merge"]
    error = refused(variants.check_names, ["merge"])
    assert (error.field, error.value) == ("lanes", "merge") and "trimtab_merge" in error.allowed


# Survival -------------------------------------------------------------------------------------------------------------


def test_survival_is_the_share_along_the_change_and_the_rest():
    base = torch.zeros(2, 2)
    delta = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    kept = survival("m", base, base + delta, delta)
    assert (kept.survived, kept.noise, kept.delta_norm) == (1.0, 0.0, 5.0)
    half = survival("m", base, 0.5 * delta + torch.tensor([[0.0, 5.0], [0.0, 0.0]]), delta)
    assert (half.survived, half.noise) == (0.5, 1.0)
    assert survival("m", base, base, delta).survived == 0.0 and survival("m", base, base + 2 * delta, delta).survived == 2.0
    assert survival("m", base, base, 0 * delta) == Survival("m", 1.0, 0.0, 0.0, 0.0)
    assert survival("m", base, base + 1, 0 * delta).survived == 0.0


def test_pieces_do_not_change_survival(monkeypatch):
    from trimtab.verification.merges import retention as module

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(9, 7, generator=generator) for _ in range(3)]
    whole = survival("m", *weights)
    monkeypatch.setattr(module, "_PIECE_VALUES", 10)
    pieces = survival("m", *weights)
    # The same sums of float64 in another order.
    assert (pieces.survived, pieces.noise) == (pytest.approx(whole.survived, rel=1e-12), pytest.approx(whole.noise, rel=1e-12))


def test_modules_count_by_the_squares_of_their_changes():
    rows = [Survival("a", 1.0, 0.0, 2.0, 0.0), Survival("b", 0.0, 1.0, 1.0, 0.0)]
    assert mean_survival(rows) == (pytest.approx(0.8), pytest.approx((1 / 5) ** 0.5))


def test_a_dora_change_is_the_rescaled_weight_less_the_base():
    generator = torch.Generator().manual_seed(0)
    weight, A, B = torch.randn(4, 6, generator=generator), torch.ones(1, 6), torch.ones(4, 1)
    magnitude = torch.arange(1.0, 5.0)
    merged = weight + lora_delta(weight, A, B, 0.5, magnitude)
    # The length of every row is its magnitude, to float32's rounding.
    assert torch.linalg.norm(merged, dim=1).tolist() == pytest.approx(magnitude.tolist(), rel=1e-5)
    assert torch.allclose(torch.nn.functional.normalize(merged), torch.nn.functional.normalize(weight + 0.5))


def nf4_round_trip(weight: np.ndarray) -> np.ndarray:
    """Quantize in blocks of 64 and back, in float64."""
    blocks = weight.reshape(-1, 64)
    scale = np.abs(blocks).max(1, keepdims=True).astype(np.float32).astype(np.float64)
    return (NF4[np.abs((blocks / scale)[..., None] - NF4).argmin(-1)] * scale).reshape(weight.shape)


# Lanes that run -------------------------------------------------------------------------------------------------------


def weaker(adapter: Path, factor: float) -> Path:
    file = adapter / "adapter_model.safetensors"
    tensors = {name: t * factor if "lora_B" in name else t for name, t in load_file(str(file)).items()}
    save_file(tensors, str(file), metadata={"format": "pt"})
    return adapter


def run(folder, adapter, work, names, prompts=PROMPTS):
    rows = runner.prepare(folder, "bfloat16", prompts, work, isolated=False)
    report = run_lanes(folder, adapter, rows, work / "lanes", device=DEVICE, new_tokens=5, names=names, isolated=False)
    json.dumps(report.to_json(), allow_nan=False)
    assert not [path for path in (work / "lanes").iterdir() if path.name != "adapter_vs_base"]
    return {run.lane.name: run for run in report.lanes}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    work = tmp_path_factory.mktemp("lanes")
    base = pico.build("llama", work / "base")
    return base, weaker(pico.adapter(base, work / "adapter"), 0.05)


def test_a_small_change_is_rounded_away_in_four_bits_and_not_in_bf16(small, tmp_path):
    base, adapter = small
    found = run(base, adapter, tmp_path, ["direct_4bit_merge", "fresh_bf16_merge", "base_dequantize_then_merge"])
    direct, bf16 = found["direct_4bit_merge"], found["fresh_bf16_merge"]
    assert direct.merge_warnings == 14 and bf16.merge_warnings == 0  # one a layer
    assert len(direct.survival) == len(bf16.survival) == 14
    assert mean_survival(direct.survival)[0] < 0.5 < 0.95 < mean_survival(bf16.survival)[0]
    assert mean_survival(found["base_dequantize_then_merge"].survival)[0] > 0.95
    assert direct.mean("kl_to_adapter") > bf16.mean("kl_to_adapter") > 0
    assert set(direct.stages) == {"base", "adapter", "merge", "merged"} and direct.error is None
    assert all(item.kl_to_bf16 is not None for item in direct.prompts)


@pytest.mark.skipif(DEVICE != "cpu", reason="one computation, checked where numpy runs")
def test_survival_in_four_bits_is_what_an_independent_computation_gives(small, tmp_path):
    base, adapter = small
    run_ = run(base, adapter, tmp_path, ["direct_4bit_merge"])["direct_4bit_merge"]
    weights = load_file(str(next(base.glob("*.safetensors"))))
    lora = load_file(str(adapter / "adapter_model.safetensors"))
    for found in run_.survival[:4]:
        weight = nf4_round_trip(weights[f"{found.module_path}.weight"].double().numpy())
        A, B = (lora[f"base_model.model.{found.module_path}.lora_{role}.weight"].double().numpy() for role in "AB")
        delta = 2 * B @ A  # pico's alpha is twice the rank
        before = torch.from_numpy(weight).bfloat16().double().numpy()
        apart = nf4_round_trip(torch.from_numpy(before + delta).bfloat16().double().numpy()) - before
        expected = (apart * delta).sum() / (delta * delta).sum()
        # PEFT rounds once more, to bf16 after adding a bf16 change: values on an edge fall to the other side.
        assert found.survived == pytest.approx(expected, abs=0.05), found.module_path
        assert found.delta_norm == pytest.approx(np.linalg.norm(delta), rel=1e-4)


def test_dequantizing_in_place_raises_and_the_evidence_is_kept(small, tmp_path):
    found = run(*small, tmp_path, ["dequantize_then_merge"])["dequantize_then_merge"]
    assert found.verdict == "DEQUANTIZE_THEN_MERGE_STILL_RAISES" and found.prompts == ()
    assert (found.error["type"], found.error["package"], found.error["stage"]) == ("AttributeError", "peft", "merge")
    assert "'quant_state'" in found.error["message"]
    assert found.error["frames"][-1].startswith("peft/") and "/site-packages" not in json.dumps(found.to_json())


def test_trimtabs_own_merges_pass_and_requantizing_keeps_the_change(tmp_path):
    base = pico.build("llama", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter")
    found = run(base, adapter, tmp_path, ["trimtab_merge", "trimtab_requantized_merge", "fresh_bf16_merge"])
    merge, requantized = found["trimtab_merge"], found["trimtab_requantized_merge"]
    assert merge.error is None and requantized.error is None and min(row.survived for row in merge.survival) > 0.99
    assert mean_survival(requantized.survival)[0] == pytest.approx(1.0, abs=0.1)
    assert mean_survival(requantized.survival)[1] > 10 * mean_survival(merge.survival)[1]
    # PEFT and trimtab round the same sums once: as good as each other.
    assert merge.mean("kl_to_adapter") == pytest.approx(found["fresh_bf16_merge"].mean("kl_to_adapter"), rel=0.5)
    assert merge.merge_s > 0 and set(merge.stages) == {"merge", "adapter", "merged"}


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.slow, id="in its own processes")])
def test_the_demo_model(tmp_path, isolated):
    """The specialist's targets name wrapped projections, which PEFT refuses: the lane loads a copy and says so."""
    rows = runner.prepare(DEMO / "base", "bfloat16", demo_prompts(1)[1:2], tmp_path, isolated=False)
    adapter = DEMO / "adapters" / "specialist"
    report = run_lanes(
        DEMO / "base", adapter, rows, tmp_path / "lanes", device=DEVICE, new_tokens=16, names=["fresh_bf16_merge"],
        isolated=isolated,
    )  # fmt: skip
    first, bf16 = report.lanes
    assert (first.verdict, bf16.verdict) == ("ADAPTER_ACTIVE", "FRESH_BF16_MERGE_STILL_PASSES")
    assert bf16.counts == {"BF16_MERGED_MATCHES_BF16_ADAPTER": 1}
    assert bf16.prompts[0].texts["merged"] == "three apricot frames at the bottom right"
    assert "names 27 wrapped projections" in bf16.notes[0]
    assert not isolated or bf16.memory["host_peak_bytes"] > 100 * 2**20  # of the processes
    assert len(bf16.survival) == 75
    assert set(report.versions) >= {"torch", "transformers", "peft", "bitsandbytes"}


def test_an_idle_adapter_shows_nothing(tmp_path):
    base = pico.build("llama", tmp_path / "base")
    adapter = weaker(pico.adapter(base, tmp_path / "adapter"), 0.0)
    found = run(base, adapter, tmp_path, ["fresh_bf16_merge"])
    assert found["adapter_vs_base"].verdict == "ADAPTER_INACTIVE"
    assert found["fresh_bf16_merge"].verdict == "FRESH_BF16_MERGE_SHOWS_NOTHING"


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", "mixtral"])
def test_what_peft_merges_is_measured_in_every_layout(tmp_path, family):
    """A Conv1D's weight is turned, and a stack of experts is a parameter without a layer."""
    import peft

    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=320, n_positions=64, n_embd=64, n_layer=2, n_head=2)
        transformers.GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path / "base")
        base, targets = tmp_path / "base", {"target_modules": ["c_attn", "c_fc"]}
    else:
        base = pico.build(family, tmp_path / "base")
        targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **targets)
    peft.get_peft_model(merged_models.load(base), config).save_pretrained(tmp_path / "adapter")
    found = run(base, tmp_path / "adapter", tmp_path, ["fresh_bf16_merge"])["fresh_bf16_merge"]
    assert (found.error, found.notes) == (None, ()) and len(found.survival) == {"gpt2": 4, "qwen3_moe": 4, "mixtral": 6}[family]
    assert all(row.survived == pytest.approx(1.0, abs=0.01) for row in found.survival)
    names = {row.module_path.rpartition(".")[2] for row in found.survival}
    assert names == ({"c_attn", "c_fc"} if family == "gpt2" else {"q_proj", "down_proj", "gate_up_proj"})
    assert not any("base_layer" in row.module_path for row in found.survival)


def test_a_measurement_that_fails_is_no_failure_of_the_merge(small, tmp_path, monkeypatch):
    def fail(module, weight):
        raise KeyError("lora_A")

    monkeypatch.setattr(stock_merge, "delta_of", fail)
    found = run(*small, tmp_path, ["fresh_bf16_merge"])["fresh_bf16_merge"]
    assert (found.error, found.survival, len(found.prompts)) == (None, (), 2)
    assert found.notes[0].endswith("q_proj: its survival could not be measured (KeyError: 'lora_A')")
