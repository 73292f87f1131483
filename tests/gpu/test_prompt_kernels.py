"""A prompt's kernels on the GPU, and prompts of a 4-bit model that are captured with them, its layers streamed or not."""

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.decode.test_graphs import demo
from tests.engine.kernels.test_fused_kernels import wide
from tests.engine.prefill.test_prefill import answered, differ, eager, ids, in_chunks, named
from trimtab.engine.batched_lora import columns
from trimtab.engine.cuda import nvrtc
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.selfcheck import KernelFamily
from trimtab.planning import planner
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS

# In bfloat16 a product of padded rows rounds its sums elsewhere, so do norms of one operation: steps of 2^-8 of the largest.
TOLERANCE = 2**-5


@pytest.fixture(scope="module")
def module():
    return prompt_kernels.load("cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
def test_an_unpacked_weight_is_bitsandbytes_own(module, quant, dtype):
    for shape in ((10240, 2560), (96, 320), (8, 1088)):
        weight = quantize(torch.randn(shape, device="cuda:0").to(dtype), quant)
        assert prompt_kernels.wrong_unpack(weight, module) is None
        assert dequantize(weight).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_lora_of_many_tokens_is_right(module, dtype):
    assert prompt_kernels.wrong_add(module, dtype, tokens=(1, 7, 16, 515, 1024)) is None


@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
def test_adapters_inside_products_are_right(module, quant):
    for shape in ((10240, 2560), (512, 2560), (2560, 10240), (96, 320), (40, 64)):
        weight = quantize(torch.randn(shape, device="cuda:0").bfloat16(), quant)
        room = torch.empty(shape[0] * (shape[1] + ADAPTER_COLUMNS), dtype=torch.bfloat16, device="cuda:0")
        assert columns.wrong(weight, room, module, tokens=(1, 17, 64, 515, 1024)) is None
    ranks = (1, 7, 8, 9, 31, 32)
    for rank in ranks:
        assert columns.wrong(weight, room, module, tokens=(33,), ranks=(rank,)) is None
    assert ranks[-1] == columns.MOST_RANK


@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_an_adapter_inside_the_products_is_read_anew_at_every_replay(monkeypatch, tmp_path, family):
    """Two adapters of one layout share a graph; both are what the eager prompt gives, whichever was captured."""
    launch, launched = nvrtc.Module.launch, []

    def noted(self, name, *given, **more):
        launched.append(name)
        return launch(self, name, *given, **more)

    monkeypatch.setattr(KernelFamily, "why_slower", lambda self, times: None)
    monkeypatch.setattr(CardEntries, "of", classmethod(lambda cls, device: CardEntries()))
    monkeypatch.setattr(nvrtc.Module, "launch", noted)
    monkeypatch.setattr(planner, "FEW_ROWS_SHARE", 0.0)  # over unpacked weights adapters go in another way
    base, _ = wide(family, monkeypatch, tmp_path)
    adapters = {name: pico.adapter(base, tmp_path / name, seed=seed, rank=8) for seed, name in enumerate("cd", 5)}
    plan = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=256, device="cuda:0", images=0, audio_s=0.0)
    with trimtab.load(plan) as model:
        batch = in_chunks(model, (64,))
        for _ in range(3):
            found = []
            for name in adapters:
                for count in (40, 64, 150):
                    expected = answered(eager(model), model.prepare(ids(count)), adapter=name)
                    found.append(answered(batch, model.prepare(ids(count)), adapter=name))
                    assert differ(found[-1], expected) < TOLERANCE
            assert differ(found[0], found[3]) > TOLERANCE
        assert batch.prompts._columns is not None and not named(batch) and len(batch.prompts.layouts) == 1
        assert {"extend_input", "unpack_columns_nested"} <= set(launched) and not bool(batch.prompts._columns.counts.any())
        # A graph launches nothing from Python: what is replayed reads the adapter that was copied into the buffer.
        launched.clear()
        for name in adapters:
            answered(batch, model.prepare(ids(40)), adapter=name)
        assert "extend_input" not in launched


@pytest.mark.parametrize("place", ["resident", "lean", "streamed"])
def test_a_four_bit_prompt_is_captured_with_the_kernels(place):
    with demo(place) as model:
        batch = in_chunks(model, (16, 64))
        for name in (None, "style", "specialist", "rslora-dora"):
            for count in (12, 64, 150):
                expected = answered(eager(model), model.prepare(ids(count)), adapter=name)
                for _ in range(3):
                    assert differ(answered(batch, model.prepare(ids(count)), adapter=name), expected) < TOLERANCE
        # Two of the adapters are copied into a buffer that graphs read, DoRA is read where it is.
        assert not named(batch) and len(batch.prompts.layouts) == 2 and len(batch.prompts._graphs) >= 15
        kernels = batch.prompts._kernels
        assert kernels.adds and (kernels.unpacks or kernels.reasons)
