"""Are mixtures of experts those of transformers' module with each row's adapter merged, in torch and in the kernels?"""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import CodeTables, Packed
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import experts as ours
from trimtab.engine.kernels.experts import Change, Mixture
from trimtab.engine.kernels.selfcheck import relative_error
from trimtab.engine.lora import experts as host

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
# Seven roundings of a value, each up to half a step of the type: 2^-9, 2^-12 and 2^-24; float32 sums add a few of its steps.
LARGEST = {BF16: 6e-3, HALF: 8e-4, FLOAT: 1e-6}


def packed_stack(stack, kind):
    """As `loader.pieces.pack` makes it: each expert by itself."""
    codes, made = CodeTables(), []
    for matrix in stack:
        made.append(codes.share(quantize(matrix, kind)))
    parts = {name: torch.stack([one.parts[name].reshape(-1) for one in made]) for name in made[0].parts}
    return Packed(made[0].kind, tuple(stack.shape), stack.dtype, parts, made[0].codes, made[0].blocksize, made[0].nested_blocksize)


def mixture_of(count, width, inner, dtype, kind="none", activation="silu"):
    stacks = [torch.randn(count, *shape).to(dtype) / shape[1] ** 0.5 for shape in ((2 * inner, width), (width, inner))]
    return Mixture(*(one if kind == "none" else packed_stack(one, kind) for one in stacks), activation)


def changes_of(count, width, inner):
    """Three slots: of gate and up together on some experts and of down; of gate alone; of gate and of up apart, of other ranks."""

    def change(rank, width, high, first, pairs):
        A, B = torch.randn(len(pairs), rank, width) / width**0.5, torch.randn(len(pairs), high, rank) / rank**0.5
        return Change(A, B, 0.7, first, {expert: place for place, expert in enumerate(pairs)})

    whole, some = list(range(count)), list(range(count))[::-2]
    return [
        [change(4, width, 2 * inner, 0, some), change(8, width, inner, 0, whole), change(3, width, inner, 0, whole)],
        [None, None, change(5, width, inner, inner, some)],
        [change(6, inner, width, 0, whole), None, change(1, inner, width, 0, some)],
    ]


def case(mixture, n, chosen, dtype, *, slots=None, weights=FLOAT):
    """Return (x, index, weights, tables of adapters)."""
    count, _, width = mixture.gate_up.shape
    index = torch.stack([torch.randperm(count)[:chosen] for _ in range(n)])
    given = (torch.rand(n, chosen) + 0.1).to(weights)
    tables = None
    if slots is not None:
        rows = torch.tensor([slots[i % len(slots)] for i in range(n)], dtype=torch.int32)
        tables = ours.lora_tables(changes_of(count, width, mixture.down.shape[2]), rows, count)
    return torch.randn(n, width).to(dtype), index, given, tables


def unpacked(stack):
    if isinstance(stack, torch.Tensor):
        return stack
    return torch.stack([dequantize(stack.expert(expert)) for expert in range(stack.shape[0])])


def exact(x, index, weights, mixture, tables):
    """Stock's module in float64, once for each slot with the slot's changes merged into its stacks."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, both, width = mixture.gate_up.shape
    names = {"gelu_tanh": "gelu_pytorch_tanh"}
    config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=both // 2, num_experts=count,
        hidden_act=names.get(mixture.activation, mixture.activation),
    )  # fmt: skip
    out = torch.full(x.shape, math.nan, dtype=torch.float64)
    slots = torch.full((len(x),), -1) if tables is None else tables.row_slots
    for slot in slots.unique().tolist():
        module = Qwen3MoeExperts(config).requires_grad_(False).double()
        stacks = [unpacked(one).double() for one in (mixture.gate_up, mixture.down)]
        for member in range(3 if slot >= 0 else 0):
            change = tables.changes[member][slot]
            for expert, place in {} if change is None else change.pairs.items():
                outputs = slice(change.first, change.first + change.B.shape[1])
                stacks[member // 2][expert, outputs] += change.scale * change.B[place].double() @ change.A[place].double()
        module.gate_up_proj.copy_(stacks[0]), module.down_proj.copy_(stacks[1])
        own = slots == slot
        out[own] = module(x[own].double(), index[own], weights[own].double())
    return out


@pytest.mark.parametrize("kind, dtype, n, chosen", [
    ("none", FLOAT, 3, 4), ("none", BF16, 8, 2), ("none", HALF, 5, 1), ("nf4", BF16, 3, 2), ("nf4-dq", HALF, 2, 4),
    ("fp4", BF16, 2, 2),
])  # fmt: skip
@pytest.mark.parametrize("slots", [None, (0, -1, 2, 1)])
def test_torch_agrees_with_stocks_module_in_float64(kind, dtype, n, chosen, slots):
    torch.manual_seed(n)
    mixture = mixture_of(6, 128, 64, dtype, kind, ours.fused.ACTIVATIONS[n % 3])
    x, index, weights, tables = case(mixture, n, chosen, dtype, slots=slots)
    out = ours.experts(x, index, weights, mixture, torch.full_like(x, math.nan), lora=tables)
    assert relative_error(out, exact(x, index, weights, mixture, tables)) < LARGEST[dtype]


@pytest.mark.parametrize("dtype, weights", [(BF16, FLOAT), (BF16, BF16), (HALF, HALF), (FLOAT, FLOAT)])
@pytest.mark.parametrize("slot", [-1, 0, 1, 2])
def test_torch_has_the_bits_of_the_forward_that_the_host_drives(dtype, weights, slot):
    """One row: there the products have the same order of sums."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(2)
    mixture = mixture_of(8, 128, 64, dtype)
    config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=64, num_experts=8)
    module = Qwen3MoeExperts(config).requires_grad_(False).to(dtype)
    module.gate_up_proj.copy_(mixture.gate_up), module.down_proj.copy_(mixture.down)
    x, index, given, tables = case(mixture, 1, 5, dtype, slots=(slot,), weights=weights)
    changes = [
        host.StackChange(
            "down_proj" if member == 2 else "gate_up_proj", one.A, one.B, one.scale, slice(one.first, one.first + one.B.shape[1]),
            one.pairs,
        )
        for member, of_slots in enumerate(tables.changes) for one in of_slots[slot : slot + 1] if slot >= 0 and one is not None
    ]  # fmt: skip
    wanted = host._Forward(module, None, None)._run(x, index, given, [host.ExpertsAdapter("", changes)], None)
    assert torch.equal(ours.experts(x, index, given, mixture, torch.empty_like(x), lora=tables), wanted)


def test_an_index_without_an_expert_and_a_weight_that_is_no_number_reach_their_rows_alone():
    mixture = mixture_of(4, 64, 64, BF16)
    x, index, weights, _ = case(mixture, 4, 2, BF16)
    wanted = ours.experts(x, index, weights, mixture, torch.empty_like(x)).clone()
    index[0, 1], index[1, 0], weights[2, 1] = 4, -1, math.nan
    out = ours.experts(x, index, weights, mixture, torch.empty_like(x))
    assert out[:3].isnan().all() and torch.equal(out[3], wanted[3])


def test_mixtures_without_kernels_say_why():
    mixture = mixture_of(4, 64, 64, BF16)

    def why(mixture, n=1, chosen=2, dtype=BF16):
        return ours.why_not(mixture, n, chosen, dtype, "cpu")

    assert why(mixture) == "cpu is not a CUDA device"
    assert "float32" in why(mixture_of(4, 64, 64, FLOAT), dtype=FLOAT)
    assert "torch.bfloat16, not torch.float16" in why(mixture, dtype=HALF)
    assert "65 rows" in why(mixture, n=65) and "33 experts" in why(mixture, chosen=33)
    assert "relu" in why(Mixture(mixture.gate_up, mixture.down, "relu"))
    assert "do not fit" in why(Mixture(mixture.gate_up, mixture.down[:, :, :32], "silu"))
    assert "multiples of 8" in why(mixture_of(4, 60, 64, BF16)) and "multiples of 64" in why(mixture_of(2, 64, 32, BF16, "nf4"))
    assert "not contiguous" in why(Mixture(mixture.gate_up.transpose(0, 1).contiguous().transpose(0, 1), mixture.down, "silu"))
