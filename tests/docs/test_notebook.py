"""What notebooks and people at a prompt see: the notebook of the docs runs, objects show themselves, media in many forms."""

import base64
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

import trimtab
from tests import ROOT
from tests.raised import refused
from tools import notebook_outputs
from trimtab import demo
from trimtab.errors import RequestError

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(demo.BASE, adapters={"style": demo.ADAPTERS["style"]}, context=128, images=2, audio_s=2.0, device="cpu")
    with trimtab.load(plan) as loaded:
        yield loaded


def test_the_notebook_runs_from_its_first_cell_to_its_last_and_has_its_outputs():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    now = notebook_outputs.with_outputs(notebook)
    kept, made = ([cell["outputs"] for cell in one["cells"] if cell["cell_type"] == "code"] for one in (notebook, now))
    assert "<svg" in made[0][0]["data"]["text/html"] and made[1][0]["data"]["text/plain"].startswith("LoadedModel('demo'")
    # Figures of a plan are of a machine, and last tokens of a CPU. What is shown is the same.
    assert [[sorted(one) for one in outputs] for outputs in kept] == [[sorted(one) for one in outputs] for outputs in made]
    answers = "".join(one["text"] for outputs in made for one in outputs if "text" in one)
    assert answers.count("->") == 3 and len(answers.split()) > 20
    assert not [word for word in (str(NOTEBOOK.parent.parent), str(Path.home()), "site-packages", "/tmp") if word in text]


def test_a_plan_shows_and_draws_itself(tmp_path):
    plan = trimtab.plan(demo.BASE, context=128, device="cpu")
    html = plan._repr_html_()
    assert html.startswith("<div") and "<svg" in html and "<pre" in html and "<script" not in html
    plan.draw(tmp_path / "plan.svg")
    ElementTree.parse(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() in html.replace("\n</div>", "") or "<svg" in html
    with pytest.raises(RequestError):
        plan.draw(tmp_path / "plan.doc")


def test_a_loaded_model_says_what_it_is():
    model = trimtab.load("demo", adapters=["demo/style"], context=128, device="cpu")
    text = repr(model)
    assert text.startswith("LoadedModel('demo', ") and "style" in text and "cpu" in text
    model.close()
    assert "closed" in repr(model)


def test_images_and_sounds_in_every_form_are_the_same_question(model):
    path = demo.IMAGES[0]
    data = path.read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    expected = model.answer("What is shown?", image=path, max_new_tokens=6).token_ids

    def parts(part):
        return [{"role": "user", "content": [part, {"type": "text", "text": "What is shown?"}]}]

    for image in (str(path), data, picture, np.asarray(picture)):
        assert model.answer("What is shown?", image=image, max_new_tokens=6).token_ids == expected
    for given in ({"url": url}, {"url": url, "detail": "high"}, url):
        messages = parts({"type": "image_url", "image_url": given})
        assert model.answer(messages, max_new_tokens=6).token_ids == expected
    sound = demo.SOUNDS[0]
    samples, rate = soundfile.read(sound)
    heard = model.answer("What is said?", audio=sound, max_new_tokens=6).token_ids
    text = base64.b64encode(sound.read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is said?"}, part]}]
    assert model.answer(messages, max_new_tokens=6).token_ids == heard
    for audio in (sound.read_bytes(), (samples, rate)):
        assert model.answer("What is said?", audio=audio, max_new_tokens=6).token_ids == heard


@pytest.mark.parametrize(("part", "field"), [
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "image"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "image"),
    ({"type": "image_url", "image_url": 3}, "image"), ({"type": "input_audio", "input_audio": "x"}, "audio"),
    ({"type": "input_audio", "input_audio": {"data": "=="}}, "audio"), ({"type": "image_url"}, "prompt"),
    ({"type": "image", "image": np.zeros((4, 4, 3))}, "image"), ({"type": "image", "image": np.zeros(4, np.uint8)}, "image"),
])  # fmt: skip
def test_a_part_that_is_none_is_refused(part, field, model):
    assert refused(model.answer, [{"role": "user", "content": [part]}], max_new_tokens=2).field == field
