"""Captured towers on the GPU: the CPU's tests with the device changed, and the memory they take."""

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.prefill.test_encoder_cache import asked, tensors_of
from tests.engine.towers.test_tower_graphs import *
from tests.engine.towers.test_tower_graphs import DEVICE, features, same
from trimtab.engine.batch.batch import Batch
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.towers.graphs import Towers
from trimtab.planning.memory.towers import BUFFERS, POOL


# Unpacked, Qwen3.5 runs eagerly on a GPU, as its plan says.
@pytest.mark.parametrize(
    ("family", "quant"),
    [*((family, quant) for family in ("gemma4", "qwen3_vl") for quant in ("nf4", "none")), ("qwen3_5_vl", "nf4")],
)
def test_towers_in_bfloat16_with_an_adapter_are_those_of_modules(family, quant, tmp_path):
    base = pico.build(family, tmp_path / "base")
    folder = pico.adapter(base, tmp_path / "a", targets="all")
    plan = trimtab.plan(base, adapters={"a": folder}, quant=quant, context=96, device=DEVICE, batch=2)
    assert plan.execution.towers.mode == "graph" and plan.gpu[BUFFERS] and plan.gpu[POOL]
    with trimtab.load(plan) as model:
        why = []
        towers = Towers(model, "auto", lambda reason, what: why.append(reason))
        for seed in (1, 2, 3):
            for adapter in ("a", None):
                found = features(model, family, seed, towers, adapter=adapter)
                same(found, features(model, family, seed, adapter=adapter))
        each = towers.captured // 2
        # Both adapters, each picture once as it is, then captured, then replayed: with the vision tower's layers.
        assert not why and towers.captured == 2 * each == towers.replayed and each >= 2
        assert towers.buffer_bytes <= towers.most_bytes


def test_layouts_of_adapters_share_the_graphs_of_towers(tmp_path):
    base = pico.build("gemma3", tmp_path / "base")
    names = {name: pico.adapter(base, tmp_path / name, targets="all", seed=number) for number, name in enumerate("ab")}
    plan = trimtab.plan(base, adapters=names, quant="none", dtype="float32", context=96, device=DEVICE)
    with trimtab.load(plan, decode="auto") as model:
        prompts = PrefillRunner(Batch(model, rows=1), "auto")
        given = {
            key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            for key, value in asked(model, "gemma3", [1]).items()
        }
        expected = {name: features(model, "gemma3", 1, adapter=name) for name in names}
        for _ in range(3):
            for name, wanted in expected.items():
                key, serial = prompts.layouts.set_towers(name)
                assert serial is None
                with torch.no_grad(), prompts.towers.running(key, serial):
                    same(tensors_of(model.hf_model.model.get_image_features(**given)), wanted)
        assert prompts.towers.captured == len(prompts.towers.layers)
