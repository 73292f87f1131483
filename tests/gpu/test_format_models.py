"""Do models in each file format answer on the GPU, an adapter on, as the stock stack does with the same weights?"""

import pytest
import torch

import trimtab
from tests import stock
from tests.engine.formats.test_format_models import adapter, files
from tests.quantized_files import FORMS

IDS = list(range(3, 40))
# Roundings of a small model in 16 bits; values of another row or scale are off by more than 1.
LARGEST = 0.15


@pytest.mark.parametrize("tier", ["resident", "stream"])
@pytest.mark.parametrize("form", FORMS)
def test_answers_of_steps_and_prompts_are_stocks(form, tier, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    small, dense = files("llama", form, root)
    own = adapter("llama", form, "lora", root)
    plan = trimtab.plan(small, adapters={"one": own}, place={"language": tier}, device="cuda", context=64)
    with trimtab.load(plan) as model:
        answers = [model.answer(IDS, adapter="one", max_new_tokens=8, logprobs=0) for _ in range(2)]
    given = torch.tensor([[*IDS, *answers[0].token_ids]])
    truth = stock.with_adapter(stock.load_stock(dense), own)(input_ids=given).logits[0].float().log_softmax(-1)
    for answer in answers:
        wanted = [float(truth[len(IDS) - 1 + at, one.token_id]) for at, one in enumerate(answer.logprobs)]
        assert [one.logprob for one in answer.logprobs] == pytest.approx(wanted, abs=LARGEST)
