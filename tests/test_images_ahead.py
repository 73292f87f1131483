"""Images are resized on threads of the media pool, and what comes of it is what the processor makes by itself."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from PIL import Image

import trimtab
from tests import talking
from tests.test_control_tokens import asked
from tests.test_media_check import SEEING
from trimtab.request import GenerateRequest
from trimtab.runtime import chat
from trimtab.runtime.images_ahead import ahead_of
from trimtab.serve.engine import LoadedEngine
from trimtab.serve.job import Job


class Real:
    """An image processor that notes on which thread it is called."""

    def __init__(self, real):
        self._real, self.threads = real, []

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __call__(self, *args, **kwargs):
        self.threads.append(threading.current_thread().name)
        return self._real(*args, **kwargs)


@pytest.fixture
def seeing():
    changed = []

    def of(family):
        model = asked(family)
        own = model.processor.image_processor
        changed.append((model.processor, own))
        model.processor.image_processor = real = Real(own)
        return model, real

    yield of
    for processor, own in changed:
        processor.image_processor = own


def pictures(*sides):
    return [Image.effect_noise((side, 64), 50).convert("RGB") for side in sides]


def equal(first, second):
    return first.token_ids == second.token_ids and all(
        torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items()
    )


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("sides", [(64,), (64, 100)])
def test_what_was_prepared_is_what_the_processor_makes(family, sides, seeing):
    model, real = seeing(family)
    shown = pictures(*sides)
    expected = chat.prepare(model, "What is it?", images=shown)
    ahead = ahead_of(model.processor)
    assert ahead is ahead_of(model.processor)
    ahead.prepare(shown)  # how the processor calls is not known yet
    assert equal(chat.prepare(model, "What is it?", images=shown), expected) and len(real.threads) == 2
    ahead.prepare(shown)
    assert len(real.threads) == 3
    assert equal(chat.prepare(model, "What is it?", images=shown), expected) and len(real.threads) == 3
    # It is used once.
    assert equal(chat.prepare(model, "What is it?", images=shown), expected) and len(real.threads) == 4


def test_other_pictures_and_options_are_not_answered_with_what_was_prepared(seeing):
    model, real = seeing("gemma4")
    one, two = pictures(64, 100)
    ahead = ahead_of(model.processor)
    chat.prepare(model, "?", images=[one])
    ahead.prepare([one])
    expected = chat.prepare(model, "?", images=[one, two])
    assert expected.tensors["pixel_values"].shape[0] == 2 and len(real.threads) == 3
    ahead.prepare([one])
    found = model.processor.image_processor([[one]], return_tensors="np")  # other options
    assert len(real.threads) == 5 and not isinstance(found["pixel_values"], torch.Tensor)


def test_what_cannot_be_prepared_fails_where_it_is_needed(seeing):
    model, real = seeing("gemma4")
    chat.prepare(model, "?", images=pictures(64))
    ahead = ahead_of(model.processor)
    chat.prepare(model, "?", images=pictures(64))

    def fail(*args, **kwargs):
        raise ValueError("no")

    real._real = fail
    shown = pictures(64)
    ahead.prepare(shown)
    with pytest.raises(ValueError, match="no"):
        model.processor.image_processor([shown], return_tensors="pt")


def test_a_tokenizer_without_images_has_nothing_to_prepare(seeing):
    assert ahead_of(asked("llama").processor) is None


def test_the_server_resizes_every_image_on_a_thread_of_its_pool_the_first_too(tmp_path):
    folder = talking.build_gemma4(tmp_path / "gemma4")
    with trimtab.load(trimtab.plan(folder, quant="nf4", device="cpu", context=256, images=1)) as model:
        model.processor.image_processor = real = Real(model.processor.image_processor)
        engine = LoadedEngine(model, rows=1)
        engine.capture()
        stream = io.BytesIO()
        pictures(100)[0].save(stream, "PNG")
        parts = [{"type": "text", "text": "?"}, {"type": "image", "image": stream.getvalue()}]
        for _ in range(2):
            job = Job("a", [{"role": "user", "content": parts}], GenerateRequest(max_new_tokens=1))
            found = engine.prepare(job).result(60)
        assert equal(found, chat.prepare(model, job.prompt, device=torch.device("cpu")))
    # What the processor learned from, then the two, then the comparison.
    names = [name.rpartition("-")[0] if "media" in name else name for name in real.threads]
    assert names == ["trimtab-prepare", "trimtab-media", "trimtab-media", "MainThread"]
