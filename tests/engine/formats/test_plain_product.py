"""A weight that is not quantized is multiplied as a stock model does it: one matrix by another, the same bits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.engine.formats.packed import PlainShell

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
