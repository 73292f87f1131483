"""Which cases of a cross product every run has, that a lent model comes back as it was, and what a test draws without a seed."""

import random
import zlib
from itertools import combinations, product

import numpy as np
import pytest
import torch

from tests.lent import DEVICE, lent
from tests.long_runs import crossed, halved
from trimtab.errors import RequestError

on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU every case runs and no model is kept")


@on_cpu
def test_no_case_is_lost_and_the_first_names_have_all_of_theirs_in_every_run():
    names, sizes, kinds = ("a", "b", "c", "d"), (1, 2), ("x", "y")
    cases = crossed(names, sizes, kinds, first=("b",), rest=1)
    assert [one.values for one in cases] == list(product(names, sizes, kinds))
    in_every_run = [one.values for one in cases if not one.marks]
    assert [one[1:] for one in in_every_run if one[0] == "b"] == list(product(sizes, kinds))
    # Each other name has one case, a different one from name to name.
    others = [one for one in in_every_run if one[0] != "b"]
    assert [one[0] for one in others] == ["a", "c", "d"] and len({one[1:] for one in others}) == 3
    assert {mark.name for one in cases for mark in one.marks} == {"slow"}


@on_cpu
def test_without_a_rest_the_other_names_are_slow_alone():
    assert [bool(one.marks) for one in crossed(("a", "llama"))] == [True, False]


@on_cpu
def test_every_two_values_of_different_factors_meet_in_every_run():
    factors = ("a", "b"), ("x", "y", "z"), (1, 2, 3)
    cases = halved(*factors, slow=("c",))
    assert [one.values for one in cases] == list(product(("a", "b", "c"), *factors[1:]))
    kept = [one.values for one in cases if not one.marks]
    assert len(kept) == 9 and {mark.name for one in cases for mark in one.marks} == {"slow"}
    met = {pair for one in kept for pair in combinations(one, 2)}
    assert met == {pair for one, other in combinations(factors, 2) for pair in product(one, other)}


@on_cpu
def test_a_lent_model_is_kept_and_comes_back_as_it_was(monkeypatch):
    closed = []
    with lent("llama", context=40) as first:
        first.keep_prefixes(2**20)
        first.context_tokens = 3
        monkeypatch.setattr(first.prefix_cache, "close", lambda: closed.append("cache"))
    with lent("llama", context=40) as second, lent("llama", context=48) as other:
        assert second is first is not other and second.prefix_cache is None and second.context_tokens == 40
        assert closed == ["cache"]


@on_cpu
def test_a_model_of_a_test_that_failed_is_lent_to_no_other():
    with pytest.raises(KeyError), lent("llama", context=40) as first:
        raise KeyError
    with pytest.raises(RequestError, match="closed"):
        _ = first.hf_model
    with lent("llama", context=40) as second:
        assert second is not first and second.hf_model is not None


@pytest.fixture(scope="module")
def late():
    return random.random(), np.random.random(), torch.rand(3)


def test_a_name_alone_decides_what_its_test_draws(request):
    request.getfixturevalue("late")
    seed = zlib.crc32(request.node.nodeid.encode())
    assert random.random() == random.Random(seed).random() and np.random.random() == np.random.RandomState(seed).random()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))


DRAWN = []


@pytest.fixture(scope="module", params=range(2))
def shared():
    DRAWN.append(random.random())


def test_a_shared_fixture_draws_something_else_for_each_parameter(shared):
    assert len(set(DRAWN)) == len(DRAWN)
