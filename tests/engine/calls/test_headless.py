"""Checkpoints whose class gives no answers: decoders without a head embed texts, others are refused before they are loaded."""

from typing import Any

import pytest
import torch
import transformers

import trimtab
from trimtab.api import PlanInputs, plan_request
from trimtab.errors import CheckpointError, RequestError

IDS = [2, 5, 9, 44, 100, 7]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
REFUSED: dict[str, dict[str, Any]] = {
    "BertModel": SIZES, "BertForMaskedLM": SIZES,
    "T5ForConditionalGeneration": {"vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}  # fmt: skip
ANSWERS = {
    "answer": lambda m: m.answer(IDS, max_new_tokens=2), "generate": lambda m: list(m.generate(IDS)),
    "batch": lambda m: list(m.batch([IDS])), "logits": lambda m: m.logits(IDS),
    "answers": lambda m: m.answers(IDS, 2, temperature=1.0),
}  # fmt: skip


def planned(name: str, folder: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.partition('For')[0].removesuffix('Model')}Config")
    stock = getattr(transformers, name)(config(**REFUSED.get(name, SIZES))).eval()
    stock.save_pretrained(folder)
    return stock, trimtab.plan(folder, device="cpu", quant="none", dtype="float32", context=64)


@pytest.mark.parametrize("name", ["LlamaModel", "MistralModel", "LlamaForSequenceClassification"])
def test_a_decoder_without_a_head_embeds_as_stock_does(name, tmp_path):
    stock, plan = planned(name, tmp_path)
    with torch.no_grad():
        states = stock.base_model(torch.tensor([IDS])).last_hidden_state[0]
    with trimtab.load(plan) as model:
        torch.testing.assert_close(model.embed([IDS], normalize=False), states[-1:])
        torch.testing.assert_close(model.embed([IDS], pooling="mean", normalize=False), states.mean(0, keepdim=True))
        assert torch.equal(model.hidden_states(IDS)[-1], states)
        for ask in ANSWERS.values():
            with pytest.raises(RequestError, match=f"{name} has no language modelling head") as refused:
                ask(model)
            assert (refused.value.field, refused.value.value) == ("model", name)
    with pytest.raises(CheckpointError, match="gives no answers") as served:
        plan_request(plan.request, inputs=PlanInputs(is_served=True))
    assert served.value.path == str(tmp_path) and "`model.embed`" in served.value.hint


@pytest.mark.parametrize("name", REFUSED)
def test_another_class_is_refused_before_it_is_loaded(name, tmp_path):
    with pytest.raises(CheckpointError, match="gives no answers|an encoder and a decoder") as refused:
        planned(name, tmp_path)
    assert (refused.value.path, refused.value.hint) == (str(tmp_path), "`trimtab merge` works")
