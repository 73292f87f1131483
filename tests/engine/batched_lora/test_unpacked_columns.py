"""Adapters inside products over unpacked weights: the kernel that writes columns, what the plan counts, whose columns are there."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import prompts as cpu_module
from tests.engine.decode.test_graphs import demo
from tests.engine.families.test_chunk_layers import batch_of
from tests.engine.families.test_last_layers import BFLOAT16_TOLERANCE
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401 - a fixture
from tests.engine.prefill.test_prefill import ON_GPU, answered, differ, eager, ids
from tests.planning.values.test_execution import E4B, plan
from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.batched_lora.columns import Columns, KeptWeights, are_inside, inside_of, wrong_kept
from trimtab.engine.families.chunk import ChunkLayers
from trimtab.engine.kernels import dequantize
from trimtab.engine.layers.leaves import UnpackedWeights
from trimtab.engine.lora.store import Selection
from trimtab.engine.prefill.rows import layers_of
from trimtab.errors import DeviceError
from trimtab.planning.planner import COLUMNS, ITEM, unpacked_bytes

needs_sources = pytest.mark.skipif(ON_GPU or run.why_not() is not None, reason="the sources, compiled by g++")


@needs_sources
@pytest.mark.parametrize("order", [0, 1])
def test_the_check_passes_in_any_order_of_threads(order):
    module = cpu_module(order)
    assert wrong_kept(module) is None and module.launches.count("write_columns") == 2


FAULTS = {
    "columns of another's ranks": ("2 * i + k - 3 * before", "2 * i + k"),
    "the columns behind the last are no zeros": ("two[k] = 0;\n", "two[k] = column < 3 * rank ? 0 : 0x3f80;\n"),
    "the next row's place": ("out + (size_t)row * stride + width + first", "out + (size_t)row * (stride - 8) + width + first"),
    "another line's weight": ("lines + blockIdx.y * 8", "lines"),
}  # fmt: skip


@needs_sources
@pytest.mark.parametrize("what", FAULTS)
def test_the_check_sees_a_kernel_that_is_wrong(what):
    before, after = FAULTS[what]
    source = dequantize.source()
    assert before in source and wrong_kept(cpu_module(source=source.replace(before, after))) is not None


def test_a_kernel_that_cannot_run_is_named_and_left_out(monkeypatch):
    kernels = dequantize.PromptKernels(module=object(), adds=True)
    model = SimpleNamespace(device=torch.device("cpu"), unpacked=SimpleNamespace(columns=COLUMNS))

    def broken(*given):
        raise DeviceError("no such kernel", device="cpu")

    told = []
    monkeypatch.setattr(adapter_columns, "wrong_kept", broken)
    assert adapter_columns.choose_kept(model, kernels, [], lambda why, what: told.append((what, why))) is None
    assert [what for what, _ in told] == [adapter_columns.NAME_KEPT] and "no such kernel" in told[0][1]


def test_a_plan_with_adapters_counts_their_columns():
    large, base = plan(139, batch=32, adapters={"a": "a"}), plan(139, batch=32)
    assert base.gpu[ITEM] == unpacked_bytes(E4B) < large.gpu[ITEM] == unpacked_bytes(E4B, COLUMNS)
    assert large.gpu[ITEM] < 1.07 * base.gpu[ITEM]


@pytest.fixture
def columned(on_cpu):  # noqa: F811
    """The demo model, its unpacked weights with columns, and a batch whose chunks use them."""
    with demo() as model:
        model.unpacked = UnpackedWeights(dequantize.four_bit(model.hf_model), COLUMNS)
        batch = batch_of(model, sizes=(8, 24))
        answered(batch, model.prepare(ids(5)))  # the cache's layers are known from here on
        step = batch.steps.fused_step()
        first = batch.prompts.firsts.first_shared
        groups = [group for layer in step.layers[:first] for group in layer.products]
        module = cpu_module()
        weights = KeptWeights(model.unpacked, groups, module)
        batch.prompts.firsts = ChunkLayers(step, first, Columns(weights, weights.groups, module, model.device))
        yield model, batch, module


@needs_sources
def test_prompts_with_adapters_in_turn_have_the_scores_of_the_modules(columned):
    model, batch, module = columned
    names, modules, written = ("specialist", "specialist", "style", None, "specialist", "rslora-dora", "style"), eager(model), []
    wanted = {name: answered(modules, model.prepare(ids(20)), adapter=name)[0] for name in set(names)}
    for name in names:
        before = module.launches.count("write_columns")
        assert differ(answered(batch, model.prepare(ids(20)), adapter=name)[0], wanted[name]) < BFLOAT16_TOLERANCE, name
        written.append(module.launches.count("write_columns") - before)
    # Once for an adapter's turn; the base and an adapter of another kind read none, and leave what is there.
    assert written == [1, 0, 1, 0, 1, 0, 1]
    assert "extend_input" in module.launches


@needs_sources
@pytest.mark.slow
def test_an_adapter_whose_table_has_gone_has_its_columns_written_again(columned, monkeypatch):
    model, batch, _ = columned
    monkeypatch.setattr(adapter_columns, "MOST_ADAPTERS", 1)
    expected = eager(model)
    for name in ("specialist", "style", "specialist"):
        wanted, found = (answered(one, model.prepare(ids(20)), adapter=name)[0] for one in (expected, batch))
        assert differ(found, wanted) < BFLOAT16_TOLERANCE, name
    assert len(batch.prompts.firsts.columns.weights._lines) == 1


@needs_sources
def test_a_short_chunk_and_passes_whose_rows_look_theirs_up_do_without(columned):
    model, batch, module = columned
    answered(batch, model.prepare(ids(6)), adapter="specialist")  # 8 tokens: written, not read
    assert "extend_input" not in module.launches
    columns = batch.prompts.firsts.columns
    name = columns.weights._name
    model.adapter_store.select(Selection(name))  # as in a pass
    group = next(one for one in columns.weights.groups if are_inside(one, name, inside_of(one, name)))
    x = torch.zeros(64, group[0].in_features, dtype=torch.bfloat16)
    assert columns.operands(group, x) is not None
    layers_of(batch.prompts, batch.prompts._forward)  # as a pass of several prompts asks for them
    assert columns.operands(group, x) is None


@needs_sources
def test_columns_of_another_adapter_would_be_seen(columned):
    model, batch, _ = columned
    wanted = answered(eager(model), model.prepare(ids(20)), adapter="specialist")[0]
    answered(batch, model.prepare(ids(20)), adapter="style")
    own = KeptWeights.hold

    def kept(self, key, name, content):
        self.unpacked.holds = (key, content)  # as if they were there already
        own(self, key, name, content)

    KeptWeights.hold = kept
    try:
        found = answered(batch, model.prepare(ids(20)), adapter="specialist")[0]
    finally:
        KeptWeights.hold = own
    assert differ(found, wanted) > BFLOAT16_TOLERANCE


@needs_sources
def test_an_adapter_that_is_unloaded_is_held_by_nobody(columned):
    model, batch, _ = columned
    answered(batch, model.prepare(ids(20)), adapter="specialist")
    leaf = model.hf_model.get_decoder().layers[0].mlp.down_proj
    held = weakref.ref(leaf.adapters["specialist"].A)
    model.unload_adapter("specialist")
    gc.collect()
    assert held() is None
