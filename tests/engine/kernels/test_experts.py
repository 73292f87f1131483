"""Are mixtures of experts those of transformers' module with each row's adapter merged, in torch and in the kernels?"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.machine_code import machine_code
from tests.long_runs import halved
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import CodeTables, Packed
from trimtab.engine.formats.weights import dequantize, exact_rows
from trimtab.engine.kernels import autotune
from trimtab.engine.kernels import experts as ours
from trimtab.engine.kernels.experts import Mixture
from trimtab.engine.kernels.selfcheck import relative_error
from trimtab.engine.lora import experts as host
from trimtab.engine.lora.layers import ExpertsAdapter, StackChange
from trimtab.engine.lora.store import AdapterStore, Holders

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
# Seven roundings of a value, each up to half a step of the type: 2^-9, 2^-12 and 2^-24; float32 sums add a few of its steps.
LARGEST = {BF16: 6e-3, HALF: 8e-4, FLOAT: 1e-6}


def packed_stack(stack, kind):
    """As `loader.pieces.pack` makes it: each expert by itself."""
    codes, made = CodeTables(), []
    for matrix in stack:
        made.append(codes.share(quantize(matrix, kind)))
    parts = {name: torch.stack([one.parts[name].reshape(-1) for one in made]) for name in made[0].parts}
    return Packed(made[0].kind, tuple(stack.shape), stack.dtype, parts, made[0].codes, made[0].blocks)


def mixture_of(count, width, inner, dtype, kind="none", activation="silu"):
    stacks = [torch.randn(count, *shape).to(dtype) / shape[1] ** 0.5 for shape in ((2 * inner, width), (width, inner))]
    return Mixture(*(one if kind == "none" else packed_stack(one, kind) for one in stacks), activation)


def changes_of(count, width, inner, dtype=FLOAT):
    """Three slots: of gate and up together on some experts and of down; of gate alone; of gate and of up apart, of other ranks."""

    def change(rank, width, high, first, pairs):
        A, B = torch.randn(len(pairs), rank, width) / width**0.5, torch.randn(len(pairs), high, rank) / rank**0.5
        places = {expert: place for place, expert in enumerate(pairs)}
        return StackChange("", A.to(dtype), B.to(dtype), 0.7, slice(first, first + high), places)

    whole, some = list(range(count)), list(range(count))[::-2]
    return [
        [change(4, width, 2 * inner, 0, some), change(8, width, inner, 0, whole), change(3, width, inner, 0, whole)],
        [None, None, change(5, width, inner, inner, some)],
        [change(6, inner, width, 0, whole), None, change(1, inner, width, 0, some)],
    ]


def case(mixture, n, chosen, dtype, *, slots=None, weights=FLOAT, adapters=FLOAT, rows=None):
    """Return (x, index, weights, tables of adapters). slots: of the rows in turn; rows: None for one a token."""
    count, _, width = mixture.gate_up.shape
    index = torch.stack([torch.randperm(count)[:chosen] for _ in range(n)])
    given = (torch.rand(n, chosen) + 0.1).to(weights)
    tables = None
    if slots is not None:
        of_rows = torch.tensor([slots[i % len(slots)] for i in range(rows or n)], dtype=torch.int32)
        tables = ours.lora_tables(changes_of(count, width, mixture.down.shape[2], adapters), of_rows, count)
    return torch.randn(n, width).to(dtype), index, given, tables


def unpacked(stack, *, is_rounded):
    if isinstance(stack, torch.Tensor):
        return stack.double()
    count, rows, _ = stack.shape
    matrices = [stack.expert(expert) for expert in range(count)]
    if is_rounded:
        return torch.stack([dequantize(one).double() for one in matrices])
    return torch.stack([exact_rows(one, range(rows), torch.float64) for one in matrices])


def exact(x, index, weights, mixture, tables, *, is_rounded=False):
    """Stock's module in float64, once for each slot with the slot's changes merged into its stacks. is_rounded: whether packed
    weights are rounded to the model's type, as their formats' libraries do it."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, both, width = mixture.gate_up.shape
    names = {"gelu_tanh": "gelu_pytorch_tanh"}
    config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=both // 2, num_experts=count,
        hidden_act=names.get(mixture.activation, mixture.activation),
    )  # fmt: skip
    out = torch.full(x.shape, math.nan, dtype=torch.float64)
    slots = torch.full((len(x),), -1) if tables is None else tables.row_slots.repeat_interleave(len(x) // len(tables.row_slots))
    for slot in slots.unique().tolist():
        module = Qwen3MoeExperts(config).requires_grad_(False).double()
        stacks = [unpacked(one, is_rounded=is_rounded) for one in (mixture.gate_up, mixture.down)]
        for member in range(3 if slot >= 0 else 0):
            change = tables.changes[member][slot]
            for expert, place in {} if change is None else change.pairs.items():
                stacks[member // 2][expert, change.outputs] += change.scale * change.B[place].double() @ change.A[place].double()
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
    mixture = mixture_of(6, 128, 64, dtype, kind, ours.attention_and_norms.ACTIVATIONS[n % 3])
    x, index, weights, tables = case(mixture, n, chosen, dtype, slots=slots)
    out = ours.experts(x, index, weights, mixture, torch.full_like(x, math.nan), lora=tables)
    assert relative_error(out, exact(x, index, weights, mixture, tables, is_rounded=True)) < LARGEST[dtype]


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
        replace(one, parameter="down_proj" if member == 2 else "gate_up_proj")
        for member, of_slots in enumerate(tables.changes) for one in of_slots[slot : slot + 1] if slot >= 0 and one is not None
    ]  # fmt: skip
    store = AdapterStore()
    store.attached("a", Holders(None, []))
    store.set("a")
    host.cover(module, store, "", "")
    module.adapters["a"] = ExpertsAdapter("", changes)
    wanted = module(x, index, given)
    asked = []
    recording = SimpleNamespace(
        table=None, apply=lambda product, x, y, groups: asked.append((product.expert, product.parameter)) or y
    )
    with store.applying(recording):  # as a linear layer, each product asks who adds adapters
        module(x, index, given)
    assert sorted(asked) == [(expert, name) for expert in sorted(index[0].tolist()) for name in ("down_proj", "gate_up_proj")]
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

    assert why(mixture) == "cpu is not a CUDA device" and "float32" in why(mixture_of(4, 64, 64, FLOAT), dtype=FLOAT)
    assert "torch.bfloat16, not torch.float16" in why(mixture, dtype=HALF)
    assert "65 rows" in why(mixture, n=65) and "33 experts" in why(mixture, chosen=33)
    assert "relu" in why(Mixture(mixture.gate_up, mixture.down, "relu"))
    assert "do not fit" in why(Mixture(mixture.gate_up, mixture.down[:, :, :32], "silu"))
    assert "multiples of 8" in why(mixture_of(4, 60, 64, BF16)) and "multiples of 64" in why(mixture_of(2, 64, 32, BF16, "nf4"))
    assert "not contiguous" in why(Mixture(mixture.gate_up.transpose(0, 1).contiguous().transpose(0, 1), mixture.down, "silu"))


# The kernels, on the CPU ------------------------------------------------------------------------------------------------


def kernels(source=None, order=7):
    module = run.CpuModule(source or ours.source(), ours.NAMES, order=order)
    module.variant_names = ours.NAMES
    return module


@pytest.fixture(scope="module")
def module():
    return kernels()


# Values that are one step of the type apart where float32 sums in another order round otherwise, and packed weights that torch
# rounds: then the seven roundings of both paths are others.
FROM_TORCH = {("none", BF16): 2e-3, ("none", HALF): 2.5e-4, ("nf4", BF16): 8e-3, ("nf4", HALF): 1e-3}


@pytest.mark.parametrize("kind, dtype, sizes, n, chosen, slots, weights", [
    ("none", BF16, (6, 264, 40), 2, 2, None, FLOAT), ("none", HALF, (5, 512, 256), 1, 4, (0, 1, 2, -1), HALF),
    ("nf4", BF16, (5, 320, 192), 1, 2, None, FLOAT), ("nf4", BF16, (9, 512, 320), 2, 8, (0, 2), BF16),
    ("nf4-dq", BF16, (4, 192, 64), 8, 1, (2, -1, 1, 0), FLOAT), ("nf4-dq", HALF, (4, 576, 704), 1, 2, (1,), FLOAT),
    ("fp4", BF16, (4, 64, 128), 2, 2, None, BF16), ("nf4", BF16, (8, 64, 64), 64, 8, (0, 1, -1, 2, -1), FLOAT),
    # More chunks than a block has warps, of the hidden and of the inner size.
    ("nf4", BF16, (2, 6464, 64), 1, 1, None, FLOAT), ("nf4-dq", BF16, (8, 64, 1024), 1, 8, (0,), FLOAT),
    ("none", BF16, (2, 6408, 8), 1, 1, None, FLOAT),
])  # fmt: skip
def test_kernels_agree_with_torch_and_with_float64(module, kind, dtype, sizes, n, chosen, slots, weights):
    torch.manual_seed(3)
    mixture = mixture_of(*sizes, dtype, kind, ours.attention_and_norms.ACTIVATIONS[n % 3])
    x, index, given, tables = case(mixture, n, chosen, dtype, slots=slots, weights=weights)
    before = len(module.launches)
    out = ours.experts(x, index, given, mixture, torch.full_like(x, math.nan), lora=tables, module=module)
    names = module.launches[before:]
    assert names == ["experts_gate_up", "experts_down"] if slots is None else names == [
        "experts_low", "experts_gate_up", "experts_low", "experts_down"
    ]  # fmt: skip
    own = ours.experts(x, index, given, mixture, torch.empty_like(x), lora=tables)
    assert relative_error(out, own) < FROM_TORCH["none" if kind == "none" else "nf4", dtype]
    assert relative_error(out, exact(x, index, given, mixture, tables)) < LARGEST[dtype]


def file_stack(form, count, rows, columns, device="cpu"):
    """A stack in a publisher's format: random experts, each by itself."""
    made = autotune.RandomWeights(torch.device(device), quant=form)
    experts = [made.make(rows, columns) for _ in range(count)]
    parts = {name: torch.stack([one.parts[name] for one in experts]) for name in experts[0].parts}
    return replace(experts[0], shape=(count, rows, columns), parts=parts)


@pytest.mark.parametrize(
    "form", ["int4-g32", "int4-g128-zp", "int4-row", "fp8-128x128", "fp8-row", "q4_0", "q8_0", "q4_k", "q6_k", "nvfp4-g16"]
)
def test_kernels_read_stacks_in_publishers_formats(module, form):
    """Gate and up in this format, down in 16 bits: two formats in a mixture."""
    torch.manual_seed(4)
    stack = file_stack(form, 3, 128, 512)
    mixture = Mixture(stack, torch.randn(3, 512, 64).bfloat16() / 8, "silu")
    assert ours.why_not(mixture, 2, 2, BF16, "cpu") == "cpu is not a CUDA device"
    x, index, given, tables = case(mixture, 2, 2, BF16, slots=(1, -1))
    out = ours.experts(x, index, given, mixture, torch.full_like(x, math.nan), lora=tables, module=module)
    own = ours.experts(x, index, given, mixture, torch.empty_like(x), lora=tables)
    assert relative_error(out, own) < FROM_TORCH["nf4", BF16]
    assert relative_error(out, exact(x, index, given, mixture, tables)) < LARGEST[BF16]


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_adapters_in_the_models_type_are_rounded_as_torch_rounds_them(module, dtype):
    torch.manual_seed(8)
    mixture = mixture_of(4, 128, 64, dtype)
    x, index, given, tables = case(mixture, 4, 2, dtype, slots=(0, 1, 2, -1), weights=dtype, adapters=dtype)
    out = ours.experts(x, index, given, mixture, torch.full_like(x, math.nan), lora=tables, module=module)
    own = ours.experts(x, index, given, mixture, torch.empty_like(x), lora=tables)
    assert tables.dtype == dtype and relative_error(out, own) < FROM_TORCH["none", dtype]


@pytest.mark.parametrize("kind, dtype, sizes, n, chosen, weights, slots, rows", [
    ("none", BF16, (5, 128, 64), 70, 2, BF16, None, None), ("none", HALF, (3, 64, 128), 65, 1, HALF, (1,), 1),
    ("nf4", BF16, (9, 128, 64), 132, 3, FLOAT, None, None), ("nf4-dq", BF16, (4, 64, 192), 66, 2, BF16, (0,), 1),
    # More columns than a warp has at once; rows of several adapters, in one expert's pairs.
    ("nf4", BF16, (9, 320, 64), 132, 3, FLOAT, (0, -1, 2, 1), 4), ("none", BF16, (5, 128, 64), 70, 2, BF16, (2, 0, 1, -1), 70),
    ("nf4-dq", HALF, (40, 64, 64), 80, 8, FLOAT, (1, 0), 2),
])  # fmt: skip
def test_many_tokens_agree_with_torch_and_with_float64(module, kind, dtype, sizes, n, chosen, weights, slots, rows):
    """More tokens than a step has: pairs sorted by experts, some with none, some with more than a tile holds."""
    torch.manual_seed(4)
    mixture = mixture_of(*sizes, dtype, kind, ours.attention_and_norms.ACTIVATIONS[n % 3])
    x, index, given, tables = case(mixture, n, chosen, dtype, weights=weights, slots=slots, rows=rows)
    index[: n // 2] = torch.arange(chosen) % sizes[0]
    before = len(module.launches)
    out = ours.experts(x, index, given, mixture, torch.full_like(x, math.nan), lora=tables, module=module)
    low = [] if tables is None else ["low"]
    names = ("gate_up", *low, "down", "sum")
    assert module.launches[before:] == ["experts_sort", *(f"experts_many_{name}" for name in (*low, *names))]
    own = ours.experts(x, index, given, mixture, torch.empty_like(x), lora=tables)
    assert relative_error(out, own) < FROM_TORCH["none", dtype]
    assert relative_error(out, exact(x, index, given, mixture, tables)) < LARGEST[dtype]
    index[3, 0], index[n - 1, chosen - 1] = sizes[0], -1
    again = ours.experts(x, index, given, mixture, torch.empty_like(x), lora=tables, module=module)
    lost = again.isnan().all(dim=1)
    assert lost.nonzero()[:, 0].tolist() == [3, n - 1] and torch.equal(again[~lost], out[~lost])


def test_a_prompts_token_keeps_its_bits_in_any_company(module):
    """Pairs of one expert and of several adapters stand in another order with every sort."""
    torch.manual_seed(9)
    mixture = mixture_of(3, 320, 64, BF16, "nf4")
    x, index, weights, tables = case(mixture, 72, 2, BF16, slots=(0, 1, 2, -1))
    whole = ours.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables, module=module).clone()
    turn = torch.randperm(72)
    other = [given[turn].contiguous() for given in (x, index, weights)]
    lora = replace(tables, row_slots=tables.row_slots[turn].contiguous())
    assert torch.equal(ours.experts(*other, mixture, torch.empty_like(x), lora=lora, module=module), whole[turn])


def test_many_tokens_need_whole_tiles():
    assert ours.why_not_many(((4, 128, 64), (4, 64, 64))) is None
    assert ours.why_not_many(((4, 128, 72), (4, 72, 64))) == "matrices of [128, 72] are not multiples of 64"


def test_the_check_at_load_passes_and_finds_faults(module):
    torch.manual_seed(5)
    for mixture in (mixture_of(4, 192, 64, BF16, "nf4-dq"), mixture_of(4, 72, 40, HALF)):
        assert ours.check(module, mixture, 2, mixture.gate_up.dtype) is None
    for right, wrong in (
        ("fmaf(a, even, b * odd)", "fmaf(a, even, b * even)"),
        ("changed[m * ROWS + half", "changed[half"),
        ("two[1], HALF)", "1.f, HALF)"),
        ("row_slots + token / tokens", "row_slots"),
        ("is_done || A[j] == A[i]", "true"),
        ("own[8 + 2 * j + i]", "own[2 * j + i]"),
    ):
        assert right in ours.source()
        assert "relative error" in str(
            ours.check(kernels(ours.source().replace(right, wrong)), mixture_of(4, 192, 64, BF16, "nf4"), 2, BF16)
        )


def test_a_row_keeps_its_bits_in_any_company_and_what_cannot_be_read_reaches_its_row_alone(module):
    torch.manual_seed(6)
    mixture = mixture_of(6, 320, 64, BF16, "nf4")
    x, index, weights, tables = case(mixture, 5, 2, BF16, slots=(0, 1, 2, -1, 0))
    whole = ours.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables, module=module).clone()
    for row in range(5):
        own = replace(tables, row_slots=tables.row_slots[row : row + 1].clone())
        one = [given[row : row + 1].clone() for given in (x, index, weights)]
        assert torch.equal(ours.experts(*one, mixture, torch.empty_like(one[0]), lora=own, module=module)[0], whole[row])
    index[0, 1], index[1, 0], weights[2, 1], x[3, 7] = 6, -(2**40), math.nan, math.inf
    out = ours.experts(x, index, weights, mixture, torch.full_like(x, math.nan), lora=tables, module=module)
    assert out[:3].isnan().all() and not out[3].isfinite().any() and torch.equal(out[4], whole[4])


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
def test_inputs_of_any_size_are_computed(module, scale):
    """In fp16, as the kernel multiplies them, they would be zero or infinite; one is far smaller than the others."""
    torch.manual_seed(7)
    stacks = [packed_stack(torch.randn(2, *shape).bfloat16() / 8, "nf4") for shape in ((128, 64), (64, 64))]
    mixture = Mixture(*stacks, "silu")
    x, index, weights, _ = case(mixture, 2, 1, BF16)
    x = x * scale
    x[:, 5] *= 1e-6
    out = ours.experts(x, index, weights, mixture, torch.full_like(x, math.nan), module=module)
    own = ours.experts(x, index, weights, mixture, torch.empty_like(x))
    assert (
        torch.equal(out.isinf(), own.isinf()) and relative_error(out.nan_to_num(), own.nan_to_num()) < 2 * FROM_TORCH["nf4", BF16]
    )


@pytest.mark.parametrize(("target", "form"), halved(["sm_75", "sm_86", "sm_90"], [("nf4", HALF), ("nf4-dq", BF16), ("none", BF16)]))
def test_the_kernels_compile(target, form):
    kind, dtype = form
    stack = mixture_of(1, 64, 64, dtype, kind).gate_up
    assert machine_code(ours.source(), target, ours.options(stack, dtype))
