"""Media that a processor shrinks to nothing, or to more patches than a model has positions, never reach the model."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests import pico, talking_families
from tests.engine.chat.test_control_tokens import asked
from tests.raised import raised, refused
from trimtab.engine.chat import prompt
from trimtab.engine.chat.media_check import check_frames, check_pictures, check_sound_lengths
from trimtab.engine.loader.processor import load_processor
from trimtab.errors import CheckpointError, RequestError

SIZES = [
    (1, 1), (1, 65), (65, 1), (20, 1300), (1300, 20), (4, 130), (9000, 50), (1, 16), (8, 8), (64, 64), (3, 500), (7, 1399),
    (2000, 10),
]  # fmt: skip


def prepared(family, **media):
    return prompt.prepare(asked(family), "What is it?", **media)


HAS_TABLE = ("gemma4", "gemma4_dense", "gemma4_moe")
SEEING = (*HAS_TABLE, "gemma3", "qwen2_5_vl", "qwen3_vl")
HEARING = ("gemma4",)
# Of mistral3 see the tests of Pixtral's sizes: transformers makes its processor only with torchvision.
PREPARED_APART = ("mistral3",)


def test_every_family_is_in_these_tests():
    for family in pico.FAMILIES:
        config = pico._CONFIGS[family][1]()
        assert (getattr(config, "vision_config", None) is not None) == (family in (*SEEING, *PREPARED_APART)), family
        assert (getattr(config, "audio_config", None) is not None) == (family in HEARING), family


@pytest.mark.parametrize("family", [*SEEING, "qwen3_5_vl"])
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
    assert bool(refused) == (family in HAS_TABLE)
    monkeypatch.setattr(prompt, "check_pictures", lambda *arguments: None)
    for picture in refused:  # none of them for nothing
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|num_classes"):
            is_read(picture)


@pytest.mark.parametrize("family", sorted(set(pico.FAMILIES) - set(SEEING) - set(PREPARED_APART)))
def test_a_family_that_does_not_see_or_hear_refuses_by_field(family):
    assert raised(RequestError, lambda: prepared(family, images=[Image.new("RGB", (1, 65))])).field == "image"


@pytest.mark.parametrize("family", sorted(set(pico.FAMILIES) - set(HEARING)))
@pytest.mark.parametrize("samples", [1, 160, 481_600])
def test_a_family_that_does_not_hear_refuses_every_sound_by_field(family, samples):
    assert raised(RequestError, prepared, family, audios=[np.zeros(samples, np.float32)]).field == "audio"


def test_a_processor_that_drops_media_is_an_error():
    """A folder with a tokenizer alone: transformers' tokenizers take `images=` and do nothing with it."""
    wrong = copy.copy(asked("mistral3"))
    wrong.__dict__["processor"] = talking_families.tokenizer("mistral3")
    with pytest.raises(CheckpointError, match="ignores images and audio") as caught:
        prompt.prepare(wrong, "What is it?", images=[Image.new("RGB", (64, 64))])
    assert "processor_config.json" in caught.value.hint


@pytest.mark.parametrize(("family", "field", "value", "words"), [
    ("qwen3_5_vl", "merge_size", 1, "64 tokens, the model reads 16 tokens"),
    ("qwen2_5_vl", "merge_size", 4, "4 tokens, the model reads 16 tokens"),
    ("qwen3_vl", "patch_size", 16, "1536 values, the model reads 384 values"),
    ("qwen3_vl", "temporal_patch_size", 1, "192 values, the model reads 384 values"),
    ("gemma3", "size", {"height": 28, "width": 28}, "28 x 28 values, the model reads 56 x 56 values"),
    ("gemma3", "image_seq_length", 9, "9 tokens, the model reads 4 tokens"),
])  # fmt: skip
def test_a_processor_of_another_model_is_an_error(family, field, value, words, tmp_path):
    """Its images have other patches, or other places in the prompt, than the model's."""
    folder = talking_families.save(family, pico.build(family, tmp_path))
    settings = json.loads((folder / "processor_config.json").read_text())
    (settings if field in settings else settings["image_processor"])[field] = value
    (folder / "processor_config.json").write_text(json.dumps(settings))
    wrong = copy.copy(asked(family))
    wrong.__dict__["processor"] = load_processor(folder)
    error = raised(CheckpointError, prompt.prepare, wrong, "What is it?", images=[Image.new("RGB", (64, 64))], match=words)
    assert "processor_config.json" in error.hint


def test_sounds_of_gemma3n_are_refused_by_name_or_heard():
    """Its processor and its tower need timm; extractor and encoder of sounds do not."""
    from transformers import Gemma3nAudioConfig
    from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder

    torch.manual_seed(0)
    encoder = Gemma3nAudioEncoder(
        Gemma3nAudioConfig(
            hidden_size=64, conf_num_attention_heads=2, conf_num_hidden_layers=1, sscp_conv_channel_size=(8, 4),
        )
    ).eval()  # fmt: skip
    extractor = Gemma3nAudioFeatureExtractor()
    refused = []
    for samples in (1, 100, 159, 160, 400, 512, 513, 640, 641, 1000, 1600, 16_000, 480_000, 480_001):
        sound = np.zeros(samples, np.float32)
        try:
            check_sound_lengths(extractor, [sound], 16_000)
        except RequestError as error:
            assert error.field == "audio" and error.number == 0
            refused.append(samples)
            continue
        encoded = extractor([sound], sampling_rate=16_000, return_tensors="pt")
        check_frames(encoded, [sound], 16_000)
        if samples < 20_000:  # longer ones take long
            with torch.no_grad():
                heard = encoder(encoded["input_features"], ~encoded["input_features_mask"]).last_hidden_state
            assert heard.shape[1] > 0 and torch.isfinite(heard).all()
    assert refused[0] == 1 and refused[-1] == 480_001 and 16_000 not in refused


def test_what_whispers_extractor_would_cut_off_is_refused():
    """Its limit is not in its signature: Qwen2-Audio and Voxtral use it."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=16)
    check_sound_lengths(extractor, [np.zeros(1, np.float32), np.zeros(480_000, np.float32)], 16_000)
    error = refused(check_sound_lengths, extractor, [np.zeros(480_001, np.float32)], 16_000, match="this model reads 30 s")
    assert error.field == "audio"


def test_the_picture_that_is_wrong_is_named():
    with pytest.raises(RequestError, match="image 2 of 1300 x 20 pixels becomes 134 x 2 patches, this model has 64") as caught:
        prepared("gemma4", images=[Image.new("RGB", size) for size in ((60, 40), (1300, 20))])
    assert caught.value.number == 1


@pytest.mark.parametrize(
    "size, words", [((0, 64), "no complete patch"), ((64, 0), "no complete patch"), ((80, 16), "1 x 5 patches"), ((64, 64), "")]
)
def test_pixtrals_sizes_are_held_against_its_table(size, words):
    """Its processor needs torchvision; these are the sizes that it gives."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(asked("mistral3").processor_folder)
    encoded = {"image_sizes": torch.tensor([[64, 64], size])}
    if not words:
        check_pictures(config, encoded, ())
        return
    assert raised(RequestError, check_pictures, config, encoded, (), match=words).number == 1


def test_sizes_of_other_models_are_not_taken_for_pixtrals():
    vision = SimpleNamespace(model_type="clip_vision_model", image_size=336, patch_size=14)
    check_pictures(SimpleNamespace(vision_config=vision), {"image_sizes": torch.tensor([[5000, 1]])}, ())


@pytest.mark.parametrize("samples", [1, 100, 159, 160])
def test_a_sound_too_short_for_a_frame_is_refused(samples):
    with pytest.raises(RequestError, match=rf"audio 2 lasts .* ms .{samples} samples at 16000 Hz.* too short") as caught:
        prepared("gemma4", audios=[np.zeros(n, np.float32) for n in (1600, samples)])
    assert caught.value.field == "audio" and caught.value.number == 1


def test_the_shortest_sound_is_heard():
    inputs = prepared("gemma4", audios=[np.zeros(161, np.float32)])
    assert inputs.token_ids.count(pico.AUDIO) == 1
    with torch.no_grad():
        assert torch.isfinite(pico.make_model("gemma4")(**inputs.tensors).logits).all()


def test_a_sound_of_which_the_end_would_be_cut_off_is_refused():
    assert prepared("gemma4", audios=[np.zeros(480_000, np.float32)]).token_ids.count(pico.AUDIO) == 750
    words = r"lasts 30.1 s, this model reads 30 s and would ignore the rest"
    assert refused(prepared, "gemma4", audios=[np.zeros(481_600, np.float32)], match=words).field == "audio"


def test_a_prompt_without_audio_needs_no_feature_extractor():
    check_sound_lengths(None, [], 16_000)
