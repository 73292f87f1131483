"""4-bit products and LoRA: the torch path against float64 and against bitsandbytes, and the CUDA source run on the CPU.

The kernels run as they are, compiled by g++ (tests/cuda_on_cpu): tiny shapes, three orders of threads and blocks,
poisoned outputs. tests/gpu/test_kernels.py runs them over the shapes of real models.
"""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch

from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import products
from tests.long_runs import slow_on_cpu
from trimtab.engine.cuda import launch_config
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.weights import dequantize, shell
from trimtab.engine.kernels import attention_and_norms, autotune, gemv4
from trimtab.engine.kernels.selfcheck import exact_changes
from trimtab.engine.lora.layers import LinearAdapter
from trimtab.errors import DeviceError

H200 = {"multiprocessors": 132, "shared_bytes": 232448}


@pytest.fixture(scope="module")
def modules():
    """The kernels on the CPU, threads and blocks forwards, backwards and shuffled."""
    return [products(order, multiprocessors=4) for order in (0, 1, 7)]


def multiplied(modules, x, group, *, width=None, lora=None, **options):
    """Return the product [n, width, or the outputs of all layers], to the bit the same of each of these modules."""
    outs = []
    for module in modules:
        outs.append(torch.full((len(x), width or sum(one.shape[0] for one in group)), math.nan, dtype=x.dtype))
        if lora is not None:
            lora.low.fill_(math.nan)
        gemv4.matvec4(x, group, outs[-1], lora=lora, module=module, **options)
        assert (module.scratch["parts"] == gemv4.EMPTY).all()
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    return outs[0]


def packed_of(rows, columns, quant="nf4-dq", dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return quantize((torch.randn(rows, columns, generator=generator) * 0.05).to(dtype), quant)


def group_of(rows, columns, quant="nf4-dq", dtype=torch.bfloat16):
    """Layers over one input, with one copy of the code tables, as a loaded model has them."""
    group = [packed_of(one, columns, quant, dtype, seed) for seed, one in enumerate(rows)]
    return [packed.with_parts(packed.parts, group[0].codes) for packed in group]


def adapters_of(rows, columns, ranks):
    """One list a layer: an adapter of each rank, None for rank 0."""
    return [
        [(torch.randn(r, columns) / columns**0.5, torch.randn(one, r), 0.3 + slot) if r else None for slot, r in enumerate(ranks)]
        for one in rows
    ]


def exact(x, group, bias=()):
    y = x.double() @ torch.cat([gemv4.decoded(packed, torch.float64) for packed in group]).T
    return y + torch.cat(bias).double() if bias else y


def changed(x, adapters, slots):
    """Return the changes of each row's adapter of layers over one input, in float64."""
    return torch.cat([exact_changes(x, one, slots) for one in adapters], dim=1)


# The torch path -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["nf4", "fp4", "nf4-dq"])
def test_decoded_weights_are_bitsandbytes_own_up_to_their_rounding(quant):
    packed = packed_of(48, 192, quant)
    stock, ours = dequantize(packed).double(), gemv4.decoded(packed).double()
    # bf16 has 8 bits: half a step is 2^-9 of the value.
    assert ((stock - ours).abs() <= ours.abs() * 2**-8 + 1e-9).all()
    assert torch.equal(ours.to(torch.bfloat16), dequantize(packed))


def test_the_torch_path_equals_a_quantized_layer_with_an_adapter():
    """The same roundings as the layer and LinearAdapter.apply: y, then the change, then their sum."""

    class Leaf:
        quant_kind, bias = "nf4", None

    torch.manual_seed(1)
    packed, x = packed_of(96, 256, dtype=torch.bfloat16), torch.randn(3, 256).bfloat16()
    ((adapter,),) = adapters_of([96], 256, [8])
    lora = gemv4.lora_args([[adapter]], torch.tensor([0, -1, 0], dtype=torch.int32), 8)
    out = torch.full((3, 96), math.nan, dtype=torch.bfloat16)
    gemv4.matvec4(x, [packed], out, lora=lora, module=None)
    base = torch.nn.functional.linear(x.float(), gemv4.decoded(packed)).bfloat16()
    A, B, scale = adapter
    wanted = LinearAdapter("text", scale, A, B).apply(Leaf(), x, base.clone())
    wanted[1] = base[1]
    assert torch.equal(out, wanted)
    # And bitsandbytes' own layer, which rounds each weight to bf16, is near: 2^-9 a weight, averaged over 256 of them.
    assert autotune.relative_error(base, shell(packed, None, torch.bfloat16)(x)) < 5e-3


@pytest.mark.parametrize("round_change", [False, True])
def test_the_change_of_other_layers_is_added_as_the_adapter_adds_it(round_change):
    class Leaf:
        quant_kind, bias = ("int8" if round_change else "none"), None

    torch.manual_seed(2)
    x, y = torch.randn(3, 100).bfloat16(), torch.randn(3, 50).bfloat16()
    adapters = adapters_of([50], 100, [0, 6])
    lora = gemv4.lora_args(adapters, torch.tensor([1, 0, -1], dtype=torch.int32), 6)
    A, B, scale = adapters[0][1]
    wanted = y.clone()
    wanted[0] = LinearAdapter("text", scale, A, B).apply(Leaf(), x[0], y[0])
    gemv4.lora_add(y, lora, None, x=x, round_change=round_change)
    assert torch.equal(y, wanted)


def test_adapter_tables_hold_addresses_ranks_and_scales():
    adapters = adapters_of([16, 32], 64, [4, 0])
    lora = gemv4.lora_args(adapters, torch.zeros(2, dtype=torch.int32), 4)
    assert lora.A_ptr.tolist() == [[adapters[0][0][0].data_ptr(), 0], [adapters[1][0][0].data_ptr(), 0]]
    assert lora.B_ptr[1, 0] == adapters[1][0][1].data_ptr()
    assert (lora.rank.tolist(), lora.low.shape) == ([[4, 0], [4, 0]], (2, 2, 4))
    one = lora.member(1)
    assert one.B_ptr.tolist() == lora.B_ptr[1:].tolist() and one.low.data_ptr() == lora.low[:, 1].data_ptr()


@pytest.mark.parametrize("quant", ["nf4-dq", "fp4"])
def test_random_weights_have_the_layout_of_quantized_ones(quant):
    real, made = packed_of(48, 192, quant), autotune.RandomWeights(torch.device("cpu"), quant=quant).make(48, 192)
    assert (made.kind, made.shape, made.dtype) == (real.kind, real.shape, real.dtype)
    for name, part in real.parts.items():
        assert (made.parts[name].dtype, made.parts[name].numel()) == (part.dtype, part.numel()), name
    assert {name: code.tolist() for name, code in made.codes.items()} == {n: c.tolist() for n, c in real.codes.items()}
    assert 0.01 < gemv4.decoded(made).std() < 0.1
    half = gemv4.decoded(made, torch.float64, rows=slice(20, 31))
    assert torch.equal(half.float(), gemv4.decoded(made)[20:31])


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, words", [
    ({"kind": "int8"}, "the weight is int8"), ({"shape": (128, 96)}, "not whole blocks of 64"),
    ({"blocks": (128, 256)}, "blocks of 128"), ({"blocks": (64, 128)}, "nested blocks of 128"),
])  # fmt: skip
def test_a_weight_that_the_kernel_cannot_take_is_refused_by_name(change, words):
    packed = dataclasses.replace(packed_of(64, 192), **change)
    assert words in gemv4.why_not(packed, torch.bfloat16, "cpu")


def test_types_rows_codes_and_alignment_are_refused_by_name():
    packed = packed_of(64, 192)
    assert "torch.float32" in gemv4.why_not(packed, torch.float32, "cpu")
    assert "9 rows" in gemv4.why_not(packed, torch.bfloat16, "cpu", n=9)
    assert gemv4.why_not(packed, torch.bfloat16, "cpu") == "cpu is not a CUDA device"
    large = packed.with_parts(packed.parts, packed.codes | {"code": packed.codes["code"] * 1e6})
    assert "codes" in gemv4.why_not(large, torch.bfloat16, "cpu")
    shifted = torch.empty(packed.parts["absmax"].numel() + 1, dtype=torch.uint8)[1:]
    assert "absmax is not" in gemv4.why_not(
        packed.with_parts(packed.parts | {"absmax": shifted}, packed.codes), torch.bfloat16, "cpu"
    )


# Cuts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("rows, columns", [
    ((10240, 10240), 2560), ((2560,), 10240), ((2048, 512, 512), 2560), ((1536,), 12288), ((15360, 15360), 3840),
    ((3840,), 15360), ((2112, 2112), 2816), ((2816,), 2112), ((256,), 2560), ((2560,), 256), ((17,), 64),
])  # fmt: skip
def test_cuts_cover_every_row_and_column_once_and_fit_the_card(rows, columns, n):
    pair = len(rows) == 2 and rows[0] == rows[1]
    found = launch_config.cuts(rows, columns, n, pair=pair, **H200)
    assert found == sorted(found, key=lambda cut: cut.estimated_us)
    for cut in found:
        units = launch_config.units_of(rows, pair=pair)
        assert (cut.grid - 1) * cut.units < units <= cut.grid * cut.units and (cut.units % 2 == 0 or not pair)
        blocks = columns // 64
        assert (cut.splits - 1) * cut.chunk < blocks <= cut.splits * cut.chunk
        assert cut.chunk % 4 == 0  # blocks are read four at a time
        assert cut.k_warps * cut.groups <= (22 if cut.held else launch_config.MAX_WARPS) and cut.chunk % cut.piece == 0
        if cut.held:  # every warp has the same number of pairs of blocks, in whole batches
            assert cut.groups == cut.units and cut.splits * cut.chunk == blocks and cut.stages == 0
            assert cut.chunk % (2 * cut.k_warps * cut.held) == 0
        else:
            assert cut.k_warps <= cut.piece // 4 and cut.groups <= cut.units and 1 <= cut.stages <= launch_config.MOST_STAGES
        assert cut.needed_bytes(n) == cut.shared_bytes <= H200["shared_bytes"]
        assert cut.splits * cut.grid * cut.units * 16 * n <= launch_config.MOST_PARTS or cut.splits == 1
    assert len({str(cut) for cut in found}) == len(found) > 0


def test_a_card_with_little_shared_memory_gets_more_cuts_along_k():
    small = {"multiprocessors": 46, "shared_bytes": 101376}  # compute capability 8.6 and 8.9
    found = launch_config.cuts((2560,), 10240, 8, **small)
    assert {cut.splits for cut in found if not cut.held} == {14} and {cut.splits for cut in found if cut.held} == {8}
    assert launch_config.cuts((2560,), 10240, 1, **small) and not launch_config.cuts((2560,), 65536, 8, **small)


def test_a_product_that_fits_no_cut_is_a_named_error():
    module = products()
    module.shared_bytes = 65536
    x, out = torch.zeros(1, 64).bfloat16(), torch.zeros(1, 16).bfloat16()
    with pytest.raises(DeviceError, match=r"no launch configuration of \[16\] x 64 for 1 rows"):
        gemv4.matvec4(x, [packed_of(16, 64)], out, module=module)


# The kernels ----------------------------------------------------------------------------------------------------------

SHAPES = [
    ((16,), 64, 1, "nf4-dq", torch.bfloat16),
    ((33,), 256, 1, "nf4", torch.bfloat16),
    ((48, 16, 17), 512, 3, "nf4-dq", torch.bfloat16),
    ((40, 24), 704, 8, "nf4-dq", torch.bfloat16),  # 11 blocks of 64: scales one at a time
    ((40,), 192, 5, "fp4", torch.float16),
    ((80,), 1280, 2, "nf4-dq", torch.float16),
    ((32, 32), 4096, 8, "nf4-dq", torch.bfloat16),  # x beyond what the threads hold in registers
]


@pytest.mark.parametrize("rows, columns, n, quant, dtype", SHAPES)
def test_products_agree_with_float64_and_with_torch(modules, rows, columns, n, quant, dtype):
    torch.manual_seed(3)
    group = group_of(rows, columns, quant, dtype)
    # Rows of very different size: one scale for all of them would lose the small ones.
    x = (torch.randn(n, columns) * torch.logspace(-3, 3, n)[:, None]).to(dtype)
    bias = [torch.randn(one).to(dtype) for one in rows]
    out = multiplied(modules, x, group, bias=bias)
    reference = torch.empty_like(out)
    gemv4.matvec4_torch(x, group, reference, bias=bias)
    wanted = exact(x, group, bias)
    for i in range(n):
        error, rounding = autotune.relative_error(out[i], wanted[i]), autotune.relative_error(reference[i], wanted[i])
        # Codes as float16 add up to 2^-12 of each weight.
        assert error < min(autotune.LARGEST_ERROR, rounding + 2.5e-4)


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_every_cut_gives_the_same_product(modules, n, splits):
    torch.manual_seed(4)
    rows, columns = (80, 33), 1024
    group = group_of(rows, columns)
    x = torch.randn(n, columns).bfloat16()
    wanted = exact(x, group)
    found = [cut for cut in launch_config.cuts(rows, columns, n, **H200) if cut.splits == splits and not cut.held]
    tried = {(cut.units, cut.k_warps, cut.groups, cut.piece): cut for cut in found if cut.units in (1, 2, 4, 8)}
    assert len(tried) >= 3
    for number, cut in enumerate(tried.values()):
        out = multiplied([modules[number % 3]], x, group, cut=cut)
        assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR, cut


def held(n, units, k_warps, pairs, chunk, splits, total):
    cut = launch_config.LaunchConfig(n, units, k_warps, units, chunk, 0, splits, chunk, -(-total // units), 0, 0.0, pairs)
    return dataclasses.replace(cut, shared_bytes=cut.needed_bytes(n))


@pytest.mark.parametrize(
    "rows, columns, quant, dtype, cut",
    [
        ((80, 33), 1024, "nf4-dq", torch.bfloat16, held(1, 3, 4, 1, 16, 1, 8)),  # two batches; a block with no unit left
        ((80, 33), 1024, "nf4", torch.float16, held(3, 1, 2, 2, 16, 1, 8)),  # two batches of two
        ((48, 16, 17), 1024, "fp4", torch.bfloat16, held(4, 5, 1, 1, 8, 2, 6)),  # four batches, two blocks along K
        ((48, 16, 17), 1024, "nf4-dq", torch.bfloat16, held(8, 2, 2, 2, 8, 2, 6)),  # all at once
        ((40,), 512, "nf4-dq", torch.bfloat16, held(5, 1, 1, 1, 8, 1, 3)),
    ],
)
def test_weights_held_in_registers_give_the_same_product(modules, rows, columns, quant, dtype, cut):
    torch.manual_seed(13)
    group, n = group_of(rows, columns, quant, dtype), cut.n
    x = (torch.randn(n, columns) * torch.logspace(-3, 3, n)[:, None]).to(dtype)
    bias = [torch.randn(one).to(dtype) for one in rows]
    adapters = adapters_of(rows, columns, [6, 0])
    lora = gemv4.lora_args(adapters, torch.tensor([i % 3 - 1 for i in range(n)], dtype=torch.int32), 8)
    for given in (None, lora):
        out = multiplied(modules, x, group, bias=bias, lora=given, cut=cut)
        assert all(module.launches[-1] == "matvec_held" for module in modules)
        wanted = exact(x, group, bias) + (0 if given is None else changed(x, adapters, lora.row_slots.tolist()))
        assert all(autotune.relative_error(*pair) < 1.5 * autotune.LARGEST_ERROR for pair in zip(out, wanted, strict=True))
        assert lora.low.isnan().any() or given is None


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_a_gate_ends_a_product_whose_weights_are_held(modules, n):
    torch.manual_seed(14)
    rows, columns = (48, 48), 512
    group, x = group_of(rows, columns), torch.randn(n, columns).bfloat16()
    y = exact(x, group)
    act = torch.nn.functional.gelu(y[:, :48].float().bfloat16().float(), approximate="tanh").bfloat16()
    wanted = act.double() * y[:, 48:].bfloat16().double()
    out = multiplied(modules[2:], x, group, width=48, gate=gemv4.Gate("gelu_tanh"), cut=held(n, 4, 2, 2, 8, 1, 6))
    assert autotune.relative_error(out, wanted) < 2 * autotune.LARGEST_ERROR  # two products are rounded, act, and the end
    other = torch.randn(n, 48).bfloat16()
    out = multiplied(modules[1:2], x, group[:1], gate=gemv4.Gate("gelu_tanh", other), cut=held(n, 3, 1, 1, 8, 1, 3))
    assert autotune.relative_error(out, act.double() * other.double()) < 2 * autotune.LARGEST_ERROR


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("groups, k_warps", [(1, 5), (2, 2), (5, 1)])
def test_a_ring_that_goes_round_many_times_gives_the_same_product(modules, n, groups, k_warps):
    torch.manual_seed(12)
    rows, columns = (200,), 1024
    group, x = group_of(rows, columns), torch.randn(n, columns).bfloat16()
    outs = []
    for stages in (1, 2, 3, 13):
        cut = launch_config.LaunchConfig(n, 13, k_warps, groups, 8, stages * groups, 1, 16, 1, 0, 0.0)
        cut = dataclasses.replace(cut, shared_bytes=cut.needed_bytes(n))
        if cut.shared_bytes > H200["shared_bytes"] or cut.stages > launch_config.MOST_STAGES:
            continue
        outs.append(multiplied([modules[stages % 3]], x, group, cut=cut))
    assert autotune.relative_error(outs[0], exact(x, group)) < autotune.LARGEST_ERROR
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_splits_add_their_parts_in_the_same_order_whoever_runs_first(modules):
    """Blocks run forwards, backwards and shuffled; the sum of six parts must not depend on it."""
    torch.manual_seed(5)
    group, x = group_of((48,), 1536), torch.randn(2, 1536).bfloat16()
    cut = next(cut for cut in launch_config.cuts((48,), 1536, 2, **H200) if cut.splits == 6 and not cut.held)
    multiplied(modules, x, group, cut=cut)


def test_zero_tiny_huge_and_broken_rows_do_not_touch_each_other(modules):
    torch.manual_seed(6)
    group = group_of((32,), 256)
    x = torch.randn(7, 256).bfloat16()
    x[1] = 0
    x[2] *= 1e-37
    x[3] *= 1e36
    x[4, 5] = math.inf
    x[5, 9] = math.nan
    x[6, 1:] *= 2**-20  # one value far above all others
    out, wanted = multiplied(modules[2:], x, group), exact(x, group)
    for i in (0, 2, 3, 6):
        assert autotune.relative_error(out[i], wanted[i]) < autotune.LARGEST_ERROR, i
    assert torch.equal(out[1], torch.zeros(32).bfloat16()) and not out[4].isfinite().any() and not out[5].isfinite().any()


def test_rows_and_outputs_may_be_parts_of_larger_tensors(modules):
    torch.manual_seed(7)
    group, module = group_of((24, 40), 128), modules[1]
    wide, into = torch.randn(3, 256).bfloat16(), torch.full((3, 100), 7.0).bfloat16()
    gemv4.matvec4(wide[:, 128:], group, into[:, 20:84], module=module)
    assert autotune.relative_error(into[:, 20:84], exact(wide[:, 128:], group)) < autotune.LARGEST_ERROR
    assert (into[:, :20] == 7).all() and (into[:, 84:] == 7).all()


def test_layers_with_other_code_tables_are_launched_alone(modules):
    group = [packed_of(32, 128, seed=1), packed_of(16, 128, seed=2)]  # each with its own copy
    module, x = modules[0], torch.randn(2, 128).bfloat16()
    adapters = adapters_of([32, 16], 128, [4])
    lora = gemv4.lora_args(adapters, torch.tensor([0, -1], dtype=torch.int32), 4)
    before, wanted = len(module.launches), torch.full((2, 48), math.nan, dtype=torch.bfloat16)
    out = multiplied([module], x, group, lora=lora)
    assert module.launches[before:] == ["matvec_4", "matvec_4"]
    gemv4.matvec4_torch(x, group, wanted, lora=lora)
    assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR


def test_layers_with_and_without_scales_of_scales_are_launched_alone(modules):
    group = [packed_of(32, 256, "nf4-dq"), packed_of(16, 256, "nf4")]
    group[1] = group[1].with_parts(group[1].parts, {"code": group[0].codes["code"]})
    module, x = modules[0], torch.randn(2, 256).bfloat16()
    before, out = len(module.launches), multiplied([module], x, group)
    assert module.launches[before:] == ["matvec_4", "matvec_4"]
    assert autotune.relative_error(out, exact(x, group)) < autotune.LARGEST_ERROR


@pytest.mark.slow  # half a minute on two busy cores: compiles the source again and runs every kind of cut
@pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))
def test_nothing_is_read_or_written_beyond_its_end():
    """Every tensor at the edge of a closed page, in a process of its own, which a wrong access ends."""
    done = subprocess.run([sys.executable, "-m", "tests.engine.kernels.fenced_matvec"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "nothing was touched beyond its end" in done.stdout


# LoRA in the kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "splits"), [
    (torch.bfloat16, 2), (torch.float16, 1), slow_on_cpu(torch.bfloat16, 1), slow_on_cpu(torch.float16, 2),
])  # fmt: skip
def test_each_row_uses_its_own_adapter(modules, dtype, splits):
    torch.manual_seed(8)
    rows, columns, n, width = (48, 16, 17), 512, 8, 20
    group = group_of(rows, columns, dtype=dtype)
    adapters = adapters_of(rows, columns, [8, 5, 0, 16])  # 5: rows of B are not whole groups of four
    adapters[1][1] = None  # this layer is not adapted by slot 1
    slots = torch.tensor([0, 1, -1, 3, 3, 2, 0, 1], dtype=torch.int32)
    x = torch.randn(n, columns).to(dtype)
    cut = next(cut for cut in launch_config.cuts(rows, columns, n, **H200) if cut.splits == splits)
    for module in modules:
        lora = gemv4.lora_args(adapters, slots, width)
        reference = dataclasses.replace(lora, low=torch.full_like(lora.low, math.nan))
        for apart in (True, False):  # by the kernel for other layers, and by the product itself
            lora.low.fill_(math.nan)
            out, wanted, plain = (torch.full((n, sum(rows)), math.nan, dtype=dtype) for _ in range(3))
            if apart:
                y = torch.zeros(n, rows[0], dtype=dtype)
                gemv4.lora_add(y, lora, module, x=x)
            else:
                gemv4.matvec4(x, group, out, lora=lora, module=module, cut=cut)
            gemv4.lora_shrink_torch(x, reference)
            assert torch.equal(lora.low.isnan(), reference.low.isnan())
        # Rows and ranks without an adapter are not written.
        assert torch.equal(lora.low.isnan(), reference.low.isnan())
        torch.testing.assert_close(lora.low, reference.low, rtol=1e-4, atol=1e-5, equal_nan=True)
        gemv4.matvec4_torch(x, group, wanted, lora=reference)
        gemv4.matvec4(x, group, plain, module=module, cut=cut)
        assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR
        for i, start, end in ((2, 0, 81), (5, 0, 81), (1, 48, 64), (7, 48, 64)):
            assert torch.equal(out[i, start:end], plain[i, start:end])  # no adapter: bit for bit the base's
        assert not torch.equal(out[0], plain[0])


@pytest.mark.parametrize("rows, cut", [
    pytest.param((48, 16, 17), None, marks=pytest.mark.slow), ((48, 48), held(8, 6, 1, 2, 8, 2, 6)), slow_on_cpu((48, 48), None),
])  # fmt: skip
def test_fixed_ranks_give_a_row_the_same_bits_beside_larger_adapters(modules, rows, cut):
    """Ranks on both sides of what one thread has of B. Sums in which large values cancel show in which order they are added."""
    torch.manual_seed(21)
    columns, n = 1024, 8
    group, x = group_of(rows, columns), torch.randn(n, columns).bfloat16()
    x[:, 1] = -x[:, 0]
    adapters = adapters_of(rows, columns, [8, 5, 64, 16])
    for A, B, _ in (one for layer in adapters for one in layer):
        A[:, :2], B[:, 0], B[:, 4] = 2**20, 2**26, -(2**26)
        A[4] = A[0]  # so that what cancels is the same
    gate = gemv4.Gate("gelu_tanh") if rows == (48, 48) else None

    def row_0(own, other, *, is_fixed, module):
        slots = torch.tensor([own] + [other] * (n - 1), dtype=torch.int32)
        lora = dataclasses.replace(gemv4.lora_args(adapters, slots, 64), is_fixed=is_fixed)
        return multiplied([module], x, group, width=48 if gate else None, lora=lora, gate=gate, cut=cut)[0]

    for own in (0, 1, 3):
        found = [row_0(own, other, is_fixed=True, module=module) for other, module in zip((-1, 0, 2), modules, strict=True)]
        assert all(torch.equal(one, found[0]) for one in found) and found[0].isfinite().all()
    differ = [not torch.equal(*(row_0(own, other, is_fixed=False, module=modules[0]) for other in (own, 2))) for own in (0, 1)]
    assert all(differ)  # else this test could not fail


def test_fixed_ranks_make_a_x_in_the_same_order_beside_larger_adapters():
    """Beside rank 64 a block makes several values of A x at once, each of fewer threads."""
    module = products(multiprocessors=64)
    torch.manual_seed(3)
    rows, columns, n = (64 * 16,), 512, 4
    group, x = group_of(rows, columns), torch.randn(n, columns).bfloat16()
    x[:, 200] = -x[:, 0]
    adapters = adapters_of(rows, columns, [8, 64])
    for A, _, _ in adapters[0]:
        A[:, 0] = A[:, 200] = 2**24
    cut = launch_config.cuts(rows, columns, n, multiprocessors=64, shared_bytes=H200["shared_bytes"])[0]

    def a_x(other, *, is_fixed):
        slots = torch.tensor([0] + [other] * (n - 1), dtype=torch.int32)
        lora = dataclasses.replace(gemv4.lora_args(adapters, slots, 64), is_fixed=is_fixed)
        gemv4.matvec4(x, group, torch.empty(n, sum(rows)).bfloat16(), lora=lora, module=module, cut=cut)
        return lora.low[0, 0, :8].clone()

    assert torch.equal(a_x(0, is_fixed=True), a_x(1, is_fixed=True))
    assert not torch.equal(a_x(0, is_fixed=False), a_x(1, is_fixed=False))  # else this test could not fail


@pytest.mark.parametrize(
    "ranks", [[64, 24, 0], *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ([8, 4, 72], [33, 6, 64]))]
)
@pytest.mark.parametrize(
    "rows, cut",
    [
        ((80, 33), held(1, 3, 4, 1, 16, 1, 8)),
        ((80,), held(1, 1, 5, 1, 20, 1, 5)),  # warps that no value is left for
        slow_on_cpu((48, 16, 17), held(4, 5, 1, 1, 8, 2, 6)),  # two blocks along K
        slow_on_cpu((48, 48), held(2, 4, 2, 2, 16, 1, 6)),  # with a gate
        ((48, 48), held(8, 6, 1, 2, 8, 2, 6)),  # with a gate; outputs in several rounds
        ((48, 48), None),  # through the ring, with a gate
    ],
)
def test_high_ranks_take_several_values_a_block_and_several_threads_an_output(modules, rows, cut, ranks):
    """Against float64, for ranks on both sides of what one thread has of B, and of what a block makes at once."""
    torch.manual_seed(16)
    columns = 1280 if rows == (80,) else 1024
    n = 5 if cut is None else cut.n
    paired = rows == (48, 48)
    group, x = group_of(rows, columns), torch.randn(n, columns).bfloat16()
    adapters, slots = adapters_of(rows, columns, ranks), [(i + n) % 4 - 1 for i in range(n)]
    if len(rows) > 1:
        adapters[1][1] = None
    for width in (72, 75):  # rows of `low` that are not aligned
        lora = gemv4.lora_args(adapters, torch.tensor(slots, dtype=torch.int32), width)
        gate = gemv4.Gate("gelu_tanh") if paired else None
        out = multiplied(modules, x, group, width=48 if paired else None, lora=lora, gate=gate, cut=cut)
        wanted = exact(x, group).bfloat16().double() + changed(x, adapters, slots).bfloat16().double()
        for i, slot in enumerate(slots):
            for m, own in enumerate(adapters):
                if slot >= 0 and own[slot] is not None:
                    low = own[slot][0].double() @ x[i].double()
                    torch.testing.assert_close(lora.low[i, m, : len(low)].double(), low, rtol=1e-4, atol=1e-4)
        if paired:
            act = torch.nn.functional.gelu(wanted[:, :48].float().bfloat16().float(), approximate="tanh").bfloat16()
            wanted = act.double() * wanted[:, 48:].bfloat16().double()
        for i in range(n):
            assert autotune.relative_error(out[i], wanted[i]) < (3 if paired else 1.5) * autotune.LARGEST_ERROR


@pytest.mark.parametrize(("kind", "splits", "n"), [
    *((kind, 1, 5) for kind in attention_and_norms.ACTIVATIONS), (attention_and_norms.ACTIVATIONS[0], 2, 1),
    *(slow_on_cpu(kind, *case) for kind in attention_and_norms.ACTIVATIONS for case in ((1, 1), (2, 5))),
    *(slow_on_cpu(kind, 2, 1) for kind in attention_and_norms.ACTIVATIONS[1:]),
])  # fmt: skip
def test_gate_and_product_are_one_launch(modules, n, kind, splits):
    """act(gate) up of two layers, and act(product) other: the same bits as the product and the gate one after the other."""
    torch.manual_seed(11)
    rows, columns = (40, 40), 1024
    group, adapters = group_of(rows, columns), adapters_of(rows, columns, [4, 6])
    x, other = torch.randn(n, columns).bfloat16(), torch.randn(n, 3, 40).bfloat16()[:, 1]
    for module in modules:
        slots = torch.tensor([0, -1, 1, 1, 0][:n], dtype=torch.int32)
        for members, gate in ((group, gemv4.Gate(kind)), (group[:1], gemv4.Gate(kind, other))):
            pair = len(members) == 2
            lora = gemv4.lora_args(adapters[: len(members)], slots, 8)
            found = launch_config.cuts(rows[: len(members)], columns, n, pair=pair, **H200)
            cut = next(cut for cut in found if cut.splits == splits and cut.k_warps == 2)
            out, wanted = (torch.full((n, 40), math.nan, dtype=torch.bfloat16) for _ in range(2))
            wide = torch.full((n, 40 * len(members)), math.nan, dtype=torch.bfloat16)
            gemv4.matvec4(x, members, out, lora=lora, gate=gate, module=module, cut=cut)
            plain = next(
                one for one in launch_config.cuts(rows[: len(members)], columns, n, **H200)
                if (one.splits, one.k_warps) == (splits, 2)
            )  # fmt: skip
            gemv4.matvec4(x, members, wide, lora=lora, module=module, cut=plain)
            attention_and_norms.gated(wide[:, :40], wide[:, 40:] if pair else other, wanted, kind)
            # The activation is the C library's here and torch's there: a step of bf16 at most.
            torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)
            assert (out == wanted).float().mean() > 0.98
            gemv4.matvec4_torch(x, members, wanted, lora=lora, gate=gate)
            assert autotune.relative_error(out, wanted) < 3 * autotune.LARGEST_ERROR
        assert (module.scratch["parts"] == gemv4.EMPTY).all()


def test_the_change_is_rounded_before_it_is_added(modules):
    """256 and a change of 1.0039: rounded first it is 1, and 257 rounds to 256; not rounded first, 257.0039 gives 258."""
    x = torch.zeros(1, 64).bfloat16()
    x[0, 0] = 1
    A, B = torch.zeros(1, 64), torch.full((16, 1), 1.00390625)  # halfway between two bf16 numbers: rounds to 1
    A[0, 0] = 1
    lora = gemv4.lora_args([[(A, B, 1.0)]], torch.zeros(1, dtype=torch.int32), 1)
    bias, out = torch.full((16,), 256.0).bfloat16(), torch.zeros(1, 16).bfloat16()
    packed = packed_of(16, 64)
    zero = packed.with_parts(packed.parts | {"nested_absmax": torch.zeros(1), "offset": torch.zeros(1)}, packed.codes)
    gemv4.matvec4(x, [zero], out, bias=[bias], lora=lora, module=modules[0])
    assert (out == 256).all()


OUTPUTS = (200, 64, 17)


@pytest.mark.parametrize("round_change", [False, True])
@pytest.mark.parametrize(
    "columns, ranks, slots, shifted",
    [
        (64, [8], [0], 0),  # one row, one rank
        (100, [7, 0, 16], [0, 1, -1], 0),
        (130, [7, 4], [0, 1, -1], 0),  # rows of A that are not whole groups of four
        (64, [72, 8], [1, 0, -1, 1, 0], 0),  # more of B than a thread has ready; several rounds of values
        (192, [8, 12], [0, 1, 1], 2),  # rows of x that are not aligned
        (5460, [3, 64], [1, 0], 0),  # more of A than a thread has ready
        (64, [1, 2, 3, 0, 5, 6, 7, 33], [0, 1, 2, 3, 4, 5, 6, 7], 0),
        (64, [4], [-1, -1], 0),
        (64, [4, 9], [i % 3 - 1 for i in range(11)], 0),  # more rows than a launch takes
    ],
)
def test_the_change_of_layers_of_another_kind(modules, columns, ranks, slots, shifted, round_change):
    """Three layers over one input: the first one's launch makes A x of all, the others only add; against float64."""
    torch.manual_seed(9)
    n, dtype = len(slots), torch.float16 if columns == 192 else torch.bfloat16
    adapters = adapters_of(OUTPUTS, columns, ranks)
    if len(ranks) > 1:
        adapters[0][1] = None  # the layer that makes it for the others has none itself
    x = torch.randn(n, columns + shifted).to(dtype)[:, shifted:]
    wide = torch.randn(n, sum(OUTPUTS)).to(dtype)
    outs = []
    for number, module in enumerate(modules):
        lora = gemv4.lora_args(adapters, torch.tensor(slots, dtype=torch.int32), max(ranks) + number)
        lora.low.fill_(math.nan)
        if number == 1:  # as a step has it that emptied its scratch at once
            lora.low.view(torch.int32).fill_(gemv4.EMPTY)
            lora = dataclasses.replace(lora, is_empty=True)
        y, before = wide.clone(), len(module.launches)
        parts = y.split(OUTPUTS, dim=1)
        gemv4.lora_add(parts[0], lora, module, x=x, round_change=round_change)
        for m in (1, 2):
            gemv4.lora_add(parts[m], lora.member(m), module, round_change=round_change)
        assert module.launches[before:] == ["lora_add"] * (3 if n <= 8 else 6)
        outs.append(y)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    change = changed(x, adapters, slots)
    wanted = wide.double() + (change.to(dtype).double() if round_change else change)
    assert torch.equal(outs[0][change == 0], wide[change == 0])
    # One rounding of the sum, and where two float32 sums lie on both sides of one, a step of the change's rounding.
    assert (outs[0] == wanted.to(dtype)).float().mean() > 0.99
    torch.testing.assert_close(outs[0].double(), wanted, rtol=2**-7, atol=2e-2)


def test_values_of_a_x_that_are_no_numbers_reach_every_output(modules):
    """NaN with all bits set means that a value is not there yet: a value that is such a NaN must not be waited for."""
    x = torch.zeros(1, 64).bfloat16()
    adapters = [[(torch.full((2, 64), -1, dtype=torch.int32).view(torch.float32), torch.ones(80, 2), 1.0)]]
    for module in modules:
        lora, y = gemv4.lora_args(adapters, torch.zeros(1, dtype=torch.int32), 2), torch.ones(1, 80).bfloat16()
        gemv4.lora_add(y, lora, module, x=x)
        assert y.isnan().all()


def test_tables_may_be_parts_of_the_models_table(modules):
    """The slots of a model are one table [layers, slots]; a group's is a slice of it, not at its beginning."""
    torch.manual_seed(10)
    rows, columns = (16, 32), 128
    group, adapters = group_of(rows, columns), adapters_of(rows, columns, [0, 6, 3])
    whole = gemv4.lora_args([[None] * 3, *adapters, [None] * 3], torch.tensor([1, 2], dtype=torch.int32), 6)
    lora = gemv4.LoraArgs(
        whole.A_ptr[1:3], whole.B_ptr[1:3], whole.rank[1:3], whole.scale[1:3], whole.row_slots, torch.zeros(2, 2, 6), adapters
    )
    x = torch.randn(2, columns).bfloat16()
    out, wanted = multiplied(modules[:1], x, group, lora=lora), torch.full((2, 48), math.nan, dtype=torch.bfloat16)
    gemv4.matvec4_torch(x, group, wanted, lora=lora)
    assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR


def test_the_check_at_load_finds_a_kernel_that_is_wrong(modules, monkeypatch):
    group = group_of((32, 16), 128)
    assert autotune.check(group, modules[0], rows=(1, 3)) is None
    own = modules[0].variant(gemv4.options(group[0], torch.bfloat16))
    launch = own.launch

    def spoiled(name, grid, block, args, **more):
        launch(name, grid, block, args, **more)
        args[4][0, 3] += 1

    monkeypatch.setattr(own, "launch", spoiled)
    assert "relative error" in autotune.check(group, modules[0], rows=(1, 3))
    monkeypatch.setattr(own, "launch", lambda *_, **__: None)
    assert "relative error inf" in autotune.check(group, modules[0], rows=(1,))


@pytest.mark.parametrize("columns", [128, 384, 1664])
def test_the_check_at_load_takes_a_product_with_one_output(modules, monkeypatch, columns):
    """A shared expert's gate. In these widths terms of the first row cancel: a rounding is much of what is left."""
    (weight,) = group = [autotune.RandomWeights(torch.device("cpu"), quant="nf4").make(1, columns)]
    assert autotune.check(group, modules[0], rows=(1, 3, 8)) is None
    own = modules[0].variant(gemv4.options(weight, torch.bfloat16))
    launch = own.launch
    monkeypatch.setattr(
        own, "launch", lambda name, grid, block, args, **more: (launch(name, grid, block, args, **more), args[4].mul_(1.02))
    )
    assert "relative error" in autotune.check(group, modules[0], rows=(1, 3, 8))


@pytest.mark.parametrize(
    "rows, cut, paired, scaled, followed, form",
    [
        ((80, 33), held(1, 3, 4, 1, 16, 1, 8), False, True, True, gemv4.PLAIN),
        ((48, 48), held(2, 4, 2, 2, 16, 1, 6), True, False, True, gemv4.NormForm("after", False)),
        slow_on_cpu((32,), held(3, 2, 4, 1, 16, 1, 2), False, False, False, gemv4.PLAIN),
        slow_on_cpu((32,), held(3, 2, 4, 1, 16, 1, 2), False, False, True, gemv4.NormForm("plus_one", True)),
        ((32,), held(5, 2, 8, 1, 16, 1, 2), False, True, True, gemv4.PLAIN),  # a warp has two pieces of a row, the last one
    ],
)
def test_the_norm_in_front_may_be_a_part_of_a_product(modules, rows, cut, paired, scaled, followed, form, monkeypatch):
    """Equal, bit for bit but for the order of the norms' sums, to `add_norm` and then the product."""
    torch.manual_seed(15)
    columns, n = 1024, cut.n
    group = group_of(rows, columns)
    y, residual = torch.randn(n, columns).bfloat16(), torch.randn(n, columns).bfloat16()
    post, following = torch.rand(2, columns).bfloat16() + 0.5
    scalar = torch.tensor([0.7]).bfloat16() if scaled else None
    lora = gemv4.lora_args(adapters_of(rows, columns, [6, 0]), torch.tensor([i % 3 - 1 for i in range(n)]).int(), 8)
    gate = gemv4.Gate("gelu_tanh") if paired else None
    width = rows[0] if paired else sum(rows)
    for given in (None, lora):
        outs = []
        for module in [None, *modules]:
            if module is not None and form != gemv4.PLAIN:
                monkeypatch.setattr(
                    module, "common", (f"-DNORM_FORM={attention_and_norms.FORMS.index(form.form)}", f"-DHAS_POST={form.has_post:d}")
                )
                monkeypatch.setattr(module.products, "norm", form)
                monkeypatch.setattr(module, "variants", {})
            norm = gemv4.Norm(
                residual, post if form.has_post else None, following if followed else None, 1e-6, scalar,
                torch.full_like(y, math.nan), form.form,
            )  # fmt: skip
            out = torch.full((n, width), math.nan, dtype=torch.bfloat16)
            lora.low.fill_(math.nan)
            gemv4.matvec4(y, group, out, lora=given, gate=gate, norm=norm, module=module, cut=None if module is None else cut)
            outs.append((out, norm.out_h))
        (wanted, h), (first, first_h) = outs[:2]
        # A sum in another order moves a value of h or x by one step of bf16 now and then.
        assert ((first_h.float() - h.float()).abs() <= h.float().abs() * 2**-7).all() and (first_h != h).float().mean() < 0.01
        assert autotune.relative_error(first, wanted) < autotune.LARGEST_ERROR
        assert all(torch.equal(out, first) and torch.equal(h, first_h) for out, h in outs[2:])


def test_a_norm_is_part_of_a_product_only_where_a_block_has_whole_rows():
    assert held(8, 2, 8, 1, 16, 1, 2).may_be_normed and held(4, 4, 2, 1, 16, 1, 2).may_be_normed
    assert not held(8, 2, 2, 1, 16, 1, 2).may_be_normed  # fewer warps than rows
    assert not held(8, 2, 4, 1, 16, 1, 2).may_be_normed  # four pieces a warp
    assert not held(1, 2, 2, 1, 16, 2, 2).may_be_normed
    assert not next(cut for cut in launch_config.cuts((48,), 1536, 2, **H200) if not cut.held).may_be_normed


@pytest.mark.parametrize("spoiled", ["plain", "with adapters", "refused", None])
def test_tuning_keeps_the_fastest_cut_that_computes_the_product(modules, monkeypatch, spoiled):
    module = products(multiprocessors=4)
    groups = [group_of((64,), 512)]
    real, asked = gemv4.matvec4, []

    def multiply(x, weights, out, *, lora=None, cut=None, **more):
        if spoiled == "refused" and cut is not None and cut.held and cut.units == 1:
            raise DeviceError("too many resources requested for launch", device="cpu")
        real(x, weights, out, lora=lora, cut=cut, **more)
        asked.append(cut)
        if cut is not None and cut.held and cut.units == 1 and spoiled == ("plain" if lora is None else "with adapters"):
            out[0, 5] += 3

    def time_us(call, device, *, repeat):
        call()
        return 9.0 if not asked[-1].held else 1.0 if asked[-1].units == 1 else 2.0

    monkeypatch.setattr(gemv4, "matvec4", multiply)
    monkeypatch.setattr(autotune, "graph_us", time_us)
    taken = autotune.tune(groups, 2, module, limit=6)
    best = module.products.chosen[gemv4.cut_key(groups[0], 2)]
    assert best.held and (best.units == 1) == (spoiled is None) and gemv4.cut_key(groups[0], 2) in module.products.measured
    assert any(cut.held and cut.units == 1 for cut in taken) == (spoiled is None) and any(not cut.held for cut in taken)
