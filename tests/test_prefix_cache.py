"""A prompt whose beginning is kept says what it says alone: every family, adapters, pictures, chunk borders; and nothing that is
another client's, another adapter's or another picture's is ever reused."""

from __future__ import annotations

import os

import pytest
import torch

from tests import pico
from tests.test_prefill import differ, eager, ids, in_chunks, load
from trimtab.request import GenerateRequest
from trimtab.runtime import hf_slots
from trimtab.runtime.prefix_cache import PrefixCache

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
# As in test_prefill.py: another order of the same sums. A token that is missing or another one's moves a score by 1e-2.
TOLERANCE = 1e-4 if DEVICE != "cpu" else 2e-5
SIZE = 8  # tokens of a block: as many as the families' window
REQUEST = GenerateRequest(max_new_tokens=6)


def keeping(model, capacity=2**22, block_tokens=SIZE):
    """Let a model keep beginnings, with nothing kept yet."""
    if model.prefix_cache is not None:
        model.prefix_cache.close()
    model.prefix_cache = PrefixCache(model, capacity, block_tokens=block_tokens)
    return model.prefix_cache


def through(batch, inputs, **options):
    prompt = batch.begin(inputs, REQUEST, **options)
    while not prompt.step():
        pass
    return prompt


def scores(batch, inputs, **options):
    """Return the scores of a prompt's last token and of the step after it, and how many tokens were reused."""
    prompt = through(batch, inputs, **options)
    first = prompt.logits.clone()
    row = batch.join(prompt).row
    row.token_ids[-1] = 7
    batch.tell_tokens()
    batch._ahead = None
    after = batch.logits()[row.number].clone()
    batch.leave(row)
    return torch.stack([first, after]).cpu(), row.cached_tokens


def answer(batch, inputs, **options):
    """Return a row that was answered to its end."""
    row = batch.join(through(batch, inputs, **options)).row
    while row.finish is None:
        batch.step()
    batch.leave(row)
    return row


BATCHES = {
    "transformers": lambda model: eager(model),
    "chunks of 8 and 16": lambda model: in_chunks(model, (8, 16)),
    "chunks, three rows": lambda model: in_chunks(model, (16,), rows=3),
}


@pytest.mark.parametrize("how", BATCHES)
@pytest.mark.parametrize("family", pico.FAMILIES)
def test_the_second_turn_of_a_chat_computes_what_is_new_and_says_the_same(family, how, tmp_path):
    with load(family, tmp_path) as model:
        plain = BATCHES[how](model)
        has_rings = any(one.is_sliding for one in hf_slots.prompt_cache(model.hf_model).layers)
        cache = keeping(model)
        batch = BATCHES[how](model)
        first = answer(batch, model.prepare(ids(27)))
        assert first.cached_tokens == 0
        turn = [*first.token_ids[:-1], 250, 251, 252, 253, 254]
        # Four tokens were decided and went through; of full attention whole blocks are kept.
        expected = 32
        model.prefix_cache = None
        alone, none = scores(plain, model.prepare(turn))
        model.prefix_cache = cache
        found, reused = scores(batch, model.prepare(turn))
        assert none == 0 and reused == expected
        assert differ(found, alone) < TOLERANCE
        # The answer was written otherwise: the prompt alone is shared.
        other = [*first.token_ids[:27], 260, *turn[28:]]
        model.prefix_cache = None
        alone, _ = scores(plain, model.prepare(other))
        model.prefix_cache = cache
        found, reused = scores(batch, model.prepare(other))
        assert reused == (27 if has_rings else 24)
        assert differ(found, alone) < TOLERANCE
        assert cache.numbers()["hits"] == 2 and cache.numbers()["hit_tokens"] == 32 + reused
