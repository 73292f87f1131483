"""A prompt's kernels on the GPU, and prompts of a 4-bit model that are captured with them, its layers streamed or not."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.test_graphs import demo
from tests.test_prefill import answered, differ, eager, ids, in_chunks, named
from trimtab.runtime import prompt_kernels
from trimtab.runtime.quant import dequantize, quantize

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
