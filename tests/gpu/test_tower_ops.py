"""Towers with the kernels of prompts on the GPU: the CPU's tests, layers of E4B's size, and whole prompts."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.engine.prefill.test_prefill import in_chunks, picture
from tests.engine.towers.test_tower_graphs import same
from tests.engine.towers.test_tower_ops import *
from tests.engine.towers.test_tower_ops import CHANCE, TOLERANCE, far, loaded, ops_of
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.dequantize import PromptKernels
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.engine.lora import layers
from trimtab.engine.lora.store import AdapterStore, Selection
from trimtab.engine.towers.graphs import Towers
from trimtab.request import GenerateRequest

DEVICE = torch.device("cuda:0")
# Of E4B's vision tower: attention, gate and up, down; patches of one image; embedding of patches.
SHAPES = ((768, 768), (3072, 768), (768, 3072))
PATCHES = 2520


def random(*shape, seed=0):
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed + sum(shape)))


def layer(shape, quant):
    weight = quantize((random(*shape) / shape[1] ** 0.5).bfloat16(), quant)
    return ResidentLeaf("layer", weight, bias=None, device=DEVICE, dtype=torch.bfloat16, store=AdapterStore())


@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_an_image_s_patches_has_the_bits_of_bitsandbytes(shape, quant):
    leaf, x = layer(shape, quant), random(1, PATCHES, shape[1]).bfloat16()
    kernels = PromptKernels(prompt_kernels.load(DEVICE), unpacks=True)
    kernels.reserve([leaf])
    with torch.no_grad():
        expected = leaf(x)
        with leaf.adapter_store.applying(None, MatmulTable(kernels.matmul([leaf]))):
            assert torch.equal(leaf(x), expected)


@pytest.mark.parametrize("rank", [4, 8, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_adapter_of_an_image_s_patches_is_as_right_as_pefts(shape, rank):
    leaf, x = layer(shape, "nf4-dq"), random(1, PATCHES, shape[1]).bfloat16()
    A, B = random(rank, shape[1]) / shape[1] ** 0.5, random(shape[0], rank)
    leaf.adapters["a"] = layers.LinearAdapter("vision", 0.5, A, B)
    leaf.adapter_store.select(Selection("a"))
    weight = dequantize(leaf.packed()).double()
    exact = x.double() @ weight.T + 0.5 * (x.double() @ A.double().T @ B.double().T)
    with torch.no_grad():
        plain = leaf(x)
        leaf.adapter_store.applier = PromptKernels(prompt_kernels.load(DEVICE), adds=True).adapters(shares_inputs=False)
        found = leaf(x)
    assert far([found], [exact]) < CHANCE * far([plain], [exact]) < TOLERANCE
    # Both round the same sums in float32: few values lie so near a border that they round to the other side.
    assert rank > prompt_kernels.PAYING_RANK or float((found != plain).float().mean()) < 0.02


def chunked(model):
    """Return a batch of captured prompts whose towers use every kernel, whether or not it pays for layers of this size."""
    batch = in_chunks(model, (32,))
    batch.prompts.kernels()
    batch.prompts._tower_ops, _ = ops_of(model)
    return batch


@pytest.mark.parametrize("place", [{}, {"vision": "stream"}], ids=["resident", "streamed"])
@pytest.mark.parametrize("family", ["gemma4", "gemma3", "qwen3_vl"])
def test_a_prompt_s_image_is_the_same_as_it_is_captured_and_replayed(family, place, tmp_path):
    with loaded(family, tmp_path, rank=8, place=place) as model:
        batch, plain = chunked(model), chunked(model)
        plain.prompts.towers = Towers(model, "eager", plain.prompts.fall_back)

        def given(one, adapter):
            prompt = one.begin(picture(model, family, 9), GenerateRequest(max_new_tokens=4), adapter=adapter)
            media = one.prompts.tower_passes.media_of(prompt)
            return [media.embeddings, *media.deep]

        for adapter in ("a", None):
            first = given(batch, adapter)
            for _ in range(3):
                same(given(batch, adapter), first)
            # Gemma 4's audio is padded where towers are captured, and cuBLAS may sum products of more rows in another order.
            if family != "gemma4" or place:
                same(given(plain, adapter), first)
        assert not any(one.what == "captured towers" for one in batch.steps.fallbacks)
        assert bool(batch.prompts.towers.replayed) is not bool(place)


def test_a_pass_launches_fewer_kernels(tmp_path):
    """Counted in a pass that is not captured. An image's linears in layers are 14 here, each with an adapter: two launches for a
    weight where there were four, two for its adapter where there were five or six, one for a norm where there were eight."""
    with loaded("gemma4", tmp_path, rank=8) as model:
        batch, counts = chunked(model), []
        batch.prompts.towers = Towers(model, "eager", batch.prompts.fall_back)
        prompt = batch.begin(picture(model, "gemma4", 9), GenerateRequest(max_new_tokens=4), adapter="a")
        for _ in range(2):
            batch.prompts.tower_passes.media_of(prompt)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                batch.prompts.tower_passes.media_of(prompt)
                torch.cuda.synchronize()
            counts.append(sum(one.device_type == torch.autograd.DeviceType.CUDA for one in seen.events()))
            batch.prompts._tower_ops = None
        print("kernels of a pass with and without:", counts)
        assert counts[0] < 0.75 * counts[1]
