"""Tests that run for every family or every way of a step: some cases in every run, the others with the slow tests.

On a GPU, where each case is fast, all of them run.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import pico
from trimtab.runtime import hf_slots

SLOW_ON_CPU = (pytest.mark.slow,) if os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") == "cpu" else ()
# Of each build: keys and values shared with earlier layers, several streams of states, positions in three dimensions, none of
# these, experts.
FIRST = ("gemma4", "gemma3n", "qwen3_vl", "llama", "qwen3_moe")


def slow_on_cpu(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is a slow test on a CPU."""
    return pytest.param(*values, marks=SLOW_ON_CPU)


FAMILIES = [name if name in FIRST else slow_on_cpu(name) for name in pico.FAMILIES]


def skip_without_rings(model: Any) -> None:
    """Skip a test of chunks or of steps in kernels: transformers 5.6.2 gives Gemma 4 without shared layers no sliding caches."""
    kinds = getattr(model.hf_model.config.get_text_config(), "layer_types", None) or ()
    if "sliding_attention" in kinds and not hf_slots.windows(model.hf_model, model.context_tokens):
        pytest.skip("this transformers release keeps the full cache of sliding layers")
