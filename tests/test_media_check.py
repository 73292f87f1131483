"""Media that a processor shrinks to nothing, or to more patches than a model has positions, never reach the model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests import pico
from tests.test_control_tokens import asked
from trimtab.errors import RequestError
from trimtab.runtime import chat
from trimtab.runtime.media_check import check_pictures

SIZES = [
    (1, 1),
    (1, 65),
    (65, 1),
    (20, 1300),
    (1300, 20),
    (4, 130),
    (9000, 50),
    (1, 16),
    (8, 8),
    (64, 64),
    (3, 500),
    (7, 1399),
]


def prepared(family, **media):
    return chat.prepare(asked(family), "What is it?", **media)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_dense", "gemma4_moe", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_every_picture_is_refused_by_name_or_read(family, monkeypatch):
    model = pico.make_model(family)

    def is_read(picture):
        inputs = prepared(family, images=[picture])
        assert inputs.token_ids.count(pico.IMAGE) > 0
        with torch.no_grad():
            return bool(torch.isfinite(model(**inputs.tensors).logits).all())

    refused = []
    for size in SIZES:
        picture = Image.new("RGB", size, "red")
        try:
            assert is_read(picture)
        except RequestError as error:
            assert error.field == "image" and error.number == 0 and f"{size[0]} x {size[1]} pixels" in str(error)
            refused.append(picture)
    assert bool(refused) == family.startswith("gemma4")
    monkeypatch.setattr(chat, "check_pictures", lambda *arguments: None)
    for picture in refused:  # none of them for nothing
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|num_classes"):
            is_read(picture)


def test_the_picture_that_is_wrong_is_named():
    with pytest.raises(
        RequestError, match="picture 2 of 1300 x 20 pixels becomes 134 x 2 patches, this model knows 64"
    ) as caught:
        prepared("gemma4", images=[Image.new("RGB", size) for size in ((60, 40), (1300, 20))])
    assert caught.value.number == 1


@pytest.mark.parametrize(
    "size, words", [((0, 64), "no patch"), ((64, 0), "no patch"), ((80, 16), "1 x 5 patches"), ((64, 64), "")]
)
def test_pixtrals_sizes_are_held_against_its_table(size, words):
    """Its processor needs torchvision; these are the sizes that it gives."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(asked("mistral3").processor_folder)
    encoded = {"image_sizes": torch.tensor([[64, 64], size])}
    if not words:
        check_pictures(config, encoded, ())
        return
    with pytest.raises(RequestError, match=words) as caught:
        check_pictures(config, encoded, ())
    assert caught.value.number == 1


def test_sizes_of_other_models_are_not_taken_for_pixtrals():
    vision = SimpleNamespace(model_type="clip_vision_model", image_size=336, patch_size=14)
    check_pictures(SimpleNamespace(vision_config=vision), {"image_sizes": torch.tensor([[5000, 1]])}, ())


@pytest.mark.parametrize("samples", [1, 100, 159, 160])
def test_a_sound_too_short_for_a_frame_is_refused(samples):
    with pytest.raises(
        RequestError, match=rf"sound 2 lasts .* ms .{samples} samples at 16000 Hz.* too short"
    ) as caught:
        prepared("gemma4", audios=[np.zeros(n, np.float32) for n in (1600, samples)])
    assert caught.value.field == "audio" and caught.value.number == 1


def test_the_shortest_sound_is_heard():
    inputs = prepared("gemma4", audios=[np.zeros(161, np.float32)])
    assert inputs.token_ids.count(pico.AUDIO) == 1
    with torch.no_grad():
        assert torch.isfinite(pico.make_model("gemma4")(**inputs.tensors).logits).all()


def test_a_sound_of_which_the_end_would_be_cut_off_is_refused():
    assert prepared("gemma4", audios=[np.zeros(480_000, np.float32)]).token_ids.count(pico.AUDIO) == 750
    with pytest.raises(
        RequestError, match=r"lasts 30.1 s, this model reads 30 s and would not hear the rest"
    ) as caught:
        prepared("gemma4", audios=[np.zeros(481_600, np.float32)])
    assert caught.value.field == "audio"
