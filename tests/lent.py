"""Loaded models that the tests of a process share: each family with its options is planned and loaded once, and lent to a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trimtab
from tests import pico

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
_LOADED: dict[Any, Any] = {}


@contextmanager
def lent(family: str, **options: Any) -> Iterator[Any]:
    """Lend the loaded model of a family, in float32 with a context of 96 tokens where options of `trimtab.plan` say no other.

    What the model holds beside its weights is afterwards what it was: the prefix cache, the batch, the plan, the chosen adapter. A
    test that changes weights, modules or the configuration loads a model of its own. After a failure, and on a GPU, where
    graphs take memory, the model is closed.
    """
    key = family, tuple(sorted(options.items()))
    model = _LOADED.pop(key, None)
    if model is None:
        given = {"quant": "none", "dtype": "float32", "context": 96, "device": DEVICE} | options
        model = trimtab.load(trimtab.plan(pico.built(family), **given), decode="auto")
    before = dict(vars(model))
    try:
        yield model
    except BaseException:
        model.close()
        raise
    if DEVICE != "cpu":
        model.close()
        return
    if model.prefix_cache is not None and model.prefix_cache is not before["prefix_cache"]:
        model.prefix_cache.close()
    vars(model).update(before)
    model.adapter_store.set(None)
    if _LOADED.setdefault(key, model) is not model:  # lent twice at a time
        model.close()
