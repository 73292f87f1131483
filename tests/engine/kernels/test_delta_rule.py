"""Is the gated delta rule that of transformers' modules, in steps, in chunks and in pieces, in torch and in the kernels?"""

import copy
import math

import pytest
import torch

from tests.cuda_on_cpu import run
from trimtab.engine.kernels import delta_rule
from trimtab.engine.kernels.delta_rule import DeltaShape, DeltaWeights

SHAPE = DeltaShape(2, 4, 32, 64, 4)


@pytest.fixture(scope="module")
def layer():
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        hidden_size=64, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=64,
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0).requires_grad_(False).eval()


def ours(layer, x, conv, state, *, tokens, count=None, live=None, module=None):
    """x [R T, D] through the layer's linears and the delta rule. module: the kernels, None for torch."""
    weights = DeltaWeights(layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias, layer.norm.weight, layer.norm.variance_epsilon)
    out = torch.full((len(x), 256), math.nan, dtype=x.dtype)
    numbers = [None if one is None else torch.tensor([one], dtype=torch.int32) for one in (count, live)]
    buffers = torch.empty(len(x), SHAPE.channels, dtype=x.dtype), torch.empty_like(out)
    linears = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
    delta_rule.delta_net(
        tuple(linear(x) for linear in linears), SHAPE, weights, conv, state, buffers, out, tokens=tokens, count=numbers[0],
        live=numbers[1], module=module,
    )  # fmt: skip
    return layer.out_proj(out)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_pieces_and_steps_of_a_prompt_are_the_modules_own_pass(layer, dtype, tolerance):
    module = layer.to(dtype)
    x = torch.randn(19, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = module(x[None])[0]
    conv, state = torch.zeros(2, SHAPE.channels, 4, dtype=dtype), torch.zeros(2, 4, 32, 64)
    found, at = [], 0
    for tokens, there in ((8, 8), (8, 5), (1, 1), (1, 1), (4, 4)):  # the second is padded
        piece = torch.cat((x[at : at + there], torch.full((tokens - there, 64), 3.0, dtype=dtype)))
        given = {"tokens": tokens, "count": there if there < tokens else None}
        found.append(ours(module, piece, conv[:1], state[:1], **given)[:there])
        at += there
    error = (torch.cat(found).float() - wanted.float()).norm() / wanted.float().norm()
    assert error < tolerance and not conv[1].any() and not state[1].any()


def test_a_row_without_a_state_keeps_what_is_there(layer):
    module = layer.to(torch.float32)
    conv, state = torch.randn(3, SHAPE.channels, 4), torch.randn(3, 4, 32, 64)
    before = conv.clone(), state.clone()
    x = torch.randn(3, 64)
    ours(module, x, conv, state, tokens=1, live=2)
    assert torch.equal(conv[2], before[0][2]) and torch.equal(state[2], before[1][2])
    alone = before[0][:1].clone(), before[1][:1].clone()
    ours(module, x[:1], *alone, tokens=1)
    for found, wanted in ((conv[:1], alone[0]), (state[:1], alone[1])):
        assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("rows", [9, 33, pytest.param(64, marks=pytest.mark.slow)])
def test_steps_of_many_rows_are_the_modules_own_pass(layer, rows):
    """Rows of unlike states, one of which leaves: the last row takes its place and goes on with its own state."""
    module, kernels = layer.to(torch.bfloat16), run.CpuModule(
        delta_rule.source(), delta_rule.NAMES, options=delta_rule.options(SHAPE, torch.bfloat16)
    )  # fmt: skip
    x = torch.randn(rows, 4, 64, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    conv, state = torch.zeros(rows, SHAPE.channels, 4, dtype=torch.bfloat16), torch.zeros(rows, 4, 32, 64)
    found = torch.stack([ours(module, x[:, at], conv, state, tokens=1, live=rows, module=kernels) for at in range(3)], dim=1)
    order = [rows - 1, *range(1, rows - 1)]  # row 0 leaves
    conv[0], state[0] = conv[-1], state[-1]
    last = ours(module, x[order, 3], conv[:-1], state[:-1], tokens=1, live=rows - 1, module=kernels)
    wanted = copy.deepcopy(module).double()(x.double())
    for made, exact in ((found, wanted[:, :3]), (last, wanted[order, 3])):
        assert (made.double() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("shape, dtype", [
    (SHAPE, torch.bfloat16), pytest.param(DeltaShape(1, 2, 128, 128, 4), torch.float16, marks=pytest.mark.slow),
    pytest.param(DeltaShape(2, 2, 64, 32, 2), torch.bfloat16, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_check_at_load_passes_on_the_cpu_and_finds_a_fault(shape, dtype):
    module = run.CpuModule(delta_rule.source(), delta_rule.NAMES, options=delta_rule.options(shape, dtype))
    assert delta_rule.check(module, shape, dtype) is None and set(module.launches) == set(delta_rule.NAMES)
    broken = delta_rule.source().replace("*= decay[i]", "*= 1.f")
    module = run.CpuModule(broken, delta_rule.NAMES, options=delta_rule.options(shape, dtype))
    assert "of the delta rule" in delta_rule.check(module, shape, dtype)


def test_shapes_without_kernels_say_why():
    assert delta_rule.why_not(SHAPE, torch.bfloat16) is None
    for keys, values in ((48, 64), (96, 64), (160, 64), (64, 48), (288, 64)):  # 3 or 5 values of a lane are no whole words
        assert f"heads of {keys} and {values} values" in delta_rule.why_not(DeltaShape(2, 4, keys, values, 4), torch.bfloat16)
    assert "float32" in delta_rule.why_not(SHAPE, torch.float32)
