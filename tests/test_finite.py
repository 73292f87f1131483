"""Values that are not numbers: an adapter that holds some is refused when it is read, logits that are some end the answer."""

from __future__ import annotations

import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
import trimtab.demo as demo
from trimtab import cli
from trimtab.errors import AdapterError, DeviceError
from trimtab.runtime.finite import is_finite

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
FILE = "adapter_model.safetensors"


def spoiled(folder, value, dtype=None):
    """Return a copy of the demo's style adapter in which one tensor has two such values, and that tensor's name."""
    shutil.copytree(demo.ADAPTERS["style"], folder)
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in load_file(folder / FILE).items()}
    name = sorted(tensors)[5]
    tensors[name].view(-1)[3:5] = value
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder, name


@pytest.fixture(scope="module")
def model():
    with trimtab.load(trimtab.plan(demo.BASE, device=DEVICE, context=128, images=0, audio_s=0.0)) as loaded:
        yield loaded


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_adapter_with_values_that_are_not_finite_is_refused_by_tensor(model, tmp_path, value, dtype):
    folder, name = spoiled(tmp_path / "bad", value, dtype)
    with pytest.raises(AdapterError) as caught:
        model.load_adapter("bad", folder)
    count = load_file(folder / FILE)[name].numel()
    assert caught.value.problems == (f"{name}: 2 of {count} values are NaN or infinite",)
    assert caught.value.path == str(folder) and model.adapters == ()


def test_run_refuses_it_too_before_it_answers(tmp_path, capsys):
    folder, name = spoiled(tmp_path / "bad", math.nan)
    arguments = ["run", str(demo.BASE), "hi", "--adapter", f"a={folder}", "--device", "cpu", "--context", "128"]
    assert cli.main(arguments) == 5
    out, err = capsys.readouterr()
    assert out == "" and name in err


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.2}])
def test_logits_that_are_not_numbers_end_the_answer_with_an_error(model, options):
    norm = model.hf_model.model.language_model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(math.nan)
    try:
        with pytest.raises(DeviceError, match="logits are NaN or infinite") as caught:
            model.answer("Hello", max_new_tokens=4, **options)
    finally:
        with torch.no_grad():
            norm.copy_(kept)
    assert caught.value.hint == "Check the model's weights"
    assert model.answer("Hello", max_new_tokens=2, **options).token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_finite_values_of_every_type_are_finite(dtype):
    assert is_finite(torch.arange(-8, 8).to(dtype)) and is_finite(torch.empty(0, dtype=dtype))
    for value in (math.nan, math.inf) if dtype.is_floating_point and dtype.itemsize > 1 else ():
        values = torch.zeros(1000).index_fill_(0, torch.tensor([777]), value).to(dtype)
        assert not is_finite(values)
