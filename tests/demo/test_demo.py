"""The bundled model: right answers in every format and tier, from the base and from every adapter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile

import pytest

import trimtab
from tests.raised import raised
from trimtab.demo import demo
from trimtab.errors import CheckpointError

DEMO = demo.FOLDER
PROMPTS = [json.loads(text) for text in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
ADAPTERS = {name: DEMO / "adapters" / name for name in demo.ADAPTERS}
KINDS = ("image", "audio", "text")
# Answers that a format may change, of 72: none of those below. fp4 is coarser and changed up to three on one sample set.
QUANTS = ("none", "nf4", "nf4-dq", "int8")


def wrong_answers(prompts, *, voices=(), **options) -> list[tuple[str, str, str]]:
    """Return what is not as expected: of every voice, or of the one voice that stands at the prompt's place."""
    plan = trimtab.plan(DEMO / "base", adapters=ADAPTERS, context=256, audio_s=1.0, device="cpu", **options)
    found = []
    with trimtab.load(plan) as model:
        for place, prompt in enumerate(prompts):
            media = {kind: str(DEMO / prompt[kind]) for kind in ("image", "audio") if prompt.get(kind)}
            for voice in (voices[place % len(voices)],) if voices else prompt["answers"]:
                expected = prompt["answers"][voice]
                adapter = None if voice == "base" else voice
                text = model.answer(prompt["prompt"], **media, adapter=adapter, max_new_tokens=48).text
                if text != expected:
                    found.append((prompt["id"], voice, text))
    return found


def first_of_each_kind():
    return [next(prompt for prompt in PROMPTS if prompt["kind"] == kind) for kind in KINDS]


def test_every_prompt_is_answered_exactly_by_one_voice():
    assert len(PROMPTS) == 18 and all(set(prompt["answers"]) == {"base", *ADAPTERS} for prompt in PROMPTS)
    voices = ("base", *ADAPTERS)
    by_kind = {kind: {voices[i % 4] for i, one in enumerate(PROMPTS) if one["kind"] == kind} for kind in KINDS}
    assert by_kind == {kind: set(voices) for kind in KINDS}
    assert wrong_answers(PROMPTS, voices=voices, quant="nf4-dq", place={"*": "resident"}) == []


@pytest.mark.slow
@pytest.mark.parametrize("quant", QUANTS)
def test_every_prompt_is_answered_exactly(quant):
    assert wrong_answers(PROMPTS, quant=quant, place={"*": "resident"}) == []


TIERS = {"stream": {"*": "stream", "table": "gather"}, "disk": {"*": "disk", "table": "gather"}, "host": {"*": "host"}}


@pytest.mark.parametrize(("tier", "quant"), [("stream", "nf4-dq"), ("disk", "int8")])
def test_a_tier_answers_a_prompt_of_each_kind_exactly(tier, quant):
    prompts = first_of_each_kind()
    assert wrong_answers(prompts, voices=tuple(ADAPTERS), quant=quant, place=TIERS[tier]) == []


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_tier_answers_exactly(quant, tier):
    assert wrong_answers(first_of_each_kind(), quant=quant, place=TIERS[tier]) == []


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
    drawn = {demo.new_picture() for _ in range(2)}
    assert len(drawn) == 2 and drawn == set(tmp_path.iterdir()) and all(path.suffix == ".svg" for path in drawn)


def test_the_plan_of_the_demo_fits_80_columns(monkeypatch):
    class BeforeLoading(Exception):
        pass

    def loads(*_):
        raise BeforeLoading

    said: list[str] = []
    monkeypatch.setattr(demo, "_answers", loads)
    with pytest.raises(BeforeLoading):
        demo.run(said.append)
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
    monkeypatch.setattr(demo, "FOLDER", folder)
    error = raised(CheckpointError, demo.run, lambda *text: None, match="missing: .*git checkout")
    assert lost in str(error) and error.path == str(folder)


def test_a_damaged_file_says_how_to_get_it_back(tmp_path, monkeypatch):
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    shard = next((folder / "base").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    monkeypatch.setattr(demo, "FOLDER", folder)
    error = raised(CheckpointError, demo.run, lambda *text: None, match="bundled model is damaged")
    assert error.path == str(shard) and "git checkout" in error.hint
