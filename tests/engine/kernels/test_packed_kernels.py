"""Kernels over publishers' formats, run on the CPU: products and unpacked weights against float64 and each format's own bits."""

import math
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests import gguf_files, mobile_files, pico, quantized_files
from tests.cuda_on_cpu import modules
from tests.engine.decode.test_graphs import joined, replayed  # noqa: F401 - replayed is a fixture
from tests.engine.kernels.test_fused_kernels import STEP_TOLERANCE, on_cpu  # noqa: F401 - on_cpu is a fixture
from tests.engine.kernels.test_matvec import changed, multiplied
from trimtab.engine.batched_lora import columns as extended
from trimtab.engine.cuda import launch_config
from trimtab.engine.formats import mobile
from trimtab.engine.formats.weights import dequantize, dequantize_at, exact_rows, shell
from trimtab.engine.kernels import autotune, gemm4, gemv4, layouts
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.formats.kernels import LAYOUTS

CPU = torch.device("cpu")
BF16, HALF = torch.bfloat16, torch.float16
FORMS = {
    "int4-g32": BF16, "int4-g128": HALF, "int4-g32-zp": HALF, "int4-g128-zp": BF16, "int4-row": BF16, "int4-g64-f32": torch.float32,
    "fp8-128x128": BF16, "fp8-row": BF16, "fp8-tensor": BF16,
    **dict.fromkeys(("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "mobile2-row-a8", "mobile4-row-a8", "mobile8-row-a8"), BF16),
    "nvfp4-g16": BF16, "int4-g32-zp-idx": HALF, "int4-g128-idx": HALF, "q4_k-idx": BF16,
}  # fmt: skip


@pytest.fixture(scope="module")
def products():
    return modules.products(7, multiprocessors=4)


def weights_of(form, rows, columns, dtype=BF16):
    made = autotune.RandomWeights(CPU, quant=form, scale_dtype=FORMS[form])
    return [made.make(one, columns, dtype) for one in rows]


def exact(x, group, weight=lambda one: exact_rows(one, range(one.shape[0]), torch.float64)):
    """As the format's layer rounds its inputs and outputs, if it does."""
    parts = []
    for one in group:
        scales = one.parts.get("activation")
        own = (x if scales is None else mobile.rounded(x, scales[0])).double()
        y = own @ weight(one).T
        parts.append(y if scales is None else mobile.rounded(y.to(x.dtype), scales[1]).double())
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("form", FORMS)
def test_exact_weights_round_to_those_of_the_format(form):
    (packed,) = weights_of(form, [40], 512 if form.endswith("_k") else 320)
    ours = exact_rows(packed, range(40), torch.float64)
    assert torch.equal(ours[8:24], exact_rows(packed, range(8, 24), torch.float64))
    rounded = ours.float() if form.endswith("f32") or form.startswith(("fp8", "q")) else ours.to(FORMS[form])
    assert torch.equal(rounded.to(BF16), dequantize(packed))


@pytest.mark.parametrize("form, columns, n", [
    ("int4-g32", 192, 3), ("int4-g32", 256, 8), ("int4-g128", 256, 1), ("int4-g32-zp", 256, 2), ("int4-g128-zp", 320, 6),
    ("int4-row", 256, 1), ("int4-g64-f32", 256, 4), ("fp8-128x128", 512, 1), ("fp8-row", 256, 5), ("fp8-tensor", 256, 3),
    *((form, columns, n) for form in ("q4_0", "q4_1", "q8_0") for columns, n in ((320, 1), (256, 7))),
    *((form, 512, n) for form in ("q4_k", "q5_k", "q6_k") for n in (1, 3, 8)),
    *((f"mobile{bits}-row-a8", columns, n) for bits in (2, 4, 8) for columns, n in ((320, 2), (256, 7))),
    *(("nvfp4-g16", columns, n) for columns, n in ((320, 1), (256, 3), (512, 8))),
    *(("int4-g32-zp-idx", 320, n) for n in range(1, 9)), ("int4-g128-idx", 256, 3), ("q4_k-idx", 512, 5),
])  # fmt: skip
def test_a_product_and_its_adapters_agree_with_float64(products, form, columns, n):
    """x has a mean, which zero points of a group multiply; rows are no multiple of 16, groups end within a row."""
    group, x = weights_of(form, [20, 40], columns), (torch.randn(n, columns) + 0.5).bfloat16()
    for rank, places in ((0, None), (6, torch.tensor([i % 3 - 1 for i in range(n)], dtype=torch.int32))):
        pair = [[(torch.randn(rank, columns) / columns**0.5, torch.randn(one, rank), 0.5)] * 2 for one in (20, 40)]
        lora = None if places is None else gemv4.lora_args(pair, places, rank)
        out, own = multiplied([products], x, group, lora=lora), torch.empty(n, 60, dtype=BF16)
        gemv4.matvec4(x, group, own, lora=lora, module=None)
        wanted = exact(x, group) + (0 if places is None else changed(x, pair, places.tolist()))
        assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR
        # Sums in another order: a few values are a step of bfloat16 away; more where weights are scaled in float16. The inputs are
        # of no fixed seed: five standard deviations of a share of as many outputs are allowed above it.
        share = 0.2 if form.startswith("q") else 0.02
        assert (out != own).float().mean() < share + 5 * math.sqrt(share * (1 - share) / out.numel())


@pytest.mark.parametrize("form, n", [
    ("int4-g32", 1), ("int4-g32", 4), ("int4-g32-zp", 8), ("int4-g128", 1), ("fp8-128x128", 1), ("int4-g32-zp-idx", 1),
    *((form, n) for form in ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k") for n in (2, 8)),
    *((f"mobile{bits}-row-a8", n) for bits in (2, 4, 8) for n in (2, 8)), ("nvfp4-g16", 1), ("nvfp4-g16", 8), ("q4_k-idx", 8),
])  # fmt: skip
def test_weights_held_in_registers_give_the_same_product(products, form, n):
    group, x = weights_of(form, [64], 512), torch.randn(n, 512).bfloat16()
    cut = next(one for one in gemv4.ways(group, n, products) if one.held and one.splits == 2)
    out = multiplied([products], x, group, cut=cut)
    assert products.launches[-1] == "matvec_held" and cut.layout == layouts.layout(group[0]) != "nf4"
    assert autotune.relative_error(out, exact(x, group)) < autotune.LARGEST_ERROR


@pytest.mark.parametrize(
    "form, n", [*((f"mobile{bits}-row-a8", n) for bits, n in ((2, 1), (2, 3), (4, 2), (8, 1))), ("int4-g128", 2)]
)
def test_the_norm_in_front_may_be_a_part_of_a_product(products, form, n):
    """Adapters read the product's input as it was before it is rounded."""
    columns, rows = 1024, (32, 48)
    group, (y, residual) = weights_of(form, rows, columns), torch.randn(2, n, columns).bfloat16()
    post, following = torch.rand(2, columns).bfloat16() + 0.5
    pair = [[(torch.randn(6, columns) / columns**0.5, torch.randn(one, 6), 0.5)] * 2 for one in rows]
    adapters = gemv4.lora_args(pair, torch.tensor([i % 3 - 1 for i in range(1, n + 1)], dtype=torch.int32), 6)
    cut = next(one for one in gemv4.ways(group, n, products) if one.may_be_normed)
    for lora in (None, adapters):
        made = []
        for module in (None, products):
            norm = gemv4.Norm(residual, post, following, 1e-6, None, torch.full_like(y, math.nan))
            out = torch.full((n, sum(rows)), math.nan, dtype=BF16)
            gemv4.matvec4(y, group, out, lora=lora, norm=norm, module=module, cut=None if module is None else cut)
            made.append((out, norm.out_h))
        (wanted, h), (out, own) = made
        # A norm's sum in another order moves a few values of x by a step, of 8 bits here and there.
        assert (own != h).float().mean() < 0.01 and autotune.relative_error(out, wanted) < 2 * autotune.LARGEST_ERROR


def test_minima_far_above_scales_and_scales_of_nothing_are_computed(products):
    """The unit of a block of Q4_K is its scale, or the minima's where that is almost nothing; a block of both zero is zeros."""
    (packed,) = weights_of("q4_k", [32], 512)
    heads = packed.parts["scale"].view(-1, 16)
    for first, (d, least) in enumerate(((0.0, 0.01), (1e-6, -0.02), (0.0, 0.0), (-0.01, 0.0), (6e-8, 6e-8))):
        heads[first::6, :4] = torch.tensor([d, least], dtype=HALF).view(torch.uint8)
    x = torch.randn(3, 512).bfloat16()
    assert autotune.relative_error(multiplied([products], x, [packed]), exact(x, [packed])) < autotune.LARGEST_ERROR


@pytest.mark.parametrize("form, other", [("q4_k", "q6_k"), ("int4-g128-idx", "int4-g128")])
def test_weights_of_several_formats_or_orders_over_one_input_take_a_launch_each(products, form, other, monkeypatch):
    group = [weights_of(one, [rows], 512)[0] for one, rows in ((form, 40), (form, 20), (other, 24))]
    x, before = torch.randn(2, 512).bfloat16(), len(products.launches)
    pair = [[(torch.randn(4, 512) / 24, torch.randn(one, 4), 0.5)] for one in (40, 20, 24)]
    lora = gemv4.lora_args(pair, torch.tensor([0, -1], dtype=torch.int32), 4)
    out = multiplied([products], x, group, lora=lora)
    assert autotune.relative_error(out, exact(x, group) + changed(x, pair, (0, -1))) < autotune.LARGEST_ERROR
    assert products.launches[before:] == ["in_order"] * form.endswith("idx") + ["matvec_4"] * 2
    assert layouts.runs(group) == [slice(0, 2), slice(2, 3)]
    monkeypatch.setitem(products.products.chosen, gemv4.cut_key(group[:2], 2), SimpleNamespace(normed=True))
    assert gemv4.takes_norm(group[:2], 2, products) is (form == "q4_k")


def test_a_check_finds_a_product_that_reads_bits_above_of_a_neighbour(products):
    """The planted fault: the kernel's Q6_K with one word of the bits above taken for another."""
    read = "return {low, From::read_8(own + t * 8)};"
    source = gemv4.source().replace(read, "{ const uint2 v = From::read_8(own + t * 8); return {low, make_uint2(v.y, v.x)}; }")
    assert source != gemv4.source()
    wrong = modules.products(7, source=source)
    group = weights_of("q6_k", [16], 256)
    assert autotune.check(group, products, rows=(1,)) is None and "relative error" in str(autotune.check(group, wrong, rows=(1,)))


def test_configurations_of_each_layout_are_kept_apart():
    nf4 = autotune.RandomWeights(CPU).make(64, 512)
    groups = [weights_of(form, [64], 512)[0] for form in ("int4-g32", "int4-g128", "int4-g32-zp", "int4-row")]
    keys = [gemv4.cut_key([one], 1) for one in (nf4, *groups)]
    assert [key[0] for key in keys] == ["cut", "int4-2", "int4", "int4-2-zp", "int4"]
    facts = {"multiprocessors": 132, "shared_bytes": 232448}
    for layout in LAYOUTS:
        for cut in launch_config.cuts((64,), 512, 1, layout=layout, **facts):
            assert cut.needed_bytes(1) == cut.shared_bytes <= facts["shared_bytes"] and cut.layout == layout


@pytest.mark.parametrize("form, words", [("int8-g32", "no kernel"), ("int8-g32-zp-idx", "no kernel"), ("int4-g96", "no kernel")])
def test_what_no_kernel_reads_is_said(form, words):
    packed = autotune.RandomWeights(CPU, quant="int4-g32").make(8, 192)
    packed = type(packed)(form, packed.shape, packed.dtype, packed.parts, {})
    assert words in gemv4.why_not(packed, BF16, "cpu")


def test_scales_that_float16_products_cannot_hold_are_said():
    (packed,) = weights_of("q8_0", [8], 64)
    packed.parts["scale"][3, 1] = -300
    assert gemv4.why_not(packed, BF16, "cpu") == "scales beyond 256"


# Prompts --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts():
    module = modules.prompts(1)
    module.variant_names = ("unpack_plain", "unpack_columns_plain")
    return module


@pytest.mark.parametrize("form", ["mobile2-row-a8", "nvfp4-g16", "int4-g128-idx"])
def test_a_product_of_a_prompt_rounds_as_the_layer_does(form):
    module = modules.prompts(1)
    module.variant_names = ("unpack_plain", *["round_to_8"] * form.startswith("mobile"))
    (packed,) = weights_of(form, [40], 512)
    kernels = prompt_kernels.PromptKernels(module, unpacks=True, _weights={BF16: torch.empty(40 * 512, dtype=BF16)})
    x, bias = torch.randn(1, 9, 512).bfloat16(), torch.randn(40).bfloat16()
    x[0, 4, 7] = torch.nan  # stays one, through both roundings
    opened = []
    layer = SimpleNamespace(packed=lambda: opened.append(1) or packed, bias=bias, quant_kind=packed.kind)
    made, wanted = kernels.product([layer], x), shell(packed, bias, BF16)(x)
    assert len(opened) == 1 + form.startswith("mobile")  # a weight in host memory is copied each time
    made = made.view_as(wanted)
    assert made[0, 4].isnan().all() and torch.equal(made.nan_to_num(0.5), wanted.nan_to_num(0.5))
    assert ("round_to_8" in module.launches) == form.startswith("mobile")


@pytest.mark.parametrize("form, columns, dtype", [
    ("int4-g32", 320, BF16), ("int4-g128-zp", 256, BF16), ("int4-g32-zp", 96, BF16), ("int4-g32", 64, HALF), ("int4-row", 40, BF16),
    ("int4-g64-f32", 64, BF16), ("fp8-128x128", 200, BF16), ("fp8-row", 8, BF16), ("fp8-tensor", 64, BF16), ("q4_k-idx", 256, BF16),
    ("q4_0", 320, BF16), ("q4_1", 96, BF16), ("q8_0", 320, HALF), ("q4_k", 512, BF16), ("q5_k", 512, BF16), ("q6_k", 512, HALF),
    *((f"mobile{bits}-row-a8", 320, BF16) for bits in (2, 4, 8)), ("nvfp4-g16", 80, BF16), ("nvfp4-g16", 64, HALF),
])  # fmt: skip
def test_unpacked_weights_have_the_bits_of_the_format(prompts, form, columns, dtype):
    (packed,) = weights_of(form, [50], columns, dtype if form.endswith("f32") else FORMS[form])
    assert prompt_kernels.can_unpack(packed) and prompt_kernels.wrong_unpack(packed, prompts, dtype) is None
    if dtype == BF16 and columns % 16 == 0:
        B, wide = torch.randn(50, 4), columns + 64
        out = extended.unpack_extended(packed, B, 0, wide, torch.empty(50 * wide, dtype=BF16), prompts)
        wanted = torch.cat((dequantize(packed.as_it_lies()).to(BF16), B[:, :1].bfloat16()), dim=1)
        assert torch.equal(out[:, : columns + 1], wanted)


@pytest.mark.parametrize("form, columns", [("mobile2-row", 320), ("mobile4-g256", 512), ("q6_k", 256), ("int4-g32", 64)])
def test_rows_of_a_packed_table_have_the_bits_of_the_format(form, columns):
    """An id that the table has no row for gives values that are not numbers."""
    module = modules.prompts(1)
    module.variant_names = ("unpack_rows",)
    packed = autotune.RandomWeights(CPU, quant=form).make(40, columns)
    ids = torch.tensor([39, 0, 7])
    assert prompt_kernels.can_unpack(packed)
    assert torch.equal(prompt_kernels.unpack_rows(packed, ids, module), dequantize_at(packed, ids))
    assert prompt_kernels.unpack_rows(packed, torch.tensor([40, -1]), module).isnan().all()


def test_groups_that_end_within_a_row_are_unpacked_by_torch(prompts):
    for form, columns in (("int4-g128", 320), ("mobile4-g4", 64), ("mobile4-g12", 96)):
        assert not prompt_kernels.can_unpack(autotune.RandomWeights(CPU, quant=form).make(8, columns))


# Many rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, n, dtype", [
    ("int4-g32", 9, BF16), ("int4-g128-zp", 33, BF16), ("int4-g32-zp", 17, BF16), ("int4-row", 9, BF16), ("int4-g64-f32", 9, HALF),
    ("fp8-128x128", 9, BF16), *((form, 9, BF16) for form in ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q4_k-idx", "int4-g128-idx")),
    ("q6_k", 9, HALF), *((f"mobile{bits}-row-a8", n, BF16) for bits, n in ((2, 9), (4, 33), (8, 17))), ("nvfp4-g16", 17, BF16),
])  # fmt: skip
def test_a_product_of_many_rows_is_that_of_the_unpacked_weights(form, n, dtype):
    module = modules.rows(7)
    module.variant_names = ("rows_product_16", "rows_product_32", "rows_product_64", *["round_to_8"] * form.startswith("mobile"))
    own = dtype if form.endswith("f32") else FORMS[form]
    group = weights_of(form, [130, 24], 512, own)
    assert not any(gemm4.why_not(one, dtype) for one in group)
    x, out = torch.randn(n, 512).to(dtype), torch.full((n, 154), math.nan, dtype=dtype)
    gemm4.linear(x, group, out, module=module)
    wanted = exact(x, group, lambda one: dequantize(one).to(dtype).double())
    assert autotune.relative_error(out, wanted) < torch.finfo(dtype).eps / 2


# A whole step ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ct-int4", "awq", "gptq-ordered", "gguf", "mobile"])
def test_a_step_over_packed_weights_is_the_modules(on_cpu, replayed, tmp_path, form):  # noqa: F811
    """A tiny Llama from a publisher's file, rows with an adapter and without; of GGUF in two types, its head too."""
    if form == "gguf":
        small, dense = gguf_files.model("llama", "q4_k", tmp_path / "file")
    elif form == "mobile":
        # Not calibrated: where a sum is rounded to 8 bits its last bit decides on a step. Products are compared with rounding.
        small, dense = mobile_files.write(pico.built("gemma4"), tmp_path / "file", rounds=False), pico.built("gemma4")
    else:
        small, dense = quantized_files.write(pico.built("llama"), tmp_path, form)[0], pico.built("llama")
    adapters = {"a": pico.adapter(dense, tmp_path / "a", seed=1, rank=6)}
    with trimtab.load(trimtab.plan(small, adapters=adapters, context=64, device="cpu")) as model:
        asked = [("a", [5, 6, 7], {}), (None, [9, 8], {})]
        expected, batch = (joined(model, way, asked, rows=2) for way in ("eager", "fused"))
        wanted, found = expected.logits(), batch.logits()
        assert (found - wanted).abs().max() <= STEP_TOLERANCE * wanted.abs().max()
        assert "matvec_4" in on_cpu.matvec.launches and batch.steps.fallbacks == []
        # Values in another type than queries and keys are a launch of their own, and the head is one.
        assert form != "gguf" or len(on_cpu.matvec.launches) % (2 * 5 + 1) == 0


@pytest.mark.parametrize("kind, is_rounded", [("int4-g32", False), ("fp8-row", False), ("nf4", True), ("none", False)])
def test_an_adapter_of_a_prompt_is_rounded_as_peft_rounds_it_over_the_layer(monkeypatch, kind, is_rounded):
    """PEFT rounds the change over bitsandbytes' layers, and the sum over a plain Linear, as all others are in the stock stack."""
    said = []
    monkeypatch.setattr(prompt_kernels, "add", lambda *given, round_change: said.append(round_change))
    monkeypatch.setattr(prompt_kernels, "can_add", lambda *given: True)
    adapter = SimpleNamespace(A=torch.zeros(4, 8), B=torch.zeros(8, 4), scale=1.0)
    store = SimpleNamespace(selection=SimpleNamespace(rows=None, name="a"))
    leaf = SimpleNamespace(adapter_store=store, adapters={"a": adapter}, quant_kind=kind)
    prompt_kernels.PromptKernels(object(), adds=True).adapters().add(leaf, torch.zeros(9, 8), torch.zeros(9, 8))
    assert said == [is_rounded]
