"""A prompt's kernels equal bitsandbytes and PEFT: weights bit for bit, LoRA up to the order of a sum; a wrong one is found."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.cuda_on_cpu.modules import launches
from tests.cuda_on_cpu.modules import prompts as cpu_module
from tests.engine.kernels.test_many_rows import random
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.dequantize import PromptKernels, add, unpack, wrong_add, wrong_unpack
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.store import EAGER, AdapterStore, Selection
from trimtab.errors import DeviceError

TYPES = (torch.bfloat16, torch.float16)
ORDERS = (0, 1, 7)  # of threads and blocks


def packed(quant, shape=(96, 320), dtype=torch.bfloat16, seed=0):
    return quantize(random(*shape, dtype=dtype, seed=seed), quant)


def leaf(rows, columns, quant="nf4", store=None, seed=0):
    common = {"bias": None, "device": torch.device("cpu"), "dtype": torch.bfloat16, "store": store or AdapterStore()}
    return ResidentLeaf("a", packed(quant, (rows, columns), seed=seed), **common)


OLD_BITSANDBYTES = tuple(int(part) for part in version("bitsandbytes").split(".")[:2]) < (0, 50)


@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_unpacked_weight_is_bitsandbytes_own(quant, dtype):
    for order in ORDERS:
        module = cpu_module(order)
        for shape in ((96, 320), (64, 64), (8, 1088)):
            weight = packed(quant, shape, dtype)
            made = unpack(weight, torch.full((shape[0] * shape[1] + 7,), torch.nan, dtype=dtype), module)
            if dtype == torch.float16 and quant == "nf4-dq" and OLD_BITSANDBYTES:  # on a CPU it rounds otherwise
                assert (made != dequantize(weight)).float().mean() < 4e-3
            else:
                assert torch.equal(made, dequantize(weight))
        assert set(launches(module)) == {"unpack_plain" if quant in ("nf4", "fp4") else "unpack_nested"}


@pytest.mark.parametrize("dtype", TYPES)
def test_a_lora_of_many_tokens_is_the_sum_of_its_products(dtype):
    for order in ORDERS:
        module = cpu_module(order)
        for n, rank, wide, high in ((1, 8, 64, 32), (8, 4, 1028, 34), (13, 20, 2052, 514), (35, 12, 1104, 66)):
            A, B = random(rank, wide) / wide**0.5, random(high, rank)
            x, y = random(n, wide, dtype=dtype), random(n, high, dtype=dtype)
            wanted = y.double() + 0.25 * (x.double() @ A.double().T @ B.double().T)
            for round_change in (False, True):
                made = add(A, B, 0.25, x, y.clone(), module, round_change=round_change)
                plain = add(A, B, 0.25, x, y.clone(), round_change=round_change)
                # One rounding of the type in the sum, and one more in the change.
                assert float((made.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps
                # Where the sum in float32 lies between two values another order may take the other one.
                assert float((made != plain).float().mean()) < 0.01
        assert set(launches(module)) == {"lora_low", "lora_up", *(["lora_low_tensor"] if dtype == torch.bfloat16 else [])}


def test_a_block_adds_as_many_tokens_as_leave_enough_blocks(monkeypatch):
    monkeypatch.setattr(prompt_kernels, "_BLOCKS", 1)
    module = cpu_module()
    A, B, x, y = (random(9, 48), random(40, 9), random(150, 48, dtype=torch.bfloat16), random(150, 40, dtype=torch.bfloat16))
    wanted = y.double() + x.double() @ A.double().T @ B.double().T
    made = add(A, B, 1.0, x, y.clone(), module, round_change=False).double()
    assert float((made - wanted).norm() / wanted.norm()) < 2 * torch.finfo(torch.bfloat16).eps


def test_rows_that_lie_apart_are_read_and_written_where_they_are():
    module = cpu_module()
    x, y = random(9, 128, dtype=torch.bfloat16)[:, :64], random(9, 96, dtype=torch.bfloat16)[:, :32]
    A, B, before = random(8, 64), random(32, 8), y.clone()
    rest = y.untyped_storage().tolist()
    add(A, B, 1.0, x, y, module, round_change=False)
    assert torch.equal(y, add(A, B, 1.0, x.contiguous(), before, module, round_change=False))
    assert len(rest) == len(y.untyped_storage().tolist()) and launches(module).count("lora_up") == 2


def test_shapes_that_the_kernels_do_not_know_are_torchs():
    module = cpu_module()
    A, B, x, y = random(8, 62), random(33, 8), random(5, 62, dtype=torch.bfloat16), random(5, 33, dtype=torch.bfloat16)
    expected = add(A, B, 1.0, x, y.clone(), round_change=True)
    assert torch.equal(add(A, B, 1.0, x, y.clone(), module, round_change=True), expected)
    weight = packed("int8")
    assert torch.equal(unpack(weight, torch.empty(96 * 320, dtype=torch.float16), module), dequantize(weight).half())
    assert launches(module) == []


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_found():
    for before, after in (
        ("(byte >> 4)", "(byte & 15)"), ("__fadd_rn(", "__fmul_rn("), ("lane & 8) ? 16", "lane & 8) ? 0"), ("part < 3", "part < 0"),
        ("s + k < slices", "s + k < 1"), ("(i & 1) * 8, at", "(i & 1) * 4, at"),
        ("sum[t][i] * scale", "sum[t][i]"), ("first + t >= n", "first + t >= n - 1"),
    ):  # fmt: skip
        source = prompt_kernels.source()
        assert before in source
        module = cpu_module(source=source.replace(before, after))
        assert wrong_unpack(packed("nf4-dq"), module) or wrong_add(module, torch.bfloat16, tokens=(1, 9)), before
    assert wrong_unpack(packed("nf4-dq"), cpu_module()) is None
    assert wrong_add(cpu_module(), torch.bfloat16, tokens=(1, 9)) is None


def test_a_layer_multiplies_with_the_weight_that_is_unpacked_for_it():
    module, store = cpu_module(), AdapterStore()
    leaves = [leaf(96, 128, "nf4-dq", store=store, seed=number) for number in range(2)]
    many, few = random(1, 12, 128, dtype=torch.bfloat16), random(1, 4, 128, dtype=torch.bfloat16)
    kernels = PromptKernels(module, unpacks=True)
    kernels.reserve(leaves)
    plain = [one(few) for one in leaves]
    with store.applying(None, MatmulTable(kernels.matmul(leaves))), torch.no_grad():
        for one, before in zip(leaves, plain, strict=True):
            assert torch.equal(one(many), torch.nn.functional.linear(many, dequantize(one.packed())))
            assert torch.equal(one(few), before)
    assert launches(module) == ["unpack_nested"] * 2


def test_an_adapter_of_many_ranks_stays_with_torch():
    module, store = cpu_module(), AdapterStore()
    layer, x = leaf(96, 128, "nf4-dq", store=store), random(1, 12, 128, dtype=torch.bfloat16)
    base = layer(x)
    adapters = PromptKernels(module, adds=True).adapters()
    for rank, expected in ((prompt_kernels.PAYING_RANK, 2), (prompt_kernels.PAYING_RANK + 1, 0)):
        module.launches.clear()
        layer.adapters["a"] = lora.LinearAdapter("language", 0.5, random(rank, 128), random(96, rank))
        store.selection, store.applier = Selection("a"), adapters
        found = layer(x)
        store.applier = EAGER
        assert len(launches(module)) == expected
        assert float((found.float() - layer(x).float()).abs().max()) <= 2**-7 * float(layer(x).float().abs().max())
        assert not torch.equal(found, base)


def test_kernels_are_tried_on_a_layer_that_leaves_room(monkeypatch):
    """Trying takes several times the unpacked weight: on a card that weights fill the largest layer ran out of memory."""
    monkeypatch.setattr(prompt_kernels, "TRIED_VALUES", 96 * 320)
    small, middle, large = leaf(64, 64), leaf(96, 320), leaf(128, 320)
    assert prompt_kernels.tried_leaf([large, small, middle]) is middle
    assert prompt_kernels.tried_leaf([large, leaf(256, 320)]) is large  # the smallest, where all are larger
    assert prompt_kernels.tried_leaf([]) is None and prompt_kernels.tried_leaf([leaf(64, 64, "int8")]) is None


@pytest.mark.parametrize(
    "layers, unpacks, reasons",
    [
        (["none"], False, []),  # nothing to unpack is no slower way
        (["none", "nf4"], True, []),
        (["odd"], False, [("unpacked 4-bit weights", "no layer is in a form that it reads")]),
    ],
)
def test_what_a_model_has_no_layers_for_is_no_fallback_and_is_not_checked_again(monkeypatch, layers, unpacks, reasons):
    made = {"none": lambda: nn.Linear(8, 8), "nf4": lambda: leaf(64, 64), "odd": lambda: leaf(3, 2)}
    decoder, checked, kept = nn.ModuleList([made[kind]() for kind in layers]), [], CardEntries()
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=64))
    model = SimpleNamespace(get_decoder=lambda: decoder, config=config)
    monkeypatch.setattr(CardEntries, "of", classmethod(lambda cls, device: kept))
    monkeypatch.setattr(prompt_kernels, "load", lambda device: "module")
    for name in ("wrong_unpack", "wrong_add", "wrong_add_rows"):
        monkeypatch.setattr(prompt_kernels, name, lambda *given, name=name: checked.append(name))
    for name in ("_unpack_runs", "_add_runs"):
        monkeypatch.setattr(prompt_kernels, name, lambda *given: (None, None))
    monkeypatch.setattr(prompt_kernels, "pair_us", lambda *given: (1.0, 2.0))
    for _ in range(2):
        found = prompt_kernels.choose(model, torch.device("cuda:0"), torch.bfloat16)
        assert (found.module, found.adds, found.unpacks, found.reasons) == ("module", True, unpacks, reasons)
    assert checked.count("wrong_add") == 1 and ("wrong_unpack" in checked) == unpacks


@pytest.mark.parametrize("where", ["four_bit", "tried_leaf", "scale_type", "width"])
def test_a_layer_that_cannot_be_opened_leaves_the_kernels_out_and_no_answer(monkeypatch, where):
    def refuse(*_):
        raise DeviceError("a weight cannot be opened", device="cuda:0")

    decoder = nn.ModuleList([leaf(64, 64)])
    text = refuse if where == "width" else lambda: SimpleNamespace(hidden_size=64)
    model = SimpleNamespace(get_decoder=lambda: decoder, config=SimpleNamespace(get_text_config=text))
    monkeypatch.setattr(CardEntries, "of", classmethod(lambda cls, device: CardEntries()))
    monkeypatch.setattr(prompt_kernels, "load", lambda device: "module")
    if where != "width":
        monkeypatch.setattr(prompt_kernels.layouts if where == "scale_type" else prompt_kernels, where, refuse)
    found = prompt_kernels.choose(model, torch.device("cuda:0"), torch.bfloat16)
    assert found.module is None and found.reasons == [("kernels of a prompt", "cuda:0: a weight cannot be opened")]
