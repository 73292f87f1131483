"""Does each text turn as if it were alone, and where does a model keep the offset of its positions and shared keys?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from tests import pico, stock
from tests.engine.prefill.test_prefill import ids, through
from tests.lent import lent
from tests.long_runs import crossed
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.loader import transformers_model
from trimtab.planning.values.byte_sizes import ALLOCATION_BYTES
from trimtab.request import GenerateRequest

LIMIT = 128
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0 + 0.1 * n for n in range(16)], "long_factor": [2.0 + 0.3 * n for n in range(16)],
        "original_max_position_embeddings": LIMIT, "factor": 4.0,
    },
}  # fmt: skip
TEXT = torch.randint(3, 300, (400,), generator=torch.Generator().manual_seed(1)).tolist()
# float32: attention adds in another order (largest seen: 4e-6). Angles of another length change 0.1 and more.
TOLERANCE = 5e-5


@pytest.fixture(params=ROPES)
def base(request, tmp_path):
    folder = pico.build("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": LIMIT, "eos_token_id": None}
    config["rope_parameters"] = {"rope_type": request.param, "rope_theta": 10000.0, **ROPES[request.param]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def planned(base: Any, **options: Any) -> Any:
    return trimtab.plan(base, quant="none", dtype="float32", context=420, device="cpu", **options)


def theirs(base: Any, ids: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return the tokens and log-probabilities [tokens, V] of a greedy answer."""
    model = stock.load_stock(base, dtype=torch.float32)
    found = model.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=tokens,
        do_sample=False, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences[0, len(ids) :].tolist(), torch.cat(found.logits).float().log_softmax(-1)


def is_theirs(base: Any, ids: list[int], answer: Any) -> None:
    tokens, wanted = theirs(base, ids, len(answer.token_ids))
    assert list(answer.token_ids) == tokens
    for one, row in zip(answer.logprobs, wanted, strict=True):
        assert max(abs(value - float(row[token])) for token, value in one.top) < TOLERANCE


def test_rows_of_unlike_lengths_turn_by_their_own(base):
    texts = [TEXT[:9], TEXT[:300], TEXT[5:45]]
    with trimtab.load(planned(base, batch=3)) as model:
        answers = model.batch([{"prompt": one} for one in texts], max_new_tokens=4, logprobs=5)
        for ids, answer in zip(texts, answers, strict=True):
            is_theirs(base, ids, answer)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": "16MiB"}], ids=["alone", "prefix cache"])
def test_a_text_does_not_turn_as_an_earlier_one(base, options):
    with trimtab.load(planned(base, **options)) as model:
        for count in (100, 300, 200, 100, 300):
            is_theirs(base, TEXT[:count], model.answer(TEXT[:count], max_new_tokens=4, logprobs=5))


def test_the_chunks_of_a_long_text_turn_as_all_of_it(base):
    with trimtab.load(replace(planned(base), prefill_tokens=64)) as model:
        is_theirs(base, TEXT[:300], model.answer(TEXT[:300], max_new_tokens=4, logprobs=5))
        prompt = Batch(model, rows=1).begin(model.prepare(TEXT[:300]), GenerateRequest(max_new_tokens=4)).compute()
        assert prompt.logits is not None
        assert (prompt.logits.log_softmax(-1) - theirs(base, TEXT[:300], 1)[1][0]).abs().max() < TOLERANCE


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
    model = transformers_model.probe(read_checkpoint(pico.build(family, tmp_path / "base"))).model
    assert sequence.rope_module(model) is next((one for one in model.modules() if hasattr(one, "rope_deltas")), None)


CACHES = {"full": {}, "int8": {"kv": "int8"}, "pages": {"batch": 4, "kv_tokens": 160}}


@pytest.mark.parametrize(("family", "cache"), crossed(["llama", "gemma4", "gemma3", "qwen3_vl"], CACHES, first=["gemma4"], rest=1))
def test_keys_and_values_of_all_layers_are_one_piece_of_memory_and_lie_apart(family, cache):
    options = CACHES[cache]
    with lent(family, **options) as model:
        batch = Batch(model, options.get("batch", 1))
        batch.join(through(batch, model.prepare(ids(20))))
        tensors = [tensor for layer in batch.cache.with_memory().values() for tensor in layer.tensors]
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
    cache = kv_cache.BatchedKVCache(2, 64, torch.device("cpu"), bytes_of=lambda rows: asked.append(rows) or 5000)
    like = torch.ones(1, dtype=torch.bfloat16)
    first, second, third = cache.zeros(like, 100), cache.zeros(like, 3, 8), cache.zeros(like, 4096)
    assert asked == [2]
    assert second.data_ptr() - first.data_ptr() == ALLOCATION_BYTES
    assert third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert [one.shape for one in (first, second, third)] == [(100,), (3, 8), (4096,)]
    assert not any(bool(one.any()) for one in (first, second, third))
    alone = kv_cache.BatchedKVCache(2, 64, torch.device("cpu")).zeros(like, 100)
    assert alone.untyped_storage().nbytes() == 200
