"""Does a Gemma 4 mobile model answer as transformers' own layers do, in every tier, with adapters on?"""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

import trimtab
from tests import mobile_files, pico, stock

pytest.importorskip("transformers.integrations.gemma_quant")
TIERS = {"resident": {"*": "resident"}, "stream": {"language": "stream"}, "disk": {"language": "disk"}, "host": {"language": "host"}}
TABLES = {"resident": "resident", "stream": "gather:host", "disk": "gather:file", "host": "gather:host"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mobile_files.write(pico.built("gemma4"), tmp_path_factory.mktemp("mobile"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return pico.adapter(pico.built("gemma4"), tmp_path_factory.mktemp("adapter"), targets="all")


@pytest.fixture(scope="module")
def expected(folder, adapter):
    """The logits of transformers' own layers: without an adapter, and with its change added by hooks of plain torch."""
    model = mobile_files.stock(folder)
    given = pico.inputs("gemma4", model.config)
    found = {None: stock.logits(model, given)}
    lora = load_file(adapter / "adapter_model.safetensors")
    for name, A in lora.items():
        if not name.endswith("lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        B = lora[name.replace("lora_A", "lora_B")]

        def add(module, inputs, y, A=A, B=B):
            change = torch.nn.functional.linear(torch.nn.functional.linear(inputs[0].float(), A), B) * 2.0
            return (y + change).to(y.dtype)

        model.get_submodule(path).register_forward_hook(add)
    found["one"] = stock.logits(model, given)
    assert not torch.equal(found[None], found["one"])
    return given, found


@pytest.mark.parametrize("tier", TIERS)
def test_logits_are_those_of_transformers_own_layers(folder, adapter, expected, tier):
    given, truth = expected
    plan = trimtab.plan(folder, adapters={"one": adapter}, place=TIERS[tier], device="cpu", context=64, audio_s=1.0)
    print(plan)
    with trimtab.load(plan) as model:
        for name, logits in truth.items():
            model.adapter_store.set(name)
            assert torch.equal(stock.logits(model.hf_model, given), logits), name
