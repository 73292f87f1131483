"""Attached adapters give PEFT's numbers, bit for bit, on plain, 4-bit and 8-bit layers and on whole models."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from tests import pico
from tests.engine.lora.toy_lora import IDS, WIDTH, Toy, make_adapter, ours, peft_output, put_on, read, spec_of, with_our_layers
from tests.long_runs import crossed
from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader.transformers_model import read_anatomy
from trimtab.engine.lora import base_values
from trimtab.engine.lora.layers import attach_fitted, detach, fit

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "rslora": {"use_rslora": True}, "patterns": {"rank_pattern": {"down": 8}, "alpha_pattern": {"up": 16, "down": 3}},
    "rslora with patterns": {"use_rslora": True, "rank_pattern": {"down": 2}, "alpha_pattern": {"up": 16}},
    "dora": {"use_dora": True}, "lora_bias": {"lora_bias": True}, "embedding": {"target_modules": ["embed", "up"]},
    "dora embedding": {"target_modules": ["embed", "up"], "use_dora": True}, "head": {"target_modules": ["head"]},
    "saved": {"modules_to_save": ["norm", "head"]}, "saved table": {"target_modules": ["down"], "modules_to_save": ["embed"]},
}  # fmt: skip


def as_in_peft(toy: Toy, folder: Path, dtype: torch.dtype = torch.float32) -> Toy:
    """Return a model with an adapter, whose answer has the bits of PEFT's."""
    model, store = ours(toy, dtype)
    put_on(model, store, toy, folder, "one")
    store.set("one")
    with torch.no_grad():
        assert torch.equal(model(IDS), peft_output(toy, folder))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "nf4", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_peft_bit_for_bit(variant: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    toy = Toy(kind, dtype, scaled=True)
    folder = make_adapter(tmp_path, toy, **VARIANTS[variant])
    model, store = ours(toy, dtype)
    put_on(model, store, toy, folder, "one")
    base = toy(IDS)
    with torch.no_grad():
        expected = peft_output(toy, folder)
        assert torch.equal(model(IDS), base)
        store.set("one")
        found = model(IDS)
        assert torch.equal(found, expected) and not torch.equal(found, base)
        store.none()
        assert torch.equal(model(IDS), base)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_an_adapter_stored_in_half_precision_is_computed_in_float32_as_peft_does(stored: torch.dtype, tmp_path: Path) -> None:
    toy = Toy("nf4", torch.bfloat16)
    folder = make_adapter(tmp_path, toy, dtype=stored)
    spec = spec_of(folder, toy)
    assert {entry.dtype for target in spec.targets for entry in target.tensors.values()} == {str(stored)[6:]}
    assert as_in_peft(toy, folder, torch.bfloat16).up.adapters["one"].A.dtype == torch.float32


@pytest.mark.parametrize("option", ["velora_config", "monteclora_config"])
def test_training_only_variants_are_plain_lora_at_inference(option: str, tmp_path: Path) -> None:
    config = pytest.importorskip("peft.tuners.lora.config")
    made = getattr(config, "VeloraConfig" if option == "velora_config" else "MontecloraConfig", None)
    if made is None:
        pytest.skip("this PEFT does not know the variant")
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, **{option: made()})
    assert {why for _, why in spec_of(folder, toy).no_effect} == {"used in training only"}
    as_in_peft(toy, folder)


def test_plain_and_dora_agree_with_float64(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, store = ours(toy, torch.float32)
    put_on(model, store, toy, make_adapter(tmp_path / "plain", toy, use_rslora=True), "plain")
    put_on(model, store, toy, make_adapter(tmp_path / "dora", toy, use_dora=True), "dora")
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(5))
    weight, bias = toy.up.weight.double(), toy.up.bias.double()

    def tensors(name: str) -> dict[str, Tensor]:
        target = next(t for t in spec_of(tmp_path / name, toy).targets if t.module_path == "up")
        return {role: read(entry).double() for role, entry in target.tensors.items()}

    found = tensors("plain")
    expected = {"plain": x.double() @ (weight + 6 / math.sqrt(4) * found["B"] @ found["A"]).T + bias}
    found = tensors("dora")
    moved = weight + 6 / 4 * found["B"] @ found["A"]
    moved = moved * (found["magnitude"] / moved.norm(dim=1))[:, None]
    expected["dora"] = x.double() @ moved.T + bias
    for name, answer in expected.items():
        store.set(name)
        with torch.no_grad():
            got = model.up(x).double()
        # float32 carries 24 bits and the longest sum here has 64 terms: 64 x 2**-24 of the largest value, about 4e-6.
        assert (got - answer).abs().max() <= 64 * 2**-24 * answer.abs().max()


def test_two_adapters_switch_without_leaving_a_trace(tmp_path: Path) -> None:
    toy = Toy("nf4", torch.bfloat16)
    model, store = ours(toy, torch.bfloat16)
    folders = {"a": make_adapter(tmp_path / "a", toy, seed=1), "b": make_adapter(tmp_path / "b", toy, seed=2, use_dora=True)}
    for name, folder in folders.items():
        put_on(model, store, toy, folder, name)
    with torch.no_grad():
        for name in ("a", "b", "a"):
            store.set(name)
            assert torch.equal(model(IDS), peft_output(toy, folders[name]))
        store.set(None)
        assert torch.equal(model(IDS), toy(IDS))


# Tied full weights


def with_tensor(folder: Path, name: str, value: Tensor) -> Path:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: value.contiguous()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_peft_writes_next_to_lora_acts_as_in_peft(tied: bool, changed: bool, tmp_path: Path) -> None:
    toy = Toy("none", torch.float32, tied=tied)
    folder = make_adapter(tmp_path, toy, target_modules=["embed", "up"])
    table = toy.embed.weight.detach().clone() + (0.5 if changed else 0)
    with_tensor(folder, "base_model.model.embed.base_layer.weight", table)
    model = as_in_peft(toy, folder)
    kept = [model.embed.adapters["one"].weight, model.head.adapters["one"].weight if "one" in model.head.adapters else None]
    # PEFT loads the copy into the base weight itself, so a tied head changes with it; an unchanged copy costs nothing.
    assert [weight is not None for weight in kept] == [changed, changed and tied]
    if changed and tied:
        assert kept[0] is kept[1]


def test_dora_next_to_a_changed_base_weight_takes_the_changed_one(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, target_modules=["embed", "head"], use_dora=True)
    for name in ("embed", "head"):
        changed = getattr(toy, name).weight.detach() + 0.5
        with_tensor(folder, f"base_model.model.{name}.base_layer.weight", changed)
    as_in_peft(toy, folder)


def test_a_copy_that_differs_in_one_late_row_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, target_modules=["embed"])
    table = toy.embed.weight.detach().clone()
    table[-1] += 1
    with_tensor(folder, "base_model.model.embed.base_layer.weight", table)
    monkeypatch.setattr(base_values, "COMPARED_VALUES", 5 * WIDTH)
    model, store = ours(toy, torch.float32)
    put_on(model, store, toy, folder, "one")
    assert torch.equal(model.embed.adapters["one"].weight, table)


def test_a_saved_linear_takes_its_own_bias(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, target_modules=["down"], modules_to_save=["up"])
    as_in_peft(toy, folder)


def test_modules_to_save_leaves_a_tied_partner_alone(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32, tied=True)
    folder = make_adapter(tmp_path, toy, modules_to_save=["head"])
    model = as_in_peft(toy, folder)
    assert "one" not in model.embed.adapters and model.head.adapters["one"].weight is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_promised_bytes_are_the_bytes_attached(variant: str, tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    spec = spec_of(make_adapter(tmp_path, toy, **VARIANTS[variant]), toy)
    model, store = ours(toy, torch.float32)
    attach_fitted(fit(model, spec), "one", read=read, device="cpu", store=store)
    found = 0
    for module in model.modules():
        adapter = module.__dict__.get("adapters", {}).get("one")
        values = () if adapter is None else (adapter if isinstance(adapter, dict) else vars(adapter)).values()
        found += sum(value.nbytes for value in values if isinstance(value, Tensor))
    assert found == spec.nbytes("float32")


def test_large_weights_are_taken_in_pieces_with_the_same_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, target_modules=["embed", "up"], use_dora=True)
    model, store = ours(toy, torch.float32)
    put_on(model, store, toy, folder, "whole")
    monkeypatch.setattr(base_values, "NORM_VALUES", 5 * WIDTH)
    put_on(model, store, toy, folder, "pieces")
    for layer in (model.up, model.embed):
        whole, pieces = layer.adapters["whole"].magnitude, layer.adapters["pieces"].magnitude
        # Another order of summation over at most 64 squares in float32.
        torch.testing.assert_close(pieces, whole, rtol=64 * 2**-24, atol=0)


MODEL_VARIANTS: dict[str, dict[str, Any]] = {
    "every linear": {"targets": "all", "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"o_proj": 2}},
    "dora": {"targets": "all", "dora": True}, "embedding": {"embeddings": True, "rslora": True},
    "saved norms and head": {"modules_to_save": ["norm", "lm_head"]}, "saved embedding": {"modules_to_save": ["embed_tokens"]},
}  # fmt: skip


@cache
def checkpoint_of(family: str, folder: Path) -> tuple[Path, Anatomy]:
    built = pico.build(family, folder / family)
    return built, read_anatomy(read_checkpoint(built), quant="none", dtype="bfloat16")


@pytest.mark.parametrize(("family", "variant"), crossed(["gemma4", "qwen2_5_vl"], MODEL_VARIANTS, first=["gemma4"], rest=2))
def test_logits_equal_pefts(family: str, variant: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, anatomy = checkpoint_of(family, tmp_path_factory.getbasetemp() / "models")
    adapter = pico.adapter(folder, tmp_path / "adapter", **MODEL_VARIANTS[variant])
    stock, model = pico.make_model(family), pico.make_model(family)
    given = pico.inputs(family, stock.config)
    store = with_our_layers(model)
    attach_fitted(fit(model, match_adapter(read_adapter(adapter), anatomy)), "one", read=read, device="cpu", store=store)
    with torch.no_grad():
        base = stock(**given).logits
        assert torch.equal(model(**given).logits, base)
        store.set("one")
        found = model(**given).logits
        assert torch.equal(found, PeftModel.from_pretrained(stock, adapter).eval()(**given).logits)
        assert not torch.equal(found, base)
        detach(model, "one")
        assert torch.equal(model(**given).logits, base)
