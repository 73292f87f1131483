"""Differences, noise floors and verdicts, against numbers computed another way."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from trimtab.errors import RequestError
from trimtab.proof import compare
from trimtab.proof.compare import Noise, NoiseFloor, difference


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
    assert difference(first, first.float()).is_same
    assert NoiseFloor().verdict(difference(first, first.float())) == "same"


def test_the_smallest_change_of_one_value_is_seen():
    first, _ = random_pair()
    second = first.clone()
    second[5, 11] = torch.nextafter(second[5, 11], torch.tensor(9.0))
    found = difference(first, second)
    assert (found.first_position, found.is_same) == (5, False)
    assert found.max_abs == float(second[5, 11].double() - first[5, 11].double()) > 0
    assert NoiseFloor().verdict(found) == "differs"


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
    with pytest.raises(RequestError, match=r"\[3, 4\] cannot be compared with \[3, 5\]") as caught:
        difference(torch.zeros(3, 4), torch.zeros(3, 5))
    assert caught.value.field == "logits"


def floor_of(max_abs: float, mean_abs: float, kl_max: float) -> NoiseFloor:
    return NoiseFloor((Noise("p", "a", "b", max_abs, mean_abs, 0.0, kl_max),))


def test_within_noise_means_within_all_three():
    first, second = random_pair()
    found = difference(first, second)
    exact = (found.max_abs, found.mean_abs, found.kl_max)
    assert floor_of(*exact).verdict(found) == "same within noise"
    for place in range(3):
        below = tuple(value * (1 - 1e-6 * (at == place)) for at, value in enumerate(exact))
        assert floor_of(*below).verdict(found) == "differs"


def test_the_floor_is_the_largest_of_all_pairs():
    first, second = random_pair()
    pairs = compare.noise_between("p1", {"once": first, "twice": first, "split": second})
    floor = NoiseFloor(pairs)
    assert len(pairs) == 3 and floor.orders == ("once", "twice", "split")
    assert floor.max_abs == difference(first, second).max_abs
    assert [pair.max_abs for pair in pairs if {pair.first, pair.second} == {"once", "twice"}] == [0.0]
    assert floor.to_json()["pairs"] == 3


def test_the_worst_verdict_counts():
    assert compare.worst([]) == "same"
    assert compare.worst(["same", "same within noise"]) == "same within noise"
    assert compare.worst(["same within noise", "differs", "same"]) == "differs"


def test_layers_are_compared_by_length():
    a, b = [torch.full((2, 2), 2.0), torch.zeros(1, 1)], [torch.full((2, 2), 2.5), torch.zeros(1, 1)]
    assert compare.relative_by_layer(a, b) == (0.25, 0.0)
