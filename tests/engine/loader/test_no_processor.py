"""Is a folder without a usable processor read once, and not by every answer?"""

import trimtab
from tests import pico
from trimtab.engine import model as model_module
from trimtab.request import GenerateRequest


def test_a_missing_processor_is_looked_for_once(tmp_path, monkeypatch):
    reads, own = [], model_module.hf_processor.load_processor
    monkeypatch.setattr(model_module.hf_processor, "load_processor", lambda folder: reads.append(folder) or own(folder))
    plan = trimtab.plan(pico.build("llama", tmp_path), quant="none", context=32, device="cpu")
    with trimtab.load(plan) as model:
        for _ in range(3):
            answer = model.answer_inputs(model.prepare([5, 6, 7]), GenerateRequest(max_new_tokens=2))
            assert len(answer.token_ids) == 2
    assert len(reads) == 1
