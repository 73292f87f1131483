"""Which product a weight gets, its bits where it is not quantized, what a machine cannot do, and how bitsandbytes is imported."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab
from tests import pico, stock
from tests.raised import raised, refused
from trimtab.engine.formats import bitsandbytes, weights
from trimtab.engine.formats.bitsandbytes import quantize, without_compiler, without_hub_kernels
from trimtab.engine.formats.packed import Matmul, MatmulTable, PlainShell
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.engine.lora import layers
from trimtab.engine.lora.store import AdapterStore, Selection
from trimtab.errors import CheckpointError, DeviceError
from trimtab.formats.record import PackedEntry

# File tensors of look-up tables -> their names in memory.
TABLES = {"quant_map": "code", "nested_quant_map": "nested_code"}


@pytest.mark.parametrize("kind, name", [("nf4", "quantize_4bit"), ("int8", "int8_vectorwise_quant")])
def test_a_format_that_the_machine_cannot_make_is_a_device_error(kind, name, monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("no kernel image is available")

    monkeypatch.setattr(bitsandbytes, name, fail, raising=False)
    monkeypatch.setattr(bitsandbytes.bnb.functional, name, fail)
    error = raised(DeviceError, bitsandbytes.quantize, torch.ones(64, 64), kind, match=r"cannot quantize to .* \(no kernel image")
    assert error.device == "cpu"


def test_a_packed_checkpoint_is_never_packed_again(tmp_path):
    reference = stock.load_stock(pico.build("llama", tmp_path / "plain"), "nf4")
    reference.save_pretrained(tmp_path / "packed")
    assert trimtab.plan(tmp_path / "packed", device="cpu", context=64).request.quant == "nf4"
    error = refused(trimtab.plan, tmp_path / "packed", device="cpu", context=64, quant="int8", match="never quantized twice")
    assert error.field == "quant" and "nf4" in error.allowed


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
        data, state = bitsandbytes.quantize_4bit(tensor.contiguous(), blocksize=64, quant_type="nf4")
        tensors[name] = data
        tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        dense[name] = bitsandbytes.dequantize_4bit(data, state)
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
        packed = bitsandbytes.quantize(weight, kind)
    except DeviceError as exc:
        assert "bitsandbytes 0.49" in str(exc) and weight.numel() % 2, exc
        pytest.skip("bitsandbytes 0.49 quantizes no odd number of values on a CPU")
    state = bitsandbytes.quant_state(packed)
    scales = state.absmax
    if state.nested:
        scales = bitsandbytes.dequantize_blockwise(scales, state.state2) + state.offset
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
    assert torch.equal(weights.dequantize_rows(packed, 1, 2, torch.device("cpu")), expected[1:2])


@pytest.mark.parametrize("kind, part", [("int8", "SCB"), ("nf4", "absmax"), ("fp4", "quant_map"), ("nf4-dq", "nested_absmax")])
def test_scales_of_files_that_are_not_finite_are_refused(kind, part):
    packed = bitsandbytes.quantize(torch.randn(64, 128).bfloat16(), kind)
    parts = {**packed.parts, **{name: packed.codes[code] for name, code in TABLES.items() if code in packed.codes}}
    state = {"blocksize": 64, "nested_blocksize": 256, "nested_offset": float(parts.pop("offset", 0.0))}
    entry = PackedEntry("x.weight", kind, (64, 128), "bfloat16", {}, state)
    assert torch.equal(bitsandbytes.dequantize(bitsandbytes.read(entry, parts, torch.bfloat16)), bitsandbytes.dequantize(packed))
    with pytest.raises(CheckpointError, match="x.weight: has scales that are not finite"):
        bitsandbytes.read(entry, parts | {part: parts[part].index_fill(0, torch.tensor([0]), torch.nan)}, torch.bfloat16)


def test_a_process_that_quantizes_says_nothing_and_asks_for_no_kernels(tmp_path):
    (tmp_path / "kernels.py").write_text("raise SystemExit('asked for the hub')")
    code = "import trimtab.engine.formats.bitsandbytes, sys; print('kernels' in sys.modules, 'bitsandbytes' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert made.stdout.split() == ["False", "True"] and "kernels" not in made.stderr


def test_what_was_imported_before_comes_back(monkeypatch):
    stands = object()
    monkeypatch.setitem(sys.modules, "kernels", stands)
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = log.level
    with without_hub_kernels():
        assert sys.modules["kernels"] is None and log.level == logging.ERROR
    assert sys.modules["kernels"] is stands and log.level == before


def test_functions_go_to_the_compiler_again_after_the_import(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    with without_compiler():
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_a_program_that_compiles_keeps_its_compiler_meanwhile(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", object())
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with without_compiler():
        assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_a_weight_with_an_odd_side_is_unpacked_to_the_numbers_of_its_format():
    """bitsandbytes would compile this one; the right value is numpy's, each product and each cast rounded once."""
    import bitsandbytes.functional as functional

    import trimtab.engine.formats.bitsandbytes  # noqa: F401 - which imports bitsandbytes

    weight = torch.randn(64, 65, generator=torch.Generator().manual_seed(3))
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    found = torch.ops.bitsandbytes.dequantize_4bit(packed, state.absmax, 64, "nf4", (64, 65), torch.float32)
    nibbles = np.stack([packed.numpy().reshape(-1) >> 4, packed.numpy().reshape(-1) & 15], axis=1).reshape(-1)
    scales = np.repeat(state.absmax.numpy(), 64)[: nibbles.size]
    right = state.code.numpy()[nibbles] * scales
    assert np.array_equal(found.numpy().reshape(-1), right[: 64 * 65])


X = torch.arange(24.0).view(1, 3, 8)


def layer(store):
    return ResidentLeaf(
        "layer", quantize(torch.eye(4, 8), "nf4"), bias=None, device=torch.device("cpu"), dtype=torch.float32, store=store
    )


def value(number):
    return lambda leaf, x: torch.full((*x.shape[:-1], 4), float(number))


def refusing(leaf, x):
    return None


def test_the_first_way_that_takes_the_rows_and_the_values_computes():
    leaf, other = layer(AdapterStore()), layer(AdapterStore())
    few, many = Matmul("gemv4", {leaf}, value(1), most=2), Matmul("gemm4", {leaf}, value(2), least=3, most=3)
    table = MatmulTable(few, None, Matmul("dequantized", {leaf}, refusing), many, Matmul("dequantized", {leaf, other}, value(3)))
    for rows, expected in ((1, 1), (2, 1), (3, 2), (4, 3)):
        with leaf.adapter_store.applying(None, table):
            assert float(leaf(X[:, :1].expand(1, rows, 8))[0, 0, 0]) == expected
    assert table.first(leaf, 2) is few and table.first(other, 2).name == "dequantized" and table.first("none", 1) is None
    with other.adapter_store.applying(None, MatmulTable(few, many)):  # of another layer
        assert torch.equal(other(X), functional.linear(X, torch.eye(4, 8)))


def test_an_adapter_is_added_once_and_a_failed_pass_leaves_no_table():
    store = AdapterStore()
    leaf = layer(store)
    leaf.adapters["a"] = layers.LinearAdapter("language", 1.0, torch.ones(1, 8), torch.ones(4, 1))
    store.select(Selection("a"))
    change = X.sum(-1, keepdim=True).expand(1, 3, 4)
    with store.applying(None, MatmulTable(Matmul("dequantized", {leaf}, value(2)))):
        assert torch.equal(leaf(X), 2 + change)
    # With columns both operands are theirs, and the adapter is inside; without it is added behind the same product.
    weight, with_columns = torch.ones(4, 8), (torch.ones(3, 9), torch.ones(4, 9))
    for operands, wanted in ((with_columns, torch.full((1, 3, 4), 9.0)), (None, X @ weight.T + change)):
        way = Matmul("dequantized", {leaf}, lambda _, x, w=weight: x @ w.T, columns=lambda *_, operands=operands: operands)
        with store.applying(None, MatmulTable(way)):
            assert torch.equal(leaf(X), wanted)
    with pytest.raises(KeyboardInterrupt), store.applying(None, MatmulTable()):
        raise KeyboardInterrupt
    assert store.matmuls is None and torch.equal(leaf(X), functional.linear(X, torch.eye(4, 8)) + change)


BATCHED = {torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


VIEWS = {
    "a prompt": lambda x: x, "its last position": lambda x: x[:, -1:], "several positions": lambda x: x[:, 3:6],
    "positions first": lambda x: x.transpose(0, 1), "one position": lambda x: x[:, 2], "a row": lambda x: x[0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("view", "has_bias"), [*((view, False) for view in VIEWS), *((view, True) for view in VIEWS if view != "positions first")]
)
def test_no_view_of_a_prompt_is_multiplied_as_a_batch(view, has_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    x = VIEWS[view](torch.randn(2 if view == "positions first" else 1, 8, 32, generator=generator).to(dtype))
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    with torch.no_grad(), Operations() as operations:
        found = PlainShell(weight, bias)(x)
    assert bias is not None or not operations.seen & BATCHED
    # A stock model's weights are Parameters that need a gradient: torch folds every view of those.
    stock = torch.nn.Linear(32, 48, bias=has_bias, dtype=dtype)
    with torch.no_grad():
        stock.weight.copy_(weight)
        if bias is not None:
            stock.bias.copy_(bias)
        expected = stock(x)
    assert found.shape == expected.shape and torch.equal(found, expected)
