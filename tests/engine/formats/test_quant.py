"""Formats: what the machine cannot do is named, and packed experts of older files become what they stand for."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import trimtab
from tests import pico, stock
from trimtab.engine.formats import bitsandbytes as quant
from trimtab.engine.formats import weights
from trimtab.errors import CheckpointError, DeviceError, RequestError
from trimtab.formats.record import PackedEntry

# File tensors of look-up tables -> their names in memory.
TABLES = {"quant_map": "code", "nested_quant_map": "nested_code"}


@pytest.mark.parametrize("kind, name", [("nf4", "quantize_4bit"), ("int8", "int8_vectorwise_quant")])
def test_a_format_that_the_machine_cannot_make_is_a_device_error(kind, name, monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("no kernel image is available")

    monkeypatch.setattr(quant, name, fail, raising=False)
    monkeypatch.setattr(quant.bnb.functional, name, fail)
    with pytest.raises(DeviceError, match=r"cannot quantize to .* \(no kernel image") as caught:
        quant.quantize(torch.ones(64, 64), kind)
    assert caught.value.device == "cpu"


def test_a_packed_checkpoint_is_never_packed_again(tmp_path):
    reference = stock.load_stock(pico.build("llama", tmp_path / "plain"), "nf4")
    reference.save_pretrained(tmp_path / "packed")
    assert trimtab.plan(tmp_path / "packed", device="cpu", context=64).request.quant == "nf4"
    with pytest.raises(RequestError, match="never quantized twice") as caught:
        trimtab.plan(tmp_path / "packed", device="cpu", context=64, quant="int8")
    assert caught.value.field == "quant" and "nf4" in caught.value.allowed


def test_experts_that_an_older_file_packs_one_by_one_are_dequantized(tmp_path):
    """Stock 5.6.2 loads the packed bytes of such a file as weights, 5.23.0 refuses it."""
    folder = pico.build("mixtral", tmp_path / "mixtral")
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors, dense = {}, {}
    for name, tensor in load_file(file).items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        data, state = quant.quantize_4bit(tensor.contiguous(), blocksize=64, quant_type="nf4")
        tensors[name] = data
        tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        dense[name] = quant.dequantize_4bit(data, state)
    assert dense
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata=metadata)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    plain = pico.build("mixtral", tmp_path / "again")
    save_file(load_file(plain / "model.safetensors") | dense, plain / "model.safetensors", metadata=metadata)
    for place in ({"*": "resident"}, {"*": "stream"}):
        with trimtab.load(trimtab.plan(folder, device="cpu", context=64, place=place)) as model:
            found = stock.logits(model.hf_model, pico.inputs("mixtral", model.hf_model.config))
        with trimtab.load(trimtab.plan(plain, device="cpu", context=64, quant="none")) as model:
            expected = stock.logits(model.hf_model, pico.inputs("mixtral", model.hf_model.config))
        assert torch.equal(found, expected), place


@pytest.mark.parametrize("shape", [(24, 80), (3, 1104), (5, 33), (2, 64)])
@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "fp4"])
def test_rows_that_begin_inside_a_block_have_that_block_s_scale(kind, shape):
    """On CPUs with AVX512 bitsandbytes 0.50 takes another (I16)."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(5)) * torch.logspace(-2, 2, shape[1])
    try:
        packed = quant.quantize(weight, kind)
    except DeviceError as exc:
        assert "bitsandbytes 0.49" in str(exc) and weight.numel() % 2, exc
        pytest.skip("bitsandbytes 0.49 quantizes no odd number of values on a CPU")
    state = quant.quant_state(packed)
    scales = state.absmax
    if state.nested:
        scales = quant.dequantize_blockwise(scales, state.state2) + state.offset
    bytes_ = packed.parts["weight"].flatten()
    codes = packed.codes["code"][torch.stack((bytes_ >> 4, bytes_ & 15), 1).flatten().long()][: weight.numel()]
    expected = (codes * scales.repeat_interleave(packed.blocks[0])[: weight.numel()]).view(shape)
    assert torch.equal(weights.dequantize(packed), expected)
    bias, x = torch.randn(shape[0]), torch.randn(2, 3, shape[1])
    layer = weights.shell(packed, bias, torch.float32)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, expected, bias))
    half = weights.shell(packed, bias, torch.bfloat16)  # rounded once, from the codes
    rounded = torch.nn.functional.linear(x.bfloat16(), expected.bfloat16(), bias.bfloat16())
    assert torch.equal(half(x), rounded.float())
    rows = weights.dequantize_rows(packed, 1, 2, torch.device("cpu"))
    assert torch.equal(rows, expected[1:2])


@pytest.mark.parametrize("kind, part", [("int8", "SCB"), ("nf4", "absmax"), ("fp4", "quant_map"), ("nf4-dq", "nested_absmax")])
def test_scales_of_files_that_are_not_finite_are_refused(kind, part):
    packed = quant.quantize(torch.randn(64, 128).bfloat16(), kind)
    parts = {**packed.parts, **{name: packed.codes[code] for name, code in TABLES.items() if code in packed.codes}}
    state = {"blocksize": 64, "nested_blocksize": 256, "nested_offset": float(parts.pop("offset", 0.0))}
    entry = PackedEntry("x.weight", kind, (64, 128), "bfloat16", {}, state)
    assert torch.equal(quant.dequantize(quant.read(entry, parts, torch.bfloat16)), quant.dequantize(packed))
    with pytest.raises(CheckpointError, match="x.weight: has scales that are not finite"):
        quant.read(entry, parts | {part: parts[part].index_fill(0, torch.tensor([0]), torch.nan)}, torch.bfloat16)
