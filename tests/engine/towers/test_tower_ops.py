"""Towers with the kernels of prompts: without an adapter the bits of bitsandbytes' own path, with one the same in every pass and as
near to the formula as PEFT's.

The kernels are compiled for a CPU and run thread by thread; tests/gpu/test_tower_ops.py runs the same tests on a GPU.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import trimtab
from tests import pico
from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import launches
from tests.cuda_on_cpu.modules import prompts as cpu_module
from tests.engine.prefill.test_encoder_cache import asked, tensors_of
from tests.engine.prefill.test_prefill import WITH_PICTURES, eager, in_chunks, picture, through
from tests.engine.towers.test_tower_graphs import MODE, same
from tests.lent import DEVICE
from tests.long_runs import FIRST, crossed
from tests.planning.values.test_execution import E4B
from trimtab.engine.formats.packed import Matmul, MatmulTable
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.dequantize import LEAST_TOKENS, PAYING_RANK, PromptKernels
from trimtab.engine.layers.leaves import HostLeaf, StagedLinear
from trimtab.engine.lora import layers
from trimtab.engine.lora.fewer_ops import ShortOps
from trimtab.engine.lora.store import EAGER
from trimtab.engine.passes import media_embeddings
from trimtab.engine.towers.graphs import TowerOps, Towers, four_bit_towers
from trimtab.planning.memory.prompts import uncaptured_bytes

ON_GPU = DEVICE != "cpu"
pytestmark = pytest.mark.skipif(not ON_GPU and run.why_not() is not None, reason=str(run.why_not()))
# The sum of an adapter's change in another order, and norms of one operation, move a value by a step of bfloat16 (2^-8 of it). Two
# layers pass that on: a few steps of the largest value, as between two passes that round the same sums in another order.
TOLERANCE = 2**-5
# Two ways of rounding are equally far from the same pass in float32, up to chance.
CHANCE = 1.25


@contextmanager
def loaded(family, folder, *, rank=None, quant="nf4-dq", dtype="bfloat16", **options):
    """Give a model with an adapter "a" on decoder and towers if there is a rank."""
    base = pico.build(family, folder / "base")
    adapters = {}
    if rank is not None:
        where = folder / f"rank{rank}"
        adapters["a"] = where if where.exists() else pico.adapter(base, where, targets="all", rank=rank)
    plan = trimtab.plan(base, adapters=adapters, quant=quant, dtype=dtype, context=96, device=DEVICE, **options)
    with trimtab.load(plan, decode="auto") as model:
        yield model


def ops_of(model, *, norms=True):
    """Return (what towers use, the module whose launches it makes). norms: whether norms are one operation too."""
    module = prompt_kernels.load(model.device) if ON_GPU else cpu_module()
    told = []
    short = ShortOps(model.hf_model, model.adapter_store, model.device, lambda what, why: told.append((what, why)))
    if not norms:
        short._why = "not in this test"
    ops = TowerOps(model, PromptKernels(module, unpacks=True, adds=True), short)
    assert not told
    return ops, module


def given(model, family, adapter=None):
    """Return what a prompt with an image (Gemma 4: and audio) gives to the decoder."""
    model.adapter_store.set(adapter)
    with torch.no_grad():
        media = media_embeddings.media_of(model.hf_model, picture(model, family, 9).tensors)
    return [media.embeddings, *media.deep]


def features(model, family, seed, adapter):
    model.adapter_store.set(adapter)
    arguments = {
        name: value.to(DEVICE, model.dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor) else value
        for name, value in asked(model, family, [seed]).items()
    }  # fmt: skip
    with torch.no_grad():
        return tensors_of(model.hf_model.model.get_image_features(**arguments))


def far(found, expected):
    """Return the relative error of all values together."""
    pairs = [(one.double().cpu(), other.double().cpu()) for one, other in zip(found, expected, strict=True)]
    off = sum(float((one - other).square().sum()) for one, other in pairs)
    return (off / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


@contextmanager
def unpacked_by_bitsandbytes(leaves):
    """Let layers multiply with weights that bitsandbytes unpacks. It does so for many rows; on a GPU its releases from 0.50 on have
    a kernel of their own for up to 1,536 rows of some shapes, whose sums are in another order."""

    def product(leaf, x):
        return functional.linear(x, dequantize(leaf.packed()), leaf.bias) if x.dtype == leaf.dtype else None

    table = MatmulTable(Matmul("dequantized", set(leaves), product, LEAST_TOKENS))
    with leaves[0].adapter_store.applying(None, table) if ON_GPU else nullcontext():
        yield


def is_bitsandbytes_own(model, family, ops):
    own = given(model, family)
    with unpacked_by_bitsandbytes(ops.leaves):
        expected = given(model, family)
    assert far(expected, own) < TOLERANCE
    with ops.running():
        same(given(model, family), expected)


@pytest.mark.parametrize("family", crossed(WITH_PICTURES, first=(*FIRST, "gemma3")))
def test_without_an_adapter_the_bits_are_bitsandbytes_own(family, tmp_path):
    with loaded(family, tmp_path) as model:
        ops, module = ops_of(model, norms=False)
        is_bitsandbytes_own(model, family, ops)
        assert model.adapter_store.matmuls is None and model.adapter_store.applier is EAGER
        if not ON_GPU:
            # Layers over fewer rows than LEAST_TOKENS, as those of a short sound, stay as they are.
            assert set(launches(module)) == {"unpack_nested"} and len(launches(module)) >= 8


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_every_form_of_a_four_bit_weight_has_its_bits(quant, tmp_path):
    with loaded("gemma4", tmp_path, quant=quant) as model:
        ops, module = ops_of(model, norms=False)
        is_bitsandbytes_own(model, "gemma4", ops)
        assert ON_GPU or set(launches(module)) == {"unpack_plain"}


@pytest.mark.parametrize(("family", "quant"), crossed(["gemma4", "gemma3", "qwen3_vl"], ["nf4-dq", "none"], rest=1))
def test_with_an_adapter_every_pass_gives_the_same_and_is_as_right_as_pefts(family, quant, tmp_path):
    with loaded(family, tmp_path, rank=4, quant=quant, dtype="float32") as model:
        exact = {adapter: features(model, family, 1, adapter) for adapter in ("a", None)}
    with loaded(family, tmp_path, rank=4, quant=quant) as model:
        ops, module = ops_of(model)
        why = []
        towers = Towers(model, MODE, lambda reason, what: why.append(reason))
        for adapter in ("a", None):
            plain = features(model, family, 1, adapter)
            with ops.running():
                expected = features(model, family, 1, adapter)
            serial = None if adapter is None else model.adapter_store.serials[adapter]
            for _ in range(3):  # as it is, captured, replayed
                with ops.running(), towers.running(adapter, serial):
                    same(features(model, family, 1, adapter), expected)
            assert far(expected, plain) < TOLERANCE
            assert far(expected, exact[adapter]) < CHANCE * far(plain, exact[adapter]) < TOLERANCE
        assert towers.replayed == towers.captured >= 4 and not why
        if not ON_GPU:
            names = launches(module)
            assert "lora_up" in names and names.count("lora_up") == sum(name.startswith("lora_low") for name in names)
            assert ("unpack_nested" in names) == (quant == "nf4-dq")


def test_an_adapter_of_a_high_rank_is_torchs_and_leaves_nothing_for_the_next_layer(tmp_path):
    with loaded("gemma3", tmp_path, rank=PAYING_RANK + 1) as model:
        ops, module = ops_of(model)
        plain = features(model, "gemma3", 1, "a")
        towers = Towers(model, MODE, lambda reason, what: None)
        with ops.running():
            expected = features(model, "gemma3", 1, "a")
            assert ops.adapters._wide is None and ops.adapters._source is None
        for _ in range(3):
            with ops.running(), towers.running("a", model.adapter_store.serials["a"]):
                same(features(model, "gemma3", 1, "a"), expected)
        assert far(expected, plain) < TOLERANCE
        assert ON_GPU or not any(name.startswith("lora") for name in launches(module))


def test_streamed_towers_use_the_kernels_and_layers_on_the_host_do_not(tmp_path):
    with loaded("gemma4", tmp_path, place={"vision": "stream", "audio": "host"}) as model:
        paths = [one.module_path for one in four_bit_towers(model)]
        assert any(path.startswith("model.vision_tower.encoder.layers.") for path in paths)
        assert not any(path.startswith("model.audio_tower.layers.") for path in paths)
        kinds = {type(model.hf_model.get_submodule(path)) for path in paths}
        assert StagedLinear in kinds and HostLeaf not in kinds
        ops, _ = ops_of(model, norms=False)
        is_bitsandbytes_own(model, "gemma4", ops)


def test_the_weights_of_towers_and_decoder_are_unpacked_into_one_place(tmp_path):
    with loaded("gemma4", tmp_path) as model:
        decoder = prompt_kernels.four_bit(model.hf_model)
        towers = four_bit_towers(model)
        assert decoder and towers and not set(decoder) & set(towers)
        kernels = PromptKernels(object(), unpacks=True)
        kernels.reserve(decoder)
        TowerOps(model, kernels, ShortOps(model.hf_model, model.adapter_store, model.device, lambda what, why: None))
        largest = max(leaf.out_features * leaf.in_features for leaf in (*decoder, *towers))
        assert [room.numel() for room in kernels._weights.values()] == [largest]


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_a_prompt_s_towers_run_with_them_in_every_pass(tmp_path):
    with loaded("gemma4", tmp_path, rank=4) as model:
        alone, batch = eager(model), in_chunks(model, (8, 16, 32))
        assert batch.prompts._tower_ops is None  # a CPU computes them as they are
        batch.prompts._tower_ops, module = ops_of(model)
        counts = []
        for number in range(3):
            inputs = picture(model, "gemma4", 9 + number)
            expected, found = through(alone, inputs, adapter="a"), through(batch, inputs, adapter="a")
            assert float((found.logits - expected.logits).abs().max() / expected.logits.abs().max()) < TOLERANCE
            counts.append(len(launches(module)))
            for one, prompt in ((batch, found), (alone, expected)):
                one.leave(one.join(prompt).row)
        assert counts[0] > 0 and counts == [counts[0], 2 * counts[0], 3 * counts[0]]
        assert batch.prompts.towers.replayed and not batch.steps.fallbacks


def test_a_plan_counts_room_for_the_largest_weight_of_towers_too():
    before = uncaptured_bytes(E4B, (16,), quant="nf4-dq", has_adapters=False)["prompt_buffers"]
    largest = max(row.weight.numel for row in E4B.rows if row.part == "language" and row.quantized and row.weight)
    for part in layers.TOWERS:
        place, row = next((n, row) for n, row in enumerate(E4B.rows) if row.part == part and row.quantized and row.weight)
        wide = tuple(replace(one, shape=(largest // 64, 128)) for one in row.tensors)
        other = replace(E4B, rows=(*E4B.rows[:place], replace(row, tensors=wide), *E4B.rows[place + 1 :]))
        assert uncaptured_bytes(other, (16,), quant="nf4-dq", has_adapters=False)["prompt_buffers"] - before == 2 * (
            largest // 64 * 128 - largest
        )
