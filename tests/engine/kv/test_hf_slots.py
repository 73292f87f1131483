"""Where a model keeps the offset of its positions, and the memory that keys and values of all layers share."""

import pytest
import torch
from torch import nn

from tests import pico
from tests.engine.prefill.test_prefill import ids, through
from tests.lent import lent
from tests.long_runs import crossed
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv import kv_cache as hf_slots
from trimtab.engine.kv import sequence
from trimtab.engine.loader import transformers_model as hf
from trimtab.planning.values.byte_sizes import ALLOCATION_BYTES


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
    assert sequence.has_three_axes(model) and sequence.read_offset(model) == 0
    assert not sequence.has_three_axes(within(nn.Linear(2, 2)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma4", "gemma3n", "mistral3", "llama"])
def test_real_models_keep_it_where_a_walk_over_all_modules_finds_it(family, tmp_path):
    model = hf.probe(read_checkpoint(pico.build(family, tmp_path / "base"))).model
    assert sequence.rope_module(model) is next((one for one in model.modules() if hasattr(one, "rope_deltas")), None)


CACHES = {"full": {}, "int8": {"kv": "int8"}, "pages": {"batch": 4, "kv_tokens": 160}}


@pytest.mark.parametrize(("family", "cache"), crossed(["llama", "gemma4", "gemma3", "qwen3_vl"], CACHES, first=["gemma4"], rest=1))
def test_keys_and_values_of_all_layers_are_one_piece_of_memory_and_lie_apart(family, cache):
    options = CACHES[cache]
    with lent(family, **options) as model:
        batch = Batch(model, options.get("batch", 1))
        batch.join(through(batch, model.prepare(ids(20))))
        tensors = [tensor for layer in batch.cache._own() for tensor in (layer.keys, layer.values)]
        (memory,) = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        places = sorted((tensor.data_ptr() - memory, tensor.nbytes) for tensor in tensors)
        assert all(start % ALLOCATION_BYTES == 0 for start, _ in places)
        ends = [start + count for start, count in places]
        assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
        whole = tensors[0].untyped_storage().nbytes()
        # Each layer's two tensors end less than one allocation behind what they take.
        counted = 2 * len(model.anatomy.kv_layers) * ALLOCATION_BYTES
        assert ends[-1] <= whole == batch.cache.nbytes() + counted


def test_what_is_more_than_was_counted_has_memory_of_its_own():
    asked = []
    cache = hf_slots.BatchedKVCache(2, 64, torch.device("cpu"), bytes_of=lambda rows: asked.append(rows) or 5000)
    like = torch.ones(1, dtype=torch.bfloat16)
    first, second, third = cache.zeros(like, 100), cache.zeros(like, 3, 8), cache.zeros(like, 4096)
    assert asked == [2]
    assert second.data_ptr() - first.data_ptr() == ALLOCATION_BYTES
    assert third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert [one.shape for one in (first, second, third)] == [(100,), (3, 8), (4096,)]
    assert not any(bool(one.any()) for one in (first, second, third))
    alone = hf_slots.BatchedKVCache(2, 64, torch.device("cpu")).zeros(like, 100)
    assert alone.untyped_storage().nbytes() == 200
