"""Pictures and sounds: what comes in, in one form, or a refusal that names the field."""

import io
import struct
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps

from tests import talking
from tests.raised import refused
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.chat import media
from trimtab.engine.chat.media import SAMPLE_RATE, LowDetail, read_audio, read_image
from trimtab.errors import RequestError


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


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 10))
def test_an_image_is_turned_once_and_as_pillow_turns_it(orientation, kind):
    """Also where another tag has a value that Pillow reads and cannot write: a resolution as text."""
    picture = Image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3)
    exif = Image.Exif()
    exif[media.ORIENTATION] = orientation
    plain = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(picture, kind, exif=exif))))
    tags = struct.pack("<HHHIIHHI4sI", 2, media.ORIENTATION, 3, 1, orientation, 0x011A, 2, 4, b"abc\0", 0)
    turned = read_image(encoded(picture, kind, exif=b"Exif\0\0II*\0" + struct.pack("<I", 8) + tags))
    assert np.array_equal(np.asarray(turned), np.asarray(plain.convert("RGB")))
    assert np.array_equal(np.asarray(read_image(turned)), np.asarray(turned))


@pytest.mark.parametrize("source, words", [
    (b"not a picture", "supported format"), (talking.png()[:200], "cannot be decoded"), ("missing.png", "no such file"),
    (17, "not a path"), (b"GIF89a" + bytes(40), "supported format"),
])  # fmt: skip
def test_what_is_no_picture_is_refused(source, words):
    assert refused(read_image, source, match=words).field == "image"


@pytest.mark.parametrize(
    "size, words",
    [
        ((9_000, 9_000), "has 9000 x 9000 pixels, the limit is 64000000"),
        ((20_000, 20_000), "decompression bomb"),  # Pillow refuses while it opens the file
        ((16_385, 1_000), "has 16385 x 1000 pixels, the limit per side is 16384"),
        ((31_000_000, 1), "has 31000000 x 1 pixels, the limit per side is 16384"),
        ((16_000, 79), "has 16000 x 79 pixels, the limit of longer to shorter side is 200"),
    ],
)
def test_a_picture_of_a_senseless_size_is_refused_before_it_is_decoded(size, words, monkeypatch):
    bomb = io.BytesIO()
    Image.new("1", size).save(bomb, "PNG")
    assert len(bomb.getvalue()) < 2**20
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(RequestError, match=words):
        read_image(bomb.getvalue())


@pytest.mark.parametrize("rate, channels, form", [(44_100, 2, "WAV"), (8_000, 1, "WAV"), (48_000, 1, "FLAC"), (16_000, 1, "WAV")])
def test_a_sound_becomes_mono_16_khz(rate, channels, form):
    found = read_audio(talking.wav(rate=rate, channels=channels, form=form))
    assert found.dtype == np.float32 and found.ndim == 1 and abs(len(found) - 0.8 * SAMPLE_RATE) <= 2
    spectrum = np.abs(np.fft.rfft(found))
    assert abs(np.argmax(spectrum) * SAMPLE_RATE / len(found) - 440) < 3  # the tone is still where it was


@pytest.mark.parametrize("rate, channels", [(44_100, 1), (8_000, 2), (48_000, 16), (16_000, 2)])
def test_samples_with_their_rate_are_resampled_as_a_file_is(rate, channels):
    file = talking.wav(rate=rate, channels=channels)
    samples, _ = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=channels > 1)
    assert np.array_equal(read_audio((samples, rate)), read_audio(file))


@pytest.mark.parametrize("channels", [1, 2, 7, 16])
def test_audio_that_is_mixed_in_blocks_is_that_of_the_whole(channels, monkeypatch):
    samples = np.random.default_rng(0).standard_normal((2500, channels)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 8_000, format="WAV", subtype="FLOAT")
    reads = []
    read = soundfile.SoundFile.read
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *args, **named: (reads.append(named), read(*args, **named))[1])
    monkeypatch.setattr(media, "BLOCK_FRAMES", 1000)
    assert np.array_equal(read_audio(file.getvalue()), read_audio((samples, 8_000)))
    assert max(named["frames"] for named in reads) == 1000  # never all channels of the whole clip
    with pytest.raises(RequestError, match=r"the limit is 0.3 s"):
        read_audio(file.getvalue(), max_s=0.3)


@pytest.mark.parametrize("rate, form", [(44_100, "WAV"), (8_000, "FLAC"), (22_050, "OGG")])
def test_the_rate_of_audio_is_known_before_it_is_decoded(rate, form):
    assert media.sound_rate(talking.wav(rate=rate, form=form)) == rate
    tag = b"ID3\4\0\0\0\0\1\2" + bytes(130)
    assert media.sound_rate(tag + tag + b"\xff\xfb\x90\0") == media.MOST_MP3_RATE and media.sound_rate(b"nothing") == 0
    # libsndfile reads what stands behind a tag, whatever it is.
    assert media.sound_rate(tag + talking.wav(rate=rate, form=form)) == media.MOST_RATE


@pytest.mark.parametrize("form", ["OGG", "MP3"])
def test_ogg_and_mp3_are_read_where_libsndfile_can(form, tmp_path):
    if form not in soundfile.available_formats():
        pytest.skip("this libsndfile has none")
    data = talking.wav(rate=44_100, channels=2, form=form)
    (tmp_path / "a").write_bytes(data)
    for found in (read_audio(data), read_audio(tmp_path / "a")):
        assert abs(len(found) - 0.8 * SAMPLE_RATE) < 0.06 * SAMPLE_RATE  # mp3 has whole frames
        assert abs(np.argmax(np.abs(np.fft.rfft(found))) * SAMPLE_RATE / len(found) - 440) < 3
    with pytest.raises(RequestError, match="the limit is 0.5 s"):
        read_audio(data, max_s=0.5)


def test_what_a_decoder_says_is_one_line_without_an_address():
    for data in (b"\0\0\0\x18ftypM4A " + bytes(100), b"ID3\4" + bytes(60), b"OggS" + bytes(60)):
        error = refused(read_audio, data, match="cannot be decoded")
        assert "0x" not in str(error) and "\n" not in str(error) and error.allowed == ("wav", "flac", "ogg", "mp3")


def test_samples_are_taken_as_they_are():
    samples = np.linspace(-1, 1, 1600, dtype=np.float32)
    assert np.array_equal(read_audio(samples), samples)


@pytest.mark.parametrize("source, words", [
    (b"not a sound", "cannot be decoded"), ("missing.wav", "no such file"), (np.zeros((2, 100), np.float32), "one row"),
    (np.zeros(10, np.int16), "floats from -1 to 1"), (np.array([np.nan], np.float32), "not numbers"),
    (np.zeros(0, np.float32), "no samples"), ((np.zeros(10, np.float32), 0), "rate from 1000"),
    ((np.zeros(10, np.float32), 16_000, 1), "rate from 1000"), ((44_100, np.zeros(10, np.float32)), "rate from 1000"),
    ([0.0, 0.1], "not a path"), (3.5, "not a path"), (talking.wav(form="AIFF"), "AIFF"),
])  # fmt: skip
def test_what_is_no_sound_is_refused(source, words):
    assert refused(read_audio, source, match=words).field == "audio"


def test_a_sound_that_is_too_long_is_refused():
    with pytest.raises(RequestError, match=r"lasts 0.8 s, the limit is 0.5 s"):
        read_audio(talking.wav(), max_s=0.5)


def test_low_detail_makes_a_large_picture_smaller_and_leaves_others():
    large, small = Image.new("RGB", (1200, 300), "red"), Image.new("RGB", (300, 200), "red")
    assert read_image(LowDetail(large)).size == (512, 128) and large.size == (1200, 300)
    assert read_image(LowDetail(small)) is small


def encoded(picture, kind, **options):
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def transparent_files():
    rgba = Image.fromarray(np.random.default_rng(0).integers(0, 256, (77, 53, 4), dtype=np.uint8))
    rgb = rgba.convert("RGB")
    return {
        "RGBA": encoded(rgba, "PNG"), "LA": encoded(rgba.convert("LA"), "PNG"),
        "one color of a palette": encoded(rgb.convert("P"), "PNG", transparency=3),
        "a palette with alpha": encoded(rgb.convert("P"), "PNG", transparency=bytes(range(256))),
        "one color": encoded(rgb, "PNG", transparency=rgb.getpixel((0, 0))),
        "one gray": encoded(rgb.convert("L"), "PNG", transparency=7), "WebP": encoded(rgba, "WEBP", lossless=True),
    }  # fmt: skip


@pytest.mark.parametrize("kind", transparent_files())
def test_strips_of_a_transparent_image_are_those_of_the_whole(kind, monkeypatch):
    data = transparent_files()[kind]
    whole = Image.open(io.BytesIO(data)).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
    monkeypatch.setattr(media, "STRIP_PIXELS", 1000)  # 18 rows
    found = media.read_image(data)
    assert found.mode == "RGB" and found.tobytes() == expected.tobytes()


MEASURED = """
import sys
from pathlib import Path
from PIL import Image
from trimtab.engine.chat import media
from trimtab.serve.scheduling.media_pool import return_freed_pages

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

media.read_image(Image.new("RGB", (8, 8)))
prepare = lambda picture: None
if len(sys.argv) > 2:
    from trimtab.engine.loader.processor import load_processor
    prepare = load_processor(Path(sys.argv[2])).image_processor
    prepare(Image.new("RGB", (64, 64)))
data = Path(sys.argv[1]).read_bytes()
said = media.picture_bytes(data)[0]
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
picture = media.read_image(data)
return_freed_pages()  # as a server does once the image is used
held = kib("VmRSS") - before
prepare(picture)
print(said, 1024 * (kib("VmHWM") - before), 1024 * held)
"""


def measured(file, *more):
    """Return the bytes that are counted for an image file, those it takes at its peak, and those of the picture."""
    command = [sys.executable, "-c", MEASURED, str(file), *map(str, more)]
    line = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return map(int, line.splitlines()[-1].split())


def large_file(name, side):
    """Return an image of one color as a file of this kind."""
    rgb, exif = Image.new("RGB", (side, side), (10, 200, 30)), Image.Exif()
    exif[media.ORIENTATION] = 6
    lossless = {"lossless": True, "method": 0, "quality": 0}
    match name:
        case "palette.png":
            return encoded(rgb.convert("P"), "PNG", transparency=0)
        case "rgba.png":
            return encoded(rgb.convert("RGBA"), "PNG")
        case "turned.jpeg":
            return encoded(rgb, "JPEG", exif=exif)
        case "cmyk.jpeg":
            return encoded(rgb.convert("CMYK"), "JPEG", progressive=True, subsampling=0)
        case "rgba.webp":
            return encoded(rgb.convert("RGBA"), "WEBP", **lossless)
        case "webp":
            return encoded(rgb, "WEBP", **lossless)
    return encoded(rgb, "PNG")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("png", "palette.png", "turned.jpeg", "cmyk.jpeg", "rgba.webp")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc has the peak memory")
@pytest.mark.parametrize("name", ["rgba.png", "webp", *SLOW])
def test_decoding_takes_no_more_memory_than_is_counted_and_leaves_the_picture_alone(name, tmp_path):
    """6 MiB are for what the decoders and Python take besides pixels."""
    side, mib = 2000, 2**20
    (tmp_path / name).write_bytes(large_file(name, side))
    said, peak, held = measured(tmp_path / name)
    assert 4 * side * side <= peak <= said + 6 * mib and held <= 4 * side * side + 6 * mib
    if name == "rgba.png":
        assert peak <= 8 * side * side + 10 * mib  # no whole copies


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc has the peak memory")
def test_the_largest_image_takes_no_more_memory_than_is_counted_until_it_is_patches(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(Image.new("RGB", (7000, 4500), (10, 200, 30)), "PNG"))
    said, peak, _ = measured(tmp_path / "a.png", DEMO / "base")
    assert 4 * 7000 * 4500 <= peak <= said
