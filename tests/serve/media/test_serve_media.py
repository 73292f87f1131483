"""Media in a body: cut out before it is read as JSON, and measured before it is decoded: limits, lies in headers, bombs."""

import base64
import io
import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.raised import refused
from tests.serve.http.test_app import PNG, MockPool, client
from trimtab.engine.chat import media_headers
from trimtab.engine.chat.media_headers import webp_size
from trimtab.errors import RequestError
from trimtab.serve.api import schemas
from trimtab.serve.api.admission import MEMORY_BYTES
from trimtab.serve.contract.settings import Limits
from trimtab.serve.media import cut_media, media
from trimtab.serve.media.cut_media import CUT_BYTES

FIELD = "here"


def picture(kind="PNG", size=(4, 3), **options):
    out = io.BytesIO()
    Image.new("RGB", size, "red").save(out, kind, **options)
    return out.getvalue()


def png(width, height, *chunks):
    """Return a PNG by hand: a header of any size, then other chunks, then pixels that are not there."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*found) for found in chunks) + chunk(b"IDAT", b"")


def wav(samples=1600, *, rate=16_000, channels=1, bits=16, tag=1, claimed=None, byte_rate=None, extra=b""):
    data = b"\0" * (samples * channels * bits // 8)
    form = struct.pack(
        "<HHIIHH", tag, channels, rate, rate * channels * bits // 8 % 2**32 if byte_rate is None else byte_rate,
        channels * bits // 8, bits,
    )  # fmt: skip
    body = b"fmt " + struct.pack("<I", 16) + form + extra + b"data" + struct.pack("<I", claimed or len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def flac(samples=1600, rate=16_000, channels=1):
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, np.zeros((samples, channels), dtype=np.float32), rate, format="FLAC")
    return out.getvalue()


def flac_claiming(samples, rate=16_000, channels=1):
    packed = rate << 44 | (channels - 1) << 41 | 15 << 36 | samples
    return b"fLaC\x80\0\0\x22" + b"\x10\0\x10\0" + b"\0" * 6 + packed.to_bytes(8, "big") + b"\0" * 16


def check_image(data, **limits):
    return media.check_image(data, field=FIELD, limits=Limits(**limits))


def check_sound(data, kind="wav", **limits):
    return media.check_sound(data, kind, field=FIELD, limits=Limits(**limits))


# Pictures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_taken_by_its_size(kind):
    data = picture(kind, (40, 30))
    assert check_image(data, image_pixels=1200) == 1200 and "40 x 30" in str(refused(check_image, data, image_pixels=1199))


@pytest.mark.parametrize("width, height, words", [
    (31_000_000, 1, "the limit per side is 16384"), (16_385, 500, "the limit per side is"),
    (4_000, 19, "longer to shorter side is 200"), (1, 201, "longer to shorter side is 200"),
])  # fmt: skip
def test_a_picture_of_a_senseless_size_is_refused_by_its_header(width, height, words):
    error = refused(check_image, png(width, height))
    assert error.field == FIELD and f"has {width} x {height} pixels" in str(error) and words in str(error)


def test_a_lossless_and_an_extended_webp_are_measured():
    for options in ({"lossless": True}, {"exif": b"Exif\0\0x"}):
        assert webp_size(picture("WEBP", (40, 30), **options)) == (40, 30)


def test_a_header_of_a_huge_picture_is_refused_before_its_pixels():
    for side in (20_000, 100_000, 2**31 - 1):
        assert "pixels" in str(refused(check_image, png(side, side)))


def test_a_huge_webp_header_is_refused_without_room_for_it():
    data = bytearray(picture("WEBP", (40, 30), exif=b"Exif\0\0x"))
    data[24:30] = b"\xff" * 6
    assert "16777216 x 16777216" in str(refused(check_image, bytes(data)))


def test_text_that_unpacks_to_gigabytes_is_not_unpacked():
    bomb = zlib.compress(b"\0" * 64 * 2**20, 9)
    for name, head in ((b"iTXt", b"a\0\1\0\0\0"), (b"zTXt", b"a\0\0"), (b"iCCP", b"a\0\0")):
        data = png(4, 3, (name, head + bomb))
        try:
            check_image(data)  # a chunk that is skipped is fine
        except RequestError as error:
            assert error.field == FIELD


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "BMP", "PPM", "ICO"])
def test_other_formats_are_refused(kind):
    assert "png, jpeg or webp" in str(refused(check_image, picture(kind)))


@pytest.mark.parametrize("data", [b"", b"x", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP" + b"\0" * 20, png(0, 5), b"<svg/>"])
def test_what_is_no_picture_is_refused(data):
    assert refused(check_image, data).field == FIELD


@pytest.mark.parametrize("url", [
    "", "x", "file:///etc/passwd", "/etc/passwd", "data:image/png,abc", "data:text/plain;base64,YQ==",
    "data:image/svg+xml;base64,YQ==", "data:image/tiff;base64,YQ==", "data:;base64,YQ==", "ftp://a/b",
    "data:image/png;base64,", "data:image/png;base64,@@", "data:image/png;base64,YQ", "data:image/png;base64,YQ==\n",
])  # fmt: skip
def test_what_is_no_data_url_of_a_picture_is_refused(url):
    assert refused(media.from_data_url, url, field=FIELD).field == FIELD


def test_a_data_url_gives_its_bytes():
    data = picture()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert media.from_data_url(url, field=FIELD) == media.from_data_url("DATA:IMAGE/PNG;BASE64," + url[22:], field=FIELD) == data


# Sounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"bits": 24}, {"bits": 32, "tag": 3}, {"channels": 2}, {"tag": 0xFFFE}])
def test_a_wav_is_measured_by_its_samples(options):
    data = wav(16_000, **options)
    assert check_sound(data, audio_s=1.0) == 1.0 and "1.0 seconds" in str(refused(check_sound, data, audio_s=0.99))


def test_the_header_of_a_wav_may_lie_about_its_bytes():
    long = wav(160_000, byte_rate=2**32 - 1)  # claims to last no time at all
    assert "10.0 seconds" in str(refused(check_sound, long, audio_s=5))
    short = wav(1600, claimed=2**32 - 1)  # claims to go on for hours
    assert check_sound(short, audio_s=1) <= 1


@pytest.mark.parametrize("options", [
    {"rate": 0}, {"rate": 1}, {"rate": 2**31}, {"channels": 0}, {"channels": 200}, {"bits": 4}, {"bits": 12}, {"tag": 2},
    {"tag": 0x55}, {"samples": 0}, {"extra": b"fmt \x10\0\0\0" + b"\0" * 16}, {"extra": b"junk\0\0\0\0" * 300},
])  # fmt: skip
def test_a_wav_of_impossible_kind_is_refused(options):
    assert refused(check_sound, wav(**{"samples": 160, **options})).field == f"{FIELD}.data"


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"RIFF\0\0\0\0WAVE", b"RIFF\0\0\0\0AVI " + b"\0" * 40, wav()[:40], flac_claiming(5)]
)
def test_what_is_no_wav_is_refused(data):
    assert refused(check_sound, data).field == f"{FIELD}.data"


def test_a_flac_is_measured_by_its_header():
    data = flac(16_000)
    assert check_sound(data, "flac", audio_s=1.0) == 1.0
    assert "1.0 seconds" in str(refused(check_sound, data, "flac", audio_s=0.9))


def test_a_flac_that_unpacks_to_gigabytes_is_refused():
    assert "decoded" in str(refused(check_sound, flac_claiming(300 * 655_350, 655_350, 8), "flac"))
    for empty in (flac_claiming(0), flac_claiming(5, rate=0), b"fLaC" + b"\0" * 30, flac_claiming(5)[:20]):
        assert refused(check_sound, empty, "flac").field == f"{FIELD}.data"


@pytest.mark.parametrize("kind", ["ogg", "mp3"])
def test_ogg_and_mp3_are_known_by_how_they_begin(kind):
    soundfile = pytest.importorskip("soundfile")
    if kind.upper() not in soundfile.available_formats():
        pytest.skip("this libsndfile has none")
    out = io.BytesIO()
    soundfile.write(out, np.zeros(1600, dtype=np.float32), 16_000, format=kind.upper())
    assert check_sound(out.getvalue(), kind) == 0.0  # known once it is decoded
    for other in (wav(), b"", b"Ogg", b"ID3", b"\xff"):
        error = refused(check_sound, other, kind)
        assert error.field == f"{FIELD}.data" and f"is not an {kind} file" in str(error)


def ogg(subtype="VORBIS", seconds=0.1):
    soundfile = pytest.importorskip("soundfile")
    if "OGG" not in soundfile.available_formats():
        pytest.skip("this libsndfile has none")
    out = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(int(48_000 * seconds)) / 10
    soundfile.write(out, noise, 48_000, format="OGG", subtype=subtype)
    return out.getvalue()


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_of_other_than_whole_pages_of_one_stream_is_refused(subtype, monkeypatch):
    """libsndfile takes minutes to open a file of 44 MiB whose pages do not follow each other."""
    data = ogg(subtype, 2.0)
    places = [place for place in range(len(data)) if data[place : place + 5] == b"OggS\0"]
    assert check_sound(data, "ogg") == 0.0 and len(places) > 3
    last = places[-1]
    for wrong in (
        data + b"OggS" * 1000,
        data[:last] + b"\0" + data[last:],
        data[:-1],
        data[:-1] + bytes([data[-1] ^ 1]),  # a wrong checksum, after which each byte may begin a page
        data[:last] + ogg(subtype)[: places[1]],  # a second stream, unless its serial number is the same
    ):
        error = refused(check_sound, wrong, "ogg")
        assert error.field == f"{FIELD}.data" and "one stream" in str(error)
    monkeypatch.setattr(media_headers, "OGG_PAGES", len(places) - 1)
    refused(check_sound, data, "ogg")


def test_a_png_of_very_many_chunks_or_of_two_headers_is_refused(monkeypatch):
    monkeypatch.setattr(media_headers, "PNG_CHUNKS", 9)
    texts = [(b"tEXt", b"a\0b")] * 8
    assert check_image(png(40, 30, *texts[:-1])) == 1200 and "chunks" in str(refused(check_image, png(40, 30, *texts)))
    second = struct.pack(">IIBBBBB", 4000, 3000, 8, 2, 0, 0, 0)
    assert "several headers" in str(refused(check_image, png(4, 3, (b"IHDR", second))))


def test_a_jpeg_is_measured_past_its_segments_but_not_past_very_many(monkeypatch):
    data = picture("JPEG", (40, 30), exif=b"Exif\0\0" + b"\xff\xc0" * 500, progressive=True)
    begin, comment = data[:2], b"\xff\xfe\0\4ab"
    assert check_image(begin + b"\xff\xff" + comment * 100 + data[2:]) == 1200
    assert check_image(begin + comment + b"junk" + data[2:]) == 1200
    frame = data.index(b"\xff\xc2")
    for wrong in (
        begin + comment * media_headers.JPEG_SEGMENTS + data[2:],
        begin + b"\xff" * 2 * media_headers.JPEG_JUNK_BYTES + data[2:],
        begin + comment + (b"x" * 99 + comment) * (media_headers.JPEG_JUNK_BYTES // 90) + data[2:],
        data[:frame] + data[frame : frame + 19] + data[frame:],  # two sizes
        data[: frame + 4],
    ):
        assert "png, jpeg or webp" in str(refused(check_image, wrong))


def test_bytes_between_the_segments_of_a_jpeg_are_read_once(monkeypatch):
    monkeypatch.setattr(media_headers, "JPEG_JUNK_BYTES", 400_000)
    data = picture("JPEG", (40, 30))
    # To look at the rest of a run of equal bytes from each of them takes minutes.
    assert check_image(data[:2] + b"\xff" * 399_990 + b"\0" + data[2:]) == 1200


def test_a_webp_of_one_color_is_smaller_than_the_headers_of_others():
    data = picture("WEBP", (8, 8), lossless=True, exact=True)
    assert len(data) < 40 and media_headers.image_header(data[:25]) == media_headers.ImageHeader("WEBP", 8, 8)


@pytest.mark.parametrize("kind", ["m4a", "", "WAV", "wav "])
def test_other_sound_formats_are_refused_by_name(kind):
    error = refused(check_sound, wav(), kind)
    assert error.field == f"{FIELD}.format" and error.allowed == media.AUDIO_FORMATS


# Requests -------------------------------------------------------------------------------------------------------------


def test_the_images_of_a_request_are_counted_together_by_their_headers():
    total = media.Total(Limits(request_pixels=2400))
    data = picture(size=(40, 30))
    assert total.take_image(data, field="one") == data and total.take_image(data, field="two") == data
    error = refused(total.take_image, png(1, 1), field="three")  # no pixels of it are there
    assert error.field == "three" and "2401 pixels, the limit of a request is 2400" in str(error)


def test_the_audio_of_a_request_is_counted_together_by_its_headers():
    total = media.Total(Limits(request_audio_s=2.0))
    data = wav(16_000)
    assert total.take_sound(data, "wav", field="one") == data
    total.take_sound(flac(16_000), "flac", field="two")
    error = refused(total.take_sound, wav(1600), "wav", field="three")
    assert error.field == "three.data" and "2.1 seconds, the limit of a request is 2" in str(error)


def test_the_largest_allowed_image_is_within_the_limit_of_a_request():
    limits = Limits()
    assert limits.image_pixels <= limits.request_pixels and limits.audio_s <= limits.request_audio_s


LARGE = PNG + b"\0" * MEMORY_BYTES
TEXT = base64.b64encode(LARGE).decode()
URL = f"data:image/png;base64,{TEXT}"


def restored(body):
    small, cut = cut_media.cut_media(body)
    for name, data in cut.items():
        assert data is not None and small.count(name.encode()) == 1
        small = small.replace(name.encode(), base64.b64encode(data))
    return small, cut


@pytest.mark.parametrize("value, count", [
    ({"image_url": {"url": URL}}, 1), ({"image_url": URL}, 1), ({"data": TEXT}, 1), ([{"url": URL}, {"data": TEXT}], 2),
    ({"text": URL}, 0), ({"url": TEXT}, 0), ({"url": "data:image/png;base64,AAAA"}, 0), ([URL], 0),
    ({"note": 'a "quote" and \\ and \\" more', "url": URL}, 1), ({"text": '"url":"' + URL + '"'}, 0),
    ({"text": "\\" * 100_001, "url": URL}, 1), ({"text": '"' * 2**17, "url": URL}, 1), ({"a": "", "url": URL, "b": ""}, 1),
])  # fmt: skip
def test_only_long_base64_of_media_is_cut_out_and_what_is_cut_is_kept(value, count):
    for body in (json.dumps(value).encode(), json.dumps(value, indent=1).encode()):
        small, cut = restored(body)
        assert small == body and len(cut) == count


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("head", ["data:image/png;base64,", "data:image/png;name=a.png;base64,", "data:;base64,"])
def test_base64_whose_slashes_are_escaped_is_cut_out_too(shift, head):
    image = b"\0" * shift + b"\xff" * (CUT_BYTES + shift)  # ends with "/", "//" or "8="
    body = json.dumps({"url": head + base64.b64encode(image).decode()}).replace("/", "\\/").encode()
    small, cut = cut_media.cut_media(body)
    assert list(cut.values()) == [image] and json.loads(small)["url"] == head + next(iter(cut))


def test_the_length_from_which_base64_is_cut_out():
    for count, expected in ((CUT_BYTES - 1, 0), (CUT_BYTES, 1)):
        for before in (0, 1, CUT_BYTES - 9, CUT_BYTES - 8, CUT_BYTES):
            body = b" " * before + b'{"data":"' + b"A" * count + b'"}'
            assert len(cut_media.cut_media(body)[1]) == expected, (count, before)


def test_base64_with_other_escapes_stays_and_what_is_no_base64_is_known():
    escaped = json.dumps({"data": TEXT}).replace("AA", "A\\u0041").encode()
    assert cut_media.cut_media(escaped) == (escaped, {})
    for wrong in ("!" + TEXT, "=" + TEXT, TEXT[:-3]):
        _, cut = cut_media.cut_media(json.dumps({"data": wrong}).encode())
        assert list(cut.values()) == [None]


@given(st.binary(max_size=200))
def test_any_bytes_are_given_back(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_media, "CUT_BYTES", 8)
        small, cut = cut_media.cut_media(data)
        assert cut or small == data


ASKED = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}],
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
        ]}],
    },
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
}  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
def test_an_image_that_was_cut_out_reaches_the_model_whole(path, monkeypatch):
    sizes, pool = [], MockPool()
    read = schemas.read
    monkeypatch.setattr(schemas, "read", lambda kind, body, **options: sizes.append(len(body)) or read(kind, body, **options))
    answer = client(pool).post(path, json={"model": "demo", **ASKED[path]})
    assert answer.status_code == 200, answer.text
    (part,) = [part for part in pool.jobs[-1].prompt[0]["content"] if part["type"] == "image"]
    assert part["image"] == LARGE and max(sizes) < 2000
    wrong = json.dumps({"model": "demo", **ASKED[path]}).replace(TEXT[100:200], "!" * 100).encode()
    refused = client().post(path, content=wrong, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and "is not base64" in refused.text


def test_other_threads_get_the_interpreter_after_every_piece(monkeypatch):
    pauses = []
    monkeypatch.setattr(cut_media.time, "sleep", pauses.append)
    image = base64.b64encode(b"\0" * 3 * 2**20)
    body = b'{"url":"data:image/png;base64,' + image + b'"}'
    _, found = cut_media.cut_media(body)
    assert list(found.values()) == [b"\0" * 3 * 2**20]
    assert len(pauses) >= len(image) // cut_media.PIECE_BYTES and min(pauses) > 0
