"""Weights kept unpacked are the packed ones' own bits, are used where several rows or tokens are, and are in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import trimtab
from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import rows as rows_module
from tests.test_execution import E4B, plan
from tests.test_fused_kernels import on_cpu  # noqa: F401
from tests.test_graphs import joined, replayed  # noqa: F401
from tests.test_many_step import STEP_TOLERANCE, wide
from tests.test_prefill import answered, differ, eager, ids, in_chunks
from trimtab.plan.unpacked import ITEM, unpacked_bytes
from trimtab.runtime import prompt_kernels
from trimtab.runtime.quant import dequantize
from trimtab.runtime.unpacked_weights import UnpackedWeights

needs_sources = pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))


# In the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_of_many_rows_keeps_weights_unpacked_where_half_of_what_is_left_holds_them():
    count = unpacked_bytes(E4B)
    assert 7 * 2**30 < count < 8 * 2**30  # 3.9 billion weights of two bytes
    large, few = plan(139, batch=32), plan(139, batch=8)
    assert large.gpu[ITEM] == count and ITEM not in few.gpu
    assert large.gpu_needed_bytes - few.gpu_needed_bytes > count
    assert "unpacked weights" in str(large)
    left = large.gpu_budget_bytes - large.gpu_needed_bytes
    assert left > count
    # Everything else stays as it is on a card that has no room.
    small = plan(16, batch=32)
    assert ITEM not in small.gpu and {row.tier for row in small.placements} == {row.tier for row in large.placements}


@pytest.mark.parametrize("changed", [{"decode": "eager"}, {"place": {"model.language_model.layers.3": "stream"}}])
def test_steps_that_read_other_weights_keep_none_unpacked(changed):
    assert ITEM not in plan(139, batch=32, **changed).gpu


def test_a_plan_with_unpacked_weights_comes_back_from_its_file():
    made = plan(139, batch=32)
    assert made.from_json(made.to_json()) == made


# What is kept --------------------------------------------------------------------------------------------------------


def loaded(family, folder, monkeypatch):
    base, adapters = wide(family, monkeypatch, folder)
    made = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=64, device="cpu", images=0, audio_s=0.0)
    return trimtab.load(made)


def test_they_are_the_bits_that_bitsandbytes_unpacks(monkeypatch, tmp_path):
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        assert model.unpacked is None
        model.plan = replace(model.plan, gpu={**model.plan.gpu, ITEM: 1})
        kept = UnpackedWeights.of(model)
        leaves = prompt_kernels.four_bit(model.hf_model)
        for leaf in leaves:
            assert torch.equal(kept.weight(leaf), dequantize(leaf.packed()))
        assert kept.nbytes == sum(2 * leaf.in_features * leaf.out_features for leaf in leaves)
        layer = model.hf_model.get_decoder().layers[0]
        pair = [layer.mlp.gate_proj, layer.mlp.up_proj]
        assert torch.equal(kept.joined(pair), torch.cat([kept.weight(one) for one in pair]))
        assert kept.joined([layer.mlp.up_proj, layer.mlp.gate_proj]) is None
        assert kept.joined([layer.self_attn.q_proj, layer.mlp.gate_proj]) is None
        x = torch.randn(2, 3, 256, dtype=model.dtype)
        before = layer.mlp.gate_proj(x)
        with kept.covering(least=7):
            assert torch.equal(layer.mlp.gate_proj(x), before)  # six rows: as they are
        with kept.covering(least=6):
            assert torch.equal(layer.mlp.gate_proj(x), torch.nn.functional.linear(x, kept.weight(layer.mlp.gate_proj)))
        assert "base" not in vars(layer.mlp.gate_proj)


@needs_sources
def test_a_step_of_ten_rows_with_unpacked_weights_is_the_modules(on_cpu, replayed, monkeypatch, tmp_path):  # noqa: F811
    on_cpu.rows = rows_module()
    asked = [(("a", None, "b")[number % 3], [5 + number, 6, 7 + 2 * number], {}) for number in range(10)]
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        batch_of_modules = joined(model, "eager", asked, rows=10)
        model.unpacked = UnpackedWeights(prompt_kernels.four_bit(model.hf_model))
        batch = joined(model, "fused", asked, rows=10)
        wanted, found = batch_of_modules.logits(), batch.logits()
        assert (found - wanted).abs().max() <= STEP_TOLERANCE * wanted.abs().max()
        assert "rows_low" in on_cpu.rows.launches and "rows_up" in on_cpu.rows.launches
        assert not any(name.startswith("rows_product") for name in on_cpu.rows.launches)


def test_a_prompt_over_unpacked_weights_is_the_prompt(monkeypatch, tmp_path):
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        expected = answered(eager(model), model.prepare(ids(40)))
        kept = UnpackedWeights(prompt_kernels.four_bit(model.hf_model))
        with kept.covering(least=1):
            found = answered(in_chunks(model, (16,)), model.prepare(ids(40)))
        # In bfloat16 a padded product may round its sums elsewhere: a few steps of 2^-8 of the largest score.
        assert differ(found, expected) < 2**-5
        weights = kept.weight(prompt_kernels.four_bit(model.hf_model)[0])
        weights.mul_(-1)  # and a wrong weight is seen
        with kept.covering(least=1):
            assert differ(answered(in_chunks(model, (16,)), model.prepare(ids(40))), expected) > 2**-5


def test_closing_gives_them_back(monkeypatch, tmp_path):
    model = loaded("llama", tmp_path, monkeypatch)
    model.unpacked = UnpackedWeights(prompt_kernels.four_bit(model.hf_model))
    shares = {one.name: one for one in model.memory_shares()}
    assert shares["unpacked weights"].measured_bytes == model.unpacked.nbytes
    model.close()
    assert model.unpacked is None
