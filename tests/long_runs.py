"""Tests that run for every family or every way of a step: some cases in every run, the others with the slow tests.

On a GPU, where each case is fast, all of them run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests import pico
from trimtab.engine.kv import kv_cache

SLOW_ON_CPU = (pytest.mark.slow,) if os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") == "cpu" else ()
# Keys and values shared with earlier layers, towers and windows; positions in three dimensions; none of these. The other families
# go through the same features in one pass each: test_families.py.
FIRST = ("gemma4", "qwen2_5_vl", "llama")


def slow_on_cpu(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is a slow test on a CPU."""
    return pytest.param(*values, marks=SLOW_ON_CPU)


def crossed(names: Iterable[str], *others: Iterable[Any], first: Sequence[str] = FIRST[:1], rest: int = 0) -> list[Any]:
    """Return (name, *others) of every combination, as cases of parametrize: many of them are slow tests on a CPU.

    first: names with all combinations in every run. rest: how many combinations each other name has in every run, those of FIRST
    one at least; they are different ones from name to name, so that each value of the others is in some case.
    """
    combinations, cases, place = list(itertools.product(*others)), [], 0
    for name in names:
        kept = {(place + number) % len(combinations) for number in range(rest or name in FIRST)}
        for number, values in enumerate(combinations):
            is_kept = name in first or number in kept
            cases.append(pytest.param(name, *values) if is_kept else slow_on_cpu(name, *values))
        place += name not in first
    return cases


def halved(*factors: Sequence[Any], slow: Sequence[Any] = ()) -> list[Any]:
    """Return every combination of factors as cases of parametrize: every second one is a slow test on a CPU.

    Of three factors or more, every two values of different factors meet in every run; of two, each value is met. slow: more
    values of the first factor, all of whose cases are slow.
    """
    combinations = itertools.product(*map(enumerate, factors))
    cases = [(sum(index for index, _ in one), [value for _, value in one]) for one in combinations]
    kept = [slow_on_cpu(*values) if total % 2 else pytest.param(*values) for total, values in cases]
    return kept + [slow_on_cpu(*values) for values in itertools.product(slow, *factors[1:])]


FAMILIES = crossed(pico.FAMILIES)
REST = [name for name in pico.FAMILIES if name not in FIRST]


def skip_without_rings(model: Any) -> None:
    """Skip a test of chunks or of steps in kernels: transformers 5.6.2 gives Gemma 4 without shared layers no sliding caches."""
    kinds = getattr(model.hf_model.config.get_text_config(), "layer_types", None) or ()
    if "sliding_attention" in kinds and not kv_cache.windows(model.hf_model, model.context_tokens):
        pytest.skip("this transformers release keeps the full cache of sliding layers")
