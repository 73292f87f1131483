"""Long base64 is taken out of a body before it is read as JSON, and nothing else is."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.http.test_app import MockPool, client
from trimtab.serve.api import schemas as wire
from trimtab.serve.api.body import MEMORY_BYTES
from trimtab.serve.media import cut_media
from trimtab.serve.media.cut_media import CUT_BYTES

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
LARGE = PNG + b"\0" * MEMORY_BYTES
TEXT = base64.b64encode(LARGE).decode()
URL = f"data:image/png;base64,{TEXT}"


def restored(body):
    small, cut = cut_media.cut_media(body)
    for name, data in cut.items():
        assert data is not None and small.count(name.encode()) == 1
        small = small.replace(name.encode(), base64.b64encode(data))
    return small, cut


@pytest.mark.parametrize(
    "value, count",
    [
        ({"image_url": {"url": URL}}, 1), ({"image_url": URL}, 1), ({"data": TEXT}, 1), ([{"url": URL}, {"data": TEXT}], 2),
        ({"text": URL}, 0), ({"url": TEXT}, 0), ({"url": "data:image/png;base64,AAAA"}, 0), ([URL], 0),
        ({"note": 'a "quote" and \\ and \\" more', "url": URL}, 1), ({"text": '"url":"' + URL + '"'}, 0),
        ({"text": "\\" * 100_001, "url": URL}, 1), ({"text": '"' * 2**17, "url": URL}, 1), ({"a": "", "url": URL, "b": ""}, 1),
    ],
)  # fmt: skip
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
    assert list(cut.values()) == [image]
    assert json.loads(small)["url"] == head + next(iter(cut))


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
    read = wire.read
    monkeypatch.setattr(wire, "read", lambda kind, body, **options: sizes.append(len(body)) or read(kind, body, **options))
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
