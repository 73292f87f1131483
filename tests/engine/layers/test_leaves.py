"""Weights kept unpacked are the packed ones' own bits, are used where several rows or tokens are, and are in the plan."""

from __future__ import annotations

import pytest
import torch

import trimtab
from tests import pico
from tests.cuda_on_cpu.modules import rows as rows_module
from tests.engine.decode.test_graphs import joined, replayed  # noqa: F401
from tests.engine.kernels.test_fused_kernels import MANY_STEP_TOLERANCE, on_cpu, wide  # noqa: F401
from tests.engine.prefill.test_prefill import answered, differ, eager, ids, in_chunks
from tests.planning.values.test_execution import E4B, plan
from trimtab.engine.families import check
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.formats.weights import dequantize, shell
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels import gemm4
from trimtab.engine.kernels.autotune import RandomWeights
from trimtab.engine.layers.leaves import UnpackedWeights
from trimtab.planning import Machine, Plan, Rates, make_plan
from trimtab.planning.planner import ITEM, unpacked_bytes
from trimtab.request import LoadRequest

# In the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_of_many_rows_keeps_weights_unpacked_where_half_of_what_is_left_holds_them():
    count = unpacked_bytes(E4B)
    assert 7 * 2**30 < count < 8 * 2**30  # 3.9 billion weights of two bytes
    large = plan(139, batch=32)
    assert large.gpu[ITEM] == count and "unpacked weights" in str(large)
    left = large.gpu_budget_bytes - large.gpu_needed_bytes
    assert left > count
    # Everything else stays as it is on a card that has no room.
    small = plan(16, batch=32)
    assert ITEM not in small.gpu and {row.tier for row in small.placements} == {row.tier for row in large.placements}


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_keep_them_for_their_prompts_where_a_quarter_of_what_is_left_holds_them(rows):
    count = unpacked_bytes(E4B)
    large, middle, many = plan(139, batch=rows), plan(36, batch=rows), plan(36, batch=9)
    assert large.gpu[ITEM] == count and many.gpu[ITEM] == count and ITEM not in middle.gpu
    left = middle.gpu_budget_bytes - middle.gpu_needed_bytes
    assert count > left / 4
    enough = plan(middle.gpu_needed_bytes / 2**30 + 4 * count / 2**30 + 1, batch=rows)
    assert ITEM in enough.gpu and enough.gpu_needed_bytes <= enough.gpu_budget_bytes


@pytest.mark.parametrize("changed", [{"decode": "eager"}, {"place": {"model.language_model.layers.3": "stream"}}])
def test_steps_that_read_other_weights_keep_none_unpacked(changed):
    assert ITEM not in plan(139, batch=32, **changed).gpu


def test_a_plan_with_unpacked_weights_comes_back_from_its_file():
    made = plan(139, batch=32)
    assert made.from_json(made.to_json()) == made


def on_cpu_plan(gib: float, **asked) -> Plan:
    machine = Machine(execution_device="cpu", host_available_bytes=int(gib * 2**30))
    request = LoadRequest(model="m", **{"quant": "nf4-dq", "images": 0, "audio_s": 0.0, **asked})
    return make_plan(request, E4B, adapters={}, machine=machine, rates=Rates())


def test_on_a_cpu_one_row_keeps_them_too_where_half_of_the_memory_that_device_and_host_share_is_left():
    count = unpacked_bytes(E4B)
    large, small = on_cpu_plan(40), on_cpu_plan(18)
    assert large.gpu[ITEM] == count and ITEM not in small.gpu and large.gpu_needed_bytes - small.gpu_needed_bytes >= count
    # A budget for the device bounds them as well, and so does what the host needs of the same memory.
    assert ITEM not in on_cpu_plan(40, gpu_memory_bytes=14 * 2**30).gpu
    assert ITEM in on_cpu_plan(40, gpu_memory_bytes=36 * 2**30).gpu
    assert ITEM not in on_cpu_plan(18, gpu_memory_bytes=100 * 2**30).gpu
    assert ITEM not in on_cpu_plan(40, prefix_cache_bytes=17 * 2**30).gpu


@pytest.mark.parametrize("changed", [{"quant": "none"}, {"quant": "int8"}, {"place": {"language": "stream"}}])
def test_a_cpu_that_unpacks_no_weight_of_one_row_keeps_none(changed):
    assert ITEM not in on_cpu_plan(60, **changed).gpu


# What is kept --------------------------------------------------------------------------------------------------------


def loaded(family, folder, monkeypatch):
    base, adapters = wide(family, monkeypatch, folder)
    made = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=64, device="cpu", images=0, audio_s=0.0)
    return trimtab.load(made)


def test_they_are_the_bits_that_bitsandbytes_unpacks(monkeypatch, tmp_path):
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        assert model.unpacked is None  # on a CPU the layers have them
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
        with model.adapter_store.applying(None, MatmulTable(kept.matmul(least=7))):
            assert torch.equal(layer.mlp.gate_proj(x), before)  # six rows: as they are
        with model.adapter_store.applying(None, MatmulTable(kept.matmul(least=6))):
            assert torch.equal(layer.mlp.gate_proj(x), torch.nn.functional.linear(x, kept.weight(layer.mlp.gate_proj)))
        assert model.adapter_store.matmuls is None


def test_a_step_of_ten_rows_with_unpacked_weights_is_the_modules(on_cpu, replayed, monkeypatch, tmp_path):  # noqa: F811
    on_cpu.rows = rows_module()
    monkeypatch.setattr(gemm4, "PAYING_ROWS", 9)  # so many rows have the packed weights
    asked = [(("a", None, "b")[number % 3], [5 + number, 6, 7 + 2 * number], {}) for number in range(10)]
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        batch_of_modules = joined(model, "eager", asked, rows=10)
        model.unpacked = UnpackedWeights(prompt_kernels.four_bit(model.hf_model))
        batch = joined(model, "fused", asked, rows=10)
        wanted, found = batch_of_modules.logits(), batch.logits()
        assert (found - wanted).abs().max() <= MANY_STEP_TOLERANCE * wanted.abs().max()
        assert "rows_low" in on_cpu.rows.launches and "rows_up" in on_cpu.rows.launches
        assert not any(name.startswith("rows_product") for name in on_cpu.rows.launches)


def test_a_prompt_over_unpacked_weights_is_the_prompt(monkeypatch, tmp_path):
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        expected = answered(eager(model), model.prepare(ids(40)))
        kept = UnpackedWeights(prompt_kernels.four_bit(model.hf_model))
        with model.adapter_store.applying(None, MatmulTable(kept.matmul())):
            found = answered(in_chunks(model, (16,)), model.prepare(ids(40)))
        # In bfloat16 a padded product may round its sums elsewhere: a few steps of 2^-8 of the largest score.
        assert differ(found, expected) < 2**-5
        weights = kept.weight(prompt_kernels.four_bit(model.hf_model)[0])
        weights.mul_(-1)  # and a wrong weight is seen
        with model.adapter_store.applying(None, MatmulTable(kept.matmul())):
            assert differ(answered(in_chunks(model, (16,)), model.prepare(ids(40))), expected) > 2**-5


def test_a_description_is_compared_over_weights_that_are_kept_and_none_is_dequantized_again(monkeypatch, tmp_path):
    with loaded("gemma4", tmp_path, monkeypatch) as model:
        leaves = prompt_kernels.four_bit(model.hf_model)
        model.unpacked = UnpackedWeights(leaves)
        for leaf in leaves:
            monkeypatch.setitem(leaf.__dict__, "shell", lambda _: pytest.fail("dequantized"))
        assert check.difference(model) is None and model.adapter_store.matmuls is None


@pytest.mark.parametrize("quant", ["int4-g32", "q4_k", "q8_0"])
def test_a_weight_that_is_kept_is_dequantized_in_fewer_pieces_to_the_same_bits(quant, monkeypatch):
    packed = RandomWeights(torch.device("cpu"), quant=quant).make(64, 256)
    monkeypatch.setattr("trimtab.formats.record.DEQUANTIZED_VALUES", 1024)
    wanted, pieces, copy = dequantize(packed), [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *given: pieces.append(len(self)) or copy(self, *given))
    for at_once, count in ((0, 16), (4096, 4), (10**6, 1)):
        assert torch.equal(dequantize(packed, torch.empty_like(wanted), at_once=at_once), wanted)
        assert len(pieces) == count
        pieces.clear()


@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_on_a_cpu_every_layer_gives_the_bits_of_bitsandbytes(dtype, quant, tmp_path):
    base = pico.build("llama", tmp_path / "base", dtype=dtype)
    made = trimtab.plan(base, quant=quant, dtype=dtype, context=64, device="cpu")
    assert ITEM in made.gpu
    with trimtab.load(made) as model:
        leaves = prompt_kernels.four_bit(model.hf_model)
        values = sum(leaf.in_features * leaf.out_features for leaf in leaves)
        assert leaves and model.unpacked_bytes == made.gpu[ITEM] == values * model.dtype.itemsize
        for leaf in leaves:
            theirs = shell(leaf.packed(), leaf.bias, leaf.dtype)
            for rows in (1, 3, 20):
                x = torch.randn(2, rows, leaf.in_features, dtype=model.dtype)
                assert torch.equal(leaf(x), theirs(x))
        x = torch.randn(1, 3, leaves[0].in_features, dtype=model.dtype)
        before = leaves[0](x)
        leaves[0].packed().parts["weight"].zero_()
        assert torch.equal(leaves[0](x), before)  # nothing reads the packed weight
        shares = {one.name: one for one in model.memory_shares()}
        assert shares["unpacked weights"].measured_bytes == shares["unpacked weights"].planned_bytes == made.gpu[ITEM]


def test_closing_gives_them_back(monkeypatch, tmp_path):
    model = loaded("llama", tmp_path, monkeypatch)
    model.unpacked = UnpackedWeights(prompt_kernels.four_bit(model.hf_model))
    shares = {one.name: one for one in model.memory_shares()}
    assert shares["unpacked weights"].measured_bytes == model.unpacked.nbytes
    model.close()
    assert model.unpacked is None
