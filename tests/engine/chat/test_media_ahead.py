"""Images and audio are prepared on threads of the media pool, and what comes of it is what the processor makes by itself."""

import gc
import io
import threading

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

import trimtab
from tests import talking
from tests.engine.chat.test_control_tokens import asked
from tests.engine.chat.test_media_check import HEARING, SEEING
from tests.long_runs import crossed
from tests.raised import raising
from trimtab.engine.chat import prompt
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.worker.engine import LoadedEngine
from trimtab.serve.worker.prompt_inputs import audio_ahead, images_ahead


class Real:
    """An image processor or a feature extractor that notes on which thread it is called."""

    def __init__(self, real):
        self._real, self.threads = real, []

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __call__(self, *args, **kwargs):
        self.threads.append(threading.current_thread().name)
        return self._real(*args, **kwargs)


@pytest.fixture
def part_of():
    """The model of a family, and a part of its processor that notes its calls."""
    changed = []

    def of(family, part):
        model = asked(family)
        own = getattr(model.processor, part)
        changed.append((model.processor, part, own))
        real = Real(own)
        setattr(model.processor, part, real)
        return model, real

    yield of
    for processor, part, own in changed:
        setattr(processor, part, own)


@pytest.fixture
def seeing(part_of):
    return lambda family: part_of(family, "image_processor")


def sounds(*seconds):
    return [np.random.default_rng(0).normal(0, 0.1, int(count * 16_000)).astype(np.float32) for count in seconds]


def pictures(*sides):
    return [Image.effect_noise((side, 64), 50).convert("RGB") for side in sides]


def equal(first, second):
    return first.token_ids == second.token_ids and all(
        torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items()
    )


@pytest.mark.parametrize(("family", "sides"), crossed(SEEING, [(64,), (64, 100)], rest=1))
def test_what_was_prepared_is_what_the_processor_makes(family, sides, seeing):
    model, real = seeing(family)
    shown = pictures(*sides)
    expected = prompt.prepare(model, "What is it?", images=shown)
    ahead = images_ahead(model.processor)
    assert ahead is images_ahead(model.processor)
    ahead.prepare(shown)  # how the processor calls is not known yet
    assert equal(prompt.prepare(model, "What is it?", images=shown), expected) and len(real.threads) == 2
    ahead.prepare(shown)
    assert len(real.threads) == 3
    assert equal(prompt.prepare(model, "What is it?", images=shown), expected) and len(real.threads) == 3
    # It is used once.
    assert equal(prompt.prepare(model, "What is it?", images=shown), expected) and len(real.threads) == 4


@pytest.mark.parametrize("family", HEARING)
@pytest.mark.parametrize("seconds", [(1,), (1, 0.5)])
def test_audio_that_was_prepared_is_what_the_processor_makes(family, seconds, part_of):
    model, real = part_of(family, "feature_extractor")
    heard = sounds(*seconds)
    expected = prompt.prepare(model, "What is it?", audios=heard)
    ahead = audio_ahead(model.processor)
    assert equal(prompt.prepare(model, "What is it?", audios=heard), expected) and len(real.threads) == 2
    ahead.prepare(heard)
    assert equal(prompt.prepare(model, "What is it?", audios=heard), expected) and len(real.threads) == 3
    assert equal(prompt.prepare(model, "What is it?", audios=heard), expected) and len(real.threads) == 4
    # The same samples in another array are other audio.
    ahead.prepare(heard)
    assert equal(prompt.prepare(model, "What is it?", audios=sounds(*seconds)), expected) and len(real.threads) == 6


def test_what_was_prepared_is_dropped_with_its_media(part_of):
    model, _ = part_of("gemma4", "feature_extractor")
    heard = sounds(1)
    ahead = audio_ahead(model.processor)
    prompt.prepare(model, "?", audios=heard)
    ahead.prepare(heard)
    assert len(ahead._prepared) == 1
    heard.clear()
    gc.collect()
    assert not ahead._prepared


def test_other_pictures_and_options_are_not_answered_with_what_was_prepared(seeing):
    model, real = seeing("gemma4")
    one, two = pictures(64, 100)
    ahead = images_ahead(model.processor)
    prompt.prepare(model, "?", images=[one])
    ahead.prepare([one])
    assert prompt.prepare(model, "?", images=[one, two]).tensors["pixel_values"].shape[0] == 2 and len(real.threads) == 3
    ahead.prepare([one])
    found = model.processor.image_processor([[one]], return_tensors="np")  # other options
    assert len(real.threads) == 5 and not isinstance(found["pixel_values"], torch.Tensor)


def test_what_cannot_be_prepared_fails_where_it_is_needed(seeing):
    model, real = seeing("gemma4")
    prompt.prepare(model, "?", images=pictures(64))
    ahead = images_ahead(model.processor)
    prompt.prepare(model, "?", images=pictures(64))

    real._real = raising(ValueError("no"))
    shown = pictures(64)
    ahead.prepare(shown)
    with pytest.raises(ValueError, match="no"):
        model.processor.image_processor([shown], return_tensors="pt")


def test_a_tokenizer_without_images_has_nothing_to_prepare(seeing):
    assert images_ahead(asked("llama").processor) is None


def png():
    stream = io.BytesIO()
    pictures(100)[0].save(stream, "PNG")
    return stream.getvalue()


def wav():
    stream = io.BytesIO()
    soundfile.write(stream, sounds(0.5)[0], 16_000, format="WAV")
    return stream.getvalue()


@pytest.mark.parametrize("kind, part, made", [("image", "image_processor", png), ("audio", "feature_extractor", wav)])
def test_the_server_prepares_every_medium_on_a_thread_of_its_pool_the_first_too(kind, part, made, tmp_path):
    folder = talking.build_gemma4(tmp_path / "gemma4")
    with trimtab.load(folder, quant="nf4", device="cpu", context=256, images=1, audio_s=2) as model:
        real = Real(getattr(model.processor, part))
        setattr(model.processor, part, real)
        engine = LoadedEngine(model, rows=1)
        engine.capture()
        parts = [{"type": "text", "text": "?"}, {"type": kind, kind: made()}]
        for _ in range(2):
            job = Job("a", [{"role": "user", "content": parts}], GenerateRequest(max_new_tokens=1))
            found = engine.prepare(job).result(60)
        assert equal(found, prompt.prepare(model, job.prompt, device=torch.device("cpu")))
    # What the processor learned from, then the two, then the comparison.
    assert real.threads == ["trimtab-pool", "trimtab-pool", "trimtab-pool", "MainThread"]
