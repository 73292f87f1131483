"""Where a model keeps the offset of its positions."""

import pytest
from torch import nn

from tests import pico
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.runtime import hf, hf_slots


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.rope_deltas = None
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])


def within(module):
    outer = nn.Module()
    outer.model, outer.lm_head = module, nn.Linear(2, 2)
    return outer


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_offset_is_kept_by_the_model_or_within_its_head(depth):
    model = Keeper()
    for _ in range(depth):
        model = within(model)
    assert hf_slots.has_three_axes(model) and hf_slots.read_offset(model) == 0
    assert not hf_slots.has_three_axes(within(nn.Linear(2, 2)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma4", "gemma3n", "mistral3", "llama"])
def test_real_models_keep_it_where_a_walk_over_all_modules_finds_it(family, tmp_path):
    model = hf.probe(read_checkpoint(pico.build(family, tmp_path / "base"))).model
    assert hf_slots._rope_module(model) is next((one for one in model.modules() if hasattr(one, "rope_deltas")), None)
