"""The kernels over publishers' formats on a GPU, against float64 and each format's own bits, at sizes of real layers."""

import pytest
import torch

from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.cuda import launch_config, nvrtc
from trimtab.engine.formats.weights import dequantize_at
from trimtab.engine.kernels import autotune, dequantize, gemm4, gemv4
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS

REASON = nvrtc.why_not("cuda:0")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
DEVICE = torch.device("cuda:0")
BF16, HALF = torch.bfloat16, torch.float16
# A format, and the type of its scales.
FORMS = [
    ("int4-g32", BF16), ("int4-g128", BF16), ("int4-g128-zp", HALF), ("int4-g32-zp", BF16), ("int4-row", BF16),
    ("int4-g64-f32", torch.float32), ("fp8-128x128", BF16), ("fp8-row", BF16), ("fp8-tensor", BF16),
    *((form, BF16) for form in ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "nvfp4-g16", "q4_k-idx")),
    ("int4-g128-zp-idx", HALF),
]  # fmt: skip
MOBILE = [(f"mobile{bits}-row-a8", BF16) for bits in (2, 4, 8)]


def weights_of(form, scales, rows, columns, dtype=BF16):
    made = autotune.RandomWeights(DEVICE, quant=form, scale_dtype=scales)
    return [made.make(one, columns, scales if scales in (HALF,) else dtype) for one in rows]


@pytest.fixture(scope="module")
def products():
    return gemv4.load(DEVICE)


@pytest.mark.parametrize("form, scales", FORMS)
def test_products_agree_with_float64(products, form, scales):
    for rows, columns in (((2048, 512, 512), 2560), ((10240, 10240), 2560), ((2560,), 10240), ((4096,), 12288), ((48, 17), 768)):
        group = weights_of(form, scales, rows, columns)
        assert gemv4.why_not(group[0], BF16, DEVICE, n=8) is None
        # The relative error of a bfloat16 output, LARGEST_ERROR.
        assert autotune.check(group, products, rows=(1, 2, 3, 8)) is None
    assert autotune.check(weights_of(form, scales, (96,), 1536), products, dtype=HALF, rows=(1, 4, 7)) is None


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_products_that_round_their_inputs_agree_with_float64(products, bits):
    """Gemma 4's mobile layers: steps of few rows."""
    for rows, columns in (((2048, 512, 512), 1536), ((6144, 6144), 1536), ((1536,), 6144), ((48, 17), 768)):
        group = weights_of(f"mobile{bits}-row-a8", BF16, rows, columns)
        assert gemv4.why_not(group[0], BF16, DEVICE, n=8) is None
        assert autotune.check(group, products, rows=(1, 2, 3, 8)) is None
        for n in (1, 8):
            for cut in launch_config.unlike(gemv4.ways(group, n, products), 6):
                assert autotune.check(group, products, rows=(n,), cut=cut) is None, cut


def test_a_group_of_several_formats_agrees_with_float64(products):
    """A file in Q4_K_M has values in Q6_K next to queries and keys in Q4_K."""
    group = [weights_of(form, BF16, (rows,), 4096)[0] for form, rows in (("q4_k", 4096), ("q4_k", 1024), ("q6_k", 1024))]
    assert autotune.check(group, products, rows=(1, 3, 8)) is None
    assert gemm4.wrong(group, gemm4.load(DEVICE), BF16) is None


@pytest.mark.parametrize("form, scales, n", [(*form, n) for form in FORMS[:4] + FORMS[6:7] + FORMS[9:] for n in (1, 2, 4, 8)])
def test_every_likely_cut_is_right(products, form, scales, n):
    group = weights_of(form, scales, (10240,), 2560)
    for cut in launch_config.unlike(gemv4.ways(group, n, products), 6):
        assert autotune.check(group, products, rows=(n,), cut=cut) is None, cut


@pytest.mark.parametrize("form, columns", [("mobile2-row", 1536), ("mobile4-g256", 8960), ("q6_k", 4096)])
def test_rows_of_packed_tables_have_the_bits_of_the_format(form, columns):
    (packed,) = weights_of(form, BF16, [4096], columns)
    ids = torch.randint(4096, (515,), device=DEVICE)
    assert torch.equal(dequantize.unpack_rows(packed, ids, dequantize.load(DEVICE)), dequantize_at(packed, ids))


@pytest.mark.parametrize("form, scales", FORMS + MOBILE)
def test_unpacked_weights_have_the_bits_of_the_format(form, scales):
    module = dequantize.load(DEVICE)
    for shape in ((10240, 2560), (96, 512), (40, 256 if form.startswith("q") else 128)):
        (packed,) = weights_of(form, scales, shape[:1], shape[1])
        assert dequantize.wrong_unpack(packed, module, BF16) is None
    room = torch.empty(shape[0] * (shape[1] + ADAPTER_COLUMNS), dtype=BF16, device=DEVICE)
    assert adapter_columns.wrong(packed, room, module, tokens=(1, 64, 515)) is None


@pytest.mark.parametrize("form, scales", FORMS + MOBILE)
def test_products_of_many_rows_agree_with_float64(form, scales):
    module = gemm4.load(DEVICE)
    for rows, columns in (((2048, 512, 512), 2560), ((2560,), 10240), ((130, 24), 512)):
        group = weights_of(form, scales, rows, columns)
        assert all(gemm4.why_not(one, BF16) is None for one in group)
        assert gemm4.wrong(group, module, BF16) is None
