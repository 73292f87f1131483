"""The bundled model: right answers in every format and tier, from the base and from every adapter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile

import pytest

import trimtab
from trimtab.demo import line
from trimtab.errors import CheckpointError

DEMO = line.FOLDER
PROMPTS = [json.loads(text) for text in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
ADAPTERS = {name: DEMO / "adapters" / name for name in line.ADAPTERS}
# Answers that a format may change, of 72: none of those below. fp4 is coarser and changed up to three on one sample set.
QUANTS = ("none", "nf4", "nf4-dq", "int8")


def wrong_answers(prompts, **options) -> list[tuple[str, str, str]]:
    plan = trimtab.plan(DEMO / "base", adapters=ADAPTERS, context=256, audio_s=1.0, device="cpu", **options)
    found = []
    with trimtab.load(plan) as model:
        for prompt in prompts:
            media = {kind: str(DEMO / prompt[kind]) for kind in ("image", "audio") if prompt.get(kind)}
            for voice, expected in prompt["answers"].items():
                adapter = None if voice == "base" else voice
                text = model.answer(prompt["prompt"], **media, adapter=adapter, max_new_tokens=48).text
                if text != expected:
                    found.append((prompt["id"], voice, text))
    return found


def first_of_each_kind():
    return [next(prompt for prompt in PROMPTS if prompt["kind"] == kind) for kind in ("image", "audio", "text")]


# The other formats answer one prompt of each kind below.
@pytest.mark.parametrize(
    "quant", [pytest.param(quant, marks=() if quant == "nf4-dq" else pytest.mark.slow) for quant in QUANTS]
)
def test_every_prompt_is_answered_exactly(quant):
    assert len(PROMPTS) == 18 and all(set(prompt["answers"]) == {"base", *ADAPTERS} for prompt in PROMPTS)
    assert wrong_answers(PROMPTS, quant=quant, place={"*": "resident"}) == []


@pytest.mark.parametrize("place", [{"*": "stream", "table": "gather"}, {"*": "disk", "table": "gather"}, {"*": "host"}])
@pytest.mark.parametrize(
    "quant", [quant if quant in ("nf4-dq", "int8") else pytest.param(quant, marks=pytest.mark.slow) for quant in QUANTS]
)
def test_every_tier_answers_exactly(quant, place):
    assert wrong_answers(first_of_each_kind(), quant=quant, place=place) == []


def test_the_demos_files_can_be_named():
    code = (
        "import sys, trimtab.demo as demo\n"
        "assert 'torch' not in sys.modules\n"
        "assert (demo.BASE / 'config.json').is_file()\n"
        "assert all((path / 'adapter_config.json').is_file() for path in demo.ADAPTERS.values()), demo.ADAPTERS\n"
        "assert len([*demo.IMAGES, *demo.SOUNDS]) == 12 and all(path.is_file() for path in (*demo.IMAGES, *demo.SOUNDS))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_run_draws_into_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    drawn = {line.new_picture() for _ in range(2)}
    assert len(drawn) == 2 and drawn == set(tmp_path.iterdir())
    assert all(path.suffix == ".svg" for path in drawn)


def test_the_plan_of_the_demo_fits_80_columns(monkeypatch):
    class BeforeLoading(Exception):
        pass

    def loads(*_):
        raise BeforeLoading

    said: list[str] = []
    monkeypatch.setattr(line, "_answers", loads)
    with pytest.raises(BeforeLoading):
        line.run(said.append)
    plan = next(text for text in said if "language_model.layers" in text or "block" in text.split())
    assert "per token" in plan and max(map(len, plan.splitlines())) <= 80


def test_the_adapters_really_change_the_answer():
    for prompt in PROMPTS:
        answers = prompt["answers"]
        assert answers["base"] != answers["style"] and answers["base"] != answers["rslora-dora"]
        assert prompt["kind"] == "text" or answers["base"] != answers["specialist"]


@pytest.mark.parametrize("lost", ["base/config.json", "prompts.jsonl", "adapters/style/adapter_model.safetensors"])
def test_a_missing_file_says_how_to_get_it_back(lost, tmp_path, monkeypatch):
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    (folder / lost).unlink()
    monkeypatch.setattr(line, "FOLDER", folder)
    with pytest.raises(CheckpointError, match="missing: .*git checkout") as caught:
        line.run(lambda *text: None)
    assert lost in str(caught.value) and caught.value.path == str(folder)


def test_a_damaged_file_says_how_to_get_it_back(tmp_path, monkeypatch):
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    shard = next((folder / "base").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    monkeypatch.setattr(line, "FOLDER", folder)
    with pytest.raises(CheckpointError, match="bundled model is damaged") as caught:
        line.run(lambda *text: None)
    assert caught.value.path == str(shard) and "git checkout" in caught.value.hint
