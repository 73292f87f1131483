"""Pictures and sounds: what comes in, in one form, or a refusal that names the field."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests import talking
from trimtab.errors import RequestError
from trimtab.runtime.media import SAMPLE_RATE, read_audio, read_image


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_read_from_path_bytes_and_object(form, tmp_path):
    original = Image.open(io.BytesIO(talking.png()))
    file = tmp_path / f"a.{form.lower()}"
    original.save(file, form)
    found = [read_image(file), read_image(str(file)), read_image(file.read_bytes()), read_image(Image.open(file))]
    assert all(picture.mode == "RGB" and picture.size == (150, 100) for picture in found)
    assert len({picture.tobytes() for picture in found}) == 1


def test_transparency_becomes_white():
    found = read_image(talking.png(mode="RGBA"))
    assert found.getpixel((0, 0)) == (255, 255, 255) and found.getpixel((50, 50)) == (255, 0, 0)


def test_a_picture_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    Image.open(io.BytesIO(talking.png())).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").size == (100, 150)


@pytest.mark.parametrize(
    "source, words",
    [
        (b"not a picture", "known format"),
        (talking.png()[:200], "cannot be decoded"),
        ("missing.png", "no such file"),
        (17, "neither a path"),
        (b"GIF89a" + bytes(40), "known format"),
    ],
)
def test_what_is_no_picture_is_refused(source, words):
    with pytest.raises(RequestError, match=words) as caught:
        read_image(source)
    assert caught.value.field == "image"


@pytest.mark.parametrize("side, words", [(9_000, "9000 x 9000 pixels"), (20_000, "decompression bomb")])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side, words):
    """Above twice its own limit Pillow refuses while it opens the file; between the limits the refusal is ours."""
    bomb = io.BytesIO()
    Image.new("1", (side, side)).save(bomb, "PNG")
    assert len(bomb.getvalue()) < 2**20
    with pytest.raises(RequestError, match=words):
        read_image(bomb.getvalue())


@pytest.mark.parametrize(
    "rate, channels, form", [(44_100, 2, "WAV"), (8_000, 1, "WAV"), (48_000, 1, "FLAC"), (16_000, 1, "WAV")]
)
def test_a_sound_becomes_mono_16_khz(rate, channels, form):
    found = read_audio(talking.wav(rate=rate, channels=channels, form=form))
    assert found.dtype == np.float32 and found.ndim == 1 and abs(len(found) - 0.8 * SAMPLE_RATE) <= 2
    spectrum = np.abs(np.fft.rfft(found))
    assert abs(np.argmax(spectrum) * SAMPLE_RATE / len(found) - 440) < 3  # the tone is still where it was


def test_samples_are_taken_as_they_are():
    samples = np.linspace(-1, 1, 1600, dtype=np.float32)
    assert np.array_equal(read_audio(samples), samples)


@pytest.mark.parametrize(
    "source, words",
    [
        (b"not a sound", "cannot be decoded"),
        ("missing.wav", "no such file"),
        (np.zeros((2, 10), np.float32), "one row"),
        (np.array([np.nan], np.float32), "finite"),
        (np.zeros(0, np.float32), "0.0 s"),
        (3.5, "neither a path"),
        (talking.wav(form="AIFF"), "AIFF"),
    ],
)
def test_what_is_no_sound_is_refused(source, words):
    with pytest.raises(RequestError, match=words) as caught:
        read_audio(source)
    assert caught.value.field == "audio"


def test_a_sound_that_is_too_long_is_refused():
    with pytest.raises(RequestError, match=r"lasts 0.8 s, the limit is 0.5 s"):
        read_audio(talking.wav(), max_s=0.5)
