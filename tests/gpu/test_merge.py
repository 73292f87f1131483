"""A packed merge computes the same on the GPU in trimtab and in the stock stack: the answers of the demo model."""

import json

import pytest

import trimtab
from tests.merging.test_merge_demo import DEMO, asks, media_of
from trimtab.merging import merge


@pytest.mark.parametrize("requantize", ["nf4", "nf4-dq"])
def test_a_packed_merge_answers_on_the_gpu_as_the_adapter_did(requantize, tmp_path):
    merge(DEMO / "base", tmp_path / "out", adapters={"a": DEMO / "adapters" / "specialist"}, requantize=requantize)
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())
    plan = trimtab.plan(tmp_path / "out", context=256, audio_s=1.0, place={"*": "resident"})
    with trimtab.load(plan) as model:
        for prompt in asks():
            answer = model.answer(prompt["prompt"], **media_of(prompt), max_new_tokens=48).text
            assert answer == prompt["answers"]["specialist"]
