"""Do models in each file format answer as the stock stack does with the same weights, in every tier, adapters on?"""

from __future__ import annotations

import itertools
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import pico, quantized_files, stock
from tests.long_runs import slow_on_cpu
from tests.quantized_files import FAMILIES, FORMS, TIERS, base_of, write
from tests.raised import raised
from trimtab.engine.formats import weights
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.errors import CheckpointError, RequestError
from trimtab.stock import unsplit

VARIANTS = {"none": None, "lora": {}, "dora": {"dora": True}, "rslora": {"rslora": True}, "saved": {"modules_to_save": ["norm"]}}


@cache
def files(family: str, form: str, root: Path) -> tuple[Path, Path]:
    return write(base_of(family, form), root / f"{family}-{form}", form)


@cache
def adapter(family: str, form: str, variant: str, root: Path) -> Path:
    base = base_of(family, form)
    return pico.adapter(base, root / f"{base.name}-{variant}", targets="all", **VARIANTS[variant])


@cache
def expected(family: str, form: str, variant: str, root: Path) -> torch.Tensor:
    model = stock.load_stock(files(family, form, root)[1])
    given = pico.inputs(family, model.config)
    if VARIANTS[variant] is not None:
        model = stock.with_adapter(model, adapter(family, form, variant, root))
    return stock.logits(model, given)


@pytest.fixture
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def cases():
    """Yield every combination: by default each format in every tier, with and without adapters, once in another family."""
    variants, kept = list(VARIANTS), {("llama", next(iter(FORMS)), "disk", "saved")}
    for number, form in enumerate(FORMS):
        for place, variant in enumerate(("none", ("lora", "rslora")[number % 2], "dora")):
            kept.add(("llama", form, TIERS[(number + place) % 4], variant))
        kept.add((FAMILIES[1 + number % 4], form, TIERS[(number + 3) % 4], variants[number % 5]))
    for one in itertools.product(FAMILIES, FORMS, TIERS, VARIANTS):
        yield one if one in kept else slow_on_cpu(*one)


@pytest.mark.parametrize(("family", "form", "tier", "variant"), list(cases()))
def test_logits_are_those_of_the_stock_stack(family, form, tier, variant, root):
    small, _ = files(family, form, root)
    adapters = {} if VARIANTS[variant] is None else {"one": adapter(family, form, variant, root)}
    place = {"*": tier} if tier == "resident" else {"language": tier}
    plan = trimtab.plan(small, adapters=adapters, place=place, device="cpu", context=64, audio_s=1.0)
    assert plan.request.quant == FORMS[form][2]
    with trimtab.load(plan) as model:
        model.adapter_store.set("one" if adapters else None)
        found = stock.logits(model.hf_model, pico.inputs(family, model.hf_model.config))
    assert torch.equal(found, expected(family, form, variant, root))


@pytest.mark.parametrize("form", FORMS)
def test_a_merge_is_the_sum_in_float64_rounded_once(form, root, tmp_path):
    small, dense = files("llama", form, root)
    folder = adapter("llama", form, "lora", root)
    trimtab.merge(small, tmp_path / "merged", adapters=folder, check=True)
    written = load_file(tmp_path / "merged" / "model.safetensors")
    lora = {name: tensor.double() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    settings = json.loads((folder / "adapter_config.json").read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    delta = lora[f"{stem}.lora_B.weight"] @ lora[f"{stem}.lora_A.weight"] * (settings["lora_alpha"] / settings["r"])
    base = load_file(dense / "model.safetensors")[name].double()
    # Half a unit of bfloat16 for the result, and for the base, rounded to it (of GPTQ and AWQ to float16 before).
    off = (written[name].double() - (base + delta)).abs()
    assert bool((off <= 2**-8 * (base + delta).abs() + (2**-8 + 2**-11) * base.abs()).all())
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()


@pytest.mark.parametrize(("form", "name"), [
    ("nvfp4-modelopt", "hf_quant_config.json"), ("gptq", "quantize_config.json"), ("awq", "quant_config.json"),
    ("gptq", "quantization_config.json"), ("ct-int4", None),
])  # fmt: skip
@pytest.mark.parametrize("requantize", [None, "nf4"])
def test_a_merge_does_not_say_that_its_weights_are_packed_as_the_bases(form, name, requantize, root, tmp_path):
    base = shutil.copytree(files("llama", form, root)[0], tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    settings = config["quantization_config"]
    (base / (name or "config.json")).write_text(json.dumps(settings if name else config | {"compression_config": settings}))
    trimtab.merge(base, tmp_path / "merged", adapters=adapter("llama", form, "lora", root), requantize=requantize)
    kept = {path.name for path in base.iterdir() if path.suffix == ".json"} - {name}
    assert {path.name for path in (tmp_path / "merged").glob("*.json")} == kept | {"trimtab_merge.json"}
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "compression_config" not in written
    assert written.get("quantization_config", {}).get("quant_method") == ("bitsandbytes" if requantize else None)


@pytest.mark.parametrize("form", ["ct-fp8", "nvfp4-ct", "nvfp4-modelopt", "fp8-tensor"])
@pytest.mark.parametrize("shape", [(1,), (), (4, 1, 1)], ids=str)
def test_the_scales_of_a_rounded_kv_cache_are_left_out(form, shape, root, tmp_path):
    base = shutil.copytree(files("llama", form, root)[0], tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    (base / "config.json").write_text(json.dumps(config))
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_scale", "k_scale", "v_scale", "k_proj.output_scale")]
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {name: torch.full(shape, 0.5) for name in names}, base / "model.safetensors", {"format": "pt"})
    with trimtab.load(trimtab.plan(base, device="cpu", context=64, place={"*": "resident"})) as model:
        found = stock.logits(model.hf_model, pico.inputs("llama", model.hf_model.config))
    assert torch.equal(found, expected("llama", form, "none", root))
    trimtab.merge(base, tmp_path / "merged", adapters=adapter("llama", form, "lora", root))
    dense = load_file(files("llama", form, root)[1] / "model.safetensors")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(dense)


@pytest.mark.parametrize("form", FORMS)
def test_the_stock_route_of_verify_has_the_same_weights_without_the_engines_reader(form, root, monkeypatch):
    for name in ("prequantized", "dequantize"):
        monkeypatch.setattr(weights, name, lambda *_: pytest.fail("the engine's reader"))
    small, dense = files("llama", form, root)
    model = unsplit.load_unsplit(str(small), "auto", "bfloat16", "cpu")
    truth = load_file(dense / "model.safetensors")
    found = model.state_dict()
    assert set(truth) <= set(found) and all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][0]["quant_method"] in unsplit.DEQUANTIZED_BY_STOCK])
def test_stock_computes_the_same_with_an_adapter_over_the_packed_files(form, root):
    """transformers reads FP8 itself, the others with the package that made them: `make test-formats` has it."""
    pytest.importorskip(unsplit.DEQUANTIZED_BY_STOCK[FORMS[form][0]["quant_method"]] or "transformers")
    small, _ = files("llama", form, root)
    model = unsplit.load_unsplit(str(small), "auto", "bfloat16", "cpu")
    assert unsplit.dense_note(str(small)) == []
    given = pico.inputs("llama", model.config)
    found = stock.logits(stock.with_adapter(model, adapter("llama", form, "lora", root)), given)
    assert torch.equal(found, expected("llama", form, "lora", root))


def test_a_plan_counts_the_bytes_of_the_format(root):
    small, dense = files("llama", "ct-int4", root)
    plan = trimtab.plan(small, device="cpu", context=64, place={"*": "resident"})
    with trimtab.load(plan) as model:
        layers = [one.stored for one in model.hf_model.modules() if isinstance(one, ResidentLeaf) and one.quant_kind != "none"]
    assert len(layers) == 14 and {one.kind for one in layers} == {"int4-g32"}
    # Four bits a value and a bfloat16 scale for 32 of them.
    assert sum(one.nbytes for one in layers) == sum(one.shape[0] * one.shape[1] for one in layers) * 9 // 16
    whole = trimtab.plan(dense, quant="none", device="cpu", context=64, place={"*": "resident"})
    assert whole.gpu["weights"] - plan.gpu["weights"] == sum(one.shape[0] * one.shape[1] for one in layers) * 23 // 16


def test_a_gpu_is_predicted_to_dequantize_each_weight_for_each_token(root):
    small, dense = files("llama", "ct-int4", root)
    given = {"card": "H100", "context": 64, "place": {"*": "resident"}, "decode": "eager"}
    steps = [trimtab.plan(folder, quant=quant, **given).token_s for folder, quant in ((small, "auto"), (dense, "none"))]
    assert steps[0] > steps[1]


@pytest.mark.parametrize("quant", ["int4-g32", "fp8-row"])
def test_a_format_of_files_is_not_made(quant):
    with pytest.raises(RequestError, match="reads and does not make"):
        trimtab.plan(pico.built("llama"), quant=quant, device="cpu")


@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_table_is_looked_up_or_refused_by_name(form, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_files, "LINEAR", (*quantized_files.LINEAR, "embed_tokens.weight"))
    small, dense = write(base_of("llama", form), tmp_path, form)
    if FORMS[form][2].endswith("-idx") or FORMS[form][2] in ("fp8-128x128", "fp8-tensor", "nvfp4-g16"):
        error = raised(CheckpointError, trimtab.plan, small, device="cpu", context=64, match="cannot be looked up")
        assert error.tensor_name == "model.embed_tokens.weight"
        return
    truth = stock.load_stock(dense)
    wanted = stock.logits(truth, pico.inputs("llama", truth.config))
    for tier in ("resident", "gather"):
        plan = trimtab.plan(small, device="cpu", context=64, place={"model.embed_tokens": tier})
        with trimtab.load(plan) as model:
            assert torch.equal(stock.logits(model.hf_model, pico.inputs("llama", model.hf_model.config)), wanted)
    with pytest.raises(RequestError, match="its rows cannot be read from there"):
        trimtab.plan(small, device="cpu", context=64, device_map={"model.embed_tokens": "disk", "": "cpu"})


def test_a_quantized_checkpoint_is_not_quantized_again(root):
    with pytest.raises(RequestError, match="already quantized \\(int4-g32\\)"):
        trimtab.plan(files("llama", "ct-int4", root)[0], quant="nf4", device="cpu")
