"""Products and adapters of 9 to 64 rows on the GPU, at the sizes of real layers."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.test_graphs import ASKED, answers, demo, joined
from trimtab.runtime import many_rows
from trimtab.runtime.tuning import RandomWeights


@pytest.fixture(scope="module")
def module():
    return many_rows.load("cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant", ["nf4-dq", "nf4"])
def test_products_of_many_rows_are_right_at_the_sizes_of_layers(module, quant, dtype):
    weights = RandomWeights(torch.device("cuda:0"), quant=quant)
    for shape, columns in (
        ((2048, 512, 512), 2560),
        ((10240, 10240), 2560),
        ((2560,), 10240),
        ((256,), 2560),
        ((2560,), 256),
    ):
        group = [weights.make(rows, columns, dtype) for rows in shape]
        assert many_rows.wrong(group, module, dtype) is None


@pytest.mark.parametrize("rows", [12, 32])
def test_captured_steps_of_many_rows_answer_as_the_modules_do(rows):
    asked = [ASKED[number % len(ASKED)] for number in range(rows)]
    with demo() as model:
        expected = answers(joined(model, "eager", asked, tokens=16))
        batch = joined(model, "auto", asked, tokens=16)
        found = answers(batch)
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        assert (
            same >= rows * 3 // 4 and batch.steps.captures
        )  # in bfloat16 answers may part where two tokens are nearly equal
