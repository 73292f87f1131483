"""Does each text turn as if it were alone, where the angles of a rotation depend on its length?

The reference is transformers' own generation by a model that has computed no other text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import trimtab
from tests import pico, stock
from trimtab.engine.batch.batch import Batch
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
        prompt = Batch(model, rows=1).begin(model.prepare(TEXT[:300]), GenerateRequest(max_new_tokens=4))
        while not prompt.step():
            pass
        assert prompt.logits is not None
        assert (prompt.logits.log_softmax(-1) - theirs(base, TEXT[:300], 1)[1][0]).abs().max() < TOLERANCE
