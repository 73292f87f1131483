"""Differences, noise floors and verdicts by numbers computed another way; what two routes loaded is compared."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tests.raised import refused
from trimtab.verification.routes import alarm_rate, compare
from trimtab.verification.routes.compare import DRAW, Difference, Noise, NoiseFloor, difference
from trimtab.verification.routes.loaded_changes import SIZE, compare_changes, sketch


def random_pair(positions: int = 7, vocabulary: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(positions, vocabulary, generator=generator)
    second = first.clone()
    second[3:] += 0.01 * torch.randn(positions - 3, vocabulary, generator=generator)
    return first, second


def by_numpy(first: torch.Tensor, second: torch.Tensor) -> dict[str, float]:
    a, b = first.numpy().astype(np.float64), second.numpy().astype(np.float64)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    kl = (p * np.log(p / q)).sum(-1)
    return {
        "max_abs": np.abs(a - b).max(), "mean_abs": np.abs(a - b).mean(), "kl_mean": kl.mean(), "kl_max": kl.max(),
        "top1_agreement": (a.argmax(-1) == b.argmax(-1)).mean(),
    }  # fmt: skip


def test_a_difference_is_what_numpy_computes():
    first, second = random_pair()
    found = difference(first, second)
    assert (found.positions, found.first_position) == (7, 3)
    for name, value in by_numpy(first, second).items():
        # Both in float64, in another order: a few units of its rounding (2.2e-16), which the ratio of two sums multiplies.
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    assert found.max_abs_by_position[:3] == (0.0, 0.0, 0.0)
    assert max(found.max_abs_by_position) == found.max_abs and max(found.kl_by_position) == found.kl_max


def test_pieces_give_what_the_whole_gives(monkeypatch):
    first, second = random_pair()
    whole = difference(first, second)
    monkeypatch.setattr(compare, "_PIECE_VALUES", 40)
    assert difference(first, second) == whole


def test_equal_values_of_two_dtypes_are_the_same():
    first = torch.randn(4, 9).bfloat16()
    assert difference(first, first.float()).is_same and NoiseFloor().verdict(difference(first, first.float())) == "same"


def test_the_smallest_change_of_one_value_is_seen():
    first, _ = random_pair()
    second = first.clone()
    second[5, 11] = torch.nextafter(second[5, 11], torch.tensor(9.0))
    found = difference(first, second)
    assert (found.first_position, found.is_same) == (5, False)
    assert found.max_abs == float(second[5, 11].double() - first[5, 11].double()) > 0
    assert NoiseFloor().verdict(found) == "cannot tell"  # nobody measured what is noise here


@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_a_number_is_never_the_same(both):
    first, _ = random_pair()
    second = first.clone()
    second[2, 0] = math.nan
    if both:
        first[2, 0] = math.nan
    found = difference(first, second)
    assert (found.first_position, found.max_abs, found.kl_max) == (2, math.inf, math.inf)
    floor = NoiseFloor(compare.noise_between("p", {"a": first, "b": second}))
    assert floor.verdict(found) == "differs"  # not even within a floor that is infinite itself
    assert json.loads(json.dumps(found.to_json()))["max_abs"] == "inf"


def test_masked_values_of_both_are_no_difference():
    first, _ = random_pair()
    first[:, 4] = -math.inf
    found = difference(first, first.clone())
    assert found.is_same and found.kl_max == 0.0


def test_shapes_must_agree():
    error = refused(difference, torch.zeros(3, 4), torch.zeros(3, 5), match=r"\[3, 4\] cannot be compared with \[3, 5\]")
    assert error.field == "logits"


def drawn(prompt: str, sizes: list[float]) -> tuple[Noise, ...]:
    """Runs with roundings drawn at random: mean, max 5 times and KL the square of a size."""
    return tuple(Noise(prompt, "once", f"draw {at}", 5 * size, size, size**2, 3 * size**2, DRAW) for at, size in enumerate(sizes))


def at_limit(floor: NoiseFloor, prompt: str, **factors: float) -> Difference:
    """A difference that is just within the limits of a prompt, but for the measures that are named."""
    limit = asdict(floor.limits[prompt])
    values = {name: value * factors.get(name, 1.0) for name, value in limit.items()}
    return Difference(4, 0, kl_max=1.0, top1_agreement=1.0, max_abs_by_position=(), kl_by_position=(), **values)


SIZES = [0.010, 0.011, 0.009, 0.0105, 0.0095, 0.0102, 0.0098, 0.0112]


def test_the_limit_is_above_all_runs_and_below_what_is_ten_times_as_far():
    floor = NoiseFloor(drawn("p", SIZES))
    assert floor.is_measured and max(SIZES) < floor.limits["p"].mean_abs < 10 * max(SIZES)
    # The noise that the field report was about: 0.3 % above the largest run.
    assert floor.limits["p"].mean_abs > 1.003 * floor.mean_abs
    assert floor.limits["p"].kl_mean == pytest.approx(floor.limits["p"].mean_abs ** 2, rel=1e-6)


@pytest.mark.parametrize("measure", ["mean_abs", "max_abs", "kl_mean"])
def test_within_noise_means_within_all_three_limits(measure):
    floor = NoiseFloor(drawn("p", SIZES))
    assert floor.verdict(at_limit(floor, "p"), "p") == "same within noise"
    assert floor.verdict(at_limit(floor, "p", **{measure: 1.001}), "p") == "differs"


def test_each_prompt_has_a_limit_of_its_own():
    floor = NoiseFloor(drawn("quiet", SIZES) + drawn("noisy", [10 * size for size in SIZES]))
    assert floor.limits["noisy"].mean_abs == pytest.approx(10 * floor.limits["quiet"].mean_abs)
    assert floor.verdict(at_limit(floor, "noisy"), "quiet") == "differs" and floor.limit == floor.limits["noisy"]
    # More runs say better how far the noise spreads, so the limit comes down.
    assert floor.limits["quiet"].mean_abs < NoiseFloor(drawn("quiet", SIZES)).limits["quiet"].mean_abs


def test_an_order_of_summation_that_is_further_off_than_the_draws_lifts_the_limit():
    alone = NoiseFloor(drawn("p", SIZES))
    lifted = NoiseFloor((*drawn("p", SIZES), Noise("p", "once", "in a batch of 2", 0.5, 0.1, 0.01, 0.1)))
    assert lifted.limits["p"].mean_abs == pytest.approx(alone.limits["p"].mean_abs * 0.1 / 0.0101, rel=0.02)


def test_without_enough_runs_a_difference_cannot_be_judged():
    for pairs in ((), drawn("p", SIZES[:2]), (Noise("p", "once", "twice", 1.0, 1.0, 1.0, 1.0),)):
        floor = NoiseFloor(pairs)
        first, second = random_pair()
        assert not floor.is_measured and floor.verdict(difference(first, second)) == "cannot tell"
        assert floor.verdict(difference(first, first)) == "same"


def test_a_limit_is_exceeded_as_rarely_as_it_says():
    """With a rate of 5 % and no margin, 4,000 simulated right routes exceed it in 2 to 5.5 %: Bonferroni and the bound on t
    make it a little rarer than stated; four standard errors are 1.4 %."""
    import random

    generator = random.Random(0)
    alarms = 0
    for _ in range(4000):
        sizes = [math.exp(generator.gauss(-4, 0.2)) for _ in range(9)]
        rows = [{name: size**power for name, power in alarm_rate.MEASURES.items()} for size in sizes]
        limit = alarm_rate.limits({"p": rows[:8]}, rate=0.05 * 3, margin=1.0)["p"]
        alarms += rows[8]["mean_abs"] > limit.mean_abs
    assert 0.02 < alarms / 4000 < 0.055


def test_the_quantile_is_students():
    # Tables: t(0.0005, 21) = 3.819, t(0.0005, 7) = 5.408. The bound is at most 5 % above.
    for freedom, exact in ((21, 3.819), (7, 5.408)):
        assert exact < alarm_rate.student_quantile(0.0005, freedom) < 1.05 * exact


def test_the_limit_of_signs_is_hoeffdings():
    assert alarm_rate.symmetric_limit(1e-6, 49) == pytest.approx(math.sqrt(2 * math.log(2 * 49 / 1e-6)))


def test_the_floor_is_the_largest_of_all_pairs():
    first, second = random_pair()
    pairs = compare.noise_between("p1", {"once": first, "twice": first, "split": second})
    floor = NoiseFloor(pairs)
    assert len(pairs) == 3 and floor.orders == ("once", "twice", "split") and floor.max_abs == difference(first, second).max_abs
    assert [pair.max_abs for pair in pairs if {pair.first, pair.second} == {"once", "twice"}] == [0.0]
    assert floor.to_json()["pairs"] == 3


def test_the_worst_verdict_counts():
    assert compare.worst([]) == "same" and compare.worst(["same", "same within noise"]) == "same within noise"
    assert compare.worst(["same within noise", "differs", "same"]) == "differs"
    assert compare.worst(["same", "cannot tell", "same within noise"]) == "cannot tell"


def test_layers_are_compared_by_length():
    a, b = [torch.full((2, 2), 2.0), torch.zeros(1, 1)], [torch.full((2, 2), 2.5), torch.zeros(1, 1)]
    assert compare.relative_by_layer(a, b) == (0.25, 0.0)


def pair(seed=0, rank=4, size=64, out=64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, size, generator=generator), torch.randn(out, rank, generator=generator)


def loaded(scale=2.0, dtype=torch.float32, change=lambda A, B: (A, B), count=3):
    found = {}
    for number in range(count):
        A, B = pair(number)
        if number == 1:
            A, B = change(A, B)
        found[f"layers.{number}.q_proj"] = sketch(A.to(dtype), B.to(dtype), scale)
    return {"a": found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_adapter_in_any_dtype_is_the_same(dtype):
    found = compare_changes(loaded(), loaded(dtype=dtype))
    assert found is not None and (found.modules, found.wrong) == (3, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_scale_off_by_one_percent_is_named_in_every_module(dtype, factor):
    found = compare_changes(loaded(), loaded(2.0 * factor, dtype))
    assert len(found.wrong) == 3
    assert all(row.share == pytest.approx(factor, abs=0.002) and row.rest < 0.05 for row in found.wrong)
    assert f"{100 * found.wrong[0].share:.4g} % of the change of a is present" in str(found.wrong[0])


FAULTS = {"dropped": lambda A, B: (A, 0 * B), "transposed": lambda A, B: (B.T, A.T), "another": lambda A, B: pair(9)}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_module_is_named_and_no_other(fault):
    found = compare_changes(loaded(), loaded(change=FAULTS[fault]))
    assert [row.module_path for row in found.wrong] == ["layers.1.q_proj"] and found.to_json()["wrong"][0]["adapter"] == "a"
    assert found.to_json() == json.loads(json.dumps(found.to_json()))


def test_a_module_that_one_side_lacks_is_wrong_unless_names_differ_or_it_does_nothing():
    less = {"a": {path: row for path, row in loaded()["a"].items() if path != "layers.2.q_proj"}}
    assert [row.module_path for row in compare_changes(loaded(), less).wrong] == ["layers.2.q_proj"]
    assert compare_changes(loaded(), less, same_names=False).wrong == ()
    idle = {"a": less["a"] | {"layers.2.q_proj": [0.0] * SIZE}}
    assert compare_changes(less, idle).wrong == () and compare_changes({}, loaded()) is None


def test_signs_are_fixed_and_balanced():
    """The numbers may be made by two releases of torch: they come from integers alone."""
    assert sketch(torch.ones(1, 3), torch.ones(2, 1), 1.0)[:6] == EXPECTED
    many = torch.tensor(sketch(torch.ones(1, 4096), torch.ones(4096, 1), 1.0 / 4096))
    assert float(many.square().mean()) == pytest.approx(1.0, abs=0.8)


EXPECTED = [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
