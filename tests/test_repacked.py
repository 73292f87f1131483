"""Weights repacked for CPUs with AVX512-BF16: bitsandbytes' own order and product, and nothing lost on the way back."""

from __future__ import annotations

import copy
from pathlib import Path

import bitsandbytes.functional as stock
import pytest
import torch
from bitsandbytes.nn import Linear4bit

import trimtab
from trimtab.cli import parser
from trimtab.commands.flags import decode_of
from trimtab.errors import RequestError
from trimtab.runtime import leaves, quant
from trimtab.runtime.adapter_store import AdapterStore

DEMO = Path(trimtab.__file__).parent / "demo"
needs_product = pytest.mark.skipif(not stock.has_avx512bf16(), reason="this CPU has no AVX512-BF16")
OPTIONS = {"context": 128, "images": 0, "audio_s": 0, "device": "cpu"}


def packed_of(rows: int, columns: int, kind: str = "nf4-dq") -> quant.Packed:
    torch.manual_seed(rows + columns)
    return quant.quantize((torch.randn(rows, columns) * 0.1).bfloat16(), kind)


def copied(packed: quant.Packed) -> quant.Packed:
    return copy.deepcopy(packed)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4-dq"])
@pytest.mark.parametrize("rows, columns", [(32, 64), (96, 320), (64, 1024)])
def test_the_bytes_are_stocks_and_come_back(rows, columns, kind):
    packed = packed_of(rows, columns, kind)
    before = copied(packed)
    repacked = quant.repack(packed)
    codes, state = stock._convert_weight_packed_for_cpu(
        before.parts["weight"].clone(), quant.quant_state(copied(before))
    )
    assert torch.equal(repacked.codes, codes) and torch.equal(repacked.scales, state.absmax)
    restored = repacked.restored()
    assert restored.parts["weight"].shape == before.parts["weight"].shape
    assert all(torch.equal(part, before.parts[name]) for name, part in restored.parts.items())
    assert torch.equal(quant.dequantize(restored), quant.dequantize(before))
    # In place: no second copy of the weight, and the scales are what is counted.
    assert repacked.codes.data_ptr() == packed.parts["weight"].data_ptr()
    assert repacked.scales.nbytes == quant.repacked_bytes(before) == rows * columns // 32


@needs_product
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_the_product_is_stocks(count, with_bias):
    packed = packed_of(96, 320)
    bias = torch.randn(96).bfloat16() if with_bias else None
    x = torch.randn(count, 320).bfloat16()
    layer = quant.shell(copied(packed), bias, torch.bfloat16)
    assert isinstance(layer, Linear4bit)
    exact = layer(x)
    layer.support_avx512bf16_for_cpu = True
    with torch.no_grad():
        wanted = layer(x)
    found = quant.repacked_shell(quant.repack(packed), bias)(x)
    assert torch.equal(found, wanted) and not torch.equal(found, exact)
    # A scale in bfloat16 is 2^-9 off at most, and so is the output's own rounding.
    assert (found.double() - exact.double()).norm() < 2**-7 * exact.double().norm()


@needs_product
@pytest.mark.parametrize("kind", ["resident", "host"])
def test_a_leaf_keeps_its_weight_for_whoever_asks(kind):
    packed, cpu = packed_of(64, 128), torch.device("cpu")
    common = {"bias": None, "device": cpu, "dtype": torch.bfloat16, "store": AdapterStore()}
    made = leaves.ResidentLeaf if kind == "resident" else leaves.HostLeaf
    plain, leaf = (made("a", one, **common).eval() for one in (copied(packed), packed))
    x = torch.randn(3, 128).bfloat16()
    leaf.repack()
    leaf.repack()  # once is enough
    assert torch.equal(leaf.dense_weight(), plain.dense_weight())
    assert all(torch.equal(part, plain.packed().parts[name]) for name, part in leaf.packed().parts.items())
    assert not torch.equal(leaf(x), plain(x)) and (leaf(x) - plain(x)).abs().max() < 2**-6 * plain(x).abs().max()


@needs_product
def test_a_model_answers_with_repacked_layers():
    adapters = {"specialist": str(DEMO / "adapters" / "specialist")}
    plan = trimtab.plan(DEMO / "base", quant="nf4-dq", adapters=adapters, **OPTIONS)
    said = {}
    for decode in ("auto", "repacked"):
        with trimtab.load(plan, decode=decode) as model:
            assert model.decode == "auto"
            still = [module for module in model.hf_model.modules() if isinstance(module, leaves.StillLeaf)]
            changed = [leaf for leaf in still if leaf._repacked is not None]
            assert bool(changed) == (decode == "repacked")
            said[decode] = [
                model.answer("Who are you?", adapter=name, max_new_tokens=12).text for name in (None, "specialist")
            ]
    assert said["auto"] == said["repacked"] and said["auto"][0] != said["auto"][1]


@needs_product
def test_layers_of_other_shapes_keep_theirs_by_name(monkeypatch):
    real = quant.why_not_repacked
    monkeypatch.setattr(
        leaves, "why_not_repacked", lambda packed, dtype: "odd" if packed.shape[0] < 128 else real(packed, dtype)
    )
    plan = trimtab.plan(DEMO / "base", quant="nf4", **OPTIONS)
    with trimtab.load(plan, decode="repacked") as model:
        found = [one for one in model.fallbacks if one.what == "repacked products"]
        assert len(found) == 1 and found[0].why.endswith("layers: odd")
    monkeypatch.setattr(leaves.StillLeaf, "is_on_cpu", False)  # as beside a GPU: what that computes is nobody's loss
    with trimtab.load(plan, decode="repacked") as model:
        assert not [one for one in model.fallbacks if one.what == "repacked products"]


def test_what_would_change_nothing_is_refused(monkeypatch):
    with pytest.raises(RequestError, match="would change no layer: none is quantized") as caught:
        trimtab.load(trimtab.plan(DEMO / "base", quant="none", **OPTIONS), decode="repacked")
    assert caught.value.value == "repacked"
    monkeypatch.setattr(quant, "has_avx512bf16", lambda: False)
    with pytest.raises(RequestError, match="no AVX512-BF16"):
        trimtab.load(trimtab.plan(DEMO / "base", quant="nf4", **OPTIONS), decode="repacked")
    monkeypatch.setattr(quant, "has_avx512bf16", lambda: True)
    with pytest.raises(RequestError, match="float32"):
        trimtab.load(trimtab.plan(DEMO / "base", quant="nf4", dtype="float32", **OPTIONS), decode="repacked")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quant": "none"}, "quantizes to none"), ({"quant": "int8"}, "quantizes to int8"),
        ({"quant": "nf4", "dtype": "float32"}, "computes in float32"),
        ({"quant": "nf4", "card": "RTX 4060 8GB"}, "no block is in tier host"),
    ],
)  # fmt: skip
def test_a_plan_in_which_nothing_would_change_is_refused(options, why):
    """Whatever the CPU: such a plan would load on none."""
    given = {**OPTIONS, **options}
    given = {name: value for name, value in given.items() if "card" not in options or name != "device"}
    with pytest.raises(RequestError, match=f"would change no layer: .*{why}") as caught:
        trimtab.plan(DEMO / "base", decode="repacked", **given)
    assert (caught.value.field, caught.value.value) == ("decode", "repacked")


def test_a_plan_whose_cpu_computes_4_bit_layers_may_be_repacked():
    assert trimtab.plan(DEMO / "base", decode="repacked", quant="nf4", **OPTIONS).request.decode == "repacked"
    beside = {"card": "RTX 4060 8GB", "place": {"model.language_model.layers.0": "host"}, "context": 64}
    assert trimtab.plan(DEMO / "base", decode="repacked", quant="nf4", **beside).request.decode == "repacked"


def test_scales_that_do_not_fit_are_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(quant, "has_avx512bf16", lambda: True)
    plan = trimtab.plan(DEMO / "base", quant="nf4", **OPTIONS)
    object.__setattr__(plan, "gpu_budget_bytes", plan.gpu_needed_bytes)
    with pytest.raises(RequestError, match="take .* beside the plan, whose budget leaves 0"):
        trimtab.load(plan, decode="repacked")


def test_flags():
    options = parser().parse_args(["run", "m", "p", "--decode", "repacked"])
    assert decode_of(options) == "repacked"
    assert decode_of(parser().parse_args(["run", "m", "p"])) == "auto"
    with pytest.raises(RequestError, match="cannot be combined with --eager"):
        decode_of(parser().parse_args(["run", "m", "p", "--decode", "auto", "--eager"]))
