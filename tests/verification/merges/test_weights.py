"""The test of merged weights: right roundings of every kind pass, a scale off by 1 % does not, and rates are as stated."""

import math

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise

from tests import pico, quantized_files
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.formats import coded_files
from trimtab.engine.formats.bitsandbytes import quant_state, quantize
from trimtab.errors import CheckpointError
from trimtab.formats.packed import split_packed
from trimtab.merging.check_exact import rounded_once
from trimtab.verification.merges.retention_files import packed_modules
from trimtab.verification.merges.weights import (
    FALSE_ALARM_RATE,
    Grid,
    MergedWeights,
    merged_weights,
    module_weight,
    read_grid,
    saved_weight,
)
from trimtab.verification.routes.alarm_rate import symmetric_limit

SHAPE = (96, 128)


def pieces(seed=0, size=0.05, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(SHAPE, generator=generator).to(dtype).float()
    A, B = torch.randn(4, SHAPE[1], generator=generator), size / 2 * torch.randn(SHAPE[0], 4, generator=generator)
    return base, B @ A, B.abs() @ A.abs()


def judged(merged, base, delta, terms, form="bfloat16"):
    return MergedWeights((module_weight("m", base, merged.float(), delta, form, terms=terms),))


def nearest(base, delta, dtype=torch.bfloat16):
    return (base + delta).to(dtype)


def in_bfloat16(base, delta, dtype=torch.bfloat16):
    return base.to(dtype) + delta.to(dtype)


@pytest.mark.parametrize("rounding", [nearest, in_bfloat16])
@pytest.mark.parametrize("size", [0.001, 0.05, 1.0])
def test_every_right_rounding_is_right_and_one_percent_is_not(rounding, size):
    base, delta, terms = pieces(size=size)
    found = judged(rounding(base, delta), base, delta, terms)
    assert (found.verdict, found.wrong) == ("right", ()) and found.modules[0].slope == pytest.approx(1.0, abs=0.05)
    if size >= 0.05:
        assert found.sees_scale_fault
        assert judged(rounding(base, 1.01 * delta), base, delta, terms).verdict == "differs"
    assert judged(rounding(base, 3 * delta), base, delta, terms).verdict == "differs"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dropped_doubled_and_foreign_changes_differ_in_every_dtype(dtype):
    base, delta, terms = pieces(dtype=dtype)
    form = str(dtype).removeprefix("torch.")
    other = pieces(seed=5)[1]
    for wrong in (0 * delta, 2 * delta, other, delta.flip(0)):
        assert judged(nearest(base, wrong, dtype), base, delta, terms, form).verdict == "differs"
    found = judged(nearest(base, 0 * delta, dtype), base, delta, terms, form).wrong[0]
    assert found.slope == pytest.approx(0.0, abs=1e-3) and found.beyond > 0


def test_a_change_below_the_rounding_is_right_without_being_seen():
    """The file with the change and the one without are the same bytes: no test of it can tell, and none has to."""
    base, delta, terms = pieces(size=1e-6)
    base = torch.where(base.abs() < 0.5, torch.ones_like(base), base)  # small values would show it
    assert torch.equal(nearest(base, delta), base.bfloat16())
    found = judged(base, base, delta, terms)
    assert (found.verdict, found.sees_scale_fault) == ("right", False) and found.to_json()["slope"] == 1.0


def test_one_value_out_of_bound_or_not_a_number_is_found():
    base, delta, terms = pieces()
    for value in (base[3, 4] + delta[3, 4] + 0.5, math.nan, math.inf):
        merged = nearest(base, delta).float()
        merged[3, 4] = value
        found = judged(merged, base, delta, terms)
        assert (found.verdict, found.wrong[0].beyond) == ("differs", 1)


def test_many_modules_together_show_what_one_cannot():
    """A scale 2 % off in modules of two rows: none of them alone is beyond doubt."""
    rows = []
    for seed in range(40):
        base, delta, terms = (part[:2] for part in pieces(seed=seed, size=0.02))
        rows.append(module_weight(f"m{seed}", base, nearest(base, 1.02 * delta).float(), delta, "bfloat16", terms=terms))
    assert MergedWeights(tuple(rows[:1])).verdict == "right"
    found = merged_weights(rows)
    assert found is not None and found.verdict == "differs" and len(found.wrong) < 5
    assert found.together.size > found.limit and 1 + found.together.off == pytest.approx(1.02, abs=0.005)
    assert merged_weights([]) is None


def packed(values, quant, dtype=torch.bfloat16):
    """Return (grid, values) of a weight as bitsandbytes packs it, or with "own" as `trimtab merge --requantize nf4-dq` does."""
    if quant.startswith("own"):
        parts = {}
        for name, _, data in coded_files.packed_parts(quant.removeprefix("own "), "", lambda a, b: values[a:b], SHAPE, "bfloat16"):
            parts[name] = torch.cat((parts.get(name, torch.empty(0, dtype=torch.uint8)), data.reshape(-1).view(torch.uint8)))
        rows = coded_files.in_memory(quant.removeprefix("own "), SHAPE, parts)
        codes, levels = parts[""], parts[".quant_map"].view(torch.float32)
        index = torch.stack((codes >> 4, codes & 15), 1).view(-1)
        found = (levels[index.int()] * rows.scales.repeat_interleave(64)).view(SHAPE)
        assert torch.equal(found, rows(0, SHAPE[0]))
        return Grid(levels.double(), rows.scales, 64, dtype, SHAPE), found
    made = quantize(values.to(dtype), quant)
    if quant == "int8":
        levels, scales = torch.arange(-127, 128, dtype=torch.float64) / 127, made.parts["SCB"].float()
        found = made.parts["weight"].float() * scales.view(-1, 1) / 127
        return Grid(levels, scales, SHAPE[1], torch.float16, SHAPE), found
    state = quant_state(made)
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = made.parts["weight"].view(-1)
    index = torch.stack((codes >> 4, codes & 15), 1).view(-1)
    found = (state.code[index.int()] * scales.float().repeat_interleave(64)).view(SHAPE)
    return Grid(state.code.double().unique(), scales.float(), 64, dtype, SHAPE), found


@pytest.mark.parametrize("quant", ["own nf4", "own nf4-dq", "nf4", "nf4-dq", "fp4", "int8"])
def test_packed_weights_are_the_levels_that_base_plus_change_is_packed_to(quant):
    """What 4 bits lose is no fault, whoever packed and however the scales were chosen; 1 % of the scale is."""
    base, delta, terms = pieces(size=0.3)

    def tested(values):
        grid, found = packed(values, quant)
        return MergedWeights((module_weight("m", base, found, delta, quant.split()[-1][:4].rstrip("-"), terms=terms, grid=grid),))

    for right in (base + delta, nearest(base, delta).float(), in_bfloat16(base, delta).float()):
        judged_right = tested(right)
        assert (judged_right.verdict, judged_right.sees_scale_fault) == ("right", True)
        assert judged_right.modules[0].beyond == 0 and not judged_right.modules[0].is_coarse
    for wrong, slope in ((1.01 * delta, 1.01), (0.99 * delta, 0.99), (0 * delta, 0.0), (2 * delta, 2.0)):
        found = tested(base + wrong)
        assert found.verdict == "differs"
        # Of the wrong merge's own scales too: far off where much is missing.
        assert found.modules[0].slope == pytest.approx(slope, abs=0.005 if abs(slope - 1) < 0.1 else 0.25)
    for wrong in (delta.flip(0), pieces(seed=5)[1] * 6):
        assert tested(base + wrong).verdict == "differs"


def test_one_wrong_code_of_a_packed_weight_is_out_of_the_bound():
    base, delta, terms = pieces(size=0.3)
    grid, found = packed(base + delta, "nf4")
    other = grid.levels[(grid.levels != found[5, 7].double() / grid.scale_of(5, 6)[0, 7]).nonzero()[3, 0]]
    found[5, 7] = float(other * grid.scale_of(5, 6)[0, 7])
    judged_once = MergedWeights((module_weight("m", base, found, delta, "nf4", terms=terms, grid=grid),))
    assert (judged_once.verdict, judged_once.wrong[0].beyond) == ("differs", 1)


def test_packed_weights_without_a_grid_are_held_against_the_noise_of_four_bits():
    base, delta, terms = pieces(size=0.3)
    noise = 0.09 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    right = judged(base + 0.99 * delta + noise, base, delta, terms, "nf4")  # clipping costs a percent
    assert (right.verdict, right.sees_scale_fault) == ("right", False)
    assert judged(base + noise, base, delta, terms, "nf4").verdict == "differs"
    assert judged(base + 2 * delta + noise, base, delta, terms, "nf4").verdict == "differs"
    assert judged(torch.randn(SHAPE), base, delta, terms, "nf4").verdict == "differs"
    faint = judged(base + 0.001 * delta + noise, base, 0.001 * delta, terms, "nf4")
    assert faint.verdict == "cannot tell"


def test_saved_tensors_are_in_the_file_rounded():
    saved = torch.randn(8, 8)
    assert saved_weight("head", saved, saved.bfloat16().float(), "bfloat16").beyond == 0
    assert MergedWeights((saved_weight("head", saved, saved + 0.1, "bfloat16"),)).verdict == "differs"


def test_the_limit_is_exceeded_as_rarely_as_it_says():
    """|sum x| / sqrt(sum x^2) of symmetric x: at a rate of 10 % at most 10 % of 4,000, whatever the sizes of x."""
    generator = torch.Generator().manual_seed(0)
    for spread, least in ((0.0, 0.005), (1.0, 0.0), (3.0, 0.0)):
        sizes = torch.exp(spread * torch.randn(4000, 50, generator=generator))
        x = sizes * (torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1)
        exceeded = (x.sum(1).abs() / x.square().sum(1).sqrt() > symmetric_limit(0.1, 1)).double().mean()
        assert least <= float(exceeded) <= 0.1
    assert MergedWeights(()).limit == symmetric_limit(FALSE_ALARM_RATE, 1)


def test_rounding_once_does_not_go_through_float32():
    """Just above a tie of bfloat16: rounded to float32 first, the tie would go to the even neighbour below."""
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert float(value.to(torch.bfloat16)) == 1.0 and float(rounded_once(value, torch.bfloat16)) == 1 + 2.0**-7
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0)).double() * 10.0 ** torch.linspace(-7, 4, 4096)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(rounded_once(random.float().double(), dtype), random.float().to(dtype).double())


def test_merged_files_in_a_format_that_no_merge_is_packed_in_are_refused(tmp_path):
    packed = quantized_files.write(pico.built("llama"), tmp_path, "ct-int4")[0]
    with pytest.raises(CheckpointError, match="is packed in int4-g32, whose rounding of a merged weight is not defined") as refused:
        packed_modules(packed)
    assert refused.value.path == str(packed)
    assert read_grid(next(iter(split_packed(read_checkpoint(packed))[1].values()))) is None
