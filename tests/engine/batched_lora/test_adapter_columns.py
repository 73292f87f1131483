"""LoRA inside a prompt's products: the columns are the adapter in float64, layers over one input share it, the rest stays."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests.cuda_on_cpu.modules import launches
from tests.cuda_on_cpu.modules import prompts as cpu_module
from tests.engine.kernels.test_fused_kernels import wide as wide_checkpoint
from tests.engine.kernels.test_many_rows import random
from tests.engine.prefill.test_prefill import answered, differ, eager, ids, in_chunks
from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.batched_lora.columns import LARGEST_ERROR, Columns, DequantizedWeights, extended_width, wrong
from trimtab.engine.batched_lora.table import groups_of
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.autotune import RandomWeights
from trimtab.engine.kernels.dequantize import PromptKernels
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.store import EAGER, AdapterStore, Selection
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS

BF16, CPU = torch.bfloat16, torch.device("cpu")
WIDE = 192


def packed(shape, quant="nf4-dq"):
    return RandomWeights(CPU, quant=quant).make(*shape) if "int4" in quant else quantize(random(*shape, dtype=BF16), quant)


def columns_of(leaves, kernels):
    return Columns(DequantizedWeights(kernels), list(groups_of(leaves).values()), kernels.module, CPU)


def room_for(high, wide):
    return torch.empty(high * (wide + ADAPTER_COLUMNS), dtype=BF16)


# The kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
def test_columns_are_the_adapter_in_float64(quant):
    for order, shape in ((0, (96, 320)), (1, (40, 64)), (7, (24, 1104))):
        weight, module = packed(shape, quant), cpu_module(order)
        assert wrong(weight, room_for(*shape), module, tokens=(1, 17, 35)) is None
        assert set(launches(module)) == {"extend_input", f"unpack_columns_{'nested' if quant == 'nf4-dq' else 'plain'}"}


def test_columns_of_every_rank_and_of_a_wide_input_are_right():
    module = cpu_module()
    for rank in (1, 7, 8, 9, 31, 32):
        assert wrong(packed((40, 128)), room_for(40, 128), module, tokens=(18,), ranks=(rank,)) is None, rank
    assert wrong(packed((16, 5120)), room_for(16, 5120), module, tokens=(33,), ranks=(8, 3)) is None


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_found():
    for before, after in (
        ("column % 3 < 2", "column % 3 < 3"), ("to_bf16(v - from_bf16(high))", "0"), ("- 3 * before", ""),
        ("before += rank1", "before += 0"), ("r < rank0 + rank1 ? scale1", "r < rank0 ? scale1"),
        ("+ width + 3 * rank + i % empty] = 0", "+ width + 3 * rank + i % empty] = 0x7fc0"),
        ("s + k < (int)gridDim.y", "s + k < 1"),
        ("to = (i64)row * stride", "to = (i64)row * width"), ("to[0] = to[2] = high", "to[0] = high"),
        ("* out_stride + at) = v[k]", "* out_stride + at) = v[0]"),
        ("gridDim.y * (gridDim.z - 1) - 1", "gridDim.y * gridDim.z - 1"),
    ):  # fmt: skip
        source = prompt_kernels.source()
        assert before in source, before
        module = cpu_module(source=source.replace(before, after))
        assert wrong(packed((24, 2080)), room_for(24, 2080), module, tokens=(17,)), before
    assert wrong(packed((24, 2080)), room_for(24, 2080), cpu_module(), tokens=(17,)) is None


# Layers ----------------------------------------------------------------------------------------------------------------


class Layers:
    """Layers of one block on the CPU, an adapter "a" on each with its rank, and what computes them."""

    def __init__(self, ranks, *, highs=None, bias=False, wide=WIDE, quant="nf4-dq"):
        self.module, self.adapter_store = cpu_module(), AdapterStore()
        self.module.variant_names = ("unpack_columns_plain",)
        self.leaves = {}
        for number, (name, rank) in enumerate(ranks.items()):
            high = 48 + 16 * number if highs is None else highs[number]
            own = random(high, dtype=BF16) if bias else None
            facts = {"bias": own, "device": CPU, "dtype": BF16, "store": self.adapter_store}
            leaf = ResidentLeaf(f"layers.0.{name}", packed((high, wide), quant), **facts)
            if rank:
                leaf.adapters["a"] = lora.LinearAdapter("language", 0.5 + number, random(rank, wide), random(high, rank))
            self.leaves[name] = leaf
        self.kernels = PromptKernels(self.module, unpacks=True)
        self.kernels.reserve(list(self.leaves.values()), columns=ADAPTER_COLUMNS)
        self.columns = columns_of(list(self.leaves.values()), self.kernels)
        self.adapter_store.select(Selection("a"))

    @contextmanager
    def applying(self):
        table = MatmulTable(self.kernels.matmul(list(self.leaves.values()), self.columns.operands))
        with torch.no_grad(), self.adapter_store.applying(None, table):
            yield

    def run(self, *inputs):
        """Return each layer's output in one pass; inputs: of each layer, or one of all of them."""
        given = inputs if len(inputs) > 1 else inputs * len(self.leaves)
        self.module.launches.clear()
        with self.applying():
            made = [leaf(x) for leaf, x in zip(self.leaves.values(), given, strict=True)]
        self.columns.forget()
        assert not bool(self.columns.counts.any()) and self.adapter_store.matmuls is None
        return made

    def expected(self, name, x):
        leaf = self.leaves[name]
        y = x.double() @ dequantize(leaf.packed()).double().T
        adapter = leaf.adapters.get("a")
        if adapter is not None:
            y += adapter.scale * (x.double() @ adapter.A.double().T @ adapter.B.double().T)
        return y if leaf.bias is None else y + leaf.bias.double()

    def check(self, x):
        """Compare all layers over one input with float64. One rounding to bfloat16 is 1.7e-3 of the norm, PEFT's three are more."""
        for name, y in zip(self.leaves, self.run(x), strict=True):
            expected = self.expected(name, x)
            assert y.shape == expected.shape and y.dtype == BF16
            assert float((y.double() - expected).norm() / expected.norm()) < LARGEST_ERROR, name

    def counted(self, name):
        return sum(one.startswith(name) for one in launches(self.module))


QKV = {"q_proj": 8, "k_proj": 4, "v_proj": 12}
INPUT = random(1, 35, WIDE, dtype=BF16)


@pytest.mark.parametrize(
    "ranks", [QKV, {"gate_proj": 8, "up_proj": 20}, {"o_proj": 5}, {"q_proj": 8, "k_proj": 0, "v_proj": 3}, {"q_proj": 1}]
)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_over_one_input_share_it(ranks, bias):
    layers = Layers(ranks, bias=bias)
    layers.check(INPUT)
    assert layers.counted("extend_input") == 1 and layers.counted("lora_") == 0
    assert layers.counted("unpack_columns") == sum(map(bool, ranks.values()))
    assert layers.counted("unpack_nested") == sum(not rank for rank in ranks.values())


def test_inputs_are_in_the_order_of_a_weights_columns_and_shared_only_in_it():
    layers = Layers(QKV, quant="int4-g64-idx")
    layers.check(INPUT)
    assert layers.counted("extend_input") == layers.counted("in_order") == 1
    layers.leaves["v_proj"]._packed = layers.leaves["v_proj"]._packed.as_it_lies()
    layers.check(INPUT)
    assert (layers.counted("extend_input"), layers.counted("in_order")) == (2, 1)


def test_an_input_that_is_another_or_has_changed_is_extended_again():
    layers = Layers(QKV)
    first, second = INPUT, random(1, 35, WIDE, dtype=BF16, seed=5)
    made = layers.run(first, second, first)
    for y, x, name in zip(made, (first, second, first), layers.leaves, strict=True):
        assert float((y.double() - layers.expected(name, x)).norm() / y.double().norm()) < LARGEST_ERROR
    assert layers.counted("extend_input") == 3
    x = first.clone()

    def double(*given):
        x.mul_(2)

    layers.leaves["q_proj"].register_forward_hook(double)
    for y, name, expected in zip(layers.run(x), layers.leaves, (first, 2 * first, 2 * first), strict=True):
        assert float((y.double() - layers.expected(name, expected)).norm() / y.double().norm()) < LARGEST_ERROR
    assert layers.counted("extend_input") == 2


def test_a_tensor_without_versions_is_extended_for_each_layer():
    layers = Layers(QKV)
    with torch.inference_mode():
        layers.check(INPUT.clone())
    assert layers.counted("extend_input") == 3


def test_an_adapter_whose_values_change_is_read_in_the_next_pass():
    layers = Layers(QKV)
    layers.check(INPUT)
    for leaf in layers.leaves.values():
        leaf.adapters["a"].A.mul_(-3)
        leaf.adapters["a"].B.add_(1)
    layers.check(INPUT)
    for leaf in layers.leaves.values():
        leaf.adapters["a"].B.zero_()
    layers.check(INPUT)
    for leaf, y in zip(layers.leaves.values(), layers.run(INPUT), strict=True):
        base = torch.nn.functional.linear(INPUT, dequantize(leaf.packed()))
        # Zeros change no value, but a longer inner dimension may have another order of the sum.
        assert float((y - base).abs().max()) <= 2**-7 * float(base.abs().max())


def test_a_group_without_its_last_layer_keeps_nothing_after_the_pass():
    layers = Layers({"q_proj": 8, "k_proj": 4})
    with layers.applying():
        layers.leaves["q_proj"](INPUT)
    assert layers.columns._last is not None
    layers.columns.forget()
    assert layers.columns._last is None


def rows_differ(layers):
    layers.adapter_store.select(Selection(None, ("a",)))


def dora(layers):
    layers.leaves["o_proj"].adapters["a"].magnitude = torch.ones(1, 48)


def narrow_room(layers):
    layers.kernels._weights[BF16] = layers.kernels._weights[BF16][: 48 * WIDE]


def by_table(layers):
    layers.adapter_store.applier = SimpleNamespace(table=object(), apply=EAGER.apply)


def base(layers):
    layers.adapter_store.none()


@pytest.mark.parametrize("change", [rows_differ, dora, narrow_room, by_table, base])
def test_what_does_not_fit_is_computed_as_before(change):
    layers = Layers({"o_proj": 8})
    change(layers)
    layers.run(INPUT)
    assert layers.counted("extend_input") == 0 and layers.counted("unpack_nested") == 1


def test_few_tokens_high_ranks_narrow_inputs_and_float16_are_computed_as_before():
    layers = Layers({"o_proj": 8})
    least = adapter_columns.LEAST_TOKENS
    for x, count in ((INPUT[:, : least - 1], 0), (INPUT[:, :least], 1), (INPUT.half(), 0)):
        layers.run(x)
        assert layers.counted("extend_input") == count
    for rank, wide in ((adapter_columns.MOST_RANK + 1, WIDE), (32, 64)):  # 64 + 96 columns are more than twice 64
        layers = Layers({"o_proj": rank}, wide=wide)
        layers.run(random(1, 35, wide, dtype=BF16))
        assert layers.counted("extend_input") == 0


def test_layers_are_grouped_by_what_they_read():
    store = AdapterStore()

    def leaf(path, wide=64):
        return ResidentLeaf(path, packed((8, wide)), bias=None, device=CPU, dtype=BF16, store=store)

    q, k, v, other_q = leaf("a.0.q_proj"), leaf("a.0.k_proj"), leaf("a.0.v_proj"), leaf("a.1.q_proj")
    gate, up, down = leaf("a.0.gate_proj"), leaf("a.0.up_proj", 128), leaf("a.0.down_proj", 128)
    groups = groups_of([v, q, k, other_q, gate, up, down])
    assert groups[q] == groups[k] == groups[v] == (q, k, v) and groups[other_q] == (other_q,)
    assert groups[gate] == (gate,) and groups[up] == (up,) and groups[down] == (down,)


def test_the_plan_counts_as_many_columns_as_the_widest_group_has():
    for wide in range(1024, 1024 + 2 * adapter_columns.STEP, 16):
        columns = extended_width(wide, adapter_columns.MOST_LAYERS * adapter_columns.MOST_RANK) - wide
        assert columns <= ADAPTER_COLUMNS


def test_a_prompt_with_the_adapter_inside_its_products_is_the_prompt(monkeypatch, tmp_path):
    base, adapters = wide_checkpoint("gemma4", monkeypatch, tmp_path)
    made = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=64, device="cpu", images=0, audio_s=0.0)
    with trimtab.load(made) as model:
        leaves = prompt_kernels.four_bit(model.hf_model)
        kernels = PromptKernels(cpu_module(), unpacks=True)
        kernels.reserve(leaves, columns=ADAPTER_COLUMNS)
        columns = columns_of(leaves, kernels)
        table = MatmulTable(kernels.matmul(leaves, columns.operands))
        for name in adapters:
            expected = answered(eager(model), model.prepare(ids(40)), adapter=name)
            kernels.module.launches.clear()
            with model.adapter_store.applying(None, table):
                found = answered(in_chunks(model, (64,)), model.prepare(ids(40)), adapter=name)
            # In bfloat16 sums of another order and one rounding instead of three: a few steps of 2^-8 of the largest score.
            assert differ(found, expected) < 2**-5
            products = [one for one in launches(kernels.module) if one.startswith("unpack_columns")]
            adapted = [leaf for leaf in leaves if name in leaf.adapters]
            # transformers gives q, k and v one tensor, and gate and up another.
            inputs = {columns.groups[leaf] for leaf in adapted}
            assert launches(kernels.module).count("extend_input") <= len(inputs) < len(products) <= len(adapted)
            for leaf in adapted:
                leaf.adapters[name].B.mul_(-1)  # and another adapter is seen
            with model.adapter_store.applying(None, table):
                assert differ(answered(in_chunks(model, (64,)), model.prepare(ids(40)), adapter=name), expected) > 2**-5


# Choosing --------------------------------------------------------------------------------------------------------------


def chosen(monkeypatch, *, why=None, slower=None, adapters=True, unpacked=None, quant="nf4", kept=None, check=None):
    leaf = ResidentLeaf("q_proj", packed((64, 64), quant), bias=None, device=CPU, dtype=BF16, store=AdapterStore())
    decoder = torch.nn.ModuleList([leaf])
    model = SimpleNamespace(
        hf_model=SimpleNamespace(get_decoder=lambda: decoder), device=CPU, dtype=BF16, unpacked=unpacked,
        plan=SimpleNamespace(request=SimpleNamespace(adapters={"a": "a"} if adapters else {})),
    )  # fmt: skip
    kernels, checked, said = PromptKernels("module", unpacks=True, adds=True), [], []
    kernels.reserve([leaf], columns=ADAPTER_COLUMNS)

    kept = CardEntries() if kept is None else kept
    monkeypatch.setattr(CardEntries, "of", classmethod(lambda cls, device: kept))
    monkeypatch.setattr(adapter_columns, "wrong", check or (lambda *given: checked.append("wrong") or why))
    monkeypatch.setattr(adapter_columns, "pair_us", lambda *given: (3.0, 2.0) if slower else (1.0, 2.0))
    monkeypatch.setattr(adapter_columns, "runs", lambda *given: (None, None))
    columns = adapter_columns.choose(model, kernels, lambda why, what: said.append((why, what)))
    return columns, checked, said


def test_what_is_right_and_faster_is_used_and_not_checked_again(monkeypatch):
    kept = CardEntries()
    for checks in (["wrong"], []):
        columns, checked, said = chosen(monkeypatch, kept=kept)
        assert columns is not None and checked == checks and not said
        assert columns.weights.kernels.measured_us[adapter_columns.NAME] == (1.0, 2.0)


def test_what_is_wrong_or_slower_is_named_and_checked_again(monkeypatch):
    kept = CardEntries()
    for given in ({"why": "it is wrong"}, {"slower": "slower here: 3.0 µs against torch's 2.0"}):
        columns, checked, said = chosen(monkeypatch, kept=kept, **given)
        assert columns is None and checked == ["wrong"] and said == [(*given.values(), adapter_columns.NAME)]


@pytest.mark.parametrize("given", [{"adapters": False}, {"unpacked": "weights"}, {"quant": "int8"}])
def test_what_has_no_place_for_columns_is_not_tried(monkeypatch, given):
    assert chosen(monkeypatch, **given) == (None, [], [])


def test_kernels_that_cannot_be_launched_leave_the_other_way(monkeypatch):
    def broken(*given):
        raise RuntimeError("no launch")

    columns, _, said = chosen(monkeypatch, check=broken)
    assert columns is None and said == [("RuntimeError: no launch", adapter_columns.NAME)]
