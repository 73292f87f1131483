"""Tests that run for every family or every way of a step: some cases in every run, the others with the slow tests.

On a GPU, where each case is fast, all of them run.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import pico

_MARKS = (pytest.mark.slow,) if os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") == "cpu" else ()
# Of each build: keys and values shared with earlier layers, several streams of states, positions in three dimensions, none of
# these, experts.
FIRST = ("gemma4", "gemma3n", "qwen3_vl", "llama", "qwen3_moe")


def slow_on_cpu(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is a slow test on a CPU."""
    return pytest.param(*values, marks=_MARKS)


FAMILIES = [name if name in FIRST else slow_on_cpu(name) for name in pico.FAMILIES]
